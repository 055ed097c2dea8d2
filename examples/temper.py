"""Fitted exponents in plain transformers, without limitlens: code to copy.

`install(model, "runs/temper/per_head_constant_far_0.2.json")` takes a file of `limitlens temper ... --out runs/temper`:
the rotary positions are scaled as they were for the fit, and the scores of a query at position p (counted from 1) of
head h are multiplied by e^{c_h} max(p/n0, 1)^{gamma_h}. For llama-like decoders, one text at a time, without padding.
"""

import json
from pathlib import Path

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def install(model, file):
    """Make the model attend with the exponents and the rope scaling of a file."""
    told = json.loads(Path(file).read_text())
    gamma = torch.tensor(told["exponents"])
    constant = torch.zeros_like(gamma) if told["constants"] is None else torch.tensor(told["constants"])
    scale_rope(model, told["rope_scaling"], told["to"] / told["trained"], told["trained"])

    def attention(module, query, key, value, mask, **kwargs):
        stop, layer = key.shape[2], module.layer_idx
        place = torch.arange(stop - query.shape[2] + 1, stop + 1, device=query.device)
        log = (place / told["trained"]).clamp(min=1).log()
        factor = (gamma[layer].to(log)[:, None] * log + constant[layer].to(log)[:, None]).exp()
        return sdpa_attention_forward(module, query * factor.to(query)[None, :, :, None], key, value, mask, **kwargs)

    AttentionInterface.register("tempered", attention)
    AttentionMaskInterface.register("tempered", sdpa_mask)
    model.set_attn_implementation("tempered")
    return model


def scale_rope(model, how, factor, trained):
    """Other frequencies for the rotary positions; YaRN's own factor on the scores is left out."""
    rotary = model.base_model.rotary_emb
    theta = rotary.inv_freq
    if how == "none":
        return
    if how == "ntk":
        turned = theta * factor ** -(torch.arange(len(theta), device=theta.device) / (len(theta) - 1))
    else:
        wanted = {"rope_type": how, "factor": factor, "original_max_position_embeddings": trained}
        config = type(model.config)(
            **model.config.to_dict() | {"rope_parameters": model.config.rope_parameters | wanted}
        )
        turned, _ = ROPE_INIT_FUNCTIONS[how](config, theta.device)
    rotary.inv_freq = turned.to(theta)
