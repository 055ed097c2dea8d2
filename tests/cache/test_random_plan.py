"""Plans: budgets from curves with known answers, and trials that equal dense attention over the keys that were kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from head_cases import SIZES, curve_of, head_record, probe_run
from limitlens.attention.policies.streaming import SINKS
from limitlens.cache import trial as trial_module
from limitlens.cache.plan import Plan, plan
from limitlens.cache.random_trial import ASKING, BATCH, QUERIES, HeadTrial, Measured, relative_error, run_trial
from limitlens.cli import main
from limitlens.errors import Array, InputError
from limitlens.models import Captured, LoadedModel, Windows, capture, open_corpus
from limitlens.probing.pilot import run_pilot
from limitlens.probing.probe import probe
from limitlens.probing.record import Sink
from limitlens.probing.regimes import Regime
from limitlens.probing.result import ProbeRun
from limitlens.record import json_text, read_run
from limitlens.report.page import page
from limitlens.report.view import Figure, Row
from limitlens.statistics.error_curve import ErrorCurve
from tiny_models import TINY, letters, tiny_tokenizer

N = np.asarray(SIZES, dtype=float)


def power(constant: float, rate: float) -> Array:
    return np.asarray(constant * N**-rate)


def exact(constant: float, error: float, context: float) -> int:
    """The budget of e = c/√n."""
    return int(np.ceil(round(1 / (error**2 / constant**2 + 1 / context), 6)))


@pytest.mark.parametrize("context", [512, 4000, 32_768, np.inf])
@pytest.mark.parametrize("wanted", [0.1, 0.05, 0.01])
def test_a_budget_solves_the_error_in_its_context(wanted: float, context: float) -> None:
    """With e = c/√n the answer is n = 1/(ε²/c² + 1/C)."""
    curve = curve_of(power(2, 0.5))
    budget = curve.tokens_for(wanted, context)
    needed = 1 / (wanted**2 / 4 + 1 / context)
    assert needed <= 40_960  # ten times the largest size
    assert budget.n == np.ceil(round(needed, 6)) == exact(2, wanted, context)
    assert budget.extrapolated == (needed > 4096)
    assert not budget.beyond
    assert curve.predict(needed)[0] * np.sqrt(1 - needed / context) == pytest.approx(wanted, rel=1e-9)


def test_what_lies_beyond_is_kept_whole_or_not_given() -> None:
    slow = curve_of(power(1, 0.1))
    endless = slow.tokens_for(0.05)
    assert (endless.n, endless.interval, endless.beyond) == (None, (None, None), True)
    bounded = slow.tokens_for(0.05, 1_000_000)
    assert (bounded.n, bounded.beyond) == (1_000_000, True)
    within = slow.tokens_for(0.05, 20_000)
    assert within.n is not None
    assert not within.beyond
    assert 19_000 < within.n < 20_000


def test_few_keys_are_extrapolated_downwards() -> None:
    budget = curve_of(power(2, 0.5)).tokens_for(0.5)
    assert (budget.n, budget.extrapolated) == (16, True)
    assert curve_of(power(2, 0.5)).tokens_for(5.0).n == 1


def test_a_curve_that_rises_again_is_not_trusted() -> None:
    bumpy = np.array([0.3, 0.04, 0.2, 0.1, 0.06, 0.03, 0.02])
    tokens = curve_of(bumpy).tokens_for(0.05).n
    assert tokens is not None
    assert 1024 < tokens < 2048  # not the early dip below 0.05
    rising = np.array([0.3, 0.3, 0.3, 0.3, 0.2, 0.25, 0.3])
    assert curve_of(rising).tokens_for(0.05).beyond


def test_the_interval_covers_the_truth() -> None:
    """20 replicates whose errors scatter by 3%: the 95% interval holds the true n in about 19 of 20 of them."""
    truth = power(2, 0.5)
    generator = np.random.default_rng(0)
    for wanted, n in ((0.1, 400), (0.02, 10_000)):  # inside the sizes, and extrapolated
        hits = 0
        for seed in range(200):
            noisy = truth**2 * (1 + 0.06 * np.sqrt(20) * generator.standard_normal((20, 7)))
            low, high = curve_of(noisy, seed=seed).tokens_for(wanted).interval
            hits += low is not None and low <= n and (high is None or n <= high)
        assert 0.9 <= hits / 200 <= 0.99


@pytest.mark.parametrize(("spread", "tolerance"), [(0.5, 0.08), (2.0, 0.1), (3.0, 0.15)])
def test_random_keys_of_a_finite_context_have_the_planned_error(spread: float, tolerance: float) -> None:
    """Softmax attention over Gaussian tokens: a curve against endless tokens gives the budget in a context of 1,500."""
    generator = np.random.default_rng(1)
    query = generator.standard_normal((32, 4))
    query *= spread / np.linalg.norm(query, axis=1, keepdims=True)  # scores of that standard deviation
    limit = query

    def attend(keys: Array) -> Array:
        weights = np.exp(query @ keys.T)
        return np.asarray((weights @ keys) / weights.sum(1, keepdims=True))

    def error(output: Array, truth: Array) -> float:
        return float(np.sqrt(np.square(output - truth).sum() / np.square(truth).sum()))

    def tokens(n: int) -> Array:
        return generator.standard_normal((n, 4))

    sizes = (100, 200, 400, 800, 1600)
    squares = [[error(attend(tokens(n)), limit) ** 2 for n in sizes] for _ in range(100)]
    curve = ErrorCurve.of(sizes, np.array(squares))
    wanted = float(curve.error[2])
    budget = curve.tokens_for(wanted, 1500).n
    assert budget is not None
    assert 200 < budget < 400  # fewer than the 400 of an endless context
    found = []
    for _ in range(100):
        context = tokens(1500)
        found.append(error(attend(context[:budget]), attend(context)) ** 2)
    assert np.sqrt(np.mean(found)) == pytest.approx(wanted, rel=tolerance)


GROUPED = probe_run(
    [
        head_record(0, 0, kv_head=0, errors=power(2, 0.5)),
        head_record(0, 1, kv_head=0, errors=power(4, 0.5)),
        head_record(0, 2, kv_head=1, errors=power(1, 0.5)),
        head_record(0, 3, kv_head=1, errors=power(0.5, 0.5)),
        head_record(2, 0, kv_head=0, errors=power(1, 0.05), regime=Regime.FROZEN),
        head_record(2, 1, kv_head=0, errors=power(2, 0.5)),
    ]
)


def test_a_group_takes_its_largest_budget_and_totals_add_up() -> None:
    made = plan(GROUPED, 0.1, 100_000, trial=False)
    assert [shared.keys for shared in made.key_value_heads] == [exact(4, 0.1, 1e5), exact(1, 0.1, 1e5), 100_000]
    assert [shared.decided_by for shared in made.key_value_heads] == [1, 2, 0]
    kept = exact(4, 0.1, 1e5) + exact(1, 0.1, 1e5)
    assert made.layers[0]["ratio"] == kept / 200_000
    assert made.total == {
        "key_value_heads": 3,
        "entries": kept + 100_000,
        "entries_without_plan": 300_000,
        "ratio": (kept + 100_000) / 300_000,
        "share": (kept + 100_000) / 300_000,
    }
    assert made.document()["total"]["share"] == made.total["ratio"]
    marks = [head.mark for head in made.heads]
    assert marks == ["measured", "measured", "measured", "extrapolated", "beyond", "measured"]
    assert [head.status.value for head in made.heads[3:]] == ["heuristic", "heuristic", "verified"]
    assert any("1 head needs more keys than" in note for note in made.notes)
    assert any("has not converged" in note for note in made.notes)


def test_a_plan_gives_no_temperatures() -> None:
    """They were taken back (docs/temper.md): neither the notes nor the advice of a regime speak of one."""
    made = plan(GROUPED, 0.1, 100_000, trial=False)
    assert "temperature" not in json_text(made.document())
    assert "temperature_factor" not in made.table.columns


def test_without_a_context_there_are_no_ratios() -> None:
    made = plan(GROUPED, 0.1, trial=False)
    assert [head.keys.n for head in made.heads] == [400, 1600, 100, 25, None, 400]
    assert made.key_value_heads[0].ratio is None
    assert made.total["entries"] is None


def test_a_sliding_window_is_the_context_of_its_layer() -> None:
    run = probe_run([head_record(0, 0, errors=power(2, 0.5), sliding_window=500)])
    for context in (None, 300, 100_000):
        own = min(context or 500, 500)
        head = plan(run, 0.1, context, trial=False).heads[0]
        assert (head.context, head.keys.n) == (own, exact(2, 0.1, own))


def test_a_head_without_a_curve_keeps_everything() -> None:
    run = probe_run([head_record(0, 0, errors=np.full(7, np.nan)), head_record(0, 1, errors=power(2, 0.5))])
    made = plan(run, 0.1, 5000, trial=False)
    head = made.heads[0]
    assert (head.keys.n, head.keys.interval, head.mark) == (5000, (5000, 5000), "beyond")
    assert (head.rate, head.status.value) == (None, "heuristic")
    assert any("1 head without a budget (the limit is 0" in note for note in made.notes)
    assert not any("more keys than" in note for note in made.notes)
    endless = plan(run, 0.1, trial=False).heads[0]
    assert (endless.keys.n, endless.mark) == (None, "beyond")


def test_a_sink_is_one_more_key_and_damps_the_error() -> None:
    share = 1000 / (1000 + N)
    rest, beside = power(2, 0.5), power(2, 0.5) * (1 - share)
    sink = Sink("first token", share, 0.5, 1000.0)
    head = head_record(0, 0, errors=beside, without_sink=rest, sink=sink)

    def rest_in(context: float) -> ErrorCurve:
        return head.curve_without_sink.scaled(1 / head.sink_factor(context))

    for context in SIZES:  # at n = C the curve beside the sink itself
        curve = rest_in(context)
        assert np.interp(context, SIZES, curve.error) == pytest.approx(np.interp(context, SIZES, beside))
        np.testing.assert_allclose(curve.stderr, 0.01 * curve.error)
    np.testing.assert_allclose(rest_in(np.inf).error, rest)
    # Here the factor beyond the sizes is exact: the rest's share at 9,000 tokens.
    np.testing.assert_allclose(rest_in(9000).error, rest * 0.9)
    made = plan(probe_run([head]), 0.1, 9001, trial=False).heads[0]
    assert made.keys.n == exact(2 * 0.9, 0.1, 9000) + 1
    assert made.status.value == "heuristic"
    learned = head_record(0, 0, errors=beside, without_sink=rest, sink=Sink("learned sink", share, 0.5, 1000.0))
    assert plan(probe_run([learned]), 0.1, 9000, trial=False).heads[0].keys.n == exact(2 * 0.9, 0.1, 9000)


def test_the_export_is_what_eviction_methods_index(tmp_path: Path) -> None:
    made = plan(GROUPED, 0.1, 100_000, trial=False)
    assert made.save(tmp_path) == tmp_path
    document = json.loads((tmp_path / "kv_budgets.json").read_text())
    assert document["budgets"] == [[exact(4, 0.1, 1e5), exact(1, 0.1, 1e5)], None, [100_000]]
    assert document["marks"] == [["measured", "measured"], None, ["beyond"]]
    ratios = document["ratios"]
    assert ratios[0] == [budget / 100_000 for budget in document["budgets"][0]]
    assert document["compression_ratios"] == pytest.approx([1 - sum(ratios[0]) / 2, None, 0.0])
    table = pd.read_csv(tmp_path / "kv_budgets.csv")
    assert list(table.columns[:5]) == ["layer", "kv_head", "budget", "ratio", "compression_ratio"]
    assert table.budget.tolist() == [*document["budgets"][0], *document["budgets"][2]]


def test_a_plan_prints_itself() -> None:
    made = plan(GROUPED, 0.1, 100_000, trial=False)
    assert "a model on a text: relative output error 0.1 per head in a context of 100,000 tokens" in str(made)
    assert "1 of 6 heads are frozen" in str(made)
    assert "kv_budgets.json" in str(made)
    assert "<table" in made._repr_html_()
    assert repr(made) == "<Plan for a model: error 0.1 in 100,000 tokens, 6 heads, 33.9% of KV entries kept>"
    assert len(made.table) == 6
    json.loads(json_text(made.document()))
    assert made == made


def test_a_plan_shows_its_shares_on_a_map() -> None:
    made = plan(GROUPED, 0.1, 100_000, trial=False)
    (row,) = (block for section in made.view().sections for block in section.blocks if isinstance(block, Row))
    keys, shares = row.blocks
    assert isinstance(keys, Figure)
    assert isinstance(shares, Figure)
    assert [series.name for series in keys.series] == ["averaging", "frozen"]
    assert sorted(keys.series[0].y) == sorted(head.keys.n for head in made.heads if head.regime is Regime.AVERAGING)
    (drawn,) = shares.series
    assert (list(drawn.y), list(drawn.x)) == ([0, 2], [0, 1, 2, 3])
    expected = [[head.ratio for head in made.heads[:4]], [1.0, made.heads[5].ratio, np.nan, np.nan]]
    np.testing.assert_allclose(drawn.values, expected)
    endless = plan(GROUPED, 0.1, trial=False)
    (row,) = (block for section in endless.view().sections for block in section.blocks if isinstance(block, Row))
    assert len(row.blocks) == 1  # no context, no shares
    assert "<h2" in page(made.view(), made.made)


def test_a_plan_that_saves_nothing_says_so() -> None:
    nothing = plan(probe_run([head_record(0, 0, errors=power(2, 0.5))]), 0.01, 100, trial=False)
    assert nothing.total["share"] > 0.99
    assert "nothing is saved" in str(nothing)
    assert "nothing is saved" not in str(plan(GROUPED, 0.1, 100_000, trial=False))


TRIED = (
    HeadTrial(0, 0, "pool", 2048, 300, {"random": Measured(0.1, 0.01), "oracle_topk": Measured(np.nan, np.nan)}),
    HeadTrial(0, 1, "pool", 2048, 700, {"random": Measured(0.1, 0.01), "oracle_topk": Measured(0.02, 0.001)}),
    HeadTrial(0, 0, "window", 256, 90, {"random": Measured(0.2, 0.02), "recent": Measured(0.05, 0.003)}),
)


def test_a_saved_plan_is_read_back_as_it_was(tmp_path: Path) -> None:
    for name, made in {
        "endless": plan(GROUPED, 0.1, trial=False),
        "bounded": plan(GROUPED, 0.1, 2048, trial=False),
        "tried": replace(plan(GROUPED, 0.1, 2048, trial=False), trials=TRIED),
    }.items():
        back = Plan.load(read_run(made.save(tmp_path / name)))
        assert json_text(back.document()) == json_text(made.document())
        assert json_text(back.view().__dict__) == json_text(made.view().__dict__)
        assert str(back) == str(made)
        assert back.heads == made.heads
        assert len(back.trials) == len(made.trials)
        names = {path.name for path in (tmp_path / name).iterdir()}
        assert names == {"run.json", "heads.csv", "heads.parquet", "kv_budgets.json", "kv_budgets.csv"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": 0}, "the error is 0"),
        ({"error": -1.0}, "the error is -1"),
        ({"context": 1}, "the context is 1 tokens"),
        ({"run": probe_run([head_record(0, 0, errors=power(1, 0.5)[:2])])}, "an error curve of 2 sizes"),
    ],
)
def test_bad_input_is_told(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"run": GROUPED, "error": 0.1, "context": 5000} | change
    with pytest.raises(InputError, match=words):
        plan(arguments.pop("run"), trial=False, **arguments)


def test_a_folder_that_is_no_probe_is_told_in_a_sentence(tmp_path: Path) -> None:
    def message(folder: Path) -> str:
        with pytest.raises(InputError) as error:
            plan(folder, trial=False)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "there is no run folder" in message(tmp_path / "nowhere")
    assert "holds no run.json" in message(tmp_path)
    record = tmp_path / "run.json"
    record.write_text('{"command": "probe", "result": {"hea')
    assert "cannot be read" in message(tmp_path)
    record.write_text(json.dumps({"command": "probe", "versions": {"limitlens": "9.9"}, "result": {"model": "m"}}))
    assert "another version of limitlens (9.9)" in message(tmp_path)
    made = plan(GROUPED, 0.1, trial=False).save(tmp_path / "plan")
    assert "holds a plan; expected the folder of a probe" in message(made)


def command_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, captured.out, captured.err


def test_the_command_prints_a_page_a_document_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    GROUPED.save(tmp_path)
    asked = (str(tmp_path), "--error", "0.1", "--context", "100000", "--no-trial")
    code, out, err = command_line(capsys, *asked, "--json", "--out", str(tmp_path / "plan"))
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "plan" / "run.json").read_text())["result"]
    assert json.loads(out) == json.loads(json_text(plan(GROUPED, 0.1, 100_000, trial=False).document()))
    assert {"kv_budgets.json", "kv_budgets.csv", "heads.csv"} <= {path.name for path in (tmp_path / "plan").iterdir()}
    code, out, err = command_line(capsys, *asked)
    assert (code, err) == (0, "")
    assert "Keys per head, largest first" in out
    assert "beyond, lower bound" in out


def test_the_command_ends_with_2_on_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command_line(capsys, str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "there is no run folder" in err


# Trials, on tiny models.

WINDOW, TOKENS = 16, 4800


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return letters(tmp_path_factory.mktemp("text"), spaces=5)


def tiny(name: str) -> LoadedModel:
    return LoadedModel(name, TINY[name].model(), tiny_tokenizer(special=not TINY[name].causal))


def keep_best(priority: Any, count: int, seen: Any) -> Any:
    """The `count` keys of highest priority among those seen, one query at a time."""
    chosen = torch.zeros_like(seen)
    for i in range(len(seen)):
        order = sorted(torch.nonzero(seen[i]).flatten().tolist(), key=lambda j: -float(priority[i, j]))
        chosen[i, order[:count]] = True
    return chosen


@pytest.mark.parametrize("name", ["bert", "modernbert", "llama", "gemma2", "gpt_oss"])
def test_a_trial_is_dense_attention_over_the_keys_that_were_kept(name: str, text: str) -> None:
    """Top and recent keys, in a window and among pooled tokens, in float64 and one query at a time."""
    loaded, seed = tiny(name), 2
    windows = Windows(loaded, open_corpus(text), length=WINDOW, tokens=800)
    reserved = np.arange(3, 40, 3)
    kept = {(layer, head): 3 + 2 * layer + head for layer in range(3) for head in range(4)}
    found = run_trial(loaded, windows, reserved, lambda context: kept, seed=seed)
    asking = reserved[::ASKING]
    pilot = run_pilot(loaded, windows, asking, queries=QUERIES, batch=BATCH, seed=seed, report=lambda tokens: None)
    captured: list[Captured] = []
    with torch.inference_mode(), capture(loaded.model, captured.append):
        (ids,) = windows.batches(len(reserved), reserved)
        loaded.model(input_ids=ids)
    answering = [row for row, window in enumerate(reserved) if window not in asking]
    row_of = {int(window): row for row, window in enumerate(reserved)}
    places = [(row_of[int(w)], int(p)) for w, p in pilot.queries]
    clusters = np.array([row for row, _ in places])
    assert len(found) == 2 * 3 * 4
    for record in found:
        layer = captured[record.layer]
        groups = layer.query.shape[1] // layer.key.shape[1]
        key, value = layer.key.double()[:, record.head // groups], layer.value.double()[:, record.head // groups]
        queries = torch.stack([layer.query[row, record.head, p].double() for row, p in places])
        sinks = None if layer.sinks is None else layer.sinks[record.head].double()
        first = layer.causal and not (layer.sliding_window is not None and layer.sliding_window < WINDOW)

        def attend(scores: Any, keep: Any, values: Any, extra: Any, sinks: Any = sinks) -> Any:
            """One softmax over the kept keys, beside atoms (scores, values) and a learned sink."""
            scores = scores.masked_fill(~keep, -torch.inf)
            columns = [scores] + ([] if extra is None else [extra[0]])
            if sinks is not None:
                columns.append(sinks.expand(len(scores), 1))
            weights = torch.softmax(torch.cat(columns, 1), 1)
            output = (weights[:, : scores.shape[1], None] * values).sum(1)
            return output if extra is None else output + weights[:, scores.shape[1], None] * extra[1]

        def cap(scores: Any, softcap: float | None = layer.softcap) -> Any:
            return scores if softcap is None else softcap * torch.tanh(scores / softcap)

        def check(way: str, output: Any, full: Any, record: Any = record) -> None:
            wrong = (output - full).square().sum(1).numpy()[None]
            expected = relative_error(wrong, full.square().sum(1).numpy()[None], clusters)
            assert record.errors[way].measured == pytest.approx(expected.measured, rel=1e-3, abs=2e-6)
            assert record.errors[way].stderr == pytest.approx(expected.stderr, rel=5e-3, abs=2e-6)

        if record.setting == "window":
            assert (record.context, record.keys) == (WINDOW, kept[record.layer, record.head])
            own_key = torch.stack([key[row] for row, _ in places])
            own_value = torch.stack([value[row] for row, _ in places])
            scores = cap(layer.scale * (own_key @ queries[..., None])[..., 0])
            position = torch.tensor([p for _, p in places])[:, None]
            distance = position - torch.arange(WINDOW)
            seen = distance >= 0 if layer.causal else torch.ones_like(distance, dtype=torch.bool)
            if layer.sliding_window is not None:
                seen &= distance.abs() < layer.sliding_window
            full = attend(scores, seen, own_value, None)
            check("oracle_topk", attend(scores, keep_best(scores, record.keys, seen), own_value, None), full)
            near = -distance.abs().double()
            check("recent", attend(scores, keep_best(near, record.keys, seen), own_value, None), full)
            near[:, :SINKS] = torch.arange(SINKS, 0, -1)
            check("streaming", attend(scores, keep_best(near, record.keys, seen), own_value, None), full)
        else:
            pooled = slice(pilot.positions.start, pilot.positions.stop)
            pool_key, pool_value = key[answering][:, pooled].flatten(0, 1), value[answering][:, pooled].flatten(0, 1)
            if layer.sliding_window is not None:  # a random few of them stand for a full window
                assert record.context == layer.sliding_window
                continue
            assert record.context == len(pool_key) + first
            assert record.keys == kept[record.layer, record.head]
            scores = cap(layer.scale * queries @ pool_key.T)
            extra = None
            if first:
                own = torch.stack([key[row, 0] for row, _ in places])
                extra = (
                    cap(layer.scale * (queries * own).sum(1, keepdim=True)),
                    torch.stack([value[row, 0] for row, _ in places]),
                )
            everything = torch.ones_like(scores, dtype=torch.bool)
            full = attend(scores, everything, pool_value[None], extra)
            best = keep_best(scores, record.keys - first, everything)
            check("oracle_topk", attend(scores, best, pool_value[None], extra), full)
        assert ("random_eviction" in record.errors) == (first or sinks is not None)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss"])
def test_keeping_everything_is_full_attention(name: str, text: str) -> None:
    loaded = tiny(name)
    windows = Windows(loaded, open_corpus(text), length=WINDOW, tokens=800)
    everything = {(layer, head): 10_000 for layer in range(3) for head in range(4)}
    for record in run_trial(loaded, windows, np.arange(12), lambda context: everything):
        for way, error in record.errors.items():
            assert error.measured < 1e-5, (record.setting, way)


def probed(loaded: LoadedModel, text: str, seed: int = 3) -> ProbeRun:
    return probe(loaded, text, TOKENS, window=WINDOW, sizes=(20, 40, 80, 160), replicates=20, queries=64, seed=seed)


@pytest.fixture(scope="module")
def bert(text: str) -> tuple[LoadedModel, ProbeRun]:
    loaded = tiny("bert")
    return loaded, probed(loaded, text)


@pytest.fixture(scope="module")
def llama(text: str) -> tuple[LoadedModel, ProbeRun]:
    loaded = tiny("llama")
    return loaded, probed(loaded, text)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_budgets_keep_their_promise_on_the_reserved_windows(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random keys, as many as planned, make the planned error, where it lies within the sizes measured."""
    monkeypatch.setattr(trial_module, "DRAWS", 40)
    loaded, run = request.getfixturevalue(name)
    made = plan(run, error=0.3, context=200, model=loaded)
    pooled = [trial for trial in made.trials if trial.setting == "pool"]
    assert {trial.context for trial in pooled} == {200}
    ratios = np.array([trial.errors["random"].measured / 0.3 for trial in pooled])
    assert np.median(ratios) == pytest.approx(1, abs=0.12)
    assert 0.6 < ratios.min() <= ratios.max() < 1.6
    assert set(made.trial_summary()) == {"pool", "window"}
    drawn = [block for block in made.view().blocks if isinstance(block, Figure) and block.title.startswith("Errors in")]
    for figure, setting in zip(drawn, ("pool", "window"), strict=True):
        tried = [trial for trial in made.trials if trial.setting == setting]
        random = next(series for series in figure.series if series.name == "random keys")
        assert random.y == [t.errors["random"].measured for t in tried if t.errors["random"].measured > 0]
        assert [guide.y for guide in figure.guides] == [made.error]
    assert {"pool_random", "window_recent", "window_top_stderr"} <= set(made.table.columns)


