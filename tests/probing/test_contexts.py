"""Contexts of real (tiny) models: sums against dense attention, rotation to other distances, documents, commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import limitlens as ll
from limitlens.errors import InputError
from limitlens.models import Captured, LoadedModel, capture
from limitlens.models.rope_scaling import rotated
from limitlens.models.windows import Windows, draw_runs, open_windows
from limitlens.probing.contexts import measure_contexts
from limitlens.probing.pilot import run_pilot
from tiny_models import TINY, letters, tiny_tokenizer


def tiny(name: str) -> LoadedModel:
    return LoadedModel(name, TINY[name].model(), tiny_tokenizer(special=not TINY[name].causal))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return letters(tmp_path_factory.mktemp("text"))


def test_rotated_queries_are_those_of_later_positions() -> None:
    """The scores of a text that begins 7 positions later, against keys at their old positions."""
    model = tiny("llama").model
    calls: list[Captured] = []
    ids = torch.randint(1, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), capture(model, calls.append) as run:
        run(input_ids=ids)
        run(input_ids=ids, position_ids=torch.arange(7, 19)[None])
    here, later = calls[0], calls[len(calls) // 2]
    moved = rotated(here.query, here.frequencies, 7)
    assert torch.allclose(moved, later.query, atol=1e-5)
    assert not torch.allclose(here.query, later.query, atol=1e-2)


@pytest.mark.parametrize("name", ["llama", next(one for one in TINY if TINY[one].sinks)])
def test_predict_and_probe_give_contexts(name: str, text: str, tmp_path: Path) -> None:
    model = tiny(name)
    run = ll.predict(model, text, tokens=800, window=16, sizes=[8, 32, 128], context=64, queries=12)
    full = [head for head in run.records if head.contexts is not None]
    assert full
    for head in full:
        found: Any = head.contexts
        assert found.n[-1] > 30
        assert (found.error > 0).all()
        assert (found.error_low <= found.error).all()
        assert (found.distance is not None) == (name == "llama")  # neighbouring dimensions are not known as rotary
    document = next(one for one in run.document()["heads"] if one["contexts"])
    assert {"value", "interval", "memory"} <= set(document["autocorrelation_time"])
    again = ll.load(run.save(tmp_path / "run") or tmp_path / "run")
    kept = next(head.contexts for head in again.records if head.contexts is not None)
    assert np.allclose(kept.error, full[0].contexts.error)  # type: ignore[union-attr]
    assert "independent ones in the median head" in str(run)


def test_a_contiguous_probe_gives_contexts(text: str) -> None:
    run = ll.probe(tiny("bert"), text, 3000, window=32, sizes=[4, 8], replicates=4, queries=8, sampling="contiguous")
    heads = run.document()["heads"]
    assert all({"value", "interval"} <= set(head["autocorrelation_time"]) for head in heads)
    assert {"context_worth", "autocorrelation_time", "memory"} <= set(run.heads)


def test_one_window_is_dense_attention(text: str) -> None:
    """The sums of `measure_contexts` against attention computed from the captured keys, for an encoder."""
    model = tiny("bert")
    _, windows = open_windows(model, text, 2000, window=32, special="auto", device="cpu", fewer=True)
    found = measure_contexts(model, windows, count=6, seed=4, warnings=[])
    runs, _ = draw_runs(windows, 1, 6, 4, [])
    calls: list[Captured] = []
    with torch.no_grad(), capture(model.model, calls.append) as run:
        run(input_ids=torch.as_tensor(windows.read(runs[:, 0].tolist()), dtype=torch.long))
    pilot = run_pilot(model, windows, runs[:, 0], queries=18, batch=1, seed=4, report=lambda _: None, clusters=6)
    query = pilot.layers[1].query[2, 0].double()
    call = calls[1]
    begin, end = 0, windows.length
    key, value = (part[:, 2, begin:end].double() for part in (call.key, call.value))
    weights = torch.exp(query @ key.transpose(1, 2))  # (R, m, t)
    every = (weights @ value) / weights.sum(-1, keepdim=True)
    centre = (weights @ value).sum(0) / weights.sum(-1).sum(0)[:, None]
    error = (every - centre).square().sum(-1) * 6 / 5
    owner = np.searchsorted(runs[:, 0], pilot.queries[:, 0])
    error[owner, np.arange(18)] = torch.nan
    wanted = torch.sqrt(error.nanmean(0).mean() / centre.square().sum(-1).mean())
    assert (end - begin) == found[1, 2].n[-1]
    assert float(found[1, 2].error[-1]) == pytest.approx(float(wanted), rel=1e-4)


def open_text(folder: Path, lengths: list[int], window: int) -> Windows:
    for number, length in enumerate(lengths):
        (folder / f"{number:02}.txt").write_text("ab" * (length // 2))
    model = LoadedModel("letters", TINY["bert"].model(), tiny_tokenizer(special=False))
    return open_windows(model, str(folder), 10**5, window=window, special="none", device="cpu", fewer=True)[1]


def test_sentences_about_documents(tmp_path: Path) -> None:
    for name in ("long", "short", "one"):
        (tmp_path / name).mkdir()
    warnings: list[str] = []
    windows = open_text(tmp_path / "long", [80, 80, 80, 80, 80, 20], 10)
    runs, documents = draw_runs(windows, 3, 9, 0, warnings)
    assert len(set(documents.tolist())) > 1
    assert "join documents and are left out" in warnings[0]
    ends = np.array(windows.ends)
    first, last = runs[:, 0] * 10, runs[:, -1] * 10 + 9
    assert (np.searchsorted(ends, first, "right") == np.searchsorted(ends, last, "right")).all()
    warnings.clear()
    draw_runs(open_text(tmp_path / "short", [20] * 20, 10), 4, 5, 0, warnings)
    assert "too few documents are as long" in warnings[0]
    warnings.clear()
    assert not draw_runs(open_text(tmp_path / "one", [400], 10), 2, 5, 0, warnings)[1].any()
    assert "all contexts come from one document" in warnings[0]
    with pytest.raises(InputError, match="the text holds 2 contexts of 200 tokens; expected at least 4"):
        draw_runs(open_text(tmp_path / "one", [400], 10), 20, 5, 0, warnings)


def test_a_context_shorter_than_a_window_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="the context has 8 tokens; expected at least a window"):
        ll.predict(tiny("bert"), text, window=16, context=8)


def test_overlapping_windows_cover_a_context_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the first layer do not see other tokens, so four windows give what one long window gives."""
    monkeypatch.setattr("limitlens.probing.contexts.START", 0)
    model = tiny("llama")
    _, windows = open_windows(model, text, 4000, window=16, special="none", device="cpu", fewer=True)
    found = measure_contexts(model, windows, length=4, count=6, queries=1, seed=4, warnings=[])
    runs, _ = draw_runs(windows, 4, 6, 4, [])
    calls: list[Captured] = []
    with torch.no_grad(), capture(model.model, calls.append) as run:
        run(input_ids=torch.as_tensor(np.stack([windows.read(row.tolist()).ravel() for row in runs])).long())
    groups = calls[0].query.shape[1] // calls[0].key.shape[1]
    for head in range(calls[0].query.shape[1]):
        query = calls[0].query[:, head, -1].double() * calls[0].scale
        key, value = (part[:, head // groups, :-1].double() for part in (calls[0].key, calls[0].value))
        weights = torch.exp(query @ key.mT).transpose(0, 1)[..., None]  # (m, R, t, 1)
        every = (weights * value).sum(2) / weights.sum(2)
        centre = (weights * value).sum((1, 2)) / weights.sum((1, 2))
        error = (every - centre[:, None]).square().sum(-1) * 6 / 5
        error.fill_diagonal_(torch.nan)
        wanted = torch.sqrt(error.nanmean() / centre.square().sum(-1).mean())
        assert float(found[0, head].error[-1]) == pytest.approx(float(wanted), rel=1e-4)
