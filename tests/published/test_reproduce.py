"""Published experiments: tiny sizes, the catalogue, the released protocol, the limit on a sphere."""

from __future__ import annotations

import json
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad

import limitlens as ll
from downstream_cases import data as documents
from limitlens.cli import main
from limitlens.estimate import UNKNOWN, Estimate
from limitlens.experiments.reference import Reference, sampled_moments
from limitlens.measures.sphere import limit_covariance
from limitlens.models import Captured, LoadedModel
from limitlens.published.catalogue import Claim, Number, catalogue
from limitlens.published.laws import _keys, _moment_growth
from limitlens.published.protocol import error_rows, moments, output, slopes
from limitlens.published.reproduction import HOME, listing
from limitlens.published.temperatures import _growth, _of_queries
from tiny_models import TINY, tiny_tokenizer

PROTOCOL = {"sizes": "16:128:4", "replicates": 6, "reference": 400}
TINY_SIZES: dict[str, dict[str, Any]] = {
    "gaussian-horizon": {"dim": 6, "scales": "0.05:50:3", "sizes": "100:800:4", "replicates": 8, "protocol": PROTOCOL},
    "sphere-d50": {
        "dim": 8, "scales": "1:1000:3", "sizes": "100:800:4", "replicates": 8, "queries": 32,
    },
    "coupling-or-horizon": {"horizons": "0.5,1.5", "ratios": "100", "dim": 2, "sizes": "100:800:4", "replicates": 8},
    "hardmax-log": {"sizes": "100:10000:4", "replicates": 20},
    "bert-layers": {
        "tokens": 4000, "window": 32, "sizes": "8:64:4", "replicates": 8, "queries": 16,
        "protocol": {"sizes": "8:24:4", "replicates": 6},
    },
    "window-random": {"window": 32, "windows": 2, "halves": "2,4,8", "random": 6, "documents": 4, "draws": 1},
    "horizon-ablation": {
        "law_factors": "0.1:10:6", "law_sizes": "100:10000:4", "law_replicates": 40, "factors": "0.5,2",
        "tokens": 2000, "sizes": "8:64:4", "replicates": 6, "queries": 16,
    },
    "downstream": {"keys": "4,8,16", "test": 24, "train": 60, "window": 40, "corpus": documents()},
    "critical-weights": {"dims": [3, 5], "n": 1000, "replicates": 200},
    "three-regimes": {"n": 1000, "thetas": [30, 1, 0.01], "replicates": 200},
    "backward-heat": {"layers": 5, "n": 300},
    "critical-log-n": {"correlations": [0.1, 0.5], "sizes": [64, 256], "dim": 256, "queries": 8},
    "uniform-ball": {
        "dim": 2, "heads": {}, "radii": "0.25,0.5,1,1.5", "scales": "0.5,1,1.5", "sizes": "100,400", "replicates": 6,
        "queries": 32, "fit_from": 0.2,
    },
    "critical-scaling": {"sizes": "16,32,60", "documents": 5, "queries": 4},
}  # fmt: skip


def run(name: str, **options: Any) -> Any:
    sizes = dict(TINY_SIZES[name])
    if "model" in catalogue()[name].full:
        kind = "llama" if name == "critical-scaling" else "bert"
        sizes["model"] = LoadedModel("letters", TINY[kind].model(), tiny_tokenizer(special=kind == "bert"))
    return ll.reproduce(name, quick=True, **(sizes | options))


@pytest.mark.parametrize("name", TINY_SIZES)
def test_every_experiment_runs_and_reports_its_numbers(name: str, tmp_path: Any) -> None:
    told: list[float] = []
    found = run(name, as_published=True, progress=lambda done, total: told.append(done / total))
    claims = catalogue()[name].claims
    assert set(found.numbers) <= set(claims)
    assert told == sorted(told)
    assert all(0 < part <= 1 for part in told)
    assert len(found.table) == len(found.numbers)
    assert all(
        verdict.split(":")[0].split()[0] in ("agrees", "differs", "no", "not") for verdict in found.table["verdict"]
    )
    assert all(math.isfinite(y) or name in ("bert-layers", "horizon-ablation") for one in found.drawn for y in one.y)
    again = ll.load(found.save(tmp_path / "run"))
    assert str(again) == str(found)
    assert catalogue()[name].title in again.report(tmp_path / "page.html").read_text(encoding="utf-8")
    again.plot(tmp_path / "figure.png")


