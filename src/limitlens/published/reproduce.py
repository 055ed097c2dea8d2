"""`reproduce`: a published experiment by its name."""

import time
from importlib import import_module
from typing import Any

from limitlens.errors import InputError, Progress, check_seed
from limitlens.published.catalogue import named
from limitlens.published.reproduction import Reproduction, Work

# Where each experiment is.
HOME = {
    "laws": "gaussian-horizon sphere-d50 hardmax-log",
    "encoders": "bert-layers window-random horizon-ablation downstream",
    "temperatures": "critical-weights three-regimes backward-heat critical-log-n",
}


def reproduce(
    name: str, quick: bool = False, *, as_published: bool = False, seed: int = 0, progress: Progress | None = None,
    **changes: Any,
) -> Reproduction:  # fmt: skip
    """Run a published experiment again: its numbers beside the published ones, a figure, a verdict on each claim.

    `quick` takes sizes for a look in the place of the full ones. `as_published` computes numbers by the published
    code's own definitions too, where they differ from the right ones. `changes` replace parameters of the experiment
    by name, such as `replicates=50`, or `corpus="wikipedia.txt"` for one that reads a text.

    >>> found = ll.reproduce("backward-heat", quick=True)
    >>> found.table["verdict"].tolist()[:2]
    ['agrees within 1%', 'agrees within 1%']
    """
    about = named(name)
    check_seed(seed)
    parameters = {**about.full, **(about.quick if quick else {})}
    if (unknown := next((key for key in changes if key not in parameters), None)) is not None:
        raise InputError(f"{name!r} has no parameter {unknown!r}; expected one of {', '.join(parameters)}")
    parameters |= changes
    started, work = time.perf_counter(), Work(seed, as_published, progress)
    module = next(module for module, names in HOME.items() if name in names.split())
    getattr(import_module(f"limitlens.published.{module}"), name.replace("-", "_"))(work, **parameters)
    told = {**parameters, "seed": seed} | ({"model": str(model)} if (model := parameters.get("model")) else {})
    found = (work.numbers, tuple(work.drawn), time.perf_counter() - started, tuple(work.warnings))
    return Reproduction(name, quick, as_published, told, *found)
