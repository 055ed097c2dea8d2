"""`hardmax`: error of attention with softmax replaced by argmax, measured and predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from scipy.special import ndtri

from limitlens.arrays import pd, torch
from limitlens.attention.head import Head, as_head, designed_head
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.estimate import Estimate
from limitlens.measures import Gaussian, Measure, TokenLaw, as_measure
from limitlens.measures.named import named_measure
from limitlens.report.text import plural, short
from limitlens.report.view import SHADES, Axis, Block, Dash, Figure, Section, Table, View, frame_table, line, points
from limitlens.results import Result
from limitlens.sampling.cells import Cells, parse_grid, parse_sizes
from limitlens.sampling.checkpoint import Checkpoint, identity
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.fit import Rate
from limitlens.theory import hardmax as laws
from limitlens.theory.prediction import Status
from limitlens.theory.spectrum import whitened
from limitlens.theory.statuses import CLAIMS
from limitlens.theory.token_influence import INFLUENCE_UP_TO, mean_error_1d

SAMPLES_PER_REPLICATE = 1000  # samples per replicate in d = 1, where a sample of any n costs two random numbers
SAMPLE_SECONDS, SAMPLE_BYTES = 1e-3, 1e5  # in d = 1
NUMBER_SECONDS, SCORE_SECONDS = 1e-6, 2e-9  # for each number of a token and each score, elsewhere
STEP = 0.01  # spacing of the grid of `grid_outputs`
MARGIN = 2.0  # the grid ends this far beyond √(2 ln n): n ≥ 100 tokens leave it with probability below 1e-4
STEEPEST = 20.0  # largest horizon: beyond it all weights of the farthest query may underflow, below e^{-700}
check_horizon = partial(
    check_number, "the horizon", expected=f"at most {STEEPEST:g}; larger ones are close to hardmax",
    low=-STEEPEST, below=np.nextafter(STEEPEST, np.inf),
)  # fmt: skip
DASHES: Mapping[str, Dash] = {"influence": "dashed", "finite": "dashed", "isotropic": "dashed", "asymptotic": "dotted"}
NO_FORMULA = (
    "No formula is known for these tokens and this score matrix; for Gaussian tokens of mean 0 there is one if all "
    "singular values of Σ^(1/2) A Σ^(1/2) are equal."
)
# Error that was measured. Standard normal tokens have the mean output 0 in expectation, so its size is its error.
ABOUT_ZERO = "E|mean output|"
SCATTER = "E|mean output − its expectation|"
FOLLOWS = {
    "log": "follows a logarithm",
    "power": "follows a power law",
    "undecided": "follows a power law or a logarithm (these sizes do not decide)",
}


@dataclass(frozen=True)
class PredictedCurve:
    """Predicted errors (sizes,), and whether the formula is proved, verified or heuristic."""

    value: Array
    status: Status


@dataclass(frozen=True, eq=False)
class HardmaxCurve:
    """Measured error of the mean output over all queries, against n, with predictions where a formula is known."""

    label: str
    n: tuple[int, ...]
    measured: Array  # (sizes,)
    stderr: Array
    predicted: Mapping[str, PredictedCurve]
    rate: Rate | None  # None where no law could be fitted
    replicates: int

    @classmethod
    def of(cls, label: str, errors: ErrorCurve, **predicted: PredictedCurve) -> Self:
        """Curve from measured errors, with predictions by name."""
        return cls(label, errors.sizes, errors.error, errors.stderr, predicted, errors.rate, errors.replicates)


@dataclass(frozen=True, eq=False, repr=False)
class Hardmax(Result):
    """Result of `hardmax`: error of attention with argmax against n, and with softmax at several score strengths."""

    kind, file = "hardmax", "hardmax"
    # measure, dim, replicates, seed, error (what was measured, in words), matrix (how the score matrix A was chosen), A
    inputs: Mapping[str, Any]
    hardmax: HardmaxCurve
    softmax: tuple[HardmaxCurve, ...]

    @property
    def curves(self) -> tuple[HardmaxCurve, ...]:
        """All error curves over n: softmax at each score strength (horizon), then argmax."""
        return (*self.softmax, self.hardmax)

    def document(self) -> dict[str, Any]:
        """JSON document of the inputs, the error curves and their fitted rates."""
        document = super().document()
        for curve, found in zip(self.curves, (*document["softmax"], document["hardmax"]), strict=True):
            found["rate"] = curve.rate and curve.rate.document()
        return document

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per curve and size n: measured error, standard error and predictions."""
        parts = []
        for curve in self.curves:
            measured = {"label": curve.label, "n": curve.n, "measured": curve.measured, "stderr": curve.stderr}
            parts.append(pd.DataFrame(measured | {name: line.value for name, line in curve.predicted.items()}))
        return pd.concat(parts, ignore_index=True)

    def view(self) -> View:
        """HTML page: errors with softmax and argmax against n, and whether each follows a power law or a logarithm."""
        hard, rate, measure, error = self.hardmax, self.hardmax.rate, self.inputs["measure"], self._error
        first, last = f"{hard.n[0]:,}", f"{hard.n[-1]:,}"
        fitted = [
            (curve.label, Estimate(fit.slope, fit.stderr), fit.log_exponent, f"{fit.law} ({fit.evidence:+.1f})")
            for curve in self.curves
            if (fit := curve.rate) is not None
        ]
        columns = ["curve", "rate of the power law", "exponent of the logarithm", "law (evidence for a power)"]
        compared = f"; softmax at {plural(len(self.softmax), 'horizon')} is the comparison" if self.softmax else ""
        follows = "follows no law that could be fitted" if rate is None else FOLLOWS[rate.law]
        lead = f"{error} against n. A straight line is a power law; hardmax bends into a logarithm."
        lead += " Broken lines are predicted."
        unknown = "" if any(curve.predicted for curve in self.curves) else f" {NO_FORMULA}"
        blocks: list[Block] = [self._figure(), Table("laws", columns, fitted), frame_table(error, self.table)]
        verdict = (
            f"Softmax was replaced by argmax on {measure} tokens, with score matrix A = "
            f"{self.inputs.get('matrix', '1')}, and {error} measured for n from {first} to {last}{compared}.",
            f"With argmax the error {follows}: {short(hard.measured[0])} at n = {first} and still "
            f"{short(hard.measured[-1])} at n = {last}.{unknown}",
            "More tokens hardly improve a head that has become an argmax: lower its inverse temperature, or keep the "
            "tokens that win.",
        )
        title = f"Hardmax on {measure} tokens in dimension {self.inputs['dim']}"
        subtitle = f"n from {first} to {last} · {hard.replicates} replicates"
        return View(title, subtitle, verdict, [Section("From softmax to hardmax", lead, blocks)])

    @property
    def _error(self) -> str:
        return str(self.inputs.get("error", ABOUT_ZERO))  # runs saved by older versions do not name it

    def _figure(self) -> Figure:
        series = []
        for place, curve in enumerate(self.curves):
            colour = SHADES[place % len(SHADES)]
            name = curve.label if curve.rate is None else f"{curve.label} (law: {curve.rate.law})"
            series.append(points(name, curve.n, curve.measured, colour, curve.stderr, joined=True))
            for label, predicted in curve.predicted.items():
                name = f"{curve.label}: {label} ({predicted.status.value})"
                listed = curve is self.hardmax
                series.append(line(name, curve.n, predicted.value, colour, DASHES[label], listed=listed))
        across, up = Axis("number of tokens n", log=True), Axis(self._error, log=True)
        return Figure(f"{self._error} against n", across, up, series, height=400)


