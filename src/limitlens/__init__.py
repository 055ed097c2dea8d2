"""limitlens: how softmax attention over n tokens approaches its infinite-token limit.

Names are loaded when first used, so that `import limitlens` costs nothing and theory never waits for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limitlens.attention.attend import attend, limit
    from limitlens.attention.design import designed_head
    from limitlens.attention.head import Head
    from limitlens.attention.state import State
    from limitlens.budgets.plan import Plan
    from limitlens.errors import InputError
    from limitlens.experiments.study import study
    from limitlens.experiments.study_result import Curve
    from limitlens.experiments.sweeps import radius_sweep
    from limitlens.heads.probe import probe
    from limitlens.heads.result import ProbeRun
    from limitlens.measures import (
        Ball,
        Cube,
        Discrete,
        Gaussian,
        GaussianMixture,
        Measure,
        Sample,
        Sphere,
        VonMisesFisher,
    )

_ROOMS = {
    "limitlens.attention.attend": ("attend", "limit"),
    "limitlens.attention.head": ("Head",),
    "limitlens.attention.state": ("State",),
    "limitlens.attention.design": ("designed_head",),
    "limitlens.experiments.study_result": ("Curve",),
    "limitlens.experiments.study": ("study",),
    "limitlens.experiments.sweeps": ("radius_sweep",),
    "limitlens.budgets.plan": ("Plan",),
    "limitlens.heads.probe": ("probe",),
    "limitlens.heads.result": ("ProbeRun",),
    "limitlens.errors": ("InputError",),
    "limitlens.measures": (
        "Ball",
        "Cube",
        "Discrete",
        "Gaussian",
        "GaussianMixture",
        "Measure",
        "Sample",
        "Sphere",
        "VonMisesFisher",
    ),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Ball",
    "Cube",
    "Curve",
    "Discrete",
    "Gaussian",
    "GaussianMixture",
    "Head",
    "InputError",
    "Measure",
    "Plan",
    "ProbeRun",
    "Sample",
    "Sphere",
    "State",
    "VonMisesFisher",
    "attend",
    "designed_head",
    "limit",
    "probe",
    "radius_sweep",
    "study",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'limitlens' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
