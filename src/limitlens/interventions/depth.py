"""Error through the layers of a live model when each of its queries sees n sampled keys.

Every document is read once as it is, and again with n keys for each query (`live.draws`): in every layer, drawn anew in
each ("resampled") or the same in all ("fixed"), and in one layer alone, for each of them ("single"). What is compared
are the hidden states that leave each layer and, of a decoder, its predictions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.device import choose_device
from limitlens.cost import check_cost
from limitlens.errors import Array, InputError, Progress, check_seed
from limitlens.interventions.depth_result import BESIDE, ERRORS, PREDICTIONS, DepthRun
from limitlens.interventions.draws import WAYS, WINDOW, Draws, numbers_of_keys
from limitlens.interventions.reader import Reader
from limitlens.interventions.together import DRAWS, add_up
from limitlens.models import LoadedModel, Windows, intervene, load, open_corpus
from limitlens.sampling.checkpoint import Checkpoint
from limitlens.sampling.streams import generator_for

A_PRODUCT = 2e-11  # seconds of one weight for one token


def depth(
    model: str | LoadedModel, corpus: str = "stdlib-docs", keys: str | Sequence[int] = "16:256:5", *,
    ways: str | Sequence[str] = WAYS[:1], beside: str | Sequence[str] = BESIDE, replicates: int = 1,
    documents: int = 16, window: int | None = None, special: str = "auto", seed: int = 0, device: str = "auto",
    yes: bool = False, progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> DepthRun:  # fmt: skip
    """How the error of attention over n keys travels through the layers of a model.

    Ctrl-C keeps the documents so far, a `checkpoint` all that is needed for the same call to go on.

    Parameters
    ----------
    keys : how many keys each query sees; `live.draws` says how they are drawn.
    ways : or such as "shared,own"; "shared": the queries of a document share their keys; "own": each draws its own.
    beside : what is run beside keys drawn anew in every layer: "fixed", the same keys in all layers; "single", each
        layer alone, a forward for each, for what errors add up to and what amplifies them; "heads" (`live.together`).
    replicates : draws of each document; errors are those of means over documents, so a few suffice.
    window, special : tokens of a document, the model's positions, at most 512, when left out; those put around it.

    >>> made = ll.depth(model, text, [4, 16], documents=2, window=32)
    >>> len(made.table)
    30
    """
    ways, beside = _some("ways", ways, WAYS), _some("beside", beside, BESIDE)
    loaded = model if isinstance(model, LoadedModel) else load(model, device=choose_device(device), head=True)
    length = window or loaded.window(WINDOW)
    sizes = numbers_of_keys(keys, length, loaded.causal)
    if documents < 2 or replicates < 1 or not ways:
        raise InputError(f"{documents} documents, {replicates} draws, {len(ways)} ways; expected at least 2, 1 and 1")
    reader, stack = Reader(loaded) if loaded.causal else None, loaded.model.base_model
    windows = Windows(loaded, open_corpus(corpus), length=length, tokens=documents * length, special=special)
    layers, first = loaded.model.config.get_text_config().num_hidden_layers, int(loaded.causal)
    passes: list[dict[str, Any]] = [{}, *[{"fixed": True}] * ("fixed" in beside)]
    passes += [{"layers": (layer,)} for layer in range(layers * ("single" in beside))]
    shape, forwards = (len(ways), len(passes), len(sizes)), 1 + len(ways) * len(passes) * len(sizes) * replicates
    weights = sum(part.numel() for part in stack.parameters())
    remedy = "ask for fewer documents, keys or runs beside, or pass yes=True"
    check_cost(f"depth of {loaded.name}", A_PRODUCT * weights * forwards * windows.tokens, yes=yes, remedy=remedy)

    def read(ids: Tensor) -> list[Tensor]:
        options = {"use_cache": False} if loaded.causal else {}
        states: Any = stack(input_ids=ids, output_hidden_states=True, **options).hidden_states
        return [state[0, first:] for state in states[1:]]

    def document(index: int) -> dict[str, Any]:
        (ids,) = windows.batches(1, [index])
        ids, generator = ids.to(loaded.model.device), generator_for(seed, index)
        squares, logits = np.zeros((*shape, layers, len(ERRORS))), np.zeros((*shape, first * len(PREDICTIONS)))
        with torch.inference_mode():
            truth = [(state, *_moments(state)) for state in read(ids)]
            told = None if reader is None else _predicted(reader, truth[-1][0], ids[0, 1:])
            for (way, at, size), _ in ((place, each) for place in np.ndindex(shape) for each in range(replicates)):
                with intervene(stack, keys=Draws(sizes[size], generator, own=ways[way] == "own", **passes[at])):  # type: ignore[arg-type]
                    found = read(ids)
                for layer in range(passes[at].get("layers", (0,))[0], layers):  # those before are what they were
                    squares[way, at, size, layer] += _errors(truth[layer], found[layer]) / replicates
                if reader is not None and told is not None:
                    other = _predicted(reader, found[-1], ids[0, 1:])
                    logits[way, at, size] += _changes(told, other) / replicates
            heads = np.zeros((len(DRAWS), 0, 0, 0))
            if "heads" in beside:
                heads = add_up(stack, ids, sizes, replicates, generator)
        return {"squares": squares, "logits": logits, "heads": heads}

    job: dict[str, Any] = {"job": "depth", "weights": loaded.digest, "text": windows.sha256}
    job |= {"keys": sizes, "seed": check_seed(seed)}
    job |= {"ways": ways, "beside": beside, "replicates": replicates, "window": length, "special": special}
    options: dict[str, Any] = {"tokens": length * forwards, "fewest": 2, "progress": progress}
    rows = (checkpoint or Checkpoint()).each(job, windows.count, document, **options)
    done = len(rows["squares"])
    about = loaded.name, corpus, loaded.causal, length, done, sizes, ways, beside, replicates, seed
    return DepthRun(*about, **rows, interrupted=done < windows.count, warnings=tuple(windows.warnings))


def _moments(states: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (d,) and covariance (d, d) over the tokens."""
    mean = states.mean(0)
    centred = states - mean
    return mean, centred.mT @ centred / len(states)


