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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from limitlens.errors import Array, InputError, as_array

STEP = 0.8  # of log s: the trapezoidal rule is within 3e-4 there, since the integrand is smooth (0.1 says the same)
GAP = 0.125  # between the logarithms of neighbouring nodes: within 2e-3 of an error for scores of deviation up to 6
NEAR = 0.02  # s from here on, over the largest n: below, a sample has no mass yet
LIGHTEST = 40.0  # below the largest score: lighter tokens count as this light, or their squares would be lost
SURVIVING = 30.0  # tokens heavier than 1/s, over the smallest n, at the last s: no sample is without one
# n is drawn without replacement from these shares of the pilot on: the first whatever n is, the second where n is so
# large that it matters little (1/2n) that the law without replacement lets the number of tokens vary
REPEATED, SOMEWHAT, MANY = 1 / 6, 1 / 32, 128
QUARTERS, PARTS = 4, 8  # of a pilot: each of the quarters that it comes from is in two parts
# Independent ways to halve it: three by quarters, then three that take half the tokens of each of them.
HALVINGS = tuple(np.array([bin(part & way).count("1") % 2 for part in range(PARTS)]) for way in (2, 4, 6, 1, 3, 5))
BY_QUARTERS = 3


@dataclass(frozen=True, eq=False)
class PilotErrors:
    """Expected squares at every query and size, (queries, sizes): of the error, and of the output it is relative to."""

    error: Array
    output: Array
    whole: Array  # the same error with replacement, at any size
    halves: Array  # (2, 6, queries, sizes): and from either half alone, for the halvings of `HALVINGS`
    half_outputs: Array  # with the outputs that these are relative to


Half: TypeAlias = NDArray[np.float32]  # single precision, where there are many
Product: TypeAlias = Callable[[Half, Half], Half]


