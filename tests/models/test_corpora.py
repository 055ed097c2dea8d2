"""Corpora: text is read or refused; windows hold it in order, with the special tokens the model expects."""

from __future__ import annotations

import gc
import hashlib
import os
import pydoc_data.topics
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from limitlens.errors import InputError
from limitlens.models import BUILT_IN, Corpus, LoadedModel, Windows, choose, open_corpus
from tiny_models import TINY, tiny_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def corpus_of(*documents: str) -> Corpus:
    return Corpus("letters", lambda: iter(documents))


@pytest.fixture(scope="module")
def bert() -> LoadedModel:
    return LoadedModel("tiny-bert", TINY["bert"].model(), tiny_tokenizer(special=True))


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return LoadedModel("tiny-llama", TINY["llama"].model(), tiny_tokenizer(special=False))


# Corpora


def test_stdlib_docs_are_all_topics_in_order() -> None:
    documents = list(open_corpus("stdlib-docs").documents())
    assert "".join(documents) == "".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    assert len("".join(documents)) > 300_000


def test_stdlib_code_is_python_source_without_tests_or_installed_packages() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    pieces = list(open_corpus("stdlib-code").documents())
    text = "".join(pieces)
    assert len(text) > 3_000_000
    assert (root / "argparse.py").read_text("utf-8") in text
    assert (root / "json" / "decoder.py").read_text("utf-8") in text
    assert Path(pytest.__file__).read_text("utf-8") not in text
    assert max(map(len, pieces)) < 1 << 18
    assert list(open_corpus("stdlib-code").documents()) == pieces


def test_a_file_of_any_size_is_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    generator = np.random.default_rng(0)
    words = [" ".join("äöü€🙂abc"[i] * 3 for i in generator.integers(0, 8, 9)) for _ in range(9_000)]
    text = "\n".join(words)
    path.write_text(text, "utf-8")
    pieces = list(open_corpus(str(path)).documents())
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    path.write_text(f"{text}\n", "utf-8")
    assert list(open_corpus(str(path), 1 << 24).documents()) == [f"{text}\n"]
    path.write_text(text.replace("\n", " "), "utf-8")
    assert "".join(open_corpus(str(path)).documents()) == text.replace("\n", " ")


def test_a_folder_is_its_text_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"second\n",
        "a.md": b"first\n",
        "c/d.rst": b"third\n",
        "picture.png": b"\x89PNG\0\0",
        "latin.txt": "é".encode("latin-1") * 3,
        ".hidden": b"no\n",
        ".git/config": b"no\n",
        "blank.txt": b" \n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    assert list(open_corpus(str(tmp_path)).documents()) == ["first\n", "second\n", "third\n"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b" \n\t\n", "holds no text"),
        (b"words and\0 bytes", "null byte"),
        (b"words" * 20_000 + b"\xff", "not UTF-8 text"),
        ("ends in the middle of é".encode()[:-1], "not UTF-8 text"),
    ],
)
def test_empty_and_binary_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        list(open_corpus(str(path)).documents())
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\0\1")
    with pytest.raises(InputError, match="holds no text"):
        list(open_corpus(str(tmp_path)).documents())


def test_an_unknown_corpus_is_refused_with_the_known_ones() -> None:
    for name in ("no such text", "x" * 5000):
        with pytest.raises(InputError, match=rf"'{name}' is not known.*stdlib-docs, stdlib-code"):
            open_corpus(name)


def test_a_hub_dataset_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"'owner/name'.*`pip install datasets`.*stdlib-docs"):
        open_corpus("owner/name")


