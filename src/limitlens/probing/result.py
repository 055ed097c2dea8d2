"""Result of a probe or a prediction (`ProbeRun`): records, tables, files and plots of every head of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from limitlens.probing.record import CURVES, ERROR_NAMES, HeadRecord, error_columns
from limitlens.probing.view import probe_view
from limitlens.record import Run, from_json, to_json
from limitlens.results import Result
from limitlens.sampling.cells import parse_sizes
from limitlens.statistics.error_curve import ErrorCurve, PredictedErrors
from limitlens.statistics.regimes import Regime

STATES = "states.safetensors"
CONTEXT = 32_768  # length of the context for which budgets (keys per head) of a causal model are given
# Fields of `ErrorCurve` that a run folder holds as arrays.
CURVE = ("error_moments", "outputs", "finite_population_correction", "floor", "text", "text_share", "min_snr")


@dataclass(frozen=True, eq=False, repr=False)
class ProbeRun(Result):
    """Error curves of every head of a model: measured by `limitlens.probe` or predicted by `limitlens.predict`.

    In a predicted run, error curves have no replicates and heads have no diagnostics.
    """

    kind = "probe"
    model: str
    model_revision: str | None
    model_sha256: str | None
    model_note: str | None  # remark about the model that its results must show
    causal: bool
    corpus: str
    corpus_sha256: str
    tokens: int  # number of tokens that samples are drawn from (the pool)
    tokens_asked: int
    window: int  # tokens per window
    windows: Mapping[str, Any]  # "count", indices for queries ("pilot") and plan tests ("reserved"), size of the "pool"
    pooled_positions: tuple[int, int]  # positions of a window that are sampled: start, and stop (exclusive)
    sizes_asked: tuple[int, ...]
    replicates: int  # 0 if the run is predicted
    replicates_asked: int
    queries: int  # per head
    records: tuple[HeadRecord, ...]  # the heads, by layer
    layer_records: tuple[LayerRecord, ...]  # tail tests of the tokens of each layer
    seed: int
    batch: int  # windows per forward
    device: str
    floor: float  # largest relative error of the attention kernel, against float64
    interrupted: bool
    seconds: Mapping[str, float]  # time in the "model", in "attention" and in "total"
    warnings: tuple[str, ...]
    special: Mapping[str, Any] = field(default_factory=dict)  # around a window: "mode"; ids "prefix" and "suffix"
    score_scale: float = 1.0  # multiplies every score in the measurement; the model's own forward is unchanged
    sampling: str = "pooled"  # how samples are drawn (one of `sampling.assignment.SAMPLINGS`)
    kernel: str = "float32"  # the attention kernel, in words
    reference: Mapping[str, Any] | Path = field(default_factory=dict)  # the `states`, or the file that holds them

    @property
    def n(self) -> tuple[int, ...]:
        """Sample sizes n of the error curves, the same for all heads."""
        return self.records[0].sizes

    @property
    def measured(self) -> bool:
        """Whether the run was measured (`limitlens.probe`), not predicted (`limitlens.predict`)."""
        return self.replicates > 0

    @property
    def budget_context(self) -> int:
        """Context length for which the number of keys that each head needs is given; for an encoder, its window."""
        return CONTEXT if self.causal else self.window

    def head(self, layer: int, head: int) -> HeadRecord:
        """Record of one head, by the indices of its layer and of the head; raises an `InputError` if there is none."""
        found = next((record for record in self.records if record.place == (layer, head)), None)
        if found is None:
            raise InputError(f"there is no layer {layer}, head {head} in this run; see its heads table")
        return found

    @cached_property
    def states(self) -> Mapping[str, Tensor]:
        """Queries of a probe and their attention over all tokens that samples are drawn from, as tensors by name.

        `query_places` (m, 2) holds window and position of each query. `layer{i}.query` (heads, m, k) holds the queries
        of layer i, times the scale of the scores. `layer{i}.reference.lse` (heads, m) and `.output` (heads, m, v) are
        their attention over these tokens. `layer{i}.atom.lse` and `.output` are attention to the sink, if any.
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
        """The run as a JSON document: arguments, heads, layers and summary."""
        apart = ("records", "layer_records", "reference", "made")
        found = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in apart}
        found |= {"n": self.n, "heads": self._head_documents}
        found |= {"layers": layer_documents(self.records, self.layer_records)}
        found |= {"summary": summary(self.records) | {"rates": rate_skills(self.records)}}
        return to_json(found)  # type: ignore[no-any-return]

    @classmethod
    def load(cls, run: Run) -> ProbeRun:
        """Load the run that was saved in a run folder; its `states` are read from the file at first use."""
        document, arrays, states = run.document, run.arrays(), run.folder / STATES
        if document["replicates"] and not states.is_file():
            raise InputError(f"{str(run.folder)!r} is not whole (it has no {STATES}); probe again with --out")
        seed, heads = check_seed(document["seed"]), document["heads"]

        def curves(which: str) -> Iterator[ErrorCurve]:
            stored = {name: arrays[f"{which}.{name}"] for name in CURVE if f"{which}.{name}" in arrays}
            logs = arrays.get(f"{which}.predicted")
            owners = [head for head in heads if which != "without_sink" or head[which] is not None]
            for row, head in enumerate(owners):
                known: dict[str, Any] = {name: rows[row] for name, rows in stored.items()}
                if logs is not None:
                    known["prediction"] = PredictedErrors(arrays["predicted_sizes"], logs[row])
                yield ErrorCurve(sizes=parse_sizes(head["n"]), seed=seed, **known)

        stored = {name: curves(name) for name in ERROR_NAMES if f"{name}.error_moments" in arrays}
        records = []
        for head in heads:
            names = [name for name in stored if name != "without_sink" or head[name] is not None]
            own = {name: next(stored[name]) for name in names}
            curve, bare = own.pop("curve"), own.pop("without_sink", None)
            records.append(HeadRecord.of(head, curve=curve, without_sink=bare, moment_curves=own))
        tails = [{**layer["tails"], "layer": layer["layer"]} for layer in document["layers"] if layer["tails"]]
        found: ProbeRun = from_json(cls, {**document, "records": records, "layer_records": tails})
        return replace(found, reference=states if found.measured else {})

    def check(self) -> None:
        """Raise a ValueError if a loaded run is damaged: every head needs its effective tokens at each sample size."""
        for head in self.records:
            tokens = head.effective_tokens
            if self.measured if tokens is None else tokens.shape != (len(head.sizes),):
                raise ValueError(f"{head.name} has other sizes than its curve")

    @property
    def table(self) -> pd.DataFrame:
        """Main table of the result: `heads`, one row per head."""
        return self.heads

    @cached_property
    def heads(self) -> pd.DataFrame:
        """Table with one row per head: rates, regime, diagnostics; quantities that depend on n are in `curves`."""
        table = pd.DataFrame([_flat(head) for head in self._head_documents])
        return table if self.measured else table.dropna(axis="columns", how="all")

    @cached_property
    def curves(self) -> pd.DataFrame:
        """Table with one row per head and sample size: errors of all kinds, effective tokens, share of the sink."""

        def table(head: HeadRecord) -> pd.DataFrame:
            found: dict[str, Any] = {"layer": head.layer, "head": head.head, "n": head.sizes}
            if self.measured:
                found |= {"effective_tokens": head.effective_tokens, "text_stderr": head.curve.text_stderr}
            for name, curve in head.curves.items():
                found |= error_columns(ERROR_NAMES[name], curve)
            found |= {} if head.sink is None else {"sink_share": head.sink.share}
            return pd.DataFrame(found)

        return pd.concat([table(head) for head in self.records], ignore_index=True)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """Table with one row per layer: medians over heads, number of heads per regime, tail test of the tokens."""
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
        """Tables that are saved with the run, by file name."""
        return {"heads": self.heads, "layers": self.layers, "curves": self.curves}

    def arrays(self) -> dict[str, Any]:
        """Arrays that are saved with the run: the error curves of all heads, as "curve.error_moments" and other fields.

        "without_sink." begins the names for curves without the sink; "mean." and so on, those for `moment_curves`.
        """
        found: dict[str, Any] = {}
        for which in ERROR_NAMES:
            curves = [head.curves[which] for head in self.records if which in head.curves]
            if curves:
                found |= {f"{which}.{name}": np.stack([getattr(curve, name) for curve in curves]) for name in CURVE}
                if predictions := [curve.prediction for curve in curves if curve.prediction is not None]:
                    found[f"{which}.predicted"] = np.stack([one.logs for one in predictions])
                    found["predicted_sizes"] = predictions[0].sizes
        return found

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """Functions that write further files of the saved run, by file name: the `states` of a measured run."""
        from safetensors.torch import save_file

        return {STATES: partial(save_file, dict(self.states))} if self.measured else {}

    def predict(self, n: float) -> pd.DataFrame:
        """Table of the relative error of every head over n tokens, with its 95% interval: one row per head.

        Outside the sizes of the run errors are extrapolated (`theory.exact_bootstrap`); NaN if n is too large for that.
        """
        check_number("n", n, "a number of tokens of at least 1", low=1)
        outside = not self.n[0] <= n <= self.n[-1]
        rows = [(*head.place, *head.curve.predict(n), outside) for head in self.records]
        return pd.DataFrame(rows, columns=["layer", "head", "error", "low", "high", "extrapolated"])

    def plot_map(self, quantity: str = "rate", path: str | Path | None = None) -> Drawing:
        """Draw a map of all heads, coloured by `quantity`: "rate", "regime", or any numeric column of `heads`."""
        return results.plot([map_figure(self, quantity)], path)

    def plot(self, path: str | Path | None = None) -> Drawing:
        """Draw the map of all heads, coloured by the rate at which the error falls with n."""
        return self.plot_map("rate", path)

    def __repr__(self) -> str:
        kind = "" if self.measured else "predicted, "
        return f"<ProbeRun of {self.model} on {self.corpus}: {kind}{len(self.records)} heads>"

    view = probe_view


