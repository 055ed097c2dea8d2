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
GAP = 0.125  # between the logarithms of neighbouring nodes: within 2e-3 of an error for scores of deviation up to 6
NEAR = 0.02  # s from here on, over the largest n: below, a sample has no mass yet
LIGHTEST = 40.0  # below the largest score: lighter tokens count as this light, or their squares would be lost
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


def pilot_errors(
    scores: Array, values: Array, sizes: Array, atom: tuple[Array, Array] | None = None,
    *, quarters: NDArray[np.intp] | None = None, matmul: Product = np.matmul,
) -> tuple[PilotErrors, ...]:  # fmt: skip
    """E|Γ_n − Γ|² for samples of a pilot of M tokens at each of m queries; and beside an atom.

    Scores are (m, M), −inf for a token that a query does not see; values (M, v). An atom is given by its score (m,) and
    value (m, v) for each query. `quarters` (M,) says from which of four independent parts a token comes; without it
    they are in random order. Most of the work is products of matrices, which `matmul` may do elsewhere.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> (told,) = theory.pilot_errors(rng.normal(size=(1, 500)), rng.normal(size=(500, 2)), np.array([10, 100]))
    >>> told.error.shape, bool(told.error[0, 0] > told.error[0, 1])
    ((1, 2), True)
    """
    raw, v = np.asarray(scores, dtype=np.float64), as_array("values", values, ndim=2)
    n = np.asarray(sizes, dtype=np.float64)
    if raw.ndim != 2 or raw.shape[1] != len(v) or raw.shape[1] < PARTS:
        raise InputError(f"scores have shape {raw.shape} and values {v.shape}; expected (queries, M) and (M, v), M ≥ 8")
    top = raw.max(1, keepdims=True)
    if not np.isfinite(top).all():
        raise InputError(UNSEEN)
    unseen = np.isneginf(raw)
    logs = np.maximum(raw - top, -LIGHTEST)
    if unseen.any():
        logs[unseen] = -np.inf
    level = np.log(np.array([np.exp(log).mean() for log in logs]))
    logs -= level[:, None]
    pilot = Gathered.of(logs, v, parts_of(len(v), quarters), n, matmul)
    if atom is not None:
        atom = (np.exp(np.minimum(atom[0] - top[:, 0] - level, HEAVIEST)), atom[1])
    return tuple(PilotErrors.of(told) for told in pilot.errors(n, atom))


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


