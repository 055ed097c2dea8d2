"""The CPU kernel: torch's fused attention, which returns the log-sum-exp beside the output."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention without forming the scores. See the package docstring for shapes.

    The fused kernel wants one head size for keys and values, so the shorter of the two is padded with zeros; zeros add
    nothing to a score, and the padded coordinates of the output are dropped.
    """
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])  # type: ignore[no-untyped-call]
    value_dim = value.shape[-1]
    width = max(query.shape[-1], value_dim)
    query, key, value = (_rows(tensor, batch, width) for tensor in (query, key, value))
    mask = None
    if bias is not None:
        rows = (query.shape[-2], key.shape[-2])
        mask = bias.to(query.dtype).expand(*batch, *rows).reshape(-1, 1, *rows)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=1.0
    )
    output, lse = output[:, 0, :, :value_dim], lse[:, 0]
    if bias is not None:  # a query with every token masked: the fused kernel divides 0 by 0
        void = ~(torch.isfinite(bias).any(-1).expand(*batch, query.shape[-2]).reshape(lse.shape))
        lse, output = lse.masked_fill(void, float("-inf")), output.masked_fill(void[..., None], 0.0)
    return lse.reshape(*batch, -1), output.reshape(*batch, -1, value_dim)


def _rows(tensor: Tensor, batch: torch.Size, width: int) -> Tensor:
    """`tensor` with one batch axis, one head axis of length 1, and its rows padded to `width`."""
    if tensor.shape[-1] < width:
        tensor = pad(tensor, (0, width - tensor.shape[-1]))
    return tensor.expand(*batch, *tensor.shape[-2:]).reshape(-1, 1, *tensor.shape[-2:])
