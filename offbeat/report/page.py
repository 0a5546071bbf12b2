"""`offbeat report`: one HTML file about runs, comparisons, reproductions and benchmarks, that needs nothing else.

The text comes from the template page.html. Charts stand in the file as specifications, with the JavaScript of Vega that
draws them; they follow the width of the screen, and its light or dark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from pathlib import Path

from offbeat.errors import UserError, first_line
from offbeat.report import benches, scaling, studies
from offbeat.report.draw import PICTURE, rendered, require_charts, vega_lite_version
from offbeat.report.formatting import counted
from offbeat.report.read import folders_of_runs, kind_of
from offbeat.report.sections import Drawing, ReportPart, slug
from offbeat.report.style import CONFIG, DARK, FONT, LIGHT, variables
from offbeat.runs import record

HERE = Path(__file__).parent
WIDTHS = {1: PICTURE, 2: 504, 3: 340}  # pixels of a chart in a file, by how many stand in a row


def parts(folders: Sequence[Path]) -> list[ReportPart]:
    """All runs together, and each other folder by itself; a folder of runs stands for them."""
    kinds = [(path, kind_of(path)) for folder in folders for path in folders_of_runs(folder)]
    runs = [folder for folder, kind in kinds if kind == "run"]
    found = []
    for folder, kind in kinds:
        several = len([other for other, its in kinds if its == kind]) > 1
        name = slug(f"{folder.resolve().name}" if several else kind)
        if kind == "run":
            if folder == runs[0]:
                found.append(studies.runs(list(dict.fromkeys(runs))))
        else:
            made = {
                "comparison": studies.comparison,
                "reproduction": studies.reproduction,
                "bench": benches.bench,
                "scaling": scaling.scaling,
            }[kind](folder, name)
            found.append(made)
    return found


def html(made: Sequence[ReportPart]) -> str:
    """The file."""
    import jinja2

    title = made[0].title if len(made) == 1 else f"{made[0].title} and {counted(len(made) - 1, 'more', 'more')}"
    links: list[tuple[str, str]] = [(f"p{number}", part.title) for number, part in enumerate(made)]
    if len(made) == 1:
        links = [(slug(section.title), section.title) for section in made[0].sections]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["coded"] = lambda text: jinja2.utils.markupsafe.Markup(coded(text))
    drawn = _drawings(made)
    places = {id(drawing): number for number, drawing in enumerate(drawn)}
    charts = {f"chart-{number}": _specification(drawing) for number, drawing in enumerate(drawn)}
    return environment.from_string((HERE / "page.html").read_text()).render(
        title=title,
        links=links,
        parts=made,
        slug=slug,
        place=lambda drawing: places[id(drawing)],
        light=f"{variables(LIGHT)};--font:{FONT}",
        dark=variables(DARK),
        css=(HERE / "page.css").read_text(),
        specifications=_json({"config": {**CONFIG, "background": "transparent"}, "charts": charts}),
        script=_script(),
    )


def _drawings(made: Sequence[ReportPart]) -> list[Drawing]:
    return [drawing for part in made for section in part.sections for drawing in section.drawings()]


def _specification(drawing: Drawing) -> dict[str, object]:
    content = drawing.chart.to_dict()
    kept = {key: value for key, value in content.items() if key not in ("$schema", "config")}
    return {**kept, "width": "container"}


def _json(content: object) -> str:
    """For a script element, which ends at the first </script whatever is around it."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


@lru_cache
def _script() -> str:
    """Vega, Vega-Lite and what draws the charts with them."""
    import vl_convert

    made: str = vl_convert.javascript_bundle((HERE / "page.js").read_text(), vl_version=vega_lite_version())
    return made.replace("</script", "<\\/script")


def coded(text: str) -> str:
    """Text with `code` in it, as HTML.

    >>> coded("no trace: train with `--trace 200` <again>")
    'no trace: train with <code>--trace 200</code> &lt;again&gt;'
    """
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def write_report(folders: Sequence[Path | str], out: Path | str, pictures: Path | str | None = None) -> int:
    """Write the page, and in the folder `pictures` each chart as files of its own; returns the number of charts."""
    require_charts("jinja2")
    out, pictures = Path(out), None if pictures is None else Path(pictures)
    made = parts([Path(folder) for folder in folders])
    _write(out, html(made).encode())
    drawn = {drawing.name: drawing for drawing in _drawings(made)}
    if pictures:
        try:
            pictures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or first_line(error)
            raise UserError(f"pictures={str(pictures)!r}: {reason}; choose another folder") from error
        for name, drawing in drawn.items():
            for kind in ("svg", "png"):
                content = rendered(drawing.chart, kind, title=drawing.title, width=WIDTHS[drawing.across])
                _write(pictures / f"{name}.{kind}", content)
    return len(drawn)


def _write(path: Path, content: bytes) -> None:
    try:
        record.write(path, content)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or first_line(error)}): choose another place") from error
