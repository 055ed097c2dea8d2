"""KV-cache plans (`limitlens.plan`): how many and which keys each head keeps, given a cache size or output error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.attention.kernels import choose_device
from limitlens.attention.policies import POLICIES, duo
from limitlens.cache import budgets
from limitlens.cache.budgets import BEST, RANDOM, PolicyTotal, at_keys, policy_total, probe_errors
from limitlens.cache.cut import CutCurves, cut_windows, keys_below, measure_cut, plan_cost, window_order
from limitlens.cache.layers import LayerCache, layer_caches, share_of
from limitlens.cache.plan_view import plan_view
from limitlens.cache.recall import RecallFit, TwoAxes, check_weights
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, Progress, check_number, check_relative, check_seed
from limitlens.models import LoadedModel, load, resolve_source
from limitlens.models.catalog import dtype_of
from limitlens.models.windows import check_special
from limitlens.probing.probe import probe
from limitlens.probing.result import ProbeRun
from limitlens.record import Run, json_text, read_run, text_writer
from limitlens.report.view import View
from limitlens.results import Result
from limitlens.sampling.checkpoint import Checkpoint

FORMAT = 3  # version of the file format of a plan and of kv_budgets.json
FITTED, CHECKED = 8, 4  # windows of text to choose a plan on, and to check its errors on
DEFAULT_SHARE = 0.25
PROBE_TOKENS = 100_000  # tokens of the probe that a plan for random keys runs
MIN_CONTEXT = 64
KINDS = ("full", "sliding", "none")  # of a layer: its cache holds the whole context, only its last tokens, or nothing

Rows = tuple[tuple[int, ...], ...]  # [layer][kv_head]; a layer without a cache has no heads


@dataclass(frozen=True)
class Total:
    """Size of a model's KV cache under a plan: of all its layers, or of those of one kind."""

    key_value_heads: int
    entries: int  # one entry is one key and its value
    entries_without_plan: int  # entries that the model's own cache holds
    share: float
    bytes: int


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Result):
    """Result of `limitlens.plan`: how many keys each key/value head keeps in the cache, and by which key policy."""

    kind, file, command = "plan", "heads", "plan MODEL"
    model: str
    model_sha256: str | None  # digest of the weights, where they are local files
    corpus: str
    corpus_sha256: str | None  # digest of the text that was read
    special: str  # tokens put around a window, as in a probe
    context: int  # tokens after which the cache is cut
    policy: str  # as asked for: "best" or one policy
    error: float | None  # target relative output error, where the plan is for one
    fitted: int  # windows of text that the plan was chosen on
    checked: int  # windows of text that its errors were checked on
    seed: int
    layer_kinds: tuple[str, ...]  # cache of each layer: "full" (the whole context), "sliding" (a part of it) or "none"
    own_cache: Rows  # entries that the model's own cache holds, [layer][kv_head]
    budgets: Rows  # keys kept, [layer][kv_head]; in sliding layers all that are held
    policies: tuple[tuple[str, ...], ...]  # [layer][kv_head]
    entry_bytes: tuple[int, ...]  # bytes of one key and its value in each layer, in the model's number format
    totals: tuple[PolicyTotal, ...]
    allocations: Mapping[str, Mapping[str, Rows]]  # keys kept by policy and allocation, all of the same cache size
    probed: bool  # whether the curve of random keys comes from a probe
    weights: Mapping[str, float] | None = None  # of text and recall; None: text, by Fisher information alone
    recall: RecallFit | None = None  # how the budgets were fitted to recall
    dtype: str = "float32"  # number format of the model
    warnings: tuple[str, ...] = ()

    @property
    def total(self) -> Total:
        """Size of the whole model's KV cache under the plan."""
        return self.size(self.budgets)

    @property
    def by_kind(self) -> dict[str, Total]:
        """Size of the KV cache under the plan by kind of layer, "full" and "sliding", where the model has such."""
        return {kind: self.size(self.budgets, kind) for kind in KINDS[:2] if kind in self.layer_kinds}

    def size(self, budgets: Rows, kind: str | None = None) -> Total:
        """Size of the KV cache, of all layers or of one kind, if it holds `budgets` entries, [layer][kv_head]."""
        layers = [layer for layer, own in enumerate(self.layer_kinds) if kind in (None, own)]
        entries, held = (sum(sum(rows[layer]) for layer in layers) for rows in (budgets, self.own_cache))
        size = sum(sum(budgets[layer]) * self.entry_bytes[layer] for layer in layers)
        return Total(sum(len(budgets[layer]) for layer in layers), entries, held, entries / held, size)

    @property
    def shares(self) -> list[list[float]]:
        """Share of the entries of the model's own cache that each key/value head keeps, [layer][kv_head]."""
        return [[kept / held for kept, held in zip(*rows, strict=True)]
                for rows in zip(self.budgets, self.own_cache, strict=True)]  # fmt: skip

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per key/value head: kind of its layer, key policy, number and share of kept keys."""
        rows = [
            (layer, head, self.layer_kinds[layer], *row)
            for layer, heads in enumerate(zip(self.policies, self.budgets, self.shares, strict=True))
            for head, row in enumerate(zip(*heads, strict=True))
        ]
        return pd.DataFrame(rows, columns=["layer", "kv_head", "kind", "policy", "budget", "share"])

    def document(self) -> dict[str, Any]:
        """JSON document of the plan, with the size of the cache and the share of keys that each head keeps."""
        sizes = {"total": vars(self.total), "by_kind": {kind: vars(part) for kind, part in self.by_kind.items()}}
        return {"format": FORMAT, **super().document(), **sizes, "shares": self.shares}

    @classmethod
    def load(cls, run: Run) -> Plan:
        """Read a plan from a run folder; a plan of an earlier file format raises an `InputError`."""
        if run.document.get("format") != FORMAT:
            given = f"{str(run.folder)!r} holds a cache plan of an earlier format"
            raise InputError(f"{given}; expected format {FORMAT}, so plan again with limitlens plan MODEL")
        return super().load(run)

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """Extra file for the run folder: kv_budgets.json, with the numbers of keys and policies, for other programs."""
        document = {"format": FORMAT, "model": self.model, "digest": self.model_sha256, "context": self.context,
                    "budgets": self.budgets, "shares": self.shares, "policies": self.policies,
                    "kind": self.layer_kinds, "bytes": self.total.bytes,
                    "layer_shares": [sum(row) / len(row) if row else None for row in self.shares]}  # fmt: skip
        return {"kv_budgets.json": text_writer(json_text(document))}

    def view(self) -> View:
        """Report of the plan: cache size, maps of shares and policies over heads, and errors of all key policies."""
        return plan_view(self)


def plan(
    model: str | LoadedModel, corpus: str | None = None,
    *, total: float | int | None = None, error: float | None = None, context: int = 4096, policy: str = BEST,
    run: ProbeRun | str | Path | None = None, special: str | None = None,
    weights: Mapping[str, float] | None = None, windows: tuple[int, int] = (FITTED, CHECKED), seed: int = 0,
    device: str = "auto", dtype: str = "float32", progress: Progress = lambda done, total: None,
    checkpoint: Checkpoint | None = None,
) -> Plan:  # fmt: skip
    """Choose how many keys each key/value head of a decoder keeps in its cache, and by which key policy.

    Parameters
    ----------
    model : an alias, a folder, a GGUF file, a hub id, or a loaded decoder with its language-model head
    corpus : text to measure errors on; by default that of the `run`, or "stdlib-docs"
    total : size of the cache: a share of the layers that cache the whole context (a float, 0.25 by default), or bytes
        of the whole cache (an int). Layers whose sliding window is shorter than the context are left as they are.
    error : relative output error that each head may make, instead of a total
    context : prompt length at which the cache is cut
    policy : "best" for the best policy of each head, or one by name, such as "snapkv" or "random"
    run : a probe of the model, or its folder, for the errors of random keys; a plan for "random" makes one if needed
    special : special tokens around each window, as in `probe`; by default those of the `run`, or "auto"
    weights : {"text": 1, "recall": 1} plans for the likelihood of text and for recall of planted facts, measured by
        real cuts on calibration prompts from the same text; "best" may then take a policy that reads the context twice.
        By default the plan is for text alone, by Fisher information.
    windows : number of windows of text to choose the plan on, and number to check its errors on
    dtype : number format of a model given by name: "float32", "bfloat16" or "float16"
    checkpoint : where finished windows are stored, so that the same call can continue

    >>> made = ll.plan(model, text, total=0.5, context=64, windows=(2, 2))
    >>> 0.45 < made.total.share <= 0.5
    True
    """
    if total is None and error is None:
        total = DEFAULT_SHARE
    _check_arguments(total, error, context, policy, windows, weights, seed)
    probed: ProbeRun | None = read_run(run).result(ProbeRun) if isinstance(run, str | Path) else run
    if probed is not None and probed.score_scale != 1:
        raise InputError(f"the run scaled its scores by {probed.score_scale:g}; expected a probe without score_scale")
    special = special or ("auto" if probed is None else probed.special.get("mode", "auto"))
    check_special(special)
    if corpus is None:
        corpus = "stdlib-docs" if probed is None else resolve_source(probed.corpus, probed.made)
    where = choose_device(device)
    loaded = model if isinstance(model, LoadedModel) else load(model, device=where, dtype=dtype_of(dtype), head=True)
    caches = layer_caches(loaded, context)
    share = share_of(total, caches, context) if isinstance(total, int) else total
    cut = cut_windows(loaded, corpus, special, context)
    fitted, needed = windows[0], sum(windows)
    if cut.count < needed:
        given = f"the corpus {corpus!r} gives {cut.count} windows of {cut.length:,} tokens"
        raise InputError(f"{given}; a plan needs {needed}, so give more text or a shorter context")
    if policy == RANDOM and probed is None:
        try:
            probed = probe(loaded, corpus, PROBE_TOKENS, special=special, seed=seed, checkpoint=checkpoint)
        except InputError as problem:
            need = f"budgets of random keys need a probe of {PROBE_TOKENS:,} tokens"
            raise InputError(f"{need}, or one given as the run: {problem}") from None
    if probed is not None and probed.model_sha256 != loaded.sha256:
        raise InputError(f"the run is of {probed.model!r} with other weights (digests differ); probe the model again")
    check_cost("the plan", *plan_cost(loaded, context, needed), yes=True)
    order = window_order(cut, seed)[:needed]
    resumable: dict[str, Any] = {"progress": progress, "checkpoint": checkpoint}
    if all(cache.entries < context for cache in caches):
        made = _untouched(caches, context, policy, error)
    else:
        curves = measure_cut(loaded, cut, order, context, tuple(POLICIES), seed=seed, **resumable)
        costs = budgets.fisher_costs(loaded, cut, order[:fitted], context, seed=seed)
        asked: dict[str, Any] = {"policy": policy, "error": error, "share": share, "run": probed, "fitted": fitted}
        axes = None if weights is None else TwoAxes(loaded, cut, order[:fitted], curves, weights, seed, **resumable)
        made = make_plan(curves, costs, caches, **asked, axes=axes)
    return replace(
        made, model=loaded.name, model_sha256=loaded.sha256, corpus=corpus, corpus_sha256=cut.sha256, special=special,
        seed=seed, dtype=str(loaded.model.dtype).removeprefix("torch."), warnings=tuple(cut.warnings),
    )  # fmt: skip


def _check_arguments(
    total: float | int | None, error: float | None, context: int, policy: str, windows: tuple[int, int],
    weights: Mapping[str, float] | None, seed: int,
) -> None:  # fmt: skip
    """Raise an `InputError` for arguments of `plan` that no plan can follow, before a model is loaded."""
    if total is not None and error is not None:
        raise InputError("both total and error were given; expected one of them")
    if weights is not None:
        check_weights(weights)
        if error is not None:
            raise InputError("weights and an error were given; expected a total with weights such as text=1,recall=1")
    if isinstance(total, float):
        check_number("total", total, "a share above 0 and at most 1, or bytes", closed=False, below=1 + 1e-9)
    if error is not None:
        check_relative(error)
    check_number("context", context, f"at least {MIN_CONTEXT} tokens, such as 4096", low=MIN_CONTEXT)
    check_number("windows", min(windows), "at least 1 for the curves and 1 for the check", low=1)
    check_seed(seed)
    if policy != BEST and (policy not in POLICIES or POLICIES[policy].sees_queries):
        usable = ", ".join(name for name, one in POLICIES.items() if not one.sees_queries)
        what = "is an oracle, which no cache can follow" if policy in POLICIES else "is unknown"
        raise InputError(f"the key policy {policy!r} {what}; expected {BEST} or one of {usable}")


def make_plan(
    curves: CutCurves, fisher: Array, caches: Sequence[LayerCache], *, policy: str = BEST, error: float | None = None,
    share: float | None = None, run: ProbeRun | None = None, fitted: int = FITTED, axes: TwoAxes | None = None,
) -> Plan:  # fmt: skip
    """Make a cache plan from error curves, for a target `error` or for a `share` of the cache of the measured layers.

    The first `fitted` windows of text choose the plan, and the others check its errors. `fisher` (layers, heads) comes
    from `fisher_costs`, `caches` is what the model's own cache holds of each layer, and `run` is a probe for the errors
    of random keys. `axes` fits a share to text and recall. All other layers are left as they are.
    """
    fit, check = curves.part(slice(fitted)), curves.part(slice(fitted, None))
    errors = fit.error()
    if run is not None:
        place = curves.policies.index(RANDOM)
        errors[place] = probe_errors(run, curves, errors[place, ..., 0])
    worst = fit.by_kv_head(errors).max(-2)  # (policies, layers, key/value heads, sizes)
    costs = fit.by_kv_head(errors**2 * (fit.full.mean(0) * fisher)[..., None]).sum(-2)
    # A policy that reads the context twice is used if asked for by name, or for recall.
    twice = axes is not None and axes.weights.get("recall", 0) > 0
    allowed = [name for name, one in POLICIES.items() if not one.sees_queries and (twice or not one.needs_repeat)]
    usable = [i for i, name in enumerate(curves.policies) if name in allowed]
    candidates = np.asarray(usable if policy == BEST else [curves.policies.index(policy)])
    shape = worst.shape[1:3]
    everything = curves.context * shape[0] * shape[1]
    recall = None
    if error is not None:
        needed = keys_below(worst, curves.sizes, error)
        keys = needed[candidates].min(0)
        chosen = candidates[needed[candidates].argmin(0)]
    else:
        assert share is not None
        fit_to = partial(budgets.least_cost, costs, curves.sizes) if axes is None else axes.fit
        chosen, keys, recall = fit_to(candidates, round(share * everything))
    total = int(keys.sum())
    allocated = {
        name: {
            "uniform": budgets.uniform(shape, total),
            "equal_error": budgets.equal_error(worst[i], curves.sizes, total),
            "fisher_weighted": budgets.fisher_weighted(costs[i], curves.sizes, total),
        }
        for i, name in enumerate(curves.policies)
    }
    if "streaming" in curves.policies:
        lost = costs[curves.policies.index("streaming")]
        window = at_keys(lost, curves.sizes, round(duo.WINDOW * curves.context))
        allocated["streaming"]["duo"] = duo.whole_heads(window - lost[..., -1], curves.context, total)
    own = [(BEST, chosen, keys)] if policy == BEST else []
    single = [(name, np.full(shape, i), allocated[name]["fisher_weighted"] if error is None else needed[i])
              for i, name in enumerate(curves.policies)]  # fmt: skip

    start = _untouched(caches, curves.context, policy, error)

    def rows(table: Any, others: Any = start.own_cache) -> Any:
        by_layer = dict(zip(curves.layers, np.asarray(table).tolist(), strict=True))
        return tuple(tuple(by_layer.get(layer, row)) for layer, row in enumerate(others))

    beside = sum(sum(row) for layer, row in enumerate(start.own_cache) if layer not in curves.layers)
    return replace(
        start, fitted=fitted, checked=len(check.full), budgets=rows(keys),
        policies=rows(np.asarray(curves.policies)[chosen], start.policies),
        totals=tuple(policy_total(check, *row, error, beside) for row in [*own, *single]),
        allocations={name: {kind: rows(table) for kind, table in kinds.items()} for name, kinds in allocated.items()},
        probed=run is not None, weights=None if axes is None else axes.weights, recall=recall,
    )  # fmt: skip


def _untouched(caches: Sequence[LayerCache], context: int, policy: str, error: float | None) -> Plan:
    """Plan that leaves every layer of a model as it is, measured on no text."""
    held = tuple((cache.entries,) * cache.heads for cache in caches)
    return Plan(
        model="", model_sha256=None, corpus="", corpus_sha256=None, special="auto", context=context, policy=policy,
        error=error, fitted=0, checked=0, seed=0, own_cache=held, budgets=held,
        layer_kinds=tuple("none" if not cache.heads else "full" if cache.entries == context else "sliding"
                          for cache in caches),
        policies=tuple(("recent",) * cache.heads for cache in caches),  # what a sliding window keeps
        entry_bytes=tuple(cache.entry_bytes for cache in caches), totals=(), allocations={}, probed=False,
    )  # fmt: skip
