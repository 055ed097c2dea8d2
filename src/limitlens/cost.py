"""What work costs, said before it begins: seconds and bytes from counts alone.

Rates were read off single runs on two busy cores, or guessed: a time is right to a factor of several, a probe's to one
of two (`docs/reliability.md`). They are there to tell a minute from a month, and nothing else is decided by them.
"""

import os
from logging import getLogger

from limitlens.errors import InputError

LONGEST = 24 * 3600.0  # seconds that are begun unasked
TOLD = 60.0  # seconds from which on they are said
_SPANS = ((365.25 * 86400, "years"), (86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def machine_memory() -> float:
    """Bytes of memory of this machine, or those that its control group leaves us; infinite where it does not say."""
    bound = float("inf")
    try:
        bound = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(bound, float(file.read()))  # "max" is no number: there is no bound
    except (OSError, ValueError, AttributeError):
        return bound


def check_cost(
    what: str, seconds: float = 0.0, memory: float = 0.0, yes: bool = False,
    remedy: str = "ask for fewer tokens, replicates or queries, or pass yes=True",
) -> None:  # fmt: skip
    """Say what the work costs where that is much; refuse what the machine cannot hold, or a day, unless `yes`.

    It is said to the logger "limitlens", which the command line prints.
    """
    there = machine_memory()
    parts = [f"about {_in(_SPANS, seconds)}"] if seconds >= TOLD else []
    cost = " and ".join(parts + ([f"{_in(_SIZES, memory)} of memory"] if memory >= 1e9 else []))
    if not yes and (memory > there or seconds > LONGEST):
        has = f"this machine has {_in(_SIZES, there)}" if memory > there else "no more than a day is begun unasked"
        raise InputError(f"{what} would take {cost}, and {has}; {remedy}")
    if cost:
        getLogger("limitlens").info("%s takes %s", what, cost)


def _in(units: tuple[tuple[float, str], ...], amount: float) -> str:
    """An amount in the largest unit that it holds one of."""
    size, name = next(unit for unit in units if amount >= unit[0])
    return f"{min(amount / size, 1e9):,.3g} {name}"
