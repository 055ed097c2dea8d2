"""A model and the windows of a text it will read: where a probe and a prediction begin alike."""

from __future__ import annotations

import numpy as np

from limitlens.arrays import Tensor
from limitlens.attention.device import choose_device
from limitlens.errors import InputError
from limitlens.models import Windows, load, open_corpus
from limitlens.models.catalog import LoadedModel

FORWARD = 1 << 12  # tokens a forward: its activations should not leave the caches far behind
TIMES = 8  # windows that are read for each that is taken at random
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
    """The model, loaded where it is given by name, and so many tokens of the corpus in windows; or `fewer`."""
    text, where = open_corpus(corpus), choose_device(device)
    loaded = load(model, device=where) if isinstance(model, str) else model
    length = loaded.window(WINDOW) if window is None else window
    return loaded, Windows(loaded, text, length=length, tokens=tokens, special=special, fewer=fewer)


def open_some(
    model: str | LoadedModel, corpus: str, count: int, length: int, *, special: str, seed: int, device: str
) -> tuple[LoadedModel, Windows, Tensor]:
    """The same, and so many windows (count, length) at random from the first `TIMES` as many of the corpus."""
    known = {"window": length, "special": special, "device": device, "fewer": True}
    loaded, windows = open_windows(model, corpus, TIMES * count * length, **known)  # type: ignore[arg-type]
    if windows.count < count:
        given = f"the corpus {corpus!r} holds {windows.count:,} documents of {length:,} tokens"
        raise InputError(f"{given}; {count:,} were asked for, so ask for fewer or give more text")
    order = np.random.default_rng(np.random.SeedSequence([seed, 0x0BE9])).permutation(windows.count)
    return loaded, windows, next(windows.batches(count, order[:count]))
