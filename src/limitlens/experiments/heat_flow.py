"""The backward heat flow measured: layers of attention on a density, and one layer on n tokens.

The density side iterates the exact map (`theory/scaling/heat.py`) and compares each mode with e^{l(l+d−2)t}, t =
layers/β. The token side asks whether n tokens feel the drift at all: tokens drawn from 1 + ε cos θ attend to n others,
their displacements are regressed on the drift of the density, and what is left is the noise of finite n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.cost import check_cost
from limitlens.errors import Array, check_number
from limitlens.experiments.quantity import Quantity, verified
from limitlens.report.view import Block, Row, Table, View, line, points
from limitlens.report.words import read_words, short, worded_figure, worded_view
from limitlens.results import Result
from limitlens.theory.prediction import Status
from limitlens.theory.scaling import control, heat
from limitlens.theory.scaling.laws import uniform
from limitlens.theory.scaling.regimes import averaging

WORDS = read_words("experiments/scaling_words.json")["heat"]
A_TOKEN, A_LAYER = 5e-4, 2e-3  # seconds


@dataclass(frozen=True, eq=False)
class ModePath:
    """Amplitudes of the zonal modes after each layer."""

    layer: tuple[int, ...]
    modes: Array  # (layers + 1, degree)


@dataclass(frozen=True)
class ModeGrowth(Quantity):
    """Growth of a small mode per layer: by the heat equation, and exact."""

    degree: int = 1


@dataclass(frozen=True)
class TokenLayer:
    """One layer on n tokens at one β, over independent sets of tokens."""

    beta: float
    applies: bool  # enough keys share the mass for the central limit theorem behind the noise
    drift_slope: Quantity  # displacement over that predicted for the density: 1 when the flow is right
    noise: Quantity  # root mean square of the difference between the two, along the polar angle
    drift_to_noise: Quantity


@dataclass(frozen=True, eq=False, repr=False)
class HeatFlow(Result):
    """A density 1 + amplitude · cos θ on S^{dim−1} through layers of attention at β, and n tokens of it through one."""

    kind, file = "heat", "scaling"
    inputs: Mapping[str, Any]  # the arguments of `heat_flow`
    time: float  # t = layers/β
    mode_1: Quantity  # the first mode after the last layer
    path: ModePath
    growth_per_layer: tuple[ModeGrowth, ...]
    gaussian_variance: Quantity  # of N(0, 1) on the line after as many layers
    visible_until_beta: Quantity  # the β up to which the drift of one layer beats the noise of n tokens
    tokens: tuple[TokenLayer, ...]  # at β, and well inside where the drift beats the noise

    @property
    def table(self) -> pd.DataFrame:
        """One row per layer: the amplitude of every mode."""
        modes = {f"mode_{degree}": amplitudes for degree, amplitudes in enumerate(self.path.modes.T, 1)}
        return pd.DataFrame({"layer": self.path.layer, **modes})

    def view(self) -> View:
        """The first mode through the layers, and whether tokens feel it."""
        dim, n, beta, amplitude = (self.inputs[name] for name in ("dim", "n", "beta", "amplitude"))
        layer, first = np.array(self.path.layer), self.path.modes[:, 0]
        every = slice(None, None, max(1, len(first) // 30))
        heated = first[0] * np.exp(heat.heat_growth(1, dim) * layer / beta)
        betas, ratios = [row.beta for row in self.tokens], [row.drift_to_noise for row in self.tokens]
        fine = np.geomspace(min(betas) / 3, 3 * max(betas), 40).tolist()
        expected = [heat.drift_to_noise(n, value, dim, amplitude) for value in fine]
        found, bars = [row.measured for row in ratios], [row.stderr for row in ratios]
        flow = [
            line("backward heat equation", layer, heated, "orange"),
            points("attention", layer[every], first[every]),
        ]
        noise = [line("predicted", fine, expected, "grey"), points(f"{n:,} tokens", betas, found, stderr=bars)]
        growth = [(str(row.degree), f"{row.exact:.8f}", f"{row.predicted:.8f}") for row in self.growth_per_layer]
        tokens = [(row.beta, row.drift_slope.cell, row.noise.cell, row.drift_to_noise.cell) for row in self.tokens]
        blocks: list[Block] = [
            Row([worded_figure(WORDS["flow"], flow), worded_figure(WORDS["noise"], noise)]),
            Table("growth of a small mode per layer", WORDS["growth"], growth),
            Table(f"one layer on {n:,} tokens", WORDS["tokens"], tokens),
        ]
        visible = short(self.visible_until_beta.predicted, 4)
        known = {"sphere": dim - 1, "beta": short(beta), "amplitude": short(amplitude), "visible": visible}
        return worded_view(WORDS, blocks, of=self, **known)

    def __repr__(self) -> str:
        told = "S^{0}, {layers} layers at β = {beta:g}".format(self.inputs["dim"] - 1, **self.inputs)
        mode = self.mode_1
        return f"<HeatFlow: {told}: first mode {mode.measured:.4f}, backward heat {mode.predicted:.4f}>"


def heat_flow(
    dim: int = 2,
    beta: float = 2000.0,
    layers: int = 400,
    amplitude: float = 0.5,
    degree: int = 6,
    n: int = 10_000,
    seed: int = 0,
    yes: bool = False,
) -> HeatFlow:
    """The density through its layers, and tokens through one: at β, and well inside where drift beats noise."""
    check_number("amplitude", amplitude, "a density 1 + amplitude · cos θ, so 1e-9 to 1", low=1e-9, below=1 + 1e-9)
    check_number("layers", layers, "at least 1", low=1)
    check_cost("the flow", seconds=A_TOKEN * n + A_LAYER * layers, memory=8.0 * (dim + 64) * n + 64.0 * layers, yes=yes)
    modes = heat.ZonalFlow(dim, beta, degree).layers([amplitude], layers)
    rng, time, limit = np.random.default_rng(seed), layers / beta, heat.visible_until(n, dim, amplitude)
    growth = [
        ModeGrowth(predicted, Status.VERIFIED, exact=heat.mode_growth(mode, beta, dim), degree=mode)
        for mode in range(1, degree + 1)
        for predicted in [math.exp(heat.heat_growth(mode, dim) / beta)]
    ]
    about = {"dim": dim, "beta": beta, "layers": layers, "amplitude": amplitude, "degree": degree}
    line_variance = float(heat.gaussian_flow(np.eye(1), beta, layers)[-1, 0, 0])
    return HeatFlow(
        inputs={**about, "n": n, "seed": seed},
        time=time,
        mode_1=verified(
            amplitude * math.exp(heat.heat_growth(1, dim) * time), measured=float(modes[-1, 0]), stderr=0.0
        ),
        path=ModePath(tuple(range(layers + 1)), modes),
        growth_per_layer=tuple(growth),
        gaussian_variance=verified(max(0.0, 1 - 2 * time), measured=line_variance, stderr=0.0),
        visible_until_beta=verified(limit),
        tokens=tuple(token_layer(dim, value, amplitude, n, rng) for value in (beta, limit / 8)),
    )


def token_layer(
    dim: int, beta: float, amplitude: float, n: int, rng: np.random.Generator, replicates: int = 64, queries: int = 32
) -> TokenLayer:
    """Let tokens of the density 1 + ε cos θ on S^{d−1} attend to n others of the same density.

    Queries that share their keys share most of the noise, so the standard errors come from the sets of keys.
    """
    control.check_keys(n)
    flow = heat.ZonalFlow(dim, beta, 1)
    slopes, noises, drifts = np.empty((3, replicates))
    for replicate in range(replicates):
        keys, asked = (_tokens(dim, count, amplitude, rng) for count in (n, queries))
        score = beta * (asked @ keys.T)
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        moved = _polar_displacement(asked, weight @ keys / weight.sum(axis=1, keepdims=True))
        drift = flow.displacement(np.array([amplitude]), asked[:, 0])
        drifts[replicate] = drift @ drift / queries
        slopes[replicate] = moved @ drift / queries
        noises[replicate] = np.mean(np.square(moved - drift))
    root, slope = math.sqrt(replicates), float(slopes.mean() / drifts.mean())
    size, noise = math.sqrt(drifts.mean()), math.sqrt(noises.mean())
    slope_stderr = float((slopes - slope * drifts).std(ddof=1) / drifts.mean()) / root
    noise_stderr = float(noises.std(ddof=1)) / (2 * noise * root)
    ratio = heat.drift_to_noise(n, beta, dim, amplitude)
    return TokenLayer(
        beta,
        applies=bool(averaging(n, beta, uniform(dim)).effective_sample_size >= control.AVERAGING_FROM),
        drift_slope=verified(1.0, measured=slope, stderr=slope_stderr),
        noise=verified(heat.token_noise(n, beta, dim), measured=noise, stderr=noise_stderr),
        drift_to_noise=verified(ratio, measured=size / noise, stderr=size * noise_stderr / noise**2),
    )


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
    return np.asarray(np.arctan2((output * meridian).sum(axis=1), (output * tokens).sum(axis=1)))
