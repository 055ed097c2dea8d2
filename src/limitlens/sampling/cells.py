"""Nested sample sizes n₁ < n₂ < ...: each sample extends the one before, so one pass over the tokens serves all."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from limitlens.errors import InputError

LARGEST = 10**15  # largest size: larger integers are not exact in float64
MOST = 10_000  # largest number of values in a grid


@dataclass(frozen=True)
class Cells:
    """Nested sample sizes n₁ < n₂ < ...: each sample contains the smaller ones."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] < 1 or any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            given = f"sizes are {', '.join(map(str, self.sizes)) or 'none'}"
            raise InputError(f"{given}; expected increasing positive integers, or lo:hi:count such as 1000:30000:12")

    @property
    def steps(self) -> tuple[int, ...]:
        """Number n_j − n_{j−1} of tokens by which a sample grows to each size, with n₀ = 0."""
        return tuple(int(step) for step in np.diff(self.sizes, prepend=0))

    def blocks(self, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield token ranges (index of size, start, stop) that cross neither a size nor a multiple of `length`."""
        start = 0
        for step, size in enumerate(self.sizes):
            while start < size:
                stop = min(start - start % length + length, size)
                yield step, start, stop
                start = stop


def parse_sizes(text: str | Sequence[int]) -> tuple[int, ...]:
    """Increasing sample sizes from `lo:hi:k` (k values in geometric progression), `a,b,c`, or a sequence of integers.

    >>> parse_sizes("1000:8000:4")
    (1000, 2000, 4000, 8000)
    """
    numbers = parse_grid(text, "sizes", "1000:30000:12")
    if max(numbers) > LARGEST or not (isinstance(text, str) or all(number.is_integer() for number in numbers)):
        raise InputError(f"sizes are {text!r}; expected whole numbers up to {LARGEST:g}, such as 1000:30000:12")
    values = [round(value) for value in numbers]
    # Neighbours in a progression may round to the same size; in a list they are a mistake.
    progression = isinstance(text, str) and ":" in text
    return Cells(tuple(dict.fromkeys(values) if progression else values)).sizes


def parse_grid(text: str | Sequence[float], name: str, example: str = "0.2:3:8") -> list[float]:
    """Parse positive numbers from `lo:hi:k` (k values in geometric progression), `a,b,c`, or a sequence of numbers."""
    try:
        if isinstance(text, str) and ":" in text:
            low, high, count = text.split(":")
            lo, hi, k = float(low), float(high), int(count)
            if 0 < lo <= hi < float("inf") and 1 <= k <= MOST:
                return [float(value) for value in np.geomspace(lo, hi, k)]
            raise ValueError
        if not isinstance(text, str) and any(isinstance(part, complex) for part in text):
            raise TypeError
        values = [float(part) for part in (text.split(",") if isinstance(text, str) else text)]
        if values and all(0 < value < float("inf") for value in values):
            return values
        raise ValueError
    except (ValueError, TypeError, OverflowError):
        given = repr(text) if len(repr(text)) < 80 else f"{repr(text)[:60]}..."
        expected = f"lo:hi:k with 0 < lo <= hi and 1 <= k <= {MOST:,}, such as {example}, or numbers such as 1 or 1,2,5"
        raise InputError(f"{name} is {given}; expected {expected}") from None
