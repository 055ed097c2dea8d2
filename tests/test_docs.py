"""The documentation is executable: examples of docstrings, code blocks, commands, notebooks, figures.

Blocks of Python run as they stand, but for `SMALLER`: names of real models become that of a small random one, and sizes
shrink. Commands are parsed with all their options; those of `QUICK` are run as well.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import limitlens as ll
from limitlens import theory
from limitlens.cli import app, main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("**/*.md")])
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
PROBED = "tokens=3000, window=50, sizes=[8, 32, 128], replicates=4, queries=16"
SMALLER = {
    'corpus="stdlib-docs", tokens=100_000': f"corpus=TEXT, {PROBED}",
    '"minilm"': "MODEL",
    '"smollm2"': "MODEL",
    "tokens=100_000": "tokens=2_000",
    '"1000:100000:9", replicates=400': '"100:1600:5", replicates=20',
    "context=32768": "context=128",
    "[:, :9000]": "[:, :300]",
    'll.apply(model, "runs/plan")': "ll.apply(model, ll.plan(MODEL, total=0.5, context=64))",
    'corpus="stdlib-docs", seed=0)': "corpus=TEXT, seed=0, window=50, tokens=3_000, sizes=[8, 32, 128], queries=16)",
    'corpus="stdlib-docs", total=0.25, context=512': "corpus=TEXT, total=0.25, context=64",
}
QUICK = ("theory", "doctor", "schedules")


def doors() -> dict[str, Any]:
    """Every public name with what it is."""
    found = {f"ll.{name}": getattr(ll, name) for name in ll.__all__}
    found |= {f"theory.{name}": getattr(theory, name) for name in theory.__all__}
    return {name: what for name, what in found.items() if inspect.isfunction(what) or inspect.isclass(what)}


def example_of(name: str) -> doctest.DocTest:
    text = inspect.getdoc(doors()[name]) or ""
    return doctest.DocTestParser().get_doctest(text, {"ll": ll, "np": np, "theory": theory}, name, None, None)


EXAMPLES = [name for name in doors() if example_of(name).examples]


def test_every_public_function_has_an_example() -> None:
    assert [name for name, what in doors().items() if inspect.isfunction(what) and name not in EXAMPLES] == []


def given(name: str) -> dict[str, Any]:
    """A model and a text, or labelled documents, that an example may speak of."""
    import cache_cases
    import downstream_cases
    import temper_cases

    if name == "ll.temper":
        return {"model": temper_cases.decoder(steps=0), "text": temper_cases.text()}
    if name == "ll.downstream":
        return {"model": downstream_cases.encoder(), "data": downstream_cases.data()}
    return {"model": cache_cases.language_model(), "text": cache_cases.text(), "prompt": cache_cases.prompt()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_of_docstrings_give_their_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example = example_of(name)
    source = "".join(one.source for one in example.examples)
    if "model" in source:
        example.globs |= given(name)
    assert doctest.DocTestRunner().run(example).failed == 0, capsys.readouterr().out


def test_the_reference_holds_every_public_name() -> None:
    told = re.findall(r"^::: (\S+)", "\n".join((DOCS / page).read_text() for page in ("api.md", "api-theory.md")), re.M)
    assert len(set(told)) == len(told)
    shown = {name.rsplit(".", 1)[1] for name in told}
    assert {name.split(".")[1] for name in doors()} - shown == set()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of every fenced block of a page, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


@cache
def stand_in(folder: Path) -> tuple[str, str]:
    """A small decoder in a folder, and a text, in the place of real ones."""
    from cache_cases import language_model, text

    loaded = language_model()
    loaded.model.save_pretrained(folder / "model")
    loaded.tokenizer.save_pretrained(folder / "model")
    return str(folder / "model"), text()


def smaller(text: str) -> str:
    """Code of a page or notebook with small models and sizes in the place of real ones."""
    for real, small in SMALLER.items():
        text = text.replace(real, small)
    return text


def prepare(folder: Path, model: str, text: str) -> None:
    """What a page finds in the folder it runs in: runs of a probe, and exponents that somebody fitted."""
    from limitlens.models import load
    from limitlens.models.exponents import Exponents, identity

    run = ll.probe(model, corpus=text, tokens=3000, window=50, sizes=[8, 32, 128], replicates=4, queries=16)
    for name in ("minilm", "demo"):
        run.save(folder / "runs" / name)
    loaded = load(model, head=True).model
    zero = np.zeros((loaded.config.num_hidden_layers, loaded.config.num_attention_heads))
    made = Exponents("m", identity(loaded), 256, 512, "yarn", "a text", "head", 0.2, zero, zero)
    (folder / "runs" / "temper").mkdir()
    made.write(folder / "runs" / "temper" / "per_head_constant_far_0.2.json")


CODE = [page for page in PAGES if any(language == "python" for language, _ in blocks(page))]


@pytest.mark.parametrize("page", CODE, ids=[str(page.relative_to(ROOT)) for page in CODE])
def test_python_of_the_pages_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = [text for language, text in blocks(page) if language == "python"]
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "page"}
    if any(f'"{name}' in text for text in code for name in ("minilm", "smollm2", "runs/")):
        space["MODEL"], space["TEXT"] = stand_in(tmp_path)
        if any('"runs/' in text for text in code):
            prepare(tmp_path, space["MODEL"], space["TEXT"])
    for text in code:
        exec(compile(smaller(text), page.name, "exec"), space)


def commands() -> list[str]:
    """Every command that a page shows: a line of a block, indented code, or words within backticks."""
    found = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line.strip() for _, block in blocks(page) for line in block.splitlines()]
        lines += re.findall(r"^    (limitlens .*)$", text, re.M) + re.findall(r"`(limitlens [^`\n]+)`", text)
        found |= {line for line in lines if re.match(r"limitlens [a-z]+( |$)", line)}
    return sorted(found)


def arguments(line: str) -> list[str]:
    """What a command is given: without comments, dots and what a shell does with its output."""
    return shlex.split(re.split(r" [>|] ", line.replace("...", ""))[0], comments=True)[1:]


@pytest.mark.parametrize("line", commands())
def test_commands_of_the_pages_have_the_options_they_show(line: str) -> None:
    name, *words = arguments(line)
    group: Any = typer.main.get_command(app)
    assert name in group.commands, f"there is no command {name!r}"
    if words:  # a command that is only named needs no arguments
        group.commands[name].make_context(name, list(words))


@pytest.mark.parametrize(
    "line", [line for line in commands() if any(word in line for word in QUICK) and ".npy" not in line]
)
def test_quick_commands_of_the_pages_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(arguments(line))
    assert not ended.value.code
    assert len(capsys.readouterr().out) > 200


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebooks_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cell by cell as Jupyter does: the last expression of a cell is shown. Only the tutorial stores outputs."""
    monkeypatch.chdir(tmp_path)
    document, space = json.loads(path.read_text(encoding="utf-8")), {"__name__": "__main__"}
    if stored := path.stem == "tutorial":
        space["MODEL"], space["TEXT"] = stand_in(tmp_path)
    assert (document["nbformat"], len({cell["id"] for cell in document["cells"]})) == (4, len(document["cells"]))
    shown = 0
    for cell in document["cells"]:
        if cell["cell_type"] == "code":
            assert (bool(cell["outputs"]), cell["execution_count"] is not None) == (stored, stored)
            *steps, last = ast.parse(smaller("".join(cell["source"]))).body
            if not isinstance(last, ast.Expr):
                steps.append(last)
            exec(compile(ast.Module(steps, []), path.name, "exec"), space)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), path.name, "eval"), space)
                assert value is None or getattr(value, "_repr_html_", lambda: "")() or repr(value)
                shown += 1
    assert shown >= 4


def test_the_gallery_shows_the_figures_of_its_commands() -> None:
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    made = re.findall(r"```bash\n(limitlens .*--out runs/(\S+))\n```\n\n!\[.+\]\(figures/(\S+)\.png\)", text)
    assert len(made) == text.count("![") == text.count("\n## ") >= 10
    for _, folder, picture in made:
        assert folder == picture
        assert (DOCS / "figures" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


def test_printed_theory_in_the_docs_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [line for _, block in blocks(DOCS / "quickstart.md") for line in block.splitlines() if "rate_" in line]
    with pytest.raises(SystemExit):
        main(["theory", "--horizon", "1.5", "--n", "30000"])
    printed = capsys.readouterr().out.splitlines()
    assert len([line for line in shown if "predicted" not in line and line in printed]) == 4
