"""The HTML report as its readers see it: in a headless Chromium, where there is one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import made_folders as made
import pytest

from offbeat.report import browser
from offbeat.report.browser import Browser
from offbeat.report.page import write_report

pytestmark = pytest.mark.skipif(browser.find() is None, reason="there is no Chromium; install one, or set CHROMIUM")

WIDTHS = (1280, 800, 390)

# Of all that is shown: whether it lies outside the page to the left or right, where nothing around it scrolls.
OUTSIDE = """
[...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width && !e.closest(".table") && e.id !== "tip" && (box.left < -3 || box.right > innerWidth + 3);
}).map(e => e.outerHTML.slice(0, 120))
"""
# Width and height of the pictures that are shown, with how large their letters are on the screen.
DRAWN = """
[...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().width).map(e => {
  const box = e.getBoundingClientRect();
  return [box.width, box.height, 11.5 * box.width / e.viewBox.baseVal.width];
})
"""
# Letters of a picture that lie on other letters of it.
COLLIDE = """
[...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().width).flatMap(svg => {
  const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([a, x], i) => texts.slice(i + 1).filter(([b, y]) =>
    x.left < y.right - 2 && y.left < x.right - 2 && x.top < y.bottom - 5 && y.top < x.bottom - 5).map(([b]) => [a, b]));
})
"""


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    with Browser() as made_browser:
        yield made_browser


@pytest.fixture(scope="module", params=["run", "runs", "bench", "scaling", "broken"])
def report(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in ("bench", "scaling"):
        folders = [getattr(made, request.param)(folder / "a")]
    else:
        folders = [made.run(folder / "a")]
        made.trace(folders[0])
        made.diagnosis(folders[0])
    if request.param == "runs":
        folders += [made.run(folder / "b", method="bp", K=1), made.run(folder / "c", seed=1)]
    if request.param == "broken":
        for name in ("trace.json", "config.json"):
            (folders[0] / name).write_text("{")
    out = folder / "report.html"
    write_report(folders, out)
    return out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_is_shown_without_complaints_and_nothing_leaves_it(opened, report, width, dark):
    opened.open(report.as_uri(), width=width, dark=dark)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.evaluate(OUTSIDE) == []
    assert opened.errors == []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_picture_has_a_size_and_letters_that_can_be_read_and_do_not_collide(opened, report, width):
    opened.open(report.as_uri(), width=width)
    opened.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    drawn = opened.evaluate(DRAWN)
    assert drawn
    for wide, high, letters in drawn:
        assert wide > 150
        assert high > 20
        assert 8.5 <= letters <= 18
    assert opened.evaluate(COLLIDE) == []


def test_light_and_dark_are_not_the_same_page(opened, report):
    grounds = []
    for dark in (False, True):
        opened.open(report.as_uri(), width=1280, dark=dark)
        grounds.append(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]


def test_letters_stand_out_from_the_page_in_light_and_dark(opened, report):
    """Contrast of all colours of letters in pictures and text, as WCAG counts it."""
    script = """
    (() => {
      const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126*r + 0.7152*g + 0.0722*b; };
      const page = light(getComputedStyle(document.body).backgroundColor);
      const inBoxes = t => ["inside", "inside-faint", "in-box"].some(name => t.classList.contains(name));
      const letters = [...document.querySelectorAll("svg text, p, td, th, dt, dd, figcaption")];
      return letters.filter(t => !inBoxes(t)).map(t => {
        const style = getComputedStyle(t), own = light(t.closest("svg") ? style.fill : style.color);
        return (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
      }).reduce((a, b) => Math.min(a, b));
    })()
    """
    for dark in (False, True):
        opened.open(report.as_uri(), width=1280, dark=dark)
        assert opened.evaluate(script) >= 4.5


def test_the_pointer_reads_values_and_the_page_is_whole_without_the_script(opened, report):
    opened.open(report.as_uri(), width=1280)
    shape = opened.evaluate("document.querySelectorAll('svg title').length")
    assert shape == 0  # the script has taken them over
    if "<title>" not in report.read_text().split("<body>")[1]:
        return
    shown = opened.evaluate("""
      (() => { const shape = document.querySelector("svg.wide [aria-label]:not(svg)");
        shape.dispatchEvent(new PointerEvent("pointermove", { clientX: 300, clientY: 300 }));
        const tip = document.getElementById("tip");
        return [getComputedStyle(tip).display, tip.textContent === shape.getAttribute("aria-label")]; })()
    """)
    assert shown == ["block", True]
    text = report.read_text()
    bare = report.with_name("bare.html")
    bare.write_text(text[: text.index("<script>")] + "</body></html>")
    opened.open(bare.as_uri(), width=1280)
    assert opened.evaluate("document.querySelectorAll('svg title').length") > 0
    assert opened.errors == []


def test_a_screenshot_shows_the_whole_page(opened, report, tmp_path):
    opened.open(report.as_uri(), width=390)
    shot = opened.screenshot()
    assert shot.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", shot[16:24])
    assert (width, height) == (390, opened.evaluate("document.documentElement.scrollHeight"))
    assert len(shot) > 20_000


def test_pictures_are_written_as_png_of_twice_their_size(tmp_path):
    run = made.run(tmp_path / "a")
    count, said = write_report([run], tmp_path / "a.html", tmp_path / "pictures")
    assert said == []
    drawn = sorted((tmp_path / "pictures").glob("*.png"))
    assert len(drawn) == count
    width, height = struct.unpack(">II", (tmp_path / "pictures" / "run-partition.png").read_bytes()[16:24])
    assert width == 2 * (960 + 48)
    assert height > 200


def test_a_program_that_is_no_browser_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("CHROMIUM", "false")
    run = made.run(tmp_path / "a")
    _, said = write_report([run], tmp_path / "a.html", tmp_path / "pictures")
    assert len(said) == 1
    assert "not as PNG: the browser ended" in said[0]
