"""The page in a real browser: opened from disk with the network off, used with mouse and keyboard, wide and narrow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limitlens.budgets.head_plan import plan_head
from limitlens.comparison import compare_records
from limitlens.record import to_json
from limitlens.report.page import write_report
from limitlens.report.prose import kept_share
from report_cases import NASTY, bare_contract, probe_document, record

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
def document() -> dict[str, Any]:
    return dict(json.loads(to_json(probe_document(6, 12, sink=True, groups=2))))


@pytest.fixture(scope="module")
def probe(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(record(document), tmp_path_factory.mktemp("page") / "probe.html")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_opens_without_a_network_and_without_complaint(chromium: Page, probe: Path, width: int, theme: str) -> None:
    chromium.open(probe, width, theme)
    assert chromium.complaints() == []
    assert all(url.startswith(("file:", "data:")) for url in chromium.requests())
    assert chromium.run("return document.documentElement.scrollWidth") <= width  # nothing sticks out
    assert chromium.run("return document.querySelectorAll('.cell').length") == 72
    assert chromium.run("return document.querySelectorAll('svg.chart').length") >= 6
    ground = chromium.run("return getComputedStyle(document.body).backgroundColor")
    bright = sum(int(part) for part in ground[4:-1].split(",")) / 3
    assert (bright < 60) if theme == "dark" else (bright > 230)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_map_takes_the_quantity_that_is_picked(chromium: Page, probe: Path, width: int, document: Any) -> None:
    chromium.open(probe, width)
    before = chromium.run("return document.querySelector('.cell').style.backgroundColor")
    label = "document.querySelector('.cell').getAttribute('aria-label')"
    assert f"{document['heads'][0]['rate']['slope']:.3g}" in chromium.run(f"return {label}")
    from selenium.webdriver.support.ui import Select

    pick = Select(chromium.driver.find_element("id", "quantity"))
    names = [option.get_attribute("value") for option in pick.options]
    assert {"rate", "tokens_0.05", "regime", "score_std", "pareto_k", "sink_mass"} <= set(names)
    pick.select_by_value("horizon")
    assert chromium.run("return document.querySelector('.cell').style.backgroundColor") != before
    assert f"{document['heads'][0]['horizon']:.3g}" in chromium.run(f"return {label}")
    pick.select_by_value("regime")
    assert document["heads"][0]["regime"] in chromium.run(f"return {label}")
    for name in names:
        pick.select_by_value(name)
    assert chromium.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_on_a_head_shows_its_curve(chromium: Page, probe: Path, width: int, document: Any) -> None:
    chromium.open(probe, width)
    before = chromium.curve()
    chromium.click(".cell[data-head='17']")
    assert chromium.text("#panel-title") == "Layer 1, head 5"
    assert chromium.curve() != before
    assert chromium.text(".badge") == document["heads"][17]["regime"]
    chromium.run("document.querySelector('#panel figure details').open = true")
    chromium.run("document.querySelector('#panel figure details').dispatchEvent(new Event('toggle'))")
    cells = chromium.texts("#panel figure tbody td")
    assert f"{document['heads'][17]['relative_output_error'][3]:.4g}" in cells
    chromium.run("document.querySelector('#rates .dot.pick').dispatchEvent(new Event('click', {bubbles: true}))")
    assert chromium.text("#panel-title") != "Layer 1, head 5"  # the views are linked
    chromium.click("button.jump")
    worst = max(document["heads"], key=lambda head: float(head["relative_output_error"][-1]))
    assert chromium.text("#panel-title") == f"Layer {worst['layer']}, head {worst['head']}"
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
    chromium.slide("error", 50)
    assert chromium.text("#error-value") == "23%"
    assert chromium.text("#own-budget") != told
    assert chromium.texts("#budgets .tile b") != tiles
    told = chromium.text("#own-budget")
    chromium.slide("context", 3)
    assert chromium.text("#context-value") == "2,048 tokens"
    assert chromium.text("#own-budget") != told
    chromium.slide("context", 13)
    assert chromium.text("#context-value") == "endless"
    assert chromium.complaints() == []


@pytest.mark.parametrize(("step", "error"), [(30, 0.05), (45, 0.16)])
@pytest.mark.parametrize(("place", "context"), [(1, 512), (7, 32_768), (12, 1_048_576)])
def test_budgets_in_the_page_are_those_of_the_plan(
    chromium: Page, probe: Path, document: Any, step: int, error: float, place: int, context: int
) -> None:
    chromium.open(probe)
    chromium.slide("error", step)
    chromium.slide("context", place)
    assert chromium.text("#error-value") == f"{100 * error:g}%"
    rows = chromium.run(
        "const d = document.querySelector('#budgets > .data-block details'); d.open = true;"
        "d.dispatchEvent(new Event('toggle'));"
        "return [...d.querySelectorAll('tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    )
    assert len(rows) == 72
    for row, head in zip(rows, document["heads"], strict=True):
        planned = plan_head(head, error, context)
        assert int(row[2].replace(",", "")) == pytest.approx(planned.keys.tokens, rel=2e-3, abs=1)
        assert row[5] == planned.mark
    share = float(chromium.texts("#budgets .tile b")[0].rstrip("%")) / 100
    assert share == pytest.approx(kept_share(document["heads"], error, context), rel=0.06)


def test_a_budget_lies_within_its_range(chromium: Page, probe: Path) -> None:
    """Also where the first size is the noisiest, so that the upper edge of the band falls faster than the lower one."""
    chromium.open(probe)
    curve = {"n": [1000, 2000, 4000], "error": [0.36, 0.3, 0.26], "stderr": [0.03, 0.01, 0.001]}
    found = chromium.run("return budgetRange(arguments[0], 0.2, 32768)", curve)
    assert found["low"] < found["tokens"] < found["high"]


def test_temperatures_are_those_of_the_schedules(chromium: Page, probe: Path) -> None:
    from limitlens.theory.scaling.laws import LocalPower
    from limitlens.theory.schedules import logarithmic, yarn

    chromium.open(probe)
    chromium.slide("context", 7)
    cells = chromium.texts("#schedules > .scroll tbody td")
    factors = {cells[i]: float(cells[i + 1]) for i in range(0, len(cells), 2)}
    law = LocalPower(1.0, 0.0)
    assert factors["log n"] == pytest.approx(logarithmic(32_768, 256, 1.0, law), rel=1e-3)
    assert factors["YaRN"] == pytest.approx(yarn(32_768, 256, 1.0, law), rel=1e-3)
    assert sum(name.startswith("critical") for name in factors) == 2


def test_what_is_downloaded_is_what_is_shown(chromium: Page, probe: Path, document: Any) -> None:
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
    assert float(lines[18].split(",")[2]) == pytest.approx(document["heads"][17]["rate"]["slope"], rel=1e-4)


def test_names_from_outside_run_nothing(chromium: Page, tmp_path: Path) -> None:
    nasty = json.loads(to_json(probe_document(1, 2, model=NASTY)))
    nasty["heads"][0]["regime_reason"] = NASTY
    nasty["warnings"] = [NASTY]
    chromium.open(write_report(record(nasty), tmp_path / "nasty.html"))
    assert chromium.run("return window.hacked") is None
    assert "<script>window.hacked=1</script>" in chromium.text("h1")
    chromium.click(".cell[data-head='0']")
    assert "<script>" in chromium.text(".reason")
    assert chromium.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_of_nothing_but_the_contract(chromium: Page, tmp_path: Path, width: int) -> None:
    chromium.open(write_report(record(json.loads(to_json(bare_contract()))), tmp_path / "bare.html"), width)
    for head in range(6):
        chromium.click(f".cell[data-head='{head}']")
    assert chromium.complaints() == []
    assert chromium.run("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_a_large_model_answers_at_once(chromium: Page, tmp_path: Path, width: int) -> None:
    large = json.loads(to_json(probe_document(30, 32, intervals=False)))
    chromium.open(write_report(record(large), tmp_path / "large.html"), width)
    assert chromium.run("return document.querySelectorAll('.cell').length") == 960
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    spent = chromium.run(
        "const t = performance.now(); document.querySelectorAll('.cell')[500].click(); return performance.now() - t"
    )
    assert spent < 1500  # milliseconds, on a busy machine
    assert chromium.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_of_studies_and_comparisons(chromium: Page, tmp_path: Path, width: int) -> None:
    import limitlens as ll

    curve = ll.study(ll.Gaussian(0.0, 1.0), ll.Head(0.5), [100, 300, 1000, 3000], replicates=20, queries=64)
    chromium.open(write_report(curve, tmp_path / "study.html"), width)
    told = chromium.text("#own-budget")
    chromium.slide("error", 40)
    assert chromium.text("#own-budget") != told
    assert chromium.complaints() == []
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    runs = [record(json.loads(to_json(probe_document(3, 4, shift=shift)))) for shift in (0.0, 0.1)]
    compared = record(compare_records(runs, ["a", "b"]), "compare")
    chromium.open(write_report(json.loads(to_json(compared)), tmp_path / "compare.html"), width)
    assert chromium.run("return document.querySelectorAll('tr.marked').length") > 0
    assert chromium.complaints() == []
    assert chromium.run("return document.documentElement.scrollWidth") <= width
