"""Labelled documents from files, and the logistic head that is trained on them."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from limitlens.errors import Array, InputError

LONGEST = 1 << 20  # characters of a document that are read
PENALTIES = np.geomspace(1e-4, 10, 6)  # L2 penalties that are tried on a held-out part
EXPECTED = "a folder for each label, or a .zip of these, or .jsonl, .csv or .tsv with labels"


def read_labelled(name: str) -> list[tuple[str, str]]:
    """Documents with their labels, (text, label), in the same order on every machine.

    A .jsonl file has an object with "text" and "label" on each line, a .csv or .tsv file columns with these names. In a
    folder, or in a .zip (also inside a folder), each .txt file is a document, and its folder's name is its label.
    """
    path = Path(name)
    try:
        if path.is_dir() or path.suffix == ".zip":
            rows = list(_text_files(path))
        else:
            text = path.read_text(encoding="utf-8-sig")
            table: Any = csv.DictReader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else ",")
            objects = map(json.loads, text.splitlines()) if path.suffix == ".jsonl" else table
            rows = [(str(row["text"])[:LONGEST], str(row["label"])) for row in objects]
    except KeyError as missing:
        given = f"the data {name!r} has a row without {missing}"
        raise InputError(f"{given}; expected a text and a label in each") from None
    except (OSError, BadZipFile, ValueError, TypeError, csv.Error) as error:
        raise InputError(f"the data {name!r} cannot be read ({error}); expected {EXPECTED}") from None
    if len({label for _, label in rows}) < 2:
        raise InputError(f"{len(rows)} documents in {name!r} have fewer than two labels; expected {EXPECTED}")
    return rows


def _text_files(path: Path) -> Iterator[tuple[str, str]]:
    """Text and label of every .txt file in a folder or a .zip."""
    if path.suffix == ".zip":
        with ZipFile(path) as archive:
            for name in sorted(name for name in archive.namelist() if name.endswith(".txt")):
                with archive.open(name) as file:
                    yield file.read(LONGEST).decode("utf-8", "replace"), Path(name).parent.name
        return
    for inner in sorted([*path.rglob("*.txt"), *path.rglob("*.zip")]):
        if inner.suffix == ".zip":
            yield from _text_files(inner)
        else:
            yield inner.read_text(encoding="utf-8", errors="replace")[:LONGEST], inner.parent.name


def train_head(x: Array, y: Array, seed: int) -> tuple[Array, float]:
    """Weights (d + 1, labels) of a logistic head on features x (n, d), and the penalty chosen on a held-out fifth.

    They minimise the mean cross-entropy + penalty/2 · |weights|²; the intercepts, in the last row, are not penalised.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    one_hot = np.eye(int(y.max()) + 1)[y]
    held_out = np.random.default_rng(seed).permutation(len(x)) < len(x) / 5
    shape = x.shape[1] + 1, one_hot.shape[1]

    def minimised(rows: Any, penalty: float) -> Array:
        def loss(flat: Array) -> tuple[float, Array]:
            weights = flat.reshape(shape)
            logs = log_softmax(label_scores(weights, x[rows]), 1)
            shrinkage = penalty * weights
            shrinkage[-1] = 0
            residual = (np.exp(logs) - one_hot[rows]) / len(logs)
            gradient = np.vstack([x[rows].T @ residual, residual.sum(0)]) + shrinkage
            return -(one_hot[rows] * logs).sum() / len(logs) + (shrinkage * weights).sum() / 2, gradient.ravel()

        return np.asarray(minimize(loss, np.zeros(np.prod(shape)), jac=True, method="L-BFGS-B").x.reshape(shape))

    def held_out_cost(penalty: float) -> float:
        scores = label_scores(minimised(~held_out, penalty), x[held_out])
        return -float((one_hot[held_out] * log_softmax(scores, 1)).sum())

    best = float(min(PENALTIES, key=held_out_cost))
    return minimised(slice(None), best), best


def label_scores(weights: Array, x: Array) -> Array:
    """Scores (n, labels) of a head for features x (n, d)."""
    return np.asarray(x @ weights[:-1] + weights[-1])
