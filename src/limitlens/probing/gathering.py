"""The pilot law of all heads of a layer at once on a device: tokens on nodes of weight, as in `theory.pilot_law`.

On a CPU a sparse matrix for each query is fastest. Here the shares of all tokens on all nodes are a dense matrix for
each query, nearly all of it zeros, that is multiplied with what its tokens carry: no two additions meet in one place,
so that a pilot gives the same numbers again. Nodes are powers of e^GAP, whoever is gathered on them, so that a head is
told the same alone and among others, to single precision. Points s go as far as one of the heads needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.errors import Array, InputError
from limitlens.lazily import sent
from limitlens.probing.pilot import Layer, scores_of
from limitlens.theory import pilot_law as law
from limitlens.theory.pilot_law import PARTS, Gathered, PilotErrors

AT_ONCE = 1 << 18  # queries · values at a time: arrays of up to 2.4 GB
SHARES = 1 << 28  # of tokens on nodes at a time: 1 GB


def together(
    layer: Layer, key: Tensor, value: Tensor, n: Array, chosen: NDArray[np.int64], quarters: NDArray[np.intp] | None
) -> Iterator[tuple[PilotErrors, ...]]:
    """`pilot_errors` of the chosen queries of all heads of a layer, head after head, as many heads at a time as fit."""
    (shared, groups, m, _), device = layer.query.shape, key.device
    part, rows = law.parts_of(len(key), quarters), groups * len(chosen)
    order, asked = sent(np.argsort(part, kind="stable"), device), sent(chosen, device)
    spans = [slice(*span) for span in pairwise((0, *np.cumsum(np.bincount(part, minlength=PARTS)).tolist()))]
    keys, values = (tokens.index_select(0, order).transpose(0, 1) for tokens in (key, value))
    step = max(1, AT_ONCE // (rows * (value.shape[-1] + 2)))
    for start in range(0, shared, step):
        some = slice(start, start + step)
        scores = scores_of(layer.query[some][:, :, asked].flatten(1, 2), keys[some], layer.traits.softcap).double()
        top = scores.amax(-1, keepdim=True)
        logs = (scores - top).clip(-law.LIGHTEST)
        level = logs.exp().mean(-1, keepdim=True).log()
        atom = None
        if layer.atom is not None:
            score, own = (
                one[some].reshape(-1, groups, m, *one.shape[2:])[:, :, asked].flatten(0, 2)
                for one in (layer.atom.lse, layer.atom.output)
            )
            atom = ((score - (top + level).flatten()).clip(max=law.HEAVIEST).exp(), own)
        found = _gathered(logs - level, values[some].double(), spans, n).errors(n, atom)
        yield tuple(PilotErrors.of(told) for told in found.cpu().numpy())


def _gathered(logs: Tensor, values: Tensor, spans: list[slice], n: Array) -> Gathered:
    """Split each of M tokens between the nodes around its weight, of which logs (B, r, M) are given and mean 1.

    Values are (B, M, v); the parts of the pilot are spans of its tokens.
    """
    device, (heads, queries, tokens) = logs.device, logs.shape
    light = logs.kthvalue(max(1, int(np.ceil(law.lightest_share(n) * tokens))), -1).values
    # The one wait for the device: how many nodes and points there are.
    low, high, lightest = torch.stack((logs.min(), logs.max(), light.min())).tolist()
    if not np.isfinite(low + high):
        raise InputError(law.UNSEEN)
    weights, first = law.nodes(low, high)
    node = sent(weights, device)
    weight, middle, rows = logs.exp(), values.mean(1, keepdim=True), heads * queries
    at = ((logs - first) * (1 / law.GAP)).long()
    upper = (weight / node[at] - 1).clip(0) * (1 / np.expm1(law.GAP))
    about = torch.cat((values - middle, torch.ones_like(values[..., :1])), -1)
    pull = torch.stack([weight[..., span] @ about[:, span] for span in spans]).flatten(1, 2)  # (parts, m, v + 1)
    limit = pull[..., :-1].sum(0) / tokens
    pull[..., :-1] -= pull[..., -1:] * limit
    # Single precision from here on: d is taken about the limit before anything is summed, so that nothing cancels.
    place, share = (torch.stack(pair, 2).flatten(0, 1) for pair in ((at, at + 1), (1 - upper, upper)))  # (m, 2, M)
    about, weight, share = about[..., :-1].float(), weight.flatten(0, 1).float(), share.float()
    head = torch.arange(rows, device=device) // queries
    table = share.new_empty(PARTS, rows, len(node), values.shape[-1] + 3)  # of W d, W, W |d|² and 1
    step = min(rows, max(1, SHARES // (len(node) * tokens)))
    shares = share.new_zeros(step, len(node), tokens)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        d, w = about[head[some]] - limit[some, None].float(), weight[some, :, None]
        carried = torch.cat((w * d, w, w * d.square().sum(-1, keepdim=True), torch.ones_like(w)), -1)
        filled = shares[: len(d)].scatter_(1, place[some], share[some])
        for sums, span in zip(table, spans, strict=True):
            torch.bmm(filled[..., span], carried[:, span], out=sums[some])
        filled.scatter_(1, place[some], 0.0)
    table = table.transpose(1, 2)
    return Gathered(
        law.points(n, np.exp(lightest)), np.array([span.stop - span.start for span in spans], float), node,
        table[..., -1].double(), table[..., :-1].flatten(2), pull, limit + middle.repeat_interleave(queries, 0)[:, 0],
        torch.matmul, torch, lambda array: sent(array, device),
    )  # fmt: skip
