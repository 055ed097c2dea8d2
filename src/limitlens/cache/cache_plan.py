"""A plan of the cache by choices of keys: how many keys each key/value head keeps, chosen how, at what error or total.

Curves come from windows of the text as long as the context (`cut`); other windows, on which nothing was fitted, tell
which error the budgets really give. The cheapest choice is taken per head among those made before the queries arrive:
oracles are shown, never taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limitlens.arrays import pd
from limitlens.attention.policies import POLICIES, get_policy
from limitlens.cache import allocate
from limitlens.cache.cut import BEHIND, CutCurves, measure_cut
from limitlens.cache.fisher import effects
from limitlens.errors import Array, InputError, Progress, check_number
from limitlens.models import Captured, LoadedModel, Windows, capture, open_corpus
from limitlens.record import json_text, text_writer
from limitlens.report.view import Block, Table, Text, View, head_map
from limitlens.report.words import read_words, sentence, worded_view
from limitlens.results import Result
from limitlens.sampling.checkpoint import Checkpoint

BEST = "best"
FITTED, CHECKED = 8, 4  # windows behind the curves, and windows that check them
MOST = 64  # windows of a text that are cut at most: a plan takes some, a trial others
WORDS = read_words("cache/words.json")["cache"]


@dataclass(frozen=True)
class ChoiceTotal:
    """What one choice gives for the whole model; `best` is the mixture of choices."""

    choice: str
    oracle: bool
    share: float  # of the cache that is kept
    error: float  # on the windows that check: median and 90% quantile over query heads, and the median's standard error
    error_stderr: float
    error_high: float
    holding: float | None  # share of query heads whose error there is at most the one asked for; None where none was


@dataclass(frozen=True, eq=False, repr=False)
class CachePlan(Result):
    """Keys and choices of every key/value head, for every choice and allocation at one size of the cache."""

    kind, file, command = "cache plan", "heads", "plan --keep best"
    model: str
    corpus: str
    special: str  # what stands around a window, as in the probe
    context: int
    keep: str  # a choice, or "best"
    error: float | None  # relative output error asked for, or
    share: float  # the share of the cache that is kept
    fitted: int  # windows behind the curves, and windows that check them
    checked: int
    seed: int
    choices: tuple[tuple[str, ...], ...]  # of each layer's key/value heads
    keys: tuple[tuple[int, ...], ...]  # as many
    totals: tuple[ChoiceTotal, ...]
    budgets: Mapping[str, Mapping[str, tuple[tuple[int, ...], ...]]]  # by choice and allocation, at the same total
    model_sha256: str | None = None  # the digest of the weights, where they are files of this machine
    entry_bytes: int | None = None  # of one key and its value, in the numbers the model was loaded with
    warnings: tuple[str, ...] = ()

    @property
    def total(self) -> dict[str, Any]:
        """Entries of the whole model that are kept."""
        entries, without = int(np.sum(self.keys)), self.context * int(np.size(self.keys))
        return {"key_value_heads": int(np.size(self.keys)), "entries": entries, "entries_without_plan": without,
                "share": entries / without, "bytes": self.entry_bytes and entries * self.entry_bytes}  # fmt: skip

    @property
    def table(self) -> pd.DataFrame:
        """One row per key/value head."""
        (layer, head), keys = np.indices(np.shape(self.keys)).reshape(2, -1), np.ravel(self.keys)
        rows = {"layer": layer, "kv_head": head, "choice": np.ravel(self.choices), "budget": keys}
        return pd.DataFrame(rows | {"ratio": keys / self.context})

    def document(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {**super().document(), "total": self.total}

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """kv_budgets.json, which says keys and choice of every layer and head."""
        known = {"format": "limitlens-kv-budgets", "version": 2, "model": self.model, "context": self.context,
                 "budgets": self.keys, "choices": self.choices}  # fmt: skip
        return {"kv_budgets.json": text_writer(json_text(known))}

    def view(self) -> View:
        """What it shows."""
        total = self.total
        asked = f"{100 * self.error:g}% error" if self.error is not None else f"{self.share:.1%} of the cache"
        size = WORDS["size"].format(kept=total["bytes"] / 1e6) if total["bytes"] else ""
        nothing = WORDS["nothing"] if total["share"] > 0.99 else ""
        said = sentence(WORDS["kept"].format(**total, size=size, nothing=nothing))
        rows = [
            (WORDS["best"] if t.choice == BEST else POLICIES[t.choice].label, f"{t.share:.1%}", t.error, t.error_stderr,
             t.error_high, "–" if t.holding is None else f"{t.holding:.0%}")
            for t in self.totals
        ]  # fmt: skip
        counted = self.table.groupby("choice")["budget"].agg(["size", "mean"])
        taken = [(POLICIES[str(name)].label, int(row["size"]), round(row["mean"])) for name, row in counted.iterrows()]
        places, shares = zip(*(((row.layer, row.kv_head), row.ratio) for row in self.table.itertuples()), strict=True)
        blocks: list[Block] = [
            Table(WORDS["totals"], WORDS["columns"], rows),
            head_map(WORDS["map"], "share kept", places, shares, height=340),
            Table(WORDS["taken"], WORDS["taken columns"], taken),
        ]
        return worded_view(WORDS, blocks, [Text([WORDS["export"]])], of=self, asked=asked, said=said)

    def __repr__(self) -> str:
        return f"<CachePlan for {self.model}: {self.keep}, {self.total['share']:.1%} of {self.context:,} keys kept>"


def cut_windows(loaded: LoadedModel, corpus: str, special: str, context: int) -> Windows:
    """The text in windows of a context and what is read behind it."""
    length = context + BEHIND
    return Windows(loaded, open_corpus(corpus), length=length, tokens=MOST * length, special=special, fewer=True)


def order_of(windows: Windows, seed: int) -> list[int]:
    """Windows in the order they are used: those that fit, those that check, then those of a trial."""
    return [int(index) for index in np.random.default_rng([seed, 0xC7]).permutation(windows.count)]


def plan_cache(
    model: LoadedModel, corpus: str, context: int, *, keep: str = BEST, error: float = 0.05,
    total: float | int | None = None, special: str = "auto", seed: int = 0,
    progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> CachePlan:  # fmt: skip
    """Keys of every key/value head under a choice, for an error or a `total`: a share of the cache, or bytes (int)."""
    entry, heads = _entry(model)  # first, since a model outside the attention interface may be no encoder either
    if not model.causal:
        raise InputError(
            f"{model.name} is an encoder, which keeps no cache; expected a decoder, such as smollm2 (ll.intervene "
            "chooses an encoder's keys; docs/act.md says what that costs its embeddings)"
        )
    if keep != BEST and get_policy(keep).sees_queries:
        raise InputError(f"keys are kept by {keep!r}, an oracle that no cache can follow; expected another choice")
    if context < 64:
        raise InputError(f"the context is {context} tokens; expected at least 64, such as 1024")
    if isinstance(total, int):
        total = _share(total, entry, heads * context)
    if total is not None:
        expected = "a number above 0 and at most 1, or a size in bytes"
        check_number("the share of the cache", total, expected, closed=False, below=1 + 1e-9)
    check_number("the error", error, "a number above 0, such as 0.05", closed=False)
    windows = cut_windows(model, corpus, special, context)
    order, needed = order_of(windows, seed), FITTED + CHECKED
    if windows.count < needed:
        given = f"the corpus {corpus!r} gives {windows.count} windows of {windows.length:,} tokens"
        raise InputError(f"{given}; a plan by choices needs {needed}, so give more text or a shorter context")
    curves = measure_cut(
        model, windows, order[:needed], context, tuple(POLICIES), seed=seed, progress=progress, checkpoint=checkpoint
    )
    gains = effects(model, windows, order[:FITTED], context, seed=seed)
    asked: dict[str, Any] = {"keep": keep, "error": error, "total": total, "seed": seed, "fitted": FITTED}
    made = make_plan(model.name, corpus, special, curves, gains, **asked)
    return replace(made, model_sha256=model.sha256, entry_bytes=entry, warnings=tuple(windows.warnings))


def _entry(model: LoadedModel) -> tuple[int, int]:
    """Bytes of one cache entry, (key + value dimensions) × bytes a number, and key/value heads of the whole model."""
    calls: list[Captured] = []
    stack: Any = model.model.base_model
    with torch.inference_mode(), capture(stack, calls.append) as run_until_last_attention:
        run_until_last_attention(
            input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.model.device), use_cache=False
        )
    dims = calls[0].key.shape[-1] + calls[0].value.shape[-1]
    return dims * calls[0].key.element_size(), sum(call.key.shape[1] for call in calls)


def _share(size: int, entry: int, entries: int) -> float:
    """The share of a cache of so many entries that fits into a size in bytes."""
    if not entry <= size <= entry * entries:
        raise InputError(
            f"the cache is to take {size:,} bytes; expected between {entry:,}, one entry, and {entry * entries:,}, all "
            "of the context, or a share such as 0.25"
        )
    return size // entry / entries


def make_plan(
    model: str, corpus: str, special: str, curves: CutCurves, gains: Array, *, keep: str = BEST, error: float = 0.05,
    total: float | None = None, seed: int = 0, fitted: int = FITTED,
) -> CachePlan:  # fmt: skip
    """The plan from curves whose first windows fit and whose last ones check."""
    fit, check = curves.part(slice(fitted)), curves.part(slice(fitted, None))
    shape = curves.wrong.shape[2], curves.shared
    worst = fit.by_key_value_head(fit.error()).max(-2)  # (choices, layers, key/value heads, sizes)
    costs = fit.by_key_value_head(fit.wrong.mean(0) * gains[..., None]).sum(-2)
    free = [i for i, name in enumerate(curves.choices) if not POLICIES[name].sees_queries]
    mine = free if keep == BEST else [curves.choices.index(keep)]
    wanted, everything = fit.keys_for(error), curves.context * shape[0] * shape[1]
    if total is None:
        keys, picked = wanted[mine].min(0), np.asarray(mine)[wanted[mine].argmin(0)]
    else:
        keys = allocate.least_cost(costs[mine].min(0), curves.sizes, round(total * everything))
        picked = np.asarray(mine)[_at(costs[mine], curves.sizes, keys).argmin(0)]
    budget = int(keys.sum())
    budgets = {
        name: {
            "uniform": allocate.uniform(shape, budget),
            "equal error": allocate.equal_error(worst[i], curves.sizes, budget),
            "least cost": allocate.least_cost(costs[i], curves.sizes, budget),
        }
        for i, name in enumerate(curves.choices)
    }
    asked = error if total is None else None
    rows = [(name, np.full(shape, i), budgets[name]["least cost"] if asked is None else wanted[i])
            for i, name in enumerate(curves.choices)]  # fmt: skip
    totals = tuple(_total(check, *row, asked) for row in [(BEST, picked, keys), *rows])
    named_choices = tuple(tuple(curves.choices[i] for i in row) for row in picked)
    return CachePlan(
        model, corpus, special, curves.context, keep, asked, budget / everything, fitted, len(check.full), seed,
        named_choices,
        tuple(map(tuple, keys.tolist())), totals if keep == BEST else totals[1:],
        {name: {way: tuple(map(tuple, n.tolist())) for way, n in ways.items()} for name, ways in budgets.items()},
    )  # fmt: skip


def _at(curves: Array, sizes: Sequence[int], keys: Any) -> Array:
    """Curves (choices, ..., sizes) at numbers of keys (...), straight between sizes: (choices, ...)."""
    flat = [[np.interp(n, sizes, row) for n, row in zip(keys.ravel(), rows.reshape(-1, len(sizes)), strict=True)]
            for rows in curves]  # fmt: skip
    return np.asarray(flat).reshape(curves.shape[:-1])


def _total(check: CutCurves, name: str, picked: Any, keys: Any, error: float | None) -> ChoiceTotal:
    """What budgets give on the windows that check them."""
    per_head = [np.repeat(part, check.wrong.shape[3] // check.shared, 1) for part in (picked, keys)]

    def seen(curves: CutCurves) -> Array:
        found = _at(curves.error(), check.sizes, per_head[1])
        return np.asarray(np.take_along_axis(found, per_head[0][None], 0)[0])

    errors, count = seen(check), len(check.full)
    left = [check.part(np.arange(count) != row) for row in range(count)]
    without = [np.median(seen(curves)) for curves in left] if count > 1 else [np.nan]
    stderr, share = float(np.sqrt(np.var(without) * (count - 1))), float(keys.mean() / check.context)
    middle, high = np.quantile(errors, (0.5, 0.9)).tolist()
    holding = None if error is None else float((errors <= error).mean())
    return ChoiceTotal(name, name != BEST and POLICIES[name].sees_queries, share, middle, stderr, high, holding)
