"""Published experiments on attention at falling temperature: softmax weights of one query, and heat flow of tokens."""

import math

import numpy as np

from limitlens.estimate import Estimate
from limitlens.experiments.heat_flow import heat_flow
from limitlens.experiments.scaling import scaling_limits
from limitlens.experiments.weight_samples import Quantity, sample_ordered
from limitlens.published.catalogue import Number
from limitlens.published.reproduction import Work
from limitlens.sampling.cells import parse_grid
from limitlens.theory import KeyPoints, PoissonPoints, critical_beta, participation
from limitlens.theory.scaling.heat import heat_growth
from limitlens.theory.scaling.laws import uniform

RANKS = np.array([1, 2, 3, 4, 6, 8, 11, 16, 22, 32])


def critical_weights(work: Work, *, dims: list[int], n: int, replicates: int) -> None:
    """Measure the largest softmax weights at the temperature where θ, the effective number of keys, is 1."""
    rng = np.random.default_rng(work.seed)
    for dim in work.each(dims):
        law = uniform(dim)
        known = scaling_limits(law, n, 1.0, replicates=replicates, seed=work.seed)
        finite, poisson = KeyPoints(law, n, critical_beta(n, law)), PoissonPoints(1.0, law.a)
        found, limit = (sample_ordered(of, RANKS[-1], replicates, rng)[:, RANKS - 1] for of in (finite, poisson))
        work.draw(f"d = {dim}, n keys", RANKS, found.mean(0), found.std(0, ddof=1) / math.sqrt(replicates))
        work.draw(f"d = {dim}, limit", RANKS, limit.mean(0), line=True)
        work.numbers[f"participation_{dim}"] = _number(known.quantities["participation"])
        if dim == 3:
            work.numbers["inverse_top_3"] = _number(known.quantities["inverse_top_weight"])


def three_regimes(work: Work, *, dim: int, n: int, thetas: list[float], replicates: int) -> None:
    """Measure Σw² of the softmax weights as θ, the effective number of keys, falls from averaging to collapse."""
    law = uniform(dim)
    rows = [scaling_limits(law, n, theta, replicates=replicates, seed=work.seed) for theta in work.each(thetas)]
    shared = [row.quantities["participation"] for row in rows]
    work.draw(f"{n:,} keys", thetas, [one.measured.value for one in shared], [one.measured.stderr for one in shared])
    fine = np.geomspace(thetas[-1], thetas[0], 50)
    work.draw("scaling limit", fine, [participation(PoissonPoints(theta, law.a)) for theta in fine], line=True)
    work.draw("many keys share: 1/(2^a θ)", fine[fine > 1], 1 / (2**law.a * fine[fine > 1]), line=True)
    growth = math.log(critical_beta(1e12, law) / critical_beta(1e9, law)) / math.log(1e3)
    leak = rows[-1].collapse.get("one_minus_top_weight")
    work.numbers["effective_keys"] = _number(rows[0].averaging["effective_sample_size"])
    work.numbers["critical"] = _number(shared[thetas.index(1)])
    if leak is not None:
        work.numbers["leak"] = _number(leak)
    work.numbers["growth"] = Number(Estimate(growth), 2 / (dim - 1))


def backward_heat(work: Work, *, dim: int, beta: float, layers: int, amplitude: float, n: int) -> None:
    """Compare a density after many attention layers, and n tokens after one, with the backward heat equation."""
    flow = heat_flow(dim, beta, layers, amplitude, n=n, seed=work.seed)
    layer, first = np.arange(len(flow.modes)), flow.modes[:, 0]
    every = slice(None, None, max(1, layers // 25))
    work.draw("attention, first mode", layer[every], first[every])
    work.draw("backward heat", layer, amplitude * np.exp(heat_growth(1, dim) * layer / beta), line=True)
    found = {"mode": flow.mode_1, "variance": flow.gaussian_variance}
    found |= {"drift": flow.tokens[1].drift_slope, "noise": flow.tokens[1].noise}
    work.numbers |= {key: _number(one) for key, one in found.items()}


def critical_log_n(
    work: Work, *, correlations: list[float], sizes: list[int], dim: int, gammas: str, queries: int
) -> None:
    """Find the γ at which a token gives itself half of the softmax weight at inverse temperature β = γ log n.

    The tokens have correlations close to ρ. If they are exactly ρ, the weight is 1/(1 + (n−1) n^{−γ(1−ρ)}), one half at
    γ = log(n−1)/log n · 1/(1−ρ).
    """
    rng = np.random.default_rng(work.seed)
    grid = np.array(parse_grid(gammas, "gammas"))  # γ (1 − ρ)
    found = np.empty((2, len(sizes), len(correlations)))
    for place in work.each(list(np.ndindex(found.shape[1:]))):
        n, rho = sizes[place[0]], correlations[place[1]]
        across = rng.standard_normal((n, dim))
        across /= np.linalg.norm(across, axis=1, keepdims=True)
        scores = math.log(n) / (1 - rho) * (rho + (1 - rho) * (across[:queries] @ across.T))
        scores -= np.diagonal(scores)[:, None]
        weights = np.stack([1 / np.exp(gamma * scores).sum(1) for gamma in grid])
        halfway = np.array([np.interp(0.5, row, grid) for row in weights.T])
        found[:, *place] = halfway.mean(), halfway.std(ddof=1) / math.sqrt(len(halfway))
    left = 1 - np.array(correlations)
    for (gamma, stderr), n in zip(np.moveaxis(found, 1, 0), sizes, strict=True):
        work.draw(f"n = {n:,}", correlations, gamma / left, stderr / left)
    work.draw("1/(1−ρ)", fine := np.linspace(0, max(correlations), 60), 1 / (1 - fine), line=True)
    last = {f"transition_{rho:g}": found[:, -1, place] for place, rho in enumerate(correlations)}
    work.numbers |= {key: Number(Estimate(*one)) for key, one in {**last, "transition_few": found[:, 0, 0]}.items()}


def _number(found: Quantity) -> Number:
    return Number(found.measured if found.measured.stderr > 0 else Estimate(found.measured.value), found.predicted)
