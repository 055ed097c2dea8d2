"""Fisher costs: how much an error of one head changes the model's predictions.

To second order, a change δ of a head's output changes the predicted distributions by the divergence
½ E <∂ log p(y) / ∂o, δ>² over tokens y sampled from the model (the Fisher information). For δ of random direction this
is g_h |δ|² with g_h = E |∂ log p(y) / ∂o|² / (2 dim). It is a heuristic: errors have directions, and those of several
heads are added up.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from limitlens.errors import Array
from limitlens.models import Captured, LoadedModel, Windows
from limitlens.models.relay import Output, hook_attention

SAMPLES = 4  # continuations sampled for each window


def fisher_costs(
    loaded: LoadedModel, windows: Windows, indices: Sequence[int], context: int, *, seed: int = 0
) -> Array:
    """g_h of every head, (layers, heads): divergence in nats a token per unit of squared error after the cut."""
    model, generator = loaded.model, torch.Generator().manual_seed(seed)
    total: Array | None = None
    for row in indices:
        (ids,) = windows.batches(1, [row])
        ids = ids.to(model.device)
        with torch.no_grad():
            cache = model(input_ids=ids[:, :context], use_cache=True, logits_to_keep=1).past_key_values
        outputs: list[Tensor] = []

        def watch(call: Captured, go_on: Callable[[Tensor], Output], outputs: list[Tensor] = outputs) -> Output:
            output, weights = go_on(call.query)
            # Gradients need a graph from the first layer on; weights of the model have none.
            outputs.append(output if outputs else output.detach().requires_grad_())
            return outputs[-1], weights

        with torch.enable_grad(), hook_attention(model, watch):
            logits = model(input_ids=ids[:, context:], past_key_values=cache).logits[0]
        log_p = logits.log_softmax(-1)
        sampled = torch.multinomial(log_p.detach().exp().cpu(), SAMPLES, replacement=True, generator=generator)
        for sample in sampled.T.to(model.device):
            likelihood = log_p.gather(-1, sample[:, None]).sum()
            slopes = torch.autograd.grad(likelihood, outputs, retain_graph=True)
            squares = torch.stack([slope[0].square().mean(-1).mean(0) / 2 for slope in slopes]).cpu().double().numpy()
            total = squares if total is None else total + squares
    assert total is not None
    return np.asarray(total / (SAMPLES * len(indices)))
