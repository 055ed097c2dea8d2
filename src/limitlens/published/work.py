"""One experiment while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from limitlens.errors import Progress
from limitlens.published.catalogue import Number
from limitlens.published.reproduction import Drawn

T = TypeVar("T")


@dataclass
class Work:
    """What an experiment is asked, and what it fills."""

    seed: int
    as_published: bool
    progress: Progress | None = None
    numbers: dict[str, Number] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def each(self, steps: Sequence[T]) -> Iterator[T]:
        """The steps one by one, telling how many are done."""
        for done, step in enumerate(steps):
            yield step
            if self.progress is not None:
                self.progress(done + 1, len(steps))

    def whole(self, result: T) -> T:
        """A result that was not cut short: what an interrupt left of one step is no experiment."""
        if getattr(result, "interrupted", False):
            raise KeyboardInterrupt
        self.warnings += [told for told in getattr(result, "warnings", ()) if told not in self.warnings]
        return result

    def draw(self, name: str, x: Any, y: Any, stderr: Any = None, line: bool = False) -> None:
        """Add a series to the figure."""
        x, y, bars = (None if part is None else tuple(float(one) for one in part) for part in (x, y, stderr))
        self.drawn.append(Drawn(name, x, y, bars, line))
