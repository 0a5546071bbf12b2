"""What a page is made of: sections of text, tables, figures and pictures, and how they are written in HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from offbeat.report.svg import Picture

WIDTHS = {1: 960, 2: 504, 3: 325}  # pixels that pictures are drawn at, by how many stand in a row
NARROW = 358  # and on a phone of 390


@dataclass
class Section:
    """A heading with its content: HTML, or pictures that stand together."""

    title: str
    lead: str = ""
    blocks: list[str | list[Picture]] = field(default_factory=list)
    below: list[Section] = field(default_factory=list)
    fold: bool | None = None  # None: always there; else behind its heading, open or not

    def html(self, text: str) -> Section:
        self.blocks.append(text)
        return self

    def pictures(self, *drawn: Picture) -> Section:
        self.blocks.append(list(drawn))
        return self

    def all_pictures(self) -> list[Picture]:
        here = [picture for block in self.blocks if isinstance(block, list) for picture in block]
        return here + [picture for section in self.below for picture in section.all_pictures()]


def slug(text: str) -> str:
    """A name for files and anchors.

    >>> slug("ADL, K=4 M=2: bits/s")
    'adl-k-4-m-2-bits-s'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "part"


def missing(text: str, *, warn: bool = False) -> str:
    """Why something is not there, and how to get it."""
    return f'<p class="none{" warn" * warn}">{coded(text)}</p>'


def coded(text: str) -> str:
    """Text with `code` in it.

    >>> coded("no trace: train with `--trace 200` <again>")
    'no trace: train with <code>--trace 200</code> &lt;again&gt;'
    """
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str] = (), names: Sequence[str] = ()
) -> str:
    """The first column and those in `words` and `names` are text, to the left; all others are figures."""

    def cell(tag: str, name: str, text: str) -> str:
        css = ' class="words"' if name in words else ' class="name"' if name in names else ""
        return f"<{tag}{css}>{escape(text)}</{tag}>"

    head = "".join(cell("th", name, name) for name in columns)
    body = "".join(
        "<tr>" + "".join(cell("td", name, text) for name, text in zip(columns, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def figures(shown: Sequence[tuple[str, str, str]]) -> str:
    """Headline figures: (what, how much, a remark)."""
    parts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in shown
    )
    return f'<dl class="figures">{parts}</dl>'


def facts(shown: Mapping[str, str], *, code: Sequence[str] = ()) -> str:
    """Names and what they are; those in `code` in the letters of code."""

    def written(text: str) -> str:  # lines end between words, not at a hyphen
        return f"<code>{' '.join(f'<span>{escape(word)}</span>' for word in text.split())}</code>"

    parts = "".join(
        f"<dt>{escape(name)}</dt><dd>{written(text) if name in code else escape(text)}</dd>"
        for name, text in shown.items()
    )
    return f'<dl class="facts">{parts}</dl>'


def notes(lines: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{coded(line)}</li>" for line in lines)}</ul>' if lines else ""


def rendered(section: Section, *, level: int = 2, place: str = "") -> str:
    """A section, with those below it."""
    body = [f'<p class="lead">{coded(section.lead)}</p>'] if section.lead else []
    for block in section.blocks:
        body.append(block if isinstance(block, str) else _pictures(block))
    body += [rendered(below, level=level + 1) for below in section.below]
    name = f' id="{place}"' if place else ""
    if section.fold is not None:
        opened = " open" if section.fold else ""
        return f"<details{name}{opened}><summary>{escape(section.title)}</summary>{''.join(body)}</details>"
    css = ' class="part"' if level == 2 and place and section.below else ""
    return f"<section{name}{css}><h{level}>{escape(section.title)}</h{level}>{''.join(body)}</section>"


def _pictures(drawn: Sequence[Picture]) -> str:
    """Each one twice, for large and small screens: letters keep their size."""
    shown = []
    for picture in drawn:
        wide = picture.draw(WIDTHS[picture.across]).svg(picture.title, css=' class="wide"')
        narrow = picture.draw(NARROW).svg(picture.title, css=' class="narrow"')
        caption = f"<figcaption><b>{escape(picture.title)}</b>{coded(picture.caption)}</figcaption>"
        shown.append(f'<figure class="across{picture.across}">{caption}{wide}{narrow}</figure>')
    return f'<div class="pictures">{"".join(shown)}</div>'
