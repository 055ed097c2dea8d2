"""The command line: contract, exit codes, one sentence per mistake."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from command_line import run

SMALL = ["--sizes", "50:800:4", "--replicates", "20"]


def test_study_prints_the_document_of_the_contract(capsys):
    code, out, err = run(capsys, "study", "--horizon", 0.5, *SMALL, "--radius", 2, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["n"][0] == 50
    assert document["n"][-1] == 800
    for name in ("mean", "covariance", "output", "uniform"):
        assert len(document["errors"][name]["value"]) == len(document["errors"][name]["stderr"]) == 4
        rate = document["rates"][name]
        assert rate["slope"] > 0
        assert rate["interval"][0] < rate["slope"] < rate["interval"][1]
        assert rate["law"] in ("power", "log")
    theory = document["theory"]
    assert theory["horizon"] == pytest.approx(0.5)
    assert theory["coupling"] == pytest.approx(0.25)
    assert {"horizon_one_sided", "rate_sharp", "rate_sharp_output", "rate_proved", "rate_drawn"} <= set(theory)
    assert document["replicates"] == [20] * 4
    assert document["queries"] >= 2
    assert {"seconds", "warnings"} <= set(document)


def test_study_leaves_a_folder_that_says_what_made_it(capsys, tmp_path):
    code, out, _ = run(capsys, "study", *SMALL, "--seed", 5, "--out", tmp_path / "run", "--plot")
    assert code == 0
    assert "Rates" in out
    made = json.loads((tmp_path / "run" / "run.json").read_text())
    assert made["command"] == "study"
    assert made["seed"] == made["arguments"]["seed"] == 5
    assert made["versions"]["torch"]
    assert made["result"]["n"][-1] == 800
    table = pd.read_parquet(tmp_path / "run" / "curve.parquet")
    assert len(table) == 16
    assert len(pd.read_csv(tmp_path / "run" / "curve.csv")) == 16
    assert {"study.png", "study.pdf", "replicates.parquet"} <= {p.name for p in (tmp_path / "run").iterdir()}


def test_sweeps_of_horizon_and_radius(capsys, tmp_path):
    code, out, _ = run(capsys, "study", "--horizons", "0.3:2:2", *SMALL, "--json")
    assert code == 0
    document = json.loads(out)
    assert [study["theory"]["horizon"] for study in document["studies"]] == pytest.approx([0.3, 2])
    arguments = ("--measure", "cube", "--dim", 4, "--radius", "1:2:3", *SMALL)
    code, out, _ = run(capsys, "study", *arguments, "--out", tmp_path, "--plot")
    assert code == 0
    assert "growth" in out
    assert (tmp_path / "constants.csv").exists()
    code, out, _ = run(capsys, "study", *arguments, "--json")
    assert json.loads(out)["growth"]["uniform"]["law"] in ("exponential", "polynomial")


def test_tokens_from_a_file(capsys, tmp_path):
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).normal(size=(900, 2)))
    code, out, _ = run(capsys, "study", "--sample", tmp_path / "tokens.npy", *SMALL, "--json")
    assert code == 0
    assert "Sample" in json.loads(out)["measure"]


def bad_files(folder):
    rng = np.random.default_rng(0)
    (folder / "empty.npy").write_bytes(b"")
    (folder / "text.npy").write_text("not numbers")
    np.save(folder / "nan.npy", np.array([[1.0], [np.nan]] * 500))
    np.save(folder / "inf.npy", np.array([[1.0], [np.inf]] * 500))
    np.save(folder / "flat.npy", rng.normal(size=900))
    np.save(folder / "none.npy", np.zeros((0, 3)))
    np.save(folder / "words.npy", np.array([["a"], ["b"]]))
    np.save(folder / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.savez(folder / "two.npz", a=np.zeros((3, 1)), b=np.zeros((3, 1)))
    np.save(folder / "short.npy", rng.normal(size=(100, 2)))
    (folder / "file").write_text("")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--replicates", "0"],
        ["--replicates", "many"],
        ["--horizon", "-1"],
        ["--horizon", "nan"],
        ["--sizes", "10:100"],
        ["--sizes", "30:10:4"],
        ["--sizes", "0:10:4"],
        ["--sizes", ""],
        ["--dim", "0"],
        ["--measure", "gauss"],
        ["--spectrum", "steep"],
        ["--dim", "3", "--spectrum", "1,2"],
        ["--queries", "0"],
        ["--radius", "-2"],
        ["--radius", "1:3:3"],
        ["--device", "tpu"],
        ["--seed", "-4"],
        ["--measure", "vmf", "--dim", "3", "--concentration", "-1"],
        ["--horizons", "1:2:2", "--radius", "1:2:2"],
        ["--nonsense"],
        ["--sample", "missing.npy"],
        *(
            ["--sample", f"{name}.{kind}"]
            for name, kind in (
                ("empty", "npy"), ("text", "npy"), ("nan", "npy"), ("inf", "npy"), ("flat", "npy"), ("none", "npy"),
                ("words", "npy"), ("pickle", "npy"), ("two", "npz"), ("short", "npy"),
            )
        ),
        ["--out", "file"],
        ["--out", "file/below"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_two(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    bad_files(tmp_path)
    given = arguments if "--sizes" in arguments else [*arguments, "--sizes", "50:800:4"]
    given = given if "--replicates" in given else [*given, "--replicates", "3"]
    code, out, err = run(capsys, "study", *given)
    assert code == 2
    assert out == ""
    assert err.startswith("limitlens: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_unknown_commands_and_versions(capsys):
    code, _, err = run(capsys, "stdy")
    assert code == 2
    assert "stdy" in err
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("limitlens ")
    code, out, _ = run(capsys)
    assert code == 0
    assert "study" in out
    code, out, _ = run(capsys, "study", "--help")
    assert code == 0
    assert "Example" in out


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, limitlens, limitlens.cli; print([m for m in ('torch','scipy','pandas') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_interrupt_ends_with_130(capsys, monkeypatch):
    from limitlens.experiments import study as study_module

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(study_module, "choose_queries", interrupted)
    code, out, err = run(capsys, "study", *SMALL)
    assert (code, out) == (130, "")
    assert err == "limitlens: interrupted\n"


def test_doctor_says_what_is_at_hand(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["versions"]["torch"]
    assert {"minilm", "smollm2"} <= {model["name"] for model in document["models"]}
    assert "stdlib-docs" in document["corpora"]
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "stdlib-docs" in out
