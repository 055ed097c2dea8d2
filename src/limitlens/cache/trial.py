"""Trials of cache plans (`limitlens.trial`): how the predictions of a model change when its KV cache is cut.

The model reads the context of a document, its cache is cut, and it predicts the continuation. Predictions are compared
with those of the full cache by KL divergence, agreement of the likeliest token, and negative log-likelihood (nll).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import pd
from limitlens.attention.kernels import choose_device
from limitlens.attention.policies import POLICIES
from limitlens.cache.budgets import BEST, FULL, policy_label
from limitlens.cache.cut import BEHIND, cut_windows, window_order
from limitlens.cache.plan import Plan, Rows
from limitlens.cost import check_cost, forward_cost
from limitlens.errors import Array, InputError, Progress, check_number
from limitlens.estimate import Estimate
from limitlens.models import Captured, LoadedModel, capture, intervene, load, resolve_source
from limitlens.models.intervene import PolicyHook, kv_shape
from limitlens.record import json_text, read_run
from limitlens.report.view import Axis, Cell, Colour, Figure, Section, Table, View, points
from limitlens.results import Result
from limitlens.sampling.checkpoint import Checkpoint, digest
from limitlens.statistics.documents import paired_mean

DOCUMENTS = 24
OWN = "plan"  # name of the allocation that the plan itself chose
COLOURS: dict[str, Colour] = {"uniform": "grey", "equal_error": "blue", "fisher_weighted": "green", OWN: "red"}
NUMBERS = ("kl", "kl_minus_uniform", "kl_minus_equal_error", "agreement", "nll", "nll_increase")


@dataclass(frozen=True)
class TrialRow:
    """Predictions with a cache cut by one key policy and one allocation of keys to heads, against the full cache."""

    policy: str  # a key policy, "best", or "full" for the full cache
    allocation: str  # one of `budgets.ALLOCATIONS`, "plan" for that of the plan itself, or "full"
    task: str
    share: float  # share of the cache that is kept
    bytes: int
    kl: float  # KL(full ‖ cut), nats a token
    agreement: float  # share of tokens whose most likely successor is the same
    nll: float  # negative log-likelihood of the text, nats a token
    nll_increase: float  # nll minus that of the full cache
    kl_minus_uniform: float | None  # paired difference from uniform budgets with the same policy (of each head)
    kl_minus_equal_error: float | None  # difference from the equal-error allocation of the same policy
    stderr: Mapping[str, float]  # standard errors by field name

    def estimate(self, name: str) -> Estimate:
        """Value of the field `name`, such as "kl", with its standard error; NaN where the field is None."""
        return Estimate.of(getattr(self, name), self.stderr.get(name))


@dataclass(frozen=True, eq=False, repr=False)
class Trial(Result):
    """Result of `limitlens.trial`: predictions of a model under a cache plan, and under others of the same size."""

    kind, file, command = "trial", "rows", "trial PLAN"
    model: str
    corpus: str
    context: int
    behind: int  # tokens of a continuation
    documents: int
    rows: tuple[TrialRow, ...]  # the full cache first
    interrupted: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def ranked(self) -> list[TrialRow]:
        """Rows by increasing KL divergence from the full cache; the row of the full cache comes first."""
        return sorted(self.rows, key=lambda row: (row.policy != FULL, row.kl))

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table of KL, agreement and nll with standard errors: one row per policy and allocation, smallest KL first."""
        table = pd.DataFrame([vars(row) | {f"{n}_stderr": row.stderr.get(n) for n in NUMBERS} for row in self.ranked])
        return table.drop(columns="stderr")

    def view(self) -> View:
        """Report of the trial: a table of all key policies and allocations, and a figure of KL against agreement."""
        cut = self.ranked[1:]
        share, perplexity = cut[0].share, np.exp(self.ranked[0].nll)
        series = []
        for allocation, colour in COLOURS.items():
            own = [row for row in cut if row.allocation == allocation]
            labels = [policy_label(row.policy) for row in own]
            agreement, kl = ([getattr(row, name) for row in own] for name in ("agreement", "kl"))
            bars = [row.stderr["kl"] for row in own]
            series.append(points(_allocation(allocation), agreement, kl, colour, bars, labels=labels))
        axes = Axis("share of tokens with the same most likely successor"), Axis("KL, nats a token", log=True)
        columns = ("key policy", "allocation", *(name.replace("kl", "KL").replace("_", " ") for name in NUMBERS))
        names = [(policy_label(row.policy), _allocation(row.allocation)) for row in self.ranked]
        numbers = [map(row.estimate, NUMBERS) for row in self.ranked]
        cells: list[tuple[Cell, ...]] = [(*name, *row) for name, row in zip(names, numbers, strict=True)]
        lead = (
            "KL and nll in nats a token, agreement as a share of tokens: means over documents ± standard errors; "
            "differences are paired by document."
        )
        return View(
            title=f"Cache trial of {self.model}: {share:.1%} of the cache",
            subtitle=f"{self.model} on {self.corpus}: {self.documents} documents of {self.context:,} + {self.behind} "
                     "tokens",
            verdict=(
                f"With {share:.1%} of the cache of {self.context:,} tokens, {self.model} predicts {self.behind} more "
                f"tokens of {self.documents} documents; its perplexity with the full cache is {perplexity:.2f}.",
                f"{self._best()}{self._own()}",
                "Use per-head budgets only if their gain exceeds two standard errors.",
            ),
            sections=[
                Section("Policies and allocations at equal cache size", lead, [
                    Figure("KL and agreement", *axes, series, height=360),
                    Table("Policies and allocations", columns, cells),
                ])
            ],
            warnings=self.warnings,
            trust=["An oracle uses the scores of later queries; no cache can follow it."],
        )  # fmt: skip

    def _best(self) -> str:
        """Sentence on the best policy that a real cache can follow, and its gain over equal key counts per head."""
        usable = [row for row in self.ranked[1:] if row.policy == BEST or not POLICIES[row.policy].sees_queries]
        best, gain = usable[0], usable[0].kl_minus_uniform
        text = f"Smallest KL: {policy_label(best.policy)}, {_allocation(best.allocation)}, {best.kl:.4f} nats"
        if gain is None:
            return f"{text}."
        stderr = best.stderr["kl_minus_uniform"]
        clear = "more" if gain < -2 * stderr else "no more"
        return f"{text}; {-gain:.4f} ± {stderr:.4f} less than with uniform budgets, {clear} than two standard errors."

    def _own(self) -> str:
        """Sentence on the plan's own row: its KL against the same policies with equal key counts per head."""
        for row in self.rows:
            if row.allocation == OWN and row.kl_minus_uniform is not None:
                gain = f"{row.kl_minus_uniform:+.4f} ± {row.stderr['kl_minus_uniform']:.4f} nats"
                return f" KL of the plan minus that of its policies with uniform budgets: {gain}."
        return ""


