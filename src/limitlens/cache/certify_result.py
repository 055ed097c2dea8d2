"""Result of `limitlens.certify`: keys and bytes that queries read under each rule, and how often the error held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from limitlens.arrays import pd
from limitlens.estimate import Estimate
from limitlens.report.view import Axis, Figure, Guide, Section, Series, Table, View, head_map, look, points
from limitlens.results import Result

EVERYTHING = 0.999  # share of draws from which on a head counts as one that always reads everything


@dataclass(frozen=True)
class RuleReads:
    """What queries read under one rule, and how often the promised error held, over all measured heads."""

    label: str
    status: str  # "proved", or "asymptotic" without a bound on unread scores
    read: float  # mean share of keys read
    read_median: float
    bytes: float  # share of the bytes of keys and values read, selection included
    bytes_shared: float  # the same if the query heads of a key/value head read their keys together
    held: float  # coverage: share of draws whose error is at most ε, relative to the query's output
    interval: tuple[float, float]  # 95%, by documents
    held_quantiles: tuple[float, ...]  # 5%, 25% and 50% of the coverage of single queries
    held_rms: float  # coverage relative to the root mean square output of the head
    whole: float  # share of draws that read everything
    rejected: int  # heads whose coverage is below 1 − δ by an exact binomial test with Holm's correction
    keeps: bool  # whether coverage is at least 1 − δ − 0.01 and no head is rejected


@dataclass(frozen=True)
class HeadReads:
    """What one head reads under the chosen rule, and how often the promised error held."""

    layer: int
    head: int
    read: float
    held: float
    held_rms: float
    whole: float  # share of draws that read everything
    p: float  # of the test that coverage is at least 1 − δ, with Holm's correction
    predicted: float  # share of keys that the theory predicts from the tail of the scores


@dataclass(frozen=True)
class TaskScores:
    """Predictions of the model on one task with certified reads after the context, against those with all keys."""

    task: str
    documents: int
    kl: float  # nats a token
    kl_stderr: float
    agreement: float  # share of tokens whose most likely successor is the same
    accuracy: float  # share of prompts whose answer is right in every token
    accuracy_full: float
    change_stderr: float  # of the difference of the accuracies, paired by prompt


@dataclass(frozen=True, eq=False, repr=False)
class Certification(Result):
    """Result of `limitlens.certify`: reads and coverage of every rule, and per head for the cheapest that holds."""

    kind, file, command = "certificate", "heads", "certify MODEL"
    model: str
    corpus: str
    context: int
    error: float  # ε
    delta: float  # δ
    documents: int
    draws: int  # of the sample of each query
    heads_share: float  # share of the key/value heads measured in each document
    seed: int
    rules: Mapping[str, RuleReads]
    rule: str  # the cheapest rule in bytes that keeps the promise, or that with the best coverage if none does
    kept: bool  # whether a rule keeps the promise
    heads: tuple[HeadReads, ...]  # under that rule
    link: Mapping[str, float | None]  # rank correlations over heads of reads with numbers from other documents
    live: str  # rule of the predictions
    tasks: tuple[TaskScores, ...] = ()
    interrupted: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def overall(self) -> dict[str, Any]:
        """Share of keys read and coverage under the chosen rule, over all heads, with its 95% interval."""
        own = self.rules[self.rule]
        return {"rule": self.rule, "read": own.read, "bytes": own.bytes, "held": own.held, "interval": own.interval}

    @property
    def table(self) -> pd.DataFrame:
        """Table with one row per head: share of keys read and coverage under the chosen rule."""
        return pd.DataFrame([vars(head) for head in self.heads])

    def document(self) -> dict[str, Any]:
        """JSON document of the result, with the numbers over all heads as `overall`."""
        return {"overall": self.overall, **super().document()}

    def view(self) -> View:
        """Report: coverage against bytes read for all rules, a map of reads over heads, and predictions."""
        own, level = self.rules[self.rule], 1 - self.delta
        promise = f"an output error of at most {self.error:g} with probability {level:g}"
        everything = [head for head in self.heads if head.whole >= EVERYTHING]
        found = (
            f"The rule {own.label!r} ({own.status}) reads {own.read:.1%} of the keys and {own.bytes:.1%} of the bytes, "
            f"selection included; the error held in {own.held:.1%} of the draws."
        )
        if not self.kept:
            found += " No rule keeps the promise: that with the best coverage is shown."
        if everything:
            found += f" {len(everything)} of {len(self.heads)} heads always read everything: their tails are too heavy."
        rows = [
            (one.label, one.status, f"{one.read:.1%}", f"{one.read_median:.1%}", f"{one.bytes:.1%}",
             f"{one.bytes_shared:.1%}", f"{one.held:.3f}", f"{one.held_quantiles[0]:.2f}", f"{one.held_rms:.3f}",
             f"{one.whole:.1%}", one.rejected, "yes" if one.keeps else "no") for one in self.rules.values()
        ]  # fmt: skip
        columns = ("rule", "status", "keys", "median", "bytes", "bytes, shared heads", "error held",
                   "5% of queries below", "held, rms", "read all", "heads rejected", "keeps it")  # fmt: skip
        series: list[Series] = [
            points(one.label, [one.bytes], [one.held], look(place)[0], dash=look(place)[1], labels=[one.label])
            for place, one in enumerate(self.rules.values())
        ]
        lowest = min(level, *(one.held for one in self.rules.values()))
        shown = Axis("share of draws within the error", low=lowest - 0.05 * (1 - lowest), high=1.0)
        drawn = Figure("Coverage against bytes read", Axis("share of bytes read, selection included"), shown, series,
                       [Guide("promised", y=level)])  # fmt: skip
        places = [(head.layer, head.head) for head in self.heads]
        linked = [(name.replace("_", " "), value) for name, value in self.link.items() if value is not None]
        asked = [(one.task, one.documents, Estimate(one.kl, one.kl_stderr), one.agreement,
                  *((None, None) if one.task == "text" else (
                      one.accuracy_full, Estimate(one.accuracy - one.accuracy_full, one.change_stderr))))
                 for one in self.tasks]  # fmt: skip
        heading = ("task", "documents", "KL, nats a token", "agreement", "accuracy with all keys", "change")
        blocks = [Table("Predictions with certified reads", heading, asked)] if asked else []
        marked = frozenset({list(self.rules).index(self.rule)})
        return View(
            title=f"Certified reads of {self.model}: error {self.error:g}, probability {level:g}",
            subtitle=f"{self.model} on {self.corpus}: {self.documents} documents, {self.context:,} tokens of context",
            verdict=(f"Queries of {self.model} read some keys of a context of {self.context:,} tokens for {promise}.",
                     found, "Use ll.intervene(model, certify=(error, delta)) to run the model with certified reads."),
            sections=[
                Section("Rules", f"Means over heads; {self.draws} draws of each query's sample. CLT of the denominator "
                        "and of both sums: our version of vAttention's rules (arXiv 2510.05688).",
                        [drawn, Table("Reads and coverage", columns, rows, marked)]),
                Section("Heads", "", [head_map("Share of keys read by each head", "share read", places,
                                               [head.read for head in self.heads], height=340)]),
                *([Section("Reads predicted for each head", "Rank correlation over heads with measured reads, from "
                           "other documents.", [Table("Predictions of reads", ("from", "correlation"), linked)])]
                  if linked else []),
                *([Section("Predictions of the model", f"Queries after the context use the rule {self.live}.", blocks)]
                  if blocks else []),
            ],
            warnings=self.warnings,
            trust=["Asymptotic: coverage rests on a normal approximation; a key whose score was predicted far too low "
                   "can break it. Proved: it holds for every text.",
                   "Errors are those of single heads in an otherwise unchanged model, not of the model's output.",
                   "Bytes are those of one query head; the query heads of a key/value head together read more."],
        )  # fmt: skip
