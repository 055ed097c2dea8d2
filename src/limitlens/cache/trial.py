"""Trials of cache plans (`limitlens.trial`): how the predictions of a model change when its KV cache is cut.

The model reads a context, its cache is cut, and it predicts the continuation of the text or the answer to a question
that comes after the cut. Predictions are compared with those of the full cache by accuracy, KL divergence, agreement
of the likeliest token, and negative log-likelihood (nll).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.attention.kernels import choose_device
from limitlens.attention.policies import POLICIES, SHARED
from limitlens.cache.budgets import BEST, FULL
from limitlens.cache.compressed import check_plan
from limitlens.cache.cut import BEHIND, cut_windows, window_order
from limitlens.cache.plan import Plan, Rows
from limitlens.cache.reading import read_prompt
from limitlens.cache.tasks import SOLVED, TEXT, check_tasks, prompts_of
from limitlens.cache.trial_result import DUO, NUMBERS, OWN, PROMPT, RECALL, Trial, TrialRow
from limitlens.cost import check_cost, forward_cost
from limitlens.errors import Array, InputError, Progress, check_number
from limitlens.models import LoadedModel, load, resolve_source
from limitlens.models.catalog import dtype_of
from limitlens.models.chat import chat_of
from limitlens.models.intervene import kv_shape
from limitlens.record import json_text, read_run
from limitlens.sampling.checkpoint import Checkpoint, digest
from limitlens.statistics.documents import paired_mean

DOCUMENTS = 24
SCORES = ("accuracy", "nll", "kl", "agreement")  # of `Prompt.score`

Tables = dict[tuple[str, str], tuple[Any, Any]]  # policies and numbers of keys [layer][kv_head] by (policy, allocation)


def trial(
    plan: Plan | str | Path, *, tasks: Sequence[str] = (TEXT,), documents: int = DOCUMENTS, corpus: str | None = None,
    policies: Sequence[str] | None = None, model: LoadedModel | None = None, device: str = "auto",
    progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> Trial:  # fmt: skip
    """Measure how a model predicts with its cache cut as in a plan, on documents that the plan has not used.

    For comparison, every key policy is run with every allocation of keys to heads, at the cache size of the plan;
    `policies` names some of them. `tasks` are "text" and recall tasks of `limitlens.tasks`, which plant facts in the
    same documents. `corpus` replaces the plan's text. Ctrl-C keeps finished documents; with a `checkpoint`, calling
    again continues.

    >>> made = ll.plan(model, text, total=0.5, context=64, windows=(2, 2))
    >>> len(ll.trial(made, documents=2, model=model).rows)
    36
    """
    check_tasks(tasks)
    check_number("documents", documents, "at least 2, for the standard errors", low=2)
    known = (*POLICIES, *SHARED, DUO)
    if unknown := [name for name in policies or () if name not in known]:
        raise InputError(f"the policy {unknown[0]!r} is unknown; expected some of {', '.join(known)}")
    made: Plan = read_run(plan).result(Plan) if isinstance(plan, str | Path) else plan
    asked: dict[str, Any] = {"device": choose_device(device), "dtype": dtype_of(made.dtype)}
    loaded = model or load(resolve_source(made.model, made.made), head=True, **asked)
    check_plan(made, loaded)
    shape = kv_shape(loaded.model)
    text = corpus or resolve_source(made.corpus, made.made)
    windows = cut_windows(loaded, text, made.special, made.context)
    same = corpus is None or windows.sha256 == made.corpus_sha256  # the plan has used windows of this text
    used = made.fitted + made.checked if same else 0
    order = window_order(windows, made.seed)[used:][:documents]
    if len(order) < 2:
        raise InputError(f"the text {text!r} leaves {len(order)} documents for a trial; expected at least 2: give more")
    tables = _tables(made, shape, policies)
    rules = [name for name in SHARED if made.allocations and (policies is None or name in policies)]
    whole = sum(sum(row) for row, kind in zip(made.budgets, made.layer_kinds, strict=True) if kind == "full")
    count = 1 + len(tables) + len(rules)
    tokens = float(len(order) * len(tasks) * (3 * made.context + count * BEHIND))
    check_cost("the trial", *forward_cost(loaded.model, tokens, windows.length), yes=True)

    def document(k: int) -> dict[str, Any]:
        row, place = divmod(k, len(tasks))
        (prompt,) = prompts_of(loaded, windows, order[row], tasks[place : place + 1], made.context, made.seed + 1)
        read = read_prompt(loaded, prompt, made.seed)
        full = read.full
        numbers = [prompt.score(full, full)]
        numbers += [prompt.score(read.predict(read.cut(*table)), full) for table in tables.values()]
        numbers += [prompt.score(read.predict(read.shared(name, whole)), full) for name in rules]
        return {"numbers": np.array([[row[name] for name in SCORES] for row in numbers])}

    job: dict[str, Any] = {"job": "trial", "weights": loaded.digest, "text": windows.sha256, "documents": order}
    job |= {"plan": digest(json_text(made.document())), "device": loaded.model.device, "tasks": list(tasks)}
    job["methods"] = [*tables, *rules]
    options: dict[str, Any] = {"tokens": windows.length, "fewest": 2 * len(tasks), "progress": progress}
    found = (checkpoint or Checkpoint()).each(job, len(order) * len(tasks), document, **options)["numbers"]
    read = len(found) // len(tasks)
    numbers = found[: read * len(tasks)].reshape(read, len(tasks), count, len(SCORES))
    keys = [(FULL, FULL), *tables, *((name, PROMPT) for name in rules)]
    solved = tuple(
        task for place, task in enumerate(tasks) if task != TEXT and numbers[:, place, 0, 0].mean() >= SOLVED
    )
    rows = [row for place, task in enumerate(tasks) for row in _rows(made, keys, task, numbers[:, place])]
    if solved:
        rows += _rows(made, keys, RECALL, numbers[:, [tasks.index(task) for task in solved]].mean(1))
    warnings = list(windows.warnings)
    if set(tasks) - {TEXT} and chat_of(loaded) is None:
        warnings.append(f"{loaded.name} has no chat template: the recall tasks are asked in plain text")
    return Trial(
        loaded.name, text, made.context, BEHIND, read, tuple(tasks), solved, tuple(rows),
        interrupted=read < len(order), warnings=tuple(warnings),
    )  # fmt: skip


def _tables(made: Plan, shape: tuple[int, int], policies: Sequence[str] | None) -> Tables:
    """Key policies and numbers of keys [layer][kv_head] of every method, by its names; the plan itself is the last."""

    def filled(rows: Any, dummy: Any) -> list[Any]:  # the hook is never called in layers without a cache
        return [row or (dummy,) * shape[1] for row in rows]

    tables: Tables = {
        (DUO if allocation == DUO else name, allocation): (name, filled(budgets, 0))
        for name, allocations in made.allocations.items()
        for allocation, budgets in allocations.items()
        if policies is None or (DUO if allocation == DUO else name) in policies
    }
    own = filled(made.policies, "recent")
    if made.allocations:  # baseline of the plan; a model whose layers all slide has nothing to allocate
        tables.setdefault((made.policy, "uniform"), (own, filled(_uniform(made), 0)))
    tables[made.policy, OWN] = own, filled(made.budgets, 0)
    return tables


def _rows(plan: Plan, names: list[tuple[str, str]], task: str, numbers: Array) -> list[TrialRow]:
    """Average the scores (documents, names, `SCORES`) of one task over documents; the full cache comes first."""
    by_name = {name: dict(zip(SCORES, numbers[:, place].T, strict=True)) for place, name in enumerate(names)}
    full, own = by_name[FULL, FULL], by_name[plan.policy, OWN]

    def row(policy: str, allocation: str) -> TrialRow:
        scores = by_name[policy, allocation]
        values = dict(scores, nll_increase=scores["nll"] - full["nll"])
        if task == TEXT:
            del values["accuracy"]
        if allocation not in (OWN, FULL):
            values["kl_minus_plan"] = scores["kl"] - own["kl"]
            if task != TEXT:
                values["accuracy_minus_plan"] = scores["accuracy"] - own["accuracy"]
        if allocation != "uniform" and (policy, "uniform") in by_name:
            values["kl_minus_uniform"] = scores["kl"] - by_name[policy, "uniform"]["kl"]
        if allocation == "fisher_weighted":
            values["kl_minus_equal_error"] = scores["kl"] - by_name[policy, "equal_error"]["kl"]
        if allocation == FULL:
            budgets = plan.own_cache
        elif allocation in (OWN, PROMPT):
            budgets = plan.budgets  # rules that follow the prompt keep as many keys in all
        elif allocation == DUO:
            budgets = plan.allocations["streaming"][DUO]
        else:
            budgets = _uniform(plan) if policy == BEST else plan.allocations[policy][allocation]
        means = {name: paired_mean(value) for name, value in values.items()}
        total = plan.size(budgets)
        found: dict[str, Any] = dict.fromkeys(NUMBERS) | {name: mean.value for name, mean in means.items()}
        stderr = {name: mean.stderr for name, mean in means.items()}
        return TrialRow(policy, allocation, task, total.share, total.bytes, **found, stderr=stderr)

    return [row(*name) for name in names]


def _uniform(plan: Plan) -> Rows:
    """Equal numbers of keys for all key/value heads at the plan's cache size, which are the same for every policy."""
    return next(iter(plan.allocations.values()))["uniform"]
