"""Pages in a real browser: opened from disk without network, with mouse and keyboard, wide and narrow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from limitlens.comparison import compare
from limitlens.probing.record import kept_share
from limitlens.probing.result import ProbeRun
from limitlens.statistics.tokens_for import CONTEXTS, ERRORS
from report_cases import NASTY, bare_probe, probe_case

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
WIDTHS = (1280, 390)


class Page:
    """A page in Chromium, and what a reader does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int = 1280, theme: str = "light") -> None:
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(path.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def texts(self, selector: str) -> list[str]:
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector))

    def click(self, selector: str) -> None:
        element = self.driver.find_element("css selector", selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def focused(self) -> str:
        return str(self.run("return document.activeElement.id || document.activeElement.dataset.head || ''"))

    def slide(self, name: str, value: int) -> None:
        self.run(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('input'))",
            name,
            value,
        )

    def complaints(self) -> list[str]:
        """What the browser wrote to its console."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def curve(self) -> str:
        """The drawing of the chosen head's errors."""
        return str(self.run("return document.querySelector('#panel figure svg.chart').outerHTML"))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install '.[dev]'")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(
            "no Chromium with its chromedriver on this machine; on Debian: apt install chromium chromium-driver"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND")  # the network is off
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield Page(driver)
    driver.quit()


@pytest.fixture(scope="module")
def run() -> ProbeRun:
    return probe_case(6, 12, sink=True, groups=2, causal=True)


