"""Factors on attention scores for contexts longer than in training (`limitlens.temper`), fitted and tested on text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.arrays import pd, torch
from limitlens.cost import check_cost, forward_cost
from limitlens.errors import InputError, Progress
from limitlens.estimate import Estimate
from limitlens.interventions import harness
from limitlens.interventions.planting import Axes, Planted, plant_all, read_axes
from limitlens.interventions.reader import Reader
from limitlens.interventions.temper_fit import FitOptions, FittedExponents, fit_exponents
from limitlens.models import LoadedModel, open_corpus
from limitlens.models.exponents import Exponents, Factor, identity
from limitlens.models.rope_scaling import ROPE_SCALINGS, rope_scaled
from limitlens.report.text import join, sentence
from limitlens.report.view import Axis, Block, Figure, Guide, Section, View, head_map, look, points
from limitlens.sampling.interrupt import StopNow
from limitlens.statistics.documents import paired_mean
from limitlens.theory.schedules import entropy_scale, log_scale, yarn_scale

AXES = ("log_perplexity", "far")  # nats of plain text at the end of the context, and of passages repeated from far away
YARN = ("yarn", "yarn_all")  # YaRN's factor by the position of each query, or by the whole context
LABELS = {
    "truncated": "truncation", "constant": "no factor", "log": "log n", "yarn": "YaRN's factor",
    "yarn_all": "YaRN's factor, all queries", "entropy": "entropy invariance",
}  # fmt: skip
HEADINGS = {
    "log_perplexity": "ln perplexity", "log_perplexity_against_yarn": "minus YaRN's", "far": "far, nats",
    "far_against_yarn": "far, minus YaRN's",
}  # fmt: skip
STEP_FORWARDS = 4  # forward passes that take as long as a gradient step, which computes layers twice
SCHEDULES = 6  # score factors that are measured besides the fitted ones, truncation included
FIT_DOCUMENTS = 3  # documents for the gradient steps of a fit
CHECK_DOCUMENTS = 1  # documents that decide when a fit ends
MIN_TEST_DOCUMENTS = 2  # held-out documents that are needed at least


@dataclass(frozen=True, eq=False, repr=False)
class Temper(harness.DocumentResult):
    """Result of `limitlens.temper`: fitted exponents of score factors, and losses with them on held-out documents."""

    kind, file = "temper", "schedules"
    model: str
    identity: Mapping[str, Any]  # `models.exponents.identity`
    trained: int  # tokens of the trained window
    to: int  # tokens of the longer context
    rope_scaling: str
    texts: Mapping[str, str]  # "fitted": text of the fits (held-out documents); "other": a second text
    device: str
    precision_of_products: str
    fits: Mapping[str, FittedExponents]
    by_document: Mapping[str, Mapping[str, Axes]]  # by text and score factor; empty before a document was read
    interrupted: bool = False

    def estimate(self, text: str, name: str, axis: str, base: str | None = None) -> Estimate:
        """Mean nats per token with the score factor `name` on a text, and its standard error over documents.

        `axis` selects plain text or retrieval (`AXES`). With `base`, the mean paired difference to that score factor.
        """
        baseline = None if base is None else self.by_document[text][base].values(axis, self.trained)
        return paired_mean(self.by_document[text][name].values(axis, self.trained), baseline)

    def beats(self, name: str, base: str, text: str) -> bool:
        """Whether the score factor `name` beats `base` on plain text and on retrieval, beyond 95% Student intervals."""
        from scipy.special import stdtrit

        width = float(stdtrit(max(len(self.by_document[text][name].plain) - 1, 1), 0.975))
        differences = [self.estimate(text, name, axis, base) for axis in AXES]
        return all(one.value < -width * one.stderr for one in differences)

    @property
    def warnings(self) -> list[str]:
        """Warnings for the report: one if the run was interrupted, otherwise none."""
        return ["the run was interrupted: it holds the finished fits and documents"] * self.interrupted

    @cached_property
    def winners(self) -> list[str]:
        """Fits that significantly beat YaRN's factors on all texts and are not `beaten`, best retrieval first."""
        texts = [*self.by_document]
        unbeaten = [name for name in self.fits if texts and name not in self.beaten]
        won = [name for name in unbeaten if all(self.beats(name, rule, text) for rule in YARN for text in texts)]
        return sorted(won, key=lambda name: self.estimate(texts[-1], name, "far").value)

    @cached_property
    def beaten(self) -> list[str]:
        """Fits that truncation or a YaRN factor equals or beats on some text, both in plain text and in retrieval."""
        rivals = [(text, base) for text in self.by_document for base in ("truncated", *YARN)]

        def loses(name: str, text: str, base: str) -> bool:
            return all(self.estimate(text, name, axis, base).value >= 0 for axis in AXES)

        return [name for name in self.fits if any(loses(name, *rival) for rival in rivals)]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Nats of plain text and of distant repetitions, also minus YaRN's: one row per text and score factor."""
        tables = []
        columns = [f"{axis}{end}" for axis in AXES for end in ("", "_against_yarn")]
        for text, found in self.by_document.items():
            rows = [[axes.values(axis, self.trained) for axis in AXES] for axes in found.values()]
            nats = np.array(rows).transpose(2, 0, 1)  # (documents, schedules, AXES)
            numbers = np.stack([nats, nats - nats[:, [[*found].index("yarn")]]], -1).reshape(*nats.shape[:2], -1)
            tables.append(harness.estimate_table(numbers, columns, text=[text], schedule=found))
        return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()

    def document(self) -> dict[str, Any]:
        """JSON document of the result: fields, rows of the table, and the fits among `winners` and `beaten`."""
        return super().document() | {"winners": self.winners, "beaten": self.beaten}

    def exponents(self, name: str) -> Exponents:
        """Exponents of the fit `name`, in the form that `limitlens.intervene` applies and reads from a file."""
        fit = self.fits[name]
        about = self.model, self.identity, self.trained, self.to, self.rope_scaling, self.texts["fitted"]
        return Exponents(*about, fit.level, fit.retrieval_weight, fit.exponents, fit.constants)

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """Extra files for the run folder: one JSON file of exponents for each fit."""
        return {f"{name}.json": self.exponents(name).write for name in self.fits}

    def view(self) -> View:
        """Report of the result: perplexity and retrieval with every score factor, and maps of exponents over heads."""
        documents = [f"{len(axes['yarn'].plain)} of {self._where(text)}" for text, axes in self.by_document.items()]
        blocks: list[Block] = [self.frontier(text) for text in self.by_document]
        for text in self.by_document:
            rows = self.table[self.table["text"] == text].sort_values("far").drop(columns="text")
            rows["schedule"] = rows["schedule"].map(label)
            blocks.append(harness.shown_table(f"All schedules on both axes: {self._where(text)}", HEADINGS, rows))
        lead = (
            "ln perplexity of plain text at the end of the context; nats per token of passages repeated from further "
            "away than the trained window (far); lower is better. Means over documents ± standard errors; differences "
            "to YaRN's factor are paired by document."
        )
        gamma_lead = "γ of each head: scores of a query at position p beyond the trained window n₀ are multiplied by "
        gamma_lead += "(p/n₀)^γ. The exponent of a head that does not influence the loss means nothing."
        sections = [Section("Perplexity and retrieval", lead, blocks), Section("Exponents", gamma_lead, self.maps())]
        measured = f"{self.model} reads {self.to:,} tokens, {self.to / self.trained:g} times its trained window, "
        measured += f"under every schedule of score factors; documents: {join(documents) or 'none'}."
        trust = (
            "perplexity alone rewards forgetting: a model that ignores distant tokens predicts plain text better, and "
            "cannot copy",
            "truncation reads only the last tokens with the original model, 7/8 to all of the trained window",
            "repeated passages are adjacent in their source, so one helps to predict the next even without distant "
            "keys",
            "a schedule counts as a gain where it beats YaRN's factor, in both readings, on both axes and every text, "
            "beyond 95% Student intervals over documents",
        )
        title = f"Score factors for {self.model} beyond its context"
        subtitle = f"{self.trained:,} to {self.to:,} tokens, rope scaling: {self.rope_scaling}"
        verdict = measured, self._finding(), self._advice()
        return View(title, subtitle, verdict, sections, warnings=self.warnings, trust=trust)

    def frontier(self, text: str) -> Figure:
        """Figure of retrieval against perplexity on a text, as differences of each score factor to YaRN's."""
        series = []
        for place, row in enumerate(self.table[self.table["text"] == text].to_dict("records")):
            colour, dash = look(place)
            x, y = ([row[f"{axis}_against_yarn"]] for axis in AXES)
            bar = [row["far_against_yarn_stderr"]]
            series.append(points(label(row["schedule"]), x, y, colour, bar, dash=dash, positive=False))
        axes = Axis("ln perplexity at the end, minus YaRN's"), Axis("nats of far passages, minus YaRN's")
        guides = Guide("left: better prediction", x=0), Guide("below: better retrieval", y=0)
        return Figure(f"Frontier: {self._where(text)}", *axes, series, guides, height=400)

    def maps(self) -> list[Figure]:
        """Maps of the fitted exponents over layers and heads, one for each fit with an exponent per head."""
        maps = {label(name): fit.exponents for name, fit in self.fits.items() if fit.level == "head"}
        return [
            head_map(f"γ of {name}", "γ", [*np.ndindex(of.shape)], of.ravel().tolist()) for name, of in maps.items()
        ]

    def _finding(self) -> str:
        if not self.by_document:
            return "No document was read: nothing is known of either axis."
        where = join([self._where(name) for name in self.by_document])
        if not self.winners:
            return f"No fit beats YaRN's factor significantly on both axes on {where}: no gain is claimed."
        best = self.winners[0]
        text = [*self.by_document][-1]
        plain, far = (self.estimate(text, best, axis, "yarn") for axis in AXES)
        cut, lost = (self.estimate(text, "truncated", axis, best).value for axis in AXES)
        return sentence(
            f"{label(best)} beats YaRN's factor significantly on both axes on {where}; on {self._where(text)} by "
            f"{plain.value:+.4f} ± {plain.stderr:.4f} in ln perplexity and {far.value:+.3f} ± {far.stderr:.3f} nats "
            f"per token of far passages. Truncation differs from it by {cut:+.3f} and {lost:+.3f} on the two axes."
        )

    def _advice(self) -> str:
        advice = "Keep YaRN's factor, or truncate where nothing far away is needed."
        if self.winners:
            file = f"{self.winners[0]}.json"
            advice = f"Apply it, rope scaling included, with limitlens.intervene(model, score_scale='{file}')."
        if self.beaten:
            names = join([label(name) for name in self.beaten])
            advice += f" Do not use {names}: truncation or YaRN's factor has the better mean on both axes."
        return advice

    def _where(self, text: str) -> str:
        return Path(self.texts[text]).name


