"""From a probe to a plan: how many keys each head must keep for an error, in a context of a given length.

Each head's curve gives its budget (`head_plan`), query heads that share a key/value head take the largest of theirs,
and the windows that the probe reserved check it (`trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.attention.device import choose_device
from limitlens.cache.cache_plan import BEST, CachePlan, plan_cache
from limitlens.cache.head_plan import HeadPlan, SharedPlan, plan_head, shared_plans
from limitlens.cache.random_trial import WAYS, HeadTrial, run_trial
from limitlens.errors import InputError, Progress
from limitlens.models import LoadedModel, Windows, load, open_corpus, resolve_source
from limitlens.probing.figures import COLOURS
from limitlens.probing.findings import counts
from limitlens.probing.result import ProbeRun
from limitlens.record import Run, from_json, json_text, read_run, text_writer, to_json
from limitlens.report.view import Axis, Cell, Figure, Guide, Row, Section, Table, Text, View, head_map, look, points
from limitlens.report.words import plural, read_words, sentence
from limitlens.results import Result
from limitlens.sampling.checkpoint import Checkpoint, digest

SHOWN = 5  # heads at either end
DEEP = 100  # errors so many times below the one asked for are not drawn
NOTHING_SAVED = 0.99  # a share of the cache from which on a plan saves nothing worth the trouble
WORDS = read_words("cache/words.json")


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

        def told(name: str, count: int) -> str:
            grammar = {"s": "", "verb": "s"} if count == 1 else {"s": "s", "verb": ""}
            return str(said[name].format(count=count, **grammar, **known))

        return [positions, *(told(name, count) for name, count in counts.items() if count)]

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
            row |= {"regime": head.regime and head.regime.value, "rate": head.rate}
            row |= zip(("keys", "keys_low", "keys_high"), (head.keys.n, *head.keys.interval), strict=True)
            row |= {name: getattr(head, name) for name in ("context", "ratio", "mark", "lower_bound")}
            rows.append(row | tried.get(head.place, {}))
        return pd.DataFrame(rows)

    def document(self) -> dict[str, Any]:
        """The plan as a JSON document."""
        tried = {"heads": to_json(self.trials), "summary": self.trial_summary()}
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
        trials = from_json(tuple[HeadTrial, ...], (run.document["trial"] or {"heads": ()})["heads"])
        heads = from_json(tuple[HeadPlan, ...], run.document["heads"])
        return cls(**run.document["inputs"], heads=heads, trials=trials)

    def view(self) -> View:
        """Everything a plan has to show."""
        where = "an endless context" if self.context is None else f"a context of {self.context:,} tokens"
        counted, all_of = counts(self.heads).items(), f"of {len(self.heads)} heads are"
        advice = [f"{count} {all_of} {regime.value}: {regime.remedy}" for regime, count in counted]
        heads, percent = plural(len(self.heads), "head"), 100 * self.error
        read = WORDS["read"].format(heads=heads, model=self.model, percent=percent, where=where)
        meanings = Section("What the words mean", "", [Text(WORDS["meanings"], listed=True)], only="page")
        export = Section("For other programs", "", [Text([WORDS["export"]])])
        return View(
            title=f"Plan for {self.model}: {percent:g}% error",
            subtitle=f"{self.model} on {self.corpus}: relative output error {self.error:g} per head in {where}",
            verdict=(read, _found(self), " ".join(sentence(line) for line in advice)),
            sections=[*_budgets(self), *_trial(self), meanings, export],
            trust=self.notes,
        )

    def __repr__(self) -> str:
        where = "an endless context" if self.context is None else f"{self.context:,} tokens"
        share = self.total["share"]
        kept = "" if share is None else f", {share:.1%} of KV entries kept"
        return f"<Plan for {self.model}: error {self.error:g} in {where}, {len(self.heads)} heads{kept}>"

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """For other programs kv_budgets.csv, one row per key/value head, and the same as kv_budgets.json.

        There `budgets[layer][kv_head]` are the integers that per-head eviction methods index, `ratios` and `marks` have
        the same shape, and `compression_ratios[layer]`, which per-layer methods take, is the share of a layer's entries
        that is dropped; a layer without heads, and a number that is not known, is null.
        """
        heads, layers = self.key_value_heads, range(self.key_value_heads[-1].layer + 1)
        rows = [[one for one in heads if one.layer == layer] for layer in layers]
        dropped = {layer["layer"]: None if layer["ratio"] is None else 1 - layer["ratio"] for layer in self.layers}
        document = {"format": "limitlens-kv-budgets", "version": 1}
        document |= {name: getattr(self, name) for name in ("model", "error", "context")}
        for name, part in (("budgets", "keys"), ("ratios", "ratio"), ("marks", "mark")):
            document[name] = [[getattr(one, part) for one in row] or None for row in rows]
        document["compression_ratios"] = [dropped.get(layer) for layer in layers]
        table = pd.DataFrame([one.document() for one in heads]).rename(columns={"keys": "budget"})
        table.insert(4, "compression_ratio", 1 - table["ratio"].astype(float))
        csv = partial(table.astype({"budget": "Int64"}).to_csv, index=False)
        return {"kv_budgets.json": text_writer(json_text(document)), "kv_budgets.csv": csv}


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

    >>> run = ll.probe(model, corpus=text, tokens=3000, window=50, sizes=[8, 32, 128], replicates=4, queries=16)
    >>> made = ll.plan(run, error=0.2, context=512, trial=False)
    >>> 0 < made.total['share'] < 1
    True
    """
    probed: ProbeRun = read_run(run).result(ProbeRun) if isinstance(run, str | Path) else run
    if context is not None and context < 2:
        raise InputError(f"the context is {context} tokens; expected at least 2, such as 32768")
    if probed.score_scale != 1:
        told = "expected a probe of the model as it is, so probe without --score-scale"
        raise InputError(f"the run multiplied its scores by {probed.score_scale:g}; {told}")
    draws, report = probed.seed if seed is None else seed, progress or (lambda done, total: None)
    if keep is not None or total is not None:
        if context is None:
            raise InputError("no context was given; a choice of keys needs one to cut, such as 1,024 tokens")
        loaded = model or load(resolve_source(probed.model, probed.made), device=choose_device(device), head=True)
        if loaded.sha256 != probed.model_sha256:
            raise InputError(f"the model {probed.model!r} is not what was probed (its digest differs); probe it again")
        text, special = resolve_source(probed.corpus, probed.made), probed.special.get("mode", "auto")
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
        loaded = model or load(resolve_source(run.model, run.made), device=choose_device(device))
        text, special = open_corpus(resolve_source(run.corpus, run.made)), run.special.get("mode", "auto")
        windows = Windows(loaded, text, length=run.window, tokens=run.tokens_asked, special=special)
    except InputError as problem:
        raise InputError(f"the plan cannot be tried: {problem}; or plan without a trial") from None
    found = {"model": (loaded.sha256, run.model_sha256), "corpus": (windows.sha256, run.corpus_sha256)}
    if (other := next((what for what, (now, then) in found.items() if now != then), None)) is not None:
        told = "is not what was probed (its digest differs); probe it again, or plan without a trial"
        raise InputError(f"the {other} {getattr(run, other)!r} {told}")
    reserved = np.asarray(run.windows["reserved"], dtype=np.intp)
    asked = {"job": "plan", "weights": loaded.digest, "text": windows.sha256, "error": made.error, "seed": seed}
    asked |= {"context": made.context, "heads": digest(json_text(made.heads)), "device": loaded.model.device}
    job = (checkpoint or Checkpoint()).begin(asked)
    options: dict[str, Any] = {"context": made.context, "seed": seed, "report": progress, "job": job}
    return tuple(run_trial(loaded, windows, reserved, budgets, **options))


