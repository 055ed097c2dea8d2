"""The command `limitlens probe` with its options."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from limitlens import cli
from limitlens.cli import common
from limitlens.errors import InputError
from limitlens.models import LoadedModel
from limitlens.probing import probe as probe_module
from limitlens.probing.options import ProbeOptions
from limitlens.probing.overview import slowest
from limitlens.probing.probe import probe
from limitlens.probing.result import ProbeRun
from limitlens.record import read_run
from tiny_models import TINY, tiny_tokenizer

OPTIONS = [
    "--tokens",
    "2e3",
    "--window",
    "16",
    "--sizes",
    "8:64:4",
    "--replicates",
    "6",
    "--queries",
    "16",
    "--batch",
    "20",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A tiny model's folder and a text."""
    folder = tmp_path_factory.mktemp("files")
    TINY["llama"].model().save_pretrained(folder / "model")
    tiny_tokenizer(special=False).save_pretrained(folder / "model")
    letters = np.random.default_rng(8).choice(list("abcdefghijklmnopqrstuvwxyz   "), 6000)
    (folder / "text.txt").write_text("".join(letters))
    return str(folder / "model"), str(folder / "text.txt")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["probe", *arguments])
    shown = capsys.readouterr()
    return int(stopped.value.code or 0), shown.out, shown.err


def test_the_page_shows_the_slowest_and_what_to_do(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, text = files
    code, out, err = run(capsys, model, "--corpus", text, *OPTIONS, "--out", str(tmp_path / "run"))
    assert (code, err) == (0, "")
    assert "12 heads" in out
    for heading in ("The 5 slowest heads", "What to do", "tokens for 10%", "the constant 1/2"):
        assert heading in out
    saved = ProbeRun.load(read_run(tmp_path / "run"))
    worst = slowest(saved.records)[0]
    assert f"{worst.layer}.{worst.head}" in out.split("The 5 slowest heads")[1]
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())
    assert recorded["command"] == "probe"
    assert recorded["arguments"]["sizes"] == "8:64:4"
    assert recorded["seed"] == 0


def test_json_is_one_document_and_nothing_else(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    model, text = files
    code, out, err = run(capsys, model, "--corpus", text, *OPTIONS, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["n"] == [8, 16, 32, 64]
    assert len(document["heads"]) == 12


def test_special_tokens_of_windows_are_an_option_and_recorded(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, text = files
    named = tmp_path / "named"
    copytree(model, named)
    tokenizer = tiny_tokenizer(special=False)
    tokenizer.bos_token = "[CLS]"
    tokenizer.save_pretrained(named)
    found = {}
    for special in ("auto", "none", "bos"):
        folder = tmp_path / special
        code, out, err = run(
            capsys, str(named), "--corpus", text, *OPTIONS, "--special", special, "--json", "--out", str(folder)
        )
        assert code == 0
        assert ("pass --special bos" in err) == (special == "auto")
        document = json.loads(out)
        assert document["special"] == {"mode": special, "prefix": [1] * (special == "bos"), "suffix": []}
        assert ProbeRun.load(read_run(folder)).special == document["special"]
        found[special] = [head["sink"]["share"] for head in document["heads"]]
    assert found["auto"] == found["none"]
    assert found["auto"] != found["bos"]
    code, _, err = run(capsys, model, "--corpus", text, *OPTIONS, "--special", "bos")
    assert code == 2
    assert "has no first token" in err


def test_ctrl_c_saves_the_work_so_far(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def press(title: str, quiet: bool, unit: str) -> Iterator[Any]:
        yield lambda done, total: signal.raise_signal(signal.SIGINT) if 0.7 < done / total < 0.9 else None

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(common, "progress", press)
    monkeypatch.setattr(probe_module, "probe", partial(probe, options=ProbeOptions(block=20 * 16)))
    model, text = files
    code, _, err = run(capsys, model, "--corpus", text, *OPTIONS, "--out", str(tmp_path / "run"))
    assert code == 130
    assert "warning: interrupted after" in err
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is before
    saved = ProbeRun.load(read_run(tmp_path / "run"))
    assert saved.interrupted
    assert saved.n[-1] < 64


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--corpus", "nowhere.txt"], "the corpus 'nowhere.txt' is not known"),
        (["--tokens", "0.5"], "tokens is 0.5; expected a whole number"),
        (["--sizes", "10:100000:4"], "the largest size is 100,000 and 2,000 tokens leave"),
        (["--tokens", "1e6"], "so ask for fewer or give more text"),
        (["--sizes", "few"], "sizes is 'few'"),
        (["--window", "1"], "windows of 1 tokens are too short"),
        (["--device", "abacus"], "the device is 'abacus'"),
    ],
)
def test_bad_input_is_one_sentence(
    changed: list[str], message: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = files
    code, out, err = run(capsys, model, "--corpus", text, *OPTIONS, *changed)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_size_is_refused_before_the_cost_is_estimated(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "check_cost", lambda *cost, **known: pytest.fail("the cost was estimated"))
    with pytest.raises(InputError, match="the largest size is 100,000"):
        probe(*files, 2000, window=16, sizes=[10, 100_000], replicates=4, queries=8)


def test_an_unknown_model_names_those_at_hand(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "no such model!", *OPTIONS)
    assert code == 2
    assert "available models: minilm" in err


def test_an_empty_and_a_binary_text_are_refused(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "binary.txt").write_bytes(b"ab\0cd")
    for name, message in (("empty.txt", "holds no text"), ("binary.txt", "null byte")):
        code, _, err = run(capsys, files[0], "--corpus", str(tmp_path / name), *OPTIONS)
        assert code == 2
        assert message in err


def test_probe_is_a_function_too(files: tuple[str, str]) -> None:
    loaded = LoadedModel("letters", TINY["bert"].model(), tiny_tokenizer(special=True))
    found = probe(loaded, files[1], 2000, window=16, sizes=(8, 16, 32), replicates=4, queries=8)
    assert repr(found) == f"<ProbeRun of letters on {files[1]}: 12 heads>"
    assert "slowest" in str(found)
    assert list(found.layers.layer) == [0, 1, 2]
