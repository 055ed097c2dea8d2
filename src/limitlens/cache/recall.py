"""Budgets for plain text and recall together: costs of each head on both axes, refitted at the planned budgets.

text     ½ E (Σ_t <∂ log p(y)/∂o_t, δ_t>)² nats a token: second-order change of the predictions when a head's outputs
         change by its real errors δ_t, with y drawn from the model (heuristic: heads are taken one at a time).
recall   KL of the answers to calibration prompts when the number of keys or the policy of one head changes and all
         others keep theirs, minus that of the plan. Measured: Fisher information vanishes where a model is certain.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitlens.cache import budgets
from limitlens.cache.cut import CutCurves, cut_outputs
from limitlens.cache.reading import Names, ReadPrompt, read_prompt
from limitlens.cache.tasks import CALIBRATION, SOLVED, prompts_of
from limitlens.cost import check_cost, forward_cost
from limitlens.errors import Array, InputError, Progress
from limitlens.models import Captured, LoadedModel, Windows
from limitlens.models.intervene import kv_shape
from limitlens.models.relay import Output, hook_attention
from limitlens.sampling.checkpoint import Checkpoint, digest

SAMPLES = 16  # continuations drawn from the model for each text
ROUNDS = 3  # refits, at most
STEPS = (1.0, 0.5, 0.25, 0.125)  # shares of the way to the refitted budgets that are tried
POINTS = 4  # other numbers of keys at which a head is measured with its own policy, at most
STABLE = 0.02  # share of the keys whose change counts as no change
AXES = ("text", "recall")

Cut = tuple[NDArray[np.intp], NDArray[np.intp]]  # indices of key policies and numbers of keys, (layers, kv heads)


@dataclass(frozen=True)
class RecallFit:
    """How the budgets of a plan were fitted to recall: calibration prompts, and the KL of their answers."""

    families: Mapping[str, float]  # accuracy with the whole cache on each family of calibration prompts
    prompts: int  # prompts answered right with the whole cache, on which recall was measured; 0: not measured
    kl: tuple[float, ...]  # mean KL of their answers: at the budgets for text, then after each refit that was kept
    text_cost: tuple[float, ...]  # second-order cost on text at the same budgets

    @property
    def sentence(self) -> str:
        """Sentence on what the fit to recall has found."""
        whole = ", ".join(f"{name} {accuracy:.2f}" for name, accuracy in self.families.items())
        if not self.prompts:
            solves = "with its whole cache the model solves no kind of calibration prompt"
            return f"Recall was not measured: {solves} (accuracy: {whole})."
        fitted = f"{self.kl[0]:.4f} nats with budgets for text, {self.kl[-1]:.4f} after {len(self.kl) - 1} refits"
        accuracy = f"accuracy with the whole cache: {whole}"
        return f"KL of the answers to {self.prompts} calibration prompts: {fitted} ({accuracy})."


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise an `InputError` unless `weights` gives text and recall numbers of at least 0, one of them above 0."""
    values = list(weights.values())
    if not values or set(weights) - set(AXES) or min(values) < 0 or not 0 < sum(values) < float("inf"):
        raise InputError(f"the plan is for {dict(weights)}; expected weights of at least 0 such as text=1,recall=1")


