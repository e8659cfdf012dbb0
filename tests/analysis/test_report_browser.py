"""The report in a real browser, driven over DevTools' pipe: it draws, it answers clicks and keys, it fetches nothing."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import pytest
from analysed_runs import pretend, tiny_config

from stop_mim.analysis.report import write_report
from stop_mim.training.config import PositionsConfig
from stop_mim.training.run_folder import RunFolder

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# DevTools' pipe must be the files 3 and 4 of the browser, which Popen alone cannot promise.
TRAMPOLINE = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
)
PATIENCE_SECONDS = 60

NAME = "<script>alert(1)<&>"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
UNCHOSEN = '[data-predictions] [role="gridcell"][aria-disabled="false"][aria-selected="false"]'


class Browser:
    """One headless Chromium; every page is a tab of its own."""

    def __init__(self, profile):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # Above 3 and 4, so that neither is overwritten before it is copied.
        passed = [fcntl.fcntl(number, fcntl.F_DUPFD, 10) for number in (theirs_in, theirs_out)]
        os.close(theirs_in), os.close(theirs_out)
        command = [
            sys.executable,
            "-c",
            TRAMPOLINE,
            *map(str, passed),
            CHROMIUM,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            command, pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for number in passed:
            os.close(number)
        self.reader, self.writer = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self.answers, self.events, self.number = Queue(), [], 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        rest = b""
        while piece := os.read(self.reader.fileno(), 2**20):
            *messages, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, messages):
                (self.answers.put if "id" in message else self.events.append)(message)

    def send(self, method, session=None, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | (
            {"sessionId": session} if session else {}
        )
        self.writer.write(json.dumps(message).encode() + b"\0")
        self.writer.flush()
        answer = self.answers.get(timeout=PATIENCE_SECONDS)
        assert answer["id"] == self.number
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, path, **screen):
        return Page(self, path, **screen)

    def close(self):
        try:
            self.send("Browser.close")
            self.process.wait(PATIENCE_SECONDS)
        finally:
            self.process.kill()
        self.writer.close(), self.reader.close()


class Page:
    """A tab with a file in it, loaded to its end."""

    def __init__(self, browser, path, width=1200, height=900, features=(), media=""):
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.emulate(features, media)
        # A dialogue would stop the page, and wait for an answer.
        self.send("Page.addScriptToEvaluateOnNewDocument", source="window.alert = () => console.error('an alert')")
        self.send("Page.navigate", url=Path(path).resolve().as_uri())
        self.evaluate(
            "new Promise((done) => document.readyState === 'complete' ? done() : addEventListener('load', () => done()))"
        )

    def send(self, method, **parameters):
        return self.browser.send(method, self.session, **parameters)

    def emulate(self, features=(), media=""):
        self.send("Emulation.setEmulatedMedia", media=media, features=[{"name": n, "value": v} for n, v in features])

    def evaluate(self, expression):
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def events(self, *methods):
        return [e for e in self.browser.events if e.get("sessionId") == self.session and e["method"] in methods]

    def point_at(self, selector, part=0.5):
        """Move the mouse to a node: to this part of its width, in the middle of its height."""
        script = """((selector, part) => {
            const node = document.querySelector(selector);
            node.scrollIntoView({ block: "center", behavior: "instant" });
            const box = node.getBoundingClientRect();
            return [box.x + box.width * part, box.y + box.height / 2];
        })"""
        x, y = self.evaluate(f"{script}({json.dumps(selector)}, {part})")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector):
        x, y = self.point_at(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path, whole=True):
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(picture["data"]))

    def text(self, selector):
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def canvases(self, selector):
        """What is painted, an entry for every canvas."""
        return self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((canvas) => canvas.toDataURL())"
        )

    def complaints(self):
        """Exceptions, console messages, and errors that the browser itself logs, refusals of the page's policy among them."""
        kinds = (
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Log.entryAdded",
        )
        return [event["params"] for event in self.events(*kinds)]


pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def one(stop_run, tmp_path_factory, scene_cache):
    """The report on one run, whose name, recipe and log are hostile."""
    folder = tmp_path_factory.mktemp("one")
    run = pretend(stop_run, folder / NAME)
    sessions = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps([sessions[0] | {"recipe": HOSTILE}]))
    with (run / "log.txt").open("a") as file:
        file.write(f"2026-01-01 00:00:00 Warning: {HOSTILE}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_MIM_CACHE", str(scene_cache))
        return write_report([run], folder / "report.html")


@pytest.fixture(scope="module")
def three(stop_run, tmp_path_factory, scene_cache):
    """The report on runs with noise, without, and without anything."""
    folder = tmp_path_factory.mktemp("three")
    RunFolder(folder / ("empty-" * 12)).create(tiny_config(folder / "empty"), "tiny")
    runs = [
        pretend(stop_run, folder / "stop", positions=PositionsConfig(sigma=900.0)),
        pretend(stop_run, folder / NAME, signs={"loss": 0.125}, positions=PositionsConfig(kind="sincos")),
        folder / ("empty-" * 12),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_MIM_CACHE", str(scene_cache))
        return write_report(runs, folder / "report.html")


@pytest.fixture
def page(browser, one):
    return browser.open(one)


def test_it_loads_without_a_complaint_and_fetches_nothing(browser, one, three):
    for path in (one, three):
        page = browser.open(path)
        assert page.evaluate("document.querySelectorAll('.chart path.curve').length") > 10
        assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
        assert page.complaints() == []
        requested = [event["params"]["request"]["url"] for event in page.events("Network.requestWillBeSent")]
        assert [url for url in requested if not url.startswith("data:")] == [path.as_uri()]


def test_complaints_would_be_heard(browser, tmp_path):
    (tmp_path / "bad.html").write_text(
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; script-src 'unsafe-inline'\">"
        "<img src='http://localhost:9/x.png'><script>console.error('so'); throw new Error('no')</script>"
    )
    assert len(browser.open(tmp_path / "bad.html").complaints()) == 3


def test_a_hostile_name_stays_text(page):
    assert page.text("h1") == NAME
    assert page.evaluate("document.title").startswith(NAME)
    assert HOSTILE in page.text(".about")
    assert HOSTILE in page.text(".warnings li")
    assert page.complaints() == []
    assert page.evaluate("document.scripts.length") == 2
    assert page.evaluate("document.querySelector('main script, main iframe, [onerror]')") is None


def test_a_click_on_a_patch_changes_the_position_maps(page):
    before, query = page.canvases("[data-positions] .map canvas"), page.text("[data-positions] .readout")
    assert len(before) == 3
    page.click('[data-positions] [data-patch="1"]')
    after = page.canvases("[data-positions] .map canvas")
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert page.text("[data-positions] .readout") == "Query: row 1, column 2."
    assert query == "Query: row 3, column 4."
    page.click('[data-positions] [data-patch="15"]')
    assert page.canvases("[data-positions] .map canvas") == before


def test_arrow_keys_move_the_query(page):
    page.click('[data-positions] [data-patch="1"]')
    seen = [page.canvases("[data-positions] .map canvas")]
    for key, place in (("ArrowDown", "row 2, column 2"), ("ArrowRight", "row 2, column 3"), ("End", "row 2, column 6")):
        page.press(key)
        seen.append(page.canvases("[data-positions] .map canvas"))
        assert page.text("[data-positions] .readout") == f"Query: {place}."
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == place
        assert page.text("#announce") == f"Query: {place}."
    assert len({tuple(canvases) for canvases in seen}) == 4
    page.press("ArrowRight")
    assert page.canvases("[data-positions] .map canvas") == seen[-1]
    assert page.evaluate("document.querySelectorAll('[data-positions] [tabindex=\"0\"]').length") == 1


def test_a_click_on_a_masked_patch_changes_the_heat_map(page):
    heat, readout = "[data-predictions] canvas.over", "[data-predictions] .readout"
    first = page.canvases(heat)
    chosen = page.evaluate(f"document.querySelector({json.dumps(UNCHOSEN)}).dataset.patch")
    page.click(UNCHOSEN)
    second = page.canvases(heat)
    assert second != first
    assert page.text(readout) == f"Masked patch: image 1, row {int(chosen) // 6 + 1}, column {int(chosen) % 6 + 1}."
    page.click('[data-predictions] [role="gridcell"][aria-disabled="true"]')
    assert page.canvases(heat) == second
    page.click("[data-predictions] .pictures button:nth-child(2)")
    assert page.canvases(heat) != second
    assert page.text(readout).startswith("Masked patch: image 2, ")
    pictures = "[...document.querySelectorAll('[data-predictions] .map img')].map((image) => image.src)"
    shown = page.evaluate("document.querySelector('.pictures button:nth-child(2) img').src")
    assert set(page.evaluate(pictures)) == {shown}


def test_the_maps_of_all_runs_follow_one_click(browser, three):
    page = browser.open(three)
    positions, heat = (page.canvases(f"[data-{name}] .map canvas") for name in ("positions", "predictions"))
    assert (len(positions), len(heat)) == (4, 2)
    page.click('[data-positions] .run-maps:nth-of-type(2) [data-patch="0"]')
    page.click(UNCHOSEN)
    moved = zip(positions, page.canvases("[data-positions] .map canvas"), strict=True)
    assert all(old != new for old, new in moved)
    moved = zip(heat, page.canvases("[data-predictions] .map canvas"), strict=True)
    assert all(old != new for old, new in moved)


def test_noise_is_seen_in_the_maps(browser, three):
    page = browser.open(three)
    fixed, _, mean, _ = page.canvases("[data-positions] .map canvas")
    assert fixed != mean
    own = page.evaluate("[...document.querySelectorAll('[data-positions] figcaption .hint')].map((n) => n.textContent)")
    assert own[0].startswith("itself 1.00")
    assert float(own[2].split()[1].rstrip(",")) < 0.9


def test_charts_tell_their_values_to_mouse_and_keyboard(browser, three):
    page = browser.open(three)
    page.point_at(".chart .frame", part=0.98)
    tooltip = page.text(".chart .tooltip")
    assert tooltip.startswith("step 8 stop ")
    assert tooltip.endswith(f"{NAME} 0.125")
    page.evaluate("document.querySelector('.chart .frame > svg').focus()")
    page.press("Home")
    assert page.text(".chart .tooltip").startswith("step 1 ")
    page.press("ArrowRight")
    assert page.text("#announce").startswith("step 2 ")
    page.press("Escape")
    assert page.evaluate("document.querySelector('.chart .tooltip').hidden")


def test_the_legend_hides_a_run_everywhere(browser, three):
    page = browser.open(three)
    count = "document.querySelectorAll('.chart .curve.series-1').length"
    before = page.evaluate(count)
    assert before > 8
    page.click('[data-legend] [data-run="1"]')
    assert page.evaluate(count) == 0
    assert (
        page.evaluate("new Set([...document.querySelectorAll('[data-run=\"1\"]')].map((n) => n.ariaPressed)).size") == 1
    )
    page.click('[data-legend] [data-run="1"]')
    assert page.evaluate(count) == before
    assert page.complaints() == []


@pytest.mark.parametrize("width", [320, 360, 768])
def test_no_page_is_wider_than_its_screen(browser, one, three, width):
    for path in (one, three):
        page = browser.open(path, width=width, height=780)
        page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        # A phone's browser widens the window to what does not fit, so that it is compared with the width that was asked for.
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_light_dark_and_print(browser, one):
    page = browser.open(one)
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    page.emulate([("prefers-color-scheme", "dark")])
    assert page.evaluate(background) != "rgb(255, 255, 255)"
    page.emulate([("prefers-color-scheme", "dark")], media="print")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_everything_can_be_reached_and_is_named(page):
    page.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    nameless = """[...document.querySelectorAll('button, a, [tabindex="0"], [role=img], [role=grid], [role=gridcell], img')]
        .filter((node) => !(node.ariaLabel || node.alt || node.textContent.trim() || node.querySelector("[alt]")))
        .filter((node) => !(node.tagName === "IMG" && node.hasAttribute("alt"))).length"""
    assert page.evaluate(nameless) == 0
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3, h4')].map((node) => Number(node.tagName[1]))")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
