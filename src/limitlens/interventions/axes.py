"""Both axes of a score scale beyond the trained window: cost of plain text by position, and retrieval from far away."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from limitlens.arrays import Tensor
from limitlens.errors import Array
from limitlens.interventions.planting import Planted, plant
from limitlens.interventions.reader import Reader

PARTS = 3  # equal parts of the positions beyond the trained window


@dataclass(frozen=True, eq=False)
class Axes:
    """Mean nats per token, one row for each document."""

    plain: Array  # (documents, 1 + PARTS): plain text within the trained window and in equal parts beyond it
    first: Array  # (documents, depths): planted passages at their first occurrence
    again: Array  # (documents, depths): the same passages when they are repeated
    fact: Array  # (documents, depths): answers to questions about planted facts
    distance: Array  # (documents, depths): tokens between a passage and its repetition

    def last(self) -> Array:
        """Nats of plain text at the end of the context, (documents,)."""
        return self.plain[:, -1]

    def beyond(self, trained: int, what: str = "again") -> Array:
        """Mean nats of repeated passages (or "fact") from further away than the trained window, (documents,)."""
        far = self.distance > trained
        return np.asarray((getattr(self, what) * far).sum(1) / far.sum(1))


def plant_all(documents: Sequence[Tensor], reader: Reader, trained: int, seed: int = 0) -> list[Planted]:
    """Documents with passages of the next document planted."""
    pairs = enumerate(zip(documents, [*documents[1:], documents[0]], strict=True))
    return [plant(ids, other, reader.loaded.tokenizer, trained, seed + i) for i, (ids, other) in pairs]


def edges(trained: int, to: int) -> list[int]:
    """Ends of the parts of a document: the trained window, then equal parts beyond it."""
    return [1, *(round(edge) for edge in np.linspace(trained, to, PARTS + 1))]


def read_axes(reader: Reader, document: Planted, trained: int, *, truncated: bool = False) -> Axes:
    """Both axes of one document under the score scale and rope scaling in force, or of a truncated context."""
    cost = (lambda ids: reader.truncated(ids, trained)) if truncated else reader.nll
    nats = cost(document.plain)
    parts = [float(nats[a - 1 : b - 1].mean()) for a, b in pairwise(edges(trained, len(document.ids)))]
    planted = document.means(cost(document.ids))
    distance = [again[0] - first[0] for first, again in zip(document.first, document.again, strict=True)]
    rows = {name: np.array([planted[name]]) for name in ("first", "again", "fact")}
    return Axes(plain=np.array([parts]), **rows, distance=np.array([distance], float))


def joined(before: Axes | None, more: Axes) -> Axes:
    """The rows of two sets of documents, one after the other."""
    every = [more] if before is None else [before, more]
    return Axes(*(np.concatenate([getattr(axes, part.name) for axes in every]) for part in fields(Axes)))
