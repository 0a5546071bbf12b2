"""The bars of `offbeat bench`: samples a second of every row, with their spread, and the bound of the cuts."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from offbeat.report.standings import setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAMILIES = {"bp": ("#999999", "back-propagation"), "torch": ("#E69F00", "torch.distributed"),
            "offbeat": ("#0072B2", "Offbeat")}  # fmt: skip
STALE = "///"


def bench_figure(record: dict[str, Any]) -> Figure:
    """A bar with the gid of each row that was timed; stale gradients are hatched."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [row for row in record["rows"] if row["seconds_per_batch"]]
    figure = Figure(figsize=(9.6, 1.6 + 0.42 * len(rows)), dpi=100, facecolor="white")
    axes = figure.add_axes((0.33, 0.75 / (1.6 + 0.42 * len(rows)), 0.64, 1 - 1.55 / (1.6 + 0.42 * len(rows))))
    for place, row in enumerate(rows):
        speeds = row["samples_per_second"]
        middle = median(speeds)
        axes.barh(place, middle, color=FAMILIES[row["family"]][0], hatch=None if row["exact"] else STALE,
                  edgecolor="white", height=0.72, gid=row["name"])  # fmt: skip
        axes.plot([min(speeds), max(speeds)], [place, place], color="black", linewidth=1.2, marker="|", markersize=7)
        axes.annotate(f"{middle:,.0f}", (max(speeds), place), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    handles: list[Any] = [Patch(color=colour, label=name) for family, (colour, name) in FAMILIES.items()
               if any(row["family"] == family for row in rows)]  # fmt: skip
    handles.append(Patch(facecolor="#CCCCCC", hatch=STALE, edgecolor="white", label="late gradients"))
    if record["bound"]["samples_per_second"]:
        line = axes.axvline(median(record["bound"]["samples_per_second"]), color="#D55E00", linestyle="--", gid="bound",
                            label="slowest stage alone")  # fmt: skip
        handles.append(line)
    titles = [row["title"] + (f", m={row['micro_batches']}" if row["micro_batches"] else "") for row in rows]
    axes.set_yticks(range(len(rows)), titles)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.14 * max(axes.get_xlim()[1], 1e-9))
    axes.set_xlabel("samples a second: median, least and most")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#EEEEEE")
    axes.set_axisbelow(True)
    figure.suptitle(setting(record), x=0.02, ha="left", fontsize=12)
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=8,
                  bbox_to_anchor=(0.99, 1 - 0.3 / (1.6 + 0.42 * len(rows))))  # fmt: skip
    return figure


def bench_text(record: dict[str, Any]) -> str:
    """The same as lines."""
    rows = [row for row in record["rows"] if row["seconds_per_batch"]]
    width = max(len(row["title"]) for row in rows)
    most = max(median(row["samples_per_second"]) for row in rows)
    return "\n".join(
        f"{row['title']:<{width}} | {'#' * round(40 * median(row['samples_per_second']) / most)} "
        f"{median(row['samples_per_second']):,.0f}" for row in rows
    )  # fmt: skip
