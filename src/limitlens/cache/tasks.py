"""Recall tasks: prompts with facts planted in a user's own text, whose cache is cut before the question is known.

text      the text goes on; nothing is planted
needle1   one number is planted under a name and asked for
needle8   eight numbers are planted under eight names, and one is asked for
hop       a number is given to one variable and handed on to a second, which is asked for, beside another such pair
repeat    the beginning of a passage of the text is quoted, and the model continues it
words     four words are planted in four places and asked for in their order

Calibration prompts (`CALIBRATION`) have facts, chains, passages and sentences with other wording and other values.
`needle8` (many facts of one kind) and `words` (a list) have no counterpart among them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from limitlens.attention.kernels import choose_device
from limitlens.cache.cut import MAX_WINDOWS, cut_windows, window_order
from limitlens.errors import InputError, check_number
from limitlens.models import LoadedModel, Windows, load
from limitlens.models.chat import chat_of

SOLVED = 0.8  # accuracy with the whole cache from which on a task counts in averages
QUOTED, CONTINUED = 24, 8  # tokens of a passage that are quoted, and that the model must continue
INTRO = "Read the following text and remember the notes in it. A question about it follows.\n\n"


def _listed(words: str) -> list[str]:
    return words.split()


_NAMES = _listed("amber birch cedar delta ember fjord glade haven iris jade karst lotus maple nectar opal prism")
_WORDS = _listed("lantern harbor violin meadow copper saddle pepper window anchor basket candle ladder mirror needle")
_PEOPLE = _listed("Mira Tomas Elena Jonas Clara Hugo Nadia Oscar Petra Simon Laura Felix")
_CITIES = _listed("Lisbon Oslo Vienna Madrid Dublin Athens Prague Warsaw Helsinki Geneva")
_THINGS = _listed("chairs apples stamps bottles books shirts candles lamps")
_ANIMALS = _listed("falcon tiger salmon rabbit badger lizard pigeon turtle")

Piece = str | Sequence[int]  # a text, or tokens of it


@dataclass(frozen=True)
class Prompt:
    """One prompt of a recall task as tokens: a context, a question that is asked after the cut, and its answer."""

    task: str
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def own(self) -> slice:
        """Predictions for the tokens of the answer among those after each token of question and answer."""
        return slice(len(self.question) - 1, len(self.question) + len(self.answer) - 1)

    def score(self, log_p: Tensor, full: Tensor | None = None) -> dict[str, float]:
        """Accuracy, nll, KL and agreement of predictions for the answer, compared with those of the full cache.

        `log_p` and `full` (question + answer, vocabulary) are log-probabilities after each token of question and
        answer. `accuracy` is 1 if every token of the answer is the likeliest one, so that greedy decoding gives it.
        `nll` and `kl` are nats a token of the answer; `agreement` is the share of equal likeliest tokens.
        """
        cut, target = log_p[self.own].float(), torch.tensor(self.answer, device=log_p.device)
        whole = cut if full is None else full[self.own].float()
        best = cut.argmax(-1)
        return {
            "accuracy": float((best == target).all()),
            "nll": -float(cut.gather(-1, target[:, None]).mean()),
            "kl": float((whole.exp() * (whole - cut)).sum(-1).mean()),
            "agreement": float((best == whole.argmax(-1)).float().mean()),
        }


@dataclass(frozen=True)
class Puzzle:
    """Notes to plant in a text, a question about them, and the beginning and the rest of the answer."""

    notes: Sequence[str]
    question: Sequence[Piece]
    lead: Sequence[Piece]
    answer: Piece


Maker = Callable[[np.random.Generator, Sequence[int]], Puzzle]  # (generator, tokens of the text around the notes)


def needle(count: int, asked: int | None = None) -> Maker:
    """Maker of puzzles with `count` numbers of which one is asked for: the one in place `asked`, or any."""

    def make(rng: np.random.Generator, text: Sequence[int]) -> Puzzle:
        names = [str(name) for name in rng.choice(_NAMES, count, replace=False)]
        numbers = [str(number) for number in rng.integers(10**6, 10**7, count)]
        notes = [f"The special number for {name} is {number}." for name, number in zip(names, numbers, strict=True)]
        drawn = int(rng.integers(count))  # drawn in any case, so that all questions have the same context
        place = drawn if asked is None else asked
        lead = f"The special number for {names[place]} is"
        return Puzzle(notes, [f"What is the special number for {names[place]}?"], [lead], f" {numbers[place]}")

    return make


def _hop(rng: np.random.Generator, text: Sequence[int]) -> Puzzle:
    letters = rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), (4, 4))
    first, second, third, fourth = ("".join(row) for row in letters)
    numbers = rng.integers(10**4, 10**5, 2)
    notes = [f"VAR {first} = {numbers[0]}.", f"VAR {second} = VAR {first}."]
    notes += [f"VAR {third} = {numbers[1]}.", f"VAR {fourth} = VAR {third}."]
    return Puzzle(notes, [f"Which number does VAR {second} have?"], [f"VAR {second} has the number"], f" {numbers[0]}")


def _passage(rng: np.random.Generator, text: Sequence[int]) -> Puzzle:
    start = int(rng.integers(len(text) // 8, len(text) * 7 // 8 - QUOTED - CONTINUED))
    quoted = list(text[start : start + QUOTED])
    answer = list(text[start + QUOTED : start + QUOTED + CONTINUED])
    return Puzzle([], ["Continue this passage of the text, word for word:\n", quoted], [quoted], answer)


def _words(rng: np.random.Generator, text: Sequence[int]) -> Puzzle:
    words = [str(word) for word in rng.choice(_WORDS, 4, replace=False)]
    notes = [f"Secret word number {place}: {word}." for place, word in enumerate(words, 1)]
    lead = "The four secret words, in their order, are:"
    return Puzzle(notes, ["Which are the four secret words, in their order?"], [lead], f" {', '.join(words)}")


def _fact(rng: np.random.Generator, text: Sequence[int]) -> Puzzle:
    person, animal, code = rng.choice(_PEOPLE), rng.choice(_ANIMALS), rng.integers(100, 1000)
    note = f"{person} has chosen the password {animal}{code}."
    return Puzzle([note], [f"Which password has {person} chosen?"], [f"{person} has chosen the password"],
                  f" {animal}{code}")  # fmt: skip


def _chain(rng: np.random.Generator, text: Sequence[int]) -> Puzzle:
    first, second, third = rng.choice(_PEOPLE, 3, replace=False)
    cities = rng.choice(_CITIES, 2, replace=False)
    notes = [f"{first} lives in the same city as {second}.", f"{second} lives in {cities[0]}."]
    notes.append(f"{third} lives in {cities[1]}.")
    return Puzzle(notes, [f"In which city does {first} live?"], [f"{first} lives in"], f" {cities[0]}")


def _sentence(rng: np.random.Generator, text: Sequence[int]) -> Puzzle:
    person, city, thing = rng.choice(_PEOPLE), rng.choice(_CITIES), rng.choice(_THINGS)
    note = f"On a Sunday {person} bought {rng.integers(12, 99)} {thing} at a market in {city}."
    return Puzzle([note], [f"Where did {person} buy the {thing}?"], [f"{person} bought the {thing} at a market in"],
                  f" {city}")  # fmt: skip


TEXT = "text"
TASKS: dict[str, Maker] = {
    "needle1": needle(1), "needle8": needle(8), "hop": _hop, "repeat": _passage, "words": _words,
}  # fmt: skip
CALIBRATION: dict[str, Maker] = {"fact": _fact, "chain": _chain, "passage": _passage, "sentence": _sentence}


def check_tasks(names: Sequence[str]) -> None:
    """Raise an `InputError` unless `names` are different names of tasks, "text" or those in `TASKS`."""
    known = (TEXT, *TASKS)
    if not names or len(set(names)) < len(names) or set(names) - set(known):
        raise InputError(f"the tasks are {','.join(names) or 'none'}; expected some of {','.join(known)}, each once")


def make_prompt(
    loaded: LoadedModel, task: str, window: Sequence[int], context: int, entropy: Sequence[int],
    maker: Maker | None = None,
) -> Prompt:  # fmt: skip
    """Prompt of a task or calibration family, with its notes planted at random places of a window of text.

    The context has exactly `context` tokens: the beginning of the chat template or of the `window`, an instruction,
    and text with the notes. A model without a chat template is asked in plain text. `maker` makes the puzzle instead of
    the one that the task has.
    """
    if task == TEXT:
        return Prompt(task, tuple(window[:context]), (window[context],), tuple(window[context + 1 :]))
    rng = np.random.default_rng([*entropy, *task.encode()])
    chat = chat_of(loaded)

    def tokens(*pieces: Piece) -> list[int]:
        return [token for piece in pieces for token in (
            loaded.tokenizer(piece, add_special_tokens=False)["input_ids"] if isinstance(piece, str) else piece)
        ]  # fmt: skip

    first = tuple(window[:1]) if loaded.opening else ()
    before = [*(first if chat is None else chat.before), *tokens(INTRO)]
    made = (maker or (TASKS | CALIBRATION)[task])(rng, window[len(first) : context - len(before)])
    notes = [tokens(f"\n{note}\n") for note in made.notes]
    room = context - len(before) - sum(map(len, notes))
    if room < 2 * (QUOTED + CONTINUED):
        given = f"a context of {context} tokens leaves {room} for the text of the task {task!r}"
        raise InputError(f"{given}; expected at least {2 * (QUOTED + CONTINUED)}, so use a longer context")
    text = list(window[len(first) : len(first) + room])
    ids, place = list(before), 0
    for stop, note in zip(np.sort(rng.integers(0, room, len(notes))).tolist(), notes, strict=True):
        ids += [*text[place:stop], *note]
        place = stop
    ids += text[place:]
    asked = ["\n\n", *made.question, *([chat.after] if chat else ["\n\n"]), *made.lead]
    if isinstance(made.answer, str):  # the tokens at the joint of lead and answer are those of the joined text
        *asked, last = asked
        both, alone = tokens(f"{last}{made.answer}"), tokens(last)
        same = next((i for i, pair in enumerate(zip(both, alone, strict=False)) if pair[0] != pair[1]), len(alone))
        question, answer = [*tokens(*asked), *both[:same]], both[same:]
    else:
        question, answer = tokens(*asked), list(made.answer)
    needed = context + len(question) + len(answer)
    if loaded.positions is not None and needed > loaded.positions:
        given = f"a context of {context} tokens with question and answer has {needed} tokens"
        raise InputError(f"{given}; {loaded.name} has {loaded.positions} positions, so use a shorter context")
    return Prompt(task, tuple(ids), tuple(question), tuple(answer))


def tasks(
    model: str | LoadedModel, corpus: str = "stdlib-docs", names: Sequence[str] = tuple(TASKS),
    *, context: int = 4096, count: int = 8, special: str = "auto", seed: int = 0, device: str = "auto",
) -> list[Prompt]:  # fmt: skip
    """Make `count` prompts of each recall task from a text, to test any cache: cut it between context and question.

    >>> made = ll.tasks(model, text, ["text"], context=64, count=2)
    >>> len(made), len(made[0].context)
    (2, 64)
    """
    check_tasks(names)
    check_number("count", count, f"from 1 to {MAX_WINDOWS} prompts of each task", low=1, below=MAX_WINDOWS + 1)
    loaded = model if isinstance(model, LoadedModel) else load(model, device=choose_device(device), head=True)
    windows = cut_windows(loaded, corpus, special, context)
    if windows.count < count:
        given = f"the corpus {corpus!r} gives {windows.count} windows of {windows.length:,} tokens"
        raise InputError(f"{given}; {count} were asked for, so give more text or a shorter context")
    rows = window_order(windows, seed)[:count]
    return [prompt for row in rows for prompt in prompts_of(loaded, windows, row, names, context, seed)]


def prompts_of(
    loaded: LoadedModel, windows: Windows, row: int, names: Sequence[str], context: int, seed: int
) -> list[Prompt]:
    """One prompt of each task or calibration family `names`, made from the window `row` of a text."""
    window = windows[row].tolist()
    return [make_prompt(loaded, name, window, context, [seed, row]) for name in names]
