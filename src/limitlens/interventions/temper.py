"""Exponents fitted on one text, and every schedule tried on its other documents and on a text never fitted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from limitlens.arrays import Tensor, torch
from limitlens.errors import InputError, Progress, check_number
from limitlens.interventions.axes import Axes, edges, joined, material, read
from limitlens.interventions.critical import critical_exponents
from limitlens.interventions.planting import Planted
from limitlens.interventions.reader import Reader
from limitlens.interventions.schedules import schedules
from limitlens.interventions.temper_fit import Step, fit
from limitlens.interventions.temper_result import Temper
from limitlens.models import LoadedModel, Windows, load, open_corpus
from limitlens.models.exponents import Factor, identity, powers
from limitlens.models.rope_scaling import rope_scaled

LEVELS = ("head", "layer", "model")  # who has an exponent of its own
FITTED, CHECKED, LEAST = 3, 1, 2  # documents that steps read, that end a fit, and that both axes are read on at least


@dataclass(frozen=True)
class Fit:
    """A fit that is wanted."""

    level: str = "head"  # of `LEVELS`
    far: float = 0.0  # the weight of far use
    constant: bool = False  # whether there are constant factors beside the exponents

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise InputError(f"an exponent per {self.level!r} was asked for; expected one of {', '.join(LEVELS)}")
        check_number("the weight of far use", self.far, "at least 0 and at most 1", below=1 + 1e-12)

    @property
    def name(self) -> str:
        """As files and tables call it."""
        level = "single" if self.level == "model" else f"per_{self.level}"
        return level + "_constant" * self.constant + (f"_far_{self.far:g}" if self.far else "")


def temper(
    model: str | LoadedModel, to: int, text: str = "stdlib-docs", other: str | None = None, *, stretch: str = "yarn",
    far: Sequence[float] = (0.0, 0.2), per: str = "head", constant: bool = False, fits: Sequence[Fit] | None = None,
    trained: int | None = None, documents: int = 6, steps: int = 24, rate: float = 0.05, seconds: float = float("inf"),
    seed: int = 0, device: str = "auto", progress: Progress = lambda done, total: None,
    told: Callable[[str], None] = lambda line: None, keep: Callable[[Temper], object] = lambda made: None,
) -> Temper:  # fmt: skip
    """What factors on the scores do to a decoder that reads `to` tokens, more than it was trained for.

    Products are computed in bfloat16 on a GPU. Ctrl-C keeps what was finished.

    Parameters
    ----------
    text, other : what exponents are fitted on and then tried on (other documents of it), and a text that is only tried.
    stretch : of the rotary positions, within which everything but truncation runs: none, linear, ntk, yarn.
    far : weights of far use against plain text, one fit each; `per` head, layer or model, with constant factors beside
        the exponents where `constant`. One exponent for the whole model is always fitted too.
    fits : the fits themselves, in place of `far`, `per` and `constant`.
    trained : the trained window; what the model says when left out.
    documents : of each text that are read, at most. `seconds`: no fit is begun behind half of them, nor another
        document when it would not end within. `steps` and `rate` are of each fit (Adam).
    told, keep : are given a line after each step, and what is known after each fit and document.

    >>> made = ll.temper(model, 512, text, documents=2, steps=1, far=[0.0])
    >>> list(made.fits)
    ['single', 'per_head']
    """
    from limitlens.attention.device import choose_device

    if fits is None:
        fits = list(dict.fromkeys([Fit("model"), *(Fit(per, weight, constant) for weight in far)]))
    loaded = model if isinstance(model, LoadedModel) else load(model, device=choose_device(device), head=True)
    window = trained or loaded.positions
    if window is None or to <= window:
        raise InputError(
            f"a context of {to:,} tokens was asked for, {loaded.name} was trained for {window or 'an unknown number'}; "
            "expected a longer one, since factors act beyond the trained window"
        )
    where = loaded.model.device
    reader = Reader(loaded, half=where.type == "cuda")
    with rope_scaled(reader.stack, stretch, to / window, window):
        pass  # what cannot be stretched is told before anything is read
    started = time.perf_counter()
    ids = _documents(loaded, text, to, FITTED + CHECKED + documents, 1 + CHECKED + LEAST)
    count = min(FITTED, len(ids) - CHECKED - LEAST)
    parts = {"fitted": ids[count + CHECKED :][:documents]}
    if other is not None:
        parts["other"] = _documents(loaded, other, to, documents, LEAST)
    held = {name: material(found, reader, window, seed=seed + 100 * i) for i, (name, found) in enumerate(parts.items())}
    made = Temper(
        model=loaded.name, identity=identity(loaded.model), trained=window, to=to, stretch=stretch,
        texts={"fitted": text} | ({} if other is None else {"other": other}), edges=tuple(edges(window, to)),
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
        precision_of_products="bfloat16" if reader.half else "float32",
        critical=critical_exponents(reader, ids[:1], window), fits={}, by_document={}, seconds=0.0,
    )  # fmt: skip
    rows = max(map(len, held.values()))

    def known(**more: Any) -> Temper:
        found = replace(made, seconds=time.perf_counter() - started, **more)
        keep(replace(found, interrupted=True))
        return found

    for number, one in enumerate(fits):
        if made.interrupted or time.perf_counter() - started > seconds / 2:
            told(f"no time for {one.name}")
            continue

        def report(step: Step, total: float, number: int = number, name: str = one.name) -> None:
            progress(number + step.number / steps, len(fits) + rows)
            far = "" if step.far is None else f", far {step.far:.4f}"
            told(f"{name} step {step.number}: loss {total:.4f}, plain {step.plain:.4f}{far}")

        with rope_scaled(reader.stack, stretch, to / window, window):
            found = fit(
                reader, ids[:count], ids[count], trained=window, far=one.far, level=one.level, constant=one.constant,
                steps=steps, rate=rate, seed=seed, report=report,
            )  # fmt: skip
        made = known(fits={**made.fits, one.name: found}, interrupted=found.interrupted)
    fitted = {name: made.exponents(name).factor() for name in made.fits}
    critical = powers(torch.as_tensor(made.critical), None, window)
    factors, took = {**schedules(window, to, reader.dim), "critical": critical, **fitted}, 0.0  # all but truncation
    try:
        for row in range(rows):  # a document under all schedules: a run that is cut short holds paired rows
            began = time.perf_counter()
            if made.interrupted or began - started + took > seconds:
                break
            now = {name: _read(reader, made, each[row], factors) for name, each in held.items() if row < len(each)}
            for name, axes in now.items():
                for schedule, own in axes.items():
                    end, again = own.last()[0], own.beyond(window)[0]
                    told(f"{made.texts[name]}, {schedule}: {end:.4f} nats at the end, {again:.4f} of far passages")
                    axes[schedule] = joined(made.by_document.get(name, {}).get(schedule), own)
            made = known(by_document={**made.by_document, **now})
            took = 1.1 * (time.perf_counter() - began)
            progress(len(fits) + row + 1, len(fits) + rows)
    except KeyboardInterrupt:
        return replace(made, interrupted=True)
    return made


def _documents(loaded: LoadedModel, text: str, to: int, wanted: int, least: int) -> list[Tensor]:
    """The text in documents of the whole length; those beyond the wanted number are not read."""
    windows = Windows(loaded, open_corpus(text), length=to, tokens=wanted * to, fewer=True)
    if len(windows) < least:
        given = f"the text {text!r} holds {len(windows)} documents of {to:,} tokens"
        raise InputError(f"{given}; expected at least {least}: give a longer text or a shorter context")
    return [ids for batch in windows.batches(1) for ids in batch]


def _read(reader: Reader, made: Temper, document: Planted, factors: dict[str, Factor]) -> dict[str, Axes]:
    """Both axes of one document under all schedules."""
    with reader.acting(None):
        found = {"truncated": read(reader, document, made.trained, truncated=True)}
    with rope_scaled(reader.stack, made.stretch, made.to / made.trained, made.trained):
        for name, factor in factors.items():
            with reader.acting(factor):
                found[name] = read(reader, document, made.trained)
    return found
