"""The rooms and who calls whom: arrows point down only, lazy imports counted, imports for types alone not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import limitlens
from limitlens.loading import KINDS

SOURCE = Path(limitlens.__file__).parent
GROUND = {"arrays", "cost", "errors", "outcome", "record", "results"}  # what every room stands on


def rooms() -> list[str]:
    """The packages and the modules beside them."""
    inside = [path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    return sorted(path.stem for path in inside if path.stem != "__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    """Names of imported modules of the package, lazy ones too; not those under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for other in node.orelse:
                yield from imports(other)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        else:
            yield from imports(node)


def graph() -> dict[str, set[str]]:
    """Which room imports which, but for the arrows that point up."""
    found: dict[str, set[str]] = {}
    for room in rooms():
        home = SOURCE / room
        files = sorted(home.rglob("*.py")) if home.is_dir() else [home.with_suffix(".py")]
        names = {name for file in files for name in imports(ast.parse(file.read_text(encoding="utf-8")))}
        called = {name.split(".")[1] for name in names if name.startswith("limitlens.")}
        assert "limitlens" not in names, f"{room} goes through the front door"
        found[room] = called - {room}
    found["loading"] |= {where.split(".")[0].split(":")[0] for where in KINDS.values()}
    for room, other in UPWARD:
        found[room].discard(other)
    return found


def mermaid(called: dict[str, set[str]]) -> str:
    """The graph as docs/architecture.md shows it, without the ground and without arrows that others imply."""
    found = {room: others - GROUND for room, others in called.items() if room not in GROUND}

    def reached(room: str) -> set[str]:
        return found[room] | {far for other in found[room] for far in reached(other)}

    lines = []
    for room, others in found.items():
        implied = {far for other in others for far in reached(other)}
        lines += [f"  {room} --> {other}" for other in sorted(others - implied)]
    return "\n".join(["graph TD", *lines])


def test_arrows_point_down_only() -> None:
    called = graph()
    assert list(TopologicalSorter(called).static_order())
    drawn = f"```mermaid\n{mermaid(called)}\n```"
    shown = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert drawn in shown, f"docs/architecture.md shows another graph than\n{drawn}"


def test_every_room_calls_only_whom_it_may() -> None:
    for room, others in graph().items():
        allowed = {"report"} if room in GROUND else set(MAY_CALL) if room == "cli" else MAY_CALL[room]
        assert others <= allowed | GROUND, (room, sorted(others - allowed - GROUND))


def test_report_knows_nobody_and_theory_only_measures() -> None:
    called = graph()
    assert called["report"] <= GROUND
    assert called["theory"] <= GROUND | {"measures", "report"}
