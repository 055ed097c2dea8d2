"""A plan of the cache in a live model: what the model predicts after the cache of its context was cut.

Each document is a context and a continuation. The context is read once; every choice ranks its keys while it is read,
and every setting (a choice of keys and an allocation, all of the same size) then reads the continuation from the same
cache, seeing only what it kept. What is compared with the uncut cache, token by token of the continuation: the
divergence KL(whole ‖ cut) of the predicted distributions, whether the likeliest token is the same, and how likely the
text itself is. All errors are those of means over documents, of differences between settings in the same documents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import pd
from limitlens.attention.device import choose_device
from limitlens.attention.policies import POLICIES, Selection
from limitlens.cache.cache_plan import BEST, CachePlan, cut_windows, order_of
from limitlens.cache.random_trial import Measured
from limitlens.errors import Array, InputError, Progress
from limitlens.models import Captured, LoadedModel, capture, intervene, load, resolve_source
from limitlens.models.policy_hook import PolicyHook
from limitlens.record import json_text, read_run
from limitlens.report.view import Colour, Table, View, points
from limitlens.report.words import read_words, worded_figure, worded_view
from limitlens.results import Result
from limitlens.sampling.checkpoint import Checkpoint, digest
from limitlens.statistics.documents import paired_mean

DOCUMENTS = 24
COLOURS: dict[str, Colour] = {"uniform": "grey", "equal error": "blue", "least cost": "green", "plan": "red"}
WORDS = read_words("cache/trial_words.json")


@dataclass(frozen=True)
class Setting:
    """What one choice and one allocation did to the model's predictions."""

    choice: str
    allocation: str  # one of `allocate.ALLOCATIONS`, or "plan": the plan's own choices and numbers
    divergence: Measured  # KL(whole ‖ cut), nats a token
    against_uniform: Measured | None  # its difference from the same choice with the same number for all heads
    agreement: Measured  # share of tokens whose likeliest successor is the same
    log_likelihood: Measured  # change of the text's log-likelihood, nats a token; negative is worse
    against_equal: Measured | None = None  # the same of the least cost and one error for all heads


