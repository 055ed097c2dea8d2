"""Hostile command lines and files, each made from a valid one, and the rules that every call must follow.

A case is a list of arguments and the files it reads, copies of valid files that were cut, flipped, swapped or edited.
The tests and `make soak` draw cases from the strategies here and pass them to `check`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import mkdtemp
from types import FrameType
from typing import Any, get_args, get_type_hints

import numpy as np
import typer
from hypothesis import strategies as st

from cache_cases import language_model
from limitlens import cli, load
from tiny_models import letters

LIMIT = 20.0  # seconds of computing that a case may take: all are tiny or refused
PATIENCE = 10  # and as many times as long by the clock, on a machine that others use too

# Small calls of every command, to which hostile options are added; {model}, {text}, ... are names of good files.
PROBE = (
    "probe", "{model}", "--corpus", "{text}", "--tokens", "1500", "--window", "16", "--sizes", "8:32:3",
    "--replicates", "3", "--queries", "16", "--batch", "20",
)  # fmt: skip
SMALL = ("--sizes", "20:80:3", "--replicates", "4")
CALLS: dict[str, tuple[str, ...]] = {
    "probe": PROBE,
    "predict": ("predict", "{model}", "--corpus", "{text}", "--tokens", "800", "--window", "16",
              "--sizes", "8:64:4", "--queries", "16"),
    "study": ("study", *SMALL),
    "horizons": ("study", *SMALL, "--horizons", "0.5,1"),
    "radii": ("study", *SMALL, "--measure", "ball", "--radius", "1:2:3"),
    "sample": ("study", *SMALL, "--sample", "{tokens}"),
    "hardmax": ("hardmax", *SMALL),
    "tails": ("tails", *SMALL),
    "verdict": ("tails", "--sample", "{tokens}"),
    "theory": ("theory", "--n", "100"),
    "scaling": ("scaling", "--n", "100", "--replicates", "8"),
    "heat": ("heat-flow", "--layers", "8"),
    "schedules": ("schedules", "--sizes", "10:100:3"),
    "plan": ("plan", "{model}", "--corpus", "{text}", "--error", "0.5", "--context", "64"),
    "cache": ("plan", "{model}", "--corpus", "{text}", "--policy", "recent", "--total", "0.5", "--context", "64"),
    "trial": ("trial", "{cache}", "--documents", "2"),
    "generate": ("generate", "{model}", "--plan", "{cache}", "--prompt", "{prompt}", "--max-new-tokens", "2"),
    "certify": ("certify", "{model}", "--corpus", "{text}", "--context", "128", "--documents", "2", "--draws", "2",
                "--rules", "int4"),
    "temper": ("temper", "{model}", "--to", "64", "--trained", "32", "--text", "{text}", "--steps", "1",
               "--documents", "2"),
    "depth": ("depth", "{model}", "--corpus", "{text}", "--keys", "4,8", "--documents", "2", "--window", "16"),
    "downstream": ("downstream", "{model}", "--data", "{labelled}", "--keys", "4,8", "--window", "16", "--test", "6"),
    "designs": ("designs", "{model}", "--corpus", "{text}", "--keys", "4:16:3", "--context", "24", "--documents", "4",
                "--queries", "4"),
    "stability": ("stability", "{model}", "--corpus", "{text}", "--keys", "8", "--contexts", "2",
                     "--documents", "2"),
    "reproduce": ("reproduce", "--list"),
    "compare": ("compare", "{probe}", "{probe}"),
    "report": ("report", "{study}", "--out", "{new}/page.html"),
    "doctor": ("doctor",),
}  # fmt: skip
SAVED = ("probe", "predict", "study", "horizons", "radii", "hardmax", "tails", "verdict", "theory", "scaling",
         "heat", "schedules", "plan", "cache", "compare")  # fmt: skip
READ_BY = ("report", "compare", "plan", "trial")  # what reads a run folder

NUMBERS = (
    "0", "-1", "-0.0", "1", "2", "3", "0.5", "1.5", "1e-300", "1e300", "1e400", "nan", "inf", "-inf", "1e16", "1_0",
    "10000000000000000", "99999999999999999999999999", "0x10", "١", "1e", "", " ", "-", "--", "a", "1,2", "1;2", "½",
)  # fmt: skip
GRIDS = (
    "1:2", "1:2:0", "1:2:-1", "2:1:3", "1:2:3:4", "::", "0:1:3", "-1:1:3", "nan:1:2", "1:inf:3", "1:1e16:3", "1,2,",
    "8:16:2", "5,5,5", "1e300", "1:2:99999999999999999999", "20:40:2,5", ",", "3,2,1", "1e-300:1e300:5", "1:2:1e3",
)  # fmt: skip
WORDS = (
    "gaussian", "sphere", "vmf", "ball", "cube", "mixture", "student", "uniform", "power", "flat", "1/k", "cpu", "cuda",
    "cuda:99", "bos", "best", "random", "auto", "Ⅷ", "\udcff", "a\nb", "../x", "x" * 5000, "%s{}", "<b>", "null",
    "{text}", "{tokens}", "{model}", "{probe}", "{missing}", "{empty}", "{folder}", "{new}", "/dev/null", "/proc", "~",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    arguments: tuple[str, ...]
    code: int | None  # its exit code; None where it ended otherwise
    out: str
    err: str
    seconds: float
    faults: tuple[str, ...]  # what it broke of the promises below, each in a line; empty where it kept them all


class _Late(BaseException):
    """The time of a case is over; nothing that catches errors catches this."""


class Ground:
    """A folder with one good file of every kind that is read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.names = {name: str(folder / name) for name in ("model", "missing", "empty", "folder", *SAVED)}
        self.names |= {name: str(folder / f"{name}.npy") for name in ("tokens",)}
        self.names["text"] = letters(folder, spaces=4)
        rows = [f"{'xyz'[i % 2] * 40}\t{i % 2}" for i in range(16)]
        (folder / "labelled.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
        self.names["labelled"] = str(folder / "labelled.tsv")
        (folder / "prompt.txt").write_text("abc " * 8)
        self.names["prompt"] = str(folder / "prompt.txt")
        with contextlib.redirect_stderr(io.StringIO()):  # it draws a bar
            language_model().model.save_pretrained(folder / "model")
        language_model().tokenizer.save_pretrained(folder / "model")
        np.save(folder / "tokens.npy", np.random.default_rng(3).normal(size=(120, 3)))
        (folder / "empty").touch()
        (folder / "folder").mkdir()
        (folder / "model.gguf").write_bytes(_gguf())
        for name in SAVED:
            made = self.run([*CALLS[name], "--out", self.names[name]])
            assert made.code == 0, (name, made.err, made.faults)

    def new(self) -> Path:
        """A path where nothing is yet."""
        self.count += 1
        return self.folder / f"case{self.count}"

    def copy(self, name: str) -> Path:
        """A copy of a good file or folder."""
        source, place = Path(self.names.get(name, str(self.folder / name))), self.new()
        if source.is_dir():
            copytree(source, place)
        else:
            place = place.with_suffix(source.suffix)
            place.write_bytes(source.read_bytes())
        return place

    def run(self, arguments: list[str], files: dict[str, str] | None = None) -> Outcome:
        """Call the command line in this process and hold it to its promises."""
        new, here = self.new(), os.getcwd()
        names = self.names | {"new": str(new)} | (files or {})
        given = tuple(re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), word) for word in arguments)
        scratch = Path(mkdtemp(dir=self.folder))  # what is written where nobody asked is found here
        os.chdir(scratch)
        try:
            outcome = _call(given)
            left = sorted(path.name for path in scratch.iterdir())
            faults = [*outcome.faults, *_broken(outcome, new)]
            if left and (outcome.code != 0 or not {"--plot", "--out"} & set(given)):
                faults.append(f"left {left} in the current folder")
            return Outcome(given, outcome.code, outcome.out, outcome.err, outcome.seconds, tuple(faults))
        finally:
            os.chdir(here)
            rmtree(scratch)
            rmtree(new, ignore_errors=True)


