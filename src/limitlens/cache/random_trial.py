"""A plan tried on text it has not seen: keep as many keys as it says and measure the error that this really gives.

The windows are those that the probe reserved. A quarter of them asks the queries; two contexts answer:

pool     the tokens of the other windows, as the probe pools them, with the first token of the query's own window where
         the model is causal, and no more of them than a sliding window holds: this checks the budgets themselves;
window   the query's own window, as the model attends to it: this checks whether pooled tokens stand for a real context.

Each head keeps its own budget for a context of that many tokens, chosen by each policy that each query
can take for itself; those that ask for an order of tokens only in a window. Beside a sink, which is always kept, n
random keys that stand for C have log(C/n) added to their scores, so that the sink keeps its share; "random_eviction"
are the same keys without that: plain eviction, which lets the sink grow.

The error is the relative output error of the probe: root mean square, over queries and draws, of |kept − full| over
that of |full|. Standard errors come from the draws and from leaving out one query window at a time.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.attention.kernels import state_of
from limitlens.attention.kernels.reference import attend_scores
from limitlens.attention.policies import POLICIES, PolicyInput
from limitlens.attention.scores import scores_of
from limitlens.attention.state import State
from limitlens.errors import Array, InputError, Progress
from limitlens.models import Captured, LoadedModel, Windows, capture
from limitlens.probing.pilot import Layer, Pilot, run_pilot
from limitlens.record import from_json, to_json
from limitlens.sampling.checkpoint import Checkpoint, Job, Saved
from limitlens.sampling.interrupt import held_interrupt

DRAWS = 8  # random choices of the kept keys
QUERIES = 128  # queries of a head
ASKING = 4  # one window in so many asks, the others answer
TOKENS = 1 << 14  # reserved tokens that are run at most, all at once: a layer is tried while it is at hand
BATCH = 16
ALONE = {name: choice for name, choice in POLICIES.items() if not choice.needs_past}  # a query chooses for itself
WAYS = {name: choice.label for name, choice in ALONE.items()}

Budgets = Callable[[int], Mapping[tuple[int, int], int]]  # keys that (layer, head) keeps in a context of so many tokens


@dataclass(frozen=True)
class Measured:
    """A relative output error and its standard error."""

    measured: float
    stderr: float


@dataclass(frozen=True)
class HeadTrial:
    """What one head's budget gives in one context."""

    layer: int
    head: int
    setting: str  # "pool" or "window"
    context: int  # tokens there are, and how many of them are kept
    keys: int
    errors: Mapping[str, Measured]  # by how the kept ones are chosen


