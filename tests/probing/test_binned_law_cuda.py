"""Binned predictions for all heads of a layer at once, as on a GPU, against one head at a time."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from limitlens.attention.state import State
from limitlens.errors import InputError
from limitlens.probing import binned_law_cuda as gathering
from limitlens.probing.pilot import Layer, Traits
from limitlens.probing.predict import predict_layer, predicted_sizes
from limitlens.statistics.error_curve import PredictedErrors
from limitlens.theory.exact_bootstrap import pilot_errors

M, SIZES, CHOSEN = 500, np.array([4.0, 16, 64, 256, 1024]), np.array([0, 2, 3])
QUARTERS = np.random.default_rng(1).integers(4, size=M)


FEW_PROGRAMS = gathering.Tiling(nodes=256, block=64)  # where there is no GPU they are interpreted


def layer_of(spread: float = 1.0, atom: bool = True, device: str = "cpu") -> tuple[Layer, torch.Tensor, torch.Tensor]:
    """3 key/value heads with 2 query heads each; scores of the last are `spread` times as far apart as of the first."""
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(*shape, generator=drawn) for shape in ((3, 2, 4, 5), (M, 3, 5), (M, 3, 6)))
    scale = torch.linspace(1, spread, 6).view(3, 2, 1, 1) / 2
    beside = State(
        torch.ones(3, dtype=torch.int64), torch.linspace(-2, 9, 24).view(3, 8).double(), torch.ones(3, 8, 6).double()
    )
    if device != "cpu":
        beside = State(*(part.to(device) for part in beside.tensors().values()))
    traits = Traits(1.0, None, None, None, {}, None, None, "")
    layer = Layer(0, (query * scale).to(device), beside if atom else None, False, np.arange(4), traits)
    return layer, key.to(device), 3 + value.to(device)


def alone(layer: Layer, key: torch.Tensor, value: torch.Tensor, quarters: Any) -> list[Any]:
    """`pilot_errors` of each head."""
    found = []
    for pair, group in np.ndindex(3, 2):
        scores = layer.query[pair, group, CHOSEN] @ key[:, pair].mT
        atom = None
        if layer.atom is not None:
            atom = (
                layer.atom.lse[pair][4 * group + CHOSEN].numpy(),
                layer.atom.output[pair][4 * group + CHOSEN].numpy(),
            )
        values = value[:, pair].double().numpy()
        found.append(pilot_errors(scores.double().numpy(), values, SIZES, atom, quarters=quarters))
    return found


@pytest.mark.parametrize(
    ("spread", "atom", "quarters"), [(1.0, False, None), (4.0, True, QUARTERS), (40.0, True, None)]
)
def test_heads_together_give_the_predictions_of_single_heads(spread: float, atom: bool, quarters: Any) -> None:
    """Also where not all fit at once: two key/value heads of 8 values and 6 queries each."""
    tiling = replace(FEW_PROGRAMS, at_once=2 * 8 * 6)
    given = layer_of(spread, atom)
    at_once = list(gathering.layer_errors(*given, SIZES, CHOSEN, quarters, tiling))
    assert [len(some[0].error) for some in at_once] == [12, 6]
    for name in ("error", "output", "whole", "halves", "half_outputs"):
        for way in range(1 + atom):
            found = np.concatenate([getattr(some[way], name) for some in at_once], -2)
            expected = np.concatenate([getattr(one[way], name) for one in alone(*given, quarters)], -2)
            # Single precision; squares from 1e-12 of the largest on are of weights that vanish in it. Half a pilot
            # without its one heavy token is told about a limit far away: against tables in double precision the
            # farthest spread errs by 0.8e-5 one by one, and by 1.7e-5 together.
            close = 4e-5 if name == "halves" and spread == 60 else 2e-5
            np.testing.assert_allclose(found, expected, rtol=close, atol=1e-12 * expected.max(), err_msg=name)


def test_predictions_are_the_same() -> None:
    layer, key, value = layer_of(4.0)
    one_by_one = predict_layer(layer, key, value, [16, 64], queries=3)
    sizes = np.array(predicted_sizes([16, 64]), dtype=float)
    (found,) = gathering.layer_errors(layer, key, value, sizes, layer.places(3), None, FEW_PROGRAMS)
    clusters = layer.clusters[layer.places(3)]
    for way, errors in enumerate(found):
        for told, expected in zip(
            PredictedErrors.of(sizes, errors, clusters, M, 0), (head[way] for head in one_by_one), strict=True
        ):
            np.testing.assert_allclose(told.logs, expected.logs, atol=2e-5)
            np.testing.assert_allclose(told.text, expected.text, atol=2e-5)


class Calls(TorchDispatchMode):
    """What torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_a_device_synchronises_once_and_copies_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors that hold no numbers looking at one raises, and so does meeting a tensor of the CPU."""
    waits: list[Any] = []

    def told(tensor: torch.Tensor) -> list[float]:
        waits.append(tuple(tensor.shape))
        return [-9.0, 6.0, -3.0, -8.0]

    def back(tensor: torch.Tensor) -> torch.Tensor:
        waits.append(tuple(tensor.shape))
        return torch.zeros(tensor.shape)

    monkeypatch.setattr(torch.Tensor, "tolist", told)
    monkeypatch.setattr(torch.Tensor, "cpu", back)
    monkeypatch.setattr(gathering, "to_device", lambda array, device: torch.from_numpy(array).to(device))
    monkeypatch.setattr(gathering, "programs", SimpleNamespace(gather=defaultdict(lambda: lambda *given, **own: None)))
    given = layer_of(device="meta")
    with Calls() as calls:
        (found,) = gathering.layer_errors(*given, SIZES, CHOSEN, None)
    assert waits == [(4,), (2, 27, 18, len(SIZES))]
    assert found[1].halves.shape == (2, 6, 18, len(SIZES))
    assert calls.names.total() < 1500  # views among them
    assert not {"_local_scalar_dense.default", "nonzero.default", "scatter_add_.default"} & set(calls.names)


def test_scores_that_are_no_numbers_are_refused() -> None:
    layer, key, value = layer_of()
    key[3] = np.nan
    with pytest.raises(InputError, match="not a number"):
        next(gathering.layer_errors(layer, key, value, SIZES, CHOSEN, None))
