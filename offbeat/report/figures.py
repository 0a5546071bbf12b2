"""The charts of a report and of files: the values of records in charts of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import altair as alt

from offbeat.method import Method
from offbeat.ops import Backward, Forward, Update
from offbeat.report.charts import Axis, Bar, Box, Line, bars, lanes, lines
from offbeat.report.curves import points
from offbeat.report.formatting import size
from offbeat.report.read import mapping, mappings, numbers
from offbeat.report.style import colour, shade
from offbeat.report.text import staleness_of_stages, unit
from offbeat.runs.task import CLASSIFICATION, LearningTask
from offbeat.timeline import Costs, timeline

Rows = Sequence[Mapping[str, Any]]
Curves = Mapping[str, Sequence[Sequence[float]]]  # a list for each run, by the name of its method


# ---- learning curves


def curve_lines(runs: Curves, times: Curves | None = None, *, task: LearningTask = CLASSIFICATION) -> list[Line]:
    """The median of each method's runs, in the band of their range where there are several.

    task: whose metric they are
    times: seconds of training until each epoch; the lines are against them, in minutes, and not against the epoch
    """
    drawn = []
    for place, (name, curves) in enumerate(runs.items()):
        found = points(curves)
        across = range(1, len(found) + 1) if times is None else [point.middle / 60 for point in points(times[name])]
        band = [(point.lowest, point.highest) for point in found] if len(curves) > 1 else []
        values = [(float(at), point.middle) for at, point in zip(across, found, strict=True)]
        drawn.append(
            Line(name, values, band, end=task.shown(found[-1].middle, space=" ") if found else "", colour=place)
        )
    return [line for line in drawn if line.points]


def curves(
    drawn: Sequence[Line],
    *,
    across: str = "epoch",
    what: str = CLASSIFICATION.axis,
    most: float | None = None,
    height: int = 300,
    width: int | None = None,
) -> alt.LayerChart:
    """A metric against the epoch, or against the time of training."""
    by_epoch = across == "epoch"
    x = Axis(across, whole=by_epoch, zero=not by_epoch)
    return lines(drawn, x=x, y=Axis(what, log=None if most is None else False, most=most), height=height, width=width)


# ---- methods


def method_timeline(method: Method, costs: Costs, batches: int) -> alt.LayerChart:
    """When every stage does what, fill and drain included, with the version of the weights in each box."""
    scale, name = unit(costs)
    drawn = []
    for span in timeline(method, batches, costs):
        operation = span.operation
        kind = {Forward: "forward", Backward: "backward", Update: "update"}.get(type(operation))
        if kind is None:
            continue
        start, end, number = span.start / scale, span.end / scale, getattr(operation, "t", None)
        if span.replayed:
            middle = start + span.replayed / scale
            drawn.append(Box(span.k, "forward repeated", start, middle, number, span.version))
            start = middle
        drawn.append(Box(span.k, kind, start, end, number, span.version))
    end = max(box.end for box in drawn)
    return lanes(drawn, K=costs.K, length=1.003 * end, unit="F, the forward of a stage" if name == "F" else name)


def staleness(method_of_M: Callable[[int], Method], K: int, largest_M: int) -> alt.LayerChart:
    """Mean staleness of every stage against M; the values of stage 1, the stalest, are written at its line."""
    rows = staleness_of_stages(method_of_M, K, largest_M)
    drawn = [
        Line(f"stage {k}", [(float(M), late) for M, late in enumerate(row, 1)], colour=shade(k, K), written=k == 1)
        for k, row in enumerate(rows, start=1)
    ]
    most = 1.08 * max(map(max, rows)) or 1.0
    return lines(drawn, x=Axis("M, gradients per update", whole=True), y=Axis("updates", most=most), height=340)


# ---- a benchmark

FAMILIES = {"offbeat": ("Offbeat", 0), "torch": ("torch.distributed", 1), "bp": ("back-propagation", 7)}
LATE = ", late gradients"


def called(row: Mapping[str, Any]) -> str:
    micro = f", m={row['micro_batches']}" if row.get("micro_batches") else ""
    return str(row.get("title") or row.get("name") or "unnamed") + micro


def family(row: Mapping[str, Any]) -> str:
    return FAMILIES.get(str(row.get("family")), ("other", 6))[0]


def _groups(rows: Rows) -> dict[str, str]:
    known = {name: colour(place) for name, place in (*FAMILIES.values(), ("other", 6))}
    return {name: value for name, value in known.items() if any(family(row) == name for row in rows)}


def measured(rows: Any) -> list[dict[str, Any]]:
    """The rows of a benchmark that have a speed, all of them above 0."""
    return [row for row in mappings(rows) if (speeds := numbers(row.get("samples_per_second"))) and min(speeds) > 0]


def speeds(rows: Rows, bound: Any) -> alt.LayerChart:
    """Samples per second of each row, with its slowest and fastest round, and what the slowest stage would do alone."""
    drawn = []
    for row in rows:
        values = numbers(row["samples_per_second"])
        late = row.get("exact") is False
        drawn.append(
            Bar(
                called(row) + LATE * late,
                median(values),
                f"{median(values):,.0f}",
                family(row),
                faint=late,
                spread=(min(values), max(values)) if len(values) > 1 else None,
            )
        )
    limit = numbers(mapping(bound).get("samples_per_second"))
    return bars(
        drawn,
        title="samples per second",
        groups=_groups(rows),
        limit=median(limit) if limit else None,
        limit_name="slowest stage alone",
        above=True,
    )


def amounts(rows: Rows, key: str, *, title: str) -> alt.LayerChart | None:
    """Bytes of each row, in MB; None where no row has them."""
    drawn = [
        Bar(called(row), value[0] / 1e6, size(value[0]), family(row))
        for row in rows
        if (value := numbers(row.get(key)))
    ]
    return bars(drawn, title=title, groups=_groups(rows), above=True) if drawn else None


# ---- a scaling study

LEAST = 1 / 32  # of BP's speed: what is slower is not drawn
TITLES = {"adl": "ADL", "adl-1f1b": "ADL on the 1F1B lag", "gpipe": "GPipe, at most 4K micro-batches"}
Panels = dict[str, tuple[str, alt.LayerChart]]  # title and chart, by name


def with_stages(value: Any) -> list[dict[str, Any]]:
    """The rows that have a K."""
    return [row for row in mappings(value) if isinstance(row.get("K"), int) and row["K"] >= 1]


def _series(rows: Rows, key: str, how: Callable[[list[float]], float], by: Any = "K") -> list[tuple[float, float]]:
    of = by if callable(by) else lambda row: row[by]
    found = [(float(of(row)), numbers(row.get(key))) for row in rows]
    return sorted((at, how(values)) for at, values in found if values)


def first_staleness(row: Mapping[str, Any]) -> list[float]:
    """The staleness that stage 1 has measured; empty where it is not known.

    >>> first_staleness({"staleness_measured": [1.5, 0.0]}), first_staleness({"staleness_measured": [None, 0.0]})
    ([1.5], [])
    """
    found = row.get("staleness_measured")
    return numbers(found[:1]) if isinstance(found, list) else []


def measured_speed_ups(strong: Rows) -> list[tuple[float, float]]:
    """Over one stage, by K."""
    times = [(K, seconds) for K, seconds in _series(strong, "seconds_per_batch", median) if seconds > 0]
    alone = dict(times).get(1.0)
    return [(K, alone / seconds) for K, seconds in times] if alone else []


def speed_ups(content: Mapping[str, Any], *, width: int | None = None) -> Panels:
    """For each method the clock's speed-up against K, a line for each link, with the measured points."""
    rows = with_stages(mapping(content.get("simulation")).get("rows"))
    own = mapping(content.get("settings")).get("method")
    seen = measured_speed_ups([row for row in with_stages(content.get("points")) if row.get("axis") == "strong"])
    made: Panels = {}
    for method in dict.fromkeys(str(row.get("method", "")) for row in rows):
        mine = [row for row in rows if str(row.get("method", "")) == method]
        drawn = []
        for place, link in enumerate(dict.fromkeys(str(row.get("link", "")) for row in mine)):
            found = _series([row for row in mine if str(row.get("link", "")) == link], "speedup", max)
            fast = [point for point in found if point[1] >= LEAST and point[0] > 0]
            drawn.append(Line(link, fast, colour=place, dash=2 if link == "no cost" else None))
        drawn += [Line("measured, one core per stage", seen, colour=7, measured=True)] if seen and method == own else []
        if any(line.points for line in drawn):
            made[f"speed-up-{method}"] = (
                TITLES.get(method, method) or "Speed-up",
                _by_stages(drawn, "times BP on one worker", width=width, doubling=True),
            )
    return made


