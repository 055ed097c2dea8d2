"""Checkpoints: exact resume after kills, interrupts, damage and a full disk; refusals in one sentence."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import limitlens as ll
from kill_cases import JOBS, LINE, model, probe, study, text, told
from limitlens.cli import common, main
from limitlens.cli.threads import limited_threads
from limitlens.experiments.uniform import _Ascent
from limitlens.models import LoadedModel
from limitlens.probing.collect import Collector
from limitlens.sampling import checkpoint as module
from limitlens.sampling.interrupt import Interrupt, StopNow, held_interrupt

NEWEST, BEFORE = module.NEWEST, module.BEFORE


class Killed(BaseException):
    """Ends a job as a kill would: nobody catches it."""


def stopped(monkeypatch: pytest.MonkeyPatch, job: Any, folder: Path, after: int = 2, **options: Any) -> None:
    """Run a job until its checkpoint was written so many times."""
    write, count = module._write, 0

    def counted(*arguments: Any) -> None:
        nonlocal count
        write(*arguments)
        if (count := count + 1) == after:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(module, "_write", counted)
        with pytest.raises(Killed):
            job(ll.Checkpoint(folder, every=1), **options)


def test_killed_and_resumed_jobs_end_with_the_same_result() -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "kill_cases.py"), "12", "7"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    found = json.loads(done.stdout)
    assert found["different"] == [], done.stderr
    assert found["kills"] >= 12
    assert found["resumed"] >= 5


@pytest.mark.parametrize("name", JOBS)
def test_a_stopped_job_goes_on_to_the_same_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(monkeypatch, JOBS[name], tmp_path)
    assert told(JOBS[name](ll.Checkpoint(tmp_path, resume=True))) == told(JOBS[name](None))


def test_every_damage_is_seen_and_the_one_before_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = told(study(None))
    stopped(monkeypatch, study, tmp_path, after=3)
    good = (tmp_path / NEWEST).read_bytes()
    assert module._read(tmp_path / NEWEST)[1][0].position["blocks"] == 3
    for length in (0, 7, 100, len(good) // 2, len(good) - 1):
        (tmp_path / NEWEST).write_bytes(good[:length])
        assert told(study(ll.Checkpoint(tmp_path, resume=True))) == whole
        assert "resuming from the previous checkpoint" in capsys.readouterr().err
    (tmp_path / BEFORE).write_bytes(b"\0" * 99)
    with pytest.raises(ll.InputError, match=r"is damaged .*; expected an undamaged file, so start again"):
        ll.Checkpoint(tmp_path, resume=True)
    (tmp_path / NEWEST).unlink()
    (tmp_path / BEFORE).unlink()
    assert told(study(ll.Checkpoint(tmp_path, resume=True))) == whole  # there is nothing yet: begun at the start


def test_no_flipped_bit_is_read_as_something_else(tmp_path: Path) -> None:
    job = ll.Checkpoint(tmp_path, every=1).begin({"job": "test", "seed": 3})
    tensors = {
        "a": torch.arange(3.0),
        "b": torch.tensor([[7]]),
        "c": torch.empty(0, 2),
        "d": torch.tensor(2.5).double(),
    }
    job.passed(1, lambda: ({"rows": 2}, tensors), Interrupt())
    path, flips = tmp_path / NEWEST, np.random.default_rng(0)
    good = path.read_bytes()
    made, (saved,) = module._read(path)
    assert {name: t.tolist() for name, t in saved.tensors.items()} == {name: t.tolist() for name, t in tensors.items()}
    seen = 0
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ (1 << int(flips.integers(8)))]) + good[place + 1 :])
        try:
            again, (one,) = module._read(path)
        except module.DAMAGE:  # what `Checkpoint` knows; anything else ends the test
            seen += 1
        else:  # a blank of the header, perhaps
            assert (again, one.job, one.position) == (made, saved.job, saved.position)
            assert all(torch.equal(one.tensors[name], saved.tensors[name]) for name in tensors)
    assert seen > 0.95 * len(good)


def test_the_file_is_plain_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(monkeypatch, probe, tmp_path)
    with safe_open(tmp_path / NEWEST, "pt") as file:
        header = file.metadata()
        names = list(file.keys())
    assert set(header) == {"limitlens", "sha256"}
    assert "0.layer0.state.lse" in names
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_stops_nothing_and_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(monkeypatch, study, tmp_path)
    before = (tmp_path / NEWEST).read_bytes()

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert told(study(ll.Checkpoint(tmp_path, every=1, resume=True))) == told(study(None))
    assert "the checkpoint could not be written" in capsys.readouterr().err
    assert (tmp_path / NEWEST).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [BEFORE, NEWEST]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 1}, "seed 0, and this run has seed 1"),
        ({"sizes": [50, 5000]}, r"sizes \[50, 5000, 20000\], and"),
        ({"replicates": 5}, "replicates 4, and this run has replicates 5"),
        ({"mask_self": True}, "mask_self False, and"),
        ({"queries": None}, "queries 64, and this run has queries None"),
    ],
)
def test_other_arguments_are_refused(
    changed: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(monkeypatch, study, tmp_path)
    with pytest.raises(ll.InputError, match=f"the checkpoint in .* was made with {words}.*; expected the same, so use"):
        study(ll.Checkpoint(tmp_path, resume=True), **changed)


def test_another_law_head_model_text_or_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(monkeypatch, study, tmp_path / "study")
    own: dict[str, Any] = {"sizes": [50, 5000, 20000], "replicates": 4, "queries": 64}
    for law, head, words in (
        (ll.Gaussian(0.0, 2.0), ll.Head(1.2), "made with law"),
        (LINE, ll.Head(1.3), "made with head"),
    ):
        with pytest.raises(ll.InputError, match=words):
            ll.study(law, head, **own, checkpoint=ll.Checkpoint(tmp_path / "study", resume=True))
    stopped(monkeypatch, probe, tmp_path / "probe")
    other, moved = model("Bert", 2), LoadedModel("Bert", model().model, model().tokenizer)
    weight = next(moved.model.parameters())
    weight += 1
    options: dict[str, Any] = {"tokens": 4000, "window": 16, "sizes": [8, 16, 700], "replicates": 2, "queries": 16}
    try:
        for changed in (other, moved):
            with pytest.raises(ll.InputError, match="made with weights"):
                ll.probe(changed, text(), **options, batch=4, checkpoint=ll.Checkpoint(tmp_path / "probe", resume=True))
    finally:
        weight -= 1
    (tmp_path / "text.txt").write_text(Path(text()).read_text().replace("a", "b"))
    with pytest.raises(ll.InputError, match="made with text"):
        ll.probe(
            model(), str(tmp_path / "text.txt"), **options, batch=4,
            checkpoint=ll.Checkpoint(tmp_path / "probe", resume=True),
        )  # fmt: skip
    monkeypatch.setattr(module, "installed", lambda names: {"limitlens": "9.9.9"})
    with pytest.raises(ll.InputError, match=r"limitlens .*, and this run has limitlens 9\.9\.9"):
        ll.Checkpoint(tmp_path / "probe", resume=True)


def test_when_a_checkpoint_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

    def write(folder: Path, jobs: Any) -> None:
        written.append(clock[0])
        clock[0] += 3  # writing is slow

    monkeypatch.setattr(module, "_write", write)
    by_clock = ll.Checkpoint(tmp_path, every="10s").begin({})
    while clock[0] < 100:
        clock[0] += 1
        by_clock.passed(1000, lambda: ({}, {}), Interrupt())
    assert written == [10, 43, 76]  # at most a tenth of the time goes into writing
    written.clear()
    by_tokens = ll.Checkpoint(tmp_path, every=2500).begin({})
    for _ in range(10):
        by_tokens.passed(1000, lambda: ({}, {}), Interrupt())
    assert len(written) == 3
    for wrong in ("soon", "0", "-5", "5m", "0s", ".s", "1.2.3", ""):
        with pytest.raises(ll.InputError, match="expected tokens, such as 100000, or seconds: 60s"):
            ll.Checkpoint(tmp_path, every=wrong)


def test_the_second_signal_stops_at_once() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with held_interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def signals(at: dict[str, list[int]]) -> Any:
    """A function that counts its calls by name, and raises SIGINT in the calls that are listed."""
    counts: dict[str, int] = {}

    def pressed(name: str) -> int:
        counts[name] = counts.get(name, 0) + 1
        for _ in range(at.get(name, []).count(counts[name])):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # as Ctrl-C, which interrupts waiting
        return counts[name]

    return counts, pressed


def test_a_signal_drops_the_unit_under_way_and_keeps_the_finished_ones(tmp_path: Path) -> None:
    counts, pressed = signals({"part": [8]})

    def unit(k: int) -> dict[str, Any]:
        return {"found": np.array([pressed("part") for _ in range(3)])}

    kept = ll.Checkpoint(tmp_path)
    assert kept.each({"job": "units"}, 5, unit, fewest=2)["found"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert counts == {"part": 8}  # nothing ran after the signal
    again = ll.Checkpoint(tmp_path, resume=True).each({"job": "units"}, 5, unit)
    assert again["found"].tolist() == [[1, 2, 3], [4, 5, 6], [9, 10, 11], [12, 13, 14], [15, 16, 17]]
    counts, pressed = signals({"part": [1]})
    with pytest.raises(KeyboardInterrupt):  # before any unit is finished
        ll.Checkpoint().each({"job": "units"}, 5, unit, fewest=1)
    assert counts == {"part": 1}


def test_a_second_signal_keeps_nothing(tmp_path: Path) -> None:
    def unit(k: int) -> dict[str, Any]:
        return {"found": np.zeros(1)}

    def twice(done: float, total: float) -> None:
        if done == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(StopNow):
        ll.Checkpoint(tmp_path).each({"job": "units"}, 5, unit, fewest=2, progress=twice)
    assert list(tmp_path.iterdir()) == []
    options: dict[str, Any] = {"sizes": [10, 20], "replicates": 8, "queries": 8}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("limitlens.experiments.study_pass.CHUNK_FLOATS", 1)
        with pytest.raises(StopNow):
            ll.study(LINE, ll.Head(0.5), progress=twice, checkpoint=ll.Checkpoint(tmp_path), **options)
        second = lambda done, total: twice(3, total) if done > 1 else None  # noqa: E731 - study of a sweep
        with pytest.raises(StopNow):
            ll.sweep(LINE, horizons=[0.5, 1.0], progress=second, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("place", [1, 3, 4])
def test_a_signal_drops_the_forward_pass_of_a_probe(
    place: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with limited_threads(threads):
        whole = probe(None)
        at = 4 * 4 * threads + place  # blocks have 4 forward passes, cut in two for two threads
        counts, pressed = signals({"pass": [at]})
        store = Collector.work

        def counted(self: Any, *given: Any) -> Any:
            pressed("pass")
            time.sleep(0.3 if counts["pass"] >= at else 0)  # let the main thread see the signal
            return store(self, *given)

        with monkeypatch.context() as patched:
            patched.setattr(Collector, "work", counted)
            stopped = probe(ll.Checkpoint(tmp_path))
        assert stopped.interrupted
        assert stopped.tokens == 4 * 16 * 16  # complete blocks of 16 windows
        assert counts["pass"] < at + threads + 1
        _, (saved,) = module._read(tmp_path / NEWEST)
        assert saved.position["blocks"] == 4
        assert saved.position["windows"] <= 4 * (place - 1) // threads
        resumed = probe(ll.Checkpoint(tmp_path, resume=True))
    assert told(resumed) == told(whole)


def test_a_signal_drops_the_search_for_the_largest_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, pressed = signals({"climb": [7]})
    climb = _Ascent.climb

    def counted(self: Any, *given: Any) -> Any:
        pressed("climb")
        return climb(self, *given)

    monkeypatch.setattr("limitlens.experiments.study_pass.CHUNK_FLOATS", 1)
    monkeypatch.setattr(_Ascent, "climb", counted)
    options: dict[str, Any] = {"sizes": [10, 20], "replicates": 5, "queries": 8, "radius": 1.0}
    curve = ll.study(LINE, ll.Head(0.5), checkpoint=ll.Checkpoint(tmp_path), **options)
    assert counts == {"climb": 7}
    assert curve.interrupted
    assert curve.replicates == 3  # two sizes each; the fourth was dropped
    resumed = ll.study(LINE, ll.Head(0.5), checkpoint=ll.Checkpoint(tmp_path, resume=True), **options)
    whole = ll.study(LINE, ll.Head(0.5), **options)
    assert told(resumed) == told(whole)


OPTIONS = ["study", "--sizes", "50,5000", "--replicates", "6", "--queries", "32", "--json"]


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    with pytest.raises(SystemExit) as ended:
        main([*OPTIONS, *arguments])
    out, err = capsys.readouterr()
    document = json.loads(out) if out else {}
    document.pop("seconds", None)
    return int(ended.value.code or 0), document, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_goes_on_after_a_signal(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("limitlens.experiments.study_pass.CHUNK_FLOATS", 1)
    out = str(tmp_path / "run")

    @contextmanager
    def press(title: str, quiet: bool, unit: str = "") -> Any:
        yield lambda done, total: signal.raise_signal(number) if done == 3 else None

    with monkeypatch.context() as patched:
        patched.setattr(common, "progress", press)
        code, cut, err = ran(capsys, "--out", out)
    assert code == 130
    assert cut["interrupted"]
    assert f"the state is saved in {out}/{NEWEST}" in err
    code, document, _ = ran(capsys, "--out", out, "--resume", "--checkpoint-every", "60s")
    assert code == 0
    assert document == ran(capsys)[1]
    assert not list(Path(out).glob("*checkpoint*"))


def test_the_command_refuses_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--resume"], "--resume was given without --out; expected the folder"),
        (["--checkpoint-every", "60s"], "--checkpoint-every was given without --out"),
        (["--checkpoint-every", "soon", "--out", str(tmp_path)], "interval is 'soon'; expected tokens"),
        (["--memory", "4"], "--memory is '4'; expected a size such as 16MB"),
        (["--memory", "1MB"], "the memory limit is 0.001 GB; expected"),
    ):
        code, _, err = ran(capsys, *arguments)
        assert code == 2
        assert words in err
        assert err.count("\n") == 1
