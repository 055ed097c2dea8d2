"""Sparse attention designs in a live model (`limitlens.designs`): error of attention to k keys against all keys.

A design S keeps k of the keys that a query q sees, or mixes them into k keys. Let out be full attention over one
document and out_S sparse attention. Let Γ and Γ_S be the same over the merged keys of all documents but the query's
own; they estimate the limit of infinitely many tokens. Three relative root mean squares over queries are measured:

error        |out_S − out| in the query's own document
floor        |Γ_S − Γ|, the bias of the design, 0 for random keys. Its square is corrected by the jackknife over
             documents, and may therefore be negative.
fluctuation  |out_S − Γ_S| over another document, which falls as k^(−rate). It is corrected to first order for the error
             of the estimated limit (heuristic, tested against probes of 40 small documents).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitlens.arrays import pd
from limitlens.attention.policies import PolicyInput, get_policy
from limitlens.attention.policies.mixing import MIXINGS, Mixed
from limitlens.attention.subset import attend_subset, scores_of
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.interventions.harness import shown_table
from limitlens.models import Captured, LoadedModel, capture
from limitlens.models.windows import open_some
from limitlens.record import to_json
from limitlens.report.text import short
from limitlens.report.view import Axis, Block, Figure, Section, Series, View, line, look, points
from limitlens.results import Result
from limitlens.sampling.cells import parse_sizes
from limitlens.statistics.documents import jackknife

POLICIES = ("random", "recent", "streaming", "bigbird", "strided", "dilated", "block", "knorm")
DESIGNS = {name: get_policy(name).label for name in POLICIES} | {name: label for name, (label, _) in MIXINGS.items()}
MAX_DRAWN_ERROR = 2.0  # a design whose error is above this at every number of keys is left out of the figure
NEGLIGIBLE = 1e-6  # relative error below which a design equals full attention
DRAWN = ("error", "error_stderr", "floor", "floor_stderr")  # columns of the figure


@dataclass(frozen=True, eq=False, repr=False)
class Designs(Result):
    """Result of `limitlens.designs`: error, floor (bias), fluctuation and rate of every sparse design in every head.

    The arrays hold mean squares over the queries, for P heads, S designs, K numbers of keys and N documents.
    """

    kind, file, held = "designs", "designs", ("squares", "apart", "floors", "outputs", "limits")
    model: str
    corpus: str
    context: int  # tokens of a document
    documents: int
    queries: int  # positions of a document whose queries were used
    keys: tuple[int, ...]
    designs: tuple[str, ...]
    places: tuple[tuple[int, int], ...]  # (layer, head) of each of the P heads
    squares: Array  # (P, S, K, N): squared error of the output in each document
    apart: Array  # (P, S, K, N): squared fluctuation of each document
    floors: Array  # (P, S, K, 1 + N): squared floor (distance of the limits), of all documents, then without each
    outputs: Array  # (P, N): |output of full attention|² in each document
    limits: Array  # (P, 1 + N): |limit of full attention|², in the order of floors
    warnings: tuple[str, ...] = ()

    @cached_property
    def relative(self) -> dict[str, Array]:
        """Squared error, floor (bias) and fluctuation relative to full attention, by name, each (P, S, K, 1 + N).

        On the last axis, entry 0 uses all N documents, and entry 1 + i all but document i (jackknife).
        """

        def left_out(rows: Array) -> Array:
            total = rows.sum(-1, keepdims=True)
            return np.concatenate((total, total - rows), -1)

        own, law = left_out(self.outputs)[:, None, None], self.limits[:, None, None]
        fluctuation = left_out(self.apart) / left_out(np.ones(self.documents)) / law
        return {"error": left_out(self.squares) / own, "floor": self.floors / law, "fluctuation": fluctuation}

    def numbers(self, squares: dict[str, Array]) -> dict[str, Array]:
        """Error, floor (bias), fluctuation and its rate, (..., S, K), with standard errors, from `relative` squares."""
        found: dict[str, Array] = {}
        across = np.log(self.keys) - np.mean(np.log(self.keys))
        weights = across / (across @ across) if len(across) > 2 else across * np.nan
        with np.errstate(divide="ignore", invalid="ignore"):  # a design without fluctuation has no rate
            slopes = -np.einsum("...kn,k->...n", np.log(squares["fluctuation"]) / 2, weights)[..., None, :]
            roots = {name: np.sqrt(squares[name].clip(0)) for name in ("error", "fluctuation")}
            for name, rows in (roots | {"floor": squares["floor"], "rate": slopes}).items():
                found |= {name: rows[..., 0], f"{name}_stderr": jackknife(rows[..., 1:], -1)}
        floor, spread = found["floor"], found["floor_stderr"]
        square = floor + (self.documents - 1) * (floor - squares["floor"][..., 1:].mean(-1))  # bias removed
        found |= {"floor": _root(square), "floor_stderr": (_root(square + spread) - _root(square - spread)) / 2}
        return {name: np.broadcast_to(value, square.shape) for name, value in found.items()}

    @cached_property
    def overall(self) -> dict[str, Array]:
        """Error, floor (bias), fluctuation and rate of each design, (S, K), from mean squares over all heads."""
        return self.numbers({name: rows.mean(0) for name, rows in self.relative.items()})

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table of error, floor (bias), fluctuation and rate, one row per head, design and number of keys."""
        rows = [(*place, name, count) for place in self.places for name in self.designs for count in self.keys]
        found = {name: value.ravel() for name, value in self.numbers(self.relative).items()}
        return pd.DataFrame(rows, columns=["layer", "head", "design", "keys"]).assign(**found)

    def document(self) -> dict[str, Any]:
        """JSON document of the result, with the numbers of every head (heads, designs, keys) and over all heads."""
        numbers = {"heads": self.numbers(self.relative), "overall": self.overall}
        return super().document() | to_json(numbers)  # type: ignore[no-any-return]

    def view(self) -> View:
        """Report: error of each design against the number of keys, and a table of designs at the middle number."""
        middle = len(self.keys) // 2
        labels = pd.DataFrame({"design": [DESIGNS[name] for name in self.designs]})
        numbers = {name: values[:, middle] for name, values in self.overall.items()}
        rows = labels.assign(**numbers).sort_values("error")
        best = rows.iloc[0]
        verdict = (
            "Every head attends to k keys under each design; its output is compared with attention over the whole "
            "document.",
            f"At {self.keys[middle]} keys the design with the smallest error over all heads is {best['design']} "
            f"({short(best['error'])} ± {best['error_stderr']:.1g}).",
            "Where the floor of a design is near its error, more tokens do not help: use more keys or another design.",
        )
        lead = (
            "Root mean squares over heads: errors relative to the output, floors (bias of the design's limit, dotted "
            "where significant) and fluctuations relative to the limit. Designs whose error is always above twice the "
            "output are only in the tables."
        )
        trust = (
            "floor and fluctuation use queries and keys of different documents; an error below the floor means that a "
            "query's own document serves it better than the average one",
            "the bias-corrected floor may be negative where there is none; random keys have none, so their value "
            "shows the resolution of this many documents",
            "errors are those of one layer at a time: all other layers read every key",
        )
        axes = Axis("keys", log=True), Axis("relative output error", log=True)
        blocks: list[Block] = [
            Figure("Error against keys, floors dotted", *axes, self._series(), height=420),
            shown_table(f"At {self.keys[middle]} keys", {"rate": "rate of the fluctuation"}, rows),
        ]
        size = f"{self.documents} documents of {self.context:,} tokens · {self.queries} queries in each"
        section = Section("Over all heads", lead, blocks)
        title = f"Sparse attention designs in {self.model}"
        return View(title, f"{self.corpus} · {size}", verdict, [section], warnings=self.warnings, trust=trust)

    def _series(self) -> list[Series]:
        """Curves of the figure: error of every design over the number of keys, and its bias where significant."""
        keys = np.asarray(self.keys)
        series = []
        for s, name in enumerate(self.designs):
            error, stderr, floor, floor_stderr = (self.overall[column][s] for column in DRAWN)
            at = error > NEGLIGIBLE
            above = (floor > 1.96 * floor_stderr) & (floor > NEGLIGIBLE)
            colour, dash = look(s)
            if error.min() <= MAX_DRAWN_ERROR:
                series.append(points(DESIGNS[name], keys[at], error[at], colour, stderr[at], joined=True, dash=dash))
                series.append(line(f"{name}: floor", keys[above], floor[above], colour, "dotted", listed=False))
        return series


