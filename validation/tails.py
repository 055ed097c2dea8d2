"""Verdicts of `check_tails` for samples of several laws, by dimension and number of tokens (docs/theory.md)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import limitlens as ll
from limitlens.errors import Array
from limitlens.statistics.tails import Verdict, tokens_needed

SAMPLES = 40
Draw = Callable[[np.random.Generator, tuple[int, int]], Array]


def _sphere(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    x = rng.standard_normal(shape)
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True)) if shape[1] > 1 else rng.uniform(-1, 1, shape)


def _two_scales(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return np.asarray(rng.standard_normal(shape) * np.where(rng.random((shape[0], 1)) < 0.1, 3.0, 1.0))


def _two_means(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    x = rng.standard_normal(shape)
    x[:, 0] += rng.choice([-2.0, 2.0], size=shape[0])
    return x


def _rotated(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return np.asarray(rng.laplace(size=shape) @ np.linalg.qr(rng.standard_normal((shape[1], shape[1])))[0])


# law, how it is drawn, the verdicts that are true of it
LAWS: dict[str, tuple[Draw, str]] = {
    "Gaussian": (lambda rng, shape: rng.standard_normal(shape), "light"),
    "sphere (d = 1: uniform)": (_sphere, "light"),
    "½ N(−2, 1) + ½ N(2, 1)": (_two_means, "light"),
    "Laplace": (lambda rng, shape: rng.laplace(size=shape), "above"),
    "Laplace, rotated": (_rotated, "above"),
    ".9 N(0, I) + .1 N(0, 9 I)": (_two_scales, "above"),
    "Bernoulli(.01)": (lambda rng, shape: (rng.random(shape) < 0.01).astype(float), "above"),
    "Student, 5 degrees": (lambda rng, shape: rng.standard_t(5, size=shape), "power"),
    "Student, 3 degrees": (lambda rng, shape: rng.standard_t(3, size=shape), "power"),
}
TRUE = {
    "light": (Verdict.SUB_GAUSSIAN, Verdict.CANNOT_TELL),
    "above": (Verdict.ABOVE_GAUSSIAN, Verdict.CANNOT_TELL),
    "power": (Verdict.POWER, Verdict.ABOVE_GAUSSIAN, Verdict.CANNOT_TELL),
}


def run(samples: int = SAMPLES) -> dict[str, object]:
    """Table of verdicts, and how often one Laplace direction among d is detected at `tokens_needed(d)` tokens."""
    rows = []
    for place, (name, (draw, kind)) in enumerate(LAWS.items()):
        for dim in (1, 8, 64):
            for n in (1000, 10_000):
                rng = np.random.default_rng([place, dim, n])
                found = [ll.tails(draw(rng, (n, dim))).verdict for _ in range(samples)]  # type: ignore[union-attr]
                shares = {verdict.value: found.count(verdict) / samples for verdict in Verdict}
                wrong = 1 - sum(shares[verdict.value] for verdict in TRUE[kind])
                told = ", ".join(f"{share:.2f} {verdict}" for verdict, share in shares.items() if share)
                print(
                    f"{name:28} d = {dim:<3} n = {n:<6} {told}" + (f"   WRONG {wrong:.2f}" * (wrong > 1e-9)), flush=True
                )
                rows.append({"law": name, "dim": dim, "n": n, "samples": samples, "verdicts": shares, "wrong": wrong})
    return {"verdicts": rows, "power": [_power(dim, samples) for dim in (1, 2, 8, 32)]}


def _power(dim: int, samples: int) -> dict[str, object]:
    rng, n, found = np.random.default_rng(dim), tokens_needed(dim), []
    for _ in range(samples):
        x = rng.standard_normal((n, dim))
        x[:, 0] = rng.laplace(size=n) / np.sqrt(2)
        found.append(ll.tails(x @ np.linalg.qr(rng.standard_normal((dim, dim)))[0]).kurtosis > 4)  # type: ignore[union-attr]
    share = float(np.mean(found))
    noise = float(np.sqrt(share * (1 - share) / samples))
    print(f"one Laplace direction among d = {dim}, n = {n}: found in {share:.2f} ± {noise:.2f}", flush=True)
    return {"dim": dim, "n": n, "measured": share, "stderr": noise}
