"""Checkpoints on disk (safetensors with a digest), from which an interrupted run resumes and gives the same result."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from limitlens.arrays import Tensor, torch
from limitlens.errors import InputError, Progress
from limitlens.measures import Measure, Sample
from limitlens.record import installed, to_json, write_files
from limitlens.sampling.interrupt import Interrupt, held_interrupt

if TYPE_CHECKING:
    from limitlens.attention.head import Head

NEWEST, BEFORE = "checkpoint.safetensors", "checkpoint.before.safetensors"
FORMAT = 3
EXACT = ("limitlens", "numpy", "torch", "transformers")  # packages whose other versions may round differently
DAMAGE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError)  # from a damaged file
MOST_WRITING = 0.1  # largest share of the time spent writing, if the interval is given in seconds

Item = TypeVar("Item")
State: TypeAlias = tuple[dict[str, Any], dict[str, Tensor]]  # position of a job as JSON, and its tensors


@dataclass(frozen=True, eq=False)
class Saved:
    """Saved state of one job, a computation that can be resumed."""

    job: dict[str, Any]  # arguments of the job by name
    position: dict[str, Any]  # how far the job has come; empty for a new job
    tensors: dict[str, Tensor]


class Checkpoint:
    """Saves the state of a run in a folder, and resumes it after an interruption; without a folder nothing is written.

    `every` is the interval between writes in tokens, such as 100000, or in seconds, such as "60s". By default only an
    interruption writes. With `resume`, the run continues from the state in the folder, if any.

    >>> law, head = ll.Gaussian(0.0, 1.0), ll.Head(0.5)
    >>> kept = ll.Checkpoint('runs/long', every='60s', resume=True)
    >>> curve = ll.study(law, head, [50, 200], replicates=12, queries=32, checkpoint=kept)
    >>> kept.remove()
    """

    def __init__(
        self, folder: str | Path | None = None, every: str | float | None = None, *, resume: bool = False
    ) -> None:
        found = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?) *(s?)", str(every))
        if every is not None and (found is None or not float(found[1]) > 0):
            raise InputError(f"the checkpoint interval is {every!r}; expected tokens, such as 100000, or seconds: 60s")
        self.folder = None if folder is None else Path(folder)
        self._every = float("inf") if found is None else float(found[1])
        self._by_clock = found is not None and found[2] == "s"
        self._jobs = _newest(self.folder) if resume and self.folder is not None else []
        self._begun = 0
        self._tokens, self._written, self._cost = 0, time.monotonic(), 0.0

    def begin(self, job: Mapping[str, Any]) -> Job:
        """Start or resume the next job (resumable computation) of the run; an `InputError` if its arguments changed."""
        place = self._begun
        arguments = json.loads(json.dumps(to_json(job)))
        self._begun += 1
        if place == len(self._jobs):
            self._jobs.append(Saved(arguments, {}, {}))
            return Job(self, place, None)
        saved = self._jobs[place]
        _same(self.folder, saved.job, arguments)
        self._jobs[place] = Saved(arguments, saved.position, {})  # from here on only the job holds the tensors
        return Job(self, place, saved if saved.position else None)

    def each(
        self, job: Mapping[str, Any], count: int, make: Callable[[int], dict[str, Any]], *, tokens: int = 1,
        fewest: int | None = None, progress: Progress | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Call `make(k)` for k < count and stack its arrays by name; an interrupt keeps `fewest` or more."""
        running = self.begin(job)
        rows: list[dict[str, Any]] = []
        if running.saved is not None:
            done = range(running.saved.position["rows"])
            rows = [{name: tensor[k].numpy() for name, tensor in running.saved.tensors.items()} for k in done]

        def stacked() -> dict[str, Any]:
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

        def state() -> State:
            return {"rows": len(rows)}, {name: torch.as_tensor(array) for name, array in stacked().items()}

        def make_rows(interrupt: Interrupt) -> None:
            for k in range(len(rows), count):
                row = interrupt.during(make, k, drop=True)
                if row is not None:
                    rows.append(row)
                    interrupt.during(progress, len(rows), count)
                if not rows:
                    interrupt.check()
                running.passed(tokens, state, interrupt)

        with held_interrupt() as interrupt:
            interrupt.during(make_rows, interrupt)  # after an interrupt the finished rows are returned
        if len(rows) < (count if fewest is None else fewest):
            raise KeyboardInterrupt
        running.keep(state())
        return stacked()

    def remove(self) -> None:
        """Delete the checkpoint files from the folder, once the result of the run is saved."""
        if self.folder is not None:
            for name in (NEWEST, BEFORE):
                (self.folder / name).unlink(missing_ok=True)

    def _due(self, tokens: int) -> bool:
        self._tokens += tokens
        passed = time.monotonic() - self._written
        return passed >= max(self._every, self._cost / MOST_WRITING) if self._by_clock else self._tokens >= self._every

    def _keep(self, place: int, state: State, folder: Path | None) -> bool:
        """Store the state of job `place` and, if a folder is given, write all jobs to it; True if written."""
        self._jobs[place] = Saved(self._jobs[place].job, *state)
        started, written = time.monotonic(), folder is not None
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                _write(folder, self._jobs)
        except (OSError, InputError) as error:
            written = False
            print(f"limitlens: the checkpoint could not be written ({error}); the run continues", file=sys.stderr)
        self._tokens, self._written = 0, time.monotonic()
        self._cost = self._written - started
        return written


