"""The backward heat flow measured: layers of attention on a density, and one layer on n tokens.

The density side iterates the exact map (`theory/scaling/heat.py`) and compares each mode with e^{l(l+d−2)t}, t =
layers/β. The token side asks whether n tokens feel the drift at all: tokens drawn from 1 + ε cos θ attend to n others,
their displacements are regressed on the drift of the density, and what is left is the noise of finite n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.errors import Array, InputError
from limitlens.theory.prediction import Status
from limitlens.theory.scaling.control import AVERAGING_FROM, check_keys
from limitlens.theory.scaling.heat import (
    ZonalFlow,
    drift_to_noise,
    gaussian_flow,
    heat_growth,
    mode_growth,
    token_noise,
    visible_until,
)
from limitlens.theory.scaling.laws import uniform
from limitlens.theory.scaling.regimes import averaging


@dataclass(frozen=True)
class TokenDrift:
    """One layer on n tokens of the density 1 + ε cos θ, over independent sets of tokens.

    Attributes
    ----------
    slope, stderr : float
        Displacement measured over that predicted for the density: 1 when the flow is right.
    noise, noise_stderr : float
        Root mean square of the difference between the two, along the polar angle.
    predicted_noise : float
        That of the central limit theorem.
    drift : float
        Root mean square of the predicted displacement.
    """

    slope: float
    stderr: float
    noise: float
    noise_stderr: float
    predicted_noise: float
    drift: float


def token_drift(
    dim: int, beta: float, amplitude: float, n: int, rng: np.random.Generator, replicates: int = 64, queries: int = 32
) -> TokenDrift:
    """Let tokens of the density 1 + ε cos θ on S^{d−1} attend to n others of the same density.

    Queries that share their keys share most of the noise, so the standard errors come from the sets of keys.
    """
    check_keys(n)
    flow = ZonalFlow(dim, beta, 1)
    slopes, noises, drifts = np.empty((3, replicates))
    for replicate in range(replicates):
        keys, asked = (_tokens(dim, count, amplitude, rng) for count in (n, queries))
        moved = _polar_displacement(asked, _attend(asked, keys, beta))
        drift = flow.displacement(np.array([amplitude]), asked[:, 0])
        drifts[replicate] = drift @ drift / queries
        slopes[replicate] = moved @ drift / queries
        noises[replicate] = np.mean(np.square(moved - drift))
    noise = math.sqrt(noises.mean())
    slope = slopes.mean() / drifts.mean()
    root = math.sqrt(replicates)
    return TokenDrift(
        slope=float(slope),
        stderr=float((slopes - slope * drifts).std(ddof=1) / drifts.mean()) / root,
        noise=noise,
        noise_stderr=float(noises.std(ddof=1)) / (2 * noise * root),
        predicted_noise=token_noise(n, beta, dim),
        drift=math.sqrt(drifts.mean()),
    )


def heat_document(
    dim: int = 2,
    beta: float = 2000.0,
    layers: int = 400,
    amplitude: float = 0.5,
    degree: int = 6,
    n: int = 10_000,
    seed: int = 0,
) -> dict[str, Any]:
    """The density through its layers, and tokens through one: at β, and well inside where drift beats noise."""
    if not 0 < amplitude <= 1:
        raise InputError(f"amplitude is {amplitude:g}; expected a density 1 + amplitude · cos θ, so between 0 and 1")
    if layers < 1:
        raise InputError(f"layers is {layers}; expected at least 1")
    path = ZonalFlow(dim, beta, degree).layers([amplitude], layers)
    time = layers / beta
    rng = np.random.default_rng(seed)
    limit = visible_until(n, dim, amplitude)
    verified = Status.VERIFIED.value
    inputs = {
        "dim": dim,
        "beta": beta,
        "layers": layers,
        "amplitude": amplitude,
        "degree": degree,
        "n": n,
        "seed": seed,
    }
    return {
        "inputs": inputs,
        "time": time,
        "mode_1": {
            "predicted": amplitude * math.exp(heat_growth(1, dim) * time),
            "measured": float(path[-1, 0]),
            "stderr": 0.0,
            "status": verified,
        },
        "path": {"layer": np.arange(layers + 1), "modes": path},
        "growth_per_layer": [
            {
                "degree": mode,
                "predicted": math.exp(heat_growth(mode, dim) / beta),
                "exact": mode_growth(mode, beta, dim),
                "status": verified,
            }
            for mode in range(1, degree + 1)
        ],
        "gaussian_variance": {
            "predicted": max(0.0, 1 - 2 * time),
            "measured": float(gaussian_flow(np.eye(1), beta, layers)[-1, 0, 0]),
            "stderr": 0.0,
            "status": verified,
        },
        "visible_until_beta": {"predicted": limit, "status": verified},
        "tokens": [_tokens_document(dim, value, amplitude, n, rng) for value in (beta, limit / 8)],
    }


def _tokens_document(dim: int, beta: float, amplitude: float, n: int, rng: np.random.Generator) -> dict[str, Any]:
    found = token_drift(dim, beta, amplitude, n, rng)
    verified = Status.VERIFIED.value
    return {
        "beta": beta,
        "applies": averaging(n, beta, uniform(dim)).effective_sample_size >= AVERAGING_FROM,
        "drift_slope": {"predicted": 1.0, "measured": found.slope, "stderr": found.stderr, "status": verified},
        "noise": {
            "predicted": found.predicted_noise,
            "measured": found.noise,
            "stderr": found.noise_stderr,
            "status": verified,
        },
        "drift_to_noise": {
            "predicted": drift_to_noise(n, beta, dim, amplitude),
            "measured": found.drift / found.noise,
            "stderr": found.drift * found.noise_stderr / found.noise**2,
            "status": verified,
        },
    }


def _tokens(dim: int, count: int, amplitude: float, rng: np.random.Generator) -> Array:
    """Tokens (count, d) of the density 1 + ε x₁ on the sphere: flip x₁ with the right probability."""
    tokens = rng.standard_normal((count, dim))
    tokens /= np.sqrt(np.square(tokens).sum(axis=1, keepdims=True))
    # uniform points x and their mirror images are exchangeable: keep x with probability (1 + ε x₁)/2
    tokens[:, 0] *= np.where(rng.random(count) < (1 + amplitude * tokens[:, 0]) / 2, 1, -1)
    return tokens


def _polar_displacement(tokens: Array, output: Array) -> Array:
    """The angle from each token to its output along the meridian ∂x/∂θ: (tokens, d) twice to (tokens,)."""
    cosine, across = tokens[:, :1], tokens[:, 1:]
    sine = np.sqrt(np.square(across).sum(axis=1, keepdims=True))
    meridian = np.concatenate([-sine, cosine * across / sine], axis=1)
    angle: Array = np.arctan2((output * meridian).sum(axis=1), (output * tokens).sum(axis=1))
    return angle


def _attend(queries: Array, keys: Array, beta: float) -> Array:
    """softmax(β Q Kᵀ) K, (queries, d)."""
    weight = np.exp(beta * (queries @ keys.T - 1))
    output: Array = weight @ keys / weight.sum(axis=1, keepdims=True)
    return output
