"""Read the metadata in the header of a GGUF file, except arrays, without the package gguf."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from limitlens.errors import InputError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 28  # bytes of the longest string accepted; a longer one means a damaged file
# If the file does not say whether to add a first token, llama.cpp adds one for SentencePiece and Llama 3 tokenizers.
_ADDED_UNSAID = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "llama-bpe"}


def read_metadata(path: Path) -> dict[str, Any]:
    """Metadata entries of a GGUF file by key, without arrays; empty if the format version is unknown."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF" or _number(file, "<I") not in (2, 3):  # version 1 has 32-bit counts
                return {}
            _, entries = _number(file, "<Q"), _number(file, "<Q")
            found = {_string(file): _value(file, _number(file, "<I")) for _ in range(entries)}
    except (OSError, ValueError, OverflowError, RecursionError):  # offsets outside the file, or too few bytes
        problem = f"the file {path} is damaged or ends within its metadata"
        raise InputError(f"{problem}; expected a complete GGUF file") from None
    return {key: value for key, value in found.items() if value is not None}


def opening_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Ids of the special tokens that began every text in training, one or none; None if the metadata do not say."""
    first = metadata.get("tokenizer.ggml.bos_token_id")
    added = metadata.get("tokenizer.ggml.add_bos_token")
    if added is None and any(metadata.get(key) == value for key, value in _ADDED_UNSAID.items()):
        added = True
    if added is False:
        return ()
    return (first,) if added and isinstance(first, int) else None


def _value(file: BinaryIO, kind: int) -> Any:
    """Read a value of the GGUF type `kind`; an array is skipped and gives None."""
    if kind == _STRING:
        return _string(file)
    if kind in _SCALARS:
        return _number(file, _SCALARS[kind])
    if kind != _ARRAY:
        raise ValueError(f"unknown type {kind}")
    inner, count = _number(file, "<I"), _number(file, "<Q")
    if inner in _SCALARS:
        file.seek(count * struct.calcsize(_SCALARS[inner]), 1)
        return None
    for _ in range(count):
        file.seek(_number(file, "<Q"), 1) if inner == _STRING else _value(file, inner)
    return None


def _string(file: BinaryIO) -> str:
    return _bytes(file, _number(file, "<Q")).decode("utf-8", "replace")


def _number(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, _bytes(file, struct.calcsize(layout)))[0]


def _bytes(file: BinaryIO, count: int) -> bytes:
    if count >= _LONGEST or len(found := file.read(count)) < count:
        raise ValueError("too few bytes")
    return found
