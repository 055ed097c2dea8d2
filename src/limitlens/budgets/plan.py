"""From a probe to a plan: how many keys each head must keep for an error, in a context of a given length.

Each head's curve gives its budget (`head_plan`), query heads that share a key/value head take the largest of theirs,
and the windows that the probe reserved check it (`trial`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.budgets.head_plan import HeadPlan, SharedPlan, plan_head, shared_plans
from limitlens.budgets.temperature import Temperatures, temperatures
from limitlens.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from limitlens.budgets.trial import HeadTrial
    from limitlens.heads.result import ProbeRun
    from limitlens.models import LoadedModel

NEEDED = ("model", "corpus", "tokens_asked", "window", "windows", "seed", "heads")
NEEDED_OF_HEADS = ("layer", "head", "kv_head", "n", "relative_output_error", "relative_output_error_stderr", "regime")


@dataclass(frozen=True, eq=False)
class Plan:
    """KV entries per head for an error, what they gave on the reserved windows, and temperatures where known."""

    run: dict[str, Any] = field(repr=False)
    error: float
    context: int | None
    heads: tuple[HeadPlan, ...] = field(repr=False)
    trials: tuple[HeadTrial, ...] = field(repr=False, default=())
    temperatures: Temperatures | None = field(repr=False, default=None)

    @cached_property
    def key_value_heads(self) -> tuple[SharedPlan, ...]:
        """Budgets of the key/value heads, in the order of layers and heads."""
        return shared_plans(self.heads)

    @property
    def total(self) -> dict[str, Any]:
        """KV entries of the whole model against those without a plan; null where a budget is not known."""
        return _total(self.key_value_heads)

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The same for each layer."""
        indices = sorted({shared.layer for shared in self.key_value_heads})
        return [
            {"layer": index, **_total([shared for shared in self.key_value_heads if shared.layer == index])}
            for index in indices
        ]

    @property
    def notes(self) -> list[str]:
        """What a reader must know before acting on the plan."""
        marks = [head.mark for head in self.heads]
        beyond, extrapolated = marks.count("beyond"), marks.count("extrapolated")
        bound = sum(head.lower_bound for head in self.heads)
        notes = [
            f"budgets are for keys drawn at random from the law of windows of {self.run['window']:,} tokens; "
            "a longer context has other positions, which only a probe with longer windows sees"
        ]
        if beyond:
            whole = "their keys are all kept" if self.context else "no number is given"
            notes.append(f"{beyond} heads need more than ten times the largest n measured: {whole}")
        if extrapolated:
            notes.append(f"{extrapolated} budgets lie outside the sizes measured and are extrapolated")
        if bound:
            notes.append(f"{bound} heads are frozen: their errors, and so their budgets, are lower bounds")
        if self.temperatures is None:
            notes.append(
                "no temperatures: they need a second probe of this model with another window length, "
                "because the number of pooled tokens is not the length of a context"
            )
        return notes

    def trial_summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Measured errors over heads (median, 10% and 90% quantiles) by setting and way of choosing keys."""
        found: dict[str, dict[str, list[float]]] = {}
        for trial in self.trials:
            for name, error in trial.errors.items():
                found.setdefault(trial.setting, {}).setdefault(name, []).append(error.measured)
        return {
            setting: {
                name: dict(
                    zip(("low", "median", "high"), map(float, np.nanquantile(values, (0.1, 0.5, 0.9))), strict=True)
                )
                for name, values in ways.items()
            }
            for setting, ways in found.items()
        }

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per head: its budget, what it gave on the reserved windows, its temperature factor."""
        import pandas as pd

        tried: dict[tuple[int, int], dict[str, float]] = {}
        for trial in self.trials:
            cells = tried.setdefault((trial.layer, trial.head), {})
            cells[f"{trial.setting}_keys"] = trial.keys
            for name, error in trial.errors.items():
                cells[f"{trial.setting}_{name}"] = error.measured
                cells[f"{trial.setting}_{name}_stderr"] = error.stderr
        heated = {} if self.temperatures is None else {(h.layer, h.head): h.factor for h in self.temperatures.heads}
        rows = []
        for head in self.heads:
            row: dict[str, Any] = {
                "layer": head.layer,
                "head": head.head,
                "kv_head": head.kv_head,
                "regime": head.regime.value,
                "rate": head.rate,
                "keys": head.keys.tokens,
                "keys_low": head.keys.interval[0],
                "keys_high": head.keys.interval[1],
                "context": head.context,
                "ratio": head.ratio,
                "mark": head.mark,
                "lower_bound": head.lower_bound,
                **tried.get((head.layer, head.head), {}),
            }
            if self.temperatures is not None:
                row["temperature_factor"] = heated.get((head.layer, head.head))
            rows.append(row)
        return pd.DataFrame(rows)

    def document(self) -> dict[str, Any]:
        """The plan as a JSON document."""
        return {
            "inputs": {
                "model": self.run["model"],
                "corpus": self.run["corpus"],
                "window": self.run["window"],
                "error": self.error,
                "context": self.context,
            },
            "heads": [
                {
                    "layer": head.layer,
                    "head": head.head,
                    "kv_head": head.kv_head,
                    "regime": head.regime.value,
                    "remedy": head.regime.remedy,
                    "keys": {
                        "predicted": head.keys.tokens,
                        "interval": list(head.keys.interval),
                        "ratio": head.ratio,
                        "extrapolated": head.keys.extrapolated,
                        "beyond": head.keys.beyond,
                        "lower_bound": head.lower_bound,
                        "status": head.status.value,
                    },
                    "context": head.context,
                }
                for head in self.heads
            ],
            "key_value_heads": [
                {
                    "layer": shared.layer,
                    "kv_head": shared.kv_head,
                    "keys": shared.keys,
                    "ratio": shared.ratio,
                    "decided_by": shared.decided_by,
                    "mark": shared.mark,
                }
                for shared in self.key_value_heads
            ],
            "layers": self.layers,
            "total": self.total,
            "trial": {"heads": [trial.document() for trial in self.trials], "summary": self.trial_summary()}
            if self.trials
            else None,
            "temperature": None if self.temperatures is None else self.temperatures.document(),
            "notes": self.notes,
        }

    def save(self, folder: str | Path) -> list[Path]:
        """Write the budgets as `kv_budgets.json` and `kv_budgets.csv`; see `limitlens.budgets.export`."""
        from limitlens.budgets.export import write_budgets

        return write_budgets(self, folder)

    def __str__(self) -> str:
        from limitlens.budgets.plan_words import summary

        return "\n".join(summary(self))

    def _repr_html_(self) -> str:
        from html import escape

        from limitlens.budgets.plan_words import summary

        lines = "<br>".join(escape(line) for line in summary(self))
        return f"<p>{lines}</p>{self.table.to_html(index=False, float_format='{:.4g}'.format)}"


