"""What sampled keys do to a model, layer by layer: errors, what they add up to, what amplifies them, predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from limitlens.arrays import pd
from limitlens.errors import Array
from limitlens.interventions.by_document import ByDocument, Statistic, curves, shown, tabled
from limitlens.interventions.together import DRAWS
from limitlens.report.view import Block, Row, View, line
from limitlens.report.words import read_words, worded_figure, worded_view

WORDS = read_words("interventions/words.json")["depth"]
RUNS = ("resampled", "fixed")  # keys of the layers: drawn anew in each, or the same in all
BESIDE = ("fixed", "single", "heads")  # what may be run beside the first of them
ERRORS = ("error", "mean_error", "covariance_error")  # of each hidden state, of their mean and covariance in a document
PREDICTIONS = ("logits", "divergence", "agreement", "log_perplexity")


@dataclass(frozen=True, eq=False, repr=False)
class DepthRun(ByDocument):
    """A model whose queries see n keys, against itself.

    Squares are relative: of tokens |ĥ − h|²/|h|², a mean over them; of mean and covariance |difference|²/|own|².
    Passes are the runs of every layer, then one of each layer alone where "single" was run.
    """

    kind, file, held = "depth", "layers", ("squares", "logits", "heads")
    model: str
    corpus: str
    causal: bool
    window: int  # tokens of a document
    documents: int
    sizes: tuple[int, ...]
    ways: tuple[str, ...]
    beside: tuple[str, ...]
    replicates: int
    seed: int
    squares: Array  # (documents, ways, passes, sizes, layers, ERRORS)
    logits: Array  # (documents, ways, passes, sizes, PREDICTIONS), logits squared; nothing of an encoder
    heads: Array  # (documents, DRAWS, sizes, layers, heads + 1) of `live.together`, or nothing
    interrupted: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def passes(self) -> list[str]:
        """What was run, in words."""
        alone = range(self.squares.shape[4] * ("single" in self.beside))
        return [*RUNS[: 1 + ("fixed" in self.beside)], *(f"layer {layer} alone" for layer in alone)]

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per way, run, number of keys and layer: errors of tokens, mean and covariance.

        Where single layers were run, of the errors e of tokens: what single layers add up to in squares, e over that,
        and the amplification, e behind layer l over √(e² before it + what layer l alone adds, squared).
        """
        layers = self.squares.shape[4]
        numbers: dict[str, tuple[Statistic, Array]] = {
            name: (np.sqrt, self.squares[..., at]) for at, name in enumerate(ERRORS)
        }
        if "single" in self.beside:

            def summed(mean: Array) -> Array:
                return np.asarray(np.sqrt(mean[:, -layers:].sum(1, keepdims=True) + 0 * mean))

            def amplified(mean: Array) -> Array:
                alone = np.einsum("wlsl->wsl", mean[:, -layers:])[:, None]
                return np.asarray(np.sqrt(mean / (np.pad(mean[..., :-1], [(0, 0)] * 3 + [(1, 0)]) + alone)))

            of: dict[str, Statistic] = {"sum_of_single": summed, "over_sum": lambda mean: np.sqrt(mean) / summed(mean)}
            numbers |= {name: (one, self.squares[..., 0]) for name, one in {**of, "amplification": amplified}.items()}
        return tabled(numbers, way=self.ways, run=self.passes, keys=self.sizes, layer=range(layers))

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """One row per way, run and number of keys of a decoder; no rows of an encoder."""
        told = enumerate(PREDICTIONS[: self.logits.shape[-1]])
        numbers = {name: (np.asarray if at else np.sqrt, self.logits[..., at]) for at, name in told}
        return tabled(numbers, way=self.ways, run=self.passes, keys=self.sizes)

    @cached_property
    def together(self) -> pd.DataFrame:
        """One row per way of drawing for the heads, number of keys and layer; no rows where heads were not added up.

        `error` of the layer's attention output, `sum_of_heads` what its heads add up to in squares, `ratio` of the
        squares, `correlation` Σ_{h≠g} E<W_h e_h, W_g e_g> / Σ_{h≠g} r_h r_g with r_h² = E|W_h e_h|².
        """

        def correlation(mean: Array) -> Array:
            own = mean[..., :-1].sum(-1)
            return np.asarray((mean[..., -1] - own) / (np.sqrt(mean[..., :-1]).sum(-1) ** 2 - own))

        of: dict[str, Statistic] = {
            "error": lambda mean: np.sqrt(mean[..., -1]), "sum_of_heads": lambda mean: np.sqrt(mean[..., :-1].sum(-1)),
            "ratio": lambda mean: mean[..., -1] / mean[..., :-1].sum(-1), "correlation": correlation,
        }  # fmt: skip
        numbers = {name: (one, self.heads) for name, one in of.items() if "heads" in self.beside}
        table = tabled(numbers, draw=[WORDS[draw] for draw in DRAWS], keys=self.sizes, layer=range(self.heads.shape[3]))
        if len(table):
            table["adds_in_squares"] = (table["ratio"] - 1).abs() <= 1.96 * table["ratio_stderr"]
        return table

    def tables(self) -> dict[str, pd.DataFrame]:
        """Errors by layer, and where there are any predictions and heads together."""
        found = {self.file: self.table, "predictions": self.predictions, "together": self.together}
        return {name: table for name, table in found.items() if len(table)}

    def view(self) -> View:
        """What it shows: errors by layer for every number of keys, the rest for the number in the middle."""
        keys, words = self.sizes[len(self.sizes) // 2], WORDS["columns"]
        every = self.table[self.table["run"].isin(RUNS)]
        ends = every[every["layer"] == every["layer"].max()]
        first = every[(every["way"] == self.ways[0]) & (every["run"] == RUNS[0])]
        errors = curves(first, "layer", "error", "keys", unit=" keys")
        told = ends[ends["keys"] == keys].iloc[0].to_dict()
        figures, found = [worded_figure(WORDS["errors"], errors, **told)], WORDS["plain"].format(**told)
        if "single" in self.beside:
            for series, (_, rows) in zip([*errors], first.groupby("keys"), strict=True):
                sums = rows["layer"], rows["sum_of_single"], series.colour
                errors.append(line(WORDS["summed"], *sums, "dashed", listed=len(errors) == len(self.sizes)))
            own = every[(every["keys"] == keys) & (every["layer"] > 0)]
            drawn = curves(own, "layer", "amplification", "run", "way")
            figures.append(worded_figure(WORDS["amplified"], drawn, **told))
            between = first[(first["keys"] == keys) & (first["layer"] > 0)]["amplification"].quantile([0, 0.5, 1])
            found += WORDS["sums"].format(**told, between=between.tolist())
        blocks: list[Block] = [Row(figures), shown(WORDS["ends"], words, ends.drop(columns="layer"))]
        if len(self.predictions):
            rows = self.predictions[self.predictions["run"].isin(RUNS)]
            blocks.append(shown(WORDS["predictions"], words, rows))
        sections = [blocks]
        if len(self.together):
            own = self.together[self.together["keys"] == keys]
            figure = worded_figure(WORDS["ratio"], curves(own, "layer", "ratio", "draw"), keys=keys)
            sections.append([figure, shown(WORDS["heads"], words, own)])
            of = (rows for _, rows in own.groupby("draw", sort=False))
            said = [(len(rows), rows["adds_in_squares"].sum(), *rows["ratio"].agg(["min", "max"])) for rows in of]
            found += WORDS["survives"].format(*said, keys=keys)
        known = {"of": self, "least": self.sizes[0], "most": self.sizes[-1], "found": found}
        named = WORDS | {"sections": WORDS["sections"][: len(sections)]}
        return worded_view(named, *sections, warnings=self.warnings, **known)

    def __repr__(self) -> str:
        return f"<DepthRun of {self.model}: {self.documents} documents, {self.sizes[0]} to {self.sizes[-1]} keys>"
