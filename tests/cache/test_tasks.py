"""Recall tasks: notes are in the context, questions come after it, answers are scored as greedy decoding would."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import limitlens as ll
from cache_cases import language_model, text
from limitlens.attention.policies import SHARED
from limitlens.attention.policies.adakv import FLOOR
from limitlens.attention.policies.duo import whole_heads
from limitlens.cache import trial as trial_module
from limitlens.cache.tasks import CALIBRATION, CONTINUED, QUOTED, TASKS, Prompt, make_prompt, needle
from limitlens.errors import InputError
from limitlens.models import LoadedModel

LONG = 600


def spelling_model(positions: int = 900) -> LoadedModel:
    """A tiny decoder whose tokens are single characters, so that every text can be read back."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    signs = [chr(code) for code in range(32, 127)] + ["\n"]
    backend = Tokenizer(models.WordLevel({sign: place for place, sign in enumerate([*signs, "[UNK]"])}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(signs) + 1, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=positions,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    return LoadedModel("spelling", model, tokenizer)


def read(loaded: LoadedModel, ids: tuple[int, ...]) -> str:
    return "".join(loaded.tokenizer.convert_ids_to_tokens(list(ids)))


def made(task: str, seed: int = 0, loaded: LoadedModel | None = None) -> Prompt:
    loaded = loaded or spelling_model()
    window = loaded.tokenizer("".join(f"{number} " for number in range(1000, 1300)))["input_ids"]
    return make_prompt(loaded, task, window[: LONG + 128], LONG, [seed, 1])


@pytest.mark.parametrize("task", [*TASKS, *CALIBRATION])
def test_a_prompt_fills_its_context_and_asks_after_it(task: str) -> None:
    loaded, prompt = spelling_model(), made(task)
    assert prompt.task == task
    assert len(prompt.context) == LONG
    context, question, answer = (read(loaded, part) for part in (prompt.context, prompt.question, prompt.answer))
    assert context.startswith("Read the following text")
    assert question.startswith("\n\n")
    for word in answer.replace(",", " ").split() if task not in ("repeat", "passage") else [answer]:
        assert word in context  # everything that is asked for is in the context
        assert word not in question
    assert made(task) == prompt
    assert made(task, seed=1) != prompt


def test_the_answers_are_those_of_the_notes() -> None:
    loaded = spelling_model()
    asked = made("needle8")
    name = read(loaded, asked.question).split("number for ")[1].split("?")[0]
    assert f"The special number for {name} is{read(loaded, asked.answer)}." in read(loaded, asked.context)
    assert read(loaded, asked.context).count("special number") == 8
    hop = made("hop")
    context, second = read(loaded, hop.context), read(loaded, hop.question).split("VAR ")[1].split(" ")[0]
    first = context.split(f"VAR {second} = VAR ")[1][:4]
    assert f"VAR {first} ={read(loaded, hop.answer)}." in context
    words = made("words")
    listed = [read(loaded, words.context).split(f"word number {place}: ")[1].split(".")[0] for place in range(1, 5)]
    assert read(loaded, words.answer) == f" {', '.join(listed)}"
    repeat = made("repeat")
    quoted = repeat.question[-QUOTED:]
    assert len(repeat.answer) == CONTINUED
    assert read(loaded, quoted + repeat.answer) in read(loaded, repeat.context)


def test_each_number_can_be_asked_for_in_the_same_context() -> None:
    loaded = spelling_model()
    window = list(loaded.tokenizer("".join(f"{number} " for number in range(1000, 1300)))["input_ids"])[: LONG + 128]
    prompts = [make_prompt(loaded, "needle8", window, LONG, [0, 1], needle(8, place)) for place in range(8)]
    assert {prompt.context for prompt in prompts} == {made("needle8").context}
    assert made("needle8") in prompts
    answers = [read(loaded, prompt.answer) for prompt in prompts]
    assert len(set(answers)) == 8
    for prompt, answer in zip(prompts, answers, strict=True):
        name = read(loaded, prompt.question).split("number for ")[1].split("?")[0]
        assert f"The special number for {name} is{answer}." in read(loaded, prompt.context)


def test_scores_count_the_answer_alone() -> None:
    """The answer 2, 3 after the question 0, 1: rows 1 and 2 of the predictions."""
    prompt = Prompt("needle1", (0,), (0, 1), (2, 3))
    full = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    right = torch.full((4, 5), -9.0)
    right[1, 2] = right[2, 3] = 0.0
    right = right.log_softmax(-1)
    found = prompt.score(right, full)
    assert found["accuracy"] == 1
    assert found["nll"] == pytest.approx(-float(right[1, 2] + right[2, 3]) / 2)
    own = slice(1, 3)
    assert found["kl"] == pytest.approx(float((full[own].exp() * (full[own] - right[own])).sum(-1).mean()))
    assert found["agreement"] == float((right[own].argmax(-1) == full[own].argmax(-1)).float().mean())
    wrong = right.clone()
    wrong[2, 3] = -50
    assert prompt.score(wrong, full)["accuracy"] == 0
    right[0] = right[3] = 0  # rows outside the answer
    assert prompt.score(right, full) == found


def test_a_chat_template_is_around_context_and_question() -> None:
    loaded = spelling_model()
    tokenizer = loaded.tokenizer.__class__(tokenizer_object=loaded.tokenizer.backend_tokenizer, unk_token="[UNK]")
    tokenizer.chat_template = "<user>{{ messages[0]['content'] }}</user>{% if add_generation_prompt %}<bot>{% endif %}"
    prompt = made("needle1", loaded=replace(loaded, tokenizer=tokenizer))
    assert read(loaded, prompt.context).startswith("<user>Read")
    assert "</user><bot>The special number for" in read(loaded, prompt.question)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match=r"leaves -?\d+ for the text of the task 'needle8'; .* longer context"):
        make_prompt(spelling_model(), "needle8", [3] * 600, 450, [0])
    with pytest.raises(InputError, match="spelling has 610 positions, so use a shorter context"):
        made("needle1", loaded=spelling_model(positions=610))
    with pytest.raises(InputError, match=r"the tasks are text,chess; expected some of text,needle1"):
        ll.tasks(language_model(), text(), ["text", "chess"])
    with pytest.raises(InputError, match=r"gives 0 windows of 40,128 tokens; 2 were asked for"):
        ll.tasks(language_model(), text(), ["text"], context=40_000, count=2)


def test_a_trial_on_tasks_shows_what_the_model_cannot_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = trial_of(("text", "repeat"))
    assert (tried.tasks, tried.solved) == (("text", "repeat"), ())
    assert "Recall was not measured" in str(tried)
    assert "has no chat template" in str(tried)
    assert "Left out" not in str(tried)
    monkeypatch.setattr(trial_module, "SOLVED", 0.0)
    tried = trial_of(("text", "repeat"))
    assert tried.solved == ("repeat",)
    rows = {(row.task, row.policy, row.allocation): row for row in tried.rows}
    for (task, policy, allocation), row in rows.items():
        assert (row.accuracy is None) == (task == "text")
        if task == "recall":  # the average over one task
            assert row.kl == rows["repeat", policy, allocation].kl
        if allocation not in ("plan", "full"):
            own = rows[task, "best", "plan"]
            assert row.kl_minus_plan == pytest.approx(row.kl - own.kl)
    assert {row.policy for row in tried.rows} == {"full", "best", "knorm", "kvzip"}
    assert ("The plan loses on" in str(tried)) != ("No other method has a smaller KL than the plan" in str(tried))


@cache
def spelled_plan() -> tuple[LoadedModel, ll.Plan]:
    """A plan for half of the cache of the spelling model, on a text of numbers."""
    path = Path(tempfile.mkdtemp()) / "numbers.txt"
    path.write_text("".join(f"{number} " for number in range(10_000, 10_500)))
    loaded = spelling_model()
    return loaded, ll.plan(loaded, str(path), total=0.5, context=200, windows=(1, 1))


def trial_of(tasks: tuple[str, ...]) -> ll.Trial:
    loaded, plan = spelled_plan()
    return ll.trial(plan, tasks=tasks, documents=2, model=loaded, policies=["knorm", "kvzip"])


def test_kvzip_compares_all_layers_and_adakv_the_heads_of_a_layer() -> None:
    rng = np.random.default_rng(0)
    scores = [torch.tensor(rng.random((2, 200)) * size) for size in (1.0, 3.0)]
    scores[1][0] *= 0.01
    kept = SHARED["kvzip"].masks(scores, 200)
    assert sum(int(mask.sum()) for mask in kept) == 200
    assert all(bool(mask[:, :4].all()) for mask in kept)
    flat = torch.cat([part[:, 4:].flatten() for part in scores])
    threshold = flat.topk(200 - 16).values.min()
    assert all(torch.equal(mask[:, 4:], part[:, 4:] >= threshold) for mask, part in zip(kept, scores, strict=True))
    kept = SHARED["adakv"].masks(scores, 300)
    assert [int(mask.sum()) for mask in kept] == [150, 150]
    assert all(bool(mask[:, -64:].all()) for mask in kept)
    assert int(kept[1][0].sum()) == max(64, int(FLOOR * 75)) < int(kept[1][1].sum())


def test_duo_keeps_the_heads_whole_that_lose_most() -> None:
    gain = np.array([[0.1, 5.0], [3.0, 0.2]])
    keys = whole_heads(gain, 160, 400)
    assert keys[0, 1] == keys[1, 0] == 160
    assert keys[0, 0] == keys[1, 1] == (400 - 320) // 2
    assert whole_heads(gain, 160, 20).sum() == 20
    assert (whole_heads(gain, 160, 640) == 160).all()
