"""Error through the layers of a live model whose queries attend to n sampled keys.

Every document is read as the model is, and again with n keys for each query (`interventions.sampled_keys`): in every
layer, drawn anew in each ("resampled") or the same in all ("fixed"), and in one layer at a time ("single"). Compared
are the hidden states behind each layer and the predictions of a decoder.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.cost import check_cost, forward_cost
from limitlens.errors import Array, InputError, Progress, check_seed
from limitlens.interventions.depth_result import ERRORS, INCLUDE, PREDICTIONS, DepthRun
from limitlens.interventions.harness import WINDOW, compare_variants, open_model, some_of
from limitlens.interventions.head_sums import HEAD_SHARING, sum_head_errors
from limitlens.interventions.reader import Reader
from limitlens.interventions.sampled_keys import KEY_SHARING, SampledKeys, check_keys
from limitlens.models import LoadedModel, Windows, intervene, open_corpus
from limitlens.sampling.cells import parse_sizes
from limitlens.sampling.checkpoint import Checkpoint
from limitlens.sampling.streams import generator_for

State = tuple[Tensor, Tensor, Tensor]  # hidden states (n, d), their mean (d,) and covariance (d, d)
Prediction = tuple[Tensor, Tensor, Tensor]  # centred logits and log-probabilities (n, vocabulary), nats a token


def depth(
    model: str | LoadedModel, corpus: str = "stdlib-docs", keys: str | Sequence[int] = "16:256:5", *,
    key_sharing: str | Sequence[str] = KEY_SHARING[:1], include: str | Sequence[str] = INCLUDE, replicates: int = 1,
    documents: int = 16, window: int | None = None, special: str = "auto", seed: int = 0, device: str = "auto",
    yes: bool = False, progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> DepthRun:  # fmt: skip
    """Measure how the error of attention over n sampled keys grows through the layers of a model.

    Ctrl-C keeps the finished documents; with a `checkpoint` the same call continues from there.

    Parameters
    ----------
    keys : numbers of keys that each query attends to (`interventions.sampled_keys` says how they are drawn).
    key_sharing : "shared" (the queries of a document share their keys), "own" (each query draws its own), or both.
    include : what to run in addition to keys drawn anew in every layer: "fixed", the same keys in all layers;
        "single", each layer alone (one forward each), to compare the sum of single-layer errors with their joint
        error; "heads", the sum of the errors of a layer's heads (`interventions.head_sums`).
    replicates : draws per document; standard errors are over documents, so a few suffice.
    window, special : tokens of a document (by default the model's positions, at most 512), and its special tokens.

    >>> made = ll.depth(model, text, [4, 16], documents=2, window=32)
    >>> len(made.table)
    30
    """
    sharing = some_of("key_sharing", key_sharing, KEY_SHARING)
    included = some_of("include", include, INCLUDE)
    parse_sizes(keys)
    check_seed(seed)
    if documents < 2 or replicates < 1 or not sharing:
        given = f"{documents} documents, {replicates} replicates and {len(sharing)} ways of sharing keys were asked for"
        raise InputError(f"{given}; expected at least 2, 1 and 1")
    text = open_corpus(corpus)
    loaded = open_model(model, device, head=True)
    length = window or loaded.window(WINDOW)
    sizes = check_keys(keys, length, loaded.causal)
    reader = Reader(loaded) if loaded.causal else None
    windows = Windows(loaded, text, length=length, tokens=documents * length, special=special)
    layers = loaded.model.config.get_text_config().num_hidden_layers
    passes: list[dict[str, Any]] = [{}, *[{"fixed": True}] * ("fixed" in included)]
    passes += [{"layers": (layer,)} for layer in range(layers * ("single" in included))]
    grid = _Grid(sizes, sharing, passes, replicates, "heads" in included)
    cost = forward_cost(loaded.model, grid.forwards * windows.tokens, windows.length)
    remedy = "ask for fewer documents, keys or included runs, or pass yes=True"
    check_cost(f"depth of {loaded.name}", *cost, yes=yes, remedy=remedy)

    def document(index: int) -> dict[str, Any]:
        (ids,) = windows.batches(1, [index])
        return _measure(loaded, reader, ids.to(loaded.model.device), grid, generator_for(seed, index))

    job: dict[str, Any] = {"job": "depth", "weights": loaded.digest, "text": windows.sha256}
    job |= {"keys": sizes, "seed": seed, "key_sharing": sharing, "include": included}
    job |= {"replicates": replicates, "window": length, "special": special}
    options: dict[str, Any] = {"tokens": length * grid.forwards, "fewest": 2, "progress": progress}
    rows = (checkpoint or Checkpoint()).each(job, windows.count, document, **options)
    done = len(rows["squares"])
    about = loaded.name, corpus, loaded.causal, length, done, sizes, sharing, included, replicates, seed
    return DepthRun(*about, **rows, interrupted=done < windows.count, warnings=tuple(windows.warnings))


@dataclass(frozen=True)
class _Grid:
    """The variants under which every document is read."""

    sizes: tuple[int, ...]
    sharing: tuple[str, ...]
    passes: list[dict[str, Any]]  # options of `SampledKeys`: which layers sample, and whether they share the draw
    replicates: int
    heads: bool  # whether to add up the errors of heads

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of key sharings, passes and sizes."""
        return len(self.sharing), len(self.passes), len(self.sizes)

    @property
    def forwards(self) -> int:
        """Forwards per document."""
        return 1 + int(np.prod(self.shape)) * self.replicates

    def samplers(self, generator: torch.Generator) -> Iterator[Any]:
        """The sampled keys of every variant, replicates innermost."""
        for share, at, size in np.ndindex(self.shape):
            for _ in range(self.replicates):
                per_query = self.sharing[share] == "own"
                yield SampledKeys(self.sizes[size], generator, per_query=per_query, **self.passes[at])


def _measure(
    loaded: LoadedModel, reader: Reader | None, ids: Tensor, grid: _Grid, generator: torch.Generator
) -> dict[str, Any]:
    """The rows of one document in the arrays of `DepthRun`."""
    stack: Any = loaded.model.base_model
    first = int(loaded.causal)  # the first token of a causal model sees only itself

    def read() -> tuple[list[State], Prediction | None]:
        options = {"use_cache": False} if loaded.causal else {}
        hidden: Any = stack(input_ids=ids, output_hidden_states=True, **options).hidden_states
        states = [_moments(state[0, first:]) for state in hidden[1:]]
        return states, None if reader is None else _predict(reader, states[-1][0], ids[0, 1:])

    with torch.inference_mode():
        variants = (intervene(stack, keys=sampler) for sampler in grid.samplers(generator))
        rows = np.array(compare_variants(read, variants, _compare))
        heads = np.zeros((len(HEAD_SHARING), 0, 0, 0))
        if grid.heads:
            heads = sum_head_errors(stack, ids, grid.sizes, grid.replicates, generator)
    means = rows.reshape(*grid.shape, grid.replicates, -1).mean(-2)
    width = means.shape[-1] - first * len(PREDICTIONS)
    squares = means[..., :width].reshape(*grid.shape, -1, len(ERRORS))
    return {"squares": squares, "logits": means[..., width:], "heads": heads}


def _moments(states: Tensor) -> State:
    """Hidden states (n, d) with their mean (d,) and covariance (d, d) over the tokens."""
    mean = states.mean(0)
    centred = states - mean
    return states, mean, centred.mT @ centred / len(states)


def _predict(reader: Reader, states: Tensor, following: Tensor) -> Prediction:
    """Predictions behind each token: centred logits, log-probabilities, and the mean nats of the tokens that follow."""
    logits = reader.logits(states)
    logs = logits.log_softmax(-1)
    nats = -logs[:-1].gather(-1, following[1:, None]).mean()
    return logits - logits.mean(-1, keepdim=True), logs, nats


def _compare(whole: tuple[list[State], Prediction | None], cut: tuple[list[State], Prediction | None]) -> Array:
    """Squared relative errors of every layer in the order of `ERRORS`, then changes in the order of `PREDICTIONS`."""
    numbers = []
    for (states, *moments), (others, *other_moments) in zip(whole[0], cut[0], strict=True):
        numbers.append(((others - states).square().sum(-1) / states.square().sum(-1)).mean())
        pairs = zip(moments, other_moments, strict=True)
        numbers += [(other - own).square().sum() / own.square().sum() for own, other in pairs]
    if whole[1] is not None and cut[1] is not None:
        (logits, logs, nats), (other_logits, other_logs, other_nats) = whole[1], cut[1]
        numbers.append(((other_logits - logits).square().sum(-1) / logits.square().sum(-1)).mean())
        numbers.append((logs.exp() * (logs - other_logs)).sum(-1).mean())
        numbers.append((logs.argmax(-1) == other_logs.argmax(-1)).to(logs.dtype).mean())
        numbers.append(other_nats - nats)
        assert len(numbers) == len(whole[0]) * len(ERRORS) + len(PREDICTIONS)
    return np.asarray(torch.stack(numbers).double().cpu())
