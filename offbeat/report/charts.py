"""The kinds of picture that a report is made of: lines, bars, shares of a whole, and the lanes of a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.report.svg import SIZE, SMALL, Canvas, Scale, doublings, log_ticks, number, shorten, text_width, ticks
from offbeat.report.traces import KINDS, Trace

COLOURS = 8  # that lines have, see look.py; the next eight are dashed
MOST_DOTS = 60  # of a line, that answer to the pointer
LOG_FROM = 8.0  # times that the largest value is above the smallest
CROWD = 5  # lines, from which on half of that is enough: they must be told apart where they end


@dataclass(frozen=True)
class Line:
    """A series of points; `band` holds the lowest and the highest at each, where it stands for several runs.

    faint   0..1: of a family of lines, how far from the first
    end     what its label says behind the name, the last value for instance
    dots    whether it is circles without a line between them
    """

    label: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    band: Sequence[tuple[float, float]] = ()
    faint: float = 0.0
    dashed: bool = False
    end: str = ""
    dots: bool = False


def lines(drawn: Sequence[Line], width: int, *, x: str, y: str, height: int = 0, whole: bool = False,
          log: bool | None = None, form: str = ".2f", unit: str = "", origin: bool = False,
          doubling: bool = False) -> Canvas:  # fmt: skip
    """Lines with their names at their ends, or below where there is no room; log: None where the values decide."""
    drawn = [line for line in drawn if line.points]
    xs = [point[0] for line in drawn for point in line.points] + [0.0] * origin
    ys = [point[1] for line in drawn for point in line.points] + [
        value for line in drawn for pair in line.band for value in pair]  # fmt: skip
    low, high = min(ys), max(ys)
    far = LOG_FROM if len(drawn) < CROWD else LOG_FROM / 2
    log = low > 0 and high > far * low if log is None else log
    labels = [f"{line.label}  {line.end}".strip() for line in drawn]
    longest = max(text_width(label) for label in labels)
    beside = longest <= 0.34 * width
    rows = [] if beside else list(zip(drawn, labels, strict=True))
    height = height or (320 if width > 600 else 240)
    top, bottom = 30, 40
    canvas = Canvas(width, height + (14 + 20 * len(rows) if rows else 0))
    if log:
        low, high = low / 1.12, high * 1.12
    else:
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low, high = (0.0 if 0 <= low < 0.35 * high else low - room), high + room
    marks = (log_ticks if log else ticks)(low, high, max(4, height // 42))
    left = max(text_width(number(mark), SMALL) for mark in marks) + 12
    right = 14.0 + (longest + 12 if beside else 0)
    across = Scale(min(xs), max(xs), left, width - right, log=doubling)
    up = Scale(low, high, height - bottom, top, log=log)
    for mark in marks:
        canvas.line(left, up(mark), width - right, up(mark), "grid")
        canvas.text(left - 7, up(mark) + 4, number(mark), "tick", anchor="end")
    canvas.text(0, 13, y + (", log scale" if log else ""), "axis")
    most = max(3, int((width - left - right) // 50))
    for mark in doublings(min(xs), max(xs), most) if doubling else ticks(min(xs), max(xs), most, whole=whole):
        canvas.line(across(mark), height - bottom, across(mark), height - bottom + 4, "rule")
        canvas.text(across(mark), height - bottom + 18, number(mark), "tick", anchor="middle")
    canvas.line(left, height - bottom, width - right, height - bottom, "rule")
    canvas.text(width - right, height - 4, x, "axis", anchor="end")
    for line in drawn:
        _line(canvas, line, across, up, x=x, form=form, unit=unit)
    if beside:
        _names(canvas, drawn, labels, across, up, width - right, top, height - bottom)
    for place, (line, label) in enumerate(rows):
        level = height + 14 + 20 * place
        if line.dots:
            canvas.dot(left + 11, level - 4, 4.5, f"ring c{line.colour % COLOURS}")
        else:
            canvas.path([(left, level - 4), (left + 22, level - 4)], _css(line), opacity=1 - line.faint)
        canvas.text(left + 30, level, shorten(label, width - left - 30), "label")
    return canvas


def _css(line: Line) -> str:
    dashed = " dashed" if line.dashed or line.colour % (2 * COLOURS) >= COLOURS else ""
    return f"line c{line.colour % COLOURS}{dashed}"


def _line(canvas: Canvas, line: Line, across: Scale, up: Scale, *, x: str, form: str, unit: str) -> None:
    places = [(across(a), up(b)) for a, b in line.points]
    opacity = 1 - line.faint
    if line.band:
        upper = [(across(point[0]), up(pair[1])) for point, pair in zip(line.points, line.band, strict=True)]
        lower = [(across(point[0]), up(pair[0])) for point, pair in zip(line.points, line.band, strict=True)]
        canvas.path([*upper, *reversed(lower)], f"band f{line.colour % COLOURS}", closed=True)
    if len(places) > 1 and not line.dots:
        canvas.path(places, _css(line), opacity=opacity)
    step = -(-len(places) // MOST_DOTS)
    small = 0.0 if line.dots or len(places) > 30 else 2.6
    for a, b in places if line.dots else ():
        canvas.dot(a, b, 4.5, f"ring c{line.colour % COLOURS}")
    for place in range(len(places) - 1, -1, -step):
        (a, b), (at, value) = places[place], line.points[place]
        spread = f" ({line.band[place][0]:{form}} to {line.band[place][1]:{form}})" if line.band else ""
        if small:
            canvas.dot(a, b, small, f"f{line.colour % COLOURS}", opacity=opacity)
        canvas.dot(a, b, 7, "touch", tip=f"{line.label}, {x} {at:g}: {value:{form}}{unit}{spread}")


def _names(canvas: Canvas, drawn: Sequence[Line], labels: Sequence[str], across: Scale, up: Scale, right: float,
           top: float, bottom: float) -> None:  # fmt: skip
    """The labels at the ends of their lines, pushed apart where these lie close."""
    ends = [up(line.points[-1][1]) for line in drawn]
    order = sorted(range(len(drawn)), key=lambda place: (round(ends[place]), place))
    gap = min(16.0, (bottom - top) / max(1, len(drawn)))
    levels = dict(zip(order, spaced([ends[place] for place in order], gap, top, bottom), strict=True))
    for place, line in enumerate(drawn):
        level, here = levels[place], across(line.points[-1][0])
        if line.dots and here < right - 60:
            canvas.path([(here + 7, ends[place]), (right + 8, level)], "leader")
        elif abs(level - ends[place]) > 3 or here < right - 3:
            canvas.path([(here + 4, ends[place]), (right + 8, level)], "leader")
        canvas.text(right + 10, level + 4, labels[place], f"label t{line.colour % COLOURS}")


def spaced(levels: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Levels, sorted, moved as little as may be so that they lie so far apart and in the range, if it has room.

    >>> spaced([10, 11, 50], 10, 0, 100), spaced([98, 99], 10, 0, 100)
    ([5.5, 15.5, 50.0], [90, 100])
    """
    members: list[list[float]] = []
    starts: list[float] = []  # of the first of each group
    for level in levels:
        members.append([float(level)])
        starts.append(0.0)
        while True:
            group = members[-1]
            middle = sum(wanted - place * gap for place, wanted in enumerate(group)) / len(group)
            starts[-1] = min(max(middle, low), max(low, high - (len(group) - 1) * gap))
            if len(members) < 2 or starts[-2] + len(members[-2]) * gap <= starts[-1]:
                break
            starts.pop()
            members.pop()
            members[-1] += group
    return [start + place * gap for start, group in zip(starts, members, strict=True) for place in range(len(group))]