def _flat(head: Mapping[str, Any]) -> dict[str, Any]:
    """Row of the table of heads: a head's JSON entry without its lists, and with nested entries as columns."""
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
    if (context := head["contexts"]) is not None:
        row |= {f"context_{name}": context[name][-1] for name in ("n", "error", "in_use")}
        row |= {"context_worth": (context["worth"] or [np.nan])[-1], "memory": context["memory"]["verdict"]}
        row |= {"autocorrelation_time": head["autocorrelation_time"]["value"]}
    for suffix, part in (("", head), *((("_without_sink", bare),) if bare else ())):
        row |= {f"{name}{suffix}": value for name, value in _rate_columns(part["rate"], "rate").items()}
        for error, found in part["tokens_for"].items():
            row[f"tokens_for_{error}{suffix}"] = np.nan if found is None else found["n"]
            row[f"extrapolated_{error}{suffix}"] = None if found is None else found["extrapolated"]
    return row if sink is None else row | {"dilution_length": sink["dilution_length"]}


def _rate_columns(rate: Mapping[str, Any] | None, name: str) -> dict[str, float]:
    """Columns of a fitted rate for the table of heads: slope as `name`, then its standard error and interval."""
    rate = rate or {"slope": np.nan, "stderr": np.nan, "interval": (np.nan, np.nan)}
    low, high = rate["interval"]
    return {name: rate["slope"], f"{name}_stderr": rate["stderr"], f"{name}_low": low, f"{name}_high": high}