@pytest.fixture(scope="module")
def probe(run: ProbeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run.report(tmp_path_factory.mktemp("page") / "probe.html")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_opens_offline_without_console_errors(chromium: Page, probe: Path, width: int, theme: str) -> None:
    chromium.open(probe, width, theme)
    assert chromium.complaints() == []
    assert all(url.startswith(("file:", "data:")) for url in chromium.requests())
    assert chromium.run("return document.documentElement.scrollWidth") <= width  # nothing sticks out
    assert chromium.run("return document.querySelectorAll('.cell').length") == 72
    assert chromium.run("return document.querySelectorAll('svg.chart').length") >= 5
    ground = chromium.run("return getComputedStyle(document.body).backgroundColor")
    bright = sum(int(part) for part in ground[4:-1].split(",")) / 3
    assert (bright < 60) if theme == "dark" else (bright > 230)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_map_takes_the_quantity_that_is_picked(chromium: Page, probe: Path, width: int, run: ProbeRun) -> None:
    chromium.open(probe, width)
    before = chromium.run("return document.querySelector('.cell').style.backgroundColor")
    label = "document.querySelector('.cell').getAttribute('aria-label')"
    assert f"{run.records[0].curve.rate.slope:.3g}" in chromium.run(f"return {label}")
    from selenium.webdriver.support.ui import Select

    pick = Select(chromium.driver.find_element("id", "quantity"))
    names = [option.get_attribute("value") for option in pick.options]
    assert {"rate", "tokens_0.05", "regime", "score_std", "pareto_k", "sink_mass"} <= set(names)
    pick.select_by_value("horizon")
    assert chromium.run("return document.querySelector('.cell').style.backgroundColor") != before
    assert f"{run.records[0].horizon:.3g}" in chromium.run(f"return {label}")
    pick.select_by_value("regime")
    assert run.records[0].regime.value in chromium.run(f"return {label}")
    for name in names:
        pick.select_by_value(name)
    assert chromium.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_on_a_head_shows_its_curve(chromium: Page, probe: Path, width: int, run: ProbeRun) -> None:
    chromium.open(probe, width)
    before = chromium.curve()
    chromium.click(".cell[data-head='17']")
    assert chromium.text("#panel-title") == "Layer 1, head 5"
    assert chromium.curve() != before
    assert chromium.text(".badge") == run.records[17].regime.value
    chromium.run("document.querySelector('#panel figure details').open = true")
    chromium.run("document.querySelector('#panel figure details').dispatchEvent(new Event('toggle'))")
    cells = chromium.texts("#panel figure tbody td")
    assert f"{run.records[17].curve.error[3]:.4g}" in cells
    chromium.run("document.querySelector('#rates .dot.pick').dispatchEvent(new Event('click', {bubbles: true}))")
    assert chromium.text("#panel-title") != "Layer 1, head 5"  # the views are linked
    assert chromium.complaints() == []


def test_keys_reach_every_head(chromium: Page, probe: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    chromium.open(probe)
    chromium.run("document.getElementById('quantity').focus()")
    for _ in range(3):
        chromium.press(Keys.TAB)
        if chromium.run("return document.activeElement.classList.contains('cell')"):
            break
    assert chromium.run("return document.activeElement.classList.contains('cell')")
    chromium.press(Keys.PAGE_UP, Keys.HOME)
    seen = {chromium.focused()}
    for row in range(6):
        for _ in range(11):
            chromium.press(Keys.ARROW_RIGHT if row % 2 == 0 else Keys.ARROW_LEFT)
            seen.add(chromium.focused())
        chromium.press(Keys.ARROW_DOWN)
        seen.add(chromium.focused())
    assert seen == {str(index) for index in range(72)}
    assert chromium.text("#panel-title") == "Layer 5, head 0"
    assert chromium.run("return document.querySelectorAll('.cell[tabindex=\"0\"]').length") == 1
    assert chromium.run("return document.querySelector('.cell[aria-selected=true]').dataset.head") == "60"


def test_keys_reach_everything_else(chromium: Page, probe: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    chromium.open(probe)
    reached = set()
    for _ in range(120):
        chromium.press(Keys.TAB)
        reached.add(chromium.run("const e = document.activeElement; return e.id || e.tagName + ' ' + e.textContent"))
    assert {"theme", "quantity", "rate-axis", "error", "context"} <= reached
    assert "BUTTON Download CSV" in reached
    assert "SUMMARY Numbers of every head" in reached
    chromium.run("document.getElementById('error').focus()")
    told = chromium.text("#error-value")
    chromium.press(Keys.ARROW_RIGHT)
    assert chromium.text("#error-value") != told
    chromium.run("document.getElementById('theme').focus()")
    chromium.press(Keys.ENTER)
    assert chromium.run("return document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("width", WIDTHS)
def test_sliders_move_the_budgets(chromium: Page, probe: Path, width: int) -> None:
    chromium.open(probe, width)
    told, tiles = chromium.text("#own-budget"), chromium.texts("#budgets .tile b")
    chromium.slide("error", 0)
    assert chromium.text("#error-value") == f"{100 * ERRORS[0]:g}%"
    assert chromium.text("#own-budget") != told
    assert chromium.texts("#budgets .tile b") != tiles
    told = chromium.text("#own-budget")
    chromium.slide("context", 0)
    assert chromium.text("#context-value") == f"{CONTEXTS[0]:,} tokens"
    assert chromium.text("#own-budget") != told
    chromium.slide("context", len(CONTEXTS) - 1)
    assert chromium.text("#context-value") == "unlimited"
    assert chromium.complaints() == []


@pytest.mark.parametrize("error", [0.05, 0.2])
@pytest.mark.parametrize("context", [CONTEXTS[0], CONTEXTS[-2]])
def test_the_page_shows_the_budgets_and_intervals_it_was_given(
    chromium: Page, probe: Path, run: ProbeRun, error: float, context: int
) -> None:
    chromium.open(probe)
    chromium.slide("error", ERRORS.index(error))
    chromium.slide("context", CONTEXTS.index(context))
    assert chromium.text("#error-value") == f"{100 * error:g}%"
    rows = chromium.run(
        "const d = document.querySelector('#budgets > .data-block details'); d.open = true;"
        "d.dispatchEvent(new Event('toggle'));"
        "return [...d.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    assert len(rows) == 72
    for row, head in zip(rows, run.records, strict=True):
        planned = head.keys_for(error, context)
        shown = [int(cell.replace(",", "")) for cell in row[2:5]]
        assert shown == pytest.approx([planned.n, *planned.interval], rel=1e-4, abs=1)
        assert row[5] == planned.mark
    share = float(chromium.texts("#budgets .tile b")[0].rstrip("%")) / 100
    assert share == pytest.approx(kept_share(run.records, error, context), rel=0.06)


def test_downloaded_numbers_equal_shown_numbers(chromium: Page, probe: Path, run: ProbeRun) -> None:
    chromium.open(probe)
    chromium.run(
        "window.kept = [];"
        "URL.createObjectURL = (blob) => { blob.text().then((t) => window.kept.push(t)); return 'blob:x'; };"
        "HTMLAnchorElement.prototype.click = function () { window.kept.push(this.download); };"
        "document.querySelector('#map-data button').click();"
    )
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(chromium.driver, 10).until(lambda driver: len(driver.execute_script("return window.kept")) == 2)
    name, text = chromium.run("return window.kept")
    assert name == "heads.csv"
    lines = text.strip().split("\r\n")
    assert len(lines) == 73
    assert lines[0].startswith("layer,head,Rate β of the error,")
    assert float(lines[18].split(",")[2]) == pytest.approx(run.records[17].curve.rate.slope, rel=1e-4)


@pytest.mark.parametrize("width", WIDTHS)
def test_figures_keep_their_ticks_and_labels(chromium: Page, tmp_path: Path, width: int) -> None:
    from limitlens.report.view import Axis, Figure, Guide, Section, Table, View, look, points
    from limitlens.results import write_page

    sizes, narrow = [100, 1_000, 10_000, 1_000_000], [0.951, 0.94, 0.93, 0.921]
    looks = [look(index) for index in range(8)]
    many = [points(f"H = {i}", sizes, narrow, colour, dash=dash) for i, (colour, dash) in enumerate(looks)]
    axes = Axis("number of tokens n", log=True, low=100, high=1_000_000), Axis("error", log=True)
    figure = Figure("narrow", *axes, many, [Guide("", y=0.93), Guide("", x=1_000)])
    view = View("t", "", ("", "", ""), [Section("s", "", [figure, Table("rows", ["k"], [(k,) for k in range(72)])])])
    chromium.open(write_page(view, tmp_path / "page.html", {}), width)
    assert chromium.complaints() == []
    assert len(set(looks)) == 8
    assert "72 rows; scroll to see them all." in chromium.texts(".note")
    ticks = chromium.run(
        "const svg = document.querySelector('svg.chart'), edge = svg.getBoundingClientRect();"
        "return [...svg.querySelectorAll('.tick')].map((e) => { const r = e.getBoundingClientRect();"
        "return {text: e.textContent, end: e.getAttribute('text-anchor'), left: r.left - edge.left,"
        "right: edge.right - r.right, from: r.left, to: r.right}; })"
    )
    assert all(tick["left"] >= 0 and tick["right"] >= 0 for tick in ticks)  # nothing is cut off
    across = sorted((tick for tick in ticks if tick["end"] == "middle"), key=lambda tick: tick["from"])
    assert across[-1]["text"] == "1,000,000"
    assert all(a["to"] < b["from"] for a, b in pairwise(across))  # nor lies over another
    up = [tick["text"] for tick in ticks if tick["end"] == "end"]
    assert len(set(up)) == len(up) >= 2  # however narrow a logarithmic axis is


def test_names_from_outside_run_nothing(chromium: Page, tmp_path: Path) -> None:
    nasty = probe_case(1, 2, model=NASTY)
    first = replace(nasty.records[0], regime_reason=NASTY)
    nasty = replace(nasty, records=(first, *nasty.records[1:]), warnings=(NASTY,))
    chromium.open(nasty.report(tmp_path / "nasty.html"))
    assert chromium.run("return window.hacked") is None
    assert "<script>window.hacked=1</script>" in chromium.text("h1")
    chromium.click(".cell[data-head='0']")
    assert "<script>" in chromium.text(".reason")
    assert chromium.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_with_little_known(chromium: Page, tmp_path: Path, width: int) -> None:
    chromium.open(bare_probe().report(tmp_path / "bare.html"), width)
    for head in range(6):
        chromium.click(f".cell[data-head='{head}']")
    assert chromium.complaints() == []
    assert chromium.run("return document.documentElement.scrollWidth") <= width


def test_a_large_model_answers_at_once(chromium: Page, tmp_path: Path) -> None:
    large = probe_case(30, 32).report(tmp_path / "large.html")
    for width in WIDTHS:
        chromium.open(large, width)
        assert chromium.run("return document.querySelectorAll('.cell').length") == 960
        assert chromium.run("return document.documentElement.scrollWidth") <= width
        spent = chromium.run(
            "const t = performance.now(); document.querySelectorAll('.cell')[500].click(); return performance.now() - t"
        )
        assert spent < 1500  # milliseconds, on a busy machine
        assert chromium.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_of_other_results(chromium: Page, tmp_path: Path, width: int) -> None:
    import limitlens as ll
    from cache_cases import planned

    curve = ll.study(ll.Gaussian(0.0, 1.0), ll.Head(0.5), [100, 300, 1000, 3000], replicates=20, queries=64)
    cube = ll.sweep(ll.Cube(2), radii=[1, 2, 3], sizes=[50, 200], replicates=4, queries=32)
    compared = compare(probe_case(3, 4), probe_case(3, 4, shift=0.1))
    others = [
        curve, cube, compared, planned(),
        ll.theory_report(ll.Gaussian(0.0, 1.0), [[1.5]], 1e4),
        ll.hardmax([100, 300, 1000], replicates=20), ll.tails(sizes=[100, 300, 1000], replicates=20),
        ll.scaling(n=500, replicates=50), ll.heat_flow(layers=20, n=200), ll.schedules("100:10000:3"),
    ]  # fmt: skip
    for place, result in enumerate(others):
        chromium.open(result.report(tmp_path / f"{place}.html"), width)
        assert chromium.complaints() == [], result.kind
        assert chromium.run("return document.documentElement.scrollWidth") <= width, result.kind
        if result is compared:
            assert chromium.run("return document.querySelectorAll('tr.marked').length") > 0
