"""Division of a KV cache among heads (how many keys each head keeps), and the output error that follows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor

from limitlens.attention.policies import POLICIES
from limitlens.cache.cut import CutCurves, keys_below
from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.models import Captured, LoadedModel, Windows
from limitlens.models.relay import Output, hook_attention
from limitlens.probing.result import ProbeRun
from limitlens.statistics.documents import jackknife

BEST, RANDOM = "best", "random"  # names: the best policy for each head; random keys, which a probe can measure
FULL = "full"  # name for the cache that is not cut
ALLOCATIONS = ("uniform", "equal_error", "fisher_weighted")  # functions that divide a cache among key/value heads
SAMPLES = 4  # continuations sampled for the Fisher costs of each window
BISECTIONS = 60  # steps of the bisection for equal errors


@dataclass(frozen=True)
class PolicyTotal:
    """Cache size and output error of the whole model under one key policy (a rule for which keys stay in the cache)."""

    policy: str  # name of a key policy, or "best" for the best policy of each head
    oracle: bool  # whether the policy uses later queries, which no real cache can
    share: float  # share of the whole model's cache that is kept
    error: Estimate  # median over query heads of the relative output error, on windows not used for the budgets
    error_high: float  # 90% quantile over query heads of that error
    within: float | None  # share of query heads within the target error; None for a plan without one


def policy_label(policy: str) -> str:
    """Display name of a key policy, or of "best" (the best policy for each head) or "full" (the cache is not cut)."""
    return {BEST: "best policy for each head", FULL: "full cache"}.get(policy) or POLICIES[policy].label


def probe_errors(run: ProbeRun, curves: CutCurves, without_keys: Array) -> Array:
    """Relative output errors (layers, heads, sizes) of heads that keep only random keys, from a probe's error curves.

    With n of the C keys that are not attention sinks, the error is r e(n) √(1 − n/C). Here e is the head's error curve
    without sinks, and r is the ratio of its errors with and without sinks. Where the curve has no value, the error is
    `without_keys` (layers, heads), that of a head without any key.
    """
    errors = np.repeat(without_keys[..., None], len(curves.sizes), -1)
    for record in (record for record in run.records if record.layer in curves.layers):
        place = curves.layers.index(record.layer), record.head
        atoms = record.sink.keys if record.sink else 0
        rest = max(record.context(curves.context) - atoms, 1)
        factor = record.sink_factor(rest)
        for j, size in enumerate(curves.sizes):
            n = size - atoms
            if n >= rest:
                errors[place][j] = 0
            elif n >= 1:
                value = factor * record.curve_without_sink.predict(n)[0] * math.sqrt(1 - n / rest)
                errors[place][j] = value if math.isfinite(value) else errors[place][j]
    return errors


def at_keys(curves: Array, sizes: Sequence[int], keys: Any) -> Array:
    """Values (policies, ...) of curves (policies, ..., sizes) at `keys` (...) kept keys, by linear interpolation."""
    counts = np.broadcast_to(keys, curves.shape[:-1]).ravel()
    flat = [np.interp(n, sizes, row) for n, row in zip(counts, curves.reshape(-1, len(sizes)), strict=True)]
    return np.reshape(flat, curves.shape[:-1])


def policy_total(
    check: CutCurves, name: str, chosen: Any, keys: Any, error: float | None, beside: int = 0
) -> PolicyTotal:
    """Cache share and output error of the whole model if each key/value head keeps `keys` (layers, kv heads) keys.

    The error curves `check` come from held-out windows of text, over which the standard error is the jackknife's.
    `chosen` (layers, kv heads) are indices of key policies, `name` labels the result, and `error` is the target. All
    `beside` entries of sliding-window layers are kept and count in the share, but not in the errors.
    """
    policies, counts = (np.repeat(part, check.full.shape[2] // check.kv_heads, 1) for part in (chosen, keys))

    def errors_of(curves: CutCurves) -> Array:
        every = at_keys(curves.error(), check.sizes, counts)
        return np.asarray(np.take_along_axis(every, policies[None], 0)[0])

    errors, count = errors_of(check), len(check.full)
    left = [check.part(np.arange(count) != row) for row in range(count)]
    medians = np.array([np.median(errors_of(curves)) for curves in left] if count > 1 else [np.nan])
    stderr = float(jackknife(medians, 0))
    middle, high = np.quantile(errors, (0.5, 0.9)).tolist()
    within = None if error is None else float((errors <= error).mean())
    oracle = name != BEST and POLICIES[name].sees_queries
    share = float((keys.sum() + beside) / (keys.size * check.context + beside))
    return PolicyTotal(name, oracle, share, Estimate(middle, stderr), high, within)


def uniform(shape: tuple[int, ...], total: int) -> NDArray[np.intp]:
    """Divide `total` keys equally among heads, rounded down; `shape` is that of the array of heads."""
    return np.full(shape, total // int(np.prod(shape)), dtype=np.intp)


def equal_error(errors: Array, sizes: Sequence[int], total: int) -> NDArray[np.intp]:
    """Divide `total` keys among heads so that all have the same, smallest possible error; `errors` is (..., sizes)."""
    low, high = 0.0, float(np.nanmax(errors)) + 1
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if keys_below(errors, sizes, middle).sum() <= total:
            high = middle
        else:
            low = middle
    return keys_below(errors, sizes, high)


def fisher_weighted(costs: Array, sizes: Sequence[int], total: int) -> NDArray[np.intp]:
    """Divide at most `total` keys among heads (...) so that the sum of their costs is smallest.

    `costs` (..., sizes) are the costs of each head by number of kept keys. Each curve is replaced by its lower convex
    hull, so that keys can go first to the heads where a key saves most.
    """
    widths = np.diff(sizes)
    saved = -np.diff(costs.reshape(-1, len(sizes))) / widths  # per key, (heads, segments)
    saved = np.stack([isotonic_regression(row, weights=widths, increasing=False).x for row in saved])
    keys = np.full(costs.shape[:-1], sizes[0], dtype=np.intp)
    left_over = total - int(keys.sum())
    for place in np.argsort(-saved, axis=None, kind="stable"):
        head, segment = divmod(int(place), len(widths))
        taken = min(int(widths[segment]), left_over)
        if saved[head, segment] <= 0 or taken <= 0:
            break
        keys.flat[head] += taken
        left_over -= taken
    return keys


def least_cost(
    costs: Array, sizes: Sequence[int], candidates: NDArray[np.intp], total: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], None]:
    """Policies among `candidates` and numbers of keys (...) whose sum of costs (policies, ..., sizes) is smallest."""
    keys = fisher_weighted(costs[candidates].min(0), sizes, total)
    return candidates[at_keys(costs[candidates], sizes, keys).argmin(0)], keys, None


def fisher_costs(loaded: LoadedModel, windows: Windows, indices: Sequence[int], context: int, seed: int = 0) -> Array:
    """Sensitivity g_h (layers, heads) of a model's predictions to errors in the output of each attention head.

    An output error δ changes the predicted distribution by a KL divergence of about g_h |δ|² nats per token, where
    g_h = E |∂ log p(y) / ∂o|² / (2 dim) over tokens y sampled from the model (Fisher information). This is a heuristic:
    it assumes errors of random direction. The tokens after `context` in the windows `indices` are predicted. The
    layers are those of `measure_cut`.
    """
    model, generator = loaded.model, torch.Generator(loaded.model.device).manual_seed(seed)
    total: Array | None = None
    for row in indices:
        (ids,) = windows.batches(1, [row])
        ids = ids.to(model.device)
        with torch.no_grad():
            cache = model(input_ids=ids[:, :context], use_cache=True, logits_to_keep=1).past_key_values
        outputs: list[Tensor] = []

        def watch(call: Captured, go_on: Callable[[Tensor], Output], outputs: list[Tensor] = outputs) -> Output:
            output, weights = go_on(call.query)
            if call.slides(context):
                return output, weights
            # The model's weights need no gradients, so the first layer's output must start the graph.
            outputs.append(output if outputs else output.detach().requires_grad_())
            return outputs[-1], weights

        with torch.enable_grad(), hook_attention(model, watch):
            logits = model(input_ids=ids[:, context:], past_key_values=cache).logits[0]
        log_p = logits.float().log_softmax(-1)
        sampled = torch.multinomial(log_p.detach().exp(), SAMPLES, replacement=True, generator=generator)
        for sample in sampled.T:
            likelihood = log_p.gather(-1, sample[:, None]).sum()
            slopes = torch.autograd.grad(likelihood, outputs, retain_graph=True)
            squares = torch.stack([slope[0].square().mean(-1).mean(0) / 2 for slope in slopes]).cpu().double().numpy()
            total = squares if total is None else total + squares
    assert total is not None
    return np.asarray(total / (SAMPLES * len(indices)))
