"""Interventions: neutral settings leave a model unchanged, others attend by the formula, with a cache too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

import limitlens as ll
from capture_cases import LENGTH, assert_untouched, captures, run, token_ids, watch_outputs
from limitlens.attention.policies import POLICIES
from limitlens.errors import InputError
from limitlens.models import Captured, LoadedModel, capture
from limitlens.models.intervene import PolicyHook, attend
from tiny_models import GROUPED, LAYERS, TINY, VOCABULARY, dense_outputs, tiny_tokenizer

DECODERS = ("gpt2", "opt", "llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")
ONCE = [name for name, choice in POLICIES.items() if not choice.needs_repeat]  # no second pass over the context
ALONE = [name for name in ONCE if not POLICIES[name].needs_past]
CUT = 12


def heads_out(name: str, ids: Any, **options: Any) -> tuple[list[Any], Any]:
    """What enters the output projections under an intervention, and the model's own output."""
    model = TINY[name].model()
    outputs, remove = watch_outputs(model, TINY[name].output)
    with ll.intervene(model, **options):
        states = run(model, ids)
    remove()
    return outputs, states


@pytest.mark.parametrize("name", TINY)
def test_all_keys_and_factor_one_change_no_bit(name: str) -> None:
    model, ids = TINY[name].model(), token_ids()
    before = run(model, ids)
    with ll.intervene(model, keys="all", score_scale=1):
        assert torch.equal(run(model, ids), before)
    with ll.intervene(model, keys=lambda call: call):
        assert torch.equal(run(model, ids), before)
    assert_untouched(model, TINY[name].implementation)


