"""Separation of data: a trial reads no window that chose or checked its plan, and a check no window that chose it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import limitlens as ll
from cache_cases import CONTEXT
from limitlens.attention.policies import POLICIES
from limitlens.cache.cut import BEHIND, CutCurves
from limitlens.cache.layers import LayerCache
from limitlens.cache.plan import make_plan
from reading_cases import counted_words, counting_model, reading

LENGTH = CONTEXT + BEHIND
WORDS = 6 * LENGTH


def windows_in(passes: list[torch.Tensor]) -> set[int]:
    """The windows of the text that were read."""
    return {word // LENGTH for ids in passes for word in ids.tolist() if word < WORDS}  # without words of prompts


def test_a_trial_reads_no_window_of_its_plan(tmp_path: Path) -> None:
    """Also where the text of the plan is given once more, by another path."""
    loaded, path = counting_model(WORDS), tmp_path / "words.txt"
    path.write_text(counted_words(WORDS))
    with reading(loaded) as passes:
        made = ll.plan(loaded, str(path), total=0.5, context=CONTEXT, windows=(2, 2))
    # Costs need the windows of the fit alone, whose continuations they read; curves need all windows, whole.
    fit = windows_in([ids for ids in passes if len(ids) == BEHIND])
    planned = windows_in([ids for ids in passes if len(ids) == LENGTH])
    assert (len(fit), len(planned)) == (2, 4)
    assert fit < planned
    for corpus in (None, f"{tmp_path}/./words.txt"):
        with reading(loaded) as passes:
            tried = ll.trial(made, documents=24, model=loaded, corpus=corpus)
        assert tried.documents == 2
        assert windows_in(passes) == set(range(6)) - planned


def test_windows_that_check_a_plan_do_not_choose_it() -> None:
    """Other errors in the windows of the check change what is said of the plan, but not the plan, and conversely."""
    rng, sizes, fitted = np.random.default_rng(0), (0, 8, 16, 32, CONTEXT), 3
    falling = np.sort(rng.random((5, len(POLICIES), 2, 4, len(sizes))), -1)[..., ::-1]
    curves = CutCurves(tuple(POLICIES), sizes, falling, np.ones((5, 2, 4)), 2, (0, 1))

    def planned(squared_error: Any) -> tuple[Any, list[float]]:
        made = make_plan(
            replace(curves, squared_error=squared_error), np.ones((2, 4)), [LayerCache(2, CONTEXT, 64)] * 2,
            share=0.5, fitted=fitted,
        )  # fmt: skip
        return (made.budgets, made.policies, made.allocations), [one.error.value for one in made.totals]

    chosen, said = planned(falling)
    assert np.isfinite(said).all()
    check, fit = falling.copy(), falling.copy()
    check[fitted:] *= 4
    assert planned(check)[0] == chosen
    assert planned(check)[1] == pytest.approx([2 * error for error in said])
    fit[:fitted] = fit[:fitted][:, ::-1]  # the policies exchange their errors
    assert planned(fit)[0] != chosen
