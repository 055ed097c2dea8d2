"""A plan for other programs: two files.

`kv_budgets.json` holds `budgets[layer][kv_head]`, the integers that per-head eviction methods index, `ratios` of the
same shape, and `compression_ratios[layer]`, the share of a layer's entries that is dropped, which per-layer methods
take. `kv_budgets.csv` holds the same, one row per key/value head.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from limitlens.record import open_folder, to_json, write_whole

if TYPE_CHECKING:
    import pandas as pd

    from limitlens.budgets.plan import Plan

FORMAT, VERSION = "limitlens-kv-budgets", 1


def budgets_document(plan: Plan) -> dict[str, Any]:
    """The budgets as JSON; a layer without heads, and a number that is not known, is null."""
    layers = max(shared.layer for shared in plan.key_value_heads) + 1
    rows: list[list[Any]] = [[] for _ in range(layers)]
    for shared in plan.key_value_heads:
        rows[shared.layer].append(shared)
    dropped = {layer["layer"]: None if layer["ratio"] is None else 1 - layer["ratio"] for layer in plan.layers}
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.run["model"],
        "error": plan.error,
        "context": plan.context,
        "budgets": [[shared.keys for shared in row] or None for row in rows],
        "ratios": [[shared.ratio for shared in row] or None for row in rows],
        "marks": [[shared.mark for shared in row] or None for row in rows],
        "compression_ratios": [dropped.get(layer) for layer in range(layers)],
    }


def budgets_table(plan: Plan) -> pd.DataFrame:
    """One row per key/value head: layer, kv_head, budget, ratio, compression_ratio, decided_by, mark."""
    import pandas as pd

    rows = [
        {
            "layer": shared.layer,
            "kv_head": shared.kv_head,
            "budget": shared.keys,
            "ratio": shared.ratio,
            "compression_ratio": None if shared.ratio is None else 1 - shared.ratio,
            "decided_by": shared.decided_by,
            "mark": shared.mark,
        }
        for shared in plan.key_value_heads
    ]
    return pd.DataFrame(rows).astype({"budget": "Int64"})


def write_budgets(plan: Plan, folder: str | Path) -> list[Path]:
    """Write both files into a folder and return their paths."""
    path = open_folder(folder)
    text, table = to_json(budgets_document(plan)), budgets_table(plan)
    files = [path / "kv_budgets.json", path / "kv_budgets.csv"]
    write_whole(files[0], lambda partial: partial.write_text(text + "\n", encoding="utf-8"))
    write_whole(files[1], lambda partial: table.to_csv(partial, index=False))
    return files
