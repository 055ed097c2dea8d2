"""Both axes of a schedule: what plain text costs by position, and what the far context still gives."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from limitlens.arrays import Tensor
from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.interventions.planting import Planted, plant
from limitlens.interventions.reader import Reader

PARTS = 3  # of the positions beyond the trained window


@dataclass(frozen=True, eq=False)
class Axes:
    """Mean nats a token, one row for each document."""

    plain: Array  # (documents, 1 + PARTS): plain text within the trained window and in equal parts beyond it
    first: Array  # (documents, depths): planted passages when first read, when they come again, and answers
    again: Array
    fact: Array
    distance: Array  # (documents, depths): tokens between a passage and its repetition

    def last(self) -> Array:
        """Nats of plain text at the end of the context, (documents,)."""
        return self.plain[:, -1]

    def beyond(self, trained: int, what: str = "again") -> Array:
        """Mean nats of what comes again, or is asked for, from further away than the trained window, (documents,)."""
        away = self.distance > trained
        return np.asarray((getattr(self, what) * away).sum(1) / away.sum(1))


def mean(values: Array, base: Array | None = None) -> Estimate:
    """Mean over documents, or of the paired differences to another schedule; no standard error from one document."""
    found = values if base is None else values - base
    stderr = float(found.std(ddof=1) / np.sqrt(len(found))) if len(found) > 1 else float("nan")
    return Estimate(float(found.mean()), stderr)


def material(documents: Sequence[Tensor], reader: Reader, trained: int, seed: int = 0) -> list[Planted]:
    """Documents with passages of the next one planted."""
    pairs = enumerate(zip(documents, [*documents[1:], documents[0]], strict=True))
    return [plant(ids, other, reader.loaded.tokenizer, trained, seed + i) for i, (ids, other) in pairs]


def edges(trained: int, to: int) -> list[int]:
    """Where the parts of a document begin and end: within the trained window, and beyond it in equal parts."""
    return [1, *(round(edge) for edge in np.linspace(trained, to, PARTS + 1))]


def read(reader: Reader, document: Planted, trained: int, *, truncated: bool = False) -> Axes:
    """Both axes of one document, under whatever schedule and stretch are in force."""
    cost = (lambda ids: reader.truncated(ids, trained)) if truncated else reader.nll
    plain, ends = cost(document.plain), edges(trained, len(document.ids))
    parts = [float(plain[a - 1 : b - 1].mean()) for a, b in pairwise(ends)]
    planted = document.means(cost(document.ids))
    away = [again[0] - first[0] for first, again in zip(document.first, document.again, strict=True)]
    found = {name: np.array([planted[name]]) for name in ("first", "again", "fact")}
    return Axes(plain=np.array([parts]), **found, distance=np.array([away], float))


def joined(before: Axes | None, more: Axes) -> Axes:
    """The axes of the documents before, where there are some, and of more."""
    every = [more] if before is None else [before, more]
    return Axes(*(np.concatenate([getattr(axes, part.name) for axes in every]) for part in fields(Axes)))
