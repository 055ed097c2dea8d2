"""Views whose sentences are in a JSON file; on the way out: write sentences as f-strings in the view instead."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from limitlens.report.text import cell as cell
from limitlens.report.text import falling as falling
from limitlens.report.text import is_number as is_number
from limitlens.report.text import join as join
from limitlens.report.text import numeric as numeric
from limitlens.report.text import plural as plural
from limitlens.report.text import sentence as sentence
from limitlens.report.text import short as short
from limitlens.report.view import Axis, Block, Figure, Guide, Section, Series, View


def read_words(file: str) -> dict[str, Any]:
    """The words in a file of the package, such as "experiments/scaling_words.json"."""
    found: dict[str, Any] = json.loads((resources.files("limitlens") / file).read_text(encoding="utf-8"))
    return found


def worded_view(words: Mapping[str, Any], *blocks: Sequence[Block], warnings: Sequence[str] = (), **known: Any) -> View:
    """A view in these words, filled with what is `known`: title, subtitle, verdict, and a section per `blocks`."""
    texts = (words["title"], words["subtitle"], *words["verdict"])
    title, subtitle, read, found, do = (text.format(**known) for text in texts)
    told = zip(words["sections"], blocks, strict=True)
    sections = [Section(heading, lead.format(**known), inside) for (heading, lead), inside in told]
    return View(title, subtitle, (read, found, do), sections, warnings=warnings, trust=words.get("trust", ()))


def worded_figure(words: Mapping[str, Any], series: Sequence[Series], *guides: Guide, **known: Any) -> Figure:
    """A figure in these words: its title, axes and height, and guides that stand where they always do."""
    x, y, fixed = Axis(**words["x"]), Axis(**words["y"]), [Guide(**guide) for guide in words.get("guides", ())]
    return Figure(words["title"].format(**known), x, y, series, [*fixed, *guides], height=words.get("height", 320))
