"""The result of a probe: every head of a model over a corpus."""

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
from limitlens.probing import figures, findings
from limitlens.probing.overview import LayerRecord, layer_documents, summary
from limitlens.probing.predictors import rate_skills
from limitlens.probing.record import MOMENTS, OTHERS, HeadRecord
from limitlens.probing.regimes import Regime, Thresholds
from limitlens.probing.view import probe_view
from limitlens.record import Run, from_json, to_json
from limitlens.results import Result
from limitlens.sampling.cells import parse_sizes
from limitlens.statistics.error_curve import ErrorCurve
from limitlens.statistics.predicted_curve import Foresight

STATES = "states.safetensors"
# Fields of an error curve that a run folder holds as arrays.
CURVE = ("error_moments", "outputs", "finite_population_correction", "floor", "text", "min_snr")


@dataclass(frozen=True, eq=False, repr=False)
class ProbeRun(Result):
    """Every head of a model over a corpus."""

    kind = "probe"
    model: str  # what was probed; the note says what a reader must know about the model
    model_revision: str | None
    model_sha256: str | None
    model_note: str | None
    causal: bool
    corpus: str  # on what: `tokens` were pooled of those asked for
    corpus_sha256: str
    tokens: int
    tokens_asked: int
    window: int  # tokens in one
    windows: Mapping[str, Any]  # "count", which gave queries ("pilot"), which may check plans ("reserved"), "pool"
    pooled_positions: tuple[int, int]  # of a window, half open
    sizes_asked: tuple[int, ...]
    replicates: int
    replicates_asked: int
    queries: int
    thresholds: Thresholds
    records: tuple[HeadRecord, ...]  # the heads, by layer
    layer_records: tuple[LayerRecord, ...]  # what was judged of the tokens of each layer
    # `floor` is the numerical floor of relative errors; `seconds` in the "model", in "attention" and in "total"
    seed: int
    batch: int
    device: str
    floor: float
    interrupted: bool
    seconds: Mapping[str, float]
    warnings: tuple[str, ...]
    # the tokens around each window: "mode", as asked for, and the ids of the "prefix" and the "suffix"
    special: Mapping[str, Any] = field(default_factory=dict)
    score_scale: float = 1.0  # on every head's scores; the model's own forward was left as it is
    sampling: str = "pooled"  # what samples are drawn from (`sampling.documents.SAMPLINGS`)
    kernel: str = "float32"  # what attention was computed with, in words
    reference: Mapping[str, Any] | Path = field(default_factory=dict)  # the `states`, or the file that holds them

    @property
    def n(self) -> tuple[int, ...]:
        """The sizes measured."""
        return self.records[0].sizes

    def head(self, layer: int, head: int) -> HeadRecord:
        """One head."""
        found = next((record for record in self.records if record.place == (layer, head)), None)
        if found is None:
            raise InputError(f"there is no layer {layer}, head {head} in this run; see its heads table")
        return found

    @cached_property
    def states(self) -> Mapping[str, Tensor]:
        """`query_places` (m, 2), the window and the position of each query, and for each layer i the following.

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
        """The probe as the JSON document of the contract."""
        apart = ("records", "layer_records", "reference", "made")
        found = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in apart}
        found |= {"n": self.n, "heads": self._head_documents}
        found |= {"layers": layer_documents(self.records, self.layer_records)}
        found |= {"summary": summary(self.records) | {"rates": rate_skills(self.records)}}
        return to_json(found)  # type: ignore[no-any-return]

    @classmethod
    def load(cls, run: Run) -> ProbeRun:
        """The probe that a run folder holds; its states are read when they are first asked for."""
        document, arrays, states = run.document, run.arrays(), run.folder / STATES
        if not states.is_file():
            raise InputError(f"{str(run.folder)!r} is not whole (it has no {STATES}); probe again with --out")

        def curves(which: str, entries: Sequence[Mapping[str, Any]]) -> list[ErrorCurve]:
            kept = [name for name in CURVE if f"{which}.{name}" in arrays]  # older runs have no text and no min_snr
            rows = [{name: arrays[f"{which}.{name}"][row] for name in kept} for row in range(len(entries))]
            told = arrays.get(f"{which}.foretold")
            ahead = [None] * len(rows) if told is None else [Foresight(arrays["foretold_sizes"], logs) for logs in told]
            sizes, seed = [parse_sizes(entry["n"]) for entry in entries], check_seed(document["seed"])
            told = zip(sizes, rows, ahead, strict=True)
            return [ErrorCurve(sizes=own, seed=seed, **row, foresight=one) for own, row, one in told]

        heads, layers = document["heads"], document["layers"]
        others = {name: curves(name, heads) for name in OTHERS if f"{name}.error_moments" in arrays}
        bare = iter(curves("pooled", [head for head in heads if head["without_sink"] is not None]))
        records = []
        for place, (head, curve) in enumerate(zip(heads, curves("curve", heads), strict=True)):
            pooled = None if head["without_sink"] is None else next(bare)
            records.append(HeadRecord.of(head, curve, pooled, {name: own[place] for name, own in others.items()}))
        judged = [{**layer["tails"], "layer": layer["layer"]} for layer in layers if layer["tails"] is not None]
        found: ProbeRun = from_json(cls, {**document, "records": records, "layer_records": judged})
        return replace(found, reference=states)

    def check(self) -> None:
        """Raise a ValueError unless every head has a number at each of its sizes; the view of a probe takes seconds."""
        for head in self.records:
            parts = (head.centred, head.predicted_error, head.effective_tokens)
            if any(part.shape != (len(head.sizes),) for part in parts):
                raise ValueError(f"{head.name} has other sizes than its curve")

    @property
    def table(self) -> pd.DataFrame:
        """The same as `heads`."""
        return self.heads

    @cached_property
    def heads(self) -> pd.DataFrame:
        """One row per head, numbers only: lists and what depends on n are in `curves`."""
        return pd.DataFrame([_flat(head) for head in self._head_documents])

    @cached_property
    def curves(self) -> pd.DataFrame:
        """One row per head and size: errors of all kinds, effective tokens, the sink's share."""

        def columns(head: HeadRecord) -> dict[str, Any]:
            found: dict[str, Any] = {"n": head.sizes, "relative_centred_error": head.centred}
            found |= {name: getattr(head, name) for name in ("predicted_error", "effective_tokens")}
            for end, curve in (("", head.curve), ("_without_sink", head.pooled)):
                if curve is not None:
                    name = f"relative_output_error{end}"
                    found |= {name: curve.error, f"{name}_stderr": curve.stderr}
            for name, curve in head.others.items():
                error = MOMENTS.get(name, f"{name}_error")
                found |= {error: curve.error, f"{error}_stderr": curve.stderr}
            return found if head.sink is None else found | {"sink_share": head.sink.share}

        return self._rows_of_heads(columns)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """One row per layer: medians, regimes, and whether its tokens are sub-Gaussian."""
        rows = []
        for layer in layer_documents(self.records, self.layer_records):
            row = {name: layer[name] for name in ("layer", "heads", "attention")}
            row |= {regime.value: layer["regimes"].get(regime.value, 0) for regime in Regime}
            row |= {name: (layer[name] or {}).get("median") for name in ("rate", "error_at_largest_n")}
            tails = layer["tails"] or {}
            told = {"tokens_are": tails.get("verdict"), "variance_proxy": tails.get("variance_proxy")}
            rows.append(row | layer["median"] | told)
        return pd.DataFrame(rows)

    @cached_property
    def replicate_errors(self) -> pd.DataFrame:
        """One row per head, replicate and size: its relative output error, and the same without the sink."""

        def columns(head: HeadRecord) -> dict[str, Any]:
            shape = head.curve.rows.shape
            # Samples of a run that was cut short differ in size: 1 − n/N is the square of what they have not seen.
            seen = 1 - np.broadcast_to(head.curve.finite_population_correction, shape) ** 2
            n = np.broadcast_to(head.sizes, shape) if not self.interrupted else np.rint(self.tokens * seen).astype(int)
            found = {"replicate": np.indices(shape)[0], "n": n, "relative_output_error": np.sqrt(head.curve.rows)}
            if head.pooled is not None:
                found["relative_output_error_without_sink"] = np.sqrt(head.pooled.rows)
            return {name: values.ravel() for name, values in found.items()}

        return self._rows_of_heads(columns)

    def _rows_of_heads(self, columns: Callable[[HeadRecord], dict[str, Any]]) -> pd.DataFrame:
        """The columns of every head, one head below the other."""
        found = [pd.DataFrame({"layer": head.layer, "head": head.head, **columns(head)}) for head in self.records]
        return pd.concat(found, ignore_index=True)

    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables of a run folder."""
        return {"heads": self.heads, "layers": self.layers, "curves": self.curves, "replicates": self.replicate_errors}

    def arrays(self) -> dict[str, Any]:
        """The error curves of all heads, "curve.error_moments" (heads, clusters, replicates, sizes) and the like.

        Those without the sink are "pooled.error_moments" and the like, of the heads that have one, in order; those of
        the mean and the covariance of the outputs, and of argmax, "mean.error_moments" and so on.
        """
        bare = [head.pooled for head in self.records if head.pooled is not None]
        found: dict[str, Any] = {}
        every = {"curve": [head.curve for head in self.records], "pooled": bare}
        every |= {name: [head.others[name] for head in self.records if name in head.others] for name in OTHERS}
        for which, curves in every.items():
            if curves:
                found |= {f"{which}.{name}": np.stack([getattr(curve, name) for curve in curves]) for name in CURVE}
                told = [curve.foresight for curve in curves if curve.foresight is not None]
                if told:
                    found |= {f"{which}.foretold": np.stack([one.logs for one in told])}
                    found |= {"foretold_sizes": told[0].sizes}
        return found

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """The reference states, which a run folder holds beside arrays and tables."""
        from safetensors.torch import save_file

        return {STATES: partial(save_file, dict(self.states))}

    def predict(self, n: float) -> pd.DataFrame:
        """The error of every head at n tokens with its 95% interval, beyond the sizes measured too: one row a head.

        Outside the sizes measured it follows what the run's own kept tokens foretell (`pilot_errors`), relative to
        the nearest size; NaN where that says nothing any more.
        """
        check_number("n", n, "a number of tokens of at least 1", low=1)
        outside = not self.n[0] <= n <= self.n[-1]
        names = ("layer", "head", "error", "low", "high", "extrapolated")
        rows = [(*head.place, *head.curve.predict(n), outside) for head in self.records]
        return pd.DataFrame(rows, columns=list(names))

    def slowest(self, count: int = 5) -> pd.DataFrame:
        """The heads that need the most tokens: those with the largest error at the largest n."""
        return self._rows(findings.slowest(self)[:count])

    def fastest(self, count: int = 5) -> pd.DataFrame:
        """The heads that need the fewest, among those whose error falls."""
        return self._rows(findings.fastest(self)[:count])

    def _rows(self, records: Sequence[HeadRecord]) -> pd.DataFrame:
        return self.heads.iloc[[self.records.index(record) for record in records]]

    def plot_rates(self, path: str | Path | None = None, kind: str = "output") -> Drawing:
        """Fitted rates of the "output", the "mean" or the "covariance" against the horizon, with what theory says."""
        return results.plot([figures.rates_figure(self, kind)], path)

    def plot_map(self, quantity: str = "rate", path: str | Path | None = None) -> Drawing:
        """A map of all heads, coloured by a quantity: "rate", "regime", or any column of `heads` that holds numbers."""
        return results.plot([figures.map_figure(self, quantity)], path)

    def plot_head(self, layer: int, head: int, path: str | Path | None = None) -> Drawing:
        """The error curve of one head and its effective tokens."""
        return results.plot(figures.head_figures(self.head(layer, head)), path)

    def __repr__(self) -> str:
        return f"<ProbeRun of {self.model} on {self.corpus}: {len(self.records)} heads>"

    view = probe_view
    plot = plot_rates


def _flat(head: Mapping[str, Any]) -> dict[str, Any]:
    """A head's document without its lists, one level deep: `rate` is the slope, its companions follow it."""
    bare, sink = head["without_sink"], head["sink"]
    lists = {name for name, value in head.items() if isinstance(value, (list, dict))} | {"without_sink", "sink"}
    row = {name: value for name, value in head.items() if name not in lists}
    row |= {"error_at_largest_n": head["relative_output_error"][-1], "effective_tokens": head["effective_tokens"][-1]}
    for name in OTHERS:
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
    """A rate in a row: its slope under the name, its companions beside it."""
    rate = rate or {"slope": np.nan, "stderr": np.nan, "interval": (np.nan, np.nan)}
    low, high = rate["interval"]
    return {name: rate["slope"], f"{name}_stderr": rate["stderr"], f"{name}_low": low, f"{name}_high": high}