def label(name: str) -> str:
    """Display name of a score factor, such as "per head (retrieval weight 0.2)"."""
    level, _, weight = name.replace("single", "one exponent").replace("_constant", " with constants").partition("_far_")
    return LABELS.get(name) or level.replace("_", " ") + (f" (retrieval weight {weight})" if weight else "")


def temper(
    model: str | LoadedModel, to: int, text: str = "stdlib-docs", other: str | None = None, *,
    rope_scaling: str = "yarn", retrieval_weight: Sequence[float] = (0.0, 0.2), constant: bool = False,
    fits: Sequence[FitOptions] | None = None, trained: int | None = None, documents: int = 6, steps: int = 24,
    rate: float = 0.05, seed: int = 0, device: str = "auto", progress: Progress = lambda done, total: None,
    keep: Callable[[Temper], object] = lambda made: None,
) -> Temper:  # fmt: skip
    """Fit factors on the attention scores of a decoder for a context of `to` tokens, longer than it was trained for.

    Fitted factors are (p/n₀)^γ at query positions p beyond the trained window n₀. They are compared with YaRN's factor
    and truncation on held-out documents, by the loss on plain text and on passages repeated from beyond the window
    (retrieval). A GPU computes in bfloat16. Ctrl-C keeps the finished fits and documents.

    Parameters
    ----------
    text, other : text to fit on, some documents of which are held out; an optional second text for testing only
    rope_scaling : scaling of the rotary positions: none, linear, ntk or yarn (none under truncation)
    retrieval_weight : weights of retrieval against plain text in the loss; for each, one exponent per head is fitted.
        One exponent for the whole model is always fitted too. `constant` fits constant factors besides exponents.
    fits : options of the fits, in place of `retrieval_weight` and `constant`
    trained : length of the trained window; by default from the model's configuration
    documents, steps, rate : most held-out documents of a text; gradient steps and Adam's learning rate of a fit
    keep : function that is called with the result so far, after each fit and each round of documents

    >>> made = ll.temper(model, 512, text, documents=2, steps=1, retrieval_weight=[0.0])
    >>> list(made.fits)
    ['single', 'per_head']
    """
    if fits is None:
        fits = [FitOptions("model"), *(FitOptions("head", weight, constant) for weight in retrieval_weight)]
    if rope_scaling not in ROPE_SCALINGS:
        raise InputError(f"rope_scaling is {rope_scaling!r}; expected one of {', '.join(ROPE_SCALINGS)}")
    for name in (text, other or text):
        open_corpus(name)
    loaded = harness.open_model(model, device, head=True)
    window = trained or loaded.positions
    if window is None or to <= window:
        known = window or "an unknown number"
        given = f"a context of {to:,} tokens was asked for, {loaded.name} was trained for {known}"
        raise InputError(f"{given}; expected a longer one, since factors act beyond the trained window")
    reader = Reader(loaded, half=loaded.model.device.type == "cuda")
    with rope_scaled(reader.stack, rope_scaling, to / window, window):
        pass  # refuse a model without rotary positions before anything is read
    most, least = FIT_DOCUMENTS + CHECK_DOCUMENTS + documents, 1 + CHECK_DOCUMENTS + MIN_TEST_DOCUMENTS
    ids = harness.read_documents(loaded, text, to, most, least)
    count = min(FIT_DOCUMENTS, len(ids) - CHECK_DOCUMENTS - MIN_TEST_DOCUMENTS)
    texts = {"fitted": text}
    held_out = {"fitted": plant_all(ids[count + CHECK_DOCUMENTS :][:documents], window, seed)}
    if other is not None:
        texts["other"] = other
        others = harness.read_documents(loaded, other, to, documents, MIN_TEST_DOCUMENTS)
        held_out["other"] = plant_all(others, window, seed + 100)
    where = torch.cuda.get_device_name(reader.device) if reader.half else reader.device.type
    about = loaded.name, identity(loaded.model), window, to, rope_scaling, texts, where
    made = Temper(*about, "bfloat16" if reader.half else "float32", fits={}, by_document={})
    forwards = len(fits) * steps * (STEP_FORWARDS + 1 / count)
    forwards += (len(fits) + SCHEDULES) * sum(map(len, held_out.values()))
    check_cost(f"temper of {loaded.name}", *forward_cost(loaded.model, forwards * to, to), yes=True)
    total = len(fits) + max(map(len, held_out.values()))
    course: dict[str, Any] = {"steps": steps, "rate": rate, "seed": seed}
    try:
        for number, options in enumerate(fits):
            course["progress"] = lambda step, done=number: progress(done + step / steps, total)
            with rope_scaled(reader.stack, rope_scaling, to / window, window):
                fitted = fit_exponents(reader, ids[:count], ids[count], window, options, **course)
            made = replace(made, fits={**made.fits, options.name: fitted}, interrupted=fitted.interrupted)
            keep(replace(made, interrupted=True))
            if made.interrupted:
                return made
        for row in range(total - len(fits)):
            for name, planted in held_out.items():
                made = _measured(made, reader, name, planted[row]) if row < len(planted) else made
            keep(replace(made, interrupted=True))
            progress(len(fits) + row + 1, total)
    except KeyboardInterrupt as stop:
        if not (made.fits or made.by_document) or isinstance(stop, StopNow):
            raise
        made = replace(made, interrupted=True)
    return made


