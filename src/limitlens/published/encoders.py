"""Published experiments on the attention heads of a text encoder such as BERT."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from scipy import stats

from limitlens.errors import Array, InputError
from limitlens.estimate import UNKNOWN, Estimate
from limitlens.experiments.hardmax import softmax_errors
from limitlens.interventions.downstream import downstream as classify
from limitlens.models import Captured, LoadedModel, Windows, capture, projector
from limitlens.models.windows import open_windows
from limitlens.probing.overview import summary
from limitlens.probing.probe import probe
from limitlens.probing.result import ProbeRun
from limitlens.published.catalogue import Number
from limitlens.published.protocol import MOMENTS, Projected, error_rows, moments, slopes
from limitlens.published.reproduction import Work
from limitlens.sampling.cells import parse_grid, parse_sizes
from limitlens.statistics.documents import paired_mean
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.theory.rates import rate_drawn, rate_sharp

CHANCE = 0.0228  # probability of a normal number beyond two standard errors on one side
MAX_RATE_STDERR = 0.1  # a rate with a larger standard error is dropped


def bert_layers(
    work: Work, *, model: str | LoadedModel, corpus: str, tokens: int, protocol: Mapping[str, Any], **options: Any
) -> None:  # fmt: skip
    """Measure how fast mean and covariance of each head's outputs converge, against its horizon (score strength)."""
    loaded, windows = _open(model, corpus, tokens, options["window"])
    options |= {"seed": work.seed, "progress": work.progress, "checkpoint": work.checkpoint}
    run = work.whole(probe(loaded, corpus, windows.tokens, **options), part=True)
    horizons = np.array([head.horizon for head in run.records])
    layers = _as_published(work, loaded, windows, **protocol) if work.as_published else None
    work.numbers["tokens"] = Number(Estimate(run.tokens))
    work.details += _head_and_layer_rows(run)
    whole = [row for row in work.details if row["head"] is None]
    longest = np.array([row["horizon"] for row in whole])
    for place, name in enumerate(MOMENTS, 1):
        found, bars = _rates([head.moment_curves.get(name) for head in run.records])
        known = np.isfinite(found)
        drawn = np.array([rate_drawn(value) for value in horizons])
        theirs = UNKNOWN if layers is None else _rank(layers[0], layers[place])
        slow = UNKNOWN
        if known.any():
            slow = Estimate((found + 2 * bars < drawn)[known].mean(), np.sqrt(CHANCE * (1 - CHANCE) / known.sum()))
        work.numbers[f"{name}_known"] = Number(Estimate(known.sum()))
        work.numbers[f"{name}_rank"] = Number(_rank(horizons[known], found[known]), None, theirs)
        work.numbers[f"{name}_bound"] = Number(slow, CHANCE)
        by_layer = np.array([[row[f"rate_{name}"], row[f"rate_{name}_stderr"]] for row in whole], float).T
        clear = by_layer[1] < MAX_RATE_STDERR
        work.numbers[f"{name}_rank_layers"] = Number(_rank(longest[clear], by_layer[0, clear]))
        for label, line in (("drawn", drawn), ("sharp", [rate_sharp(value) for value in horizons]), ("half", 0.5)):
            miss = np.abs(found - line)[known]
            work.numbers[f"{name}_{label}_miss"] = Number(paired_mean(miss) if len(miss) > 1 else UNKNOWN)
        work.draw(f"{name}, each head", horizons[known], found[known], bars[known])
        work.draw(f"{name}, each layer", longest[clear], *by_layer[:, clear])
        if layers is not None:
            work.draw(f"{name}, each layer as published", layers[0], layers[place])
    argmax = summary(run.records)["hardmax"] or {"laws": {}}
    for law in ("power", "log", "undecided"):
        work.numbers[f"hardmax_{law}"] = Number(Estimate(argmax["laws"].get(law, 0)))
        if (decides := argmax.get(f"decides_if_{law}")) is not None:
            work.numbers[f"hardmax_decides_{law}"] = Number(Estimate(decides["median"]))
    if layers is not None:
        work.numbers["horizon"] = Number(Estimate(np.median(longest)), None, Estimate(np.median(layers[0])))
        work.numbers["half_shift"] = Number(Estimate(0.0), None, Estimate(np.abs(layers[3]).mean()))
        work.numbers["slope_stderr"] = Number(Estimate(layers[4].mean()), None, Estimate(layers[5].mean()))
    fine = np.geomspace(horizons.min(), horizons.max() if layers is None else layers[0].max(), 60)
    work.draw("1/(2(1+H²)), drawn", fine, map(rate_drawn, fine), line=True)


