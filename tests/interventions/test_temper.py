"""Score factors beyond the trained window: RoPE scaling, schedules, evaluation, planted passages, fits, the result."""

from __future__ import annotations

import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import limitlens as ll
from command_line import run
from limitlens.interventions.planting import Axes, plant, read_axes, repeat
from limitlens.interventions.reader import Reader
from limitlens.interventions.temper import temper
from limitlens.interventions.temper_fit import FitOptions, _loss, fit_exponents, yarn_exponent
from limitlens.models import LoadedModel
from limitlens.models.exponents import powers
from limitlens.models.rope_scaling import rope_scaled, scaled_frequencies
from limitlens.statistics.documents import paired_mean
from limitlens.theory.schedules import entropy_scale, log_scale, yarn_scale
from reading_cases import counted_words, counting_model, reading
from temper_cases import TO, TRAINED, decoder, tempered, text, texts
from tiny_models import TINY, tiny_tokenizer


@pytest.mark.parametrize(("how", "name"), [("linear", "linear"), ("yarn", "yarn"), ("ntk", "dynamic")])
def test_rope_scalings_are_those_of_transformers(how: str, name: str) -> None:
    scaling = {"rope_type": name, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": TRAINED}
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=TRAINED, rope_parameters=scaling)
    told, _ = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **({"seq_len": TO} if name == "dynamic" else {}))
    theta = 1e4 ** -(torch.arange(0, 64, 2).double() / 64)
    if how == "ntk":  # theirs grows with s·factor − (factor − 1), here 13
        torch.testing.assert_close(scaled_frequencies(theta, how, 13.0, TRAINED).float(), told, rtol=1e-5, atol=0)
    else:
        torch.testing.assert_close(scaled_frequencies(theta, how, 4.0, TRAINED).float(), told, rtol=1e-5, atol=0)


def test_rope_scaling_is_put_back_after_an_error() -> None:
    model = decoder().model
    before = model.model.rotary_emb.inv_freq.clone()
    with rope_scaled(model, "yarn", 4.0, TRAINED):
        assert not torch.equal(model.model.rotary_emb.inv_freq, before)
    with pytest.raises(RuntimeError), rope_scaled(model, "yarn", 4.0, TRAINED):
        raise RuntimeError
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_schedules_begin_at_one_and_reach_what_they_say() -> None:
    place = torch.tensor([10, TRAINED - 1, TO - 1])
    n = np.array([TRAINED, TO])
    assert log_scale(n, TRAINED) == pytest.approx([1, math.log(512) / math.log(128)])
    assert yarn_scale(n, TRAINED) == pytest.approx([1, (0.1 * math.log(4) + 1) ** 2])
    assert entropy_scale(n, TRAINED, 8) == pytest.approx([1, math.sqrt((1 - 512**-0.25) / (1 - 128**-0.25))])
    gamma = torch.full((1, 1), yarn_exponent(TRAINED, TO))
    assert powers(gamma, None, TRAINED)(0, place)[0, 2].item() == pytest.approx((0.1 * math.log(4) + 1) ** 2)
    assert powers(gamma, torch.full((1, 1), 0.5), TRAINED)(0, place)[0, 0].item() == pytest.approx(math.exp(0.5))


