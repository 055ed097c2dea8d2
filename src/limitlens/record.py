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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from limitlens.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

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
            raise InputError(
                f"{str(self.folder)!r} is not whole ({error}); expected the arrays of a {self.kind}, so run it again"
            ) from None

    def result(self, kind: Any) -> Any:
        """The result that the folder holds, read by the `load` of the kind that it is expected to be."""
        if self.kind != kind.kind:
            raise InputError(
                f"{str(self.folder)!r} holds a {self.kind}; expected the folder of a {kind.kind}, which "
                f"`limitlens {getattr(kind, 'command', kind.kind)} --out` writes"
            )
        try:
            return replace(kind.load(self), made=self.made)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InputError(
                f"the run.json in {str(self.folder)!r} lacks what a {self.kind} needs ({type(error).__name__}: "
                f"{error}); expected one that limitlens wrote, so run its command again"
            ) from None


def to_json(document: Any, *, indent: int | None = 2) -> str:
    """`document` as strict JSON: arrays as lists, numbers that are not finite as null."""
    return json.dumps(plain(document), indent=indent, ensure_ascii=False, allow_nan=False)


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


def open_folder(folder: str | Path) -> Path:
    """Make the run folder before the work begins, so that a bad path is told before anything is lost."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"cannot write to {str(path)!r} ({error.strerror}); give a folder you may write") from None
    return path


def write_run(folder: str | Path, result: Result) -> Path:
    """Write arrays and tables first and `run.json` last, so that a folder with a run.json is complete."""
    path = open_folder(folder)
    arrays = result.arrays()
    if arrays:
        from safetensors.numpy import save_file

        whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        write_whole(path / ARRAYS, lambda partial: save_file(whole, partial))
    for name, table in result.tables().items():
        write_table(path / name, table)
    made = result.made or provenance(result.kind, {})
    text = to_json({"format": FORMAT, "kind": result.kind, **made, "result": result.document()})
    write_whole(path / "run.json", lambda partial: partial.write_text(text + "\n", encoding="utf-8"))
    return path


def write_table(stem: Path, table: pd.DataFrame) -> None:
    """A table as Parquet and as CSV."""
    write_whole(stem.with_suffix(".parquet"), lambda path: table.to_parquet(path, index=False))
    write_whole(stem.with_suffix(".csv"), lambda path: table.to_csv(path, index=False))


def read_run(folder: str | Path) -> Run:
    """What `write_run` left in a folder."""
    path = Path(folder)
    if path.name == "run.json":
        path = path.parent
    if not path.is_dir():
        raise InputError(f"there is no run folder {str(path)!r}; expected one that a command wrote with --out")
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{str(path)!r} holds no run.json; expected a finished run, so run its command again with --out"
        ) from None
    except (ValueError, OSError) as error:
        raise InputError(
            f"{str(path / 'run.json')!r} cannot be read ({error}); expected a whole JSON file, so run its command again"
        ) from None
    whole = isinstance(run, dict) and isinstance(run.get("result"), dict) and isinstance(run.get("kind"), str)
    if not whole or run.get("format") != FORMAT:
        versions = run.get("versions") if isinstance(run, dict) else None
        made = versions.get("limitlens", "unknown") if isinstance(versions, dict) else "unknown"
        raise InputError(
            f"{str(path / 'run.json')!r} was made by another version of limitlens ({made}); "
            f"expected format {FORMAT}, so run its command again with this version"
        )
    about = {key: value for key, value in run.items() if key not in ("result", "kind", "format")}
    return Run(run["kind"], about, run["result"], path)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` on a temporary neighbour of `path` and move it into place."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """A document of plain JSON values: arrays as lists, dataclasses by field, numbers that are not finite as null."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value) if item.name != "made"}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple, range)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def typed(kind: Any, value: Any) -> Any:
    """A JSON value as the type whose `plain` wrote it: dataclasses, outcomes, tuples, mappings and arrays, nested."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = [part for part in parts if part is not type(None)]
        return None if value is None and len(inner) < len(parts) else typed(inner[0], value)
    if origin is np.ndarray:
        return np.array([] if value is None else value, dtype=float)  # null becomes NaN
    if origin is tuple:
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(typed(part, item) for part, item in zip(kinds, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: typed(parts[1], item) for key, item in value.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, kind):
            return value
        hints = get_type_hints(kind)
        return kind(
            **{item.name: typed(hints[item.name], value[item.name]) for item in fields(kind) if item.name in value}
        )
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return math.nan if kind is float and value is None else value
