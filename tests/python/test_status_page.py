"""The proxy's status page in a real browser, under a load with faults."""

import json
import os
import urllib.error
import urllib.request
from importlib.resources import files
from pathlib import Path

import pytest
from browser import Browser
from watched import Load, Stack, eventually, get

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
# Set to a folder to keep the pictures.
PICTURES = os.environ.get("TETHER_PICTURES")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A stack under load: the proxy, and one whose only server publishes nothing."""
    stack = Stack(tmp_path_factory.mktemp("page"))
    try:
        stack.start_server()
        stack.start_proxy()
        stack.start_doubter()
        load = Load(stack.proxy, stack.doubter)
        load.start()
        yield stack
        load.stop()
    finally:
        stack.end()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture()
def page(loaded, browser):
    browser.complaints.clear()
    browser.requested.clear()
    browser.screen(1200, 900, "light")
    browser.open(f"http://{loaded.proxy}/tether/")
    eventually("the page has drawn", lambda: number(browser, "Answered") and curve(browser) > 3)
    yield browser
    assert not browser.complaints, browser.complaints


def number(browser, name: str) -> str:
    return browser.run(f"""[...document.querySelectorAll("dl div")].filter(d => d.querySelector("dt").textContent === {json.dumps(name)})
        .map(d => d.querySelector("dd").firstChild.textContent)[0]""")


def curve(browser) -> int:
    """Points of the first chart's line."""
    return browser.run('(document.querySelector("svg .curve")?.getAttribute("d") ?? "").split("L").length')


def violations(browser) -> list[str]:
    browser.run(AXE + "; 0")
    found = browser.run("""axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]})
        .then(r => r.violations.map(v => `${v.id}: ${v.help}: ${v.nodes.map(n => n.html).join(" ").slice(0, 300)}`))""")
    assert browser.run("typeof axe.version") == "string"
    return found


def test_values_move_while_requests_come(page):
    before, points = number(page, "Answered"), curve(page)
    eventually("the count has risen", lambda: number(page, "Answered") != before)
    eventually("the curve has grown", lambda: curve(page) > points)
    assert "now 0," not in page.run('document.querySelector("svg[role=img]").getAttribute("aria-label")')
    assert page.run('document.getElementById("state").textContent') in ("running", "1 upstream down")
    assert page.run('document.querySelectorAll("#upstreams tr").length') == 2
    assert "free of" in page.run('document.getElementById("disks").textContent')
    assert number(page, "Mismatches") == "0"
    # One in ten requests has two IDs and is refused.
    eventually("a refused request is shown", lambda: "`rid` is there twice" in page.run(
        'document.getElementById("errors").textContent'))


def test_nothing_comes_from_elsewhere(page, loaded):
    assert page.requested
    assert all(url.startswith((f"http://{loaded.proxy}/tether/", "data:")) for url in page.requested), page.requested
    html = get(loaded.proxy, "/tether/")
    assert "https://" not in html and "src=" not in html


def test_mismatches_are_shown_where_nobody_can_overlook_them(page, loaded):
    page.open(f"http://{loaded.doubter}/tether/")
    eventually("mismatches are counted", lambda: number(page, "Mismatches") not in (None, "0"))
    assert page.run('document.getElementById("state").textContent') == "mismatches found"
    assert "mismatches" in page.run("document.title")
    row = page.run('document.querySelector("#errors tr").textContent')
    assert "502" in row and "were not published in time" in row, row
    request = page.run('document.querySelector("#errors .id").textContent')
    assert len(request) == 36


@pytest.mark.parametrize(("name", "width", "height", "scheme"), [
    ("light", 1200, 900, "light"), ("dark", 1200, 900, "dark"), ("phone", 400, 800, "light"), ("phone-dark", 400, 800, "dark")])
def test_the_page_is_accessible_and_fits(page, name, width, height, scheme):
    page.screen(width, height, scheme, mobile=width < 500)
    eventually("the page has been drawn anew", lambda: page.run("document.documentElement.clientWidth") == width)
    page.run("draw()")
    assert page.run("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    dark = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark.removeprefix("rgb(").rstrip(")").split(", "))) < 200) == (scheme == "dark"), dark
    assert violations(page) == []
    if PICTURES:
        eventually("there is something to see", lambda: curve(page) > 8)
        page.picture(Path(PICTURES) / f"status-page-{name}.png")


def test_everything_works_without_a_mouse(page):
    seen = []
    for _ in range(12):
        page.press("Tab", 9)
        focused = page.run("""(e => e.dataset.minutes ? `minutes ${e.dataset.minutes}` : e.id || e.className)(document.activeElement)""")
        seen.append(focused)
        assert page.run("document.activeElement === document.body || document.activeElement.matches(':focus-visible')")
        if focused == "minutes 30":
            page.press("Enter", 13)
            assert page.run('document.querySelector("[data-minutes=\\"30\\"]").getAttribute("aria-pressed")') == "true"
        if focused == "pause":
            page.press("Enter", 13)
            assert page.run("paused")
            page.press("Enter", 13)
            assert not page.run("paused")
    assert {"pause", "minutes 1", "minutes 5", "minutes 30", "scroll", "skip"} <= set(seen), seen


def test_a_page_that_gets_no_answer_says_so(loaded, browser):
    """Last: the proxy is stopped here, and a browser complains of what it cannot reach."""
    browser.open(f"http://{loaded.doubter}/tether/")
    eventually("the page has drawn", lambda: number(browser, "Answered"))
    next(process for process in loaded.processes if process.name == "doubter").child.send_signal(19)
    try:
        eventually("it says so", lambda: "old" in browser.run('document.getElementById("lost").textContent'))
    finally:
        next(process for process in loaded.processes if process.name == "doubter").child.send_signal(18)
    eventually("and takes it back", lambda: browser.run('document.getElementById("lost").textContent') == "")


def test_the_status_is_asked_for_in_one_way(loaded):
    known = json.loads(get(loaded.proxy, "/tether/status"))
    latest = known["history"][-1][0]
    assert all(point[0] > latest for point in json.loads(get(loaded.proxy, f"/tether/status?since={latest}"))["history"])
    for request, code in ((f"http://{loaded.proxy}/tether/status?since=yesterday", 400),
                          (urllib.request.Request(f"http://{loaded.proxy}/tether/", b"x", method="POST"), 405)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == code


def test_the_page_can_be_turned_off(loaded, tmp_path):
    loaded.folder, before = tmp_path, loaded.folder
    kept = loaded.proxy, loaded.proxy_metrics, loaded.down
    try:
        loaded.start_proxy("--no-page")
        for path in ("/tether/", "/tether/status"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                get(loaded.proxy, path)
            assert refused.value.code == 404
        assert "true" in get(loaded.proxy, "/tether/live")
    finally:
        (loaded.proxy, loaded.proxy_metrics, loaded.down), loaded.folder = kept, before
