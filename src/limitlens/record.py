"""The run folder: what a result leaves behind with `save` or `--out`, and how it was made.

`run.json` says which kind of result it holds and in which format, the command, its arguments, versions, seed, host and
times, and the document of the result; tables are written twice, as Parquet for programs and CSV for people; arrays as
safetensors. Files appear whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from limitlens.errors import InputError

if TYPE_CHECKING:
    from limitlens.results import Result

PACKAGES = ("limitlens", "numpy", "scipy", "torch", "pandas", "transformers")
FORMAT = 3  # of run.json; it rises when a reader of the old one would misunderstand the new one
ARRAYS = "arrays.safetensors"


@dataclass(frozen=True)
class Run:
    """A run folder that was read: its kind, how it was made, and the document of its result."""

    kind: str
    made: Mapping[str, Any]
    document: Mapping[str, Any]
    folder: Path

    def arrays(self) -> dict[str, Any]:
        """The arrays of the result, as NumPy's."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(self.folder / ARRAYS)
        except (OSError, SafetensorError) as error:
            given = f"{str(self.folder)!r} is not whole ({error})"
            raise InputError(f"{given}; expected the arrays of a {self.kind}, so run it again") from None

    def result(self, kind: Any) -> Any:
        """The result that the folder holds, read by the `load` of the kind that it is expected to be."""
        if self.kind != kind.kind:
            raise InputError(
                f"{str(self.folder)!r} holds a {self.kind}; expected the folder of a {kind.kind}, which "
                f"`limitlens {getattr(kind, 'command', kind.kind)} --out` writes"
            )
        try:
            found = replace(kind.load(self), made=self.made)
            with np.errstate(all="ignore"):  # what its numbers say is told before anybody works with them
                found.check()
            return found
        except InputError as error:
            where = str(self.folder)
            raise error if where in str(error) else InputError(f"{where!r}: {error}; run its command again") from None
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, StopIteration) as error:
            raise InputError(
                f"the run.json in {str(self.folder)!r} lacks what a {self.kind} needs ({type(error).__name__}: "
                f"{error}); expected one that limitlens wrote, so run its command again"
            ) from None


def json_text(document: Any, *, indent: int | None = 2) -> str:
    """`document` as strict JSON: arrays as lists, numbers that are not finite as null."""
    return json.dumps(to_json(document), indent=indent, ensure_ascii=False, allow_nan=False)


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def provenance(command: str, arguments: Mapping[str, Any], started: datetime | None = None) -> dict[str, Any]:
    """Who made a result: command, arguments, the folder that its paths start from, versions, host and times."""
    now = datetime.now(UTC)
    return {
        "command": command,
        "arguments": dict(arguments),
        "folder": os.getcwd(),
        "seed": arguments.get("seed"),
        "versions": installed(PACKAGES),
        "host": {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()},
        "started": (started or now).isoformat(timespec="seconds"),
        "finished": now.isoformat(timespec="seconds"),
    }


@contextmanager
def open_folder(folder: str | Path, command: str, overwrite: bool = False) -> Iterator[Path]:
    """A run folder that may be written: it holds nothing of another command, unless `overwrite` says so.

    What was made of it and is empty at the end of the block is taken away again, so that an empty block tells of a bad
    path before the work begins.
    """
    path, made = Path(folder), []
    if not str(folder).strip():
        raise InputError(f"the folder is {str(folder)!r}; expected a name, such as runs/mine")
    if str(folder).startswith("~"):
        raise InputError(f"the folder is {str(folder)!r}, which no shell has expanded; expected its whole path")
    try:
        made = [one for one in (path, *path.parents) if not one.exists()]
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        holder = None if overwrite else _holder(path)
        if holder not in (None, command):
            other = f"what `limitlens {holder}` made" if holder else "a run.json that is not of limitlens"
            raise InputError(f"{str(path)!r} holds {other}; give another folder, or pass overwrite=True")
        yield path
    except (OSError, ValueError) as error:
        raise error if isinstance(error, InputError) else cannot_write(path, error) from None
    finally:
        for one in made:
            with suppress(OSError, ValueError):
                one.rmdir()


def _holder(path: Path) -> str | None:
    """The command whose result a folder holds; empty where its run.json is not of limitlens, None without one."""
    if not (path / "run.json").exists():
        return None
    try:
        return str(read_run(path).made["command"])
    except (InputError, KeyError):
        return ""


def cannot_write(path: Path, error: Exception) -> InputError:
    """That a place cannot be written, in one sentence."""
    reason = getattr(error, "strerror", None) or error
    return InputError(f"cannot write to {str(path)!r} ({reason}); give a place with room that you may write")


