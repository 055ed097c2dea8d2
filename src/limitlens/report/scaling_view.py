"""The pages of scaling limits: the three regimes, temperature schedules, the backward heat flow, real keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from limitlens.report.parts import Figures, View, falling, line, log_axis, points, section, short, table
from limitlens.report.scaling_words import QUANTITIES, SIDES
from limitlens.theory.scaling import PoissonPoints, participation

FATE = {
    "averaging": "many keys share the mass, and the output is an average",
    "selective": "a handful of keys shares the mass",
    "frozen": "one key holds nearly all of the mass",
}
COLOURS = {"constant": "grey", "log": "orange", "yarn": "green", "critical": "blue"}


def law_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """The three regimes at one n and β, predicted beside measured."""
    inputs, regime = result["inputs"], result["regime"]
    figures = Figures()
    rows = [
        (label, row["predicted"], row.get("exact"), row.get("measured"), row.get("stderr"), row["status"])
        for name, label in QUANTITIES.items()
        if (row := result["quantities"].get(name)) is not None
    ]
    columns = ("expectation of", "scaling limit", "exact at n", "measured", "standard error", "status")
    blocks = [table("expectations", columns, rows)]
    for side, labels in SIDES.items():
        if result[side]["applies"]:
            found = [
                (label, row["predicted"], row.get("measured"), row.get("stderr"), row["status"])
                for name, label in labels.items()
                if (row := result[side].get(name)) is not None
            ]
            blocks.append(
                table(f"{side} side", ("formula", "predicted", "measured", "standard error", "status"), found)
            )
    laws = [(name, row["against"], row["ks"], row["p"]) for name, row in result["laws"].items()]
    shared = result["quantities"]["participation"]["measured"]
    worst = max(
        (abs(row["measured"] - expected) / row["stderr"], label)
        for name, label in QUANTITIES.items()
        if (row := result["quantities"].get(name)) is not None and row.get("stderr")
        for expected in [row.get("exact", row["predicted"])]
    )
    critical_beta, critical_n = (result["control"][key]["predicted"] for key in ("critical_beta", "critical_n"))
    return View(
        title=f"{inputs['law'].capitalize()} keys on the sphere in dimension {inputs['dim']}",
        subtitle=f"n = {inputs['n']:,} keys · β = {short(inputs['beta'])} · θ = {short(inputs['theta'])} · "
        f"{inputs['replicates']:,} "
        "replicates",
        verdict=(
            f"One query attended to {inputs['n']:,} random keys at inverse temperature {short(inputs['beta'])}, "
            f"{inputs['replicates']:,} times over; theory says that everything depends on the effective number of "
            "keys θ, "
            f"here {short(inputs['theta'])}.",
            f"The head is {regime}: {FATE[regime]} ({short(1 / shared)} keys in effect); measured and predicted "
            "differ by at "
            f"most {worst[0]:.1f} standard errors ({worst[1]}).",
            f"At this temperature it stops selecting beyond about {short(critical_n)} keys; with {inputs['n']:,} "
            "keys, β near "
            f"{short(critical_beta)} is the critical scale, and β must grow like "
            f"{falling(-2 / result['local']['exponent'])} to stay "
            "there.",
        ),
        sections=[
            section(
                "Where this head stands",
                "The share of an effective key, E Σw², along the effective number of keys θ: near 1 one key has won, "
                "near 0 "
                "many share. The scaling limit is a line, this run a point.",
                _participation(figures, result),
            ),
            section("Predicted and measured", "Every expectation beside its measurement and its standing.", *blocks),
            section(
                "Whole laws, not only their means",
                "Kolmogorov-Smirnov distances between measured and predicted laws; a small p says they differ.",
                table("laws", ("law of", "against", "distance", "p"), laws),
            ),
        ],
        data={"figures": list(figures)},
        warnings=list(result.get("warnings") or []),
        trust=["Statuses: proved (in the literature), verified (derived here, confirmed by simulation), heuristic."],
    )


def _participation(figures: Figures, result: Mapping[str, Any]) -> str:
    here = math.log(result["inputs"]["theta"])
    fine = [float(v) for v in np.exp(np.linspace(max(min(here - 2, -7.0), -12.0), max(here + 2, 7.0), 45))]
    limit = [participation(PoissonPoints(value, result["local"]["a"])) for value in fine]
    row = result["quantities"]["participation"]
    return figures.place(
        "E Σw² against the effective number of keys",
        log_axis("effective number of keys θ"),
        log_axis("E Σw²", max=1.2),
        [
            line("scaling limit", fine, limit, "grey"),
            points("this run", [result["inputs"]["theta"]], [row["measured"]], "blue", [row["stderr"]]),
        ],
        guides=[{"x": 1.0, "label": "θ = 1: critical"}],
        height=340,
    )


def schedules_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """Temperature schedules side by side as the context grows."""
    figures, predicted = Figures(), result["predicted"]
    sizes = predicted["constant"]["n"]
    places = [
        figures.place(
            label,
            log_axis("context length n"),
            log_axis(label) if log else {"label": label},
            [line(name, steps["n"], steps[field], COLOURS.get(name, "pink")) for name, steps in predicted.items()],
            height=280,
        )
        for field, label, log in (
            ("beta", "inverse temperature β", True),
            ("sharing_keys", "keys that share the mass", True),
            ("entropy", "entropy (nats)", False),
        )
    ]
    rows = [
        (n, *(cell for steps in predicted.values() for cell in (steps["beta"][i], steps["sharing_keys"][i])))
        for i, n in enumerate(sizes)
    ]
    columns = ["n", *(f"{name}: {what}" for name in predicted for what in ("β", "keys"))]
    first, last = sizes[0], sizes[-1]
    ends = {name: steps["sharing_keys"][-1] for name, steps in predicted.items()}
    start = predicted["constant"]["sharing_keys"][0]
    exponent = result["inputs"]["exponent"]
    weak = "β like ln n is too weak here" if ends["log"] > 1.5 * start else "β like ln n nearly does so too"
    return View(
        title="Temperature schedules for a growing context",
        subtitle=f"local exponent {short(exponent)} · from {first:,.0f} to {last:,.0f} keys · predictions are "
        f"{result['status']}",
        verdict=(
            f"Four schedules of the inverse temperature were followed from {first:,.0f} to {last:,.0f} keys, for "
            "keys of local "
            f"exponent {short(exponent)}.",
            f"A head that starts with {short(start)} keys sharing its mass ends with {short(ends['constant'])} at "
            "constant "
            f"temperature, {short(ends['log'])} with β like ln n, {short(ends['yarn'])} with YaRN and "
            f"{short(ends['critical'])} on "
            "the critical schedule.",
            f"To keep its selectivity let β grow like {falling(-2 / exponent)}; {weak}.",
        ),
        sections=[
            section(
                "Schedules side by side",
                "Every quantity along the context length.",
                f'<div class="pair">{"".join(places)}</div>',
            ),
            section("The numbers", "β and the keys that share the mass.", table("schedules", columns, rows)),
        ],
        data={"figures": list(figures)},
        warnings=list(result.get("warnings") or []),
    )


def heat_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """The backward heat flow of a density through layers."""
    figures, inputs, mode, tokens = Figures(), result["inputs"], result["mode_1"], result["tokens"]
    layers = result["path"]["layer"]
    first = [row[0] for row in result["path"]["modes"]]
    growth = math.log(mode["predicted"] / first[0]) / layers[-1]
    every = max(1, len(layers) // 60)
    path = figures.place(
        "The first mode through the layers",
        {"label": "layer"},
        {"label": "amplitude of the first mode"},
        [
            line("backward heat equation", layers, [first[0] * math.exp(growth * k) for k in layers], "orange"),
            points("attention", layers[::every], first[::every], "blue"),
        ],
        height=320,
    )
    ratio = [token["drift_to_noise"] for token in tokens]
    order = sorted(range(len(tokens)), key=lambda i: tokens[i]["beta"])
    noise = figures.place(
        "Can one layer of tokens feel it?",
        log_axis("inverse temperature β"),
        log_axis("drift over noise of a token"),
        [
            line("predicted", [tokens[i]["beta"] for i in order], [ratio[i]["predicted"] for i in order], "grey"),
            points(
                "measured",
                [token["beta"] for token in tokens],
                [row["measured"] for row in ratio],
                "blue",
                [row["stderr"] for row in ratio],
            ),
        ],
        guides=[{"y": 1.0, "label": "drift = noise"}],
        height=320,
    )
    rows = [
        (str(row["degree"]), f"{row['exact']:.8f}", f"{row['predicted']:.8f}", row["status"])
        for row in result["growth_per_layer"]
    ]
    limit = result["visible_until_beta"]["predicted"]
    return View(
        title=f"Backward heat flow on S^{inputs['dim'] - 1}",
        subtitle=f"{inputs['layers']} layers · β = {short(inputs['beta'])} · {inputs['n']:,} tokens",
        verdict=(
            f"A density 1 + {short(inputs['amplitude'])} cos was sent through {inputs['layers']} layers of attention "
            "at "
            f"β = {short(inputs['beta'])}.",
            f"Its first mode grew to {mode['measured']:.4f}, where the backward heat equation says "
            f"{mode['predicted']:.4f}.",
            f"With {inputs['n']:,} tokens the drift of a layer shows above its noise only up to β near "
            f"{short(limit)}: use more "
            "tokens or a smaller β to see it.",
        ),
        sections=[
            section("Through the layers", "Attention makes a density sharper the way heat makes it smoother.", path),
            section(
                "On finitely many tokens",
                "95% bars.",
                noise,
                table("growth per layer", ("degree", "attention", "heat equation", "status"), rows),
            ),
        ],
        data={"figures": list(figures)},
        warnings=list(result.get("warnings") or []),
    )


def keys_view(result: Mapping[str, Any], record: Mapping[str, Any]) -> View:
    """Real keys: local exponent, critical temperature and weights per query."""
    figures, inputs, median, queries = Figures(), result["inputs"], result["median"], result["queries"]
    numbers = list(range(len(queries)))
    regimes = [row["regime"] for row in queries]
    shares = [row["participation"][kind] for row in queries for kind in ("predicted", "measured")]
    span = [min(shares), max(shares)]
    exponents = figures.place(
        "Local exponent around each query",
        {"label": "query", "whole": True},
        {"label": "local exponent α", "min": 0},
        [
            points(
                "measured",
                numbers,
                [row["exponent"]["measured"] for row in queries],
                "blue",
                [row["exponent"]["stderr"] for row in queries],
            )
        ],
        guides=[{"y": median["exponent"], "label": "median"}],
    )
    shared = figures.place(
        "Σw² of each query against its scaling limit",
        log_axis("expected by the scaling limit"),
        log_axis("measured Σw²"),
        [
            points(
                "queries",
                [row["participation"]["predicted"] for row in queries],
                [row["participation"]["measured"] for row in queries],
                "blue",
            ),
            line("equal", span, span, "grey", "dashed"),
        ],
    )
    columns = (
        "query",
        "exponent",
        "± se",
        "critical β",
        "± se",
        "five-key β",
        "β",
        "Σw², limit",
        "Σw², measured",
        "regime",
    )
    rows = [
        (
            i,
            row["exponent"]["measured"],
            row["exponent"]["stderr"],
            row["critical_beta"]["measured"],
            row["critical_beta"]["stderr"],
            (row.get("five_key_beta") or {}).get("measured"),
            row["beta"],
            row["participation"]["predicted"],
            row["participation"]["measured"],
            row["regime"],
        )
        for i, row in enumerate(queries)
    ]
    said = ", ".join(f"{regimes.count(name)} {name}" for name in FATE if name in regimes)
    return View(
        title=f"{len(queries)} queries on {inputs['keys']:,} real keys",
        subtitle=f"{inputs['neighbours']} nearest keys behind each exponent",
        verdict=(
            f"Around each of {len(queries)} queries the {inputs['neighbours']} nearest of {inputs['keys']:,} keys "
            "were used to "
            "measure how keys thin out towards it.",
            f"The local exponent is {short(median['exponent'])} in the median, the critical inverse temperature "
            f"{short(median['critical_beta'])}; queries are {said}.",
            f"To keep these queries selective in a longer context let β grow like {falling(-2 / median['exponent'])}.",
        ),
        sections=[
            section("Exponents", "With 95% bars.", exponents),
            section(
                "Weights",
                "A query on the diagonal does what the limit says; single queries scatter widely.",
                shared,
                table("queries", columns, rows),
            ),
        ],
        data={"figures": list(figures)},
        warnings=list(result.get("warnings") or []),
        trust=["The scaling limit of a real head is a heuristic: it assumes a power law of keys near the query."],
    )
