"""Documents with known answers far away: planted passages that are repeated, and facts that are asked for at the end.

A document of n tokens gets, at each of four depths, a passage of another document followed by a fact. Its last tokens
are the passages again, in another order, and then the questions. The first tenth of a repeated passage is not counted:
a reader cannot know yet that it is a repetition.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.errors import InputError

DEPTHS = (1 / 32, 1 / 4, 1 / 2)  # of far passages, relative to the document; one more is within the trained window
NAMES = ("Alice", "Bruno", "Clara", "David")
REPEATS = 8  # passages that a document repeats while exponents are fitted


@dataclass(frozen=True, eq=False)
class Planted:
    """A document with planted passages and facts, and their spans (start, stop) of tokens, one for each depth."""

    plain: Tensor  # (n,): the original document
    ids: Tensor  # (n,): the document with passages and facts
    first: tuple[tuple[int, int], ...]  # the counted tokens of a passage at its first occurrence
    again: tuple[tuple[int, int], ...]  # the same at its repetition
    answer: tuple[tuple[int, int], ...]  # answers to the questions at the end

    def means(self, nll: Tensor) -> dict[str, list[float]]:
        """Mean nats of first and repeated passages and of answers, by depth, from nats of tokens 1 .. n − 1."""
        spans = {"first": self.first, "again": self.again, "fact": self.answer}
        return {name: [float(nll[a - 1 : b - 1].mean()) for a, b in found] for name, found in spans.items()}


def passage_length(n: int) -> int:
    """Number of tokens of a planted passage: 200 in a document of 32,768."""
    return max(16, min(200, n // 160))


def plant(ids: Tensor, other: Tensor, tokenizer: Any, trained: int, seed: int) -> Planted:
    """Plant passages of another document and facts at four depths of a document (n,), and repeat them at its end."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xFA2]))
    n = len(ids)
    length = passage_length(n)
    facts, answered = zip(*(_fact(tokenizer, name, generator) for name in NAMES), strict=True)
    tail = n - sum(length + len(fact) for fact in facts)
    longest = length + 1 + max(map(len, facts))
    depths = [round(part * n) for part in DEPTHS] + [tail - max(trained // 2, longest)]
    if depths[-1] < depths[-2] + longest:
        given = f"documents of {n} tokens are too short to hold passages at four depths"
        raise InputError(f"{given}; expected a longer context")
    planted = ids.clone()
    skip = max(2, length // 10)
    source = len(other) // 4 + length * np.arange(len(depths))  # disjoint passages of the other document
    first, again, answers = [], {}, {}
    for place, (begin, depth) in enumerate(zip(source.tolist(), depths, strict=True)):
        planted[depth : depth + length] = other[begin : begin + length]
        planted[depth + length : depth + length + len(facts[place])] = facts[place]
        first.append((depth + skip, depth + length))
    at = tail
    for place in generator.permutation(len(depths)).tolist():
        planted[at : at + length] = planted[depths[place] : depths[place] + length]
        again[place] = (at + skip, at + length)
        at += length
    for place in generator.permutation(len(depths)).tolist():
        planted[at : at + len(facts[place])] = facts[place]
        at += len(facts[place])
        answers[place] = (at - answered[place], at)
    spans = [tuple(found[place] for place in range(len(depths))) for found in (again, answers)]
    return Planted(ids, planted, tuple(first), spans[0], spans[1])


def repeat(ids: Tensor, other: Tensor, trained: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A document (n,) that repeats passages at distances above `trained`, and the role of each token, (n,).

    Role 0: original token; 1: counted as a repetition; 2: planted and not counted.
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


def _fact(tokenizer: Any, name: str, generator: np.random.Generator) -> tuple[Tensor, int]:
    """The tokens of a fact, and the number of tokens at its end that are the answer."""
    number = " " + "".join(str(digit) for digit in generator.integers(0, 10, 5))
    texts = f". The number of {name} is", number
    question, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    return torch.tensor([*question, *answer]), len(answer)
