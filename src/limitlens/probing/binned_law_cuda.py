"""GPU version of the exact bootstrap (`theory.exact_bootstrap`): expected errors of all heads of a layer at once.

Tokens are sorted by softmax weight and binned onto a grid of weights, whose points are called nodes. One Triton program
adds up the tokens of neighbouring nodes. Results are reproducible, and to single precision the errors of a head do not
depend on the heads computed with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.arrays import to_device
from limitlens.attention.kernels.split import padded, programs
from limitlens.attention.subset import scores_of
from limitlens.errors import Array, InputError
from limitlens.probing.pilot import Layer
from limitlens.theory import exact_bootstrap as law
from limitlens.theory import weight_nodes as grid
from limitlens.theory.exact_bootstrap import PARTS, BinnedTokens, PilotErrors


@dataclass(frozen=True)
class Tiling:
    """How the work of the exact bootstrap is divided on a GPU."""

    at_once: int = 1 << 18  # queries × value dimensions computed at a time: arrays of up to 2.4 GB
    nodes: int = 16  # nodes (grid points of the weight) whose tokens one program adds up
    block: int = 32  # tokens that one program reads at a time


TILING = Tiling()


def layer_errors(
    layer: Layer, key: Tensor, value: Tensor, n: Array, chosen: NDArray[np.int64], quarters: NDArray[np.intp] | None,
    tiling: Tiling = TILING,
) -> Iterator[tuple[PilotErrors, ...]]:  # fmt: skip
    """Yield the expected errors of attention over n random tokens, for all heads of a layer, some heads at a time.

    The formula is that of `theory.exact_bootstrap.pilot_errors`. Samples come from M tokens, `key` and `value`
    (M, Hkv, ·). `n` (J,) are the sample sizes, `chosen` the indices of the queries used, `quarters` (M,) the quarter of
    the text that each token comes from. A tuple holds the errors without the sink and, if there is a sink, with it.
    """
    (shared, groups, m, _), device = layer.query.shape, key.device
    part, rows = law.parts_of(len(key), quarters), groups * len(chosen)
    order, asked = to_device(np.argsort(part, kind="stable"), device), to_device(chosen, device)
    spans = [slice(*span) for span in pairwise((0, *np.cumsum(np.bincount(part, minlength=PARTS)).tolist()))]
    keys, values = (tokens.index_select(0, order).transpose(0, 1) for tokens in (key, value))
    step = max(1, tiling.at_once // (rows * (value.shape[-1] + 2)))
    for start in range(0, shared, step):
        some = slice(start, start + step)
        scores = scores_of(layer.query[some][:, :, asked].flatten(1, 2), keys[some], layer.traits.softcap).double()
        top = scores.amax(-1, keepdim=True)
        logs, sink, sink_value = scores - top, None, None
        if layer.atom is not None:
            sink, sink_value = (
                one[some].reshape(-1, groups, m, *one.shape[2:])[:, :, asked].flatten(0, 2)
                for one in (layer.atom.lse, layer.atom.output)
            )
            sink = sink - top.flatten()
        level = logs.exp().mean(-1, keepdim=True).log()
        binned = _binned(logs - level, values[some].double(), spans, n, tiling)
        if binned is None:
            columns = logs.flatten(0, 1).T.cpu().numpy()
            closed, moved = grid.close_gaps(columns, None if sink is None else sink.cpu().numpy())
            sink = None if moved is None else to_device(moved, device)
            logs = to_device(closed.T, device).reshape(logs.shape) - level  # light tokens do not change the level
            binned = _binned(logs, values[some].double(), spans, n, tiling, wide=True)
            assert binned is not None
        atom = None if sink is None else ((sink - level.flatten()).clip(max=law.MAX_LOG_ATOM).exp(), sink_value)
        found = binned.errors(n, atom)
        yield tuple(PilotErrors.of(errors) for errors in found.cpu().numpy())


def _binned(
    logs: Tensor, values: Tensor, spans: list[slice], n: Array, tiling: Tiling, wide: bool = False
) -> BinnedTokens | None:
    """Bin tokens by softmax weight: each of M tokens is split between the two grid nodes around its weight.

    `logs` (B, r, M) are log weights with mean weight 1, of r queries of B key/value heads; `values` are (B, M, v);
    `spans` are slices of the tokens. Returns None if `weight_nodes.close_gaps` must be applied first, unless `wide`.
    """
    device, (_, queries, tokens) = logs.device, logs.shape
    share = grid.lightest_share(n)
    light, faint = (
        logs.kthvalue(max(1, int(np.ceil(part * tokens))), -1).values.min()
        for part in (share, min(share, grid.FAINT_SHARE))
    )
    # The only wait for the GPU: these numbers fix the number of nodes and of quadrature points.
    low, high, lightest, faint_log = torch.stack((logs.min(), logs.max(), light, faint)).tolist()
    if not np.isfinite(low + high):
        raise InputError(law.NO_TOKEN)
    low = max(low, faint_log - grid.FAINT_MARGIN)
    logs = logs.clip(low)  # lighter tokens share the first node
    if high - low > grid.WIDE_RANGE and not wide:
        return None
    node, first = grid.nodes(low, high)
    weight, middle = logs.exp(), values.mean(1, keepdim=True)
    about = torch.cat((values - middle, torch.ones_like(values[..., :1])), -1)
    pull = torch.stack([weight[..., span] @ about[:, span] for span in spans]).flatten(1, 2)  # (parts, m, v + 1)
    limit = pull[..., :-1].sum(0) / tokens
    pull[..., :-1] -= pull[..., -1:] * limit
    count, table = _on_nodes(logs.flatten(0, 1), about[..., :-1].contiguous(), limit, spans, first, len(node), tiling)
    return BinnedTokens(
        grid.points(n, lightest), np.array([span.stop - span.start for span in spans], float), to_device(node, device),
        count.double(), table.flatten(2), pull, limit + middle.repeat_interleave(queries, 0)[:, 0],
        torch.matmul, torch, lambda array: to_device(array, device),
    )  # fmt: skip


def _on_nodes(
    logs: Tensor, values: Tensor, limit: Tensor, spans: list[slice], first: float, nodes: int, tiling: Tiling
) -> tuple[Tensor, Tensor]:
    """Sums over the tokens of every grid node, for log weights (m, M), values (B, M, v) and limits (m, v) of m queries.

    Returns counts (parts, K, m) on K nodes, and sums (parts, K, m, v + 2) of W d, W and W |d|², divided by the weight
    of the node, with W the weight of a token and d its value minus the limit.
    """
    (rows, tokens), v = logs.shape, values.shape[-1]
    parts = [logs[:, span].float().sort(-1) for span in spans]
    token = torch.cat([part.indices + span.start for part, span in zip(parts, spans, strict=True)], -1)
    place = ((torch.cat([part.values for part in parts], -1) - first) * (1 / grid.GAP)).int()
    above = logs.gather(-1, token) - (first + grid.GAP * place)
    asked = torch.arange(nodes + 1, dtype=torch.int32, device=logs.device).expand(rows, -1).contiguous()
    begin = torch.stack(
        [torch.searchsorted(place[:, span].contiguous(), asked, out_int32=True) + span.start for span in spans], 1
    )
    count, table = (above.new_empty(PARTS, nodes, rows, *own, dtype=torch.float32) for own in ((), (v + 2,)))
    programs.gather[(rows, PARTS, -(-nodes // tiling.nodes))](
        above, place, token, values, limit, begin, count, table, float(np.expm1(grid.GAP)),
        rows, rows // len(values), tokens, nodes, v, PARTS, tiling.nodes, padded(v), tiling.block, num_warps=2,
    )  # fmt: skip
    return count, table