def growth(content: Mapping[str, Any], *, width: int | None = None) -> Panels:
    """Memory and staleness against K, counted and measured, and the time of a batch against what makes it longer."""
    counted, points_of = with_stages(content.get("counted")), with_stages(content.get("points"))
    strong = [row for row in points_of if row.get("axis") == "strong"]
    made: Panels = {}
    memory = []
    whole: dict[str, Callable[[list[float]], float]] = {"largest stage": max, "all stages together": sum}
    for place, (label, how) in enumerate(whole.items()):
        for rows, key, seen in ((counted, "memory_counted", False), (strong, "memory", True)):
            found = [(at, value / 1e6) for at, value in _series(rows, key, how)]
            memory.append(Line(f"{label}, {'measured' if seen else 'counted'}", found, colour=place, measured=seen))
    if any(line.points for line in memory):
        made["memory"] = ("Memory", _by_stages(memory, "MB", width=width, log=None))
    first = [{**row, "staleness_measured": first_staleness(row)} for row in strong]
    late = [
        Line("stage 1, the stalest, by formula", _series(counted, "staleness", max)),
        Line("mean of all stages, by formula", _series(counted, "staleness", lambda v: sum(v) / len(v)), colour=2),
        Line("stage 1, measured", _series(first, "staleness_measured", max), colour=0, measured=True),
    ]
    if any(line.points for line in late):
        made["staleness"] = ("Mean staleness", _by_stages(late, "updates", width=width, doubling=True, zero=True))
    if times := _times(points_of):
        K = next((row["K"] for row in points_of if row["axis"] in ("batch", "depth")), None)
        title = "Time per batch" + (f" (batch and depth: K={K})" if K else "")
        x, y = Axis("times the smallest", doubling=True, format="~g"), Axis("seconds", log=True, format=".3~g")
        made["time"] = (title, lines(times, x=x, y=y, height=240, width=width))
    return made


