"""Diagnostics and geometry of a layer: all heads at once, as on a GPU, against one head at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from limitlens.models import LoadedModel
from limitlens.probing import diagnostics
from limitlens.probing import probe as probe_module
from limitlens.probing.collect import Collector
from limitlens.probing.probe import probe
from limitlens.statistics import tails
from tiny_models import TINY, letters, tiny_tokenizer


def collectors_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Collector]:
    """The layers of a tiny model that have seen the pool."""
    found: list[Collector] = []
    measure = probe_module.measure

    def spy(collectors: list[Collector], *rest: Any) -> Any:
        found.extend(collectors)
        return measure(collectors, *rest)

    monkeypatch.setattr(probe_module, "measure", spy)
    loaded = LoadedModel(name, TINY[name].model(), tiny_tokenizer(special=not TINY[name].causal))
    probe(loaded, letters(folder, spaces=5), 4800, window=16, sizes=(8, 16, 40, 200), replicates=5, queries=12, seed=3)
    return sorted(found, key=lambda collector: collector.layer.index)


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on as on a GPU: all heads together, and no arrays inside."""
    monkeypatch.setattr(diagnostics, "_heads_at_once", lambda collector: 1000)
    for module in (diagnostics, tails):
        monkeypatch.setattr(module, "native", lambda tensor: tensor)


def measured(collector: Collector) -> dict[str, Any]:
    """Diagnostics and geometry of a layer, by name."""
    (geometry,) = diagnostics.layer_geometry(collector, [collector])
    found = diagnostics.layer_detail(collector, 64)._asdict() | vars(geometry)
    return found | found.pop("numbers")


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2", "gpt_oss"])
def test_heads_at_once_are_the_heads_one_by_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without an atom, with shared keys and with a softcap."""
    for collector in collectors_of(name, tmp_path, monkeypatch)[:2]:
        with torch.inference_mode(), monkeypatch.context() as patch:
            alone = measured(collector)
            at_once(patch)
            together = measured(collector)
        assert alone.keys() == together.keys()
        for part, expected in alone.items():
            found = together[part]
            if part == "critical":
                expected, found = (np.array([astuple(f) for f in row], float) for row in (expected, found))
            if isinstance(expected, tails.TailReport):
                assert expected.verdict is found.verdict
                expected, found = expected.stderr, found.stderr
            if expected is None or isinstance(expected, str):
                assert expected == found
            else:
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * (part == "floor"))


class Calls(TorchDispatchMode):
    """Counts what is asked of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_layer_is_few_launches_and_waits_for_hardly_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the roots were found is all that is asked before the one copy back."""
    collector = collectors_of("llama", tmp_path, monkeypatch)[1]
    at_once(monkeypatch)
    with torch.inference_mode(), Calls() as calls:
        diagnostics.layer_detail(collector, 64)
    assert calls.count.total() < 1000
    assert calls.count["is_nonzero"] == 1
    assert not {"item", "_local_scalar_dense", "nonzero"} & set(calls.count)


def test_tails_of_a_tensor_are_those_of_the_array() -> None:
    tokens = np.random.default_rng(1).standard_t(5, size=(700, 5))
    tokens[:, 4] = tokens[:, 3]  # one axis without variance
    found, expected = tails.check_tails(torch.from_numpy(tokens)), tails.check_tails(tokens)
    assert found.verdict is expected.verdict
    np.testing.assert_allclose(found.pareto_norm.value, expected.pareto_norm.value, rtol=1e-9)
    for name in ("excess", "stderr", "variance_proxy", "kurtosis"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9)


def test_pareto_shapes_of_a_tensor_are_those_of_the_array() -> None:
    scores = np.sort(np.random.default_rng(2).gumbel(size=(3, 4, 60)), axis=-1)
    scores[0, 0] = 1.0  # a flat tail, one whose quarter ties with its threshold, and one beyond floating point
    scores[0, 1, :20] = scores[0, 1, 20]
    scores[0, 2] *= 200
    found = tails.sorted_shape(torch.from_numpy(scores))
    assert isinstance(found, Tensor)
    np.testing.assert_allclose(found.numpy(), tails.sorted_shape(scores), rtol=1e-10)