def _call(arguments: tuple[str, ...]) -> Outcome:
    def late(number: int, frame: FrameType | None) -> None:
        raise _Late

    out, err, faults, code = io.StringIO(), io.StringIO(), [], None
    timers = {signal.SIGALRM: (signal.ITIMER_REAL, PATIENCE * LIMIT), signal.SIGPROF: (signal.ITIMER_PROF, LIMIT)}
    before = {number: signal.signal(number, late) for number in timers}
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for timer, limit in timers.values():
            signal.setitimer(timer, limit)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.main(list(arguments))
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 0
        except _Late:
            where = traceback.extract_tb(sys.exc_info()[2])
            faults.append(f"hang: more than {LIMIT:g} s, at {_own(where)}")
        except BaseException as error:
            faults.append(f"traceback: {type(error).__name__} at {_own(traceback.extract_tb(error.__traceback__))}")
        finally:
            for number, (timer, _) in timers.items():
                signal.setitimer(timer, 0)
                signal.signal(number, before[number])
    faults += [f"warning: {note.category.__name__}: {note.message} at {note.filename}:{note.lineno}" for note in warned]
    return Outcome(arguments, code, out.getvalue(), err.getvalue(), time.perf_counter() - begun, tuple(faults))


def _own(frames: traceback.StackSummary) -> str:
    """The last place in our own code, and the last of all."""
    own = [frame for frame in frames if "/limitlens/" in frame.filename]
    last = [*own[-1:], frames[-1]]
    return ", in ".join(dict.fromkeys(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in last))


