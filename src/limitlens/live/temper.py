"""Exponents fitted on one text, and every schedule tried on its other documents and on a text never fitted.

Documents are read one after another under all schedules, so a run that is cut short holds whole, paired rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.errors import InputError, Progress, check_number
from limitlens.live.axes import Axes, Material, edges, joined, material, read
from limitlens.live.critical import critical_exponents
from limitlens.live.fit import Fitted, Step, fit
from limitlens.live.reader import Reader
from limitlens.live.schedules import schedules
from limitlens.live.temper_result import Temper
from limitlens.models import LoadedModel, Windows, load, open_corpus
from limitlens.models.exponents import Factor, identity, powers
from limitlens.models.stretch import stretched

if TYPE_CHECKING:
    from torch import Tensor

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

    Products are computed in bfloat16 on a GPU. Ctrl-C keeps what was finished.
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
    reader = Reader(loaded, half=loaded.model.device.type == "cuda")
    run = _Run(reader, window, to, stretch, {"fitted": text} | ({} if other is None else {"other": other}), told, keep)
    with run.stretching():
        pass  # what cannot be stretched is told before anything is read
    ids = _documents(loaded, text, to, FITTED + CHECKED + documents, 1 + CHECKED + LEAST)
    count = min(FITTED, len(ids) - CHECKED - LEAST)
    parts = {"fitted": ids[count + CHECKED :][:documents]}
    if other is not None:
        parts["other"] = _documents(loaded, other, to, documents, LEAST)
    held = {name: material(found, reader, window, seed=seed + 100 * i) for i, (name, found) in enumerate(parts.items())}
    run.critical = critical_exponents(reader, ids[:1], window)
    rows = max(map(len, held.values()))
    for number, one in enumerate(fits):
        if run.interrupted or run.elapsed > seconds / 2:
            told(f"no time for {one.name}")
            continue

        def report(step: Step, total: float, number: int = number, name: str = one.name) -> None:
            progress(number + step.number / steps, len(fits) + rows)
            far = "" if step.far is None else f", far {step.far:.4f}"
            told(f"{name} step {step.number}: loss {total:.4f}, plain {step.plain:.4f}{far}")

        run.fit(one, ids[:count], ids[count], steps=steps, rate=rate, seed=seed, report=report)
    factors, took = run.factors(), 0.0
    for row in range(rows):
        if run.interrupted or run.elapsed + took > seconds:
            break
        began = run.elapsed
        run.read({name: found[row] for name, found in held.items() if row < len(found)}, factors)
        took = 1.1 * (run.elapsed - began)
        progress(len(fits) + row + 1, len(fits) + rows)
    return run.made()


def _documents(loaded: LoadedModel, text: str, to: int, wanted: int, least: int) -> list[Tensor]:
    """The text in documents of the whole length; those beyond the wanted number are not read."""
    windows = Windows(loaded, open_corpus(text), length=to, tokens=wanted * to, fewer=True)
    if len(windows) < least:
        raise InputError(
            f"the text {text!r} holds {len(windows)} documents of {to:,} tokens; expected at least {least}: give a "
            "longer text or a shorter context"
        )
    return [ids for batch in windows.batches(1) for ids in batch]


class _Run:
    """What is known so far."""

    def __init__(
        self, reader: Reader, trained: int, to: int, stretch: str, texts: dict[str, str],
        told: Callable[[str], None], keep: Callable[[Temper], object],
    ) -> None:  # fmt: skip
        self.reader, self.trained, self.to, self.stretch, self.texts = reader, trained, to, stretch, texts
        self.told, self.keep, self.started, self.interrupted = told, keep, time.perf_counter(), False
        self.critical = np.zeros((reader.layers, reader.heads))
        self.fits: dict[str, Fitted] = {}
        self.axes: dict[str, dict[str, list[Axes]]] = {}

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def stretching(self) -> AbstractContextManager[None]:
        return stretched(self.reader.stack, self.stretch, self.to / self.trained, self.trained)

    def fit(self, one: Fit, ids: Sequence[Tensor], check: Tensor, **options: Any) -> None:
        """One more fit."""
        with self.stretching():
            found = fit(
                self.reader, ids, check, trained=self.trained, far=one.far, level=one.level, constant=one.constant,
                **options,
            )  # fmt: skip
        self.fits[one.name], self.interrupted = found, found.interrupted
        self.keep(replace(self.made(), interrupted=True))

    def factors(self) -> dict[str, Factor]:
        """Every schedule but truncation."""
        import torch

        own = {name: self.made().exponents(name).factor() for name in self.fits}
        critical = powers(torch.as_tensor(self.critical), None, self.trained)
        return {**schedules(self.trained, self.to, self.reader.dim), "critical": critical, **own}

    def read(self, documents: dict[str, Material], factors: dict[str, Factor]) -> None:
        """Both axes of one document of each text under all schedules; nothing of them where Ctrl-C comes before."""
        found: dict[tuple[str, str], Axes] = {}
        try:
            for text, document in documents.items():
                with self.reader.acting(None):
                    found[text, "truncated"] = read(self.reader, document, self.trained, truncated=True)
                for name, factor in factors.items():
                    with self.stretching(), self.reader.acting(factor):
                        found[text, name] = read(self.reader, document, self.trained)
        except KeyboardInterrupt:
            self.interrupted = True
            return
        for (text, name), axes in found.items():
            self.axes.setdefault(text, {}).setdefault(name, []).append(axes)
            end, far = axes.last()[0], axes.beyond(self.trained)[0]
            self.told(f"{self.texts[text]}, {name}: {end:.4f} nats at the end, {far:.4f} of far repeated passages")
        self.keep(replace(self.made(), interrupted=True))

    def made(self) -> Temper:
        """The result of what is known."""
        import torch

        reader, device = self.reader, self.reader.device
        return Temper(
            model=reader.loaded.name, identity=identity(reader.loaded.model), trained=self.trained, to=self.to,
            stretch=self.stretch, texts=self.texts, edges=tuple(edges(self.trained, self.to)),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            precision_of_products="bfloat16" if reader.half else "float32", critical=self.critical,
            fits=dict(self.fits), seconds=self.elapsed, interrupted=self.interrupted,
            by_document={text: {name: joined(own) for name, own in found.items()} for text, found in self.axes.items()},
        )  # fmt: skip