def _by_stages(
    drawn: Sequence[Line],
    unit: str,
    *,
    width: int | None,
    log: bool | None = False,
    doubling: bool = False,
    zero: bool = False,
) -> alt.LayerChart:
    y = Axis(unit, log=log, doubling=doubling, zero=zero, format=",.3~r")
    return lines(drawn, x=Axis("stages K", doubling=True, format="~g"), y=y, height=240, width=width)


def _times(points_of: Rows) -> list[Line]:
    """Against the batch, the depth, and K with the depth, each as a multiple of its smallest."""
    measures: dict[str, tuple[str, Callable[[Mapping[str, Any]], float]]] = {
        "batch": ("batch", lambda row: row.get("batch_size", 0)),
        "depth": ("depth", lambda row: int("".join(filter(str.isdigit, str(row.get("model")))) or 0)),
        "weak": ("K, with the depth (weak)", lambda row: row["K"]),
    }
    drawn = []
    for place, (axis, (label, of)) in enumerate(measures.items()):
        found = _series([row for row in points_of if row.get("axis") == axis], "seconds_per_batch", median, of)
        if found and found[0][0] > 0:
            first = found[0][0]
            drawn.append(
                Line(f"{label}, from {first:g}", [(at / first, value) for at, value in found], colour=place, dash=place)
            )
    return drawn
