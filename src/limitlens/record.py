"""Run folders, which hold a saved result: run.json, tables as Parquet and CSV, and arrays as safetensors."""

import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from limitlens.errors import InputError
from limitlens.estimate import Estimate

PACKAGES = ("limitlens", "numpy", "scipy", "torch", "pandas", "transformers")
FORMAT = 5  # version of run.json; raise it when older code would misunderstand the file
ARRAYS = "arrays.safetensors"


@dataclass(frozen=True)
class Run:
    """Contents of the folder of a saved result: its kind, how it was made (provenance), and its JSON document."""

    kind: str
    made: Mapping[str, Any]
    document: Mapping[str, Any]
    folder: Path

    def arrays(self) -> dict[str, Any]:
        """Read the NumPy arrays of the saved result, by name."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(self.folder / ARRAYS)
        except (OSError, SafetensorError) as error:
            problem = f"{str(self.folder)!r} is incomplete ({error})"
            raise InputError(f"{problem}; expected the arrays of a {self.kind}, so run it again") from None

    def result(self, kind: Any) -> Any:
        """Build the saved result as an object of class `kind`; an `InputError` if it is of another kind or damaged."""
        if self.kind != kind.kind:
            expected = f"a {kind.kind}, which `limitlens {getattr(kind, 'command', kind.kind)} --out` writes"
            raise InputError(f"{str(self.folder)!r} holds a {self.kind}; expected the folder of {expected}")
        try:
            result = replace(kind.load(self), made=self.made)
            with np.errstate(all="ignore"):  # a damaged file is reported below, not as a NumPy warning
                result.check()
            return result
        except InputError as error:
            folder = str(self.folder)
            raise error if folder in str(error) else InputError(f"{folder!r}: {error}; run its command again") from None
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, StopIteration) as error:
            given = f"the run.json in {str(self.folder)!r} lacks what a {self.kind} needs"
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{given} ({reason}); expected one that limitlens wrote, so run it again") from None


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of the packages that are installed, by name."""
    versions = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def provenance(command: str, arguments: Mapping[str, Any], started: datetime | None = None) -> dict[str, Any]:
    """Record of how a result was made, which is saved with it: command, arguments, versions, machine and times."""
    now = datetime.now(UTC)
    torch = sys.modules.get("torch")  # only a command that computes with torch has imported it
    host = {"python": platform.python_version(), "system": platform.platform(), "cores": os.cpu_count()}
    host |= {} if torch is None else {"threads": torch.get_num_threads()}
    return {
        "command": command,
        "arguments": dict(arguments),
        "folder": os.getcwd(),  # relative paths among the arguments start here
        "seed": arguments.get("seed"),
        "versions": installed(PACKAGES),
        "host": host,
        "started": (started or now).isoformat(timespec="seconds"),
        "finished": now.isoformat(timespec="seconds"),
    }


@contextmanager
def open_folder(folder: str | Path, command: str, overwrite: bool = False) -> Iterator[Path]:
    """Create a folder for a result; raise an `InputError` if it is not writable or holds a result of another command.

    `overwrite` accepts such a folder. A new folder that is still empty after the block is removed again.
    """
    path = Path(folder)
    created: list[Path] = []
    if not str(folder).strip():
        raise InputError(f"the name of the output folder is blank ({str(folder)!r}); expected one such as runs/mine")
    if str(folder).startswith("~"):
        raise InputError(f"the folder is {str(folder)!r}, which no shell has expanded; expected its whole path")
    try:
        created = [one for one in (path, *path.parents) if not one.exists()]
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        owner = None if overwrite else _command_of(path)
        if owner not in (None, command):
            other = f"a run of `limitlens {owner}`" if owner else "a run.json that limitlens did not write"
            raise InputError(f"{str(path)!r} holds {other}; give another folder, or pass overwrite=True")
        yield path
    except (OSError, ValueError) as error:
        raise error if isinstance(error, InputError) else cannot_write(path, error) from None
    finally:
        for one in created:
            with suppress(OSError, ValueError):
                one.rmdir()


def _command_of(path: Path) -> str | None:
    """Name of the command whose result a folder holds: None without a run.json, "" if run.json cannot be read."""
    if not (path / "run.json").exists():
        return None
    try:
        return str(read_run(path).made["command"])
    except (InputError, KeyError):
        return ""


def cannot_write(path: Path, error: Exception) -> InputError:
    """Make an `InputError` that says that a path cannot be written, with the reason from `error`."""
    reason = getattr(error, "strerror", None) or error
    return InputError(f"cannot write to {str(path)!r} ({reason}); give a path that you may write, on a disk with space")


def text_writer(text: str) -> Callable[[Path], Any]:
    """Make a function that writes the text and a final line break to a path, for `write_files`."""
    return lambda path: path.write_text(text + "\n", encoding="utf-8", errors="xmlcharrefreplace")


