"""Labelled documents of one's own, and the logistic head that learns them."""

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
STRENGTHS = np.geomspace(1e-4, 10, 6)  # of the penalty, tried on a part held out


def read_labelled(name: str) -> list[tuple[str, str]]:
    """Documents and their labels: (text, label), in an order that no file system decides.

    A .jsonl file has an object with "text" and "label" on each line, a .csv or .tsv file columns of these names. In a
    folder, or in a .zip, which may lie in a folder, each .txt file is a document and the folder it lies in its label.
    """
    path, expected = Path(name), "a folder for each label, or a .zip of these, or .jsonl, .csv or .tsv with labels"
    try:
        if path.is_dir() or path.suffix == ".zip":
            rows = list(_files(path))
        else:
            text = path.read_text(encoding="utf-8-sig")
            split: Any = csv.DictReader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else ",")
            objects = map(json.loads, text.splitlines()) if path.suffix == ".jsonl" else split
            rows = [(str(row["text"])[:LONGEST], str(row["label"])) for row in objects]
    except KeyError as missing:
        given = f"the data {name!r} has a row without {missing}"
        raise InputError(f"{given}; expected a text and a label in each") from None
    except (OSError, BadZipFile, ValueError, TypeError, csv.Error) as error:
        raise InputError(f"the data {name!r} cannot be read ({error}); expected {expected}") from None
    if len({label for _, label in rows}) < 2:
        raise InputError(f"{len(rows)} documents in {name!r} have fewer than two labels; expected {expected}")
    return rows


def _files(path: Path) -> Iterator[tuple[str, str]]:
    if path.suffix == ".zip":
        with ZipFile(path) as archive:
            for name in sorted(name for name in archive.namelist() if name.endswith(".txt")):
                with archive.open(name) as file:
                    yield file.read(LONGEST).decode("utf-8", "replace"), Path(name).parent.name
        return
    for inner in sorted([*path.rglob("*.txt"), *path.rglob("*.zip")]):
        if inner.suffix == ".zip":
            yield from _files(inner)
        else:
            yield inner.read_text(encoding="utf-8", errors="replace")[:LONGEST], inner.parent.name


def fit_head(x: Array, y: Array, seed: int) -> tuple[Array, float]:
    """Weights (d + 1, labels) of a logistic head on x (n, d), and the penalty that a held-out fifth preferred.

    They minimise the mean cross-entropy + penalty/2 · |weights|², the constants, in the last row, left free.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    one, held = np.eye(int(y.max()) + 1)[y], np.random.default_rng(seed).permutation(len(x)) < len(x) / 5

    def fit(rows: Any, penalty: float) -> Array:
        def loss(flat: Array) -> tuple[float, Array]:
            weights = flat.reshape(shape)
            logs, pull = log_softmax(scores(weights, x[rows]), 1), penalty * weights
            pull[-1] = 0
            wrong = (np.exp(logs) - one[rows]) / len(logs)
            slope = np.vstack([x[rows].T @ wrong, wrong.sum(0)]) + pull
            return -(one[rows] * logs).sum() / len(logs) + (pull * weights).sum() / 2, slope.ravel()

        shape = x.shape[1] + 1, one.shape[1]
        return np.asarray(minimize(loss, np.zeros(np.prod(shape)), jac=True, method="L-BFGS-B").x.reshape(shape))

    costs = [-(one[held] * log_softmax(scores(fit(~held, each), x[held]), 1)).sum() for each in STRENGTHS]
    best = float(STRENGTHS[int(np.argmin(costs))])
    return fit(slice(None), best), best


def scores(weights: Array, x: Array) -> Array:
    """What a head says of x (n, d): (n, labels)."""
    return np.asarray(x @ weights[:-1] + weights[-1])