def _head_and_layer_rows(run: ProbeRun) -> list[dict[str, Any]]:
    """Geometry and rates of every head of a run, and of every layer (`head` None), as rows of a table.

    A layer's outputs are those of its heads side by side, so its squared error is the sum of theirs: of the mean
    exactly, of the covariance for the blocks within heads. Its horizon and coupling are the largest of its heads.
    """
    rows: list[dict[str, Any]] = []
    geometry = ("horizon", "horizon_one_sided", "coupling")
    for layer, group in groupby(run.records, lambda head: head.layer):
        heads = list(group)
        outputs = run.states[f"layer{layer}.reference.output"].double()  # (heads, queries, v)
        centred = outputs - outputs.mean(1, keepdim=True)
        spread = torch.linalg.matrix_norm(centred.mT @ centred / centred.shape[1])
        scales = {"mean": outputs.mean(1).norm(dim=-1), "covariance": spread}
        parts = [({name: getattr(head, name) for name in geometry}, head.moment_curves, head.head) for head in heads]
        largest = {name: max((own[name] or 0.0 for own, *_ in parts), default=0.0) for name in geometry}
        curves = {}
        for name, scale in scales.items():
            each = zip((scale**2 / (scale**2).sum()).tolist(), heads, strict=True)
            summed = sum(share * head.moment_curves[name].error_moments for share, head in each)
            curves[name] = replace(heads[0].moment_curves[name], error_moments=np.asarray(summed))
        for own, found, head in (*parts, (largest, curves, None)):
            row = {"layer": layer, "head": head, **own}
            for name in MOMENTS:
                rate = found[name].rate if name in found else None
                low, high = (None, None) if rate is None else rate.interval
                row |= {f"rate_{name}": rate and rate.slope, f"rate_{name}_stderr": rate and rate.stderr}
                row |= {f"rate_{name}_low": low, f"rate_{name}_high": high}
            rows.append(row)
    return rows


