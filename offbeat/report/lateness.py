"""Mean staleness against M (the paper's Fig. 2) as a chart and as a table, for every stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from offbeat.method import Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOLD, LIGHT = "#0072B2", "#BBBBBB"


def staleness_of_stages(method_of_M: Callable[[int], Method], K: int, largest_M: int) -> list[list[float]]:
    """Mean staleness in updates, a row a stage and a column for each M = 1..largest_M.

    >>> from offbeat.methods import ADL
    >>> staleness_of_stages(ADL, 3, 4)
    [[4.0, 2.0, 1.3333333333333333, 1.0], [2.0, 1.0, 0.6666666666666666, 0.5], [0.0, 0.0, 0.0, 0.0]]
    """
    methods = [method_of_M(M) for M in range(1, largest_M + 1)]
    return [[method.staleness(k, K) for method in methods] for k in range(1, K + 1)]


def staleness_figure(method_of_M: Callable[[int], Method], K: int, *, largest_M: int = 16) -> Figure:
    """Stage 1, the stalest, in bold with its values; the others lightly, named at M = 1."""
    from matplotlib.figure import Figure

    rows = staleness_of_stages(method_of_M, K, largest_M)
    accumulated = range(1, largest_M + 1)
    every = -(-largest_M // 16)
    shown = [1, *(M for M in accumulated if M % every == 0 and M > 1)]  # at most 17
    highest = max(map(max, rows)) or 1.0
    figure = Figure(figsize=(9.6, 5.4), dpi=100, facecolor="white")
    axes = figure.add_axes((0.08, 0.11, 0.89, 0.79), facecolor="white")
    few = largest_M <= 24
    for k in range(K, 0, -1):
        colour, width, dot = (BOLD, 2.4, 6) if k == 1 else (LIGHT, 1.0 if K <= 12 else 0.6, 3)
        axes.plot(accumulated, rows[k - 1], marker="o" if few else "", color=colour, linewidth=width, markersize=dot,
                  gid=f"stage{k}", zorder=3 if k == 1 else 2)  # fmt: skip
    room = max(largest_M - 1, 1)
    axes.set_xlim(1 - 0.11 * room, largest_M + 0.06 * room)
    axes.set_ylim(-0.03 * highest, 1.08 * highest)
    axes.set_xticks(shown)
    axes.grid(axis="y", color="#EEEEEE")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("M, gradients an update")
    axes.set_ylabel("mean staleness (updates)")
    axes.set_title(f"{method_of_M(1).name}, K={K}: mean staleness against M", loc="left", fontsize=13)
    for M in shown:
        value = rows[0][M - 1]
        axes.annotate(f"{round(value, 2):g}", (M, value), (4, 5), textcoords="offset points", fontsize=9, color=BOLD,
                      fontweight="bold", zorder=4)  # fmt: skip
    last = float("inf")
    for value, group in itertools.groupby(range(1, K + 1), key=lambda k: rows[k - 1][0]):
        stages = list(group)
        if last - value < 0.04 * highest:
            continue  # no room for its name
        name = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
        colour, weight = (BOLD, "bold") if stages[0] == 1 else ("#777777", "normal")
        axes.annotate(name, (1, value), (-8, 0), textcoords="offset points", ha="right", va="center", fontsize=9,
                      color=colour, fontweight=weight)  # fmt: skip
        last = value
    return figure


def staleness_text(method_of_M: Callable[[int], Method], K: int, *, largest_M: int = 16) -> str:
    """The same as a table, a row an M and a column a stage.

    >>> from offbeat.methods import ADL
    >>> print(staleness_text(ADL, 3, largest_M=4))
    adl, K=3: mean staleness in updates
    M | stage 1 | stage 2 | stage 3
    1 |    4.00 |    2.00 |    0.00
    2 |    2.00 |    1.00 |    0.00
    3 |    1.33 |    0.67 |    0.00
    4 |    1.00 |    0.50 |    0.00
    """
    rows = staleness_of_stages(method_of_M, K, largest_M)
    names = [f"stage {k}" for k in range(1, K + 1)]
    width = len(str(largest_M))
    lines = [
        f"{method_of_M(1).name}, K={K}: mean staleness in updates",
        " | ".join(["M".ljust(width), *names]),
    ]
    for M in range(1, largest_M + 1):
        values = [f"{row[M - 1]:.2f}".rjust(len(name)) for row, name in zip(rows, names, strict=True)]
        lines.append(" | ".join([str(M).ljust(width), *values]))
    return "\n".join(lines)
