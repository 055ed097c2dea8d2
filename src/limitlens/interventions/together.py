"""Heads together: what the errors of a layer's heads add up to when each query sees n keys.

With e_h the error of head h and W_h its block of the output projection, the layer's attention is off by Σ_h W_h e_h.
The analysis of single heads holds for the layer where this adds in squares, E|Σ_h W_h e_h|² = Σ_h E|W_h e_h|²: that is
where the errors of different heads are uncorrelated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.errors import Array, InputError
from limitlens.interventions.draws import Draws
from limitlens.models import Captured
from limitlens.models.intervene import attend
from limitlens.models.relay import Output, hook_attention

DRAWS = ("together", "apart")  # whether the heads of a layer see the same keys, or each its own


@contextmanager
def projected(stack: Any, take: Callable[[Captured, Tensor, Tensor], None]) -> Iterator[None]:
    """Tell `take` of every layer: its call, its heads' outputs (B, L, H, v), and their output projection (H, v, d).

    The projection is the module that is handed the outputs, whatever its name; being affine it is known by what it
    makes of unit vectors and of zero.
    """
    waiting: list[tuple[Captured, Tensor]] = []

    def look(call: Captured, go_on: Callable[[Tensor], Output]) -> Output:
        found = go_on(call.query)
        waiting.append((call, found[0]))
        return found

    def read(module: Any, given: tuple[Any, ...]) -> None:
        if not waiting or not given or getattr(module.weight, "ndim", 0) != 2:
            return
        call, output = waiting[-1]
        width = output.shape[2] * output.shape[3]
        if given[0].shape[-1] != width or not torch.equal(given[0].reshape(-1), output.reshape(-1)):
            return
        waiting.pop()
        made = module.forward(torch.eye(width + 1, width, dtype=output.dtype, device=output.device))
        take(call, output, (made[:-1] - made[-1]).unflatten(0, tuple(output.shape[2:])))

    with ExitStack() as undo:
        for module in stack.modules():
            if isinstance(getattr(module, "weight", None), Tensor):
                undo.callback(module.register_forward_pre_hook(read).remove)
        with hook_attention(stack, look):
            yield
    if waiting:
        told = f"no module reads the outputs of the heads of layer {waiting[0][0].layer} as they are"
        raise InputError(f"{told}; expected an output projection, so leave heads out of what is run beside")


def add_up(stack: Any, ids: Tensor, sizes: Sequence[int], replicates: int, generator: torch.Generator) -> Array:
    """E|W_h e_h|² of each head and, last, E|Σ_h W_h e_h|², over |Σ_h W_h o_h|²: (draws, sizes, layers, heads + 1).

    Means over tokens (without the first of a causal model, which sees itself alone) and replicates; inputs of a layer
    are those of the whole model, and its queries share their keys.
    """
    found: list[Array] = []

    def take(call: Captured, output: Tensor, matrix: Tensor) -> None:
        first, gram, joined = int(call.causal), matrix @ matrix.mT, matrix.flatten(0, 1)
        size = (output[:, first:].flatten(2) @ joined).square().sum(-1).mean()
        each = torch.zeros(len(DRAWS), len(sizes), len(gram) + 1, dtype=torch.float64)
        for i, j in np.ndindex(each.shape[:2]):
            for _ in range(replicates):
                kept = Draws(sizes[j], generator, apart=DRAWS[i] == "apart")(call)
                error = (attend(kept) - output.transpose(1, 2))[:, :, first:]
                own = (error @ gram * error).sum(-1).mean((0, 2))
                whole = (error.transpose(1, 2).flatten(2) @ joined).square().sum(-1).mean()
                each[i, j] += torch.cat([own, whole[None]]).double().cpu() / float(size) / replicates
        found.append(each.numpy())

    with projected(stack, take):
        stack(input_ids=ids)
    return np.stack(found, 2)
