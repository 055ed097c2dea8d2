"""Far contexts with known answers: passages that come again, and facts that are asked for at the end.

A document of n tokens gets, at each of four depths, a passage of another document and behind it a fact. Its last tokens
are the passages again, in an order of its own, and then the questions. Of a repeated passage the first tenth is not
counted: a reader cannot know yet that it comes again.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.errors import InputError

DEPTHS = (1 / 32, 1 / 4, 1 / 2)  # of far passages, as parts of the document; one more lies within the trained window
NAMES = ("Alice", "Bruno", "Clara", "David")
REPEATS = 8  # passages that a document repeats while exponents are fitted


@dataclass(frozen=True, eq=False)
class Planted:
    """A document with planted passages and facts; spans (start, stop) of tokens, one for each depth."""

    plain: Tensor  # (n,): the document itself, and as it is with them
    ids: Tensor
    first: tuple[tuple[int, int], ...]  # the counted tokens of a passage when it is read for the first time
    again: tuple[tuple[int, int], ...]  # and when it comes again
    answer: tuple[tuple[int, int], ...]  # of the questions at the end

    def means(self, nll: Tensor) -> dict[str, list[float]]:
        """Mean nats of first and repeated passages and of answers, by depth, from nats of tokens 1 .. n − 1."""
        spans = {"first": self.first, "again": self.again, "fact": self.answer}
        return {name: [float(nll[a - 1 : b - 1].mean()) for a, b in found] for name, found in spans.items()}


def passage_length(n: int) -> int:
    """Tokens of a planted passage: 200 in 32,768."""
    return max(16, min(200, n // 160))


def plant(ids: Tensor, other: Tensor, tokenizer: Any, trained: int, seed: int) -> Planted:
    """A document (n,) with passages of another one at four depths, repeated at its end, and four facts."""
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xFA2]))
    n, length = len(ids), passage_length(len(ids))
    facts, answered = zip(*(_fact(tokenizer, name, generator) for name in NAMES), strict=True)
    tail, longest = n - sum(length + len(fact) for fact in facts), length + 1 + max(map(len, facts))
    depths = [round(part * n) for part in DEPTHS] + [tail - max(trained // 2, longest)]
    if depths[-1] < depths[-2] + longest:
        given = f"documents of {n} tokens are too short to hold passages at four depths"
        raise InputError(f"{given}; expected a longer context")
    planted, skip = ids.clone(), max(2, length // 10)
    source = len(other) // 4 + length * np.arange(len(depths))  # passages of the other document, none twice
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
    """A document (n,) that repeats passages over more than `trained` tokens, and what each token is, (n,).

    0: the document's own, 1: counted as a repetition, 2: planted and counted as neither.
    """
    n, length = len(ids), passage_length(len(ids))
    planted, role = ids.clone(), torch.zeros(len(ids), dtype=torch.int8)
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
            continue  # a crowded document repeats fewer
        begin = int(generator.integers(0, len(other) - length))
        for at in (int(free[0]), place):
            planted[at : at + length] = other[begin : begin + length]
            role[at : at + length] = 2
        role[place + max(2, length // 10) : place + length] = 1
    return planted, role


def _fact(tokenizer: Any, name: str, generator: np.random.Generator) -> tuple[Tensor, int]:
    """The tokens of a fact, and how many of them, the last ones, are its answer."""
    number = " " + "".join(str(digit) for digit in generator.integers(0, 10, 5))
    told = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (f". The number of {name} is", number))
    question, answer = told
    return torch.tensor([*question, *answer]), len(answer)