def _broken(outcome: Outcome, new: Path) -> Iterator[str]:
    """The promises of the contract that a call has not kept."""
    code, lines = outcome.code, outcome.err.splitlines()
    if code is None:
        return
    if code not in (0, 2, 130):
        yield f"exit code {code}"
    if code == 2:
        if len(lines) != 1 or not lines[0].startswith("limitlens: "):
            yield f"not one sentence on stderr: {outcome.err!r}"
        if outcome.out:
            yield f"refused after it had printed {outcome.out[:80]!r}"
    if code == 2 and (new / "run.json").exists():
        yield "refused and left a run that looks whole"
    if code == 0:
        if any(not line.startswith("warning: ") for line in lines):
            yield f"stderr is {outcome.err!r}"
        if "--json" in outcome.arguments and not {"-h", "--help", "--version"} & set(outcome.arguments):
            try:
                json.loads(outcome.out, parse_constant=lambda name: float("x"))
            except ValueError as error:
                yield f"stdout is no JSON document ({error})"
        if (new / "run.json").exists():
            load(new)
    if list(new.parent.glob(f"{new.name}/.*partial*")):
        yield "left a part of a file"


def _gguf() -> bytes:
    """A GGUF file of no tensors, after the description of the format."""

    def word(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    sizes = {"block_count": 2, "embedding_length": 8, "feed_forward_length": 8, "context_length": 64,
             "attention.head_count": 2, "vocab_size": 2}  # fmt: skip
    entries = [
        word("general.architecture") + struct.pack("<I", 8) + word("llama"),
        *(word(f"llama.{name}") + struct.pack("<II", 4, count) for name, count in sizes.items()),
        word("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + word("a") + word("b"),
        word("tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.5, 1.0),
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries)


@cache
def ground() -> Ground:
    """The one ground of this process."""
    return Ground(Path(mkdtemp(prefix="fuzz")))


@cache
def _options(command: str) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """The options of a command, as it lists them itself, and what values are likely to reach its inside; None: none."""
    found: list[tuple[str, tuple[str, ...] | None]] = [("--what", WORDS)]
    functions = {function.__name__.replace("_", "-"): function for panel in cli.PANELS.values() for function in panel}
    kinds = get_type_hints(functions[command])
    for option in typer.main.get_command(cli.app).commands[command].params:  # type: ignore[attr-defined]
        numeric = {int, float} & {kinds[option.name], *get_args(kinds[option.name])}
        grid = ":" in (option.metavar or "")
        values = None if getattr(option, "is_flag", False) else NUMBERS if numeric else GRIDS if grid else WORDS
        found += [(name, values) for name in option.opts if name.startswith("--")]
    return tuple(found)


VALUES = st.one_of(
    *map(st.sampled_from, (NUMBERS, GRIDS, WORDS)), st.text(st.characters(exclude_characters="\0/"), max_size=8)
)


@st.composite
def calls(draw: st.DrawFn) -> list[str]:
    """A small call of some command with one to three hostile options, or a hostile argument in place of a good one."""
    call = list(CALLS[draw(st.sampled_from(sorted(CALLS)))])
    for name, values in draw(st.lists(st.sampled_from(_options(call[0])), min_size=1, max_size=3)):
        value = draw(VALUES if values is None or draw(st.integers(0, 4)) == 0 else st.sampled_from(values))
        # a good folder that a call may not write to would be another case's file
        call += [name] if values is None else [name, value.replace("{", "") if name == "--out" else value]
    if draw(st.integers(0, 5)) == 0:
        place = draw(st.integers(1, len(call)))
        call[place : place + 1] = draw(st.lists(VALUES, max_size=2))
    if draw(st.booleans()):
        call += draw(st.sampled_from((["--json"], ["--out", "{new}"], ["--json", "--out", "{new}"], ["--quiet"])))
    return call


FOREIGN = (b"", b"\0" * 64, b"\xff" * 64, b"{}", b"[]", b"null", b"\xef\xbb\xbf", b"PK\x03\x04", b"\x80\x04N.")


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes cut, flipped, put in, left out or swapped for others."""
    how = draw(st.sampled_from(("cut", "flip", "put", "drop", "swap", "twice")))
    place = draw(st.integers(0, len(whole)))
    if draw(st.booleans()):
        place = min(place, draw(st.integers(0, 256)))  # headers are where files lie
    few = draw(st.binary(min_size=1, max_size=12))
    before, after = whole[:place], whole[place:]
    match how:
        case "cut":
            return before
        case "flip":
            return before + bytes(byte ^ few[k] if k < len(few) else byte for k, byte in enumerate(after))
        case "put":
            return before + few + after
        case "drop":
            return before + after[len(few) :]
        case "twice":
            return whole + whole
    return draw(st.sampled_from((*FOREIGN, few)))


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from((10**30, -1e300, 1e300, 0.5, "", "x", "nan", "…")),
    st.lists(st.integers(0, 2), max_size=2), st.dictionaries(st.sampled_from(("n", "a")), st.none(), max_size=1),
)  # fmt: skip


@st.composite
def edited(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document in which one value somewhere is replaced, left out or doubled."""
    document = json.loads(json.dumps(document))
    inside = document
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        if not keys:
            return draw(SCALARS) if inside is document else document
        key = draw(st.sampled_from(keys))
        deeper = isinstance(inside[key], (dict, list)) and draw(st.integers(0, 4)) > 0
        if not deeper:
            break
        inside = inside[key]
    how = draw(st.sampled_from(("replace", "replace", "drop", "wrap")))
    if how == "drop":
        del inside[key]
    else:
        inside[key] = [inside[key]] if how == "wrap" else draw(SCALARS)
    return document


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    """A command that reads the folder of a run, of which one file was damaged or edited."""
    name, place = draw(st.sampled_from(SAVED)), ground().new()
    copytree(ground().names[name], place)
    files = [path for path in ("run.json", "arrays.safetensors") if (place / path).exists()]
    file = place / draw(st.sampled_from([*files, "run.json"]))
    if file.name == "run.json" and draw(st.integers(0, 4)):
        file.write_text(json.dumps(draw(edited(json.loads(file.read_text())))))
    else:
        file.write_bytes(draw(damaged(file.read_bytes())))
    reader = draw(st.sampled_from(READ_BY))
    call = {
        "report": ["report", "{run}", "--out", "{new}/page.html"],
        "compare": ["compare", *draw(st.permutations(("{run}", f"{{{name}}}")))],
        "plan": ["plan", "{model}", "--corpus", "{text}", "--run", "{run}", "--error", "0.3", "--context", "64"],
        "trial": ["trial", "{run}", "--documents", "2"],
    }[reader]
    return call, {"run": str(place)}


STRANGE: dict[str, tuple[Any, ...]] = {
    "shape": ((0, 3), (3, 0), (1, 1), (2, 3), (90, 1), (90,), (30, 3, 1), ()),
    "kind": ("f4", ">f8", "f2", "i1", "u8", "?", "c8", "S3", "U2", "M8[s]", "g"),
    "scale": (0, 1e-200, 1e-30, 1e30, 1e150, 1e300),
    "shift": (1, 1e8, 1e300),
    "value": (np.nan, np.inf, -np.inf, 1e308, -1e160),
    "suffix": (".npz", ".txt"),
    "damage": (True,),
}


@st.composite
def arrays(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    """A command that reads a .npy file with one or two strange things about it."""
    good = {"shape": (90, 3), "kind": "f8", "scale": 1, "shift": 0, "value": 0, "suffix": ".npy", "damage": False}
    chosen = draw(st.lists(st.sampled_from(sorted(STRANGE)), min_size=1, max_size=2, unique=True))
    given = good | {name: draw(st.sampled_from(STRANGE[name])) for name in chosen}
    values = np.random.default_rng(draw(st.integers(0, 3))).normal(size=given["shape"])
    values = np.asarray(values * given["scale"] + given["shift"])
    if "value" in chosen and values.size:
        values.flat[draw(st.integers(0, values.size - 1))] = given["value"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = (np.nan_to_num(values).astype("i8") if given["kind"] == "M8[s]" else values).astype(given["kind"])
    place = ground().new().with_suffix(given["suffix"])
    with place.open("wb") as file:
        (np.savez if place.suffix == ".npz" else np.save)(file, array)
    if given["damage"]:
        place.write_bytes(draw(damaged(place.read_bytes())))
    call = draw(st.sampled_from(("sample", "verdict")))
    return list(CALLS[call]), {"tokens": str(place)}


@st.composite
def models(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    """A probe of a folder or a GGUF file that was damaged or edited."""
    if draw(st.integers(0, 3)) == 0:
        place = ground().copy("model.gguf")
        place.write_bytes(draw(damaged(place.read_bytes())))
    else:
        place = ground().copy("model")
        file = place / draw(st.sampled_from(sorted(path.name for path in place.iterdir())))
        if file.suffix == ".json" and draw(st.integers(0, 4)):
            file.write_text(json.dumps(draw(edited(json.loads(file.read_text())))))
        elif draw(st.integers(0, 3)):
            file.write_bytes(draw(damaged(file.read_bytes())))
        else:
            file.unlink()
    return [*CALLS["predict"], "--out", "{new}"], {"model": str(place)}


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    """A probe of a text that is hardly one."""
    place = ground().new().with_suffix(".txt")
    words = st.text(max_size=30).map(lambda text: text.encode("utf-8", "replace"))
    piece = draw(st.one_of(st.binary(max_size=30), words))
    place.write_bytes(piece * draw(st.sampled_from((1, 1, 400))))
    return [*CALLS["predict"], "--out", "{new}"], {"text": str(place)}


SURFACES: dict[str, st.SearchStrategy[tuple[list[str], dict[str, str]]]] = {
    "calls": calls().map(lambda call: (call, {})),
    "runs": runs(),
    "arrays": arrays(),
    "models": models(),
    "texts": texts(),
}
CASES = {"calls": 200, "runs": 130, "arrays": 90, "models": 60, "texts": 20}  # of the tests: 500


def check(case: tuple[list[str], dict[str, str]]) -> Outcome:
    """Run a case and clear away what it read; its `faults` are empty where every promise was kept."""
    arguments, files = case
    try:
        return ground().run(arguments, files)
    finally:
        for path in map(Path, files.values()):
            rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
