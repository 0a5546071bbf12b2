"""The timeline of a method as a chart (the paper's Fig. 1), from the spans that its programs and costs give.

Stage 1, the input, is at the bottom, so that forwards climb and backwards descend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.method import Method
from offbeat.ops import Forward, Update
from offbeat.timeline import Costs, Span, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD, BACKWARD, UPDATE = "#56B4E9", "#E69F00", "#000000"  # Okabe and Ito's, told apart by the colour-blind
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 12.8, 0.95, 0.2, 0.75, 0.55  # inches; 1280 px at DPI
DPI = 100


@dataclass(frozen=True, slots=True)
class Box:
    """A span as it is drawn.

    version    of the weights: those that a forward or backward computes with, or that an update makes
    replayed   seconds at the start of a backward in which it repeats its forward
    """

    span: Span
    version: int
    replayed: float = 0.0


def boxes(method: Method, costs: Costs, batches: int) -> list[Box]:
    """All spans of that many batches with the versions of their weights, in the order of each stage's program.

    >>> from offbeat.methods import ADL
    >>> stage_1 = [box for box in boxes(ADL(M=1), Costs([1, 1], [2, 2]), 4) if box.span.k == 1]
    >>> print(" ".join(f"{box.span.operation}@v{box.version}" for box in stage_1))
    F0@v0 F1@v0 F2@v0 B0@v0 U@v1 F3@v1 B1@v0 U@v2 B2@v0 U@v3 B3@v1 U@v4
    """
    return [Box(span, span.version, span.replayed) for span in timeline(method, batches, costs)]


def heading(method: Method, costs: Costs, batches: int) -> str:
    """What is drawn, in a line."""
    letters = f"K={costs.K}" + (f", M={method.M}" if method.M > 1 else "")
    if method.m > 1:
        return f"{method.name}, {letters}, {batches} batches of m={method.m} micro-batches (numbered through)"
    return f"{method.name}, {letters}, {batches} batches"


def unit(costs: Costs) -> tuple[float, str]:
    """Seconds that the axis counts as one, and their name: the forward where all forwards cost 1, otherwise ms."""
    return (1.0, "F") if all(forward == 1 for forward in costs.forward) else (0.001, "ms")


# --- chart --------------------------------------------------------------------------------------------------------


def timeline_figure(method: Method, costs: Costs, *, batches: int = 8, title: str | None = None) -> Figure:
    """A row a stage, a box a forward or backward with its batch, a mark an update; white is idle.

    The box of Forward(t=3) at stage 2 has the gid "stage2-F3", and so in the svg; updates are "stage2-U1", ...
    """
    from matplotlib.figure import Figure

    K, (scale, name) = costs.K, unit(costs)
    row = 0.62 if K <= 8 else max(0.26, 5.0 / K)
    height = TOP + row * K + BOTTOM
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    axes = figure.add_axes(
        (LEFT / WIDTH, BOTTOM / height, (WIDTH - LEFT - RIGHT) / WIDTH, row * K / height), facecolor="white"
    )
    drawn = boxes(method, costs, batches)
    end = max(box.span.end for box in drawn) / scale or 1.0
    axes.set_xlim(0, end * 1.004)  # room for the mark of the last update
    axes.set_ylim(0.5, K + 0.5)
    axes.set_yticks(range(1, K + 1), [f"stage {k}" for k in range(1, K + 1)], fontsize=10 if row > 0.4 else 8)
    axes.set_xlabel("time (F, the forward of a stage)" if name == "F" else f"time ({name})")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.hlines([k + 0.5 for k in range(1, K)], 0, end, color="#DDDDDD", linewidth=0.6, zorder=0)
    pixels = (WIDTH - LEFT - RIGHT) * DPI / (end * 1.004)
    _draw_boxes(axes, drawn, scale, pixels=pixels)
    versions = _label(axes, drawn, scale, pixels=pixels, row=row * DPI)
    figure.text(LEFT / WIDTH, 1 - 0.12 / height, title or heading(method, costs, batches), fontsize=13, va="top")
    _legend(figure, height, replayed=any(box.replayed for box in drawn), versions=versions)
    return figure


def _draw_boxes(axes: Axes, drawn: Iterable[Box], scale: float, *, pixels: float) -> None:
    from matplotlib.patches import Rectangle

    for box in drawn:
        span = box.span
        start, width = span.start / scale, (span.end - span.start) / scale
        gid = f"stage{span.k}-{span.operation}"
        if isinstance(span.operation, Update):
            edge = 1.6 if width * pixels < 2 else 0.0  # updates cost little, and must be seen
            mark = Rectangle((start, span.k - 0.46), width, 0.92, facecolor=UPDATE, edgecolor=UPDATE, linewidth=edge)
            mark.set(gid=f"{gid}{box.version}", zorder=3)
            axes.add_patch(mark)
            continue
        colour = FORWARD if isinstance(span.operation, Forward) else BACKWARD
        whole = Rectangle((start, span.k - 0.4), width, 0.8, facecolor=colour, edgecolor="white", linewidth=0.8)
        whole.set(gid=gid, zorder=1)
        axes.add_patch(whole)
        if box.replayed:
            part = Rectangle((start, span.k - 0.4), box.replayed / scale, 0.8, facecolor=FORWARD, edgecolor="white",
                             linewidth=0.8, hatch="////")  # fmt: skip
            part.set(gid=f"{gid}-replay", zorder=2)
            axes.add_patch(part)


def _label(axes: Axes, drawn: Sequence[Box], scale: float, *, pixels: float, row: float) -> bool:
    """Write batch, and version below, into the boxes where they fit; whether any version could be written.

    pixels: that one unit of time is wide; row: that a row is high.
    """
    alike: dict[tuple[int, type], list[Box]] = {}  # the forwards of a stage, or its backwards: labelled all or none
    for box in drawn:
        if not isinstance(box.span.operation, Update):
            alike.setdefault((box.span.k, type(box.span.operation)), []).append(box)
    room = {
        kind: min(box.span.end - box.span.start - box.replayed for box in group) / scale * pixels - 2
        for kind, group in alike.items()
    }
    number = "0" * max(len(str(box.span.operation)) - 1 for group in alike.values() for box in group)
    version = "0" * len(f"v{max(box.version for box in drawn)}")
    sizes = [size for size in (11.0, 9.0, 7.5) if _wide(number, size) <= min(room.values())]
    size = sizes[0] if sizes else 6.5
    small = min(7.0, size - 1)
    tall_enough = 0.75 * row >= (size + small) * DPI / 72 * 1.25
    versions = False
    for kind, group in alike.items():
        if _wide(number, size) > room[kind]:
            continue
        both = tall_enough and _wide(version, small) <= room[kind]
        versions = versions or both
        for box in group:
            k, middle = box.span.k, (box.span.start + box.replayed + box.span.end) / 2 / scale
            place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 4}
            axes.text(middle, k + (0.11 if both else 0), str(box.span.operation)[1:], fontsize=size, **place)
            if both:
                axes.text(middle, k - 0.24, f"v{box.version}", fontsize=small, color="#333333", **place)
    return versions


def _wide(text: str, size: float) -> float:
    """Pixels that a text of this font size is wide, about: a digit of DejaVu Sans is 0.64 of its size."""
    return len(text) * 0.64 * size * DPI / 72


def _legend(figure: Figure, height: float, *, replayed: bool, versions: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries: list[Patch | Line2D] = [
        Patch(facecolor=FORWARD, label="forward"),
        Patch(facecolor=BACKWARD, label="backward"),
    ]
    if replayed:
        entries.append(Patch(facecolor=FORWARD, edgecolor="white", hatch="////", label="forward repeated"))
    entries.append(Line2D([], [], color=UPDATE, marker="|", markersize=12, markeredgewidth=1.6, linestyle="none",
                          label="update"))  # fmt: skip
    if versions:
        entries.append(Line2D([], [], color="#333333", marker="$v2$", markersize=10, markeredgewidth=0.3,
                              linestyle="none", label="version of the weights used"))  # fmt: skip
    corner = (LEFT / WIDTH, 1 - 0.42 / height)
    figure.legend(handles=entries, loc="upper left", bbox_to_anchor=corner, ncols=len(entries), frameon=False,
                  fontsize=10, borderpad=0, borderaxespad=0, handletextpad=0.5, columnspacing=1.4)  # fmt: skip
