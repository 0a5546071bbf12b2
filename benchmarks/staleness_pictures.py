"""The pictures of docs/staleness.md: loss against staleness, error against K, and loss of what is recommended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from page import RECORDS, Picture
from staleness_records import MeasuredRow, MeasuredTable

from offbeat.runs.optimizers import OPTIMIZERS

DASHED = 1
LOSS = "validation loss, nats per token"


@dataclass(frozen=True)
class Curve:
    """Points with the range of their runs; dashed: a reference; end: what the legend adds to the label."""

    label: str
    points: list[tuple[float, float]]
    band: list[tuple[float, float]]
    colour: int
    dashed: bool = False
    end: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    curves: list[Curve]


def drawn(
    name: str, title: str, x: str, y: str, zero: bool, panels: list[Panel], *, columns: int = 3, each: bool = False
) -> Picture:
    """A file in docs/results with these panels. `zero`: whether 0 is on the x axis; `each`: a tick at every value."""
    content = {
        "name": name,
        "title": title,
        "x": x,
        "y": y,
        "zero": zero,
        "panels": [asdict(panel) for panel in panels],
        "columns": columns,
        **({"each": True} if each else {}),
    }

    def svg() -> str:
        from offbeat.report.charts import Axis, Line, lines
        from offbeat.report.draw import PANEL, PICTURE, rendered
        from offbeat.report.draw import panels as side_by_side

        single = len(panels) == 1
        width = PICTURE if single else PANEL
        lines_of = {
            panel.title: [
                Line(one.label, one.points, one.band, one.end, one.colour, _dash(one))
                for one in panel.curves
                if one.points
            ]
            for panel in panels
        }
        named = {line.label: line for those in lines_of.values() for line in those}
        axis = Axis(x, doubling=True, zero=zero, each=each, format="~g")
        charts = {
            heading: lines(those, x=axis, y=Axis(y), height=320, width=width, shared_legend=list(named.values()))
            for heading, those in lines_of.items()
        }
        chart = charts[panels[0].title] if single else side_by_side(charts.items(), columns=columns, shared=True)
        subtitle = "median of the runs, in the band of their range; dashed: back-propagation"
        heading = ", ".join([title, *(panel.title for panel in panels if single and panel.title)])
        return rendered(chart, "svg", title=heading, subtitle=subtitle, width=width if single else None).decode()

    return Picture(RECORDS / name, json.dumps(content), svg)


def _dash(one: Curve) -> int | None:
    """Of a reference, or of a line whose colour another has: never that of references."""
    from offbeat.report.style import COLOURS

    return DASHED if one.dashed else (DASHED + one.colour // COLOURS if one.colour >= COLOURS else None)


def curve(label: str, rows: Sequence[tuple[float, MeasuredRow]], colour: int, *, end: str = "") -> Curve:
    """The values of rows at their places on the x axis."""
    band = [row.range for _, row in rows] if any(len(row.runs) > 1 for _, row in rows) else []
    return Curve(label, [(x, row.value) for x, row in rows], band, colour, end=end)


def reference(label: str, row: MeasuredRow, places: Sequence[float], colour: int, *, end: str = "") -> Curve:
    """The value of back-propagation across all places."""
    ends = (min(places), max(places))
    band = [row.range] * 2 if len(row.runs) > 1 else []
    return Curve(label, [(x, row.value) for x in ends], band, colour, dashed=True, end=end)


KINDS = {
    "without a corrector": {"corrected": False},
    "recommended corrector": {"corrected": True},
    "recommended corrector, synchronous start": {"corrected": True, "warmup": True},
}


def by_staleness(table: MeasuredTable) -> Picture:
    """Loss against the staleness of stage 1: for each K a panel without correctors, one with them, and one with a
    synchronous start as well. All rows are at the best of their learning rates."""
    made = [panel for K in table.stages for panel in _panels(table, K, f"K={K}, ", table.stages)]
    title = f"{table.title}: loss against the mean staleness of stage 1"
    return drawn(f"staleness-{table.slug}.svg", title, "updates", LOSS, True, made, columns=2)


def cost_by_optimizer(table: MeasuredTable, K: int) -> Picture:
    """The same of one K, side by side."""
    title = f"{table.title}, K={K}: loss against the mean staleness of stage 1"
    return drawn(f"staleness-cost-{table.slug}.svg", title, "updates", LOSS, True, _panels(table, K, "", [K]))


def _panels(table: MeasuredTable, K: int, prefix: str, stages: Sequence[int]) -> list[Panel]:
    """A panel for each of KINDS that was measured, with one range of staleness for those of all `stages`."""
    late = [row for each in stages for kind in KINDS.values() for row in table.late(each, **kind)]
    places = [0.0, *(row.staleness for row in late)]
    made = []
    for name, kind in KINDS.items():
        if not table.late(K, **kind):
            continue
        curves = []
        for colour, optimizer in enumerate(table.optimizers):
            title, bp = OPTIMIZERS[optimizer].title, table.best_bp(K, optimizer)
            rows = [(row.staleness, row) for row in table.at_best_rates(K, optimizer, **kind)]
            if bp is not None:
                rows = [(0.0, bp), *rows]
                curves.append(reference(f"{title}, BP", bp, places, colour))
            curves.append(curve(title, rows, colour))
        made.append(Panel(prefix + name, curves))
    return made


def by_stages(table: MeasuredTable) -> Picture:
    """Error against K: a panel for each M that BP has, with a line for each method and corrector."""
    late = [row for row in table.rows if row.method != "bp"]
    stages = [row.K for row in table.rows]
    kinds = sorted({(row.method, row.corrector or "") for row in late})
    made = []
    for bp in sorted((row for row in table.rows if row.method == "bp"), key=lambda row: row.M):
        curves = [reference("BP, same M", bp, stages, 0)]
        for colour, (method, corrector) in enumerate(kinds, start=1):
            rows = [row for row in late if (row.method, row.corrector or "", row.M) == (method, corrector, bp.M)]
            rows.sort(key=lambda row: row.K)
            label = f"{method}, {corrector}" if corrector else method
            curves += [curve(label, [(row.K, row) for row in rows], colour)] if rows else []
        made.append(Panel(f"M={bp.M}", curves))
    title = f"{table.title}: test error"
    return drawn(f"staleness-{table.slug}.svg", title, "stages K", "test error, %", False, made, each=True)


def by_choice(table: MeasuredTable, method: str, reference_optimizer: str) -> Picture:
    """Loss of what is recommended against M, a panel for each K, with BP of one optimizer."""
    made = []
    for K in table.stages:
        rows = [row for row in table.recommended(K) if row.method == method]
        curves = []
        bp = table.best_bp(K, reference_optimizer)
        if bp is not None and rows:
            name = f"{OPTIMIZERS[bp.optimizer].title}, BP"
            curves.append(reference(name, bp, [row.M for row in rows], table.optimizers.index(bp.optimizer)))
        for colour, optimizer in enumerate(table.optimizers):
            mine = [(row.M, row) for row in rows if row.optimizer == optimizer]
            curves += [curve(OPTIMIZERS[optimizer].title, mine, colour)] if mine else []
        made += [Panel(f"K={K}", curves)] if rows else []
    title = f"{table.title}: {method} with the recommended corrector and start, by M"
    return drawn(f"staleness-choice-{table.slug}.svg", title, "M, micro-batches per update", LOSS, False, made)