# ---- bars


@dataclass(frozen=True)
class Bar:
    """A value in a row of its own; mark: another to compare it with; spread: the lowest and the highest; short: its
    name where there is little room."""

    label: str
    value: float
    text: str
    colour: int = 0
    mark: float | None = None
    spread: tuple[float, float] | None = None
    tip: str = ""
    short: str = ""


def bars(drawn: Sequence[Bar], width: int, *, mark: str = "", limit: float | None = None, note: str = "") -> Canvas:
    """A row a bar: its name, its length, its value in words; `mark` names what the upright strokes are.

    limit   the most that a value can be, where there is such: shown as the ground of all bars
    """
    row = 24 if len(drawn) <= 12 else 18
    head = 26 if mark or note else 4
    reach = [bar.value for bar in drawn] + [bar.mark or 0 for bar in drawn] + [
        bar.spread[1] for bar in drawn if bar.spread]  # fmt: skip
    most = limit or max(reach) or 1.0
    titles = [bar.label for bar in drawn]
    if max(map(text_width, titles)) + 10 > 0.42 * width:
        titles = [bar.short or bar.label for bar in drawn]
    names = min(max(map(text_width, titles)) + 10, 0.42 * width)
    values = max(text_width(bar.text) for bar in drawn) + 14
    canvas = Canvas(width, head + row * len(drawn) + 4)
    along = Scale(0, most, names, max(names + 40, width - values))
    whole = limit is not None
    if note:
        canvas.text(0, 13, note, "axis")
    if mark:
        start = text_width(note) + 14 if note else names
        canvas.line(start + 4, 4, start + 4, 16, "mark")
        canvas.text(start + 12, 13, mark, "axis")
    for place, (bar, title) in enumerate(zip(drawn, titles, strict=True)):
        level = head + row * place
        canvas.text(names - 10, level + row / 2 + 4, shorten(title, names), "label", anchor="end")
        if whole:
            canvas.rect(names, level + 4, along(most) - names, row - 8, "lane", radius=2)
        canvas.rect(names, level + 4, max(along(bar.value) - names, 1), row - 8, f"f{bar.colour % COLOURS}", radius=2,
                    tip=bar.tip or f"{bar.label}: {bar.text}")  # fmt: skip
        end = along(bar.value)
        if bar.spread:
            low, high = along(bar.spread[0]), along(bar.spread[1])
            canvas.line(low, level + row / 2, high, level + row / 2, "whisker")
            for at in (low, high):
                canvas.line(at, level + row / 2 - 4, at, level + row / 2 + 4, "whisker")
            end = max(end, high)
        if bar.mark is not None:
            canvas.line(along(bar.mark), level + 1, along(bar.mark), level + row - 1, "mark")
            end = max(end, along(bar.mark))
        canvas.text(end + 8, level + row / 2 + 4, bar.text, "label value")
    return canvas