def text_costs(read: ReadPrompt, policies: Sequence[str], sizes: Sequence[int], seed: int) -> Array:
    """Second-order costs (policies, layers, kv heads, sizes) of cutting one head's cache, nats a token of a text."""
    loaded, prompt = read.loaded, read.prompt
    ids = torch.tensor([prompt.question + prompt.answer], device=loaded.model.device)
    outputs: list[Tensor] = []
    calls: list[Captured] = []

    def watch(call: Captured, go_on: Callable[[Tensor], Output]) -> Output:
        output, weights = go_on(call.query)
        if call.slides(read.context):
            return output, weights
        outputs.append(output if outputs else output.detach().requires_grad_())  # the first output starts the graph
        calls.append(call)
        return outputs[-1], weights

    with torch.enable_grad(), hook_attention(loaded.model, watch):
        model: Any = loaded.model
        log_p = model(input_ids=ids, past_key_values=read.copy()).logits[0].float().log_softmax(-1)
    generator = torch.Generator(log_p.device).manual_seed(seed)
    drawn = torch.multinomial(log_p.detach().exp(), SAMPLES, replacement=True, generator=generator)
    sums = (log_p.gather(-1, sample[:, None]).sum() for sample in drawn.T)
    slopes = [torch.autograd.grad(one, outputs, retain_graph=True) for one in sums]  # by layer: (1, tokens, Hq, v)
    before = {call.layer: call for call in read.calls}
    found = []
    for place, call in enumerate(calls):
        kv_heads, tokens = call.key.shape[1], ids.shape[1]
        slope = torch.stack([one[place][0] for one in slopes]).float()  # (samples, tokens, Hq, v)
        slope = slope.transpose(1, 2).reshape(SAMPLES, kv_heads, -1, slope.shape[-1])
        costs = np.empty((len(policies), kv_heads, len(sizes)))
        known: dict[str, Any] = {"past": before[call.layer].query, "repeat": read.repeat_of(policies, call.layer)}
        rows = torch.arange(tokens, device=call.key.device)
        with torch.inference_mode():
            for i, j, output, full in cut_outputs(
                _detached(call), rows, read.context, sizes, policies, [seed, call.layer], **known
            ):
                along = (slope[:, None] * (output - full)).sum((-1, -2))  # (samples, draws, kv heads)
                costs[i, :, j] = along.square().mean((0, 1)).cpu().numpy() / (2 * tokens)
        found.append(costs)
    return np.stack(found, 1)


def calibration(
    loaded: LoadedModel, windows: Windows, rows: Sequence[int], context: int, seed: int
) -> tuple[list[ReadPrompt], dict[str, float]]:
    """Calibration prompts on some windows of a text that the model answers with its whole cache, and accuracies."""
    reads: list[ReadPrompt] = []
    right: dict[str, list[float]] = {name: [] for name in CALIBRATION}
    for row in rows:
        for prompt in prompts_of(loaded, windows, row, tuple(CALIBRATION), context, seed):
            read = read_prompt(loaded, prompt, seed)
            right[prompt.task].append(prompt.score(read.full)["accuracy"])
            reads += [read] if right[prompt.task][-1] else []
    accuracy = {name: float(np.mean(values)) for name, values in right.items()}
    return [read for read in reads if accuracy[read.prompt.task] >= SOLVED], accuracy


