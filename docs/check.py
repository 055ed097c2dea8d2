"""Compare the documentation with the committed results of the benchmarks and with the tests: `make docs` runs it.

The files bench/results/cache-*.json were measured by version 0.1 and hold its names; `OLD` maps the names of
the docs to them. The script ends with 1 and names the first row that differs.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from limitlens.estimate import Estimate
from limitlens.published.catalogue import Number, catalogue
from limitlens.report.text import cell

ROOT = Path(__file__).parents[1]
CELL = r"[+−]?\d\.\d{4} ± \d\.\d{4}"
OLD = {
    "priority": "mixed",
    "streaming": "sinks",
    "knorm": "norm",
    "random_eviction": "unweighted",
    "oracle_topk": "top",
}
ALLOCATIONS = ("uniform", "equal error", "least cost")
OPTIONS = ("model", "corpus", "tokens", "sizes", "replicates", "documents")  # of `limitlens reproduce`
POLICIES = 9  # policies of the tables, the oracle included


def table(text: str, heading: str) -> list[tuple[Any, ...]]:
    """Matches of a table whose heading matches `heading`: its groups, then its rows as one string."""
    return re.findall(rf"^\| {heading}.*\n\| ---.*\n((?:\|.*\n)+)", text, re.M)


def expect(found: Any, expected: Any, where: str) -> None:
    """End with 1 where the documentation shows other numbers than the results."""
    if found != expected:
        sys.exit(f"docs: {where} shows {found}, the results say {expected}")


def check_cache_tables() -> None:
    """Every cell of the tables of docs/results/cache.md."""
    text = (ROOT / "docs/results/cache.md").read_text()
    files = {n: json.loads((ROOT / f"bench/results/cache-{n}.json").read_text()) for n in (1024, 4096)}
    trials = {(n, round(100 * trial["share"]), trial["corpus"]): trial for n in files for trial in files[n]["trials"]}
    texts = [trial["corpus"] for trial in files[1024]["trials"][:2]]

    def cell(where: tuple[int, int, str], policy: str, allocation: str, quantity: str, form: str) -> str:
        rows = trials[where]["settings"]
        policy = OLD.get(policy, policy)
        (one,) = (row[quantity] for row in rows if (row["choice"], row["allocation"]) == (policy, allocation))
        return f"{one['measured']:{form}} ± {one['stderr']:.4f}".replace("-", "−")

    tables = table(text, r"(\d+)% of ([\d,]+) tokens ")
    sizes = [(share, n) for n in ("1,024", "4,096") for share in ("25", "50")]
    expect([found[:2] for found in tables], sizes, "docs/results/cache.md")
    for share, context, rows in tables:
        expect(len(rows.splitlines()), 1 + POLICIES, f"the number of rows for {share}% of {context}")
        for row in rows.splitlines():
            name = re.search(r"`(\w+)`", row)
            where = [(int(context.replace(",", "")), int(share), corpus) for corpus in texts]
            policy, kinds = (name[1], ALLOCATIONS) if name else ("best", ("plan",))
            expected = [cell(one, policy, kind, "divergence", ".4f") for one in where for kind in kinds]
            expect(re.findall(CELL, row), expected, row)
    (rows,) = table(text, "Fisher-weighted − equal error ")
    for row in rows.splitlines():
        policy = re.findall(r"`(\w+)`", row)[0]
        places = [(n, share, corpus) for n in files for share in (25, 50) for corpus in texts]
        expect(re.findall(CELL, row), [cell(p, policy, "least cost", "against_equal", "+.4f") for p in places], row)
    (rows,) = table(text, "share of the cache for an error of ")
    for row in rows.splitlines():
        policy = (re.findall(r"`(\w+)`", row) or ["best"])[0]
        plans = [files[n]["plans"][f"error {error}"] for n in files for error in ("0.05", "0.1", "0.2")]
        shares = [f"{one['share']:.1%}" for plan in plans for one in plan if one["choice"] == OLD.get(policy, policy)]
        expect(re.findall(r"\d+\.\d%", row), shares, row)


def claim_rows() -> list[str]:
    """Rows of the table of docs/reproduction.md for every experiment saved in bench/results, in the order of files.

    One row for each claim with a published number or bound: experiment, claim with its place, model and size of the
    run, number, published value, verdict and command.
    """
    rows = []
    for path in sorted((ROOT / "bench/results").glob("*.json")):
        result = json.loads(path.read_text())
        about = catalogue().get(result.get("name"))
        if about is None:
            continue
        ran = replace(about, full={**about.full, **result["parameters"]})
        setting, name = f"{ran.model}; {ran.size}", result["name"]
        changed = [key for key in OPTIONS if ran.full.get(key) != about.full.get(key)]
        given = [f" --{key} {ran.full[key]}" for key in changed]
        command = f"`limitlens reproduce {name}{''.join(given)}`"
        for key, number in result["numbers"].items():
            claim = about.claims[key]
            value = Estimate.of(number["value"], number["stderr"])
            published, verdict = claim.verdict(Number(value, number["published"]))
            if published is None:
                continue
            test = "" if claim.test == "equal" else f"{claim.test} "
            shown = (f"`{name}`", f"{claim.says} ({claim.where})", setting, cell(value), f"{test}{cell(published)}")
            rows.append(f"| {' | '.join(part.replace('|', '&#124;') for part in (*shown, verdict, command))} |")
            setting, command = "same", "same"
    return rows


def check_claims() -> None:
    """The table of docs/reproduction.md names every experiment, and has the rows of saved results as they are."""
    text = (ROOT / "docs/reproduction.md").read_text()
    ((rows,),) = [found if isinstance(found, tuple) else (found,) for found in table(text, "experiment ")]
    named = re.findall(r"^\| `([\w-]+)` ", rows, re.M)
    expect(sorted(set(named)), sorted(catalogue()), "the table of all claims")
    missing = [row for row in claim_rows() if row not in rows.splitlines()]
    expect(missing, [], "docs/reproduction.md lacks rows that `python docs/check.py rows` prints: it")


def layer_ranges(layers: list[int]) -> str:
    """Layers as ranges, such as "0 to 3, 5"."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def tail_rows() -> list[str]:
    """Rows of the table of tails in docs/theory.md, one for each model of bench/results/tails.json."""
    rows = []
    for name, model in json.loads((ROOT / "bench/results/tails.json").read_text())["models"].items():
        layers = model["layers"]
        of = {verdict: [one["layer"] for one in layers if one["verdict"] == verdict] for verdict in model["verdicts"]}
        verdicts = "; ".join(f"{verdict}: {layer_ranges(of[verdict])}" for verdict in sorted(of))

        def spread(field: str, form: str, layers: list[dict[str, Any]] = layers) -> str:
            known = [one[field] for one in layers if one[field] is not None]
            if not known:
                return "none"
            low, middle, high = (f"{number:{form}}" for number in (min(known), statistics.median(known), max(known)))
            return f"{low}, {middle}, {high}".replace("-", "−")

        numbers = [spread("variance_proxy", ".2f"), spread("pareto_shape", ".2f"), spread("coupling_median", ".3g")]
        numbers += [spread(f"rate_proved_by_{of}", ".1g") for of in ("covariance", "proxy")]
        rows.append(f"| `{name}` | {model['tokens']:,} | {verdicts} | {' | '.join(numbers)} |")
    return rows


