"""Exponents fitted by gradient: the model's weights stay as they are, only factors on its scores are moved.

With roles of tokens beyond the trained window, the loss is

    (1 − w) · mean nats of plain text + w · mean nats of passages that come again from further away than the window,

w the weight of far use. A step reads one document; every round of documents one more is read for checking, and the best
exponents there are kept: fitting ends when some rounds in a row were no better.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.errors import Array
from limitlens.interventions.planting import repeat
from limitlens.interventions.reader import Reader
from limitlens.interventions.schedules import yarn_exponent
from limitlens.models.exponents import powers
from limitlens.sampling.interrupt import held_interrupt

PATIENCE = 2  # rounds without gain that end a fit


@dataclass(frozen=True)
class Step:
    """One step of a fit, or one check of it."""

    number: int
    plain: float  # mean nats of plain text beyond the trained window, and of far repeated passages where there are some
    far: float | None


@dataclass(frozen=True, eq=False)
class Fitted:
    """Exponents, and how they were found."""

    level: str
    far: float  # the weight of far use
    exponents: Array  # (layers, heads)
    constants: Array | None  # (layers, heads): logarithms of constant factors
    felt: Array  # (layers, heads): root mean square of the loss's derivative in the exponent over all steps
    steps: tuple[Step, ...]
    checks: tuple[Step, ...]  # on the document that no step has read; the first is of the start
    interrupted: bool = False


def fit(
    reader: Reader, documents: Sequence[Tensor], check: Tensor, *, trained: int, far: float = 0.0,
    level: str = "head", constant: bool = False, steps: int = 24, rate: float = 0.05, seed: int = 0,
    report: Callable[[Step, float], None] = lambda step, total: None,
) -> Fitted:  # fmt: skip
    """Fit exponents to `documents` (n,) each, beginning at YaRN's; `rate` is Adam's, which falls linearly to zero."""
    shape = (reader.layers if level != "model" else 1, reader.heads if level == "head" else 1)
    full = (reader.layers, reader.heads)
    begin = yarn_exponent(trained, len(check))
    gamma = torch.full(shape, begin, device=reader.device, requires_grad=True)
    offset = torch.zeros(shape, device=reader.device, requires_grad=True) if constant else None
    moved = [gamma] if offset is None else [gamma, offset]
    optimiser = torch.optim.Adam(moved, lr=rate)
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xF17]))

    def prepared(ids: Tensor, other: Tensor, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
        return repeat(ids, other, trained, generator) if far else (ids, ids.new_zeros(len(ids)))  # with tokens' roles

    checked = prepared(check, documents[0], np.random.default_rng(seed))
    taken, checks = list[Step](), list[Step]()
    best, kept, felt, stale = float("inf"), [part.detach().clone() for part in moved], torch.zeros(shape), 0

    def applied() -> AbstractContextManager[None]:
        return reader.acting(powers(gamma.expand(full), None if offset is None else offset.expand(full), trained))

    def look(number: int) -> None:
        nonlocal best, kept, stale
        with torch.no_grad(), reader.precision(), applied():
            loss, found = _loss(reader, *checked, trained, far)
        checks.append(Step(number, *found))
        total = float(loss)
        stale = 0 if total < best else stale + 1
        if total < best:
            best, kept = total, [part.detach().clone() for part in moved]
        report(checks[-1], total)

    with held_interrupt() as interrupt, reader.recomputing():
        look(0)
        for number in range(steps):
            if interrupt.asked or stale >= PATIENCE:
                break
            which = number % len(documents)
            other = documents[(which + 1) % len(documents)] if len(documents) > 1 else check
            given = prepared(documents[which], other, generator)
            for group in optimiser.param_groups:
                group["lr"] = rate * (1 - number / steps)
            optimiser.zero_grad()
            with applied():
                with reader.precision():
                    loss, found = _loss(reader, *given, trained, far)
                loss.backward()  # type: ignore[no-untyped-call] # within the block: layers are computed again
            assert gamma.grad is not None
            felt += gamma.grad.detach().cpu().square()
            optimiser.step()
            taken.append(Step(number + 1, *found))
            report(taken[-1], float(loss.detach()))
            if (number + 1) % len(documents) == 0 or number + 1 == steps:
                look(number + 1)
        stopped = interrupt.asked
    wide = [part.expand(full).cpu().double().numpy().copy() for part in kept]
    spread = (felt / max(len(taken), 1)).sqrt().expand(full).double().numpy().copy()
    constants = wide[1] if constant else None
    return Fitted(level, far, wide[0], constants, spread, tuple(taken), tuple(checks), stopped)


def _loss(
    reader: Reader, ids: Tensor, role: Tensor, trained: int, far: float
) -> tuple[Tensor, tuple[float, float | None]]:
    """The loss of a prepared document, and its two parts."""
    cost = reader.cost(reader.hidden(ids), ids, trained)
    behind = role[trained:].to(cost.device)
    plain, again = cost[behind == 0].mean(), cost[behind == 1]
    if not len(again):
        return plain, (float(plain.detach()), None)
    return (1 - far) * plain + far * again.mean(), (float(plain.detach()), float(again.mean().detach()))