def trial(
    plan: Plan | str | Path, *, documents: int = DOCUMENTS, corpus: str | None = None,
    model: LoadedModel | None = None, device: str = "auto", progress: Progress = lambda done, total: None,
    checkpoint: Checkpoint | None = None,
) -> Trial:  # fmt: skip
    """Measure how a model predicts with its cache cut as in a plan, on documents that the plan has not used.

    For comparison, every key policy is run with every allocation of keys to heads, at the cache size of the plan.
    `corpus` replaces the plan's text. Ctrl-C keeps finished documents; with a `checkpoint`, calling again continues.

    >>> made = ll.plan(model, text, total=0.5, context=64, windows=(2, 2))
    >>> len(ll.trial(made, documents=2, model=model).rows)
    30
    """
    check_number("documents", documents, "at least 2, for the standard errors", low=2)
    made: Plan = read_run(plan).result(Plan) if isinstance(plan, str | Path) else plan
    loaded = model or load(resolve_source(made.model, made.made), device=choose_device(device), head=True)
    if made.model_sha256 is not None and loaded.sha256 != made.model_sha256:
        raise InputError(f"the weights of {loaded.name} differ from those of the plan (by their digest); plan again")
    shape = kv_shape(loaded.model)
    planned = len(made.budgets), max(map(len, made.budgets))
    if planned != shape:
        given = f"the plan has {planned} layers and key/value heads, {loaded.name} has {shape}"
        raise InputError(f"{given}; expected the model of the plan")
    text = corpus or resolve_source(made.corpus, made.made)
    windows = cut_windows(loaded, text, made.special, made.context)
    same = corpus is None or windows.sha256 == made.corpus_sha256  # the plan has used windows of this text
    used = made.fitted + made.checked if same else 0
    order = window_order(windows, made.seed)[used:][:documents]
    if len(order) < 2:
        raise InputError(f"the text {text!r} leaves {len(order)} documents for a trial; expected at least 2: give more")

    def filled(rows: Any, dummy: Any) -> list[Any]:  # the hook is never called in layers without a cache
        return [row or (dummy,) * shape[1] for row in rows]

    tables: dict[tuple[str, str], tuple[Any, Any]] = {
        (name, allocation): (name, filled(budgets, 0))
        for name, allocations in made.allocations.items()
        for allocation, budgets in allocations.items()
    }
    policies = filled(made.policies, "recent")
    if made.allocations:  # baseline of the plan; a model whose layers all slide has nothing to allocate
        tables.setdefault((made.policy, "uniform"), (policies, filled(_uniform(made), 0)))
    tables[made.policy, OWN] = policies, filled(made.budgets, 0)

    tokens = float(len(order) * (made.context + (1 + len(tables)) * BEHIND))
    check_cost("the trial", *forward_cost(loaded.model, tokens, windows.length), yes=True)

    def document(k: int) -> dict[str, Any]:
        (ids,) = windows.batches(1, [order[k]])
        hooks = [PolicyHook(names, counts, made.context, made.seed, shape) for names, counts in tables.values()]
        return _read(loaded, ids, made.context, hooks)

    job: dict[str, Any] = {"job": "trial", "weights": loaded.digest, "text": windows.sha256, "documents": order}
    job |= {"plan": digest(json_text(made.document())), "device": loaded.model.device}
    options: dict[str, Any] = {"tokens": windows.length, "fewest": 2, "progress": progress}
    found = (checkpoint or Checkpoint()).each(job, len(order), document, **options)
    rows = _rows(made, list(tables), found["full"], found["cut"])
    read = len(found["full"])
    about = loaded.name, text, made.context, BEHIND, read, rows
    return Trial(*about, interrupted=read < len(order), warnings=tuple(windows.warnings))


