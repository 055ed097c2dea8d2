"""Errors of a layer's heads added up: whether heads err independently when each query sees n keys.

With e_h the error of head h and W_h its block of the output projection, the attention of the layer errs by Σ_h W_h e_h.
The analysis of single heads carries over to the layer where E|Σ_h W_h e_h|² = Σ_h E|W_h e_h|², that is where the
errors of different heads are uncorrelated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.errors import Array, InputError
from limitlens.interventions.sampled_keys import SampledKeys
from limitlens.models import Captured
from limitlens.models.intervene import attend
from limitlens.models.relay import Output, hook_attention

HEAD_SHARING = ("together", "apart")  # the heads of a layer attend to the same keys, or each head to keys of its own


@contextmanager
def output_projections(stack: Any, take: Callable[[Captured, Tensor, Tensor], None]) -> Iterator[None]:
    """Call `take` for every layer with its call, its heads' outputs (B, L, H, v) and their projection (H, v, d).

    The output projection is the module whose input equals the outputs of the heads, whatever its name; it is affine,
    so its matrix follows from its values at the unit vectors and at zero.
    """
    waiting: list[tuple[Captured, Tensor]] = []

    def remember(call: Captured, proceed: Callable[[Tensor], Output]) -> Output:
        output = proceed(call.query)
        waiting.append((call, output[0]))
        return output

    def read(module: Any, args: tuple[Any, ...]) -> None:
        if not waiting or not args or getattr(module.weight, "ndim", 0) != 2:
            return
        call, output = waiting[-1]
        width = output.shape[2] * output.shape[3]
        if args[0].shape[-1] != width or not torch.equal(args[0].reshape(-1), output.reshape(-1)):
            return
        waiting.pop()
        values = module.forward(torch.eye(width + 1, width, dtype=output.dtype, device=output.device))
        take(call, output, (values[:-1] - values[-1]).unflatten(0, tuple(output.shape[2:])))

    with ExitStack() as undo:
        for module in stack.modules():
            if isinstance(getattr(module, "weight", None), Tensor):
                undo.callback(module.register_forward_pre_hook(read).remove)
        with hook_attention(stack, remember):
            yield
    if waiting:
        raise InputError(
            f"no module reads the outputs of the heads of layer {waiting[0][0].layer} unchanged; expected an output "
            "projection, so leave out heads of include"
        )


def sum_head_errors(
    stack: Any, ids: Tensor, sizes: Sequence[int], replicates: int, generator: torch.Generator
) -> Array:
    """E|W_h e_h|² of each head and, last, E|Σ_h W_h e_h|²: (HEAD_SHARING, sizes, layers, heads + 1).

    All are relative to |Σ_h W_h o_h|², means over replicates and tokens, without the first token of a causal model,
    which sees only itself. The inputs of a layer are those of the unchanged model; its queries share their keys.
    """
    layers: list[Array] = []

    def take(call: Captured, output: Tensor, matrix: Tensor) -> None:
        first = int(call.causal)
        gram = matrix @ matrix.mT
        joined = matrix.flatten(0, 1)
        size = (output[:, first:].flatten(2) @ joined).square().sum(-1).mean()
        squares = torch.zeros(len(HEAD_SHARING), len(sizes), len(gram) + 1, dtype=torch.float64)
        for i, j in np.ndindex(squares.shape[:2]):
            for _ in range(replicates):
                sampled = SampledKeys(sizes[j], generator, per_head=HEAD_SHARING[i] == "apart")(call)
                error = (attend(sampled) - output.transpose(1, 2))[:, :, first:]
                of_heads = (error @ gram * error).sum(-1).mean((0, 2))
                of_layer = (error.transpose(1, 2).flatten(2) @ joined).square().sum(-1).mean()
                squares[i, j] += torch.cat([of_heads, of_layer[None]]).double().cpu() / float(size) / replicates
        layers.append(squares.numpy())

    with output_projections(stack, take):
        stack(input_ids=ids)
    return np.stack(layers, 2)
