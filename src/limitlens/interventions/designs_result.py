"""Result of `limitlens.designs`: error, floor, fluctuation and rate of every design, and the best one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from limitlens.arrays import pd
from limitlens.attention.policies import get_policy
from limitlens.attention.policies.mixing import MIXINGS
from limitlens.errors import Array
from limitlens.estimate import Estimate
from limitlens.record import to_json
from limitlens.report.text import short
from limitlens.report.view import Axis, Block, Cell, Figure, Section, Series, Table, View, line, look, points
from limitlens.results import Result
from limitlens.statistics.documents import jackknife

CHOSEN = ("random", "recent", "streaming", "bigbird", "strided", "dilated", "block", "knorm")
DESIGNS = {name: get_policy(name).label for name in CHOSEN} | {name: words for name, (words, _) in MIXINGS.items()}
LEVEL = 0.05  # of the tests whether a design is best
WORST_DRAWN = 2.0  # a design whose error is above this at every number of keys is left out of the figure
BEST_COLUMNS = ("keys", "best over all heads", "error", "significant", "best in heads (significantly)")
NEGLIGIBLE = 1e-6  # relative error below which a design equals full attention


@dataclass(frozen=True, eq=False, repr=False)
class Designs(Result):
    """Sparse designs in every head; `limitlens.interventions.designs` defines error, floor and fluctuation.

    With P heads, S designs, K numbers of keys and N documents; all arrays are mean squares over the queries.
    """

    kind, file, held = "designs", "designs", ("squares", "apart", "floors", "outputs", "limits")
    model: str
    corpus: str
    context: int  # tokens of a document
    documents: int
    queries: int  # positions of a document whose queries were used
    keys: tuple[int, ...]
    designs: tuple[str, ...]
    places: tuple[tuple[int, int], ...]  # layer and head
    squares: Array  # (P, S, K, N): errors in each document
    apart: Array  # (P, S, K, N): fluctuation of each document
    floors: Array  # (P, S, K, 1 + N): squared distance of the limits, over all documents and without each of them
    outputs: Array  # (P, N): |output of full attention|² in each document
    limits: Array  # (P, 1 + N): |limit of full attention|², in the order of floors
    warnings: tuple[str, ...] = ()

    @cached_property
    def relative(self) -> dict[str, Array]:
        """Squares relative to the output, (P, S, K, 1 + N): over all documents, then without each of them."""

        def left_out(rows: Array) -> Array:
            total = rows.sum(-1, keepdims=True)
            return np.concatenate((total, total - rows), -1)

        own, law = left_out(self.outputs)[:, None, None], self.limits[:, None, None]
        found = {"error": left_out(self.squares) / own, "floor": self.floors / law}
        return found | {"fluctuation": left_out(self.apart) / left_out(np.ones(self.documents)) / law}

    def numbers(self, squares: dict[str, Array]) -> dict[str, Array]:
        """Errors, floors, fluctuations and their rates with standard errors, from relative squares."""
        found: dict[str, Array] = {}
        for name in ("error", "fluctuation"):
            roots = np.sqrt(squares[name].clip(0))
            found |= {name: roots[..., 0], f"{name}_stderr": _stderr(roots)}
        whole = squares["floor"][..., 0]
        square = whole + (self.documents - 1) * (whole - squares["floor"][..., 1:].mean(-1))  # bias removed
        spread = _stderr(squares["floor"])
        found |= {"floor": _root(square), "floor_stderr": (_root(square + spread) - _root(square - spread)) / 2}
        across = np.log(self.keys) - np.mean(np.log(self.keys))
        weights = across / (across @ across) if len(across) > 2 else across * np.nan
        with np.errstate(divide="ignore", invalid="ignore"):
            slopes = -np.einsum("...kn,k->...n", np.log(squares["fluctuation"]) / 2, weights)[..., None, :]
        found |= {"rate": slopes[..., 0], "rate_stderr": _stderr(slopes)}
        return {name: np.broadcast_to(value, square.shape) for name, value in found.items()}

    @cached_property
    def overall(self) -> dict[str, Array]:
        """The numbers over all heads, their relative squares averaged: (S, K)."""
        return self.numbers({name: rows.mean(0) for name, rows in self.relative.items()})

    def best(self, squares: Array) -> tuple[Any, Any]:
        """The design of least error at every k, and whether it is significantly better than all others: (..., K) twice.

        Errors (..., S, K, 1 + N) are paired by document; the level of 5% is divided by the number of other designs.
        """
        roots = np.sqrt(squares.clip(0))
        first = roots[..., 0].argmin(-2)
        ahead = roots - np.take_along_axis(roots, first[..., None, :, None], -3)
        border = special.stdtrit(self.documents - 1, 1 - LEVEL / 2 / (len(self.designs) - 1)) * _stderr(ahead)
        beaten = ahead[..., 0] > border
        np.put_along_axis(beaten, first[..., None, :], True, -2)
        return first, beaten.all(-2) & (roots[..., 0].max(-2) > NEGLIGIBLE)

    @cached_property
    def winners(self) -> list[dict[str, Any]]:
        """Best design over all heads at each number of keys, whether that is significant, and heads by best design."""
        every = self.relative["error"]
        first, sure = self.best(every.mean(0))
        of_heads, heads_sure = self.best(every)

        def counted(k: int, which: Any) -> dict[str, int]:
            return {name: int(((of_heads[:, k] == s) & which).sum()) for s, name in enumerate(self.designs)}

        return [
            {"keys": count, "best": self.designs[first[k]], "error": self.overall["error"][first[k], k],
             "stderr": self.overall["error_stderr"][first[k], k], "sure": bool(sure[k]),
             "heads": counted(k, True), "heads_sure": counted(k, heads_sure[:, k])}
            for k, count in enumerate(self.keys)
        ]  # fmt: skip

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per head, design and number of keys; the rate belongs to the head and the design."""
        rows = [(*place, name, count) for place in self.places for name in self.designs for count in self.keys]
        found = {name: value.ravel() for name, value in self.numbers(self.relative).items()}
        return pd.DataFrame(rows, columns=["layer", "head", "design", "keys"]).assign(**found)

    def document(self) -> dict[str, Any]:
        """The result as JSON: numbers of every head (heads, designs, keys), over all heads, and the best design."""
        numbers = {"heads": self.numbers(self.relative), "overall": self.overall, "best": self.winners}
        return super().document() | to_json(numbers)  # type: ignore[no-any-return]

    def view(self) -> View:
        """Error against keys, one line per design with dotted floors; and the best design."""
        middle = len(self.keys) // 2
        best = self.winners[middle]
        certainty = "significantly better than every other" if best["sure"] else "not significantly better than others"
        verdict = (
            "Every head attends to k keys under each design; its output is compared with attention over the whole "
            "document.",
            f"At {best['keys']} keys the design with the least error over all heads is {DESIGNS[best['best']]} "
            f"({short(best['error'])} ± {best['stderr']:.1g}), {certainty}; in {sum(best['heads_sure'].values())} of "
            f"{len(self.places)} heads one design is significantly the best.",
            "Where the floor of a design is near its error, more tokens do not help: use more keys or another design.",
        )
        lead = (
            "Root mean squares over heads: errors relative to the output, floors (bias of the design's limit, dotted "
            "where significant) and fluctuations relative to the limit. Designs whose error is always above twice the "
            "output are only in the tables. Heads are counted by their best design, in brackets where it is "
            "significantly the best."
        )
        trust = (
            "floor and fluctuation use queries and keys of different documents; an error below the floor means that a "
            "query's own document serves it better than the average one",
            "the bias-corrected floor may be negative where there is none; random keys have none, so their value "
            "shows the resolution of this many documents",
            "errors are those of one layer at a time: all other layers read every key",
        )
        axes = Axis("keys", log=True), Axis("relative output error", log=True)
        blocks: list[Block] = [
            Figure("Error against keys, floors dotted", *axes, self._series(), height=420),
            self._table_at(middle),
            Table("Best design by number of keys", BEST_COLUMNS, self._best_rows()),
        ]
        size = f"{self.documents} documents of {self.context:,} tokens · {self.queries} queries in each"
        section = Section("Over all heads", lead, blocks)
        title = f"Sparse attention designs in {self.model}"
        return View(title, f"{self.corpus} · {size}", verdict, [section], warnings=self.warnings, trust=trust)

    def _series(self) -> list[Series]:
        """Error of every design over the number of keys, and its floor where it is significant."""
        overall = self.overall
        keys = np.asarray(self.keys)
        series = []
        for s, name in enumerate(self.designs):
            error, stderr, floor = (overall[column][s] for column in ("error", "error_stderr", "floor"))
            if error.min() > WORST_DRAWN:
                continue
            colour, dash = look(s)
            at = error > NEGLIGIBLE
            above = (floor > 1.96 * overall["floor_stderr"][s]) & (floor > NEGLIGIBLE)
            series.append(points(DESIGNS[name], keys[at], error[at], colour, stderr[at], joined=True, dash=dash))
            series.append(line(f"{name}: floor", keys[above], floor[above], colour, "dotted", listed=False))
        return series

    def _table_at(self, k: int) -> Table:
        """All designs at one number of keys, least error first."""
        columns = ("error", "floor", "fluctuation", "rate")
        rows: list[list[Cell]] = []
        for s in np.argsort(self.overall["error"][:, k]):
            numbers = [Estimate(self.overall[name][s, k], self.overall[f"{name}_stderr"][s, k]) for name in columns]
            rows.append([DESIGNS[self.designs[s]], *numbers])
        return Table(f"At {self.keys[k]} keys", ["design", *columns[:3], "rate of the fluctuation"], rows)

    def _best_rows(self) -> list[list[Cell]]:
        """The best design at each number of keys."""
        return [
            [row["keys"], DESIGNS[row["best"]], Estimate(row["error"], row["stderr"]), row["sure"], _counted(row)]
            for row in self.winners
            if row["error"] > NEGLIGIBLE
        ]

    def __repr__(self) -> str:
        return f"<Designs in {self.model}: {len(self.designs)} designs, {len(self.places)} heads>"


def _stderr(rows: Array) -> Array:
    """Jackknife standard error of the first entry of the last axis, from the entries that leave out a document each."""
    with np.errstate(invalid="ignore"):
        return jackknife(rows[..., 1:], -1)


def _root(squares: Array) -> Array:
    """Square root of the absolute value, with the sign of the argument."""
    return np.asarray(np.sign(squares) * np.sqrt(np.abs(squares)))


def _counted(row: dict[str, Any]) -> str:
    """The three designs that are best in most heads, and in brackets the heads where they are significantly so."""
    ranked = sorted(row["heads"].items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{name} {count} ({row['heads_sure'][name]})" for name, count in ranked if count)