def pilot_errors(
    scores: Array, values: Array, sizes: Array, atom: tuple[Array, Array] | None = None,
    *, quarters: NDArray[np.intp] | None = None, matmul: Product = np.matmul,
) -> tuple[PilotErrors, ...]:  # fmt: skip
    """E|Γ_n − Γ|² for samples of a pilot of M tokens at each of m queries; and beside an atom.

    Scores are (m, M), −inf for a token that a query does not see; values (M, v). An atom is given by its score (m,) and
    value (m, v) for each query. `quarters` (M,) says from which of four independent parts a token comes; without it
    they are in random order. Most of the work is products of float32 matrices, which `matmul` may do elsewhere.

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
        raise InputError("a query sees no token of the pilot, or a score is not a number; expected finite scores")
    unseen = np.isneginf(raw)
    logs = np.maximum(raw - top, -LIGHTEST)
    if unseen.any():
        logs[unseen] = -np.inf
    mean, middle = np.array([np.exp(log).mean() for log in logs]), v.mean(0)
    logs -= np.log(mean)[:, None]
    place = np.arange(len(v))
    first = 2 * (place * QUARTERS // len(v) if quarters is None else quarters)
    pilot = _Gathered.of(logs, v - middle, first + place % 2, n, matmul)
    ways = [(np.zeros(len(raw)), np.zeros_like(pilot.limit))]
    if atom is not None:  # beyond e^60 an atom is all there is
        weight = np.exp(np.minimum(atom[0] - top[:, 0] - np.log(mean), 60.0))
        ways.append((weight, atom[1] - middle - pilot.limit))
    repeated = np.flatnonzero((n > np.where(n < MANY, REPEATED, SOMEWHAT) * len(v)) & (n < len(v)))
    halves = [np.flatnonzero(way == side) for side in (0, 1) for way in HALVINGS]
    drawn = [pilot.with_replacement(n, parts, ways) for parts in (np.arange(PARTS), *halves)]
    found = []
    for way, (weight, away) in enumerate(ways):
        (whole, centre), *from_half = (each[way] for each in drawn)
        error = whole.copy()
        for j in repeated:
            error[:, j] = pilot.without_replacement(n[j], weight, away) / (1 - n[j] / len(v))
        centres = (centre, *(about for _, about in from_half))
        output, *outputs = (np.square(pilot.limit + middle + about).sum(-1).T for about in centres)
        shape = (2, len(HALVINGS), *error.shape)
        told = (np.reshape(part, shape) for part in ([half for half, _ in from_half], outputs))
        found.append(PilotErrors(error, output, whole, *told))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _Gathered:
    """A pilot gathered on K nodes in each of its parts, for m queries, and its sums at points s."""

    s: Array  # (S,)
    node: Array  # (K,): the weights of the nodes
    count: Array  # (parts, K, m): of tokens
    table: Half  # (K, m · (v + 2)): of W d, W and W |d|² over all parts, d about each query's own limit
    limit: Array  # (m, v)
    # With e = e^{−sW} sums over the tokens of each part:
    left: Array  # (parts, S, m): of e
    once: Array  # (parts, S, m, v + 1): of W d e and W e
    twice: Array  # (parts, S, m, v + 2): of W² d e, W² e and W² |d|² e
    pull: Array  # (parts, m, v + 1): of W d and W
    matmul: Product

    @classmethod
    def of(cls, logs: Array, values: Array, part: NDArray[np.intp], n: Array, matmul: Product) -> Self:
        """Split each of M tokens between the two nodes around its weight, of which logs (m, M) are given and mean 1."""
        queries, tokens = logs.shape
        low, high = logs.min(), logs.max()
        low = low if np.isfinite(low) else logs[np.isfinite(logs)].min()
        # 0 is a node of its own, for tokens that a query does not see.
        node = np.concatenate(([0.0], np.exp(low + GAP * np.arange(int((high - low) / GAP) + 3))))
        over = np.concatenate(([0.0], 1 / node[1:]))
        carried = np.concatenate((values, np.ones((tokens, 1)), np.square(values).sum(1, keepdims=True)), 1)
        width, size = carried.shape[1], len(node)
        limit, pull = np.empty((queries, width - 2)), np.empty((PARTS, queries, width - 1))
        count, tables = np.empty((PARTS, size, queries)), np.empty((PARTS, size, queries, width), np.float32)
        rows = PARTS * size
        ends = np.arange(0, 2 * tokens + 1, 2, dtype=np.int32)
        spread = sparse.csc_array((np.empty(2 * tokens), np.zeros(2 * tokens, np.int32), ends), shape=(rows, tokens))
        place, share = spread.indices.reshape(-1, 2), spread.data.reshape(-1, 2)  # filled anew for every query
        first = (part * size).astype(np.int32)
        for i, log in enumerate(logs):  # one query at a time: what it needs stays in cache
            weight, at = np.exp(log), np.maximum((log - (low - (1 + 1e-9) * GAP)) * (1 / GAP), 0).astype(np.int32)
            upper = np.maximum(weight * over[at] - 1, 0) * (1 / np.expm1(GAP))
            at += first
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
        lightest = node[
            np.minimum((count.sum(0).cumsum(0) < (1 - min(SURVIVING / n.min(), 0.9)) * tokens).sum(0), size - 1)
        ]
        start = np.log(NEAR / n.max())
        s = np.exp(np.arange(start, max(start + 12, np.log(3 / max(lightest.min(), 1e-30))) + STEP, STEP))
        e = np.exp(-s[:, None] * node)
        both, flat = np.concatenate((e, e * node)).astype(np.float32), tables.reshape(PARTS, size, -1)
        products = np.stack([matmul(both, table) for table in flat]).astype(np.float64)
        products = products.reshape(PARTS, 2, len(s), queries, width)
        left, once, twice = e @ count, products[:, 0, ..., :-1], products[:, 1]
        return cls(s, node, count, flat.sum(0), limit, left, once, twice, pull, matmul)

    def with_replacement(
        self, n: Array, which: NDArray[np.intp], ways: Sequence[tuple[Array, Array]]
    ) -> list[tuple[Array, Array]]:
        """The integral for draws from some parts, (m, sizes), and their g about the limit of all, (sizes, m, v).

        In each way the atom has weights (m,) and lies so far (m, v) from the limit.
        """
        tokens = float(self.count[which].sum((0, 1))[0])
        left, once, twice, pull = (
            sum(sums[part] for part in which) / tokens for sums in (self.left, self.once, self.twice, self.pull)
        )
        mass = np.maximum(pull[:, -1], 1e-300)
        centre = pull[:, :-1] / mass[:, None]  # their own limit: all that follows is about it
        a1, b1, c2, b2 = once[..., :-1] - centre * once[..., -1:], once[..., -1], twice[..., :-2], twice[..., -2]
        a2 = twice[..., -1] - 2 * np.einsum("smv,mv->sm", c2, centre) + np.square(centre).sum(1) * b2
        near = np.einsum("smv,smv->sm", a1, a1)
        size = n[:, None, None]
        # (1 − q)^{n−2}, for every size
        kept = np.exp((size - 2) * np.log(np.maximum(left, 1e-300)))
        found = []
        for weight, away in ways:
            own, lam, inside = away - centre, np.zeros((1, 1, len(weight))), size * (a2 * left + (size - 1) * near)
            if weight.any():
                lam = (weight / (weight + n[:, None] * mass))[:, None]  # g is so far from the centre to the atom
                far, along = np.square(own).sum(1), np.einsum("smv,mv->sm", a1, own)
                across = np.einsum("smv,mv->sm", c2, own) - np.einsum("mv,mv->m", centre, own) * b2
                inside += size * (lam**2 * far * b2 - 2 * lam * across) * left
                inside += size * (size - 1) * ((lam * b1) ** 2 * far - 2 * lam * b1 * along)
                inside += (weight * (1 - lam)) ** 2 * far * left**2
                inside += 2 * size * weight * (1 - lam) * (along - lam * b1 * far) * left
                inside *= np.exp(-self.s[:, None] * weight)
            error = np.einsum("s,nsm->mn", self.s**2, inside * kept) * STEP
            about = np.broadcast_to(centre + lam[:, 0, :, None] * own, (len(n), *centre.shape))
            found.append((np.maximum(error, 0.0), about))
        return found

    def without_replacement(self, n: float, weight: Array, away: Array) -> Array:
        """The integral for draws without replacement from all of it, beside the atom, (m,)."""
        tokens = float(self.count.sum((0, 1))[0])
        p = n / tokens
        kept = (self.s > NEAR / n) & (n * (1 - self.left.sum(0) / tokens) < 40).any(1)
        at = self.s[kept, None]
        e = np.exp(-at * self.node)
        f = 1 - p * (1 - e)
        share = e / f
        rest = 1 - p * share
        factors = [share, self.node * share * rest] + [share * rest] * bool(weight.any())
        sums = self.matmul(np.concatenate(factors).astype(np.float32), self.table).astype(np.float64) * p
        first, second, *drift = sums.reshape(len(factors), len(at), len(weight), -1)
        lam = weight / (weight + n)  # the pilot's own mass is n and its pull 0
        g, far = lam[:, None] * away, lam**2 * np.square(away).sum(1)
        vector = (weight * (1 - lam))[:, None] * away + first[..., :-2] - g * first[..., -2:-1]
        spread = second[..., -1] - 2 * np.einsum("smv,mv->sm", second[..., :-2], g) + far * second[..., -2]
        tokens_at = self.count.sum(0)
        if drift:  # how many tokens are kept matters beside an atom, and does not vary: take its part out
            varied = np.maximum(p * (share * rest) @ tokens_at, 1e-300)
            spread -= np.square(drift[0][..., :-2] - g * drift[0][..., -2:-1]).sum(-1) / varied
        total = at**2 * np.exp(np.log(f) @ tokens_at - at * weight) * (np.square(vector).sum(-1) + spread)
        return np.asarray(np.maximum(total.sum(0) * STEP, 0.0))
