"""Exponents fitted on one text, and every schedule tried on its other documents and on a text never fitted.

Documents are read one after another under all schedules, so a run that is cut short holds whole, paired rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.errors import InputError, Progress
from limitlens.live.axes import Axes, Material, edges, joined, material, read
from limitlens.live.critical import critical_exponents
from limitlens.live.fit import LEVELS, Step, fit
from limitlens.live.reader import Reader
from limitlens.live.schedules import schedules
from limitlens.live.temper_result import Temper
from limitlens.models import LoadedModel, Windows, load, open_corpus
from limitlens.models.exponents import Factor, identity, powers
from limitlens.models.stretch import stretched

if TYPE_CHECKING:
    from torch import Tensor

FITTED, CHECKED, LEAST = 3, 1, 2  # documents that steps read, that end a fit, and that both axes are read on at least


@dataclass(frozen=True)
class Fit:
    """A fit that is wanted."""

    level: str = "head"  # of `fit.LEVELS`
    far: float = 0.0  # the weight of far use
    constant: bool = False  # whether there are constant factors beside the exponents

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
    told: Callable[[str], None] = lambda line: None, keep: Callable[[Temper], None] = lambda made: None,
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

    if per not in LEVELS:
        raise InputError(f"per is {per!r}; expected one of {', '.join(LEVELS)}")
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
    with stretched(reader.stack, stretch, to / window, window):
        pass  # what cannot be stretched is told before anything is read
    ids = _documents(loaded, text, to, FITTED + CHECKED + documents, 1 + CHECKED + LEAST)
    count = min(FITTED, len(ids) - CHECKED - LEAST)
    parts = {"fitted": ids[count + CHECKED :][:documents]}
    if other is not None:
        parts["other"] = _documents(loaded, other, to, documents, LEAST)
    run = _Run(
        reader,
        window,
        to,
        stretch,
        {"fitted": text, **({} if other is None else {"other": other})},
        seconds,
        told,
        keep,
    )
    held = {name: material(found, reader, window, seed=seed + 100 * i) for i, (name, found) in enumerate(parts.items())}
    run.count(progress, len(fits) * steps, held)
    run.fit_all(fits, ids[:count], ids[count], steps=steps, rate=rate, seed=seed)
    run.read_all(held)
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
        self, reader: Reader, trained: int, to: int, stretch: str, texts: dict[str, str], seconds: float,
        told: Callable[[str], None], keep: Callable[[Temper], None],
    ) -> None:  # fmt: skip
        self.reader, self.trained, self.to, self.stretch, self.texts = reader, trained, to, stretch, texts
        self.seconds, self.told, self.keep, self.started = seconds, told, keep, time.perf_counter()
        self.schedules: dict[str, Factor] = schedules(trained, to, reader.dim)
        self.critical = np.zeros((reader.layers, reader.heads))
        self.fits: dict[str, Any] = {}
        self.axes: dict[str, dict[str, list[Axes]]] = {}
        self.interrupted, self.done = False, 0

    def count(self, progress: Progress, steps: int, held: dict[str, list[Material]]) -> None:
        """Progress in steps and readings together: they take about as long."""
        named = len(self.schedules) + 2  # truncation and the critical exponents
        readings = sum(map(len, held.values()))
        self.advance = lambda fits: progress(self.done, steps + readings * (named + fits))

    def step(self, line: str = "") -> None:
        self.done += 1
        self.advance(len(self.fits))
        if line:
            self.told(line)

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.started)

    def stretching(self) -> Any:
        return stretched(self.reader.stack, self.stretch, self.to / self.trained, self.trained)

    def fit_all(self, fits: Sequence[Fit], ids: Sequence[Tensor], check: Tensor, **options: Any) -> None:
        """The exponents of gap counting, and every fit that there is time for."""
        import torch

        self.critical = critical_exponents(self.reader, ids[:1], self.trained)
        self.schedules["critical"] = powers(torch.as_tensor(self.critical), None, self.trained)
        for one in fits:
            if self.interrupted or self.left < self.seconds / 2:
                self.told(f"no time for {one.name}")
                continue

            def report(step: Step, total: float, name: str = one.name) -> None:
                far = "" if step.far is None else f", far {step.far:.4f}"
                self.step(f"{name} step {step.number}: loss {total:.4f}, plain {step.plain:.4f}{far}")

            with self.stretching():
                found = fit(
                    self.reader, ids, check, trained=self.trained, far=one.far, level=one.level,
                    constant=one.constant, report=report, **options,
                )  # fmt: skip
            self.fits[one.name], self.interrupted = found, found.interrupted
            self.keep(replace(self.made(), interrupted=True))
        self.schedules |= {name: self.made().exponents(name).factor() for name in self.fits}

    def read_all(self, held: dict[str, list[Material]]) -> None:
        """Both axes of all schedules, document by document of all texts in turn, as long as there is time."""
        took = 0.0
        for i in range(max(map(len, held.values()))):
            if self.interrupted or self.left < took:
                break
            began = time.perf_counter()
            try:
                found = {text: self.read_one(documents[i]) for text, documents in held.items() if i < len(documents)}
            except KeyboardInterrupt:
                if not self.fits:
                    raise
                self.interrupted = True
                break
            for text, axes in found.items():
                for name, own in axes.items():
                    self.axes.setdefault(text, {}).setdefault(name, []).append(own)
                self.told(f"document {i + 1} of {self.texts[text]}: nats at the end | of far repeated passages")
                for name, own in axes.items():
                    self.told(f"   {name:<26} {own.last()[0]:.4f} | {own.beyond(self.trained)[0]:.4f}")
            took = 1.1 * (time.perf_counter() - began)
            self.keep(replace(self.made(), interrupted=True))

    def read_one(self, document: Material) -> dict[str, Axes]:
        """One document under all schedules."""
        with self.reader.acting(None):
            found = {"truncated": read(self.reader, document, self.trained, truncated=True)}
        with self.stretching():
            for name, factor in self.schedules.items():
                with self.reader.acting(factor):
                    found[name] = read(self.reader, document, self.trained)
                self.step()
        return found

    def made(self) -> Temper:
        """The result of what is known."""
        import torch

        device = self.reader.device
        return Temper(
            model=self.reader.loaded.name, identity=identity(self.reader.loaded.model), trained=self.trained,
            to=self.to, stretch=self.stretch, texts=self.texts, edges=tuple(edges(self.trained, self.to)),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            precision_of_products="bfloat16" if self.reader.half else "float32", critical=self.critical,
            fits=dict(self.fits), seconds=time.perf_counter() - self.started, interrupted=self.interrupted,
            by_document={text: {name: joined(own) for name, own in found.items()} for text, found in self.axes.items()},
        )  # fmt: skip
