"""Predict the errors of every head of a model from a few thousand tokens (the pilot), by `theory.exact_bootstrap`."""

import time
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.attention.kernels.split import missing
from limitlens.attention.subset import scores_of
from limitlens.errors import InputError, Progress, check_number, check_seed
from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.models.windows import FORWARD, open_windows
from limitlens.probing.binned_law_cuda import layer_errors
from limitlens.probing.collect import Collector, tokens_of
from limitlens.probing.contexts import CONTEXTS, Records, measure_contexts, with_contexts
from limitlens.probing.pilot import Layer, Pilot, layer_sinks, run_pilot
from limitlens.probing.record import HeadRecord
from limitlens.probing.result import ProbeRun
from limitlens.sampling.cells import parse_sizes
from limitlens.sampling.workers import Workers, one_after_another, product, summed, workers_for
from limitlens.statistics.error_curve import ErrorCurve, PredictedErrors
from limitlens.theory.exact_bootstrap import PARTS, QUARTERS, PilotErrors, pilot_errors

READ = 100_000  # tokens of the text (or all, if fewer) from which windows are drawn
QUERY_WINDOWS = 32  # smallest number of windows that give queries: intervals come from resampling these windows
QUERIES_PER_WINDOW = 3  # largest number of queries from one window, if the text is long enough
FEWEST_TOKENS = PARTS  # smallest number of tokens in a pilot
POOL_TOKENS = 8192  # tokens of a probe from which its predictions are computed
POOL_QUERIES = 64  # queries of a head that predictions of a probe use, spread over the windows that gave queries
NEAREST, FARTHEST = 8, 64  # predictions reach from the smallest size / NEAREST to the largest size × FARTHEST
RESERVED = 0.1  # share of the windows that the model does not read, on which a cache plan can be tested
DECODER = "intervals of a decoder are too narrow: in tests 64 to 86% of its 95% intervals held the measured error"
ENCODER = "errors of contexts longer than a window of an encoder are too small: its windows do not see each other"


