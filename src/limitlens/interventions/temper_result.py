"""What factors on the scores do to a model beyond its context: both axes, the frontier, the exponents."""

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
from limitlens.interventions.axes import Axes, mean
from limitlens.interventions.temper_fit import Fitted
from limitlens.models.exponents import Exponents
from limitlens.record import to_json
from limitlens.report.view import Block, Figure, Guide, Row, Table, View, head_map, look, points
from limitlens.report.words import join, read_words, sentence, worded_figure, worded_view
from limitlens.results import Result

WORDS = read_words("interventions/words.json")
AXES = ("perplexity", "far", "fact")  # log-perplexity at the end; nats of far repeated passages, of far facts
RULES = ("yarn", "yarn_all")  # both readings of YaRN's factor: with the stretch of each query, or that of the whole
SHOWN = 12  # heads that the table of copying heads names


@dataclass(frozen=True, eq=False, repr=False)
class Temper(Result):
    """Every schedule on the same documents, and the exponents that were fitted."""

    kind, file = "temper", "schedules"
    model: str
    identity: Mapping[str, Any]  # `models.exponents.identity`
    trained: int
    to: int
    stretch: str
    texts: Mapping[str, str]  # "fitted": held-out documents of the text of the fits; "other": a text never fitted
    edges: tuple[int, ...]  # between the parts of a document
    device: str
    precision_of_products: str
    critical: Array  # (layers, heads): exponents of `live.critical`
    fits: Mapping[str, Fitted]
    by_document: Mapping[str, Mapping[str, Axes]]  # of a text and a schedule; empty before a document was read
    seconds: float
    interrupted: bool = False

    def estimate(self, text: str, name: str, axis: str, base: str | None = None) -> Estimate:
        """A schedule's mean over documents on one of `AXES`, or that of its differences to another; less is better."""
        found = self._values(text, name, axis)
        return mean(found, None if base is None else self._values(text, base, axis))

    def beats(self, name: str, base: str, text: str) -> bool:
        """Whether a schedule is better than another on both axes, beyond 95% of Student's law over documents."""
        from scipy.stats import t as student

        found = [self.estimate(text, name, axis, base) for axis in AXES[:2]]
        wide = float(student.ppf(0.975, max(len(self._values(text, name, "far")) - 1, 1)))
        return all(one.value < -wide * one.stderr for one in found)

    @property
    def warnings(self) -> list[str]:
        """What a user must know of it."""
        return [WORDS["cut short"]] if self.interrupted else []

    @cached_property
    def winners(self) -> list[str]:
        """Fits that beat YaRN's factor in both readings, on all texts, and are not beaten; the best copier first."""
        texts = [*self.by_document]
        able = [name for name in self.fits if texts and name not in self.beaten]
        won = [name for name in able if all(self.beats(name, rule, text) for rule in RULES for text in texts)]
        return sorted(won, key=lambda name: self.estimate(texts[-1], name, "far").value)

    @cached_property
    def beaten(self) -> list[str]:
        """Fits to which truncation or YaRN's factor is to be preferred on both axes, by the means of some text."""
        rivals = [(text, base) for text in self.by_document for base in ("truncated", *RULES)]

        def loses(name: str, text: str, base: str) -> bool:
            return all(self.estimate(text, name, axis, base).value >= 0 for axis in AXES[:2])

        return [name for name in self.fits if any(loses(name, *rival) for rival in rivals)]

    @cached_property
    def copying(self) -> pd.DataFrame:
        """Heads by γ(far) − γ(plain) times what the loss feels of γ: the difference of two fits; empty without two."""
        pair, names = self._pair(), ["layer", "head", "plain", "far", "difference", "felt"]
        if pair is None:
            return pd.DataFrame(columns=names)
        low, high, felt = pair[0].exponents, pair[1].exponents, pair[1].felt
        parts = np.stack((*np.indices(low.shape), low, high, high - low, felt)).reshape(len(names), -1)
        table = pd.DataFrame(dict(zip(names, parts, strict=True))).astype({"layer": int, "head": int})
        return table.iloc[np.argsort(-np.abs((high - low) * felt), axis=None)].reset_index(drop=True)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per text and schedule: each axis, and its difference to YaRN's factor on the same documents."""
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
        """Its fields as JSON, and under the name of each axis the means of all schedules; without SciPy and pandas."""
        texts = self.by_document.items()
        return super().document() | {
            axis: {text: {name: self._entry(text, name, axis) for name in found} for text, found in texts}
            for axis in AXES
        }

    def document(self) -> dict[str, Any]:
        """The result as JSON: its numbers, and which fits are a gain and which are not."""
        return self.numbers() | {"winners": self.winners, "beaten": self.beaten}

    def exponents(self, name: str) -> Exponents:
        """A fit, as the file of exponents that `limitlens.intervene(model, score_scale=...)` reads."""
        own, text = self.fits[name], self.texts["fitted"]
        about = self.model, self.identity, self.trained, self.to, self.stretch, text
        return Exponents(*about, own.level, own.far, own.exponents, own.constants)

    def files(self) -> dict[str, Callable[[Path], Any]]:
        """A file of exponents for each fit."""
        return {f"{name}.json": self.exponents(name).write for name in self.fits}

    def view(self) -> View:
        """What it shows."""
        count = join([f"{len(found['yarn'].plain)} of {self._where(text)}" for text, found in self.by_document.items()])
        maps = [self._map(f"γ of {label(name)}", one.exponents) for name, one in self._per_head().items()]
        if (pair := self._pair()) is not None:
            title = f"γ with far weight {pair[1].far:g} less γ with {pair[0].far:g}"
            maps.append(self._map(title, pair[1].exponents - pair[0].exponents))
        rows = self.copying.head(SHOWN).to_numpy().tolist()
        heads = [Table(WORDS["copying"], WORDS["copying columns"], rows)] if rows else []
        both: list[Block] = []
        for text in self.by_document:
            frontier, *others = self.figures(text)
            both += [frontier, self._both(text), Row(others)]
        return worded_view(
            WORDS, both, [*(Row(maps[at : at + 2]) for at in range(0, len(maps), 2)), *heads],
            warnings=self.warnings, of=self, times=self.to / self.trained, documents=count or "none",
            found=self._found(),
            do=WORDS["do"]["won" if self.winners else "none"].format(best="".join(self.winners[:1])),
            leave=WORDS["leave"].format(names=join([label(name) for name in self.beaten])) if self.beaten else "",
        )  # fmt: skip

    def figures(self, text: str | None = None) -> list[Figure]:
        """The frontier of a text, what plain text costs by position and what repeated passages cost by distance."""
        if text is None:
            return super().figures()
        found, looks = self.by_document[text], {name: look(i) for i, name in enumerate(self.by_document[text])}

        def drawn(what: str, x: dict[str, Any], y: dict[str, list[Estimate]], *guides: Guide) -> Figure:
            series = []
            for name, each in y.items():
                (colour, dash), values, errors = looks[name], [one.value for one in each], [one.stderr for one in each]
                more: dict[str, Any] = {"dash": dash, "joined": len(each) > 1, "positive": False}
                series.append(points(label(name), x[name], values, colour, errors, **more))
            return worded_figure(WORDS[what], series, *guides, where=self._where(text))

        ends = {axis: {name: [self.estimate(text, name, axis, "yarn")] for name in found} for axis in AXES[:2]}
        across = {name: [one.value for one in each] for name, each in ends["perplexity"].items()}
        figures = [drawn("frontier", across, ends["far"])]
        places = {"plain": np.convolve(self.edges, [0.5, 0.5], "valid"), "again": found["yarn"].distance.mean(0)}
        shown = [name for name in found if name in (*RULES, "constant", "truncated", *self.fits)]
        for part, x in places.items():
            order = np.argsort(x)
            apart = {name: (getattr(found[name], part) - getattr(found["yarn"], part)).T[order] for name in shown}
            each = {name: [mean(column) for column in columns] for name, columns in apart.items()}
            figures.append(drawn(part, dict.fromkeys(shown, x[order]), each, Guide(WORDS["trained"], x=self.trained)))
        return figures

    def _values(self, text: str, name: str, axis: str) -> Array:
        axes = self.by_document[text][name]
        return axes.last() if axis == "perplexity" else axes.beyond(self.trained, "again" if axis == "far" else "fact")

    def _entry(self, text: str, name: str, axis: str) -> dict[str, Any]:
        own, against = (to_json(self.estimate(text, name, axis, base)) for base in (None, "yarn"))
        if axis != "perplexity":
            return {**own, "against_yarn": against}
        log = {"log": own["value"], "log_stderr": own["stderr"], "log_against_yarn": against}
        return {"value": math.exp(own["value"]), **log, "documents": len(self._values(text, name, axis))}

    def _per_head(self) -> dict[str, Fitted]:
        return {name: one for name, one in self.fits.items() if one.level == "head"}

    def _pair(self) -> tuple[Fitted, Fitted] | None:
        """The fits per head with the least and the most weight of far use, alike in having constants."""
        alike = [one for one in self._per_head().values() if one.constants is None] or [*self._per_head().values()]
        order = sorted(alike, key=lambda one: one.far)
        return (order[0], order[-1]) if order and order[0].far < order[-1].far else None

    def _map(self, title: str, values: Array) -> Figure:
        return head_map(title, "γ", [(i, j) for i, j in np.ndindex(values.shape)], values.ravel().tolist())

    def _both(self, text: str) -> Block:
        """Both axes of all schedules side by side, the best copier first."""
        rows, order = [], sorted(self.by_document[text], key=lambda name: self.estimate(text, name, "far").value)
        for name in order:
            own, against = ([self.estimate(text, name, axis, base) for axis in AXES] for base in (None, "yarn"))
            rows.append((label(name), math.exp(own[0].value), against[0], own[1], against[1], own[2], against[2]))
        marked = frozenset(index for index, name in enumerate(order) if name in self.winners)
        return Table(f"{WORDS['both']}: {self._where(text)}", WORDS["columns"], rows, marked)

    def _found(self) -> str:
        if not self.by_document:
            return WORDS["nothing read"]  # type: ignore[no-any-return]
        text = [*self.by_document][-1]
        where = join([self._where(name) for name in self.by_document])
        if not self.winners:
            return WORDS["none"].format(where=where)  # type: ignore[no-any-return]
        best = self.winners[0]
        plain, far = (self.estimate(text, best, axis, "yarn") for axis in AXES[:2])
        cut, lost = (self.estimate(text, "truncated", axis, best).value for axis in AXES[:2])
        told = WORDS["won"].format(best=label(best), where=where, text=self._where(text), plain=plain, far=far)
        over = WORDS["truncation"]["better" if cut < 0 else "worse"].format(cut=abs(cut), lost=lost)
        return f"{sentence(told)} {over}"

    def _where(self, text: str) -> str:
        return Path(self.texts[text]).name

    def __repr__(self) -> str:
        return f"<Temper of {self.model}: {self.trained:,} to {self.to:,} tokens, {len(self.fits)} fits>"


def label(name: str) -> str:
    """A schedule in words."""
    known: str | None = WORDS["schedules"].get(name)
    who, _, weight = name.replace("single", "one exponent").replace("_constant", " with constants").partition("_far_")
    return known or who.replace("_", " ") + (f" (far {weight})" if weight else "")
