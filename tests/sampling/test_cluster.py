"""Runs on a Ray cluster of two machines give the result of one process, also if a worker dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import limitlens as ll
from limitlens.errors import InputError
from limitlens.models import LoadedModel
from limitlens.probing import distributed
from limitlens.probing.options import ProbeOptions
from limitlens.sampling import cluster
from tiny_models import TINY, letters, tiny_tokenizer

needed = pytest.mark.skipif(cluster.importlib.util.find_spec("ray") is None, reason="needs `pip install ray`")
SMALL = ProbeOptions(block=160, kept_step=8)  # so that there are streamed cells too


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """A cluster of two machines with one core each; the second one can be taken away."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.second = made.add_node(num_cpus=1)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Workers have one thread each, and so has what they are held to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two books of arrays, relative to the largest number of each array."""
    assert one.keys() == other.keys()
    gaps = [0.0]
    for name, array in one.items():
        finite = np.isfinite(array)
        assert np.array_equal(finite, np.isfinite(other[name]))
        there = np.abs(array[finite])
        gaps.append(float(np.abs(array[finite] - other[name][finite]).max(initial=0) / max(there.max(initial=0), 1e-9)))
    return max(gaps)


def squares(folder: str) -> Callable[[], Callable[[int], tuple[int, int]]]:
    """A worker that squares numbers; the first to see a 3 dies of it, having been told where to leave a mark."""

    def prepare() -> Callable[[int], tuple[int, int]]:
        Path(folder, f"prepared-{os.getpid()}").touch()

        def work(number: int) -> tuple[int, int]:
            mark = Path(folder, "died")
            if number == 3 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 99:
                raise InputError("there is no 99")
            return number**2, torch.get_num_threads()

        return work

    return prepare


@needed
def test_a_dead_worker_loses_nothing_and_a_mistake_is_one_sentence(machines: Any, tmp_path: Path) -> None:
    told: list[int] = []

    def pieces(workers: int) -> range:
        told.append(workers)
        return range(8)

    found = list(cluster.spread(machines.address, squares(str(tmp_path)), pieces))
    assert told == [2]
    assert found == [(number**2, 1) for number in range(8)]
    assert (tmp_path / "died").exists()
    assert len(list(tmp_path.glob("prepared-*"))) <= 3  # once for each worker, and once more for the one that died
    with pytest.raises(InputError, match=r"^there is no 99$"):
        list(cluster.spread(machines.address, squares(str(tmp_path)), lambda workers: [99]))


@needed
def test_a_probe_outlives_a_machine(machines: Any, tmp_path: Path) -> None:
    TINY["llama"].model().save_pretrained(tmp_path / "model")
    tiny_tokenizer(special=False).save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"tokens": 6000, "window": 16, "sizes": "8:64:4", "replicates": 6, "queries": 16}
    options |= {"corpus": letters(tmp_path), "batch": 5, "options": SMALL}
    alone = ll.probe(str(tmp_path / "model"), **options)
    seen: list[float] = []

    def progress(done: float, total: float) -> None:
        seen.append(done / total)
        if done / total > 0.5 and machines.second is not None:
            machines.remove_node(machines.second, allow_graceful=False)
            machines.second = None

    spread = ll.probe(str(tmp_path / "model"), **options, ray=machines.address, progress=progress)
    assert machines.second is None
    assert seen[-1] == 1
    assert spread.tokens == alone.tokens
    assert distance(alone.arrays(), spread.arrays()) < 1e-10
    for mine, other in zip(alone.records, spread.records, strict=True):
        np.testing.assert_allclose(other.curve.error, mine.curve.error, rtol=1e-10)


def test_a_probe_on_a_cluster_is_interrupted_whole_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out: list[int] = []

    def here(address: str, prepare: Any, pieces: Any, *, gpus: bool = True) -> Iterator[Any]:
        """Two pieces are always out, as on a cluster."""
        work, waiting = prepare(), []
        for piece in pieces(2):
            waiting.append(piece)
            out.append(len(waiting))
            if len(waiting) == 2:
                yield work(waiting.pop(0))
        yield from map(work, waiting)

    monkeypatch.setattr(distributed, "spread", here)
    model = LoadedModel("tiny", TINY["llama"].model(), tiny_tokenizer(special=False))
    options: dict[str, Any] = {"tokens": 6000, "window": 16, "sizes": "8:64:4", "replicates": 6, "queries": 16}
    options |= {"corpus": letters(tmp_path), "batch": 5, "options": SMALL}
    alone = ll.probe(model, **options)

    def stop(done: float, total: float) -> None:
        if done / total > 0.5:
            raise KeyboardInterrupt

    kept = ll.Checkpoint(tmp_path / "run")
    half = ll.probe(model, **options, ray="auto", checkpoint=kept, progress=stop)
    assert half.interrupted
    assert max(out) == 2
    # What was out when it was asked to stop is in it: as many tokens are counted as were merged.
    assert half.tokens < alone.tokens
    again = ll.probe(model, **options, ray="auto", checkpoint=ll.Checkpoint(tmp_path / "run", resume=True))
    assert not again.interrupted
    assert again.tokens == alone.tokens
    assert distance(alone.arrays(), again.arrays()) < 1e-10


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:1", "127.0.0.1:99999", "host:port", "ray://x:1"])
@needed
def test_an_unreachable_address_is_refused(address: str) -> None:
    with pytest.raises(InputError, match=r"^no Ray cluster answers at .*; expected auto or the HOST:PORT of a head"):
        list(cluster.spread(address, squares("."), range))


def test_ray_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs Ray; run `pip install 'limitlens\[cluster\]'`"):
        list(cluster.spread("auto", squares("."), range))
