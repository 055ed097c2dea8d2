"""Reproducibility bit for bit or up to rounding: block sizes, threads, memory limits, a GPU out of memory."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kill_cases
import limitlens as ll
from kill_cases import LINE, model, study, text, told
from limitlens.cli.common import size
from limitlens.experiments import study_pass
from limitlens.probing.options import ProbeOptions
from limitlens.sampling import memory
from limitlens.sampling.assignment import Assignment
from limitlens.sampling.cells import Cells
from limitlens.sampling.workers import one_after_another

SMALL = ProbeOptions(block=32 * 16)
probe = partial(kill_cases.probe, options=SMALL)


def near(one: ll.ProbeRun, other: ll.ProbeRun) -> None:
    """The same deal of tokens, and errors that differ by rounding alone."""
    assert (one.n, one.replicates, one.tokens) == (other.n, other.replicates, other.tokens)
    for a, b in zip(one.records, other.records, strict=True):
        np.testing.assert_allclose(a.curve.rows, b.curve.rows, rtol=1e-5)  # of every replicate
        np.testing.assert_allclose(a.curve.error, b.curve.error, rtol=1e-6)
        geometry = ([one.horizon, one.coupling, one.mean_tilt, one.score_std] for one in (a, b))
        np.testing.assert_allclose(*geometry, rtol=1e-5)
    for name, tensor in one.reference.items():
        torch.testing.assert_close(tensor, other.reference[name], rtol=1e-5, atol=1e-5)


def test_a_block_in_pieces_is_the_block() -> None:
    assignment = Assignment([60, 60, 30], Cells((4, 12, 40)), 3, seed=5)
    assignment.kept[:, 1:] = False  # cells of few tokens would all be kept
    cells = {False: set(), True: set()}
    for block, assigned in enumerate(assignment.assign_blocks()):
        for small, wait in ((False, 60), (True, 10)):
            start, waits = 0, {}
            assignment.wait = wait
            for part in assigned.slices(5, assignment):
                pieces = part.cut(2) if small else (part,)
                for piece, begin in zip(pieces, (0, 2), strict=False):
                    rows = [(row, start + begin + token) for token, row in enumerate(piece.rows.tolist())]
                    waits |= {row - assignment.slots: token for row, token in rows if row >= assignment.slots}
                    cells[small] |= {("slot", row, block, token) for row, token in rows if row < assignment.slots}
                    cells[small] |= {("some", block, token) for token in (piece.subset + start + begin).tolist()}
                    if piece.completed is not None:
                        spans = piece.completed.streamed
                        assert sorted(waits) == list(range(spans[-1][2] if spans else 0))
                        cells[small] |= {(n, block, waits[place]) for n, a, b in spans for place in range(a, b)}
                        waits = {}
                start += len(part.rows)
            assert start == len(assigned.order)
            assert part.ends_block
    assert cells[True] == cells[False]


def test_the_memory_limit_of_a_probe_does_not_change_the_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = probe(None)
    asked: list[int] = []
    held = memory.resident(torch.device("cpu"))
    monkeypatch.setattr(memory, "resident", lambda device: held)
    needed = 200_000
    cheap = replace(SMALL, activations=8, layer_copies=0, score_copies=0)
    tokens_waiting = ProbeOptions.tokens_waiting
    monkeypatch.setattr(
        ProbeOptions, "tokens_waiting", lambda *arguments: asked.append(tokens_waiting(*arguments)) or asked[-1]
    )
    while True:  # the tightest that is not refused
        try:
            tight = probe(None, memory=held + needed, options=cheap)
            break
        except ll.InputError:
            needed = int(1.1 * needed)
    assert asked[-1] < 32 * 16
    near(tight, whole)
    assert told(probe(None, memory=10**12)) == told(whole)
    with pytest.raises(ll.InputError, match=r"the memory limit is 0\.001 GB; expected at least .* GB for a forward"):
        probe(None, memory=10**6)


def test_the_memory_of_a_study_sizes_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, held = study(None), 10**9
    monkeypatch.setattr(memory, "resident", lambda device: held)
    small = study(None, memory=held + study_pass.FLOAT_BYTES * 25_000)
    for name in whole.errors:
        np.testing.assert_allclose(small.replicate_errors[name], whole.replicate_errors[name], rtol=1e-9)
    with pytest.raises(ll.InputError, match="for a study of one replicate at a time"):
        study(None, memory=held + 1000)


def test_sizes_of_memory() -> None:
    assert [size(given) for given in (None, "4GB", "1.5 MiB", "700b")] == [None, 4 * 10**9, 1572864, 700]
    with pytest.raises(ll.InputError, match="--memory is '4'; expected a size such as 16MB"):
        size("4")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
def test_the_peak_of_a_study_stays_within_its_memory() -> None:
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import numpy as np, torch, limitlens as ll
from limitlens.sampling.memory import resident
torch.set_num_threads(1)
law, head = ll.Gaussian(np.zeros(64), 1.0), ll.designed_head(np.eye(64), 1.0)
ll.study(law, head, [50, 100], replicates=2, queries=32)
bound = resident(torch.device("cpu")) + 40_000_000
ll.study(law, head, [1000, 9000], replicates=6, queries=512, memory=bound)
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
print(peak / bound)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.15


def test_a_gpu_out_of_memory_halves_the_forward_and_adds_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from limitlens.probing.collect import Collector, Moments

    # As on a device, where forwards do not run side by side.
    monkeypatch.setattr("limitlens.probing.probe.workers_for", lambda device: nullcontext(one_after_another))
    whole = probe(None)
    sum_rows, add_hidden, full, large = Moments.sum, Collector._add_hidden, [0], [0]

    def short(self: Any, rows: torch.Tensor) -> Any:
        """No memory for the moments of more than two windows, noticed once those of the keys were added."""
        large[0] += (own := len(rows) > 2 * 16)
        if own and large[0] == 2:
            full[0] += 1
            raise torch.cuda.OutOfMemoryError
        return sum_rows(self, rows)

    monkeypatch.setattr(Moments, "sum", short)
    run = probe(None)
    assert full[0] == 1  # from there on windows come in twos
    assert run.warnings[-1] == "the GPU ran out of memory: from there on windows were processed 2 at a time"
    assert run.warnings[-1] in capsys.readouterr().err
    near(run, whole)
    count = [0]

    def at_last(self: Any, *given: Any) -> Any:
        """Once in the middle of the last part of a block, after one piece of work was done."""
        count[0] += 1
        if count[0] == 8:
            raise torch.cuda.OutOfMemoryError
        return add_hidden(self, *given)

    monkeypatch.setattr(Moments, "sum", sum_rows)
    monkeypatch.setattr(Collector, "_add_hidden", at_last)
    near(probe(None), whole)
    assert count[0] > 8
    monkeypatch.setattr(Moments, "sum", lambda *given: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError()))
    with pytest.raises(ll.InputError, match="the GPU has no memory for one of the windows"):
        probe(None)


def test_halves_of_concurrent_forward_passes_add_their_sums_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from limitlens.probing.collect import Collector

    before, add_hidden, count = torch.get_num_threads(), Collector._add_hidden, [0]

    def short(self: Any, *given: Any) -> Any:
        """No memory in one of the forward passes, after the moments of keys and queries were summed."""
        count[0] += 1
        if count[0] == 5:
            raise torch.cuda.OutOfMemoryError
        return add_hidden(self, *given)

    try:
        torch.set_num_threads(2)
        whole = probe(None)
        monkeypatch.setattr(Collector, "_add_hidden", short)
        near(probe(None), whole)
    finally:
        torch.set_num_threads(before)
    assert count[0] > 5


def test_a_gpu_out_of_memory_halves_the_replicates_of_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, draw = study(None), study_pass.ReplicatePass._add

    def short(self: Any, start: int, stop: int) -> None:
        if len(self.replicates) > 1 and start:
            raise torch.cuda.OutOfMemoryError
        draw(self, start, stop)

    monkeypatch.setattr(study_pass.ReplicatePass, "_add", short)
    curve = study(None)
    assert [warning for warning in curve.warnings if "GPU" in warning] == [
        f"the GPU ran out of memory: from there on replicates were processed {few} at a time" for few in (2, 1)
    ]
    for name in whole.errors:
        np.testing.assert_allclose(curve.replicate_errors[name], whole.replicate_errors[name], rtol=1e-9)


def test_threads_change_nothing_but_rounding() -> None:
    before, found = torch.get_num_threads(), {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found[threads] = probe(None), study(None)
        assert told(study(None)) == told(found[2][1])
    finally:
        torch.set_num_threads(before)
    near(found[1][0], found[2][0])
    for name in found[1][1].errors:
        one, two = (found[threads][1].replicate_errors[name] for threads in (1, 2))
        np.testing.assert_allclose(one, two, rtol=1e-9)


@pytest.mark.parametrize("threads", [2, 3, 8])  # of the last there are more than windows of a forward
def test_threads_give_the_same_bits_again(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert told(probe(None)) == told(probe(None))
    finally:
        torch.set_num_threads(before)


def test_the_uniform_error_of_a_replicate_does_not_depend_on_the_others() -> None:
    own: dict[str, Any] = {"sizes": [100], "queries": 16, "radius": 1.5}
    few, more = (ll.study(LINE, ll.Head(1.0), replicates=count, **own) for count in (2, 4))
    np.testing.assert_allclose(few.replicate_errors["uniform"], more.replicate_errors["uniform"][:2], rtol=1e-12)


def test_a_given_batch_size_has_its_own_assignment() -> None:
    options: dict[str, Any] = {"tokens": 4000, "window": 16, "sizes": [8, 16, 700], "replicates": 2, "queries": 16}
    one, other = (ll.probe(model(), text(), **options, batch=batch, options=SMALL) for batch in (4, 3))
    assert not np.allclose(one.records[0].curve.error, other.records[0].curve.error, rtol=1e-3)
