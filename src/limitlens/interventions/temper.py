"""Score scaling for a longer context: exponents fitted on one text, every schedule tried on held-out documents."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from limitlens.arrays import Tensor, torch
from limitlens.cost import check_cost, forward_cost
from limitlens.errors import InputError, Progress, check_number
from limitlens.interventions.axes import Axes, edges, joined, plant_all, read_axes
from limitlens.interventions.critical import critical_exponents
from limitlens.interventions.harness import open_model, read_documents
from limitlens.interventions.planting import Planted
from limitlens.interventions.reader import Reader
from limitlens.interventions.temper_fit import Step, fit_exponents
from limitlens.interventions.temper_result import Temper
from limitlens.models import LoadedModel, open_corpus
from limitlens.models.exponents import Factor, identity, powers
from limitlens.models.rope_scaling import ROPE_SCALINGS, rope_scaled
from limitlens.theory.schedules import entropy_scale, log_scale, yarn_scale

LEVELS = ("head", "layer", "model")  # what has an exponent of its own
STEP_FORWARDS = 4  # forward passes that take as long as a gradient step, which computes layers twice
SCHEDULES = 7  # schedules of factors that are measured besides the fitted ones, truncation included
FIT_DOCUMENTS = 3  # documents for the gradient steps of a fit
CHECK_DOCUMENTS = 1  # documents that decide when a fit ends
MIN_TEST_DOCUMENTS = 2  # held-out documents that are needed at least


@dataclass(frozen=True)
class FitOptions:
    """What to fit: the level of the exponents, the weight of retrieval in the loss, and constants or none."""

    level: str = "head"  # of `LEVELS`
    retrieval_weight: float = 0.0  # weight of far repeated passages against plain text
    constant: bool = False  # fit constant factors in addition to exponents

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise InputError(f"an exponent per {self.level!r} was asked for; expected one of {', '.join(LEVELS)}")
        check_number("retrieval_weight", self.retrieval_weight, "at least 0 and at most 1", below=1 + 1e-12)

    @property
    def name(self) -> str:
        """Name of the fit in files and tables."""
        level = "single" if self.level == "model" else f"per_{self.level}"
        weight = f"_far_{self.retrieval_weight:g}" if self.retrieval_weight else ""
        return level + "_constant" * self.constant + weight


def temper(
    model: str | LoadedModel, to: int, text: str = "stdlib-docs", other: str | None = None, *,
    rope_scaling: str = "yarn", retrieval_weight: Sequence[float] = (0.0, 0.2), per: str = "head",
    constant: bool = False, fits: Sequence[FitOptions] | None = None, trained: int | None = None, documents: int = 6,
    steps: int = 24, rate: float = 0.05, seconds: float = float("inf"), seed: int = 0, device: str = "auto",
    progress: Progress = lambda done, total: None, log: Callable[[str], None] = lambda line: None,
    keep: Callable[[Temper], object] = lambda made: None,
) -> Temper:  # fmt: skip
    """Fit factors on the attention scores of a decoder for a context of `to` tokens, longer than it was trained for.

    Every schedule of factors is measured on held-out documents, on plain text and on retrieval from far away, and
    compared with YaRN's factor and with truncation. Products are computed in bfloat16 on a GPU. Ctrl-C keeps what is
    finished.

    Parameters
    ----------
    text, other : the text to fit on, whose other documents are held out; a second text that is only held out.
    rope_scaling : of the rotary positions, for everything but truncation: none, linear, ntk or yarn.
    retrieval_weight : weights of retrieval against plain text in the loss, one fit for each; exponents `per` head,
        layer or model, with constant factors where `constant`. One exponent for the whole model is always fitted too.
    fits : the fits themselves, in place of `retrieval_weight`, `per` and `constant`.
    trained : the trained window, by default what the model's configuration says.
    documents : held-out documents of each text, at most. No fit begins after half of `seconds`, and no document that
        would not end in time. `steps` and `rate` (Adam's) belong to each fit.
    log, keep : are called with one line after each step, and with the result so far after each fit and document.

    >>> made = ll.temper(model, 512, text, documents=2, steps=1, retrieval_weight=[0.0])
    >>> list(made.fits)
    ['single', 'per_head']
    """
    if fits is None:
        own = [FitOptions(per, weight, constant) for weight in retrieval_weight]
        fits = list(dict.fromkeys([FitOptions("model"), *own]))
    if rope_scaling not in ROPE_SCALINGS:
        raise InputError(f"rope_scaling is {rope_scaling!r}; expected one of {', '.join(ROPE_SCALINGS)}")
    for name in (text, other or text):
        open_corpus(name)
    loaded = open_model(model, device, head=True)
    window = trained or loaded.positions
    if window is None or to <= window:
        raise InputError(
            f"a context of {to:,} tokens was asked for, {loaded.name} was trained for {window or 'an unknown number'}; "
            "expected a longer one, since factors act beyond the trained window"
        )
    started = time.perf_counter()
    reader = Reader(loaded, half=loaded.model.device.type == "cuda")
    with rope_scaled(reader.stack, rope_scaling, to / window, window):
        pass  # refuse a model without rotary positions before anything is read
    most, least = FIT_DOCUMENTS + CHECK_DOCUMENTS + documents, 1 + CHECK_DOCUMENTS + MIN_TEST_DOCUMENTS
    ids = read_documents(loaded, text, to, most, least)
    count = min(FIT_DOCUMENTS, len(ids) - CHECK_DOCUMENTS - MIN_TEST_DOCUMENTS)
    texts = {"fitted": text}
    held_out = {"fitted": plant_all(ids[count + CHECK_DOCUMENTS :][:documents], reader, window, seed)}
    if other is not None:
        texts["other"] = other
        others = read_documents(loaded, other, to, documents, MIN_TEST_DOCUMENTS)
        held_out["other"] = plant_all(others, reader, window, seed + 100)
    where = loaded.model.device
    made = Temper(
        model=loaded.name, identity=identity(loaded.model), trained=window, to=to, rope_scaling=rope_scaling,
        texts=texts, edges=tuple(edges(window, to)),
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
        precision_of_products="bfloat16" if reader.half else "float32",
        critical=critical_exponents(reader, ids[:1], window), fits={}, by_document={}, seconds=0.0,
    )  # fmt: skip
    readings = (len(fits) + SCHEDULES) * sum(map(len, held_out.values()))
    forwards = len(fits) * steps * (STEP_FORWARDS + 1 / count) + readings
    check_cost(f"temper of {loaded.name}", *forward_cost(loaded.model, forwards * to, to), yes=True)
    total = len(fits) + max(map(len, held_out.values()))
    run = _Run(reader, made, seconds, progress, log, keep, total, started)
    run.fit(fits, ids[:count], ids[count], steps, rate, seed)
    return run.measure(held_out, len(fits))


@dataclass
class _Run:
    """A run of `temper`: the result so far, and whom to tell about it."""

    reader: Reader
    made: Temper
    seconds: float
    progress: Progress
    log: Callable[[str], None]
    keep: Callable[[Temper], object]
    total: int  # fits and rounds of documents
    started: float  # of the clock

    def fit(
        self, fits: Sequence[FitOptions], documents: list[Tensor], check: Tensor, steps: int, rate: float, seed: int
    ) -> None:
        """Fit the exponents of each request, as long as there is time."""
        for number, options in enumerate(fits):
            if self.made.interrupted or time.perf_counter() - self.started > self.seconds / 2:
                self.log(f"no time for {options.name}")
                continue

            def report(step: Step, loss: float, number: int = number, name: str = options.name) -> None:
                self.progress(number + step.number / steps, self.total)
                far = "" if step.far is None else f", far {step.far:.4f}"
                self.log(f"{name} step {step.number}: loss {loss:.4f}, plain {step.plain:.4f}{far}")

            with self._rope_scaled():
                fitted = fit_exponents(
                    self.reader, documents, check, trained=self.made.trained,
                    retrieval_weight=options.retrieval_weight, level=options.level, constant=options.constant,
                    steps=steps, rate=rate, seed=seed, report=report,
                )  # fmt: skip
            self._update(fits={**self.made.fits, options.name: fitted}, interrupted=fitted.interrupted)

    def measure(self, held_out: dict[str, list[Planted]], done: int) -> Temper:
        """Read held-out documents under every schedule, one document at a time: what is finished stays paired."""
        factors = self._factors()
        took = 0.0
        try:
            for row in range(self.total - done):
                began = time.perf_counter()
                if self.made.interrupted or began - self.started + took > self.seconds:
                    break
                read = {text: self._read(each[row], factors) for text, each in held_out.items() if row < len(each)}
                self._update(by_document={**self.made.by_document, **{t: self._joined(t, a) for t, a in read.items()}})
                took = 1.1 * (time.perf_counter() - began)
                self.progress(done + row + 1, self.total)
        except KeyboardInterrupt:
            return replace(self.made, interrupted=True)
        return self.made

    def _factors(self) -> dict[str, Factor]:
        """Every schedule but truncation: factors on the scores by layer and position of the query."""
        trained, to, dim = self.made.trained, self.made.to, self.reader.dim
        n = np.maximum(np.arange(1, to + 1), trained)
        scales = {
            "constant": np.ones(to), "log": log_scale(n, trained), "yarn": yarn_scale(n, trained),
            "yarn_all": np.full(to, yarn_scale(to, trained)), "entropy": entropy_scale(n, trained, dim),
        }  # fmt: skip

        def by_position(scale: Any) -> Factor:
            table = torch.as_tensor(scale, device=self.reader.device)
            return lambda layer, position: table[position]

        critical = powers(torch.as_tensor(self.made.critical), None, trained)
        fitted = {name: self.made.exponents(name).factor() for name in self.made.fits}
        return {name: by_position(scale) for name, scale in scales.items()} | {"critical": critical} | fitted

    def _read(self, document: Planted, factors: dict[str, Factor]) -> dict[str, Axes]:
        """Both axes of one document under all schedules."""
        with self.reader.acting(None):
            axes = {"truncated": read_axes(self.reader, document, self.made.trained, truncated=True)}
        with self._rope_scaled():
            for name, factor in factors.items():
                with self.reader.acting(factor):
                    axes[name] = read_axes(self.reader, document, self.made.trained)
        return axes

    def _joined(self, text: str, read: dict[str, Axes]) -> dict[str, Axes]:
        """The axes of all documents of a text so far, with those of the document just read."""
        for schedule, axes in read.items():
            end, again = axes.last()[0], axes.beyond(self.made.trained)[0]
            where = self.made.texts[text]
            self.log(f"{where}, {schedule}: {end:.4f} nats at the end, {again:.4f} of far passages")
        before = self.made.by_document.get(text, {})
        return {schedule: joined(before.get(schedule), axes) for schedule, axes in read.items()}

    def _rope_scaled(self) -> Any:
        made = self.made
        return rope_scaled(self.reader.stack, made.rope_scaling, made.to / made.trained, made.trained)

    def _update(self, **changes: Any) -> None:
        """Add to the result, and pass it on as if the run ended here."""
        self.made = replace(self.made, seconds=time.perf_counter() - self.started, **changes)
        self.keep(replace(self.made, interrupted=True))
