"""`schedules`: how the inverse temperature β should grow with the context length, four schedules compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from limitlens.arrays import pd
from limitlens.experiments.real_keys import median_exponent, read_vectors
from limitlens.experiments.scaling import check_one_scale, sphere_law
from limitlens.report.text import falling, short
from limitlens.report.view import Axis, Colour, Figure, Row, Section, Table, View, line
from limitlens.results import Result
from limitlens.sampling.cells import parse_grid
from limitlens.theory import GapLaw, critical_beta
from limitlens.theory.prediction import Status
from limitlens.theory.scaling.laws import Law
from limitlens.theory.schedules import ScheduleStep, compare_schedules

COLOURS: Mapping[str, Colour] = {"constant": "grey", "log": "orange", "yarn": "green", "critical": "blue"}
LABELS = {
    "beta": "inverse temperature β",
    "theta": "effective number of keys θ",
    "sharing_keys": "keys that share the mass",
    "entropy": "entropy (nats)",
}
DRAWN = ("beta", "sharing_keys", "entropy")


@dataclass(frozen=True, eq=False, repr=False)
class Schedules(Result):
    """Four schedules of β over the same context lengths."""

    kind, file = "schedules", "schedules"
    inputs: Mapping[str, Any]  # local law of the keys near the query (`exponent`, `log_c`) and its name, if it has one
    status: Status  # verified for a known law, heuristic where only the local power law is known
    predicted: Mapping[str, Mapping[str, tuple[Any, ...]]]  # fields of `ScheduleStep` by schedule, one value per n

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
        """Figures and tables of the four schedules over the context length."""
        sizes = self.predicted["constant"]["n"]
        figures = [
            Figure(
                LABELS[name],
                Axis("context length n", log=True),
                Axis(LABELS[name], log=name != "entropy"),
                [line(schedule, sizes, row[name], COLOURS[schedule]) for schedule, row in self.predicted.items()],
                height=280,
            )
            for name in DRAWN
        ]
        tables = [
            Table(
                label,
                ["n", *self.predicted],
                list(zip(sizes, *(row[name] for row in self.predicted.values()), strict=True)),
            )
            for name, label in LABELS.items()
        ]
        exponent = short(self.inputs["exponent"])
        sharing = {name: row["sharing_keys"] for name, row in self.predicted.items()}
        last = {name: short(keys[-1]) for name, keys in sharing.items()}
        log_is_weak = sharing["log"][-1] > 1.5 * sharing["log"][0]
        return View(
            "Temperature schedules for a growing context",
            f"local exponent {exponent} · {self._span} · predictions are {self.status.value}",
            (
                f"Four schedules of the inverse temperature were compared {self._span}, for keys of local exponent "
                f"{exponent}.",
                f"A head starts with {short(sharing['constant'][0])} keys sharing its mass. It ends with "
                f"{last['constant']} at constant β, {last['log']} with β proportional to ln n, {last['yarn']} with "
                f"YaRN and {last['critical']} on the critical schedule.",
                f"To keep the head's selectivity, let β grow like {falling(-2 / self.inputs['exponent'])}; β "
                f"proportional to ln n {'is too weak here' if log_is_weak else 'is nearly enough'}.",
            ),
            [
                Section("Schedules compared", "Each quantity against the context length.", [Row(figures)]),
                Section("Values", "One table per quantity, one column per schedule.", tables),
            ],
        )

    def __repr__(self) -> str:
        ends = ", ".join(f"{name} {row['sharing_keys'][-1]:.3g}" for name, row in self.predicted.items())
        return f"<Schedules: {self._span}; keys sharing the mass at the end: {ends}>"


def schedules(
    sizes: str | Sequence[float] = "4096:1048576:5",
    *,
    theta: float | None = None,
    beta: float | None = None,
    dim: int = 5,
    law: str = "uniform",
    concentration: float = 5.0,
    cosine: float = 1.0,
    sub: int = 2,
    power: float = 1.0,
    keys: ArrayLike | str | Path | None = None,
    queries: ArrayLike | str | Path | None = None,
    neighbours: int | None = None,
    normalise: bool = False,
    yes: bool = False,
) -> Schedules:
    """Compare four schedules of the inverse temperature β as the context grows.

    The schedules are constant β, β proportional to ln n, YaRN, and the critical schedule, which keeps the effective
    number of keys θ. All start from `beta`, or from the β of `theta` (1 by default), at the first of the context
    lengths `sizes`, "lo:hi:k" or a sequence. The keys follow a `law` on S^{dim−1} or are given as `keys` and `queries`;
    these options are those of `ll.scaling`. No tokens are sampled.

    >>> result = ll.schedules([1000, 10_000], beta=100.0)
    >>> {name: round(steps['sharing_keys'][-1], 2) for name, steps in result.predicted.items()}
    {'constant': 6.73, 'log': 4.29, 'yarn': 3.6, 'critical': 1.77}
    """
    check_one_scale(theta, beta)
    if keys is not None or queries is not None:
        query_rows, key_rows = read_vectors(queries, keys, yes)
        local = median_exponent(query_rows, key_rows, neighbours, normalise).local
        return follow_schedules(sizes, local, theta=theta, beta=beta)
    gap_law = sphere_law(law, dim, concentration=concentration, cosine=cosine, sub=sub, power=power)
    inputs: dict[str, Any] = {"law": law, "dim": dim} | ({"sub": sub} if law == "subsphere" else {})
    return follow_schedules(sizes, gap_law, theta=theta, beta=beta, inputs=inputs)


def follow_schedules(
    sizes: str | Sequence[float],
    law: Law,
    *,
    theta: float | None = None,
    beta: float | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Schedules:
    """Every schedule over the context lengths for a law of gaps, from β or θ at the first; `inputs` names the law."""
    grid = parse_grid(sizes, "the range of context lengths", "1024:65536:7")
    if beta is None:
        beta = critical_beta(grid[0], law, 1.0 if theta is None else theta)
    columns = [column.name for column in fields(ScheduleStep)]
    return Schedules(
        inputs={"exponent": 2 * law.a, "log_c": law.log_c, **(inputs or {})},
        status=Status.VERIFIED if isinstance(law, GapLaw) else Status.HEURISTIC,
        predicted={
            schedule: {name: tuple(getattr(step, name) for step in steps) for name in columns}
            for schedule, steps in compare_schedules(grid, beta, law).items()
        },
    )