def _read(loaded: LoadedModel, ids: Tensor, context: int, hooks: list[PolicyHook]) -> dict[str, Array]:
    """Predict the end of a document: nll with the full cache, and KL, agreement and nll (hooks, 3) with each cut."""
    model = loaded.model
    ids = ids.to(model.device)

    def select(call: Captured) -> None:
        for hook in hooks:
            hook(call)

    def read() -> tuple[Tensor, float]:
        # A copy, because a layer with a sliding window could not be cropped to the context again.
        log_p = model(input_ids=ids[:, context:], past_key_values=deepcopy(cache)).logits[0].float().log_softmax(-1)
        return log_p, -float(log_p[:-1].gather(-1, ids[0, context + 1 :, None]).mean())

    with torch.inference_mode():
        with capture(model, select):
            cache = model(input_ids=ids[:, :context], use_cache=True, logits_to_keep=1).past_key_values
        full, full_nll = read()
        numbers = []
        for hook in hooks:
            with intervene(model, keys=hook):
                cut, nll = read()
            kl = float((full.exp() * (full - cut)).sum(-1).mean())
            numbers.append((kl, float((full.argmax(-1) == cut.argmax(-1)).float().mean()), nll))
    return {"full": np.array(full_nll), "cut": np.array(numbers)}


def _rows(plan: Plan, names: list[tuple[str, str]], full: Array, cut: Array) -> tuple[TrialRow, ...]:
    """Average over documents: nll `full` (documents,), and KL, agreement and nll `cut` (documents, names, 3)."""
    kl = {name: cut[:, place, 0] for place, name in enumerate(names)}

    def row(policy: str, allocation: str, budgets: Rows, **numbers: Array) -> TrialRow:
        means = {name: paired_mean(values) for name, values in numbers.items()}
        values: dict[str, Any] = dict.fromkeys(NUMBERS) | {name: mean.value for name, mean in means.items()}
        total = plan.size(budgets)
        size: dict[str, Any] = {"share": total.share, "bytes": total.bytes}
        stderr = {name: mean.stderr for name, mean in means.items()}
        return TrialRow(policy=policy, allocation=allocation, task="text", **size, **values, stderr=stderr)

    zero = np.zeros_like(full)
    rows = [row(FULL, FULL, plan.own_cache, kl=zero, agreement=zero + 1, nll=full, nll_increase=zero)]
    for place, (policy, allocation) in enumerate(names):
        _, agreement, nll = cut[:, place].T
        numbers = {"kl": kl[policy, allocation], "agreement": agreement, "nll": nll, "nll_increase": nll - full}
        if allocation != "uniform" and (policy, "uniform") in kl:
            numbers["kl_minus_uniform"] = numbers["kl"] - kl[policy, "uniform"]
        if allocation == "fisher_weighted":
            numbers["kl_minus_equal_error"] = numbers["kl"] - kl[policy, "equal_error"]
        if allocation == OWN:
            budgets = plan.budgets
        else:
            budgets = _uniform(plan) if policy == BEST else plan.allocations[policy][allocation]
        rows.append(row(policy, allocation, budgets, **numbers))
    return tuple(rows)


def _uniform(plan: Plan) -> Rows:
    """Equal numbers of keys for all key/value heads at the plan's cache size, which are the same for every policy."""
    return next(iter(plan.allocations.values()))["uniform"]


def _allocation(name: str) -> str:
    return {"equal_error": "equal error", "fisher_weighted": "Fisher-weighted"}.get(name, name)
