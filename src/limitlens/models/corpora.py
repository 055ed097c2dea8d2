"""Corpora: texts that are read as streams, from the Python installation, files, folders or Hugging Face datasets."""

import codecs
import importlib
import importlib.util
import os
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from limitlens.errors import InputError

PIECE = 1 << 16  # bytes of a file that are read at once, as one document
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}(:[\w.-]{1,96})?")
# Folders left out of stdlib-code: other packages, tests, and the documentation, which is stdlib-docs.
_NOT_CODE = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "pydoc_data", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """A named text that is read as a stream of documents."""

    name: str  # as the user gave it
    read: Callable[[], Iterator[str]]  # opens a new stream of pieces of text, always in the same order

    def documents(self) -> Iterator[str]:
        """Yield the pieces of text that are not blank; raise an `InputError` if there is none."""
        empty = True
        for document in self.read():
            if document and not document.isspace():
                empty = False
                yield document
        if empty:
            raise InputError(f"the corpus {self.name!r} holds no text; give a text file, or a folder with some")


def open_corpus(name: str, piece: int = PIECE) -> Corpus:
    """Open a corpus by name: built in (`BUILT_IN`), a text file, a folder of text files, or a Hugging Face dataset.

    A file longer than `piece` bytes is read in pieces, so that memory stays bounded. A dataset (owner/name or
    owner/name:configuration) gives the column "text" of its training split. It needs the package `datasets` and a
    network. An unknown name raises an `InputError` here, an empty or unreadable text when it is read.
    """
    if name in BUILT_IN:
        return Corpus(name, partial(BUILT_IN[name], piece))
    if os.path.isdir(name):
        return Corpus(name, lambda: _read_folder(Path(name), _is_text, piece))
    if os.path.isfile(name):
        return Corpus(name, lambda: _read_file(Path(name), piece))
    built_in = ", ".join(BUILT_IN)
    given = f"the corpus {name!r} is not known: it is no file or folder here"
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"{given}; give one, a hub dataset (owner/name), or one of {built_in}")
    if importlib.util.find_spec("datasets") is None:
        raise InputError(f"{given}; to read it from the hub, `pip install datasets` first, or use one of {built_in}")
    return Corpus(name, lambda: _read_dataset(name))


def _read_docs(_: int) -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


def _read_code(piece: int) -> Iterator[str]:
    return _read_folder(Path(sysconfig.get_path("stdlib")), lambda path: path.suffix == ".py", piece, _NOT_CODE)


BUILT_IN: dict[str, Callable[[int], Iterator[str]]] = {"stdlib-docs": _read_docs, "stdlib-code": _read_code}


def _read_folder(folder: Path, wanted: Callable[[Path], bool], piece: int, skip: Collection[str] = ()) -> Iterator[str]:
    """Yield the text of visible files under a folder for which `wanted(path)` is true, in the order of paths."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for path in (Path(root, name) for name in sorted(files) if not name.startswith(".")):
            if path.is_file() and wanted(path):
                yield from _read_file(path, piece)


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        block = file.read(PIECE)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(block)
    except UnicodeDecodeError:
        return False
    return b"\0" not in block


def _read_file(path: Path, piece: int) -> Iterator[str]:
    """Yield the text of a file in pieces of about `piece` bytes that end with a line."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest = ""
    try:
        with path.open("rb") as file:
            while block := file.read(piece):
                text = rest + decoder.decode(block)
                if "\0" in text:
                    raise InputError(f"{path} holds a null byte and is not text; give a file of UTF-8 text")
                cut = text.rfind("\n") + 1 or len(text)
                yield text[:cut]
                rest = text[cut:]
            yield rest + decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason}); convert it first or give another file") from None
    except OSError as error:
        raise InputError(f"{path} could not be read ({error.strerror}); give a file that can") from None


def _read_dataset(name: str) -> Iterator[str]:
    """Yield the texts of a Hugging Face hub dataset: the column "text" of its training split, streamed."""
    datasets = importlib.import_module("datasets")
    identifier, _, configuration = name.partition(":")
    try:
        rows = iter(datasets.load_dataset(identifier, configuration or None, split="train", streaming=True))
        row: dict[str, Any] | None = next(rows, None)
    except Exception as error:  # the network, the hub and the format of the dataset raise different errors
        given = f"the dataset {name!r} could not be read from the hub ({type(error).__name__})"
        raise InputError(f"{given}; check its name and the network, or use one of {', '.join(BUILT_IN)}") from error
    while row is not None:
        text = row.get("text")
        if not isinstance(text, str):
            raise InputError(f"the dataset {name!r} has the columns {', '.join(row)}; expected one called text")
        yield text
        row = next(rows, None)
