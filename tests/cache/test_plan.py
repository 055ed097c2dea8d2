"""KV-cache plans: error curves against a dense computation, allocations, Fisher costs, plans, and their trial."""

from __future__ import annotations

import json
import signal
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
from limitlens.cache import budgets, cut, reading
from limitlens.cache.budgets import BEST, FULL, fisher_costs
from limitlens.cache.cut import BEHIND, QUERIES, cut_windows, keys_below, measure_cut, window_order
from limitlens.cache.layers import LayerCache
from limitlens.cache.plan import Plan, Total, make_plan
from limitlens.cli import main
from limitlens.cli.common import share_or_size
from limitlens.errors import InputError
from limitlens.models import Captured, LoadedModel, capture, load
from limitlens.record import Run
from limitlens.report.text import cell
from tiny_models import TINY, tiny_tokenizer


def windows() -> Any:
    return cut_windows(language_model(), text(), "auto", CONTEXT)


def test_curves_are_dense_attention_over_what_was_kept() -> None:
    """The error of one layer's heads at one number of keys, against the model run with that intervention there."""
    loaded, rows = language_model(), [0, 3]
    curves = measure_cut(loaded, windows(), rows, CONTEXT, ("streaming", "snapkv", "oracle_topk"))
    place = torch.linspace(CONTEXT, CONTEXT + BEHIND - 1, QUERIES).long()
    size = curves.sizes.index(CONTEXT // 4)
    for number, name in enumerate(curves.policies):
        for row, index in enumerate(rows):
            (ids,) = windows().batches(1, [index])
            for layer in range(3):
                parts = []
                count = [[CONTEXT // 4 if other == layer else CONTEXT] * 2 for other in range(3)]
                for options in ({}, {"keys": name, "count": count, "cut": CONTEXT}):
                    seen: list[Any] = []
                    module = loaded.model.model.layers[layer].self_attn.o_proj
                    hook = module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
                    with torch.inference_mode(), ll.intervene(loaded, **options):
                        loaded.model(ids, use_cache=False)
                    hook.remove()
                    parts.append(seen[0][0, place].double().unflatten(-1, (4, 8)))
                whole, cut = parts
                wrong = (cut - whole).square().sum(-1).mean(0).numpy()
                assert curves.squared_error[row, number, layer, :, size] == pytest.approx(wrong, rel=1e-3, abs=1e-7)
                assert curves.full[row, layer] == pytest.approx(whole.square().sum(-1).mean(0).numpy(), rel=1e-4)


def test_all_keys_make_no_error() -> None:
    curves = measured()[0].part(slice(4))
    assert (curves.squared_error[..., -1] == 0).all()
    assert curves.sizes[0] == 0
    assert curves.error().shape == (len(POLICIES), 3, 4, len(curves.sizes))
    # With no keys left all choices are the same; with some the oracle is the best of those that do not sample.
    assert np.ptp(curves.error()[..., 0], axis=0) == pytest.approx(0, abs=1e-6)
    middle = curves.error()[..., 4].mean((1, 2))
    drawn = [POLICIES[name].sampled for name in curves.policies]
    assert curves.policies[int(np.where(drawn, np.inf, middle).argmin())] == "oracle_topk"


def test_keys_below_a_level() -> None:
    sizes = (0, 10, 20, 40)
    curves = np.array([[1.0, 0.5, 0.2, 0.0], [0.1, 0.05, 0.02, 0.0], [1.0, 0.1, 0.6, 0.0]])
    assert keys_below(curves, sizes, 0.35).tolist() == [15, 0, 29]  # the last rises again, so counts from where it fell
    assert keys_below(curves, sizes, 0.0).tolist() == [40, 40, 40]


def test_allocations_keep_to_the_total_and_fisher_weights_cost_least() -> None:
    rng, sizes, total = np.random.default_rng(0), (0, 4, 8, 16), 20
    convex = rng.uniform(0.2, 5, (3, 1)) * np.exp(-np.array(sizes) * rng.uniform(0.05, 0.4, (3, 1)))
    found = budgets.fisher_weighted(convex, sizes, total)
    assert found.sum() == total

    def cost(keys: Any) -> float:
        return sum(float(np.interp(n, sizes, row)) for n, row in zip(keys, convex, strict=True))

    every = [(a, b, total - a - b) for a in range(17) for b in range(17) if 0 <= total - a - b <= 16]
    assert cost(found) == pytest.approx(min(map(cost, every)), abs=1e-12)
    assert budgets.uniform((3,), total).tolist() == [6, 6, 6]
    even = budgets.equal_error(convex, sizes, total)
    assert total - 3 <= even.sum() <= total
    levels = [np.interp(n, sizes, row) for n, row in zip(even, convex, strict=True) if 0 < n < 16]
    assert np.ptp(levels) < 0.25  # whole keys


def test_a_dent_in_a_cost_is_bridged() -> None:
    """Nothing is saved by the first stretch alone, so that equal marginals would never buy it."""
    costs = np.array([[1.0, 1.0, 0.0], [0.9, 0.8, 0.7]])
    assert budgets.fisher_weighted(costs, (0, 4, 8), 8).tolist() == [8, 0]
    assert budgets.fisher_weighted(costs * [[1], [0]], (0, 4, 8), 16).tolist() == [8, 0]  # no gain
    uneven = np.array([[1.0, 0.7, 0.7], [1.0, 0.9, 0.3]])  # the second saves more, the first more per key
    assert budgets.fisher_weighted(uneven, (0, 4, 16), 4).tolist() == [4, 0]


def test_fisher_costs_predict_the_divergence_of_a_perturbed_head() -> None:
    """A small random change of one head's output behind the cut: KL a token against g_h |δ|², for every head."""
    loaded = language_model()
    found = fisher_costs(loaded, windows(), range(6), CONTEXT)
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


@pytest.mark.parametrize("at", [4, 5, 8])  # layers of a window: 3
def test_ctrl_c_within_a_window_stops_at_once_and_keeps_whole_windows(
    at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layers, errors = 0, cut._layer_errors

    def interrupting(*given: Any) -> Any:
        nonlocal layers
        layers += 1
        if layers == at:
            signal.raise_signal(signal.SIGINT)
        return errors(*given)

    monkeypatch.setattr(cut, "_layer_errors", interrupting)
    options: dict[str, Any] = {"context": CONTEXT, "total": 0.5, "windows": (2, 2)}
    with pytest.raises(KeyboardInterrupt):
        ll.plan(language_model(), text(), checkpoint=ll.Checkpoint(tmp_path), **options)
    assert layers == at
    resumed = ll.plan(language_model(), text(), checkpoint=ll.Checkpoint(tmp_path, resume=True), **options)
    assert layers == at + 3 * (4 - (at - 1) // 3)  # the windows that were not finished
    assert resumed.document() == ll.plan(language_model(), text(), **options).document()


def test_ctrl_c_within_a_document_of_a_trial_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    readings, intervene = 0, reading.intervene

    def interrupting(*given: Any, **known: Any) -> Any:
        nonlocal readings
        readings += 1
        if readings == 2 * 35 + 5:  # in the third document
            signal.raise_signal(signal.SIGINT)
        return intervene(*given, **known)

    monkeypatch.setattr(reading, "intervene", interrupting)
    found = ll.trial(planned(), documents=4, model=language_model(), corpus=text())
    assert readings == 2 * 35 + 5
    assert (found.interrupted, found.documents) == (True, 2)


def test_one_window_that_checks_gives_no_standard_error() -> None:
    curves, costs = measured()
    made = make_plan(curves.part(slice(3)), costs, [LayerCache(2, CONTEXT, 64)] * 3, share=0.5, fitted=2)
    assert (made.fitted, made.checked) == (2, 1)
    assert all(np.isnan(total.error.stderr) and total.error.value > 0 for total in made.totals)
    assert not any(np.isnan(total.error.stderr) for total in planned().totals)


def test_a_plan_keeps_its_total_and_takes_no_oracle() -> None:
    made = planned()
    assert made.total.share == pytest.approx(0.5, abs=0.01)
    assert "oracle_topk" not in {name for row in made.policies for name in row}
    assert [total.policy for total in made.totals] == [BEST, *POLICIES]
    assert [total.oracle for total in made.totals] == [False, *(policy.sees_queries for policy in POLICIES.values())]
    for allocations in made.allocations.values():
        assert [name for name in allocations if name != "duo"] == list(budgets.ALLOCATIONS)
        for keys in allocations.values():
            assert 0.9 * made.total.entries <= np.sum(keys) <= made.total.entries
    frame = made.table
    assert frame["budget"].sum() == made.total.entries
    assert (made.layer_kinds, made.total.key_value_heads) == (("full",) * 3, 6)
    share, policy = made.figures()  # maps of the kept shares and of the policies
    (drawn,) = policy.series
    assert [[drawn.words[int(k)] for k in row] for row in drawn.values] == [list(row) for row in made.policies]
    assert np.allclose(share.series[0].values, made.shares)


def test_a_layer_without_a_cache_has_no_budgets_and_a_sliding_one_is_named() -> None:
    """Of four full layers a quarter stays; the entries of the sliding layer all stay, and count in the share."""
    curves, costs = measured()
    full, sliding = LayerCache(2, CONTEXT, 64), LayerCache(3, 20, 32)
    caches = [full, LayerCache(), full, sliding, full]
    made = make_plan(replace(curves, layers=(0, 2, 4)), costs, caches, share=0.25)
    assert made.layer_kinds == ("full", "none", "full", "sliding", "full")
    assert [len(row) for row in made.budgets] == [len(row) for row in made.policies] == [2, 0, 2, 3, 2]
    assert (made.own_cache[3], made.budgets[3], made.shares[3]) == ((20,) * 3, (20,) * 3, [1.0] * 3)
    assert made.table["layer"].unique().tolist() == [0, 2, 3, 4]
    kept = made.by_kind["full"].entries
    assert kept == pytest.approx(CONTEXT * 6 / 4, abs=2)
    assert made.total == Total(9, kept + 60, CONTEXT * 6 + 60, (kept + 60) / (CONTEXT * 6 + 60), 64 * kept + 32 * 60)
    assert made.totals[0].share == pytest.approx(made.total.share)
    assert made.by_kind["sliding"] == Total(3, 60, 60, 1.0, 32 * 60)
    for rows in (keys for allocations in made.allocations.values() for keys in allocations.values()):
        assert rows[3] == (20,) * 3
    assert "sliding window shorter than the context are left as they are" in str(made)
    assert made.document()["by_kind"]["sliding"]["entries"] == 60


def probed(**options: Any) -> Any:
    own: dict[str, Any] = {"tokens": 3000, "window": 50, "sizes": [8, 32, 128], "replicates": 4, "queries": 16}
    return ll.probe(language_model(), text(), **own, **options)


def test_a_probe_gives_the_budgets_of_random_keys(tmp_path: Path) -> None:
    run, loaded = probed(seed=3), language_model()
    run.save(tmp_path / "run")
    with pytest.raises(InputError, match="with other weights"):
        ll.plan(loaded, run=replace(run, model_sha256="0"), context=CONTEXT)
    with pytest.raises(InputError, match="expected a probe without score_scale"):
        ll.plan(loaded, run=replace(run, score_scale=2.0), context=CONTEXT)
    seen: list[tuple[float, float]] = []
    asked: dict[str, Any] = {"policy": "random", "error": 0.3, "context": CONTEXT, "windows": (2, 2)}
    made = ll.plan(loaded, run=run, **asked, progress=lambda *done: seen.append(done))
    assert (made.corpus, made.probed, seen[-1]) == (text(), True, (4, 4))
    assert (made.fitted, made.checked) == (2, 2)
    assert {name for row in made.policies for name in row} == {"random"}
    needed = [max(head.keys_for(0.3, CONTEXT).n or CONTEXT for head in run.records
                  if (head.layer, head.kv_head) == place) for place in np.ndindex(3, 2)]  # fmt: skip
    # Budgets lie between measured sizes on straight lines, above convex curves.
    assert np.ravel(made.budgets) == pytest.approx(needed, abs=6)
    again = ll.plan(loaded, run=tmp_path / "run", **asked)
    assert again.budgets == made.budgets
    other = ll.plan(loaded, text(), policy="snapkv", total=0.25, context=CONTEXT, windows=(2, 2))
    assert not other.probed
    assert other.total.share == pytest.approx(0.25, abs=0.01)
    assert [total.policy for total in other.totals] == list(POLICIES)


def test_a_plan_for_random_keys_probes_the_model_itself(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="budgets of random keys need a probe of 100,000 tokens"):
        ll.plan(language_model(), text(), policy="random", context=CONTEXT)
    path = tmp_path / "letters.txt"
    path.write_text(" ".join("".join(row) for row in np.random.default_rng(5).choice(list("abcdefgh"), (12_600, 8))))
    made = ll.plan(language_model(), str(path), policy="random", context=CONTEXT, windows=(2, 2))
    assert made.probed
    assert made.total.share == pytest.approx(0.25, abs=0.01)


def test_a_total_in_bytes_is_that_of_its_entries() -> None:
    """Keys and values of 8 numbers of 4 bytes: 64 bytes an entry, 64 tokens in 6 key/value heads."""
    asked: dict[str, Any] = {"context": CONTEXT, "windows": (2, 2)}
    made = ll.plan(language_model(), text(), **asked, total=10_000)
    assert made.entry_bytes == (64,) * 3
    assert made.total.entries == 10_000 // 64
    assert made.total.bytes == 10_000 // 64 * 64
    assert "10.0 of 24.6 MB" in str(replace(made, entry_bytes=(64_000,) * 3))
    assert made.budgets == ll.plan(language_model(), text(), **asked, total=156 / 384).budgets


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), ("0.25", 0.25), ("1", 1.0), ("64MB", 64_000_000), ("1.5 KiB", 1536), ("700b", 700), ("2GiB", 2**31)],
)
def test_a_total_has_a_unit_or_is_a_share(given: str | None, expected: float | None) -> None:
    found = share_or_size(given)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("given", ["64XB", "-1", "", "a quarter", "25%"])
def test_a_total_that_is_neither_share_nor_bytes_is_refused(given: str) -> None:
    with pytest.raises(InputError, match=r"expected a share such as 0\.25, or a size such as 16MB"):
        share_or_size(given)


def test_a_plan_and_its_trial_work_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model and text are named by relative paths, which mean nothing elsewhere."""
    home, away = tmp_path / "home", tmp_path / "away"
    for folder in (home, away):
        folder.mkdir()
    loaded = language_model()
    loaded.model.save_pretrained(home / "letters")
    loaded.tokenizer.save_pretrained(home / "letters")
    (home / "text.txt").write_text(Path(text()).read_text())
    monkeypatch.chdir(home)
    assert load("letters", head=True).sha256 is not None
    with pytest.raises(SystemExit) as stop:
        main(
            ["plan", "letters", "--corpus", "text.txt", "--total", "0.5", "--context", "64", "--out", "plan", "--json"]
        )
    assert stop.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format"] == 3
    assert document["total"]["share"] == pytest.approx(0.5, abs=0.01)
    assert document["total"]["bytes"] == 64 * document["total"]["entries"]
    monkeypatch.chdir(away)
    tried = ll.trial(home / "plan", documents=2)
    assert (tried.documents, tried.model) == (2, str(home / "letters"))
    other = language_model().model.state_dict() | {"model.norm.weight": torch.zeros(32)}
    transformers.LlamaForCausalLM(language_model().model.config).save_pretrained(home / "letters", state_dict=other)
    for words, told in (
        (["trial", "../home/plan"], "differ from those of the plan"),
        (["plan", "no-model", "--context", "64", "--total", "a half"], "expected a share such as 0.25, or a size"),
        (["plan", "no-model", "--total", "0.5", "--error", "0.1"], "both total and error were given"),
        (["plan", "no-model", "--policy", "nearest"], "is unknown; expected best or one of random"),
        (["plan", "no-model", "--run", "nowhere"], "there is no run folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
        assert told in capsys.readouterr().err


def test_a_plan_for_an_error_takes_the_cheapest_policy() -> None:
    best, one = planned(error=0.3), planned(error=0.3, policy="expected")
    shares = {total.policy: total.share for total in best.totals}
    assert best.total.share <= min(share for name, share in shares.items() if name not in (BEST, "oracle_topk"))
    assert shares["expected"] == pytest.approx(one.total.share)
    assert {name for row in one.policies for name in row} == {"expected"}
    assert all(0 <= total.within <= 1 for total in best.totals)
    smaller = planned(error=0.1)
    assert smaller.total.share > best.total.share


def test_a_plan_that_saves_nothing_says_so() -> None:
    assert "Nothing is saved" in str(planned(error=1e-6))
    assert "Nothing is saved" not in str(planned())


def test_a_plan_is_saved_with_its_policies(tmp_path: Path) -> None:
    made = replace(planned(), model_sha256="0" * 64)
    folder = made.save(tmp_path / "plan")
    budgets = json.loads((folder / "kv_budgets.json").read_text())
    assert budgets["format"] == 3
    assert budgets["digest"] == "0" * 64
    assert budgets["context"] == CONTEXT
    assert budgets["budgets"] == [list(row) for row in made.budgets]
    assert budgets["shares"] == [[keys / CONTEXT for keys in row] for row in made.budgets]
    assert budgets["policies"] == [list(row) for row in made.policies]
    assert budgets["kind"] == ["full"] * 3
    assert budgets["bytes"] == made.total.bytes == 64 * made.total.entries
    again = ll.load(folder)
    assert again.allocations == made.allocations
    assert again.budgets == made.budgets


@pytest.mark.parametrize("version", [1, 2])
def test_earlier_formats_are_refused_in_a_sentence(version: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="of an earlier format; expected format 3, so plan again"):
        Plan.load(Run("plan", {}, {"format": "limitlens-kv-budgets", "version": version}, tmp_path))
    folder = planned().save(tmp_path / "plan")
    record = json.loads((folder / "run.json").read_text())
    del record["result"]["format"]
    record["result"]["keys"] = record["result"].pop("budgets")
    (folder / "run.json").write_text(json.dumps(record))
    for read in (ll.load, ll.trial):
        with pytest.raises(InputError, match="of an earlier format") as error:
            read(folder)
        assert "\n" not in str(error.value)


def test_a_trial_compares_rows_of_one_size() -> None:
    made = planned()
    tried = ll.trial(made, documents=3, model=language_model(), corpus=text())
    assert tried.documents == 3
    assert "letters.txt: 3 documents of 64 + 128 tokens" in str(tried)
    full, *cut = tried.rows
    assert {(row.policy, row.allocation) for row in cut} == {
        *((name, allocation) for name in POLICIES for allocation in budgets.ALLOCATIONS),
        (BEST, "uniform"), (BEST, "plan"), ("kvzip", "prompt"), ("adakv", "prompt"), ("duo", "duo"),
    }  # fmt: skip
    assert (full.policy, full.share, full.kl, full.agreement, full.nll_increase) == (FULL, 1, 0, 1, 0)
    assert full.bytes == made.total.entries_without_plan * 64
    assert all(row.kl >= 0 and 0 <= row.agreement <= 1 and row.task == "text" for row in cut)
    assert all(row.nll_increase == pytest.approx(row.nll - full.nll) for row in cut)
    assert all(0.45 < row.share <= 0.51 and row.bytes == round(row.share * full.bytes) for row in cut)
    without = ("uniform", "prompt", "duo")  # allocations that are not compared with uniform budgets
    assert all((row.kl_minus_uniform is None) == (row.allocation in without) for row in cut)
    assert all((row.kl_minus_equal_error is None) == (row.allocation != "fisher_weighted") for row in cut)
    by_name = {(row.policy, row.allocation): row for row in cut}
    weighted, equal = (by_name["knorm", allocation] for allocation in ("fisher_weighted", "equal_error"))
    assert weighted.kl_minus_equal_error == pytest.approx(weighted.kl - equal.kl)
    assert weighted.stderr["kl_minus_equal_error"] > 0
    own, even = by_name[BEST, "plan"], by_name[BEST, "uniform"]
    assert own.kl_minus_uniform == pytest.approx(own.kl - even.kl)
    assert cell(own.estimate("kl_minus_uniform")) in next(
        row for row in str(tried).splitlines() if row[:7] == "  plan "
    )
    (figure,) = tried.figures()
    assert all(series.named for series in figure.series)
    assert ("plan",) in [tuple(series.labels) for series in figure.series]
    (first, *_) = tried.document()["rows"]
    assert {"policy", "allocation", "task", "share", "bytes", "kl", "nll", "agreement", "stderr"} <= set(first)
    loaded, order = language_model(), window_order(windows(), made.seed)[:3]
    # One row by hand, and the plan's own: a forward over the whole text with the cut in it.
    for row, names, counts in (
        (by_name["expected", "fisher_weighted"], "expected", made.allocations["expected"]["fisher_weighted"]),
        (by_name[BEST, "plan"], made.policies, made.budgets),
        (by_name[BEST, "uniform"], made.policies, made.allocations["recent"]["uniform"]),
    ):
        found = []
        for index in order:
            (ids,) = windows().batches(1, [index])
            with torch.inference_mode():
                whole = loaded.model(ids).logits[0, CONTEXT:-1].log_softmax(-1)
                with ll.intervene(loaded, keys=names, count=counts, cut=CONTEXT):
                    part = loaded.model(ids, use_cache=False).logits[0, CONTEXT:-1].log_softmax(-1)
            found.append(float((whole.exp() * (whole - part)).sum(-1).mean()))
        assert row.kl == pytest.approx(np.mean(found), rel=1e-3)
        assert row.stderr["kl"] == pytest.approx(np.std(found, ddof=1) / 3**0.5, rel=1e-3)


def test_a_trial_of_a_full_cache_finds_nothing() -> None:
    tried = ll.trial(planned(share=1.0), documents=2, model=language_model(), corpus=text())
    for row in tried.rows:
        if row.allocation in ("uniform", "plan", FULL):
            assert row.kl == pytest.approx(0, abs=1e-6)
            assert row.agreement == 1


def test_a_context_beyond_the_positions_of_a_model_gives_a_warning() -> None:
    made = ll.plan(language_model(), text(), context=130, total=0.5, windows=(2, 2))
    (warning,) = made.warnings
    assert "258 tokens" in warning
    assert "256 positions" in warning


def test_bad_arguments_are_refused_before_a_model_is_loaded() -> None:
    for options, message in (
        ({"policy": "oracle_topk"}, "'oracle_topk' is an oracle, which no cache can follow; expected best or one of"),
        ({"policy": "nearest"}, "the key policy 'nearest' is unknown; expected best or one of random, "),
        ({"total": 1.5}, "total is 1.5"),
        ({"total": 0.0}, "total is 0"),
        ({"error": 0.0}, "the error is 0"),
        ({"error": 0.1, "total": 0.5}, "both total and error were given"),
        ({"context": 8}, "context is 8; expected at least 64 tokens"),
        ({"seed": -1}, "seed"),
        ({"windows": (8, 0)}, "windows is 0; expected at least 1 for the curves and 1 for the check"),
    ):
        with pytest.raises(InputError, match=message):
            ll.plan("there-is-no-such-model", text(), **options)
    with pytest.raises(InputError, match="documents is 1"):
        ll.trial("nowhere", documents=1)


def test_totals_contexts_and_encoders_without_a_plan_are_refused() -> None:
    loaded = language_model()
    for total, message in (
        (1, "total is 1 bytes; expected between 64, one entry, and 24,576, the whole cache"),
        (24_577, "total is 24,577 bytes"),
    ):
        with pytest.raises(InputError, match=message):
            ll.plan(loaded, text(), context=CONTEXT, total=total)
    with pytest.raises(InputError, match="give more text or a shorter context"):
        ll.plan(loaded, text(), context=220)
    bert = LoadedModel("bert", TINY["bert"].model(), tiny_tokenizer(special=True))
    with pytest.raises(InputError, match="bert is an encoder, which keeps no cache"):
        measure_cut(bert, windows(), [0], CONTEXT, ("streaming",))
    with pytest.raises(InputError, match=r"bert is an encoder, .*ll.intervene selects the keys of an encoder"):
        ll.plan(bert, text(), context=CONTEXT)
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=29, hidden_size=8, num_hidden_layers=2))
    with pytest.raises(InputError, match="MambaModel computes the attention of its layers without"):
        ll.plan(LoadedModel("mamba", mamba.eval(), tiny_tokenizer(special=False)), text(), context=CONTEXT)
    other = LoadedModel("other", TINY["gpt2"].model(), tiny_tokenizer(special=False))
    with pytest.raises(InputError, match="expected the model of the plan"):
        ll.trial(planned(), model=other)
    with pytest.raises(InputError, match="the weights of letters differ from those of the plan"):
        ll.trial(replace(planned(), model_sha256="0"), model=loaded)


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
    with pytest.raises(InputError, match=r"holds a trial; .* which `limitlens plan MODEL --out` writes"):
        ll.trial(tmp_path)


def test_a_plan_says_that_nothing_was_saved_and_records_what_was_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("limitlens.cache.plan.plan", lambda *given, **known: planned())
    call = ["plan", "letters", "--total", "0.5", "--context", "64"]
    told = {}
    for name, more in (("bare", []), ("kept", ["--out", str(tmp_path)]), ("json", ["--json"]), ("quiet", ["--quiet"])):
        with pytest.raises(SystemExit):
            main([*call, *more])
        told[name] = "Nothing was saved; --out DIR keeps the result." in capsys.readouterr().out
    assert told == {"bare": True, "kept": False, "json": False, "quiet": False}
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["arguments"]["total"] == "0.5"
    assert "error" not in record["arguments"]
    assert record["typed"] == f"limitlens {' '.join(call)} --out {tmp_path}"