@dataclass(frozen=True, eq=False)
class Gathered:
    """A pilot gathered on K nodes in each of its parts, for m queries: arrays of NumPy, or of torch on a device."""

    s: Array  # (S,): where the integrand is taken
    tokens: Array  # (parts,): how many tokens there are
    node: Any  # (K,): the weights of the nodes
    count: Any  # (parts, K, m): tokens on each node
    table: Any  # (parts, K, m · (v + 2)), single: their W d, W and W |d|², d about each query's own limit
    pull: Any  # (parts, m, v + 1): W d and W of all tokens of a part
    limit: Any  # (m, v)
    matmul: Product
    xp: Any = np  # the library of these arrays, and what sends it one of NumPy's
    send: Callable[[NDArray[Any]], Any] = np.asarray

    @classmethod
    def of(cls, logs: Array, values: Array, part: NDArray[np.intp], n: Array, matmul: Product) -> Self:
        """Split each of M tokens between the two nodes around its weight, of which logs (m, M) are given and mean 1."""
        queries, tokens = logs.shape
        low, high = logs.min(), logs.max()
        low = low if np.isfinite(low) else logs[np.isfinite(logs)].min()
        (node, first), middle = nodes(low, high), values.mean(0)
        over = np.concatenate(([0.0], 1 / node[1:]))
        about = values - middle
        carried = np.concatenate((about, np.ones((tokens, 1)), np.square(about).sum(1, keepdims=True)), 1)
        width, size = carried.shape[1], len(node)
        limit, pull = np.empty((queries, width - 2)), np.empty((PARTS, queries, width - 1))
        count, tables = np.empty((PARTS, size, queries)), np.empty((PARTS, size, queries, width), np.float32)
        rows = PARTS * size
        ends = np.arange(0, 2 * tokens + 1, 2, dtype=np.int32)
        spread = sparse.csc_array((np.empty(2 * tokens), np.zeros(2 * tokens, np.int32), ends), shape=(rows, tokens))
        place, share = spread.indices.reshape(-1, 2), spread.data.reshape(-1, 2)  # filled anew for every query
        own_rows = (part * size).astype(np.int32)
        for i, log in enumerate(logs):  # one query at a time: what it needs stays in cache
            weight, at = np.exp(log), np.maximum((log - first) * (1 / GAP), 0).astype(np.int32)
            upper = np.maximum(weight * over[at] - 1, 0) * (1 / np.expm1(GAP))
            at += own_rows
            shared = np.bincount(at, upper, rows)
            there = np.bincount(at, minlength=rows) - shared
            there[1:] += shared[:-1]
            count[..., i] = there.reshape(PARTS, size)
            place[:, 0] = at
            np.add(at, 1, out=place[:, 1])
            np.multiply(weight, upper, out=share[:, 1])
            np.subtract(weight, share[:, 1], out=share[:, 0])
            sums = spread @ carried
            own = sums.reshape(PARTS, size, width).sum(1)
            limit[i] = own[:, :-2].sum(0) / tokens
            pull[:, i] = own[:, :-1]
            pull[:, i, :-1] -= own[:, -2:-1] * limit[i]
            # About the query's own limit: |d|² = |c|² − 2 c·Γ + |Γ|².
            sums[:, -1] += limit[i] @ limit[i] * sums[:, -2] - 2 * np.einsum("kv,v->k", sums[:, :-2], limit[i])
            sums[:, :-2] -= sums[:, -2:-1] * limit[i]
            tables[:, :, i] = sums.reshape(PARTS, size, width)
        lightest = node[np.minimum((count.sum(0).cumsum(0) < lightest_share(n) * tokens).sum(0), size - 1)].min()
        table, own = tables.reshape(PARTS, size, -1), np.bincount(part, minlength=PARTS).astype(float)
        return cls(points(n, lightest), own, node, count, table, pull, middle + limit, matmul)

    def errors(self, n: Array, atom: tuple[Any, Any] | None = None) -> Any:
        """What `PilotErrors` holds, one below the other: (1 or 2, 27, m, sizes), the second beside the atom.

        An atom is given by its weight (m,) and value (m, v).
        """
        xp, s, tokens = self.xp, self.send(self.s[:, None]), float(self.tokens.sum())
        at = s * self.node
        e = xp.exp(-at)
        # Over the tokens of each part, e = e^{−sW}: sums of 1 − e, which is small where it matters how large it is; of
        # W d e, W e and W |d|² e, and of the same with one more W.
        gone = self.matmul(-xp.expm1(-at), self.count)
        sums = self._product((e, self.node * e), self.table).reshape(PARTS, 2, len(s), len(self.limit), -1)
        shares = CHOICES / (CHOICES @ self.tokens)[:, None]
        repeated = np.flatnonzero((n > np.where(n < MANY, REPEATED, SOMEWHAT) * tokens) & (n < tokens))
        # One choice or size at a time stays in a processor's cache; a device is idle between small steps.
        choices, several = (shares[:, None], 1) if xp is np else (shares[None], max(1, len(repeated)))
        drawn = [self._with_replacement(n, s, self.send(share), gone, sums, atom) for share in choices]
        table, count, gone = (part.sum(0) for part in (self.table, self.count, gone / tokens))
        found: list[Any] = []
        for error, output in (map(xp.concatenate, zip(*way, strict=True)) for way in zip(*drawn, strict=True)):
            first = 1.0 * error[0]  # a copy
            for which in repeated.reshape(-1, several):
                # Where some query's samples may have no token left; looking would wait for a device.
                kept = (n[which] * gone < 40).any(1) & (self.s > NEAR / n[which]) if xp is np else slice(None)
                own = self._without_replacement(n[which], s[kept], self.s[kept], table, count, atom if found else None)
                first[:, self.send(which)] = own
            found.append(xp.concatenate((first[None], output[:1], error, output[1:])))
        return xp.stack(found)

    def _product(self, factors: tuple[Any, ...], table: Any) -> Any:
        """Factors (..., K), one below the other, times a table, in single precision."""
        rows = self.xp.stack(factors).reshape(-1, len(self.node))
        return self.xp.asarray(self.matmul(self.xp.asarray(rows, dtype=self.xp.float32), table), dtype=self.xp.float64)

    def _with_replacement(
        self, n: Array, s: Any, share: Any, gone: Any, sums: Any, atom: tuple[Any, Any] | None
    ) -> list[tuple[Any, Any]]:
        """The integral for draws from c choices of parts, and the squares of their outputs: (c, m, sizes) each.

        Without an atom, and beside it; shares (c, parts) are of the mean over a choice's tokens.
        """
        xp, size = self.xp, self.send(n)
        gone, sums, pull = (
            self.matmul(share, part.reshape(PARTS, -1)).reshape(-1, *part.shape[1:]) for part in (gone, sums, self.pull)
        )
        once, twice, mass = sums[:, 0], sums[:, 1], pull[..., -1].clip(1e-300)
        centre = pull[..., :-1] / mass[..., None]  # their own limit: all that follows is about it
        b1, c2, b2, left = once[..., -2], twice[..., :-2], twice[..., -2], (1 - gone).clip(1e-300)
        a1 = once[..., :-2] - centre[:, None] * b1[..., None]
        a2 = twice[..., -1] - 2 * self._dot(c2, centre) + (centre**2).sum(-1)[:, None] * b2
        # (1 − q)^{n−2} s², for every size, of which the integral is a sum with these factors.
        kept = xp.exp((size[:, None, None] - 2) * xp.log(left)[:, None] + 2 * xp.log(s)) * STEP
        near, limit = (a1**2).sum(-1), self.limit + centre

        def integral(*factors: Any) -> Any:
            return xp.einsum("cnsm,fcsm->fcmn", kept, xp.stack(factors))

        alone, pairs = integral(a2 * left, near)
        outputs = xp.broadcast_to((limit**2).sum(-1)[..., None], alone.shape)
        found = [((size * (alone + (size - 1) * pairs)).clip(0), outputs)]
        if atom is not None:
            weight, value = atom
            own = value - limit
            both = weight[:, None] + size * mass[..., None]
            lam, rest = weight[:, None] / both, size * mass[..., None] / both  # g is so far from the limit to the atom
            far, along, e = (own**2).sum(-1)[..., None], self._dot(a1, own), xp.exp(-s * weight)
            across = self._dot(c2, own) - (centre * own).sum(-1)[:, None] * b2
            alone, b2_left, across, along_left, b1_left, pairs, b1_twice, b1_along, left_twice = integral(
                *(part * e * left for part in (a2, b2, across, along, b1)),
                *(part * e for part in (near, b1**2, b1 * along, left**2)),
            )
            pull = weight[:, None] * rest  # of the atom on what is about g
            error = size * (alone + lam**2 * far * b2_left - 2 * lam * across)
            error = error + size * (size - 1) * (pairs + lam**2 * far * b1_twice - 2 * lam * b1_along)
            error = error + pull**2 * far * left_twice + 2 * size * pull * (along_left - lam * far * b1_left)
            inner = 2 * lam * rest * (limit * value).sum(-1)[..., None] + lam**2 * (value**2).sum(-1)[:, None]
            found.append((error.clip(0), rest**2 * outputs + inner))
        return found

    def _dot(self, rows: Any, vector: Any) -> Any:
        """Products of rows (c, S, m, v) and vectors (c, m, v) of every query."""
        return self.xp.einsum("csmv,cmv->csm", rows, vector)

    def _without_replacement(
        self, n: Array, s: Any, points: Array, table: Any, count: Any, atom: tuple[Any, Any] | None
    ) -> Any:
        """The integral at some points for draws of n without replacement from all of it over 1 − n/M, (m, sizes)."""
        xp, tokens, size = self.xp, float(self.tokens.sum()), self.send(n[:, None, None])
        each = self.send(points**2 * (points > NEAR / n[:, None]) * (STEP / (1 - n[:, None] / tokens)))[..., None]
        e, p = xp.exp(-s * self.node), size / tokens
        f = 1 - p * (1 - e)  # (sizes, S, K)
        share = e / f
        rest = 1 - p * share
        factors = (share, self.node * share * rest) + (share * rest,) * (atom is not None)
        sums = self._product(factors, table).reshape(len(factors), len(n), len(s), len(self.limit), -1)
        first, second, *drift = (p[..., None] * part for part in sums)
        vector, spread, log = first[..., :-2], second[..., -1], self.matmul(xp.log(f), count)
        if atom is not None:
            weight, away = atom[0], atom[1] - self.limit
            lam = weight / (weight + size)  # the pilot's own mass is n and its pull 0
            g, far = lam[..., None] * away, lam**2 * (away**2).sum(1)
            vector = (weight * size / (weight + size))[..., None] * away + vector - g * first[..., -2:-1]
            spread = spread - 2 * (second[..., :-2] * g).sum(-1) + far * second[..., -2]
            # How many tokens are kept matters beside an atom, and does not vary: take its part out.
            varied = self.matmul(p * share * rest, count).clip(1e-300)
            spread = spread - ((drift[0][..., :-2] - g * drift[0][..., -2:-1]) ** 2).sum(-1) / varied
            log = log - s * weight
        return (each * xp.exp(log) * ((vector**2).sum(-1) + spread)).sum(1).clip(0).T
