"""Pictures in files, .svg or .png: timelines, staleness, learning curves (also .txt), benchmarks, scaling studies.

A file is written completely or not at all, and the same arguments give the same bytes. Charts need Altair and
vl-convert, which training does not need: `draw_if_possible` continues without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import PackageMissing, UserError, first_line, print_once, require
from offbeat.method import Method
from offbeat.report import text
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


def draw_if_possible(draw: Callable[[Path], None], *paths: Path) -> None:
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
    if batches < 1:
        raise UserError(f"{batches} batches to draw: use a whole number from 1 up")

    def chart(kind: str) -> bytes:
        from offbeat.report import figures

        drawn = figures.method_timeline(method, costs, batches)
        return rendered(drawn, kind, title=title or text.heading(method, costs, batches), width=1180)

    _draw(path, lambda: text.timeline_text(method, costs, batches=batches, title=title), chart)


def draw_staleness(method_of_M: Callable[[int], Method], K: int, path: Path | str, *, largest_M: int = 16) -> None:
    """Draw the mean staleness of every stage against M = 1..largest_M (the paper's Fig. 2)."""
    for letter, value in (("K", K), ("largest M", largest_M)):
        if value < 1:
            raise UserError(f"{letter} = {value}: use a whole number from 1 up")

    def chart(kind: str) -> bytes:
        from offbeat.report import figures

        title = f"{method_of_M(1).name}, K={K}: mean staleness against M"
        return rendered(figures.staleness(method_of_M, K, largest_M), kind, title=title)

    _draw(path, lambda: text.staleness_text(method_of_M, K, largest_M=largest_M), chart)


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
    chart = partial(curves_rendered, runs, title=title, times=times, task=task)
    _draw(path, lambda: text.curves_text(runs, title=title), chart)


def curves_rendered(
    runs: Mapping[str, Sequence[Sequence[float]]],
    kind: str,
    *,
    title: str,
    times: Mapping[str, Sequence[Sequence[float]]] | None = None,
    task: LearningTask = CLASSIFICATION,
) -> bytes:
    """The same as "svg" or "png"."""
    from offbeat.report import figures

    across = "epoch" if times is None else "minutes of training"
    drawn = figures.curve_lines(runs, times, task=task)
    chart = figures.curves(drawn, across=across, what=task.axis, height=400, width=PICTURE)
    several = any(len(curves) > 1 for curves in runs.values())
    subtitle = "median of the runs, in the band of their range; " * several + "the legend has the last value"
    return rendered(chart, kind, title=title, subtitle=subtitle)


def draw_bench(record: Mapping[str, Any], path: Path | str) -> None:
    """Draw the speeds in a record of `offbeat bench`."""
    _draw(path, None, partial(bench_rendered, record))


def bench_rendered(record: Mapping[str, Any], kind: str) -> bytes:
    """What `draw_bench` draws, as the content of a file of that kind: svg or png."""
    from offbeat.report import bench_table, figures

    drawn = figures.speeds(figures.measured(record["rows"]), record["bound"])
    subtitle = "median of the rounds, whiskers from the slowest to the fastest; lighter: late gradients"
    return rendered(drawn, kind, title=bench_table.setting(dict(record)), width=860, subtitle=subtitle)


def draw_scaling(record: Mapping[str, Any], path: Path | str) -> None:
    """Draw a record of `offbeat bench scaling`."""
    _draw(path, None, partial(scaling_rendered, record))


def scaling_rendered(record: Mapping[str, Any], kind: str) -> bytes:
    """What `draw_scaling` draws, as the content of a file of that kind: svg or png."""
    from offbeat.report import figures

    drawn = panels([*figures.speed_ups(record, width=PANEL).values(), *figures.growth(record, width=PANEL).values()])
    simulation = record["simulation"]
    title = f"{simulation['model']}, b={simulation['batch_size']}, M={simulation['M']}"
    subtitle = "lines: by the clock from measured units; circles: measured"
    return rendered(drawn, kind, title=title, width=None, subtitle=subtitle)


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


def _draw(path: Path | str, words: Callable[[], str] | None, chart: Callable[[str], bytes]) -> None:
    """Write the words into a .txt file, if there are any, or the chart as the kind of picture that the file's name
    states."""
    path = check_picture(path, SUFFIXES if words else SUFFIXES[:2])
    kind = path.suffix.lower()[1:]
    if words and kind == "txt":
        content = f"{words()}\n".encode()
    else:
        require_charts()
        content = chart(kind)
    try:
        write(path, content)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"picture {str(path)!r}: cannot be written, {reason}; use another place") from error


def check_picture(path: Path | str, suffixes: Sequence[str] = SUFFIXES) -> Path:
    """The file as a path; refuses one that cannot be drawn to: another suffix, or no such folder."""
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise UserError(f"picture {str(path)!r}: unknown kind of file, use a name that ends in {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UserError(f"picture {str(path)!r}: there is no folder {str(path.parent)!r}, make it first")
    return path


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