def _errors(truth: tuple[Tensor, ...], found: Tensor) -> Array:
    """Squared relative errors of hidden states, in the order of `ERRORS`."""
    tokens = ((found - truth[0]).square().sum(-1) / truth[0].square().sum(-1)).mean()
    pairs = zip(truth[1:], _moments(found), strict=True)
    moments = [(mine - own).square().sum() / mine.square().sum() for mine, own in pairs]
    return np.asarray(torch.stack([tokens, *moments]).double().cpu())


def _predicted(reader: Reader, states: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centred logits and log-probabilities behind each token (n, vocabulary), and nats of the text, a token."""
    logits = reader.logits(states)
    logs = logits.log_softmax(-1)
    cost = -logs[:-1].gather(-1, following[1:, None]).mean()
    return logits - logits.mean(-1, keepdim=True), logs, cost


def _changes(full: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> Array:
    """What became of predictions, in the order of `PREDICTIONS`."""
    apart = ((found[0] - full[0]).square().sum(-1) / full[0].square().sum(-1)).mean()
    divergence = (full[1].exp() * (full[1] - found[1])).sum(-1).mean()
    same = (full[1].argmax(-1) == found[1].argmax(-1)).to(apart.dtype).mean()
    return np.asarray(torch.stack([apart, divergence, same, found[2] - full[2]]).double().cpu())


def _some(what: str, given: str | Sequence[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the known names that were given, in their own order; "none" is none of them."""
    given = (given.split(",") if given != "none" else []) if isinstance(given, str) else given
    if not set(given) <= set(known):
        raise InputError(f"{what} is {', '.join(given)}; expected some of {', '.join(known)}")
    return tuple(name for name in known if name in given)
