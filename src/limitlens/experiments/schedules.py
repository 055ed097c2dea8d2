"""`schedules`: compare four ways to let the inverse temperature β grow with the context length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from limitlens.arrays import pd
from limitlens.experiments.scaling import check_one_scale, sphere_law
from limitlens.report.text import falling, short
from limitlens.report.view import Axis, Block, Colour, Figure, Row, Section, Table, View, line
from limitlens.results import Result
from limitlens.sampling.cells import parse_grid
from limitlens.theory import critical_beta
from limitlens.theory.prediction import Status
from limitlens.theory.schedules import compare_schedules

COLOURS: Mapping[str, Colour] = {"constant": "grey", "log": "orange", "yarn": "green", "critical": "blue"}
DRAWN = {"beta": "inverse temperature β", "sharing_keys": "keys that share the mass", "entropy": "entropy (nats)"}


@dataclass(frozen=True, eq=False, repr=False)
class Schedules(Result):
    """Result of `schedules`: attention predicted under four schedules of the inverse temperature β, for growing n."""

    kind, file = "schedules", "schedules"
    inputs: Mapping[str, Any]  # law of the keys and its local power law near the query (`exponent`, `log_c`)
    status: Status
    predicted: Mapping[str, Mapping[str, tuple[Any, ...]]]  # fields of `ScheduleStep` by schedule, one value per n

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per schedule and context length n: β, θ, keys that share the weight, entropy, regime."""
        parts = [pd.DataFrame({"schedule": name, **columns}) for name, columns in self.predicted.items()]
        return pd.concat(parts, ignore_index=True)

    def view(self) -> View:
        """HTML page: figures and a table of the four schedules over the context length."""
        sizes = self.predicted["constant"]["n"]
        span = f"from {sizes[0]:,.0f} to {sizes[-1]:,.0f} keys"
        figures = []
        for name, label in DRAWN.items():
            axes = Axis("context length n", log=True), Axis(label, log=name != "entropy")
            lines = [line(schedule, sizes, row[name], COLOURS[schedule]) for schedule, row in self.predicted.items()]
            figures.append(Figure(label, *axes, lines, height=280))
        columns = ["schedule", "n", "β", "effective number of keys θ", "keys that share the mass", "entropy", "regime"]
        blocks: list[Block] = [Row(figures), Table("schedules", columns, self.table.to_numpy().tolist())]
        exponent = short(self.inputs["exponent"])
        sharing = {name: row["sharing_keys"] for name, row in self.predicted.items()}
        last = {name: short(keys[-1]) for name, keys in sharing.items()}
        log_is_weak = sharing["log"][-1] > 1.5 * sharing["log"][0]
        verdict = (
            f"Four schedules of the inverse temperature were compared {span}, for keys of local exponent {exponent}.",
            f"A head starts with {short(sharing['constant'][0])} keys sharing its mass. It ends with "
            f"{last['constant']} at constant β, {last['log']} with β proportional to ln n, {last['yarn']} with "
            f"YaRN and {last['critical']} on the critical schedule.",
            f"To keep the head's selectivity, let β grow like {falling(-2 / self.inputs['exponent'])}; β "
            f"proportional to ln n {'is too weak here' if log_is_weak else 'is nearly enough'}.",
        )
        subtitle = f"local exponent {exponent} · {span} · predictions are {self.status.value}"
        sections = [Section("Schedules compared", "Each quantity against the context length.", blocks)]
        return View("Temperature schedules for a growing context", subtitle, verdict, sections)


def schedules(
    sizes: str | Sequence[float] = "4096:1048576:5", *, theta: float | None = None, beta: float | None = None,
    dim: int = 5, law: str = "uniform", concentration: float = 5.0, cosine: float = 1.0, power: float = 1.0,
) -> Schedules:  # fmt: skip
    """Compare four schedules of the inverse temperature β as the context grows, by formulas and without sampling.

    They are constant β, β proportional to ln n, YaRN, and the critical schedule, which keeps the effective number of
    keys θ constant. All start at the first length in `sizes` ("lo:hi:k" or a sequence) from `beta`, or from the β at
    which θ is `theta` (1 by default). Keys follow a `law` on the sphere S^{dim−1}, with the options of `ll.scaling`.

    >>> result = ll.schedules([1000, 10_000], beta=100.0)
    >>> {name: round(steps['sharing_keys'][-1], 2) for name, steps in result.predicted.items()}
    {'constant': 6.73, 'log': 4.29, 'yarn': 3.6, 'critical': 1.77}
    """
    check_one_scale(theta, beta)
    gap_law = sphere_law(law, dim, concentration=concentration, cosine=cosine, power=power)
    grid = parse_grid(sizes, "the range of context lengths", "1024:65536:7")
    if beta is None:
        beta = critical_beta(grid[0], gap_law, 1.0 if theta is None else theta)
    inputs: dict[str, Any] = {"exponent": 2 * gap_law.a, "log_c": gap_law.log_c, "law": law, "dim": dim}
    columns = {}
    for name, steps in compare_schedules(grid, beta, gap_law).items():
        columns[name] = {key: tuple(vars(step)[key] for step in steps) for key in vars(steps[0])}
    return Schedules(inputs, Status.VERIFIED, columns)