def recall_costs(
    reads: Sequence[ReadPrompt], policies: Sequence[str], chosen: NDArray[np.intp], counts: NDArray[np.intp],
    layers: Sequence[int], sizes: Sequence[int], each: Callable[..., Any],
) -> Array:  # fmt: skip
    """Marginal recall costs (policies, layers, kv heads, sizes): KL of answers with another cut of one head only.

    All other heads keep `counts` [layer][kv_head] keys by the policies with the indices `chosen`. Each head is measured
    without keys, with half and with twice its keys and with all keys, with other policies at half, the same and twice;
    other sizes are interpolated. Costs are 0 at the planned keys and policy. `each` is `Checkpoint.each` without its
    job: one item a prompt.
    """
    heads = [(layer, head) for layer in layers for head in range(counts.shape[1])]
    cuts = []  # (head, policy, number of keys)
    for place in heads:
        n = int(counts[place])
        middle, ends = {n // 2, n, min(2 * n, sizes[-1])}, {0, sizes[-1]}
        for policy in range(len(policies)):
            own = policy == chosen[place]
            cuts += [(place, policy, m) for m in sorted((middle | ends) - {n} if own else middle - ends)]

    def prompt(k: int) -> dict[str, Any]:
        read, hooks = reads[k], [reads[k].cut(_named(policies, chosen), counts)]
        for place, policy, number in cuts:
            other, names = counts.copy(), chosen.copy()
            other[place], names[place] = number, policy
            hooks.append(read.cut(_named(policies, names), other, hooks[0], place[0]))
        kl = read.kl_each(hooks)
        return {"kl": np.array(kl[1:]) - kl[0]}

    kl = dict(zip(cuts, np.mean(each(len(reads), prompt)["kl"], 0).tolist(), strict=True))
    found = np.empty((len(policies), len(heads), len(sizes)))
    for policy, row in np.ndindex(found.shape[:2]):
        place, own = heads[row], int(chosen[heads[row]])
        # Without keys, and with all, every policy keeps the same.
        points = {number: kl.get((place, own, number), 0.0) for number in (0, sizes[-1])}
        points |= {cut[2]: value for cut, value in kl.items() if cut[:2] == (place, policy)}
        if policy == own:
            points[int(counts[place])] = 0.0
        found[policy, row] = np.interp(sizes, sorted(points), [points[number] for number in sorted(points)])
    return found.reshape(len(policies), len(layers), counts.shape[1], len(sizes))


def _named(policies: Sequence[str], chosen: NDArray[np.intp]) -> Names:
    """Names of key policies [layer][kv_head] by index; −1 stands for layers that are not planned."""
    return [["recent" if place < 0 else policies[place] for place in row] for row in chosen]


@dataclass(eq=False)
class TwoAxes:
    """Measures costs on text and recall on windows of a text, and fits budgets to their weighted sum."""

    loaded: LoadedModel
    windows: Windows
    rows: Sequence[int]  # windows to calibrate on
    curves: CutCurves
    weights: Mapping[str, float]
    seed: int
    progress: Progress = lambda done, total: None
    checkpoint: Checkpoint | None = None
    stop: Callable[[], bool] = lambda: False  # asked before each refit

    def __post_init__(self) -> None:
        self.kept = self.checkpoint or Checkpoint()
        self.text: dict[tuple[str, ...], Array] = {}  # costs on text by the names of key policies

    @property
    def both(self) -> Array:
        """Weights of recall and of text."""
        return np.array([self.weights.get("recall", 0.0), self.weights.get("text", 0.0)])

    @cached_property
    def calibrated(self) -> tuple[list[ReadPrompt], dict[str, float]]:
        """Calibration prompts and accuracies, see `calibration`."""
        return calibration(self.loaded, self.windows, self.rows, self.curves.context, self.seed)

    def fit(
        self, candidates: NDArray[np.intp], total: int
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], RecallFit | None]:
        """Key policies among `candidates` and numbers of keys, both (layers, kv heads), for `total` keys in all.

        The fit starts from the budgets for text, with the best policy of each head or one for all heads, whichever is
        best on both axes, and refits until budgets are stable or no longer better.
        """
        names = [self.curves.policies[place] for place in candidates]
        sizes, context = self.curves.sizes, self.curves.context
        job: dict[str, Any] = {"job": "text costs", "weights": self.loaded.digest, "text": self.windows.sha256,
                               "windows": list(self.rows), "policies": names, "seed": self.seed}  # fmt: skip

        def window(k: int) -> dict[str, Any]:
            (prompt,) = prompts_of(self.loaded, self.windows, self.rows[k], ("text",), context, self.seed)
            return {"costs": text_costs(read_prompt(self.loaded, prompt, self.seed), names, sizes, self.seed)}

        options: dict[str, Any] = {"tokens": context, "progress": self.progress}
        if tuple(names) not in self.text:
            self.text[tuple(names)] = self.kept.each(job, len(self.rows), window, **options)["costs"].mean(0)
        text = self.text[tuple(names)]
        every = np.arange(len(names))
        starts = [budgets.least_cost(text, sizes, part, total)[:2] for part in (every, *every[:, None])]
        if not self.both[0]:
            return candidates[starts[0][0]], starts[0][1], None
        reads, families = self.calibrated
        if not reads:
            return candidates[starts[0][0]], starts[0][1], RecallFit(families, 0, (), ())
        costs = self._costs(reads, text, names, starts)
        best = int(np.argmin(costs @ self.both))
        chosen, keys = starts[best]
        history = [costs[best]]
        for turn in range(ROUNDS):
            if self.stop():
                break
            both = self.both[1] * text + self.both[0] * self._recall(reads, names, chosen, keys, turn)
            better, wanted, _ = budgets.least_cost(both, sizes, every, total)
            proposed = [self._step(both, (chosen, keys), (better, wanted), step) for step in STEPS]
            costs = self._costs(reads, text, names, proposed)
            best = int(np.argmin(costs @ self.both))
            if self.both @ (costs[best] - history[-1]) >= 0:
                break
            moved = np.abs(proposed[best][1] - keys).sum() / 2
            chosen, keys = proposed[best]
            history.append(costs[best])
            if moved <= STABLE * total:
                break
        kl, cost = (tuple(part) for part in np.array(history).T.tolist())
        return candidates[chosen], keys, RecallFit(families, len(reads), kl, cost)

    def _table(self, part: Any, dummy: int) -> NDArray[np.intp]:
        """Complete values of the planned layers with a dummy for all others, [layer][kv_head]."""
        whole = np.full(kv_shape(self.loaded.model), dummy)
        whole[list(self.curves.layers)] = part
        return whole

    def _step(self, both: Array, now: Cut, wanted: Cut, step: float) -> Cut:
        """Cut that is a `step` of the way to the wanted one: keys of all heads, and policies where they gain most."""
        keys = np.asarray(now[1] + step * (wanted[1] - now[1])).astype(np.intp)
        costs = budgets.at_keys(both, self.curves.sizes, keys)
        old, new = (np.take_along_axis(costs, part[0][None], 0)[0] for part in (now, wanted))
        gain = np.where(wanted[0] != now[0], old - new, 0)
        switched = (gain > 0) & (
            gain >= np.quantile(gain[gain > 0], 1 - step, method="lower") if (gain > 0).any() else 0
        )
        return np.where(switched, wanted[0], now[0]), keys

    def _costs(self, reads: Sequence[ReadPrompt], text: Array, names: Sequence[str], cuts: Sequence[Cut]) -> Array:
        """Mean KL of the answers, measured, and cost on text (cuts, 2) of policies and keys (layers, kv heads)."""
        kl = []
        for read in reads:
            hooks = [read.cut(_named(names, self._table(part, -1)), self._table(keys, 0)) for part, keys in cuts]
            kl.append(read.kl_each(hooks))
        lost = [np.take_along_axis(budgets.at_keys(text, self.curves.sizes, keys), part[None], 0).sum()
                for part, keys in cuts]  # fmt: skip
        return np.stack([np.mean(kl, 0), lost], 1)

    def _recall(
        self, reads: Sequence[ReadPrompt], names: Sequence[str], chosen: NDArray[np.intp], keys: NDArray[np.intp],
        turn: int,
    ) -> Array:  # fmt: skip
        """Marginal recall costs at policies and keys (layers, kv heads); a long measurement is announced."""
        job = {"job": "recall", "weights": self.loaded.digest, "round": turn, "keys": keys.tolist(), "names": names,
               "chosen": chosen.tolist(), "prompts": [digest(str(read.prompt)) for read in reads]}  # fmt: skip
        cuts = (POINTS + 3 * (len(names) - 1)) * keys.size
        tokens = cuts * sum(len(read.prompt.question + read.prompt.answer) for read in reads)
        seconds, _ = forward_cost(self.loaded.model, float(tokens), self.curves.context)
        check_cost("measuring recall head by head", seconds, yes=True)
        each = partial(self.kept.each, job, tokens=tokens // len(reads), progress=self.progress)
        tables = self._table(chosen, -1), self._table(keys, 0)
        return recall_costs(reads, names, *tables, self.curves.layers, self.curves.sizes, each)


def _detached(call: Captured) -> Captured:
    return replace(call, query=call.query.detach(), key=call.key.detach(), value=call.value.detach())
