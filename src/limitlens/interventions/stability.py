"""Stability of top keys (`limitlens.stability`): does a head attend to the same keys after another text?

The end of each document is read after several other texts (contexts). For pairs of contexts, the attention weights of
the last queries on the tokens of that end are compared:

overlap      share of the m keys of largest weight that are the same in both contexts
stays        share of pairs of contexts in which the key of largest weight is the same
ranks        rank correlation of the weights
variation    standard deviation over contexts / mean, of the weight of the key whose mean weight is largest
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from scipy import special
from torch import Tensor

from limitlens.arrays import pd
from limitlens.errors import Array, InputError, Progress, check_number, check_seed
from limitlens.interventions import harness
from limitlens.models import Captured, LoadedModel, capture
from limitlens.models.intervene import attend
from limitlens.models.windows import open_some
from limitlens.report.view import Section, View, head_map
from limitlens.results import Result

MEASURES = ("overlap", "stays", "ranks", "variation")


@dataclass(frozen=True, eq=False, repr=False)
class Stability(Result):
    """Result of `limitlens.stability`: share of the top keys of every head that stay the same after another text."""

    kind, file = "stability", "stability"
    model: str
    corpus: str
    keys: int  # tokens of a context, the replaced text before the document's last tokens
    tail: int  # last tokens of a document that stay; the last of them are the queries
    top: int  # m, the number of keys of largest weight that are compared
    contexts: int
    trust: float  # a head is trusted if the 95% Student interval of its overlap over documents is not below this
    places: tuple[tuple[int, int], ...]  # (layer, head) of each head
    found: Array  # (documents, heads, MEASURES)
    warnings: tuple[str, ...] = ()

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table with one row per head: means of `MEASURES` over documents, standard errors, whether it is trusted."""
        numbers = harness.estimate_table(self.found, MEASURES, place=range(len(self.places))).drop(columns="place")
        rows = pd.DataFrame(self.places, columns=["layer", "head"]).join(numbers)
        width = float(special.stdtrit(len(self.found) - 1, 0.975))
        low = rows["overlap"] - width * rows["overlap_stderr"]
        return rows.assign(trusted=low >= self.trust)

    def view(self) -> View:
        """Report of the result: a map of the overlap of top keys over layers and heads, and the least stable heads."""
        rows = self.table.sort_values("overlap", kind="stable")
        rows["head"] = [f"{layer}.{head}" for layer, head in zip(rows.pop("layer"), rows["head"], strict=True)]
        overlap, stays, _, variation = (float(self.table[name].median()) for name in MEASURES)
        verdict = (
            f"The last {self.tail} tokens of every document were read behind {self.contexts} other texts, and the "
            "attention weights of every head on them were compared.",
            f"{self.table['trusted'].sum()} of {len(rows)} heads keep at least {self.trust:.0%} of their top "
            f"{self.top} keys with 95% confidence at n = {self.keys:,}. In the median head {overlap:.0%} of the top "
            f"keys stay, the first of them in {stays:.0%} of the pairs of contexts, and its weight varies by "
            f"{variation:.0%}.",
            "Do not read the importance of single tokens off heads that are not trusted: behind another text they "
            "attend to other keys.",
        )
        lead = (
            "Means over documents ± standard errors, over pairs of contexts: share of the top keys that are the same, "
            "how often the first key is, rank correlation of the weights, relative variation of the largest weight."
        )
        trust = (
            "a head is trusted where the lower end of the 95% interval of its overlap reaches the threshold",
            "a key of the replaced text may have more weight than all candidates; the overlap does not count it",
        )
        picture = head_map("Share of the top keys that stay", "overlap", self.places, self.table["overlap"].tolist())
        section = Section("Every head", lead, [picture, harness.shown_table("Least stable first", {}, rows, 12)])
        size = f"{len(self.found)} documents, {self.contexts} contexts of {self.keys:,} tokens before each"
        title = f"Stability of top keys in {self.model}"
        return View(title, f"{self.corpus} · {size}", verdict, [section], warnings=self.warnings, trust=trust)


