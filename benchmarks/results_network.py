"""The section of docs/results.md about benchmarks/network.py: which method is fastest on which network.

docs/results/network-*.json are its records; the picture of the same name beside one shows which kind of method the
timeline predicts to be the fastest for every rate and delay, and which was on the lines that were measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from statistics import median
from typing import Any, TypeVar

from network_prediction import MeasuredCosts, predicted
from network_relay import LOOPBACK, Profile
from network_rows import INNER_STEPS, M, NetworkRow
from page import RECORDS, Picture, Record, point, prose, records, source

from offbeat.report.formatting import markdown, ranged

WITHIN = 0.20  # of the measured time: the aim of predictions
SAME = 1.02  # times the smallest predicted time that count as equally fast
RATES = [10e6 * 10 ** (step / 8) for step in range(25)]  # bits per second of the map, the middle of each cell
DELAYS = [0.1e-3 * 10 ** (step / 6) for step in range(20)]  # seconds
DDP, SYNCHRONOUS, ONE_WAY, ADL = "DDP", "synchronous pipeline", "1F1B lag (ADL, 2BW)", "ADL"
KINDS = (DDP, SYNCHRONOUS, ONE_WAY, ADL)  # exact gradients first, then by staleness
AIMS = {"synchronous pipeline": 2.0, "DDP with accumulation": 4.0}  # of ADL, for the GPT on AIMED
AIMED = "100mbit-10ms"
FASTEST = "fastest"  # the line of a table with the fastest row of each profile
T = TypeVar("T")


def kind_of(row: NetworkRow) -> str | None:
    """Of the rows that are compared at equal samples per update and exact messages: local SGD is none of them."""
    if row.kind == "ddp":
        return DDP
    if row.kind == "local-sgd" or row.messages != "exact":
        return None
    return SYNCHRONOUS if not row.late else ADL if row.setting == "adl" else ONE_WAY


def rows_of(record: Record) -> list[NetworkRow]:
    return [NetworkRow(**row) for row in record["settings"]["rows"]]


def profiles_of(record: Record) -> list[Profile]:
    return [Profile(**profile) for profile in record["settings"]["profiles"]]


def by_round(record: Record, network: str, profile: str, row: str, *, what: str = "seconds") -> dict[int, float]:
    """A figure of every round."""
    return {
        one["round"]: one[what]
        for one in record["measurements"]
        if (one["network"], one["profile"], one["row"]) == (network, profile, row) and one[what] is not None
    }


def fastest(record: Record, network: str, profile: str, rows: Iterable[NetworkRow]) -> str | None:
    """The row with the smallest median time."""
    times = {row.name: by_round(record, network, profile, row.name) for row in rows}
    medians = {name: median(found.values()) for name, found in times.items() if found}
    return min(medians, key=medians.__getitem__) if medians else None


def fastest_of_all(record: Record, network: str, profile: str) -> str | None:
    """The fastest row of those that are compared; None on a line where a whole kind of them was not measured."""
    rows = [row for row in rows_of(record) if kind_of(row)]
    measured = {kind_of(row) for row in rows if by_round(record, network, profile, row.name)}
    return fastest(record, network, profile, rows) if measured == set(map(kind_of, rows)) else None


def ratio(record: Record, network: str, profile: str, above: str | None, below: str) -> str:
    """Median (least-most) of the times of one row over those of another in the same round."""
    if above is None:
        return ""
    first, second = (by_round(record, network, profile, row) for row in (above, below))
    found = [first[number] / second[number] for number in first if number in second]
    return ranged(found, 2) if found else ""


def rounds_of(record: Record) -> str:
    """How often rows were measured; a record that was cut off has rounds that are not complete.

    >>> rounds_of({"measurements": [{"network": "gpt", "profile": "x", "row": "adl"}]})
    '1 round'
    """
    counts = Counter((one["network"], one["profile"], one["row"]) for one in record["measurements"]).values()
    least, most = min(counts, default=0), max(counts, default=0)
    return f"{least} to {most} rounds" if least < most else f"{most} round{'s' if most != 1 else ''}"


# ---- tables


def lines_table(record: Record) -> list[str]:
    rows = [
        [
            profile.name,
            f"{profile.rate / 1e6:,.0f}",
            f"{found['rate'] / 1e6:,.0f}",
            f"{2e3 * profile.delay:.1f}",
            f"{1e3 * found['round_trip']:.1f}",
        ]
        for profile in profiles_of(record)
        if (found := record["lines"].get(profile.name))
    ]
    return [markdown(["line", "Mbit/s asked for", "measured", "round trip asked for (ms)", "measured"], rows), ""]


def by_profile(record: Record, heading: str, lines: Mapping[str, T], cell: Callable[[T, Profile], str]) -> list[str]:
    """A table with a column for each profile, of the lines that have a cell that is not empty."""
    profiles = profiles_of(record)
    cells = [[title, *(cell(what, profile) for profile in profiles)] for title, what in lines.items()]
    return [markdown([heading, *(profile.name for profile in profiles)], [line for line in cells if any(line[1:])]), ""]


def speeds_table(record: Record, network: str) -> list[str]:
    """Samples per second; of rows that differ in their micro-batches, the fastest on each line."""
    families: dict[str, list[NetworkRow]] = {}
    for row in rows_of(record):
        families.setdefault(row.family or row.name, []).append(row)

    def cell(members: list[NetworkRow], profile: Profile) -> str:
        best = fastest(record, network, profile.name, members)
        if best is None:
            return "left out"
        seconds = median(by_round(record, network, profile.name, best).values())
        chosen = f" (m={best.rpartition('-')[2]})" if len(members) > 1 else ""
        return f"{record['settings']['samples_per_update'] / seconds:.1f}{chosen}"

    lines = {one[0].title.rpartition(",")[0] if len(one) > 1 else one[0].title: one for one in families.values()}
    return by_profile(record, "samples per second", lines, cell)


def ratios_table(record: Record, network: str) -> list[str]:
    rows = rows_of(record)
    kinds = {kind: [row for row in rows if kind_of(row) == kind] for kind in KINDS}
    others = {
        "best synchronous pipeline / ADL": kinds[SYNCHRONOUS],
        "DDP / ADL": [row for row in kinds[DDP] if row.parts == 1],
        "DDP with accumulation / ADL": [row for row in kinds[DDP] if row.parts > 1],
        "1F1B lag / ADL": kinds[ONE_WAY],
        "local SGD / ADL": [row for row in rows if row.kind == "local-sgd"],
        "ADL / ADL with bf16 messages": [row for row in rows if row.name == "adl-bf16"],
        "ADL / ADL with int8 messages": [row for row in rows if row.name == "adl-int8"],
    }

    def cell(title: str, profile: Profile) -> str:
        if title == FASTEST:
            best = fastest_of_all(record, network, profile.name)
            return next((row.title for row in rows if row.name == best), "")
        best = fastest(record, network, profile.name, others[title])
        above, below = ("adl", best) if title.startswith("ADL") else (best, "adl")
        return ratio(record, network, profile.name, above, below)

    return by_profile(record, "times of an update", {title: title for title in (*others, FASTEST)}, cell)


def bytes_table(record: Record, network: str) -> list[str]:
    """Bytes and idle shares; bytes are the same on all lines but for what TCP sends again."""
    profiles = profiles_of(record)
    table = []
    for row in rows_of(record):
        sent, idle = [], []
        for profile in profiles:
            sent += by_round(record, network, profile.name, row.name, what="bytes").values()
            found = by_round(record, network, profile.name, row.name, what="idle").values()
            idle.append(f"{100 * median(found):.0f}" if found else "")
        if any(idle):
            table.append([row.title, f"{median(sent) / 1e6:.2f}" if sent else "", *idle])
    return [
        markdown(["row", "MB per update, all lines", *(f"idle %, {profile.name}" for profile in profiles)], table),
        "",
    ]


def predictions(record: Record, network: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Predicted and measured seconds per update, by row and profile."""
    costs = MeasuredCosts(record["costs"][f"{network}-{record['settings']['K']}"]["workers"])
    found = {}
    for row in rows_of(record):
        for profile in profiles_of(record):
            times = by_round(record, network, profile.name, row.name)
            if times:
                found[row.name, profile.name] = predicted(row, costs, profile), median(times.values())
    return found