def shares(rows: Sequence[tuple[str, Sequence[float]]], width: int) -> Canvas:
    """A row a quantity, cut into the stages by their share of it; the stages are named above the first."""
    row, head, gap = 30, 22, 2
    names = max(text_width(name) for name, _ in rows) + 14
    canvas = Canvas(width, head + (row + 6) * len(rows))
    room = width - names
    for place, (name, values) in enumerate(rows):
        level, at, total = head + (row + 6) * place, names, sum(values) or 1.0
        canvas.text(names - 10, level + row / 2 + 4, name, "label", anchor="end")
        for k, value in enumerate(values, start=1):
            wide = room * value / total
            shade = 1 - 0.62 * (k - 1) / max(1, len(values) - 1)
            percent = f"{100 * value / total:.0f} %"
            canvas.rect(at, level, max(wide - gap, 0.5), row, "f0", radius=2, opacity=shade,
                        tip=f"stage {k}: {100 * value / total:.1f} % of {name}")  # fmt: skip
            if wide > text_width(percent, SMALL) + 6:
                css = "inside" if shade > 0.62 else "inside-faint"
                canvas.text(at + (wide - gap) / 2, level + row / 2 + 4, percent, css, anchor="middle")
            title = f"stage {k}" if wide > text_width(f"stage {k}", SMALL) + 4 else str(k)
            if place == 0 and wide > text_width(title, SMALL) + 2:
                canvas.text(at + (wide - gap) / 2, 13, title, "tick", anchor="middle")
            at += wide
    return canvas


# ---- timelines


def lanes(trace: Trace, width: int, *, length: float, scale: float = 1e-3, unit: str = "ms") -> Canvas:
    """A lane a stage, stage 1 at the bottom as in the paper's figure; a box an operation, with its batch."""
    K = trace.K
    row = 34 if K <= 8 else 24 if K <= 12 else 16
    names = text_width(f"stage {K}") + 10
    shown = [kind for kind in KINDS if any(spell.kind == kind for spell in trace.spells)]
    key: list[list[str]] = [[]]  # the kinds, a list a line
    for kind in shown:
        if key[-1] and names + sum(28 + text_width(other) for other in key[-1]) + 16 + text_width(kind) > width:
            key.append([])
        key[-1].append(kind)
    head = 10 + 16 * len(key)
    canvas = Canvas(width, head + row * K + 36)
    along = Scale(0, length / scale, names, width - 4)
    for place, kinds in enumerate(key):
        at = names
        for kind in kinds:
            canvas.rect(at, 16 * place + 2, 11, 11, f"o-{kind}", radius=2)
            canvas.text(at + 16, 16 * place + 12, kind, "axis")
            at += 28 + text_width(kind)
    numbers = len(str(max((spell.batch or 0 for spell in trace.spells), default=0)))
    for k in range(1, K + 1):
        level = head + row * (K - k)
        canvas.text(names - 10, level + row / 2 + 4, f"stage {k}", "label", anchor="end")
        canvas.rect(names, level + 2, width - 4 - names, row - 4, "lane", radius=3)
        for spell in sorted(trace.of(k), key=lambda spell: KINDS.index(spell.kind), reverse=True):
            start, end = along(spell.start / scale), along(spell.end / scale)
            thin = spell.kind == "update" and end - start < 2
            what = spell.kind + (f" {spell.batch}" if spell.batch is not None else "")
            tip = f"stage {k}: {what}, {(spell.end - spell.start) / scale:.3g} {unit}"
            inset = 2 if spell.kind in ("forward", "backward") else 4 if spell.kind != "update" else 1
            box = 2.0 if thin else max(end - start - (0.8 if end - start > 4 else 0), 0.6)
            canvas.rect(start, level + inset, box, row - 2 * inset, f"o-{spell.kind}", tip=tip,
                        radius=1.5 if box > 6 else 0)  # fmt: skip
            roomy = spell.batch is not None and end - start > numbers * WIDTH_OF_DIGIT + 5 and row > 20
            if roomy and spell.kind in ("forward", "backward"):
                canvas.text((start + end) / 2, level + row / 2 + 4, str(spell.batch), "in-box", anchor="middle")
    base = head + row * K
    canvas.line(names, base + 2, width - 4, base + 2, "rule")
    for mark in ticks(0, length / scale, max(2, int((width - names) // 90))):
        canvas.line(along(mark), base + 2, along(mark), base + 6, "rule")
        anchor = "end" if along(mark) > width - 20 else "middle"
        canvas.text(along(mark), base + 19, number(mark), "tick", anchor=anchor)
    canvas.text(width - 4, base + 33, unit, "axis", anchor="end")
    return canvas


WIDTH_OF_DIGIT = 0.62 * (SIZE - 1)
