"""The CPU kernel: torch's fused attention, which also returns the log-sum-exp."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute attention without forming all scores. See the package docstring for shapes.

    The fused kernel needs one head size for keys and values, so the smaller one is padded with zeros; these change no
    score, and the padded coordinates of the output are dropped.
    """
    batch, value_dim = query.shape[:-2], value.shape[-1]
    if key.shape[:-2] != batch:
        batch = torch.broadcast_shapes(batch, key.shape[:-2])  # type: ignore[no-untyped-call]
    width = max(query.shape[-1], value_dim)
    query, key, value = _rows(query, batch, width), _rows(key, batch, width), _rows(value, batch, width)
    mask = None
    if bias is not None:
        rows = (query.shape[-2], key.shape[-2])
        mask = bias.to(query.dtype).expand(*batch, *rows).reshape(-1, 1, *rows)
    output, lse = _FUSED(query, key, value, 0.0, False, attn_mask=mask, scale=1.0)
    output, lse = output.squeeze(1), lse.squeeze(1)
    if value_dim < width:
        output = output[..., :value_dim]
    if bias is not None:  # a query with every token masked: the fused kernel divides 0 by 0
        void = ~(torch.isfinite(bias).any(-1).expand(*batch, query.shape[-2]).reshape(lse.shape))
        lse, output = lse.masked_fill(void, float("-inf")), output.masked_fill(void[..., None], 0.0)
    if len(batch) != 1:
        lse, output = lse.reshape(*batch, -1), output.reshape(*batch, -1, value_dim)
    return lse, output


def _rows(tensor: Tensor, batch: torch.Size, width: int) -> Tensor:
    """Reshape to one batch axis and one head axis of length 1, and pad rows to `width`.

    The early return matters: over a cell of 64 tokens every call counts.
    """
    if tensor.shape[-1] < width:
        tensor = pad(tensor, (0, width - tensor.shape[-1]))
    if tensor.shape[:-2] == batch and len(batch) == 1:
        return tensor.unsqueeze(1)
    return tensor.expand(*batch, *tensor.shape[-2:]).reshape(-1, 1, *tensor.shape[-2:])
