"""Score scaling and per-head KV budgets in plain transformers, without limitlens: thirty lines to copy.

`factors` [layer][head] multiply the scores. `budgets` [layer][kv_head] are those of kv_budgets.json, which
`limitlens plan MODEL --policy streaming --context C --out DIR` writes: the number of the first C keys that a key/value
head keeps, here by the policy "streaming" (the first tokens and the nearest).
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

SINKS = 4


def install(model, factors=None, budgets=None, cut=None):
    """Make the model multiply its scores by the factors and attend to the kept keys before position `cut`."""

    def attention(module, query, key, value, mask, scaling=None, **kwargs):
        layer, groups = module.layer_idx, query.shape[1] // key.shape[1]
        if factors is not None:
            query = query * torch.as_tensor(factors[layer]).to(query)[None, :, None, None]
        length, total = query.shape[2], key.shape[2]
        place = torch.arange(total - length, total, device=query.device)[:, None]  # positions of the queries
        keys = torch.arange(total, device=query.device)
        seen = (keys <= place).expand(key.shape[1], -1, -1) if mask is None else mask[0].expand(key.shape[1], -1, -1)
        if budgets is not None and total > cut:
            kept = torch.as_tensor(budgets[layer], device=query.device)[:, None, None]
            old = (keys < cut) & (place >= cut)
            near = (keys < SINKS) & (keys < kept) | (keys >= cut - (kept - SINKS).clamp(min=0))
            seen = seen & (~old | near)
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        seen = seen.repeat_interleave(groups, 0)[None]
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("planned", attention)
    AttentionMaskInterface.register("planned", sdpa_mask)
    model.set_attn_implementation("planned")
    return model
