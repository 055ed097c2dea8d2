"""Temperature schedules for a growing context, as a result: `limitlens.theory.schedules` compared and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from limitlens.arrays import pd
from limitlens.report.view import Axis, Colour, Figure, Row, Table, View, line
from limitlens.report.words import falling, read_words, short, worded_view
from limitlens.results import Result
from limitlens.sampling.cells import parse_grid
from limitlens.theory import GapLaw, critical_beta
from limitlens.theory.prediction import Status
from limitlens.theory.scaling.laws import Law
from limitlens.theory.schedules import ScheduleStep, compare_schedules

COLOURS: Mapping[str, Colour] = {"constant": "grey", "log": "orange", "yarn": "green", "critical": "blue"}
WORDS = read_words("experiments/scaling_words.json")["schedules"]
SHOWN: Mapping[str, str] = WORDS["shown"]
DRAWN = ("beta", "sharing_keys", "entropy")


@dataclass(frozen=True, eq=False, repr=False)
class Schedules(Result):
    """Schedules of β side by side as the context grows, along the same context lengths."""

    kind, file = "schedules", "scaling"
    inputs: Mapping[str, Any]  # how keys lie near the query: `exponent`, `log_c`, and of which law, if any
    status: Status  # verified for a known law, heuristic where only the local power law is known
    predicted: Mapping[str, Mapping[str, tuple[Any, ...]]]  # the fields of `ScheduleStep` by schedule, over n

    @property
    def table(self) -> pd.DataFrame:
        """One row per schedule and context length."""
        parts = [pd.DataFrame({"schedule": name, **columns}) for name, columns in self.predicted.items()]
        return pd.concat(parts, ignore_index=True)

    @property
    def _span(self) -> str:
        sizes = self.predicted["constant"]["n"]
        return f"from {sizes[0]:,.0f} to {sizes[-1]:,.0f} keys"

    def view(self) -> View:
        """The schedules along the context length."""
        exponent, sizes, schedules = self.inputs["exponent"], self.predicted["constant"]["n"], self.predicted.values()
        sharing = {name: row["sharing_keys"] for name, row in self.predicted.items()}
        ends = {name: short(keys[-1]) for name, keys in sharing.items()}
        weak = "is too weak here" if sharing["log"][-1] > 1.5 * sharing["log"][0] else "nearly does so too"
        figures = [
            Figure(
                SHOWN[name],
                Axis("context length n", log=True),
                Axis(SHOWN[name], log=name != "entropy"),
                [line(schedule, sizes, row[name], COLOURS[schedule]) for schedule, row in self.predicted.items()],
                height=280,
            )
            for name in DRAWN
        ]
        tables = [
            Table(label, ["n", *sharing], list(zip(sizes, *(row[name] for row in schedules), strict=True)))
            for name, label in SHOWN.items()
        ]
        known = {"span": self._span, "exponent": short(exponent), "growth": falling(-2 / exponent), "weak": weak}
        known |= {"start": short(sharing["constant"][0]), **ends}
        return worded_view(WORDS, [Row(figures)], tables, of=self, **known)

    def __repr__(self) -> str:
        ends = ", ".join(f"{name} {row['sharing_keys'][-1]:.3g}" for name, row in self.predicted.items())
        return f"<Schedules: {self._span}, of which at the end share the mass: {ends}>"


def follow_schedules(
    sizes: str | Sequence[float],
    law: Law,
    *,
    theta: float | None = None,
    beta: float | None = None,
    about: Mapping[str, Any] | None = None,
) -> Schedules:
    """Every schedule as the context grows, from β at its first length, or from the β of θ; `about` names the law."""
    grid = parse_grid(sizes, "the range of context lengths", "1024:65536:7")
    if beta is None:
        beta = critical_beta(grid[0], law, 1.0 if theta is None else theta)
    names, steps = [column.name for column in fields(ScheduleStep)], compare_schedules(grid, beta, law)
    return Schedules(
        inputs={"exponent": 2 * law.a, "log_c": law.log_c, **(about or {})},
        status=Status.VERIFIED if isinstance(law, GapLaw) else Status.HEURISTIC,
        predicted={
            schedule: {name: tuple(getattr(step, name) for step in row) for name in names}
            for schedule, row in steps.items()
        },
    )
