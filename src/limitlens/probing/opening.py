"""A model and the windows of a text it will read: where a probe and a prediction begin alike."""

from __future__ import annotations

from limitlens.attention.device import choose_device
from limitlens.models import Windows, load, open_corpus
from limitlens.models.catalog import LoadedModel

FORWARD = 1 << 12  # tokens a forward: its activations should not leave the caches far behind
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
    length = min(WINDOW, loaded.positions or WINDOW) if window is None else window
    return loaded, Windows(loaded, text, length=length, tokens=tokens, special=special, fewer=fewer)
