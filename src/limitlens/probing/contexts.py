"""Errors of contexts: attention over n consecutive tokens before a query, against their document and the corpus.

A context is a run of K consecutive windows of text. Keys of the window k before the last get the distances that they
have in a context of K windows, by rotating the queries k windows further. A context then costs K short forward passes,
but its windows do not see each other, and the first token is that of the query's window (tested in docs/contexts.md).
Every query attends to every context: to its own, as in use, and to those of other texts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.models.rope_scaling import rotated
from limitlens.models.windows import FEWEST_RUNS, draw_runs
from limitlens.probing.pilot import run_pilot
from limitlens.probing.record import ERRORS, HeadRecord
from limitlens.statistics.contexts import BLOCKS, BlockSums, ContextRecord
from limitlens.statistics.error_curve import ErrorCurve

CONTEXTS = 16  # contexts that are read
QUERIES = 3  # queries of a context


def measure_contexts(
    loaded: LoadedModel, windows: Windows,
    *, length: int = 1, count: int = CONTEXTS, queries: int = QUERIES, score_scale: float = 1.0, seed: int = 0,
    warnings: list[str], report: Callable[[int], None] = lambda _: None,
) -> dict[tuple[int, int], ContextRecord]:  # fmt: skip
    """Measure contexts of `length` windows at `count` random places of the text: a record for each (layer, head).

    Layers with a sliding window shorter than a context are left out. Sentences about documents are added to `warnings`.
    """
    runs, single = draw_runs(windows, length, count, seed, warnings)
    pilot = run_pilot(
        loaded, windows, runs[:, -1], queries=queries * len(runs), batch=1, seed=seed, report=report,
        score_scale=score_scale, clusters=len(runs),
    )  # fmt: skip
    special = len(windows.prefix), windows.length - len(windows.suffix)
    first, last = (pilot.positions.start, pilot.positions.stop) if pilot.causal else special
    blocks = min(max(1, BLOCKS // length), 1 << (last - first).bit_length() - 1)
    size = (last - first) // blocks
    whole = length * windows.length
    layers = {index: layer for index, layer in pilot.layers.items() if (layer.traits.sliding_window or whole) >= whole}
    sums = {
        index: BlockSums(layer.flat_query, layer.traits.softcap, (len(runs), length * blocks),
                         layer.traits.tokens["value"].shape[-1])
        for index, layer in layers.items()
    }  # fmt: skip

    def take(call: Captured) -> None:
        if call.layer not in sums:
            return
        run, place = call.forward
        own, behind, theta = sums[call.layer], length - 1 - place, call.frequencies
        key, value = (part[0, :, last - blocks * size : last].float() for part in (call.key, call.value))
        moved = None if behind or theta is None else rotated(own.query, theta, windows.length)
        query = rotated(own.query, theta, behind * windows.length)
        own.add(query, key, value, run, slice(place * blocks, (place + 1) * blocks), moved)

    with torch.inference_mode(), capture(loaded.model, take) as run_until_last_attention:
        for (run, place), window in np.ndenumerate(runs):
            ids = torch.as_tensor(windows[int(window)], dtype=torch.long, device=loaded.model.device)
            run_until_last_attention(input_ids=ids[None], forward=(run, place))
            report(windows.length)
    owner = np.searchsorted(runs[:, -1], pilot.queries[:, 0])
    found = {}
    for index, layer in layers.items():
        own, (groups, m) = sums.pop(index), layer.query.shape[1:3]
        for head in range(len(layer.query) * groups):
            rows = head // groups, slice(head % groups * m, (head % groups + 1) * m)
            found[index, head] = own.head(
                rows, layer.atom, size=size, owner=owner, near=blocks, one_document=single, errors=ERRORS, seed=seed
            )
    return found


def probe_contexts(
    heads: list[HeadRecord], loaded: LoadedModel, windows: Windows, score_scale: float, seed: int, warnings: list[str]
) -> list[HeadRecord]:
    """Heads of a probe with their contexts, which are single windows; unchanged if there are too few windows."""
    if windows.count < FEWEST_RUNS:
        return heads
    return with_contexts(
        heads, measure_contexts(loaded, windows, score_scale=score_scale, seed=seed, warnings=warnings)
    )


def with_contexts(heads: Sequence[HeadRecord], found: dict[tuple[int, int], ContextRecord]) -> list[HeadRecord]:
    """Add contexts to records of heads, with the number of independent tokens that each context is worth."""

    def worth(head: HeadRecord, errors: np.ndarray) -> np.ndarray | None:
        prediction = head.curve.prediction
        if prediction is None or not prediction.defined:
            return None
        pooled = ErrorCurve.predicted(np.rint(prediction.sizes), prediction)
        known = [pooled.tokens_for(float(error)).n if error > 0 else None for error in errors]
        return np.array([np.nan if m is None else m for m in known])

    return [
        head if (one := found.get(head.place)) is None
        else replace(head, contexts=replace(one, worth=worth(head, one.error)))
        for head in heads
    ]  # fmt: skip
