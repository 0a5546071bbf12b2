"""Figures as people read them: counts, bytes, times, medians with their range, tables of a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any


def counted(count: int, word: str, several: str | None = None) -> str:
    """
    >>> counted(1, "run"), counted(3, "run"), counted(2, "batch", "batches")
    ('1 run', '3 runs', '2 batches')
    """
    return f"{count} {word if count == 1 else several or word + 's'}"


def size(value: float) -> str:
    """Bytes.

    >>> size(0), size(1600), size(887420), size(12.3e6), size(3.2e9)
    ('0', '1.6 kB', '0.89 MB', '12 MB', '3.2 GB')
    """
    if value < 1e5:
        return f"{value / 1e3:.2g} kB" if value >= 1 else "0"
    shown, unit = (value / 1e9, "GB") if value >= 1e9 else (value / 1e6, "MB")
    return f"{shown:.0f} {unit}" if shown >= 10 else f"{shown:.2g} {unit}"


def duration(seconds: float) -> str:
    """
    >>> duration(3.19), duration(75), duration(4000)
    ('3.2 s', '1 min 15 s', '1 h 6 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def ranged(values: Sequence[float], digits: int = 0) -> str:
    """Median (least-most); of a single one only that.

    >>> ranged([1200.4, 1100, 1300]), ranged([7]), ranged([1.5, 1.2], digits=2)
    ('1,200 (1,100-1,300)', '7', '1.35 (1.20-1.50)')
    """
    middle, least, most = (f"{value:,.{digits}f}" for value in (median(values), min(values), max(values)))
    return middle if len(values) < 2 else f"{middle} ({least}-{most})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def markdown_rows(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of rows with the same columns.

    >>> print(markdown_rows([{"a": "1", "b": "2"}]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def aligned(lines: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table for a terminal or a pipe: a line for each row, however wide; the columns `right` are of numbers.

    >>> print(aligned([["row", "K"], ["first", "12"], ["b", "4"]], right=[1]))
    row    K
    first 12
    b      4
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        " ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def document(title: str, lines: Sequence[str], notes: Sequence[str], provenance: Mapping[str, Any]) -> str:
    """A table, its notes, and where it comes from."""
    made = provenance
    source = (
        f"`{' '.join(made['command'])}`, commit {made['commit'] or 'unknown'}, {made['machine']}, {made['started']}"
    )
    return "\n".join([f"### {title}", "", *lines, "", *(f"- {note}" for note in (*notes, source)), ""])
