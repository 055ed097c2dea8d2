"""What an error of one head does to the model's predictions: g_h, by which squared errors of heads are added up.

To second order the divergence of the predicted distributions under a change δ of a head's output is
½ E (<∂ log p(y) / ∂o, δ>)² over tokens y that the model itself draws (the Fisher information). For a δ of any direction
that is g_h |δ|² with g_h = E |∂ log p(y) / ∂o|² / (2 dim), a heuristic: errors have directions, and heads add up.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from limitlens.errors import Array
from limitlens.models import Captured, LoadedModel, Windows
from limitlens.models.relay import Output, hook_attention

SAMPLES = 4  # continuations that are drawn for each window


def effects(loaded: LoadedModel, windows: Windows, indices: Sequence[int], context: int, *, seed: int = 0) -> Array:
    """g_h of every head, (layers, heads): divergence a token for each unit of squared error behind the cut."""
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
            outputs.append(output.detach().requires_grad_(not outputs) if not outputs else output)
            return outputs[-1], weights

        with torch.enable_grad(), hook_attention(model, watch):
            logits = model(input_ids=ids[:, context:], past_key_values=cache).logits[0]
        chance = logits.log_softmax(-1)
        drawn = torch.multinomial(chance.detach().exp().cpu(), SAMPLES, replacement=True, generator=generator)
        for sample in drawn.T.to(model.device):
            likelihood = chance.gather(-1, sample[:, None]).sum()
            slopes = torch.autograd.grad(likelihood, outputs, retain_graph=True)
            squares = torch.stack([slope[0].square().mean(-1).mean(0) / 2 for slope in slopes]).cpu().double().numpy()
            total = squares if total is None else total + squares
    assert total is not None
    return np.asarray(total / (SAMPLES * len(indices)))
