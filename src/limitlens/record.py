"""The run folder: what a command leaves behind with `--out`, and how it was made.

`run.json` holds the command, its arguments, versions, seed, host and times beside the result; tables are written twice,
as Parquet for programs and CSV for people; states as safetensors. Files appear whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from limitlens.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

PACKAGES = ("limitlens", "numpy", "scipy", "torch", "pandas", "transformers")
FORMAT = 1  # of run.json; it rises when a reader of the old one would misunderstand the new one


def to_json(document: Any, *, indent: int | None = 2) -> str:
    """`document` as strict JSON: arrays as lists, numbers that are not finite as null."""
    return json.dumps(_plain(document), indent=indent, ensure_ascii=False, allow_nan=False)


def provenance(command: str, arguments: Mapping[str, Any], started: datetime) -> dict[str, Any]:
    """Who made a result: command, arguments, versions, host and times."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "format": FORMAT,
        "command": command,
        "arguments": dict(arguments),
        "seed": arguments.get("seed"),
        "versions": versions,
        "host": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
        },
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def open_folder(folder: str | Path) -> Path:
    """Make the run folder before the work begins, so that a bad path is told before anything is lost."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write to {str(path)!r} ({error.strerror}); give --out a folder you may write"
        ) from None
    return path


def write_run(
    folder: Path,
    made_by: Mapping[str, Any],
    result: Mapping[str, Any],
    tables: Mapping[str, pd.DataFrame] | None = None,
) -> None:
    """Write tables first and `run.json` last, so that a folder with a run.json is complete."""
    for name, table in (tables or {}).items():
        write_whole(folder / f"{name}.parquet", lambda path, table=table: table.to_parquet(path, index=False))  # type: ignore[misc]
        write_whole(folder / f"{name}.csv", lambda path, table=table: table.to_csv(path, index=False))  # type: ignore[misc]
    text = to_json({**made_by, "result": result})
    write_whole(folder / "run.json", lambda path: path.write_text(text + "\n", encoding="utf-8"))


def read_run(folder: str | Path) -> dict[str, Any]:
    """What `write_run` left in a folder: the contents of its run.json, the result under "result"."""
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
    if not isinstance(run, dict) or run.get("format") != FORMAT or not isinstance(run.get("result"), dict):
        versions = run.get("versions") if isinstance(run, dict) else None
        made = versions.get("limitlens", "unknown") if isinstance(versions, dict) else "unknown"
        raise InputError(
            f"{str(path / 'run.json')!r} was made by another version of limitlens ({made}); "
            f"expected format {FORMAT}, so run its command again with this version"
        )
    return run


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write` on a temporary neighbour of `path` and move it into place."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
