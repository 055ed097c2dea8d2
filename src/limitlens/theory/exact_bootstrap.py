"""Exact expected squared error of attention over n tokens sampled from M given tokens, without sampling (proved).

The M given tokens are the pilot. With weights W = e^{score} of mean 1, values v, the output Γ over all M tokens and
d = v − Γ, the error over n tokens drawn with replacement is

    E|Γ_n − Γ|² = ∫ s [ n a₂ (1−q)^{n−1} + n(n−1) |a₁|² (1−q)^{n−2} ] ds,
    q = E[1 − e^{−sW}],   a₁ = E[W d e^{−sW}],   a₂ = E[W² |d|² e^{−sW}].

An atom is a token in every sample, such as an attention sink, with weight b and value v_a. It moves the centre from Γ
to g = (b v_a + n Γ)/(b + n). With u = v_a − g, it adds b² |u|² (1−q)^n + 2 n b u·a₁ (1−q)^{n−1} to the bracket and
multiplies it by e^{−sb}. Near n = M, samples are without replacement. With p = n/M, e = e^{−sW}, f = 1 − p(1−e) it is

    ∫ s e^{−sb} Π f { |b u + Σ p W d e/f|² + Σ p W² |d|² (e/f)(1 − p e/f) } ds,

divided by 1 − n/M. Tokens are binned by weight, after which the cost does not depend on M. See docs/predict.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from limitlens.errors import Array, InputError, as_array
from limitlens.theory import weight_nodes as grid
from limitlens.theory.weight_nodes import GAP, MAX_EXPONENT, STEP, powers, scaled_weights, unit_logs

MAX_LOG_ATOM = 60.0  # log-weight from which on an atom (token in every sample) is the whole output
MAX_BLOCK = 2176  # queries times (values + 2) per block: tables of larger blocks exceed the processor's caches
NO_TOKEN = "a query sees no token of the pilot, or a score is not a number; expected finite scores"

# Sizes n above these fractions of M are sampled without replacement; the second fraction holds for n ≥ LARGE_N, where
# the varying size of such samples matters little (1/2n).
REPLACE_UP_TO, REPLACE_UP_TO_LARGE_N, LARGE_N = 1 / 6, 1 / 32, 128

# The M tokens come from four quarters of a text, each split into two parts. Six independent ways halve them: three
# (BY_QUARTERS) take whole quarters, three take half of the tokens of each quarter.
QUARTERS, PARTS, BY_QUARTERS = 4, 8, 3
HALVINGS = tuple(np.array([bin(part & mask).count("1") % 2 for part in range(PARTS)]) for mask in (2, 4, 6, 1, 3, 5))
# Which parts a sample is drawn from: all of them, then the first half of each halving, then the second halves.
SUBSETS = np.array([np.ones(PARTS), *(halving == side for side in (0, 1) for halving in HALVINGS)])


@dataclass(frozen=True, eq=False)
class PilotErrors:
    """Expected squared errors and outputs of attention over n tokens sampled from M given ones: (queries, sizes)."""

    error: Array  # without replacement, over 1 − n/M, for n near M; with replacement otherwise
    output: Array  # squared length of the expected output, which relative errors divide by
    whole: Array  # the error with replacement at every size
    halves: Array  # (2, 6, queries, sizes): the error with replacement from one half of the pilot (`HALVINGS`)
    half_outputs: Array  # (2, 6, queries, sizes): squared outputs of the halves

    @classmethod
    def of(cls, stacked: Array) -> Self:
        """Unpack the stack (27, queries, sizes) of fields that `BinnedTokens.errors` returns."""
        halves, outputs = stacked[3:].reshape(2, 2, len(HALVINGS), *stacked.shape[1:])
        return cls(stacked[0], stacked[1], stacked[2], halves, outputs)


Product: TypeAlias = Callable[[Any, Any], Any]
Bags: TypeAlias = Callable[[NDArray[np.int32], NDArray[np.int32], NDArray[Any], NDArray[Any]], Any]


def sparse_bags(ends: Any, places: Any, weights: Any, rows: Any) -> Any:
    """Sums (bags, w) of rows (M, w): bag b sums `weights[k] · rows[places[k]]` over `ends[b]` ≤ k < `ends[b + 1]`."""
    return sparse.csr_array((weights, places, ends), shape=(len(ends) - 1, len(rows))) @ rows


def pilot_errors(
    scores: Array, values: Array, sizes: Array, atom: tuple[Array, Array] | None = None,
    *, quarters: NDArray[np.intp] | None = None, matmul: Product = np.matmul, bags: Bags = sparse_bags,
) -> tuple[PilotErrors, ...]:  # fmt: skip
    """Expected squared error of attention over n tokens sampled from M given tokens, for every query and size n.

    Scores are (m, M) for m queries, −inf where a token is hidden; values are (M, v). `atom` holds scores (m,) and
    values (m, v) of one more token that is in every sample; a second result then includes it. `quarters` (M,) says
    which of four independent parts (0 to 3) of the text a token is from; without it tokens should be in random order.
    `matmul` and `bags` can replace the main operations. float32 scores add a relative error of 1e-6, rarely up to 2e-3.

    >>> rng = np.random.default_rng(0)
    >>> (found,) = theory.pilot_errors(rng.normal(size=(1, 500)), rng.normal(size=(500, 2)), np.array([10, 100]))
    >>> found.error.shape, bool(found.error[0, 0] > found.error[0, 1])
    ((1, 2), True)
    """
    raw = np.asarray(scores)
    raw = raw if raw.dtype == np.float32 else raw.astype(np.float64)
    v = as_array("values", values, ndim=2)
    n = np.asarray(sizes, dtype=np.float64)
    if raw.ndim != 2 or raw.shape[1] != len(v) or raw.shape[1] < PARTS:
        raise InputError(f"scores have shape {raw.shape} and values {v.shape}; expected (queries, M) and (M, v), M ≥ 8")
    part = parts_of(len(v), quarters)
    order = np.argsort(part, kind="stable")  # keeps the tokens of one part together in the cache
    centred = v[order] - v[order].mean(0)
    carried = np.column_stack((centred, np.ones(len(centred)), np.square(centred).sum(1))).astype(raw.dtype)
    pilot = Pilot(carried, v[order].mean(0), part[order])
    columns = raw.T.take(order, 0)
    tops = columns.max(0)
    if not np.isfinite(tops).all():
        raise InputError(NO_TOKEN)
    queries = max(1, MAX_BLOCK // carried.shape[1])
    stacked = []
    for start in range(0, len(raw), queries):
        block = slice(start, start + queries)
        logs = columns[:, block] - tops[block]
        sink: Any = None if atom is None else atom[0][block] - tops[block]
        binned, sink = BinnedTokens.of(logs, sink, pilot, n, matmul, bags)
        own = atom and (np.exp(np.minimum(sink, MAX_LOG_ATOM)), atom[1][block])
        stacked.append(binned.errors(n, own))
    return tuple(PilotErrors.of(errors) for errors in np.concatenate(stacked, 2))


def parts_of(tokens: int, quarters: NDArray[np.intp] | None = None) -> NDArray[np.intp]:
    """Eighth of the text, 0 to 7, of each of M tokens (M,): tokens of a quarter alternate between its two eighths."""
    place = np.arange(tokens)
    return 2 * (place * QUARTERS // tokens if quarters is None else quarters) + place % 2


@dataclass(frozen=True, eq=False)
class Pilot:
    """The M tokens that samples are drawn from: what does not depend on the query."""

    carried: NDArray[Any]  # (M, v + 2): centred values c, 1 and |c|², in the precision of the sums
    middle: Array  # (v,): mean of the values
    part: NDArray[np.intp]  # (M,): eighth of the text of each token, in increasing order


def _bin_matrix(row: NDArray[np.int64], upper: Array, ratio: Array, shrink: Array, rows: int, dtype: Any) -> Any:
    """Sparse matrix (rows, M) that splits each token's weight between the grid weights next to it; inputs (M, m)."""
    tokens, queries = row.shape
    share = np.empty((tokens, 2, queries), dtype)
    np.multiply(upper, ratio, out=share[:, 1])
    np.subtract(ratio, share[:, 1], out=share[:, 0])
    share[:, 1] *= shrink
    place = np.empty((tokens, 2, queries), np.int32)
    place[:, 0] = row
    np.add(place[:, 0], queries, out=place[:, 1])
    ends = np.arange(0, place.size + 1, 2 * queries, dtype=np.int32)
    return sparse.csc_array((share.ravel(), place.ravel(), ends), shape=(rows, tokens)).tocsr()


