"""How a run scales: the clock's speed-ups for more stages than there are cores, with the measured points on them."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from offbeat.report.curves import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 1 / 32  # of BP's speed: what is slower is not drawn
TITLES = {"adl": "ADL", "adl-1f1b": "ADL on the 1F1B lag", "gpipe": "GPipe, at most 4K micro-batches"}


def scaling_figure(record: dict[str, Any]) -> Figure:
    """Above: speed-up against K by the clock, a line a link, for each method. Below: memory and staleness against K,
    and time a batch against the batch, the depth, and K with the depth."""
    from matplotlib.figure import Figure

    simulation, settings = record["simulation"], record["settings"]
    figure = Figure(figsize=(12.6, 7.8), dpi=100, facecolor="white")
    every = figure.subplots(2, 3)
    strong = [point for point in record["points"] if point["axis"] == "strong"]
    methods = list(dict.fromkeys(row["method"] for row in simulation["rows"]))
    for axes, method in zip(every[0], methods, strict=False):
        _speed_ups(axes, method, simulation, strong if method == settings["method"] else [])
    lowest = min(axes.get_ylim()[0] for axes in every[0])
    for axes in every[0]:
        axes.set_ylim(max(lowest, LEAST), max(axes.get_ylim()[1] for axes in every[0]))
    figure.legend(*every[0][0].get_legend_handles_labels(), frameon=False, fontsize=9, loc="upper left", ncols=6,
                  bbox_to_anchor=(0.015, 0.965))  # fmt: skip
    _memory(every[1][0], record["counted"], strong)
    _staleness(every[1][1], record["counted"], strong)
    _times(every[1][2], record["points"], settings)
    for axes in every.flat:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#EEEEEE")
        axes.set_axisbelow(True)
    figure.suptitle(f"{simulation['model']}, b={simulation['batch_size']}, M={simulation['M']}: lines by the clock "
                    "from measured units, points measured", x=0.02, ha="left", fontsize=12)  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    return figure


def _speed_ups(axes: Axes, method: str, simulation: dict[str, Any], strong: list[dict[str, Any]]) -> None:
    for colour, link in zip(COLOURS, simulation["links"], strict=False):
        rows = [row for row in simulation["rows"] if row["method"] == method and row["link"] == link]
        axes.plot([row["K"] for row in rows], [row["speedup"] for row in rows], color=colour, label=link, linewidth=1.6,
                  linestyle=":" if link == "no cost" else "-", gid=f"{method}-{link}")  # fmt: skip
    alone = next((median(point["seconds_per_batch"]) for point in strong if point["K"] == 1), None)
    if alone:
        axes.plot([point["K"] for point in strong], [alone / median(point["seconds_per_batch"]) for point in strong],
                  color="black", marker="o", linestyle="", markersize=7, markerfacecolor="white", markeredgewidth=1.6,
                  label="measured, one core a stage", gid="measured")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _plain(axes)
    axes.set_title(TITLES.get(method, method), loc="left", fontsize=11)
    axes.set_xlabel("stages K")
    axes.set_ylabel("times BP on one worker")


def _plain(axes: Axes) -> None:
    """Numbers as they are, not as powers."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def _memory(axes: Axes, counted: list[dict[str, Any]], strong: list[dict[str, Any]]) -> None:
    stages = [row["K"] for row in counted]
    for label, pick, colour in (("largest stage", max, COLOURS[1]), ("all stages together", sum, COLOURS[2])):
        axes.plot(stages, [pick(row["memory_counted"]) / 1e6 for row in counted], color=colour,
                  label=f"{label}, counted")  # fmt: skip
        if not strong:
            continue
        axes.plot([point["K"] for point in strong], [pick(point["memory"]) / 1e6 for point in strong], color=colour,
                  marker="o", linestyle="", markerfacecolor="white", label=f"{label}, measured")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plain(axes)
    axes.set_title("memory", loc="left", fontsize=11)
    axes.set_xlabel("stages K")
    axes.set_ylabel("MB")
    axes.legend(frameon=False, fontsize=8)


def _staleness(axes: Axes, counted: list[dict[str, Any]], strong: list[dict[str, Any]]) -> None:
    stages = [row["K"] for row in counted]
    axes.plot(stages, [row["staleness"][0] for row in counted], color=COLOURS[1], label="stage 1, by formula")
    means = [sum(row["staleness"]) / row["K"] for row in counted]
    axes.plot(stages, means, color=COLOURS[3], label="mean of all stages, by formula")
    seen = [point for point in strong if point["K"] > 1 and any(point["staleness_measured"])]
    if seen:
        axes.plot([point["K"] for point in seen], [point["staleness_measured"][0] for point in seen], color="black",
                  marker="o", linestyle="", markerfacecolor="white", label="stage 1, measured")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", base=2, linthresh=1)
    axes.set_ylim(bottom=0)
    _plain(axes)
    axes.set_title("staleness of gradients", loc="left", fontsize=11)
    axes.set_xlabel("stages K")
    axes.set_ylabel("updates")
    axes.legend(frameon=False, fontsize=8)


def _times(axes: Axes, points: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """All three against their own measure of work, as multiples of the first of each."""
    from matplotlib.ticker import StrMethodFormatter

    from offbeat.report.curves import STYLES

    measures = {
        "batch": ("batch", lambda point: point["batch_size"]),
        "depth": ("depth", lambda point: int("".join(filter(str.isdigit, point["model"])) or 0)),
        "weak": ("K, with the depth (weak)", lambda point: point["K"]),
    }
    for place, (axis, (label, of)) in enumerate(measures.items()):
        there = sorted((point for point in points if point["axis"] == axis), key=of)
        if there:
            first = of(there[0])
            axes.plot([of(point) / first for point in there], [median(point["seconds_per_batch"]) for point in there],
                      marker="o", color=COLOURS[1 + place], linestyle=STYLES[place],
                      label=f"{label}, from {first}", gid=axis)  # fmt: skip
    if not axes.lines:
        axes.set_visible(False)
        return
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _plain(axes)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:.2g}"))
    axes.legend(frameon=False, fontsize=8)
    K = next((point["K"] for point in points if point["axis"] in ("batch", "depth")), settings["K"])
    axes.set_title(f"time a batch (batch and depth: K={K})", loc="left", fontsize=11)
    axes.set_xlabel("times the smallest")
    axes.set_ylabel("seconds")


def scaling_text(record: dict[str, Any]) -> str:
    """The clock's speed-ups as lines."""
    rows = record["simulation"]["rows"]
    return "\n".join(f"{row['method']:9} {row['link']:16} K={row['K']:<4} {row['speedup']:8.2f}" for row in rows)
