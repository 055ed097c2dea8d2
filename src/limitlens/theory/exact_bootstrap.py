"""The error of attention over n tokens drawn from any sample of tokens, at every n, without drawing one [P].

With W = e^{score} of a token, v its value, Γ the limit at a query and d = v − Γ, the output over n independent tokens
is Γ + Σ W d / Σ W. Since 1/Z² = ∫ s e^{−sZ} ds and tokens are independent,

    E|Γ_n − Γ|² = ∫ s [ n a₂ (1−q)^{n−1} + n(n−1) |a₁|² (1−q)^{n−2} ] ds,
    q = E[1 − e^{−sW}],   a₁ = E[W d e^{−sW}],   a₂ = E[W² |d|² e^{−sW}]:

pairs of equal tokens give the first term, pairs of different ones the second. Expectations over the M tokens of a pilot
make it the bootstrap with infinitely many replicates. An atom, a token of weight b and value v_a that is in every
sample, moves the centre to g = (b v_a + n Γ)/(b + n) (with E W = 1) and adds to the bracket, all times e^{−sb},

    b² |u|² (1−q)^n + 2 n b u·a₁ (1−q)^{n−1},   u = v_a − g,   a₁ and a₂ centred at g.

Near M the pilot's own tokens repeat. Samples without replacement, each token kept with probability p = n/M, have
instead (e = e^{−sW}, f = 1 − p(1−e))

    ∫ s e^{−sb} Π f { |b u + Σ p W d e/f|² + Σ p W² |d|² (e/f)(1 − p e/f) } ds,

which is zero at n = M; over 1 − n/M it is what a probe measures against its pool.

All of these are sums over tokens of a value times a smooth function of W. So tokens are gathered first on nodes of W,
each split between its two neighbours such that its count and its weight are kept: what follows costs the same for any
number of tokens and any number of sizes, and its exponentials are those of the nodes, the same for all queries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from limitlens.errors import Array, InputError, as_array

STEP = 0.8  # of log s: the trapezoidal rule is within 3e-4 there, since the integrand is smooth (0.1 says the same)
AT_ONCE = 2176  # queries · (values + 2): with more of them tables would outgrow the caches
GAP = 0.125  # between the logarithms of neighbouring nodes: within 2e-3 of an error for scores of deviation up to 6
NEAR = 0.02  # s from here on, over the largest n: below, a sample has no mass yet
LIGHTEST = 40.0  # below the largest score: lighter tokens count as this light, or their squares would be lost
# The lightest share of tokens, which no sample consists of; below it by so much as a logarithm e^{−sW} is linear in W
# wherever it matters, to 1e-5. How many tokens say where that is, and how many of these are of the share at least
FAINT, FAINTEST, SEVERAL, FEW = 0.1, 1.5, 512, 16
RARE = 1e-8  # how likely no token of the smallest sample is heavier than 3/s, at the last s
HEAVIEST = 60.0  # the logarithm of an atom's weight, beyond which it is all there is
UNSEEN = "a query sees no token of the pilot, or a score is not a number; expected finite scores"
# n is drawn without replacement from these shares of the pilot on: the first whatever n is, the second where n is so
# large that it matters little (1/2n) that the law without replacement lets the number of tokens vary
REPEATED, SOMEWHAT, MANY = 1 / 6, 1 / 32, 128
QUARTERS, PARTS = 4, 8  # of a pilot: each of the quarters that it comes from is in two parts
# Independent ways to halve it: three by quarters, then three that take half the tokens of each of them.
HALVINGS = tuple(np.array([bin(part & way).count("1") % 2 for part in range(PARTS)]) for way in (2, 4, 6, 1, 3, 5))
BY_QUARTERS = 3
# Which parts to draw from: all, then one half of each halving, then the other halves.
CHOICES = np.array([np.ones(PARTS), *(way == side for side in (0, 1) for way in HALVINGS)])


@dataclass(frozen=True, eq=False)
class PilotErrors:
    """Expected squares at every query and size, (queries, sizes): of the error, and of the output it is relative to."""

    error: Array
    output: Array
    whole: Array  # the same error with replacement, at any size
    halves: Array  # (2, 6, queries, sizes): and from either half alone, for the halvings of `HALVINGS`
    half_outputs: Array  # with the outputs that these are relative to

    @classmethod
    def of(cls, told: Array) -> Self:
        """From what `Gathered.errors` gives for one atom."""
        halves, outputs = told[3:].reshape(2, 2, len(HALVINGS), *told.shape[1:])
        return cls(told[0], told[1], told[2], halves, outputs)


Product: TypeAlias = Callable[[Any, Any], Any]
# Sums (bags, w) of the rows (M, w) that are in each bag, times their weights: (ends (bags + 1,), places, weights, rows)
Bags: TypeAlias = Callable[[NDArray[np.int32], NDArray[np.int32], NDArray[Any], NDArray[Any]], Any]


def sparse_bags(ends: Any, places: Any, weights: Any, rows: Any) -> Any:
    """The sums of `Bags` as a product with a sparse matrix."""
    return sparse.csr_array((weights, places, ends), shape=(len(ends) - 1, len(rows))) @ rows


def pilot_errors(
    scores: Array, values: Array, sizes: Array, atom: tuple[Array, Array] | None = None,
    *, quarters: NDArray[np.intp] | None = None, matmul: Product = np.matmul, bags: Bags = sparse_bags,
) -> tuple[PilotErrors, ...]:  # fmt: skip
    """E|Γ_n − Γ|² for samples of a pilot of M tokens at each of m queries; and beside an atom.

    Scores are (m, M), −inf for a token that a query does not see; values (M, v). An atom is given by its score (m,) and
    value (m, v) for each query. `quarters` (M,) says from which of four independent parts a token comes; without it
    they are in random order. Scores in single precision have sums in single precision, which leaves 1e-6 of a square,
    and at worst 2e-3 where one token holds everything: less than the nodes do. Most of the work is products of matrices
    and sums of rows, which `matmul` and `bags` may do elsewhere.

    >>> rng = np.random.default_rng(0)
    >>> (told,) = theory.pilot_errors(rng.normal(size=(1, 500)), rng.normal(size=(500, 2)), np.array([10, 100]))
    >>> told.error.shape, bool(told.error[0, 0] > told.error[0, 1])
    ((1, 2), True)
    """
    raw, v = np.asarray(scores), as_array("values", values, ndim=2)
    raw = raw if raw.dtype == np.float32 else raw.astype(np.float64)
    n = np.asarray(sizes, dtype=np.float64)
    if raw.ndim != 2 or raw.shape[1] != len(v) or raw.shape[1] < PARTS:
        raise InputError(f"scores have shape {raw.shape} and values {v.shape}; expected (queries, M) and (M, v), M ≥ 8")
    part = parts_of(len(v), quarters)
    order = np.argsort(part, kind="stable")  # so that what a part needs stays in cache
    pilot, columns, found = Tokens.of(v[order], part[order], raw.dtype), raw.T.take(order, 0), []
    tops = columns.max(0)
    if not np.isfinite(tops).all():
        raise InputError(UNSEEN)
    hidden = np.isneginf(columns).any()
    queries = max(1, AT_ONCE // pilot.carried.shape[1])
    for start in range(0, len(raw), queries):
        some = slice(start, start + queries)
        logs = columns[:, some] - tops[some]
        logs = np.maximum(logs, -LIGHTEST, where=~np.isneginf(logs) if hidden else True, out=logs)
        gathered, level = Gathered.of(logs, pilot, n, matmul, bags)
        own = atom and (np.exp(np.minimum(atom[0][some] - (level + tops[some]), HEAVIEST)), atom[1][some])
        found.append(gathered.errors(n, own))
    return tuple(PilotErrors.of(told) for told in np.concatenate(found, 2))


def parts_of(tokens: int, quarters: NDArray[np.intp] | None = None) -> NDArray[np.intp]:
    """The part of each token, (M,): either half, one by one, of the quarter it comes from."""
    place = np.arange(tokens)
    return 2 * (place * QUARTERS // tokens if quarters is None else quarters) + place % 2


def nodes(low: float, high: float) -> tuple[Array, float]:
    """Nodes (K,) around weights with logarithms from low to high, and where the first would be as a logarithm.

    The first is 0, for tokens that are not seen; the others are powers of e^GAP, the same for whoever is gathered.
    """
    first = np.floor(low / GAP) * GAP
    return np.concatenate(([0.0], np.exp(first + GAP * np.arange(int((high - first) / GAP) + 3)))), float(first - GAP)


def lightest_share(n: Array) -> float:
    """The share of the lightest tokens that the smallest sample consists of alone only as often as `RARE` says."""
    return float(RARE ** (1 / n.min()))


def points(n: Array, lightest: float) -> Array:
    """Where s is taken, (S,), for sizes n, where `lightest` is the weight that the lightest share has at most."""
    start = np.log(NEAR / n.max())
    return np.exp(np.arange(start, max(start + 12, np.log(3 / max(lightest, 1e-30))) + STEP, STEP))


def powers(xp: Any, s: Any, node: Any) -> tuple[Any, Any]:
    """s e and s² W e at points (S, 1) and nodes (K,), e = e^{−sW}: times W c, W and W |c|² they make the integrand.

    Where s is small e − 1 takes the place of e in the first: it makes no difference about a limit, and nothing is left
    that cancels.
    """
    at = s * node
    lost = xp.expm1(-at)
    return s * xp.where(s < 1, lost, 1 + lost), s * at * (1 + lost)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of a pilot, whoever looks at them."""

    carried: NDArray[Any]  # (M, v + 2): their values c less the mean of these, 1 and |c|², in the precision of the sums
    middle: Array  # (v,): the mean
    part: NDArray[np.intp]  # (M,): in order

    @classmethod
    def of(cls, values: Array, part: NDArray[np.intp], dtype: Any) -> Self:
        """Of their values (M, v)."""
        middle = values.mean(0)
        about = values - middle
        carried = np.column_stack((about, np.ones(len(about)), np.square(about).sum(1))).astype(dtype)
        return cls(carried, middle, part)