def read_run(folder: str | Path) -> Run:
    """Read the folder of a saved result, given by the folder or its run.json; an `InputError` if it cannot be read."""
    path = Path(folder).parent if Path(folder).name == "run.json" else Path(folder)
    file = path / "run.json"
    if not str(folder) or not os.path.isdir(path):
        raise InputError(f"there is no run folder {str(folder)[:200]!r}; expected one that a command wrote with --out")
    if not file.is_file():
        problem = f"{str(path)!r} holds no run.json"
        raise InputError(f"{problem}; expected a finished run, so run its command again with --out")
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        problem = f"{str(file)!r} cannot be read ({error})"
        raise InputError(f"{problem}; expected a complete JSON file, so run its command again") from None
    parts = {"result": dict, "kind": str, "arguments": dict, "versions": dict, "host": dict}
    found = run if isinstance(run, dict) else {}
    complete = all(isinstance(found.get(name), kind) for name, kind in parts.items())
    if not complete or found.get("format") != FORMAT:
        versions = found.get("versions")
        version = versions.get("limitlens", "unknown") if isinstance(versions, dict) else "unknown"
        problem = f"{str(file)!r} is of another version of limitlens ({version}), format {found.get('format')}"
        raise InputError(f"{problem}; expected a run of format {FORMAT}, so run its command again with this version")
    made = {key: value for key, value in found.items() if key not in ("result", "kind", "format")}
    return Run(found["kind"], made, found["result"], path)


def write_files(files: Mapping[Path, Callable[[Path], Any]]) -> None:
    """Write all files, or none if the disk is full; `files` maps each path to a function that writes to a path."""
    from safetensors import SafetensorError

    partials = {path: path.with_name(f".{path.stem}.partial{path.suffix}") for path in files}
    try:
        for path, partial_path in partials.items():
            files[path](partial_path)
        if len(partials) > 1:
            path.unlink(missing_ok=True)  # run.json, the last file: without it the folder is known to be incomplete
        for path, partial_path in partials.items():
            partial_path.replace(path)
    except (OSError, SafetensorError) as error:
        raise cannot_write(path, error) from None
    finally:
        for partial_path in partials.values():
            partial_path.unlink(missing_ok=True)


def json_text(document: Any, *, indent: int | None = 2) -> str:
    """Text of a value as strict JSON, with arrays as lists, and NaN and ∞ as null."""
    return json.dumps(to_json(document), indent=indent, ensure_ascii=False, allow_nan=False)


def to_json(value: Any) -> Any:
    """Convert a value for `json.dumps`: arrays to lists, dataclasses to dicts, NaN and ∞ to None."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        found: dict[str, Any] = {}
        for name, part in ((item.name, getattr(value, item.name)) for item in fields(value) if item.name != "made"):
            found |= _estimate_entries(name, part) if isinstance(part, Estimate) else {name: to_json(part)}
        return found
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return to_json(value.tolist())
    if isinstance(value, (list, tuple, range)):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def from_json(kind: Any, value: Any) -> Any:
    """Inverse of `to_json`: convert a JSON value to type `kind`; raise a TypeError or ValueError if it does not fit."""
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
        present = [item.name for item in fields(kind) if item.name in value]
        read = {name: from_json(hints[name], value[name]) for name in present if hints[name] is not Estimate}
        return kind(**read, **{name: _estimate_of(name, value) for name in present if hints[name] is Estimate})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float:
        return math.nan if value is None else _of(value, int, float)
    return _of(value, kind) if kind in (int, str, bool) else value


def _estimate_entries(name: str, estimate: Estimate) -> dict[str, Any]:
    """JSON entries of the estimate in a field: NAME and NAME_stderr ("stderr" if the name is "measured" or "value")."""
    stderr = "stderr" if name in ("measured", "value") else f"{name}_stderr"
    entries: dict[str, Any] = {name: estimate.value, stderr: estimate.stderr}
    if name == "measured":
        entries["interval"] = None if math.isnan(estimate.low) else (estimate.low, estimate.high)
    return to_json(entries)  # type: ignore[no-any-return]


def _estimate_of(name: str, document: Mapping[str, Any]) -> Estimate:
    """Estimate in the field `name`, read from the entries that `_estimate_entries` wrote."""
    stderr = document.get("stderr" if name in ("measured", "value") else f"{name}_stderr")
    ends = document.get("interval") if name == "measured" else None
    return Estimate(*(from_json(float, number) for number in (document[name], stderr, *(ends or (None, None)))))


def _of(value: Any, *kinds: type) -> Any:
    """Return `value` if it has one of the types `kinds` (a bool is not a number); otherwise raise a TypeError."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"{str(value)[:40]!r} is not of type {kinds[0].__name__}")
    return value
