"""What a notebook shows of a probe: the three sentences and the map of its heads, without scripts."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from limitlens.report.prose import verdict
from limitlens.report.style import BLUE, GREEN, RED

COLOURS = {"averaging": BLUE, "selective": GREEN, "frozen": RED}


def probe_html(result: Mapping[str, Any]) -> str:
    """A probe in a notebook: what was measured, found and to do, and every head's rate coloured by its regime."""
    rows: dict[int, list[str]] = {}
    for head in result["heads"]:
        rate = head.get("rate")
        shown = "–" if rate is None else f"{rate['slope']:.2f}"
        colour = COLOURS.get(head["regime"], "#666666")
        label = escape(f"layer {head['layer']}, head {head['head']}: {head['regime']}")
        rows.setdefault(head["layer"], []).append(
            f'<td style="background:{colour};color:#fff;text-align:center" title="{label}">{shown}</td>'
        )
    body = "".join(f"<tr><th>{layer}</th>{''.join(cells)}</tr>" for layer, cells in rows.items())
    key = ", ".join(f'<span style="color:{colour}">■</span> {name}' for name, colour in COLOURS.items())
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(result))
    title = escape(f"{result['model']} on {result['corpus']}")
    return f"<h4>{title}</h4>{said}<table>{body}</table><p>Rates of all heads, layer by layer; {key}.</p>"