def test_every_experiment_has_a_module_and_its_quick_sizes_are_parameters() -> None:
    assert {name for names in HOME.values() for name in names.split()} == set(catalogue()) == set(TINY_SIZES)
    for one in catalogue().values():
        assert set(one.quick) <= set(one.full)


@pytest.mark.parametrize(
    ("claim", "number", "verdict"),
    [
        (Claim("", "", 1.0), Number(Estimate(1.2, 0.1)), "agrees within errors"),
        (Claim("", "", 1.0, why="small"), Number(Estimate(1.4, 0.1)), "differs: small"),
        (Claim("", "", 1.0, within=0.5), Number(Estimate(1.4)), "agrees within 50%"),
        (Claim("", "", 1.0, "at least"), Number(Estimate(2.0, 0.1)), "agrees"),
        (Claim("", "", 1.0, "at most"), Number(Estimate(2.0, 0.1)), "differs"),
        (Claim("", "", 1.0), Number(Estimate(2.0, 0.1), published=2.1), "agrees within errors"),
        (Claim("", "", 1.0, "at least"), Number(Estimate(0.9, 0.1)), "agrees within errors"),
        (Claim("", "", 0.0, "below"), Number(Estimate(-0.4, 0.1)), "agrees within errors"),
        (Claim("", "", 0.0, "below", why="none"), Number(Estimate(-0.2, 0.1)), "differs: none"),
        (Claim("", ""), Number(Estimate(2.0, 0.1)), "no number to compare"),
        (
            Claim("", "", 1.0, why="small", setting="BERT"),
            Number(Estimate(1.4, 0.1)),
            "not comparable: the claim is about BERT; here it differs: small",
        ),
        (Claim("", "", 1.0), Number(UNKNOWN), "not known at these sizes"),
    ],
)
def test_verdicts(claim: Claim, number: Number, verdict: str) -> None:
    assert claim.verdict(number)[1] == verdict


def test_the_catalogue_names_the_model_of_each_run_and_of_each_claim() -> None:
    for name, one in catalogue().items():
        if one.full.get("model") == "minilm":
            assert "all-MiniLM-L6" in one.shows, name
        if name in ("bert-layers", "downstream"):  # published for another model
            assert all(claim.setting for claim in one.claims.values() if claim.test != "equal")
    assert "not published" in catalogue()["horizon-ablation"].source


def test_an_unknown_name_and_an_unknown_parameter_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "gaussian"])
    assert stop.value.code == 2
    assert "no experiment 'gaussian'; expected one of gaussian-horizon, sphere-d50" in capsys.readouterr().err
    with pytest.raises(ll.InputError, match="'hardmax-log' has no parameter 'corpus'; expected one of sizes"):
        ll.reproduce("hardmax-log", corpus="x")


def test_too_little_text_is_refused(tmp_path: Any) -> None:
    (tmp_path / "few.txt").write_text("a few words")
    with pytest.raises(ll.InputError, match="holds 0 windows of 32 tokens; expected at least 6, so give more text"):
        run("window-random", corpus=str(tmp_path / "few.txt"))


def test_an_interrupted_step_interrupts_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from limitlens.published import laws

    whole = laws.study
    monkeypatch.setattr(laws, "study", lambda *given, **options: replace(whole(*given, **options), interrupted=True))
    with pytest.raises(KeyboardInterrupt):
        run("gaussian-horizon")


def test_an_interrupted_probe_still_gives_its_numbers_and_keeps_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from dataclasses import replace

    from limitlens.published import encoders

    whole, kept = encoders.probe, ll.Checkpoint(tmp_path)

    def stopped(*given: Any, checkpoint: Any, **options: Any) -> Any:
        assert checkpoint is kept
        return replace(whole(*given, **options), interrupted=True, warnings=("interrupted after a part",))

    monkeypatch.setattr(encoders, "probe", stopped)
    found = run("bert-layers", checkpoint=kept)
    assert found.interrupted
    assert "interrupted after a part" in found.warnings
    assert found.numbers["mean_rank_layers"].value.known


