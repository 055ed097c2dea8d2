"""Plans: budgets from curves with known answers, and trials that equal dense attention over the keys that were kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from limitlens.budgets import trial as trial_module
from limitlens.budgets.budget import budget_for, error_at
from limitlens.budgets.export import budgets_document, write_budgets
from limitlens.budgets.head_plan import curve_in
from limitlens.budgets.plan import plan, read
from limitlens.budgets.trial import ASKING, BATCH, QUERIES, SINKS, relative_error, run_trial
from limitlens.cli import main
from limitlens.errors import Array, InputError
from limitlens.heads.pilot import run_pilot
from limitlens.heads.probe import probe
from limitlens.heads.result import ProbeRun
from limitlens.models import Captured, LoadedModel, Windows, capture, open_corpus
from tiny_models import TINY, tiny_tokenizer

SIZES = np.array([64.0, 128, 256, 512, 1024, 2048, 4096])


def power(constant: float, rate: float, sizes: Array = SIZES) -> Array:
    return np.asarray(constant * sizes**-rate)


@pytest.mark.parametrize("context", [512, 4000, 32_768, np.inf])
@pytest.mark.parametrize("wanted", [0.1, 0.05, 0.01])
def test_a_budget_solves_the_error_in_its_context(wanted: float, context: float) -> None:
    """With e = c/√n the answer is n = 1/(ε²/c² + 1/C)."""
    budget = budget_for(SIZES, power(2, 0.5), np.zeros(7), wanted, context)
    needed = 1 / (wanted**2 / 4 + 1 / context)
    assert needed <= 40_960  # ten times the largest size
    assert budget.tokens == np.ceil(round(needed, 6)) == exact(2, wanted, context)
    assert budget.extrapolated == (needed > 4096)
    assert not budget.beyond
    assert error_at(needed, SIZES, power(2, 0.5), context) == pytest.approx(wanted, rel=1e-9)


def test_what_lies_beyond_is_kept_whole_or_not_given() -> None:
    slow = power(1, 0.1)
    endless = budget_for(SIZES, slow, 0.01 * slow, 0.05)
    assert (endless.tokens, endless.interval, endless.beyond) == (None, (None, None), True)
    bounded = budget_for(SIZES, slow, 0.01 * slow, 0.05, 1_000_000)
    assert (bounded.tokens, bounded.beyond) == (1_000_000, True)
    within = budget_for(SIZES, slow, 0.01 * slow, 0.05, 20_000)
    assert within.tokens is not None
    assert not within.beyond
    assert 19_000 < within.tokens < 20_000


def test_few_keys_are_extrapolated_downwards() -> None:
    budget = budget_for(SIZES, power(2, 0.5), np.zeros(7), 0.5)
    assert (budget.tokens, budget.extrapolated) == (16, True)
    assert budget_for(SIZES, power(2, 0.5), np.zeros(7), 5.0).tokens == 1


def test_a_curve_that_rises_again_is_not_trusted() -> None:
    bumpy = np.array([0.3, 0.04, 0.2, 0.1, 0.06, 0.03, 0.02])
    tokens = budget_for(SIZES, bumpy, np.zeros(7), 0.05).tokens
    assert tokens is not None
    assert 1024 < tokens < 2048  # not the early dip below 0.05
    rising = np.array([0.3, 0.3, 0.3, 0.3, 0.2, 0.25, 0.3])
    assert budget_for(SIZES, rising, np.zeros(7), 0.05).beyond


def test_the_interval_covers_the_truth() -> None:
    """Curves measured with 3% noise: the 95% interval holds the true n in about 19 of 20 of them."""
    truth = power(2, 0.5)
    generator = np.random.default_rng(0)
    for wanted, exact in ((0.1, 400), (0.02, 10_000)):  # inside the sizes, and extrapolated
        hits = 0
        for seed in range(200):
            noisy = truth * (1 + 0.03 * generator.standard_normal(7))
            low, high = budget_for(SIZES, noisy, 0.03 * truth, wanted, seed=seed).interval
            hits += low is not None and low <= exact and (high is None or exact <= high)
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

    sizes = np.array([100, 200, 400, 800, 1600])
    errors = [np.sqrt(np.mean([error(attend(tokens(n)), limit) ** 2 for _ in range(100)])) for n in sizes]
    wanted = float(errors[2])
    budget = budget_for(sizes, np.array(errors), np.zeros(5), wanted, 1500)
    assert budget.tokens is not None
    assert 200 < budget.tokens < 400  # fewer than the 400 of an endless context
    squares = []
    for _ in range(100):
        context = tokens(1500)
        squares.append(error(attend(context[: budget.tokens]), attend(context)) ** 2)
    assert np.sqrt(np.mean(squares)) == pytest.approx(wanted, rel=tolerance)


def head_record(layer: int, head: int, kv_head: int, errors: Array, **changes: Any) -> dict[str, Any]:
    return {
        "layer": layer,
        "head": head,
        "kv_head": kv_head,
        "n": SIZES.tolist(),
        "relative_output_error": errors.tolist(),
        "relative_output_error_stderr": (0.01 * errors).tolist(),
        "rate": {"slope": 0.5},
        "regime": "averaging",
        "sliding_window": None,
        "sink": None,
        "without_sink": None,
        "error_is_lower_bound": False,
    } | changes


def run_document(heads: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "model": "a model",
        "corpus": "a text",
        "tokens_asked": 1000,
        "window": 256,
        "windows": {"reserved": [1, 2]},
        "seed": 0,
        "heads": heads,
    } | changes


GROUPED = run_document(
    [
        head_record(0, 0, 0, power(2, 0.5)),
        head_record(0, 1, 0, power(4, 0.5)),
        head_record(0, 2, 1, power(1, 0.5)),
        head_record(0, 3, 1, power(0.5, 0.5)),
        head_record(2, 0, 0, power(1, 0.05), regime="frozen", error_is_lower_bound=True),
        head_record(2, 1, 0, power(2, 0.5)),
    ]
)


def exact(constant: float, error: float, context: float) -> int:
    """The budget of e = c/√n."""
    return int(np.ceil(round(1 / (error**2 / constant**2 + 1 / context), 6)))


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
    }
    marks = [head.mark for head in made.heads]
    assert marks == ["measured", "measured", "measured", "extrapolated", "beyond", "measured"]
    assert [head.status.value for head in made.heads[3:]] == ["heuristic", "heuristic", "verified"]
    assert any("1 heads need more than ten times" in note for note in made.notes)
    assert any("lower bounds" in note for note in made.notes)
    assert any("second probe" in note for note in made.notes)


def test_without_a_context_there_are_no_ratios() -> None:
    made = plan(GROUPED, 0.1, trial=False)
    assert [head.keys.tokens for head in made.heads] == [400, 1600, 100, 25, None, 400]
    assert made.key_value_heads[0].ratio is None
    assert made.total["entries"] is None


def test_a_sliding_window_is_the_context_of_its_layer() -> None:
    document = run_document([head_record(0, 0, 0, power(2, 0.5), sliding_window=500)])
    for context in (None, 300, 100_000):
        own = min(context or 500, 500)
        head = plan(document, 0.1, context, trial=False).heads[0]
        assert (head.context, head.keys.tokens) == (own, exact(2, 0.1, own))


def test_a_head_without_a_curve_keeps_everything() -> None:
    broken = head_record(0, 0, 0, power(2, 0.5), relative_output_error=[None] * 7)
    head = plan(run_document([broken]), 0.1, 5000, trial=False).heads[0]
    assert (head.keys.tokens, head.mark) == (5000, "beyond")


def test_a_sink_is_one_more_key_and_damps_the_error() -> None:
    sink = {"kind": "first token", "dilution_length": 1000.0}
    share = 1000 / (1000 + SIZES)
    rest, beside = power(2, 0.5), power(2, 0.5) * (1 - share)
    both = {
        "sink": sink,
        "without_sink": {
            "relative_output_error": rest.tolist(),
            "relative_output_error_stderr": (0.01 * rest).tolist(),
        },
    }
    head = head_record(0, 0, 0, beside, **both)
    for context in SIZES:  # at n = C the curve beside the sink itself
        sizes, errors, stderr = curve_in(head, context)
        assert np.interp(context, sizes, errors) == pytest.approx(np.interp(context, SIZES, beside))
        np.testing.assert_allclose(stderr, 0.01 * errors)
    np.testing.assert_allclose(curve_in(head, np.inf)[1], rest)
    # Here the factor beyond the sizes is exact: the rest's share at 9,000 tokens.
    np.testing.assert_allclose(curve_in(head, 9000)[1], rest * 0.9)
    made = plan(run_document([head]), 0.1, 9001, trial=False).heads[0]
    assert made.keys.tokens == exact(2 * 0.9, 0.1, 9000) + 1
    assert made.status.value == "heuristic"
    learned = head_record(0, 0, 0, beside, **both | {"sink": sink | {"kind": "learned sink"}})
    assert plan(run_document([learned]), 0.1, 9000, trial=False).heads[0].keys.tokens == exact(2 * 0.9, 0.1, 9000)


def test_the_export_is_what_eviction_methods_index(tmp_path: Path) -> None:
    made = plan(GROUPED, 0.1, 100_000, trial=False)
    files = write_budgets(made, tmp_path)
    document = json.loads(files[0].read_text())
    assert document == json.loads(json.dumps(budgets_document(made)))
    assert document["budgets"] == [[exact(4, 0.1, 1e5), exact(1, 0.1, 1e5)], None, [100_000]]
    assert document["marks"] == [["measured", "measured"], None, ["beyond"]]
    ratios = document["ratios"]
    assert ratios[0] == [budget / 100_000 for budget in document["budgets"][0]]
    assert document["compression_ratios"] == pytest.approx([1 - sum(ratios[0]) / 2, None, 0.0])
    table = pd.read_csv(files[1])
    assert list(table.columns[:5]) == ["layer", "kv_head", "budget", "ratio", "compression_ratio"]
    assert table.budget.tolist() == [*document["budgets"][0], *document["budgets"][2]]


def test_a_plan_prints_itself() -> None:
    made = plan(GROUPED, 0.1, 100_000, trial=False)
    assert "a model on a text: relative output error 0.1 per head in a context of 100,000 tokens" in str(made)
    assert "1 of 6 heads are frozen" in str(made)
    assert "<table" in made._repr_html_()
    assert len(made.table) == 6
    json.dumps(made.document())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": 0}, "the error is 0"),
        ({"error": -1.0}, "the error is -1"),
        ({"context": 1}, "the context is 1 tokens"),
        ({"run": run_document([head_record(0, 0, 0, power(1, 0.5)[:2], n=[64, 128])])}, "an error curve of 2 sizes"),
        ({"run": {"heads": []}}, "the run lacks model"),
    ],
)
def test_bad_input_is_told(change: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"run": GROUPED, "error": 0.1, "context": 5000} | change
    with pytest.raises(InputError, match=words):
        plan(arguments.pop("run"), trial=False, **arguments)


def test_a_folder_that_is_no_run_is_told_in_a_sentence(tmp_path: Path) -> None:
    def message(folder: Path) -> str:
        with pytest.raises(InputError) as error:
            read(folder)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "is no folder" in message(tmp_path / "nowhere")
    assert "holds no run.json" in message(tmp_path)
    record = tmp_path / "run.json"
    record.write_text('{"command": "probe", "result": {"hea')
    assert "could not be read" in message(tmp_path)
    record.write_text(json.dumps({"command": "study", "result": {}}))
    assert "is not the folder of a probe" in message(tmp_path)
    record.write_text(json.dumps({"command": "probe", "versions": {"limitlens": "9.9"}, "result": {"model": "m"}}))
    assert "written by 9.9, so probe again" in message(tmp_path)


def command_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, captured.out, captured.err


def test_the_command_prints_a_page_a_document_and_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"command": "probe", "versions": {"limitlens": "0.1.0"}, "result": GROUPED}
    (tmp_path / "run.json").write_text(json.dumps(record))
    asked = (str(tmp_path), "--error", "0.1", "--context", "100000", "--no-trial")
    code, out, err = command_line(capsys, *asked, "--json", "--out", str(tmp_path / "plan"))
    assert (code, err) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "plan" / "run.json").read_text())["result"]
    assert {"kv_budgets.json", "kv_budgets.csv", "heads.csv"} <= {path.name for path in (tmp_path / "plan").iterdir()}
    code, out, err = command_line(capsys, *asked)
    assert (code, err) == (0, "")
    assert "Keys per head, largest first" in out
    assert "beyond, lower bound" in out


def test_the_command_ends_with_2_on_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command_line(capsys, str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "is no folder" in err


# Trials, on tiny models.

WINDOW, TOKENS = 16, 4800


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    letters = np.random.default_rng(5).choice(list("abcdefghijklmnopqrstuvwxyz     "), 12_000)
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(letters))
    return str(path)


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
            check("top", attend(scores, keep_best(scores, record.keys, seen), own_value, None), full)
            near = -distance.abs().double()
            near[:, :SINKS] += 100
            check("recent", attend(scores, keep_best(near, record.keys, seen), own_value, None), full)
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
            check("top", attend(scores, best, pool_value[None], extra), full)
        assert ("unweighted" in record.errors) == (first or sinks is not None)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss"])
def test_keeping_everything_is_full_attention(name: str, text: str) -> None:
    loaded = tiny(name)
    windows = Windows(loaded, open_corpus(text), length=WINDOW, tokens=800)
    everything = {(layer, head): 10_000 for layer in range(3) for head in range(4)}
    for record in run_trial(loaded, windows, np.arange(12), lambda context: everything):
        for way, error in record.errors.items():
            assert error.measured < 1e-5, (record.setting, way)


def probed(loaded: LoadedModel, text: str) -> ProbeRun:
    return probe(loaded, text, TOKENS, window=WINDOW, sizes=(20, 40, 80, 160), replicates=20, queries=64, seed=3)


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
    """Random keys, as many as planned, make the planned error."""
    monkeypatch.setattr(trial_module, "DRAWS", 40)
    loaded, run = request.getfixturevalue(name)
    made = run.plan(error=0.2, context=200, model=loaded)
    pooled = [trial for trial in made.trials if trial.setting == "pool"]
    assert {trial.context for trial in pooled} == {200}
    ratios = np.array([trial.errors["random"].measured / 0.2 for trial in pooled])
    assert np.median(ratios) == pytest.approx(1, abs=0.12)
    assert 0.6 < ratios.min() <= ratios.max() < 1.6
    assert set(made.trial_summary()) == {"pool", "window"}
    assert {"pool_random", "window_recent", "window_top_stderr"} <= set(made.table.columns)


def test_eviction_lets_a_strong_sink_grow_unless_the_rest_is_weighted(text: str) -> None:
    loaded = tiny("gpt_oss")
    for parameter, tensor in loaded.model.named_parameters():
        if parameter.endswith("sinks"):
            tensor.fill_(13.0)  # most of the mass beside 200 keys
    run = probed(loaded, text)
    made = run.plan(error=0.5, context=200, model=loaded)
    pooled = [trial for trial in made.trials if trial.setting == "pool" and trial.layer == 1]  # the others slide
    weighted, plain = ([trial.errors[way].measured for trial in pooled] for way in ("random", "unweighted"))
    assert all(run.result["heads"][4 + trial.head]["sink"]["share"][-1] > 0.5 for trial in pooled)
    assert np.mean(plain) > 1.15 * np.mean(weighted)
    assert 0.6 < np.mean(weighted) / 0.5 < 1.2


def test_a_trial_wants_the_model_and_the_text_of_the_probe(
    bert: tuple[LoadedModel, ProbeRun], text: str, tmp_path: Path
) -> None:
    loaded, run = bert
    document = run.document()
    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text()[::-1])
    with pytest.raises(InputError, match="is not what was probed"):
        plan(document | {"corpus": str(other)}, model=loaded)
    with pytest.raises(InputError, match="is not what was probed"):
        plan(document | {"model_sha256": "0"}, model=loaded)
    with pytest.raises(InputError, match="the plan cannot be tried: the corpus"):
        plan(document | {"corpus": str(tmp_path / "gone.txt")}, model=loaded)
    few = document | {"windows": document["windows"] | {"reserved": [1, 2]}}
    with pytest.raises(InputError, match="reserved 2 windows"):
        plan(few, model=loaded)


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