@dataclass(frozen=True, eq=False)
class BinnedTokens:
    """The M tokens binned by softmax weight on a grid of K weights (nodes), for m queries; NumPy arrays or tensors."""

    log_s: Array  # (S,): logarithms of the quadrature points
    tokens: Array  # (parts,): number of tokens in each eighth (part) of the text
    node: Any  # (K,): logarithms of the weights of the nodes
    count: Any  # (parts, K, m): number of tokens at each node
    table: Any  # (parts, K, m · (v + 2)): sums of W c, W and W |c|² at each node, over the weight of the node
    pull: Any  # (parts, m, v + 1): sums of W d and W over a part
    limit: Any  # (m, v)
    matmul: Product
    xp: Any = np  # library of the arrays
    send: Callable[[NDArray[Any]], Any] = np.asarray  # copies a NumPy array to the device
    sums: Any = None  # (parts, 2 S + 1, m · (v + 2)): `powers` and 1 times the table, if already computed
    shift: Any = 0.0  # (m, v): c − d, the limit in centred coordinates; 0 if values are centred at the limit

    @classmethod
    def of(cls, logs: Array, sink: Any, pilot: Pilot, n: Array, matmul: Product, bags: Bags) -> tuple[Self, Any]:
        """Bin tokens by log-weights `logs` (M, m), which it overwrites, scaled like `sink` to a mean weight of 1."""
        tokens, queries = logs.shape
        log_mean = np.log(np.exp(logs).mean(0, dtype=np.float64))
        logs -= log_mean.astype(logs.dtype)
        sink = None if sink is None else sink - log_mean
        low, tops = grid.lowest_log(logs, n), logs.max(0)
        if tops.max() - low > grid.WIDE_RANGE:
            logs, sink = grid.close_gaps(logs, sink)  # relative to the heaviest tokens, whose weights stay
            logs, sink = logs + tops, None if sink is None else sink + tops
            low = grid.lowest_log(logs, n)
        node, first = grid.nodes(low, tops.max())
        index, ratio, upper = grid.split(logs, node, first)
        shrink = np.where(index > 0, np.exp(-GAP), 1).astype(pilot.carried.dtype)
        index *= queries
        index += (pilot.part * (len(node) * queries))[:, None]
        index += np.arange(queries)
        rows = PARTS * len(node) * queries
        moved_up = np.bincount(index.ravel(), upper.ravel(), rows).reshape(PARTS, -1, queries)
        matrix = _bin_matrix(index, upper, ratio, shrink, rows, pilot.carried.dtype)
        table = bags(matrix.indptr, matrix.indices, matrix.data, pilot.carried).reshape(PARTS, len(node), -1)
        # A row of the matrix has entries of its node's tokens and of the node below: alternating sums separate them.
        entries = np.diff(matrix.indptr).reshape(moved_up.shape)
        sign = 1 - 2 * (np.arange(len(node)) % 2)[:, None]
        count = sign * (sign * entries).cumsum(1) - moved_up
        count[:, 1:] += moved_up[:, :-1]
        cumulative = count.sum(0).cumsum(0)
        lightest = node[np.minimum((cumulative < grid.lightest_share(n) * tokens).sum(0), len(node) - 1)].min()
        log_s = grid.points(n, max(lightest, node[1]))
        factors = (*powers(np, log_s[:, None], node), np.exp(unit_logs(np, node)))
        sums = matmul(np.vstack(factors).astype(table.dtype), table)  # the last row is the sum over all tokens
        pull = sums[:, -1].reshape(PARTS, queries, -1)[..., :-1].astype(np.float64)
        total = pull.sum(0)
        limit = total[:, :-1] / total[:, -1:]
        pull[..., :-1] -= pull[..., -1:] * limit
        in_part = np.bincount(pilot.part, minlength=PARTS).astype(float)
        binned = cls(log_s, in_part, node, count, table, pull, pilot.middle + limit, matmul, sums=sums, shift=limit)
        return binned, sink

    def errors(self, n: Array, atom: tuple[Any, Any] | None = None) -> Any:
        """Stack (1 or 2, 27, m, sizes) of fields of `PilotErrors`: without, then with a token `atom` in all samples."""
        xp, log_s, tokens = self.xp, self.send(self.log_s[:, None]), float(self.tokens.sum())
        at, _ = scaled_weights(xp, log_s, self.node)
        gone = self.matmul(-xp.expm1(-at), self.count)  # sums of 1 − e^{−sW} over the tokens of each part
        sums = self._product(powers(xp, log_s, self.node), self.table) if self.sums is None else self.sums
        sums = sums.reshape(*sums.shape[:2], len(self.limit), -1)
        replaced = self._with_replacement(n, log_s, gone, sums, atom)
        limit = np.where(n < LARGE_N, REPLACE_UP_TO, REPLACE_UP_TO_LARGE_N) * tokens
        without = np.flatnonzero((n > limit) & (n < tokens))
        # On a CPU one size at a time stays in the cache; a GPU would be idle between such small steps.
        group = 1 if xp is np else max(1, len(without))
        table, count, gone = (part.sum(0) for part in (self.table, self.count, gone / tokens))
        firsts = [1.0 * error[0] for error, _ in replaced]  # copies
        for sizes in without.reshape(-1, group):
            # Points where some query's samples may have no token left; on a GPU finding them would wait for the device.
            kept = (
                (n[sizes] * gone < 40).any(1) & (self.log_s > np.log(grid.SMALLEST_S / n[sizes]))
                if xp is np
                else slice(None)
            )
            found = self._without_replacement(n[sizes], log_s[kept], self.log_s[kept], table, count, atom)
            for first, error in zip(firsts, found, strict=True):
                first[:, self.send(sizes)] = error
        both = zip(firsts, replaced, strict=True)
        return xp.stack([xp.concatenate((first[None], out[:1], error, out[1:])) for first, (error, out) in both])

    def _product(self, factors: tuple[Any, ...], table: Any) -> Any:
        """Matrix product of stacked factors (..., K) with a table (parts, K, columns), in the table's precision."""
        rows = self.xp.asarray(self.xp.stack(factors).reshape(-1, len(self.node)), dtype=self.table.dtype)
        return self._held(self.matmul(rows, table))

    def _held(self, array: Any) -> Any:
        """Convert to the table's precision on a CPU, where float32 fits the cache, and to float64 on a GPU."""
        return self.xp.asarray(array, dtype=self.table.dtype if self.xp is np else self.xp.float64)

    def _with_replacement(
        self, n: Array, log_s: Any, gone: Any, sums: Any, atom: tuple[Any, Any] | None
    ) -> list[tuple[Any, Any]]:
        """Pairs (squared error, squared output), each (c, m, sizes), for c `SUBSETS`: without, then with the atom."""
        xp, size, s = self.xp, self.send(n), self.xp.exp(log_s.clip(None, MAX_EXPONENT))
        shares = self.send(SUBSETS / (SUBSETS @ self.tokens)[:, None])  # (c, parts): averages over a subset's tokens
        gone, pull, sums = (
            self.matmul(share, part.reshape(PARTS, -1)).reshape(-1, *part.shape[1:])
            for share, part in ((shares, gone), (shares, self.pull), (self._held(shares), sums))
        )
        once, twice = sums[:, : len(s)], sums[:, len(s) : 2 * len(s)]
        mass = pull[..., -1].clip(1e-300)
        centre = pull[..., :-1] / mass[..., None]  # limit of the subset: values are centred there
        about = centre + self.shift
        c2, b2 = twice[..., :-2], twice[..., -2]
        left = (1 - gone).clip(1e-300)
        a1 = self._held(about)[:, None] * once[..., -2:-1]
        a1 = once[..., :-2] - a1 if xp is not np else np.subtract(once[..., :-2], a1, out=a1)
        b1 = once[..., -2] + s * (s < 1) * mass[:, None]
        a2 = twice[..., -1] - 2 * self._dot(c2, about) + (about**2).sum(-1)[:, None] * b2
        # (1 − q)^{n−2} for every size, times the step: the weights of the quadrature.
        kept = STEP * xp.exp(self._held(size[:, None] - 2) * self._held(xp.log(left).swapaxes(1, 2))[:, :, None])
        near = self._dot(a1, a1)
        limit = self.limit + centre

        def integral(*factors: Any) -> Any:
            return xp.moveaxis(xp.matmul(kept, self._held(xp.stack(factors, -1)).swapaxes(1, 2)), -1, 0)

        alone, pairs = integral(a2 * left, near)
        outputs = xp.broadcast_to((limit**2).sum(-1)[..., None], alone.shape)
        found = [((size * (alone + (size - 1) * pairs)).clip(0), outputs)]
        if atom is not None:
            weight, value = atom
            own = value - limit
            both = weight[:, None] + size * mass[..., None]
            lam, rest = weight[:, None] / both, size * mass[..., None] / both  # g = limit + lam · own
            far, along, pulled = (own**2).sum(-1)[..., None], self._dot(a1, own), s * weight
            e = xp.exp(-pulled)
            across = self._dot(c2, own) - (about * own).sum(-1)[:, None] * b2
            alone, b2_left, across, along_left, b1_left, pairs, b1_twice, b1_along, left_twice = integral(
                *(part * e * left for part in (a2, b2, across, pulled * along, pulled * b1)),
                *(part * e for part in (near, b1**2, b1 * along, (pulled * left) ** 2)),
            )  # `rest` is the distance of the atom from g
            error = size * (alone + lam**2 * far * b2_left - 2 * lam * across)
            error = error + size * (size - 1) * (pairs + lam**2 * far * b1_twice - 2 * lam * b1_along)
            error = error + rest**2 * far * left_twice + 2 * size * rest * (along_left - lam * far * b1_left)
            inner = 2 * lam * rest * (limit * value).sum(-1)[..., None] + lam**2 * (value**2).sum(-1)[:, None]
            found.append((error.clip(0), rest**2 * outputs + inner))
        return found

    def _dot(self, rows: Any, vector: Any) -> Any:
        """Inner products (c, S, m) of rows (c, S, m, v) with rows of equal shape or one vector per query (c, m, v)."""
        return self.xp.einsum("csmv,csmv->csm" if vector.ndim == 4 else "csmv,cmv->csm", rows, self._held(vector))

    def _without_replacement(
        self, n: Array, log_s: Any, points: Array, table: Any, count: Any, atom: tuple[Any, Any] | None
    ) -> list[Any]:
        """Squared errors (m, sizes) of n of M tokens without replacement, over 1 − n/M: without, then with the atom."""
        xp, tokens, size = self.xp, float(self.tokens.sum()), self.send(n[:, None, None])
        counted = points > np.log(grid.SMALLEST_S / n[:, None])
        step = self.send(counted * (STEP / (1 - n[:, None] / tokens)))[..., None]
        at, relative = scaled_weights(xp, log_s, self.node)
        lost, p = xp.expm1(-at), size / tokens
        f = 1 + p * lost  # (sizes, S, K)
        share = p * (1 + lost) / f
        variance = share * (1 - share)
        factors = (relative * share, relative * at * variance) + (relative * variance,) * (atom is not None)
        sums = self._product(factors, table).reshape(len(factors), len(n), len(log_s), len(self.limit), -1)
        vectors = sums[..., :-2] - self._held(self.shift) * sums[..., -2:-1]
        square = sums[1, ..., -1]
        log = self.matmul(xp.log(f), count)
        if xp is np:  # |d|² = |c|² − (c + d)·shift
            square = square - self._dot(sums[1, ..., :-2] + vectors[1], self.shift[None])

        def integral(vector: Any, spread: Any, log: Any) -> Any:
            return (step * xp.exp(log) * (self._dot(vector, vector) + spread)).sum(1).clip(0).T

        found = [integral(vectors[0], square, log)]
        if atom is not None:
            weight, away = atom[0], atom[1] - self.limit
            lam = weight / (weight + size)  # the pilot's weights sum to n on average, and its W d to 0
            g = self._held(lam[..., None] * away)
            vector, drift = (vectors[k] - g * sums[k, ..., -2:-1] for k in (0, 2))
            pulled = (xp.exp(log_s.clip(None, MAX_EXPONENT)) * weight).clip(None, 100)  # e^{−100} is zero
            vector = vector + self._held((pulled * size / (weight + size))[..., None] * away)
            square = square - 2 * self._dot(vectors[1], g[:, 0]) + lam**2 * (away**2).sum(1) * sums[1, ..., -2]
            # With an atom the number of kept tokens matters; it is fixed at n, so its variance is subtracted.
            varied = self.matmul(variance, count).clip(1e-300)
            found.append(integral(vector, square - self._dot(drift, drift) / varied, log - pulled))
        return found
