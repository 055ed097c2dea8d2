"""Sparse attention designs in a live model: error of k keys per query against attention over all of them.

A design S keeps k of the keys that a query sees, or mixes them into k. Let out(q, D) be the attention of query q over
the keys of document D at the positions that q sees, out_S(q, D) the same under the design, and |·| a root mean square
over queries relative to that of the target. Three distances are measured:

error        |out_S(q, own) − out(q, own)|: the error in the query's own document.
floor        |Γ_S(q) − Γ(q)|, the bias of the design: Γ_S(q) is attention over what the design keeps in *all* documents,
             their states merged, and Γ(q) the same over all keys. These are the limits of the design at this k, and of
             full attention, as the number of tokens grows. Random keys have none; a window has one, since tokens near
             a query follow another law than tokens anywhere. The jackknife over documents removes the bias of the
             squared distance, which may therefore be negative where there is no floor.
fluctuation  |out_S(q, D) − Γ_S(q)| over documents D other than the query's own: the distance of k keys of one document
             from the design's own limit. It falls with k at the design's `rate`, but not to 0, since the tokens of one
             document are not independent: full attention over it differs from its limit too. The error of a limit
             that is estimated from a few documents is removed to first order (heuristic; tested against probes of 40
             small documents).

Queries stand at the same positions in every document: the last ones of a causal model, random ones of an encoder.
Standard errors are those of the jackknife over documents, which provide both the queries and the keys.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.policies import PolicyInput, get_policy
from limitlens.attention.policies.mixing import MIXINGS, Mixed
from limitlens.attention.subset import attend_subset, scores_of
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.interventions.designs_result import DESIGNS, Designs
from limitlens.models import Captured, capture
from limitlens.models.catalog import LoadedModel
from limitlens.models.opening import open_some
from limitlens.sampling.cells import parse_sizes

Pair = tuple[Tensor, Tensor]


def designs(
    model: str | LoadedModel, corpus: str = "stdlib-docs", keys: str | Sequence[int] = "16:512:6",
    *, designs: str | Sequence[str] | None = None, context: int = 512, documents: int = 32, queries: int = 4,
    special: str = "auto", seed: int = 0, device: str = "auto", progress: Progress = lambda done, total: None,
) -> Designs:  # fmt: skip
    """Compare sparse attention designs at equal numbers of keys in every head: errors, bias floors and rates.

    Parameters
    ----------
    keys : numbers of keys k, as a list or as "lo:hi:k"; at most the number of tokens of a document
    designs : such as "random,recent", of `limitlens.interventions.designs_result.DESIGNS`; all by default
    context : tokens of a document, all of which full attention reads
    documents : documents that are read, all in one forward; they provide the queries and the keys
    queries : positions of a document whose queries are used

    >>> found = ll.designs(model, text, [4, 8, 16], context=16, documents=6, queries=1)
    >>> found.overall['error'].shape  # designs, keys
    (10, 3)
    """
    counts = parse_sizes(keys)
    names = tuple(designs.split(",") if isinstance(designs, str) else DESIGNS if designs is None else designs)
    for name in names:
        if name not in DESIGNS:
            raise InputError(f"a design is {name!r}; expected some of {', '.join(DESIGNS)}")
    check_number("designs", len(names), "at least 2, to compare them", low=2)
    check_number("documents", documents, "at least 4, for the standard errors", low=4)
    check_number("queries", queries, "at least 1 position in a document, such as 4", low=1)
    check_seed(seed)
    if max(counts[-1], queries) > context:
        given = f"{counts[-1]} keys are to be kept" if counts[-1] > context else f"{queries} queries are to be used"
        raise InputError(f"{given} of documents of {context} tokens; expected at most as many, so ask for fewer")
    loaded, windows, ids = open_some(model, corpus, documents, context, special=special, seed=seed, device=device)
    layers: dict[int, tuple[Array, ...]] = {}
    number = loaded.model.config.get_text_config().num_hidden_layers

    def take(captured: Captured) -> None:
        layers[captured.layer] = _layer(captured, names, counts, queries, seed)
        progress(len(layers), number)

    with torch.inference_mode(), capture(loaded.model, take) as run_until_last_attention:
        run_until_last_attention(input_ids=ids.to(loaded.model.device))
    squares, apart, floors, outputs, limits = (np.concatenate(part) for part in zip(*layers.values(), strict=True))
    return Designs(
        loaded.name, corpus, context, documents, queries, counts, names,
        tuple((layer, head) for layer, found in layers.items() for head in range(len(found[0]))),
        squares, apart, floors, outputs, limits, tuple(windows.warnings),
    )  # fmt: skip


def _layer(
    captured: Captured, names: Sequence[str], counts: Sequence[int], queries: int, seed: int
) -> tuple[Array, ...]:
    """The arrays of `Designs` for one layer, means over the positions of its queries."""
    if captured.bias is not None:
        raise InputError(
            f"layer {captured.layer} adds a relative position bias to its scores, which a key of another document "
            "does not have; choose a model with rotary, learned or no positions"
        )
    documents, heads, length, _ = captured.query.shape
    places = np.random.default_rng(seed).permutation(length)[:queries]
    places = np.arange(length - queries, length) if captured.causal else places
    squares, apart = np.zeros((2, heads, len(names), len(counts), documents))
    floors = np.zeros((heads, len(names), len(counts), 1 + documents))
    outputs = np.zeros((heads, documents))
    limits = np.zeros((heads, 1 + documents))
    for place in places.tolist():
        entropy = np.random.SeedSequence([seed, captured.layer, place]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(entropy))
        query, key, value, position = _seen(captured, place)
        full, limit, _ = _limits(*_attend(query, key, value, None, captured))
        outputs += _norms(full) / queries
        limits += _without(_norms(limit)) / queries
        for s, name in enumerate(names):
            for k, kept in enumerate(_kept(name, counts, key, value, position, generator)):
                sparse, sparse_limit, away = _limits(*_attend(query, *kept, captured))
                squares[:, s, k] += _norms(sparse - full) / queries
                apart[:, s, k] += away / queries
                floors[:, s, k] += _without(_norms(sparse_limit - limit)) / queries
    return squares, apart, floors, outputs, limits


def _kept(
    name: str, counts: Sequence[int], key: Tensor, value: Tensor, position: Tensor, generator: torch.Generator
) -> Iterator[Mixed]:
    """Keys, values and added scores that a design keeps at every number of keys."""
    counts = [min(count, key.shape[-2]) for count in counts]
    if name in MIXINGS:
        yield from MIXINGS[name][1](key, value, counts, generator)
        return
    for count in counts:
        chosen = get_policy(name).select(PolicyInput(key, value, position=position), count, 1, generator)
        kept = chosen.mask[0, ..., 0, :].expand(key.shape[:-1]).flatten().nonzero()[:, 0]
        keys, values = (part.flatten(0, 2)[kept].view(*key.shape[:2], count, -1) for part in (key, value))
        weights = chosen.log_weights  # kept keys stand for all where there is a learned sink
        yield keys, values, None if weights is None else weights[0, ..., 0, :].flatten()[kept].view(keys.shape[:-1])


def _seen(captured: Captured, place: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries (Hkv, G · N, k) at a position, the keys and values (N, Hkv, n, ·) they see, their index among these."""
    keys = captured.key.shape[2]
    near = captured.sliding_window or keys
    begin = max(0, place - near + 1)
    end = place + 1 if captured.causal else min(place + near, keys)
    key, value = (part[:, :, begin:end].float().contiguous() for part in (captured.key, captured.value))
    query = captured.query[:, :, place].float() * captured.scale  # (N, Hq, k)
    grouped = query.transpose(0, 1).reshape(key.shape[1], -1, query.shape[-1])
    return grouped, key, value, torch.tensor([place - begin], device=key.device)


