"""Published experiments on random tokens: Gaussian tokens, tokens on a sphere, and argmax in place of softmax."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from limitlens.attention.head import Head
from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.experiments.hardmax import hardmax
from limitlens.experiments.study import study
from limitlens.experiments.study_result import StudyResult
from limitlens.measures import Gaussian, Sphere
from limitlens.measures.base import Measure
from limitlens.published.catalogue import Number
from limitlens.published.protocol import MOMENTS, Projected, error_rows, moments, slopes
from limitlens.published.reproduction import Work
from limitlens.sampling.cells import parse_grid, parse_sizes
from limitlens.theory.hardmax import hardmax_asymptotic, hardmax_finite
from limitlens.theory.rates import rate_drawn, rate_drawn_coupling, rate_proved, rate_rms_output, rate_sharp


def gaussian_horizon(
    work: Work, *, dim: int, variance: float, scales: str, sizes: str, replicates: int, protocol: Mapping[str, Any]
) -> None:
    """Measure how fast outputs converge with n for Gaussian tokens, against the horizon (strength) of the scores."""
    Wq, Wk, Wv = (part / np.sqrt(dim) for part in _projections(dim, work.seed))
    factors = np.sqrt(parse_grid(scales, "scales"))
    heads = [Head.from_projections(factor * Wq, factor * Wk, Wv) for factor in factors]
    _sweep(work, Gaussian(np.zeros(dim), variance), heads, sizes, replicates=replicates)
    if work.as_published:
        _as_published(work, heads[0], variance, **protocol)


def sphere_d50(work: Work, *, dim: int, scales: str, sizes: str, replicates: int, queries: int) -> None:
    """Measure how fast outputs converge with n for tokens on a sphere, against the horizon (strength) of the scores."""
    Wq, Wk, Wv = _projections(dim, work.seed)
    heads = [Head.from_projections(scale * Wq, scale * Wk, Wv) for scale in parse_grid(scales, "scales")]
    _sweep(work, Sphere(dim), heads, sizes, replicates=replicates, queries=queries)


def hardmax_log(work: Work, *, sizes: str, replicates: int) -> None:
    """Measure the error of attention with argmax in place of softmax in d = 1, which falls like 1/√(log n)."""
    found = hardmax(sizes, horizons="0.5,1.5", replicates=replicates, seed=work.seed, progress=work.progress)
    curve = found.hardmax
    for label, place in (("first", 0), ("last", -1)):
        n = curve.n[place]
        error = Estimate(float(curve.measured[place]), float(curve.stderr[place]))
        work.numbers[f"hardmax_{label}"] = Number(error, hardmax_asymptotic(n))
        work.numbers[f"finite_{label}"] = Number(error, hardmax_finite(n))
    if (rate := curve.rate) is not None:
        work.numbers["evidence"] = Number(Estimate(-rate.evidence))
        exponent = Estimate(rate.log_exponent, rate.stderr / rate.slope * rate.log_exponent)
        work.numbers["log_exponent"] = Number(exponent)
    for one in found.curves:
        work.draw(one.label, one.n, one.measured, one.stderr)
    work.draw("ln 4/(2√(2 ln n)), proved", curve.n, map(hardmax_asymptotic, curve.n), line=True)
    work.draw("finite n, verified", curve.n, map(hardmax_finite, curve.n), line=True)


def coupling_or_horizon(
    work: Work, *, horizons: str, ratios: str, power: float, dim: int, sizes: str, replicates: int
) -> None:
    """Measure rates for anisotropic Gaussian tokens, for which the coupling Ψ and the squared horizon H² differ.

    Σ and A are diagonal, and so is B = Σ^{1/2} A Σ^{1/2}, with H its largest entry. Two cases of equal B, for each H
    and each of several Σ, differ in Ψ: the largest entry of B is at the largest variance (Ψ = H²) or at the smallest.
    Σ is diag(r, 1) for each r in `ratios`, with B = diag(0, H) or diag(H, 0) (Ψ = r H² or H²), or k^−power for
    k = 1 to `dim`, with H/k on the diagonal of B in falling or rising order (Ψ = H² or H² dim^power).
    """
    rank = np.arange(1, dim + 1.0)
    shapes = [(np.array([ratio, 1.0]), np.array([1.0, 0.0])) for ratio in parse_grid(ratios, "ratios")]
    shapes.append((rank**-power, 1 / rank))
    grid = parse_grid(horizons, "horizons")
    cases = [(H * entries[::order], variances) for H in grid for variances, entries in shapes for order in (1, -1)]
    found = []
    for B, variances in work.each(cases):
        law = Gaussian(np.zeros(len(B)), np.diag(variances))
        found.append(work.whole(study(law, Head(np.diag(B / variances)), sizes, replicates=replicates, seed=work.seed)))
    horizon, coupling = (np.array([curve.theory[name] for curve in found]) for name in ("horizon", "coupling"))
    lines = {
        "horizon": np.array([rate_drawn(H) for H in horizon]),
        "coupling": np.array([rate_drawn_coupling(one) for one in coupling]),
    }
    proved = np.array([rate_proved(one) for one in coupling])
    for name in (*MOMENTS, "output"):
        sharp = np.array([(rate_rms_output if name == "output" else rate_sharp)(H) for H in horizon])
        slope, bars = _rates(found, name)
        for label, line in (lines | {"sharp": sharp}).items():
            missed = np.nanmean(np.abs(slope - line))
            work.numbers[f"{name}_{label}_miss"] = Number(Estimate(missed, np.nanmean(bars)))
        for label, value in (("low", horizon.min()), ("high", horizon.max())):
            same = np.isclose(horizon, value) & np.isfinite(slope)
            decades = np.log10(coupling[same])
            fit, covariance = np.polyfit(decades, slope[same], 1, w=1 / bars[same], cov="unscaled")
            drawn = np.polyfit(decades, lines["coupling"][same], 1, w=1 / bars[same])[0]
            work.numbers[f"{name}_change_{label}"] = Number(Estimate(fit[0], np.sqrt(covariance[0, 0])), drawn)
            work.draw(f"{name}, H = {value:g}", coupling[same], slope[same], bars[same])
        if name != "output":
            lowest = int(np.nanargmin(slope - proved))
            work.numbers[f"{name}_proved"] = Number(Estimate(slope[lowest], bars[lowest]), proved[lowest])
    fine = np.geomspace(coupling.min(), coupling.max(), 60)
    work.draw("1/(2(1+Ψ)), drawn", fine, map(rate_drawn_coupling, fine), line=True)


def _projections(dim: int, seed: int) -> list[Array]:
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0x9B]))
    return [generator.standard_normal((dim, dim)) for _ in range(3)]


def _rates(curves: list[StudyResult], name: str) -> Array:
    """Fitted rates of the error `name` of studies, and their standard errors, (2, studies); NaN without a fit."""
    rates = [curve.rate(name) for curve in curves]
    return np.array([(rate.slope, rate.stderr) if rate else (np.nan, np.nan) for rate in rates]).T


def _sweep(work: Work, law: Measure, heads: list[Head], sizes: str, **options: Any) -> None:
    """Run a study for each head; record its rates, and their distance from the published and the sharp formula."""
    curves = [work.whole(study(law, head, sizes, seed=work.seed, **options)) for head in work.each(heads)]
    horizons = np.array([curve.theory["horizon"] for curve in curves])
    theirs = horizons * np.sqrt(heads[0].key_dim)  # the released code's horizon lacks the 1/√k of the scores
    work.numbers["horizon_high"] = Number(Estimate(horizons[-1]), None, Estimate(theirs[-1]))
    for name in MOMENTS:
        found, bars = _rates(curves, name)
        for label, place in (("low", 0), ("high", -1)):
            rate = Estimate(found[place], bars[place])
            work.numbers[f"{name}_{label}"] = Number(rate, rate_drawn(horizons[place]))
        stderr = np.nanmean(bars)  # all scales share their tokens, so their errors do not average out
        for label, line in (("drawn", rate_drawn), ("sharp", rate_sharp)):
            miss, missed = (np.nanmean(np.abs(found - [line(h) for h in at])) for at in (horizons, theirs))
            number = Number(Estimate(miss, stderr), None, Estimate(missed, stderr))
            work.numbers[f"{name}_{label}_miss"] = number
        work.draw(name, horizons, found, bars)
        if work.as_published:
            work.draw(f"{name}, horizon as published", theirs, found, bars)
    fine = np.geomspace(horizons[0], (theirs if work.as_published else horizons)[-1], 60)
    work.draw("1/(2(1+H²)), drawn", fine, map(rate_drawn, fine), line=True)
    work.draw("min(1/2, 1/(1+H²)), sharp", fine, map(rate_sharp, fine), line=True)


def _as_published(work: Work, head: Head, variance: float, sizes: str, replicates: int, reference: int) -> None:
    """Record rates against the exact limit and, like the released code, against one sampled from `reference` tokens."""
    generator = torch.Generator().manual_seed(work.seed)
    counts = parse_sizes(sizes)

    def draw(n: int) -> Projected:
        tokens = variance**0.5 * torch.randn(n, head.dim, generator=generator)
        return head.queries(tokens)[None], head.keys(tokens)[None], head.values(tokens)[None]

    slope = torch.from_numpy(variance * head.V @ head.A)
    exact = torch.zeros(head.value_dim, dtype=torch.float64), variance * slope @ slope.T
    both = [error_rows(draw, limit, counts, replicates) for limit in (exact, moments(draw(reference)))]
    for place, name in enumerate(MOMENTS):
        (right, _), (own, theirs) = (slopes(counts, rows[place]) for rows in both)
        work.numbers[f"{name}_sampled"] = Number(right, None, own)
        work.numbers[f"{name}_stderr"] = Number(Estimate(own.stderr), None, Estimate(theirs.stderr))
