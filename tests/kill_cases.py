"""Long jobs on tiny inputs, killed at random moments and resumed until they end: `python kill_cases.py COUNT SEED`.

One process imports everything once and forks for every attempt, so that an attempt costs no start-up time. It prints
one line of JSON: the number of killed attempts, of finished jobs and of kills that left a half-written file, and the
results that differ from a run without kills (there must be none).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import limitlens as ll
from limitlens.models import LoadedModel
from limitlens.probing.options import ProbeOptions
from limitlens.record import json_text
from limitlens.sampling.checkpoint import digest

LINE = ll.Gaussian(0.0, 1.0)


def told(result: Any) -> str:
    """Everything a result holds, but how long it took."""
    document = {name: part for name, part in result.document().items() if name != "seconds"}
    for study in document.get("studies", ()):
        study.pop("seconds")
    arrays = result.arrays()
    return json_text(document) + digest(*(part for name in sorted(arrays) for part in (name, arrays[name])))


@cache
def model(name: str = "Bert", layers: int = 1) -> LoadedModel:
    import transformers

    from tiny_models import SIZES, tiny_tokenizer

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **SIZES | {"num_hidden_layers": layers, "num_attention_heads": 2, "pad_token_id": 0}
    )
    own = getattr(transformers, f"{name}Model")(config).eval().requires_grad_(False)
    return LoadedModel(name, own, tiny_tokenizer(special=name == "Bert"))


@cache
def text() -> str:
    from tiny_models import letters

    return letters(Path(tempfile.mkdtemp()))


def probe(checkpoint: ll.Checkpoint | None, **options: Any) -> ll.ProbeRun:
    own: dict[str, Any] = {"tokens": 4000, "window": 16, "sizes": [8, 16, 700], "replicates": 2, "queries": 16}
    own["options"] = ProbeOptions(block=16 * 16)
    return ll.probe(model(), text(), **own | options, batch=4, checkpoint=checkpoint)


def study(checkpoint: ll.Checkpoint | None, **options: Any) -> ll.StudyResult:
    own: dict[str, Any] = {"sizes": [50, 5000, 20000], "replicates": 4, "queries": 64}
    return ll.study(LINE, ll.Head(1.2), **own | options, checkpoint=checkpoint)


def sweep(checkpoint: ll.Checkpoint | None) -> Any:
    own: dict[str, Any] = {"sizes": [50, 5000], "replicates": 3, "queries": 32}
    return ll.sweep(ll.Sphere(2), horizons=[0.5, 1, 2], **own, checkpoint=checkpoint)


def hardmax(checkpoint: ll.Checkpoint | None) -> Any:
    return ll.hardmax([50, 5000], measure="sphere", dim=2, replicates=40, queries=64, checkpoint=checkpoint)


def plan(checkpoint: ll.Checkpoint | None) -> Any:
    from cache_cases import language_model
    from cache_cases import text as letters

    return ll.plan(language_model(), letters(), total=0.5, context=64, checkpoint=checkpoint)


def trial(checkpoint: ll.Checkpoint | None) -> Any:
    from cache_cases import language_model, planned
    from cache_cases import text as letters

    return ll.trial(planned(), documents=4, model=language_model(), corpus=letters(), checkpoint=checkpoint)


def layers(checkpoint: ll.Checkpoint | None) -> Any:
    own: dict[str, Any] = {"tokens": 60_000, "window": 32, "sizes": "8:256:4", "replicates": 8, "queries": 16}
    return ll.reproduce("bert-layers", model=model(), corpus="stdlib-docs", **own, checkpoint=checkpoint)


JOBS: dict[str, Callable[..., Any]] = {
    "probe": probe, "study": study, "sweep": sweep, "hardmax": hardmax, "plan": plan, "trial": trial,
    "layers": layers,
}  # fmt: skip


def attempt(name: str, folder: Path) -> int:
    """Start the job anew in a child, which goes on from what it finds; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        found = told(JOBS[name](ll.Checkpoint(folder, every=1, resume=True)))
        (folder / "partial").write_text(found)
        (folder / "partial").rename(folder / "told")
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(count: int, seed: int, names: list[str]) -> None:
    torch.set_num_threads(1)  # a process with threads of its own cannot be forked
    JOBS["probe"] = partial(probe, options=ProbeOptions(block=4 * 16))  # many blocks, so many moments to be killed at
    generator = np.random.default_rng(seed)
    found: dict[str, Any] = {"kills": 0, "ended": 0, "half_written": 0, "resumed": 0, "different": []}
    expected, seconds = {}, {}
    for name in names:
        JOBS[name](None)  # whatever is made once is made
        begun = time.perf_counter()
        expected[name] = told(JOBS[name](None))
        seconds[name] = time.perf_counter() - begun
    while found["kills"] < count:
        name = names[found["ended"] % len(names)]
        with tempfile.TemporaryDirectory() as place:
            folder, longest = Path(place), seconds[name]
            while True:
                child = attempt(name, folder)
                time.sleep(generator.uniform(0, longest := 1.1 * longest))
                os.kill(child, signal.SIGKILL)
                status = os.waitpid(child, 0)[1]
                if not os.WIFSIGNALED(status):
                    break
                found["kills"] += 1
                found["half_written"] += (folder / ".checkpoint.partial.safetensors").exists()
                found["resumed"] += (folder / "checkpoint.safetensors").exists()
            found["ended"] += 1
            if os.WEXITSTATUS(status) or (folder / "told").read_text() != expected[name]:
                found["different"].append(name)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(JOBS))
