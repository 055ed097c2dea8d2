"""Labelled documents of one's own, and the logistic head that learns them."""

from __future__ import annotations

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
    path = Path(name)
    try:
        if path.is_dir() or path.suffix == ".zip":
            rows = list(_files(path))
        elif path.suffix in (".jsonl", ".csv", ".tsv") and path.is_file():
            text = path.read_text(encoding="utf-8-sig")
            split = csv.DictReader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else ",")
            objects: Any = map(json.loads, text.splitlines()) if path.suffix == ".jsonl" else split
            rows = [(str(row["text"])[:LONGEST], str(row["label"])) for row in objects]
        else:
            raise InputError(
                f"the data {name!r} is no folder and no .zip, .jsonl, .csv or .tsv file; give one of these"
            )
    except KeyError as missing:
        raise InputError(f"{name!r} has a row without {missing}; expected a text and a label in every row") from None
    except (OSError, BadZipFile, ValueError, TypeError, csv.Error) as error:
        raise (
            error
            if isinstance(error, InputError)
            else InputError(f"{name!r} cannot be read ({error}); expected labelled documents, so mend it")
        ) from None
    if len({label for _, label in rows}) < 2:
        raise InputError(
            f"{name!r} holds {len(rows)} documents with fewer than two labels; expected a folder for each label, or a "
            "label in every row"
        )
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
    """Weights (d + 1, labels) of a logistic head on x (n, d), and the penalty that a held-out fifth preferred."""
    held = np.random.default_rng(seed).permutation(len(x)) < len(x) / 5
    costs = [_cost(_fit(x[~held], y[~held], y.max() + 1, one), x[held], y[held]) for one in STRENGTHS]
    best = float(STRENGTHS[int(np.argmin(costs))])
    return _fit(x, y, y.max() + 1, best), best


def scores(weights: Array, x: Array) -> Array:
    """What a head says of x (n, d): (n, labels)."""
    return np.asarray(x @ weights[:-1] + weights[-1])


def _cost(weights: Array, x: Array, y: Array) -> float:
    from scipy.special import log_softmax

    return float(-log_softmax(scores(weights, x), 1)[np.arange(len(y)), y].mean())


def _fit(x: Array, y: Array, labels: int, strength: float) -> Array:
    """The minimum of mean cross-entropy + strength/2 · |weights|², the constants free."""
    from scipy.optimize import minimize
    from scipy.special import softmax

    shape = x.shape[1] + 1, int(labels)

    def loss(flat: Array) -> tuple[float, Array]:
        weights = flat.reshape(shape)
        wrong = (softmax(scores(weights, x), 1) - np.eye(shape[1])[y]) / len(x)
        penalty = strength * np.vstack([weights[:-1], 0 * weights[-1:]])
        slope = np.vstack([x.T @ wrong, wrong.sum(0)]) + penalty
        return _cost(weights, x, y) + float((penalty * weights).sum()) / 2, slope.ravel()

    found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 500})
    return np.asarray(found.x.reshape(shape))
