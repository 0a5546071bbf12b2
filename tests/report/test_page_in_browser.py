"""The HTML report as its readers see it: in the system's Chromium, through Playwright, where there are both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_folders as made

from offbeat.report.page import write_report

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")

NAMES = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "chrome")
PROGRAM = next(filter(None, map(shutil.which, filter(None, NAMES))), None)
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: install one, or set CHROMIUM to it")

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# What lies outside the page to the left or right, where nothing around it scrolls.
OUTSIDE = """
[...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && !e.closest(".table") && !e.closest("[clip-path]") && e.id !== "tip"
    && !e.closest("[aria-hidden=true]") && (box.left < -3 || box.right > innerWidth + 3);
}).map(e => e.outerHTML.slice(0, 120))
"""
# Letters of a chart that lie on other letters of it, or above the chart on its caption.
COLLIDE = """
[...document.querySelectorAll("figure")].filter(e => e.getBoundingClientRect().width).flatMap(figure => {
  const shown = [...figure.querySelectorAll("text:not([stroke])")].filter(t => t.textContent.trim());
  const texts = [...shown, figure.querySelector("figcaption")].map(t => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([a, x], i) => texts.slice(i + 1).filter(([b, y]) =>
    x.left < y.right - 2 && y.left < x.right - 2 && x.top < y.bottom - 5 && y.top < x.bottom - 5).map(([b]) => [a, b]));
})
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=PROGRAM, args=OPTIONS)
        yield opened
        opened.close()


@pytest.fixture(scope="module", params=["run", "runs", "bench", "scaling", "broken"])
def report(request, tmp_path_factory) -> Path:
    return written(request.param, tmp_path_factory.mktemp(request.param))


def written(kind: str, folder: Path) -> Path:
    if kind in ("bench", "scaling"):
        folders = [getattr(made, kind)(folder / "a")]
    else:
        folders = [made.run(folder / "a")]
        made.trace(folders[0])
        made.diagnosis(folders[0])
    if kind == "runs":
        folders += [made.run(folder / "b", method="bp", K=1), made.run(folder / "c", seed=1)]
    if kind == "broken":
        for name in ("trace.json", "config.json"):
            (folders[0] / name).write_text("{")
    out = folder / "report.html"
    write_report(folders, out)
    return out


class Seen:
    """A page, with what it complained about and what it asked the network for."""

    def __init__(self, browser: playwright.Browser, report: Path, width: int, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(report.as_uri())
        self.page.wait_for_function("[...document.querySelectorAll('.chart')].every(e => e.querySelector('svg'))")

    def __enter__(self) -> Seen:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (800, "light"), (390, "dark")])
def test_a_page_is_drawn_without_complaints_network_or_sideways_scrolling(browser, report, width, scheme):
    with Seen(browser, report, width, scheme) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        assert seen.page.evaluate(OUTSIDE) == []
        assert seen.page.locator(".chart text").count() > 10
        assert seen.page.evaluate(COLLIDE) == []
        assert seen.complaints == []
        assert seen.requests == [report.as_uri()]


def test_light_and_dark_are_not_the_same_page_and_paper_is_light(browser, report):
    grounds = {}
    for scheme in ("light", "dark"):
        with Seen(browser, report, 1280, scheme) as seen:
            grounds[scheme] = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
            seen.page.emulate_media(media="print")
            grounds[f"{scheme} paper"] = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    white = "rgb(255, 255, 255)"
    assert grounds == {"light": white, "dark": "rgb(20, 23, 27)", "light paper": white, "dark paper": white}


def test_a_chart_follows_the_width_of_the_window(browser, report):
    with Seen(browser, report, 1280) as seen:
        wide = seen.page.evaluate("document.querySelector('.chart svg').getBoundingClientRect().width")
        seen.page.set_viewport_size({"width": 390, "height": 800})
        seen.page.wait_for_function(f"document.querySelector('.chart svg').getBoundingClientRect().width < {wide} - 50")
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390


# ---- what readers do


@pytest.fixture
def timeline(browser, tmp_path) -> Iterator[tuple[Seen, playwright.Locator]]:
    with Seen(browser, written("run", tmp_path), 1280) as seen:
        yield seen, seen.page.locator("figure", has_text="As recorded").locator(".chart")


def boxes(chart: playwright.Locator) -> list[tuple[float, str]]:
    """Width and colour of the boxes of a timeline that are shown."""
    script = """e => [...e.querySelectorAll("path")].map(p => [p.getBoundingClientRect().width, p.getAttribute("fill")])
      .filter(([width, fill]) => width && /forward|backward|update|send/.test(fill))"""
    return [(width, fill) for width, fill in chart.evaluate(script)]


def test_pointing_at_a_box_shows_its_values(timeline):
    seen, chart = timeline
    chart.scroll_into_view_if_needed()
    chart.locator('path[fill="var(--backward)"]').nth(3).hover(force=True)
    tip = seen.page.locator("#tip")
    tip.wait_for(state="visible")
    for part in ("stage", "does backward", "batch", "takes 19.9"):
        assert part in tip.inner_text()


def test_a_click_in_the_legend_filters_and_the_next_brings_all_back(timeline):
    _, chart = timeline
    before = len(boxes(chart))
    name = chart.locator("text", has_text="backward").first
    name.click(force=True)
    chart.page.wait_for_timeout(200)
    kept = [fill for _, fill in boxes(chart)]
    assert kept.count("var(--forward)") <= 1  # in the legend
    assert kept.count("var(--backward)") > 10
    name.click(force=True)
    chart.page.wait_for_timeout(200)
    assert len(boxes(chart)) == before


def test_the_wheel_with_ctrl_zooms_a_timeline_and_without_scrolls_the_page(timeline):
    seen, chart = timeline
    chart.scroll_into_view_if_needed()
    widest = max(width for width, fill in boxes(chart) if "backward" in fill)
    place = chart.bounding_box()
    seen.page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    seen.page.mouse.wheel(0, -300)
    seen.page.wait_for_timeout(200)
    assert max(width for width, fill in boxes(chart) if "backward" in fill) == pytest.approx(widest, abs=0.5)
    chart.scroll_into_view_if_needed()
    place = chart.bounding_box()
    seen.page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    seen.page.keyboard.down("Control")
    seen.page.mouse.wheel(0, -300)
    seen.page.keyboard.up("Control")
    seen.page.wait_for_timeout(200)
    assert max(width for width, fill in boxes(chart) if "backward" in fill) > 1.2 * widest


def test_a_printed_report_has_its_folded_charts(browser, tmp_path):
    with Seen(browser, written("runs", tmp_path), 1280) as seen:
        assert seen.page.locator("details:not([open])").count() == 1
        seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert seen.page.locator("details:not([open])").count() == 0
        assert seen.page.evaluate("[...document.querySelectorAll('.chart')].every(e => e.querySelector('svg'))")
        seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert seen.page.locator("details:not([open])").count() == 1
        assert seen.page.pdf().startswith(b"%PDF")


def test_without_javascript_text_and_tables_are_there(browser, tmp_path):
    page = browser.new_page(java_script_enabled=False)
    page.goto(written("run", tmp_path).as_uri())
    assert "The charts need JavaScript" in page.locator("noscript").text_content()
    assert page.locator("table").first.is_visible()
    page.close()
