"""What generated pages share: records, where they come from, markdown, pictures, and `--check`."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs/results"

Record = dict[str, Any]
Records = dict[str, Record]


def records(kind: str) -> Records:
    """The records whose name begins so: by setting, then by the time they were made."""
    found = {path.name: json.loads(path.read_text()) for path in RECORDS.glob(f"{kind}-*.json")}

    def order(name: str) -> tuple[int, int, int, str]:
        """The larger machine first, then the smaller network and K."""
        first, second, third, *_ = [int(number) for number in re.findall(r"\d+", name)] + [0, 0, 0]
        return -first, second, third, made(found[name]).get("started", "") + name

    return {name: found[name] for name in sorted(found, key=order)}


def made(record: Record) -> Record:
    """Where a record comes from; a plan tells it among its other keys."""
    found = record.get("comparison") or record
    if "provenance" not in found and "hardware" in found:
        told = {key: found[key] for key in ("commit", "command")}
        return {**told, "machine": found["hardware"], "versions": {"torch": found["torch"]}}
    return found["provenance"]


def shown(values: list[float], rounds: int) -> str:
    """Median (least-most); of a single round there is only one."""
    middle, least, most = values
    return f"{middle:.2f} ({least:.2f}-{most:.2f})" if rounds > 1 else f"{middle:.2f}"


def source(name: str, record: Record) -> str:
    """Where a record is, where it comes from, and what else a reader should know (`remark`, added by hand)."""
    found = made(record)
    parts = [f"`{' '.join(found['command'])}`"] if "command" in found else []
    if "cuts" in record:
        parts.append(f"cuts {record['cuts']}")
    commit = found["commit"] or "unknown"
    note = " (set afterwards, see the [log](LOG.md))" if "commit_set" in found or "set" in found else ""
    parts.append(f"commit {commit[:12]}{'+' * commit.endswith('+')}{note}")
    parts.append(f"torch {found['versions']['torch']}, {found['machine']}")
    remark = f". {record['remark']}." if "remark" in record else ""
    return f"- [{name}](results/{name}): {', '.join(parts)}{remark}"


def prose(*parts: str) -> str:
    return textwrap.fill(" ".join(parts), 120, break_long_words=False, break_on_hyphens=False)


def point(*parts: str) -> str:
    return textwrap.fill(
        "- " + " ".join(parts), 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def listed(items: list[str]) -> str:
    return "; ".join(items) if items else "none"


def between(values: list[float], form: Callable[[float], str]) -> str:
    """The smallest and the largest, or the one that there is.

    >>> between([1.434, 1.36], "{:.2f}".format), between([2.0], "{:.2f}".format)
    ('1.36 to 1.43', '2.00')
    """
    return " to ".join(dict.fromkeys(form(value) for value in (min(values), max(values))))


@dataclass(frozen=True)
class Picture:
    """An SVG file, which names the content that it shows.

    content   all that is drawn in it, as text
    svg       draws it
    """

    path: Path
    content: str
    svg: Callable[[], str]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def origin(self) -> str:
        return f"<!-- drawn from {hashlib.sha256(self.content.encode()).hexdigest()} -->"

    @property
    def current(self) -> bool:
        return self.path.exists() and self.origin in self.path.read_text()

    def draw(self) -> None:
        from offbeat.runs.record import write

        write(self.path, self.svg().replace("</svg>", f"{self.origin}\n</svg>"))


def publish(
    pages: Mapping[Path, str],
    command: str,
    *,
    pictures: Iterable[Picture] = (),
    left_over: Iterable[Path] = (),
    options: Iterable[str] = (),
) -> None:
    """Write the pages and pictures that are not current, and remove files that nothing makes any more; with --check
    only name them. `options` are other arguments that the script takes."""
    allowed = ["--check", *options]
    if unknown := set(sys.argv[1:]) - {*allowed}:
        sys.exit(f"unknown arguments {' '.join(sorted(unknown))}: use {', '.join(allowed)}, or none")
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text]
    drawn = [picture for picture in pictures if not picture.current or "--picture" in sys.argv]
    left_over = sorted(left_over)
    if "--check" in sys.argv:
        names = ", ".join(each.name for each in (*stale, *drawn, *left_over))
        sys.exit(f"not current: {names}; run {command}" if names else 0)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(pages[path], "utf-8")
    for picture in drawn:
        picture.draw()
    for path in left_over:
        path.unlink()
