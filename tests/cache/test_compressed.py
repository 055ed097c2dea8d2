"""The compressed cache against the masked trial: the same logits for every architecture, at fewer bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import limitlens as ll
from cache_cases import CONTEXT, language_model, planned
from command_line import run
from limitlens.attention.policies import POLICIES
from limitlens.cache import compression
from limitlens.cache.compressed import CompressedCache, CompressedLayer, budgets_for, layer_bytes
from limitlens.cache.layers import layer_caches
from limitlens.cache.plan import Plan, _untouched
from limitlens.cache.reconstruction import read_twice
from limitlens.errors import InputError
from limitlens.models import LoadedModel
from limitlens.models.catalog import weights_digest
from limitlens.models.intervene import PolicyHook, kv_shape
from test_architectures import DECODERS, SLIDING, loaded, windows_of

USABLE = [name for name, policy in POLICIES.items() if not policy.sees_queries and not policy.needs_repeat]


def tokens(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(3, 29, (batch, length), generator=torch.Generator().manual_seed(seed))


def mixed_plan(model: LoadedModel, context: int = CONTEXT) -> Plan:
    """A plan without any measurement: every head of a full layer has a policy and a budget of its own."""
    start = _untouched(layer_caches(model, context), context, "best", None)
    budgets, policies, count = [], [], 0
    for kind, held in zip(start.layer_kinds, start.own_cache, strict=True):
        budgets.append(tuple(9 + 7 * ((count + h) % 4) for h in range(len(held))) if kind == "full" else held)
        policies.append(tuple(USABLE[(count + h) % len(USABLE)] for h in range(len(held))))
        count += len(held)
    return replace(start, model=model.name, budgets=tuple(budgets), policies=tuple(policies))


@contextmanager
def masked(model: LoadedModel, plan: Plan, length: int = CONTEXT) -> Iterator[None]:
    """The model with evicted keys masked instead of freed, as in a trial."""
    counts = [row or [0] for row in budgets_for(plan, length)]
    heads = max(map(len, counts))
    keys = [row or ("recent",) * heads for row in plan.policies]
    with torch.inference_mode(), ll.intervene(model, keys=keys, count=counts, cut=length):
        yield


def continued(model: LoadedModel, ids: Tensor, length: int = CONTEXT, step: int | None = None) -> Tensor:
    """Logits of the tokens behind the prompt, all in one forward pass or `step` at a time."""
    with torch.inference_mode():
        cache = model.model(input_ids=ids[:, :length], use_cache=True).past_key_values
        parts = ids[:, length:].split(step or ids.shape[1], 1)
        return torch.cat([model.model(input_ids=part, past_key_values=cache).logits for part in parts], 1)


def close(found: Tensor, wanted: Tensor) -> bool:
    return float((found - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("name", [*DECODERS, *SLIDING])
def test_every_architecture_predicts_as_the_masked_trial(name: str) -> None:
    """Token by token and in pieces, past the ends of sliding windows that are longer than the prompt."""
    model, ids = loaded(name), tokens(CONTEXT + 60)
    plan = mixed_plan(model)
    full = any(window is None or window > CONTEXT for window in windows_of(name))
    with masked(model, plan):
        wanted = continued(model, ids)
    with ll.apply(model, plan) as applied:
        for step in (1, 7, None):
            assert close(continued(model, ids, step=step), wanted)
    assert close(continued(model, ids), wanted) is not full  # the plan does change the predictions
    weighted = sum(sum(row) for row, kind in zip(plan.budgets, plan.layer_kinds, strict=True) if kind == "full")
    beside = applied.kept_bytes - plan.total.bytes  # at most a log-weight and a position for each entry
    assert 0 <= beside <= 8 * weighted
    assert applied.full_bytes == plan.size(plan.own_cache).bytes


@pytest.mark.parametrize("policy", USABLE)
def test_every_policy_predicts_as_the_masked_trial(policy: str) -> None:
    model, ids = language_model(), tokens(CONTEXT + 20)
    plan = replace(planned(), policies=tuple((policy,) * len(row) for row in planned().policies))
    with masked(model, plan):
        wanted = continued(model, ids)
    with ll.apply(model, plan) as applied:
        assert close(continued(model, ids, step=1), wanted)
    weighted = POLICIES[policy].unbiased
    assert (applied.kept_bytes > plan.total.bytes) == weighted
    assert applied.prompt == (CONTEXT,)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral-100"])
def test_a_batch_of_different_lengths_gives_each_prompt_what_it_gets_alone(name: str) -> None:
    model = loaded(name)
    plan = mixed_plan(model)
    rows = [tokens(length, seed=length)[0] for length in (CONTEXT, 41, 90)]
    longest = max(map(len, rows))
    ids, mask = torch.zeros(3, longest, dtype=torch.long), torch.zeros(3, longest, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, longest - len(row) :], mask[b, longest - len(row) :] = row, 1
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    with ll.apply(model, plan) as applied:
        together = model.model.generate(ids, attention_mask=mask, **options)
        assert applied.prompt == (CONTEXT, 41, 90)
        for b, row in enumerate(rows):
            alone = model.model.generate(row[None], **options)
            assert torch.equal(together.sequences[b, -8:], alone.sequences[0, -8:])
            for found, wanted in zip(together.logits, alone.logits, strict=True):
                assert close(found[b], wanted[0])
    assert any(isinstance(layer, CompressedLayer) for layer in together.past_key_values.layers)


def test_a_second_pass_selects_the_keys_that_the_repeated_prompt_reads() -> None:
    model, ids = language_model(), tokens(CONTEXT + 12)
    twice = mixed_plan(model)
    twice = replace(twice, policies=tuple(("reconstruction", "expected") for _ in twice.policies))
    hook = PolicyHook(twice.policies, twice.budgets, CONTEXT, twice.seed, kv_shape(model.model))
    hook.repeat = read_twice(model, ids[:, :CONTEXT])
    with torch.inference_mode(), ll.intervene(model, keys=hook):
        wanted = continued(model, ids)
    with ll.apply(model, twice) as applied:
        assert close(continued(model, ids, step=1), wanted)
        assert applied.kept_bytes == twice.total.bytes
    other = replace(twice, policies=mixed_plan(model).policies)
    with ll.apply(model, other):
        assert not close(continued(model, ids), wanted)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    padded = torch.cat([torch.zeros(1, 30, dtype=torch.long), ids[:, : CONTEXT - 30]], 1)
    both, mask = torch.cat([padded, ids[:, :CONTEXT]]), torch.ones(2, CONTEXT, dtype=torch.long)
    mask[0, :30] = 0
    with ll.apply(model.model, twice, force=True, tokenizer=model.tokenizer):
        together = model.model.generate(both, attention_mask=mask, **options)
        for b, prompt in enumerate((ids[:, : CONTEXT - 30], ids[:, :CONTEXT])):
            assert torch.equal(together[b, -4:], model.model.generate(prompt, **options)[0, -4:])
    with pytest.raises(InputError, match="needs its tokenizer"), ll.apply(model.model, twice, force=True):
        pass


def test_generation_gives_the_text_of_the_masked_model_and_leaves_the_model_as_it_was() -> None:
    model, plan, ids = language_model(), mixed_plan(language_model()), tokens(CONTEXT)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    before = model.model.generate(ids, **options)
    # The masked model draws other random keys for each beam, the compressed one the same: compare without chance.
    fixed = replace(plan, policies=tuple(("snapkv", "streaming") for _ in plan.policies))
    for used, beams in ((plan, 1), (fixed, 3)):
        with masked(model, used):
            wanted = model.model.generate(ids, num_beams=beams, **options)
        with ll.apply(model, used):
            found = model.model.generate(ids, num_beams=beams, **options)
        assert torch.equal(found, wanted)
    assert "generate" not in vars(model.model)
    assert torch.equal(model.model.generate(ids, **options), before)
    assert not torch.equal(before, wanted)


def test_a_prompt_that_was_read_in_inference_mode_is_continued_outside_of_it() -> None:
    model, plan, ids = language_model(), mixed_plan(language_model()), tokens(CONTEXT + 6)
    with ll.apply(model, plan):
        wanted = continued(model, ids)
        with torch.inference_mode():
            cache = model.model(input_ids=ids[:, :CONTEXT]).past_key_values
        parts = [model.model(input_ids=part, past_key_values=cache).logits for part in ids[:, CONTEXT:].split(1, 1)]
        assert close(torch.cat(parts, 1), wanted)


def test_sequences_are_selected_repeated_and_cropped() -> None:
    model, plan, ids = language_model(), mixed_plan(language_model()), tokens(CONTEXT + 6, batch=3)
    with torch.inference_mode(), ll.apply(model, plan):
        wanted = continued(model, ids)
        cache = model.model(input_ids=ids[:, :CONTEXT]).past_key_values
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        chosen = ids[[2, 2, 0, 0], CONTEXT:]
        cache = deepcopy(cache)
        model.model(input_ids=chosen[:, :4].flip(1), past_key_values=cache)
        cache.crop(-4)
        found = model.model(input_ids=chosen, past_key_values=cache).logits
        assert close(found, wanted[[2, 2, 0, 0]])
        assert cache.get_seq_length() == CONTEXT + 6
        with pytest.raises(InputError, match="7 tokens are to be removed from a compressed cache, of which 6 are new"):
            cache.crop(-7)
        with pytest.raises(InputError, match="cannot be reset"):
            cache.reset()


def test_budgets_are_shares_of_a_longer_prompt_and_entries_of_a_shorter_one() -> None:
    model, plan = language_model(), mixed_plan(language_model())
    assert budgets_for(plan, CONTEXT) == [list(row) for row in plan.budgets]
    assert budgets_for(plan, 2 * CONTEXT) == [[2 * budget for budget in row] for row in plan.budgets]
    assert budgets_for(plan, 12) == [[min(budget, 12) for budget in row] for row in plan.budgets]
    for length in (9, 12, 150):  # 9: nothing is evicted
        ids = tokens(length + 10)
        with masked(model, plan, length):
            wanted = continued(model, ids, length)
        with ll.apply(model, plan) as applied:
            assert close(continued(model, ids, length), wanted)
        assert (applied.kept_bytes == applied.full_bytes) == (length == 9)
        assert close(continued(model, ids, length), wanted) == (length == 9)


def test_the_file_of_a_plan_holds_the_mean_share_of_each_layer(tmp_path: Path) -> None:
    plan = mixed_plan(language_model())
    (plan.save(tmp_path / "plan") / "kv_budgets.json").rename(tmp_path / "file.json")
    shares = json.loads((tmp_path / "file.json").read_text())["layer_shares"]
    assert shares == pytest.approx([sum(row) / len(row) / CONTEXT for row in plan.budgets])


def test_the_rest_of_a_layer_is_freed_before_the_next_layer_is_read() -> None:
    """When a layer attends to the prompt, all layers before it hold only what the plan keeps."""
    model, plan = language_model(), mixed_plan(language_model())
    held: list[list[int]] = []
    own = compression.pack

    def watched(call: Any, *args: Any) -> Any:
        held.append([layer_bytes(layer) for layer in cache.layers])
        return own(call, *args)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), ll.apply(model, plan) as applied:
        patch.setattr(compression, "pack", watched)
        cache = CompressedCache(applied)
        model.model(input_ids=tokens(CONTEXT), past_key_values=cache)
    full = CONTEXT * plan.entry_bytes[0] * 2
    for layer, sizes in enumerate(held):
        assert sizes[layer] == full
        assert all(size < 0.5 * full for size in sizes[:layer])
        assert not any(sizes[layer + 1 :])


def test_a_full_cache_survives_if_memory_does_not_suffice() -> None:
    model, plan, ids = language_model(), mixed_plan(language_model()), tokens(CONTEXT + 5)

    def failing(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    before = continued(model, ids)
    with pytest.MonkeyPatch.context() as patch, ll.apply(model, plan) as applied:
        patch.setattr(compression, "pack", failing)
        with pytest.warns(UserWarning, match="not enough memory to compress every layer of the cache"):
            assert close(continued(model, ids), before)
        assert applied.kept_bytes == applied.full_bytes
        patch.setattr(compression, "pack", lambda *args: 1 / 0)  # any other error is not hidden
        with pytest.raises(ZeroDivisionError):
            continued(model, ids)


def test_a_compiled_model_warns_once_and_gives_the_same_logits() -> None:
    model, plan, ids = language_model(), mixed_plan(language_model()), tokens(CONTEXT + 5)
    with ll.apply(model, plan):
        wanted = continued(model, ids)
    fast = torch.compile(model.model, backend="eager")
    with ExitStack() as stack, torch.inference_mode():
        with pytest.warns(UserWarning, match="the model is compiled") as noted:
            stack.enter_context(ll.apply(fast, plan))
        cache = fast(input_ids=ids[:, :CONTEXT]).past_key_values
        found = fast(input_ids=ids[:, CONTEXT:], past_key_values=cache).logits
    assert len(noted) == 1
    assert isinstance(cache, CompressedCache)
    assert close(found, wanted)
    torch._dynamo.reset()


def test_caches_and_prompts_that_cannot_be_compressed_are_refused() -> None:
    model, plan, ids = language_model(), mixed_plan(language_model()), tokens(CONTEXT + 1)
    used = DynamicCache(config=model.model.config)
    with torch.inference_mode():
        model.model(input_ids=ids, past_key_values=used)
    static = StaticCache(config=model.model.config, max_cache_len=100)
    with ll.apply(model, plan):
        with pytest.raises(InputError, match="the cache holds 65 tokens already; expected a new one"):
            model.model(ids[:, :1], past_key_values=used)
        with pytest.raises(InputError, match="the cache is a StaticCache; expected none, or"):
            model.model(ids, past_key_values=static)
        with pytest.raises(InputError, match="prefill_chunk_size was given; leave it out"):
            model.model.generate(ids, prefill_chunk_size=16)
        mine = model.model(ids, past_key_values=DynamicCache(config=model.model.config)).past_key_values
        assert isinstance(mine, CompressedCache)
        with pytest.raises(InputError, match="already inside"), ll.apply(model, plan):
            pass
    shared = replace(plan, layer_kinds=("full", "none", "full"))
    with ll.apply(model, shared), pytest.raises(InputError, match="layer 1 has no cache of its own"):
        model.model(ids, use_cache=False)
    with pytest.raises(InputError, match=r"made in an `ll.apply` block that has ended"):
        model.model(ids[:, :1], past_key_values=mine)
    with ll.apply(model, plan), pytest.raises(InputError, match=r"made in another `ll.apply` block"):
        model.model(ids[:, :1], past_key_values=mine)


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    model, plan = language_model(), mixed_plan(language_model())
    with pytest.raises(InputError, match=r"the plan has \(3, 2\) layers and key/value heads, gpt2 has"):
        ll.apply(loaded("gpt2"), plan).__enter__()
    other = replace(plan, model_sha256="1" * 64)
    own = replace(model, sha256="2" * 64)
    with pytest.raises(InputError, match="the weights of letters differ from those of the plan"):
        ll.apply(own, other).__enter__()
    with ll.apply(own, other, force=True):
        pass
    model.model.save_pretrained(tmp_path)
    bare = type(model.model).from_pretrained(tmp_path)  # its files are found, so their digest is compared
    with pytest.raises(InputError, match="the weights of LlamaForCausalLM differ from those of the plan"):
        ll.apply(bare, other).__enter__()
    right = replace(plan, model_sha256=weights_digest(str(tmp_path)))
    saved = right.save(tmp_path / "plan")
    with ll.apply(bare, str(saved)) as applied:
        bare.generate(tokens(CONTEXT), max_new_tokens=2)
    assert 0 < applied.kept_bytes < 0.5 * applied.full_bytes


def test_generate_writes_the_text_of_the_compressed_model(tmp_path: Path) -> None:
    model, plan = language_model(), mixed_plan(language_model())
    file = tmp_path / "prompt.txt"
    file.write_text("abcdefgh" * 12)
    made = ll.generate(model, plan, file, max_new_tokens=6)
    ids = model.tokenizer(file.read_text(), return_tensors="pt")["input_ids"]
    with ll.apply(model, plan) as applied:
        wanted = model.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert made.text == model.tokenizer.decode(wanted)
    assert (made.prompt_tokens, made.new_tokens) == (96, 6)
    assert made.cache_bytes == {"full": applied.full_bytes, "kept": applied.kept_bytes}
    assert made.tokens_per_second is not None
    assert made.tokens_per_second > 0
    assert 0 < made.eviction_seconds < made.prefill_seconds
    assert made.peak_memory > 1e7
    document = made.document()
    assert document.keys() >= {"text", "cache_bytes", "tokens_per_second"}
    assert document["cache_bytes"].keys() == {"full", "kept"}
    again = ll.load(made.save(tmp_path / "run"))
    assert again.document() == document
    assert f"({applied.kept_bytes / applied.full_bytes:.1%}) of the prompt" in str(made)
    with pytest.raises(InputError, match=r"the prompt 'nothing.txt' cannot be read .*; expected a text file"):
        ll.generate(model, plan, "nothing.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match=r"empty.txt' is empty; expected some text"):
        ll.generate(model, plan, tmp_path / "empty.txt")
    with pytest.raises(InputError, match="max_new_tokens is 0; expected at least 1"):
        ll.generate(model, plan, file, max_new_tokens=0)
    with pytest.raises(InputError, match="96 tokens and max_new_tokens is 200; expected at most 256 together"):
        ll.generate(model, plan, file)

    def stop(done: float, total: float) -> None:
        if done == 4:
            raise KeyboardInterrupt

    partly = ll.generate(model, plan, file, max_new_tokens=6, progress=stop)
    assert (partly.interrupted, partly.new_tokens) == (True, 4)
    assert partly.text == model.tokenizer.decode(wanted[:4])


def test_the_command_prints_one_json_document_and_refuses_a_foreign_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = language_model()
    for name in ("letters", "tuned"):
        given.model.save_pretrained(name)
        given.tokenizer.save_pretrained(name)
    other = given.model.state_dict() | {"lm_head.weight": -given.model.lm_head.weight}
    type(given.model)(given.model.config).save_pretrained("tuned", state_dict=other)
    plan = replace(mixed_plan(given), model="letters", model_sha256=weights_digest("letters"))
    plan.save("plan")
    Path("prompt.txt").write_text("abcdefgh" * 10)
    asked = ("--plan", "plan", "--prompt", "prompt.txt", "--max-new-tokens", "3", "--json")
    code, out, _ = run(capsys, "generate", "letters", *asked)
    document = json.loads(out)
    assert code == 0
    assert document["new_tokens"] == 3
    assert document["cache_bytes"]["kept"] < 0.5 * document["cache_bytes"]["full"]
    code, out, err = run(capsys, "generate", "tuned", *asked)
    assert (code, out) == (2, "")
    assert "the weights of tuned differ from those of the plan (by their digest); plan again, or use --force" in err
    code, out, _ = run(capsys, "generate", "tuned", *asked, "--force")
    assert code == 0
    assert json.loads(out)["text"] != document["text"]
    for wrong, told in (("--prompt=nothing.txt", "cannot be read"), ("--plan=nowhere", "there is no run folder")):
        code, out, err = run(capsys, "generate", "no-model", *asked, wrong)  # before any model is loaded
        assert code == 2
        assert told in err


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral-100"])
def test_a_batch_that_is_read_in_groups_gives_what_it_gives_at_once(name: str) -> None:
    model, rows = loaded(name), [tokens(length, seed=length)[0] for length in (CONTEXT, 41, 90, 70, 90)]
    plan, longest = mixed_plan(model), max(map(len, rows))
    ids, mask = torch.zeros(5, longest, dtype=torch.long), torch.zeros(5, longest, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, longest - len(row) :], mask[b, longest - len(row) :] = row, 1
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    found = []
    for size in (None, 2):
        with ll.apply(model, plan, prefill_batch=size) as applied:
            made = model.model.generate(ids, attention_mask=mask, **options)
        sizes = applied.full_bytes, applied.kept_bytes, applied.prompt
        found.append(
            (made.sequences, torch.stack(made.logits), sizes, sum(map(layer_bytes, made.past_key_values.layers)))
        )
    assert torch.equal(found[0][0], found[1][0])
    assert close(found[1][1], found[0][1])
    assert found[0][2:] == found[1][2:]
    with (
        pytest.raises(InputError, match="prefill_batch is 0; expected at least 1"),
        ll.apply(model, plan, prefill_batch=0),
    ):
        pass
