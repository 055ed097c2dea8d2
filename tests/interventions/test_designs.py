"""Sparse designs: no error with all keys, random keys agree with a probe, a window has a bias floor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import limitlens as ll
from limitlens.attention.policies.mixing import MIXINGS
from limitlens.cli import main
from limitlens.errors import InputError
from limitlens.interventions.designs import DESIGNS, Designs, _outputs, _without
from limitlens.models import Captured, capture
from limitlens.models.catalog import LoadedModel
from limitlens.models.windows import open_some
from tiny_models import TINY, tiny_tokenizer

CONTEXT = 32


def tiny(name: str) -> LoadedModel:
    return LoadedModel(name, TINY[name].model(), tiny_tokenizer(special=False))


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Independent letters: a text whose tokens are a sample."""
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(np.random.default_rng(0).choice(list("abcdefghijklmnopqrstuvwxyz"), 40_000)))
    return str(path)


@pytest.fixture(scope="module")
def found(letters: str) -> Designs:
    return ll.designs(tiny("bert"), letters, [4, 8, 16], context=CONTEXT, documents=40, queries=3)


@pytest.mark.parametrize("name", ["bert", "llama", "mistral", "gemma2", "gpt_oss"])
def test_designs_that_cover_all_keys_lose_nothing(name: str, letters: str) -> None:
    run = ll.designs(tiny(name), letters, [4, CONTEXT], context=CONTEXT, documents=5, queries=2)
    covering = [s for s, design in enumerate(run.designs) if design != "linformer"]
    for kind in ("error", "floor"):
        told = run.numbers(run.relative)[kind][:, covering]
        assert np.abs(told[..., 1]).max() < 1e-5
    assert run.overall["error"][:, 0].min() > 0.01
    assert run.overall["error"][run.designs.index("linformer"), 1] > 0.1  # it mixes: it never covers them


def test_errors_are_those_of_attention_over_the_last_keys(letters: str) -> None:
    """One head of a causal model by hand, in float64: a window of 4 keys, the last place of every document."""
    model = tiny("llama")
    run = ll.designs(model, letters, [4], context=CONTEXT, documents=6, queries=1, designs=["recent", "streaming"])
    _, _, ids = open_some(model, letters, 6, CONTEXT, special="auto", seed=0, device="cpu")
    calls: list[Captured] = []
    with torch.inference_mode(), capture(model.model, calls.append):
        model.model(input_ids=ids)
    call = calls[1]
    query, key, value = (part.double() for part in (call.query[:, 3, -1], call.key[:, 1], call.value[:, 1]))
    scores = call.scale * (key @ query[..., None])[..., 0]
    full = (scores.softmax(-1)[:, None] @ value)[:, 0]
    near = (scores[:, -4:].softmax(-1)[:, None] @ value[:, -4:])[:, 0]
    squares = (near - full).square().sum(-1).numpy()
    row = run.places.index((1, 3))
    assert run.squares[row, 0, 0] == pytest.approx(squares, rel=1e-3)
    assert run.outputs[row] == pytest.approx(full.square().sum(-1).numpy(), rel=1e-3)
    told = run.table.query("layer == 1 and head == 3 and design == 'recent'").iloc[0]
    assert told["error"] == pytest.approx(np.sqrt(squares.sum() / full.square().sum().item()), rel=1e-3)


def test_random_keys_are_those_of_the_probe(letters: str) -> None:
    """k random tokens of one document are k tokens of the pool where tokens are independent: the first layer of a model
    that knows no positions, which a document holds each of once."""
    model = tiny("bert")
    model.model.embeddings.position_embeddings.weight.zero_()
    known: dict[str, Any] = {"documents": 40, "queries": 4, "context": CONTEXT, "designs": ["random", "recent"]}
    run = ll.designs(model, letters, [4, 8, 16], **known)
    probe = ll.probe(model, letters, 20_000, window=CONTEXT, sizes=run.keys, replicates=40, queries=128)
    own, heads = run.numbers(run.relative), probe.records[:4]
    theirs = np.array([head.curve.error for head in heads])
    errors = np.hypot(own["fluctuation_stderr"][:4], np.array([head.curve.stderr for head in heads])[:, None])
    off = (own["fluctuation"][:4] - theirs[:, None]) / errors
    assert np.abs(off).max() < 3.5  # a window too: its tokens are as independent as any
    assert np.abs(off.mean((0, 2))).max() < 1.5
    assert (errors / theirs[:, None]).max() < 0.15  # or nothing could be told apart
    rates = [[head.curve.rate.slope, head.curve.rate.stderr] for head in heads if head.curve.rate is not None]
    slopes, spread = np.array(rates).T
    assert np.abs((own["rate"][:4, 0, 0] - slopes) / np.hypot(own["rate_stderr"][:4, 0, 0], spread)).max() < 3.5


