"""What a page is made of: sections with text, tables, headline figures and charts; page.html writes them as HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt

Block = dict[str, Any]  # its "kind" is the name of a macro in page.html


@dataclass(frozen=True)
class Drawing:
    """A chart in a page, or in a file of its own.

    name     of its files
    across   how many such charts stand side by side where there is room
    """

    name: str
    title: str
    chart: alt.LayerChart
    caption: str = ""
    across: int = 1


@dataclass
class Section:
    """A heading with its content."""

    title: str
    lead: str = ""
    blocks: list[Block] = field(default_factory=list)
    below: list[Section] = field(default_factory=list)
    fold: bool | None = None  # None: always there; otherwise under its heading, open or not

    def add(self, *blocks: Block) -> Section:
        self.blocks += blocks
        return self

    def drawings(self) -> list[Drawing]:
        """Its own, and those of the sections below it."""
        here = [drawing for block in self.blocks if block["kind"] == "charts" for drawing in block["drawings"]]
        return here + [drawing for section in self.below for drawing in section.drawings()]


@dataclass(frozen=True)
class ReportPart:
    """What a page shows of one folder, or of several runs."""

    title: str
    kind: str
    sections: list[Section]


def charts(*drawings: Drawing) -> Block:
    return {"kind": "charts", "drawings": list(drawings)}


def missing(text: str, *, warn: bool = False) -> Block:
    """Why something is not there, and how to get it; `code` in it is set as such."""
    return {"kind": "missing", "text": text, "warn": warn}


def table(rows: Sequence[Mapping[str, str]], *, names: Sequence[str] = (), notes: Sequence[str] = ()) -> Block:
    """Rows with the same columns. The first column and those in `names` are text, to the left; all others are figures;
    notes stand below."""
    return {"kind": "table", "rows": rows, "names": names, "lines": list(notes)}


def figures(shown: Sequence[tuple[str, str, str]]) -> Block:
    """Headline figures: (what, how much, a remark)."""
    return {"kind": "figures", "shown": list(shown)}


def facts(shown: Mapping[str, str], *, code: Sequence[str] = ()) -> Block:
    """Names and what they are; those in `code` in the letters of code."""
    return {"kind": "facts", "shown": dict(shown), "code": code}


def notes(lines: Sequence[str]) -> Block:
    return {"kind": "notes", "lines": list(lines)}


def slug(text: str) -> str:
    """A name for files and anchors.

    >>> slug("ADL, K=4 M=2: bits/s")
    'adl-k-4-m-2-bits-s'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "part"