def check_tail_table() -> None:
    """The table of the tails of real layers in docs/theory.md."""
    (rows,) = table((ROOT / "docs/theory.md").read_text(), r"model \| tokens \| verdict")
    expect(rows.splitlines(), tail_rows(), "the table of tails in docs/theory.md")


def certify_rows() -> list[str]:
    """Rows of the table of certified reads, as bench/results/certify.json gives them."""
    results = json.loads((ROOT / "bench/results/certify.json").read_text())["rows"]
    rows = []
    for name, one in results.items():
        for rule, found in one["rules"].items() if isinstance(one, dict) else ():
            numbers = [f"{found[key]:.1%}" for key in ("read", "read_median", "bytes", "bytes_shared")]
            numbers += [f"{found['held']:.3f}", f"{found['held_quantiles'][0]:.2f}", f"{found['held_rms']:.3f}"]
            numbers += [f"{found['whole']:.1%}", str(found["rejected"]), "yes" if found["keeps"] else "no"]
            rows.append(f"| {name} | `{rule}` | {' | '.join(numbers)} |")
    return rows


def check_certify_table() -> None:
    """The table of measured reads in docs/certify.md."""
    (rows,) = table((ROOT / "docs/certify.md").read_text(), r"model, context, ε, δ \| rule")
    expect(rows.splitlines(), certify_rows(), "the table of reads in docs/certify.md")


RECALL = {
    "full": "whole cache",
    "reconstruction:both": "plan for text and recall, `reconstruction`",
    "reconstruction:text": "plan for text (directional costs), `reconstruction`",
    "reconstruction:fisher": "plan for text (Fisher), `reconstruction`",
    "kvzip": "`kvzip`: one threshold for all heads",
    "expected:both": "plan for text and recall, `expected` (no second pass)",
    "expected:text": "plan for text (directional costs), `expected`",
    "expected:fisher": "plan for text (Fisher), `expected`",
    "duo": "`duo`: whole heads and windows",
    "adakv": "`adakv`: `snapkv` scores shared in the layer",
    "reconstruction, uniform": "`reconstruction`, equal budgets",
    "expected, uniform": "`expected`, equal budgets",
    "snapkv, uniform": "`snapkv`, equal budgets",
    "streaming, uniform": "`streaming`, equal budgets",
    "knorm, uniform": "`knorm`, equal budgets",
}


