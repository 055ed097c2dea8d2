"""Capture: the captured queries, keys and values reproduce the model's attention outputs and change nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, local
from typing import Any

import pytest
import torch
import transformers

from capture_cases import LENGTH, WINDOWS, assert_untouched, captures, run, token_ids, watch_outputs
from limitlens.errors import InputError
from limitlens.models import READERS, Captured, capture, load, projector
from tiny_models import LAYERS, SIZES, TINY, VOCABULARY, dense_outputs, tiny_tokenizer


def assert_explains(found: list[Captured], outputs: list[Any], rows: Any = None) -> None:
    """Dense float64 attention from what was captured equals what the model's heads gave out in float32."""
    assert len(outputs) == len(found) == LAYERS
    for captured, output in zip(found, outputs, strict=True):
        dense = dense_outputs(captured).transpose(1, 2).flatten(2)
        if rows is not None:
            dense, output = dense[rows], output[rows]
        torch.testing.assert_close(output.double(), dense, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", TINY)
def test_forwards_of_two_threads_side_by_side_are_captured_as_alone(name: str) -> None:
    model, meet, own = TINY[name].model(), Barrier(2), local()
    found: dict[int, list[Captured]] = {1: [], 2: []}

    def take(captured: Captured) -> None:
        meet.wait(10)  # so that every layer of one is captured while the other is at the same
        found[own.seed].append(captured)

    def forward(seed: int) -> None:
        own.seed = seed
        with torch.inference_mode():
            run_until_last_attention(input_ids=token_ids(seed))

    with capture(model, take, hidden=True) as run_until_last_attention, ThreadPoolExecutor(2) as pool:
        list(pool.map(forward, found))
    for seed, several in found.items():
        alone = captures(model, token_ids(seed), hidden=True)[0]
        assert [one.layer for one in several] == list(range(LAYERS))
        for one, other in zip(several, alone, strict=True):
            assert all(torch.equal(getattr(one, part), getattr(other, part)) for part in ("query", "key", "value"))
            assert one.hidden is other.hidden is None or torch.equal(one.hidden, other.hidden)


@pytest.mark.parametrize("name", TINY)
def test_dense_attention_from_what_was_captured_is_the_models_own(name: str) -> None:
    tiny = TINY[name]
    model, ids = tiny.model(), token_ids()
    outputs, remove = watch_outputs(model, tiny.output)
    before = run(model, ids)
    outputs.clear()
    found, within = captures(model, ids)
    remove()
    assert torch.equal(within, before)
    assert_explains(found, outputs)


@pytest.mark.parametrize("name", TINY)
def test_seeing_alone_ends_at_the_last_attention_and_sees_the_same(name: str) -> None:
    tiny = TINY[name]
    model, ids = tiny.model(), token_ids()
    whole, states = captures(model, ids)
    outputs, remove = watch_outputs(model, tiny.output)
    found: list[Captured] = []
    with capture(model, found.append) as run_until_last_attention, torch.inference_mode():
        run_until_last_attention(input_ids=ids)
        assert len(outputs) == LAYERS - 1  # the last layer makes nothing of what it saw
        assert torch.equal(run(model, ids), states)
    remove()
    assert len(found) == 2 * LAYERS
    for one, other in zip(found, 2 * whole, strict=True):
        assert all(torch.equal(getattr(one, part), getattr(other, part)) for part in ("query", "key", "value"))
    assert torch.equal(run(model, ids), states)


@pytest.mark.parametrize("name", TINY)
def test_every_captured_layer_has_its_kind(name: str) -> None:
    tiny = TINY[name]
    found, _ = captures(tiny.model(), token_ids())
    assert [captured.layer for captured in found] == list(range(LAYERS))
    assert tuple(captured.sliding_window for captured in found) == tiny.sliding
    for captured in found:
        assert captured.query.shape == (WINDOWS, tiny.query_heads, LENGTH, 8)
        assert captured.key.shape == captured.value.shape == (WINDOWS, tiny.key_heads, LENGTH, 8)
        assert captured.causal == tiny.causal
        assert captured.softcap == tiny.softcap
        assert (captured.sinks is not None) == tiny.sinks
        assert (captured.bias is not None) == tiny.bias
        if captured.sliding_window is not None:
            distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
            seen = (distance.abs() < captured.sliding_window) & ((distance >= 0) | (not tiny.causal))
            assert torch.equal(captured.mask.expand(WINDOWS, 1, LENGTH, LENGTH)[0, 0], seen)


def test_scales_are_the_models() -> None:
    scales = {name: captures(TINY[name].model(), token_ids())[0][0].scale for name in ("bert", "gemma2", "opt", "t5")}
    assert scales == {"bert": 8**-0.5, "gemma2": 5**-0.5, "opt": 1.0, "t5": 1.0}


@pytest.mark.parametrize("name", ["bert", "mpnet", "gpt2", "llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_is_kept_out(name: str, implementation: str) -> None:
    tiny = TINY[name]
    model, ids = tiny.model(), token_ids()
    if tiny.implementation == "sdpa":
        model.set_attn_implementation(implementation)
    real = torch.ones(WINDOWS, LENGTH, dtype=torch.long)
    real[1, -5:] = 0
    before = run(model, ids, attention_mask=real)
    outputs, remove = watch_outputs(model, tiny.output)
    found, within = captures(model, ids, attention_mask=real)
    remove()
    assert torch.equal(within, before)
    for captured in found:
        assert captured.causal == tiny.causal
        assert not captured.mask[1, ..., -5:].any()
    assert_explains(found, outputs, rows=real.bool())


def test_the_same_model_is_captured_alike_in_eager_mode() -> None:
    for name in ("bert", "llama", "mistral"):
        model, ids = TINY[name].model(), token_ids()
        sdpa, _ = captures(model, ids)
        model.set_attn_implementation("eager")
        eager, _ = captures(model, ids)
        for one, other in zip(sdpa, eager, strict=True):
            assert one.causal == other.causal
            torch.testing.assert_close(dense_outputs(one), dense_outputs(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_softcap_and_sinks_are_kept_under_any_implementation(name: str) -> None:
    model, ids = TINY[name].model(), token_ids()
    eager = run(model, ids)
    model.set_attn_implementation("flex_attention")
    found, within = captures(model, ids)
    assert model.config._attn_implementation == "flex_attention"
    assert all(captured.causal for captured in found)
    assert torch.equal(within, eager)


@pytest.mark.parametrize("name", ["bert", "mpnet", "llama", "gpt_oss"])
def test_the_model_is_put_back(name: str) -> None:
    tiny = TINY[name]
    model = tiny.model()
    captures(model, token_ids(), hidden=True)
    assert not any("forward" in vars(module) for module in model.modules())
    assert_untouched(model, tiny.implementation)


def test_the_model_is_put_back_after_an_error_in_the_callback() -> None:
    model, ids = TINY["llama"].model(), token_ids()
    before = run(model, ids)

    def fail(captured: Captured) -> None:
        if captured.layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), capture(model, fail, hidden=True):
        run(model, ids)
    assert_untouched(model, "sdpa")
    assert torch.equal(run(model, ids), before)
    assert len(captures(model, ids)[0]) == LAYERS


def test_a_model_within_a_language_model_is_captured() -> None:
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = token_ids()
    found: list[Captured] = []
    with torch.inference_mode():
        before = model(ids).logits
        with capture(model, found.append):
            within = model(ids, use_cache=False).logits
            model(ids, use_cache=False)
    assert torch.equal(before, within)
    assert [captured.layer for captured in found] == [0, 1, 2] * 2


def test_layers_without_softmax_attention_are_not_missed() -> None:
    model = transformers.Qwen3NextModel(
        transformers.Qwen3NextConfig(
            **SIZES,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            mlp_only_layers=[0, 1, 2],
        )
    ).eval()
    found, _ = captures(model, token_ids())
    assert [captured.layer for captured in found] == [1]


def test_an_architecture_outside_the_interface_is_refused() -> None:
    model = transformers.BloomModel(
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    )
    refusal = r"^BloomModel computes the attention of its layers without .* \(in BloomAttention\).* add a reader of "
    with pytest.raises(InputError, match=refusal + "BloomAttention to limitlens.models.READERS, which needs queries"):
        captures(model, token_ids())
    assert_untouched(model, "eager")


def test_a_reader_gives_what_its_module_gives_on_any_arguments() -> None:
    model = TINY["mpnet"].model()
    module = model.encoder.layer[1].attention.attn
    generator = torch.Generator().manual_seed(0)
    hidden, bias = torch.randn(2, 7, 32, generator=generator), torch.randn(1, 4, 7, 7, generator=generator)
    reader = READERS["MPNetSelfAttention"]
    for arguments in ((hidden,), (hidden, None, bias), (hidden, torch.zeros(2, 1, 1, 7), bias, True)):
        own, read = module(*arguments), reader.forward(module, reader.attend, *arguments)
        assert len(own) == len(read)
        assert all(torch.equal(one, other) for one, other in zip(own, read, strict=True))


def test_a_reader_that_differs_from_the_forward_is_refused_at_load(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, right = TINY["mpnet"].model(), READERS["MPNetSelfAttention"]
    model.save_pretrained(tmp_path)
    tiny_tokenizer(special=True).save_pretrained(tmp_path)
    assert load(str(tmp_path)).model.config.model_type == "mpnet"

    def without_bias(*arguments: Any, position_bias: Any = None, **more: Any) -> Any:
        return right.attend(*arguments, **more)

    monkeypatch.setitem(READERS, "MPNetSelfAttention", replace(right, attend=without_bias))
    with pytest.raises(
        InputError, match="reader of MPNetSelfAttention gives outputs that differ from the module's own"
    ):
        load(str(tmp_path))


def test_a_model_without_softmax_attention_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2)
    with pytest.raises(InputError, match="MambaModel computes the attention of"):
        captures(transformers.MambaModel(config).eval(), token_ids())


def test_a_layer_that_attends_twice_is_refused() -> None:
    config = transformers.DiffLlamaConfig(**SIZES)
    with pytest.raises(InputError, match="DiffLlamaModel attends more than once in layer 0"):
        captures(transformers.DiffLlamaModel(config).eval(), token_ids())


def test_a_layer_that_goes_its_own_way_is_refused() -> None:
    model = TINY["bert"].model()
    attention = model.encoder.layer[1].attention.self
    attention.forward = lambda hidden, *_, **__: (attention.value(hidden), None)
    with pytest.raises(InputError, match=r"BertModel computes the attention of layers \[1\] without"):
        captures(model, token_ids())
    assert_untouched(model, "sdpa")


def test_encoder_decoders_and_nested_captures_are_refused() -> None:
    options = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": 4}
    with pytest.raises(InputError, match="encoder with a decoder"):
        captures(transformers.T5Model(transformers.T5Config(**options)), token_ids())

    model, ids = TINY["llama"].model(), token_ids()
    with pytest.raises(InputError, match="block that captures it or intervenes in it"), capture(model, lambda _: None):
        captures(model, ids)
    assert_untouched(model, "sdpa")


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss"])
def test_queries_that_read_a_cache_are_explained(name: str) -> None:
    model, ids, first = TINY[name].model(), token_ids(), LENGTH - 4
    with torch.inference_mode():
        cache = model(ids[:, :first], use_cache=True).past_key_values
    outputs, remove = watch_outputs(model, TINY[name].output)
    found: list[Captured] = []
    with torch.inference_mode(), capture(model, found.append):
        model(ids[:, first:-1], past_key_values=cache)
        model(ids[:, -1:], past_key_values=cache)
    remove()
    for captured, output in zip(found, outputs, strict=True):
        assert captured.causal
        assert captured.position.tolist() == (
            [*range(first, LENGTH - 1)] if len(captured.position) > 1 else [LENGTH - 1]
        )
        dense = dense_outputs(captured).transpose(1, 2).flatten(2)
        torch.testing.assert_close(output.double(), dense, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", TINY)
def test_projections_make_the_captured_queries_and_keys(name: str) -> None:
    tiny = TINY[name]
    model = tiny.model()
    found, _ = captures(model, token_ids(), hidden=True)
    for captured in found:
        made, reason = projector(model)(captured.layer)
        assert (made is not None) == (captured.layer in tiny.projected)
        if made is None:
            assert f"layer {captured.layer} of {type(model).__name__} has no" in reason
            continue
        assert made.factor(made.ratios(captured)) == (tiny.factor and pytest.approx(tiny.factor, rel=1e-5))
        assert made.rotary == tiny.rotary
        assert ("before the rotary embedding" in reason) == tiny.rotary
        if tiny.factor == 1 and not tiny.rotary:
            query = captured.hidden @ made.query.T + (0 if made.query_bias is None else made.query_bias)
            key = captured.hidden @ made.key.T + (0 if made.key_bias is None else made.key_bias)
            for flat, heads in ((query, captured.query), (key, captured.key)):
                torch.testing.assert_close(flat, heads.transpose(1, 2).flatten(2), rtol=1e-4, atol=1e-5)


def test_hidden_states_are_captured_only_on_request() -> None:
    model = TINY["bert"].model()
    assert all(captured.hidden is None for captured in captures(model, token_ids())[0])
    (first, *_), _ = captures(model, token_ids(), hidden=True)
    assert first.hidden.shape == (WINDOWS, LENGTH, 32)
