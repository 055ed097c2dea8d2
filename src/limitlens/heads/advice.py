"""What to do with a probed model, in words."""

from __future__ import annotations

from typing import Any

from limitlens.heads.regimes import Regime

HEAVY_TAIL = 0.7  # Pareto shape above which the weights of a head have no variance to speak of


def advice(result: dict[str, Any]) -> list[str]:
    """One line for each thing to know or to do, from the document of a probe."""
    heads = result["heads"]
    lines = []
    for regime in Regime:
        found = [head for head in heads if head["regime"] == regime.value]
        if found:
            are = "is" if len(found) == 1 else "are"
            share = f"{len(found)} of {len(heads)} heads {are} {regime.value}"
            lines.append(f"{share}: {regime.meaning}; {regime.remedy}.")
    parked = [head for head in heads if head["sink"] and head["sink"]["share_in_window"] > 0.5]
    if parked:
        lines.append(
            f"{len(parked)} heads give more than half of their mass in a window to its first token: keep it in the "
            "cache whatever else goes."
        )
    heavy = sum((head["pareto_k"] or 0) > HEAVY_TAIL for head in heads)
    if heavy:
        lines.append(
            f"{heavy} heads have weights with a Pareto shape above {HEAVY_TAIL}: a few more tokens may move their "
            "outputs at will, so read their curves, not their rates."
        )
    sliding = sorted({head["sliding_window"] for head in heads if head["sliding_window"]})
    if sliding:
        lines.append(
            f"layers with a sliding window never see more than {', '.join(map(str, sliding))} tokens at once, "
            "whatever n their curves go to."
        )
    judged = [layer for layer in result["layers"] if layer["tails"]]
    heavy_layers = [str(layer["layer"]) for layer in judged if not layer["tails"]["sub_gaussian"]]
    if heavy_layers:
        which = "every layer" if len(heavy_layers) == len(judged) else f"layers {', '.join(heavy_layers)}"
        lines.append(
            f"the tokens of {which} are heavier than Gaussian: proved rates hold there only with a larger variance "
            "proxy, if at all."
        )
    return lines
