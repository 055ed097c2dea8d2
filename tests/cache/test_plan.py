"""Cutting a cache: curves that a dense computation confirms, allocations, effects, plans, and their trial."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import limitlens as ll
from cache_cases import CONTEXT, language_model, measured, planned, text
from limitlens.attention.policies import POLICIES
from limitlens.cache import allocate, cache_plan
from limitlens.cache.cache_plan import BEST, cut_windows, order_of, plan_cache
from limitlens.cache.cut import BEHIND, QUERIES, keys_below, measure_cut
from limitlens.cache.fisher import effects
from limitlens.cli import main
from limitlens.cli.plan import _total as total_of
from limitlens.errors import InputError
from limitlens.models import Captured, LoadedModel, capture, load
from report_cases import probe_case
from tiny_models import TINY, tiny_tokenizer


def windows() -> Any:
    return cut_windows(language_model(), text(), "auto", CONTEXT)


def test_curves_are_dense_attention_over_what_was_kept() -> None:
    """The error of one layer's heads at one number of keys, against the model run with that intervention there."""
    loaded, rows = language_model(), [0, 3]
    curves = measure_cut(loaded, windows(), rows, CONTEXT, ("streaming", "snapkv", "oracle_topk"))
    place = torch.linspace(CONTEXT, CONTEXT + BEHIND - 1, QUERIES).long()
    size = curves.sizes.index(CONTEXT // 4)
    for number, name in enumerate(curves.choices):
        for row, index in enumerate(rows):
            (ids,) = windows().batches(1, [index])
            for layer in range(3):
                parts = []
                for options in ({}, {"keys": name, "count": CONTEXT // 4, "cut": CONTEXT, "layers": [layer]}):
                    seen: list[Any] = []
                    module = loaded.model.model.layers[layer].self_attn.o_proj
                    hook = module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
                    with torch.inference_mode(), ll.intervene(loaded, **options):
                        loaded.model(ids, use_cache=False)
                    hook.remove()
                    parts.append(seen[0][0, place].double().unflatten(-1, (4, 8)))
                whole, cut = parts
                wrong = (cut - whole).square().sum(-1).mean(0).numpy()
                assert curves.wrong[row, number, layer, :, size] == pytest.approx(wrong, rel=1e-3, abs=1e-7)
                assert curves.full[row, layer] == pytest.approx(whole.square().sum(-1).mean(0).numpy(), rel=1e-4)


def test_all_keys_make_no_error() -> None:
    curves = measured()[0].part(slice(4))
    assert (curves.wrong[..., -1] == 0).all()
    assert curves.sizes[0] == 0
    assert curves.error().shape == (len(POLICIES), 3, 4, len(curves.sizes))
    # With no keys left all choices are the same; with some the oracle is the best of those that do not sample.
    assert np.ptp(curves.error()[..., 0], axis=0) == pytest.approx(0, abs=1e-6)
    middle = curves.error()[..., 4].mean((1, 2))
    drawn = [POLICIES[name].sampled for name in curves.choices]
    assert curves.choices[int(np.where(drawn, np.inf, middle).argmin())] == "oracle_topk"


def test_keys_below_a_level() -> None:
    sizes = (0, 10, 20, 40)
    curves = np.array([[1.0, 0.5, 0.2, 0.0], [0.1, 0.05, 0.02, 0.0], [1.0, 0.1, 0.6, 0.0]])
    assert keys_below(curves, sizes, 0.35).tolist() == [15, 0, 29]  # the last rises again, so counts from where it fell
    assert keys_below(curves, sizes, 0.0).tolist() == [40, 40, 40]


def test_allocations_keep_to_the_total_and_the_least_cost_is_the_least() -> None:
    rng, sizes, total = np.random.default_rng(0), (0, 4, 8, 16), 20
    convex = rng.uniform(0.2, 5, (3, 1)) * np.exp(-np.array(sizes) * rng.uniform(0.05, 0.4, (3, 1)))
    found = allocate.least_cost(convex, sizes, total)
    assert found.sum() == total

    def cost(keys: Any) -> float:
        return sum(float(np.interp(n, sizes, row)) for n, row in zip(keys, convex, strict=True))

    every = [(a, b, total - a - b) for a in range(17) for b in range(17) if 0 <= total - a - b <= 16]
    assert cost(found) == pytest.approx(min(map(cost, every)), abs=1e-12)
    assert allocate.uniform((3,), total).tolist() == [6, 6, 6]
    even = allocate.equal_error(convex, sizes, total)
    assert total - 3 <= even.sum() <= total
    levels = [np.interp(n, sizes, row) for n, row in zip(even, convex, strict=True) if 0 < n < 16]
    assert np.ptp(levels) < 0.25  # whole keys


def test_a_dent_in_a_cost_is_bridged() -> None:
    """Nothing is saved by the first stretch alone, so that equal marginals would never buy it."""
    costs = np.array([[1.0, 1.0, 0.0], [0.9, 0.8, 0.7]])
    assert allocate.least_cost(costs, (0, 4, 8), 8).tolist() == [8, 0]
    assert allocate.least_cost(costs * [[1], [0]], (0, 4, 8), 16).tolist() == [8, 0]  # what saves nothing costs nothing


def test_effects_foretell_the_divergence_of_a_perturbed_head() -> None:
    """A small random change of one head's output behind the cut: KL a token against g_h |δ|², for every head."""
    loaded = language_model()
    found = effects(loaded, windows(), range(6), CONTEXT)
    generator, scale, ratios = torch.Generator().manual_seed(1), 0.02, []
    for layer in range(3):
        for head in range(4):
            measured = []
            for row in range(6):
                (ids,) = windows().batches(1, [row])
                delta = scale * torch.randn(BEHIND, 8, generator=generator)

                def shift(_: Any, args: Any, head: int = head, delta: Any = delta) -> Any:
                    moved = args[0].clone()
                    moved[0, CONTEXT:, 8 * head : 8 * head + 8] += delta
                    return (moved, *args[1:])

                with torch.inference_mode():
                    before = loaded.model(ids, use_cache=False).logits[0, CONTEXT:].double().log_softmax(-1)
                    hook = loaded.model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(shift)
                    after = loaded.model(ids, use_cache=False).logits[0, CONTEXT:].double().log_softmax(-1)
                    hook.remove()
                measured.append(float((before.exp() * (before - after)).sum(-1).mean()))
            ratios.append(np.mean(measured) / (found[layer, head] * 8 * scale**2))
    assert np.median(ratios) == pytest.approx(1, abs=0.15)
    assert 0.6 < min(ratios) <= max(ratios) < 1.7


def test_one_window_that_checks_tells_no_error_of_the_error() -> None:
    curves, gains = measured()
    made = cache_plan.make_plan("letters", text(), "auto", curves.part(slice(3)), gains, total=0.5, fitted=2)
    assert (made.fitted, made.checked) == (2, 1)
    assert all(np.isnan(total.error_stderr) and total.error > 0 for total in made.totals)
    assert not any(np.isnan(total.error_stderr) for total in planned().totals)


def test_a_plan_keeps_its_total_and_takes_no_oracle() -> None:
    made = planned()
    assert made.total["share"] == pytest.approx(0.5, abs=0.01)
    assert made.share == made.total["share"]
    assert "oracle_topk" not in {name for row in made.choices for name in row}
    assert [total.choice for total in made.totals] == [BEST, *POLICIES]
    assert [total.oracle for total in made.totals] == [False, *(choice.sees_queries for choice in POLICIES.values())]
    for ways in made.budgets.values():
        assert list(ways) == list(allocate.ALLOCATIONS)
        for keys in ways.values():
            assert 0.9 * made.total["entries"] <= np.sum(keys) <= made.total["entries"]
    frame = made.table
    assert frame["budget"].sum() == made.total["entries"]


def test_a_plan_of_a_probe_is_made_of_its_models_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(probe_case(2, 3), corpus=text(), model_sha256=None, seed=0, special={})
    with pytest.raises(InputError, match="no context was given"):
        ll.plan(run, keep="best", model=language_model())
    with pytest.raises(InputError, match="is not what was probed"):
        ll.plan(replace(run, model_sha256="0"), context=CONTEXT, keep="best", model=language_model())
    for name in ("FITTED", "CHECKED"):
        monkeypatch.setattr(cache_plan, name, 2)
    seen: list[tuple[float, float]] = []
    made = ll.plan(run, context=CONTEXT, total=0.5, model=language_model(), progress=lambda *done: seen.append(done))
    assert made.total["share"] == pytest.approx(0.5, abs=0.01)
    assert (made.fitted, made.checked, seen[-1]) == (2, 2, (4, 4))


def test_a_total_in_bytes_is_that_of_its_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of 8 numbers of 4 bytes: 64 bytes an entry, 64 tokens in 6 key/value heads."""
    for name in ("FITTED", "CHECKED"):
        monkeypatch.setattr(cache_plan, name, 2)
    made = plan_cache(language_model(), text(), CONTEXT, total=10_000)
    assert made.entry_bytes == 64
    assert made.total["entries"] == 10_000 // 64
    assert made.total["bytes"] == 10_000 // 64 * 64
    assert "10.0 MB" in str(replace(made, entry_bytes=64_000))
    assert made.keys == plan_cache(language_model(), text(), CONTEXT, total=156 / 384).keys


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), ("0.25", 0.25), ("1", 1.0), ("64MB", 64_000_000), ("1.5 KiB", 1536), ("700b", 700), ("2GiB", 2**31)],
)
def test_a_total_has_a_unit_or_is_a_share(given: str | None, expected: float | None) -> None:
    found = total_of(given)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("given", ["64XB", "-1", "", "a quarter", "25%"])
def test_a_total_that_is_neither_is_told(given: str) -> None:
    with pytest.raises(InputError, match=r"expected a share such as 0\.25, or a size such as 16MB"):
        total_of(given)


def test_a_plan_and_its_trial_work_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model and text are named by paths that are short where the probe was made, and mean nothing elsewhere."""
    for name in ("FITTED", "CHECKED"):
        monkeypatch.setattr(cache_plan, name, 2)
    home, away = tmp_path / "home", tmp_path / "away"
    for folder in (home, away):
        folder.mkdir()
    loaded = language_model()
    loaded.model.save_pretrained(home / "letters")
    loaded.tokenizer.save_pretrained(home / "letters")
    (home / "text.txt").write_text(Path(text()).read_text())
    monkeypatch.chdir(home)
    digest = load("letters", head=True).sha256
    run = replace(probe_case(2, 3), model="letters", corpus="text.txt", model_sha256=digest, seed=0, special={})
    run.save("run")
    made = ll.plan("run", context=CONTEXT, total=0.5)
    made.save("plan")
    monkeypatch.chdir(away)
    again = ll.plan(home / "run", context=CONTEXT, total=0.5)
    assert again.keys == made.keys
    again.save("plan")
    for folder in (home / "plan", away / "plan"):
        assert ll.trial(folder, documents=2).documents == 2
    monkeypatch.chdir(tmp_path)
    assert ll.trial("away/plan", documents=2).model == str(home / "letters")
    other = language_model().model.state_dict() | {"model.norm.weight": torch.zeros(32)}
    transformers.LlamaForCausalLM(language_model().model.config).save_pretrained(home / "letters", state_dict=other)
    for words, told in (
        (["trial", "away/plan"], "are not those of the plan"),
        (["plan", "home/run", "--context", "64", "--total", "0.5"], "is not what was probed"),
        (["plan", "home/run", "--context", "64", "--total", "a half"], "expected a share such as 0.25, or a size"),
        (["plan", "home/run", "--total", "0.5"], "no context was given"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        assert told in capsys.readouterr().err


def test_a_plan_for_an_error_takes_the_cheapest_choice() -> None:
    best, one = planned(total=None, error=0.3), planned(total=None, error=0.3, keep="expected")
    shares = {total.choice: total.share for total in best.totals}
    assert best.total["share"] <= min(share for name, share in shares.items() if name not in (BEST, "oracle_topk"))
    assert shares["expected"] == pytest.approx(one.total["share"])
    assert {name for row in one.choices for name in row} == {"expected"}
    assert all(0 <= total.holding <= 1 for total in best.totals)
    smaller = planned(total=None, error=0.1)
    assert smaller.total["share"] > best.total["share"]


def test_a_plan_is_saved_with_its_choices(tmp_path: Path) -> None:
    made = planned()
    folder = made.save(tmp_path / "plan")
    told = json.loads((folder / "kv_budgets.json").read_text())
    assert told["budgets"] == [list(row) for row in made.keys]
    assert told["choices"] == [list(row) for row in made.choices]
    assert ll.load(folder).budgets == made.budgets


def test_a_trial_compares_settings_of_one_size() -> None:
    made = planned()
    tried = ll.trial(made, documents=3, model=language_model(), corpus=text())
    assert tried.documents == 3
    assert "letters.txt: 3 documents of 64 + 128 tokens" in str(tried)
    assert {(one.choice, one.allocation) for one in tried.settings} == {
        *((name, way) for name in POLICIES for way in allocate.ALLOCATIONS), (BEST, "plan"),
    }  # fmt: skip
    assert all(one.divergence.measured >= 0 and 0 <= one.agreement.measured <= 1 for one in tried.settings)
    assert all((one.against_uniform is None) == (one.allocation in ("uniform", "plan")) for one in tried.settings)
    assert all((one.against_equal is None) == (one.allocation != "least cost") for one in tried.settings)
    by_name = {(one.choice, one.allocation): one for one in tried.settings}
    least, equal = (by_name["knorm", way] for way in ("least cost", "equal error"))
    assert least.against_equal.measured == pytest.approx(least.divergence.measured - equal.divergence.measured)
    assert least.against_equal.stderr > 0
    loaded, order = language_model(), order_of(windows(), made.seed)[:3]
    # One setting by hand: a forward over the whole text with the cut in it.
    found = []
    for row in order:
        (ids,) = windows().batches(1, [row])
        with torch.inference_mode():
            whole = loaded.model(ids).logits[0, CONTEXT:].log_softmax(-1)
            with ll.intervene(loaded, keys="expected", count=made.budgets["expected"]["least cost"], cut=CONTEXT):
                cut = loaded.model(ids, use_cache=False).logits[0, CONTEXT:].log_softmax(-1)
        found.append(float((whole.exp() * (whole - cut)).sum(-1).mean()))
    (one,) = (s for s in tried.settings if (s.choice, s.allocation) == ("expected", "least cost"))
    assert one.divergence.measured == pytest.approx(np.mean(found), rel=1e-3)
    assert one.divergence.stderr == pytest.approx(np.std(found, ddof=1) / 3**0.5, rel=1e-3)


def test_a_trial_of_a_whole_cache_finds_nothing() -> None:
    tried = ll.trial(planned(total=1.0), documents=2, model=language_model(), corpus=text())
    for one in tried.settings:
        if one.allocation in ("uniform", "plan"):
            assert one.divergence.measured == pytest.approx(0, abs=1e-6)
            assert one.agreement.measured == 1


def test_a_context_beyond_the_positions_of_a_model_is_told() -> None:
    made = plan_cache(language_model(), text(), 130, total=0.5)
    assert made.warnings == (
        "windows of 258 tokens exceed the 256 positions that letters was made for: its heads are measured outside the "
        "lengths it knows",
    )


def test_what_cannot_be_planned_is_told() -> None:
    loaded = language_model()
    for options, message in (
        ({"keep": "oracle_topk"}, "an oracle that no cache can follow"),
        ({"keep": "nearest"}, "expected one of random"),
        ({"total": 1.5}, "the share of the cache is 1.5"),
        ({"total": 1}, "the cache is to take 1 bytes; expected between 64, one entry, and 24,576, all of the context"),
        ({"total": 24_577}, "the cache is to take 24,577 bytes"),
        ({"error": 0.0}, "the error is 0"),
    ):
        with pytest.raises(InputError, match=message):
            plan_cache(loaded, text(), CONTEXT, **options)
    with pytest.raises(InputError, match="expected at least 64"):
        plan_cache(loaded, text(), 8)
    with pytest.raises(InputError, match="give more text or a shorter context"):
        plan_cache(loaded, text(), 220)
    bert = LoadedModel("bert", TINY["bert"].model(), tiny_tokenizer(special=True))
    with pytest.raises(InputError, match="bert is an encoder, which keeps no cache"):
        measure_cut(bert, windows(), [0], CONTEXT, ("streaming",))
    with pytest.raises(InputError, match=r"bert is an encoder, .*ll.intervene chooses an encoder"):
        plan_cache(bert, text(), CONTEXT)
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=29, hidden_size=8, num_hidden_layers=2))
    with pytest.raises(InputError, match="MambaModel computes the attention of its layers without"):
        plan_cache(LoadedModel("mamba", mamba.eval(), tiny_tokenizer(special=False)), text(), CONTEXT)
    other = LoadedModel("other", TINY["gpt2"].model(), tiny_tokenizer(special=False))
    with pytest.raises(InputError, match="expected the model of the plan"):
        ll.trial(planned(), model=other)
    with pytest.raises(InputError, match="the weights of letters are not those of the plan"):
        ll.trial(replace(planned(), model_sha256="0"), model=loaded)
    with pytest.raises(InputError, match="documents for a trial"):
        ll.trial(replace(planned(), corpus=text()), documents=1, model=loaded, corpus=text())


def test_a_model_that_was_read_under_capture_is_left_alone() -> None:
    seen: list[Captured] = []
    with capture(language_model().model, seen.append), torch.inference_mode():
        language_model().model(torch.arange(3, 12)[None])
    assert len(seen) == 3


def test_the_command_wants_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["trial", str(tmp_path / "nowhere")])
    assert stop.value.code == 2
    assert "there is no run folder" in capsys.readouterr().err
    ll.trial(planned(), documents=2, model=language_model(), corpus=text()).save(tmp_path)
    with pytest.raises(InputError, match=r"holds a cache trial; .* which `limitlens plan --keep best --out` writes"):
        ll.trial(tmp_path)
