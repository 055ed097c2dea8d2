"""The result of a prediction: every head's error curve, foretold from a pilot alone, and what it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.errors import Array
from limitlens.probing.findings import WORDS
from limitlens.record import to_json
from limitlens.report.view import Cell, Figure, Section, Table, Text, View, band, head_map, line
from limitlens.report.words import falling, plural, worded_figure
from limitlens.results import Result
from limitlens.statistics.error_curve import TokensFor

TOLD = WORDS["prediction"]
SHOWN = 5  # of the slowest heads, and of the fastest


@dataclass(frozen=True)
class PredictedRate:
    """The rate through the foretold errors, with the 95% interval of resampled queries and tokens."""

    slope: float
    interval: tuple[float, float]


@dataclass(frozen=True, eq=False)
class PredictedCurve:
    """Foretold relative errors at each size with the ends of their 95% intervals, (sizes,), and n(ε)."""

    error: Array  # NaN where the output is 0
    low: Array
    high: Array
    tokens_for: Mapping[str, TokensFor | None]  # by error; None where it lies beyond every size foretold

    def document(self) -> dict[str, Any]:
        """The curve as JSON."""
        needed = {error: found and found.document() for error, found in self.tokens_for.items()}
        return {part.name: getattr(self, part.name) for part in fields(self)} | {"tokens_for": needed}


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadPrediction(PredictedCurve):
    """One head: its curve beside the sink where every context has one, its rate without."""

    layer: int
    head: int
    kv_head: int
    rate: PredictedRate | None  # of the law without the sink, as theory's; None where there is no error
    without_sink: PredictedCurve | None

    @property
    def name(self) -> str:
        """The head in words."""
        return f"layer {self.layer}, head {self.head}"

    def document(self) -> dict[str, Any]:
        """The head as JSON."""
        bare = self.without_sink and {**self.without_sink.document(), "rate": self.rate}
        return {**super().document(), "without_sink": bare}


@dataclass(frozen=True, eq=False, repr=False)
class Predictions(Result):
    """Every head of a model, foretold from a few tokens of a corpus."""

    kind, file = "prediction", "predictions"
    model: str
    model_revision: str | None
    model_sha256: str | None
    model_note: str | None
    causal: bool
    corpus: str
    corpus_sha256: str
    tokens: int  # of the pilot
    tokens_asked: int
    window: int  # tokens in one
    windows: Mapping[str, Any]  # "count", and which gave "queries" and "keys"
    pooled_positions: tuple[int, int]  # of a window, half open
    queries: int
    n: tuple[int, ...]
    heads: tuple[HeadPrediction, ...]
    seed: int
    device: str
    seconds: float
    warnings: tuple[str, ...]
    special: Mapping[str, Any]  # the tokens around each window, as in `ProbeRun`

    def document(self) -> dict[str, Any]:
        """The predictions as a JSON document."""
        heads = [{"n": self.n, **head.document()} for head in self.heads]
        return super().document() | {"heads": to_json(heads)}

    @property
    def table(self) -> pd.DataFrame:
        """One row per head and size: layer, head, n, error and the ends of its 95% interval."""
        numbers = ("error", "low", "high")
        rows = [
            pd.DataFrame(
                {"layer": head.layer, "head": head.head, "n": self.n, **{k: getattr(head, k) for k in numbers}}
            )
            for head in self.heads
        ]
        return pd.concat(rows, ignore_index=True)

    def view(self) -> View:
        """What it shows: the slowest heads and the fastest, the map of rates, errors over all heads."""
        slowest = sorted(self.heads, key=lambda head: -head.error[-1] if np.isfinite(head.error[-1]) else np.inf)
        fastest = [head for head in reversed(slowest) if np.isfinite(head.error[-1])]
        known = {**vars(self), "heads": plural(len(self.heads), "head"), "low": self.n[0], "high": self.n[-1]}
        read, do, subtitle = (TOLD[name].format(**known) for name in ("read", "do", "subtitle"))
        columns = [column.format(**known) for column in TOLD["columns"]]

        def table(title: str, heads: Sequence[HeadPrediction], folded: bool = False) -> Table:
            return Table(title.format(shown=SHOWN), columns, [self._cells(head) for head in heads], folded=folded)

        extremes = [table(WORDS[name], heads[:SHOWN]) for name, heads in (("slowest", slowest), ("fastest", fastest))]
        (title, lead), legend = TOLD["section"], Text(TOLD["legend"])
        told = ("seed", "device", "model_revision", "model_sha256", "corpus_sha256")
        return View(
            title=TOLD["title"].format(**known),
            subtitle=f"{self.model_note} · {subtitle}" if self.model_note else subtitle,
            verdict=(read, self._found(), do),
            sections=[
                Section(title, lead, (self._map(), self._errors())),
                Section("", "", (*extremes, legend), only="terminal"),
                Section("", "", (table("every head", slowest, folded=True), legend), only="page"),
            ],
            warnings=self.warnings,
            trust=[text.format(**known) for text in TOLD["trust"]],
            details={name.replace("_", " "): value for name in told if (value := getattr(self, name)) is not None},
        )

    def _found(self) -> str:
        """What was found, in one sentence."""
        rated = [(head.rate.slope, head) for head in self.heads if head.rate is not None]
        if not rated:
            return TOLD["nothing"]  # type: ignore[no-any-return]
        slope, slowest = min(rated, key=lambda pair: pair[0])
        left = median(head.error[-1] for head in self.heads if np.isfinite(head.error[-1]))
        middle = falling(median(rate for rate, _ in rated))
        return TOLD["found"].format(  # type: ignore[no-any-return]
            middle=middle, slope=falling(slope), slowest=slowest.name, left=left, high=self.n[-1]
        )

    def _cells(self, head: HeadPrediction) -> list[Cell]:
        rate, defined = head.rate, bool(np.isfinite(head.error).all())
        ends = (head.error[0], head.error[-1], head.low[-1], head.high[-1])
        first, last, low, high = (float(number) for number in ends)

        def tokens(found: TokensFor | None) -> str:
            if found is None:
                return "beyond" if defined else "–"
            return f"{found.n:,}{'*' * found.extrapolated}"

        return [
            f"{head.layer}.{head.head}", None if rate is None else round(rate.slope, 2),
            None if rate is None else f"{rate.interval[0]:.2f} to {rate.interval[1]:.2f}",
            float(f"{first:.3g}"), float(f"{last:.3g}"),
            f"{low:.3g} to {high:.3g}" if defined else None, *map(tokens, head.tokens_for.values()),
        ]  # fmt: skip

    def _map(self) -> Figure:
        """All heads, layer by head, coloured by their rates."""
        rates = [head.rate and head.rate.slope for head in self.heads]
        return head_map(TOLD["map"], TOLD["map"], [(head.layer, head.head) for head in self.heads], rates)

    def _errors(self) -> Figure:
        """Errors against n: the middle head, and between which most heads and all heads lie."""
        errors = np.array([head.error for head in self.heads if np.isfinite(head.error).all()]).reshape(-1, len(self.n))
        if not len(errors):
            return worded_figure(TOLD["errors"], [])
        least, low, middle, high, most = np.quantile(errors, (0, 0.1, 0.5, 0.9, 1), axis=0)
        series = [
            band("80% of the heads", self.n, low, high),
            line("the middle head", self.n, middle),
            line("the largest error", self.n, most, "red", "dashed"),
            line("the smallest", self.n, least, "green", "dotted"),
        ]
        return worded_figure(TOLD["errors"], series)

    def __repr__(self) -> str:
        heads = plural(len(self.heads), "head")
        return f"<Predictions of {self.model} on {self.corpus}: {heads} from {self.tokens:,} tokens>"
