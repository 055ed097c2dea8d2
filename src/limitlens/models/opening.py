"""Open a model and the windows of a text that it will read."""

from __future__ import annotations

import numpy as np

from limitlens.arrays import Tensor
from limitlens.attention.kernels import choose_device
from limitlens.errors import InputError
from limitlens.models import Windows, load, open_corpus
from limitlens.models.catalog import LoadedModel
from limitlens.models.windows import SPECIAL

FORWARD = 1 << 12  # tokens a forward: more activations would leave the caches
TIMES = 8  # windows read for each that is taken at random
WINDOW = 256  # tokens a window, unless the model has fewer positions


def open_windows(
    model: str | LoadedModel,
    corpus: str,
    tokens: int,
    *,
    window: int | None,
    special: str,
    device: str,
    fewer: bool = False,
) -> tuple[LoadedModel, Windows]:
    """Load a model given by name, and cut the corpus into windows; `fewer` accepts a text of fewer tokens."""
    if special not in SPECIAL:
        raise InputError(f"special is {special!r}; expected {', '.join(SPECIAL[:-1])} or {SPECIAL[-1]}")
    text, where = open_corpus(corpus), choose_device(device)
    loaded = load(model, device=where) if isinstance(model, str) else model
    length = loaded.window(WINDOW) if window is None else window
    return loaded, Windows(loaded, text, length=length, tokens=tokens, special=special, fewer=fewer)


def open_some(
    model: str | LoadedModel, corpus: str, count: int, length: int, *, special: str, seed: int, device: str
) -> tuple[LoadedModel, Windows, Tensor]:
    """Open a model and its windows, and draw `count` windows (count, length) from the first `TIMES` as many."""
    known = {"window": length, "special": special, "device": device, "fewer": True}
    loaded, windows = open_windows(model, corpus, TIMES * count * length, **known)  # type: ignore[arg-type]
    if windows.count < count:
        given = f"the corpus {corpus!r} holds {windows.count:,} documents of {length:,} tokens"
        raise InputError(f"{given}; {count:,} were asked for, so ask for fewer or give more text")
    order = np.random.default_rng(np.random.SeedSequence([seed, 0x0BE9])).permutation(windows.count)
    return loaded, windows, next(windows.batches(count, order[:count]))
