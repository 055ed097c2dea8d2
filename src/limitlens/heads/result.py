"""The result of a probe: tables, the document of the contract, a folder that can be read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.errors import InputError
from limitlens.record import open_folder, provenance, read_run, to_json, write_run, write_whole

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor

STATES = "states.safetensors"


class ProbeRun:
    """Every head of a model over a corpus.

    Attributes
    ----------
    result : dict
        The document as plain JSON values.
    replicate_errors : pandas.DataFrame
        One row per head, replicate and size: its relative output error.
    states : dict of str to Tensor
        `query_places` (m, 2), the window and the position of each query. For each layer i `layer{i}.query`
        (heads, m, k) with the scale in it, `layer{i}.reference.lse` (heads, m) and `.output` (heads, m, v) of attention
        over the whole pool, and `layer{i}.atom.lse` and `.output` where every context contains an atom.
    """

    def __init__(
        self,
        result: Mapping[str, Any],
        replicate_errors: pd.DataFrame,
        states: dict[str, Tensor],
        started: datetime | None = None,
    ) -> None:
        self.result: dict[str, Any] = json.loads(to_json(result))
        self.replicate_errors, self.states = replicate_errors, states
        self._started = started or datetime.now(UTC)

    def document(self) -> dict[str, Any]:
        """The probe as the JSON document of the contract."""
        return self.result

    @cached_property
    def heads(self) -> pd.DataFrame:
        """One row per head, numbers only: lists and what depends on n are in `curves`."""
        import pandas as pd

        return pd.DataFrame([_flat(head) for head in self.result["heads"]])

    @cached_property
    def curves(self) -> pd.DataFrame:
        """One row per head and size: errors in both views, effective tokens, hardmax error, the sink's share."""
        import pandas as pd

        rows = []
        for head in self.result["heads"]:
            bare, sink = head["without_sink"], head["sink"]
            columns = {
                name: head[name]
                for name in (
                    "n", "relative_output_error", "relative_output_error_stderr", "relative_centred_error",
                    "predicted_error", "effective_tokens", "hardmax_error",
                )
            }  # fmt: skip
            if bare is not None:
                columns["relative_output_error_without_sink"] = bare["relative_output_error"]
                columns["relative_output_error_without_sink_stderr"] = bare["relative_output_error_stderr"]
            if sink is not None:
                columns["sink_share"] = sink["share"]
            rows.append(pd.DataFrame({"layer": head["layer"], "head": head["head"], **columns}))
        return pd.concat(rows, ignore_index=True)

    @cached_property
    def layers(self) -> pd.DataFrame:
        """One row per layer: medians, regimes, and whether its tokens are sub-Gaussian."""
        import pandas as pd

        rows = []
        for layer in self.result["layers"]:
            tails, regimes = layer["tails"] or {}, layer["regimes"]
            rows.append(
                {
                    "layer": layer["layer"],
                    "heads": layer["heads"],
                    "attention": layer["attention"],
                    **{name: regimes.get(name, 0) for name in ("averaging", "selective", "frozen")},
                    "rate": (layer["rate"] or {}).get("median"),
                    "error_at_largest_n": (layer["error_at_largest_n"] or {}).get("median"),
                    **layer["median"],
                    "tokens_are": tails.get("verdict"),
                    "variance_proxy": tails.get("variance_proxy"),
                }
            )
        return pd.DataFrame(rows)

    def save(self, folder: str | Path, arguments: Mapping[str, Any] | None = None) -> Path:
        """Write run.json, tables (Parquet and CSV) and the reference states (safetensors) into a folder."""
        from safetensors.torch import save_file

        path = open_folder(folder)
        write_whole(path / STATES, lambda partial: save_file(self.states, partial))
        tables = {
            "heads": self.heads,
            "layers": self.layers,
            "curves": self.curves,
            "replicates": self.replicate_errors,
        }
        given = {"model": self.result["model"], "corpus": self.result["corpus"], "seed": self.result["seed"]}
        write_run(path, provenance("probe", arguments or given, self._started), self.result, tables)
        return path

    @classmethod
    def load(cls, folder: str | Path) -> ProbeRun:
        """Read back what `save` wrote."""
        import pandas as pd
        from safetensors.torch import load_file

        path, record = Path(folder), read_run(folder)
        if record.get("command") != "probe":
            raise InputError(
                f"{str(folder)!r} is not the folder of a probe; give the folder of `limitlens probe --out`"
            )
        try:
            errors = pd.read_parquet(path / "replicates.parquet")
            states = load_file(path / STATES)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{str(folder)!r} is not whole ({error}); expected the tables and states of a probe, so probe again"
            ) from None
        return cls(record["result"], errors, states, datetime.fromisoformat(record["started"]))

    def plan(self, **options: Any) -> Any:
        """KV entries per head for an error, checked on the reserved windows; see `limitlens.budgets.plan`."""
        from limitlens.budgets.plan import plan

        return plan(self, **options)

    def report(self, path: str | Path) -> Path:
        """Write the one-file HTML page."""
        from limitlens.report.page import write_report

        return write_report(self, path)

    def plot_rates(self, path: str | None = None) -> Figure:
        """Fitted rates against the horizon, with what theory draws."""
        from limitlens.report.head_figures import plot_rates

        return plot_rates(self.result, path=path)

    def plot_map(self, path: str | None = None) -> Figure:
        """A map of all heads."""
        from limitlens.report.head_figures import plot_map

        return plot_map(self.result, path=path)

    def plot_head(self, layer: int, head: int, path: str | None = None) -> Figure:
        """The error curve of one head."""
        from limitlens.report.head_figures import plot_head

        return plot_head(self.result, layer, head, path=path)

    def slowest(self, count: int = 5) -> pd.DataFrame:
        """The heads that need the most tokens: those with the largest error at the largest n."""
        return self._ranked().head(count)

    def fastest(self, count: int = 5) -> pd.DataFrame:
        """The heads that need the fewest."""
        return self._ranked().tail(count)[::-1]

    def _ranked(self) -> pd.DataFrame:
        return self.heads.sort_values("error_at_largest_n", ascending=False, kind="stable")

    def __str__(self) -> str:
        from limitlens.heads.advice import advice

        result, n = self.result, self.result["n"][-1]
        lines = [self.title, f"{'':<10}{'head':>6}{'rate':>8}{f'error at {n}':>15}  regime"]
        for name, table in (("slowest", self.slowest()), ("fastest", self.fastest())):
            for row in table.itertuples():
                where = f"{row.layer}.{row.head}"
                lines.append(f"{name:<10}{where:>6}{row.rate:>8.2f}{row.error_at_largest_n:>15.3f}  {row.regime}")
        return "\n".join([*lines, *advice(result), *(f"warning: {warning}" for warning in result["warnings"])])

    @property
    def title(self) -> str:
        """The run in one line."""
        result = self.result
        note = f" ({result['model_note']})" if result["model_note"] else ""
        fewer = "" if result["replicates"] == result["replicates_asked"] else " (the pool holds no more)"
        return (
            f"{result['model']}{note} on {result['corpus']}: {len(result['heads'])} heads, "
            f"{result['tokens']:,} pooled tokens, n = {result['n'][0]:,}..{result['n'][-1]:,}, "
            f"{result['replicates']} replicates{fewer}, {result['queries']} queries a head"
        )

    def __repr__(self) -> str:
        result = self.result
        return f"<ProbeRun of {result['model']} on {result['corpus']}: {len(result['heads'])} heads>"

    def _repr_html_(self) -> str:
        from limitlens.report.notebook import probe_html

        return probe_html(self.result)


def _flat(head: Mapping[str, Any]) -> dict[str, Any]:
    """A head's record without its lists, one level deep: `rate` is the slope, its companions follow it."""
    row = {name: value for name, value in head.items() if not isinstance(value, (list, dict))}
    row["error_at_largest_n"] = head["relative_output_error"][-1]
    row["effective_tokens"] = head["effective_tokens"][-1]
    for suffix, part in (("", head), ("_without_sink", head["without_sink"])):
        if part is None:
            continue
        rate = part["rate"] or {}
        low, high = rate.get("interval", (np.nan, np.nan))
        row |= {
            f"rate{suffix}": rate.get("slope", np.nan),
            f"rate_stderr{suffix}": rate.get("stderr", np.nan),
            f"rate_low{suffix}": low,
            f"rate_high{suffix}": high,
        }
        for error, found in part["tokens_for"].items():
            row[f"tokens_for_{error}{suffix}"] = np.nan if found is None else found["n"]
            row[f"extrapolated_{error}{suffix}"] = None if found is None else found["extrapolated"]
    row.pop("without_sink", None)
    if head["sink"] is not None:
        row["dilution_length"] = head["sink"]["dilution_length"]
    row.pop("sink", None)
    return row
