"""Where a long job stands, kept on disk so that it survives a kill: tensors and a plain header, whole or not at all.

The file has the safetensors format (never pickle); its header says what the job was asked, how far it is, what made it,
and a digest of all of this and of every tensor. It is written beside the file before it, flushed to the disk and
renamed; the one before is kept, and used where the newest is damaged. Random numbers come from seeds and places, so a
position is all that has to be known of them.
"""

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
from limitlens.measures import Sample
from limitlens.measures.base import Measure
from limitlens.record import installed, to_json, write_files
from limitlens.sampling.interrupt import Interrupt, held_interrupt

if TYPE_CHECKING:
    from limitlens.attention.head import Head

NEWEST, BEFORE = "checkpoint.safetensors", "checkpoint.before.safetensors"
FORMAT = 1
EXACT = ("limitlens", "numpy", "torch", "transformers")  # other versions of these may round otherwise
DTYPES = {"float64": "F64", "int64": "I64", "float32": "F32", "uint8": "U8"}
DAMAGE = (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError)  # of a file that is not whole
MOST_WRITING = 0.1  # share of the time that is spent writing, at most, where checkpoints are asked for by the clock

Item = TypeVar("Item")
State: TypeAlias = tuple[dict[str, Any], dict[str, Tensor]]  # how far a job is, as JSON, and what it holds


@dataclass(frozen=True, eq=False)
class Saved:
    """One job of a checkpoint."""

    job: dict[str, Any]  # what it was asked, by the name of each argument
    position: dict[str, Any]  # how far it is
    tensors: dict[str, Tensor]


class Checkpoint:
    """The jobs of a run in a folder, one after another, each with where it stands.

    `every` is how often it is written: tokens, such as 100000, or seconds, such as "60s"; left out, it is written when
    the work is interrupted (Ctrl-C, SIGTERM) alone. With `resume` jobs go on from what the folder holds, where it holds
    anything. Without a folder nothing is kept.

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
            given = f"a checkpoint was asked for every {every!r}"
            raise InputError(f"{given}; expected tokens, such as 100000, or seconds, such as 60s")
        self.folder = None if folder is None else Path(folder)
        self._every = float("inf") if found is None else float(found[1])
        self._by_clock = found is not None and found[2] == "s"
        self._jobs = self._read(self.folder) if resume and self.folder is not None else []
        self._begun = 0
        self._tokens, self._written, self._cost = 0, time.monotonic(), 0.0

    def begin(self, job: Mapping[str, Any]) -> Job:
        """The next job of the run: where it stood, if it was begun before; refused where that was another job."""
        place, asked = self._begun, json.loads(json.dumps(to_json(job)))
        self._begun += 1
        if place == len(self._jobs):
            self._jobs.append(Saved(asked, {}, {}))
            return Job(self, place, None)
        saved = self._jobs[place]
        _same(f"the checkpoint in {str(self.folder)!r}", saved.job, asked)
        self._jobs[place] = Saved(asked, saved.position, {})  # whoever goes on holds the tensors from here on
        return Job(self, place, saved if saved.position else None)

    def each(
        self, job: Mapping[str, Any], count: int, make: Callable[[int], dict[str, Any]], *, tokens: int = 1,
        fewest: int | None = None, progress: Progress | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """What `make` returns for 0 .. count − 1, each array stacked; or `fewest` at least, where interrupted."""
        mine = self.begin(job)
        rows: list[dict[str, Any]] = []
        if mine.saved is not None:
            whole = {name: tensor.numpy() for name, tensor in mine.saved.tensors.items()}
            rows = [{name: array[k] for name, array in whole.items()} for k in range(mine.saved.position["rows"])]

        def stacked() -> dict[str, Any]:
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

        def state() -> State:
            return {"rows": len(rows)}, {name: torch.as_tensor(array) for name, array in stacked().items()}

        with held_interrupt() as interrupt, suppress(KeyboardInterrupt):
            for k in range(len(rows), count):
                rows.append(make(k))
                interrupt.during(progress, len(rows), count)
                mine.passed(tokens, state, interrupt)
        if len(rows) < (count if fewest is None else fewest):
            raise KeyboardInterrupt
        mine.keep(state())
        return stacked()

    def remove(self) -> None:
        """Take the files away, once what they were for is saved."""
        if self.folder is not None:
            for name in (NEWEST, BEFORE):
                (self.folder / name).unlink(missing_ok=True)

    def _due(self, tokens: int) -> bool:
        self._tokens += tokens
        passed = time.monotonic() - self._written
        return passed >= max(self._every, self._cost / MOST_WRITING) if self._by_clock else self._tokens >= self._every

    def _keep(self, place: int, state: State, folder: Path | None) -> bool:
        """Take note of a state, and write all there are where a folder is named; whether that was possible."""
        self._jobs[place] = Saved(self._jobs[place].job, *state)
        started, written = time.monotonic(), folder is not None
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                _write(folder, self._jobs)
        except (OSError, InputError) as error:
            written, told = False, "the work goes on, and the checkpoint before this one, if there is one, stays"
            print(f"limitlens: no checkpoint could be written ({error}); {told}", file=sys.stderr)
        self._tokens, self._written = 0, time.monotonic()
        self._cost = self._written - started
        return written

    @staticmethod
    def _read(folder: Path) -> list[Saved]:
        """The jobs of the newest file that is whole; none where there is no file."""
        damaged = []
        for path in (folder / NEWEST, folder / BEFORE):
            try:
                header, jobs = _read(path)
            except FileNotFoundError:
                continue
            except DAMAGE as error:
                damaged.append(f"{path.name}: {error}")
                continue
            _same(f"the checkpoint in {str(folder)!r}", header, _made())
            if damaged:
                print(f"limitlens: {damaged[0]}; going on from the checkpoint before it", file=sys.stderr)
            return jobs
        if damaged:
            given = f"the checkpoint in {str(folder)!r} is damaged ({'; '.join(damaged)})"
            raise InputError(f"{given}; expected one that is whole, so begin again without resuming")
        return []


@dataclass(frozen=True, eq=False)
class Job:
    """A job of a checkpoint while it runs."""

    checkpoint: Checkpoint
    place: int
    saved: Saved | None  # where it stood, if it was begun before

    def passed(self, tokens: int, state: Callable[[], State], interrupt: Interrupt) -> None:
        """So many more tokens are done: keep the state where that is due, or where the work is to stop; then stop."""
        kept, folder = self.checkpoint, self.checkpoint.folder
        due = kept._due(tokens) or interrupt.asked
        if folder is not None and due and kept._keep(self.place, state(), folder) and interrupt.asked:
            print(f"limitlens: the work so far is in {folder / NEWEST}; resume goes on from it", file=sys.stderr)
        interrupt.check()

    def keep(self, state: State) -> None:
        """The job is done: the checkpoints of those after it hold what it found."""
        self.checkpoint._keep(self.place, state, None)


def under(prefix: str, named: Mapping[str, Item]) -> dict[str, Item]:
    """Those whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): part for name, part in named.items() if name.startswith(prefix)}