def stability(
    model: str | LoadedModel, corpus: str = "stdlib-docs", keys: int = 256,
    *, tail: int = 64, queries: int = 8, top: int = 5, contexts: int = 8, documents: int = 8, trust: float = 0.8,
    special: str = "auto", seed: int = 0, device: str = "auto", progress: Progress = lambda done, total: None,
) -> Stability:  # fmt: skip
    """Measure which heads attend to the same keys when the text before those keys is replaced.

    The last `tail` tokens of each document are read after `contexts` other texts of `keys` tokens. The last `queries`
    tokens are the queries. Their `top` keys of largest weight, among the tail's tokens before them, are compared.

    >>> found = ll.stability(model, text, keys=16, tail=16, queries=2, top=3, contexts=3, documents=3)
    >>> found.table.query('layer == 0').overlap.tolist()  # the first layer does not depend on the context
    [1.0, 1.0, 1.0, 1.0]
    """
    check_number("trust", trust, "a share of the top keys, such as 0.8", below=1 + 1e-12)
    check_number("contexts", min(contexts, documents), "at least 2, and at least 2 documents", low=2)
    check_number("keys", keys, "at least 1 token of context", low=1)
    check_number("queries", queries, "at least 1", low=1)
    check_seed(seed)
    if not 1 <= top < tail - queries:
        raise InputError(f"top is {top}, but only {tail - queries} keys are compared; lower top or lengthen the tail")
    length, count = keys + tail, documents + contexts
    loaded, windows, ids = open_some(model, corpus, count, length, special=special, seed=seed, device=device)
    texts = ids[documents:, :keys].to(loaded.model.device)
    candidates = slice(keys, length - queries)
    layers: list[tuple[int, Array]] = []

    def take(captured: Captured) -> None:
        layers.append((captured.layer, _stability(_weights(captured, queries)[..., candidates], top)))

    found = []
    for done, end in enumerate(ids[:documents, keys:].to(texts)):
        layers.clear()
        with torch.inference_mode(), capture(loaded.model, take) as run_until_last_attention:
            run_until_last_attention(input_ids=torch.cat((texts, end.expand(contexts, -1)), 1))
        found.append(np.concatenate([measures for _, measures in layers]))
        progress(done + 1, documents)
    places = tuple((layer, head) for layer, measures in layers for head in range(len(measures)))
    about = loaded.name, corpus, keys, tail, top, contexts, trust, places
    return Stability(*about, np.stack(found), warnings=tuple(windows.warnings))


def _weights(captured: Captured, queries: int) -> Tensor:
    """Softmax weights (B, Hq, m, N) of the last m queries on all N keys: attention with unit vectors as values."""
    parts = {name: getattr(captured, name) for name in ("query", "mask", "bias")}
    last = {name: part[..., -queries:, :] for name, part in parts.items() if part is not None}
    unit = torch.eye(captured.key.shape[2]).to(captured.value).expand(*captured.key.shape[:2], -1, -1)
    return attend(replace(captured, value=unit, **last))


def _stability(weights: Tensor, top: int) -> Array:
    """The four `MEASURES` of every head, (heads, 4), from softmax weights (contexts, heads, queries, keys)."""
    count = weights.shape[0]
    ranks = weights.argsort(-1).argsort(-1).double() - (weights.shape[-1] - 1) / 2
    indicators = [(weights >= weights.topk(m, -1).values[..., -1:]).double() for m in (top, 1)]
    similar = []
    for part in (*indicators, ranks):  # over pairs r ≠ s of contexts: Σ <x_r, x_s> = |Σ x_r|² − Σ |x_r|², |x_r| = 1
        unit = part / part.square().sum(-1, keepdim=True).sqrt()
        similar.append(((unit.sum(0).square().sum(-1) - count) / (count * (count - 1))).clamp_max(1).mean(-1))
    largest = weights.gather(-1, weights.mean(0).argmax(-1).expand(count, -1, -1)[..., None])[..., 0].double()
    return torch.stack([*similar, (largest.std(0) / largest.mean(0)).mean(-1)], -1).cpu().numpy()
