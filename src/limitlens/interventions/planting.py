"""Documents with repeated passages, to test whether a model retrieves text from beyond its trained window.

Passages of another document are inserted at four positions and repeated at the end, in another order. The first tenth
of a repetition does not count, because a reader cannot know yet that the passage is repeated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Self

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.errors import Array, InputError
from limitlens.interventions.reader import Reader

DEPTHS = (1 / 32, 1 / 4, 1 / 2)  # positions of passages as shares of a document; a fourth is close to its repetition
REPEATS = 8  # passages that a document repeats while exponents are fitted
PARTS = 3  # number of equal parts into which the positions beyond the trained window are divided

Span = tuple[int, int]  # index of the first token, and of the token after the last


@dataclass(frozen=True, eq=False)
class Planted:
    """A document with passages that are inserted and later repeated, and the spans of tokens that count."""

    plain: Tensor  # (n,): the original document
    ids: Tensor  # (n,): the document with passages
    first: tuple[Span, ...]  # first occurrence of the passage at each depth
    again: tuple[Span, ...]  # repetition of the passage at each depth


@dataclass(frozen=True, eq=False)
class Axes:
    """Mean nats per token (negative log-likelihood) of plain text and of repeated passages, one row per document."""

    plain: Array  # (documents, 1 + PARTS): plain text within the trained window and in equal parts beyond it
    again: Array  # (documents, depths): repeated passages
    distance: Array  # (documents, depths): tokens between a passage and its repetition

    def values(self, axis: str, trained: int) -> Array:
        """Nats per token (documents,) of plain text at the end ("log_perplexity") or of distant repetitions ("far").

        A repetition is distant if the passage first occurred more than `trained` tokens earlier.
        """
        if axis == "log_perplexity":
            return self.plain[:, -1]
        far = self.distance > trained
        return np.asarray((self.again * far).sum(1) / far.sum(1))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Concatenate the results of several sets of documents, one row per document."""
        return cls(*(np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(cls)))


def edges(trained: int, to: int) -> list[int]:
    """Boundaries of the trained window in a document of `to` tokens, then of `PARTS` equal parts after that window."""
    return [1, *(round(edge) for edge in np.linspace(trained, to, PARTS + 1))]


def read_axes(reader: Reader, document: Planted, trained: int, *, truncated: bool = False) -> Axes:
    """Nats of a document's plain text and repeated passages; if `truncated`, a token sees at most `trained` tokens."""

    def means(ids: Tensor, spans: Iterable[Span]) -> Array:
        nats = reader.truncated(ids, trained) if truncated else reader.nll(ids)
        return np.array([[float(nats[start - 1 : stop - 1].mean()) for start, stop in spans]])

    distance = [again[0] - first[0] for first, again in zip(document.first, document.again, strict=True)]
    plain = means(document.plain, pairwise(edges(trained, len(document.ids))))
    return Axes(plain, means(document.ids, document.again), np.array([distance], float))


def passage_length(n: int) -> int:
    """Length in tokens of a repeated passage in a document of n tokens: n/160, at least 16 and at most 200."""
    return max(16, min(200, n // 160))


def plant_all(documents: Sequence[Tensor], trained: int, seed: int = 0) -> list[Planted]:
    """Insert and repeat passages in each of the documents (n,); the passages come from the next document."""
    pairs = enumerate(zip(documents, [*documents[1:], documents[0]], strict=True))
    return [plant(ids, other, trained, seed + place) for place, (ids, other) in pairs]


def plant(ids: Tensor, other: Tensor, trained: int, seed: int) -> Planted:
    """Insert passages of the document `other` at four positions of a document (n,), and repeat them at its end."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xFA2]))
    n = len(ids)
    length = passage_length(n)
    tail = n - (1 + len(DEPTHS)) * length
    depths = [round(part * n) for part in DEPTHS] + [tail - max(trained // 2, length)]
    if depths[-1] < depths[-2] + length:
        given = f"documents of {n} tokens are too short to hold passages at four depths"
        raise InputError(f"{given}; expected a longer context")
    planted = ids.clone()
    source = len(other) // 4 + length * np.arange(len(depths))  # disjoint passages of the other document
    ends = (tail + length * generator.permutation(len(depths))).tolist()
    for begin, depth, end in zip(source.tolist(), depths, ends, strict=True):
        passage = other[begin : begin + length]
        planted[depth : depth + length] = passage
        planted[end : end + length] = passage
    skip = max(2, length // 10)
    first, again = (tuple((at + skip, at + length) for at in places) for places in (depths, ends))
    return Planted(ids, planted, first, again)


def repeat(ids: Tensor, other: Tensor, trained: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Insert passages of `other` twice in a document (n,), over `trained` tokens apart; returns ids and roles (n,).

    Role 0: original token. Role 1: repeated token that counts as retrieval. Role 2: inserted token that does not count.
    """
    n = len(ids)
    length = passage_length(n)
    planted = ids.clone()
    role = torch.zeros(n, dtype=torch.int8)
    earliest = trained + 2 * length
    room = (n - earliest) // REPEATS
    if room <= length:
        given = f"a context of {n} tokens beyond {trained} has no room for far passages"
        raise InputError(f"{given}; expected a longer one")
    places = [earliest + room * i + int(generator.integers(room - length)) for i in range(REPEATS)]
    for place in places:
        role[place : place + length] = 2
    for place in places:
        free = [at for at in generator.integers(0, place - trained - length, 64) if not role[at : at + length].any()]
        if not free:
            continue  # no free place: this document repeats fewer passages
        begin = int(generator.integers(0, len(other) - length))
        for at in (int(free[0]), place):
            planted[at : at + length] = other[begin : begin + length]
            role[at : at + length] = 2
        role[place + max(2, length // 10) : place + length] = 1
    return planted, role
