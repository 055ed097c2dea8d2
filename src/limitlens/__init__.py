"""limitlens: how softmax attention over n tokens approaches its infinite-token limit.

Names are loaded when first used, so that `import limitlens` costs nothing and theory never waits for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limitlens import theory as theory
    from limitlens.attention.attend import attend as attend
    from limitlens.attention.design import designed_head as designed_head
    from limitlens.attention.head import Head as Head
    from limitlens.attention.limit import limit as limit
    from limitlens.attention.state import State as State
    from limitlens.budgets.plan import Plan as Plan
    from limitlens.budgets.plan import plan as plan
    from limitlens.comparison import compare as compare
    from limitlens.critical.scaling import scaling as scaling
    from limitlens.curves.error_curve import ErrorCurve as ErrorCurve
    from limitlens.curves.error_curve import TokensFor as TokensFor
    from limitlens.curves.fit import Rate as Rate
    from limitlens.errors import InputError as InputError
    from limitlens.experiments.hardmax import hardmax as hardmax
    from limitlens.experiments.heavy_tails import tails as tails
    from limitlens.experiments.study import study as study
    from limitlens.experiments.study_result import Curve as Curve
    from limitlens.experiments.sweeps import sweep as sweep
    from limitlens.foresight.predict import predict as predict
    from limitlens.foresight.prediction import Predictions as Predictions
    from limitlens.heads.record import HeadRecord as HeadRecord
    from limitlens.heads.regimes import Regime as Regime
    from limitlens.heads.result import ProbeRun as ProbeRun
    from limitlens.live.attributions import attributions as attributions
    from limitlens.live.cache_trial import trial as trial
    from limitlens.live.depth import depth as depth
    from limitlens.live.designs import designs as designs
    from limitlens.live.downstream import downstream as downstream
    from limitlens.live.temper import temper as temper
    from limitlens.loading import load as load
    from limitlens.measures import *  # noqa: F403
    from limitlens.models.intervene import intervene as intervene
    from limitlens.probing.probe import probe as probe
    from limitlens.published.reproduction import reproduce as reproduce
    from limitlens.sampling.checkpoint import Checkpoint as Checkpoint

    __version__: str

_ROOMS = {
    "attention.attend": "attend",
    "attention.design": "designed_head",
    "attention.head": "Head",
    "attention.limit": "limit",
    "attention.state": "State",
    "budgets.plan": "Plan plan",
    "comparison": "compare",
    "critical.scaling": "scaling",
    "curves.error_curve": "ErrorCurve TokensFor",
    "curves.fit": "Rate",
    "errors": "InputError",
    "experiments.hardmax": "hardmax",
    "experiments.heavy_tails": "tails",
    "experiments.study": "study",
    "experiments.study_result": "Curve",
    "experiments.sweeps": "sweep",
    "foresight.predict": "predict",
    "foresight.prediction": "Predictions",
    "probing.probe": "probe",
    "heads.record": "HeadRecord",
    "heads.regimes": "Regime",
    "heads.result": "ProbeRun",
    "live.attributions": "attributions",
    "live.cache_trial": "trial",
    "live.depth": "depth",
    "live.downstream": "downstream",
    "live.designs": "designs",
    "live.temper": "temper",
    "loading": "load",
    "measures": "Ball Cube Discrete Gaussian GaussianMixture Measure Sample Sphere VonMisesFisher",
    "models.intervene": "intervene",
    "published.reproduction": "reproduce",
    "sampling.checkpoint": "Checkpoint",
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names.split()}

__all__ = sorted([*_HOME, "__version__", "theory"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("limitlens")
    if name == "theory":
        return import_module("limitlens.theory")
    if name not in _HOME:
        raise AttributeError(f"module 'limitlens' has no attribute {name!r}")
    return getattr(import_module(f"limitlens.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