def predict(
    model: str | LoadedModel, corpus: str = "stdlib-docs",
    *, tokens: int = 3072, queries: int = 48, window: int | None = None, special: str = "auto",
    sizes: str | Sequence[int] = "64:4096:7", context: int | None = None, seed: int = 0, device: str = "auto",
    progress: Progress | None = None,
) -> ProbeRun:  # fmt: skip
    """Predict, from a few tokens, how the error of attention over n tokens falls with n in every head of a model.

    The result is a `ProbeRun`, as `limitlens.probe` returns, but nothing is measured: curves have no replicates.

    Parameters
    ----------
    model, corpus, window, special, device : as in `limitlens.probe`
    tokens : number of tokens, in random windows, that stand for the whole text
    queries : queries per head, from other windows than these tokens
    sizes : numbers of tokens n at which errors are predicted, a list or "lo:hi:k"; they may exceed `tokens`
    context : also predict errors of contexts of this many consecutive tokens, from windows (`HeadRecord.contexts`)
    progress : called with (layers done, layers in all)

    >>> run = ll.predict(model, corpus=text, tokens=500, window=50, queries=8, sizes=[8, 32, 128])
    >>> len(run.curves)
    36
    """
    begun = time.perf_counter()
    n = tuple(parse_sizes(sizes))
    check_number("tokens", tokens, "at least 1, such as 3072", low=1)
    check_number("queries", queries, "at least 2, such as 48", low=2)
    check_seed(seed)
    check_number("context", 1 if context is None else context, "at least one window of tokens", low=1)
    read = max(READ, 2 * tokens, 2 * CONTEXTS * (context or 0))
    loaded, windows = open_windows(model, corpus, read, window=window, special=special, device=device, fewer=True)
    query_windows, key_windows, reserved, warnings = _draw(windows, corpus, tokens, queries, seed)
    contexts: Records = {}
    if context is not None and context < windows.length:
        raise InputError(f"the context has {context:,} tokens; expected at least a window ({windows.length:,})")
    if context is not None:
        length = -(-context // windows.length)
        contexts = measure_contexts(loaded, windows, length=length, seed=seed, warnings=warnings)
        warnings += [ENCODER] if length > 1 and not loaded.causal else []
    with workers_for(loaded.model.device) as workers, torch.inference_mode():
        batch = max(1, FORWARD // windows.length)
        pilot = run_pilot(
            loaded, windows, query_windows, queries=queries, batch=batch, seed=seed, report=lambda _: None,
            workers=workers,
        )  # fmt: skip
        pooled = len(key_windows) * len(pilot.positions)
        if pooled < FEWEST_TOKENS:
            given = f"the pilot has {pooled} tokens; expected at least {FEWEST_TOKENS}"
            raise InputError(f"{given}, so ask for more tokens or longer windows")
        heads = _heads(loaded, windows, key_windows, pilot, n, batch, seed, workers, progress)
    warnings += pilot.warnings(loaded, windows.length)
    if pilot.causal:  # docs/predict.md
        warnings.append(DECODER)
    return ProbeRun(
        **pilot.source(loaded, windows), corpus=corpus, tokens=pooled, tokens_asked=tokens,
        windows={
            "count": windows.count, "pilot": query_windows.tolist(), "reserved": reserved.tolist(),
            "pool": len(key_windows), "keys": key_windows.tolist(),
        },
        sizes_asked=n, replicates=0, replicates_asked=0, records=tuple(with_contexts(heads, contexts)),
        layer_records=(), seed=seed, batch=batch, floor=0.0, interrupted=False,
        seconds={"total": time.perf_counter() - begun}, warnings=tuple(warnings),
    )  # fmt: skip


def _draw(
    windows: Windows, corpus: str, tokens: int, queries: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Disjoint random windows for queries, for keys and for testing cache plans, and warnings about their number."""
    if windows.count < 2:
        given = f"the corpus {corpus!r} holds {windows.count} whole windows of {windows.length} tokens"
        expected = "expected one for queries and one for keys at least, so give more text or shorter windows"
        raise InputError(f"{given}; {expected}")
    warnings = list(windows.warnings)
    wanted = -(-tokens // windows.length)
    keys = min(wanted, windows.count - 1)
    asking = min(max(QUERY_WINDOWS, -(-queries // QUERIES_PER_WINDOW)), windows.count - keys)
    if keys < wanted:
        short = f"the text has {windows.count} windows: {keys} of them give keys instead of the {wanted} asked for"
        warnings.append(f"{short}; more text gives more")
    if asking == 1:
        warnings.append("all queries come from one window: intervals ignore how queries of other windows differ")
    order = np.random.default_rng(np.random.SeedSequence([seed, 0x9107])).permutation(windows.count)
    unread = order[asking + keys :][: int(RESERVED * windows.count)]
    return np.sort(order[:asking]), order[asking : asking + keys], np.sort(unread), warnings


def _heads(
    loaded: LoadedModel, windows: Windows, key_windows: np.ndarray, pilot: Pilot, n: Sequence[int],
    batch: int, seed: int, workers: Workers, progress: Progress | None,
) -> list[HeadRecord]:  # fmt: skip
    """Run the model over the windows that give keys, then predict the errors of each head, layer by layer."""
    positions = slice(pilot.positions.start, pilot.positions.stop)
    tokens = len(key_windows) * len(pilot.positions)
    # Tokens of one window are not independent: quarters of the text consist of whole windows if there are four.
    parts = len(key_windows) if len(key_windows) >= QUARTERS else tokens
    quarters = np.arange(tokens) // (tokens // parts) * QUARTERS // parts
    read: dict[int, list[tuple[Tensor, ...]]] = {index: [] for index in pilot.layers}

    def take(captured: Captured) -> None:
        both = (captured.key, captured.value)
        read[captured.layer].append(tuple(tokens_of(part[:, :, positions]).float() for part in both))

    with capture(loaded.model, take) as run_until_last_attention:
        for ids in windows.batches(batch, key_windows):
            run_until_last_attention(input_ids=ids.to(loaded.model.device))
    found: list[HeadRecord] = []
    for done, (index, layer) in enumerate(pilot.layers.items(), 1):
        key, value = (torch.cat(part) for part in zip(*read.pop(index), strict=True))
        predicted = predict_layer(
            layer, key, value, n, queries=len(pilot.queries), quarters=quarters, few_windows=True, seed=seed,
            workers=workers,
        )  # fmt: skip
        scores = (
            scores_of(query, keys, layer.traits.softcap)
            for query, keys in zip(layer.flat_query, key.unbind(1), strict=True)
        )
        lse = torch.stack([each.logsumexp(-1) for each in scores])
        sinks = layer_sinks(layer, lse, len(key), np.asarray(n, dtype=float), windows.length)
        for head, errors in enumerate(predicted):
            bare, *with_sink = (ErrorCurve.predicted(n, one, seed) for one in errors)
            sink = sinks[head] if sinks else None
            record = HeadRecord(
                layer=index, head=head, kv_head=head // layer.query.shape[1],
                sliding_window=layer.traits.sliding_window, curve=with_sink[0] if with_sink else bare,
                without_sink=bare if with_sink else None, sink=sink, sink_mass=sink.share_in_window if sink else None,
            )  # fmt: skip
            found.append(record)
        if progress is not None:
            progress(done, len(pilot.layers))
    return found


def predict_pool(collector: Collector) -> list[tuple[PredictedErrors, ...]]:
    """Predict the errors of each head of a probed layer from at most `POOL_TOKENS` of the tokens stored for it."""
    assignment = collector.assignment
    slots = assignment.random_slots(POOL_TOKENS)
    some = to_device(slots, collector.key.device)
    # Replicates that are single documents already vary as the text does: this variation must not be added again.
    quarters = None if assignment.single else assignment.origin[slots] * QUARTERS // assignment.seen
    sizes = np.rint(assignment.filled.cumsum(1).mean(0)).tolist()
    key, value = (tokens.index_select(0, some) for tokens in (collector.key, collector.value))
    return predict_layer(collector.layer, key, value, sizes, quarters=quarters, seed=assignment.seed)


def predicted_sizes(sizes: Sequence[float]) -> list[int]:
    """Sample sizes at which errors are predicted: those given, and smaller and larger ones in factors of two."""
    low, high = float(sizes[0]), float(sizes[-1])
    below = [low / 2**k for k in range(int(np.log2(NEAREST)), 0, -1)]
    above = [high * 2**k for k in range(1, int(np.log2(FARTHEST)) + 1)]
    return sorted({round(size) for size in (*below, *sizes, *above) if size >= 2})


def predict_layer(
    layer: Layer, key: Tensor, value: Tensor, sizes: Sequence[float],
    *, queries: int = POOL_QUERIES, quarters: NDArray[np.intp] | None = None, few_windows: bool = False, seed: int = 0,
    workers: Workers = one_after_another,
) -> list[tuple[PredictedErrors, ...]]:  # fmt: skip
    """Predict the errors of each head of a layer from the keys and values (M, Hkv, ·) of M tokens.

    A head has a prediction without the sink and, if every context contains a sink, one with it. `queries` is the number
    of queries used per head. `quarters` (M,) is the quarter of the text of each token; None means random order.
    `few_windows` widens the intervals (`PredictedErrors.of`), because the tokens come from few windows of text.
    """
    wanted = np.asarray(predicted_sizes(sizes), dtype=float)
    shared, groups, m, _ = layer.query.shape
    chosen = layer.places(queries)
    clusters = layer.clusters[chosen]

    def by_head(found: tuple[PilotErrors, ...]) -> Iterator[tuple[PredictedErrors, ...]]:
        return zip(
            *(PredictedErrors.of(wanted, one, clusters, len(key), seed, few_windows) for one in found), strict=True
        )

    def of_pair(pair: int) -> list[tuple[PredictedErrors, ...]]:
        query = layer.query[pair, :, chosen].flatten(0, 1)
        scores = scores_of(key[:, pair], query, layer.traits.softcap).T.cpu()  # the scores of a token are contiguous
        atom = None
        if layer.atom is not None:
            rows = (m * np.arange(groups)[:, None] + chosen).ravel()
            state = layer.atom[pair]
            atom = tuple(np.asarray(part[rows].cpu()) for part in (state.lse, state.output))
        options = {"quarters": quarters, "matmul": product, "bags": summed}
        values = np.asarray(value[:, pair].double().cpu())
        return list(by_head(pilot_errors(np.asarray(scores), values, wanted, atom, **options)))  # type: ignore[arg-type]

    if key.device.type == "cpu" or missing() is not None:  # one key/value head at a time
        return list(chain.from_iterable(workers(of_pair, range(shared))))
    at_once = layer_errors(layer, key, value, wanted, chosen, quarters)
    return [head for found in at_once for head in by_head(found)]
