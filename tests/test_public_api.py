"""The public API: every public name once; results that print, save, load and compare."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import limitlens as ll
from limitlens.loading import KINDS
from limitlens.models import LoadedModel
from limitlens.record import json_text
from limitlens.report.text import sentence

LINE = ll.Gaussian(0.0, 1.0)
SIZES = [50, 100, 200, 400]
KEYS = np.random.default_rng(0).standard_normal((400, 3))


def probe_run(seed: int = 0) -> Any:
    from report_cases import probe_case

    return probe_case(2, 3, sink=True, seed=seed)


def cache_plan() -> Any:
    from cache_cases import planned

    return planned()


def cache_trial() -> Any:
    from cache_cases import language_model, planned, text

    return ll.trial(planned(), documents=2, model=language_model(), corpus=text())


def tempered() -> Any:
    from temper_cases import tempered

    return tempered()


def depth() -> Any:
    from cache_cases import language_model, text

    return ll.depth(language_model(), text(), [4, 16], documents=2, window=32)


def downstream() -> Any:
    from downstream_cases import data, encoder

    return ll.downstream(encoder(), data(), [4, 16], test=12)


def generation() -> Any:
    from cache_cases import language_model, prompt

    return ll.generate(language_model(), cache_plan(), prompt(), max_new_tokens=3)


def certificate() -> Any:
    from cache_cases import language_model, text

    return ll.certify(language_model(), text(), context=128, documents=2, draws=4, rules=["int4", "output"])


def sparse_designs() -> Any:
    from tiny_models import TINY, tiny_tokenizer

    model = LoadedModel("letters", TINY["llama"].model(), tiny_tokenizer(special=False))
    return ll.designs(model, keys=[4, 8, 16], context=16, documents=6, queries=1, designs=["random", "recent", "knorm"])


def attributed() -> Any:
    from tiny_models import TINY, tiny_tokenizer

    model = LoadedModel("letters", TINY["llama"].model(), tiny_tokenizer(special=False))
    return ll.stability(model, keys=8, tail=12, queries=2, top=2, contexts=3, documents=3)


# What makes each kind of result, with inputs as small as they may be.
MAKERS: dict[str, Callable[[], Any]] = {
    "study": lambda: ll.study(LINE, ll.Head(0.5), SIZES, replicates=12, queries=32),
    "horizons": lambda: ll.sweep(LINE, horizons=[0.5, 1.5], sizes=SIZES, replicates=12, queries=32),
    "radii": lambda: ll.sweep(ll.Sphere(2), radii=[0.5, 1, 1.5, 2], sizes=SIZES, replicates=6, queries=32),
    "hardmax": lambda: ll.hardmax(SIZES, replicates=8),
    "tails": lambda: ll.tails(tilts=[0.4, 2.0], sizes=[100, 1000], replicates=8),
    "tail verdict": lambda: ll.tails(KEYS),
    "scaling": lambda: ll.scaling(dim=3, n=400, replicates=100),
    "schedules": lambda: ll.schedules([100, 1000], dim=3),
    "heat": lambda: ll.heat_flow(n=300, layers=5),
    "theory": lambda: ll.theory_report(LINE, ll.Head(1.5), 1000, sizes=SIZES),
    "probe": probe_run,
    "plan": cache_plan,
    "trial": cache_trial,
    "generation": generation,
    "certificate": certificate,
    "temper": tempered,
    "depth": depth,
    "downstream": downstream,
    "designs": sparse_designs,
    "stability": attributed,
    "comparison": lambda: ll.compare(probe_run(), probe_run(seed=1)),
    "reproduction": lambda: ll.reproduce("backward-heat", quick=True, layers=5, n=300),
}
every_kind = pytest.mark.parametrize("kind", MAKERS)


@cache
def made(kind: str) -> Any:
    return MAKERS[kind]()


def import_everything() -> None:
    for module in pkgutil.walk_packages(ll.__path__, "limitlens."):
        importlib.import_module(module.name)


def test_every_public_name_is_there_after_every_module_was_imported() -> None:
    import_everything()
    for name in ll.__all__:
        assert getattr(ll, name) is not None, name
        if name not in ("theory", "__version__"):
            assert callable(getattr(ll, name)), name
    for name in ll.theory.__all__:
        found = getattr(ll.theory, name)
        assert callable(found), name
        assert not inspect.ismodule(found), name
        assert found.__name__ == name
        assert found.__module__.startswith("limitlens.theory"), name
    assert set(ll.__all__) <= set(dir(ll))
    assert inspect.ismodule(ll.theory)
    assert ll.__version__.count(".") == 2


def test_no_module_bears_the_name_of_a_public_function() -> None:
    for door in (ll, ll.theory):
        modules = {module.name for module in pkgutil.iter_modules(door.__path__)} - {"theory"}
        assert not modules & set(door.__all__)


def test_unknown_names_are_refused() -> None:
    for door in (ll, ll.theory):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            _ = door.nothing


def test_every_kind_has_a_maker() -> None:
    assert set(MAKERS) == set(KINDS)


@every_kind
def test_results_print_and_show(kind: str) -> None:
    result = made(kind)
    assert result.kind == kind
    assert len(repr(result)) < 2000
    assert len(str(result).splitlines()) > 3
    assert "<" in result._repr_html_()
    assert isinstance(result.table, pd.DataFrame)
    assert len(result.table) > 0
    json.loads(json_text(result.document()))


# Results that never warn by themselves; a kind that is missing here must have warnings, and they are tested.
WITHOUT_WARNINGS = {"generation", "hardmax", "tails", "tail verdict", "schedules", "heat", "downstream", "comparison"}


@every_kind
def test_every_warning_of_a_result_is_printed_and_on_its_page(kind: str, tmp_path: Path) -> None:
    result, odd = made(kind), "the text was <odd>"
    if "warnings" in {field.name for field in fields(result)}:
        result = replace(result, warnings=(odd,))
    elif kind == "theory":
        result = replace(result, predicted={**result.predicted, "warnings": [odd]})
    elif kind in ("horizons", "radii"):
        result = replace(result, curves=(replace(result.curves[0], warnings=[odd]), *result.curves[1:]))
    elif kind == "temper":
        result, odd = replace(result, interrupted=True), "the run was interrupted"
    assert hasattr(result, "warnings") == (kind not in WITHOUT_WARNINGS)
    if kind in WITHOUT_WARNINGS:
        odd = ""
    else:
        assert odd in " ".join(result.warnings)
        assert f"warning: {sentence(odd).rstrip('.')}" in str(result)
        assert escape(odd) in result._repr_html_()
    result = replace(result, made={"warnings": ["--device was ignored"]})
    page = result.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert escape(sentence(odd).rstrip(".")) in page
    assert "--device was ignored" in page


@every_kind
def test_results_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    result = made(kind)
    loaded = ll.load(result.save(tmp_path / "run"))
    assert type(loaded) is type(result)
    assert json_text(loaded.document()) == json_text(result.document())
    assert str(loaded) == str(result)
    assert loaded._repr_html_() == result._repr_html_()
    assert loaded.made["versions"]["limitlens"] == ll.__version__
    assert json.loads((tmp_path / "run" / "run.json").read_text())["kind"] == kind
    page = loaded.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!")
    assert result.view().title in page


@every_kind
def test_results_are_drawn(kind: str, tmp_path: Path) -> None:
    if kind == "generation":  # a text and a few numbers
        with pytest.raises(ll.InputError, match="this result has no figure"):
            made(kind).plot(tmp_path / "figure.png")
        return
    made(kind).plot(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_attend_approaches_the_limit() -> None:
    tokens = np.random.default_rng(1).standard_normal((20_000, 1))
    assert ll.attend(tokens, ll.Head(0.5), [[1.0]]) == pytest.approx(ll.limit(LINE, ll.Head(0.5), [[1.0]]), abs=0.05)
    assert ll.designed_head(LINE, 2.0).A.item() == pytest.approx(2.0)


def test_two_studies_are_compared() -> None:
    other = ll.study(LINE, ll.Head(0.5), SIZES, replicates=12, queries=32, seed=1)
    assert len(ll.compare(made("study"), other).table) > 0


def test_a_folder_that_is_no_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ll.InputError, match="no run folder"):
        ll.load(tmp_path / "nowhere")
    folder = made("theory").save(tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"kind": "poem"}))
    with pytest.raises(ll.InputError, match="'poem'; expected one of study, "):
        ll.load(folder)


@every_kind
def test_a_damaged_document_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    folder = made(kind).save(tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    for result in ({}, dict.fromkeys(run["result"], 7), dict.fromkeys(run["result"])):
        (folder / "run.json").write_text(json.dumps(run | {"result": result}))
        with pytest.raises(ll.InputError, match="again"):
            ll.load(folder)


@pytest.mark.parametrize(
    "call",
    [
        "ll.limit(ll.Gaussian(0.0, 1.0), ll.Head(1.5), [[1.0]])",
        "ll.theory.summary(ll.Gaussian(0.0, 1.0), ll.Head(1.5), 1000)",
        "ll.theory.top_cdf([0.5], ll.theory.PoissonPoints(1.0, 1.0))",
    ],
)
def test_theory_never_waits_for_torch(call: str) -> None:
    code = f"import sys, limitlens as ll; {call}; print('torch' in sys.modules or 'pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_page_of_a_run_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from limitlens.cli.other import report

    folder = made("theory").save(tmp_path / "run")
    report(str(folder), json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["report"] == str(folder / "report.html")
    assert told["bytes"] == (folder / "report.html").stat().st_size


def test_a_law_of_ones_own_from_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "measures.md").read_text(encoding="utf-8")
    section = text[text.index("## Your own law") :]
    code = section[section.index("```python\n") + 10 :]
    space: dict[str, Any] = {}
    exec(code[: code.index("```")], space)
    mu, curve = space["mu"], space["curve"]
    assert space["summary"].predicted["inputs"]["measure"].startswith("Coins")
    assert space["head"].A.shape == (2, 2)
    exact = ll.Discrete([[a, b] for a in (-1, 1) for b in (-1, 1)])
    assert space["limit"] == pytest.approx(ll.limit(exact, space["head"], [[1.0, 0.5]]), rel=1e-12)
    from limitlens.measures import as_measure

    assert as_measure(mu).covariance == pytest.approx(np.eye(2), abs=1e-10)
    assert as_measure(mu).hess_K(np.ones((3, 2))) == pytest.approx(exact.hess_K(np.ones((3, 2))), abs=1e-10)
    errors = curve.table.query("error == 'output'")["value"]
    assert errors.iloc[-1] < errors.iloc[0]
    assert "Coins" in repr(curve) + str(curve)


def test_an_object_that_is_no_law_is_refused() -> None:
    with pytest.raises(ll.InputError, match="a float without dim; expected"):
        ll.limit(1.0, ll.Head(1.0), [[1.0]])  # type: ignore[arg-type]
    with pytest.raises(ll.InputError, match="the class Gaussian; expected"):
        ll.limit(ll.Gaussian, ll.Head(1.0), [[1.0]])  # type: ignore[arg-type]


def test_every_file_of_words_and_data_is_installed() -> None:
    home, project = Path(ll.__file__).parent, Path(__file__).parents[1] / "pyproject.toml"
    patterns = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]["limitlens"]
    installed = {path for pattern in patterns for path in home.glob(pattern)}
    there = {path for path in home.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert there <= installed, sorted(there - installed)
