"""The dependency graph between the packages of limitlens, drawn from its imports, and limits on the size of the code.

Every import counts: at the top of a module, inside a function, under `if TYPE_CHECKING`, and modules that are named by
strings (`loading.KINDS`, `runs=` of a command). `python tests/test_packages.py` prints the table EDGES and the graph
of docs/architecture.md as they should be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import limitlens
from limitlens.loading import KINDS

SOURCE = Path(limitlens.__file__).parent
ARCHITECTURE = SOURCE.parents[1] / "docs" / "architecture.md"
BASE = {"arrays", "cost", "errors", "estimate", "outcome", "record", "results"}  # left out of the graph in the docs

# Every dependency that exists. One that is missing here is an error, and so is one that no import uses.
EDGES = {
    "arrays": "",
    "attention": "arrays errors measures theory",
    "cache": "arrays attention cost errors estimate models probing record report results sampling statistics theory",
    "cli": (
        "attention cache comparison errors experiments interventions loading measures models probing published "
        "record report results sampling"
    ),
    "comparison": "arrays errors estimate experiments probing record report results statistics",
    "cost": "arrays errors",
    "errors": "",
    "estimate": "",
    "experiments": "arrays attention cost errors estimate measures record report results sampling statistics theory",
    "interventions": "arrays attention cost errors estimate models record report results sampling statistics theory",
    "loading": "cache comparison errors experiments interventions probing published record results statistics",
    "measures": "arrays cost errors",
    "models": "arrays attention cost errors record sampling",
    "outcome": "",
    "probing": "arrays attention cost errors estimate models record report results sampling statistics theory",
    "published": (
        "arrays attention errors estimate experiments interventions measures models probing record report results "
        "sampling statistics theory"
    ),
    "record": "errors estimate",
    "report": "errors estimate",
    "results": "errors record report",
    "sampling": "arrays attention errors measures record",
    "statistics": "arrays attention errors estimate measures outcome report results theory",
    "theory": "errors measures outcome",
}

# Dependencies that break a rule of this file and still have to be removed.
KNOWN_EDGES: set[tuple[str, str]] = set()

MAX_SOURCE_LINES = 26_000
MAX_PACKAGE_LINES = 3_500
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80

# What is still longer than its limit, with the number of lines that it may have until then.
KNOWN_SIZES: dict[str, int] = {"src": 27_700}


def packages() -> list[str]:
    """Names of the packages and of the modules directly inside limitlens."""
    inside = [path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    return sorted(path.stem for path in inside if path.stem != "__init__")


def source_files(package: str) -> list[Path]:
    """Python files of a package, or the one file of a module."""
    folder = SOURCE / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Full names of the modules and objects that a file imports, `runs="probing.probe"` of a command included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.keyword) and node.arg == "runs" and isinstance(node.value, ast.Constant):
            yield f"limitlens.{node.value.value}"


def dependency_graph() -> dict[str, set[str]]:
    """The packages that each package imports."""
    graph: dict[str, set[str]] = {}
    for package in packages():
        trees = [ast.parse(file.read_text(encoding="utf-8")) for file in source_files(package)]
        names = {name for tree in trees for name in imported_modules(tree)}
        assert "limitlens" not in names, f"{package} imports the whole of limitlens; expected the module it needs"
        graph[package] = {name.split(".")[1] for name in names if name.startswith("limitlens.")} - {package}
    graph["loading"] |= {place.split(".")[0].split(":")[0] for place in KINDS.values()}
    return graph


def without_known_edges(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without the dependencies in KNOWN_EDGES."""
    return {package: {other for other in graph[package] if (package, other) not in KNOWN_EDGES} for package in graph}


