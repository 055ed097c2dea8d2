"""Result of `limitlens.temper`: every schedule of score factors on both axes, the frontier, the exponents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from limitlens.arrays import pd
from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.interventions.axes import Axes
from limitlens.interventions.temper_fit import FittedExponents
from limitlens.models.exponents import Exponents
from limitlens.record import to_json
from limitlens.report.text import join, sentence
from limitlens.report.view import Axis, Block, Figure, Guide, Row, Section, Table, View, head_map, look, points
from limitlens.results import Result
from limitlens.statistics.documents import paired_mean

AXES = ("perplexity", "far", "fact")  # log-perplexity at the end; nats of far repeated passages; of far facts
YARN = ("yarn", "yarn_all")  # both readings of YaRN's factor: with the position of each query, or the whole context
LABELS = {
    "truncated": "truncation", "constant": "no factor", "log": "log n", "yarn": "YaRN's factor",
    "yarn_all": "YaRN's factor, all queries", "entropy": "entropy invariance", "critical": "gap counting",
}  # fmt: skip
COLUMNS = ("schedule", "perplexity", "ln, minus YaRN's", "far, nats", "far, minus YaRN's", "fact, nats",
           "fact, minus YaRN's")  # fmt: skip
HEAD_COLUMNS = ("layer", "head", "γ, least retrieval weight", "γ, most retrieval weight", "difference", "derivative")
HEADS_SHOWN = 12  # in the table of heads that retrieval changes most
AXES_LEAD = (
    "Perplexity of plain text at the end of the context; nats per token of passages repeated from further away than "
    "the trained window (far), and of answers about facts planted as far away; lower is better. Means over documents ± "
    "standard errors; differences to YaRN's factor are paired by document."
)
EXPONENTS_LEAD = (
    "γ of each head: scores of a query at position p beyond the trained window n₀ are multiplied by (p/n₀)^γ. The "
    "exponent of a head that does not influence the loss means nothing."
)
TRUST = (
    "perplexity alone rewards forgetting: a model that ignores distant tokens predicts plain text better, and cannot "
    "copy",
    "truncation reads only the last tokens with the original model, 7/8 to all of the trained window",
    "repeated passages are adjacent in their source, so one helps to predict the next even without distant keys",
    "a schedule counts as a gain where it beats YaRN's factor, in both readings, on both axes and every text, beyond "
    "95% Student intervals over documents",
)


@dataclass(frozen=True, eq=False, repr=False)
class Temper(Result):
    """Every schedule of score factors on the same held-out documents, and the fitted exponents."""

    kind, file = "temper", "schedules"
    model: str
    identity: Mapping[str, Any]  # `models.exponents.identity`
    trained: int
    to: int
    rope_scaling: str
    texts: Mapping[str, str]  # "fitted": held-out documents of the text of the fits; "other": another text
    edges: tuple[int, ...]  # ends of the parts of a document
    device: str
    precision_of_products: str
    critical: Array  # (layers, heads): exponents of `interventions.critical`
    fits: Mapping[str, FittedExponents]
    by_document: Mapping[str, Mapping[str, Axes]]  # by text and schedule; empty before a document was read
    seconds: float
    interrupted: bool = False

    def estimate(self, text: str, name: str, axis: str, base: str | None = None) -> Estimate:
        """Mean of a schedule on one of `AXES`, or of its paired differences to another; lower is better."""
        baseline = None if base is None else self._values(text, base, axis)
        return paired_mean(self._values(text, name, axis), baseline)

    def beats(self, name: str, base: str, text: str) -> bool:
        """Whether a schedule is better than another on both axes, beyond 95% Student intervals over documents."""
        from scipy.stats import t as student

        differences = [self.estimate(text, name, axis, base) for axis in AXES[:2]]
        wide = float(student.ppf(0.975, max(len(self._values(text, name, "far")) - 1, 1)))
        return all(one.value < -wide * one.stderr for one in differences)

    @property
    def warnings(self) -> list[str]:
        """Whether the run was interrupted."""
        return ["the run was interrupted: it holds the finished fits and documents"] if self.interrupted else []

    @cached_property
    def winners(self) -> list[str]:
        """Fits that beat YaRN's factor in both readings on all texts and are not beaten; best retrieval first."""
        texts = [*self.by_document]
        unbeaten = [name for name in self.fits if texts and name not in self.beaten]
        won = [name for name in unbeaten if all(self.beats(name, rule, text) for rule in YARN for text in texts)]
        return sorted(won, key=lambda name: self.estimate(texts[-1], name, "far").value)

    @cached_property
    def beaten(self) -> list[str]:
        """Fits that truncation or YaRN's factor beats on both axes, by the means on some text."""
        rivals = [(text, base) for text in self.by_document for base in ("truncated", *YARN)]

        def loses(name: str, text: str, base: str) -> bool:
            return all(self.estimate(text, name, axis, base).value >= 0 for axis in AXES[:2])

        return [name for name in self.fits if any(loses(name, *rival) for rival in rivals)]

    @cached_property
    def copying(self) -> pd.DataFrame:
        """Heads by change of γ with the retrieval weight, times the derivative of the loss; empty without two fits."""
        pair = self._pair()
        names = ["layer", "head", "plain", "far", "difference", "felt"]
        if pair is None:
            return pd.DataFrame(columns=names)
        low, high, felt = pair[0].exponents, pair[1].exponents, pair[1].felt
        parts = np.stack((*np.indices(low.shape), low, high, high - low, felt)).reshape(len(names), -1)
        table = pd.DataFrame(dict(zip(names, parts, strict=True))).astype({"layer": int, "head": int})
        return table.iloc[np.argsort(-np.abs((high - low) * felt), axis=None)].reset_index(drop=True)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per text and schedule: each axis, and its paired difference to YaRN's factor."""
        rows = []
        for text, found in self.by_document.items():
            for name in found:
                row: dict[str, Any] = {"text": self.texts[text], "schedule": name, "documents": len(found[name].plain)}
                for axis in AXES:
                    label = "log_perplexity" if axis == "perplexity" else axis
                    for end, base in (("", None), ("_against_yarn", "yarn")):
                        one = self.estimate(text, name, axis, base)
                        row |= {f"{label}{end}": one.value, f"{label}{end}_stderr": one.stderr}
                rows.append(row)
        return pd.DataFrame(rows)

    def numbers(self) -> dict[str, Any]:
        """Its fields as JSON, and for each axis the means of all schedules; needs neither SciPy nor pandas."""
        texts = self.by_document.items()
        return super().document() | {
            axis: {text: {name: self._entry(text, name, axis) for name in found} for text, found in texts}
            for axis in AXES
        }

    def document(self) -> dict[str, Any]:
        """The result as JSON: its numbers, the fits that are a gain, and those that are beaten."""
        return self.numbers() | {"winners": self.winners, "beaten": self.beaten}

    def exponents(self, name: str) -> Exponents:
        """A fit as the exponents file that `limitlens.intervene` reads."""
        fit = self.fits[name]
        about = self.model, self.identity, self.trained, self.to, self.rope_scaling, self.texts["fitted"]
        return Exponents(*about, fit.level, fit.retrieval_weight, fit.exponents, fit.constants)

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """One exponents file for each fit."""
        return {f"{name}.json": self.exponents(name).write for name in self.fits}

    def view(self) -> View:
        """Both axes of every schedule for each text, and the maps of the exponents."""
        count = join([f"{len(found['yarn'].plain)} of {self._where(text)}" for text, found in self.by_document.items()])
        maps = [self._map(f"γ of {label(name)}", one.exponents) for name, one in self._per_head().items()]
        if (pair := self._pair()) is not None:
            low, high = pair
            title = f"γ with retrieval weight {high.retrieval_weight:g} minus γ with {low.retrieval_weight:g}"
            maps.append(self._map(title, high.exponents - low.exponents))
        rows = self.copying.head(HEADS_SHOWN).to_numpy().tolist()
        heads = [Table("Heads whose exponent the retrieval weight changes most", HEAD_COLUMNS, rows)] if rows else []
        both: list[Block] = []
        for text in self.by_document:
            frontier, *others = self.figures(text)
            both += [frontier, self._both(text), Row(others)]
        read = (
            f"{self.model} reads {self.to:,} tokens, {self.to / self.trained:g} times its trained window, under every "
            f"schedule of score factors; documents: {count or 'none'}."
        )
        sections = [
            Section("Perplexity and retrieval", AXES_LEAD, both),
            Section("Exponents", EXPONENTS_LEAD, [*(Row(maps[at : at + 2]) for at in range(0, len(maps), 2)), *heads]),
        ]
        subtitle = f"{self.trained:,} to {self.to:,} tokens, rope scaling: {self.rope_scaling}"
        verdict = (read, self._result(), self._advice())
        title = f"Score factors for {self.model} beyond its context"
        return View(title, subtitle, verdict, sections, warnings=self.warnings, trust=TRUST)

    def figures(self, text: str | None = None) -> list[Figure]:
        """For a text: the frontier, cost of plain text by position, cost of repeated passages by distance."""
        if text is None:
            return super().figures()
        axes = self.by_document[text]
        looks = {name: look(i) for i, name in enumerate(axes)}

        def drawn(title: str, labels: tuple[str, str], x: Any, y: dict[str, list[Estimate]], *guides: Guide) -> Figure:
            series = []
            for name, each in y.items():
                colour, dash = looks[name]
                values, errors = [one.value for one in each], [one.stderr for one in each]
                more: dict[str, Any] = {"dash": dash, "joined": len(each) > 1, "positive": False}
                series.append(points(label(name), x[name], values, colour, errors, **more))
            named = f"{title}: {self._where(text)}"
            return Figure(named, Axis(labels[0]), Axis(labels[1]), series, guides, height=400)

        ends = {axis: {name: [self.estimate(text, name, axis, "yarn")] for name in axes} for axis in AXES[:2]}
        across = {name: [one.value for one in each] for name, each in ends["perplexity"].items()}
        labels = "ln perplexity at the end, minus YaRN's", "nats of far passages, minus YaRN's"
        better = Guide("left: better prediction", x=0), Guide("below: better retrieval", y=0)
        figures = [drawn("Frontier", labels, across, ends["far"], *better)]
        shown = [name for name in axes if name in (*YARN, "constant", "truncated", *self.fits)]
        middles = np.convolve(self.edges, [0.5, 0.5], "valid")
        for part, title, x_label, x in (
            ("plain", "Plain text by position", "position, middle of a part", middles),
            ("again", "Repeated passages by distance", "tokens to the first time", axes["yarn"].distance.mean(0)),
        ):
            order = np.argsort(x)
            apart = {name: (getattr(axes[name], part) - getattr(axes["yarn"], part)).T[order] for name in shown}
            each = {name: [paired_mean(column) for column in columns] for name, columns in apart.items()}
            labels = x_label, "nats per token, minus YaRN's"
            places = dict.fromkeys(shown, x[order])
            figures.append(drawn(title, labels, places, each, Guide("trained window", x=self.trained)))
        return figures

    def _values(self, text: str, name: str, axis: str) -> Array:
        axes = self.by_document[text][name]
        return axes.last() if axis == "perplexity" else axes.beyond(self.trained, "again" if axis == "far" else "fact")

    def _entry(self, text: str, name: str, axis: str) -> dict[str, Any]:
        own, against = (
            to_json({"value": one.value, "stderr": one.stderr})
            for one in (self.estimate(text, name, axis, base) for base in (None, "yarn"))
        )
        if axis != "perplexity":
            return {**own, "against_yarn": against}
        log = {"log": own["value"], "log_stderr": own["stderr"], "log_against_yarn": against}
        return {"value": math.exp(own["value"]), **log, "documents": len(self._values(text, name, axis))}

    def _per_head(self) -> dict[str, FittedExponents]:
        return {name: one for name, one in self.fits.items() if one.level == "head"}

    def _pair(self) -> tuple[FittedExponents, FittedExponents] | None:
        """The fits per head with the least and the most retrieval weight, without constants where there are such."""
        alike = [one for one in self._per_head().values() if one.constants is None] or [*self._per_head().values()]
        order = sorted(alike, key=lambda one: one.retrieval_weight)
        return (order[0], order[-1]) if order and order[0].retrieval_weight < order[-1].retrieval_weight else None

    def _map(self, title: str, values: Array) -> Figure:
        return head_map(title, "γ", [(i, j) for i, j in np.ndindex(values.shape)], values.ravel().tolist())

    def _both(self, text: str) -> Block:
        """Both axes of all schedules in one table, best retrieval first."""
        rows = []
        order = sorted(self.by_document[text], key=lambda name: self.estimate(text, name, "far").value)
        for name in order:
            own, against = ([self.estimate(text, name, axis, base) for axis in AXES] for base in (None, "yarn"))
            rows.append((label(name), math.exp(own[0].value), against[0], own[1], against[1], own[2], against[2]))
        marked = frozenset(index for index, name in enumerate(order) if name in self.winners)
        return Table(f"All schedules on both axes: {self._where(text)}", COLUMNS, rows, marked)

    def _result(self) -> str:
        """The finding, in one or two sentences."""
        if not self.by_document:
            return "No document was read: nothing is known of either axis."
        where = join([self._where(name) for name in self.by_document])
        if not self.winners:
            return f"No fit beats YaRN's factor significantly on both axes on {where}: no gain is claimed."
        best = self.winners[0]
        text = [*self.by_document][-1]
        plain, far = (self.estimate(text, best, axis, "yarn") for axis in AXES[:2])
        cut, lost = (self.estimate(text, "truncated", axis, best).value for axis in AXES[:2])
        gain = (
            f"{label(best)} beats YaRN's factor significantly on both axes on {where}; on {self._where(text)} by "
            f"{plain.value:+.4f} ± {plain.stderr:.4f} in ln perplexity and {far.value:+.3f} ± {far.stderr:.3f} nats "
            "per token of far passages."
        )
        comparison = "still lower" if cut < 0 else "higher"
        return (
            f"{sentence(gain)} Compared with it, truncation has a {comparison} ln perplexity (by {abs(cut):.3f}) and "
            f"{lost:+.3f} nats per token of far passages."
        )

    def _advice(self) -> str:
        """What to do with the fits."""
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

    def __repr__(self) -> str:
        return f"<Temper of {self.model}: {self.trained:,} to {self.to:,} tokens, {len(self.fits)} fits>"


def label(name: str) -> str:
    """Name of a schedule for people."""
    level, _, weight = name.replace("single", "one exponent").replace("_constant", " with constants").partition("_far_")
    return LABELS.get(name) or level.replace("_", " ") + (f" (retrieval weight {weight})" if weight else "")
