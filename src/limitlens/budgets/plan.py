"""From a probe to a plan: how many keys each head must keep for an error, in a context of a given length.

Each head's curve gives its budget (`head_plan`), query heads that share a key/value head take the largest of theirs,
and the windows that the probe reserved check it (`trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.attention.device import choose_device
from limitlens.budgets.cache_plan import BEST, CachePlan, plan_cache
from limitlens.budgets.export import budget_files
from limitlens.budgets.head_plan import HeadPlan, SharedPlan, plan_head, shared_plans
from limitlens.budgets.trial import HeadTrial, run_trial
from limitlens.budgets.view import WORDS, plan_view
from limitlens.errors import InputError, Progress
from limitlens.heads.result import ProbeRun
from limitlens.lazily import pd
from limitlens.models import LoadedModel, Windows, found_again, load, open_corpus
from limitlens.record import Run, plain, read_run, to_json, typed
from limitlens.results import Result
from limitlens.sampling.checkpoint import Checkpoint, digest


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Result):
    """KV entries per head for an error, and what they gave on the reserved windows."""

    kind, file = "plan", "heads"
    model: str  # what was probed: the model and the text as they were named, and the tokens in a window
    corpus: str
    window: int
    error: float  # relative output error that each head may make
    context: int | None  # tokens in the context; None: endlessly many
    heads: tuple[HeadPlan, ...]
    trials: tuple[HeadTrial, ...] = ()  # empty where the plan was not tried

    @cached_property
    def key_value_heads(self) -> tuple[SharedPlan, ...]:
        """Budgets of the key/value heads, in the order of layers and heads."""
        return shared_plans(self.heads)

    @property
    def total(self) -> dict[str, Any]:
        """KV entries of the whole model against those without a plan; null where a budget is not known."""
        total = _total(self.key_value_heads)
        return {**total, "share": total["ratio"]}

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The same for each layer."""
        groups = groupby(self.key_value_heads, lambda shared: shared.layer)
        return [{"layer": layer, **_total(list(group))} for layer, group in groups]

    @property
    def notes(self) -> list[str]:
        """What a reader must know before acting on the plan."""
        heads = self.heads
        counts = {
            "beyond": sum(head.keys.beyond and not head.keys.why for head in heads),
            "unknown": sum(bool(head.keys.why) for head in heads),
            "extrapolated": sum(head.mark == "extrapolated" for head in heads),
            "bound": sum(head.lower_bound for head in heads),
        }
        whole = "their keys are all kept" if self.context else "no number is given"
        known = {"whole": whole, "why": "; ".join(sorted({head.keys.why for head in heads if head.keys.why}))}
        said, positions = WORDS["notes"], WORDS["notes"]["positions"].format(window=self.window)
        return [positions, *(said[name].format(count=count, **known) for name, count in counts.items() if count)]

    def trial_summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Measured errors over heads (median, 10% and 90% quantiles) by setting and way of choosing keys."""
        found: dict[str, dict[str, list[float]]] = {}
        for trial in self.trials:
            for name, error in trial.errors.items():
                found.setdefault(trial.setting, {}).setdefault(name, []).append(error.measured)

        def quantiles(errors: list[float]) -> dict[str, float]:
            ends = np.nanquantile(errors, (0.1, 0.5, 0.9)).tolist()
            return dict(zip(("low", "median", "high"), ends, strict=True))

        return {setting: {name: quantiles(errors) for name, errors in ways.items()} for setting, ways in found.items()}

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per head: its budget and what it gave on the reserved windows."""
        tried: dict[tuple[int, int], dict[str, float]] = {}
        for trial in self.trials:
            cells = tried.setdefault((trial.layer, trial.head), {})
            cells[f"{trial.setting}_keys"] = trial.keys
            for name, error in trial.errors.items():
                column = f"{trial.setting}_{name}"
                cells |= {column: error.measured, f"{column}_stderr": error.stderr}
        rows = []
        for head in self.heads:
            row = {name: getattr(head, name) for name in ("layer", "head", "kv_head")}
            row |= {"regime": head.regime.value, "rate": head.rate}
            row |= zip(("keys", "keys_low", "keys_high"), (head.keys.n, *head.keys.interval), strict=True)
            row |= {name: getattr(head, name) for name in ("context", "ratio", "mark", "lower_bound")}
            rows.append(row | tried.get(head.place, {}))
        return pd.DataFrame(rows)

    def document(self) -> dict[str, Any]:
        """The plan as a JSON document."""
        tried = {"heads": plain(self.trials), "summary": self.trial_summary()}
        inputs = ("model", "corpus", "window", "error", "context")
        return {
            "inputs": {name: getattr(self, name) for name in inputs},
            "heads": [head.document() for head in self.heads],
            "key_value_heads": [shared.document() for shared in self.key_value_heads],
            "layers": self.layers,
            "total": self.total,
            "trial": tried if self.trials else None,
            "notes": self.notes,
        }

    @classmethod
    def load(cls, run: Run) -> Plan:
        """The plan that a run folder holds."""
        trials = typed(tuple[HeadTrial, ...], (run.document["trial"] or {"heads": ()})["heads"])
        heads = typed(tuple[HeadPlan, ...], run.document["heads"])
        return cls(**run.document["inputs"], heads=heads, trials=trials)

    def __repr__(self) -> str:
        where = "an endless context" if self.context is None else f"{self.context:,} tokens"
        share = self.total["share"]
        kept = "" if share is None else f", {share:.1%} of KV entries kept"
        return f"<Plan for {self.model}: error {self.error:g} in {where}, {len(self.heads)} heads{kept}>"

    view, files = plan_view, budget_files