def plan(
    run: ProbeRun | Mapping[str, Any] | str | Path,
    error: float = 0.05,
    context: int | None = None,
    *,
    second: ProbeRun | Mapping[str, Any] | str | Path | None = None,
    trial: bool = True,
    model: LoadedModel | None = None,
    device: str = "auto",
    seed: int | None = None,
    progress: Callable[[float, float], None] | None = None,
) -> Plan:
    """KV entries per head for a relative output error.

    Parameters
    ----------
    run : ProbeRun, its document, or its folder
    error : float
        Relative output error that each head may make.
    context : int, optional
        Tokens in the context; endless when left out, and then no ratios are given.
    second : like run, optional
        A probe of the same model with another window length: temperatures are given then.
    trial : bool
        Try the budgets on the windows that the probe reserved, with the model that it names.
    model : LoadedModel, optional
        That model, where it is loaded already.
    seed : int, optional
        Of the draws of the trial; the probe's when left out.
    """
    document = read(run)
    if context is not None and context < 2:
        raise InputError(f"the context is {context} tokens; expected at least 2, such as 32768")
    heads = tuple(plan_head(head, error, context) for head in document["heads"])
    heated = None if second is None else temperatures(document, read(second), context)
    found: tuple[HeadTrial, ...] = ()
    if trial:
        draws = document["seed"] if seed is None else seed
        found = _try(document, error, context, model, device, draws, progress or (lambda done, total: None))
    return Plan(document, error, context, heads, found, heated)


