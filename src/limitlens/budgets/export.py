"""A plan for other programs: two files.

`kv_budgets.json` holds `budgets[layer][kv_head]`, the integers that per-head eviction methods index, `ratios` of the
same shape, and `compression_ratios[layer]`, the share of a layer's entries that is dropped, which per-layer methods
take. `kv_budgets.csv` holds the same, one row per key/value head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limitlens.lazily import pd
from limitlens.record import text_writer, to_json

if TYPE_CHECKING:
    from limitlens.budgets.plan import Plan

FORMAT, VERSION = "limitlens-kv-budgets", 1


def budgets_document(plan: Plan) -> dict[str, Any]:
    """The budgets as JSON; a layer without heads, and a number that is not known, is null."""
    layers = max(shared.layer for shared in plan.key_value_heads) + 1
    rows = [[shared for shared in plan.key_value_heads if shared.layer == layer] for layer in range(layers)]
    dropped = {layer["layer"]: None if layer["ratio"] is None else 1 - layer["ratio"] for layer in plan.layers}
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(plan, name) for name in ("model", "error", "context")},
        "budgets": [[shared.keys for shared in row] or None for row in rows],
        "ratios": [[shared.ratio for shared in row] or None for row in rows],
        "marks": [[shared.mark for shared in row] or None for row in rows],
        "compression_ratios": [dropped.get(layer) for layer in range(layers)],
    }


def budgets_table(plan: Plan) -> pd.DataFrame:
    """One row per key/value head: layer, kv_head, budget, ratio, compression_ratio, decided_by, mark."""
    table = pd.DataFrame([shared.document() for shared in plan.key_value_heads]).rename(columns={"keys": "budget"})
    table.insert(4, "compression_ratio", 1 - table["ratio"].astype(float))
    return table.astype({"budget": "Int64"})


def budget_files(plan: Plan) -> dict[str, Callable[[Path], Any]]:
    """Both files by name, and what writes them."""
    writers = text_writer(to_json(budgets_document(plan))), partial(budgets_table(plan).to_csv, index=False)
    return dict(zip(("kv_budgets.json", "kv_budgets.csv"), writers, strict=True))