def _measured(made: Temper, reader: Reader, text: str, document: Planted) -> Temper:
    """Add to `made` the nats of one held-out document of a text under truncation and all score factors."""
    with reader.acting(None):
        read = [read_axes(reader, document, made.trained, truncated=True)]
    factors = _factors(made, reader)
    variants = map(reader.acting, factors.values())
    with rope_scaled(reader.stack, made.rope_scaling, made.to / made.trained, made.trained):
        read += harness.read_under(variants, lambda: read_axes(reader, document, made.trained))
    before = made.by_document.get(text)
    more = dict(zip(("truncated", *factors), read, strict=True))
    axes = more if before is None else {name: Axes.joined([before[name], more[name]]) for name in more}
    return replace(made, by_document={**made.by_document, text: axes})


def _factors(made: Temper, reader: Reader) -> dict[str, Factor]:
    """Score factors to compare, by name: fixed rules and all fits, each a function of layer and query position."""
    trained, to = made.trained, made.to
    n = np.maximum(np.arange(1, to + 1), trained)
    scales = {
        "constant": np.ones(to), "log": log_scale(n, trained), "yarn": yarn_scale(n, trained),
        "yarn_all": np.full(to, yarn_scale(to, trained)), "entropy": entropy_scale(n, trained, reader.dim),
    }  # fmt: skip

    def by_position(scale: Any) -> Factor:
        table = torch.as_tensor(scale, device=reader.device)
        return lambda layer, position: table[position]

    fitted = {name: made.exponents(name).factor() for name in made.fits}
    return {name: by_position(scale) for name, scale in scales.items()} | fitted
