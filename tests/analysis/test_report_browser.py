"""The report in a browser: it draws, answers clicks and keys, and requests nothing."""

import json
import shutil

import pytest
from analysed_runs import pretend, tiny_config, write_status

from stop_mim.analysis.report import write_report
from stop_mim.training.config import PositionsConfig
from stop_mim.training.run_folder import RunFolder

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'stop-mim[test]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
]
NAME = "<script>alert(1)<&>"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
POSITIONS = "[data-maps=positions] canvas"
CONTEXT, HEAT = (f"[data-maps=predictions] {part}" for part in ("canvas[tabindex]", "figure:nth-child(2) canvas"))


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def show(browser):
    """Open a page to its end; the test fails if the page logged, threw or requested anything."""
    opened, complaints = [], []

    def show(path, width=1200, **options):
        page = browser.new_page(viewport={"width": width, "height": 800}, **options)
        opened.append(page)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        return page

    yield show
    for page in opened:
        page.close()
    assert [text for text in complaints if not text.startswith(("file:", "data:"))] == []


@pytest.fixture(scope="module")
def one(stop_run, tmp_path_factory):
    """A report on one run with a hostile name, recipe and status."""
    folder = tmp_path_factory.mktemp("one")
    run = pretend(stop_run, folder / NAME)
    sessions = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps([sessions[0] | {"recipe": HOSTILE}]))
    write_status(run, "failed", 8, HOSTILE)
    return write_report([run], folder / "report.html")


@pytest.fixture(scope="module")
def three(stop_run, tmp_path_factory):
    """A report on runs with noise, without noise, and without any step."""
    folder = tmp_path_factory.mktemp("three")
    empty = folder / ("empty-" * 12)
    RunFolder(empty).create(tiny_config(empty), "tiny")
    noisy = pretend(stop_run, folder / "stop", positions=PositionsConfig(sigma=900.0))
    fixed = pretend(stop_run, folder / NAME, signs={"loss": 0.125}, positions=PositionsConfig(kind="sincos"))
    return write_report([noisy, fixed, empty], folder / "report.html")


def painted(page, selector):
    return page.eval_on_selector_all(selector, "(nodes) => nodes.map((canvas) => canvas.toDataURL())")


def click_patch(page, selector, patch, columns=6, rows=4):
    box = page.locator(selector).first.bounding_box()
    place = {
        "x": (patch % columns + 0.5) * box["width"] / columns,
        "y": (patch // columns + 0.5) * box["height"] / rows,
    }
    page.locator(selector).first.click(position=place)


def test_clicks_and_arrow_keys_choose_the_patch_of_the_position_maps(show, one):
    page = show(one)
    readout = page.locator("[data-maps=positions] [role=status]")
    before = painted(page, POSITIONS)
    assert (len(before), readout.text_content()) == (3, "Patch: row 3, column 4.")
    click_patch(page, POSITIONS, 1)
    assert readout.text_content() == "Patch: row 1, column 2."
    assert all(old != new for old, new in zip(before, painted(page, POSITIONS), strict=True))
    for key, column in (("ArrowDown", 2), ("ArrowLeft", 1), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        assert readout.text_content() == f"Patch: row 2, column {column}."
    click_patch(page, POSITIONS, 15)
    assert painted(page, POSITIONS) == before


def test_a_masked_patch_changes_the_heat_map_and_others_do_not(show, one):
    page = show(one)
    shown = json.loads(page.locator("#report-data").text_content())["predictions"][0]
    masked, readout = shown["images"][0]["masked"], page.locator("[data-maps=predictions] [role=status]")
    first = painted(page, HEAT)
    click_patch(page, CONTEXT, masked[0])
    second = painted(page, HEAT)
    assert second != first
    assert readout.text_content().startswith("Image 1, masked patch: ")
    click_patch(page, CONTEXT, shown["context"][0][0])
    assert painted(page, HEAT) == second
    page.keyboard.press("ArrowRight")
    assert painted(page, HEAT) != second
    page.locator(".pictures button").nth(1).click()
    assert readout.text_content().startswith("Image 2, masked patch: ")
    assert painted(page, HEAT) != second


def test_the_maps_of_all_runs_follow_one_click(show, three):
    page = show(three)
    positions, heat = painted(page, POSITIONS), painted(page, HEAT)
    assert (len(positions), len(heat)) == (4, 2)
    hints = page.locator("[data-maps=positions] figcaption .hint").all_text_contents()
    assert hints[0] == "to itself 1.00"
    assert float(hints[2].split()[-1]) < 0.9, "noise lowers the similarity"
    click_patch(page, POSITIONS, 0)
    masked = json.loads(page.locator("#report-data").text_content())["predictions"][0]["images"][0]["masked"]
    click_patch(page, CONTEXT, masked[0])
    assert all(old != new for old, new in zip(positions, painted(page, POSITIONS), strict=True))
    assert all(old != new for old, new in zip(heat, painted(page, HEAT), strict=True))


def test_charts_show_values_and_hide_runs(show, three):
    page = show(three)
    chart = page.locator(".charts svg").first
    chart.hover(position={"x": 0.97 * chart.bounding_box()["width"], "y": 60})
    tooltip = page.locator(".charts .tooltip").first
    assert tooltip.is_visible()
    assert tooltip.text_content().startswith("step 8stop: ")
    assert tooltip.text_content().endswith(f"{NAME}: 0.125")
    curves = page.locator('path.curve[data-run="1"]')
    assert (before := curves.count()) > 8
    page.locator('button[data-run="1"]').click()
    assert curves.count() == 0
    page.locator('button[data-run="1"]').click()
    assert curves.count() == before


@pytest.mark.parametrize("values", [(3.872, 3.871), (5.23e-4, 5.2e-4), (4464, 4463.1), (1.02e6, 1e6)])
def test_the_numbers_of_an_axis_differ(show, stop_run, tmp_path, values):
    run = pretend(stop_run, tmp_path / "run")
    lines = [{"step": step, "health/A_norm": value} for step, value in zip((1, 8), values, strict=True)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = show(write_report([run], tmp_path / "report.html"))
    axis = page.locator("figure", has_text="|A|").locator('text[text-anchor="end"]').all_text_contents()
    # The last one is the name of the other axis.
    *numbers, _ = axis
    assert len(numbers) == len({*numbers}) > 1


@pytest.mark.parametrize("width", [320, 768])
def test_no_page_is_wider_than_its_screen(show, one, three, width):
    for path in (one, three):
        page = show(path, width)
        page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_dark_and_print(show, one):
    page, background = show(one), "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) != "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark", media="print")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()


def test_everything_has_a_name(show, three):
    page = show(three)
    named = "one.ariaLabel || one.alt || one.textContent.trim() || one.querySelector('[alt]')"
    script = f"(nodes) => nodes.filter((one) => !({named})).map((one) => one.outerHTML)"
    assert page.eval_on_selector_all("button, a, [tabindex='0'], [role=img], img", script) == []
