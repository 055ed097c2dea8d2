"""The command line: JSON documents, exit codes, and one error sentence for each kind of bad input."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from command_line import run
from limitlens.cli import app, common, other
from limitlens.cli.threads import default_threads, limited_threads
from limitlens.sampling.checkpoint import Checkpoint

SMALL = ["--sizes", "50:800:4", "--replicates", "20"]
SMALL_CALLS = {
    "hardmax": SMALL, "tails": SMALL, "scaling": ("--replicates", "20"), "heat-flow": ("--layers", "4", "--n", "200"),
}  # fmt: skip


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


def test_a_study_folder_records_its_command(capsys, tmp_path):
    code, out, _ = run(capsys, "study", *SMALL, "--seed", 5, "--out", tmp_path / "run", "--plot")
    assert code == 0
    assert "Rates" in out
    made = json.loads((tmp_path / "run" / "run.json").read_text())
    assert made["command"] == "study"
    assert made["typed"].startswith("limitlens study --")
    assert made["typed"].endswith(" --plot")
    assert made["seed"] == made["arguments"]["seed"] == 5
    assert made["versions"]["torch"]
    assert made["result"]["n"][-1] == 800
    table = pd.read_parquet(tmp_path / "run" / "curve.parquet")
    assert len(table) == 12
    assert len(pd.read_csv(tmp_path / "run" / "curve.csv")) == 12
    assert {"study.png", "study.pdf"} <= {p.name for p in (tmp_path / "run").iterdir()}


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


def test_help_lists_every_command_in_a_panel(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    panels = {"Laws of tokens", "Models", "KV cache", "Long context", "Lab", "Other"}
    assert panels <= {line.removesuffix(":") for line in out.splitlines() if line.endswith(":")}
    shown = {line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.strip()}
    assert {command.name for command in app.registered_commands} <= shown


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.name)
def test_help_of_a_command_has_an_example_and_the_shared_options(capsys, command):
    code, out, _ = run(capsys, command.name, "--help")
    assert code == 0
    assert f"Example: limitlens {command.name}" in " ".join(out.split())
    for option in ("--threads", "--seed", "--device"):
        assert (option in out) == (command.name not in ("compare", "report", "doctor"))


@pytest.mark.parametrize("command", ["theory", "hardmax", "tails", "scaling", "schedules", "heat-flow"])
def test_a_command_that_computes_on_the_cpu_only_accepts_a_device_and_says_so(capsys, command):
    code, _, err = run(capsys, command, "--device", "cuda", "--seed", 3, *SMALL_CALLS.get(command, ()), "--json")
    assert code == 0
    assert f"warning: --device cuda was ignored: {command} computes on the CPU only\n" in err


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, limitlens, limitlens.cli; print([m for m in ('torch','scipy','pandas') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_interrupt_ends_with_130(capsys, monkeypatch):
    from limitlens.experiments import study_pass

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(study_pass, "choose_queries", interrupted)
    code, out, err = run(capsys, "study", *SMALL)
    assert (code, out) == (130, "")
    assert err == "limitlens: interrupted\n"


def test_doctor_lists_the_installed_parts(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["versions"]["torch"]
    assert {"minilm", "smollm2"} <= {model["name"] for model in document["models"]}
    assert "stdlib-docs" in document["corpora"]
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "stdlib-docs" in out


def test_doctor_names_what_is_missing_and_how_to_get_it(capsys, monkeypatch):
    found = other.installed(other.NEEDED)
    monkeypatch.setattr(other, "installed", lambda packages: found)
    document = json.loads(run(capsys, "doctor", "--json")[1])
    missing = {one["missing"]: one for one in document["missing"]}
    assert set(other.OPTIONAL) <= set(missing)
    assert missing["gguf"] == {"missing": "gguf", "needed for": other.OPTIONAL["gguf"], "install": "pip install gguf"}
    assert "torch" not in missing
    out = run(capsys, "doctor")[1]
    assert out.index("Missing") < out.index("pip install datasets") < out.index("Packages")


def test_progress_names_its_unit_and_never_stands_at_its_end():
    assert common.progress_text("windows", 3, 12) == "window 3 of 12"
    assert common.progress_text("tokens", 12_288, 100_000) == "token 12,288 of 100,000"
    assert common.progress_text("windows", 12, 12) == "window 12 of 12, finishing"


def test_a_progress_bar_is_drawn_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with common.progress("probing", quiet=False, unit="windows") as report:
        report(3, 12)
        report(12, 12)
    assert "probing: window 12 of 12, finishing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cores", "load", "expected"),
    [(2, 0.4, None), (2, 1.0, None), (2, 1.2, 1), (2, 7.0, 1), (8, 7.4, 1), (8, 3.0, None)],
)
def test_a_busy_machine_gets_fewer_threads(monkeypatch, cores, load, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    assert default_threads() == expected


def test_the_users_number_of_threads_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0), raising=False)
    assert default_threads() is None


def test_threads_are_set_recorded_and_given_back(capsys, tmp_path):
    import torch

    before = torch.get_num_threads()
    code, _, _ = run(capsys, "study", *SMALL, "--threads", 3, "--out", tmp_path / "run")
    assert code == 0
    made = json.loads((tmp_path / "run" / "run.json").read_text())
    assert made["host"]["threads"] == made["arguments"]["threads"] == 3
    assert torch.get_num_threads() == before


def test_a_run_is_resumed_with_another_number_of_threads(tmp_path):
    made = []

    def make(k):
        if k == 2 and len(made) == 2:
            raise KeyboardInterrupt
        made.append(k)
        return {"value": np.array([k])}

    with limited_threads(1), pytest.raises(KeyboardInterrupt):
        Checkpoint(tmp_path, 1).each({"job": "count"}, 4, make)
    made.append("resumed")
    with limited_threads(2):
        rows = Checkpoint(tmp_path, 1, resume=True).each({"job": "count"}, 4, make)
    assert made == [0, 1, "resumed", 2, 3]
    assert rows["value"].tolist() == [[0], [1], [2], [3]]


def test_more_threads_than_a_machine_can_have_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "theory", "--n", "100", "--threads", "10000000000000000")
    assert code == 2
    assert "less than or equal to 1024" in err
