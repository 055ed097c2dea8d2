"""Rope scaling: change the frequencies of rotary positions for a longer context, within a `with` block.

Pair j of the d dimensions rotates by θ_j per token. The context is s times longer than the trained window n₀.

linear   θ_j / s
ntk      θ_j s^{−2j/(d−2)}: the fastest pair is unchanged, the slowest is divided by s
yarn     θ_j for pairs that rotate more than 32 times within n₀, θ_j / s for less than once, with a ramp between
         (Peng et al., arXiv 2309.00071, without its factor on the scores)
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from limitlens.arrays import PreTrainedModel, Tensor, torch
from limitlens.errors import InputError, check_number

ROPE_SCALINGS = ("none", "linear", "ntk", "yarn")
FAST, SLOW = 32, 1  # rotations within the trained window at which YaRN's ramp begins and ends


@contextmanager
def rope_scaled(model: PreTrainedModel, how: str, factor: float, trained: int) -> Iterator[None]:
    """Within the block, scale rotary positions for a context `factor` times longer than `trained` tokens."""
    if how not in ROPE_SCALINGS:
        raise InputError(f"rope_scaling is {how!r}; expected one of {', '.join(ROPE_SCALINGS)}")
    check_number("the factor of the rope scaling", factor, "at least 1", low=1.0)
    found = [] if how == "none" else list(_frequencies(model))
    if how != "none" and not found:
        given = f"{type(model).__name__} has no rotary positions to scale"
        raise InputError(f"{given}; expected rope_scaling none for it, or another model")
    try:
        with torch.no_grad():
            for module, name, before in found:
                setattr(module, name, scaled_frequencies(before.double(), how, factor, trained).to(before.dtype))
        yield
    finally:
        for module, name, before in found:
            setattr(module, name, before)


def scaled_frequencies(theta: Tensor, how: str, factor: float, trained: int) -> Tensor:
    """Rotary frequencies `theta` (d/2,) of a model, scaled by the method `how`: "none", "linear", "ntk" or "yarn"."""
    count = len(theta)
    index = torch.arange(count, dtype=theta.dtype, device=theta.device)
    if how == "none":
        return theta
    if how == "linear":
        return theta / factor
    if how == "ntk":
        return theta * factor ** (-index / max(count - 1, 1))
    # Rotations within the window fall geometrically with j, so the ends of the ramp are linear in their logarithm.
    step = float((theta[0] / theta[-1]).log()) / (count - 1)
    ends = [math.log(trained * float(theta[0]) / (2 * math.pi * rotations)) / step for rotations in (FAST, SLOW)]
    low = max(math.floor(ends[0]), 0)
    high = min(math.ceil(ends[1]), 2 * count - 1)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    return theta * (1 - ramp) + theta / factor * ramp


def rotated(query: Tensor, theta: Tensor | None, tokens: int) -> Tensor:
    """Rotary queries (..., k) at positions `tokens` later, with the frequencies `theta` (r,); unchanged if None."""
    if theta is None or tokens == 0:
        return query
    cos, sin = ((theta.double() * tokens).cos().to(query.dtype), (theta.double() * tokens).sin().to(query.dtype))
    one, two, rest = query.tensor_split((len(theta), 2 * len(theta)), -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin, rest), -1)


def rotary_frequencies(model: PreTrainedModel, layer: int) -> Tensor | None:
    """Angles per token (r,) by which a layer rotates the dimensions (i, i + r) of queries and keys; None if unknown.

    Layers without rotary positions, and models that rotate neighbouring dimensions, have none here.
    """
    rotary: Any = getattr(model.base_model, "rotary_emb", None)
    config = model.config.get_text_config()
    rotate = getattr(inspect.getmodule(type(rotary)), "rotate_half", None)
    if rotate is None or not (getattr(config, "no_rope_layers", None) or {layer: True})[layer]:
        return None
    kind = (getattr(config, "layer_types", None) or {layer: ""})[layer]
    theta: Any = getattr(rotary, f"{kind}_inv_freq", getattr(rotary, "inv_freq", None))
    if not torch.is_tensor(theta):
        return None
    return theta if _rotates_halves(rotate, len(theta)) else None


@cache
def _rotates_halves(rotate: Callable[[Tensor], Tensor], pairs: int) -> bool:
    """Whether a function of transformers rotates the dimensions (i, i + pairs), and not neighbouring ones."""
    return bool(rotate(torch.eye(2 * pairs)[0])[pairs] == 1)


def _frequencies(model: PreTrainedModel) -> Iterator[tuple[Any, str, Tensor]]:
    """Yield module, name and value of every buffer of rotary frequencies, except those of sliding-window layers."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq") or name.startswith("sliding"):
                continue
            kind = getattr(module, "rope_type", "default")
            kind = kind.get(name.removesuffix("_inv_freq"), "default") if isinstance(kind, dict) else kind
            if kind != "default":
                given = f"{type(model).__name__} has rotary positions that are already scaled ({kind})"
                raise InputError(f"{given}; expected rope_scaling none for it")
            yield module, name, buffer
