"""Sampled keys in a live model: the sampling, the case of all keys, sums over layers, predicted tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import limitlens as ll
from cache_cases import language_model, text
from capture_cases import LENGTH, captures, run, token_ids
from command_line import run as command
from limitlens.interventions.depth import DepthRun
from limitlens.interventions.sampled_keys import KEY_SHARING, SampledKeys
from limitlens.models import Captured, LoadedModel, Windows, capture, open_corpus
from limitlens.models.intervene import attend
from limitlens.sampling.streams import generator_for
from limitlens.statistics.documents import over_documents
from tiny_models import LAYERS, TINY, dense_outputs, letters, tiny_tokenizer


def drawn(model: str, count: int, draws: int, **options: Any) -> tuple[Captured, list[Captured]]:
    """The first layer of a tiny model on one text, and its calls under some draws of keys."""
    (first, *_), _ = captures(TINY[model].model(), token_ids()[:1])
    generator = torch.Generator().manual_seed(0)
    return first, [SampledKeys(count, generator, **options)(first) for _ in range(draws)]


def test_queries_of_an_encoder_see_so_many_keys_each_as_likely() -> None:
    first, shared = drawn("bert", 5, 800)
    assert {one.key.shape[2] for one in shared} == {5}
    places = [(one.key[0, 0, :, None] == first.key[0, 0]).all(-1).float().argmax(-1) for one in shared]
    often = torch.bincount(torch.cat(places), minlength=LENGTH) / 800
    assert (often - 5 / LENGTH).abs().max() < 5 * np.sqrt(5 / LENGTH / 800)
    _, own = drawn("bert", 5, 100, key_sharing="own")
    masks = torch.cat([one.mask for one in own])
    assert (masks.sum(-1) == 5).all()
    assert (masks.float().mean((0, 1, 2)) - 5 / LENGTH).abs().max() < 5 * np.sqrt(5 / LENGTH / 100 / LENGTH)
    assert (masks[0, 0, 0] != masks[0, 0, 1]).any()


@pytest.mark.parametrize("sharing", KEY_SHARING)
def test_queries_of_a_decoder_keep_themselves_and_the_first_and_weigh_the_others(sharing: str) -> None:
    _, found = drawn("llama", 5, 400, key_sharing=sharing)
    masks = torch.stack([one.mask[0, 0] for one in found])
    place = torch.arange(LENGTH)
    assert (masks.sum(-1) == (place + 1).clamp_max(5)).all()
    assert masks[:, place, place].all()
    assert masks[..., 0].all()
    assert not masks.triu(1).any()
    last = LENGTH - 1
    for one, mask in zip(found, masks, strict=True):  # those kept stand for all
        assert (one.bias[0, 0, last].exp() * mask[last]).sum() == pytest.approx(LENGTH, rel=1e-5)
    often = masks[:, last, 1:last].float().mean(0)
    assert (often - 3 / (LENGTH - 2)).abs().max() < 5 * np.sqrt(3 / LENGTH / 400)


@pytest.mark.parametrize("name", TINY)
def test_as_many_keys_as_there_are_give_the_model_itself(name: str) -> None:
    model, ids = TINY[name].model(), token_ids()
    before = run(model, ids)
    for sharing in KEY_SHARING:
        with ll.intervene(model, keys=SampledKeys(LENGTH, torch.Generator().manual_seed(0), key_sharing=sharing)):
            torch.testing.assert_close(run(model, ids), before, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fixed", [False, True])
def test_layers_share_their_keys_only_on_request(fixed: bool) -> None:
    (first, second, _), _ = captures(TINY["bert"].model(), token_ids())
    draws = SampledKeys(4, torch.Generator().manual_seed(0), key_sharing="own", fixed=fixed)
    one, two = draws(first).mask, draws(second).mask
    assert one.shape[1] == 1  # the heads of a layer share them
    assert torch.equal(one, two) == fixed


@cache
def decoder(sharing: str = "shared") -> DepthRun:
    return ll.depth(language_model(), text(), [4, 12, 64], key_sharing=sharing, documents=4, window=64)


@pytest.mark.parametrize("sharing", KEY_SHARING)
def test_layers_before_the_one_that_is_sampled_are_as_they_were(sharing: str) -> None:
    found = decoder(sharing)
    alone = found.squares[:, -LAYERS:, :2, :, 0]
    for sampled in range(LAYERS):
        assert (alone[:, sampled, :, :sampled] == 0).all()
        assert (alone[:, sampled, :, sampled:] > 0).all()
    table = found.table.query("keys == 64")
    assert table["error"].max() < 1e-6
    assert found.predictions.query("keys == 64")["agreement"].min() == 1


def test_errors_are_those_of_a_run_by_hand() -> None:
    loaded, found = language_model(), decoder()
    windows = Windows(loaded, open_corpus(text()), length=64, tokens=64 * 4)
    (ids,) = windows.batches(1, [0])
    full = loaded.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    with ll.intervene(loaded.model, keys=SampledKeys(4, generator_for(0, 0))):
        cut = loaded.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states, others = full.hidden_states[-1][0, 1:].double(), cut.hidden_states[-1][0, 1:].double()
    spread = np.cov(states.numpy().T, bias=True)
    expected = [
        ((others - states).norm(dim=-1) / states.norm(dim=-1)).square().mean().item(),
        ((others - states).mean(0).norm() / states.mean(0).norm()).item() ** 2,
        (np.linalg.norm(np.cov(others.numpy().T, bias=True) - spread) / np.linalg.norm(spread)) ** 2,
    ]
    assert found.squares[0, 0, 0, -1] == pytest.approx(expected, rel=1e-4)
    logs, cuts = (one.logits[0, 1:].log_softmax(-1).double() for one in (full, cut))
    _, divergence, same, cost = found.logits[0, 0, 0]
    kl = torch.nn.functional.kl_div(cuts, logs, reduction="batchmean", log_target=True).item()
    assert divergence == pytest.approx(kl, rel=1e-4)
    assert same == pytest.approx((logs.argmax(-1) == cuts.argmax(-1)).double().mean().item())
    losses = [torch.nn.functional.nll_loss(one[:-1], ids[0, 2:]).item() for one in (logs, cuts)]
    assert cost == pytest.approx(losses[1] - losses[0], rel=1e-3)


def test_layers_that_neither_amplify_nor_interfere_add_in_squares() -> None:
    generator = np.random.default_rng(0)
    added = generator.gamma(4.0, size=(6, LAYERS, 3))  # what each layer adds, squared, in each of six documents
    alone = np.triu(np.ones((LAYERS, LAYERS)))[None, :, None] * added[..., None]
    squares = np.concatenate([alone.sum(1, keepdims=True), alone], 1)[..., None].repeat(3, -1)
    made = replace(decoder(), include=("single",), squares=squares, documents=6)
    first = made.table[made.table["run"] == "resampled"]
    assert first["over_sum"].to_numpy() == pytest.approx(1)
    assert first["over_sum_stderr"].to_numpy() == pytest.approx(0, abs=1e-12)
    assert first["amplification"].to_numpy() == pytest.approx(1)
    twice = np.concatenate([4 * squares[:, :1], squares[:, 1:]], 1)
    assert replace(made, squares=twice).table["over_sum"].iloc[0] == pytest.approx(2)


def test_standard_errors_are_those_of_documents() -> None:
    values = np.random.default_rng(1).normal(3, 1, (40, 2))
    mean, stderr = over_documents(np.asarray, values)
    assert mean == pytest.approx(values.mean(0))
    assert stderr == pytest.approx(values.std(0, ddof=1) / np.sqrt(40))
    _, root = over_documents(np.sqrt, values)
    assert root == pytest.approx(stderr / (2 * np.sqrt(mean)), rel=0.05)  # the delta method


def test_keys_from_the_whole_text_give_the_curves_of_a_probe(tmp_path: Path) -> None:
    """Pooled as a probe pools them, random keys of a layer give each head the error that the probe measures."""
    loaded = LoadedModel("letters", TINY["bert"].model(), tiny_tokenizer(special=False))
    corpus, sizes = letters(tmp_path), (8, 32)
    probed = ll.probe(loaded, corpus, tokens=6000, window=32, sizes=[8, 16, 32], replicates=12, queries=96)
    (ids,) = Windows(loaded, open_corpus(corpus), length=32, tokens=32 * 120).batches(120)
    generator, told = torch.Generator().manual_seed(0), []

    def take(call: Captured) -> None:
        key, value, query = (part.transpose(0, 1).flatten(1, 2)[None] for part in (call.key, call.value, call.query))
        pooled = replace(call, key=key, value=value, query=query[:, :, ::20])
        full = dense_outputs(pooled).float()
        for size in sizes:
            found = [attend(SampledKeys(size, generator)(pooled)) - full for _ in range(96)]
            squares = torch.stack([one.square().sum(-1).mean((0, 2)) for one in found])
            squares = squares / full.square().sum(-1).mean((0, 2)) / (1 - size / key.shape[2])
            errors, spread = squares.mean(0).sqrt(), squares.std(0) / 96**0.5 / (2 * squares.mean(0).sqrt())
            for head, (error, stderr) in enumerate(zip(errors.tolist(), spread.tolist(), strict=True)):
                record = probed.head(call.layer, head).document()
                place = record["n"].index(size)
                measured = (record[name][place] for name in ("relative_output_error", "relative_output_error_stderr"))
                told.append((error, stderr, *measured))

    with torch.inference_mode(), capture(loaded.model, take):
        loaded.model(input_ids=ids)
    mine, stderr, theirs, other = np.array(told).T
    z = (mine - theirs) / np.hypot(stderr, other)
    assert np.median(mine / theirs) == pytest.approx(1, abs=0.05)
    assert (np.abs(z) < 2.5).mean() > 0.85


def test_the_command_and_its_mistakes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    language_model().model.save_pretrained(folder)
    language_model().tokenizer.save_pretrained(folder)
    small = ("depth", folder, "--corpus", text(), "--window", 64, "--documents", 2, "--include", "none")
    code, out, _ = command(capsys, *small, "--keys", "4,16", "--json", "--out", tmp_path / "run")
    told = json.loads(out)
    assert (code, told["documents"], len(told["layers"])) == (0, 2, 2 * LAYERS)
    assert ll.load(tmp_path / "run").document() == told
    for mistake, words in (
        (("--keys", "4,65"), "4, 65 for documents of 64 tokens; expected numbers from 3 to 64"),
        (("--keys", "2,16"), "expected numbers from 3"),
        (("--key-sharing", "alone"), "expected one of shared, own"),
        (("--include", "everything"), "expected none or some of fixed, single"),
    ):
        code, out, err = command(capsys, *small, *mistake)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1
