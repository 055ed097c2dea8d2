"""How the attention of a head to the same keys changes when the text before them is another one.

Between keys that stay, a softmax never changes its ratios by itself: e^{s_j} / e^{s_i} knows of no other key. What
changes is the normaliser, so the share of all of them, and in a deep model their representations. So the last tokens of
a document are read behind n tokens of other texts. Over pairs of such contexts, for the last queries and the tokens
before them, which are the candidate keys:

overlap      share of the m keys of largest weight that are the same
stays        how often the key of largest weight is the same
ranks        rank correlation of the weights
variation    standard deviation over contexts over mean, of the weight of the key that is largest on average

The first layer of a model has 1, 1, 1 and a variation. Intervals are Student's over documents. A head is trusted where
the lower end of that of its overlap is at least `trust`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from limitlens.arrays import pd
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.interventions.by_document import shown
from limitlens.models import Captured, capture
from limitlens.models.catalog import LoadedModel
from limitlens.models.intervene import attend
from limitlens.models.opening import open_some
from limitlens.report.view import View, head_map
from limitlens.report.words import read_words, worded_view
from limitlens.results import Result
from limitlens.sampling.checkpoint import Checkpoint

MEASURES = ("overlap", "stays", "ranks", "variation")
WORDS = read_words("interventions/words.json")["stability"]


@dataclass(frozen=True, eq=False, repr=False)
class Stability(Result):
    """How well attributions of every head survive another context."""

    kind, file = "stability", "stability"
    model: str
    corpus: str
    keys: int  # tokens of a context
    tail: int  # tokens that stay, the last of which ask
    top: int  # m
    contexts: int
    trust: float  # overlap from which on a head is trusted
    places: tuple[tuple[int, int], ...]  # layer and head
    found: Array  # (documents, heads, MEASURES)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per head: means over documents, standard errors, and whether it is trusted."""
        mean, spread = self.found.mean(0), self.found.std(0, ddof=1) / np.sqrt(len(self.found))
        rows = pd.DataFrame(self.places, columns=["layer", "head"])
        for column, name in enumerate(MEASURES):
            rows[name], rows[f"{name}_stderr"] = mean[:, column], spread[:, column]
        low = mean[:, 0] - special.stdtrit(len(self.found) - 1, 0.975) * spread[:, 0]
        return rows.assign(trusted=low >= self.trust)

    def view(self) -> View:
        """A map of the overlap, and the heads that lose most."""
        rows = self.table.sort_values("overlap", kind="stable")
        rows["head"] = [f"{layer}.{head}" for layer, head in zip(rows.pop("layer"), rows["head"], strict=True)]
        table = shown("Least stable first", {}, rows, 12)
        picture = head_map(WORDS["map"], "overlap", self.places, self.table["overlap"].tolist())
        known: dict[str, Any] = {name: float(self.table[name].median()) for name in MEASURES}
        known |= {"trusted": int(self.table["trusted"].sum()), "heads": len(rows), "documents": len(self.found)}
        return worded_view(WORDS, [picture, table], of=self, **known)


def stability(
    model: str | LoadedModel, corpus: str = "stdlib-docs", keys: int = 256,
    *, tail: int = 64, queries: int = 8, top: int = 5, contexts: int = 8, documents: int = 8, trust: float = 0.8,
    special: str = "auto", seed: int = 0, device: str = "auto", progress: Progress = lambda done, total: None,
) -> Stability:  # fmt: skip
    """Which heads attend to the same keys behind `contexts` other texts of n = `keys` tokens, and which do not.

    The last `tail` tokens of each of the `documents` stay, the last `queries` of them ask for those before.

    >>> found = ll.stability(model, text, keys=16, tail=16, queries=2, top=3, contexts=3, documents=3)
    >>> found.table.query('layer == 0').overlap.tolist()  # nothing in the first layer knows what stood before
    [1.0, 1.0, 1.0, 1.0]
    """
    check_number("trust", trust, "a share of the top keys, such as 0.8", below=1 + 1e-12)
    check_number("contexts", min(contexts, documents), "at least 2, as of documents", low=2)
    check_number("keys", keys, "at least 1 token of context", low=1)
    check_number("queries", queries, "at least 1", low=1)
    check_seed(seed)
    if not 1 <= top < tail - queries:
        raise InputError(f"the top {top} of {tail - queries} keys are asked for; expected fewer, so lengthen the tail")
    length = keys + tail
    loaded, _, ids = open_some(model, corpus, documents + contexts, length, special=special, seed=seed, device=device)
    texts, candidates = ids[documents:, :keys].to(loaded.model.device), slice(keys, length - queries)
    places: list[tuple[int, int]] = []

    def document(which: int) -> dict[str, Array]:
        layers: list[Array] = []

        def take(captured: Captured) -> None:
            weights = _weights(captured, queries)[..., candidates]
            layers.append(_stability(weights, top))
            places.extend((captured.layer, head) for head in range(len(layers[-1])) if which == 0)

        end = ids[which, keys:].to(texts).expand(contexts, -1)
        with torch.inference_mode(), capture(loaded.model, take) as run_until_last_attention:
            run_until_last_attention(input_ids=torch.cat((texts, end), 1))
        return {"found": np.concatenate(layers)}

    found = Checkpoint().each({}, documents, document, progress=progress)["found"]
    return Stability(loaded.name, corpus, keys, tail, top, contexts, trust, tuple(places), found)


def _weights(captured: Captured, queries: int) -> Tensor:
    """Softmax weights (B, Hq, m, N) of the last queries: what attention makes of unit vectors."""
    every = {name: getattr(captured, name) for name in ("query", "mask", "bias")}
    last = {name: part[..., -queries:, :] for name, part in every.items() if part is not None}
    unit = torch.eye(captured.key.shape[2]).to(captured.value).expand(*captured.key.shape[:2], -1, -1)
    return attend(replace(captured, value=unit, **last))


def _stability(weights: Tensor, top: int) -> Array:
    """The measures (heads, MEASURES) of weights (contexts, heads, queries, candidates)."""
    count, there = weights.shape[0], weights.shape[-1]
    ranks = weights.argsort(-1).argsort(-1).double() - (there - 1) / 2
    parts = [(weights >= weights.topk(m, -1).values[..., -1:]).double() for m in (top, 1)]
    alike = []
    for part in (*parts, ranks):  # over pairs r ≠ s of contexts: Σ <x_r, x_s> = |Σ x_r|² − Σ |x_r|², with |x_r| = 1
        unit = part / part.square().sum(-1, keepdim=True).sqrt()
        alike.append(((unit.sum(0).square().sum(-1) - count) / (count * (count - 1))).clamp_max(1).mean(-1))
    largest = weights.gather(-1, weights.mean(0).argmax(-1).expand(count, -1, -1)[..., None])[..., 0].double()
    return torch.stack([*alike, (largest.std(0) / largest.mean(0)).mean(-1)], -1).cpu().numpy()
