"""Fit of score-factor exponents by gradient descent, with all weights of the model fixed.

Over the tokens beyond the trained window the loss is (1 − w) · (mean nats of plain text) + w · (mean nats of passages
repeated from further away than the window), with w the retrieval weight.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.errors import Array, InputError, check_number
from limitlens.interventions.planting import repeat
from limitlens.interventions.reader import Reader
from limitlens.models.exponents import powers
from limitlens.sampling.interrupt import held_interrupt
from limitlens.theory.schedules import yarn_scale

PATIENCE = 2  # rounds without improvement that end a fit
LEVELS = {"head": "per_head", "model": "single"}  # one exponent for each head, or one for all heads


@dataclass(frozen=True)
class FitOptions:
    """Options of one fit of score-factor exponents."""

    level: str = "head"  # "head": an exponent for each head; "model": one for all
    retrieval_weight: float = 0.0  # weight of retrieval (passages repeated from far away) against plain text
    constant: bool = False  # fit constant factors in addition to exponents

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise InputError(f"the level of a fit is {self.level!r}; expected one of {', '.join(LEVELS)}")
        check_number("retrieval_weight", self.retrieval_weight, "at least 0 and at most 1", below=1 + 1e-12)

    @property
    def name(self) -> str:
        """Name of the fit in files and tables, such as "per_head_far_0.2"."""
        weight = f"_far_{self.retrieval_weight:g}" if self.retrieval_weight else ""
        return LEVELS[self.level] + "_constant" * self.constant + weight


@dataclass(frozen=True)
class Step:
    """Losses at one gradient step of a fit, or at one check on a held-out document."""

    number: int
    plain: float  # mean nats of plain text beyond the trained window
    far: float | None  # mean nats of passages repeated from far away; None if the document has none


@dataclass(frozen=True, eq=False)
class FittedExponents:
    """Fitted exponents of the score factors of all heads, and the losses during the fit."""

    level: str
    retrieval_weight: float
    exponents: Array  # (layers, heads)
    constants: Array | None  # (layers, heads): logarithms of constant factors
    felt: Array  # (layers, heads): root mean square derivative of the loss in the exponent over all steps
    steps: tuple[Step, ...]
    checks: tuple[Step, ...]  # losses on a document that no step reads, the first before all steps
    interrupted: bool = False


def fit_exponents(
    reader: Reader, documents: Sequence[Tensor], check: Tensor, trained: int, options: FitOptions, *,
    steps: int = 24, rate: float = 0.05, seed: int = 0, progress: Callable[[int], None] = lambda number: None,
) -> FittedExponents:  # fmt: skip
    """Fit exponents γ of score factors (p/n₀)^γ at query positions p beyond the trained window n₀ = `trained`.

    `documents`, each (n,), give the gradients. The exponents with the smallest loss on the document `check` are kept.
    They start at YaRN's factor, and the `rate` of Adam falls linearly to zero. `progress` is called with the number of
    each finished step. Ctrl-C ends the fit and drops the present step.
    """
    weight = options.retrieval_weight
    full = (reader.layers, reader.heads)
    shape = full if options.level == "head" else (1, 1)
    gamma = torch.full(shape, yarn_exponent(trained, len(check)), device=reader.device, requires_grad=True)
    offset = torch.zeros(shape, device=reader.device, requires_grad=options.constant)
    optimiser = torch.optim.Adam([gamma, offset] if options.constant else [gamma], lr=rate)
    generator = np.random.default_rng(np.random.SeedSequence([seed, 0xF17]))

    def with_roles(ids: Tensor, other: Tensor, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
        return repeat(ids, other, trained, generator) if weight else (ids, ids.new_zeros(len(ids)))

    check_document = with_roles(check, documents[0], np.random.default_rng(seed))
    taken: list[Step] = []
    checks: list[tuple[Step, float, tuple[Tensor, Tensor]]] = []  # losses, their weighted sum, and the parameters
    squared_gradient = torch.zeros(shape)

    def run_check(number: int) -> tuple[Step, float, tuple[Tensor, Tensor]]:
        with torch.no_grad(), reader.acting(powers(gamma.expand(full), offset.expand(full), trained)):
            loss, parts = _loss(reader, number, *check_document, trained, weight)
        return parts, float(loss), (gamma.detach().clone(), offset.detach().clone())

    def descend(number: int) -> Step:
        which = number % len(documents)
        other = documents[(which + 1) % len(documents)] if len(documents) > 1 else check
        document = with_roles(documents[which], other, generator)
        optimiser.zero_grad()
        with reader.acting(powers(gamma.expand(full), offset.expand(full), trained)):
            loss, parts = _loss(reader, number + 1, *document, trained, weight)
            loss.backward()  # type: ignore[no-untyped-call] # within the block: layers are computed again
        return parts

    def best_check() -> int:
        return int(np.argmin(np.nan_to_num([loss for _, loss, _ in checks], nan=np.inf)))

    with held_interrupt() as interrupt, reader.recomputing():
        for number in range(steps + 1):
            if number % len(documents) == 0 or number == steps:
                found = interrupt.during(run_check, number, drop=True)
                checks += [] if found is None else [found]
                if not checks:
                    interrupt.check()
            if interrupt.asked or number == steps or len(checks) - 1 - best_check() >= PATIENCE:
                break
            parts = interrupt.during(descend, number, drop=True)
            if parts is None:
                break
            assert gamma.grad is not None
            squared_gradient += gamma.grad.detach().cpu().square()
            for group in optimiser.param_groups:
                group["lr"] = rate * (1 - number / steps)
            optimiser.step()
            taken.append(parts)
            progress(number + 1)
        stopped = interrupt.asked
    tensors = *checks[best_check()][2], (squared_gradient / max(len(taken), 1)).sqrt()
    exponents, constants, felt = (tensor.expand(full).cpu().double().numpy().copy() for tensor in tensors)
    arrays = exponents, constants if options.constant else None, felt
    losses = tuple(taken), tuple(parts for parts, _, _ in checks)
    return FittedExponents(options.level, weight, *arrays, *losses, interrupted=stopped)


def yarn_exponent(trained: int, to: int) -> float:
    """Exponent γ for which (to/trained)^γ is YaRN's score factor at the end of the context; fits start there."""
    return math.log(yarn_scale(to, trained)) / math.log(to / trained)


def _loss(reader: Reader, number: int, ids: Tensor, role: Tensor, trained: int, weight: float) -> tuple[Tensor, Step]:
    """Loss of a document (n,) beyond the trained window, and its two terms; `role` (n,) is from `planting.repeat`."""
    cost = reader.losses(ids, trained)
    role = role[trained:].to(cost.device)
    plain = cost[role == 0].mean()
    again = cost[role == 1]
    if not len(again):
        return plain, Step(number, float(plain.detach()), None)
    far = again.mean()
    return (1 - weight) * plain + weight * far, Step(number, float(plain.detach()), float(far.detach()))
