"""Result of `limitlens.depth`: errors by layer, sums of single-layer errors, amplification, predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from limitlens.arrays import pd
from limitlens.errors import Array
from limitlens.interventions.harness import DocumentResult, curves, estimate_table, identity_statistic, shown_table
from limitlens.interventions.head_sums import HEAD_SHARING
from limitlens.report.view import Axis, Block, Figure, Guide, Row, Section, View, line
from limitlens.statistics.documents import Statistic

RUNS = ("resampled", "fixed")  # keys of the layers: drawn anew in each, or the same in all
INCLUDE = ("fixed", "single", "heads")  # runs that may be added to the first of them
ERRORS = ("error", "mean_error", "covariance_error")  # of hidden states, of their mean and covariance in a document
PREDICTIONS = ("logits", "divergence", "agreement", "log_perplexity")
HEAD_LABELS = dict(zip(HEAD_SHARING, ("shared by heads", "each head its own"), strict=True))
HEADINGS = {
    "key_sharing": "keys of queries", "run": "keys of layers", "mean_error": "error of the mean",
    "covariance_error": "error of the covariance", "sum_of_single": "sum of single layers",
    "over_sum": "error / that sum", "logits": "logits, relative error", "divergence": "KL, nats",
    "agreement": "same top token", "log_perplexity": "ln perplexity", "draw": "keys of heads",
    "sum_of_heads": "sum over heads", "ratio": "ratio of squares", "adds_in_squares": "adds in squares",
}  # fmt: skip


@dataclass(frozen=True, eq=False, repr=False)
class DepthRun(DocumentResult):
    """Errors of a model whose queries attend to n sampled keys, against the unchanged model.

    Squares are relative: of tokens the mean of |ĥ − h|²/|h|², of mean and covariance |difference|²/|original|².
    Passes are the runs that sample in every layer, then one for each single layer where "single" was included.
    """

    kind, file, held = "depth", "layers", ("squares", "logits", "heads")
    model: str
    corpus: str
    causal: bool
    window: int  # tokens of a document
    documents: int
    sizes: tuple[int, ...]
    key_sharing: tuple[str, ...]
    include: tuple[str, ...]
    replicates: int
    seed: int
    squares: Array  # (documents, key_sharing, passes, sizes, layers, ERRORS)
    logits: Array  # (documents, key_sharing, passes, sizes, PREDICTIONS), logits squared; empty for an encoder
    heads: Array  # (documents, HEAD_SHARING, sizes, layers, heads + 1) of `sum_head_errors`, or empty
    interrupted: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def passes(self) -> list[str]:
        """Names of the passes."""
        single = range(self.squares.shape[4] * ("single" in self.include))
        return [*RUNS[: 1 + ("fixed" in self.include)], *(f"layer {layer} alone" for layer in single)]

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per key sharing, run, number of keys and layer: errors of tokens, mean and covariance.

        With single layers also, for the errors e of tokens: the root of the summed squared errors of single layers,
        e over that sum, and the amplification, e behind layer l over √(e² before it + square of what layer l adds).
        """
        layers = self.squares.shape[4]
        numbers: dict[str, tuple[Statistic, Array]] = {
            name: (np.sqrt, self.squares[..., at]) for at, name in enumerate(ERRORS)
        }
        if "single" in self.include:

            def summed(mean: Array) -> Array:
                return np.asarray(np.sqrt(mean[:, -layers:].sum(1, keepdims=True) + 0 * mean))

            def amplified(mean: Array) -> Array:
                single = np.einsum("wlsl->wsl", mean[:, -layers:])[:, None]
                return np.asarray(np.sqrt(mean / (np.pad(mean[..., :-1], [(0, 0)] * 3 + [(1, 0)]) + single)))

            squares = self.squares[..., 0]
            numbers["sum_of_single"] = summed, squares
            numbers["over_sum"] = lambda mean: np.sqrt(mean) / summed(mean), squares
            numbers["amplification"] = amplified, squares
        axes = {"key_sharing": self.key_sharing, "run": self.passes, "keys": self.sizes, "layer": range(layers)}
        return estimate_table(numbers, **axes)

    @cached_property
    def predictions(self) -> pd.DataFrame:
        """One row per key sharing, run and number of keys of a decoder; no rows for an encoder."""
        numbers: dict[str, tuple[Statistic, Array]] = {
            name: (identity_statistic if at else np.sqrt, self.logits[..., at])
            for at, name in enumerate(PREDICTIONS[: self.logits.shape[-1]])
        }
        return estimate_table(numbers, key_sharing=self.key_sharing, run=self.passes, keys=self.sizes)

    @cached_property
    def together(self) -> pd.DataFrame:
        """One row per key sharing of heads, number of keys and layer; no rows where "heads" was not included.

        `error` of the layer's attention output, `sum_of_heads` the root of the summed squared errors of its heads,
        `ratio` of these squares, `correlation` Σ_{h≠g} E<W_h e_h, W_g e_g> / Σ_{h≠g} r_h r_g with r_h² = E|W_h e_h|².
        """

        def correlation(mean: Array) -> Array:
            summed = mean[..., :-1].sum(-1)
            return np.asarray((mean[..., -1] - summed) / (np.sqrt(mean[..., :-1]).sum(-1) ** 2 - summed))

        statistics: dict[str, Statistic] = {
            "error": lambda mean: np.sqrt(mean[..., -1]), "sum_of_heads": lambda mean: np.sqrt(mean[..., :-1].sum(-1)),
            "ratio": lambda mean: mean[..., -1] / mean[..., :-1].sum(-1), "correlation": correlation,
        }  # fmt: skip
        numbers = {name: (one, self.heads) for name, one in statistics.items() if "heads" in self.include}
        axes = {"draw": HEAD_LABELS.values(), "keys": self.sizes, "layer": range(self.heads.shape[3])}
        table = estimate_table(numbers, **axes)
        if len(table):
            table["adds_in_squares"] = (table["ratio"] - 1).abs() <= 1.96 * table["ratio_stderr"]
        return table

    def tables(self) -> dict[str, pd.DataFrame]:
        """Errors by layer, then predictions and sums over heads where there are any."""
        every = {self.file: self.table, "predictions": self.predictions, "together": self.together}
        return {name: table for name, table in every.items() if len(table)}

    def view(self) -> View:
        """Errors by layer for every number of keys; everything else for the middle number of keys."""
        keys = self.sizes[len(self.sizes) // 2]
        every = self.table[self.table["run"].isin(RUNS)]
        first = every[(every["key_sharing"] == self.key_sharing[0]) & (every["run"] == RUNS[0])]
        ends = every[every["layer"] == every["layer"].max()]
        end = ends[ends["keys"] == keys].iloc[0]
        found = (
            f"With {keys} keys the relative error behind the last layer is {end['error']:.3f} ± "
            f"{end['error_stderr']:.3f} ({end['run']}, {end['key_sharing']})."
        )
        figures = self._layer_figures(every, first, keys)
        if "single" in self.include:
            low, middle, high = first[(first["keys"] == keys) & (first["layer"] > 0)]["amplification"].quantile(
                [0, 0.5, 1]
            )
            found += (
                f" The errors of single layers sum to {end['sum_of_single']:.3f} ± {end['sum_of_single_stderr']:.3f} "
                f"in squares, a ratio of {end['over_sum']:.3f} ± {end['over_sum_stderr']:.3f}; a layer amplifies by "
                f"{middle:.3f} in the median ({low:.3f} to {high:.3f})."
            )
        blocks: list[Block] = [Row(figures), shown_table("Behind the last layer", HEADINGS, ends.drop(columns="layer"))]
        if len(self.predictions):
            rows = self.predictions[self.predictions["run"].isin(RUNS)]
            blocks.append(shown_table("Predictions", HEADINGS, rows))
        lead = (
            "Root mean square of |ĥ − h| / |h| over tokens, documents and draws ± standard errors (jackknife over "
            "documents). Resampled: keys drawn anew in every layer; fixed: the same keys in all layers. Sum of single "
            "layers: root of the summed squared errors when one layer at a time samples. Amplification: error behind a "
            "layer over the root of the squared error that enters it plus the squared error that it adds."
        )
        sections = [Section("Error by layer", lead, blocks)]
        if len(self.together):
            rows = self.together[self.together["keys"] == keys]
            counts = []
            for label, of in rows.groupby("draw", sort=False):
                low, high = of["ratio"].min(), of["ratio"].max()
                independent = of["adds_in_squares"].sum()
                counts.append(f"{label}: {independent} of {len(of)} layers (ratios {low:.2f} to {high:.2f})")
            found += f" Errors of heads add in squares within 95% intervals in these layers; {'; '.join(counts)}."
            sections.append(self._head_section(rows, keys))
        read = (
            f"Every document was read unchanged and with {self.sizes[0]} to {self.sizes[-1]} random keys for each "
            "query; errors are relative errors of the hidden states behind each layer."
        )
        do = (
            "Add single-head errors over heads where each head draws its own keys, and over layers where the ratio of "
            "the error to the sum of single layers is 1 within its standard error."
        )
        subtitle = f"{self.corpus} · {self.documents} documents of {self.window} tokens · {self.replicates} draws each"
        trust = (
            "a causal query always keeps itself and the first token, and all keys where it sees no more than n; the "
            "first token of a document counts in no error",
            "log(c/m) is added to the scores of sampled keys, so that certain keys keep their share of the weight",
        )
        title = f"{self.model} with n sampled keys per query"
        return View(title, subtitle, (read, found, do), sections, warnings=self.warnings, trust=trust)

    def _layer_figures(self, every: pd.DataFrame, first: pd.DataFrame, keys: int) -> list[Figure]:
        """Error by layer for every number of keys and, with single layers, their sums and the amplification."""
        errors = curves(first, "layer", "error", "keys", unit=" keys")
        layer = Axis("layer", whole=True)
        title = f"Error by layer ({RUNS[0]}, {self.key_sharing[0]})"
        if "single" not in self.include:
            return [Figure(title, layer, Axis("relative error of hidden states", log=True), errors, height=380)]
        for series, (_, rows) in zip([*errors], first.groupby("keys"), strict=True):
            listed = len(errors) == len(self.sizes)
            summed = rows["layer"], rows["sum_of_single"], series.colour
            errors.append(line("sum of single layers", *summed, "dashed", listed=listed))
        rows = every[(every["keys"] == keys) & (every["layer"] > 0)]
        drawn = curves(rows, "layer", "amplification", "run", "key_sharing")
        guides = [Guide("no amplification", y=1)]
        ratio = Axis("error behind / (before and added)")
        return [
            Figure(title, layer, Axis("relative error of hidden states", log=True), errors, height=380),
            Figure(f"Amplification, {keys} keys", layer, ratio, drawn, guides, height=380),
        ]

    def _head_section(self, rows: pd.DataFrame, keys: int) -> Section:
        """Squared error of a layer's attention over the sum of its heads' squared errors."""
        lead = (
            "Squared error of a layer's attention behind its output projection over the sum of the squared errors of "
            "its heads: 1 where heads err independently. The inputs are those of the unchanged model; 95% bars."
        )
        series = curves(rows, "layer", "ratio", "draw")
        guides = [Guide("heads err independently", y=1)]
        axes = Axis("layer", whole=True), Axis("squared error / sum over heads")
        figure = Figure(f"Heads added up, {keys} keys", *axes, series, guides, height=360)
        return Section("Heads added up", lead, [figure, shown_table("Heads added up", HEADINGS, rows)])

    def __repr__(self) -> str:
        return f"<DepthRun of {self.model}: {self.documents} documents, {self.sizes[0]} to {self.sizes[-1]} keys>"
