"""Temperature schedules: their formulas, and their effect on θ, the number of effective keys and the entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from limitlens.errors import InputError
from limitlens.experiments.schedules import schedules
from limitlens.theory import LocalPower, critical_beta, uniform
from limitlens.theory.schedules import compare_schedules, rules

SIZES = [4096.0 * 16**step for step in range(4)]


def test_formulas() -> None:
    law, beta, first, n = uniform(5), 20.0, 4096.0, 65536.0
    assert rules(first, beta, law)["constant"](n) == beta
    assert rules(first, beta, law)["log"](n) == pytest.approx(beta * 16 / 12)
    assert rules(first, beta, law)["yarn"](n) == pytest.approx(beta * (0.1 * math.log(16) + 1) ** 2)


def test_critical_schedule_keeps_theta_and_the_others_lose_it() -> None:
    law = uniform(9)
    steps = compare_schedules(SIZES, critical_beta(SIZES[0], law), law)
    thetas = {name: np.array([step.theta for step in rows]) for name, rows in steps.items()}
    assert thetas["critical"] == pytest.approx(1, rel=1e-10)
    assert thetas["constant"] == pytest.approx(np.array(SIZES) / SIZES[0], rel=1e-10)
    assert thetas["constant"][-1] > thetas["log"][-1] > thetas["yarn"][-1] > 20
    shared = [step.sharing_keys for step in steps["critical"]]
    assert 16 < min(shared) <= max(shared) < 1 / 0.0520  # it tends to the limit from below, 1/.0521
    assert [step.regime for step in steps["critical"]] == ["selective"] * 4
    assert steps["constant"][-1].regime == "averaging"


def test_entropy_of_averaging_attention() -> None:
    """Where attention averages, the entropy is log n minus the relative entropy βK'(β) − K(β) of the tilt."""
    law, beta, n = uniform(5), 3.0, 1e8
    step = compare_schedules([n], beta, law)["constant"][0]
    divergence = -beta * float(law.tilted(beta)[1]) - float(law.log_laplace(beta))
    assert step.entropy == pytest.approx(math.log(n) - divergence, abs=1e-6)


def test_a_head_known_by_its_exponent_alone() -> None:
    """β ~ n^{2/α} for the critical schedule, and the numbers of the scaling limit."""
    law = uniform(5)
    local = LocalPower(law.a, law.log_c)
    beta = 1e4
    estimated, exact = (compare_schedules([1e8, 1.6e9], beta, given) for given in (local, law))
    assert estimated["critical"][1].beta == pytest.approx(beta * 16 ** (2 / 4), rel=1e-12)
    for name in exact:
        assert estimated[name][1].sharing_keys == pytest.approx(exact[name][1].sharing_keys, rel=2e-3)
    shown = schedules([1e8, 1.6e9], beta=beta)
    assert shown.document()["status"] == "verified"
    assert shown.predicted["critical"]["beta"] == pytest.approx([step.beta for step in exact["critical"]])


@pytest.mark.parametrize(
    ("sizes", "beta", "words"),
    [([], 1.0, "no context lengths"), ([10, 5], 1.0, "decrease"), ([1.0], 1.0, "n is 1"), ([10], 0.0, "beta is 0")],
)
def test_bad_input(sizes: list[float], beta: float, words: str) -> None:
    with pytest.raises(InputError, match=words):
        compare_schedules(sizes, beta, uniform(3))
