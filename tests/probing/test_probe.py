"""Probes against dense float64 attention over the same tokens and queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from threading import get_ident
from time import sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from limitlens.cache.plan import plan
from limitlens.comparison import compare
from limitlens.errors import InputError
from limitlens.models import Captured, LoadedModel, Windows, capture, open_corpus
from limitlens.probing import probe as probe_module
from limitlens.probing.options import ProbeOptions
from limitlens.probing.pilot import run_pilot
from limitlens.probing.probe import probe
from limitlens.probing.result import ProbeRun
from limitlens.record import read_run
from limitlens.sampling.assignment import Assignment
from limitlens.sampling.cells import Cells, parse_sizes
from limitlens.sampling.workers import one_after_another, workers_for
from limitlens.statistics.bootstrap import student_factor
from tiny_models import GROUPED, LAYERS, TINY, _of, letters, tiny_tokenizer

WINDOW, TOKENS, SIZES, REPLICATES, QUERIES, BATCH = 16, 4800, (8, 16, 40, 100), 5, 12, 37
CAUSAL = ("gpt2", "llama", "gemma2", "gpt_oss", "mistral")
PROBED = ("bert", "modernbert", *CAUSAL)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return letters(tmp_path_factory.mktemp("text"), spaces=5)


def tiny(name: str) -> LoadedModel:
    return LoadedModel(name, TINY[name].model(), tiny_tokenizer(special=not TINY[name].causal))


def run_tiny(loaded: LoadedModel, text: str, **options: Any) -> ProbeRun:
    arguments: dict[str, Any] = {
        "window": WINDOW, "sizes": SIZES, "replicates": REPLICATES, "queries": QUERIES, "batch": BATCH, "seed": 3,
        "options": OPTIONS,
    }  # fmt: skip
    return probe(loaded, text, TOKENS, **arguments | options)


OPTIONS = ProbeOptions(block=2 * BATCH * WINDOW)  # two forwards
# Cells keep their tokens until the end, or all but those of one replicate stream into states.
CELLS_AS = {"kept": OPTIONS, "streamed": replace(OPTIONS, kept_step=8, whole_replicates=1)}


@dataclass
class Dense:
    """All that a layer attends to, gathered window by window, and the cells of all tokens."""

    captured: dict[int, Captured]
    """Of each layer, all windows at once."""
    cells: list[list[list[tuple[int, int]]]]
    """cells[r][j]: (window, position) of its tokens."""
    pool: list[tuple[int, int]]
    run: ProbeRun

    def rows(self, layer: int, name: str, head: int, places: list[tuple[int, int]]) -> Tensor:
        window, position = torch.tensor(places).T
        return getattr(self.captured[layer], name)[window, head, position].double()

    def query_places(self) -> list[tuple[int, int]]:
        return [(int(w), int(p)) for w, p in self.run.states["query_places"]]

    def attend(
        self, layer: int, head: int, places: list[tuple[int, int]], *, weight: float = 1.0, atom: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Outputs (m, v) and weights (m, n): one softmax over `places` with n·weight worth of mass, and the atom."""
        shown = self.captured[layer]
        groups = shown.query.shape[1] // shown.key.shape[1]
        query = self.rows(layer, "query", head, self.query_places()) * shown.scale
        key, value = (self.rows(layer, name, head // groups, places) for name in ("key", "value"))

        def cap(scores: Tensor) -> Tensor:
            return scores if shown.softcap is None else shown.softcap * torch.tanh(scores / shown.softcap)

        scores = cap(query @ key.T) + np.log(weight)
        values = value.expand(len(query), *value.shape)
        if atom:
            sliding = shown.sliding_window is not None and shown.sliding_window < WINDOW
            if shown.causal and not sliding:
                first = [(w, 0) for w, _ in self.query_places()]
                own_key, own_value = (self.rows(layer, name, head // groups, first) for name in ("key", "value"))
                scores = torch.cat((scores, cap((query * own_key).sum(-1))[:, None]), 1)
                values = torch.cat((values, own_value[:, None]), 1)
            if shown.sinks is not None:
                scores = torch.cat((scores, shown.sinks[head].double().expand(len(query), 1)), 1)
                values = torch.cat((values, torch.zeros_like(values[:, :1])), 1)
        weights = torch.softmax(scores, -1)
        return (weights[:, None] @ values)[:, 0], weights


def dense(loaded: LoadedModel, text: str, run: ProbeRun, options: ProbeOptions = OPTIONS) -> Dense:
    windows = Windows(loaded, open_corpus(text), length=WINDOW, tokens=TOKENS)
    pilot, reserved = (np.array(run.windows[name]) for name in ("pilot", "reserved"))
    assert len(pilot) >= 16
    assert not set(pilot.tolist()) & set(reserved.tolist())
    assert {w for w, _ in run.states["query_places"].tolist()} <= set(pilot.tolist())
    captured: dict[int, Captured] = {}
    with torch.inference_mode(), capture(loaded.model, lambda c: captured.update({c.layer: c})):
        (ids,) = windows.batches(windows.count)
        loaded.model(input_ids=ids)
    rest = np.setdiff1d(np.arange(windows.count), np.concatenate((pilot, reserved)))
    order = np.random.default_rng(np.random.SeedSequence([3, 0x9001])).permutation(rest)
    start, stop = run.pooled_positions
    batches = [order[i : i + 2 * BATCH] for i in range(0, len(order), 2 * BATCH)]
    places = [[(int(w), p) for w in batch for p in range(start, stop)] for batch in batches]
    assignment = Assignment(
        [len(block) for block in places],
        Cells(SIZES),
        run.replicates,
        3,
        kept_step=options.kept_step,
        whole_replicates=options.whole_replicates,
    )
    slots: dict[int, tuple[int, int]] = {}
    streams: dict[int, list[tuple[int, int]]] = {}
    for block, assigned in zip(places, assignment.assign_blocks(), strict=True):
        ordered = [block[i] for i in assigned.order]
        slots |= dict(zip(assigned.slots.tolist(), ordered, strict=False))
        for number, begin, end in assigned.streamed:
            streams.setdefault(number, []).extend(ordered[len(assigned.slots) :][begin:end])
    cells = []
    for r in range(assignment.replicates):
        row = []
        for j, step in enumerate(Cells(SIZES).steps):
            first = int(assignment.start[r, j])
            kept = assignment.kept[r, j]
            row.append([slots[s] for s in range(first, first + step)] if kept else streams[assignment.number[r, j]])
        cells.append(row)
    return Dense(captured, cells, [place for block in places for place in block], run)


def rms(vectors: Tensor) -> float:
    return float(vectors.square().sum(-1).mean().sqrt())


def check_curves(found: Dense, layer: int, head: int, record: dict[str, Any], *, atom: bool) -> None:
    """The record's errors, replicate by replicate squared and averaged, from softmax over lists of tokens."""
    pool = found.pool
    expected = []
    for j, n in enumerate(SIZES):
        limit, _ = found.attend(layer, head, pool, weight=n / len(pool) if atom else 1.0, atom=atom)
        errors = []
        for replicate in found.cells:
            sample = [place for cell in replicate[: j + 1] for place in cell]
            assert len(set(sample)) == n
            output, _ = found.attend(layer, head, sample, atom=atom)
            errors.append(rms(output - limit) / np.sqrt(1 - n / len(pool)))
        expected.append(np.sqrt(np.mean(np.square(errors))) / rms(limit))
    np.testing.assert_allclose(record["relative_output_error"], expected, rtol=2e-5)


@pytest.mark.parametrize("name", PROBED)
@pytest.mark.parametrize("cells_as", CELLS_AS)
def test_curves_and_reference_are_those_of_dense_attention(name: str, text: str, cells_as: str) -> None:
    loaded = tiny(name)
    run = run_tiny(loaded, text, options=CELLS_AS[cells_as])
    found = dense(loaded, text, run, CELLS_AS[cells_as])
    tokens = [place for replicate in found.cells for cell in replicate for place in cell]
    assert len(tokens) == len(set(tokens)) == REPLICATES * SIZES[-1]
    assert set(tokens) < set(found.pool)
    assert run.tokens == len(found.pool)
    assert len(run.records) == LAYERS * TINY[name].query_heads
    for layer, head in ((0, 1), (1, 0), (LAYERS - 1, 3)):
        record = run.document()["heads"][layer * TINY[name].query_heads + head]
        assert (record["layer"], record["head"]) == (layer, head)
        reference, _ = found.attend(layer, head, found.pool)
        torch.testing.assert_close(run.states[f"layer{layer}.reference.output"][head], reference, rtol=1e-5, atol=2e-6)
        if record["without_sink"] is None:
            check_curves(found, layer, head, record, atom=False)
        else:
            check_curves(found, layer, head, record, atom=True)
            check_curves(found, layer, head, record["without_sink"], atom=False)


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2"])
@pytest.mark.parametrize("cells_as", CELLS_AS)
def test_details_are_those_of_dense_attention(name: str, text: str, cells_as: str) -> None:
    loaded = tiny(name)
    run = run_tiny(loaded, text, options=CELLS_AS[cells_as])
    found = dense(loaded, text, run, CELLS_AS[cells_as])
    whole = CELLS_AS[cells_as].whole_replicates
    for layer, head in ((0, 2), (LAYERS - 1, 1)):
        record = run.document()["heads"][layer * 4 + head]
        effective, top, entropy, hard = [], [], [], []
        groups = 4 // TINY[name].key_heads
        values = dict(zip(found.pool, found.rows(layer, "value", head // groups, found.pool), strict=True))
        _, weights = found.attend(layer, head, found.pool)
        best = torch.stack([values[found.pool[i]] for i in weights.argmax(1)])
        for number, replicate in enumerate(found.cells):
            rows, wrong = [], []
            for j, n in enumerate(SIZES):
                sample = [place for cell in replicate[: j + 1] for place in cell]
                _, weights = found.attend(layer, head, sample)
                rows.append(float((1 / weights.square().sum(1)).mean()))
                winners = torch.stack([values[sample[i]] for i in weights.argmax(1)])
                wrong.append(rms(winners - best) / rms(best) / np.sqrt(1 - n / len(found.pool)))
            hard.append(wrong)
            if number >= whole:
                continue
            effective.append(rows)
            top.append(float(weights.max(1).values.mean()))
            entropy.append(float(-(weights * weights.log()).sum(1).mean()))
        np.testing.assert_allclose(record["effective_tokens"], np.mean(effective, 0), rtol=2e-5)
        np.testing.assert_allclose(record["hardmax_error"], np.sqrt(np.mean(np.square(hard), 0)), rtol=2e-5)
        assert record["top_weight"] == pytest.approx(np.mean(top), rel=2e-5)
        assert record["entropy"] == pytest.approx(np.mean(entropy), rel=2e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_geometry_is_that_of_the_pooled_queries_and_keys(name: str, text: str) -> None:
    loaded = tiny(name)
    run = run_tiny(loaded, text)
    found = dense(loaded, text, run)
    groups = 4 // TINY[name].key_heads
    for layer, head in ((0, 0), (1, 3)):
        record = run.document()["heads"][layer * 4 + head]
        scale = found.captured[layer].scale
        query, key = (
            found.rows(layer, part, h, found.pool).numpy() for part, h in (("query", head), ("key", head // groups))
        )
        cov_q, cov_k = (np.cov(rows.T, bias=True) for rows in (query, key))
        eigenvalues = np.linalg.eigvals(cov_q @ cov_k)
        assert record["horizon"] == pytest.approx(scale * np.sqrt(eigenvalues.real.max()), rel=1e-4)
        tilt = scale * np.sqrt(query.mean(0) @ cov_k @ query.mean(0))
        assert record["mean_tilt"] == pytest.approx(tilt, rel=1e-4)
        asked = found.rows(layer, "query", head, found.query_places()).numpy() * scale
        assert record["score_std"] == pytest.approx(np.sqrt((asked @ key.T).var(1).mean()), rel=1e-4)


def test_one_sided_horizon_and_coupling_come_from_weights_and_hidden_states(text: str) -> None:
    loaded = tiny("gpt2")
    run = run_tiny(loaded, text)
    windows = Windows(loaded, open_corpus(text), length=WINDOW, tokens=TOKENS)
    hidden: list[Tensor] = []
    used = np.setdiff1d(
        np.arange(windows.count), [*run.states["query_places"][:, 0].tolist(), *run.document()["windows"]["reserved"]]
    )
    with (
        torch.inference_mode(),
        capture(loaded.model, lambda c: hidden.append(c.hidden) if c.layer == 1 else None, hidden=True),
    ):
        for ids in windows.batches(64, used):
            loaded.model(input_ids=ids)
    start, stop = run.pooled_positions
    rows = torch.cat([part[:, start:stop].flatten(0, 1) for part in hidden]).double().numpy()
    covariance = np.cov(rows.T, bias=True)
    block = loaded.model.h[1].attn.c_attn.weight.detach().double().numpy()
    for head in range(4):
        Wq, Wk = block[:, 8 * head : 8 * head + 8], block[:, 32 + 8 * head : 40 + 8 * head]
        A = Wk @ Wq.T / np.sqrt(8)
        values, vectors = np.linalg.eigh(covariance)
        root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
        one_sided = np.linalg.norm(root @ A, 2)
        record = run.document()["heads"][4 + head]
        # One hidden state in four enters the covariance: 800 of them, so 5% in a variance is one standard error.
        assert record["horizon_one_sided"] == pytest.approx(one_sided, rel=0.08)
        assert record["coupling"] == pytest.approx(values[-1] * one_sided**2, rel=0.2)
        assert record["geometry_note"] is None


def test_what_cannot_be_had_is_null_with_a_reason(text: str) -> None:
    heads = run_tiny(tiny("modernbert"), text).document()["heads"]
    assert all(head["horizon_one_sided"] is None and head["coupling"] is None for head in heads)
    assert "no query and key projections" in heads[0]["geometry_note"]
    assert "before the rotary embedding" in run_tiny(tiny("llama"), text).document()["heads"][0]["geometry_note"]
    with pytest.raises(InputError, match="layer 0 of mpnet adds a bias to its scores that still changes with distance"):
        run_tiny(LoadedModel("mpnet", TINY["mpnet"].model(), tiny_tokenizer(special=True)), text)


def test_layers_are_recorded_with_their_kind(text: str) -> None:
    result = run_tiny(tiny("gemma2"), text).document()
    assert [layer["sliding_window"] for layer in result["layers"]] == [6, None, 6]
    assert [layer["attention"] for layer in result["layers"]] == ["sliding window", "full", "sliding window"]
    assert [head["sink"] is None for head in result["heads"]] == [True] * 4 + [False] * 4 + [True] * 4
    kinds = [head["sink"]["kind"] for head in run_tiny(tiny("gpt_oss"), text).document()["heads"]]
    assert kinds == ["learned sink"] * 4 + ["first token and learned sink"] * 4 + ["learned sink"] * 4


def test_a_sliding_window_longer_than_the_probe_s_is_kept_and_hides_no_sink(text: str) -> None:
    model = _of("Mistral", sliding_window=WINDOW + 9, **GROUPED)().eval()
    result = run_tiny(LoadedModel("wide", model, tiny_tokenizer(special=False)), text).document()
    assert {head["sliding_window"] for head in result["heads"]} == {WINDOW + 9}
    assert all(head["sink"]["kind"] == "first token" for head in result["heads"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss"])
def test_a_probe_on_a_gpu_is_that_on_the_cpu(name: str, text: str) -> None:
    loaded = tiny(name)
    here = run_tiny(loaded, text).document()
    there = run_tiny(replace(loaded, model=TINY[name].model().cuda()), text).document()
    assert there["device"].startswith("cuda")
    for one, other in zip(here["heads"], there["heads"], strict=True):
        np.testing.assert_allclose(other["relative_output_error"], one["relative_output_error"], rtol=1e-4)
        for quantity in ("horizon", "mean_tilt", "score_std", "top_weight", "entropy"):
            assert other[quantity] == pytest.approx(one[quantity], rel=1e-3)


def test_queries_of_a_causal_model_come_after_every_pooled_key(text: str) -> None:
    run = run_tiny(tiny("llama"), text)
    start, stop = run.pooled_positions
    positions = run.states["query_places"][:, 1]
    assert start == 1
    assert int(positions.min()) >= stop
    assert int(positions.max()) == WINDOW - 1
    encoder = run_tiny(tiny("bert"), text)
    assert encoder.pooled_positions == (0, WINDOW)
    assert len(set(encoder.states["query_places"][:, 1].tolist())) > WINDOW / 3


def test_the_sink_is_measured_against_the_rest(text: str) -> None:
    loaded = tiny("gpt2")
    run = run_tiny(loaded, text)
    found = dense(loaded, text, run)
    record = run.document()["heads"][5]
    _, weights = found.attend(1, 1, found.pool, weight=SIZES[1] / len(found.pool), atom=True)
    assert record["sink"]["share"][1] == pytest.approx(float(weights[:, -1].mean()), rel=1e-5)
    length = record["sink"]["dilution_length"]
    _, weights = found.attend(1, 1, found.pool, weight=length / len(found.pool), atom=True)
    assert float(weights[:, -1].mean()) == pytest.approx(0.5, rel=1e-5)
    _, weights = found.attend(1, 1, found.pool, weight=(WINDOW - 1) / len(found.pool), atom=True)
    assert record["sink_mass"] == pytest.approx(float(weights[:, -1].mean()), rel=1e-5)


def test_an_encoders_sink_mass_is_that_of_its_special_tokens(text: str) -> None:
    loaded = tiny("bert")
    run = run_tiny(loaded, text)
    found = dense(loaded, text, run)
    special = torch.tensor([p in (0, WINDOW - 1) for _, p in found.pool])
    _, weights = found.attend(2, 3, found.pool)
    assert run.document()["heads"][11]["sink_mass"] == pytest.approx(float(weights[:, special].sum(1).mean()), rel=1e-5)


def test_many_windows_share_clusters_and_no_window_is_in_two(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny("bert")
    apart = run_tiny(loaded, text)
    windows, counts = apart.states["query_places"][:, 0].unique(return_counts=True)
    assert counts.max() - counts.min() <= 1  # as many queries from every window, or one more
    seen = len(windows)
    assert seen > 8
    assert apart.records[0].curve.error_moments.shape[0] == seen
    few = max(1, round(seen / 4))
    pilots = []
    monkeypatch.setattr(
        probe_module, "run_pilot", lambda *given, **known: pilots.append(run_pilot(*given, **known)) or pilots[0]
    )
    together = run_tiny(loaded, text, options=replace(OPTIONS, clusters=4))
    assert together.records[0].curve.error_moments.shape[0] == -(-seen // few)
    np.testing.assert_allclose(together.records[0].curve.error, apart.records[0].curve.error, rtol=1e-12)
    pairs = set(zip(pilots[0].queries[:, 0].tolist(), pilots[0].layers[0].clusters.tolist(), strict=True))
    assert len(pairs) == seen
    assert {cluster for _, cluster in pairs} == set(range(-(-seen // few)))


def test_the_model_runs_once_over_the_corpus(text: str) -> None:
    loaded = tiny("bert")
    seen: list[Tensor] = []
    hook = loaded.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    run = run_tiny(loaded, text)
    hook.remove()
    windows = Windows(loaded, open_corpus(text), length=WINDOW, tokens=TOKENS)
    forwarded = sorted(tuple(row.tolist()) for ids in seen for row in ids)
    reserved = set(run.windows["reserved"])
    assert forwarded == sorted(tuple(windows[i].tolist()) for i in range(windows.count) if i not in reserved)
    assert len(reserved) == round(windows.count / 10)


def test_the_same_seed_gives_the_same_run_and_another_gives_another(text: str) -> None:
    loaded = tiny("llama")
    one, two, other = (run_tiny(loaded, text, seed=seed).document() for seed in (3, 3, 4))
    assert one["heads"] == two["heads"]
    assert one["heads"][0]["relative_output_error"] != other["heads"][0]["relative_output_error"]


def test_as_many_replicates_as_the_pool_holds(text: str) -> None:
    run = run_tiny(tiny("bert"), text, replicates=50)
    pool = (300 - 64 - 30) * WINDOW
    assert run.tokens == pool
    assert run.replicates == pool // SIZES[-1]
    assert run.replicates_asked == 50
    with pytest.raises(InputError, match=r"largest size is 3,000 and 4,800 tokens leave 3,296 .* ask for about 8,738"):
        run_tiny(tiny("bert"), text, sizes=(10, 3000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicates": 1}, "replicates is 1"),
        ({"queries": 1}, "queries is 1"),
        ({"batch": 0}, "batch is 0"),
        ({"sizes": (5, 3)}, "sizes are 5, 3"),
        ({"window": 2}, "windows longer than"),
        ({"window": 100}, "learned 64 positions"),
        ({"device": "tpu"}, "the device is 'tpu'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str, text: str) -> None:
    with pytest.raises(InputError, match=message):
        run_tiny(tiny("bert"), text, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 12_000}, "the largest size is 4,096 and 12,032 tokens leave 6,656 to draw from"),
        ({"sampling": "document"}, "the largest size is 4,096 and a document has 256 tokens"),
        ({"special": "all"}, "special is 'all'"),
        ({"precision": "exactly"}, "the precision is 'exactly'"),
        ({"corpus": "no such text"}, "no such text"),
    ],
)
def test_arguments_are_checked_before_the_model_loads(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limitlens.models.windows.load", lambda *given, **known: pytest.fail("the model was loaded"))
    with pytest.raises(InputError, match=message):
        probe("minilm", **options)


def test_an_interrupted_run_is_a_run_of_the_tokens_assigned_so_far(text: str) -> None:
    loaded = tiny("llama")

    def stop(done: float, total: float) -> None:
        if done > 0.8 * total:
            raise KeyboardInterrupt

    run = run_tiny(loaded, text, progress=stop)
    result = run.document()
    assert result["interrupted"]
    assert "interrupted after" in result["warnings"][-1]
    assert 0.4 < result["tokens"] / run_tiny(loaded, text).tokens < 0.8
    assert all(a < b for a, b in zip(result["n"], SIZES, strict=True))
    error = np.array([head["without_sink"]["relative_output_error"] for head in result["heads"]])
    assert np.isfinite(error).all()
    assert (error[:, 0] > error[:, -1]).all()
    left = np.array([head.curve.finite_population_correction for head in run.records]) ** 2  # 1 − n/N
    sizes = np.rint(run.tokens * (1 - left))
    assert sizes.shape == (12, REPLICATES, len(SIZES))
    np.testing.assert_array_equal(np.rint(sizes.mean(1)), np.tile(result["n"], (12, 1)))
    assert (sizes.min(1) < sizes.max(1)).any()

    def at_once(done: float, total: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # before the pool nothing is worth keeping
        run_tiny(loaded, text, progress=at_once)


def test_a_run_is_saved_and_read_back(text: str, tmp_path: Path) -> None:
    run = run_tiny(tiny("llama"), text)
    folder = run.save(tmp_path / "run")
    assert {path.name for path in folder.iterdir()} == {
        "run.json", "states.safetensors", "arrays.safetensors",
        *(f"{table}.{kind}" for table in ("heads", "layers", "curves") for kind in ("csv", "parquet")),
    }  # fmt: skip
    again = ProbeRun.load(read_run(folder))
    assert again.document() == run.document()
    assert again.states.keys() == run.states.keys()
    assert all(torch.equal(again.states[name], run.states[name]) for name in run.states)
    assert again.heads.equals(run.heads)
    assert again.curves.equals(run.curves)
    assert str(again) == str(run)
    assert len(run.heads) == 12
    assert len(run.curves) == 12 * len(SIZES)
    assert run.arrays()["curve.error_moments"].shape[2:] == (REPLICATES, len(SIZES))
    assert "<table" in run._repr_html_()
    with pytest.raises(InputError, match=r"holds no run\.json"):
        ProbeRun.load(read_run(tmp_path))


def test_standard_errors_count_the_windows_that_another_seed_could_sample(text: str) -> None:
    run = run_tiny(tiny("llama"), text)
    windows = run.windows
    for head, entry in zip(run.records, run.document()["heads"], strict=True):
        for curve, part in ((head.curve, entry), (head.curve_without_sink, entry["without_sink"])):
            unread = 1 - windows["pool"] / windows["count"]
            assert curve.text_share == pytest.approx(unread / student_factor(3) ** 2)
            variance = np.square(curve.text).sum(0)
            assert part["text_stderr"] == pytest.approx(curve.error * np.sqrt(variance * (1 - curve.text_share)))
            between_seeds = replace(curve, text=curve.text * np.sqrt(curve.text_share), text_share=1.0)
            assert part["relative_output_error_stderr"] == pytest.approx(between_seeds.stderr)
    assert run.curves["text_stderr"].max() > 0


def test_every_head_has_what_the_contract_names(text: str) -> None:
    document = run_tiny(tiny("llama"), text).document()
    assert {"model", "corpus", "tokens", "heads", "seconds"} <= document.keys()
    assert {"model", "attention"} <= document["seconds"].keys()
    names = """layer head kv_head horizon horizon_one_sided coupling mean_tilt score_std n relative_output_error
    relative_output_error_stderr text_stderr rate rate_sharp effective_tokens top_weight entropy sink_mass pareto_k
    regime tokens_for"""
    for head in document["heads"]:
        assert set(names.split()) <= head.keys()
        assert head["tokens_for"].keys() == {"0.1", "0.05", "0.01"}
        assert {"slope", "stderr", "interval", "law"} <= head["rate"].keys()
        assert head["kv_head"] == head["head"] // 2
    layer = document["layers"][0]
    assert layer["tails"]["verdict"] in ("sub-Gaussian", "cannot tell", "heavier than Gaussian", "power tail")
    skill = document["summary"]["rates"]["predictors"]
    assert skill["rate_constant"]["rank_correlation"] is None
    slopes = [head["without_sink"]["rate"]["slope"] for head in document["heads"]]
    assert skill["rate_constant"]["mean_absolute_miss"] == pytest.approx(np.abs(np.array(slopes) - 0.5).mean())


def test_workers_keep_the_order_and_leave_torch_as_it_was(text: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with workers_for(torch.device("cpu")) as workers:
            assert workers is not one_after_another
            threads = set(workers(lambda _: (sleep(0.02), torch.get_num_threads(), get_ident())[1:], range(6)))
            assert len(threads) == 2
            assert {count for count, _ in threads} == {1}
            assert list(workers(lambda number: number**2, range(9))) == [number**2 for number in range(9)]
            with pytest.raises(ZeroDivisionError):
                list(workers(lambda number: 1 / number, range(3)))
        with workers_for(torch.device("cpu")) as workers:  # one fails, and the others need not go on

            def long(number: int) -> None:
                begun.append(number)
                while True:
                    workers.check()
                    if number == 0:
                        raise InputError("the first")
                    sleep(0.001)

            begun: list[int] = []
            with pytest.raises(InputError, match="the first"):
                list(workers(long, range(9)))
            assert len(begun) < 9
        assert torch.get_num_threads() == 2
        spread = run_tiny(tiny("llama"), text)
        torch.set_num_threads(1)
        alone = run_tiny(tiny("llama"), text)
    finally:
        torch.set_num_threads(before)
    for one, other in zip(spread.document()["heads"], alone.document()["heads"], strict=True):
        np.testing.assert_allclose(one["relative_output_error"], other["relative_output_error"], rtol=1e-6)
    with workers_for(torch.device("meta")) as workers:
        assert workers is one_after_another


@pytest.mark.parametrize("scale", [30.0, 300.0])
def test_enormous_scores_neither_overflow_nor_vanish(scale: float, text: str) -> None:
    loaded = tiny("bert")
    for layer in loaded.model.encoder.layer:
        layer.attention.self.query.weight.mul_(scale)
    run = run_tiny(loaded, text)
    found = dense(loaded, text, run)
    record = run.document()["heads"][4]
    assert record["score_std"] > 10
    check_curves(found, 1, 0, record, atom=False)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_moments_are_those_of_dense_attention_over_pairs_of_windows(name: str, text: str) -> None:
    loaded = tiny(name)
    run = run_tiny(loaded, text)
    found, clusters = dense(loaded, text, run), run.states["query_places"][:, 0].numpy()
    apart = clusters[:, None] != clusters[None]
    record = run.document()["heads"][4 + 2]
    expected: dict[str, list[float]] = {"mean": [], "covariance": []}
    limit, _ = found.attend(1, 2, found.pool)
    G = (limit - limit.mean(0)).numpy()
    for j, n in enumerate(SIZES):
        squares = []
        for replicate in found.cells:
            output, _ = found.attend(1, 2, [place for cell in replicate[: j + 1] for place in cell])
            D, Y = (output - limit).numpy(), (output - output.mean(0)).numpy()
            outer = (Y[:, :, None] * Y[:, None] - G[:, :, None] * G[:, None]).reshape(len(Y), -1)
            squares.append([(part @ part.T)[apart].mean() for part in (D, outer)])
        mean, covariance = np.mean(squares, 0) / (1 - n / len(found.pool))
        expected["mean"].append(np.sqrt(max(mean, 0)) / float(limit.mean(0).norm()))
        expected["covariance"].append(np.sqrt(max(covariance, 0)) / np.linalg.norm(np.cov(G.T, bias=True)))
    assert len(np.unique(clusters)) > 2
    for kind, errors in expected.items():
        np.testing.assert_allclose(record[f"relative_{kind}_error"], errors, rtol=1e-3, atol=1e-4)


def test_a_factor_multiplies_scores_and_leaves_the_forward_alone(text: str) -> None:
    """The first layer is that of a model with larger queries; in later ones only the queries themselves are larger."""
    plain, scaled = run_tiny(tiny("bert"), text), run_tiny(tiny("bert"), text, score_scale=2.0)
    larger = tiny("bert")
    projection = larger.model.encoder.layer[0].attention.self.query
    with torch.no_grad():
        projection.weight.mul_(2.0)
        projection.bias.mul_(2.0)
    told = run_tiny(larger, text).document()["heads"]
    for one, other in zip(scaled.document()["heads"][:4], told[:4], strict=True):
        for key in ("relative_output_error", "relative_mean_error", "horizon", "coupling", "mean_tilt", "score_std"):
            np.testing.assert_allclose(one[key], other[key], rtol=1e-4)
    torch.testing.assert_close(scaled.states["layer2.query"], 2 * plain.states["layer2.query"])
    ratio = [
        one.critical.factor / other.critical.factor for one, other in zip(scaled.records, plain.records, strict=True)
    ]
    np.testing.assert_allclose(ratio, 0.5, rtol=1e-3)
    assert scaled.document()["score_scale"] == 2
    assert "scores times 2" in str(scaled)
    assert "the model's own forward was left as it is" in str(scaled)
    assert "scaled the scores differently" in str(compare(plain, scaled))
    with pytest.raises(InputError, match="the run scaled its scores by 2"):
        plan("smollm2", run=scaled)
    with pytest.raises(InputError, match="score_scale is 0"):
        run_tiny(tiny("bert"), text, score_scale=0.0)


MINILM = transformers.BertConfig(
    hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522
)
SMOLLM2 = transformers.LlamaConfig(
    hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536,
    vocab_size=49152,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tokens", "sizes", "took"), [(MINILM, 100_000, "64:4096:7", 37.5), (SMOLLM2, 6_000, "32:128:3", 38.7)]
)
def test_the_estimated_cost_of_a_probe_is_within_a_factor_of_two(
    config: Any, tokens: int, sizes: str, took: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`took` are seconds of processor time on one thread; embeddings, half of minilm's weights, cost nothing."""
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    asked: Any = SimpleNamespace(model=model), SimpleNamespace(length=256, tokens=tokens), Cells(parse_sizes(sizes))
    monkeypatch.setattr(model.__class__, "device", torch.device("cpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    seconds, memory = ProbeOptions(kept_step=512).cost(*asked, 24, 256)
    layers, width = config.num_hidden_layers, config.num_hidden_layers * config.hidden_size
    embedded = sum(part.numel() for name, part in model.named_parameters() if "embeddings" in name or "embed_" in name)
    weights = model.num_parameters() - embedded
    expected = tokens * ((2 * weights + 1024 * width) / 6e10 + 1024 * width / 2.5e10)
    assert seconds == pytest.approx(expected + 0.08 * layers * config.num_attention_heads, rel=1e-3)
    assert took / 2 < seconds < 2 * took
    assert memory > 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert ProbeOptions(kept_step=512).cost(*asked, 24, 256) == (seconds / 2, memory)
