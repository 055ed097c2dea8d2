"""Read a saved result of any kind from its folder."""

from importlib import import_module
from pathlib import Path

from limitlens.errors import InputError
from limitlens.record import read_run
from limitlens.results import Result

# Class of each kind of result, as module:class.
KINDS = {
    "study": "experiments.study_result:StudyResult",
    "horizons": "experiments.sweeps:HorizonSweep",
    "radii": "experiments.sweeps:RadiusSweep",
    "hardmax": "experiments.hardmax:Hardmax",
    "tails": "experiments.heavy_tails:HeavyTails",
    "tail verdict": "statistics.tails:TailReport",
    "scaling": "experiments.scaling:ScalingLimits",
    "schedules": "experiments.schedules:Schedules",
    "heat": "experiments.heat_flow:HeatFlow",
    "probe": "probing.result:ProbeRun",
    "plan": "cache.plan:Plan",
    "trial": "cache.trial_result:Trial",
    "generation": "cache.generate:Generation",
    "certificate": "cache.certify_result:Certification",
    "temper": "interventions.temper:Temper",
    "depth": "interventions.depth:DepthRun",
    "downstream": "interventions.downstream:Downstream",
    "stability": "interventions.stability:Stability",
    "designs": "interventions.designs:Designs",
    "comparison": "comparison:Comparison",
    "theory": "experiments.theory_result:TheoryReport",
    "reproduction": "published.reproduction:Reproduction",
}


def load(folder: str | Path) -> Result:
    """Read a result of any kind from the folder to which `save` or `--out` wrote it.

    >>> report = ll.theory_report(ll.Gaussian(0.0, 1.0), ll.Head(1.5), 1000)
    >>> ll.load(report.save('runs/theory')).kind
    'theory'
    """
    run = read_run(folder)
    if run.kind not in KINDS:
        given = f"{str(run.folder)!r} holds a {run.kind!r}; expected one of {', '.join(KINDS)}"
        raise InputError(f"{given}, so read it with the version of limitlens that wrote it")
    module, name = KINDS[run.kind].split(":")
    return run.result(getattr(import_module(f"limitlens.{module}"), name))  # type: ignore[no-any-return]