def predictions_table(record: Record, network: str) -> list[str]:
    pairs = predictions(record, network)

    def cell(row: NetworkRow, profile: Profile) -> str:
        guessed, found = pairs.get((row.name, profile.name), (0.0, 0.0))
        return f"{guessed / found:.2f}" if found else ""

    good = sum(abs(guessed / found - 1) <= WITHIN for guessed, found in pairs.values())
    return [
        *by_profile(record, "predicted / measured time", {row.title: row for row in rows_of(record)}, cell),
        point(f"{good} of {len(pairs)} predictions are within {100 * WITHIN:.0f} % of the measured time."),
        "",
    ]


def aims(record: Record) -> list[str]:
    """What was wanted of ADL for the GPT, and what was measured."""
    if AIMED not in (profile.name for profile in profiles_of(record)) or "gpt" not in names(record):
        return []
    rows = rows_of(record)
    groups = {
        "synchronous pipeline": [row for row in rows if kind_of(row) == SYNCHRONOUS],
        "DDP with accumulation": [row for row in rows if kind_of(row) == DDP and row.parts > 1],
    }
    said = []
    for title, members in groups.items():
        best = fastest(record, "gpt", AIMED, members)
        found = ratio(record, "gpt", AIMED, best, "adl")
        if found:
            outcome = "reached" if float(found.split()[0]) >= AIMS[title] else "**missed**"
            said.append(f"{found} times as fast as the best {title} (aim {AIMS[title]:g}: {outcome})")
    return [point(f"GPT on {AIMED}: ADL is {'; '.join(said)}."), ""] if said else []