def window_random(
    work: Work, *, model: str | LoadedModel, corpus: str, window: int, windows: int, halves: str, random: int,
    documents: int, draws: int,
) -> None:  # fmt: skip
    """Measure the errors of attention over a window of text plus random tokens, and over random tokens alone.

    The window has the 2h + 1 tokens around the middle of a text, h in `halves`; `random` tokens are added. Errors are
    those of the outputs' mean and covariance, relative to attention over the whole text, averaged over `draws` draws.
    """
    length = window * windows
    loaded, read = _open(model, corpus, documents * length, window, least=3 * windows)
    generator = torch.Generator().manual_seed(work.seed)
    centre = length // 2 - window // 2  # the middle of one window
    sizes = [2 * half + 1 + random for half in parse_sizes(halves)]
    rows = np.zeros((read.count // windows, 2, 2, len(sizes)))  # texts, key choices (window, random), moments, sizes
    for text in work.each(range(len(rows))):
        calls = [captured(loaded, read, text * windows + part) for part in range(windows)]
        if calls[0][0].bias is not None:
            given = f"{loaded.name} adds a relative position bias to its scores, which keys of other windows lack"
            raise InputError(f"{given}; expected another encoder, such as minilm")
        layers = [zip(*map(_projected, layer), strict=True) for layer in zip(*calls, strict=True)]
        for parts in [tuple(torch.cat(one, 1) for one in layer) for layer in layers]:
            limit = moments(parts)
            for way, reach in enumerate((1, 0)):

                def draw(n: int, parts: Projected = parts, reach: int = reach) -> Projected:
                    order = torch.randperm(length, generator=generator)
                    near = (order - centre).abs() <= reach * (n - 1 - random) // 2 - (1 - reach)
                    chosen = torch.cat([order[near], order[~near]])[:n]
                    return tuple(part[:, chosen] for part in parts)

                norms = np.array([float(part.norm()) for part in limit])
                rows[text, way] += error_rows(draw, limit, sizes, draws).mean(1) / norms[:, None] / len(layers)
    for way, legend in enumerate((f"window + {random} random", "random alone")):
        for place, name in enumerate(MOMENTS):
            found = rows[:, way, place]
            first = Estimate(-np.polyfit(np.log(sizes), np.log(found[0]), 1)[0])  # the released code reads one text
            work.numbers[f"{('window', 'random')[way]}_{name}"] = Number(slopes(sizes, found)[0], None, first)
            work.draw(f"{name}, {legend}", sizes, found.mean(0), found.std(0, ddof=1) / np.sqrt(len(found)))
    work.numbers["excess"] = Number(paired_mean(rows[:, 0, 0, -1] / rows[:, 1, 0, -1]))


def horizon_ablation(
    work: Work, *, law_factors: str, law_sizes: str, law_replicates: int, factors: str, model: str | LoadedModel,
    corpus: str, tokens: int, **options: Any,
) -> None:  # fmt: skip
    """Measure convergence rates with scores multiplied by factors α, for scalar Gaussian tokens and for real heads."""
    fine = np.array(parse_grid(law_factors, "law_factors"))
    lines = [softmax_errors(factor, parse_sizes(law_sizes), law_replicates, work.seed) for factor in fine]
    _follow(work, "law_mean", "Gaussian tokens, mean", fine, np.transpose(_rates(lines)), rate_sharp(fine[-1]))
    loaded, windows = _open(model, corpus, tokens, None)
    grid, medians, predicted = np.array(parse_grid(factors, "factors")), [], []
    for factor in work.each(grid.tolist()):
        run = work.whole(probe(loaded, corpus, windows.tokens, score_scale=factor, seed=work.seed, **options))
        predicted.append(np.median([head.predicted_rates["rate_rms_output"] for head in run.records]))
        means = [head.moment_curves.get("mean") for head in run.records]
        outputs = [head.curve_without_sink for head in run.records]
        each = [found[np.isfinite(found)] for found in (_rates(curves)[0] for curves in (means, outputs))]
        medians.append([(np.median(one), 1.2533 * one.std() / np.sqrt(len(one))) for one in each])
    for place, name in enumerate(("mean", "output")):
        _follow(work, f"heads_{name}", f"real heads, {name}", grid, np.array(medians)[:, place])
    smooth = np.geomspace(fine[0], fine[-1], 60)
    work.draw("Gaussian tokens, min(1/2, 1/(1+α²))", smooth**2, map(rate_sharp, smooth), line=True)
    work.draw("real heads, output predicted from αH", grid**2, predicted, line=True)


def downstream(
    work: Work, *, model: str | LoadedModel, corpus: str | None, keys: str, test: int, train: int, window: int
) -> None:  # fmt: skip
    """Measure a classifier's accuracy, and its agreement with attention to all keys, against the number of keys."""
    if corpus is None:
        raise InputError("'downstream' was given no labelled documents; expected some, so pass corpus='reviews'")
    options: dict[str, Any] = {"test": test, "train": train, "window": window, "seed": work.seed}
    found = work.whole(classify(model, corpus, keys, progress=work.progress, **options))
    groups = [rows for _, rows in found.table.groupby("documents", sort=False)]  # all documents, thirds by horizon
    for rows in groups:
        work.draw(rows["documents"].iloc[0], rows["keys"], rows["agreement"], rows["agreement_stderr"])
    few, many, low, high = (groups[which].iloc[place] for which, place in ((0, 0), (0, -1), (1, 0), (-1, 0)))
    gap_stderr = np.hypot(low["agreement_stderr"], high["agreement_stderr"])
    fits = []
    for rows in (groups[1], groups[-1]):
        error, bars = (rows[name].to_numpy() for name in ("margin_error", "margin_error_stderr"))
        fit, cov = np.polyfit(np.log(rows["keys"]), np.log(error), 1, w=error / bars, cov="unscaled")
        fits.append((-fit[0], cov[0, 0]))
    (low_rate, low_variance), (high_rate, high_variance) = fits
    numbers = {
        "accuracy_whole": paired_mean(found.outcomes[:, 0, 4]),
        "accuracy_few": Estimate(few["accuracy"], few["accuracy_stderr"]),
        "agreement_few": Estimate(few["agreement"], few["agreement_stderr"]),
        "agreement_many": Estimate(many["agreement"], many["agreement_stderr"]),
        "agreement_gap": Estimate(high["agreement"] - low["agreement"], gap_stderr),
        "rate_gap": Estimate(high_rate - low_rate, np.sqrt(low_variance + high_variance)),
    }
    work.numbers |= {key: Number(value) for key, value in numbers.items()}


def _follow(work: Work, key: str, label: str, factors: Array, found: Array, published: float | None = None) -> None:
    """Plot rates β against score factors α; store the last β, and p fitted to 1/β − 1 ∝ α^{2p} (in theory 1)."""
    slope, bars = found.T  # rates and standard errors at the factors α
    p = UNKNOWN
    work.draw(label, factors**2, slope, bars)
    use = (slope < 0.45) & (slope > 3 * bars)
    if use.sum() >= 3:
        weight = slope * (1 - slope) / bars
        x, y = np.log(factors[use] ** 2), np.log(1 / slope[use] - 1)
        fit, covariance = np.polyfit(x, y, 1, w=weight[use], cov=True)  # standard errors from the residuals
        p = Estimate(fit[0], np.sqrt(covariance[0, 0]))
    work.numbers |= {f"{key}_exponent": Number(p), f"{key}_last": Number(Estimate(slope[-1], bars[-1]), published)}


def _open(
    model: str | LoadedModel, corpus: str, tokens: int, window: int | None, least: int = 8
) -> tuple[LoadedModel, Windows]:  # fmt: skip
    """Load the model and cut up to `tokens` tokens of the corpus into windows; an error if fewer than `least`."""
    loaded, found = open_windows(model, corpus, tokens, window=window, special="auto", device="auto", fewer=True)
    if found.count < least:
        given = f"the corpus {corpus!r} holds {found.count} windows of {found.length} tokens"
        raise InputError(f"{given}; expected at least {least}, so give more text")
    return loaded, found


def _rates(curves: Sequence[ErrorCurve | None]) -> Array:
    """Fitted rates of error curves and their standard errors, (2, curves); NaN without a fit or for a large error."""
    rates = [curve.rate if curve is not None else None for curve in curves]
    found = [(rate.slope, rate.stderr) if rate is not None else (np.nan, np.nan) for rate in rates]
    return np.where(np.array(found)[:, 1] < MAX_RATE_STDERR, np.transpose(found), np.nan)


def _rank(a: Array, b: Array) -> Estimate:
    """Spearman's rank correlation of `a` and `b`, with its standard error (Fisher's transform), of 3 pairs or more."""
    if len(a) < 3:
        return UNKNOWN
    found = float(stats.spearmanr(a, b).statistic)
    return Estimate(found, (1 - found**2) * 1.03 / np.sqrt(max(len(a) - 3, 1)))


def captured(loaded: LoadedModel, windows: Windows, index: int) -> list[Captured]:
    """Input of every attention layer of the model for one window of text."""
    found: list[Captured] = []
    with torch.no_grad(), capture(loaded.model, found.append, hidden=True) as run_until_last_attention:
        run_until_last_attention(torch.as_tensor(windows[index], dtype=torch.long)[None])
    return found


def _projected(call: Captured) -> Projected:
    """Queries times the score scale, keys and values of one captured attention call, each (heads, n, k).

    A relative position bias is left out: samples are of tokens without positions.
    """
    groups = call.query.shape[1] // call.key.shape[1]
    return call.scale * call.query[0], *(part[0].repeat_interleave(groups, 0) for part in (call.key, call.value))


def _as_published(work: Work, loaded: LoadedModel, windows: Windows, sizes: str, replicates: int) -> Array:
    """Measure every layer over one window of text by the protocol of the paper's released code: array (6, layers).

    Rows 0 to 2 are the horizon (score strength) without 1/√k, and the rates of the outputs' mean and covariance in
    float16. Row 3 is the relative change of the mean's error by float16. Rows 4 and 5 are the standard error of the
    mean's rate, by bootstrap and by the released fit.
    """
    generator = torch.Generator().manual_seed(work.seed)
    counts = parse_sizes(sizes)
    rows = []
    for layer, call in enumerate(captured(loaded, windows, 0)):
        weights = projector(loaded.model)(layer)[0]
        parts = _projected(call)
        assert weights is not None
        assert call.hidden is not None
        left = torch.linalg.cholesky(torch.cov(call.hidden[0].double().T) + 1e-6 * torch.eye(call.hidden.shape[-1]))
        horizon = float(torch.linalg.matrix_norm(left.T @ weights.key.double().T @ weights.query.double() @ left, 2))

        def draw(n: int, parts: Projected = parts) -> Projected:
            chosen = torch.randint(parts[0].shape[1], (n,), generator=generator)
            return tuple(part[:, chosen] for part in parts)

        errors = error_rows(draw, moments(parts, half=True), counts, replicates, half=True)
        sample = draw(counts[-1])
        right, low = (float((moments(sample, half)[0] - moments(parts)[0]).norm()) for half in (False, True))
        (mean, theirs), (_, covariance) = (slopes(counts, part) for part in errors)
        rows.append((horizon, theirs.value, covariance.value, low / right - 1, mean.stderr, theirs.stderr))
    return np.array(rows).T
