"""Error curves of cache eviction: the output error of each head when only n keys of its context stay in the KV cache.

The first C tokens of a window of text are the context. Queries after it see the n kept keys and all later tokens.

    error(n) = √(mean |output(n) − output|² / mean |output|²), with means over these queries and random draws.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from limitlens.attention.policies import POLICIES, get_policy
from limitlens.attention.subset import attend_subset, scores_of
from limitlens.cache.layers import check_decoder
from limitlens.cache.reconstruction import read_twice
from limitlens.cost import FORWARD_RATE, computing_threads, forward_cost
from limitlens.errors import Array, Progress
from limitlens.models import Captured, LoadedModel, Windows, capture, open_corpus
from limitlens.models.intervene import policy_input
from limitlens.sampling.checkpoint import Checkpoint
from limitlens.sampling.streams import generator_for

BEHIND = 128  # tokens after the cut
QUERIES = 16  # queries after the cut, evenly spaced, whose outputs are compared
DRAWS = 2  # draws of each policy that samples keys at random
MAX_WINDOWS = 64  # windows of a text, at most; plans and trials use different windows
SHARES = (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)  # kept shares of the context


@dataclass(frozen=True, eq=False)
class CutCurves:
    """Squared output errors of every head by number of keys kept in its cache, for each key policy and text window."""

    policies: tuple[str, ...]
    sizes: tuple[int, ...]  # keys kept, from 0 to the whole context
    squared_error: Array  # (windows, policies, layers, heads, sizes): mean squared errors of a head's output
    full: Array  # (windows, layers, heads): mean squares of the output itself
    kv_heads: int  # key/value heads of a layer: query head h reads number h // (heads / kv_heads)
    layers: tuple[int, ...]  # indices of the layers whose cache holds the whole context

    @property
    def context(self) -> int:
        """Number of tokens of the prompt, after which the cache is cut."""
        return self.sizes[-1]

    def part(self, windows: slice | NDArray[np.bool_]) -> Self:
        """Restrict the error curves to some of the windows of text, given as a slice or a mask (windows,)."""
        return replace(self, squared_error=self.squared_error[windows], full=self.full[windows])

    def error(self) -> Array:
        """Relative errors √(mean |change|² / mean |output|²) of outputs, (policies, layers, heads, sizes)."""
        with np.errstate(invalid="ignore"):
            return np.asarray(np.sqrt(self.squared_error.mean(0) / self.full.mean(0)[..., None]))

    def by_kv_head(self, per_head: Array) -> Array:
        """Group query heads by kv head: reshape (..., heads, sizes) to (..., kv heads, query heads of each, sizes)."""
        *front, heads, sizes = per_head.shape
        return per_head.reshape(*front, self.kv_heads, heads // self.kv_heads, sizes)


def keys_below(curves: Array, sizes: Sequence[int], level: float) -> NDArray[np.intp]:
    """Numbers of keys (...) from which error curves (..., sizes) stay at or below `level`, by linear interpolation."""
    n = np.asarray(sizes, dtype=float)
    last = len(sizes) - 1
    above = np.nan_to_num(curves, nan=np.inf) > level
    start = np.where(above.any(-1), last - above[..., ::-1].argmax(-1), -1)  # index of the last size above the level
    left, right = np.clip(start, 0, last - 1), np.clip(start + 1, 1, last)
    low, high = (np.take_along_axis(curves, i[..., None], -1)[..., 0] for i in (left, right))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.clip((low - level) / (low - high), 0, 1)
    crossing = np.where(start < 0, n[0], n[left] + np.nan_to_num(share, nan=1.0) * (n[right] - n[left]))
    return np.asarray(np.ceil(np.where(start >= last, n[-1], crossing).round(6))).astype(np.intp)


def cut_windows(loaded: LoadedModel, corpus: str, special: str, context: int) -> Windows:
    """Split a text into windows that test a cut cache: `context` tokens before the cut and `BEHIND` tokens after it."""
    length = context + BEHIND
    return Windows(loaded, open_corpus(corpus), length=length, tokens=MAX_WINDOWS * length, special=special, fewer=True)


def window_order(windows: Windows, seed: int) -> list[int]:
    """Random order of the windows of a text, from which plans and trials take different windows."""
    return [int(index) for index in np.random.default_rng([seed, 0xC7]).permutation(windows.count)]


def plan_cost(loaded: LoadedModel, context: int, windows: int) -> tuple[float, float]:
    """Estimate the (seconds, bytes) that the measurements for a cache plan take on a number of windows of text."""
    config, length = loaded.model.config.get_text_config(), context + BEHIND
    # A window is read three times and repeated once, which attends to twice as many keys as reading it; gradients of
    # some continuations cost as much as reading it again.
    seconds, memory = forward_cost(loaded.model, 6.0 * windows * length, length)
    selections = len(SHARES) * sum(DRAWS if policy.sampled else 1 for policy in POLICIES.values())
    per_score = 2 * config.hidden_size / config.num_attention_heads + 40  # output, mask, exponential
    scores = float(windows * selections * config.num_hidden_layers * config.num_attention_heads * QUERIES * length)
    return seconds + scores * per_score / (FORWARD_RATE * computing_threads(loaded.model)), memory


def measure_cut(
    loaded: LoadedModel, windows: Windows, indices: Sequence[int], context: int, policies: Sequence[str],
    *, seed: int = 0, progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> CutCurves:  # fmt: skip
    """Measure the output error of every head by number of kept keys and key policy, on windows `indices` of a text.

    Layers whose sliding window is shorter than the context are left out.
    """
    check_decoder(loaded)
    sizes = tuple(sorted({round(share * context) for share in SHARES}))
    stack: Any = loaded.model.base_model  # without the language-model head
    again = any(get_policy(name).needs_repeat for name in policies)

    def window(k: int) -> dict[str, Any]:
        rows: dict[str, list[Any]] = {"squared": [], "full": [], "layers": [], "kv_heads": []}
        (ids,) = windows.batches(1, [indices[k]])
        ids = ids.to(loaded.model.device)
        repeat = read_twice(loaded, ids[:, :context]) if again else None

        def take(call: Captured) -> None:
            if call.slides(context):
                return
            entropy, own = [seed, int(indices[k]), call.layer], None if repeat is None else repeat[call.layer]
            squared, full = _layer_errors(call, context, sizes, policies, entropy, own)
            values = (squared, full, call.layer, call.key.shape[1])
            for row, value in zip(rows.values(), values, strict=True):
                row.append(value)

        with torch.inference_mode(), capture(stack, take) as run_until_last_attention:
            run_until_last_attention(input_ids=ids, use_cache=False)
        return {name: np.stack(row, 1 if name == "squared" else 0) for name, row in rows.items()}

    job: dict[str, Any] = {"job": "cut", "weights": loaded.digest, "text": windows.sha256, "windows": list(indices)}
    job |= {"context": context, "policies": policies, "seed": seed, "device": loaded.model.device}
    found = (checkpoint or Checkpoint()).each(job, len(indices), window, tokens=windows.length, progress=progress)
    kv_heads, layers = int(found["kv_heads"][-1][-1]), tuple(found["layers"][-1].tolist())
    return CutCurves(tuple(policies), sizes, found["squared"], found["full"], kv_heads, layers)


def _layer_errors(
    call: Captured, context: int, sizes: Sequence[int], policies: Sequence[str], entropy: list[int],
    repeat: Tensor | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Mean squares of output errors (policies, heads, sizes) of a layer with a cut cache, and of outputs (heads,)."""
    heads = call.query.shape[1]
    rows = torch.linspace(context, call.key.shape[2] - 1, QUERIES, device=call.key.device).long()
    known: dict[str, Any] = {"past": call.query[:, :, :context], "repeat": repeat}
    squared = np.empty((len(policies), heads, len(sizes)))
    full = None
    for i, j, output, whole in cut_outputs(call, rows, context, sizes, policies, entropy, **known):
        squares = (output - whole).square().sum(-1).mean(0)
        squared[i, :, j] = squares.view(heads, QUERIES).mean(-1).cpu().numpy()
        full = whole
    assert full is not None
    return squared, full.square().sum(-1).view(heads, QUERIES).mean(-1).double().cpu().numpy()


