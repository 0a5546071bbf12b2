"""The section of docs/results.md on the time of optimizers, from the records of benchmarks/optimizers.py."""

from __future__ import annotations

from statistics import median

from optimizers import AIM, compared_with
from page import Record, Records, listed, point, prose, source

from offbeat.report.formatting import markdown_rows, ranged
from offbeat.runs.optimizers import OPTIMIZERS
from offbeat.runs.tables.gpt import GPTSetting


def ratios_of(record: Record, row: Record) -> list[float]:
    """The time of a turn over that of the row with which it is compared, in each round."""
    base = next(other for other in record["rows"] if other["name"] == compared_with(row["name"]))
    return [one / other for one, other in zip(row["ms"], base["ms"], strict=True)]


def title_of(name: str) -> str:
    optimizer, _, corrector = name.partition("+")
    return OPTIMIZERS[optimizer].title + (f" with `{corrector}`" if corrector else "")


def table(record: Record) -> str:
    rows = []
    for row in record["rows"]:
        base, ratios = compared_with(row["name"]), ratios_of(record, row)
        other = base != row["name"]
        rows.append(
            {
                "optimizer": title_of(row["name"]),
                "ms per turn": ranged(row["ms"], 2),
                "compared with": title_of(base) if other else "",
                "times as long": ranged(ratios, 2) if other else "",
                f"at most {AIM}": ("yes" if median(ratios) <= AIM else "**no**") if other else "",
                "host's share": f"{median(row['host']):.2f}",
            }
        )
    return markdown_rows(rows)


def section(found: Records) -> list[str]:
    lines = ["## What optimizers cost on one GPU", ""]
    for name, record in found.items():
        settings = record["settings"]
        slow = [row["name"] for row in record["rows"] if median(ratios_of(record, row)) > AIM]
        lines += [
            prose(
                f"A turn of `{settings['model'] or GPTSetting().model}`, {GPTSetting().batch} sequences per update,",
                f"ADL on the 1F1B lag, K={settings['K']}, M={settings['M']}, engine `streams`, bf16: one batch of",
                f"every stage, and every M-th time an update. Median (least-most) of {settings['rounds']} rounds.",
            ),
            "",
            table(record),
            "",
            point(f"Above the aim of {AIM} times: {listed([title_of(one) for one in slow])}."),
            "",
            source(name, record),
            "",
        ]
    return lines if found else []
