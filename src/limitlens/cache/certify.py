"""Certified reads (`limitlens.certify`): how many keys a query must read for an output error of at most ε.

For one query after a context, the sampler of every rule draws its keys many times. Coverage is the share of draws with

    |output(read) − output| ≤ ε |output|,    promised with probability 1 − δ for each query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import bdtr
from scipy.stats import rankdata

from limitlens.attention.certified import AT_ONCE, FEWEST, FIRST, RULES, SINKS, WINDOW, ReadRule, read_keys
from limitlens.attention.kernels import choose_device
from limitlens.attention.subset import attend_subset
from limitlens.cache.certify_result import Certification, HeadReads, RuleReads, TaskScores
from limitlens.cache.cut import QUERIES, cut_windows, window_order
from limitlens.cache.layers import check_decoder
from limitlens.cache.reading import read_prompt
from limitlens.cache.tasks import check_tasks, prompts_of
from limitlens.cost import check_cost, forward_cost
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.models import Captured, LoadedModel, Windows, capture, load
from limitlens.models.intervene import certified_reads, check_promise, head_rows, predicted_rows
from limitlens.sampling.checkpoint import Checkpoint
from limitlens.sampling.streams import generator_for
from limitlens.statistics.documents import holm, paired_mean
from limitlens.theory.certificates import priority_reads

DOCUMENTS, DRAWS = 8, 64
EARLIER = 32  # queries whose attention predicts the scores of a query this many tokens later
NUMBERS = ("read", "held", "held_rms", "whole")  # of a query: means over draws
KNOWN = ("tail", "spread", "freedom", "effective_tail", "effective_tokens")  # of a query, from all its keys
TOLERANCE, LEVEL = 0.01, 0.05  # coverage that may be missing, and the level of the tests of heads
MIN_CONTEXT = 2 * WINDOW  # shorter contexts have hardly more keys than every query reads
LIVE = "int4"  # rule of `ll.intervene(model, certify=...)`

Promise = tuple[float, float]


def certify(
    model: str | LoadedModel, corpus: str = "stdlib-docs", *, context: int = 4096, error: float = 0.1,
    delta: float = 0.1, rules: Sequence[str] | None = None, documents: int = DOCUMENTS, draws: int = DRAWS,
    heads: float = 0.25, tasks: Sequence[str] = ("text",), special: str = "auto", seed: int = 0, device: str = "auto",
    progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> Certification:  # fmt: skip
    """Measure how many keys each query must read for an output error of at most `error` with probability 1 − `delta`.

    Parameters
    ----------
    model : an alias, a folder, a GGUF file, a hub id, or a loaded decoder with its language-model head
    context : tokens before the queries
    rules : names in `limitlens.attention.certified.RULES`; all by default
    documents, draws : windows of text, and draws of each query's sample
    heads : share of the key/value heads measured in each document, in turn, one query for each
    tasks : "text" and recall tasks that the model then answers with certified reads; none if empty

    >>> made = ll.certify(model, text, context=128, documents=2, draws=8, heads=1.0, rules=['int4'], tasks=[])
    >>> 0 < made.overall['read'] <= 1
    True
    """
    promise = check_promise(error, delta)
    names = list(RULES) if rules is None else list(rules)
    if not names or (unknown := [name for name in names if name not in RULES]):
        given = f"the rule {unknown[0]!r} is unknown" if names else "no rule was given"
        raise InputError(f"{given}; expected some of {', '.join(RULES)}")
    check_number("context", context, f"at least {MIN_CONTEXT} tokens, such as 4096", low=MIN_CONTEXT)
    check_number("documents", documents, "at least 2, for the interval", low=2)
    check_number("draws", draws, "at least 1", low=1)
    check_number("heads", heads, "a share above 0 and at most 1", closed=False, below=1 + 1e-9)
    check_seed(seed)
    if tasks:
        check_tasks(tasks)
    loaded = model if isinstance(model, LoadedModel) else load(model, device=choose_device(device), head=True)
    check_decoder(loaded)
    windows = cut_windows(loaded, corpus, special, context)
    if windows.count < documents:
        given = f"the corpus {corpus!r} gives {windows.count} windows of {windows.length:,} tokens"
        raise InputError(f"{given}; {documents} documents were asked for, so give more text or a shorter context")
    tokens = float(windows.length * documents * (1 + 2 * len(tasks)))
    check_cost("the certificate", *forward_cost(loaded.model, tokens, windows.length), yes=True)
    order = window_order(windows, seed)[:documents]
    options: dict[str, Any] = {"draws": draws, "heads": heads, "seed": seed}
    jobs = [(promise, name) for name in names]
    resumable: dict[str, Any] = {"progress": progress, "checkpoint": checkpoint}
    found = measure_reads(loaded, windows, order, context, jobs, **options, **resumable)
    return summarise(loaded, windows, order, corpus, context, found, names, promise, tasks, **options)


def measure_reads(
    loaded: LoadedModel, windows: Windows, order: Sequence[int], context: int, jobs: Sequence[tuple[Promise, str]],
    *, draws: int = DRAWS, heads: float = 1.0, seed: int = 0, turn: int = 0,
    progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure reads and coverage of jobs ((ε, δ), rule), at one query of each measured head and document.

    Arrays: "reads" (documents, layers, jobs, heads, `NUMBERS`), "shared" (documents, layers, jobs, kv heads) with the
    share of keys that the heads of one key/value head read together, "known" (documents, layers, heads, `KNOWN`). NaN
    marks heads that were not measured; `turn` is that of the first document, which says which heads are.
    """
    stack: Any = loaded.model.base_model

    def document(k: int) -> dict[str, Any]:
        rows: list[tuple[Array, Array, Array]] = []
        waiting: list[_Queries] = []
        layers: list[int] = []
        (ids,) = windows.batches(1, [order[k]])

        def take(call: Captured) -> None:
            if not call.slides(context):
                entropy, every = [seed, int(order[k]), call.layer], round(1 / heads)
                waiting.append(
                    _Queries.of(call, context, [RULES[name] for _, name in jobs], draws, every, k + turn, entropy)
                )
                layers.append(call.layer)
                numbers = sum(one.uniform.numel() for one in waiting)
                if numbers > AT_ONCE[call.key.device.type != "cpu"] // 2:
                    finish()

        def finish() -> None:
            rows.extend(_reads(waiting, jobs, draws))
            waiting.clear()

        with torch.inference_mode(), capture(stack, take) as run_until_last_attention:
            run_until_last_attention(input_ids=ids.to(loaded.model.device), use_cache=False)
        if not layers:
            given = f"every layer of {loaded.name} has a sliding window shorter than the context of {context:,} tokens"
            raise InputError(f"{given}; expected a layer that caches all of it, so use a shorter context")
        with torch.inference_mode():
            finish()
        found = dict(zip(("reads", "shared", "known"), map(np.stack, zip(*rows, strict=True)), strict=True))
        return found | {"layers": np.array(layers)}

    job: dict[str, Any] = {"job": "certify", "weights": loaded.digest, "text": windows.sha256, "windows": list(order)}
    job |= {"context": context, "jobs": list(jobs), "draws": draws, "heads": heads, "seed": seed}
    options: dict[str, Any] = {"tokens": windows.length, "fewest": min(2, len(order)), "progress": progress}
    return (checkpoint or Checkpoint()).each(job, len(order), document, **options)


