"""Numbers and lists as people read them, the same everywhere, and views whose words are data (a room's words.json)."""

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from numbers import Real
from typing import Any

from limitlens.estimate import Estimate
from limitlens.report.view import Axis, Block, Cell, Figure, Guide, Section, Series, Table, View


def short(value: float | None, digits: int = 3) -> str:
    """A number for people: three digits, thousands apart, a power of ten where it is very large or small."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e7 or size < 1e-4:
        power = math.floor(math.log10(size) + 1e-12)
        front = f"{value / 10**power:.2g}"
        exponent = str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return ("" if front == "1" else f"{front}·") + f"10{exponent}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{float(f'{value:.{digits}g}'):g}"


def cell(value: Cell) -> str:
    """A cell of a table: four digits, a standard error with one; – where there is nothing."""
    if isinstance(value, Estimate):
        if math.isnan(value.value) or math.isnan(value.stderr):
            return short(value.value, 4)
        return f"{short(value.value, 4)} ± {short(value.stderr, 1)}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return "–" if value is None else value
    return short(value, 4)


def is_number(value: Cell) -> bool:
    """Whether a cell stands in a column of numbers."""
    return isinstance(value, (Real, Estimate)) and not isinstance(value, bool)


def numeric(table: Table) -> list[bool]:
    """Which columns are of numbers: those that hold one, or only text that looks like one (12*, >400, 1 to 2)."""

    def looks(values: list[Cell]) -> bool:
        words = [value for value in values if isinstance(value, str)]
        return any(any(letter.isdigit() for letter in word) for word in words) and not any(
            word[:1].isalpha() for word in words
        )

    columns = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    return [any(map(is_number, values)) or looks(values) for values in columns]


def falling(rate: float) -> str:
    """n to the power −rate, as in n⁻⁰·⁴⁷."""
    return "n" + f"{-rate:.2f}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


def join(parts: Sequence[str]) -> str:
    """Words in a row: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def sentence(text: str) -> str:
    """Words as a sentence: a capital at the front, a full stop at the end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def plural(count: int, word: str) -> str:
    """A count and its noun."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


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
