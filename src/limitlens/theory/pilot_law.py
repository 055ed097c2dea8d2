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

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

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
PARTS = 4  # of a pilot: two of them are a half, and there are three ways to halve it
HALVES = tuple(combinations(range(PARTS), 2))  # (0, 1) and (2, 3), the first and the last, are the two of one way


@dataclass(frozen=True, eq=False)
class PilotErrors:
    """Expected squares at every query and size, (queries, sizes): of the error, and of the output it is relative to."""

    error: Array
    output: Array
    whole: Array  # the same error with replacement, at any size
    halves: Array  # (2, 3, queries, sizes): and from either half alone, for three halvings
    half_outputs: Array  # with the outputs that these are relative to


Half: TypeAlias = NDArray[np.float32]  # single precision, where there are many
Product: TypeAlias = Callable[[Half, Half], Half]


def pilot_errors(
    scores: Array, values: Array, sizes: Array, atom: tuple[Array, Array] | None = None,
    *, parts: NDArray[np.intp] | None = None, matmul: Product = np.matmul,
) -> tuple[PilotErrors, ...]:  # fmt: skip
    """E|Γ_n − Γ|² for samples of a pilot of M tokens at each of m queries; and beside an atom.

    Scores are (m, M), −inf for a token that a query does not see; values (M, v). An atom is given by its score (m,) and
    value (m, v) for each query. `parts` (M,) puts every token into one of four independent parts; without it they are
    in random order. Most of the work is products of float32 matrices, which `matmul` may do elsewhere.
    """
    raw, v = np.asarray(scores, dtype=np.float64), as_array("values", values, ndim=2)
    n = np.asarray(sizes, dtype=np.float64)
    if raw.ndim != 2 or raw.shape[1] != len(v) or raw.shape[1] < PARTS:
        raise InputError(f"scores have shape {raw.shape} and values {v.shape}; expected (queries, M) and (M, v), M ≥ 4")
    top = raw.max(1, keepdims=True)
    if not np.isfinite(top).all() or np.isnan(raw).any():
        raise InputError("a query sees no token of the pilot, or a score is not a number; expected finite scores")
    seen = np.isfinite(raw)
    weights = np.where(seen, np.exp(np.maximum(raw - top, -LIGHTEST)), 0.0)
    mean, middle = weights.mean(1), v.mean(0)
    quarter = np.arange(len(v)) * PARTS // len(v) if parts is None else parts
    pilot = _Gathered.of(weights / mean[:, None], v - middle, quarter, n, matmul)
    ways = [(np.zeros(len(raw)), np.zeros_like(pilot.limit))]
    if atom is not None:  # beyond e^60 an atom is all there is
        weight = np.exp(np.minimum(atom[0] - top[:, 0] - np.log(mean), 60.0))
        ways.append((weight, atom[1] - middle - pilot.limit))
    repeated = np.flatnonzero((n > np.where(n < MANY, REPEATED, SOMEWHAT) * len(v)) & (n < len(v)))
    found = []
    for weight, away in ways:
        whole, centre = pilot.with_replacement(n, range(PARTS), weight, away)
        halves, centres = zip(
            *(pilot.with_replacement(n, half, weight, away) for half in (*HALVES[:3], *HALVES[:2:-1])), strict=True
        )
        error = whole.copy()
        for j in repeated:
            error[:, j] = pilot.without_replacement(n[j], weight, away) / (1 - n[j] / len(v))
        output, *outputs = (np.square(pilot.limit + middle + about).sum(-1).T for about in (centre, *centres))
        shape = (2, 3, *error.shape)
        found.append(PilotErrors(error, output, whole, *(np.reshape(part, shape) for part in (halves, outputs))))
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
    def of(cls, weights: Array, values: Array, quarter: NDArray[np.intp], n: Array, matmul: Product) -> _Gathered:
        """Split each of M tokens between the two nodes around its weight (m, M), which have mean 1 at each query."""
        queries, tokens = weights.shape
        low, high = np.log(weights[weights > 0].min()), np.log(weights.max())
        node = np.concatenate(([0.0], np.exp(low + GAP * np.arange(int((high - low) / GAP) + 3))))
        limit = weights @ values / tokens
        carried = np.concatenate((values, np.ones((tokens, 1)), np.square(values).sum(1, keepdims=True)), 1)
        places = [np.flatnonzero(quarter == part) for part in range(PARTS)]
        own = [carried[place] for place in places]
        width, size = carried.shape[1], len(node)
        count, gathered = np.empty((PARTS, size, queries)), np.empty((PARTS, size, queries, width))
        # 0 is a node of its own, for tokens that a query does not see.
        above = ((np.log(np.maximum(weights, node[1])) - low) / GAP + 1 + 1e-9).astype(np.int32)
        below = np.where(weights > 0, above, 0)
        right = (weights - node[below]) / (node[below + 1] - node[below])
        for part, place in enumerate(places):
            ends = np.arange(0, 2 * len(place) + 1, 2)
            for i in range(queries):
                at, upper = below[i, place], right[i, place]
                share, where = np.stack((1 - upper, upper), 1), np.stack((at, at + 1), 1)
                count[part, :, i] = np.bincount(where.ravel(), share.ravel(), minlength=size)
                share *= weights[i, place, None]
                spread = sparse.csc_array((share.ravel(), where.ravel(), ends), shape=(size, len(place)))
                gathered[part, :, i] = spread @ own[part]
        # About each query's own limit: |d|² = |c|² − 2 c·Γ + |Γ|².
        inner = np.einsum("pkmv,mv->pkm", gathered[..., :-2], limit)
        gathered[..., -1] += np.square(limit).sum(1) * gathered[..., -2] - 2 * inner
        gathered[..., :-2] -= limit * gathered[..., -2:-1]
        lightest = node[
            np.minimum((count.sum(0).cumsum(0) < (1 - min(SURVIVING / n.min(), 0.9)) * tokens).sum(0), size - 1)
        ]
        start = np.log(NEAR / n.max())
        s = np.exp(np.arange(start, max(start + 12, np.log(3 / max(lightest.min(), 1e-30))) + STEP, STEP))
        e = np.exp(-s[:, None] * node)
        both = np.concatenate((e, e * node)).astype(np.float32)
        tables = gathered.reshape(PARTS, size, -1).astype(np.float32)
        sums = np.stack([matmul(both, table) for table in tables]).astype(np.float64)
        sums = sums.reshape(PARTS, 2, len(s), queries, width)
        left, pull = np.stack([e @ part for part in count]), gathered[..., :-1].sum(1)
        once, twice = sums[:, 0, ..., :-1], sums[:, 1]
        return cls(s, node, count, tables.sum(0), limit, left, once, twice, pull, matmul)

    def with_replacement(self, n: Array, which: Sequence[int], weight: Array, away: Array) -> tuple[Array, Array]:
        """The integral for draws from some parts, (m, sizes), and their g about the limit of all, (sizes, m, v).

        The atom has these weights (m,) and lies `away` (m, v) from the limit.
        """
        parts = list(which)
        tokens = float(self.count[parts].sum((0, 1))[0])
        left, once, twice, pull = (
            sums[parts].sum(0) / tokens for sums in (self.left, self.once, self.twice, self.pull)
        )
        mass = np.maximum(pull[:, -1], 1e-300)
        centre = pull[:, :-1] / mass[:, None]  # their own limit: all that follows is about it
        a1, b1, c2, b2 = once[..., :-1] - centre * once[..., -1:], once[..., -1], twice[..., :-2], twice[..., -2]
        a2 = twice[..., -1] - 2 * np.einsum("smv,mv->sm", c2, centre) + np.square(centre).sum(1) * b2
        c2 = c2 - centre * b2[..., None]
        own = away - centre
        near, far = np.square(a1).sum(-1), np.square(own).sum(1)
        along, across = (np.einsum("smv,mv->sm", sums, own) for sums in (a1, c2))
        size = n[:, None, None]
        lam = (weight / (weight + n[:, None] * mass))[:, None]  # g is so far from the centre to the atom
        log_left = np.log(np.maximum(left, 1e-300))
        gone = self.s[:, None] * weight
        twice_left = np.exp((size - 2) * log_left - gone)
        once_left = twice_left * left
        inside = size * (a2 - 2 * lam * across + lam**2 * far * b2) * once_left
        inside += size * (size - 1) * (near - 2 * lam * b1 * along + (lam * b1) ** 2 * far) * twice_left
        if weight.any():
            inside += (weight * (1 - lam)) ** 2 * far * once_left * left
            inside += 2 * size * weight * (1 - lam) * (along - lam * b1 * far) * once_left
        error = np.maximum(np.einsum("s,nsm->mn", self.s**2, inside) * STEP, 0.0)
        return error, centre + lam[:, 0, :, None] * own

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