def _root(squares: Array) -> Array:
    """Signed square root, sign(x) √|x|, of squares that a bias correction may have made negative."""
    return np.asarray(np.sign(squares) * np.sqrt(np.abs(squares)))


def designs(
    model: str | LoadedModel, corpus: str = "stdlib-docs", keys: str | Sequence[int] = "16:512:6",
    *, designs: str | Sequence[str] | None = None, context: int = 512, documents: int = 32, queries: int = 4,
    special: str = "auto", seed: int = 0, device: str = "auto", progress: Progress = lambda done, total: None,
) -> Designs:  # fmt: skip
    """Compare sparse attention designs in every head at equal numbers of keys, by their error against full attention.

    Parameters
    ----------
    keys : numbers of keys k, as a list or as "lo:hi:k"; at most the number of tokens of a document
    designs : names of designs, such as "random,recent"; all of `DESIGNS` by default
    context, documents, queries : tokens of a document, number of documents, and query positions used in each

    >>> found = ll.designs(model, text, [4, 8, 16], context=16, documents=6, queries=1)
    >>> found.overall['error'].shape  # designs, keys
    (10, 3)
    """
    counts = parse_sizes(keys)
    names = tuple(designs.split(",") if isinstance(designs, str) else DESIGNS if designs is None else designs)
    for name in names:
        if name not in DESIGNS:
            raise InputError(f"there is no design {name!r}; expected one or more of {', '.join(DESIGNS)}")
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


