"""What sparse designs did to every head, and which is best at equal number of keys."""

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
from limitlens.interventions.by_document import jackknife
from limitlens.record import to_json
from limitlens.report.view import Block, Cell, Table, View, line, look, points
from limitlens.report.words import read_words, short, worded_figure, worded_view
from limitlens.results import Result

CHOSEN = ("random", "recent", "streaming", "bigbird", "strided", "dilated", "block", "knorm")
DESIGNS = {name: get_policy(name).label for name in CHOSEN} | {name: words for name, (words, _) in MIXINGS.items()}
LEVEL = 0.05
FAR = 2.0  # error from which on, at every number of keys, a design is not drawn: it would leave the others no room
NOTHING = 1e-6  # relative error below which a design reads as much as full attention
WORDS = read_words("interventions/words.json")["designs"]


@dataclass(frozen=True, eq=False, repr=False)
class Designs(Result):
    """Sparse designs in every head; see `limitlens.interventions.designs` for what error, floor and fluctuation are.

    With P heads, S designs, K numbers of keys and N documents, all arrays are mean squares over the queries.
    """

    kind, file, held = "designs", "designs", ("squares", "apart", "floors", "outputs", "limits")
    model: str
    corpus: str
    context: int  # tokens of a document
    documents: int
    queries: int  # places of a document whose queries were asked
    keys: tuple[int, ...]
    designs: tuple[str, ...]
    places: tuple[tuple[int, int], ...]  # layer and head
    squares: Array  # (P, S, K, N): errors in each document
    apart: Array  # (P, S, K, N): fluctuation of each document
    floors: Array  # (P, S, K, 1 + N): squared distance of the limits, of all documents and without each of them
    outputs: Array  # (P, N): |output of full attention|² in each document
    limits: Array  # (P, 1 + N): |limit of full attention|², like floors
    warnings: tuple[str, ...] = ()

    @cached_property
    def relative(self) -> dict[str, Array]:
        """Squares relative to the output, (P, S, K, 1 + N): of all documents, and without each of them."""

        def left_out(rows: Array) -> Array:
            total = rows.sum(-1, keepdims=True)
            return np.concatenate((total, total - rows), -1)

        own, law = left_out(self.outputs)[:, None, None], self.limits[:, None, None]
        found = {"error": left_out(self.squares) / own, "floor": self.floors / law}
        return found | {"fluctuation": left_out(self.apart) / left_out(np.ones(self.documents)) / law}

    def numbers(self, squares: dict[str, Array]) -> dict[str, Array]:
        """Errors, floors, fluctuations and the rates of these, with their standard errors, from relative squares."""
        found: dict[str, Array] = {}
        for name in ("error", "fluctuation"):
            roots = np.sqrt(squares[name].clip(0))
            found |= {name: roots[..., 0], f"{name}_stderr": _stderr(roots)}
        whole, left = squares["floor"][..., 0], squares["floor"][..., 1:]
        square, spread = whole + (self.documents - 1) * (whole - left.mean(-1)), _stderr(squares["floor"])
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
        """The design of least error at every k, and whether it beats each other one beyond its error: (..., K) twice.

        Errors (..., S, K, 1 + N) are compared document by document; 5% is shared out over the other designs.
        """
        roots = np.sqrt(squares.clip(0))
        first = roots[..., 0].argmin(-2)
        ahead = roots - np.take_along_axis(roots, first[..., None, :, None], -3)
        border = special.stdtrit(self.documents - 1, 1 - LEVEL / 2 / (len(self.designs) - 1)) * _stderr(ahead)
        beaten = ahead[..., 0] > border
        np.put_along_axis(beaten, first[..., None, :], True, -2)
        return first, beaten.all(-2) & (roots[..., 0].max(-2) > NOTHING)

    @cached_property
    def winners(self) -> list[dict[str, Any]]:
        """For each number of keys: the best design over all heads, whether that is sure, and heads by best design."""
        every = self.relative["error"]
        (first, sure), (own, own_sure) = (self.best(squares) for squares in (every.mean(0), every))

        def counted(k: int, which: Any) -> dict[str, int]:
            return {name: int(((own[:, k] == s) & which).sum()) for s, name in enumerate(self.designs)}

        return [
            {"keys": count, "best": self.designs[first[k]], "error": self.overall["error"][first[k], k],
             "stderr": self.overall["error_stderr"][first[k], k], "sure": bool(sure[k]),
             "heads": counted(k, True), "heads_sure": counted(k, own_sure[:, k])}
            for k, count in enumerate(self.keys)
        ]  # fmt: skip

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per head, design and number of keys; the rate is that of the head and the design."""
        rows = [(*place, name, count) for place in self.places for name in self.designs for count in self.keys]
        found = {name: value.ravel() for name, value in self.numbers(self.relative).items()}
        return pd.DataFrame(rows, columns=["layer", "head", "design", "keys"]).assign(**found)

    def document(self) -> dict[str, Any]:
        """The result as JSON: every head's numbers (heads, designs, keys), those over all heads, and which is best."""
        told = {"heads": self.numbers(self.relative), "overall": self.overall, "best": self.winners}
        return super().document() | to_json(told)  # type: ignore[no-any-return]

    def view(self) -> View:
        """Error against keys, one line a design, floors dotted; and who is best."""
        overall, series, middle, keys = self.overall, [], len(self.keys) // 2, np.asarray(self.keys)
        for s, name in enumerate(self.designs):
            (colour, dash), error, bars, floor = look(s), *(overall[n][s] for n in ("error", "error_stderr", "floor"))
            if error.min() > FAR:
                continue
            shown, above = error > NOTHING, (floor > 1.96 * overall["floor_stderr"][s]) & (floor > NOTHING)
            series.append(points(DESIGNS[name], keys[shown], error[shown], colour, bars[shown], joined=True, dash=dash))
            series.append(line(f"{name}: floor", keys[above], floor[above], colour, "dotted", listed=False))
        rows: list[list[Cell]] = [
            [DESIGNS[self.designs[s]],
             *(Estimate(overall[name][s, middle], overall[f"{name}_stderr"][s, middle])
               for name in ("error", "floor", "fluctuation", "rate"))]
            for s in np.argsort(overall["error"][:, middle])
        ]  # fmt: skip
        verdicts: list[list[Cell]] = [
            [row["keys"], DESIGNS[row["best"]], Estimate(row["error"], row["stderr"]), row["sure"], _counted(row)]
            for row in self.winners
            if row["error"] > NOTHING
        ]
        told = self.winners[middle]
        known = {"sure": WORDS["sure"][not told["sure"]], "name": DESIGNS[told["best"]], "error": short(told["error"])}
        known |= {"surely": str(sum(told["heads_sure"].values())), "heads": str(len(self.places))}
        figure, title = worded_figure(WORDS["figure"], series), WORDS["table"].format(**told)
        best = Table(WORDS["won"], WORDS["best"], verdicts)
        blocks: list[Block] = [figure, Table(title, WORDS["columns"], rows), best]
        return worded_view(WORDS, blocks, warnings=self.warnings, **{"of": self, "told": told, **known})

    def __repr__(self) -> str:
        return f"<Designs in {self.model}: {len(self.designs)} designs, {len(self.places)} heads>"


def _stderr(rows: Array) -> Array:
    """The jackknife's standard error of what stands first on the last axis, from what is left without each document."""
    with np.errstate(invalid="ignore"):
        return jackknife(rows[..., 1:], -1)


def _root(squares: Array) -> Array:
    """The root with the sign of what is under it."""
    return np.asarray(np.sign(squares) * np.sqrt(np.abs(squares)))


def _counted(row: dict[str, Any]) -> str:
    """The three designs that are best in most heads, and in how many of them surely."""
    ranked = sorted(row["heads"].items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{name} {count} ({row['heads_sure'][name]})" for name, count in ranked if count)