def digest(*arrays: Any) -> str:
    """A digest of texts and of arrays: their shapes, types and numbers."""
    found = hashlib.sha256()
    for array in arrays:
        if isinstance(array, str):
            found.update(array.encode())
        else:
            whole = np.ascontiguousarray(array)
            found.update(f"{np.shape(array)} {whole.dtype};".encode())
            found.update(_bytes(whole))
    return found.hexdigest()


def identity(measure: Measure, head: Head) -> dict[str, str]:
    """Digests of a law, by its name and a few draws or all it holds, and of a head."""
    drawn = measure.tokens if isinstance(measure, Sample) else measure.sample(16, torch.Generator().manual_seed(0))
    return {"law": digest(repr(measure), drawn), "head": digest(head.A, head.V, head.query_bias, head.value_bias)}


def _made() -> dict[str, Any]:
    """What numbers depend on beyond what a job is asked."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    about = {"processor": torch.backends.cpu.get_cpu_capability(), "GPU": gpu}  # threads may differ: only rounding does
    return {"checkpoint format": FORMAT, **installed(EXACT), **about}


def _same(where: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say the first thing that differs."""
    for name in dict.fromkeys((*now, *then)):
        if then.get(name) != now.get(name):
            was, is_now = (str(found.get(name, "none"))[:40] for found in (then, now))
            raise InputError(
                f"{where} is of {name} {was} and this is {name} {is_now}; expected the same, so give what it was made "
                "with, or begin again without resuming"
            )


def _bytes(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _ordered(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """As arrays, those of the widest numbers first: what is aligned stays so."""
    arrays = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
    return dict(sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])))


def _header(jobs: Sequence[Saved], made: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, str]:
    told = json.dumps([made, [[one.job, one.position, list(one.tensors)] for one in jobs]])
    names = (part for name, array in arrays.items() for part in (name, array))
    return {"limitlens": told, "sha256": digest(told, *names)}


def _write(folder: Path, jobs: Sequence[Saved]) -> None:
    """The file and the one before it. Tensors are written from where they lie: a copy of all would double memory."""
    flat = _ordered({f"{k}.{name}": part for k, one in enumerate(jobs) for name, part in one.tensors.items()})
    index: dict[str, Any] = {"__metadata__": _header(jobs, _made(), flat)}
    place = 0
    for name, array in flat.items():
        span = [place, place := place + array.nbytes]
        index[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
    text = json.dumps(index).encode()
    text += b" " * (-len(text) % 8)
    newest = folder / NEWEST

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in flat.values():
                file.write(_bytes(array))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            newest.replace(folder / BEFORE)

    write_files({newest: write})


def _read(path: Path) -> tuple[dict[str, Any], list[Saved]]:
    """What made a file and its jobs; a ValueError where it is not whole."""
    with safe_open(path, "pt") as file:
        header = file.metadata() or {}
        flat = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    made, told = json.loads(header["limitlens"])
    jobs = [
        Saved(job, position, {name: flat[f"{k}.{name}"] for name in names})
        for k, (job, position, names) in enumerate(told)
    ]
    if _header(jobs, made, _ordered(flat)) != header:
        raise ValueError("its checksum is not that of its contents")
    return made, jobs
