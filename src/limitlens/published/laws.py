"""Published experiments on random tokens: Gaussian, on a sphere, keys of a model, and argmax in place of softmax."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from limitlens.attention.head import Head
from limitlens.errors import Array, InputError
from limitlens.estimate import Estimate
from limitlens.experiments.hardmax import hardmax
from limitlens.experiments.reference import Reference
from limitlens.experiments.study import study
from limitlens.experiments.study_result import StudyResult
from limitlens.experiments.uniform import uniform_errors
from limitlens.measures import Gaussian, Measure, Sample, Sphere
from limitlens.models import LoadedModel
from limitlens.models.windows import open_windows
from limitlens.published.catalogue import Number
from limitlens.published.encoders import captured
from limitlens.published.protocol import MOMENTS, Projected, error_rows, moments, slopes
from limitlens.published.reproduction import Work
from limitlens.sampling.cells import Cells, parse_grid, parse_sizes
from limitlens.statistics.documents import over_documents
from limitlens.theory.bounds import uniform_supremum
from limitlens.theory.clt import asymptotic_covariance
from limitlens.theory.hardmax import hardmax_asymptotic, hardmax_finite
from limitlens.theory.rates import rate_drawn, rate_drawn_coupling, rate_proved, rate_rms_output, rate_sharp

TOLERANCE = 0.1  # C(R)/√n holds at a radius if the rate is as close to 1/2, but for two standard errors
FEWEST = 4  # radii of a fit with two parameters
FORMS: dict[str, Callable[[Array], Array]]  # ln C is linear in these functions of R
FORMS = {"polynomial": np.log, "exponential": np.positive, "square": np.square}


def gaussian_horizon(
    work: Work, *, dim: int, variance: float, scales: str, sizes: str, replicates: int, protocol: Mapping[str, Any]
) -> None:
    """Measure how fast outputs converge with n for Gaussian tokens, against the horizon (strength) of the scores."""
    Wq, Wk, Wv = (part / np.sqrt(dim) for part in _projections(dim, work.seed))
    heads = [Head.from_projections(root * Wq, root * Wk, Wv) for root in np.sqrt(parse_grid(scales, "scales"))]
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
        stderr = rate.stderr / rate.slope * rate.log_exponent
        work.numbers["log_exponent"] = Number(Estimate(rate.log_exponent, stderr))
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
    by_coupling, proved = (np.array([*map(law, coupling)]) for law in (rate_drawn_coupling, rate_proved))
    lines = {"horizon": np.array([rate_drawn(H) for H in horizon]), "coupling": by_coupling}
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
            drawn = np.polyfit(decades, by_coupling[same], 1, w=1 / bars[same])[0]
            work.numbers[f"{name}_change_{label}"] = Number(Estimate(fit[0], np.sqrt(covariance[0, 0])), drawn)
            work.draw(f"{name}, H = {value:g}", coupling[same], slope[same], bars[same])
        if name != "output":
            lowest = int(np.nanargmin(slope - proved))
            work.numbers[f"{name}_proved"] = Number(Estimate(slope[lowest], bars[lowest]), proved[lowest])
    fine = np.geomspace(coupling.min(), coupling.max(), 60)
    work.draw("1/(2(1+Ψ)), drawn", fine, map(rate_drawn_coupling, fine), line=True)


def uniform_ball(
    work: Work, *, dim: int, heads: Mapping[str, Sequence[int]], corpus: str, tokens: int, window: int, radii: str,
    scales: str, sizes: str, key_sizes: str, replicates: int, queries: int, fit_from: float,
) -> None:  # fmt: skip
    """Measure the constant of the largest error over queries |x| ≤ R, and of the moments for tokens of size R.

    Tokens are Gaussian, on a sphere, or the keys of a head of a model, and A = V = I. Their largest variance in any
    direction is 1, so R is the largest standard deviation of the scores of a query.
    """
    laws: dict[str, Measure] = {"gaussian": Gaussian(np.zeros(dim), 1.0), "sphere": Sphere(dim, dim**0.5)}
    laws |= {name: _keys(name, layer, head, corpus, tokens, window) for name, (layer, head) in heads.items()}
    balls, supports = (np.array(parse_grid(given, "the radii")) for given in (radii, scales))
    options: dict[str, Any] = {"replicates": replicates, "queries": queries, "seed": work.seed}
    for name, law in work.each(list(laws.items())):
        n, head, rows = parse_sizes(key_sizes if name in heads else sizes), Head(np.eye(law.dim)), []
        _ball(work, name, law, balls, Cells(n[-2:]), replicates, fit_from)
        for scale in supports:
            errors = work.whole(study(law.scaled(scale), head, n, **options)).errors
            rows.append([errors[moment].rows for moment in MOMENTS])
        each = np.array(rows).transpose(1, 2, 0, 3)  # (moments, replicates, radii, sizes)
        for moment, one in zip(MOMENTS, each, strict=True):
            found = over_documents(partial(_moment_growth, radii=supports, n=np.array(n)), one)
            work.record(f"{name}_{moment}_", ("polynomial", "exponential", "gap"), *found)


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
            work.numbers[f"{name}_{label}"] = Number(Estimate(found[place], bars[place]), rate_drawn(horizons[place]))
        stderr = np.nanmean(bars)  # all scales share their tokens, so their errors do not average out
        for label, line in (("drawn", rate_drawn), ("sharp", rate_sharp)):
            miss, missed = (np.nanmean(np.abs(found - [line(h) for h in at])) for at in (horizons, theirs))
            work.numbers[f"{name}_{label}_miss"] = Number(Estimate(miss, stderr), None, Estimate(missed, stderr))
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


def _ball(work: Work, name: str, law: Measure, radii: Array, cells: Cells, replicates: int, fit_from: float) -> None:
    """Measure and fit C(R) = √n E sup |error| / √tr Cov(X) over the radii at which the error falls like 1/√n."""
    reference = Reference(law, Head(np.eye(law.dim)), cells.sizes[-1], work.seed)
    work.warnings += [f"{name}: {one}" for one in reference.warnings]
    n, variance = np.array(cells.sizes), np.trace(law.covariance)
    size = np.sqrt(n / variance) / [reference.factor(one) for one in cells.sizes]
    rows = np.stack([uniform_errors(reference, cells, range(replicates), R)[0] * size for R in radii], 1)
    constants, bars = over_documents(lambda mean: mean[:, -1], rows)
    rates, rate_bars = over_documents(lambda mean: 0.5 - np.diff(np.log(mean))[:, 0] / np.log(n[1] / n[0]), rows)
    used = radii >= fit_from
    used[used] = np.logical_and.accumulate((np.abs(rates - 0.5) <= TOLERANCE + 2 * rate_bars)[used])
    work.draw(f"{name}, measured", radii, constants, bars)
    axis = np.linalg.eigh(law.covariance)[1][:, -1]
    both = np.stack((axis, -axis))[:, None] * radii[:, None]  # by symmetry the worst queries, but for keys
    worst = np.trace(asymptotic_covariance(law, both), axis1=-2, axis2=-1).max(0)
    predicted = np.maximum.accumulate(np.sqrt(worst / variance))
    if not isinstance(law, Sample):
        shown = predicted < 10 * constants.max()
        work.draw(f"{name}, worst query as n → ∞", radii[shown], predicted[shown], line=True)
    if used.sum() < FEWEST:
        work.warnings.append(f"{name}: C(R)/√n holds at fewer than {FEWEST} radii; give more tokens or smaller radii")
        return
    work.numbers[f"{name}_range"] = Number(Estimate(radii[used][-1]))

    def statistic(mean: Array) -> Array:
        last = mean[used, -1]
        slopes, misfits = np.transpose([_line(of, radii[used], last) for of in FORMS.values()])
        return np.array([*slopes, min(misfits[1:]) - misfits[0], last[-1] / predicted[used][-1]])

    work.record(f"{name}_", (*FORMS, "gap", "ratio"), *over_documents(statistic, rows))
    if isinstance(law, Gaussian):
        logs = [uniform_supremum(law.covariance, np.eye(law.dim), R).log_constant for R in radii[used]]
        bound = np.exp(logs) / np.sqrt(variance)
        work.draw(f"{name}, upper bound as n → ∞", radii[used], bound, line=True)
        last = np.array([constants[used][-1], bars[used][-1]]) / bound[-1]
        work.numbers[f"{name}_bound"] = Number(Estimate(*last), 1.0)


def _line(of: Callable[[Array], Array], radii: Array, constants: Array) -> tuple[float, float]:
    """Slope of the least-squares line of ln C over a function of R, and its root mean square residual."""
    slope, offset = np.polyfit(of(radii), np.log(constants), 1)
    return float(slope), float(np.sqrt(np.mean(np.square(np.log(constants) - slope * of(radii) - offset))))


def _moment_growth(mean: Array, radii: Array, n: Array) -> Array:
    """Growth with R of C' in error = C' n^−β, from errors (radii, sizes): degree, rate, difference of the misfits."""
    _, constants = np.polyfit(np.log(n), np.log(np.maximum(mean, 1e-300)).T, 1)
    (degree, polynomial), (rate, exponential), _ = (_line(of, radii, np.exp(constants)) for of in FORMS.values())
    return np.array([degree, rate, polynomial - exponential])


def _keys(model: str | LoadedModel, layer: int, head: int, corpus: str, tokens: int, window: int) -> Sample:
    """Keys of one key/value head over windows of a text, without the first of each, of largest variance 1."""
    loaded, windows = open_windows(model, corpus, tokens, window=window, special="auto", device="cpu")
    calls = (captured(loaded, windows, index) for index in range(windows.count))
    try:
        keys = torch.cat([layers[layer].key[0, head, 1:] for layers in calls]).double().numpy()
    except IndexError:
        raise InputError(f"{loaded.name} has no head {head} in layer {layer}; expected both counted from 0") from None
    return Sample(keys / np.sqrt(np.linalg.eigvalsh(np.cov(keys.T))[-1]))