def write_run(folder: str | Path, result: Result, overwrite: bool = False) -> Path:
    """Write arrays, tables, the result's own `files` and `run.json`: a folder with a run.json is complete."""
    files: dict[str, Callable[[Path], Any]] = dict(result.files())
    if arrays := result.arrays():
        from safetensors.numpy import save_file

        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        files[ARRAYS] = partial(save_file, whole)
    for name, table in result.tables().items():
        files[f"{name}.parquet"] = partial(table.to_parquet, index=False)
        files[f"{name}.csv"] = partial(table.to_csv, index=False)
    made = result.made or provenance(result.kind, {})
    text = json_text({"format": FORMAT, "kind": result.kind, **made, "result": result.document()})
    with open_folder(folder, str(made["command"]), overwrite) as path:
        if (outside := next((name for name in files if Path(name).name != name or name == ".."), None)) is not None:
            raise InputError(f"{outside!r} is no name of a file; expected one without a folder in it")
        write_all({path / name: write for name, write in (files | {"run.json": text_writer(text)}).items()})
    return path


def text_writer(text: str) -> Callable[[Path], Any]:
    """What writes a text and the end of its last line."""
    return lambda path: path.write_text(text + "\n", encoding="utf-8", errors="xmlcharrefreplace")


def _no_number(name: str) -> None:
    raise ValueError(f"it holds {name}")


def read_run(folder: str | Path) -> Run:
    """What `write_run` left in a folder."""
    path = Path(folder)
    if path.name == "run.json":
        path = path.parent
    if not str(folder) or not os.path.isdir(path):
        raise InputError(f"there is no run folder {str(folder)[:200]!r}; expected one that a command wrote with --out")
    try:
        if not os.path.lexists(path / "run.json"):
            raise FileNotFoundError
        if not (path / "run.json").is_file():
            raise OSError("it is no file")
        run = json.loads((path / "run.json").read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError:
        given = f"{str(path)!r} holds no run.json"
        raise InputError(f"{given}; expected a finished run, so run its command again with --out") from None
    except (ValueError, OSError, RecursionError) as error:
        given = f"{str(path / 'run.json')!r} cannot be read ({error})"
        raise InputError(f"{given}; expected a whole JSON file, so run its command again") from None
    whole = isinstance(run, dict) and isinstance(run.get("result"), dict) and isinstance(run.get("kind"), str)
    whole = whole and all(isinstance(run.get(name), dict) for name in ("arguments", "versions", "host"))
    if not whole or run.get("format") != FORMAT:
        versions = run.get("versions") if isinstance(run, dict) else None
        made = versions.get("limitlens", "unknown") if isinstance(versions, dict) else "unknown"
        given = f"{str(path / 'run.json')!r} was made by another version of limitlens ({made})"
        raise InputError(f"{given}; expected format {FORMAT}, so run its command again with this version")
    about = {key: value for key, value in run.items() if key not in ("result", "kind", "format")}
    return Run(run["kind"], about, run["result"], path)


def write_all(files: Mapping[Path, Callable[[Path], Any]]) -> None:
    """Write every file beside its place, then move them all there, the last one last: a full disk changes nothing."""
    from safetensors import SafetensorError

    partials = {path: path.with_name(f".{path.stem}.partial{path.suffix}") for path in files}
    try:
        for path, beside in partials.items():
            files[path](beside)
        if len(partials) > 1:
            path.unlink(missing_ok=True)  # what the others belong to, until they are all in place
        for path, beside in partials.items():
            beside.replace(path)
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from None
    finally:
        for beside in partials.values():
            beside.unlink(missing_ok=True)


def to_json(value: Any) -> Any:
    """A document of plain JSON values: arrays as lists, dataclasses by field, numbers that are not finite as null."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json(getattr(value, item.name)) for item in fields(value) if item.name != "made"}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, (list, tuple, range)):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def from_json(kind: Any, value: Any) -> Any:
    """A JSON value as the type whose `plain` wrote it: dataclasses, outcomes, tuples, mappings and arrays, nested.

    What cannot be of the type raises a TypeError or ValueError, which `Run.result` tells as one sentence.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = [part for part in parts if part is not type(None)]
        return None if value is None and len(inner) < len(parts) else from_json(inner[0], value)
    if origin is np.ndarray:
        return np.array([] if value is None else value, dtype=float)  # null becomes NaN
    if origin is Literal and value not in parts:
        raise ValueError(f"{value!r} is none of {', '.join(map(repr, parts))}")
    if origin is tuple:
        kinds = [parts[0]] * len(_of(value, list, tuple)) if parts[-1] is Ellipsis else parts
        return tuple(from_json(part, item) for part, item in zip(kinds, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: from_json(parts[1], item) for key, item in _of(value, Mapping).items()}
    if is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, kind):
            return value
        hints = get_type_hints(kind)
        return kind(
            **{item.name: from_json(hints[item.name], value[item.name]) for item in fields(kind) if item.name in value}
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float:
        return math.nan if value is None else _of(value, int, float)
    return _of(value, kind) if kind in (int, str, bool) else value


def _of(value: Any, *kinds: type) -> Any:
    """`value`, which must be of one of these kinds; a truth is no number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{str(value)[:40]!r} is no {kinds[0].__name__}")
    return value
