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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from limitlens.errors import Array, InputError, as_array

STEP = 0.8  # of log s: the trapezoidal rule is within 3e-4 there, since the integrand is smooth (0.1 says the same)
NEAR = 0.02  # s from here on, over the largest n: below, a sample has no mass yet
SURVIVING = 30.0  # tokens heavier than 1/s, over the smallest n, at the last s: no sample is without one
REPEATED = 1 / 6  # of the pilot, from which on n is drawn without replacement


@dataclass(frozen=True, eq=False)
class PilotErrors:
    """Expected squares at every query and size, (queries, sizes): of the error, and of the output it is relative to."""

    error: Array
    output: Array
    halves: Array  # (2, queries, sizes): the same error, drawn with replacement from either half of the pilot alone
    whole: Array  # (queries, sizes): and from all of it


Atom: TypeAlias = tuple[float, Array]  # its weight, where those of the tokens have mean 1, and its value
Half: TypeAlias = NDArray[np.float32]  # single precision, where there are many


def pilot_errors(
    scores: Array,
    values: Array,
    sizes: Array,
    atom: tuple[Array, Array] | None = None,
    *,
    matmul: Callable[[Half, Half], Half] = np.matmul,
) -> tuple[PilotErrors, ...]:
    """E|Γ_n − Γ|² for samples of a pilot of M tokens, in random order, at each of m queries; and beside an atom.

    Scores are (m, M), −inf for a token that a query does not see; values (M, v). An atom is given by its score (m,) and
    value (m, v) for each query. Most of the work is products of float32 matrices, which `matmul` may do elsewhere.
    """
    raw, v = np.asarray(scores, dtype=np.float64), as_array("values", values, ndim=2)
    n = np.asarray(sizes, dtype=np.float64)
    if raw.ndim != 2 or raw.shape[1] != len(v) or raw.shape[1] < 4:
        raise InputError(f"scores have shape {raw.shape} and values {v.shape}; expected (queries, M) and (M, v), M ≥ 4")
    top = raw.max(1, keepdims=True)
    if not np.isfinite(top).all() or np.isnan(raw).any():
        raise InputError("a query sees no token of the pilot, or a score is not a number; expected finite scores")
    weights = np.exp(raw - top)
    mean = weights.mean(1, keepdims=True)
    weights /= mean
    rows = []
    for i, w in enumerate(weights):
        atoms: list[Atom | None] = [None]
        if atom is not None:  # beyond e^60 an atom is all there is
            weight = np.exp(min(atom[0][i] - top[i, 0] - np.log(mean[i, 0]), 60.0))
            atoms.append((float(weight), np.asarray(atom[1][i], dtype=float)))
        rows.append(_query(w, v, n, atoms, matmul))
    found = []
    for way in zip(*rows, strict=True):
        error, output, halves, whole = (np.stack(part) for part in zip(*way, strict=True))
        found.append(PilotErrors(error, output, np.swapaxes(halves, 0, 1), whole))
    return tuple(found)


def _query(
    w: Array, v: Array, n: Array, atoms: list[Atom | None], matmul: Callable[[Half, Half], Half]
) -> list[tuple[Array, Array, Array, Array]]:
    """Errors, outputs, errors of the halves and of the whole at one query, beside each atom or none."""
    count, half = len(w), len(w) // 2
    limit = w @ v / count
    d = (v - limit).astype(np.float32)
    with_one = np.concatenate((d, np.ones((count, 1), np.float32), np.square(d).sum(1, keepdims=True)), 1)
    s = np.exp(_grid(w, n))
    light = w.astype(np.float32)
    e = np.exp(-(s.astype(np.float32)[:, None] * light))
    once = light * e
    twice = light * once
    parts = []
    for own in (slice(0, half), slice(half, count)):
        sums = np.concatenate((matmul(once[:, own], with_one[own, :-1]), matmul(twice[:, own], with_one[own])), 1)
        pull = np.append(w[own] @ d[own], w[own].sum())
        parts.append((e[:, own].sum(1, dtype=np.float64), sums.astype(np.float64), pull, own.stop - own.start))
    everything = tuple(one + other for one, other in zip(*parts, strict=True))
    repeated = np.flatnonzero((n > REPEATED * count) & (n < count))
    without = np.array([_without(s, e, light, with_one, n[j], limit, atoms, matmul) for j in repeated])
    found = []
    for place, atom in enumerate(atoms):
        whole, output = _bootstrap(s, n, everything, limit, atom)
        halves = np.stack([_bootstrap(s, n, part, limit, atom)[0] for part in parts])
        error = whole.copy()
        if len(repeated):
            error[repeated] = without[:, place] / (1 - n[repeated] / count)
        found.append((error, output, halves, whole))
    return found