def test_a_layer_whose_outputs_come_from_one_head_has_the_rates_of_this_head(tmp_path: Any) -> None:
    model = TINY["bert"].model()
    for layer in model.encoder.layer:
        layer.attention.self.value.weight[8:16] *= 1e4  # of head 1
        layer.attention.self.value.bias[8:16] *= 1e4
    loaded = LoadedModel("letters", model, tiny_tokenizer(special=True))
    found = ll.reproduce("bert-layers", quick=True, **{**TINY_SIZES["bert-layers"], "model": loaded})
    rows = {(row["layer"], row["head"]): row for row in found.details}
    assert len(rows) == 3 * (4 + 1)
    for layer in range(3):
        whole, head = rows[layer, None], rows[layer, 1]
        for name in ("rate_mean", "rate_covariance", "rate_mean_low", "rate_covariance_stderr"):
            assert whole[name] == (head[name] and pytest.approx(head[name], rel=1e-4))
        assert whole["horizon"] == max(rows[layer, one]["horizon"] for one in range(4))
    fitted = [row for row in rows.values() if row["rate_mean"] is not None]
    assert len(fitted) > 5
    assert all(row["rate_mean_low"] < row["rate_mean"] < row["rate_mean_high"] for row in fitted)
    again = ll.load(found.save(tmp_path / "run"))
    assert again.details == found.details


def test_resuming_an_experiment_without_checkpoints_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "hardmax-log", "--resume", "--out", "x"])
    assert stop.value.code == 2
    assert "'hardmax-log' keeps no checkpoint; expected --resume or --checkpoint-every with" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "bert-layers", "--tokens", "0.5"])
    assert stop.value.code == 2
    assert "--tokens is 0.5; expected a whole number" in capsys.readouterr().err


def test_an_encoder_with_a_position_bias_is_refused_where_windows_are_compared_with_random_keys() -> None:
    model = LoadedModel("mpnet", TINY["mpnet"].model(), tiny_tokenizer(special=True))
    with pytest.raises(ll.InputError, match="mpnet adds a relative position bias to its scores, which keys of other"):
        ll.reproduce("window-random", quick=True, **{**TINY_SIZES["window-random"], "model": model})


def test_downstream_without_documents_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "downstream", "--quick"])
    assert stop.value.code == 2
    assert "given no labelled documents; expected some, so pass --corpus reviews" in capsys.readouterr().err


def test_the_list_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "--list", "--json"])
    assert stop.value.code == 0
    assert set(json.loads(capsys.readouterr().out)) == set(catalogue())


def test_the_list_names_model_and_size_of_every_experiment() -> None:
    (table,) = listing().sections[0].blocks
    for (name, *row), one in zip(table.rows, catalogue().values(), strict=True):
        assert row[0] == one.model
        assert any(str(number) in row[1] for number in one.full.values()), name
        assert any(word in row[1] for word in ("sizes", "tokens", "documents", "test", "replicates", "layers")), name
    assert catalogue()["uniform-ball"].model == "minilm, smollm2, random tokens"
    assert catalogue()["bert-layers"].model == "minilm"
    assert "tokens 1000000" in catalogue()["bert-layers"].size


def test_constants_of_the_uniform_error_and_their_growth() -> None:
    found = run("uniform-ball", sizes="400,1600", replicates=16, radii="0.01,0.25,0.5,1", fit_from=0)
    gaussian, sphere = (
        next(one for one in found.drawn if one.name == f"{law}, measured") for law in ("gaussian", "sphere")
    )
    # At R = 0 the error is that of the mean token: √n E|error| / √d is E|g|/√2 = √π/2, g standard normal in the plane.
    assert gaussian.y[0] == pytest.approx(math.sqrt(math.pi) / 2, abs=3.5 * gaussian.stderr[0])
    worst = next(one for one in found.drawn if one.name == "gaussian, worst query as n → ∞")
    assert worst.y == pytest.approx([math.exp(R * R / 2) * math.sqrt(1 + R * R / 2) for R in worst.x])
    assert gaussian.y[-1] > sphere.y[-1] > sphere.y[0]
    assert found.numbers["gaussian_bound"].value.value < 1


def test_growth_of_constants_that_are_known() -> None:
    radii, n = np.array([0.5, 1, 2, 3]), np.array([100, 400, 1600])
    degree, rate, gap = _moment_growth(radii[:, None] ** 2 * n**-0.3, radii, n)
    assert degree == pytest.approx(2)
    assert gap < -0.1
    degree, rate, gap = _moment_growth(np.exp(1.5 * radii)[:, None] * n**-0.3, radii, n)
    assert rate == pytest.approx(1.5)
    assert gap > 0.1


