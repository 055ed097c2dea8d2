"""Exponents of score factors fitted by gradient descent, with all weights of the model fixed.

Over the tokens beyond the trained window the loss is

    (1 − w) · mean nats of plain text + w · mean nats of passages repeated from further away than the window,

with w the retrieval weight. Each step reads one document. After every round of documents one more document is read as
a check, and the best exponents on it are kept; the fit ends after some rounds without improvement.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.errors import Array
from limitlens.interventions.planting import repeat
from limitlens.interventions.reader import Reader
from limitlens.models.exponents import powers
from limitlens.sampling.interrupt import held_interrupt
from limitlens.theory.schedules import yarn_scale

PATIENCE = 2  # rounds without improvement that end a fit


@dataclass(frozen=True)
class Step:
    """One step of a fit, or one check of it."""

    number: int
    plain: float  # mean nats of plain text beyond the trained window
    far: float | None  # mean nats of passages repeated from far away, where there are some


@dataclass(frozen=True, eq=False)
class FittedExponents:
    """Exponents, and how they were found."""

    level: str
    retrieval_weight: float
    exponents: Array  # (layers, heads)
    constants: Array | None  # (layers, heads): logarithms of constant factors
    felt: Array  # (layers, heads): root mean square derivative of the loss in the exponent over all steps
    steps: tuple[Step, ...]
    checks: tuple[Step, ...]  # on a document that no step reads; the first is before all steps
    interrupted: bool = False


def fit_exponents(
    reader: Reader, documents: Sequence[Tensor], check: Tensor, *, trained: int, retrieval_weight: float = 0.0,
    level: str = "head", constant: bool = False, steps: int = 24, rate: float = 0.05, seed: int = 0,
    report: Callable[[Step, float], None] = lambda step, loss: None,
) -> FittedExponents:  # fmt: skip
    """Fit exponents to `documents`, each (n,), starting at YaRN's; the `rate` of Adam falls linearly to zero."""
    shape = (reader.layers if level != "model" else 1, reader.heads if level == "head" else 1)
    full = (reader.layers, reader.heads)
    gamma = torch.full(shape, yarn_exponent(trained, len(check)), device=reader.device, requires_grad=True)
    offset = torch.zeros(shape, device=reader.device, requires_grad=True) if constant else None
    parameters = [gamma] if offset is None else [gamma, offset]
    optimiser = torch.optim.Adam(parameters, lr=rate)
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xF17]))

    def prepared(ids: Tensor, other: Tensor, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
        """A document and the roles of its tokens (`repeat`)."""
        return repeat(ids, other, trained, generator) if retrieval_weight else (ids, ids.new_zeros(len(ids)))

    check_document = prepared(check, documents[0], np.random.default_rng(seed))
    taken: list[Step] = []
    checks: list[Step] = []
    best = float("inf")
    best_parameters = [part.detach().clone() for part in parameters]
    squared_gradient = torch.zeros(shape)
    stale = 0

    def applied() -> AbstractContextManager[None]:
        constants = None if offset is None else offset.expand(full)
        return reader.acting(powers(gamma.expand(full), constants, trained))

    def run_check(number: int) -> None:
        nonlocal best, best_parameters, stale
        with torch.no_grad(), reader.precision(), applied():
            loss, parts = _loss(reader, *check_document, trained, retrieval_weight)
        checks.append(Step(number, *parts))
        stale = 0 if float(loss) < best else stale + 1
        if float(loss) < best:
            best = float(loss)
            best_parameters = [part.detach().clone() for part in parameters]
        report(checks[-1], float(loss))

    with held_interrupt() as interrupt, reader.recomputing():
        run_check(0)
        for number in range(steps):
            if interrupt.asked or stale >= PATIENCE:
                break
            which = number % len(documents)
            other = documents[(which + 1) % len(documents)] if len(documents) > 1 else check
            document = prepared(documents[which], other, generator)
            for group in optimiser.param_groups:
                group["lr"] = rate * (1 - number / steps)
            optimiser.zero_grad()
            with applied():
                with reader.precision():
                    loss, parts = _loss(reader, *document, trained, retrieval_weight)
                loss.backward()  # type: ignore[no-untyped-call] # within the block: layers are computed again
            assert gamma.grad is not None
            squared_gradient += gamma.grad.detach().cpu().square()
            optimiser.step()
            taken.append(Step(number + 1, *parts))
            report(taken[-1], float(loss.detach()))
            if (number + 1) % len(documents) == 0 or number + 1 == steps:
                run_check(number + 1)
        stopped = interrupt.asked
    fitted = [part.expand(full).cpu().double().numpy().copy() for part in best_parameters]
    felt = (squared_gradient / max(len(taken), 1)).sqrt().expand(full).double().numpy().copy()
    constants = fitted[1] if constant else None
    return FittedExponents(level, retrieval_weight, fitted[0], constants, felt, tuple(taken), tuple(checks), stopped)


def yarn_exponent(trained: int, to: int) -> float:
    """The γ with (to/trained)^γ equal to YaRN's factor at the end of the context, where fits begin."""
    return math.log(yarn_scale(to, trained)) / math.log(to / trained)


def _loss(
    reader: Reader, ids: Tensor, role: Tensor, trained: int, retrieval_weight: float
) -> tuple[Tensor, tuple[float, float | None]]:
    """The loss of a prepared document, and the mean nats of its plain and of its repeated tokens."""
    cost = reader.cost(reader.hidden(ids), ids, trained)
    role = role[trained:].to(cost.device)
    plain = cost[role == 0].mean()
    again = cost[role == 1]
    if not len(again):
        return plain, (float(plain.detach()), None)
    loss = (1 - retrieval_weight) * plain + retrieval_weight * again.mean()
    return loss, (float(plain.detach()), float(again.mean().detach()))
