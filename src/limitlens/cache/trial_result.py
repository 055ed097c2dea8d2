"""Result of a cache trial: predictions under every key policy and allocation, on plain text and on recall tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from limitlens.arrays import pd
from limitlens.attention.policies import POLICIES, SHARED
from limitlens.cache.budgets import BEST, FULL, policy_label
from limitlens.cache.tasks import SOLVED, TEXT
from limitlens.estimate import Estimate
from limitlens.report.view import Axis, Cell, Colour, Figure, Section, Series, Table, View, points
from limitlens.results import Result

OWN = "plan"  # name of the allocation that the plan itself chose
PROMPT = "prompt"  # name of allocations that depend on the prompt
DUO = "duo"
RECALL = "recall"  # name of the average over recall tasks that the model solves
COLOURS: dict[str, Colour] = {  # in the order in which points get their names, where there is little room
    OWN: "red", PROMPT: "orange", DUO: "pink", "fisher_weighted": "green", "equal_error": "blue", "uniform": "grey",
}  # fmt: skip
NUMBERS = (
    "accuracy", "kl", "kl_minus_plan", "accuracy_minus_plan", "kl_minus_uniform", "kl_minus_equal_error", "agreement",
    "nll", "nll_increase",
)  # fmt: skip
SHOWN_NUMBERS = tuple(name for name in NUMBERS if name not in ("kl_minus_equal_error", "nll"))  # in `table` only
SHOWN = 14  # rows of a task that a terminal prints


@dataclass(frozen=True)
class TrialRow:
    """Predictions with a cache cut by one key policy and one allocation of keys to heads, against the full cache."""

    policy: str  # a key policy, "best", a rule that divides the cache by the prompt, or "full" for the full cache
    allocation: str  # one of `budgets.ALLOCATIONS`, "plan", "prompt", "duo" or "full"
    task: str  # "text", a recall task, or "recall" for the average over the recall tasks that the model solves
    share: float  # share of the cache that is kept
    bytes: int
    accuracy: float | None  # share of prompts whose answer is right in every token; None for text
    kl: float  # KL(full ‖ cut), nats a token
    agreement: float  # share of tokens whose most likely successor is the same
    nll: float  # negative log-likelihood of the text or answer, nats a token
    nll_increase: float  # nll minus that of the full cache
    kl_minus_plan: float | None  # paired difference from the plan's own row; above 0: the plan is better
    accuracy_minus_plan: float | None
    kl_minus_uniform: float | None  # paired difference from uniform budgets with the same policy (of each head)
    kl_minus_equal_error: float | None  # difference from the equal-error allocation of the same policy
    stderr: Mapping[str, float]  # standard errors by field name

    def estimate(self, name: str) -> Estimate:
        """Value of the field `name`, such as "kl", with its standard error; NaN where the field is None."""
        return Estimate.of(getattr(self, name), self.stderr.get(name))

    @property
    def usable(self) -> bool:
        """Whether a real cache can follow the row: it is no oracle and not the full cache."""
        return self.policy in (BEST, DUO, *SHARED) or (
            self.policy in POLICIES and not POLICIES[self.policy].sees_queries
        )

    @property
    def name(self) -> str:
        """Short name of the method: that of its key policy or rule, or "plan"."""
        return OWN if self.allocation == OWN else self.policy

    @property
    def label(self) -> str:
        """What the method keeps, in words."""
        if self.policy in SHARED:
            return SHARED[self.policy].label
        return "duo: whole heads and windows" if self.policy == DUO else policy_label(self.policy)


@dataclass(frozen=True, eq=False, repr=False)
class Trial(Result):
    """Result of `limitlens.trial`: predictions of a model under a cache plan, and under others of the same size."""

    kind, file, command = "trial", "rows", "trial PLAN"
    model: str
    corpus: str
    context: int
    behind: int  # tokens of a continuation
    documents: int  # prompts of each task
    tasks: tuple[str, ...]
    solved: tuple[str, ...]  # recall tasks that the model answers with its whole cache
    rows: tuple[TrialRow, ...]  # the full cache first in each task
    interrupted: bool = False
    warnings: tuple[str, ...] = ()

    def of(self, task: str) -> list[TrialRow]:
        """Rows of one task by increasing KL divergence from the full cache; the row of the full cache comes first."""
        return sorted((row for row in self.rows if row.task == task), key=lambda row: (row.policy != FULL, row.kl))

    @property
    def averaged(self) -> tuple[str, ...]:
        """Tasks with rows: those that were read, then "recall" if the model solves one of them."""
        return (*self.tasks, *([RECALL] if self.solved else []))

    @property
    def ranked(self) -> list[TrialRow]:
        """All rows by task, then by increasing KL divergence; the row of the full cache comes first."""
        return [row for task in self.averaged for row in self.of(task)]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Table with standard errors: one row per task, policy and allocation, smallest KL first."""
        table = pd.DataFrame([vars(row) | {f"{n}_stderr": row.stderr.get(n) for n in NUMBERS} for row in self.ranked])
        return table.drop(columns="stderr")

    def view(self) -> View:
        """Report of the trial: a figure of recall against text, and for each task a table of all policies."""
        share = next(row.share for row in self.rows if row.policy != FULL)
        asked = [task for task in self.tasks if task != TEXT]
        lead = (
            "KL and nll in nats a token, agreement as a share of tokens, accuracy as a share of prompts: means over "
            "documents ± standard errors; differences are paired by document. minus plan: the row minus the plan."
        )
        found = []
        if TEXT in self.tasks:
            found.append(f"Its perplexity with the full cache is {np.exp(self.of(TEXT)[0].nll):.2f}.")
        if asked:
            whole = ", ".join(f"{task} {self.of(task)[0].accuracy:.2f}" for task in asked)
            left = [task for task in asked if task not in self.solved]
            out = f" Left out of averages, below {SOLVED}: {', '.join(left)}." if left else ""
            none = " Recall was not measured: the model solves no task with its full cache." if not self.solved else ""
            found.append(f"Accuracy with the full cache: {whole}.{none or out}")
        found += [self._best(task) for task in self.averaged if task in (TEXT, RECALL) or len(self.tasks) == 1]
        found.append(lost := self._loses())
        forgets = any(f"on {task} to " in lost for task in self.solved)
        overview = [self._overview()] if len(self.tasks) > 1 else []
        sections = [Section("Policies and allocations at equal cache size", lead, [self._figure(), *overview])]
        sections += [Section(f"Task: {task}", "", [self._table(task)]) for task in self.averaged]
        meanings = {row.name: "the plan under trial" if row.name == OWN else row.label for row in self.rows}
        sections.append(
            Section("Names of methods", "", [Table("Names of methods", ("name", "keeps"), list(meanings.items()))])
        )
        return View(
            title=f"Cache trial of {self.model}: {share:.1%} of the cache",
            subtitle=f"{self.model} on {self.corpus}: {self.documents} documents of {self.context:,} + {self.behind} "
                     "tokens",
            verdict=(
                f"With {share:.1%} of the cache of {self.context:,} tokens, {self.model} reads {self.documents} "
                f"prompts of each task: {', '.join(self.tasks)}.",
                " ".join(found),
                "The plan loses recall: plan again with --for text=1,recall=10, or choose another method." if forgets
                else "Use per-head budgets only if their gain exceeds two standard errors.",
            ),
            sections=sections, warnings=self.warnings,
            trust=["An oracle uses the scores of later queries; no cache can follow it."],
        )  # fmt: skip

    def _table(self, task: str) -> Table:
        """Table of all policies and allocations on one task."""
        names = [name for name in SHOWN_NUMBERS if any(getattr(row, name) is not None for row in self.of(task))]
        columns = ("key policy", "allocation", *(name.replace("kl", "KL").replace("_", " ") for name in names))
        rows: list[tuple[Cell, ...]] = [
            (row.name, _allocation(row.allocation), *map(row.estimate, names)) for row in self.of(task)
        ]
        own = frozenset(k for k, row in enumerate(self.of(task)) if row.allocation == OWN)
        return Table(f"Policies and allocations: {task}", columns, rows, own, SHOWN if len(self.tasks) > 1 else None)

    def _overview(self) -> Table:
        """Table of every method with its bytes, KL on text and accuracy on each recall task, best recall first."""
        rows: list[tuple[Cell, ...]] = []
        own = {task: {(row.policy, row.allocation): row for row in self.of(task)} for task in self.tasks}
        right = {place: sum(own[task][place].accuracy or 0 for task in self.solved) for place in own[self.tasks[0]]}
        places = sorted(
            right, key=lambda place: (place[0] != FULL, -right[place])
        )  # of equal recall, smallest KL first
        for place in places:
            first = own[self.tasks[0]][place]
            found = [own[task][place].estimate("kl" if task == TEXT else "accuracy") for task in self.tasks]
            rows.append((first.name, _allocation(first.allocation), f"{first.bytes / 1e6:.2f}", *found))
        columns = ("method", "allocation", "MB", *("KL on text" if task == TEXT else task for task in self.tasks))
        marked = frozenset(k for k, place in enumerate(places) if place[1] == OWN)
        return Table("Recall beside text: accuracy on each task", columns, rows, marked)

    def _figure(self) -> Figure:
        """Figure of accuracy on recall tasks against KL on text, or of agreement against KL if there is one axis."""
        both = bool(self.solved) and TEXT in self.tasks
        text = {(row.policy, row.allocation): row for row in self.of(TEXT if both else self.averaged[-1])[1:]}
        recall = {(row.policy, row.allocation): row for row in self.of(RECALL if both else self.averaged[-1])[1:]}
        name = "accuracy" if both else "agreement"
        series: list[Series] = []
        for allocation, colour in COLOURS.items():
            if not (own := [place for place in text if place[1] == allocation]):
                continue
            series.append(points(
                _allocation(allocation), [text[place].kl for place in own],
                [getattr(recall[place], name) for place in own], colour,
                [recall[place].stderr[name] for place in own], positive=False,
                labels=[text[place].name for place in own], named=True,
            ))  # fmt: skip
        title = "Recall against text" if both else "Agreement against KL"
        tall = f"accuracy on {', '.join(self.solved)}" if both else "share of tokens with the same likeliest successor"
        return Figure(title, Axis("KL on text, nats a token" if both else "KL, nats a token", log=True),
                      Axis(tall, low=-0.05, high=1.05) if both else Axis(tall), series, height=380)  # fmt: skip

    def _best(self, task: str) -> str:
        """Sentence on the best policy that a real cache can follow, and its gain over equal key counts per head."""
        best = next(row for row in self.of(task) if row.usable)
        text = f"Smallest KL on {task}: {best.name}, {_allocation(best.allocation)}, {best.kl:.4f} nats"
        if best.kl_minus_uniform is None:
            return f"{text}."
        stderr = best.stderr["kl_minus_uniform"]
        clear = "more" if best.kl_minus_uniform < -2 * stderr else "no more"
        gain = f"{-best.kl_minus_uniform:.4f} ± {stderr:.4f}"
        return f"{text}; {gain} less than with uniform budgets, {clear} than two standard errors."

    def _loses(self) -> str:
        """Sentence on the tasks on which another method has a smaller KL than the plan, beyond two standard errors."""
        lost = []
        for task in self.tasks:
            rows = [row for row in self.of(task) if row.usable and row.kl_minus_plan is not None]
            rows = [row for row in rows if (row.kl_minus_plan or 0) < -2 * row.stderr["kl_minus_plan"]]
            if rows:
                gain = f"{rows[0].kl_minus_plan:+.4f} ± {rows[0].stderr['kl_minus_plan']:.4f}"
                lost.append(f"{task} to {rows[0].name}, {_allocation(rows[0].allocation)} (KL {gain})")
        if not lost:
            return "No other method has a smaller KL than the plan on any task, beyond two standard errors."
        return f"The plan loses on {'; on '.join(lost)}."


def _allocation(name: str) -> str:
    names = {"equal_error": "equal error", "fisher_weighted": "Fisher-weighted", PROMPT: "by the prompt"}
    return names.get(name, name)