def hardmax(
    sizes: str | Sequence[int] = "100:1000000:9", *, measure: str | TokenLaw = "gaussian", dim: int = 1,
    head: Head | None = None, horizons: str | Sequence[float] = "0.5", replicates: int = 400, queries: int = 2048,
    seed: int = 0, yes: bool = False, progress: Progress | None = None, checkpoint: Checkpoint | None = None,
) -> Hardmax:  # fmt: skip
    """Measure the error of attention with argmax in place of softmax: does it fall like a power of n or a logarithm?

    The error is that of the mean output over n tokens, n in `sizes` ("lo:hi:k", "a,b,c" or a sequence). For "gaussian"
    tokens and `dim` 1 a formula is known, and softmax with scores H·x·y, H in `horizons`, is measured too. Others are
    given by a name and `dim`, or as a `Measure`, and the scores by a `head`: without one, the score matrix is a random
    rotation of the whitened tokens. They are measured with `queries` queries per sample, the error is the scatter of
    the mean output about its expectation, and a `checkpoint` saves finished replicates. `progress` gets (done, total).

    >>> result = ll.hardmax([100, 1000, 10_000], replicates=20)
    >>> sorted(result.table.columns)[:2], len(result.table)
    (['asymptotic', 'finite'], 6)
    """
    counts = parse_sizes(sizes)
    grid = parse_grid(horizons, "horizons")
    _check(counts, replicates)
    check_seed(seed)
    inputs: dict[str, Any] = {"measure": "gaussian", "dim": 1, "replicates": replicates, "seed": seed}
    if measure == "gaussian" and dim == 1 and head is None:
        inputs |= {"error": ABOUT_ZERO, "matrix": "1", "A": [[1.0]]}
        for horizon in grid:
            check_horizon(horizon)
        samples = float(replicates) * len(counts) * (1 + len(grid))
        check_cost("hardmax", seconds=SAMPLE_SECONDS * samples, memory=SAMPLE_BYTES * float(replicates), yes=yes)
        softmax = []
        for done, horizon in enumerate(grid):
            softmax.append(softmax_line(horizon, counts, replicates, seed))
            if progress is not None:
                progress(done + 1, len(grid) + 1)
        return Hardmax(inputs, hardmax_line(counts, replicates, seed), tuple(softmax))
    law = named_measure(measure, dim) if isinstance(measure, str) else as_measure(measure)
    check_number("queries", queries, "at least 2, such as 2048", low=2)
    token_seconds = law.dim * (NUMBER_SECONDS + min(queries, counts[-1]) * SCORE_SECONDS)
    check_cost("hardmax", seconds=token_seconds * replicates * counts[-1], yes=yes)
    matrix = "that of the head given"
    if head is None:
        head = designed_head(law, 1.0, seed=seed)
        matrix = f"Σ^(−1/2) R Σ^(−1/2), R a random rotation of seed {seed}" if law.dim > 1 else f"{head.A[0, 0]:.4g}"
    as_head(head, law.dim)
    options: dict[str, Any] = {"replicates": replicates, "queries": queries, "seed": seed}
    errors = hardmax_study(law, head, counts, **options, progress=progress, checkpoint=checkpoint)
    inputs |= {"measure": measure if isinstance(measure, str) else repr(law), "dim": law.dim}
    inputs |= {"error": SCATTER, "matrix": matrix, "A": head.A.tolist()}
    return Hardmax(inputs, HardmaxCurve.of(f"hardmax over {law!r}", errors, **_isotropic(law, head, counts)), ())


