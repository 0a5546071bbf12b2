"""The section of docs/results.md about benchmarks/trace_overhead.py: what a recording costs."""

from __future__ import annotations

from page import Record, point, prose, records, source

from offbeat.report.formatting import markdown

WANTED = 1.02


def ratio(values: list[float]) -> str:
    middle, least, most = values
    return f"{middle:.3f} ({least:.3f}-{most:.3f})"


def verdict(record: Record) -> str:
    """Rounds that differ by more than the effect that was looked for show neither."""
    _, least, most = record["ratios"]["wall"]
    if most - least > WANTED - 1:
        return f"not shown: the rounds differ by {most - least:.2f}"
    return "yes" if record["good"] else "**missed**"


def section() -> list[str]:
    found = records("trace")
    if not found:
        return []
    rows = [
        [
            name,
            str(record["settings"]["rounds"]),
            str(record["settings"]["turns"]),
            f"{record['events_a_batch']:.1f}",
            ratio(record["ratios"]["wall"]),
            ratio(record["ratios"]["processor"]),
            f"{100 * record['ratios']['account'][0]:.2f} %",
            verdict(record),
        ]
        for name, record in found.items()
    ]
    first = next(iter(found.values()))["settings"]
    head = [
        "record",
        "rounds",
        "iterations",
        "events per batch",
        "wall time",
        "processor time",
        "its own account",
        f"wall below {WANTED}",
    ]
    return [
        "## What a trace costs",
        "",
        prose(
            f"{first['model']}, b={first['batch_size']}, ADL, K={first['K']} processes, M={first['M']}: a stretch of",
            "iterations that is recorded and written, over one that is not, in turn; median (least-most) over the",
            "rounds. Its own account: the processor time of the recording's own parts over that of all else.",
        ),
        "",
        markdown(head, rows),
        "",
        point("While nothing is recorded, a trace costs one comparison with None an iteration."),
        "",
        *(source(name, record) for name, record in found.items()),
        "",
    ]
