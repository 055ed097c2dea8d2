"""The uniform error: the largest |Γ_n(x) − Γ(x)| over queries |x| ≤ R, found by gradient ascent from many starts.

Γ_n is the output over n tokens and Γ the infinite-token limit. The error at x is |V δ(A x)|, with δ = ∇K_n − ∇K and
K_n, K the cumulant generating functions of sample and law. The maximum found is a lower bound of the supremum.
"""

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.kernels import state_of
from limitlens.attention.state import State
from limitlens.errors import Array
from limitlens.experiments.reference import Reference
from limitlens.sampling.cells import Cells
from limitlens.sampling.streams import PAGE

CANDIDATES, STARTS, STEPS = 192, 8, 32  # candidates in each half, how many start an ascent, and steps of an ascent
AIMED = 1 / 3  # share of the candidates that aim at the farthest tokens


def missed_note(missed: Array) -> str:
    """Sentence on how far the largest error found may fall short, from the shares missed (replicates, sizes)."""
    last = 100 * missed[:, -1]
    less = f"{last.mean():.2g}% ± {last.std() / np.sqrt(len(last)):.1g}%"
    return f"The uniform error is the largest found, a lower bound: with half of the starts it would be {less} lower."


def uniform_errors(reference: Reference, cells: Cells, replicates: range, radius: float) -> tuple[Array, Array]:
    """Largest error over queries in a ball, and the share that half of the starts would miss: (replicates, sizes)."""
    ascent = _Ascent(reference, replicates, radius)
    previous, largest, missed = np.empty((len(replicates), 0, reference.head.dim)), [], []
    for size in cells.sizes:
        x, error = ascent.climb(np.concatenate((*ascent.halves(size), previous), 1), size)
        best = error.max(1)
        one_half = (error[:, :STARTS].max(1) + error[:, STARTS : 2 * STARTS].max(1)) / 2
        largest.append(best)
        missed.append(1 - np.divide(one_half, best, out=np.ones_like(best), where=best > 0))
        previous = x[np.arange(len(x)), error.argmax(1)][:, None]  # a start for the next size, whose maximum is near
    return np.stack(largest, 1), np.stack(missed, 1)


class _Ascent:
    """Gradient ascent of the error over queries in a ball, for r replicates and s starts at once: (r, s, d)."""

    def __init__(self, reference: Reference, replicates: range, radius: float) -> None:
        self.measure, self.head, self.stream = reference.measure, reference.head, reference.stream
        self.replicates, self.radius = replicates, radius
        # One generator for each replicate, so that its starts do not depend on other replicates.
        self.generators = [np.random.default_rng(np.random.SeedSequence([r, 0xA5CE])) for r in replicates]

    def halves(self, size: int) -> tuple[Array, Array]:
        """Two independent sets of starting queries (r, STARTS, d), each the candidates of largest error among many."""
        aimed = self._aimed(size, 2 * int(AIMED * CANDIDATES))
        first, second = (self._best(np.concatenate((self._spread(), aimed[:, half::2]), 1), size) for half in (0, 1))
        return first, second

    def _best(self, candidates: Array, size: int) -> Array:
        error = self._norm(self._delta(self.head.tilts(candidates), size))
        return np.take_along_axis(candidates, np.argsort(-error, axis=1)[:, :STARTS, None], 1)

    def _spread(self) -> Array:
        """Random candidate queries in the ball (r, count, d), half of them on its surface."""
        count = CANDIDATES - int(AIMED * CANDIDATES)
        direction = np.stack([rng.standard_normal((count, self.head.dim)) for rng in self.generators])
        direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
        distance, inner = np.ones((1, count, 1)), count // 2
        distance[:, :inner, 0] = np.linspace(1 / inner, 1, inner) ** (1 / self.head.dim)
        return np.asarray(self.radius * distance * direction)

    def _aimed(self, size: int, count: int) -> Array:
        """Candidate queries R u/|u| for the longest u = Aᵀ(X − E X) over the first `size` tokens X: (r, ≤ count, d)."""
        queries = np.empty((len(self.replicates), 0, self.head.dim))
        for _, start, stop in Cells((size,)).blocks(PAGE):
            tokens = self.stream.draw(self.replicates, start, stop).cpu().numpy() - self.measure.mean
            keys = tokens if self.head.key_map is None else tokens @ self.head.key_map.T
            queries = np.concatenate((queries, keys @ self.head.query_map), 1)
            lengths = np.linalg.norm(queries, axis=-1)
            queries = np.take_along_axis(queries, np.argsort(-lengths, axis=1)[:, :count, None], 1)
        lengths = np.linalg.norm(queries, axis=-1, keepdims=True)
        return np.asarray(self.radius * queries / np.maximum(lengths, 1e-300))

    def climb(self, x: Array, size: int) -> tuple[Array, Array]:
        """Move queries x (r, s, d) to local maxima of the error over `size` tokens; also returns the errors (r, s)."""
        delta = self._delta(self.head.tilts(x), size)
        error = self._norm(delta)
        length = np.full(error.shape, self.radius / 4)
        for _ in range(STEPS):
            gradient = self._gradient(x, delta, size)
            norm = np.linalg.norm(gradient, axis=-1, keepdims=True)
            step = np.divide(gradient, norm, out=np.zeros_like(gradient), where=norm > 0)
            trial = x + length[..., None] * step
            distance = np.linalg.norm(trial, axis=-1, keepdims=True)
            trial *= np.minimum(1, self.radius / np.maximum(distance, 1e-300))  # back into the ball
            trial_delta = self._delta(self.head.tilts(trial), size)
            trial_error = self._norm(trial_delta)
            better = trial_error > error
            x, delta = np.where(better[..., None], trial, x), np.where(better[..., None], trial_delta, delta)
            error = np.where(better, trial_error, error)
            length = np.where(better, 1.5 * length, length / 2)
        return x, error

    def _gradient(self, x: Array, delta: Array, size: int) -> Array:
        """Gradient of |Vδ|²/2 in the queries x, by a central difference of δ = `delta` along u = VᵀVδ."""
        along = delta @ self.head.V.T @ self.head.V
        norm = np.linalg.norm(along, axis=-1, keepdims=True)
        unit = np.divide(along, norm, out=np.zeros_like(along), where=norm > 0)
        tilts = self.head.tilts(x)
        spacing = 1e-5 * (1 + np.linalg.norm(tilts, axis=-1, keepdims=True))
        both = np.concatenate((tilts + spacing * unit, tilts - spacing * unit), axis=1)
        ahead, behind = np.split(self._delta(both, size), 2, axis=1)
        curvature = norm * (ahead - behind) / (2 * spacing)
        queries = curvature if self.head.key_map is None else curvature @ self.head.key_map.T
        return np.asarray(queries @ self.head.query_map)

    def _norm(self, delta: Array) -> Array:
        return np.asarray(np.linalg.norm(delta @ self.head.V.T, axis=-1))

    def _delta(self, tilts: Array, size: int) -> Array:
        """Error ∇K_n(t) − ∇K(t) of the mean token weighted by exp<t, X>, t in `tilts` (r, s, d), over `size` tokens."""
        query = torch.from_numpy(np.ascontiguousarray(tilts))
        state = State.empty(tuple(query.shape[:1]), query.shape[1], self.head.dim)
        for _, start, stop in Cells((size,)).blocks(PAGE):
            tokens: Tensor = self.stream.draw(self.replicates, start, stop).cpu()
            state = state.merge(state_of(query, tokens, tokens))
        return np.asarray(state.output.numpy() - self.measure.grad_K(tilts))