def mermaid(graph: dict[str, set[str]]) -> str:
    """The graph as docs/architecture.md shows it: without BASE and without arrows that other arrows imply."""
    drawn = {package: others - BASE for package, others in graph.items() if package not in BASE}
    TopologicalSorter(drawn).prepare()  # a cycle would never end below

    def reachable(package: str) -> set[str]:
        return drawn[package] | {far for other in drawn[package] for far in reachable(other)}

    lines = []
    for package, others in drawn.items():
        implied = {far for other in others for far in reachable(other)}
        lines += [f"  {package} --> {other}" for other in sorted(others - implied)]
    return "\n".join(["```mermaid", "graph TD", *lines, "```"])


def module_name(path: Path) -> str:
    """The dotted name of a module inside limitlens, such as probing.probe."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def line_counts() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Lines of each package, each module and each function."""
    in_package, in_module, in_function = {}, {}, {}
    for package in packages():
        for file in source_files(package):
            text = file.read_text(encoding="utf-8")
            in_module[module_name(file)] = text.count("\n")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                    in_function[f"{module_name(file)}:{node.name}"] = node.end_lineno - node.lineno + 1
        if (SOURCE / package).is_dir():
            in_package[package] = sum(in_module[module_name(file)] for file in source_files(package))
    return in_package, in_module, in_function


def test_dependencies_form_no_cycle() -> None:
    graph = dependency_graph()
    for package, other in KNOWN_EDGES:
        assert other in graph[package], f"{package} no longer imports {other}; remove it from KNOWN_EDGES"
    try:
        TopologicalSorter(without_known_edges(graph)).prepare()
    except CycleError as error:
        pytest.fail(f"packages import each other in a cycle: {' -> '.join(reversed(error.args[1]))}")


def test_the_table_lists_exactly_the_dependencies_that_exist() -> None:
    graph = dependency_graph()
    exist = {(package, other) for package, others in graph.items() for other in others}
    listed = {(package, other) for package, others in EDGES.items() for other in others.split()}
    assert not exist - listed, f"dependencies that EDGES lacks: {sorted(exist - listed)}"
    assert not listed - exist, f"entries of EDGES that no import uses: {sorted(listed - exist)}"


def test_the_documentation_shows_the_graph() -> None:
    graph = mermaid(without_known_edges(dependency_graph()))
    assert graph in ARCHITECTURE.read_text(encoding="utf-8"), f"docs/architecture.md shows another graph than\n{graph}"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("report", {"errors", "estimate"}),
        ("theory", {"arrays", "errors", "measures", "outcome"}),
        ("record", {"errors", "estimate", "report"}),
        ("results", {"errors", "estimate", "record", "report"}),
    ],
)
def test_base_packages_import_little(package: str, allowed: set[str]) -> None:
    imported = without_known_edges(dependency_graph())[package]
    assert imported <= allowed, f"{package} imports {sorted(imported - allowed)}; expected only {sorted(allowed)}"


def test_sizes_are_within_their_limits() -> None:
    in_package, in_module, in_function = line_counts()
    sizes = {"src": (sum(in_module.values()), MAX_SOURCE_LINES)}
    sizes |= {f"package {name}": (lines, MAX_PACKAGE_LINES) for name, lines in in_package.items()}
    sizes |= {f"module {name}": (lines, MAX_MODULE_LINES) for name, lines in in_module.items()}
    sizes |= {f"function {name}": (lines, MAX_FUNCTION_LINES) for name, lines in in_function.items()}
    too_long = {name: lines for name, (lines, limit) in sizes.items() if lines > KNOWN_SIZES.get(name, limit)}
    assert not too_long, f"longer than their limits: {too_long}"
    mended = [name for name in KNOWN_SIZES if name not in sizes or sizes[name][0] <= sizes[name][1]]
    assert not mended, f"within their limits, so remove them from KNOWN_SIZES: {mended}"


def main() -> None:
    """Print the table EDGES and the graph of docs/architecture.md as the imports make them."""
    graph = dependency_graph()
    for package in sorted(graph):
        print(f'    "{package}": "{" ".join(sorted(graph[package]))}",')
    print(f"\n{mermaid(without_known_edges(graph))}")


if __name__ == "__main__":
    main()