def _isotropic(law: Measure, head: Head, sizes: tuple[int, ...]) -> dict[str, PredictedCurve]:
    """Prediction for Gaussian tokens of mean 0 in d > 1 whose whitened score matrix is a multiple of a rotation."""
    if not isinstance(law, Gaussian) or law.dim == 1 or law.mean.any():
        return {}
    singular = np.linalg.svd(whitened(law.covariance, head.A), compute_uv=False)
    if singular[0] - singular[-1] > 1e-6 * singular[0] or head.query_bias.any():
        return {}
    values = np.array([laws.hardmax_isotropic(n, law.covariance, head.V) for n in sizes])
    holds = sizes[0] >= laws.ISOTROPIC_FROM and law.dim <= laws.ISOTROPIC_DIM
    return {"isotropic": PredictedCurve(values, CLAIMS["hardmax.isotropic"].at(holds))}


def hardmax_line(sizes: tuple[int, ...], replicates: int = 400, seed: int = 0) -> HardmaxCurve:
    """Error of argmax attention over n standard normal tokens in d = 1, E|(N₊ max + N₋ min)/n|, with predictions.

    N₊ and N₋ are the numbers of positive and negative tokens. The extremes are drawn exactly, without drawing n tokens.
    """
    _check(sizes, replicates)

    def largest(rng: np.random.Generator, counts: Array) -> Array:
        # u^{1/N} is the distribution function at the maximum; half-normal tails are two-sided normal tails.
        tail = -np.expm1(np.log(rng.random(len(counts))) / np.maximum(counts, 1.0))
        return np.asarray(-ndtri(tail / 2))

    columns = []
    for n in sizes:
        rng = np.random.default_rng(np.random.SeedSequence([seed, 0x4A2D, n]))
        positive = rng.binomial(n, 0.5, size=replicates * SAMPLES_PER_REPLICATE).astype(np.float64)
        negative = n - positive
        mean_output = (positive * largest(rng, positive) - negative * largest(rng, negative)) / n
        columns.append(np.abs(mean_output).reshape(replicates, -1).mean(axis=1))
    finite, asymptotic = (np.array([*map(law, sizes)]) for law in (laws.hardmax_finite, laws.hardmax_asymptotic))
    return HardmaxCurve.of(
        "hardmax",
        ErrorCurve.of(sizes, np.stack(columns, axis=1), moment=1, seed=seed),
        finite=PredictedCurve(finite, laws.finite_status(sizes[0])),
        asymptotic=PredictedCurve(asymptotic, CLAIMS["hardmax.asymptotic"].at()),
    )


def softmax_line(horizon: float, sizes: tuple[int, ...], replicates: int = 400, seed: int = 0) -> HardmaxCurve:
    """Error E|mean output| of softmax with scores H·x·y, H = `horizon`, over n normal tokens, with its prediction."""
    predicted = {}
    if abs(horizon) <= INFLUENCE_UP_TO:
        status = Status.VERIFIED if abs(horizon) <= 1 else Status.HEURISTIC
        predicted["influence"] = PredictedCurve(mean_error_1d(horizon, sizes), status)
    return HardmaxCurve.of(f"softmax, H = {horizon:g}", softmax_errors(horizon, sizes, replicates, seed), **predicted)


