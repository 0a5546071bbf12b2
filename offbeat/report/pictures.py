"""Pictures in files: the timeline of a method (the paper's Fig. 1), its staleness against M (Fig. 2), learning curves.

A file is written completely or not at all, and the same arguments give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.record import write
from offbeat.report.bars import bench_figure, bench_text
from offbeat.report.curves import curves_figure, curves_text
from offbeat.report.gantt import timeline_figure
from offbeat.report.growth import scaling_figure, scaling_text
from offbeat.report.lateness import staleness_figure, staleness_text
from offbeat.report.text import timeline_text
from offbeat.timeline import Costs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".txt")


def draw_timeline(method: Method, costs: Costs, path: Path, *, batches: int = 8, title: str | None = None) -> None:
    """Draw when every stage does what, fill and drain included; .svg, .png or .txt by the suffix of the path."""
    _check(path)
    if batches < 1:
        raise UserError(f"{batches} batches to draw: use a whole number from 1 up")
    _draw(
        path,
        text=lambda: timeline_text(method, costs, batches=batches, title=title),
        figure=lambda: timeline_figure(method, costs, batches=batches, title=title),
    )


def draw_staleness(method_of_M: Callable[[int], Method], K: int, path: Path, *, largest_M: int = 16) -> None:
    """Draw the mean staleness of every stage against M = 1..largest_M; .svg, .png or .txt by the suffix."""
    _check(path)
    for letter, value in (("K", K), ("largest M", largest_M)):
        if value < 1:
            raise UserError(f"{letter} = {value}: use a whole number from 1 up")
    _draw(
        path,
        text=lambda: staleness_text(method_of_M, K, largest_M=largest_M),
        figure=lambda: staleness_figure(method_of_M, K, largest_M=largest_M),
    )


def draw_curves(
    runs: Mapping[str, Sequence[Sequence[float]]], path: Path, *, title: str,
    times: Mapping[str, Sequence[Sequence[float]]] | None = None,
) -> None:  # fmt: skip
    """Draw the test error of several runs a method against the epoch, or against the seconds of training behind each
    (not in text); .svg, .png or .txt by the suffix."""
    _check(path)
    _draw(
        path,
        text=lambda: curves_text(runs, title=title),
        figure=lambda: curves_figure(runs, title=title, times=times),
    )


def draw_bench(record: Mapping[str, Any], path: Path) -> None:
    """Draw the rows of a record of `offbeat bench` as bars; .svg, .png or .txt by the suffix."""
    _check(path)
    _draw(path, text=lambda: bench_text(dict(record)), figure=lambda: bench_figure(dict(record)))


def draw_scaling(record: Mapping[str, Any], path: Path) -> None:
    """Draw a record of `offbeat bench scaling`; .svg, .png or .txt by the suffix."""
    _check(path)
    _draw(path, text=lambda: scaling_text(dict(record)), figure=lambda: scaling_figure(dict(record)))


def _check(path: Path) -> None:
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"picture {str(path)!r}: unknown kind of file, use a name that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"picture {str(path)!r}: there is no folder {str(path.parent)!r}, make it first")


def _draw(path: Path, *, text: Callable[[], str], figure: Callable[[], Figure]) -> None:
    kind = path.suffix.lower()[1:]
    if kind == "txt":
        _write(path, (text() + "\n").encode())
        return
    with settings():
        content = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure().savefig(content, format=kind, metadata=metadata)
    _write(path, content.getvalue())


@contextmanager
def settings() -> Iterator[None]:
    """Matplotlib as it comes, whatever the user's own settings, with the same ids in every svg."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"svg.hashsalt": "offbeat", "hatch.linewidth": 0.8})
        yield


def _write(path: Path, content: bytes) -> None:
    try:
        write(path, content)
    except OSError as error:
        raise UserError(f"picture {str(path)!r}: cannot be written, {error.strerror}; use another place") from error
