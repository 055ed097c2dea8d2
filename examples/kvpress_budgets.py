"""Per-head budgets of a plan inside kvpress (0.5.5, which wants transformers below 5.3: an environment of its own).

`PerLayerCompressionPress` fails outside flash attention because layers differ in length; `masked_key_indices` does not.

    press = Budgets(KnormPress(0.0), json.load(open("runs/plan/kv_budgets.json"))["budgets"])
    with press(model): model(input_ids, past_key_values=cache)
    ...
    for layer in model.model.layers: layer.self_attn.masked_key_indices = None  # before the next text
"""

from dataclasses import dataclass

import torch
from kvpress.presses.base_press import BasePress


@dataclass
class Budgets(BasePress):
    """Keep budgets[layer][kv_head] keys by the scores of another press; the first token, a sink, always."""

    press: BasePress
    budgets: list[list[int]]

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        """Mask what is dropped: all heads keep their length."""
        scores = self.press.score(module, hidden_states, keys, values, attentions, kwargs)
        scores[..., 0] = float("inf")
        (batch, heads, length), own = scores.shape, self.budgets[module.layer_idx]
        assert batch == 1
        drops = [torch.topk(-scores[0, head], length - min(length, own[head])).indices for head in range(heads)]
        where = torch.cat([torch.full_like(drop, head) for head, drop in enumerate(drops)])
        module.masked_key_indices = (torch.zeros_like(where), where, torch.cat(drops))
        return keys, values