def test_a_reader_has_the_loss_of_the_model_and_truncation_sees_no_further() -> None:
    reader, ids = Reader(decoder()), texts(1, TO, 7)[0]
    short = ids[:TRAINED]
    loss = decoder().model(input_ids=short[None], labels=short[None]).loss
    assert reader.nll(short).mean().item() == pytest.approx(loss.item(), rel=1e-5)
    cut = reader.truncated(ids, TRAINED)
    assert len(cut) == TO - 1
    last = reader.nll(ids[TO - TRAINED :])
    torch.testing.assert_close(cut[-TRAINED // 8 :], last[-TRAINED // 8 :])
    changed = ids.clone()
    changed[: TO - TRAINED] = 3
    torch.testing.assert_close(reader.truncated(changed, TRAINED)[-TRAINED // 8 :], cut[-TRAINED // 8 :])


def test_planted_passages_are_repeated() -> None:
    ids, other = texts(2, TO, 8)
    found = plant(ids, other, TRAINED, seed=0)
    assert len(found.ids) == TO
    for (a, b), (c, d) in zip(found.first, found.again, strict=True):
        assert b - a == d - c > 8
        assert torch.equal(found.ids[a:b], found.ids[c:d])
    away = [again[0] - first[0] for first, again in zip(found.first, found.again, strict=True)]
    assert sum(one > TRAINED for one in away) == 3
    assert max(b for _, b in found.again) == TO
    planted, role = repeat(ids, other, TRAINED, np.random.default_rng(0))
    assert (role[:TRAINED] != 1).all()
    (place,) = torch.nonzero(role == 1, as_tuple=True)
    assert len(place) >= 14
    windows = planted[: TO - TRAINED].unfold(0, 14, 1)
    assert (windows == planted[place[:14]]).all(1).any()  # it stands somewhere further away than the window


class Positions:
    """A reader whose nats are the positions of the tokens that it predicts: negative under truncation."""

    def nll(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.arange(1, len(ids), dtype=torch.float64)

    def truncated(self, ids: torch.Tensor, trained: int) -> torch.Tensor:
        return -self.nll(ids)


def test_axes_are_means_over_the_tokens_of_their_spans() -> None:
    """Plain text from the second token on, in the window and in thirds behind it, and what counts of repetitions."""
    document = plant(*texts(2, TO, 3), TRAINED, 0)
    reader: Any = Positions()
    found, cut = read_axes(reader, document, TRAINED), read_axes(reader, document, TRAINED, truncated=True)
    spans = [(1, 128), (128, 256), (256, 384), (384, 512)]
    assert found.plain.tolist() == [[(start + stop - 1) / 2 for start, stop in spans]]
    assert found.again.tolist() == [[(start + stop - 1) / 2 for start, stop in document.again]]
    assert (cut.plain.tolist(), cut.again.tolist()) == ((-found.plain).tolist(), (-found.again).tolist())
    for (first, _), (again, stop), distance in zip(document.first, document.again, found.distance[0], strict=True):
        assert distance == again - first
        assert torch.equal(document.ids[first : first + stop - again], document.ids[again:stop])


def test_what_a_fit_feels_is_the_derivative_of_its_loss() -> None:
    reader, (ids, check) = Reader(decoder()), texts(2, TO, 9)
    found = fit_exponents(reader, [ids], check, TRAINED, FitOptions("model"), steps=1, rate=1e-4)
    begin, values = yarn_exponent(TRAINED, TO), []
    for shift in (-0.01, 0.01):
        with reader.acting(powers(torch.full((2, 4), begin + shift), None, TRAINED)):
            values.append(reader.nll(ids)[TRAINED - 1 :].mean().item())
    assert found.felt[0, 0] == pytest.approx(abs(values[1] - values[0]) / 0.02, rel=0.02)
    assert found.exponents[0, 0] == pytest.approx(begin - 1e-4 * np.sign(values[1] - values[0]), abs=1e-5)


def test_the_loss_of_a_fit_weighs_plain_text_and_retrieval() -> None:
    reader: Any = SimpleNamespace(losses=lambda ids, start: torch.arange(start, len(ids), dtype=torch.float32))
    role = torch.tensor([1, 1, 0, 0, 1, 1, 2, 0])  # of which the first two lie within the trained window
    loss, step = _loss(reader, 3, torch.zeros(8), role, 2, 0.2)
    assert (step.plain, step.far) == (4.0, 4.5)
    assert loss.item() == pytest.approx(0.8 * 4 + 0.2 * 4.5)


def test_exponents_lower_the_loss_on_a_document_no_step_has_read() -> None:
    for one in tempered().fits.values():
        start, *later = [
            (1 - one.retrieval_weight) * step.plain + one.retrieval_weight * (step.far or 0.0) for step in one.checks
        ]
        assert min(later) < start - 0.01


def test_no_gain_is_claimed_where_truncation_is_better_on_both_axes() -> None:
    found = tempered()
    assert found.estimate("fitted", "truncated", "log_perplexity", "yarn").value < -1
    assert found.winners == []
    assert set(found.beaten) == set(found.fits) == {"single", "per_head", "per_head_far_0.5"}
    assert "no gain is claimed" in found.view().verdict[1]


def made_up(shift: dict[str, tuple[float, float]], count: int = 6) -> Any:
    """A result whose schedules differ from YaRN's factor by given numbers on the two axes, with a little noise."""
    noise, axes = np.random.default_rng(0), {}
    distance = np.full((count, 2), 2.0 * TRAINED)
    for name in ("truncated", "constant", "log", "yarn", "yarn_all", "entropy", *tempered().fits):
        plain, far = shift.get(name, (0.0, 0.0))
        parts = 3 + plain + 0.01 * noise.standard_normal((count, 4))
        again = 2 + far + 0.01 * noise.standard_normal((count, 2))
        axes[name] = Axes(parts, again, distance)
    return replace(tempered(), by_document={"fitted": axes})


@pytest.mark.parametrize(
    ("plain", "far", "won", "beaten"),
    [(-0.1, -0.1, True, False), (-0.1, 0.1, False, False), (0.1, 0.1, False, True), (-0.002, -0.1, False, None)],
)
def test_a_gain_needs_both_axes_beyond_their_errors(plain: float, far: float, won: bool, beaten: bool | None) -> None:
    found = made_up(
        {"truncated": (-0.2, 0.5), "per_head": (plain, far), "single": (-0.3, 0.4), "per_head_far_0.5": (1, 1)}
    )
    assert ("per_head" in found.winners) is won
    assert ("per_head" in found.beaten) is bool(beaten)
    assert "single" not in [*found.winners, *found.beaten]
    assert "per_head_far_0.5" in found.beaten
    told = found.view().verdict
    assert ("Per head beats YaRN's factor" in told[1]) is won
    assert ("per_head.json" in told[2]) is won
    assert "retrieval weight 0.5" in told[2]


def test_a_point_that_truncation_beats_on_both_axes_is_no_gain() -> None:
    found = made_up({"truncated": (-0.3, -0.3), "per_head": (-0.1, -0.1)})
    assert found.beats("per_head", "yarn", "fitted")
    assert found.winners == []
    assert "per_head" in found.beaten


def test_estimates_are_means_over_documents_of_differences() -> None:
    one, other = np.array([1.0, 2.0, 6.0]), np.array([0.5, 1.5, 5.5])
    assert paired_mean(one).value == pytest.approx(3)
    assert paired_mean(one).stderr == pytest.approx(np.std([1, 2, 6], ddof=1) / math.sqrt(3))
    assert (paired_mean(one, other).value, paired_mean(one, other).stderr) == (pytest.approx(0.5), pytest.approx(0))
    assert math.isnan(paired_mean(one[:1]).stderr)


def test_the_file_of_exponents_does_what_was_fitted(tmp_path: Path) -> None:
    found, ids = tempered(), texts(1, TO, 11)[0]
    folder = found.save(tmp_path / "run")
    own = found.fits["per_head_far_0.5"]
    reader = Reader(decoder())
    with (
        rope_scaled(reader.stack, "yarn", 4.0, TRAINED),
        reader.acting(powers(torch.as_tensor(own.exponents), None, TRAINED)),
    ):
        expected = reader.nll(ids)
    with ll.intervene(decoder(), score_scale=folder / "per_head_far_0.5.json"):
        torch.testing.assert_close(reader.nll(ids), expected, rtol=1e-4, atol=1e-4)
    assert (reader.nll(ids) - expected).abs().max() > 0.01
    about = json.loads((folder / "per_head_far_0.5.json").read_text())
    assert (about["trained"], about["to"], about["rope_scaling"], about["retrieval_weight"]) == (
        TRAINED,
        TO,
        "yarn",
        0.5,
    )
    assert about["text"] == text()


def test_foreign_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tempered().save(tmp_path / "run") / "single.json"
    with (
        pytest.raises(
            ll.InputError, match=r"fitted to another model .*num_hidden_layers: 2 in the file, 3 in this model"
        ),
        ll.intervene(TINY["llama"].model(), score_scale=str(file)),
    ):
        pass
    good = json.loads(file.read_text())
    for bad in ("{", "[]", "{}", json.dumps(good | {"exponents": [[1, 2]]}), json.dumps(good | {"trained": 0})):
        file.write_text(bad)
        with (
            pytest.raises(ll.InputError, match=r"single\.json' (holds no exponents|is damaged).*expected"),
            ll.intervene(decoder(), score_scale=file),
        ):
            pass
    with (
        pytest.raises(ll.InputError, match=r"nowhere\.json' holds no exponents"),
        ll.intervene(decoder(), score_scale="nowhere.json"),
    ):
        pass


def test_ctrl_c_keeps_what_was_finished() -> None:
    def interrupting(done: float, total: float) -> None:
        if done > 1:  # the first step of the second fit
            signal.raise_signal(signal.SIGINT)

    found = temper(decoder(), TO, text(), retrieval_weight=(0.0,), documents=2, steps=3, progress=interrupting)
    assert found.interrupted
    assert len(found.fits["per_head"].steps) == 1
    assert found.by_document == {}
    assert "nothing is known" in found.view().verdict[1]
    assert "interrupted" in found.warnings[0]


@pytest.mark.parametrize(("at", "steps"), [(3, [0]), (4, [1]), (5, [1]), (6, [1, 0]), (7, [1, 1])])
def test_ctrl_c_drops_the_step_under_way(at: int, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings: one at the start, and check, step, check of each fit. Nothing is read after the signal."""
    read, losses = 0, Reader.losses

    def interrupting(self: Reader, *given: Any) -> Any:
        nonlocal read
        read += 1
        if read == at:
            signal.raise_signal(signal.SIGINT)
        return losses(self, *given)

    monkeypatch.setattr(Reader, "losses", interrupting)
    found = temper(decoder(), TO, text(), retrieval_weight=(0.0, 0.2), documents=2, steps=1)
    assert read == at
    assert found.interrupted
    assert [len(fit.steps) for fit in found.fits.values()] == steps


def test_ctrl_c_between_documents_keeps_whole_ones() -> None:
    def interrupting(done: float, total: float) -> None:
        if done == total - 1:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
    try:
        found = temper(decoder(), TO, text(), text(6), retrieval_weight=(), documents=2, steps=1, progress=interrupting)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.interrupted
    assert {name: len(axes["yarn"].plain) for name, axes in found.by_document.items()} == {"fitted": 1, "other": 1}
    assert found.winners == []  # one document has no error bar


def test_bad_inputs_are_one_sentence() -> None:
    learned = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=29, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    ).eval()
    gpt = LoadedModel("learned", learned, decoder().tokenizer)
    encoder = LoadedModel("encoder", TINY["bert"].model(), tiny_tokenizer(special=False))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (decoder(), {"to": TRAINED}, "128 tokens was asked for, copier was trained for 128; expected a longer one"),
        (decoder(), {"to": 100_000}, "holds 0 documents of 100,000 tokens; expected at least 4: give a longer text"),
        (decoder(), {"rope_scaling": "spring"}, "rope_scaling is 'spring'; expected one of none, linear, ntk, yarn"),
        (decoder(), {"retrieval_weight": (2.0,)}, "retrieval_weight is 2; expected at least 0 and at most 1"),
        (encoder, {}, "encoder is no decoder with its language-model head"),
        (gpt, {"trained": 32}, "has no rotary positions to scale; expected rope_scaling none"),
    ]
    for model, options, said in cases:
        with pytest.raises(ll.InputError, match=said):
            temper(model, **{"to": TO, "text": text()} | options)


def test_names_of_fits() -> None:
    names = [FitOptions().name, FitOptions("model", 0.5).name, FitOptions("head", 0.2, constant=True).name]
    assert names == ["per_head", "single_far_0.5", "per_head_constant_far_0.2"]
    with pytest.raises(ll.InputError, match="the level of a fit is 'neuron'; expected one of head, model"):
        FitOptions("neuron")


def test_constants_are_fitted_and_kept(tmp_path: Path) -> None:
    fits = [FitOptions("model", 0.5, constant=True)]
    found = temper(decoder(), TO, text(), fits=fits, rope_scaling="none", documents=2, steps=2, rate=0.1)
    (name, own), *_ = found.fits.items()
    assert own.constants is not None
    assert np.abs(own.constants).max() > 0.01
    assert (own.exponents == own.exponents[0, 0]).all()
    loaded = ll.load(found.save(tmp_path / "run"))
    assert loaded.document() == found.document()
    reader, ids = Reader(decoder()), texts(1, TO, 12)[0]
    with ll.intervene(decoder(), score_scale=tmp_path / "run" / f"{name}.json"):
        first = reader.nll(ids)[: TRAINED - 1]  # a constant acts below the window too
    assert (first - reader.nll(ids)[: TRAINED - 1]).abs().max() > 1e-3


def test_the_command_line_saves_a_run(capsys: Any, tmp_path: Path) -> None:
    decoder().model.save_pretrained(tmp_path / "model")
    decoder().tokenizer.save_pretrained(tmp_path / "model")
    capsys.readouterr()
    given = ["temper", tmp_path / "model", "--to", TO, "--text", text(), "--documents", 2, "--steps", 1]
    code, out, err = run(capsys, *given, "--retrieval-weight", 0.5, "--constant", "--out", tmp_path / "run", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    rows = {row["schedule"]: row for row in document["schedules"] if row["text"] == "fitted"}
    assert {"truncated", "constant", "yarn", "single", "per_head_constant_far_0.5"} <= set(rows)
    assert {"far", "far_stderr", "far_against_yarn", "far_against_yarn_stderr"} <= set(rows["single"])
    assert sorted(path.name for path in (tmp_path / "run").glob("*.json")) == [
        "per_head_constant_far_0.5.json", "run.json", "single.json",
    ]  # fmt: skip
    code, out, err = run(capsys, "temper", tmp_path / "model", "--to", 64)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_temper_tries_no_document_that_fitted_or_ended_its_fits(tmp_path: Path) -> None:
    """Documents of gradients, of the check and of the trial share no token, in a text without repetitions."""
    documents, to = 6, 256
    loaded, path = counting_model(documents * to, positions=64), tmp_path / "words.txt"
    path.write_text(counted_words(documents * to))
    phases: list[int] = []  # passes made when a fit or a round of documents is finished
    with reading(loaded) as passes:
        fits = [FitOptions("model"), FitOptions("model", 0.5)]
        found = temper(
            loaded, to, str(path), fits=fits, documents=2, steps=4, keep=lambda made: phases.append(len(passes))
        )
    assert len(found.by_document["fitted"]["yarn"].plain) == 2

    def documents_in(parts: list[torch.Tensor]) -> list[set[int]]:
        return [{word // to for word in ids.tolist()} for ids in parts if len(ids) > 8]  # 8 tokens test the reader

    first, second, *_, last = phases
    # A check, three steps, a check, one more step and a check, each on one document; the second fit mixes passages in.
    assert documents_in(passes[:first]) == [{3}, {0}, {1}, {2}, {3}, {0}, {3}]
    assert set().union(*documents_in(passes[first:second])) == {0, 1, 2, 3}
    assert set().union(*documents_in(passes[second:last])) == {4, 5}