def cut_outputs(
    call: Captured, rows: Tensor, context: int, sizes: Sequence[int], policies: Sequence[str], entropy: list[int],
    *, past: Tensor, repeat: Tensor | None,
) -> Iterator[tuple[int, int, Tensor, Tensor]]:  # fmt: skip
    """Yield outputs of a layer's queries `rows` for every policy and size of the cut cache, and with the full cache.

    `past` (B, Hq, p, k) are queries of the context and `repeat` (Hkv, context) the weights of `repeat_attention`. Each
    item is (index of the policy, index of the size, outputs (draws, Hkv, Hq / Hkv · rows, v), full outputs).
    """
    device, heads = call.key.device, call.query.shape[1]
    kv_heads, total = call.key.shape[1:3]
    end = torch.full((1,), context, device=device)
    later = call.query[:, :, rows]
    known: dict[str, Any] = {"past": past, "repeat": repeat}
    blind, oracle = (policy_input(call, context, end, served=served, **known) for served in (None, later))
    query = later[0].float().reshape(kv_heads, -1, later.shape[-1]) * call.scale
    value = call.value[0].float()
    scores = scores_of(query, call.key[0].float(), call.softcap)
    seen = call.seen()
    if seen is not None:
        seen = seen.reshape(-1, *seen.shape[-2:])[0][rows].repeat(heads // kv_heads, 1)
        scores = scores.masked_fill(~seen, float("-inf"))
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks.float().view(kv_heads, -1, 1).expand(-1, -1, len(rows)).reshape(kv_heads, -1)
    behind = (0, total - context)  # all tokens after the cut are kept

    def output(mask: Tensor, log_weights: Tensor | None) -> Tensor:
        weights = None if log_weights is None else pad(log_weights, behind)
        return attend_subset(scores, value, mask=pad(mask, behind, value=True), log_weights=weights, sinks=sinks)[1]

    full = output(torch.ones(1, 1, context, dtype=torch.bool, device=device), None)
    for i, name in enumerate(policies):
        policy = get_policy(name)
        inputs = oracle if policy.sees_queries else blind
        priority = policy.priority(inputs, DRAWS, generator_for(*entropy, i))
        for j, size in enumerate(sizes):
            kept = policy.select_by(inputs, priority, size)
            masks = kept.mask[:, 0].flatten(2, 3) if policy.sees_queries else kept.mask[:, 0]
            weights = [None] * len(masks) if kept.log_weights is None else kept.log_weights[:, 0]
            yield i, j, torch.stack([output(*one) for one in zip(masks, weights, strict=True)]), full