def _layer(call: Captured, names: Sequence[str], counts: Sequence[int], queries: int, seed: int) -> tuple[Array, ...]:
    """Errors of each sparse design at each number of keys in one layer: the five arrays of `Designs`."""
    if call.bias is not None:
        given = f"layer {call.layer} adds a relative position bias to its scores, which keys of other documents lack"
        raise InputError(f"{given}; choose a model with rotary, learned or no positions")
    documents, heads, length, _ = call.query.shape
    places = np.random.default_rng(seed).permutation(length)[:queries]
    places = np.arange(length - queries, length) if call.causal else places
    near = call.sliding_window or length
    squares, apart = np.zeros((2, heads, len(names), len(counts), documents))
    floors = np.zeros((heads, len(names), len(counts), 1 + documents))
    outputs = np.zeros((heads, documents))
    limits = np.zeros((heads, 1 + documents))
    for place in places.tolist():
        entropy = np.random.SeedSequence([seed, call.layer, place]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(entropy))
        begin = max(0, place - near + 1)
        end = place + 1 if call.causal else min(place + near, length)  # the query sees keys begin .. end - 1
        key, value = (part[:, :, begin:end].float().contiguous() for part in (call.key, call.value))
        full, limit, _ = _outputs(call, place, key, value)
        outputs += _norms(full) / queries
        limits += _without(_norms(limit)) / queries
        for s, name in enumerate(names):
            for k, kept in enumerate(_kept(name, counts, key, value, place - begin, generator)):
                sparse, sparse_limit, away = _outputs(call, place, *kept)
                squares[:, s, k] += _norms(sparse - full) / queries
                apart[:, s, k] += away / queries
                floors[:, s, k] += _without(_norms(sparse_limit - limit)) / queries
    return squares, apart, floors, outputs, limits


def _kept(
    name: str, counts: Sequence[int], key: Tensor, value: Tensor, place: int, generator: torch.Generator
) -> Iterator[Mixed]:
    """Keys, values and score offsets that a design makes of N documents (N, Hkv, n, ·), for each number in `counts`."""
    counts = [min(count, key.shape[-2]) for count in counts]
    if name in MIXINGS:
        yield from MIXINGS[name][1](key, value, counts, generator)
        return
    seen = PolicyInput(key, value, position=torch.tensor([place], device=key.device))
    for count in counts:
        chosen = get_policy(name).select(seen, count, 1, generator)
        kept = chosen.mask[0, ..., 0, :].expand(key.shape[:-1]).flatten().nonzero()[:, 0]
        keys, values = (part.flatten(0, 2)[kept].view(*key.shape[:2], count, -1) for part in (key, value))
        weights = chosen.log_weights  # so that kept keys stand for all keys against a learned sink
        yield keys, values, None if weights is None else weights[0, ..., 0, :].flatten()[kept].view(keys.shape[:-1])


def _outputs(
    captured: Captured, place: int, key: Tensor, value: Tensor, added: Tensor | None = None
) -> tuple[Tensor, Tensor, Array]:
    """Attention outputs of the queries at one position, and limits estimated from the keys of the other documents.

    Keys (N, Hkv, n, k) come from N documents, and `added` is added to their scores. Three results: outputs (Hq, N, v)
    over the query's own document; limits (Hq, N, 1 + N, v) over all other documents (index 0) or all others but j
    (index 1 + j); and the mean squared distance (Hq, N) of the output over one document j from the limit without j.
    """
    documents, groups = key.shape[:2]
    query = captured.query[:, :, place].float() * captured.scale  # (N, Hq, k)
    query = query.transpose(0, 1).reshape(groups, -1, query.shape[-1])  # every document is read by all queries
    sinks = captured.sinks  # logits of learned sinks, of value 0, counted once in every document
    if sinks is not None:
        sinks = sinks.view(groups, -1, 1).expand(-1, -1, documents).reshape(groups, -1)
    scores = scores_of(query, key, captured.softcap)
    lse, output = attend_subset(scores, value, log_weights=None if added is None else added[..., None, :], sinks=sinks)
    lse = lse.permute(1, 2, 0).reshape(-1, documents, documents).double()  # (Hq, documents of queries, of keys)
    output = output.permute(1, 2, 0, 3).reshape(*lse.shape, -1).double()
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
    return np.asarray(vectors.square().sum(-1).cpu().numpy())


def _without(squares: Array) -> Array:
    """Means over N queries of squares (Hq, N, 1 + N): entry 0 over all, entry 1 + i without query i (jackknife)."""
    count = squares.shape[1]
    left = (squares[..., 1:].sum(1) - squares[:, np.arange(count), 1 + np.arange(count)]) / (count - 1)
    return np.concatenate((squares[..., 0].mean(1)[:, None], left), 1)