# ---- the picture


@cache
def _map(costs: str, rows: tuple[NetworkRow, ...]) -> list[dict[str, Any]]:
    """For every rate and delay the kind of method with the smallest predicted time."""
    measured, cells = MeasuredCosts(json.loads(costs)), []
    for delay in DELAYS:
        for rate in RATES:
            line = Profile("", rate, delay)
            times: dict[str, float] = {}
            for row in rows:
                if kind := kind_of(row):
                    times[kind] = min(times.get(kind, float("inf")), predicted(row, measured, line))
            least = min(times.values())
            best = next(kind for kind in KINDS if kind in times and times[kind] <= SAME * least)
            left, right = (rate * 10 ** (side / 16) / 1e6 for side in (-1, 1))
            low, high = (1e3 * delay * 10 ** (side / 12) for side in (-1, 1))
            cells.append({"rate": left, "right": right, "delay": low, "high": high, "kind": best})
    return cells


def names(record: Record) -> list[str]:
    return [network["name"] for network in record["settings"]["networks"]]


def measured_points(record: Record, network: str) -> list[dict[str, Any]]:
    """The fastest row of every line."""
    rows, found = rows_of(record), []
    for profile in profiles_of(record):
        best = fastest_of_all(record, network, profile.name)
        if best and profile.name != LOOPBACK:
            row = next(row for row in rows if row.name == best)
            found.append({"rate": profile.rate / 1e6, "delay": 1e3 * profile.delay, "kind": kind_of(row), "row": best})
    return found


def picture(name: str, record: Record) -> Picture:
    shown = [record["settings"], record["costs"], [measured_points(record, network) for network in names(record)]]
    return Picture((RECORDS / name).with_suffix(".svg"), json.dumps(shown, sort_keys=True), lambda: svg(record))