@dataclass(frozen=True, eq=False)
class Gathered:
    """A pilot gathered on K nodes in each of its parts, for m queries: arrays of NumPy, or of torch on a device."""

    s: Array  # (S,): where the integrand is taken
    tokens: Array  # (parts,): how many tokens there are
    node: Any  # (K,): the weights of the nodes
    count: Any  # (parts, K, m): tokens on each node
    table: Any  # (parts, K, m · (v + 2)): their W c, W and W |c|²
    pull: Any  # (parts, m, v + 1): W d and W of all tokens of a part
    limit: Any  # (m, v)
    matmul: Product
    xp: Any = np  # the library of these arrays, and what sends it one of NumPy's
    send: Callable[[NDArray[Any]], Any] = np.asarray
    sums: Any = None  # (parts, 2 S + 1, m · (v + 2)): `powers` and 1 times the table, where they are known
    shift: Any = 0.0  # (m, v): c − d, the limit as a c; 0 where they are the same

    @classmethod
    def of(cls, logs: Array, pilot: Tokens, n: Array, matmul: Product, bags: Bags) -> tuple[Self, Array]:
        """Split each of M tokens between the two nodes around its weight, of which logs (M, m) are given.

        They are less by a level (m,), which comes second, than logarithms of weights of mean 1.
        """
        tokens, queries = logs.shape
        weight = np.exp(logs)
        mean = weight.mean(0, dtype=np.float64)
        weight *= (1 / mean).astype(weight.dtype)
        logs -= np.log(mean).astype(logs.dtype)
        low, some = logs.min(), logs[:: max(1, tokens // SEVERAL)]
        low = low if np.isfinite(low) else logs[np.isfinite(logs)].min()
        faint = int(min(lightest_share(n), FAINT) * len(some))
        if faint >= FEW:  # those below the first node are split between it and none
            low = max(low, np.partition(some, faint, 0)[faint].min() - FAINTEST)
        node, first = nodes(low, logs.max())
        over = np.concatenate(([np.expm1(GAP)], np.ones(len(node) - 1))) / np.maximum(node, node[1])
        rows = PARTS * len(node) * queries
        logs -= first
        at = np.maximum(np.multiply(logs, 1 / GAP, out=logs), 0, out=logs).astype(np.int64)
        upper = np.multiply(over.astype(logs.dtype).take(at), weight, out=logs)
        upper -= at > 0
        upper *= 1 / np.expm1(GAP)
        np.maximum(upper, 0, out=upper)
        at *= queries
        at += (pilot.part * (len(node) * queries))[:, None]
        at += np.arange(queries)
        upward = np.bincount(at.ravel(), upper.ravel(), rows).reshape(PARTS, -1, queries)
        # Sorted by node: which tokens are on it, with how much of their weight.
        share, place = np.empty((tokens, 2, queries), pilot.carried.dtype), np.empty((tokens, 2, queries), np.int32)
        np.multiply(upper, weight, out=share[:, 1])
        np.subtract(weight, share[:, 1], out=share[:, 0])
        place[:, 0] = at
        np.add(place[:, 0], queries, out=place[:, 1])
        ends = np.arange(0, place.size + 1, 2 * queries, dtype=np.int32)
        spread = sparse.csc_array((share.ravel(), place.ravel(), ends), shape=(rows, tokens)).tocsr()
        table = bags(spread.indptr, spread.indices, spread.data, pilot.carried).reshape(PARTS, len(node), -1)
        # A node has entries of its own tokens and of those of the one below: take the latter away.
        count, sign = np.diff(spread.indptr).reshape(upward.shape), 1 - 2 * (np.arange(len(node)) % 2)[:, None]
        count = sign * (sign * count).cumsum(1) - upward
        count[:, 1:] += upward[:, :-1]
        heaped = count.sum(0).cumsum(0)
        lightest = node[np.minimum((heaped < lightest_share(n) * tokens).sum(0), len(node) - 1)].min()
        each, s = np.bincount(pilot.part, minlength=PARTS).astype(float), points(n, lightest)
        # What all tokens pull is one more row of the same product.
        sums = matmul(np.vstack((*powers(np, s[:, None], node), np.ones(len(node)))).astype(table.dtype), table)
        pull = sums[:, -1].reshape(PARTS, queries, -1)[..., :-1].astype(np.float64)
        total = pull.sum(0)
        limit = total[:, :-1] / total[:, -1:]
        pull[..., :-1] -= pull[..., -1:] * limit
        given = {"sums": sums, "shift": limit}
        return cls(s, each, node, count, table, pull, pilot.middle + limit, matmul, **given), np.log(mean)

    def errors(self, n: Array, atom: tuple[Any, Any] | None = None) -> Any:
        """What `PilotErrors` holds, one below the other: (1 or 2, 27, m, sizes), the second beside the atom.

        An atom is given by its weight (m,) and value (m, v).
        """
        xp, s, tokens = self.xp, self.send(self.s[:, None]), float(self.tokens.sum())
        # Over the tokens of each part: sums of 1 − e^{−sW}, which is small where it matters how large it is.
        gone = self.matmul(-xp.expm1(-s * self.node), self.count)
        sums = self._product(powers(xp, s, self.node), self.table) if self.sums is None else self.sums
        sums = sums.reshape(*sums.shape[:2], len(self.limit), -1)
        drawn = self._with_replacement(n, s, gone, sums, atom)
        repeated = np.flatnonzero((n > np.where(n < MANY, REPEATED, SOMEWHAT) * tokens) & (n < tokens))
        # One size at a time stays in a processor's cache; a device is idle between small steps.
        several = 1 if xp is np else max(1, len(repeated))
        table, count, gone = (part.sum(0) for part in (self.table, self.count, gone / tokens))
        firsts = [1.0 * error[0] for error, _ in drawn]  # copies
        for which in repeated.reshape(-1, several):
            # Where some query's samples may have no token left; looking would wait for a device.
            kept = (n[which] * gone < 40).any(1) & (self.s > NEAR / n[which]) if xp is np else slice(None)
            own = self._without_replacement(n[which], s[kept], self.s[kept], table, count, atom)
            for first, found in zip(firsts, own, strict=True):
                first[:, self.send(which)] = found
        both = zip(firsts, drawn, strict=True)
        return xp.stack([xp.concatenate((first[None], out[:1], error, out[1:])) for first, (error, out) in both])

    def _product(self, factors: tuple[Any, ...], table: Any) -> Any:
        """Factors (..., K), one below the other, times a table, in its precision."""
        rows = self.xp.asarray(self.xp.stack(factors).reshape(-1, len(self.node)), dtype=self.table.dtype)
        return self._held(self.matmul(rows, table))

    def _held(self, array: Any) -> Any:
        """In the table's precision on a processor, whose caches hold more numbers that are single."""
        return self.xp.asarray(array, dtype=self.table.dtype if self.xp is np else self.xp.float64)

    def _with_replacement(
        self, n: Array, s: Any, gone: Any, sums: Any, atom: tuple[Any, Any] | None
    ) -> list[tuple[Any, Any]]:
        """The integral for draws from each choice of parts, and the squares of their outputs: (c, m, sizes) each.

        Without an atom, and beside it. Sums are (parts, 2 S or more, m, v + 2).
        """
        xp, size = self.xp, self.send(n)
        shares = self.send(CHOICES / (CHOICES @ self.tokens)[:, None])  # (c, parts), of the mean over a choice's tokens
        gone, pull, sums = (
            self.matmul(share, part.reshape(PARTS, -1)).reshape(-1, *part.shape[1:])
            for share, part in ((shares, gone), (shares, self.pull), (self._held(shares), sums))
        )
        once, twice, mass = sums[:, : len(s)], sums[:, len(s) : 2 * len(s)], pull[..., -1].clip(1e-300)
        centre = pull[..., :-1] / mass[..., None]  # their own limit: all that follows is about it
        about, c2, b2, left = centre + self.shift, twice[..., :-2], twice[..., -2], (1 - gone).clip(1e-300)
        a1 = self._held(about)[:, None] * once[..., -2:-1]
        a1 = once[..., :-2] - a1 if xp is not np else np.subtract(once[..., :-2], a1, out=a1)
        b1 = once[..., -2] + s * (s < 1) * mass[:, None]
        a2 = twice[..., -1] - 2 * self._dot(c2, about) + (about**2).sum(-1)[:, None] * b2
        # (1 − q)^{n−2} for every size, of which the integral is a sum with these factors.
        kept = STEP * xp.exp(self._held(size[:, None] - 2) * self._held(xp.log(left).swapaxes(1, 2))[:, :, None])
        near, limit = self._dot(a1, a1), self.limit + centre

        def integral(*factors: Any) -> Any:
            return xp.moveaxis(xp.matmul(kept, self._held(xp.stack(factors, -1)).swapaxes(1, 2)), -1, 0)

        alone, pairs = integral(a2 * left, near)
        outputs = xp.broadcast_to((limit**2).sum(-1)[..., None], alone.shape)
        found = [((size * (alone + (size - 1) * pairs)).clip(0), outputs)]
        if atom is not None:
            weight, value = atom
            own = value - limit
            both = weight[:, None] + size * mass[..., None]
            lam, rest = weight[:, None] / both, size * mass[..., None] / both  # g is so far from the limit to the atom
            far, along, e = (own**2).sum(-1)[..., None], self._dot(a1, own), xp.exp(-s * weight)
            across = self._dot(c2, own) - (about * own).sum(-1)[:, None] * b2
            alone, b2_left, across, along_left, b1_left, pairs, b1_twice, b1_along, left_twice = integral(
                *(part * e * left for part in (a2, b2, across, s * along, s * b1)),
                *(part * e for part in (near, b1**2, b1 * along, (s * left) ** 2)),
            )
            pull = weight[:, None] * rest  # of the atom on what is about g
            error = size * (alone + lam**2 * far * b2_left - 2 * lam * across)
            error = error + size * (size - 1) * (pairs + lam**2 * far * b1_twice - 2 * lam * b1_along)
            error = error + pull**2 * far * left_twice + 2 * size * pull * (along_left - lam * far * b1_left)
            inner = 2 * lam * rest * (limit * value).sum(-1)[..., None] + lam**2 * (value**2).sum(-1)[:, None]
            found.append((error.clip(0), rest**2 * outputs + inner))
        return found

    def _dot(self, rows: Any, vector: Any) -> Any:
        """Products of rows (c, S, m, v) with others, or with vectors (c, m, v) of every query."""
        return self.xp.einsum("csmv,csmv->csm" if vector.ndim == 4 else "csmv,cmv->csm", rows, self._held(vector))

    def _without_replacement(
        self, n: Array, s: Any, points: Array, table: Any, count: Any, atom: tuple[Any, Any] | None
    ) -> list[Any]:
        """The integral at some points for draws of n without replacement from all of it over 1 − n/M, (m, sizes).

        Without an atom, and beside it.
        """
        xp, tokens, size = self.xp, float(self.tokens.sum()), self.send(n[:, None, None])
        each = self.send((points > NEAR / n[:, None]) * (STEP / (1 - n[:, None] / tokens)))[..., None]
        lost, p = xp.expm1(-s * self.node), size / tokens
        f = 1 + p * lost  # (sizes, S, K)
        share = s * p * (1 + lost) / f
        rest = share * (1 - p * (1 + lost) / f)
        factors = (share, s * self.node * rest) + (rest,) * (atom is not None)
        sums = self._product(factors, table).reshape(len(factors), len(n), len(s), len(self.limit), -1)
        vectors = sums[..., :-2] - self._held(self.shift) * sums[..., -2:-1]
        square, log = sums[1, ..., -1], self.matmul(xp.log(f), count)
        if xp is np:  # |d|² = |c|² − (c + d)·shift
            square = square - self._dot(sums[1, ..., :-2] + vectors[1], self.shift[None])

        def integral(vector: Any, spread: Any, log: Any) -> Any:
            return (each * xp.exp(log) * (self._dot(vector, vector) + spread)).sum(1).clip(0).T

        found = [integral(vectors[0], square, log)]
        if atom is not None:
            weight, away = atom[0], atom[1] - self.limit
            lam = weight / (weight + size)  # the pilot's own mass is n and its pull 0
            g = self._held(lam[..., None] * away)
            vector, drift = (vectors[k] - g * sums[k, ..., -2:-1] for k in (0, 2))
            vector = vector + self._held((s * size * lam)[..., None] * away)
            square = square - 2 * self._dot(vectors[1], g[:, 0]) + lam**2 * (away**2).sum(1) * sums[1, ..., -2]
            # How many tokens are kept matters beside an atom, and does not vary: take its part out.
            varied = self.matmul(rest / s, count).clip(1e-300)
            found.append(integral(vector, square - self._dot(drift, drift) / varied, log - s * weight))
        return found