def test_keys_of_a_head_are_scaled_to_variance_one() -> None:
    loaded = LoadedModel("letters", TINY["llama"].model(), tiny_tokenizer(special=False))
    law = _keys(loaded, 1, 1, "stdlib-docs", 320, 32)
    assert law.tokens.shape == (10 * 31, 8)  # without the first token of each window
    assert np.linalg.eigvalsh(np.cov(law.tokens.T))[-1] == pytest.approx(1)
    with pytest.raises(ll.InputError, match="letters has no head 9 in layer 1; expected both counted from 0"):
        _keys(loaded, 1, 9, "stdlib-docs", 320, 32)


@pytest.mark.parametrize(("gamma", "power"), [(1.0, 0.0), (0.0, 0.2)])
def test_laws_of_growth_that_are_known(gamma: float, power: float) -> None:
    rng, n = np.random.default_rng(0), np.array([512, 1024, 2048, 4096, 8192])
    logs = gamma * np.log(np.log(n)) + power * np.log(n) + 0.01 * rng.standard_normal((10, 200, 5))
    logs += rng.standard_normal((10, 200, 1))  # levels of documents and heads
    found = _growth(logs, n)
    if gamma:
        assert found["log_exponent"] == pytest.approx(gamma, abs=0.01)
        assert found["share_one"] == pytest.approx(0.95, abs=0.05)
        assert found["share_two"] < 0.05
        assert found["prefer_one"] > found["prefer_half"] + found["prefer_two"]
        assert abs(found["curvature_log"]) < 0.1 * abs(found["curvature_power"])
    else:
        assert found["power_exponent"] == pytest.approx(power, abs=0.001)
        assert found["explained_power"] > 0.98
        assert abs(found["curvature_power"]) < 0.1 * abs(found["curvature_log"])
    assert found["spread"] < 0.05
    logs += np.linspace(-1, 1, 200)[:, None] * np.log(np.log(n))
    assert _growth(logs, n)["spread"] == pytest.approx(2 / math.sqrt(12), rel=0.02)


def test_the_critical_factor_of_a_query_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(1, 4, 40, 8, generator=generator), torch.randn(1, 2, 40, 8, generator=generator)
    call = Captured(0, query, key, key, scale=0.5, causal=True)
    found = _of_queries(call, np.array([30, 39, 12]))
    for place, head in product(range(3), range(4)):
        last = (30, 39, 12)[place]
        scores = 0.5 * key[0, head // 2, : last + 1].double() @ query[0, head, last].double()
        for row, some in zip(found, (scores, scores[1:]), strict=True):
            weights = torch.softmax(row[head, place] * some, 0)
            assert float(weights.max()) == pytest.approx(0.2, abs=1e-4)


def test_critical_scaling_refuses_an_encoder_and_short_documents(tmp_path: Any) -> None:
    encoder = LoadedModel("letters", TINY["bert"].model(), tiny_tokenizer(special=True))
    with pytest.raises(ll.InputError, match="letters is an encoder, whose context does not grow; give a decoder"):
        ll.reproduce("critical-scaling", model=encoder)
    (tmp_path / "few.txt").write_text("a few words of text " * 5)
    with pytest.raises(ll.InputError, match="holds 1 documents of 60 tokens; expected at least 4"):
        run("critical-scaling", corpus=str(tmp_path / "few.txt"))
    with pytest.raises(ll.InputError, match="expected at least three context lengths"):
        ll.reproduce("critical-scaling", sizes="512,1024")


def test_a_quick_run_from_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "backward-heat", "--quick", "--json", "--plot", "--out", str(tmp_path / "run")])
    assert stop.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["numbers"]["mode"]["value"] == pytest.approx(0.5 * math.exp(100 / 2000), rel=1e-3)
    assert (tmp_path / "run" / "reproduce.png").exists()


def test_the_transition_of_correlated_tokens_agrees_with_the_theorem() -> None:
    found = ll.reproduce("critical-log-n", quick=True, dim=4000, sizes=[64, 400], queries=8).numbers
    # With all correlations exactly ρ half of the mass is a token's own at log(n − 1)/log n.
    for rho in (0.1, 0.5, 0.9):
        assert found[f"transition_{rho:g}"].value.value == pytest.approx(math.log(399) / math.log(400), abs=0.003)