def run_trial(
    loaded: LoadedModel, windows: Windows, reserved: NDArray[np.intp], budgets: Budgets,
    *, context: int | None = None, seed: int = 0, report: Progress = lambda done, total: None, job: Job | None = None,
) -> list[HeadTrial]:  # fmt: skip
    """Try budgets on the windows `reserved` by a probe; the pooled context has `context` tokens, or all there are."""
    if len(reserved) < 3:
        given = f"the probe reserved {len(reserved)} windows"
        raise InputError(f"{given}; a trial needs at least 3, so probe more tokens or skip it")
    count = min(len(reserved), max(TOKENS // windows.length, ASKING))
    chosen = reserved[np.linspace(0, len(reserved) - 1, count).astype(int)]  # from all of the text
    asking = chosen[:: min(ASKING, len(chosen) - 1)]
    pilot = run_pilot(loaded, windows, asking, queries=QUERIES, batch=BATCH, seed=seed, report=lambda tokens: None)
    trial = _Trial(pilot, chosen, asking, budgets, context, seed, report)
    kept = job or Checkpoint().begin({})
    if kept.saved is not None:
        trial.restore(kept.saved)
    (ids,) = windows.batches(len(chosen), chosen)
    with held_interrupt() as interrupt:

        def take(captured: Captured) -> None:
            if captured.layer not in {found.layer for found in trial.found}:  # by the job, before it was killed
                trial.take(captured)
                kept.passed(ids.numel(), trial.state, interrupt)

        with torch.inference_mode(), capture(loaded.model, take) as run_until_last_attention:
            run_until_last_attention(input_ids=ids.to(loaded.model.device))
    return trial.found


class _Trial:
    """Tries each layer's budgets while the layer is captured, so that no more than one is ever held."""

    def __init__(
        self, pilot: Pilot, chosen: NDArray[np.intp], asking: NDArray[np.intp], budgets: Budgets,
        context: int | None, seed: int, report: Progress,
    ) -> None:  # fmt: skip
        self.pilot, self.budgets, self.context, self.report = pilot, budgets, context, report
        self.generator = torch.Generator().manual_seed(seed)  # of pooled contexts
        self.choosing = torch.Generator().manual_seed(seed + 1)  # of choices: without them contexts are as they are
        self.answering = torch.as_tensor(np.flatnonzero(~np.isin(chosen, asking)))
        row_of = {int(window): row for row, window in enumerate(chosen)}
        self.rows = np.array([row_of[int(window)] for window in pilot.queries[:, 0]])  # each query's own window
        self.positions = torch.as_tensor(pilot.queries[:, 1])
        self.found: list[HeadTrial] = []

    def take(self, captured: Captured) -> None:
        """Try the budgets of one layer in both contexts."""
        layer = self.pilot.layers[captured.layer]
        self._pool(layer, captured)
        self._window(layer, captured)
        self.report(len({trial.layer for trial in self.found}), len(self.pilot.layers))

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What the layers so far gave, and where the random numbers are."""
        drawn = {"contexts": self.generator.get_state(), "choices": self.choosing.get_state()}
        return {"found": to_json(self.found)}, drawn

    def restore(self, saved: Saved) -> None:
        """Go back to where the `state` was taken."""
        self.found = list(from_json(tuple[HeadTrial, ...], saved.position["found"]))
        self.generator.set_state(saved.tensors["contexts"])
        self.choosing.set_state(saved.tensors["choices"])

    def _pool(self, layer: Layer, captured: Captured) -> None:
        """The pooled tokens of the answering windows as the context of every query."""
        places = slice(self.pilot.positions.start, self.pilot.positions.stop)
        rows = self.answering.to(captured.key.device)
        tokens = (captured.key[rows][:, :, places], captured.value[rows][:, :, places])
        keys, values = (tensor.transpose(0, 1).flatten(1, 2).float() for tensor in tokens)
        atoms = 0 if layer.first is None else 1
        bounds = (None if self.context is None else max(self.context - atoms, 1), layer.traits.sliding_window)
        size = min([keys.shape[1], *(bound for bound in bounds if bound is not None)])
        # Each draw has its own context, and keeps the first of its tokens; all tokens together are one context for all.
        contexts = torch.rand(DRAWS, keys.shape[1], generator=self.generator).argsort(1)[:, :size].to(keys.device)
        everything = torch.arange(size, device=keys.device)[None] if size == keys.shape[1] else contexts
        kept = self.budgets(size + atoms)
        settled = [name for name, choice in ALONE.items() if not choice.sampled and not choice.ordered]
        shared, groups, queries, _ = layer.query.shape
        for head in range(shared * groups):
            pair, group = divmod(head, groups)
            query, key, value = layer.query[pair, group], keys[pair], values[pair]
            count = min(max(kept[layer.index, head] - atoms, 1), size)
            subset = contexts[:, :count]
            drawn = state_of(query, key[subset], value[subset], kernel=layer.kernel)
            one = everything[0]  # what is not random chooses in one context
            scores = scores_of(query, key[one], layer.traits.softcap)
            sight = PolicyInput(key[one], value[one], scores)
            states = {
                "full": state_of(query, key[everything], value[everything], kernel=layer.kernel),
                "random": State(drawn.count, drawn.lse + math.log(size / count), drawn.output),
            }
            for name in settled:
                (kept_keys,) = ALONE[name].select(sight, count, 1, self.choosing).mask
                states[name] = _state(scores, kept_keys, value[one])
            if layer.atom is not None:
                states["random_eviction"] = drawn
                part = slice(group * queries, (group + 1) * queries)
                atom = State(layer.atom.count[pair], layer.atom.lse[pair, part], layer.atom.output[pair, part])
                states = {name: atom.merge(state) for name, state in states.items()}
            full = states.pop("full").output
            errors = {
                name: self._error(state.output, full[0] if name in settled else full) for name, state in states.items()
            }
            self.found.append(HeadTrial(layer.index, head, "pool", size + atoms, count + atoms, errors))

    def _window(self, layer: Layer, captured: Captured) -> None:
        """The query's own window, as the model attends to it, as its context."""
        length, device = captured.key.shape[2], captured.key.device
        kept = self.budgets(length)
        shared, groups = layer.query.shape[:2]
        sink = 0 if layer.first is None else 1  # the first token is in every sample, as in the probe
        counts = torch.tensor([kept[layer.index, head] for head in range(shared * groups)], device=device)
        counts = counts.clamp(1 + sink, length).view(shared, groups, 1, 1)
        outputs: dict[str, list[Tensor]] = {}
        for row in np.unique(self.rows):
            mine = torch.as_tensor(np.flatnonzero(self.rows == row))
            position = self.positions[mine].to(device)
            key, value = captured.key[row].float()[:, None], captured.value[row].float()[:, None]
            scores = scores_of(layer.query[:, :, mine.to(device)], key, layer.traits.softcap)
            seen = _seen(captured, int(row), position)
            mine_full = _output(captured, scores, seen.expand_as(scores), value)
            outputs.setdefault("full", []).append(mine_full[None])
            for name, choice in ALONE.items():
                if name == "random_eviction" and layer.atom is None:
                    continue  # where nothing is always kept, weights cancel
                sight = PolicyInput(key, value, scores, seen, position, sink if choice.sampled else 0)
                chosen = choice.select(sight, counts, DRAWS, self.choosing)
                drawn = []  # one draw at a time: together they would be the largest array of all
                for draw, mask in enumerate(chosen.mask):
                    weighted = scores if chosen.log_weights is None else scores + chosen.log_weights[draw]
                    drawn.append(_output(captured, weighted, mask, value))
                outputs.setdefault(name, []).append(torch.stack(drawn))
        joined = {name: torch.cat(parts, -2).flatten(1, 2) for name, parts in outputs.items()}
        full = joined.pop("full")[0]
        for head in range(shared * groups):
            errors = {name: self._error(output[:, head], full[head]) for name, output in joined.items()}
            count = int(counts.flatten()[head])
            self.found.append(HeadTrial(layer.index, head, "window", length, count, errors))

    def _error(self, kept: Tensor, full: Tensor) -> Measured:
        """The relative error of outputs ([draws,] m, v) against those of full attention ([draws,] m, v)."""
        wrong, size = (part.square().sum(-1).cpu().numpy().reshape(-1, len(self.rows)) for part in (kept - full, full))
        return relative_error(wrong, size, self.rows)


def relative_error(wrong: Array, size: Array, clusters: NDArray[np.intp]) -> Measured:
    """√(mean |error|² / mean |output|²) over draws and queries, with its standard error.

    `wrong` are squared errors (draws, queries), `size` squared outputs of full attention (draws or 1, queries), and
    `clusters` (queries,) the window each query comes from: queries of one window are no independent witnesses. The
    variance is that of the mean over draws plus the jackknife's over clusters: a draw serves all queries, so neither
    holds the other.
    """
    labels, inverse = np.unique(clusters, return_inverse=True)
    member = np.eye(len(labels))[inverse]
    errors, sizes = wrong @ member, size.mean(0) @ member
    if sizes.sum() <= 0:
        return Measured(float("nan"), float("nan"))
    squares = errors.sum(1) / sizes.sum()
    value = float(np.sqrt(squares.mean()))
    variance = 0.0
    if len(squares) > 1 and value > 0:
        variance += float(squares.var(ddof=1)) / len(squares) / (2 * value) ** 2
    if len(labels) > 1:
        total = errors.mean(0)
        without = np.sqrt((total.sum() - total).clip(0) / (sizes.sum() - sizes))
        variance += float(np.square(without - without.mean()).sum()) * (len(labels) - 1) / len(labels)
    return Measured(value, float(np.sqrt(variance)))


def _seen(captured: Captured, row: int, position: Tensor) -> Tensor:
    """The keys that queries at some positions of a window see: (m, L)."""
    length = captured.key.shape[2]
    if captured.mask is not None:
        batch = captured.mask.expand(captured.key.shape[0], -1, length, length)
        return batch[row, 0, position]
    place = torch.arange(length, device=position.device)
    return place <= position[:, None] if captured.causal else (place >= 0).expand(len(position), -1)


def _state(scores: Tensor, kept: Tensor, value: Tensor) -> State:
    """Attention over the keys that are kept: scores (..., m, n), kept broadcast to them, values (..., n, v)."""
    lse, output = attend_scores(scores.masked_fill(~kept, float("-inf")), value)
    return State(kept.sum(-1)[..., 0], lse.double(), output.double())


def _output(captured: Captured, scores: Tensor, kept: Tensor, value: Tensor) -> Tensor:
    """Outputs (Hkv, G, m, v) over the keys that are kept, with the layer's learned sinks where it has them."""
    state = _state(scores, kept, value)
    if captured.sinks is None:
        return state.output
    lse = torch.logaddexp(state.lse, captured.sinks.double().view(*state.lse.shape[:2], 1))
    return state.output * torch.exp(state.lse - lse)[..., None]  # a sink has the value 0