@dataclass(frozen=True, eq=False)
class _Queries:
    """One query of each measured head of a layer, and predicted scores; heads that share keys are adjacent."""

    shape: tuple[int, int]  # numbers of query heads and key/value heads of the layer
    heads: NDArray[np.int64]
    scores: torch.Tensor  # (h, 1, n)
    value: torch.Tensor  # (h, n, v)
    seen: torch.Tensor
    sinks: torch.Tensor | None  # (h, 1)
    full: torch.Tensor  # (h, v): outputs with all keys
    rms: torch.Tensor  # (h,): root mean square outputs
    uniform: torch.Tensor  # (h, draws, n)
    predicted: dict[tuple[str, bool], torch.Tensor]  # (h, 1, n) by predictor, and whether they are upper bounds

    @classmethod
    def of(
        cls, call: Captured, context: int, rules: Sequence[ReadRule], draws: int, every: int, turn: int,
        entropy: list[int],
    ) -> _Queries:  # fmt: skip
        """Draw one query for each key/value head of a layer whose turn it is."""
        (count, total), kv_heads, device = call.query.shape[1:3], call.key.shape[1], call.key.device
        drawn = np.random.default_rng(entropy).integers(context, total, kv_heads)
        chosen = [kv for kv in range(kv_heads) if (call.layer * kv_heads + kv + turn) % every == 0]
        groups = count // kv_heads
        heads = np.array([kv * groups + group for kv in chosen for group in range(groups)], dtype=np.int64)
        own = torch.from_numpy(heads).to(device)
        places = torch.from_numpy(drawn[chosen].repeat(groups)[:, None]).to(device)
        some = torch.linspace(context, total - 1, QUERIES, device=device).long().expand(len(heads), -1)
        scores, value, seen, sinks = head_rows(call, 0, own, torch.cat([some, places], 1))
        _, outputs = attend_subset(scores, value, mask=seen, sinks=sinks)
        rms = outputs[:, :-1].square().sum(-1).mean(-1).sqrt()
        uniform = torch.empty((len(chosen), draws, total), device=device)  # the same for all heads that share keys
        for kv, numbers in zip(chosen, uniform, strict=True):
            numbers.uniform_(generator=generator_for(*entropy, kv, device=device))
        predicted: dict[tuple[str, bool], torch.Tensor] = {}
        for rule in rules:
            kind = (rule.predictor, rule.size == "proved")
            if kind not in predicted:
                predicted[kind] = _predictions(call, own, places, rule)
        return cls(
            (count, kv_heads), heads, scores[:, -1:], value, seen[:, -1:], None if sinks is None else sinks[:, -1:],
            outputs[:, -1], rms, uniform.repeat_interleave(groups, 0), predicted,
        )  # fmt: skip

    def known(self) -> torch.Tensor:
        """Numbers `KNOWN` (h, ·): mass and spread of the tail, its degrees of freedom, and effective tokens."""
        weight = self.scores.masked_fill(~self.seen, float("-inf")).softmax(-1)[:, 0]
        place = self.seen[:, 0].cumsum(-1)
        inner = (place > SINKS) & (place <= place[:, -1:] - WINDOW) & self.seen[:, 0]
        tail = (weight * inner).double()
        away = self.value - self.full[:, None]
        covariance = ((away * tail[..., None].float()).mT @ away).double()
        trace, mass = covariance.diagonal(dim1=-2, dim2=-1).sum(-1), tail.sum(-1)
        freedom = trace.square() / covariance.square().sum((-1, -2)).clamp_min(1e-300)
        spread = trace / self.full.double().square().sum(-1).clamp_min(1e-300)
        effective = mass.square() / tail.square().sum(-1).clamp_min(1e-300)
        return torch.stack([mass, spread, freedom, effective, 1 / weight.double().square().sum(-1)], -1)


