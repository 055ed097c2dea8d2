"""The result of a probe or a prediction: every head of a model over a corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from limitlens import results
from limitlens.arrays import Drawing, Tensor, pd
from limitlens.errors import InputError, check_number, check_seed
from limitlens.probing.figures import map_figure
from limitlens.probing.overview import LayerRecord, layer_documents, rate_skills, summary
from limitlens.probing.record import CURVES, MOMENTS, HeadRecord
from limitlens.probing.view import probe_view
from limitlens.record import Run, from_json, to_json
from limitlens.results import Result
from limitlens.sampling.cells import parse_sizes
from limitlens.statistics.error_curve import ErrorCurve, PredictedErrors
from limitlens.statistics.regimes import Regime

STATES = "states.safetensors"
CONTEXT = 32_768  # tokens of the context for which budgets of a causal model are given
# Fields of an error curve that a run folder holds as arrays.
CURVE = ("error_moments", "outputs", "finite_population_correction", "floor", "text", "min_snr")


@dataclass(frozen=True, eq=False, repr=False)
class ProbeRun(Result):
    """Every head of a model over a corpus, measured (`limitlens.probe`) or predicted (`limitlens.predict`).

    The curves of a predicted run have no replicates, and its heads have no diagnostics.
    """

    kind = "probe"
    model: str
    model_revision: str | None
    model_sha256: str | None
    model_note: str | None  # what a reader must know about the model
    causal: bool
    corpus: str
    corpus_sha256: str
    tokens: int  # pooled tokens: those that samples are drawn from
    tokens_asked: int
    window: int  # tokens per window
    windows: Mapping[str, Any]  # "count", which gave queries ("pilot"), which may check plans ("reserved"), "pool"
    pooled_positions: tuple[int, int]  # of a window, half open
    sizes_asked: tuple[int, ...]
    replicates: int  # 0 where the curves are predicted
    replicates_asked: int
    queries: int  # per head
    records: tuple[HeadRecord, ...]  # the heads, by layer
    layer_records: tuple[LayerRecord, ...]  # tail tests of the tokens of each layer
    seed: int
    batch: int  # windows per forward
    device: str
    floor: float  # numerical floor of relative errors
    interrupted: bool
    seconds: Mapping[str, float]  # in the "model", in "attention" and in "total"
    warnings: tuple[str, ...]
    # the tokens around each window: "mode" (the option), and the ids of the "prefix" and the "suffix"
    special: Mapping[str, Any] = field(default_factory=dict)
    score_scale: float = 1.0  # multiplies every score in the measurement; the model's own forward is unchanged
    sampling: str = "pooled"  # what samples are drawn from (`sampling.documents.SAMPLINGS`)
    kernel: str = "float32"  # the attention kernel, in words
    reference: Mapping[str, Any] | Path = field(default_factory=dict)  # the `states`, or the file that holds them

    @property
    def n(self) -> tuple[int, ...]:
        """The sizes of all curves."""
        return self.records[0].sizes

    @property
    def measured(self) -> bool:
        """Whether the curves were measured; those of a prediction have no replicates."""
        return self.replicates > 0

    @property
    def budget_context(self) -> int:
        """Tokens of the context for which budgets of keys are given; an encoder has none beyond its window."""
        return CONTEXT if self.causal else self.window

    def head(self, layer: int, head: int) -> HeadRecord:
        """One head."""
        found = next((record for record in self.records if record.place == (layer, head)), None)
        if found is None:
            raise InputError(f"there is no layer {layer}, head {head} in this run; see its heads table")
        return found

    @cached_property
    def states(self) -> Mapping[str, Tensor]:
        """Reference outputs of a probe: `query_places` (m, 2), the window and the position of each query, and by layer:

        `layer{i}.query` (heads, m, k) with the scale in it, `layer{i}.reference.lse` (heads, m) and `.output`
        (heads, m, v) of attention over the whole pool, and `layer{i}.atom.lse` and `.output` where every context
        contains an atom.
        """
        if not isinstance(self.reference, Path):
            return self.reference
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self.reference)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{str(self.reference)!r} cannot be read ({error}); probe again with --out") from None

    @cached_property
    def _head_documents(self) -> list[dict[str, Any]]:
        return [record.document() for record in self.records]

    def document(self) -> dict[str, Any]:
        """The run as the JSON document of the contract."""
        apart = ("records", "layer_records", "reference", "made")
        found = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in apart}
        found |= {"n": self.n, "heads": self._head_documents}
        found |= {"layers": layer_documents(self.records, self.layer_records)}
        found |= {"summary": summary(self.records) | {"rates": rate_skills(self.records)}}
        return to_json(found)  # type: ignore[no-any-return]

    @classmethod
    def load(cls, run: Run) -> ProbeRun:
        """The run that a folder holds; its states are read when they are first asked for."""
        document, arrays, states = run.document, run.arrays(), run.folder / STATES
        if document["replicates"] and not states.is_file():
            raise InputError(f"{str(run.folder)!r} is not whole (it has no {STATES}); probe again with --out")
        seed = check_seed(document["seed"])

        def curves(which: str, entries: Sequence[Mapping[str, Any]]) -> list[ErrorCurve]:
            """The curves of one kind, one per head."""
            found = []
            for row, entry in enumerate(entries):
                stored = {name: arrays[f"{which}.{name}"][row] for name in CURVE if f"{which}.{name}" in arrays}
                if (logs := arrays.get(f"{which}.predicted")) is not None:
                    stored["prediction"] = PredictedErrors(arrays["predicted_sizes"], logs[row])
                found.append(ErrorCurve(sizes=parse_sizes(entry["n"]), seed=seed, **stored))
            return found

        heads = document["heads"]
        moments = {name: curves(name, heads) for name in CURVES if f"{name}.error_moments" in arrays}
        bare = iter(curves("without_sink", [head for head in heads if head["without_sink"] is not None]))
        records = []
        for place, (head, curve) in enumerate(zip(heads, curves("curve", heads), strict=True)):
            without_sink = None if head["without_sink"] is None else next(bare)
            moment_curves = {name: every[place] for name, every in moments.items()}
            records.append(HeadRecord.of(head, curve=curve, without_sink=without_sink, moment_curves=moment_curves))
        tails = [{**layer["tails"], "layer": layer["layer"]} for layer in document["layers"] if layer["tails"]]
        found: ProbeRun = from_json(cls, {**document, "records": records, "layer_records": tails})
        return replace(found, reference=states if found.measured else {})

    def check(self) -> None:
        """Raise a ValueError unless every head has a number at each of its sizes (faster than making the view)."""
        for head in self.records:
            tokens = head.effective_tokens
            if self.measured if tokens is None else tokens.shape != (len(head.sizes),):
                raise ValueError(f"{head.name} has other sizes than its curve")

    @property
    def table(self) -> pd.DataFrame:
        """The same as `heads`."""
        return self.heads

    @cached_property
    def heads(self) -> pd.DataFrame:
        """One row per head, numbers only; numbers that depend on n are in `curves`."""
        table = pd.DataFrame([_flat(head) for head in self._head_documents])
        return table if self.measured else table.dropna(axis="columns", how="all")

    @cached_property
    def curves(self) -> pd.DataFrame:
        """One row per head and size: errors of all kinds, effective tokens, the sink's share."""

        def table(head: HeadRecord) -> pd.DataFrame:
            found: dict[str, Any] = {"layer": head.layer, "head": head.head, "n": head.sizes}
            if self.measured:
                found["effective_tokens"] = head.effective_tokens
            for end, curve in (("", head.curve), ("_without_sink", head.without_sink)):
                if curve is not None:
                    name = f"relative_output_error{end}"
                    found |= {name: curve.error, f"{name}_stderr": curve.stderr}
                    if not self.measured:
                        found |= {f"{name}_low": curve.interval[0], f"{name}_high": curve.interval[1]}
            for name, curve in head.moment_curves.items():
                error = MOMENTS.get(name, f"{name}_error")
                found |= {error: curve.error, f"{error}_stderr": curve.stderr}
            found |= {} if head.sink is None else {"sink_share": head.sink.share}
            return pd.DataFrame(found)

        return pd.concat([table(head) for head in self.records], ignore_index=True)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """One row per layer: medians, regimes, and whether its tokens are sub-Gaussian."""
        rows = []
        for layer in layer_documents(self.records, self.layer_records):
            row = {name: layer[name] for name in ("layer", "heads", "attention")}
            row |= {regime.value: layer["regimes"].get(regime.value, 0) for regime in Regime if self.measured}
            row |= {name: (layer[name] or {}).get("median") for name in ("rate", "error_at_largest_n")}
            tails = layer["tails"] or {}
            row |= layer["median"]
            rows.append(row | {"tokens_are": tails.get("verdict"), "variance_proxy": tails.get("variance_proxy")})
        return pd.DataFrame(rows)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables of a run folder."""
        return {"heads": self.heads, "layers": self.layers, "curves": self.curves}

    def arrays(self) -> dict[str, Any]:
        """The error curves of all heads: "curve.error_moments" (heads, clusters, replicates, sizes) and so on.

        "without_sink.error_moments" and so on hold the curves without the sink, of the heads that have one, in order;
        "mean.error_moments" and so on hold the `moment_curves`.
        """
        every = {"curve": [head.curve for head in self.records]}
        every["without_sink"] = [head.without_sink for head in self.records if head.without_sink is not None]
        every |= {
            name: [head.moment_curves[name] for head in self.records if name in head.moment_curves] for name in CURVES
        }
        found: dict[str, Any] = {}
        for which, curves in every.items():
            if curves:
                found |= {f"{which}.{name}": np.stack([getattr(curve, name) for curve in curves]) for name in CURVE}
                if predictions := [curve.prediction for curve in curves if curve.prediction is not None]:
                    found[f"{which}.predicted"] = np.stack([one.logs for one in predictions])
                    found["predicted_sizes"] = predictions[0].sizes
        return found

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """The reference states of a probe, which a run folder holds besides arrays and tables."""
        from safetensors.torch import save_file

        return {STATES: partial(save_file, dict(self.states))} if self.measured else {}

    def predict(self, n: float) -> pd.DataFrame:
        """The error of every head at n tokens with its 95% interval, n within the sizes or outside: one row per head.

        Outside the sizes it follows the prediction from the run's own tokens (`theory.exact_bootstrap`), relative to
        the nearest size; NaN where that prediction is too uncertain.
        """
        check_number("n", n, "a number of tokens of at least 1", low=1)
        outside = not self.n[0] <= n <= self.n[-1]
        rows = [(*head.place, *head.curve.predict(n), outside) for head in self.records]
        return pd.DataFrame(rows, columns=["layer", "head", "error", "low", "high", "extrapolated"])

    def plot_map(self, quantity: str = "rate", path: str | Path | None = None) -> Drawing:
        """A map of all heads, coloured by a quantity: "rate", "regime", or any column of `heads` that holds numbers."""
        return results.plot([map_figure(self, quantity)], path)

    def plot(self, path: str | Path | None = None) -> Drawing:
        """The map of all heads, coloured by the rate of the error."""
        return self.plot_map("rate", path)

    def __repr__(self) -> str:
        kind = "" if self.measured else "predicted, "
        return f"<ProbeRun of {self.model} on {self.corpus}: {kind}{len(self.records)} heads>"

    view = probe_view


def _flat(head: Mapping[str, Any]) -> dict[str, Any]:
    """A head's document without its lists, one level deep: `rate` is the slope, its companions follow it."""
    bare, sink, effective = head["without_sink"], head["sink"], head["effective_tokens"]
    lists = {name for name, value in head.items() if isinstance(value, (list, dict))} | {"without_sink", "sink"}
    row = {name: value for name, value in head.items() if name not in lists}
    row |= {"error_at_largest_n": head["relative_output_error"][-1], "effective_tokens": effective and effective[-1]}
    for name in CURVES:
        if f"rate_{name}" in head:
            row |= _rate_columns(head[f"rate_{name}"], f"rate_{name}")
    if (rate := head.get("rate_hardmax")) is not None:
        row |= {f"hardmax_{part}": rate[part] for part in ("law", "evidence", "log_exponent")}
    if (critical := head["critical"]) is not None:
        row |= {f"critical_{name}": critical[name] for name in ("n", "factor", "growth", "growth_stderr")}
        row |= {"critical_factor_stderr": critical["stderr"]}
    for suffix, part in (("", head), *((("_without_sink", bare),) if bare else ())):
        row |= {f"{name}{suffix}": value for name, value in _rate_columns(part["rate"], "rate").items()}
        for error, found in part["tokens_for"].items():
            row[f"tokens_for_{error}{suffix}"] = np.nan if found is None else found["n"]
            row[f"extrapolated_{error}{suffix}"] = None if found is None else found["extrapolated"]
    return row if sink is None else row | {"dilution_length": sink["dilution_length"]}


def _rate_columns(rate: Mapping[str, Any] | None, name: str) -> dict[str, float]:
    """Columns of a rate: its slope under the name, then its standard error and interval."""
    rate = rate or {"slope": np.nan, "stderr": np.nan, "interval": (np.nan, np.nan)}
    low, high = rate["interval"]
    return {name: rate["slope"], f"{name}_stderr": rate["stderr"], f"{name}_low": low, f"{name}_high": high}
