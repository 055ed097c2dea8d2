"""`heat_flow`: compare attention layers with the backward heat equation, on a density and on n tokens.

The equation says that the mode l of a density on S^{d−1} grows like e^{l(l+d−2)t}, t = layers/β.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.cost import check_cost
from limitlens.errors import Array, check_number, check_seed
from limitlens.estimate import Estimate
from limitlens.experiments.weight_samples import Quantity, check_count, verified
from limitlens.report.text import short
from limitlens.report.view import Axis, Block, Figure, Guide, Row, Section, Table, View, line, points
from limitlens.results import Result
from limitlens.theory.scaling import control, heat
from limitlens.theory.scaling.laws import uniform

TOKEN_SECONDS, LAYER_SECONDS = 5e-4, 2e-3  # estimated time for a token and for a layer


@dataclass(frozen=True)
class TokenLayer:
    """How n random tokens move in one attention layer: the drift of their density, and the noise of a finite n."""

    beta: float
    applies: bool  # whether enough keys share the mass for the central limit theorem behind the noise formula
    drift_slope: Quantity  # ratio of the tokens' displacement to that of the density; predicted to be 1
    noise: Quantity  # root mean square of the difference of the two displacements, along the polar angle
    drift_to_noise: Quantity


@dataclass(frozen=True, eq=False, repr=False)
class HeatFlow(Result):
    """Result of `heat_flow`: attention layers against the backward heat equation, for a density and for n tokens."""

    kind, file = "heat", "heat_flow"
    inputs: Mapping[str, Any]  # arguments of `heat_flow`
    time: float  # t = layers/β
    mode_1: Quantity  # amplitude of the first mode after the last layer
    modes: Array  # (layers + 1, degree): amplitudes of the density's zonal modes 1, 2, … after each layer
    growth_per_layer: tuple[Quantity, ...]  # of small modes 1, 2, …: by the heat equation, and by attention (`exact`)
    gaussian_variance: Quantity  # variance of N(0, 1) on the line after as many layers
    visible_until_beta: Quantity  # largest β at which the drift of one layer exceeds the noise of n tokens
    tokens: tuple[TokenLayer, ...]  # at β, and at an eighth of `visible_until_beta`

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per layer: the amplitude of every mode (spherical harmonic) of the density."""
        modes = {f"mode_{degree}": amplitudes for degree, amplitudes in enumerate(self.modes.T, 1)}
        return pd.DataFrame({"layer": range(len(self.modes)), **modes})

    def view(self) -> View:
        """HTML page: first mode of the density over the layers, and the ratio of drift to noise of tokens."""
        dim, layers, n, beta = (self.inputs[name] for name in ("dim", "layers", "n", "beta"))
        mode, variance = self.mode_1, self.gaussian_variance
        growth = [(str(k), f"{of.exact:.8f}", f"{of.predicted:.8f}") for k, of in enumerate(self.growth_per_layer, 1)]
        tokens = [
            (row.beta, row.drift_slope.measured, row.noise.measured, row.drift_to_noise.measured) for row in self.tokens
        ]
        blocks: list[Block] = [
            Row([self._flow_figure(), self._noise_figure()]),
            Table("growth of a small mode per layer", ["degree", "attention", "heat equation"], growth),
            Table(f"one layer on {n:,} tokens", ["β", "drift over predicted", "noise", "drift over noise"], tokens),
        ]
        lead = "Attention sharpens a density as heat, run backwards, would. Bars are 95%; the formulas are verified."
        verdict = (
            f"A density 1 + {short(self.inputs['amplitude'])} cos was sent through {layers} layers of attention at β = "
            f"{short(beta)}.",
            f"Its first mode grew to {mode.measured.value:.6f}; the backward heat equation at t = {self.time:g} "
            f"predicts {mode.predicted:.6f}. The variance of N(0, 1) on the line fell to "
            f"{variance.measured.value:.6f}; it predicts {variance.predicted:.6f}.",
            f"With {n:,} tokens the drift of a layer exceeds its noise only up to β near "
            f"{short(self.visible_until_beta.predicted, 4)}: use more tokens or a smaller β to see it.",
        )
        subtitle = f"{layers} layers · β = {short(beta)} · {n:,} tokens"
        sections = [Section("Density over the layers, and one layer on finitely many tokens", lead, blocks)]
        return View(f"Backward heat flow on S^{dim - 1}", subtitle, verdict, sections)

    def _flow_figure(self) -> Figure:
        layer, first = np.arange(len(self.modes)), self.modes[:, 0]
        heated = first[0] * np.exp(heat.heat_growth(1, self.inputs["dim"]) * layer / self.inputs["beta"])
        shown = slice(None, None, max(1, len(first) // 30))
        heat_line = line("backward heat equation", layer, heated, "orange")
        series = [heat_line, points("attention", layer[shown], first[shown])]
        return Figure("First mode over the layers", Axis("layer"), Axis("amplitude of the first mode"), series)

    def _noise_figure(self) -> Figure:
        dim, n, amplitude = (self.inputs[name] for name in ("dim", "n", "amplitude"))
        betas, ratios = [row.beta for row in self.tokens], [row.drift_to_noise for row in self.tokens]
        fine = np.geomspace(min(betas) / 3, 3 * max(betas), 40).tolist()
        expected = [heat.drift_to_noise(n, beta, dim, amplitude) for beta in fine]
        measured, stderr = zip(*((row.measured.value, row.measured.stderr) for row in ratios), strict=True)
        across, up = Axis("inverse temperature β", log=True), Axis("drift over noise of a token", log=True)
        series = [line("predicted", fine, expected, "grey"), points(f"{n:,} tokens", betas, measured, stderr=stderr)]
        guides = [Guide("drift = noise", y=1.0)]
        return Figure("Drift over noise of one layer on tokens", across, up, series, guides)


def heat_flow(
    dim: int = 2, beta: float = 2000.0, layers: int = 400, amplitude: float = 0.5, degree: int = 6, n: float = 10_000,
    seed: int = 0, yes: bool = False,
) -> HeatFlow:  # fmt: skip
    """Compare layers of attention with the backward heat equation, on a density and on n tokens.

    The density 1 + `amplitude` · cos θ on S^{dim−1} passes through `layers` attention layers at inverse temperature
    `beta`, and its first `degree` spherical harmonics (modes) are compared with the equation. One layer is also applied
    to `n` random tokens, at `beta` and at a β where their drift clearly exceeds the noise of a finite n.

    >>> flow = ll.heat_flow(layers=20, n=200)
    >>> round(flow.mode_1.measured.value, 4), round(flow.mode_1.predicted, 4)
    (0.505, 0.505)
    """
    check_seed(seed)
    check_number("amplitude", amplitude, "a density 1 + amplitude · cos θ, so 1e-9 to 1", low=1e-9, below=1 + 1e-9)
    check_number("layers", layers, "at least 1", low=1)
    n = check_count(n)
    flow = heat.ZonalFlow(dim, beta, degree)
    seconds = TOKEN_SECONDS * n + LAYER_SECONDS * layers
    check_cost("the flow", seconds=seconds, memory=8.0 * (dim + 64) * n + 64.0 * layers, yes=yes)
    modes = flow.layers([amplitude], layers)
    rng = np.random.default_rng(seed)
    time = layers / beta
    visible_until = heat.visible_until(n, dim, amplitude)
    growth = [
        verified(math.exp(heat.heat_growth(mode, dim) / beta), exact=heat.mode_growth(mode, beta, dim))
        for mode in range(1, degree + 1)
    ]
    first_mode = amplitude * math.exp(heat.heat_growth(1, dim) * time)
    line_variance = float(heat.gaussian_flow(np.eye(1), beta, layers)[-1, 0, 0])
    inputs = {"dim": dim, "beta": beta, "layers": layers, "amplitude": amplitude, "degree": degree}
    return HeatFlow(
        inputs={**inputs, "n": n, "seed": seed},
        time=time,
        mode_1=verified(first_mode, measured=Estimate(float(modes[-1, 0]), 0.0)),
        modes=modes,
        growth_per_layer=tuple(growth),
        gaussian_variance=verified(max(0.0, 1 - 2 * time), measured=Estimate(line_variance, 0.0)),
        visible_until_beta=verified(visible_until),
        tokens=tuple(token_layer(dim, value, amplitude, n, rng) for value in (beta, visible_until / 8)),
    )


def token_layer(
    dim: int, beta: float, amplitude: float, n: int, rng: np.random.Generator, replicates: int = 64, queries: int = 32
) -> TokenLayer:
    """Measure drift and noise of tokens of density 1 + amplitude · cos θ on S^{dim−1} in one attention layer."""
    control.check_keys(n)
    flow = heat.ZonalFlow(dim, beta, 1)
    slopes, noises, drifts = np.empty((3, replicates))
    for replicate in range(replicates):
        keys = _tokens(dim, n, amplitude, rng)
        query = _tokens(dim, queries, amplitude, rng)
        score = beta * (query @ keys.T)
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        moved = _polar_displacement(query, weight @ keys / weight.sum(axis=1, keepdims=True))
        drift = flow.displacement(np.array([amplitude]), query[:, 0])
        drifts[replicate] = drift @ drift / queries
        slopes[replicate] = moved @ drift / queries
        noises[replicate] = np.mean(np.square(moved - drift))
    root = math.sqrt(replicates)
    slope = float(slopes.mean() / drifts.mean())
    slope_stderr = float((slopes - slope * drifts).std(ddof=1) / drifts.mean()) / root
    drift_size = math.sqrt(drifts.mean())
    noise = math.sqrt(noises.mean())
    noise_stderr = float(noises.std(ddof=1)) / (2 * noise * root)
    ratio = heat.drift_to_noise(n, beta, dim, amplitude)
    return TokenLayer(
        beta,
        applies=bool(control.averaging(n, beta, uniform(dim)).effective_sample_size >= control.AVERAGING_FROM),
        drift_slope=verified(1.0, measured=Estimate(slope, slope_stderr)),
        noise=verified(heat.token_noise(n, beta, dim), measured=Estimate(noise, noise_stderr)),
        drift_to_noise=verified(ratio, measured=Estimate(drift_size / noise, drift_size * noise_stderr / noise**2)),
    )


def _tokens(dim: int, count: int, amplitude: float, rng: np.random.Generator) -> Array:
    """Sample tokens (count, dim) of density 1 + amplitude · x₁ on the unit sphere, by random flips of x₁."""
    tokens = rng.standard_normal((count, dim))
    tokens /= np.sqrt(np.square(tokens).sum(axis=1, keepdims=True))
    tokens[:, 0] *= np.where(rng.random(count) < (1 + amplitude * tokens[:, 0]) / 2, 1, -1)
    return tokens


def _polar_displacement(tokens: Array, output: Array) -> Array:
    """Angle (n,) by which attention outputs (n, d) turn tokens (n, d) away from the first axis, along the meridian."""
    cosine, across = tokens[:, :1], tokens[:, 1:]
    sine = np.sqrt(np.square(across).sum(axis=1, keepdims=True))
    meridian = np.concatenate([-sine, cosine * across / sine], axis=1)
    return np.asarray(np.arctan2((output * meridian).sum(axis=1), (output * tokens).sum(axis=1)))
