"""Accuracy of predicted rates: each kind of error is compared with exponents of its own kind."""

from __future__ import annotations

import numpy as np
import pytest

from head_cases import curve_of, head_record
from limitlens.probing.overview import PREDICTORS, rate_skill, rate_skills
from limitlens.theory import rates


def test_every_kind_of_rate_is_ranked_against_exponents_of_its_kind() -> None:
    """Heads whose moments follow the sharp law of moments and whose outputs follow that of outputs."""
    n = np.array([64.0, 256, 1024, 4096])
    heads = []
    for place, horizon in enumerate((0.8, 1.2, 1.6, 2.4)):
        moment = curve_of(n ** -rates.rate_rms(horizon), (64, 256, 1024, 4096))
        output = n ** -rates.rate_rms_output(horizon)
        moment_curves = {"mean": moment, "covariance": moment}
        made = {"sizes": moment.sizes, "horizon": horizon, "coupling": 1.5 * horizon**2, "moment_curves": moment_curves}
        heads.append(head_record(0, place, errors=output, **made))
    skill = rate_skills(heads)
    assert not {"rate_sharp", "rate_rms", "rate_drawn", "rate_proved"} & skill["predictors"].keys()
    assert skill["predictors"]["rate_rms_output"]["mean_absolute_miss"] < 0.02
    for kind in ("mean", "covariance"):
        found = skill["moments"][kind]["predictors"]
        assert found.keys() == {*PREDICTORS[kind], "rate_constant", "rate_best_constant"}
        assert found["rate_rms"]["mean_absolute_miss"] < 0.005 < found["rate_sharp"]["mean_absolute_miss"]
        assert found["rate_rms"]["rank_correlation"] == pytest.approx(1)
        assert found["rate_proved"]["status"] == "heuristic"  # Ψ of the covariance is no variance proxy
        assert found["rate_drawn_coupling"]["status"] == "drawn"
        assert found["rate_proved"]["at_least_as_fast"] == 1
        drawn = [rates.rate_drawn_coupling(head.coupling) for head in heads]
        slopes = [head.moment_curves[kind].rate.slope for head in heads]
        miss = np.abs(np.subtract(drawn, slopes)).mean()
        assert found["rate_drawn_coupling"]["mean_absolute_miss"] == pytest.approx(miss)
        assert found["rate_best_constant"]["mean_absolute_miss"] <= found["rate_constant"]["mean_absolute_miss"]
    assert rate_skill([head_record(0, 0, errors=output, sizes=moment.sizes, moment_curves={})], "mean")["heads"] == 0
