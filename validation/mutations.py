"""Mutation test of the tests: do they notice a wrong sign, factor or comparison in the numeric code?

Each mutation of validation/mutation_table.py replaces one text in one line of one source file, in a temporary copy of
the sources, and runs the named tests there. It is killed if a test fails or hangs, and survives otherwise. A survivor
needs a reason: the mutated program is equivalent, or differs by less than the noise of any cheap test.
`python -m validation mutations` runs all mutations; `python -m validation.mutations theory/clt.py` runs some of them,
by file or text, and replaces their rows in the results. The exit code is 2 if a mutation no longer applies or cannot be
judged.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from compileall import compile_dir
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from validation.mutation_table import TABLE

ROOT = Path(__file__).parents[1]
SAVED = Path(__file__).parent / "results" / "mutations.json"
SECONDS = 240  # time limit of the tests of one mutation
WANTED = 0.9  # smallest share of the mutations that the tests must kill
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
# Libraries that are imported once; every run of pytest is a fork of the process that imported them.
PRELOAD = ["pytest", "pandas", "scipy.stats", "torch", "transformers.models.llama.modeling_llama"]
ENDED = 10  # added to the exit code of pytest: a process that fails before it ends with 1, as if a test had failed
OUTCOMES = {None: "killed by the time limit", ENDED: "survived", ENDED + 1: "killed"}


@dataclass(frozen=True)
class Mutation:
    """A text that occurs once in a source file, the text that replaces it, and the tests that should notice."""

    file: str  # below src/limitlens
    tests: tuple[str, ...]  # files or node ids below tests/
    old: str
    new: str
    reason: str = ""  # why no cheap test can notice; empty if one should

    @property
    def name(self) -> str:
        """Name of the mutation in messages."""
        return f"{self.file}: {self.old!r} to {self.new!r}"

    def path(self, root: Path) -> Path:
        """The source file in a copy of the repository."""
        return root / "src" / "limitlens" / self.file


def node_ids(tests: str) -> tuple[str, ...]:
    """Arguments of pytest for files, each followed by the names of its tests: "a.py test_b" gives "a.py::test_b"."""
    words, file, found = tests.split(), "", []
    for word, following in zip(words, [*words[1:], ".py"], strict=True):
        file = word if word.endswith(".py") else file
        if word != file:
            found.append(f"{file}::{word}")
        elif following.endswith(".py"):
            found.append(file)
    return tuple(found)


MUTATIONS = [Mutation(file, node_ids(tests), *texts) for file, tests, rows in TABLE for texts in rows]


def run() -> list[dict[str, Any]]:
    """One row per mutation, with its outcome, and a last one with the share that was killed."""
    return with_summary(outcomes(MUTATIONS))


def outcomes(mutations: Sequence[Mutation]) -> list[dict[str, Any]]:
    """Apply mutations one by one to a copy of the sources, and run their tests."""
    stale = [each.name for each in mutations if each.path(ROOT).read_text(encoding="utf-8").count(each.old) != 1]
    if stale:
        _refuse(*(f"{name} no longer applies: the first text must occur once in the file" for name in stale))
    os.environ.update(ENVIRONMENT)
    rows = []
    with TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        # Bytecode that is used only while the hash of its source is the same: not for a mutated file.
        compile_dir(copy / "src", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        every = tuple(dict.fromkeys(test for each in mutations for test in each.tests))
        if (code := _exit_code(copy, every, 10 * SECONDS)) != ENDED:
            _refuse(f"the tests do not pass without a mutation (exit code {code}); correct them first")
        for number, each in enumerate(mutations, 1):
            begun = time.perf_counter()
            outcome = _outcome(copy, each)
            seconds = round(time.perf_counter() - begun, 1)
            print(f"{number}/{len(mutations)} {outcome}, {seconds} s: {each.name}", flush=True)
            row = {"what": each.name, "tests": " ".join(each.tests), "outcome": outcome, "seconds": seconds}
            rows.append(row | {"reason": each.reason, "passed": outcome != "survived" or bool(each.reason)})
    return rows


def with_summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of mutations, followed by the share that was killed."""
    survived = sum(row["outcome"] == "survived" for row in rows)
    share = 1 - survived / len(rows)
    what = f"{len(rows)} mutations, {survived} survived, share killed"
    print(f"{what}: {share:.3f}, expected at least {WANTED}", flush=True)
    return [*rows, {"what": what, "measured": share, "expected": WANTED, "passed": share >= WANTED}]


def _outcome(copy: Path, mutation: Mutation) -> str:
    """Mutate a file of the copy, run the tests, and restore the file."""
    path = mutation.path(copy)
    source = path.read_text(encoding="utf-8")
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    code = _exit_code(copy, mutation.tests, SECONDS)
    path.write_text(source, encoding="utf-8")
    if code not in OUTCOMES:
        _refuse(f"{mutation.name} cannot be judged by {' '.join(mutation.tests)}: they end with exit code {code}")
    return OUTCOMES[code]


def _exit_code(copy: Path, tests: tuple[str, ...], seconds: float) -> int | None:
    """Run tests of the copy in a new process; `ENDED` plus the exit code of pytest, or None beyond the time limit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    child = context.Process(target=_pytest, args=(copy, tests))
    child.start()
    child.join(seconds)
    if child.exitcode is None:
        child.kill()
        child.join()
        return None
    return child.exitcode


def _pytest(copy: Path, tests: tuple[str, ...]) -> NoReturn:
    """Run tests of the copy silently and end the process."""
    os.chdir(copy)
    sys.path.insert(0, str(copy / "src"))
    sys.dont_write_bytecode = True
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)
    import pytest

    # Libraries with a plugin for pytest are imported already.
    options = ["-x", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *(f"tests/{test}" for test in tests)])
    if not str(sys.modules["limitlens"].__file__).startswith(str(copy)):
        sys.exit("the tests imported another limitlens than the copy's")
    os._exit(ENDED + code)


def _refuse(*sentences: str) -> NoReturn:
    print(*sentences, sep="\n", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    """Run the mutations whose names contain one of the arguments, and replace their rows in the saved results."""
    chosen = [each for each in MUTATIONS if any(part in each.name for part in sys.argv[1:])]
    if not chosen:
        _refuse(f"expected files or texts of mutations, such as {MUTATIONS[0].file}")
    saved = json.loads(SAVED.read_text())[:-1] if SAVED.exists() else []
    found = {row["what"]: row for row in (*saved, *outcomes(chosen))}
    rows = with_summary([found[each.name] for each in MUTATIONS if each.name in found])
    SAVED.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
