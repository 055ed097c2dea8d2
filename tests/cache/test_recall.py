"""Budgets for text and recall: costs against real cuts, and fits that keep their total and get no worse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import limitlens as ll
from cache_cases import CONTEXT, language_model, text
from limitlens.cache import reading, recall
from limitlens.cache.cut import cut_windows, window_order
from limitlens.cache.reading import ReadPrompt, read_prompt
from limitlens.cache.recall import RecallFit, recall_costs, text_costs
from limitlens.cache.tasks import Prompt, prompts_of
from limitlens.errors import InputError
from limitlens.sampling.checkpoint import Checkpoint

SIZES = (0, 16, 32, 48, CONTEXT)


def reads(count: int = 2) -> list[ReadPrompt]:
    """Contexts that a tiny model has read; the text behind them is the answer."""
    loaded = language_model()
    windows = cut_windows(loaded, text(), "auto", CONTEXT)
    rows = window_order(windows, 0)[:count]
    prompts = [prompt for row in rows for prompt in prompts_of(loaded, windows, row, ("text",), CONTEXT, 0)]
    return [read_prompt(loaded, prompt, 0) for prompt in prompts]


def test_text_costs_are_the_kl_of_small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one head that loses a quarter of its keys: the second order, within its own accuracy; nothing if all stay."""
    monkeypatch.setattr(recall, "SAMPLES", 400)
    found = np.mean([text_costs(read, ["recent", "reconstruction"], SIZES, 0) for read in reads()], 0)
    assert found.shape == (2, 3, 2, len(SIZES))
    assert np.abs(found[..., -1]).max() < 1e-9
    ratios = []
    for place, name in enumerate(("recent", "reconstruction")):
        for layer, head in np.ndindex(3, 2):
            counts = np.full((3, 2), CONTEXT)
            counts[layer, head] = 48
            measured = np.mean([read.kl(read.cut([[name] * 2] * 3, counts)) for read in reads()])
            ratios.append(measured / found[place, layer, head, 3])
    assert np.median(ratios) == pytest.approx(1, abs=0.25)
    assert 0.4 < min(ratios) <= max(ratios) < 2.5


def test_recall_costs_are_differences_of_real_cuts() -> None:
    own = reads(1)
    counts = np.array([[16, 40], [64, 20], [0, 33]])
    policies = ["recent", "expected", "reconstruction"]
    chosen = np.array([[0, 1], [1, 1], [2, 0]])
    checkpoint = Checkpoint()
    found = recall_costs(
        own,
        policies,
        chosen,
        counts,
        (0, 1, 2),
        SIZES,
        lambda count, make: checkpoint.each({"job": "test"}, count, make),
    )
    assert found.shape == (3, 3, 2, len(SIZES))

    def kl(names: Any, keys: Any) -> float:
        return own[0].kl(own[0].cut([[policies[place] for place in row] for row in names], keys))

    for (layer, head), policy, size in (
        ((0, 0), 0, 32), ((1, 1), 1, 0), ((2, 1), 0, 64), ((2, 0), 2, 64), ((0, 0), 1, 32), ((0, 0), 2, 16),
    ):  # fmt: skip
        keys, names = counts.copy(), chosen.copy()
        keys[layer, head], names[layer, head] = size, policy
        expected = kl(names, keys) - kl(chosen, counts)
        assert found[policy, layer, head, SIZES.index(size)] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found[0, 0, 0, 1] == found[1, 1, 0, -1] == found[2, 2, 0, 0] == 0  # at the planned keys


def plan(**options: Any) -> ll.Plan:
    asked: dict[str, Any] = {"total": 0.5, "context": CONTEXT, "windows": (2, 1), "policy": "expected"} | options
    return ll.plan(language_model(), text(), **asked)


def test_a_plan_for_recall_refits_until_it_gets_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model solves nothing, so the calibration prompts are its own texts."""
    on_text = plan(weights={"text": 1})
    assert (on_text.weights, on_text.recall) == ({"text": 1}, None)
    assert on_text.budgets != plan().budgets  # directions of errors count
    monkeypatch.setattr(recall, "calibration", lambda *given: (reads(), {"fact": 1.0}))
    made = plan(weights={"text": 0.0, "recall": 1.0})
    assert made.recall is not None
    assert made.recall.prompts == 2
    assert len(made.recall.kl) == len(made.recall.text_cost) > 1
    assert list(made.recall.kl) == sorted(made.recall.kl, reverse=True)
    assert made.total.entries <= on_text.total.entries
    assert made.total.entries >= 0.97 * on_text.total.entries
    assert "calibration prompts" in str(made)
    best = plan(weights={"text": 1, "recall": 1}, policy="best")
    assert best.recall is not None
    again = ll.load(best.save(__import__("tempfile").mkdtemp() + "/plan"))
    assert again.document() == best.document()


def test_a_plan_says_when_recall_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "calibration", lambda *given: ([], {"fact": 0.25}))
    made = plan(weights={"text": 1, "recall": 1})
    assert made.recall == RecallFit({"fact": 0.25}, 0, (), ())
    assert made.budgets == plan(weights={"text": 1}).budgets
    assert "Recall was not measured: with its whole cache the model solves no kind" in str(made)


def test_calibration_keeps_prompts_that_the_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = language_model()
    windows = cut_windows(loaded, text(), "auto", CONTEXT)
    right = {"one": 1.0, "two": 0.0}

    def prompts(*given: Any) -> list[Prompt]:
        made = prompts_of(loaded, windows, given[2], ("text",), CONTEXT, 0)[0]
        return [Prompt(name, made.context, made.question, made.answer) for name in right]

    monkeypatch.setattr(recall, "CALIBRATION", right)
    monkeypatch.setattr(recall, "prompts_of", prompts)
    monkeypatch.setattr(Prompt, "score", lambda self, *given: {"accuracy": right[self.task]})
    found, accuracy = recall.calibration(loaded, windows, [0, 1], CONTEXT, 0)
    assert accuracy == right
    assert [read.prompt.task for read in found] == ["one", "one"]


@pytest.mark.parametrize("weights", [{}, {"text": -1}, {"text": 0, "recall": 0}, {"chess": 1}])
def test_weights_that_say_nothing_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(InputError, match="expected weights of at least 0 such as text=1,recall=1"):
        ll.plan("no-model", weights=weights)
    with pytest.raises(InputError, match="expected a total with weights"):
        ll.plan("no-model", weights={"text": 1}, error=0.1)


@pytest.mark.parametrize("names", ["reconstruction", "priority"])
def test_cuts_predicted_in_one_batch_are_those_predicted_alone(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = reads(1)[0]
    hooks = [
        None,
        read.cut(names, 20),
        read.cut("streaming", 20),
        read.cut([["recent"] * 2] * 3, np.full((3, 2), 9)),
        read.shared("kvzip", 99),
    ]
    alone = [read.predict(hook) for hook in hooks]
    monkeypatch.setattr(reading, "BATCHED", ("cpu",))
    held = sum(call.key.nbytes + call.value.nbytes for call in read.calls)
    for copies in (2, 4):
        monkeypatch.setattr(reading, "TOGETHER", copies * held)
        for one, other in zip(alone, read.predict_each(hooks), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