@dataclass(frozen=True, eq=False, repr=False)
class CacheTrial(Result):
    """A plan of the cache, tried."""

    kind, file = "cache trial", "settings"
    model: str
    corpus: str
    context: int
    behind: int  # tokens of the continuation
    documents: int
    share: float  # of the cache that every setting keeps
    perplexity: float  # of the continuations with the whole cache
    settings: tuple[Setting, ...]
    interrupted: bool = False

    @property
    def ranked(self) -> list[Setting]:
        """The settings, the smallest divergence first."""
        return sorted(self.settings, key=lambda one: one.divergence.measured)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per setting, the smallest divergence first."""
        rows = []
        for one in self.ranked:
            row: dict[str, Any] = {"choice": one.choice, "allocation": one.allocation}
            for name in ("divergence", "against_uniform", "against_equal", "agreement", "log_likelihood"):
                found = getattr(one, name) or Measured(np.nan, np.nan)
                row |= {name: found.measured, f"{name}_stderr": found.stderr}
            rows.append(row)
        return pd.DataFrame(rows)

    def view(self) -> View:
        """What it shows."""

        def cell(found: Measured | None, digits: int = 4) -> str:
            return "–" if found is None else f"{found.measured:.{digits}f} ± {found.stderr:.{digits}f}"

        rows = [
            (_words(one.choice), one.allocation, cell(one.divergence), cell(one.against_uniform),
             cell(one.against_equal), cell(one.agreement, 3), cell(one.log_likelihood))
            for one in self.ranked
        ]  # fmt: skip
        series = []
        for way, colour in COLOURS.items():
            own = [one for one in self.settings if one.allocation == way]
            kl, same = ([getattr(one, name).measured for one in own] for name in ("divergence", "agreement"))
            spread = [one.divergence.stderr for one in own]
            series.append(points(way, same, kl, colour, spread, labels=[_words(one.choice) for one in own]))
        figure, table = worded_figure(WORDS["figure"], series), Table("Settings", WORDS["columns"], rows)
        return worded_view(WORDS, [figure, table], of=self, found=self._verdict())

    def _verdict(self) -> str:
        """What is best among choices that a cache can follow, and whether sharing out unevenly pays there."""
        able = [one for one in self.settings if one.choice == BEST or not POLICIES[one.choice].sees_queries]
        best = min(able, key=lambda one: one.divergence.measured)
        said = f"Least divergence: {_words(best.choice)}, {best.allocation}, {best.divergence.measured:.4f}"
        gain = best.against_uniform
        if gain is None:
            return f"{said} nats."
        sure = "beyond its error" if gain.measured < -2 * gain.stderr else "not beyond its error"
        return f"{said} nats; {-gain.measured:.4f} ± {gain.stderr:.4f} less than with equal numbers, {sure}."

    def __repr__(self) -> str:
        return f"<CacheTrial of {self.model}: {len(self.settings)} settings, {self.documents} documents>"


def trial(
    plan: CachePlan | str | Path, *, documents: int = DOCUMENTS, corpus: str | None = None,
    model: LoadedModel | None = None, device: str = "auto", progress: Progress = lambda done, total: None,
    checkpoint: Checkpoint | None = None,
) -> CacheTrial:  # fmt: skip
    """Run the model of a plan with its cache cut, on documents that the plan has not seen (or on another text).

    Every choice is tried in every allocation at the plan's size of the cache. Ctrl-C keeps the documents so far, a
    `checkpoint` all that is needed for the same call to go on.

    >>> run = ll.probe(model, corpus=text, tokens=3000, window=50, sizes=[8, 32, 128], replicates=4, queries=16)
    >>> cut = ll.plan(run, total=0.5, context=64, model=model)
    >>> ll.trial(cut, documents=2, model=model)
    <CacheTrial of letters: 28 settings, 2 documents>
    """
    made: CachePlan = read_run(plan).result(CachePlan) if isinstance(plan, str | Path) else plan
    loaded = model or load(resolve_source(made.model, made.made), device=choose_device(device), head=True)
    if made.model_sha256 is not None and loaded.sha256 != made.model_sha256:
        raise InputError(f"the weights of {loaded.name} are not those of the plan (its digest differs); plan it again")
    config = loaded.model.config.get_text_config()
    heads = config.num_hidden_layers, getattr(config, "num_key_value_heads", config.num_attention_heads)
    if np.shape(made.keys) != heads:
        given = f"the plan is of {np.shape(made.keys)} layers and key/value heads, {loaded.name} has {heads}"
        raise InputError(f"{given}; expected the model of the plan")
    text = corpus or resolve_source(made.corpus, made.made)
    windows = cut_windows(loaded, text, made.special, made.context)
    order = order_of(windows, made.seed)[0 if corpus else made.fitted + made.checked :][:documents]
    if len(order) < 2:
        raise InputError(f"the text {text!r} leaves {len(order)} documents for a trial; expected at least 2: give more")
    asked: dict[str, Any] = {"job": "trial", "weights": loaded.digest, "text": windows.sha256, "documents": order}
    asked |= {"plan": digest(json_text(made.document())), "device": loaded.model.device}

    def document(k: int) -> dict[str, Any]:
        (ids,) = windows.batches(1, [order[k]])
        likelihood, outcomes = _document(loaded, ids, made)
        return {"whole": np.array(likelihood), "cut": np.array(list(outcomes.values()))}

    options: dict[str, Any] = {"tokens": windows.length, "fewest": 2, "progress": progress}
    rows = (checkpoint or Checkpoint()).each(asked, len(order), document, **options)
    whole, names = rows["whole"], _settings(made)[0]
    numbers = {name: rows["cut"][:, place].T for place, name in enumerate(names)}
    settings = []
    for (choice, way), (divergence, agreement, likelihood) in numbers.items():
        uniform, equal = (
            _over_documents(divergence - numbers[choice, other][0]) if way in ways else None
            for other, ways in (("uniform", ("equal error", "least cost")), ("equal error", ("least cost",)))
        )
        rest = (divergence, agreement, likelihood - whole)
        kl, same, likely = (_over_documents(each) for each in rest)
        settings.append(Setting(choice, way, kl, uniform, same, likely, equal))
    perplexity = float(np.exp(-np.mean(whole)))
    behind = windows.length - made.context
    return CacheTrial(
        loaded.name, text, made.context, behind, len(whole), made.share, perplexity, tuple(settings),
        len(whole) < len(order),
    )  # fmt: skip


def _words(choice: str) -> str:
    return "the cheapest for each head" if choice == BEST else POLICIES[choice].label


def _document(
    loaded: LoadedModel, ids: Tensor, plan: CachePlan
) -> tuple[float, dict[tuple[str, str], tuple[float, float, float]]]:
    """Log-likelihood with the whole cache, and of each setting: divergence, agreement and log-likelihood, a token."""
    model, context = loaded.model, plan.context
    ids = ids.to(model.device)
    settings, take = _settings(plan)
    with torch.inference_mode():
        with capture(model, take):
            cache = model(input_ids=ids[:, :context], use_cache=True, logits_to_keep=1).past_key_values

        def read() -> tuple[Tensor, float]:
            logits = model(input_ids=ids[:, context:], past_key_values=cache).logits[0].float().log_softmax(-1)
            cache.crop(context - ids.shape[1])  # what was just read
            return logits, float(logits[:-1].gather(-1, ids[0, context + 1 :, None]).mean())

        whole, likelihood = read()
        outcomes = {}
        for name, setting in settings.items():
            with intervene(model, keys=setting):
                cut, own = read()
            divergence = float((whole.exp() * (whole - cut)).sum(-1).mean())
            outcomes[name] = divergence, float((whole.argmax(-1) == cut.argmax(-1)).float().mean()), own
    return likelihood, outcomes


def _settings(plan: CachePlan) -> tuple[dict[tuple[str, str], PolicyHook], Callable[[Captured], None]]:
    """What is tried, by choice and allocation, and what must see every layer while the context is read."""

    def choosing(name: str, keys: Any) -> PolicyHook:
        return PolicyHook(name, keys, plan.context, plan.seed, np.shape(plan.keys))

    settings = {(name, way): choosing(name, keys) for name, ways in plan.budgets.items() for way, keys in ways.items()}
    parts = {name: choosing(name, plan.keys) for name in sorted({name for row in plan.choices for name in row})}
    own = settings[plan.keep, "plan"] = choosing(next(iter(parts)), plan.keys)

    def take(call: Captured) -> None:
        for one in (*settings.values(), *parts.values()):
            one(call)
        kept, heads = {name: part.selected[call.layer] for name, part in parts.items()}, call.key.shape[1]
        shape = (len(call.key), heads, 1, plan.context)
        masks = [kept[name].mask.expand(shape)[:, [h]] for h, name in enumerate(plan.choices[call.layer])]
        none = call.key.new_zeros(shape, dtype=torch.float32)
        weights = [kept[name].log_weights for name in plan.choices[call.layer]]
        joined = [(none if part is None else part.expand(shape))[:, [h]] for h, part in enumerate(weights)]
        own.selected[call.layer] = Selection(torch.cat(masks, 1), torch.cat(joined, 1))

    return settings, take


def _over_documents(found: Array) -> Measured:
    """A mean over documents and its standard error, from one number for each."""
    own = paired_mean(found)
    return Measured(own.value, own.stderr)