def test_random_keys_have_no_floor_and_a_window_has(found: Designs) -> None:
    squares = found.relative["floor"].mean(0)
    whole, left = squares[..., 0], squares[..., 1:]
    count = found.documents
    square = whole + (count - 1) * (whole - left.mean(-1))
    spread = np.sqrt((count - 1) * left.var(-1))
    off = dict(zip(found.designs, square / spread, strict=True))
    assert np.abs(off["random"]).max() < 4
    for name in ("recent", "block", "knorm", "linformer"):
        assert off[name].min() > 4
    assert found.overall["floor"][0] == pytest.approx(np.sign(square[0]) * np.sqrt(np.abs(square[0])))


def test_the_view_names_the_design_of_least_error(found: Designs) -> None:
    least = found.overall["error"][:, 1].argmin()
    assert (
        f"At 8 keys the design with the smallest error over all heads is {DESIGNS[found.designs[least]]} ("
        in (found.view().verdict[1])
    )


def test_fluctuations_of_equal_scores_are_the_variance_of_documents() -> None:
    """Outputs are then means of documents; the limit without a document fluctuates too, which must not count."""
    value = torch.randn(5, 1, 3, 2, generator=torch.Generator().manual_seed(3))
    captured: Any = SimpleNamespace(query=torch.zeros(5, 1, 3, 4), scale=1.0, sinks=None, softcap=None)
    _, _, away = _outputs(captured, 0, torch.zeros(5, 1, 3, 4), value)
    means = value[:, 0].mean(1).numpy()
    expected = [np.delete(means, own, 0).var(0, ddof=1).sum() for own in range(5)]
    assert away.mean() == pytest.approx(np.mean(expected), rel=1e-5)


def test_means_without_one_query_leave_out_its_document() -> None:
    squares = np.random.default_rng(4).uniform(size=(2, 5, 6))
    found = _without(squares)
    assert found[:, 0] == pytest.approx(squares[..., 0].mean(1))
    for query in range(5):
        assert found[:, 1 + query] == pytest.approx(np.delete(squares[..., 1 + query], query, 1).mean(1))


def test_groups_keep_the_mass_of_their_keys() -> None:
    """Means of k groups of equal keys stand for all of them, whatever the query."""
    rng = torch.Generator().manual_seed(0)
    key = torch.randn(2, 3, 4, 5, generator=rng).repeat_interleave(8, -2)
    value = torch.randn(2, 3, 32, 5, generator=rng)
    query = torch.randn(2, 3, 7, 5, generator=rng)
    full = (query @ key.mT).softmax(-1) @ value
    ((mixed, means, added),) = MIXINGS["leading"][1](key, value, [4], rng)
    assert added is not None
    torch.testing.assert_close((query @ mixed.mT + added[..., None, :]).softmax(-1) @ means, full)
    ((_, _, uneven),) = MIXINGS["leading"][1](key, value, [5], rng)
    assert uneven is not None
    torch.testing.assert_close(uneven.exp().sum(-1), torch.full((2, 3), 32.0))


def test_mistakes_are_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("bert")
    with pytest.raises(InputError, match="33 keys are to be kept of documents of 32 tokens; expected at most as many"):
        ll.designs(model, keys=[33], context=32)
    with pytest.raises(InputError, match=r"holds [0-9,]+ documents of 32 tokens; 4,000 were asked for"):
        ll.designs(model, __file__, keys=[8], context=32, documents=4000)
    with pytest.raises(InputError, match="'windows'; expected one or more of random, recent"):
        ll.designs(model, keys=[8], designs=["windows", "random"])
    with pytest.raises(InputError, match="documents is 3; expected at least 4"):
        ll.designs(model, keys=[8], documents=3)
    with pytest.raises(SystemExit) as stopped:
        main(["designs", "minilm", "--keys", "16:1024:3"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert len(DESIGNS) == 10