def test_eviction_lets_a_strong_sink_grow_unless_the_rest_is_weighted(text: str) -> None:
    loaded = tiny("gpt_oss")
    for parameter, tensor in loaded.model.named_parameters():
        if parameter.endswith("sinks"):
            tensor.fill_(13.0)  # most of the mass beside 200 keys
    weighted, plain = [], []
    for seed in range(3, 9):  # one draw of 64 queries is too few to tell
        run = probed(loaded, text, seed)
        made = plan(run, error=0.5, context=200, model=loaded)
        pooled = [trial for trial in made.trials if trial.setting == "pool" and trial.layer == 1]  # the others slide
        assert all(run.head(1, trial.head).sink.share[-1] > 0.5 for trial in pooled)
        weighted += [trial.errors["random"].measured for trial in pooled]
        plain += [trial.errors["random_eviction"].measured for trial in pooled]
    assert np.mean(plain) > 1.15 * np.mean(weighted)
    assert 0.6 < np.mean(weighted) / 0.5 < 1.2


def test_a_trial_wants_the_model_and_the_text_of_the_probe(
    bert: tuple[LoadedModel, ProbeRun], text: str, tmp_path: Path
) -> None:
    loaded, run = bert
    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text()[::-1])
    with pytest.raises(InputError, match="is not what was probed"):
        plan(replace(run, corpus=str(other)), model=loaded)
    with pytest.raises(InputError, match="is not what was probed"):
        plan(replace(run, model_sha256="0"), model=loaded)
    with pytest.raises(InputError, match="the plan cannot be tried: the corpus"):
        plan(replace(run, corpus=str(tmp_path / "gone.txt")), model=loaded)
    with pytest.raises(InputError, match="reserved 2 windows"):
        plan(replace(run, windows={**run.windows, "reserved": [1, 2]}), model=loaded)


def test_standard_errors_of_a_relative_error_are_true() -> None:
    """Over many repetitions the scatter of the estimate is the standard error that it gives itself."""
    generator = np.random.default_rng(0)
    clusters = np.repeat(np.arange(12), 5)
    found = []
    for _ in range(400):
        common = generator.gamma(20, 1 / 20, size=(8, 1)) * np.repeat(generator.gamma(8, 1 / 8, size=12), 5)
        found.append(relative_error(common, np.full((1, 60), 25.0), clusters))
    values = np.array([error.measured for error in found])
    stderr = np.sqrt(np.mean([error.stderr**2 for error in found]))
    assert values.mean() == pytest.approx(0.2, rel=0.02)
    assert stderr == pytest.approx(values.std(), rel=0.15)
