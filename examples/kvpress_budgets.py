"""Budgets and key policies of a plan inside kvpress (0.5.5, which needs transformers < 5.3: a separate environment).

`PlanPress` masks the dropped keys (`masked_key_indices`) instead of removing them: heads keep different numbers.

    press = PlanPress.from_file("runs/plan/kv_budgets.json")  # of `limitlens plan MODEL --out runs/plan`
    with press(model): model(input_ids, past_key_values=cache)
    ...
    for layer in model.model.layers: layer.self_attn.masked_key_indices = None  # before the next text

`layer_press` gives all heads of a layer the same share of keys, by one press of kvpress, and removes the others.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from kvpress import ExpectedAttentionPress, KnormPress, PerLayerCompressionPress, SnapKVPress
from kvpress.presses.base_press import BasePress

SINKS = 4  # first tokens that the policy "streaming" keeps
SCORERS = {"knorm": KnormPress(0.0), "snapkv": SnapKVPress(0.0), "expected": ExpectedAttentionPress(0.0)}


@dataclass
class PlanPress(BasePress):
    """Keep shares[layer][kv_head] of the keys by policies[layer][kv_head], and always the first token, a sink."""

    shares: list[list[float]]
    policies: list[list[str]]

    @classmethod
    def from_file(cls, file):
        """The press of a kv_budgets.json of format 3."""
        plan = json.loads(Path(file).read_text())
        if plan["format"] != 3:
            raise ValueError(f"{file} has format {plan['format']}; expected 3, so plan again with this limitlens")
        return cls(plan["shares"], plan["policies"])

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        """Mask the keys of lowest score in each head."""
        shares, policies = self.shares[module.layer_idx], self.policies[module.layer_idx]
        batch, heads, length, _ = keys.shape
        assert batch == 1
        place = torch.arange(length, device=keys.device).float().expand(batch, heads, -1)
        scores = {}
        for policy in set(policies):
            if policy in SCORERS:
                scores[policy] = SCORERS[policy].score(module, hidden_states, keys, values, attentions, kwargs).float()
            elif policy in ("recent", "streaming"):
                scores[policy] = place.clone()
                scores[policy][..., : SINKS if policy == "streaming" else 0] += length
            elif policy == "random_eviction":
                scores[policy] = torch.rand_like(place)
            else:  # random and priority
                raise ValueError(
                    f"{policy!r} adds log-weights to scores, which kvpress cannot; plan with another policy"
                )
            scores[policy][..., 0] = float("inf")
        dropped = [
            scores[policies[head]][0, head].topk(length - round(shares[head] * length), largest=False).indices
            for head in range(heads)
        ]
        where = torch.cat([torch.full_like(indices, head) for head, indices in enumerate(dropped)])
        module.masked_key_indices = (torch.zeros_like(where), where, torch.cat(dropped))
        return keys, values


def layer_press(file, press):
    """Press that keeps the plan's mean share of the keys of each layer, chosen by a press such as SnapKVPress()."""
    shares = json.loads(Path(file).read_text())["layer_shares"]
    return PerLayerCompressionPress(press, [0 if share is None else 1 - share for share in shares])