def recall_rows(name: str) -> list[str]:
    """Rows of a table of docs/results/recall.md from bench/results/NAME.json: KL on text, accuracy and KL of recall."""
    tasks = json.loads((ROOT / f"bench/results/{name}.json").read_text())["tasks"]
    methods = tasks["text"]["methods"]
    rows = []
    for key, label in [*RECALL.items(), *((key, f"{key} (its own code)") for key in methods if "Press" in key)]:
        if key not in methods:
            continue
        cells = [f"{methods[key]['kl'][0]:.4f} ± {methods[key]['kl'][1]:.4f}"]
        for task in ("needle1", "needle8"):
            found = tasks[task]["methods"].get(key)
            cells.append("–" if found is None else f"{found['accuracy'][0]:.2f} ± {found['accuracy'][1]:.2f} "
                         f"({found['kl'][0]:.3f} ± {found['kl'][1]:.3f})")  # fmt: skip
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


QWEN = {
    "full": "whole cache",
    "best:both": "plan for text and recall, best policy of each head",
    "best:strong": "the same, recall weighted tenfold",
    "best:text": "plan for text, best policy of each head",
    "reconstruction:both": "plan for text and recall, `reconstruction`",
    "reconstruction:strong": "the same, recall weighted tenfold",
    "reconstruction:text": "plan for text, `reconstruction`",
    "reconstruction:fisher": "plan for text (Fisher), `reconstruction`",
    "follow:reconstruction:both": "plan for text and recall, `reconstruction`, divided by the prompt",
    "expected:both": "plan for text and recall, `expected` (no second pass)",
    "expected:strong": "the same, recall weighted tenfold",
    "expected:text": "plan for text, `expected`",
    "scaled:best:both": "shares of the plan for 4,096, best policy of each head",
    "scaled:best:strong": "the same, recall weighted tenfold",
    "scaled:reconstruction:both": "shares of the plan for 4,096, `reconstruction`",
    "scaled:reconstruction:strong": "the same, recall weighted tenfold",
    "scaled:expected:both": "shares of the plan for 4,096, `expected`",
    "kvzip": "`kvzip`: one threshold for all heads",
    "duo": "`duo`: whole heads and windows",
    "adakv": "`adakv`: `snapkv` scores shared in the layer",
    "reconstruction:uniform": "`reconstruction`, equal budgets",
    "expected:uniform": "`expected`, equal budgets",
    "snapkv:uniform": "`snapkv`, equal budgets",
    "streaming:uniform": "`streaming`, equal budgets",
}
QWEN_TASKS = {"4096": ("needle8", "needle1", "hop", "repeat", "words"), "16384": ("needle8", "needle1", "hop")}


def qwen_rows(context: str, share: str) -> list[str]:
    """Rows of a table of docs/results/recall.md on qwen: KL on text, accuracy and KL on needle8, other accuracies."""
    tasks = json.loads((ROOT / "bench/results/recall-qwen.json").read_text())[context]["tasks"]
    rows = []
    for key, label in QWEN.items():
        name = key if key == "full" else f"{key}:{share}"
        if name not in tasks["text"]["methods"]:
            continue
        cells = ["{:.4f} ± {:.4f}".format(*tasks["text"]["methods"][name]["kl"])]
        for task in QWEN_TASKS[context]:
            found = tasks.get(task, {"methods": {}})["methods"].get(name)
            kl = "" if task != "needle8" or found is None else " ({:.3f} ± {:.3f})".format(*found["kl"])
            cells.append("–" if found is None else "{:.3f} ± {:.3f}".format(*found["accuracy"]) + kl)
        rows.append(f"| {label} | {' | '.join(cells)} |")
    return rows


def check_recall_tables() -> None:
    """The tables of docs/results/recall.md, one for each model, context and share of the cache."""
    text = (ROOT / "docs/results/recall.md").read_text()
    for name, share in (("recall", "25"), ("recall-0.5", "50"), ("recall-0.125", "12.5")):
        for rows in table(text, rf"{re.escape(share)}% of 512 tokens "):
            expect(rows.splitlines(), recall_rows(name), f"the table of {share}% in docs/results/recall.md")
    for context, share in (("4096", "0.25"), ("4096", "0.125"), ("16384", "0.25")):
        for rows in table(text, rf"{100 * float(share):g}% of {int(context):,} tokens "):
            expect(rows.splitlines(), qwen_rows(context, share), f"the table of {context} in docs/results/recall.md")


def check_test_names() -> None:
    """Every test that docs/theory.md names exists."""
    named = set(re.findall(r"`\w+::(test_\w+)`", (ROOT / "docs/theory.md").read_text()))
    found = {name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    expect(sorted(named - found), [], "docs/theory.md names tests that do not exist: it")


if __name__ == "__main__":
    if sys.argv[1:] == ["certify"]:
        print("\n".join(certify_rows()))
        sys.exit()
    if sys.argv[1:2] == ["rows"]:
        given = sys.argv[2:]
        print("\n".join(qwen_rows(*given) if len(given) == 2 else recall_rows(*given) if given else claim_rows()))
        sys.exit()
    check_cache_tables()
    check_claims()
    check_tail_table()
    check_recall_tables()
    check_certify_table()
    check_test_names()
