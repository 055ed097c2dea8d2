"""What it costs each head of a decoder when the cache of its context is cut to n keys, for every choice of keys.

A window of C + T tokens is read at once. The first C are the context, whose keys each choice ranks by what is known
when they have been read; queries among the T tokens behind them see the keys that are kept, and all tokens from the cut
on. This is what eviction does in use, so the error of a head at n is the error a cache of n keys makes, not a law's:

    wrong(n) = mean over queries and draws of |output(n) − output|²,   error(n) = √(wrong(n) / mean |output|²).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.policies import get_policy
from limitlens.attention.scores import scores_of
from limitlens.errors import Array, InputError, Progress
from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.models.policy_hook import policy_input
from limitlens.sampling.checkpoint import Checkpoint
from limitlens.sampling.streams import generator_for

BEHIND = 128  # tokens behind the cut
QUERIES = 16  # of them, evenly spaced, whose outputs are compared
DRAWS = 2  # of choices that sample
_TINY = float(np.finfo(np.float32).tiny)  # a mass that is lost beside the largest weight divides nothing by zero
SHARES = (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)  # of the context that are kept


@dataclass(frozen=True, eq=False)
class CutCurves:
    """Squared errors of all heads at all numbers of keys kept."""

    choices: tuple[str, ...]
    sizes: tuple[int, ...]  # keys kept, from 0 to all of the context
    wrong: Array  # (windows, choices, layers, heads, sizes): mean squared errors of a head's output
    full: Array  # (windows, layers, heads): mean squares of the output itself
    shared: int  # key/value heads of a layer: query head h reads number h // (heads / shared)

    @property
    def context(self) -> int:
        """Tokens before the cut."""
        return self.sizes[-1]

    def part(self, windows: slice | NDArray[np.bool_]) -> Self:
        """The curves of some windows."""
        return replace(self, wrong=self.wrong[windows], full=self.full[windows])

    def error(self) -> Array:
        """Relative output errors, (choices, layers, heads, sizes)."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.sqrt(self.wrong.mean(0) / self.full.mean(0)[..., None]))

    def by_key_value_head(self, per_head: Array) -> Array:
        """(..., heads, sizes) in groups that share their keys: (..., key/value heads, query heads of each, sizes)."""
        *front, heads, sizes = per_head.shape
        return per_head.reshape(*front, self.shared, heads // self.shared, sizes)

    def keys_for(self, error: float) -> NDArray[np.intp]:
        """Keys that bring every query head of a key/value head to an error: (choices, layers, key/value heads)."""
        return keys_below(self.by_key_value_head(self.error()).max(-2), self.sizes, error)


def keys_below(curves: Array, sizes: Sequence[int], level: float) -> NDArray[np.intp]:
    """From which number of keys on curves (..., sizes) stay at or below a level: straight between sizes, rounded up."""
    n, last = np.asarray(sizes, dtype=float), len(sizes) - 1
    above = np.nan_to_num(curves, nan=np.inf) > level
    start = np.where(above.any(-1), last - above[..., ::-1].argmax(-1), -1)  # the last size that is above the level
    here, there = np.clip(start, 0, last - 1), np.clip(start + 1, 1, last)
    low, high = (np.take_along_axis(curves, i[..., None], -1)[..., 0] for i in (here, there))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.clip((low - level) / (low - high), 0, 1)
    found = np.where(start < 0, n[0], n[here] + np.nan_to_num(share, nan=1.0) * (n[there] - n[here]))
    return np.asarray(np.ceil(np.where(start >= last, n[-1], found).round(6))).astype(np.intp)


def measure_cut(
    loaded: LoadedModel, windows: Windows, indices: Sequence[int], context: int, choices: Sequence[str],
    *, seed: int = 0, progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> CutCurves:  # fmt: skip
    """The curves of every head over the windows of some indices, each of them `context` + BEHIND tokens long."""
    if not loaded.causal:
        raise InputError(f"{loaded.name} is an encoder, which keeps no cache; expected a decoder, such as smollm2")
    sizes = tuple(sorted({round(share * context) for share in SHARES}))
    stack: Any = loaded.model.base_model  # logits are not asked for

    def window(k: int) -> dict[str, Any]:
        found: list[tuple[Array, Array]] = []
        shared: list[int] = []

        def take(call: Captured) -> None:
            shared.append(call.key.shape[1])
            found.append(_layer(call, context, sizes, choices, [seed, int(indices[k]), call.layer]))

        (ids,) = windows.batches(1, [indices[k]])
        with torch.inference_mode(), capture(stack, take) as run_until_last_attention:
            run_until_last_attention(input_ids=ids.to(loaded.model.device), use_cache=False)
        wrong, full = zip(*found, strict=True)
        return {"wrong": np.stack(wrong, 1), "full": np.stack(full), "shared": np.array(shared[-1])}

    asked: dict[str, Any] = {"job": "cut", "weights": loaded.digest, "text": windows.sha256, "windows": list(indices)}
    asked |= {"context": context, "choices": choices, "seed": seed, "device": loaded.model.device}
    rows = (checkpoint or Checkpoint()).each(asked, len(indices), window, tokens=windows.length, progress=progress)
    return CutCurves(tuple(choices), sizes, rows["wrong"], rows["full"], int(rows["shared"][-1]))


def _layer(
    call: Captured, context: int, sizes: Sequence[int], choices: Sequence[str], entropy: list[int]
) -> tuple[Array, Array]:
    """Mean squared errors (choices, heads, sizes) of a layer's heads, and mean squares of their outputs (heads,)."""
    device, (heads, there), shared = call.key.device, (call.query.shape[1], call.key.shape[2]), call.key.shape[1]
    rows = torch.linspace(context, there - 1, QUERIES, device=device).long()
    end = torch.full((1,), context, device=device)
    asked, past = call.query[:, :, rows], call.query[:, :, :context]
    blind, oracle = (policy_input(call, context, end, past=past, served=served) for served in (None, asked))
    query = asked[0].float().reshape(shared, -1, asked.shape[-1]) * call.scale
    key, value = call.key[0].float(), call.value[0].float()
    scores, seen = scores_of(query, key, call.softcap), call.seen()
    if seen is not None:
        seen = seen.reshape(-1, *seen.shape[-2:])[0][rows].repeat(heads // shared, 1)
        scores = scores.masked_fill(~seen, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weight = torch.exp(scores - peak)
    mass, moment = weight[..., context:].sum(-1, keepdim=True), weight[..., context:] @ value[:, context:]
    if call.sinks is not None:
        learned = call.sinks.float().view(shared, -1, 1).expand(-1, -1, QUERIES).reshape(shared, -1, 1)
        mass = mass + torch.exp(learned - peak)
    before, values = weight[..., :context], value[:, :context]

    def attend(kept: Tensor) -> Tensor:
        total: Tensor = kept.sum(-1, keepdim=True) + mass
        return (kept @ values + moment) / total.clamp_min(_TINY)

    full = attend(before)
    wrong = np.empty((len(choices), heads, len(sizes)))
    for i, name in enumerate(choices):
        choice = get_policy(name)
        sight = oracle if choice.sees_queries else blind
        priority = choice.priority(sight, DRAWS, generator_for(*entropy, i))
        for j, size in enumerate(sizes):
            found = choice.select_by(sight, priority, size)
            squares = torch.zeros(shared, heads // shared, QUERIES, device=device)
            for number, mask in enumerate(found.mask[:, 0]):
                kept = before * (mask.flatten(1, 2) if choice.sees_queries else mask)
                if found.log_weights is not None:
                    kept = kept * found.log_weights[number, 0].exp()
                squares += (attend(kept) - full).square().sum(-1).view_as(squares)
            wrong[i, :, j] = squares.mean(-1).flatten().cpu().numpy() / len(found.mask)
    return wrong, full.square().sum(-1).view(heads, QUERIES).mean(-1).double().cpu().numpy()