@dataclass(frozen=True, eq=False)
class Job:
    """Resumable computation number `place` of a run, whose state a checkpoint saves."""

    checkpoint: Checkpoint
    place: int
    saved: Saved | None  # state to resume from; None for a new job

    def passed(self, tokens: int, state: Callable[[], State], interrupt: Interrupt) -> None:
        """Count finished tokens, save the state if due or interrupted, and raise KeyboardInterrupt if interrupted."""
        kept, folder = self.checkpoint, self.checkpoint.folder
        due = kept._due(tokens) or interrupt.asked
        if folder is not None and due and kept._keep(self.place, state(), folder) and interrupt.asked:
            print(f"limitlens: the state is saved in {folder / NEWEST}; resume with --resume", file=sys.stderr)
        interrupt.check()

    def keep(self, state: State) -> None:
        """Store the result of the finished job, so that checkpoints of later jobs contain it."""
        self.checkpoint._keep(self.place, state, None)


def under(prefix: str, named: Mapping[str, Item]) -> dict[str, Item]:
    """Select the items whose names begin with `prefix`, and remove the prefix from their names."""
    return {name.removeprefix(prefix): part for name, part in named.items() if name.startswith(prefix)}


def digest(*arrays: Any) -> str:
    """SHA-256 digest, in hexadecimal, of texts and arrays (shape, type and numbers)."""
    found = hashlib.sha256()
    for array in arrays:
        if isinstance(array, str):
            found.update(array.encode())
        else:
            whole = np.ascontiguousarray(array)
            found.update(f"{np.shape(array)} {whole.dtype};".encode())
            found.update(whole.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def identity(measure: Measure, head: Head) -> dict[str, str]:
    """Digests of a token distribution and of a head, which tell whether a resumed run uses the same ones."""
    drawn = measure.tokens if isinstance(measure, Sample) else measure.sample(16, torch.Generator().manual_seed(0))
    return {"law": digest(repr(measure), drawn), "head": digest(head.A, head.V, head.query_bias, head.value_bias)}


def _made() -> dict[str, Any]:
    """Versions and hardware that a resumed run must share with its checkpoint, since results depend on them."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    about = {"processor": torch.backends.cpu.get_cpu_capability(), "GPU": gpu}  # not the number of threads
    return {"checkpoint format": FORMAT, **installed(EXACT), **about}


def _same(folder: Path | None, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise an InputError if an entry `then` of the checkpoint differs from the entry `now` of this run."""
    for name in dict.fromkeys((*now, *then)):
        if then.get(name) != now.get(name):
            was, is_now = (str(found.get(name, "none"))[:40] for found in (then, now))
            given = f"the checkpoint in {str(folder)!r} was made with {name} {was}, and this run has {name} {is_now}"
            remedy = "use the arguments it was made with, or start again without resuming"
            raise InputError(f"{given}; expected the same, so {remedy}")


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors by name as NumPy arrays, in the order in which the checksum of a file reads them."""
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    return dict(sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])))


def _header(jobs: Sequence[Saved], made: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, str]:
    told = json.dumps([made, [[one.job, one.position, list(one.tensors)] for one in jobs]])
    names = (part for name, array in arrays.items() for part in (name, array))
    return {"limitlens": told, "sha256": digest(told, *names)}


def _write(folder: Path, jobs: Sequence[Saved]) -> None:
    from safetensors.torch import save_file

    arrays = _arrays({f"{k}.{name}": part for k, one in enumerate(jobs) for name, part in one.tensors.items()})
    newest = folder / NEWEST

    def write(partial: Path) -> None:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        save_file(tensors, partial, _header(jobs, _made(), arrays))
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            newest.replace(folder / BEFORE)

    write_files({newest: write})


def _read(path: Path) -> tuple[dict[str, Any], list[Saved]]:
    """Read the versions that made a checkpoint file, and its jobs; a ValueError if the digest does not match."""
    with safe_open(path, "pt") as file:
        header = file.metadata() or {}
        flat = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    made, told = json.loads(header["limitlens"])
    jobs = []
    for k, (job, position, names) in enumerate(told):
        jobs.append(Saved(job, position, {name: flat[f"{k}.{name}"] for name in names}))
    if _header(jobs, made, _arrays(flat)) != header:
        raise ValueError("its checksum does not match its contents")
    return made, jobs


def _newest(folder: Path) -> list[Saved]:
    """Read the saved jobs from the newest undamaged checkpoint in the folder; empty without a file."""
    damaged = []
    for path in (folder / NEWEST, folder / BEFORE):
        try:
            header, jobs = _read(path)
        except FileNotFoundError:
            continue
        except DAMAGE as error:
            damaged.append(f"{path.name}: {error}")
            continue
        _same(folder, header, _made())
        if damaged:
            print(f"limitlens: {damaged[0]}; resuming from the previous checkpoint", file=sys.stderr)
        return jobs
    if damaged:
        given = f"the checkpoint in {str(folder)!r} is damaged ({'; '.join(damaged)})"
        raise InputError(f"{given}; expected an undamaged file, so start again without resuming")
    return []
