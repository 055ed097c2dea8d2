"""Does attention over n keys show in a task? A classifier of documents, asked again when each query sees n keys.

The classifier is a logistic head on the mean of a model's last hidden states, fitted to documents read as they are, or
the model's own where it was saved as a classifier. It is asked of the same other documents with all keys and with n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from limitlens.arrays import pd
from limitlens.attention.device import choose_device
from limitlens.errors import Array, InputError, Progress, check_seed
from limitlens.interventions.by_document import ByDocument, Statistic, curves, shown, tabled
from limitlens.interventions.draws import WAYS, WINDOW, Draws, numbers_of_keys
from limitlens.interventions.labelled import fit_head, read_labelled, scores
from limitlens.models import Captured, LoadedModel, capture, intervene, load
from limitlens.report.view import Row, View
from limitlens.report.words import read_words, worded_figure, worded_view
from limitlens.sampling.checkpoint import Checkpoint, digest
from limitlens.sampling.streams import generator_for

WORDS = read_words("interventions/words.json")["downstream"]
OWN = "ForSequenceClassification"  # how the class of a model ends that is a classifier itself


@dataclass(frozen=True, eq=False, repr=False)
class Downstream(ByDocument):
    """A classifier whose queries see n keys, against itself."""

    kind, file, held = "downstream", "keys", ("outcomes", "horizon")
    model: str
    data: str
    labels: tuple[str, ...]
    window: int  # tokens of a document that are read, at most
    trained: int  # documents that the head was fitted to; none where the model has its own
    penalty: float  # of that fit
    documents: int
    sizes: tuple[int, ...]
    way: str
    seed: int
    # (documents, sizes, 7): right, the same label, margin, squared change of the margin; of the whole model right,
    # margin and its square. A margin is the score of the true label less the best other
    outcomes: Array
    horizon: Array  # (documents,): mean over all heads of scale · √λ_max(Cov(q) Cov(k)) over the document's own tokens
    interrupted: bool = False

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per group (all documents, then thirds by horizon) and number of keys."""
        of: dict[str, Statistic] = {
            "accuracy": lambda mean: mean[..., 0], "accuracy_change": lambda mean: mean[..., 0] - mean[..., 4],
            "agreement": lambda mean: mean[..., 1], "margin": lambda mean: mean[..., 2] / mean[..., 5],
            "margin_error": lambda mean: np.sqrt(mean[..., 3] / mean[..., 6]),
        }  # fmt: skip
        third = 3 * self.horizon.argsort(kind="stable").argsort() // len(self.horizon)  # by rank: equal ones part too
        groups = [np.ones(len(third), bool), *(third == place for place in range(3))]
        rows = [
            tabled({name: (one, self.outcomes[group]) for name, one in of.items()}, documents=[label], keys=self.sizes)
            for label, group in zip(WORDS["groups"], groups, strict=True)
        ]
        return pd.concat(rows, ignore_index=True)

    def view(self) -> View:
        """What it shows."""
        keys, every = self.sizes[len(self.sizes) // 2], self.table[self.table["documents"] == WORDS["groups"][0]]
        told: dict[str, Any] = every[every["keys"] == keys].iloc[0].to_dict()
        thirds = self.table[self.table["documents"] != WORDS["groups"][0]]
        low, _, high = thirds[thirds["keys"] == keys].to_dict("records")
        told |= {"less": high["agreement"] - low["agreement"], "whole": self.outcomes[:, 0, 4].mean()}
        told |= {"less_stderr": np.hypot(high["agreement_stderr"], low["agreement_stderr"]), "of": self}
        drawn = {"accuracy": every, "agreement": self.table, "margin_error": self.table}
        figures = [worded_figure(WORDS[name], curves(part, "keys", name, "documents")) for name, part in drawn.items()]
        block = shown(WORDS["table"], WORDS["columns"], self.table)
        return worded_view(WORDS, [Row(figures), block], said=", ".join(self.labels), **told)

    def __repr__(self) -> str:
        return f"<Downstream of {self.model}: {self.documents} documents, {self.sizes[0]} to {self.sizes[-1]} keys>"


def downstream(
    model: str | LoadedModel, data: str, keys: str | Sequence[int] = "16:256:5", *, way: str = "shared",
    test: int = 500, train: int | None = None, window: int | None = None, seed: int = 0, device: str = "auto",
    progress: Progress = lambda done, total: None, checkpoint: Checkpoint | None = None,
) -> Downstream:  # fmt: skip
    """Accuracy, agreement and margins of a classifier when each query sees n keys.

    Parameters
    ----------
    data : labelled documents (`live.labelled.read_labelled`), of which `test` are asked and `train` of the others, all
        of them when left out, are learned; a model that was saved as a classifier is asked as it is.
    keys, way : as in `limitlens.depth`; a document of no more tokens than keys is read whole.
    window : tokens of a document that are read; the model's positions, at most 512, when left out.

    >>> made = ll.downstream(model, data, [4, 16], test=12)
    >>> len(made.table)
    8
    """
    loaded = model if isinstance(model, LoadedModel) else load(model, device=choose_device(device), labels=True)
    length = window or loaded.window(WINDOW)
    sizes = numbers_of_keys(keys, length, loaded.causal)
    rows, own = read_labelled(data), type(loaded.model).__name__.endswith(OWN)
    names = _names(loaded, {label for _, label in rows}) if own else sorted({label for _, label in rows})
    order = np.random.default_rng(check_seed(seed)).permutation(len(rows))
    asked, learned = order[:test], order[test:][: 0 if own else train]
    if way not in WAYS or test < 6 or (not own and len({rows[i][1] for i in learned}) < len(names)):
        raise InputError(
            f"{test} of {len(rows)} documents are to be asked and {len(learned)} learned, way {way!r}; expected 6 or "
            f"more asked, every label among those learned, and a way of {', '.join(WAYS)}"
        )
    places = {label: place for place, label in enumerate(names)}

    def read(index: int) -> Array:
        """The label scores of the model's own head, or the mean of its last hidden states."""
        given = loaded.tokenizer(rows[index][0], truncation=True, max_length=length)["input_ids"] or [0]
        with torch.inference_mode():
            found: Any = loaded.model(input_ids=torch.tensor([given], device=loaded.model.device))
        return np.asarray((found.logits[0] if own else found.last_hidden_state[0].mean(0)).double().cpu())

    features = np.zeros((len(learned), 0 if own else len(read(asked[0]))))
    for done, index in enumerate(learned):
        features[done] = read(index)
        progress(done + 1, len(learned) + len(asked))
    centre, spread = (features.mean(0), features.std(0) + 1e-12) if len(features) else (0.0, 1.0)
    truth = np.array([places[rows[index][1]] for index in learned])
    weights, penalty = (None, float("nan")) if own else fit_head((features - centre) / spread, truth, seed)

    def margin(found: Array, label: int) -> tuple[float, int]:
        said = found if weights is None else scores(weights, (found - centre) / spread)
        return float(said[label] - np.delete(said, label).max()), int(said.argmax())

    def document(place: int) -> dict[str, Any]:
        index, reaches = asked[place], list[float]()
        label, generator = places[rows[index][1]], generator_for(seed, place)
        with capture(loaded.model, lambda call: reaches.extend(_reach(call))):
            whole, best = margin(read(index), label)
        outcomes = np.zeros((len(sizes), 7))
        for at, size in enumerate(sizes):
            with intervene(loaded.model, keys=Draws(size, generator, own=way == "own")):
                cut, said = margin(read(index), label)
            outcomes[at] = said == label, said == best, cut, (cut - whole) ** 2, best == label, whole, whole**2
        return {"outcomes": outcomes, "horizon": np.mean(reaches)}

    def report(done: float, total: float) -> None:
        progress(len(learned) + done, len(learned) + total)

    job = {"job": "downstream", "weights": loaded.digest, "data": digest(*(f"{label} {text}" for text, label in rows))}
    job |= {"asked": repr((sizes, way, length, seed, test, train))}
    found = (checkpoint or Checkpoint()).each(job, len(asked), document, tokens=length, fewest=6, progress=report)
    done = len(found["horizon"])
    about = loaded.name, data, tuple(names), length, len(learned), penalty, done, sizes, way, seed
    return Downstream(*about, **found, interrupted=done < len(asked))


def _reach(call: Captured) -> list[float]:
    """scale · √λ_max(Cov(q) Cov(k)) of each head over the tokens of a document: its two-sided horizon there."""
    query, key = (part[0] - part[0].mean(1, keepdim=True) for part in (call.query.double(), call.key.double()))
    key = key.repeat_interleave(len(query) // len(key), 0)
    product = (query.mT @ query / query.shape[1]) @ (key.mT @ key / key.shape[1])
    return [call.scale * float(one) ** 0.5 for one in torch.linalg.eigvals(product).abs().amax(-1)]


def _names(loaded: LoadedModel, labels: set[str]) -> list[str]:
    """The labels in the order of a classifier's own, by their names or their numbers."""
    known: Any = loaded.model.config.id2label
    own = [str(known[place]) for place in range(len(known))]
    for names in (own, [str(place) for place in range(len(known))]):
        if labels <= set(names):
            return names
    given = f"the data is labelled {', '.join(sorted(labels)[:5])} and {loaded.name} says {', '.join(own[:5])}"
    raise InputError(f"{given}; expected the labels of the classifier, or their numbers")
