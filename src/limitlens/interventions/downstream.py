"""Accuracy of a document classifier whose queries attend to n sampled keys (`limitlens.downstream`)."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from limitlens.arrays import pd
from limitlens.errors import Array, InputError, Progress, check_number
from limitlens.interventions import harness
from limitlens.interventions.harness import plus_minus
from limitlens.interventions.sampled_keys import SampledKeys, check_keys, check_sampling
from limitlens.models import Captured, LoadedModel, capture, intervene
from limitlens.report.view import Axis, Figure, Row, Section, View
from limitlens.sampling.checkpoint import Checkpoint, digest
from limitlens.sampling.streams import generator_for

COLUMNS = ("accuracy", "accuracy_change", "agreement", "margin", "margin_error")
GROUPS = ("all", "low horizon", "middle horizon", "high horizon")
LONGEST = 1 << 20  # characters of a document that are read
PENALTIES = np.geomspace(1e-4, 10, 6)  # L2 penalties, of which a held-out fifth chooses one
EXPECTED = "a folder of .txt files for each label, or a .jsonl or .csv file with text and label in each row"


@dataclass(frozen=True, eq=False, repr=False)
class Downstream(harness.DocumentResult):
    """Result of `limitlens.downstream`: a classifier with n sampled keys per query, compared with all keys."""

    kind, file, held = "downstream", "keys", ("outcomes", "horizon")
    model: str
    data: str
    labels: tuple[str, ...]
    window: int  # tokens of a document that are read, at most
    trained: int  # documents that the classifier head was trained on
    penalty: float  # L2 penalty in the training of the classifier head
    documents: int  # held-out documents that were classified
    sizes: tuple[int, ...]  # numbers of keys
    key_sharing: str
    seed: int
    # (documents, sizes, 7): correct, same label, margin, squared change of the margin; with all keys: correct, margin,
    # squared margin. A margin is the score of the true label minus the best other score
    outcomes: Array
    horizon: Array  # (documents,): mean over all heads of scale · √λ_max(Cov(q) Cov(k)) over the document's tokens
    interrupted: bool = False

    @cached_property
    def table(self) -> pd.DataFrame:
        """Accuracy, agreement and margins by number of keys, for all documents and for thirds by spread of scores."""

        def statistic(mean: Array) -> Array:
            correct, same, margin, change, full_correct, full_margin, full_square = np.moveaxis(mean, -1, 0)
            margins = margin / full_margin, np.sqrt(change / full_square)
            return np.stack([correct, correct - full_correct, same, *margins], -1)

        third = 3 * self.horizon.argsort(kind="stable").argsort() // len(self.horizon)  # ranks split ties too
        members = [third >= 0, *(third == place for place in range(3))]
        groups = [
            harness.estimate_table(self.outcomes[group], COLUMNS, statistic, documents=[label], keys=self.sizes)
            for label, group in zip(GROUPS, members, strict=True)
        ]
        return pd.concat(groups, ignore_index=True)

    def view(self) -> View:
        """Report of the result: accuracy, agreement and margins of the classifier against the number of keys."""
        keys = self.sizes[len(self.sizes) // 2]
        every, low, _, high = self.table[self.table["keys"] == keys].to_dict("records")
        gap = high["agreement"] - low["agreement"]
        gap_stderr = np.hypot(high["agreement_stderr"], low["agreement_stderr"])
        verdict = (
            f"A classifier (trained on {self.trained} documents) labelled {self.documents} held-out documents with all "
            f"keys (accuracy {self.outcomes[:, 0, 4].mean():.3f}) and with n random keys per query.",
            f"With {keys} keys its accuracy is {plus_minus(every, 'accuracy')} (paired change "
            f"{plus_minus(every, 'accuracy_change')}), and it gives the same label in {plus_minus(every, 'agreement')} "
            "of the documents; agreement in the third of the documents with the largest horizons minus the smallest: "
            f"{gap:+.3f} ± {gap_stderr:.3f}.",
            "Judge by agreement and margins, not by accuracy: wrong labels that become right hide right ones that "
            "become wrong.",
        )
        lead = (
            "Means over documents ± jackknife standard errors; changes are paired by document. Agreement: share of "
            "documents with the same label as with all keys. Margin: score of the true label minus the best other "
            "score, relative to its mean with all keys. Margin error: root mean square change over that of the margin."
        )
        axes = {
            "accuracy": Axis("share correct"),
            "agreement": Axis("share with the same label as with all keys"),
            "margin_error": Axis("relative error of the margin", log=True),
        }
        figures = []
        for name, axis in axes.items():
            drawn = harness.curves(self.table, "keys", name, "documents")
            figures.append(Figure(axis.label, Axis("keys", log=True), axis, drawn, height=340))
        headings = {"accuracy_change": "change (paired)", "agreement": "same label", "margin": "margin / full margin"}
        table = harness.shown_table("Accuracy, agreement and margins", headings, self.table)
        trust = (
            "the horizon of a document is the mean over all heads of scale · √λ_max(Cov(q) Cov(k)) over its tokens, a "
            "working definition that also depends on the length and the topic of the document",
            "a document with no more tokens than keys is read in full",
        )
        size = f"{self.documents} documents of at most {self.window} tokens, labels {', '.join(self.labels)}"
        title = f"{self.model} as a classifier with n sampled keys per query"
        section = Section("Accuracy and agreement by number of keys", lead, [Row(figures), table])
        return View(title, f"{self.model} on {self.data}: {size}", verdict, [section], trust=trust)


def downstream(
    model: str | LoadedModel, data: str, keys: str | Sequence[int] = "16:256:5", *, key_sharing: str = "shared",
    test: int = 500, train: int | None = None, window: int | None = None, seed: int = 0, device: str = "auto",
    progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> Downstream:  # fmt: skip
    """Measure accuracy, agreement and margins of a document classifier when each query attends to n sampled keys.

    The classifier is logistic regression on the mean of the last hidden states, trained with all keys.

    Parameters
    ----------
    data : labelled documents (`read_labelled`); `test` are held out, and `train` of the rest (all by default) train it
    keys, key_sharing : as in `limitlens.depth`; a document with no more tokens than keys is read in full
    window : tokens of a document that are read, by default the model's positions, at most 512

    >>> made = ll.downstream(model, data, [4, 16], test=12)
    >>> len(made.table)
    8
    """
    check_sampling(keys, key_sharing, seed)
    check_number("test", test, "at least 6 documents to hold out", low=6)
    rows = read_labelled(data)
    loaded = harness.open_model(model, device)
    length = window or loaded.window(harness.WINDOW)
    sizes = check_keys(keys, length, loaded.causal)
    names = sorted({label for _, label in rows})
    shuffled = np.random.default_rng(seed).permutation(len(rows))
    held_out = shuffled[:test]
    training = shuffled[test:][:train]
    if len({rows[i][1] for i in training}) < len(names):
        given = f"{test} of {len(rows)} documents are held out and {len(training)} train the head"
        raise InputError(f"{given}; expected every label among the training documents")

    def features_of(index: int) -> Array:
        ids = loaded.tokenizer(rows[index][0], truncation=True, max_length=length)["input_ids"] or [0]
        with torch.inference_mode():
            output: Any = loaded.model.base_model(input_ids=torch.tensor([ids], device=loaded.model.device))
        return np.asarray(output.last_hidden_state[0].mean(0).double().cpu())

    features = []
    for done, index in enumerate(training):
        features.append(features_of(index))
        progress(done + 1, len(training) + len(held_out))
    labels = [names.index(rows[index][1]) for index in training]
    weights, penalty = train_classifier(np.array(features), np.array(labels), seed)

    def document(place: int) -> dict[str, Any]:
        label = names.index(rows[held_out[place]][1])
        horizons: list[float] = []

        def read() -> tuple[float, int]:
            scores = features_of(held_out[place]) @ weights[:-1] + weights[-1]
            return scores[label] - np.delete(scores, label).max(), int(scores.argmax())

        with capture(loaded.model, lambda call: horizons.extend(_horizons(call))):
            full_margin, full_predicted = read()
        whole = [full_predicted == label, full_margin, full_margin**2]
        generator = generator_for(seed, place)
        samplers = (SampledKeys(size, generator, key_sharing=key_sharing) for size in sizes)
        variants = (intervene(loaded.model, keys=sampler) for sampler in samplers)
        outcomes = [
            [predicted == label, predicted == full_predicted, margin, (margin - full_margin) ** 2, *whole]
            for margin, predicted in harness.read_under(variants, read)
        ]
        return {"outcomes": np.array(outcomes, float), "horizon": np.mean(horizons)}

    content = digest(*(f"{label} {text}" for text, label in rows))
    asked = repr((sizes, key_sharing, length, seed, test, train))
    job = {"job": "downstream", "weights": loaded.digest, "data": content, "asked": asked}
    report = lambda done, total: progress(len(training) + done, len(training) + total)  # noqa: E731
    found = (checkpoint or Checkpoint()).each(job, len(held_out), document, tokens=length, fewest=6, progress=report)
    done = len(found["horizon"])
    about = loaded.name, data, tuple(names), length, len(training), penalty, done, sizes, key_sharing, seed
    return Downstream(*about, **found, interrupted=done < len(held_out))


def read_labelled(name: str) -> list[tuple[str, str]]:
    """Read labelled documents as pairs (text, label), in the same order on every machine.

    A folder holds .txt files in one subfolder per label. A .jsonl or .csv file has "text" and "label" in each row.
    """
    path = Path(name)
    try:
        if path.is_dir():
            files = sorted(path.rglob("*.txt"))
            rows = [(file.read_text(encoding="utf-8", errors="replace"), file.parent.name) for file in files]
        else:
            lines = path.read_text(encoding="utf-8-sig").splitlines(keepends=True)
            objects: Any = map(json.loads, lines) if path.suffix == ".jsonl" else csv.DictReader(lines)
            rows = [(str(row["text"]), str(row["label"])) for row in objects]
    except KeyError as missing:
        raise InputError(f"the data {name!r} has a row without {missing}; expected a text and a label") from None
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise InputError(f"the data {name!r} cannot be read ({error}); expected {EXPECTED}") from None
    if len({label for _, label in rows}) < 2:
        raise InputError(f"{len(rows)} documents in {name!r} have fewer than two labels; expected {EXPECTED}")
    return [(text[:LONGEST], label) for text, label in rows]


def train_classifier(features: Array, labels: Array, seed: int) -> tuple[Array, float]:
    """Train logistic regression on features (n, d) and labels (n,); returns its weights and its L2 penalty.

    Scores of the labels are features @ weights[:-1] + weights[-1]. The penalty is for standardised features,
    and is the best one on a held-out fifth of the documents.
    """
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    centre, spread = features.mean(0), features.std(0) + 1e-12
    x = np.hstack([(features - centre) / spread, np.ones((len(features), 1))])
    one_hot = np.eye(int(labels.max()) + 1)[labels]
    held_out = np.random.default_rng(seed).permutation(len(x)) < len(x) / 5
    shape = x.shape[1], one_hot.shape[1]

    def minimised(rows: Any, penalty: float) -> Array:
        def loss(flat: Array) -> tuple[float, Array]:
            weights = flat.reshape(shape)
            logs = log_softmax(x[rows] @ weights, 1)
            shrinkage = penalty * weights
            shrinkage[-1] = 0
            gradient = x[rows].T @ (np.exp(logs) - one_hot[rows]) / len(logs) + shrinkage
            return -(one_hot[rows] * logs).sum() / len(logs) + (shrinkage * weights).sum() / 2, gradient.ravel()

        return np.asarray(minimize(loss, np.zeros(np.prod(shape)), jac=True, method="L-BFGS-B").x.reshape(shape))

    def held_out_cost(penalty: float) -> float:
        return -float((one_hot * log_softmax(x @ minimised(~held_out, penalty), 1))[held_out].sum())

    penalty = float(min(PENALTIES, key=held_out_cost))
    weights = minimised(slice(None), penalty)
    weights[:-1] /= spread[:, None]
    weights[-1] -= centre @ weights[:-1]
    return weights, penalty


def _horizons(call: Captured) -> list[float]:
    """Horizon of each head in a layer: the spread scale · √λ_max(Cov(q) Cov(k)) of its scores over one document."""
    query, key = (part[0] - part[0].mean(1, keepdim=True) for part in (call.query.double(), call.key.double()))
    key = key.repeat_interleave(len(query) // len(key), 0)
    product = (query.mT @ query / query.shape[1]) @ (key.mT @ key / key.shape[1])
    return [call.scale * float(one) ** 0.5 for one in torch.linalg.eigvals(product).abs().amax(-1)]