def svg(record: Record) -> str:
    """A map for each network: shaded by the predicted fastest kind, with circles for the measured one."""
    import altair as alt

    from offbeat.report.charts.data import chart_of, layered
    from offbeat.report.draw import panels, rendered
    from offbeat.report.style import colour

    hue = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=list(KINDS), range=[colour(place) for place in range(len(KINDS))]),
        legend=alt.Legend(title=None, orient="top"),
    )
    charts = []
    for network in names(record):
        costs = json.dumps(record["costs"][f"{network}-{record['settings']['K']}"]["workers"])
        cells, points = _map(costs, tuple(rows_of(record))), measured_points(record, network)
        x = alt.X("rate:Q", scale=alt.Scale(type="log", nice=False), title="rate of a line (Mbit/s)")
        y = alt.Y("delay:Q", scale=alt.Scale(type="log", nice=False), title="delay one way (ms)")
        shaded = chart_of(cells).mark_rect(opacity=0.35).encode(x=x, x2="right", y=y, y2="high", color=hue)
        circles = chart_of(points).mark_circle(size=130, opacity=1, stroke=colour("ink")).encode(x=x, y=y, fill=hue)
        labels = chart_of(points).mark_text(dy=-13, fontSize=11, fill=colour("ink")).encode(x=x, y=y, text="row:N")
        charts.append((network, layered([shaded, circles, labels], cells, points, height=300)))
    title = f"Fastest at {record['settings']['samples_per_update']} samples per update, K={record['settings']['K']}"
    subtitle = "shaded: predicted by the timeline; borders: equal times; circles: measured"
    return rendered(panels(charts, shared=True), "svg", title=title, subtitle=subtitle, width=None).decode()


# ---- the section


def record_section(name: str, record: Record) -> list[str]:
    settings = record["settings"]
    tcp = ", ".join(f"`{setting}` {value}" for setting, value in settings["tcp"].items())
    lines = [
        f"### {' and '.join(names(record))}, K={settings['K']}, {settings['samples_per_update']} samples per update, "
        f"{rounds_of(record)}",
        "",
        *lines_table(record),
        point(f"TCP: {tcp}."),
        "",
        *([f"![Fastest methods by rate and delay of the lines](results/{picture(name, record).name})", ""]),
        *aims(record),
    ]
    for network in names(record):
        model = next(one for one in settings["networks"] if one["name"] == network)
        shape = "x".join(map(str, model["shape"]))
        lines += [
            f"#### {model['model']}, samples of {shape}",
            "",
            *speeds_table(record, network),
            *ratios_table(record, network),
            *bytes_table(record, network),
            *predictions_table(record, network),
        ]
    failed = sorted({f"{one['network']}, {one['row']}, {one['profile']}: {one['reason']}" for one in record["failed"]})
    return [*lines, *(point(f"Left out: {reason}.") for reason in failed), source(name, record), ""]


def section() -> list[str]:
    """Nothing where there are no records."""
    found = records("network")
    if not found:
        return []
    lines = [
        "## Slow networks",
        "",
        prose(
            "`benchmarks/network.py`: every worker is a process with one core on a host of its own (a network",
            "namespace), and a relay gives the line between every two hosts a rate and a delay, each way. All rows",
            f"have the same samples per update: DDP divides them among the workers (with accumulation, in {M}",
            f"micro-batches), synchronous pipelines split them into m micro-batches, late methods into M={M} batches.",
            f"Local SGD averages weights every {INNER_STEPS} updates, which is another algorithm, and compressed",
            "messages change what is computed: they are shown, and not counted among the fastest. No accuracy is",
            "measured here. Predictions are from times of the stages without messages, sizes of messages, and the",
            "rate and delay of the line (`benchmarks/network_prediction.py`).",
        ),
        "",
    ]
    for name, record in found.items():
        lines += record_section(name, record)
    return lines