def plan(
    run: ProbeRun | str | Path, error: float = 0.05, context: int | None = None,
    *, keep: str | None = None, total: float | int | None = None, trial: bool = True, model: LoadedModel | None = None,
    device: str = "auto", seed: int | None = None, progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> Plan | CachePlan:  # fmt: skip
    """KV entries per head of a probe (or of its folder) for a relative output error.

    A context that is not given is endless, and then no ratios are. A trial runs the model that the probe names, or
    `model` where that is loaded already, on the windows that the probe reserved; `seed` is that of its draws, the
    probe's when left out. What is measured is kept in a `checkpoint` where one is given, for the same call to go on.

    `keep`, the name of a choice of keys or "best", and `total`, a share of the cache (a float such as 0.25) or its size
    in bytes (an int) instead of an error, ask for a `CachePlan`: keys as they are really chosen, measured on windows as
    long as the context (`budgets.cache_plan`). It needs the decoder with its head, `model` too.
    """
    probed: ProbeRun = read_run(run).result(ProbeRun) if isinstance(run, str | Path) else run
    if context is not None and context < 2:
        raise InputError(f"the context is {context} tokens; expected at least 2, such as 32768")
    if probed.factor != 1:
        told = "expected a probe of the model as it is, so probe without a factor"
        raise InputError(f"the run multiplied its scores by {probed.factor:g}; {told}")
    draws, report = probed.seed if seed is None else seed, progress or (lambda done, total: None)
    if keep is not None or total is not None:
        if context is None:
            raise InputError("no context was given; a choice of keys needs one to cut, such as context=1024")
        loaded = model or load(found_again(probed.model, probed.made), device=choose_device(device), head=True)
        if loaded.sha256 != probed.model_sha256:
            raise InputError(f"the model {probed.model!r} is not what was probed (its digest differs); probe it again")
        text, special = found_again(probed.corpus, probed.made), probed.special.get("mode", "auto")
        asked: dict[str, Any] = {"keep": keep or BEST, "error": error, "total": total, "special": special}
        return plan_cache(loaded, text, context, **asked, seed=draws, progress=report, checkpoint=checkpoint)
    heads = tuple(plan_head(head, error, context) for head in probed.records)
    made = Plan(probed.model, probed.corpus, probed.window, error, context, heads)
    if not trial:
        return made
    return replace(made, trials=_try(made, probed, model, device, draws, report, checkpoint))


def _try(
    made: Plan, run: ProbeRun, model: LoadedModel | None, device: str, seed: int, progress: Progress,
    checkpoint: Checkpoint | None,
) -> tuple[HeadTrial, ...]:  # fmt: skip
    """The plan on the windows that the probe reserved."""

    @cache  # every layer asks for the same contexts
    def budgets(tokens: int) -> dict[tuple[int, int], int]:
        planned = (plan_head(head, made.error, tokens) for head in run.records)
        return {head.place: head.keys.n or tokens for head in planned}

    try:
        loaded = model or load(found_again(run.model, run.made), device=choose_device(device))
        text, special = open_corpus(found_again(run.corpus, run.made)), run.special.get("mode", "auto")
        windows = Windows(loaded, text, length=run.window, tokens=run.tokens_asked, special=special)
    except InputError as problem:
        raise InputError(f"the plan cannot be tried: {problem}; or plan without a trial") from None
    for what, name, now, then in (
        ("model", run.model, loaded.sha256, run.model_sha256),
        ("corpus", run.corpus, windows.sha256, run.corpus_sha256),
    ):
        if now != then:
            raise InputError(
                f"the {what} {name!r} is not what was probed (its digest differs); "
                "probe it again, or plan without a trial"
            )
    reserved = np.asarray(run.windows["reserved"], dtype=np.intp)
    asked = {"job": "plan", "weights": loaded.digest, "text": windows.sha256, "error": made.error, "seed": seed}
    asked |= {"context": made.context, "heads": digest(to_json(made.heads)), "device": loaded.model.device}
    job = (checkpoint or Checkpoint()).begin(asked)
    options: dict[str, Any] = {"context": made.context, "seed": seed, "report": progress, "job": job}
    return tuple(run_trial(loaded, windows, reserved, budgets, **options))


def _total(shared: Sequence[SharedPlan]) -> dict[str, Any]:
    """Entries kept and entries there are, summed over key/value heads; None where one is not known."""
    counts = ([getattr(head, name) for head in shared] for name in ("keys", "context"))
    kept, there = (None if None in found else sum(found) for found in counts)
    ratio = None if kept is None or not there else kept / there
    return {"key_value_heads": len(shared), "entries": kept, "entries_without_plan": there, "ratio": ratio}
