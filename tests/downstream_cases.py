"""Labelled documents of letters and a tiny encoder for the tests of `downstream`."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from limitlens.models import LoadedModel
from tiny_models import TINY, tiny_tokenizer

COUNT = 90


def documents() -> list[tuple[str, str]]:
    """Letters from the first half of the alphabet, mostly, or from the second: even a random encoder tells."""
    generator = np.random.default_rng(0)
    found = []
    for index in range(COUNT):
        label = index % 2
        halves = np.where(generator.random(40) < 0.8, label, 1 - label)
        found.append(("".join(chr(97 + 13 * half + generator.integers(13)) for half in halves), "ba"[label]))
    return found


@cache
def data() -> str:
    """The documents as a file."""
    path = Path(tempfile.mkdtemp()) / "letters.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in documents()))
    return str(path)


@cache
def encoder() -> LoadedModel:
    """An encoder of letters."""
    return LoadedModel("letters", TINY["bert"].model(), tiny_tokenizer(special=True))


@cache
def folder() -> str:
    """The folder of the encoder and its tokenizer."""
    path = tempfile.mkdtemp()
    encoder().model.save_pretrained(path)
    encoder().tokenizer.save_pretrained(path)
    return path