@pytest.mark.parametrize("name", TINY)
def test_a_factor_multiplies_the_scores(name: str) -> None:
    """The first layer, which is given the same input, is dense attention with scaled queries, in float64."""
    (first, *_), _ = captures(TINY[name].model(), token_ids())
    table = 0.5 + torch.rand(LAYERS, 4, generator=torch.Generator().manual_seed(2))
    for factor, per_head in ((1.7, torch.full((4,), 1.7)), (table.numpy(), table[0]), (table.tolist(), table[0])):
        outputs, _ = heads_out(name, token_ids(), score_scale=factor)
        expected = dense_outputs(replace(first, query=first.query * per_head.view(1, -1, 1, 1)))
        torch.testing.assert_close(outputs[0].double(), expected.transpose(1, 2).flatten(2), rtol=1e-4, atol=2e-5)

    def grows(layer: int, position: Any) -> Any:
        assert torch.equal(position, torch.arange(LENGTH))
        return (1 + 0.1 * position) * (layer + 1)

    outputs, _ = heads_out(name, token_ids(), score_scale=grows)
    expected = dense_outputs(replace(first, query=first.query * (1 + 0.1 * torch.arange(LENGTH)).view(-1, 1)))
    torch.testing.assert_close(outputs[0].double(), expected.transpose(1, 2).flatten(2), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", TINY)
def test_as_many_keys_as_there_are_give_the_model_itself(name: str) -> None:
    before = run(TINY[name].model(), token_ids())
    for keys in ALONE if TINY[name].causal else ONCE:
        _, within = heads_out(name, token_ids(), keys=keys, count=LENGTH)
        torch.testing.assert_close(within, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_queries_attend_to_the_nearest_keys_alone(name: str) -> None:
    (first, *_), _ = captures(TINY[name].model(), token_ids())
    outputs, _ = heads_out(name, token_ids(), keys="recent", count=3)
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    near = distance < 3 if TINY[name].causal else distance < 2
    rows = slice(2, None) if TINY[name].causal else slice(1, -1)  # an encoder's first and last look to one side
    seen = near if first.seen() is None else near & first.seen()
    expected = dense_outputs(replace(first, mask=seen)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(outputs[0].double()[:, rows], expected[:, rows], rtol=1e-4, atol=2e-5)


def test_queries_attend_in_blocks() -> None:
    for name in ("mistral", "gemma2", "gpt_oss"):  # with neither softcap nor sinks, with a softcap, with sinks
        for call in captures(TINY[name].model(), token_ids())[0]:
            whole = attend(call)
            torch.testing.assert_close(attend(call, max_scores=700), whole)
            torch.testing.assert_close(whole.double(), dense_outputs(call), rtol=1e-4, atol=2e-5)
    whole = run(TINY["mistral"].model(), token_ids())
    hook = PolicyHook("oracle_topk", LENGTH, None, 0, (LAYERS, TINY["mistral"].key_heads), max_scores=700)
    _, blocks = heads_out("mistral", token_ids(), keys=hook)
    torch.testing.assert_close(blocks, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "mpnet"])
def test_the_oracle_ranks_keys_by_scores_with_the_position_bias(name: str) -> None:
    for call in captures(TINY[name].model(), token_ids())[0]:
        kept = PolicyHook("oracle_topk", 5, None, 0, (LAYERS, TINY[name].key_heads))(call).mask
        scores = call.scale * (call.query @ call.key.mT) + call.bias
        expected = torch.zeros_like(scores).bool().scatter(-1, scores.topk(5).indices, True)
        assert torch.equal(kept, expected)


def test_each_head_may_have_its_own_policy() -> None:
    """The first layer, whose input is the same, has the output of each head's own policy."""
    names = [["random", "snapkv"], ["streaming", "priority"], ["knorm", "knorm"]]
    counts = [[5, 4], [6, 3], [2, 7]]
    mixed, _ = heads_out("llama", token_ids(), keys=names, count=counts, cut=CUT)
    for head, name in enumerate(names[0]):
        one, _ = heads_out("llama", token_ids(), keys=name, count=counts, cut=CUT)
        query_heads = slice(2 * head, 2 * head + 2)
        parts = (part[0].unflatten(-1, (4, 8))[:, :, query_heads] for part in (mixed, one))
        torch.testing.assert_close(*parts)


def decode(model: Any, ids: Any, first: int) -> Any:
    """The hidden states of a text read in two parts and then token by token, with a cache."""
    with torch.inference_mode():
        made = model(ids[:, :first], use_cache=True)
        parts, cache = (ids[:, first : first + 3], *ids[:, first + 3 :].split(1, 1)), made.past_key_values
        later = [model(part, past_key_values=cache, use_cache=True).last_hidden_state for part in parts]
    return torch.cat([made.last_hidden_state, *later], 1)


@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_changes_nothing(name: str) -> None:
    """Captures, factors and choices are the same whether a text is read at once or step by step."""
    model, ids = TINY[name].model(), token_ids()
    seen: list[Captured] = []
    with capture(model, seen.append):
        decode(model, ids, CUT)
    assert all(call.causal for call in seen)
    assert [len(call.position) for call in seen[::LAYERS]] == [CUT, 3, *(1,) * (LENGTH - CUT - 3)]
    for options in (
        {"score_scale": lambda layer, position: 1 + 0.2 * position + layer},
        {"keys": "oracle_topk", "count": 4},
        {"keys": "recent", "count": 4},
        {"keys": "snapkv", "count": 5, "cut": CUT},
        {"keys": "random", "count": 5, "cut": CUT, "seed": 3},
        {"keys": "streaming", "count": [[3, 5], [6, 4], [9, 7]] if TINY[name].key_heads == 2 else 5, "cut": CUT},
    ):
        with ll.intervene(model, **options):
            whole = run(model, ids)
            torch.testing.assert_close(decode(model, ids, CUT), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keys", ONCE)
def test_a_cut_changes_only_tokens_behind_the_context(keys: str) -> None:
    name, count = "llama", 5
    (first, *_), before = captures(TINY[name].model(), token_ids())
    calls: list[Captured] = []
    model = TINY[name].model()
    with ll.intervene(model, keys=keys, count=count, cut=CUT), capture(model, calls.append):
        within = run(model, token_ids())
    torch.testing.assert_close(within[:, :CUT], before[:, :CUT], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(within[:, CUT:], before[:, CUT:], atol=1e-3)
    torch.testing.assert_close(calls[0].query, first.query)  # a capture inside sees what reaches the choice
    with ll.intervene(model, keys=keys, count=CUT, cut=CUT):
        torch.testing.assert_close(run(model, token_ids()), before, rtol=1e-5, atol=1e-5)
    with ll.intervene(model, keys=keys, count=count, cut=LENGTH):
        torch.testing.assert_close(run(model, token_ids()), before, rtol=1e-5, atol=1e-5)


def test_keys_and_values_can_be_replaced() -> None:
    """A projection: pairs of neighbouring keys and values stand for their means, in an encoder."""

    def halve(call: Captured) -> Captured:
        key, value = (part[:, :, : LENGTH - 1].unflatten(2, (-1, 2)).mean(3) for part in (call.key, call.value))
        return replace(call, key=key, value=value)

    (first, *_), _ = captures(TINY["bert"].model(), token_ids())
    outputs, _ = heads_out("bert", token_ids(), keys=halve)
    expected = dense_outputs(halve(first)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(outputs[0].double(), expected, rtol=1e-4, atol=2e-5)


def test_gradients_flow_through_the_factor_and_are_right() -> None:
    config = transformers.LlamaConfig(**GROUPED)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False).double()
    for parameter in model.parameters():
        parameter.add_(0.25 * torch.randn_like(parameter))
    ids, gamma = token_ids(), torch.full((LAYERS, 4), 0.1, dtype=torch.float64, requires_grad=True)

    def loss(exponent: Any, layerwise: bool = False) -> Any:
        def factor(layer: int, position: Any) -> Any:
            return torch.exp(exponent[layer, :, None] * torch.log1p(position))

        with ll.intervene(model, score_scale=factor):
            if layerwise:  # as a program with little memory does it
                state, place = model.model.embed_tokens(ids), torch.arange(LENGTH)[None]
                angles = model.model.rotary_emb(state, place)
                for layer in model.model.layers:
                    state = checkpoint(
                        layer, state, attention_mask=None, position_ids=place, position_embeddings=angles,
                        use_reentrant=False,
                    )  # fmt: skip
                logits = model.lm_head(model.model.norm(state))
            else:
                logits = model(ids, use_cache=False).logits
            found = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            if exponent.requires_grad:
                found.backward()
        return found.detach()

    loss(gamma)
    assert gamma.grad is not None
    whole = gamma.grad.clone()
    gamma.grad = None
    loss(gamma, layerwise=True)
    torch.testing.assert_close(gamma.grad, whole)
    for place in ((0, 0), (2, 3)):
        step = torch.zeros_like(whole)
        step[place] = 3e-3  # norms are computed in single precision
        with torch.no_grad():
            slope = (loss((gamma + step).detach()) - loss((gamma - step).detach())) / 6e-3
        assert float(whole[place]) == pytest.approx(float(slope), rel=2e-3)


def test_random_keys_come_from_the_seed() -> None:
    one, same, other = (heads_out("bert", token_ids(), keys="random", count=4, seed=seed)[1] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other, atol=1e-3)


def test_the_model_is_put_back_after_an_error() -> None:
    model, ids = TINY["llama"].model(), token_ids()
    before = run(model, ids)

    def fail(call: Captured) -> Captured:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ll.intervene(model, keys=fail):
        run(model, ids)
    assert_untouched(model, "sdpa")
    assert torch.equal(run(model, ids), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keys": "nearest"}, "key policy is 'nearest'; expected one of random, "),
        ({"keys": "recent"}, "keys to keep is None; expected a whole number of at least 1"),
        ({"keys": "recent", "count": 0}, "keys to keep is 0"),
        ({"keys": "recent", "count": [[1, 2]]}, "one for each of 3 layers and 2 key/value heads"),
        ({"count": 4}, "without a key policy"),
        ({"keys": "recent", "count": 4, "cut": 0}, "the cut is at 0"),
        ({"keys": "recent", "count": 9, "cut": 8}, "9 keys are to be kept of 8 before the cut"),
        ({"score_scale": [1.0, 2.0]}, r"score_scale has shape \(2,\)"),
        ({"score_scale": float("nan")}, "score_scale holds nan"),
        ({"score_scale": lambda layer, position: torch.ones(7, 3)}, r"layer 0 has shape \(7, 3\)"),
        ({"keys": "expected", "count": 4}, "expected a cut"),
        ({"keys": [["recent"]], "count": 4}, "for each of 3 layers a list of 2 names, one per key/value head"),
        ({"keys": [["recent", "oracle_topk"]] * 3, "count": 4}, "with an oracle in a list; expected one name"),
    ],
)
def test_meaningless_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = TINY["llama"].model()
    with pytest.raises(InputError, match=message), ll.intervene(model, **options):
        run(model, token_ids())
    assert_untouched(model, "sdpa")


def test_a_context_read_outside_the_block_is_refused() -> None:
    model, ids = TINY["llama"].model(), token_ids()
    with torch.inference_mode():
        cache = model(ids[:, :CUT], use_cache=True).past_key_values
    told = pytest.raises(InputError, match="read the context first")
    with told, torch.inference_mode(), ll.intervene(model, keys="expected", count=4, cut=CUT):
        model(ids[:, CUT:], past_key_values=cache)


def test_texts_at_different_positions_are_refused() -> None:
    model, ids = TINY["llama"].model(), token_ids()
    place = torch.arange(LENGTH).repeat(2, 1)
    place[1] += 1
    for options in ({"score_scale": lambda layer, position: position + 1.0}, {"keys": "recent", "count": 3}):
        with pytest.raises(InputError, match="have different positions"), ll.intervene(model, **options):
            run(model, ids, position_ids=place)
    with ll.intervene(model, score_scale=2.0):
        run(model, ids, position_ids=place)


def test_an_intervention_takes_a_loaded_model_and_is_alone() -> None:
    loaded = LoadedModel("llama", TINY["llama"].model(), tiny_tokenizer(special=False))
    with ll.intervene(loaded, score_scale=2.0):
        with pytest.raises(InputError, match="captures it or intervenes in it"), ll.intervene(loaded, score_scale=2.0):
            pass
        assert len(captures(loaded.model, token_ids())[0]) == LAYERS
    told = pytest.raises(InputError, match="block that captures it or intervenes in it")
    with capture(loaded.model, lambda call: None), told, ll.intervene(loaded, score_scale=2.0):
        pass
    assert_untouched(loaded.model, "sdpa")


@pytest.mark.parametrize("name", DECODERS)
def test_certified_reads_of_a_short_context_read_everything(name: str) -> None:
    """A context with fewer keys than every query reads; softcaps, learned sinks and sliding windows included."""
    model, ids = TINY[name].model(), token_ids()
    before = run(model, ids)
    with ll.intervene(model, certify=(0.1, 0.1)):
        torch.testing.assert_close(run(model, ids), before, rtol=1e-3, atol=1e-4)
    assert_untouched(model, TINY[name].implementation)


def test_certified_reads_refuse_a_policy_and_bad_promises() -> None:
    model = TINY["llama"].model()
    for options, message in (
        ({"certify": (0.1, 0.1), "keys": "recent", "count": 2}, "expected certify or a key policy, not both"),
        ({"certify": (0.0, 0.1)}, "the error is 0; expected a share between 0 and 1"),
        ({"certify": (0.1, 1.0)}, "delta is 1; expected a probability of a larger error between 0 and 1"),
    ):
        with pytest.raises(InputError, match=message), ll.intervene(model, **options):
            pass


def test_a_generating_model_is_intervened_in() -> None:
    config = transformers.LlamaConfig(**GROUPED)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
    with ll.intervene(model, keys="streaming", count=6):
        found = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        step = ids
        for _ in range(6):  # without a cache
            with torch.inference_mode():
                step = torch.cat([step, model(step, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, step)


@pytest.mark.parametrize(("name", "known"), [("llama", True), ("gemma3", True), ("gpt2", False), ("bert", False)])
def test_rotary_frequencies_undo_the_rotation_of_captured_keys(name: str, known: bool) -> None:
    """Keys of one repeated token are equal once they are rotated back by position times frequency."""
    model = TINY[name].model()
    calls: list[Captured] = []
    with torch.inference_mode(), capture(model, calls.append):
        model(input_ids=torch.full((1, 12), 5))
    theta = calls[0].frequencies
    assert (theta is not None) is known
    if theta is not None:
        key = calls[0].key[0, 0].double()
        turn = torch.polar(torch.ones(12, len(theta)).double(), -torch.arange(12)[:, None] * theta.double())
        back = torch.complex(key[:, : len(theta)], key[:, len(theta) :]) * turn
        torch.testing.assert_close(back, back[:1].expand_as(back), atol=1e-5, rtol=1e-4)
        assert not torch.allclose(key, key[:1].expand_as(key), atol=1e-3)
