"""Formatting of numbers, counts and lists as text, the same on pages, in terminals and in notebooks."""

import math
from collections.abc import Sequence
from numbers import Real

from limitlens.estimate import Estimate
from limitlens.report.view import Cell, Table


def short(value: float | None, digits: int = 3) -> str:
    """Short text of a number: 0.0123 (with `digits` significant digits), 12,345 or 2.5·10⁸; "–" for None and NaN."""
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
        return ("" if front == "1" else f"{front}·") + ten_to(power)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{float(f'{value:.{digits}g}'):g}"


def ten_to(power: int) -> str:
    """Text of a power of ten, such as 10⁻⁵, also of one beyond the range of floating point."""
    return "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def cell(value: Cell) -> str:
    """Text of a value in a table: "0.1234 ± 0.002" for an estimate with its standard error, "–" for None."""
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
    """Whether a value in a table is a number or an estimate."""
    return isinstance(value, (Real, Estimate)) and not isinstance(value, bool)


def numeric(table: Table) -> list[bool]:
    """Whether each column of a table holds numbers, or text such as "12*" or ">400", and so is aligned right."""
    found = []
    for index in range(len(table.columns)):
        values = [row[index] for row in table.rows]
        words = [value for value in values if isinstance(value, str)]
        counts = any(map(str.isdigit, "".join(words))) and not any(word[:1].isalpha() for word in words)
        found.append(counts or any(map(is_number, values)))
    return found


def falling(rate: float) -> str:
    """Text of n to the power −rate, such as n⁻⁰·⁴⁷ for 0.47."""
    return "n" + f"{-rate:.2f}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


def join(parts: Sequence[str]) -> str:
    """Join words into a list for a sentence: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def sentence(text: str) -> str:
    """Make a sentence of a text: begin it with a capital letter and end it with a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def plural(count: int, word: str) -> str:
    """Text of a count with its noun, in the plural unless the count is 1: "1 head", "2 heads"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