def _attend(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, captured: Captured) -> Pair:
    """Log-sum-exps (Hq, N queries, N documents) and outputs (Hq, N, N, v): every query over every document."""
    scores = scores_of(query, key, captured.softcap)
    documents = key.shape[0]
    sinks = captured.sinks  # in every document once, of value 0
    if sinks is not None:
        sinks = sinks.view(len(query), -1, 1).expand(-1, -1, documents).reshape(len(query), -1)
    weights = None if added is None else added[..., None, :]
    lse, output = attend_subset(scores, value, log_weights=weights, sinks=sinks)
    lse = lse.permute(1, 2, 0).reshape(-1, documents, documents).double()
    output = output.permute(1, 2, 0, 3).reshape(*lse.shape, -1).double()
    return lse, output


def _limits(lse: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Array]:
    """Outputs, limits and fluctuations of a head (under a design) from every query over every document.

    Outputs in the query's own document (Hq, N, v); limits (Hq, N, 1 + N, v) over all other documents together, then
    leaving out each of them; squared distances (Hq, N documents) of single documents from the limit without them.
    """
    documents = lse.shape[-1]
    own = torch.eye(documents, dtype=torch.bool, device=lse.device)
    lse = lse.masked_fill(own, -torch.inf)
    weight = torch.exp(lse - lse.amax(-1, keepdim=True))
    left = torch.cat((torch.ones_like(weight[0, :1]), 1 - own.double()))  # (1 + N, N): documents that count
    mass = weight[..., None, :] * left  # (Hq, N, 1 + N, N)
    share = mass / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    limit = share @ output
    # The limit over the other documents fluctuates too, by Σ w² times the fluctuation of one document.
    away = (output - limit[..., 1:, :]).square().sum(-1) / (1 + share[..., 1:, :].square().sum(-1))
    away = away.masked_fill(own, 0).sum(-2) / (documents - 1)
    return output.diagonal(dim1=1, dim2=2).mT, limit, away.cpu().numpy()


def _norms(vectors: Tensor) -> Array:
    """Squared norms over the last axis."""
    return np.asarray(vectors.square().sum(-1).cpu().numpy())


def _without(squares: Array) -> Array:
    """Means over queries of squares (Hq, N, 1 + N): over all, then without the queries of the document left out."""
    count = squares.shape[1]
    left = (squares[..., 1:].sum(1) - squares[:, np.arange(count), 1 + np.arange(count)]) / (count - 1)
    return np.concatenate((squares[..., 0].mean(1)[:, None], left), 1)
