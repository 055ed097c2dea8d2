"""Rotary positions stretched to a longer context: other frequencies for as long as a `with` block lasts.

The pair j of d dimensions turns by θ_j a token. With s the factor by which the context grows, n₀ the trained window:

linear   θ_j / s: positions are interpolated;
ntk      θ_j s^{−2j/(d−2)}: the fastest pair turns as ever, the slowest like `linear`;
yarn     pairs that turn more than 32 times within n₀ turn as ever, those that turn less than once like `linear`, and a
         ramp lies between (Peng et al., arXiv 2309.00071). Its factor on the scores is not part of it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from limitlens.arrays import PreTrainedModel, Tensor, torch
from limitlens.errors import InputError, check_number

ROPE_SCALINGS = ("none", "linear", "ntk", "yarn")
FAST, SLOW = 32, 1  # turns within the trained window at which YaRN's ramp begins and ends


@contextmanager
def rope_scaled(model: PreTrainedModel, how: str, factor: float, trained: int) -> Iterator[None]:
    """Stretch the rotary positions of `model` by `factor` within the block, and put them back afterwards."""
    if how not in ROPE_SCALINGS:
        raise InputError(f"the stretch is {how!r}; expected one of {', '.join(ROPE_SCALINGS)}")
    check_number("the factor of the stretch", factor, "at least 1", low=1.0)
    found = [] if how == "none" else list(_frequencies(model))
    if how != "none" and not found:
        given = f"{type(model).__name__} has no rotary positions that could be stretched"
        raise InputError(f"{given}; expected stretch none for it, or another model")
    try:
        with torch.no_grad():
            for module, name, before in found:
                setattr(module, name, scaled_frequencies(before.double(), how, factor, trained).to(before.dtype))
        yield
    finally:
        for module, name, before in found:
            setattr(module, name, before)


def scaled_frequencies(theta: Tensor, how: str, factor: float, trained: int) -> Tensor:
    """The frequencies θ_j (d/2,) of a stretch; see the module's docstring."""
    count = len(theta)
    index = torch.arange(count, dtype=theta.dtype, device=theta.device)
    if how == "none":
        return theta
    if how == "linear":
        return theta / factor
    if how == "ntk":
        return theta * factor ** (-index / max(count - 1, 1))
    # Turns within the window fall geometrically with j, so the ends of the ramp are linear in the logarithm of turns.
    step = float((theta[0] / theta[-1]).log()) / (count - 1)
    ends = [math.log(trained * float(theta[0]) / (2 * math.pi * turns)) / step for turns in (FAST, SLOW)]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), 2 * count - 1)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    return theta * (1 - ramp) + theta / factor * ramp


def _frequencies(model: PreTrainedModel) -> Iterator[tuple[Any, str, Tensor]]:
    """Where a model keeps the frequencies of its rotary positions; those of sliding windows need no stretching."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq") or name.startswith("sliding"):
                continue
            kind = getattr(module, "rope_type", "default")
            kind = kind.get(name.removesuffix("_inv_freq"), "default") if isinstance(kind, dict) else kind
            if kind != "default":
                given = f"{type(model).__name__} comes with rotary positions that are stretched already ({kind})"
                raise InputError(f"{given}; expected stretch none for it")
            yield module, name, buffer
