"""Report of a KV-cache plan: its size, what each head keeps, and the errors of all key policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from limitlens.attention.policies import POLICIES
from limitlens.cache.budgets import BEST, policy_label
from limitlens.report.view import Block, Cell, Row, Section, Table, View, head_map

if TYPE_CHECKING:
    from limitlens.cache.plan import Plan

NOTHING_SAVED = 0.99  # share of the cache from which on a plan saves nothing


def plan_view(plan: Plan) -> View:
    """Report of the plan: cache size, maps of shares and policies over heads, and errors of all key policies."""
    total, full = plan.total, plan.by_kind.get("full")
    goal = f"{100 * plan.error:g}% error" if plan.error is not None else f"{total.share:.1%} of the cache"
    if plan.error is None and full is not None and len(plan.by_kind) > 1:
        goal += f" ({full.share:.1%} of its full layers)"
    kept = (
        f"KV entries: {total.entries:,} of {total.entries_without_plan:,} ({total.share:.1%}) over "
        f"{total.key_value_heads} key/value heads, {total.bytes / 1e6:.1f} of "
        f"{plan.size(plan.own_cache).bytes / 1e6:.1f} MB."
    )
    if full is None:
        kept += " Nothing is saved: every layer has a sliding window shorter than the context."
    elif full.share > NOTHING_SAVED:
        kept += " Nothing is saved: allow a larger error."
    if plan.recall is not None:
        kept += f" {plan.recall.sentence}"
    if any(POLICIES[name].needs_repeat for row in plan.policies for name in row):
        kept += " The policy reconstruction reads each prompt twice before the cut."
    trust = [
        "Errors are those of single heads in an otherwise unchanged model; limitlens trial measures their joint "
        "effect on predictions.",
        "Budgets between measured sizes are interpolated linearly, which gives too many keys for convex curves.",
    ]
    if plan.probed:
        trust.append("The curve of random keys comes from a probe, whose tokens are pooled over many windows.")
    if "sliding" in plan.layer_kinds:
        trust.append(
            "Layers with a sliding window shorter than the context are left as they are: all the tokens that they "
            "cache stay, and count in shares of the cache. Errors are those of the other layers."
        )
    return View(
        title=f"KV-cache plan for {plan.model}: {goal}",
        subtitle=f"{plan.model} on {plan.corpus}: {goal} after a context of {plan.context:,} tokens",
        verdict=(
            f"This plan cuts the KV cache of {plan.model} to {goal} after a context of {plan.context:,} tokens.",
            kept,
            "Run limitlens trial on the saved plan to measure the model with it, and its recall with --tasks.",
        ),
        sections=[_heads(plan), *_errors(plan)], warnings=plan.warnings, trust=trust,
    )  # fmt: skip


def _heads(plan: Plan) -> Section:
    """Section on what each head keeps: cache by kind of layer, heads by policy, maps of shares and policies."""
    heads, kinds = plan.table, (plan.by_kind if len(plan.by_kind) > 1 else {}) | {"all": plan.total}
    places = list(zip(heads["layer"].tolist(), heads["kv_head"].tolist(), strict=True))
    used = sorted(heads.groupby("policy"), key=lambda pair: -len(pair[1]))
    names = [str(name) for name, _ in used]
    blocks: list[Block] = [
        Table("Cache by kind of layer", ("layers", "entries kept", "entries without a plan", "share", "MB kept"),
              [(kind, f"{one.entries:,}", f"{one.entries_without_plan:,}", f"{one.share:.1%}",
                f"{one.bytes / 1e6:.1f}") for kind, one in kinds.items()]),
        Table("Key policies of the heads", ("key policy", "heads", "entries kept, mean", "share, mean", "keeps"),
              [(name, len(own), f"{own['budget'].mean():.0f}", f"{own['share'].mean():.1%}", policy_label(name))
               for name, (_, own) in zip(names, used, strict=True)]),
        Row([head_map("Share of its cache kept by each key/value head", "share kept", places, heads["share"].tolist(),
                      height=420),
             head_map("Key policy of each key/value head", "key policy", places,
                      [names.index(name) for name in heads["policy"]], words=names, height=420)]),
    ]  # fmt: skip
    if plan.recall is not None and plan.recall.prompts:
        fits = zip(["for text", *(f"refit {k}" for k in range(1, len(plan.recall.kl)))], plan.recall.kl,
                   plan.recall.text_cost, strict=True)  # fmt: skip
        blocks.append(Table("Recall beside text, nats a token", ("budgets", "recall: KL of answers", "text: cost"),
                            list(fits)))  # fmt: skip
    lead = (
        f"The cache is cut once, after {plan.context:,} tokens. Each key/value head keeps its own number of entries, "
        "chosen by its own key policy. A saved plan holds kv_budgets.json for other programs."
    )
    return Section("What each head keeps", lead, blocks)


def _errors(plan: Plan) -> list[Section]:
    """Section on the output error of each key policy for the whole model; none if no policy was measured."""
    aimed = plan.error is not None
    rows: list[tuple[Cell, ...]] = [
        ("plan" if one.policy == BEST else one.policy, f"{one.share:.1%}", one.error, one.error_high,
         *([f"{one.within:.0%}"] if aimed else []), policy_label(one.policy)) for one in plan.totals]  # fmt: skip
    columns = ("key policy", "share of cache", "error, median head", "90% of heads below",
               *(["heads within target"] if aimed else []), "keeps")  # fmt: skip
    lead = (
        f"Curves come from {plan.fitted} windows of the text and errors from {plan.checked} others. An oracle uses the "
        "scores of later queries and is never chosen."
    )
    table = Table("The whole model under each policy", columns, rows)
    return [Section("Cost of each key policy", lead, [table])] if rows else []