def _predictions(call: Captured, heads: torch.Tensor, places: torch.Tensor, rule: ReadRule) -> torch.Tensor:
    """Predicted scores (h, 1, n) of the queries at `places` (h, 1) of some heads."""
    if rule.predictor != "earlier":
        return predicted_rows(call, 0, heads, places, rule)
    past = places + torch.arange(1 - 2 * EARLIER, 1 - EARLIER, device=places.device)
    attended, _, seen, _ = head_rows(call, 0, heads, past)
    return attended.masked_fill(~seen, float("-inf")).softmax(-1).mean(1, keepdim=True).clamp_min(1e-12).log()


def _reads(
    layers: Sequence[_Queries], jobs: Sequence[tuple[Promise, str]], draws: int
) -> list[tuple[Array, Array, Array]]:
    """Arrays of `measure_reads` for each of some layers of a document, whose queries are measured together."""

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(one, name) for one in layers])

    if not layers:
        return []
    scores, value, seen, full, rms, uniform = map(joined, ("scores", "value", "seen", "full", "rms", "uniform"))
    sinks = None if layers[0].sinks is None else joined("sinks")
    number, total = seen.sum(-1), scores.shape[-1]  # (h, 1) visible keys
    groups = layers[0].shape[0] // layers[0].shape[1]
    found = torch.full((len(jobs), len(scores), len(NUMBERS)), float("nan"), device=scores.device)
    shared = torch.full((len(jobs), len(scores) // groups), float("nan"), device=scores.device)

    sunk = None if sinks is None else sinks[:, 0]
    for j, (promise, name) in enumerate(jobs if len(scores) else []):
        rule = RULES[name]
        predicted = torch.cat([one.predicted[rule.predictor, rule.size == "proved"] for one in layers])
        given = (scores[:, 0], predicted[:, 0], value, seen[:, 0], promise, uniform.flatten(0, 1), sunk)
        mask, weights = (part.view(-1, draws, total) for part in read_keys(rule, *given))
        sums = None if sinks is None else sinks.expand(-1, draws)
        _, output = attend_subset(scores, value, mask=mask, log_weights=weights, sinks=sums)
        wrong, read = (output - full[:, None]).norm(dim=-1), mask.sum(-1)
        whole = read == number
        numbers = (read / number, whole | (wrong <= promise[0] * full.norm(dim=-1, keepdim=True)),
                   whole | (wrong <= promise[0] * rms[:, None]), whole)  # fmt: skip
        found[j] = torch.stack([part.float().mean(-1) for part in numbers], -1)
        together = mask.view(-1, groups, draws, total).any(1).sum((-1, -2))
        shared[j] = together / (draws * number[::groups, 0])
    known = torch.cat([one.known() for one in layers])
    place, rows = 0, []
    for one in layers:
        own, pairs = slice(place, place + len(one.heads)), one.heads[::groups] // groups
        row = (np.full((len(jobs), one.shape[0], len(NUMBERS)), np.nan), np.full((len(jobs), one.shape[1]), np.nan),
               np.full((one.shape[0], len(KNOWN)), np.nan))  # fmt: skip
        row[0][:, one.heads] = found[:, own].cpu().numpy()
        row[1][:, pairs] = shared[:, place // groups : place // groups + len(pairs)].cpu().numpy()
        row[2][one.heads] = known[own].cpu().numpy()
        rows.append(row)
        place += len(one.heads)
    return rows


def summarise(
    loaded: LoadedModel, windows: Windows, order: Sequence[int], corpus: str, context: int, found: dict[str, Any],
    rules: Sequence[str], promise: Promise, tasks: Sequence[str], *, draws: int, heads: float, seed: int,
) -> Certification:  # fmt: skip
    """Result of the arrays of `measure_reads` whose jobs are `rules` for one promise, with predictions on `tasks`."""
    reads, config = found["reads"], loaded.model.config.get_text_config()
    count = np.isfinite(reads[:, :, 0, :, 0]).sum(0)  # queries of each head (layers, heads)
    if not count.any():
        raise InputError(f"heads is {heads:g}, and no head was drawn; expected a larger share, such as 0.25")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows, tests = {}, {}
    for j, name in enumerate(rules):
        means = _mean(reads[:, :, j])  # (layers, heads, `NUMBERS`)
        tests[name] = np.full(count.shape, np.nan)
        p = bdtr(np.rint(np.nan_to_num(means[..., 1]) * count * draws), count * draws, 1 - promise[1])[count > 0]
        tests[name][count > 0] = holm(p.tolist())
        rejected = int((tests[name] < LEVEL).sum())
        measured = reads[:, :, j][np.isfinite(reads[:, :, j, :, 0])]  # (queries, `NUMBERS`)
        read, held, held_rms, whole = measured.mean(0).tolist()
        covered = _mean(reads[:, :, j, :, 1].reshape(len(reads), -1).T)  # of each document
        stderr = paired_mean(covered[np.isfinite(covered)]).stderr
        low, high = np.clip(held + 1.96 * np.nan_to_num(stderr, nan=1.0) * np.array([-1, 1]), 0, 1).tolist()
        selection = RULES[name].selection_bytes(dim)
        rows[name] = RuleReads(
            RULES[name].label, RULES[name].status, read, float(np.median(measured[:, 0])), read + selection,
            float(np.nanmean(found["shared"][:, :, j])) + selection, held, (low, high),
            tuple(np.quantile(measured[:, 1], (0.05, 0.25, 0.5)).tolist()), held_rms, whole, rejected,
            bool(held >= 1 - promise[1] - TOLERANCE and not rejected),
        )  # fmt: skip
    keeping = [name for name in rules if rows[name].keeps]
    best = min(keeping, key=lambda name: rows[name].bytes) if keeping else max(rules, key=lambda name: rows[name].held)
    tail, spread, freedom, effective, _ = np.moveaxis(found["known"], -1, 0)
    sampled = priority_reads(tail, spread, freedom, effective, *promise, max(FEWEST, FIRST * context))
    predicted = np.minimum(1.0, (SINKS + WINDOW + sampled) / context)
    means, expected = _mean(reads[:, :, rules.index(best)]), _mean(predicted)
    table = tuple(
        HeadReads(int(found["layers"][0][i]), int(head), p=float(tests[best][i, head]),
                  predicted=float(expected[i, head]), **dict(zip(NUMBERS, means[i, head].tolist(), strict=True)))
        for i, head in np.argwhere(count)
    )  # fmt: skip
    live = best if RULES[best].predictor != "earlier" else LIVE
    linked = reads[:, :, rules.index(LIVE if LIVE in rules else best), :, 0]
    return Certification(
        loaded.name, corpus, context, *promise, len(reads), draws, heads, seed, rows, best, bool(keeping), table,
        _link(linked, predicted, found["known"]), live,
        tuple(
            task_result(task, [prompt_scores(loaded, windows, row, task, context, promise, live, seed)
                               for row in order[: len(reads)]]) for task in tasks
        ),
        interrupted=len(reads) < len(order), warnings=tuple(windows.warnings),
    )  # fmt: skip


def _link(reads: Array, predicted: Array, known: Array) -> dict[str, float | None]:
    """Rank correlation over heads between reads in one half of the documents and numbers from the other half."""
    half = len(reads) // 2
    numbers = {"theory": predicted} | {name: known[..., place] for place, name in enumerate(KNOWN)}
    measured, pilot = _mean(reads[half:]), {name: _mean(values[:half]) for name, values in numbers.items()}
    usable = np.isfinite(measured) & np.isfinite(pilot["theory"])
    found: dict[str, float | None] = {}
    for name, values in pilot.items():
        ranks = np.stack([rankdata(part[usable]) for part in (values, measured)])
        varied = usable.sum() > 2 and bool((np.ptp(ranks, 1) > 0).all())
        found[name] = float(np.asarray(np.corrcoef(ranks))[0, 1]) if varied else None
    return found


def _mean(values: Array) -> Array:
    """Mean over documents (documents, ...) of the measured heads; NaN if a head was never measured."""
    count = np.isfinite(values).sum(0)
    return np.asarray(np.divide(np.nansum(values, 0), count, out=np.full(count.shape, np.nan), where=count > 0))


def prompt_scores(
    loaded: LoadedModel, windows: Windows, row: int, task: str, context: int, promise: Promise, rule: str, seed: int
) -> list[float]:
    """KL, agreement and accuracy of predictions on one prompt with certified reads, and accuracy with all keys."""
    (prompt,) = prompts_of(loaded, windows, row, [task], context, seed + 1)
    read = read_prompt(loaded, prompt, seed)
    scores = prompt.score(read.predict(certified_reads(promise, seed, rule)), read.full)
    whole = prompt.score(read.full, read.full)
    return [scores["kl"], scores["agreement"], scores["accuracy"], whole["accuracy"]]


def task_result(task: str, rows: Sequence[Sequence[float]]) -> TaskScores:
    """Means over prompts of the rows of `prompt_scores`, with errors of the KL and of the paired accuracy."""
    table = np.array(rows)
    kl, change = (paired_mean(values) for values in (table[:, 0], table[:, 2] - table[:, 3]))
    agreement, accuracy, whole = (float(part) for part in table[:, 1:].mean(0))
    return TaskScores(task, len(rows), kl.value, kl.stderr, agreement, accuracy, whole, change.stderr)