def fake_datasets(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.__spec__ = types.SimpleNamespace(name="datasets")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_hub_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    drawn = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal drawn
        for index in range(1000):
            drawn += 1
            yield {"id": index, "text": f"row {index}" if index else ""}

    def load_dataset(*args: Any, **options: Any) -> Iterator[dict[str, Any]]:
        asked.append((args, options))
        return rows()

    fake_datasets(monkeypatch, load_dataset)
    documents = open_corpus("owner/name:part").documents()
    assert [next(documents), next(documents)] == ["row 1", "row 2"]
    assert drawn <= 4
    assert asked == [(("owner/name", "part"), {"split": "train", "streaming": True})]


def test_a_hub_dataset_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    fake_datasets(monkeypatch, unreachable)
    with pytest.raises(InputError, match=r"could not be read from the hub \(ConnectionError\)"):
        next(open_corpus("owner/name").documents())
    fake_datasets(monkeypatch, lambda *_, **__: iter([{"article": "words"}]))
    with pytest.raises(InputError, match="has the columns article; expected one called text"):
        next(open_corpus("owner/name").documents())


# Windows


def letters_of(ids: Any) -> str:
    return "".join(LETTERS[index - 3] for index in ids)


def test_windows_hold_the_text_in_order_with_the_special_tokens_around(bert: LoadedModel) -> None:
    documents = ["the quick brown fox", "jumps", "over the lazy dog again and again"]
    windows = Windows(bert, corpus_of(*documents), length=9, tokens=50)
    assert (windows.prefix, windows.suffix) == ((1,), (2,))
    assert (windows.count, len(windows), windows.tokens) == (6, 6, 54)
    batches = list(windows.batches(4))
    assert [tuple(batch.shape) for batch in batches] == [(4, 9), (2, 9)]
    ids = torch.cat(batches)
    assert ids.dtype == torch.int64
    assert (ids[:, 0] == 1).all()
    assert (ids[:, -1] == 2).all()
    assert letters_of(ids[:, 1:-1].flatten().tolist()) == "".join(documents).replace(" ", "")[: 6 * 7]


def test_windows_of_a_tokenizer_without_special_tokens(llama: LoadedModel) -> None:
    windows = Windows(llama, corpus_of(LETTERS), length=5, tokens=25)
    assert (windows.prefix, windows.suffix) == ((), ())
    assert letters_of(torch.cat(list(windows.batches(2))).flatten().tolist()) == LETTERS[:25]


def test_chosen_windows_are_those_of_the_whole(llama: LoadedModel) -> None:
    windows = Windows(llama, corpus_of(LETTERS * 4), length=5, tokens=100)
    whole = torch.cat(list(windows.batches(7)))
    assert torch.equal(torch.cat(list(windows.batches(2, [17, 3, 4]))), whole[[17, 3, 4]])
    with pytest.raises(IndexError):
        windows[20]


def test_reading_stops_when_there_is_enough_and_the_digest_is_of_what_was_read(llama: LoadedModel) -> None:
    def endless() -> Iterator[str]:
        while True:
            yield LETTERS

    windows = Windows(llama, Corpus("endless", endless), length=10, tokens=60)
    assert windows.sha256 == hashlib.sha256((LETTERS * 3).encode()).hexdigest()


def test_too_little_text_is_refused_with_both_numbers_of_tokens(bert: LoadedModel) -> None:
    with pytest.raises(InputError, match=r"'letters' holds 26 tokens, enough for 3 windows of 10.* 101 .* 88 .* 11 w"):
        Windows(bert, corpus_of(LETTERS), length=10, tokens=101)


def test_windows_beyond_the_models_positions(bert: LoadedModel, llama: LoadedModel) -> None:
    corpus = corpus_of(LETTERS * 10)
    assert Windows(llama, corpus, length=64, tokens=64).warnings == []
    (warning,) = Windows(llama, corpus, length=65, tokens=65).warnings
    assert "windows of 65 tokens exceed the 64 positions" in warning
    assert Windows(bert, corpus, length=64, tokens=64).warnings == []
    with pytest.raises(InputError, match="learned 64 positions; use windows of at most 64"):
        Windows(bert, corpus, length=65, tokens=65)


@pytest.mark.parametrize(("length", "tokens"), [(2, 100), (0, 100), (10, 0)])
def test_windows_without_tokens_are_refused(bert: LoadedModel, length: int, tokens: int) -> None:
    with pytest.raises(InputError, match="2 special tokens of tiny-bert"):
        Windows(bert, corpus_of(LETTERS), length=length, tokens=tokens)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_the_temporary_file_goes_with_the_windows(llama: LoadedModel) -> None:
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))
    windows = Windows(llama, corpus_of(LETTERS), length=5, tokens=25)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del windows
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@given(count=st.integers(7, 500), seed=st.integers(0, 2**32 - 1))
def test_chosen_subsets_are_disjoint_sorted_and_repeatable(count: int, seed: int) -> None:
    pilot, reserved = choose(count, (0.05, 0.10), seed)
    assert len(pilot) == max(1, round(0.05 * count))
    assert len(reserved) == max(1, round(0.10 * count))
    both = np.concatenate([pilot, reserved])
    assert len(np.unique(both)) == len(both)
    assert both.min() >= 0
    assert both.max() < count
    assert (np.diff(pilot) > 0).all()
    assert (np.diff(reserved) > 0).all()
    again = choose(count, (0.05, 0.10), seed)
    assert all(np.array_equal(one, other) for one, other in zip((pilot, reserved), again, strict=True))


def test_every_window_is_chosen_as_often_as_any_other() -> None:
    hits = np.zeros(40)
    for seed in range(2000):
        hits[choose(40, (0.05, 0.10), seed)[1]] += 1
    assert np.abs(hits - 200).max() < 5 * np.sqrt(200)


def test_too_few_windows_to_choose_from() -> None:
    with pytest.raises(InputError, match="1 windows are too few"):
        choose(1, (0.05, 0.10), 0)


def test_built_in_corpora_are_named() -> None:
    assert list(BUILT_IN) == ["stdlib-docs", "stdlib-code"]
