"""Every renderer (page, terminal, notebook, paper) on one view that contains every kind of element."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from limitlens.errors import InputError
from limitlens.estimate import Estimate
from limitlens.report.notebook import as_html
from limitlens.report.page import SCRIPTS, compact, embedded, page, widgets
from limitlens.report.paper import PALETTE, draw
from limitlens.report.terminal import as_text, show
from limitlens.report.text import cell, falling, join, numeric, plural, sentence, short
from limitlens.report.view import (
    SHADES,
    Axis,
    Figure,
    Guide,
    Row,
    Section,
    Series,
    Table,
    Text,
    View,
    Widget,
    band,
    line,
    look,
    points,
)  # fmt: skip
from limitlens.results import plot, write_page
from page_reader import Reader

NASTY = "</script><script>window.hacked=1</script><!-- <b>&amp; \"'\u2028 ü"
N = [64, 256, 1024, 4096]
ERRORS = [0.9 * n**-0.47 for n in N]
STDERRS = [0.05 * error for error in ERRORS]
TOKENS, ERROR = Axis("number of tokens n", log=True), Axis("relative error", log=True)

REGIMES = ["averaging", "selective", "frozen"]

CURVES = Figure(
    f"Errors {NASTY}",
    TOKENS,
    ERROR,
    [
        points("measured", N, ERRORS, "blue", STDERRS, joined=True, labels=["first", "", "", NASTY]),
        points("without bars", N, [*ERRORS[:3], math.nan], "red", dash="dashed"),
        line("fitted", N, ERRORS, "orange", "dashed"),
        band("likely", N, [0.8 * e for e in ERRORS], [1.2 * e for e in ERRORS], "green"),
        line("unnamed", N, ERRORS, "ink", "dotted", listed=False),
    ],
    guides=[Guide("5% wanted", y=0.05), Guide("here", x=1000), Guide("outside", y=70.0)],
)
NUMBERS = Figure(
    "Rates", Axis("head", whole=True), Axis("layer", whole=True),
    [Series("rate", "map", [0, 1, 2], [0, 1], values=np.array([[0.1, 0.5, np.nan], [0.2, 0.3, 0.4]]))],
)  # fmt: skip
WORDS = Figure(
    "Regimes", Axis("head"), Axis("layer"),
    [Series("regime", "map", range(15), [0, 1], values=np.array([[0, 1, 2] * 5, [2, np.nan, 0] * 5]), words=REGIMES)],
)  # fmt: skip
PLAIN = Figure("Linear", Axis("R", low=0.0), Axis("share", low=0.0, high=1.0), [points("share", [1, 2], [0.2, 0.9])])
ROWS: list[Sequence[Any]] = [(n, Estimate(e, s), "power") for n, e, s in zip(N, ERRORS, STDERRS, strict=True)]
ERRORS_TABLE = Table("errors", ("n", "error", "law"), ROWS, marked=frozenset({1}), shown=3)
NASTY_TABLE = Table(NASTY, (NASTY, "value"), [(NASTY, 1.5), (None, None), ("far", math.inf)])
MADE = {
    "command": "study",
    "arguments": {"measure": NASTY, "context": 2048, "seed": 0, "radius": 0.5, "mask_self": True, "out": None},
    "versions": {"limitlens": "7.8.9", "python": "3"},
    "host": {"cores": 2},
    "started": "2031-01-01T00:00:00+00:00",
    "finished": "2031-01-01T00:00:09+00:00",
}


def everything() -> View:
    return View(
        title=f"Title {NASTY}",
        subtitle=f"Subtitle {NASTY}",
        verdict=(f"Measured {NASTY}.", "It found something.", "Do something."),
        sections=[
            Section("Errors", "They fall.", [CURVES, ERRORS_TABLE, Text([f"Plain {NASTY}"])], name="errors"),
            Section("Side by side", "", [Row([NUMBERS, WORDS]), Row([PLAIN, NASTY_TABLE])]),
            Section("List", "", [Text(["first thing", "second thing"], listed=True)]),
            Section("Folded", "", [Table("all of them", ("k", "k/7"), [(k, k / 7) for k in range(40)], folded=True)]),
            Section("Parts", "", [Widget(name) for name in widgets()], only="page"),
            Section("For terminals", "", [Table("t", ("who",), [("terminals alone",)])], only="terminal"),
            Section("For notebooks", "", [Table("b", ("who",), [("notebooks alone",)])], only="notebook"),
        ],
        above=[Text(["right under the verdict"])],
        data={"budget": {"values": np.array([[1.0, np.nan]])}, "name": NASTY},
        warnings=[f"beware of {NASTY}"],
        trust=["the floor is low"],
        details={"device": "cpu", "corpus sha256": None},
    )


def data_of(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found is not None
    return json.loads(found[1])


def visible(text: str) -> str:
    return " ".join(text.split())


def test_a_page_shows_everything_and_runs_nothing_from_outside() -> None:
    html = page(everything(), MADE)
    read = Reader(html)
    assert sum(tag == "script" for tag, _ in read.tags) == 2  # the data and the page's own
    assert "<script>window" not in html
    assert read.text.count(visible(NASTY)) >= 6  # title twice, subtitle, verdict, text, table, warning
    for shown in (
        "They fall.", "It found something.", "Do something.", "first thing", "right under the verdict", "All of them",
        "The floor is low.", "Made by limitlens 7.8.9.", "year = {2031}", "The figures need JavaScript", "cpu",
        "Versions, machine and times", "0.1274 ± 0.006",
    ):  # fmt: skip
        assert visible(shown) in re.sub(r"year +=", "year =", read.text), shown
    for hidden in ("terminals alone", "notebooks alone", "corpus sha256"):
        assert hidden not in read.text
    ids = [attributes["id"] for _, attributes in read.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert {"errors", "map", "panel", "budgets", "rates", "regime-share", "theme"} <= set(ids)
    linked = [value for _, a in read.tags for name, value in a.items() if name in ("src", "href") and value]
    assert all(value.startswith(("#", "data:")) for value in linked)


def test_a_page_is_the_same_every_time() -> None:
    assert page(everything(), MADE) == page(everything(), MADE)


def test_only_the_scripts_of_the_page_may_run() -> None:
    html = page(everything(), {})
    script = re.findall(r"<script>(.*?)</script>", html, re.S)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert "default-src 'none'" in html


def test_figures_travel_as_descriptions() -> None:
    data = data_of(page(everything(), MADE))
    assert data["budget"] == {"values": [[1, None]]}
    assert data["name"] == NASTY
    curves, numbers, words, plain = data["figures"]
    assert curves["x"] == {"label": "number of tokens n", "log": True, "whole": False}
    assert curves["guides"][:2] == [{"label": "5% wanted", "y": 0.05}, {"label": "here", "x": 1000}]
    measured, bare, fitted, likely, unnamed = curves["series"]
    assert measured["kind"] == "points"
    assert measured["joined"] is True
    assert measured["low"][0] == pytest.approx(ERRORS[0] * (1 - 1.96 * 0.05), rel=1e-4)
    assert (bare["y"][-1], "low" in bare, bare["dash"]) == (None, False, "dashed")
    assert (fitted["dash"], likely["kind"], unnamed["listed"]) == ("dashed", "band", False)
    assert numbers["series"][0]["values"] == [[0.1, 0.5, None], [0.2, 0.3, 0.4]]
    assert words["series"][0]["words"] == ["averaging", "selective", "frozen"]
    assert plain["y"] == {"label": "share", "log": False, "low": 0, "high": 1, "whole": False}


def test_cells_of_a_page_carry_their_numbers() -> None:
    html = page(everything(), MADE)
    assert f'<td class="number" data-value="{ERRORS[0]:.6g}">{cell(Estimate(ERRORS[0], STDERRS[0]))}</td>' in html
    assert html.count("<tr class=marked>") == 1
    assert '<td class="number">∞</td>' in html  # a number without a value in the CSV
    assert "<details><summary>All of them</summary>" in html


def test_a_page_without_provenance_shows_no_command() -> None:
    html = page(replace(everything(), warnings=[]), {})
    assert "limitlens study" not in html
    assert "The run gave no warnings." in html
    assert "Versions, machine and times" in html  # the device at least


def test_a_page_of_a_command_shows_warnings_in_its_options() -> None:
    view = View("t", "", ("", "", ""), [], warnings=["texts begin without it; pass special='bos'"])
    assert "pass --special bos" in page(view, {"typed": "limitlens plan"})
    assert "pass special=" in page(view, {})


def test_the_page_shows_the_command_that_was_typed() -> None:
    typed = "limitlens compare a 'b c'"
    assert f"<pre>{escape(typed)}</pre>" in page(everything(), MADE | {"typed": typed})


def test_embedded_json_cannot_leave_its_element() -> None:
    text = embedded({"name": NASTY + "\u2029", "number": 0.123456789, "bad": math.nan})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"name": NASTY + "\u2029", "number": 0.12346, "bad": None}


def test_numbers_are_cut_to_five_digits() -> None:
    assert compact({"a": (1 / 3, 2e20, 7.0, 123456.7, True, "x", None, -math.inf)}) == {
        "a": [0.33333, 2e20, 7, 123460, True, "x", None, None]
    }
    assert compact(np.array([[1.5, np.nan]])) == [[1.5, None]]


def test_a_page_goes_into_a_file_or_a_folder(tmp_path: Path) -> None:
    assert write_page(everything(), tmp_path, MADE) == tmp_path / "report.html"
    deep = write_page(everything(), tmp_path / "new" / "page.html", MADE)
    assert deep.read_text(encoding="utf-8") == (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write to"):
        write_page(everything(), tmp_path / "file" / "page.html", MADE)


def test_a_terminal_shows_every_cell_and_no_codes() -> None:
    text = as_text(everything())
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    for row in (*ROWS[:3], *NASTY_TABLE.rows):
        for value in row:
            assert visible(cell(value)) in visible(text)
    assert cell(ROWS[3][1]) not in text  # the fourth row is not shown
    assert "... and 1 more: `table` in Python, or --json / --out" in text
    for shown in (
        "Errors", "Plain ", "  - second thing", "terminals alone", "What it found\nIt found something.",
        "What to do\nDo something.", "note: The floor is low.",
    ):  # fmt: skip
        assert shown in text, shown
    for hidden in ("notebooks alone", "Parts", "beware", "right under", "They fall", "5% wanted"):
        assert hidden not in text, hidden
    assert "\n\n\n" not in text


def test_text_stands_left_and_numbers_right() -> None:
    lines = as_text(replace(everything(), sections=[Section("", "", [ERRORS_TABLE])])).splitlines()
    head, first = next((a, lines[i + 2]) for i, a in enumerate(lines) if "law" in a)
    assert head.index("n") == first.index("64") + 1
    assert head.index("law") == first.index("power")
    table = Table("t", ("word", "number", "marked", "none"), [("a", 1, "12*", "-"), ("b", None, "–", "-")])
    assert numeric(table) == [False, True, True, False]


def test_a_narrow_terminal_breaks_sentences_between_words() -> None:
    long = replace(everything(), sections=[], verdict=("", "many words " * 20, ""))
    assert max(map(len, as_text(long, width=40).splitlines())) <= 40
    assert "What to do" not in as_text(long)
    assert "many words " * 19 in as_text(long)
    assert "\x1b[1m" in as_text(long, colour=True)


def test_a_narrow_terminal_leaves_columns_out_rather_than_break_names_and_numbers() -> None:
    columns = ("key policy", "share of the cache", *(f"error {k}" for k in range(8)))
    rows = [(name, 0.25, *[Estimate(0.12345, 0.001)] * 8) for name in ("random_eviction", "reconstruction")]
    view = View("t", "", ("", "", ""), [Section("", "", [Table("", columns, rows)])])
    narrow, wide = as_text(view, width=80), as_text(view, width=200)
    assert max(map(len, narrow.splitlines())) <= 80
    assert all(f"  {name}" in narrow for name, *_ in rows)
    assert "0.1235 ± 0.001" in narrow
    assert "the columns error 2, error 3, error 4, error 5, error 6, error 7: `table` in Python" in " ".join(
        narrow.split()
    )
    assert "the columns" not in wide
    assert wide.count("0.1235 ± 0.001") == 16


def test_a_notebook_prints_text_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told = as_text(everything())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert as_text(everything()) == told


def test_a_notebook_shows_a_drawing() -> None:
    assert draw([PLAIN])._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    show(everything())
    plain = replace(everything(), warnings=())  # which a command prints on stderr
    assert capsys.readouterr().out == as_text(plain) + "\n"


def test_a_notebook_gets_tables_and_maps_without_scripts() -> None:
    html = as_html(everything())
    read = Reader(html)
    tags = {tag for tag, _ in read.tags}
    assert not tags & {"script", "style", "iframe", "b"}
    assert not any(name.startswith("on") for _, attributes in read.tags for name in attributes)
    assert visible(f"Title {NASTY}") in read.text
    assert "notebooks alone" in read.text
    assert "terminals alone" not in read.text
    maps = [attributes for tag, attributes in read.tags if tag == "img"]
    assert len(maps) == html.count("data:image/png;base64,iVBOR") == 2  # of rates and of regimes
    assert "… and 28 more rows." in read.text  # 12 of 40
    assert "… and 1 more rows." in read.text  # 3 of 4, as the table says


@pytest.mark.parametrize("figures", [[CURVES], [NUMBERS], [WORDS], [PLAIN], [CURVES, CURVES, NUMBERS, WORDS, PLAIN]])
@pytest.mark.parametrize("ending", ["png", "pdf", "SVG"])
def test_paper_draws_every_kind(figures: list[Figure], ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"figure.{ending}"
    drawing = plot(figures, path)
    assert path.stat().st_size > 1000
    panels = [axes for axes in drawing.axes if axes.get_xlabel()]
    assert [axes.get_xlabel() for axes in panels] == [figure.x.label for figure in figures]
    if len(figures) > 1:
        (legend,) = drawing.legends  # one of all names, below them all, because two panels share some
        names = [text.get_text() for text in legend.get_texts()]
        assert names == ["measured", "without bars", "fitted", "likely", "share"]


def test_panels_whose_names_look_different_have_their_own_legends() -> None:
    one = Figure("", TOKENS, ERROR, [line("a", N, ERRORS, "blue"), line("b", N, ERRORS, "red")])
    other = Figure("", TOKENS, ERROR, [line("a", N, ERRORS, "green"), line("b", N, ERRORS, "red")])
    drawing = draw([one, other])
    assert not drawing.legends
    assert all(axes.get_legend() is not None for axes in drawing.axes)


def test_paper_has_the_numbers_of_the_figure() -> None:
    (axes,) = draw([CURVES]).axes
    dots, bare, fitted, unnamed = (axes.lines[index] for index in range(4))
    np.testing.assert_allclose(dots.get_ydata(), ERRORS)
    np.testing.assert_allclose(np.asarray(bare.get_ydata())[:3], ERRORS[:3])
    assert (fitted.get_linestyle(), unnamed.get_linestyle()) == ("--", ":")
    assert (fitted.get_color(), unnamed.get_color()) == (PALETTE["orange"], "black")
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    (legend,) = [axes.get_legend()]
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["measured", "without bars", "fitted", "likely"]
    assert {text.get_text() for text in axes.texts} == {"5% wanted", "here"}  # what lies outside is not drawn
    (plain,) = draw([PLAIN]).axes
    assert plain.get_ylim() == (0.0, 1.0)
    assert plain.get_xlim()[0] == 0.0
    image = draw([NUMBERS]).axes[0].images[0].get_array()
    assert image is not None
    np.testing.assert_allclose(image.filled(np.nan), NUMBERS.series[0].values)
    bar = draw([WORDS]).axes[1]
    assert [label.get_text() for label in bar.get_yticklabels()] == ["averaging", "selective", "frozen"]


@pytest.mark.parametrize("low", [0.5212, 3.3, 1234.5])
def test_a_narrow_logarithmic_axis_has_ticks(low: float) -> None:
    figure = Figure("", TOKENS, ERROR, [points("narrow", N, [low, 1.0002 * low, 1.0003 * low, 1.0004 * low])])
    drawing = draw([figure])
    drawing.canvas.draw()
    (axes,) = drawing.axes
    bottom, top = axes.get_ylim()
    labels = [label for label in axes.get_yticklabels() if bottom <= label.get_position()[1] <= top]
    assert len({label.get_text() for label in labels if label.get_text()}) >= 2


@pytest.mark.parametrize("name", ["a.foo", "a", "regime"])
def test_paper_refuses_an_ending_that_it_cannot_write(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a file that ends in one of: .*pdf.*png"):
        plot([PLAIN], tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="cannot write to"):
        plot([PLAIN], tmp_path / "no such folder" / "a.png")


def test_many_series_look_different() -> None:
    assert len({look(index) for index in range(24)}) == 24
    assert [look(index) for index in range(8)] == [(shade, "") for shade in SHADES]


def test_a_bar_never_reaches_zero_on_a_logarithmic_axis() -> None:
    found = points("p", [1, 2, 3], [0.1, math.nan, -1.0], "blue", [1.0, 1.0, 0.1])
    assert found.low is not None
    assert found.low[0] == pytest.approx(0.005)
    assert found.low[1] is None
    assert found.low[2] == pytest.approx(-1.196)
    assert points("p", [1], [0.1], "blue", [1.0], positive=False).low == [pytest.approx(-1.86)]


def test_formatting_of_numbers() -> None:
    assert [short(v) for v in (None, math.nan, math.inf, -math.inf, 0, 0.12345, 12345.6, 2.5e8, 1e-7)] == [
        "–", "–", "∞", "−∞", "0", "0.123", "12,346", "2.5·10⁸", "10⁻⁷",
    ]  # fmt: skip
    cells = (Estimate(0.12345, 0.00678), Estimate(1.0), Estimate(math.nan, 1.0), True, 1234)
    assert [cell(value) for value in cells] == ["0.1235 ± 0.007", "1", "–", "yes", "1,234"]
    assert falling(0.47) == "n⁻⁰·⁴⁷"
    assert [join(parts) for parts in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]
    assert sentence("as said") == "As said."
    assert [plural(1, "head"), plural(1200, "head")] == ["1 head", "1,200 heads"]


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_can_be_parsed(script: str) -> None:
    source = resources.files("limitlens.report") / "assets" / script
    with resources.as_file(source) as path:
        subprocess.run(["node", "--check", str(path)], check=True, capture_output=True)