def _total(shared: Sequence[SharedPlan]) -> dict[str, Any]:
    """Entries kept and entries there are, summed over key/value heads; None where one is not known."""
    counts = ([getattr(head, name) for head in shared] for name in ("keys", "context"))
    kept, there = (None if None in found else sum(found) for found in counts)
    ratio = None if kept is None or not there else kept / there
    return {"key_value_heads": len(shared), "entries": kept, "entries_without_plan": there, "ratio": ratio}


def _found(plan: Plan) -> str:
    """What the cache would shrink to; said plainly where that is nothing."""
    known, total = sorted(head.keys.n for head in plan.heads if head.keys.n is not None), plan.total
    said = WORDS["middle"].format(middle=known[len(known) // 2]) if known else WORDS["out of reach"]
    if total["share"] is not None:
        nothing = WORDS["nothing"] if total["share"] >= NOTHING_SAVED else ""
        return f"{said} {WORDS['kept'].format(**total)}{nothing}."
    return f"{said} {WORDS['endless']}" if plan.context is None else said


def plan_figures(plan: Plan) -> list[Figure]:
    """Keys by layer, and the share of the context they are on a map of layers and heads, where there is a context."""
    widest = 1 + max(head.head for head in plan.heads)
    series = []
    for regime, colour in COLOURS.items():
        own = [head for head in plan.heads if head.regime is regime and head.keys.n is not None]
        if own:
            labels = [f"layer {head.layer}, head {head.head}\n{head.keys.n:,} keys" for head in own]
            across = [head.layer + 0.7 * head.head / widest for head in own]
            series.append(points(regime.value, across, [head.keys.n for head in own], colour, labels=labels))
    guides = [] if plan.context is None else [Guide("whole context", y=plan.context)]
    title = "Keys each head keeps"
    figures = [Figure(title, Axis("layer", whole=True), Axis("keys", log=True), series, guides, height=340)]
    if any(head.ratio is not None for head in plan.heads):
        places, shares = [head.place for head in plan.heads], [head.ratio for head in plan.heads]
        figures.append(head_map("Share of the context that is kept", "share kept", places, shares, height=340))
    return figures


def _heads_table(title: str, heads: Iterable[HeadPlan], shown: int | None = None) -> Table:
    def cells(head: HeadPlan) -> tuple[Cell, ...]:
        keys = ("beyond" if number is None else number for number in (head.keys.n, *head.keys.interval))
        share = "–" if head.ratio is None else f"{head.ratio:.1%}"
        mark = head.mark + (", lower bound" if head.lower_bound else "")
        return head.layer, head.head, *keys, share, mark, head.regime and head.regime.value, head.rate

    return Table(title, WORDS["columns"], [cells(head) for head in heads], shown=shown)


def _budgets(plan: Plan) -> list[Section]:
    ranked = sorted(plan.heads, key=lambda head: head.needed, reverse=True)
    most = _heads_table("Keys per head, largest first", ranked, 2 * SHOWN)
    lead = "One point a head; 95% intervals are in the table."
    sections = [Section("Keys each head keeps", lead, [Row(plan_figures(plan)), most])]
    if len(ranked) > 2 * SHOWN:
        fewest = _heads_table(f"The {SHOWN} heads that need the fewest keys", ranked[: -SHOWN - 1 : -1])
        sections.append(Section("", "", [fewest], only="terminal"))
    return sections


def _trial(plan: Plan) -> list[Section]:
    if not plan.trials:
        return []
    rows, figures, words = [], [], WORDS["trial"]
    for setting, ways in plan.trial_summary().items():
        tried = [trial for trial in plan.trials if trial.setting == setting]
        tokens = tried[0].context
        figures.append(_trial_figure(plan, tried, [*ways]))
        rows += [
            (f"{WAYS[name]}, {WORDS['settings'][setting]} of {tokens:,}", found["median"], found["low"], found["high"])
            for name, found in ways.items()
        ]
    table = Table(words["table"], words["columns"], rows)
    return [Section(words["title"], words["lead"].format(error=plan.error), [Row(figures), table])]


def _trial_figure(plan: Plan, tried: Sequence[HeadTrial], ways: Sequence[str]) -> Figure:
    """The error of every head in one setting, by layer, in the look of each way to choose its keys."""
    widest, series = 1 + max(trial.head for trial in tried), []
    for name in ways:
        # an oracle that misses nothing has no place on a logarithmic axis
        own = [(trial, found) for trial in tried if (found := trial.errors.get(name)) and found.measured > 0]
        if not own:
            continue
        x, y, stderr = zip(*((t.layer + 0.7 * t.head / widest, f.measured, f.stderr) for t, f in own), strict=True)
        colour, dash = look([*WAYS].index(name))  # the same in every setting
        labels = [f"layer {trial.layer}, head {trial.head}\n{trial.keys:,} keys" for trial, _ in own]
        series.append(points(WAYS[name], x, y, colour, stderr, dash=dash, labels=labels))
    words, setting = WORDS["trial"], WORDS["settings"][tried[0].setting]
    guides = [Guide(words["asked"].format(error=plan.error), y=plan.error)]
    title = words["figure"].format(setting=setting, tokens=tried[0].context)
    across, up = Axis("layer", whole=True), Axis("relative output error", log=True, low=plan.error / DEEP)
    note = words["below"].format(low=plan.error / DEEP)
    return Figure(title, across, up, series, guides, height=340, note=note)
