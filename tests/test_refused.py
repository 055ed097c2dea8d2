"""Inputs that are refused with one sentence: damaged models and files, foreign folders, edited runs, high costs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

import limitlens as ll
from limitlens.cli import main
from limitlens.cost import MAX_SECONDS, check_cost, machine_memory
from limitlens.errors import InputError
from limitlens.measures import as_measure
from limitlens.measures.named import sample_from_file
from limitlens.models import Windows, load, open_corpus
from limitlens.models.gguf_metadata import read_metadata
from tiny_models import TINY, tiny_tokenizer

LINE, HEAD = ll.Gaussian(np.zeros(1), 1.0), ll.Head(1.0)


def told(call: Callable[[], Any], words: str) -> str:
    """The one sentence with which a call is refused, which must hold the words."""
    with pytest.raises(InputError) as error:
        call()
    message = str(error.value)
    assert words in message
    assert "\n" not in message
    return message


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


# Models


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, special in (("bert", True), ("llama", False)):
        TINY[name].model().save_pretrained(folder / name)
        tiny_tokenizer(special=special).save_pretrained(folder / name)
    return folder


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Callable[..., str]:
    """A copy of a saved model with another configuration, or other weights."""

    def change(name: str, keep: Callable[[str], bool] = lambda key: True, **config: Any) -> str:
        folder = shutil.copytree(saved / name, tmp_path / "model")
        weights = {key: tensor for key, tensor in load_file(folder / "model.safetensors").items() if keep(key)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(told | config))
        return str(folder)

    return change


@pytest.mark.parametrize(
    ("name", "part", "config", "words"),
    [
        ("llama", "layers.1.self_attn", {}, "lacks layers.1.self_attn.k_proj.weight and 3 more"),
        ("llama", "embed_tokens", {}, "lacks embed_tokens.weight, which would be initialised at random"),
        ("llama", "-", {"num_hidden_layers": 5, "layer_types": None}, "lacks layers.3."),
        ("bert", "layer.2.attention.self.query", {}, "lacks encoder.layer.2.attention.self.query.bias"),
        ("llama", "-", {"vocab_size": 20}, "other shapes than its configuration says"),
        ("llama", "-", {"num_attention_heads": 0}, "could not be loaded (ZeroDivisionError"),
        ("llama", "-", {"num_attention_heads": -4}, "could not be loaded"),
        ("llama", "-", {"num_hidden_layers": 10**6, "layer_types": None}, "has 1,000,000 layers"),
        ("llama", "-", {"vocab_size": 10**12}, "128 TB of memory, and this machine has"),
        ("llama", "-", {"hidden_act": "nothing"}, "KeyError: 'nothing'"),
    ],
)
def test_a_model_with_inconsistent_files_is_refused(
    changed: Callable[..., str], name: str, part: str, config: dict[str, Any], words: str
) -> None:
    folder = changed(name, lambda key: part not in key, **config)
    told(lambda: load(folder), words)


def test_a_missing_pooler_is_accepted_and_extra_layers_give_a_warning(
    changed: Callable[..., str], tmp_path: Path
) -> None:
    assert load(changed("bert", lambda key: "pooler" not in key)).unused == ()
    shutil.rmtree(tmp_path / "model")
    loaded = load(changed("llama", num_hidden_layers=2, layer_types=None))
    assert {name.split(".")[1] for name in loaded.unused} == {"2"}
    (tmp_path / "text.txt").write_text("abcdefgh" * 20)
    warnings = Windows(loaded, open_corpus(str(tmp_path / "text.txt")), length=8, tokens=16).warnings
    assert any("layers that the model lacks: layers.2." in warning for warning in warnings)
    one = replace(loaded, unused=loaded.unused[:1])
    told_of = Windows(one, open_corpus(str(tmp_path / "text.txt")), length=8, tokens=16).warnings
    assert any(warning.endswith(f"lacks: {loaded.unused[0]}") for warning in told_of)


def test_weights_that_are_pickled_or_a_pipe_are_never_opened(changed: Callable[..., str]) -> None:
    folder = Path(changed("llama"))
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    told(lambda: load(str(folder)), "expected one that transformers knows, with weights in safetensors or GGUF")
    os.mkfifo(weights)
    told(lambda: load(str(folder)), "model.safetensors in the folder")


@pytest.mark.parametrize("measure", [ll.probe, ll.predict, ll.designs, ll.stability])
def test_a_bad_choice_of_special_tokens_is_refused_before_the_model_is_looked_up(measure: Callable[..., Any]) -> None:
    told(lambda: measure("no-such-model", special="all"), "special is 'all'; expected auto, none or bos")


def test_a_tokenizer_of_another_model_is_refused(changed: Callable[..., str], tmp_path: Path) -> None:
    folder = Path(changed("llama"))
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"] = {word: number + 1000 for word, number in words["model"]["vocab"].items()}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    (tmp_path / "text.txt").write_text("abcdefgh" * 20)
    loaded, text = load(str(folder)), open_corpus(str(tmp_path / "text.txt"))
    told(lambda: Windows(loaded, text, length=8, tokens=16), "gives the token 1010, but the model has 97")
    (folder / "tokenizer.json").write_text("{}")
    told(lambda: load(str(folder)), "could not be loaded (KeyError")


def test_numbers_that_are_not_finite_are_refused_with_their_layer(saved: Path, tmp_path: Path) -> None:
    loaded = load(str(saved / "llama"))
    loaded.model.get_parameter("layers.1.self_attn.k_proj.weight").mul_(1e30)
    (tmp_path / "text.txt").write_text("abcdefgh" * 2000)
    call = lambda: ll.probe(loaded, str(tmp_path / "text.txt"), 4000, window=32, sizes=[16, 64], queries=8)  # noqa: E731
    told(call, "layer 1 of ")


@pytest.mark.parametrize(
    "entry",
    [
        struct.pack("<IIQ", 9, 4, 1 << 60),  # an array of 2⁶⁰ numbers
        struct.pack("<IIQQ", 9, 8, 1 << 40, (1 << 64) - 9),  # a text that ends before it begins
        struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,  # arrays in arrays
    ],
)
def test_an_inconsistent_gguf_header_is_refused(tmp_path: Path, entry: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + entry)
    told(lambda: read_metadata(tmp_path / "model.gguf"), "ends within its metadata")


# Folders


def test_nothing_of_another_command_is_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(capsys, "tails", "--sizes", "50:200:2", "--replicates", 3, "--out", folder)[0] == 0
    before = (folder / "run.json").read_bytes()
    code, out, err = run(capsys, "theory", "--out", folder)
    assert (code, out) == (2, "")
    assert "holds a run of `limitlens tails`; give another folder, or pass --overwrite" in err
    assert (folder / "run.json").read_bytes() == before
    assert run(capsys, "theory", "--out", folder, "--overwrite")[0] == 0
    assert run(capsys, "theory", "--n", 100, "--out", folder)[0] == 0  # what it made itself, it makes again
    assert ll.load(folder).kind == "theory"
    (folder / "run.json").write_text('{"mine": 1}')
    assert "a run.json that limitlens did not write" in run(capsys, "theory", "--out", folder)[2]
    assert json.loads((folder / "run.json").read_text()) == {"mine": 1}


@pytest.mark.parametrize("out", ["", " ", "a\0b", "x" * 5000, "/dev/null", "/dev/null/below"])
def test_a_folder_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "theory", "--out", out)
    assert code == 2
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_refused_command_leaves_no_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "hardmax", "--replicates", 1, "--out", tmp_path / "a" / "b")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ll.tails(sizes=[50, 100], replicates=3)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    old = result.save(tmp_path / "old")
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    for folder in (old, tmp_path / "new"):
        told(lambda folder=folder: ll.tails(sizes=[60, 90], replicates=3).save(folder), "No space left on device")
    assert {file.name: file.read_bytes() for file in old.iterdir()} == before
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_output_that_cannot_be_written_is_refused() -> None:
    code = "from limitlens.cli import main; main(['doctor', '--json'])"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "limitlens: the output could not be written (No space left on device); send it to a disk with space\n"
    )


def test_a_report_never_replaces_a_file_that_is_no_page(tmp_path: Path) -> None:
    result = ll.tails(sizes=[50, 100], replicates=3)
    folder = result.save(tmp_path / "run")
    told(lambda: result.report(folder / "run.json"), "exists and is not an HTML page")
    assert ll.load(folder).kind == "tails"
    assert result.report(folder) == result.report(folder)


# Runs that were edited


@cache
def curve() -> Any:
    return ll.study(LINE, HEAD, [50, 100, 200], replicates=6, queries=16)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("result", "theory"), 3),
        (("result", "predicted", "output"), [1.0]),
        (("result", "seed"), [[1]]),
        (("result", "seed"), -1),
        (("result", "warnings"), [7]),
        (("result", "notes"), [7]),
        (("result", "n"), [50, 10, 200]),
        (("result", "floor"), {}),
        (("format",), 99),
        (("format",), "3"),
        (("kind",), ["study"]),
        (("versions",), 7),
        (("arguments",), []),
    ],
)
def test_an_edited_run_is_refused(tmp_path: Path, place: Sequence[str], value: Any) -> None:
    folder = curve().save(tmp_path / "run")
    whole = json.loads((folder / "run.json").read_text())
    inner = whole
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (folder / "run.json").write_text(json.dumps(whole))
    told(lambda: ll.compare(str(folder), curve()), "again")


@pytest.mark.parametrize("text", ['{"format": NaN}', "[" * 100_000, "[]", "null", '{"format": 3}', ""])
def test_a_file_that_is_no_document_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    told(lambda: ll.load(tmp_path), "run.json")


def test_edited_heads_of_a_probe_are_refused(tmp_path: Path) -> None:
    from report_cases import probe_case

    folder = probe_case(1, 2).save(tmp_path / "run")
    whole = json.loads((folder / "run.json").read_text())
    for name, value in (("regime", "melted"), ("n", [64, 32]), ("effective_tokens", 3.0), ("layer", "first")):
        edited = json.loads(json.dumps(whole))
        edited["result"]["heads"][0][name] = value
        (folder / "run.json").write_text(json.dumps(edited))
        told(lambda: ll.plan("smollm2", run=folder), "again")


def test_names_never_leave_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = ll.tails(sizes=[50, 100], replicates=3)
    for name in ("../escaped.txt", "/tmp/escaped.txt", "a/b.txt", ".."):
        files = {name: lambda path: path.write_text("out")}
        monkeypatch.setattr(type(result), "files", lambda self, files=files: files)
        told(lambda: result.save(tmp_path / "run"), "is not a file name")
    assert list(tmp_path.iterdir()) == []


# Tokens


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


CLAIM = "{'descr': '<f8', 'fortran_order': False, 'shape': (%s), }\n"


@pytest.mark.parametrize(
    "content",
    [
        header(CLAIM % "10**12, 3"),
        header(CLAIM % "1000000000000, 3"),
        header(CLAIM % "9223372036854775807, 9223372036854775807"),
        header(CLAIM % "-5, 3"),
        header("__import__('os').abort()\n"),
        b"\x93NUMPY\x02\x00" + struct.pack("<I", 9000) + b"(" * 9000,
        b"PK\x03\x04 an archive, or what claims to be one",
        b"\x80\x04}.",
    ],
)
def test_a_file_that_claims_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokens.npy").write_bytes(content)
    told(lambda: sample_from_file(str(tmp_path / "tokens.npy")), "cannot be read as a .npy file")


def test_pipes_devices_and_long_names_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero", "x" * 5000, "a\0b"):
        told(lambda path=path: sample_from_file(path), "there is no file")
        told(lambda path=path: open_corpus(path), "is not known")


@pytest.mark.parametrize("kind", [">f8", ">f4", np.longdouble, np.float16])
def test_tokens_of_any_real_type_are_read(kind: Any) -> None:
    tokens = np.random.default_rng(0).normal(size=(300, 2)).astype(kind)
    found = ll.study(ll.Sample(tokens), ll.Head(np.eye(2)), [20, 60], replicates=3, queries=8)
    assert np.isfinite(found.errors["output"].error).all()


@pytest.mark.parametrize("tokens", [np.zeros((900, 2)), np.full((900, 2), 2.5), 1e8 + np.arange(900)[:, None] * 1e-9])
def test_tokens_without_spread_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokens: np.ndarray
) -> None:
    np.save(tmp_path / "tokens.npy", tokens)
    code, out, err = run(capsys, "study", "--sample", tmp_path / "tokens.npy", "--sizes", "20:60:3")
    assert (code, out) == (2, "")
    assert "all tokens are equal" in err
    told(lambda: ll.study(ll.Sample(tokens), ll.Head(np.eye(tokens.shape[1])), [20, 60]), "all tokens are equal")


def test_tokens_beyond_float32_are_refused() -> None:
    told(lambda: ll.Sample([[1e300], [1.0]]), "lengths up to 1e+15")


# Costs


def test_costs_are_announced_before_the_work() -> None:
    told(lambda: ll.study(LINE, HEAD, [100, 10**15]), "years, and more than a day needs your consent")
    told(lambda: ll.study(LINE, HEAD, [100, 1000], replicates=10**11), "this machine has")
    told(lambda: ll.sweep(LINE, horizons=[1.0] * 50, sizes=[10**8], replicates=100), "the sweep would take about")
    told(lambda: ll.hardmax([100, 1000], replicates=10**11), "hardmax would take")
    told(lambda: ll.hardmax([100, 10**12], dim=2), "hardmax would take")
    told(lambda: ll.scaling(replicates=10**11), "scaling would take")
    told(lambda: ll.heat_flow(n=10**12), "the flow would take")
    told(lambda: ll.tails(sizes=[10**14]), "tails would take")
    told(lambda: ll.theory.summary(ll.Sphere(10**6), HEAD, 100), "a law of dimension 1,000,000 would take 96 TB")


def test_yes_goes_on_and_long_work_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="limitlens"):
        check_cost("this", seconds=9, memory=1e6)
        assert caplog.messages == []
        check_cost("this", seconds=7200, memory=min(2e9, machine_memory()))
        check_cost("that", seconds=10 * MAX_SECONDS, memory=1e30, yes=True)
    assert caplog.messages[0] == "this takes about 2 hours and 2 GB of memory"
    assert caplog.messages[1].startswith("that takes about 10 days and ")
    told(lambda: check_cost("that", seconds=2 * MAX_SECONDS), "that would take about 2 days")


def test_the_command_line_names_its_option_yes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "study", "--sizes", "1e15", "--replicates", 10)
    assert (code, out) == (2, "")
    assert err.endswith("or pass --yes\n")


# Mistakes in Python


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ll.study(np.zeros((10, 1)), HEAD), "for tokens in an array use Sample"),
        (lambda: ll.study(HEAD, LINE), "the measure is a Head without K"),
        (lambda: ll.study(LINE, LINE), "the head is a Gaussian; expected a Head"),
        (lambda: ll.limit(LINE, 1.0, [[1.0]]), "the head is a float"),
        (lambda: ll.attend([[1.0]], LINE, [[1.0]]), "the head is a Gaussian"),
        (lambda: ll.study(LINE, HEAD, 100), "sizes is 100; expected lo:hi:k"),
        (lambda: ll.study(LINE, HEAD, [10.5, 20]), "expected whole numbers"),
        (lambda: ll.study(LINE, HEAD, [10, 20], seed=-1), "the seed is -1"),
        (lambda: ll.study(LINE, HEAD, [10, 20], seed=1.5), "the seed is 1.5"),
        (lambda: ll.study(LINE, HEAD, [10, 20], replicates="many"), "replicates is 'many'"),
        (lambda: ll.study(LINE, HEAD, [10, 20], queries="few"), "queries is 'few'"),
        (lambda: ll.study(LINE, HEAD, [10, 20], radius=1e200), "the radius is 1e+200"),
        (lambda: ll.hardmax([10, 20], seed=-1), "the seed is -1"),
        (lambda: ll.tails(seed="x"), "the seed is 'x'"),
        (lambda: ll.scaling(seed=-1), "the seed is -1"),
        (lambda: ll.scaling(beta=1e-300), "beta is 1e-300"),
        (lambda: ll.scaling(dim=5000), "dim is 5000; expected an integer from 2 to 400"),
        (lambda: ll.designed_head(LINE, "wide"), "the horizon is 'wide'"),
        (lambda: ll.designed_head(LINE, 1.0, seed=-1), "the seed is -1"),
        (lambda: curve().tokens_for(5), "the error is 5; expected a share between 0 and 1, such as 0.05 for 5%"),
        (lambda: ll.theory.summary(LINE, HEAD, 100, radius=1e200), "the radius is 1e+200"),
        (lambda: ll.load(""), "there is no run folder ''"),
    ],
)
def test_natural_mistakes_are_one_sentence(call: Callable[[], Any], words: str) -> None:
    told(call, words)


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda x: ll.Gaussian(x, 1.0),
    "head": lambda x: ll.Head(x),
    "radius": lambda x: ll.Sphere(2, x),
    "query": lambda x: ll.limit(LINE, HEAD, x),
    "tokens": lambda x: ll.attend(x, HEAD, [[1.0]]),
    "spectrum": lambda x: ll.designed_head(LINE, 1.0, spectrum=x),
    "sizes": lambda x: ll.study(LINE, HEAD, x),
    "horizons": lambda x: ll.sweep(LINE, horizons=x),
    "replicates": lambda x: ll.hardmax([10, 20], replicates=x),
    "degrees": lambda x: ll.tails(law="student", degrees=x),
    "n": lambda x: ll.scaling(n=x),
    "beta": lambda x: ll.theory.theta(100, x, ll.theory.uniform(5)),
    "keys": lambda x: ll.heat_flow(n=x),
    "memory": lambda x: ll.study(LINE, HEAD, [10, 20], queries=8, memory=x),
    "scale": lambda x: ll.theory.hardmax_finite(100, x),
    "participation": ll.theory.regime,
    "law": lambda x: ll.theory.theta(100, 10.0, x),
    "points": ll.theory.participation,
}


@pytest.mark.parametrize(
    "value", [1j, np.array([1 + 1j]), 10**400, -(10**400), "x", {}], ids=lambda value: str(value)[:9]
)
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_real_number_is_refused(name: str, value: Any) -> None:
    told(lambda: NUMBERS[name](value), ";")


def test_the_limit_that_a_number_exceeds_is_said() -> None:
    told(lambda: ll.theory.hardmax_finite(1e300), "n is 1e+300; expected a number of tokens of at least 2, and less")
    told(lambda: ll.theory.hardmax_finite(10**400), "n is inf; expected a number of tokens of at least 2, and less")
    told(lambda: ll.theory.summary(LINE, 1e300, 100), "usual size, and less than 1e+100")
    keys = ll.theory.KeyPoints(ll.theory.uniform(5), 100, 10.0)
    told(lambda: ll.theory.top_cdf([0.5], [1.0]), "points is [1.0]; expected the gaps of keys")
    told(lambda: ll.theory.top_cdf([0.5], keys, 101), "rank is 101; expected a rank from 1 to the number of keys")
    told(lambda: ll.theory.output_law(ll.theory.PoissonPoints(1.0, 1.0)), "expected n keys")
    told(lambda: ll.Head(torch.tensor([[1j]])), "they are complex")


class Own:
    """A law whose gradient is wrong by a factor, and whose K may end somewhere; as the docs make one."""

    dim = 1

    def __init__(self, factor: float = 1.0, end: float = np.inf) -> None:
        self.factor, self.end = factor, end

    def K(self, tilts: Any) -> Any:
        return np.where(np.abs(tilts[..., 0]) < self.end, tilts[..., 0] ** 2 / 2, np.inf)

    def grad_K(self, tilts: Any) -> Any:
        return self.factor * tilts

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Any:
        return torch.randn((*shape, 1), generator=generator, dtype=torch.float64)


def test_a_law_of_ones_own_is_checked_at_the_start() -> None:
    assert as_measure(Own()).dim == 1
    assert ll.study(Own(), HEAD, [20, 40], replicates=3, queries=8).errors["output"].error[0] > 0
    told(lambda: ll.study(Own(2.0), HEAD, [20, 40]), "grad_K is not the gradient of K")
    told(lambda: ll.limit(Own(1.01), HEAD, [[1.0]]), "grad_K is not the gradient of K")
    told(lambda: ll.study(Own(end=1.5), HEAD, [20, 40]), "K of the measure at a tilt holds inf")


def test_too_many_threads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "theory", "--threads", 10**16)
    assert (code, out, err.count("\n")) == (2, "", 1)
