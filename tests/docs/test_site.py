"""The pages fit together: links lead somewhere, generated pages are current, the site builds and loads nothing."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from preloaded import PYTHON

from offbeat.methods import METHODS, named

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
GENERATOR = ROOT / "benchmarks/method_pages.py"
LINK = re.compile(r"\[(?:[^\]]*)\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The text of a page without its code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))


def titles(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [re.sub(r"[`*\\]", "", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]


def on_the_web(title: str) -> str:
    """The anchor of a title where a repository is browsed: every space a hyphen."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def on_the_site(title: str) -> str:
    """The anchor that Python-Markdown makes: runs of spaces and hyphens are one."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def broken(page: Path) -> list[str]:
    """Relative links of a page that lead nowhere, here or on the site."""
    wrong = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            wrong.append(link)
        elif DOCS in page.parents and DOCS not in target.parents:
            wrong.append(f"{link} (not part of the site)")
        elif anchor and not any(anchor == on_the_web(title) == on_the_site(title) for title in titles(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_and_anchor_leads_somewhere(page):
    assert broken(page) == []


def test_links_that_lead_nowhere_are_found(tmp_path, monkeypatch):
    monkeypatch.setitem(broken.__globals__, "DOCS", tmp_path)
    (tmp_path / "there.md").write_text("# A title: with signs\n\n```sh\n# no title\n```\n")
    page = tmp_path / "page.md"
    good = "[a](there.md) [b](there.md#a-title-with-signs) [c](https://example.org) `[d](code.md)`"
    page.write_text(f"# Page\n\n{good} [e](gone.md) [f](there.md#no-title) [g](#nothing)\n")
    assert broken(page) == ["gone.md", "there.md#no-title", "#nothing"]


def test_every_page_is_reached_from_the_first():
    seen, ahead = set(), [DOCS / "index.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = (link.partition("#")[0] for link in LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link))
        ahead += [(page.parent / link).resolve() for link in links if link]
    assert set(DOCS.rglob("*.md")) == seen


def test_the_pages_on_choosing_and_questions_contain_no_measurements():
    for name in ("choosing.md", "faq.md"):
        text = prose(DOCS / name)
        assert not re.search(r"\d+(\.\d+)? ?(%|x\b|ms\b|times\b|samples/s|MB\b)|\d\.\d", text), name


def generated(root: Path) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, root / "benchmarks/method_pages.py", "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_pages_of_methods_are_those_of_their_files():
    checked = generated(ROOT)
    assert checked.returncode == 0, checked.stderr


def test_a_page_of_a_method_that_was_edited_is_missing_or_is_no_methods_is_found(tmp_path):
    shutil.copytree(DOCS / "methods", tmp_path / "docs/methods")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    assert generated(tmp_path).returncode == 0
    pages = tmp_path / "docs/methods"
    (pages / "adl.md").write_text((pages / "adl.md").read_text().replace("2(K-k)", "3(K-k)"))
    (pages / "fr.md").unlink()
    (pages / "new.md").write_text("# new\n")
    reported = generated(tmp_path)
    assert reported.returncode == 1
    assert reported.stderr == "not current: adl.md, fr.md, new.md; run python benchmarks/method_pages.py\n"


def commands_checked(root: Path) -> subprocess.CompletedProcess[str]:
    command = [PYTHON, root / "benchmarks/command_pages.py", "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_page_of_commands_is_that_of_the_command_line():
    checked = commands_checked(ROOT)
    assert checked.returncode == 0, checked.stderr


def test_a_page_of_commands_that_was_edited_is_found(tmp_path):
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/commands.md").write_text((DOCS / "commands.md").read_text().replace("resnet56", "resnet20"))
    checked = commands_checked(tmp_path)
    assert checked.returncode == 1
    assert "run python benchmarks/command_pages.py" in checked.stderr


def test_the_page_of_commands_has_every_option_of_every_command(offbeat, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    sections = (DOCS / "commands.md").read_text().split("\n## ")[1:]
    written = {text.partition("\n")[0]: set(re.findall(r"`(--?[\w-]+)`", text)) for text in sections}
    for name in ("train", "compare", "reproduce", "plan", "bench", "bench scaling", "report", "checkpoint verify"):
        shown = offbeat(*name.split(), "--help").out
        rows = re.findall(r"^[│ *]*((?:--?[a-zA-Z][\w-]*[ ,/]*)+)", shown, re.MULTILINE)
        assert set(" ".join(rows).split()) - {"--help"} == written[f"offbeat {name}"], name


def test_the_glossary_is_in_alphabetical_order():
    terms = re.findall(r"^\| ([^|]+) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)[2:]
    assert len(terms) > 40
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("name", METHODS)
def test_the_formulas_of_a_page_give_what_the_method_declares(name):
    method = named(name)
    reported = " ".join((DOCS / f"methods/{name}.md").read_text().split())
    formulas = re.search(
        r"mean staleness in updates (\S+); parameter versions (\S+), including the newest; (?:micro-)?batches between "
        r"forward and backward (\S+)\.",
        reported,
    ).groups()
    K = 4 if method.limit is None or method.limit(4) is None else 1
    for k in range(1, K + 1):
        letters = {"k": k, "K": K, "M": method.M, "m": method.m, "N": method.workers, "ceil": math.ceil}
        values = [eval(formula.replace("2(", "2*("), {}, letters) for formula in formulas]
        assert values == [method.staleness(k, K), method.versions(k, K), method.held(k, K)]


class Loads(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found.append((given.get("href") if tag == "link" else given.get("src")) or "")


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: make site does it")
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) >= len(list(DOCS.rglob("*.md")))
    for page in pages:
        parser = Loads()
        parser.feed(page.read_text())
        assert not [loaded for loaded in parser.found if re.match(r"(https?:)?//", loaded)], page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(https?:)?//", sheet.read_text()), sheet