def _grid(w: Array, n: Array) -> Array:
    """log s from where no sample has mass to where none is left without a heavier token."""
    low = np.log(NEAR / n.max())
    rank = min(len(w) - 1, max(0, int((1 - min(SURVIVING / n.min(), 0.9)) * len(w))))
    lightest = max(float(np.partition(w, rank)[rank]), 1e-30)
    return np.arange(low, max(low + 12, np.log(3 / lightest)) + STEP, STEP)


def _bootstrap(s: Array, n: Array, sums: Any, limit: Array, atom: Atom | None) -> tuple[Array, Array]:
    """The integral for draws with replacement from tokens with these sums over them, and |g|²: (sizes,) twice.

    Sums are of e, of W d e, W e, W² d e, W² e, W² |d|² e side by side, of W d and W, d about the limit of the whole
    pilot, and of 1.
    """
    left, table, pull, count = sums
    width = len(limit)
    a1, b1, c2, b2, a2 = np.split(table / count, (width, width + 1, 2 * width + 1, 2 * width + 2), 1)
    mass = max(float(pull[-1]) / count, 1e-300)
    centre = pull[:-1] / count / mass  # their own limit, about that of the whole
    log_left = np.log(np.maximum(left / count, 1e-300))
    error, output = np.empty((2, len(n)))
    for j, size in enumerate(n):
        weight, value = (0.0, limit) if atom is None else atom
        g = (weight * (value - limit) + size * mass * centre) / (weight + size * mass)  # about the limit of the whole
        u = value - limit - g
        first = a1 - g * b1
        second = a2[:, 0] - 2 * c2 @ g + (g @ g) * b2[:, 0]
        share = np.exp(size * log_left - s * weight)
        once, twice = (np.exp((size - k) * log_left - s * weight) for k in (1, 2))
        inside = size * second * once + size * (size - 1) * np.square(first).sum(1) * twice
        inside += weight**2 * (u @ u) * share + 2 * size * weight * (first @ u) * once
        error[j] = max(float((s * s * inside).sum()) * STEP, 0.0)
        output[j] = np.square(limit + g).sum()
    return error, output


def _without(
    s: Array, e: Half, w: Half, with_one: Half, n: float, limit: Array, atoms: list[Atom | None],
    matmul: Callable[[Half, Half], Half],
) -> list[float]:  # fmt: skip
    """The integral for draws without replacement, beside each atom or none."""
    width, p = len(limit), n / len(w)
    kept = (s > NEAR / n) & (n * (1 - e.mean(1)) < 40)
    at, f = s[kept], 1 - np.float32(p) * (1 - e[kept])
    share = e[kept] / f
    rest = 1 - np.float32(p) * share
    once = w * share
    first = matmul(once, with_one[:, :-1]).astype(np.float64) * p
    second = matmul(w * once * rest, with_one).astype(np.float64) * p
    level = np.log(f).sum(1, dtype=np.float64)
    found = []
    for atom in atoms:
        weight, value = (0.0, limit) if atom is None else atom
        g = weight * (value - limit) / (weight + n)  # about the limit: the pilot's own mass is n and its pull 0
        vector = weight * (value - limit - g) + first[:, :width] - g * first[:, width:]
        spread = second[:, width + 1] - 2 * second[:, :width] @ g + (g @ g) * second[:, width]
        if atom is not None:  # how many tokens are kept matters beside an atom, and does not vary: take its part out
            drift = matmul(once * rest, with_one[:, :-1]).astype(np.float64) * p
            varied = np.maximum(p * (share * rest).sum(1, dtype=np.float64), 1e-300)
            spread -= np.square(drift[:, :width] - g * drift[:, width:]).sum(1) / varied
        total = at * at * np.exp(level - at * weight) * (np.square(vector).sum(1) + spread)
        found.append(max(float(total.sum()) * STEP, 0.0))
    return found
