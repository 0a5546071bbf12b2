"""Pictures in files, .svg, .png or .txt: timelines, staleness, learning curves, benchmarks, scaling studies.

A file is written completely or not at all, and the same arguments give the same bytes. Charts need Altair and
vl-convert, which training does not need: a command that only also draws calls `by_the_way`, and continues without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import PackageMissing, UserError, first_line, print_once, require
from offbeat.method import Method
from offbeat.report import text
from offbeat.report.gantt import heading
from offbeat.runs.record import write
from offbeat.runs.task import CLASSIFICATION, LearningTask
from offbeat.timeline import Costs

if TYPE_CHECKING:
    import altair as alt

SUFFIXES = (".svg", ".png", ".txt")
PICTURE = 960  # pixels across, without axis and legend
PANEL = 330
PNG_SCALE = 1.5


def require_charts(*more: str) -> None:
    """Raise PackageMissing where a package that draws charts is not installed, or one of the further modules."""
    require(("altair", "vl_convert", *more), "charts need")


def by_the_way(draw: Callable[[Path], None], *paths: Path) -> None:
    """Draw into each of the files, beside other work; where a package is missing, print one line and go on."""
    try:
        for path in paths:
            draw(path)
    except PackageMissing as error:
        print_once(f"offbeat: no pictures: {error}")


# ---- what can be drawn


def draw_timeline(
    method: Method, costs: Costs, path: Path | str, *, batches: int = 8, title: str | None = None
) -> None:
    """Draw when every stage does what (the paper's Fig. 1), fill and drain included."""
    path = check_picture(path)
    if batches < 1:
        raise UserError(f"{batches} batches to draw: use a whole number from 1 up")
    if _is_text(path):
        _write(path, text.timeline_text(method, costs, batches=batches, title=title))
    else:
        figures = _figures()
        _save(
            figures.method_timeline(method, costs, batches),
            path,
            title=title or heading(method, costs, batches),
            width=1180,
        )


def draw_staleness(method_of_M: Callable[[int], Method], K: int, path: Path | str, *, largest_M: int = 16) -> None:
    """Draw the mean staleness of every stage against M = 1..largest_M (the paper's Fig. 2)."""
    path = check_picture(path)
    for letter, value in (("K", K), ("largest M", largest_M)):
        if value < 1:
            raise UserError(f"{letter} = {value}: use a whole number from 1 up")
    if _is_text(path):
        _write(path, text.staleness_text(method_of_M, K, largest_M=largest_M))
    else:
        chart = _figures().staleness(method_of_M, K, largest_M)
        _save(chart, path, title=f"{method_of_M(1).name}, K={K}: mean staleness against M")


def draw_curves(
    runs: Mapping[str, Sequence[Sequence[float]]],
    path: Path | str,
    *,
    title: str,
    times: Mapping[str, Sequence[Sequence[float]]] | None = None,
    task: LearningTask = CLASSIFICATION,
) -> None:
    """Draw the metric of several runs per method against the epoch, or against the seconds of training until then (not
    in text)."""
    path = check_picture(path)
    if _is_text(path):
        _write(path, text.curves_text(runs, title=title))
    else:
        figures = _figures()
        across = "epoch" if times is None else "minutes of training"
        drawn = figures.curve_lines(runs, times, task=task)
        chart = figures.curves(drawn, across=across, what=task.axis, height=400, width=PICTURE)
        several = any(len(curves) > 1 for curves in runs.values())
        _save(
            chart,
            path,
            title=title,
            subtitle="median of the runs, in the band of their range; the legend has the last value"
            if several
            else "the legend has the last value",
        )


def draw_bench(record: Mapping[str, Any], path: Path | str) -> None:
    """Draw the speeds in a record of `offbeat bench`."""
    from offbeat.report import bench_table

    path = check_picture(path)
    if _is_text(path):
        _write(path, text.bench_text(record))
    else:
        figures = _figures()
        chart = figures.speeds(figures.measured(record["rows"]), record["bound"])
        _save(
            chart,
            path,
            title=bench_table.setting(dict(record)),
            width=860,
            subtitle="median of the rounds, whiskers from the slowest to the fastest; lighter: late gradients",
        )


def draw_scaling(record: Mapping[str, Any], path: Path | str) -> None:
    """Draw a record of `offbeat bench scaling`."""
    path = check_picture(path)
    if _is_text(path):
        _write(path, text.scaling_text(record))
    else:
        figures, simulation = _figures(), record["simulation"]
        made = {**figures.speed_ups(record, width=PANEL), **figures.growth(record, width=PANEL)}
        setting = ", ".join(f"{name}={simulation[key]}" for name, key in (("b", "batch_size"), ("M", "M")))
        _save(
            panels(made.values()),
            path,
            title=f"{simulation['model']}, {setting}",
            width=None,
            subtitle="lines: by the clock from measured units; circles: measured",
        )


def panels(charts: Any, *, columns: int = 3, shared: bool = False) -> alt.ConcatChart:
    """Charts with their titles side by side; shared: with one legend and one y axis for all."""
    import altair as alt

    made: list[alt.LayerChart] = []
    data: dict[str, Any] = {}
    for title, chart in charts:
        data |= chart.datasets
        made.append(chart.properties(title=alt.TitleParams(title, fontSize=13), width=PANEL))
        made[-1].datasets = alt.Undefined
    joined = alt.ConcatChart(concat=made, columns=columns, spacing=34, datasets=data)
    how: Any = "shared" if shared else "independent"
    return joined.resolve_scale(color=how, strokeDash=how, opacity=how, y=how, x="independent")


# ---- files


def _figures() -> Any:
    require_charts()
    from offbeat.report import figures

    return figures


def _is_text(path: Path) -> bool:
    return path.suffix.lower() == ".txt"


def check_picture(path: Path | str) -> Path:
    """The file as a path; refuses one that cannot be drawn to: another suffix, or no such folder."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"picture {str(path)!r}: unknown kind of file, use a name that ends in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"picture {str(path)!r}: there is no folder {str(path.parent)!r}, make it first")
    return path


def _save(chart: Any, path: Path, *, title: str, subtitle: str = "", width: int | None = PICTURE) -> None:
    _write(path, rendered(chart, path.suffix.lower()[1:], title=title, subtitle=subtitle, width=width))


def rendered(chart: Any, kind: str, *, title: str, subtitle: str = "", width: int | None = PICTURE) -> bytes:
    """A chart on white with its title, as "svg" or "png"; a width of None leaves it to the panels."""
    import vl_convert

    from offbeat.report.style import CONFIG, without_variables

    content = {
        **chart.to_dict(),
        "title": {"text": title, **({"subtitle": subtitle} if subtitle else {})},
        "config": CONFIG,
        "background": "white",
        "padding": 20,
        **({"width": width} if width else {}),
    }
    content = without_variables(content)
    if kind == "svg":
        made = str(vl_convert.vegalite_to_svg(content, vl_version=vega_lite_version()))
        return f"{_renumbered(made)}\n".encode()
    picture: bytes = vl_convert.vegalite_to_png(content, vl_version=vega_lite_version(), scale=PNG_SCALE)
    return picture


def _renumbered(svg: str) -> str:
    """Vega numbers clip paths through all pictures of a process: here from 0 in each.

    >>> _renumbered('<g clip-path="url(#clip7)"/><g clip-path="url(#clip9)"/><clipPath id="clip7">')
    '<g clip-path="url(#clip0)"/><g clip-path="url(#clip1)"/><clipPath id="clip0">'
    """
    numbers = {name: at for at, name in enumerate(dict.fromkeys(re.findall(r"#(clip\d+)", svg)))}
    return re.sub(r"\bclip\d+", lambda found: f"clip{numbers.get(found[0], 0)}", svg)


def vega_lite_version() -> str:
    """The one that Altair writes for, in the form of vl-convert: 6.4."""
    import altair as alt

    return ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])


def _write(path: Path, content: str | bytes) -> None:
    try:
        write(path, content + "\n" if isinstance(content, str) else content)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"picture {str(path)!r}: cannot be written, {reason}; use another place") from error
