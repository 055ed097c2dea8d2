"""The pages that `limitlens scaling` prints for people, one per kind of document."""

from __future__ import annotations

from typing import Any

from limitlens.cli.common import print_table
from limitlens.report.scaling_words import QUANTITIES, SIDES, TERSE

CONTROL = {"theta": "θ", "critical_beta": "critical β for this n", "critical_n": "critical n for this β"}


def print_law(document: dict[str, Any]) -> None:
    """The three regimes at one n and β: control parameters, expectations, laws, and the side that applies."""
    inputs, control = document["inputs"], document["control"]
    print(
        f"{inputs['law']} keys, dim {inputs['dim']}, local exponent {document['local']['exponent']:g}: "
        f"n = {inputs['n']:,}, β = {inputs['beta']:.6g}, θ = {inputs['theta']:.4g}, {document['regime']}"
    )
    rows = [
        [label, _number(control[name]["predicted"]), _number(control[name]["asymptotic"])]
        for name, label in CONTROL.items()
    ]
    print_table("Control parameters", ["", "exact", "asymptotic"], rows)
    rows = [
        [TERSE.get(name, label), _number(row["predicted"]), _number(row.get("exact")), _measured(row)]
        for name, label in QUANTITIES.items()
        if (row := document["quantities"].get(name)) is not None
    ]
    title = f"Expectations ({inputs['replicates']:,} replicates, {document['method']})"
    print_table(title, ["", "limit", "exact at n", "measured"], rows)
    for side, labels in SIDES.items():
        if document[side]["applies"]:
            rows = [
                [TERSE.get(name, label), _number(row["predicted"]), _measured(row), row["status"]]
                for name, label in labels.items()
                if (row := document[side].get(name)) is not None
            ]
            print_table(f"Formulas of the {side} side", ["", "predicted", "measured", "status"], rows)
    if ambient := document.get("ambient"):
        shared, effective = ambient["participation"], ambient["theta"]["predicted"]
        print(
            f"at the critical β of the ambient sphere, {ambient['beta']:.4g}: θ = {_number(effective)}, "
            f"E Σw² = {_number(shared['predicted'])} (measured {_measured(shared)})"
        )
    rows = [[name, row["against"], f"{row['ks']:.4f}", f"{row['p']:.3g}"] for name, row in document["laws"].items()]
    print_table("Laws (Kolmogorov-Smirnov)", ["measured law of", "against", "distance", "p"], rows)


def print_heat(document: dict[str, Any]) -> None:
    """The backward heat flow: the first mode, growth per layer, tokens."""
    inputs, mode = document["inputs"], document["mode_1"]
    print(
        f"density 1 + {inputs['amplitude']:g} cos on S^{inputs['dim'] - 1}, {inputs['layers']} layers at "
        f"β = {inputs['beta']:g}: its first mode grows to {mode['measured']:.6f} "
        f"(backward heat at t = {document['time']:g}: {mode['predicted']:.6f})"
    )
    variance = document["gaussian_variance"]
    print(f"N(0, 1) in R: variance {variance['measured']:.6f} (backward heat: {variance['predicted']:.6f})")
    rows = [
        [str(row["degree"]), f"{row['exact']:.8f}", f"{row['predicted']:.8f}"] for row in document["growth_per_layer"]
    ]
    print_table("Growth of a small mode per layer", ["degree", "attention", "heat equation"], rows)
    rows = [
        [f"{token['beta']:.4g}", *(_measured(token[name]) for name in ("drift_slope", "noise", "drift_to_noise"))]
        for token in document["tokens"]
    ]
    limit = document["visible_until_beta"]["predicted"]
    title = f"One layer on {inputs['n']:,} tokens: the drift beats the noise up to β = {limit:.4g}"
    print_table(title, ["β", "drift over predicted", "noise", "drift over noise"], rows)


def print_schedules(document: dict[str, Any]) -> None:
    """Schedules side by side, one row per context length."""
    print(f"local exponent {document['inputs']['exponent']:.3g}; predictions are {document['status']}")
    for name, label in (
        ("beta", "β"),
        ("theta", "θ"),
        ("sharing_keys", "keys sharing the mass"),
        ("entropy", "entropy"),
    ):
        predicted = document["predicted"]
        rows = [
            [f"{n:,.0f}", *(_number(columns[name][row]) for columns in predicted.values())]
            for row, n in enumerate(predicted["constant"]["n"])
        ]
        print_table(label, ["n", *predicted], rows)


def print_keys(document: dict[str, Any]) -> None:
    """Real keys: exponent, critical β and weights per query."""
    inputs, median = document["inputs"], document["median"]
    print(
        f"{inputs['keys']:,} keys, {inputs['neighbours']} nearest: median local exponent {median['exponent']:.3g}, "
        f"median critical β {median['critical_beta']:.4g}"
    )
    rows = [
        [
            str(index), _measured(row["exponent"]), _measured(row["critical_beta"]),
            _measured(row["five_key_beta"]), _number(row["beta"]),
            _number(row["theta"]["predicted"]), _number(row["participation"]["predicted"]),
            _number(row["participation"]["measured"]), row["regime"],
        ]
        for index, row in enumerate(document["queries"])
    ]  # fmt: skip
    print_table(
        "Queries", ["", "exponent", "critical β", "five-key β", "β", "θ", "E Σw² (limit)", "Σw²", "regime"], rows
    )


def _measured(row: dict[str, Any]) -> str:
    if row.get("measured") is None:
        return "–"
    if row.get("stderr") is None:
        return _number(row["measured"])
    return f"{_number(row['measured'])} ± {row['stderr']:.1g}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"