def softmax_errors(horizon: float, sizes: tuple[int, ...], replicates: int = 400, seed: int = 0) -> ErrorCurve:
    """Measure E|mean output| of softmax attention with scores H·x·y, H = `horizon`, over n standard normal tokens."""
    _check(sizes, replicates)
    samples = (grid_outputs(horizon, n, replicates, seed) for n in sizes)
    errors = np.stack([np.abs(np.sum(share * output, axis=0)) for _, share, output in samples], axis=1)
    return ErrorCurve.of(sizes, errors, moment=1, seed=seed)


def hardmax_study(
    measure: Measure, head: Head, sizes: tuple[int, ...], *, replicates: int = 200, queries: int = 2048, seed: int = 0,
    progress: Progress | None = None, checkpoint: Checkpoint | None = None,
) -> ErrorCurve:  # fmt: skip
    """Measure how far the mean output of argmax attention over n tokens is from its expectation, for any tokens.

    The expectation is the mean over replicates. Queries are the first tokens of each sample. The noise of using fewer
    queries than tokens is estimated from two halves of the queries, and corrected for.
    """
    _check(sizes, replicates)
    used = min(queries, sizes[-1])
    job = {"job": "hardmax", **identity(measure, head), "sizes": sizes, "replicates": replicates, "queries": queries}
    means = (checkpoint or Checkpoint()).each(
        job | {"seed": seed}, replicates,
        lambda r: {"means": _means(measure, head, sizes, used, seed, r)},
        tokens=sizes[-1], progress=progress,
    )["means"]  # fmt: skip
    mean, half_gap = means[:, :, 0], means[:, :, 1] - means[:, :, 2]
    errors = np.linalg.norm(mean - mean.mean(axis=0), axis=-1) * np.sqrt(replicates / (replicates - 1))
    left_out = np.clip(1 - used / np.asarray(sizes, dtype=np.float64), 0.0, None) / 4
    noise = np.sum(half_gap**2, axis=-1).mean(axis=0) * left_out
    share = noise / np.maximum(np.mean(errors**2, axis=0), np.finfo(float).tiny)
    correction = 1 / np.sqrt(np.clip(1 - share, 0.02, 1.0))
    return ErrorCurve.of(sizes, errors, moment=1, finite_population_correction=correction, seed=seed)


def _means(measure: Measure, head: Head, sizes: tuple[int, ...], queries: int, seed: int, replicate: int) -> Array:
    """Mean argmax output of one replicate over all queries, and over each half of the queries: (sizes, 3, v)."""
    from limitlens.attention.state import Peak
    from limitlens.sampling.streams import PAGE, IidStream

    stream, which = IidStream(measure, seed), range(replicate, replicate + 1)
    query = head.queries(stream.draw(which, 0, queries)[0]).float()
    best, rows = None, {}
    for step, start, stop in Cells(sizes).blocks(PAGE):
        tokens = stream.draw(which, start, stop)[0]
        peak = Peak.of([query @ head.keys(tokens).float().T], head.values(tokens))
        best = peak if best is None else best.merge(peak)
        output = best.value[: min(queries, sizes[step])]
        rows[step] = torch.stack((output.mean(0), output[::2].mean(0), output[1::2].mean(0)))
    return np.asarray(torch.stack(list(rows.values())).numpy())


def _check(sizes: tuple[int, ...], replicates: int) -> None:
    if Cells(sizes).sizes[0] < 2:
        raise InputError(f"sizes are {list(sizes)}; expected numbers of tokens from 2 on")
    check_number("replicates", replicates, "at least 2, since error bars come from their scatter", low=2)


def grid_outputs(signed_horizon: float, n: int, replicates: int, seed: int) -> tuple[Array, Array, Array]:
    """Simulate softmax attention with scores H·x·y over n normal tokens on a grid, at a cost that hardly grows with n.

    H is `signed_horizon`. Returns the grid points (points,), and the share of tokens and output at each, (points,
    replicates). Tokens follow the discrete Gaussian ∝ exp(−y²/2) of step 0.01, of limit H·x to machine precision.
    """
    check_horizon(signed_horizon)
    check_number("n", n, "between 2 and 1e15 tokens", low=2, below=10**15 + 1)
    half = round((np.sqrt(2 * np.log(n)) + MARGIN) / STEP)
    y = np.arange(-half, half + 1) * STEP
    probability = np.exp(-(y**2) / 2)
    rng = np.random.default_rng(np.random.SeedSequence([seed, n]))
    counts = rng.multinomial(n, probability / probability.sum(), size=replicates).T.astype(np.float64)
    scores = signed_horizon * np.outer(y, y)
    kernel = np.exp(scores - scores.max(axis=1, keepdims=True))
    return y, counts / n, (kernel @ (counts * y[:, None])) / (kernel @ counts)
