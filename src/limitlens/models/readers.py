"""Readers of attention modules that compute their attention in code of their own, outside the transformers interface.

Such a module calls no replaceable attention function, so a hook has nothing to hold. A reader writes the module's
`forward` once more, with the attention as a function, and is registered in `READERS` under the name of the class.
`check_readers` compares it with the module's own `forward` when a model is loaded.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from limitlens.arrays import PreTrainedModel, Tensor, torch
from limitlens.errors import InputError

Attend = Callable[..., tuple[Tensor, Tensor | None]]  # (module, query, key, value, mask, **) -> outputs, weights
MOST_DIFFERENCE = 1e-5  # largest difference from the module's own output, relative to its largest number
CHECKED_TOKENS = 16  # tokens of each of the two texts that the check runs
NEEDED = "queries, keys and values after all rotations, the scale, the mask and every bias on the scores"


@dataclass(frozen=True)
class Reader:
    """How to call the attention of one class of modules: its `forward` with the attention function as an argument.

    `forward(module, attend, *args, **kwargs)` returns what the module returns for these arguments. It calls
    `attend(module, query, key, value, mask, **kwargs)` as modules of the transformers interface do: query, key and
    value (B, H, L, k), a mask or None, `scaling` (1/√k if left out), `is_causal`, and `position_bias`, which is added
    to the scores. The result of `attend` is outputs (B, L, H, v) and weights or None. The field `attend` is the
    module's own attention as such a function.
    """

    forward: Callable[..., Any]
    attend: Attend


def _mpnet(
    module: Any, attend: Attend, hidden_states: Tensor, attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None, output_attentions: bool = False, **_: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Forward of MPNet's self-attention; its encoder computes one relative position bias for all layers."""
    shape = (*hidden_states.shape[:-1], -1, module.attention_head_size)
    query, key, value = (part(hidden_states).view(shape).transpose(1, 2) for part in (module.q, module.k, module.v))
    bias = {} if position_bias is None else {"position_bias": position_bias}
    output, weights = attend(module, query, key, value, attention_mask, is_causal=False, **bias)
    return (module.o(output.flatten(2)), *([weights] if output_attentions else []))


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, position_bias: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Softmax attention with scores <q, k>/√k + bias + mask, summed in the order of MPNet's code: same bits."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    for added in (position_bias, mask):
        scores = scores if added is None else scores + added
    weights = module.dropout(torch.softmax(scores, -1))
    return (weights @ value).transpose(1, 2).contiguous(), weights


READERS: dict[str, Reader] = {"MPNetSelfAttention": Reader(_mpnet, _attend)}


def read_modules(model: torch.nn.Module) -> dict[torch.nn.Module, Reader]:
    """Attention modules of a model that have a reader, with the reader of each."""
    named = ((module, READERS.get(type(module).__name__)) for module in model.modules())
    return {module: reader for module, reader in named if reader is not None}


def check_readers(model: PreTrainedModel) -> None:
    """Raise an `InputError` if a reader gives other outputs than the `forward` of its module, on two short texts.

    The second text ends in padding. Outputs must agree to `MOST_DIFFERENCE`, or to the precision of a half-precision
    model if that is less.
    """

    def compare(module: torch.nn.Module, args: Any, kwargs: Any, own: Any) -> None:
        reader = READERS[type(module).__name__]
        read = reader.forward(module, reader.attend, *args, **kwargs)
        found, expected = (one[0] if isinstance(one, tuple) else one for one in (read, own))
        difference = float((found - expected).abs().max() / expected.abs().max())
        allowed = max(MOST_DIFFERENCE, 8 * torch.finfo(expected.dtype).eps)
        if not difference <= allowed:
            raise InputError(
                f"the reader of {type(module).__name__} gives outputs that differ from the module's own by "
                f"{difference:.1g}; expected at most {allowed:.1g}, so use the version of transformers that the reader "
                "was written for, or correct it"
            )

    with torch.inference_mode(), ExitStack() as undo:
        for module in read_modules(model):
            undo.callback(module.register_forward_hook(compare, with_kwargs=True).remove)
        ids = torch.arange(2 * CHECKED_TOKENS, device=model.device).view(2, -1) % model.config.vocab_size
        real = torch.ones_like(ids)
        real[1, CHECKED_TOKENS // 2 :] = 0
        model(input_ids=ids, attention_mask=real)


def unread_classes(model: torch.nn.Module) -> list[str]:
    """Names of the classes of a model's innermost attention modules that have no reader, as far as names tell."""
    found = [module for module in model.modules() if "attention" in type(module).__name__.lower()]
    inner = [one for one in found if not any(part in found for part in one.modules() if part is not one)]
    return sorted({type(module).__name__ for module in inner} - set(READERS))
