"""Formatting of numbers, counts and lists as text, the same in every renderer and sentence."""

import math
from collections.abc import Sequence
from numbers import Real

from limitlens.estimate import Estimate
from limitlens.report.view import Cell, Table


def short(value: float | None, digits: int = 3) -> str:
    """Text of a number with `digits` significant digits and thousands separators, or with a power of ten.

    Powers of ten are for numbers from 10⁷ and below 10⁻⁴; None and NaN give "–".
    """
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
    """Text of a table cell: a number with four digits, its standard error with one digit, – for an unknown value."""
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
    """Whether the value of a table cell is a number or an estimate."""
    return isinstance(value, (Real, Estimate)) and not isinstance(value, bool)


def numeric(table: Table) -> list[bool]:
    """Whether each column of a table is right-aligned: it holds numbers, or text such as 12*, >400 and no words."""
    found = []
    for index in range(len(table.columns)):
        values = [row[index] for row in table.rows]
        words = [value for value in values if isinstance(value, str)]
        counts = any(map(str.isdigit, "".join(words))) and not any(word[:1].isalpha() for word in words)
        found.append(counts or any(map(is_number, values)))
    return found


def falling(rate: float) -> str:
    """Text of n to the power −rate, such as n⁻⁰·⁴⁷."""
    return "n" + f"{-rate:.2f}".translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


def join(parts: Sequence[str]) -> str:
    """Text that lists the parts: "a", "a and b", "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def sentence(text: str) -> str:
    """Text as a sentence: with a capital letter at its beginning and a full stop at its end."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def plural(count: int, word: str) -> str:
    """Text of a count with its noun, in the plural unless it is 1: "1 head", "2 heads"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
