"""Errors of contexts: attention over n consecutive tokens before a query, against their document and the corpus.

A context is a run of K consecutive windows of text. Keys of the window k before the last get the distances that they
have in a context of K windows, by rotating the queries k windows further; the windows do not see each other. The first
tokens of a context attract attention as sinks do: those of a query's own window are always kept, at the distance of the
start of its context. Every query attends to its own context, as in use, and to those of other texts.
"""

from dataclasses import replace

import numpy as np
import torch

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
    *, length: int = 1, count: int = CONTEXTS, score_scale: float = 1.0, seed: int = 0, warnings: list[str],
) -> Records:  # fmt: skip
    """Contexts of `length` windows at `count` random places, except in layers with a shorter sliding window."""
    runs, single = draw_runs(windows, length, count, seed, warnings)
    known = {"queries": QUERIES * len(runs), "batch": 1, "seed": seed, "report": lambda _: None}
    pilot = run_pilot(loaded, windows, runs[:, -1], score_scale=score_scale, clusters=len(runs), **known)  # type: ignore[arg-type]
    sink, whole = min(START, windows.length // 4) if pilot.causal else 0, length * windows.length
    first, last = sink, pilot.positions.stop  # an encoder's special tokens are tokens of its contexts, as in the pool
    blocks = min(max(1, BLOCKS // length), 1 << max((last - first) // SMALLEST, 1).bit_length() - 1)
    size, owner = (last - first) // blocks, np.searchsorted(runs[:, -1], pilot.queries[:, 0])
    layers = {
        index: BlockSums(layer.query, layer.traits, (len(runs), length * blocks), owner)
        for index, layer in pilot.layers.items() if (layer.traits.sliding_window or whole) >= whole
    }  # fmt: skip

    def take(call: Captured) -> None:
        if (own := layers.get(call.layer)) is None:
            return
        run, place = call.forward
        behind = (length - 1 - place) * windows.length
        query, further = (rotated(own.query, call.frequencies, by) for by in (behind, windows.length))
        key, value = call.key[0].float(), call.value[0].float()
        if not behind and (sink or call.sinks is not None):
            start = rotated(own.query, call.frequencies, whole - windows.length)
            own.start(start, key[:, :sink], value[:, :sink], run, call.sinks)
        used, here = slice(last - blocks * size, last), slice(place * blocks, (place + 1) * blocks)
        own.add(query, key[:, used], value[:, used], run, here, None if behind or call.frequencies is None else further)

    with torch.inference_mode(), capture(loaded.model, take) as run_until_last_attention:
        for place, window in np.ndenumerate(runs):
            ids = torch.as_tensor(windows[int(window)], dtype=torch.long, device=loaded.model.device)
            run_until_last_attention(input_ids=ids[None], forward=place)
    known = {"size": size, "near": blocks, "one_document": single, "errors": ERRORS, "seed": seed}
    every = ((index, layers.pop(index).records(**known)) for index in list(layers))
    return {(index, head): record for index, records in every for head, record in enumerate(records)}


def with_contexts(heads: list[HeadRecord], found: Records) -> list[HeadRecord]:
    """Add contexts to records of heads, with the number of independent tokens that each context is worth."""
    known = ((head, found.get(head.place)) for head in heads)
    return [head if one is None else replace(head, contexts=one.valued(head.curve.prediction)) for head, one in known]
