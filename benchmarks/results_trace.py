"""The section of docs/results.md about benchmarks/trace_overhead.py: what a recording costs."""

from __future__ import annotations

from page import Record, point, prose, records, source

from offbeat.report.formatting import markdown_rows

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
        {
            "record": name,
            "rounds": str(record["settings"]["rounds"]),
            "iterations": str(record["settings"]["turns"]),
            "events per batch": f"{record['events_a_batch']:.1f}",
            "wall time": ratio(record["ratios"]["wall"]),
            "processor time": ratio(record["ratios"]["processor"]),
            "its own account": f"{100 * record['ratios']['account'][0]:.2f} %",
            f"wall below {WANTED}": verdict(record),
        }
        for name, record in found.items()
    ]
    first = next(iter(found.values()))["settings"]
    return [
        "## What a trace costs",
        "",
        prose(
            f"{first['model']}, b={first['batch_size']}, ADL, K={first['K']} processes, M={first['M']}: a stretch of",
            "iterations that is recorded and written, over one that is not, in turn; median (least-most) over the",
            "rounds. Its own account: the processor time of the recording's own parts over that of all else.",
        ),
        "",
        markdown_rows(rows),
        "",
        point("While nothing is recorded, a trace costs one comparison with None an iteration."),
        "",
        *(source(name, record) for name, record in found.items()),
        "",
    ]
