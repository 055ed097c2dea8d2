"""Errors of contexts: attention over n consecutive tokens before a query, against their document and the corpus.

A context is a run of K consecutive windows of text. Keys of the window k before the last get the distances that they
have in a context of K windows, by rotating the queries k windows further; the windows do not see each other. The first
tokens of a context attract attention as sinks do: those of a query's own window are always kept, at the distance of the
start of its context. Every query attends to its own context, as in use, and to those of other texts.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.models.rope_scaling import rotated
from limitlens.models.windows import draw_runs
from limitlens.probing.pilot import run_pilot
from limitlens.probing.record import ERRORS, HeadRecord
from limitlens.statistics.contexts import BLOCKS, BlockSums, ContextRecord

CONTEXTS, QUERIES = 16, 3  # contexts that are read, and queries of each
START = 64  # tokens at the start of a context that count as sink: models also use the first delimiters as such
SMALLEST = 4  # tokens of a block, unless windows are shorter
Records = dict[tuple[int, int], ContextRecord]  # by layer and head


def measure_contexts(
    loaded: LoadedModel, windows: Windows,
    *, length: int = 1, count: int = CONTEXTS, queries: int = QUERIES, overlap: bool = True, score_scale: float = 1.0,
    seed: int = 0, warnings: list[str],
) -> Records:  # fmt: skip
    """Contexts of `length` windows at `count` random places, except in layers with a shorter sliding window.

    With `overlap`, decoders read windows that overlap by half, and each gives the keys of its second half.
    """
    runs, documents = draw_runs(windows, length, count, seed, warnings)
    known = {"queries": queries * len(runs), "batch": 1, "seed": seed, "report": lambda _: None}
    pilot = run_pilot(loaded, windows, runs[:, -1], score_scale=score_scale, clusters=len(runs), **known)  # type: ignore[arg-type]
    sink, whole = min(START, windows.length // 4) if pilot.causal else 0, length * windows.length
    first, last = sink, pilot.positions.stop  # an encoder's special tokens are tokens of its contexts, as in the pool
    parts = 2 if overlap and length > 1 and pilot.causal else 1  # of a window, of which later windows give the last
    blocks = min(max(1, BLOCKS // (length * parts)), 1 << max((last - first) // SMALLEST // parts, 1).bit_length() - 1)
    if parts == 2 and windows.length // 2 // blocks < sink + windows.length - last:
        blocks = 1  # so that the farthest block is longer than the sink
    size = (windows.length // 2 if parts == 2 else last - first) // blocks
    owner = np.searchsorted(runs[:, -1], pilot.queries[:, 0])
    layers = {
        index: BlockSums(layer.query, layer.traits, (len(runs), length * parts * blocks), owner)
        for index, layer in pilot.layers.items() if (layer.traits.sliding_window or whole) >= whole
    }  # fmt: skip

    def take(call: Captured) -> None:
        if (own := layers.get(call.layer)) is None:
            return
        run, place = call.forward
        behind = (length - 1) * windows.length - place * windows.length // parts
        query, further = (rotated(own.query, call.frequencies, by) for by in (behind, windows.length))
        key, value = call.key[0].float(), call.value[0].float()
        if not behind and (sink or call.sinks is not None):
            start = rotated(own.query, call.frequencies, whole - windows.length)
            own.start(start, key[:, :sink], value[:, :sink], run, call.sinks)
        moved = None if behind or call.frequencies is None else further
        begin, here = last - blocks * size, (place + parts - 1) * blocks
        own.add(query, key[:, begin:last], value[:, begin:last], run, slice(here, here + blocks), moved)
        if parts == 2 and place == 0:  # the first half of a context, whose farthest block lacks the sink
            rest = begin - (blocks - 1) * size
            for low, high, some in ((sink, rest, slice(0, 1)), (rest, begin, slice(1, blocks))):
                if high > low:
                    own.add(query, key[:, low:high], value[:, low:high], run, some, None)

    with torch.inference_mode(), capture(loaded.model, take) as run_until_last_attention:
        for run, indices in enumerate(runs):
            for place in range((length - 1) * parts + 1):
                ids = torch.as_tensor(_window(windows, indices, place, parts), dtype=torch.long)
                run_until_last_attention(input_ids=ids.to(loaded.model.device)[None], forward=(run, place))
    known = {"size": size, "near": blocks, "documents": documents, "errors": ERRORS, "seed": seed}
    every = ((index, layers.pop(index).records(**known)) for index in list(layers))
    return {(index, head): record for index, records in every for head, record in enumerate(records)}


def _window(windows: Windows, indices: NDArray[np.intp], place: int, parts: int) -> NDArray[np.int32]:
    """Token ids of window `place` of a run of windows; if `parts` is 2, odd places lie half a window further."""
    number, half = divmod(place, parts)
    ids = windows[int(indices[number])]
    if half:
        begin, end = len(windows.prefix), windows.length - len(windows.suffix)
        inner = np.concatenate((ids[begin:end], windows[int(indices[number + 1])][begin:end]))
        ids[begin:end] = inner[(end - begin) // 2 :][: end - begin]
    return ids


def with_contexts(heads: list[HeadRecord], found: Records) -> list[HeadRecord]:
    """Add contexts to records of heads, with the number of independent tokens that each context is worth."""
    known = ((head, found.get(head.place)) for head in heads)
    return [head if one is None else replace(head, contexts=one.valued(head.curve.prediction)) for head, one in known]