def read(run: ProbeRun | Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The document of a run, given as an object, as a document, or by its folder; an `InputError` if it is none."""
    name, version = "the run", "another version"
    if isinstance(run, str | Path):
        name = repr(str(run))
        record = _read_record(Path(run), name)
        version = str(record.get("versions", {}).get("limitlens", version))
        found = record.get("result")
    else:
        found = run if isinstance(run, Mapping) else run.document()
    if not isinstance(found, Mapping):
        found = {}
    heads = found.get("heads") or [{}]
    missing = [key for key in NEEDED if key not in found] + [key for key in NEEDED_OF_HEADS if key not in heads[0]]
    if missing:
        raise InputError(
            f"{name} lacks {', '.join(missing)}; expected what this version of `limitlens probe` writes, and it was "
            f"written by {version}, so probe again"
        )
    return dict(found)


def _read_record(folder: Path, name: str) -> dict[str, Any]:
    """run.json of a folder, as far as it is one."""
    hint = "give the folder that `limitlens probe --out` wrote"
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = "holds no run.json (a probe writes it last)" if folder.is_dir() else "is no folder"
        raise InputError(f"{name} {what}; {hint}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"run.json in {name} could not be read ({error}); {hint}") from None
    if not isinstance(record, dict) or record.get("command") != "probe":
        raise InputError(f"{name} is not the folder of a probe; {hint}")
    return record


def _try(
    document: Mapping[str, Any],
    error: float,
    context: int | None,
    model: LoadedModel | None,
    device: str,
    seed: int,
    progress: Callable[[float, float], None],
) -> tuple[HeadTrial, ...]:
    """The plan on the windows that the probe reserved."""
    from limitlens.budgets.trial import run_trial
    from limitlens.experiments.study import choose_device
    from limitlens.models import Windows, load, open_corpus

    @cache  # every layer asks for the same contexts
    def budgets(tokens: int) -> dict[tuple[int, int], int]:
        planned = (plan_head(head, error, tokens) for head in document["heads"])
        return {(head.layer, head.head): head.keys.tokens or tokens for head in planned}

    try:
        loaded = model or load(document["model"], device=choose_device(device))
        corpus = open_corpus(document["corpus"])
        windows = Windows(loaded, corpus, length=document["window"], tokens=document["tokens_asked"])
    except InputError as problem:
        raise InputError(f"the plan cannot be tried: {problem}; or plan without a trial") from None
    for what, now, then in (
        ("model", loaded.sha256, document.get("model_sha256")),
        ("corpus", windows.sha256, document.get("corpus_sha256")),
    ):
        if now != then:
            raise InputError(
                f"the {what} {document[what]!r} is not what was probed (its digest differs); "
                "probe it again, or plan without a trial"
            )
    reserved = np.asarray(document["windows"]["reserved"], dtype=np.intp)
    found = run_trial(loaded, windows, reserved, budgets, context=context, seed=seed, report=progress)
    return tuple(found)


def _total(shared: tuple[SharedPlan, ...] | list[SharedPlan]) -> dict[str, Any]:
    """Entries kept and entries there are, summed over key/value heads."""
    kept = [head.keys for head in shared]
    there = [head.context for head in shared]
    entries = None if None in kept else sum(keys for keys in kept if keys is not None)
    context = None if None in there else sum(keys for keys in there if keys is not None)
    return {
        "key_value_heads": len(shared),
        "entries": entries,
        "entries_without_plan": context,
        "ratio": None if entries is None or not context else entries / context,
    }