def test_the_horizon_as_published_lacks_the_root_of_the_dimension() -> None:
    number = run("gaussian-horizon", as_published=True).numbers["horizon_high"]
    assert number.as_published.value == pytest.approx(number.value.value * math.sqrt(6))


def test_the_protocol_by_hand() -> None:
    query, key, value = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    weights = torch.softmax(query @ key.mT, -1)
    rows = torch.cat(list(weights @ value), 1).double()
    mean, covariance = moments((query, key, value))
    assert mean == pytest.approx(rows.mean(0), abs=1e-6)
    assert covariance == pytest.approx((rows - rows.mean(0)).T @ (rows - rows.mean(0)) / 5, abs=1e-6)
    apart = (output((query, key, value), half=True) - weights @ value).abs().max()
    assert 1e-5 < apart < 5e-3


def test_float16_sums_overflow_over_many_equal_scores() -> None:
    # Equal scores: the sum of weights reaches 65,504, the largest number of float16, and the output vanishes.
    tokens = torch.full((1, 80_000, 1), 1e-3)
    low = output((torch.zeros(1, 1, 1), tokens, tokens), half=True)
    assert float(low) == 0
    assert float(output((torch.zeros(1, 1, 1), tokens, tokens))) == pytest.approx(1e-3, rel=1e-4)


def test_both_standard_errors_of_a_rate_are_the_scatter_of_the_rate() -> None:
    rng, sizes = np.random.default_rng(0), [100, 200, 400, 800, 1600]
    own, released = [], []
    for _ in range(200):
        rows = np.abs(rng.standard_normal((60, 5))) / np.sqrt(sizes)
        right, theirs = slopes(sizes, rows)
        own.append(right)
        released.append(theirs)
    for found in (own, released):
        scatter = float(np.std([rate.value for rate in found]))
        assert np.mean([rate.stderr for rate in found]) == pytest.approx(scatter, rel=0.2)
    assert np.mean([rate.value for rate in own]) == pytest.approx(0.5, abs=0.02)


def test_errors_against_a_limit_fall_with_n() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> tuple[torch.Tensor, ...]:
        tokens = torch.randn(1, n, 2, generator=generator)
        return 0.3 * tokens, tokens, tokens

    limit = torch.zeros(2, dtype=torch.float64), 0.09 * torch.eye(2, dtype=torch.float64)
    errors = error_rows(draw, limit, [50, 800], 30).mean(1)
    assert errors[:, 0] / errors[:, 1] == pytest.approx([4, 4], rel=0.35)


@pytest.mark.parametrize("dim", [8, 20])
def test_the_covariance_of_the_limit_on_a_sphere(dim: int) -> None:
    rng = np.random.default_rng(0)
    A = rng.standard_normal((dim, dim)) @ rng.standard_normal((dim, dim)) / math.sqrt(dim)
    # Where softmax is an argmax, λ_i = s_i² E[z_i²/Q] is an integral over one variable.
    squares = np.square(np.linalg.svd(A, compute_uv=False))

    def inside(v: float, own: float) -> float:
        return own / (math.exp(-v) + 2 * own) * math.exp(-np.log1p(2 * squares * math.exp(v)).sum() / 2)

    exact = sorted(quad(inside, -40, 40, args=(own,), limit=200)[0] for own in squares)
    assert np.linalg.eigvalsh(limit_covariance(1e9 * A)) == pytest.approx(exact, rel=1e-6)
    law, head = ll.Sphere(dim, 1.5), ll.Head(2 * A, rng.standard_normal((3, dim)))
    mean, covariance = sampled_moments(law, head, 200_000, 0)
    reference = Reference(law, head, 1000, 0, "cpu")
    assert reference.factor(1000) == 1
    assert np.abs(mean).max() < 0.02
    assert reference.covariance.numpy() == pytest.approx(covariance, abs=0.02 * np.abs(covariance).max())


def test_a_sphere_whose_scores_are_all_alike() -> None:
    # A = s times a rotation: Γ has the length A_d(s) in every direction.
    from limitlens.measures.radial import radial_mean

    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((9, 9)))[0]
    assert limit_covariance(5 * rotation) == pytest.approx(radial_mean(5.0, 9) ** 2 / 9 * np.eye(9), abs=1e-12)
    assert limit_covariance(np.zeros((9, 9))) == pytest.approx(0)
