"""What a plan shows: how many keys each head keeps and what that gave on unseen text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from limitlens.budgets.trial import WAYS
from limitlens.heads.figures import COLOURS
from limitlens.heads.regimes import Regime
from limitlens.report.view import Axis, Cell, Figure, Guide, Row, Section, Table, Text, View, head_map, points
from limitlens.report.words import plural, read_words, sentence

if TYPE_CHECKING:
    from limitlens.budgets.head_plan import HeadPlan
    from limitlens.budgets.plan import Plan

SHOWN = 5  # heads at either end
NOTHING_SAVED = 0.99  # a share of the cache from which on a plan saves nothing worth the trouble
WORDS = read_words("budgets/words.json")


def plan_view(plan: Plan) -> View:
    """Everything a plan has to show."""
    where = "an endless context" if plan.context is None else f"a context of {plan.context:,} tokens"
    counted = {regime: sum(head.regime is regime for head in plan.heads) for regime in Regime}
    advice = [
        f"{count} of {len(plan.heads)} heads are {regime.value}: {regime.remedy}"
        for regime, count in counted.items()
        if count
    ]
    known = {"heads": plural(len(plan.heads), "head"), "model": plan.model, "percent": 100 * plan.error, "where": where}
    export = Section("For other programs", "", [Text([WORDS["export"]])])
    return View(
        title=f"Plan for {plan.model}: {100 * plan.error:g}% error",
        subtitle=f"{plan.model} on {plan.corpus}: relative output error {plan.error:g} per head in {where}",
        verdict=(WORDS["read"].format(**known), _found(plan), " ".join(sentence(line) for line in advice)),
        sections=[*_budgets(plan), *_trial(plan), export],
        trust=plan.notes,
    )


def _found(plan: Plan) -> str:
    """What the cache would shrink to; said plainly where that is nothing."""
    known, total = sorted(head.keys.n for head in plan.heads if head.keys.n is not None), plan.total
    said = WORDS["middle"].format(middle=known[len(known) // 2]) if known else WORDS["out of reach"]
    if total["share"] is not None:
        nothing = WORDS["nothing"] if total["share"] >= NOTHING_SAVED else ""
        return f"{said} {WORDS['kept'].format(**total)}{nothing}."
    return f"{said} {WORDS['endless']}" if plan.context is None else said


def plan_figures(plan: Plan) -> list[Figure]:
    """Keys by layer, and the share of the context they are on a map of layers and heads, where there is a context."""
    widest = 1 + max(head.head for head in plan.heads)
    series = []
    for regime, colour in COLOURS.items():
        own = [head for head in plan.heads if head.regime is regime and head.keys.n is not None]
        if own:
            labels = [f"layer {head.layer}, head {head.head}\n{head.keys.n:,} keys" for head in own]
            across = [head.layer + 0.7 * head.head / widest for head in own]
            series.append(points(regime.value, across, [head.keys.n for head in own], colour, labels=labels))
    guides = [] if plan.context is None else [Guide("whole context", y=plan.context)]
    title = "Keys each head keeps"
    figures = [Figure(title, Axis("layer", whole=True), Axis("keys", log=True), series, guides, height=340)]
    if any(head.ratio is not None for head in plan.heads):
        places, shares = [head.place for head in plan.heads], [head.ratio for head in plan.heads]
        figures.append(head_map("Share of the context that is kept", "share kept", places, shares, height=340))
    return figures


def _heads_table(title: str, heads: Iterable[HeadPlan], shown: int | None = None) -> Table:
    def cells(head: HeadPlan) -> tuple[Cell, ...]:
        keys = ("beyond" if number is None else number for number in (head.keys.n, *head.keys.interval))
        share = "–" if head.ratio is None else f"{head.ratio:.1%}"
        mark = head.mark + (", lower bound" if head.lower_bound else "")
        return head.layer, head.head, *keys, share, mark, head.regime.value, head.rate

    return Table(title, WORDS["columns"], [cells(head) for head in heads], shown=shown)


def _budgets(plan: Plan) -> list[Section]:
    ranked = sorted(plan.heads, key=lambda head: head.needed, reverse=True)
    most = _heads_table("Keys per head, largest first", ranked, 2 * SHOWN)
    lead = "One point a head; 95% intervals are in the table."
    sections = [Section("Keys each head keeps", lead, [Row(plan_figures(plan)), most])]
    if len(ranked) > 2 * SHOWN:
        fewest = _heads_table(f"The {SHOWN} heads that need the fewest keys", ranked[: -SHOWN - 1 : -1])
        sections.append(Section("", "", [fewest], only="terminal"))
    return sections


def _trial(plan: Plan) -> list[Section]:
    if not plan.trials:
        return []
    rows, words = [], WORDS["trial"]
    for setting, ways in plan.trial_summary().items():
        tokens = next(trial.context for trial in plan.trials if trial.setting == setting)
        rows += [
            (f"{WAYS[name]}, {WORDS['settings'][setting]} of {tokens:,}", found["median"], found["low"], found["high"])
            for name, found in ways.items()
        ]
    table = Table(words["table"], words["columns"], rows)
    return [Section(words["title"], words["lead"].format(error=plan.error), [table])]
