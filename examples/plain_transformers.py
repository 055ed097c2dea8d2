"""A factor on the scores and per-head budgets in plain transformers, without limitlens: thirty lines to copy.

`factors` is a list [layer][head]; `budgets` the one of kv_budgets.json (`limitlens plan RUN --keep sinks --context C
--out DIR`), [layer][kv_head]: how many of the first C keys a key/value head keeps, here its sinks and the nearest.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

SINKS = 4


def install(model, factors=None, budgets=None, cut=None):
    """Make the model attend with these factors, and to what is kept of the keys before position `cut`."""

    def attention(module, query, key, value, mask, scaling=None, **kwargs):
        layer, groups = module.layer_idx, query.shape[1] // key.shape[1]
        if factors is not None:
            query = query * torch.as_tensor(factors[layer]).to(query)[None, :, None, None]
        length, there = query.shape[2], key.shape[2]
        place = torch.arange(there - length, there, device=query.device)[:, None]  # where the queries stand
        keys = torch.arange(there, device=query.device)
        seen = (keys <= place).expand(key.shape[1], -1, -1) if mask is None else mask[0].expand(key.shape[1], -1, -1)
        if budgets is not None and there > cut:
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
