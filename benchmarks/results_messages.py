"""The section of docs/results.md about benchmarks/messages.py: the accuracy of compressed messages."""

from __future__ import annotations

from statistics import mean

from page import Record, listed, point, prose, records, source

from offbeat.report.formatting import markdown

METRICS = {"train_loss": "training loss", "test_loss": "test loss", "test_error": "test error (%)"}


def table(record: Record, task: str) -> str:
    """Mean (least-most) over the seeds of each format; metrics that the task does not have are left out."""
    runs = [run for run in record["runs"] if run["task"] == task]
    metrics = {name: title for name, title in METRICS.items() if all(run.get(name) is not None for run in runs)}
    rows = []
    for messages in dict.fromkeys(run["messages"] for run in runs):
        cells = []
        for name in metrics:
            values = [run[name] for run in runs if run["messages"] == messages]
            cells.append(f"{mean(values):.3f} ({min(values):.3f}-{max(values):.3f})")
        rows.append([messages, *cells])
    return markdown(["messages", *metrics.values()], rows)


def apart(record: Record, task: str) -> list[str]:
    """The formats whose test losses are all above, or all below, those of exact messages."""
    losses: dict[str, list[float]] = {}
    for run in record["runs"]:
        if run["task"] == task:
            losses.setdefault(run["messages"], []).append(run["test_loss"])
    exact = losses.pop("exact")
    return [name for name, found in losses.items() if min(found) > max(exact) or max(found) < min(exact)]


def section() -> list[str]:
    found = records("messages")
    if not found:
        return []
    lines = ["## What compressed messages cost", ""]
    for name, record in found.items():
        for task, settings in record["settings"]["tasks"].items():
            seeds = {run["seed"] for run in record["runs"] if run["task"] == task}
            if not seeds:
                continue
            lines += [
                prose(
                    f"{settings['model']} on {settings['data']}, ADL, K={settings['K']}, M={record['settings']['M']},",
                    f"b={settings['batch_size']}, {settings['epochs']} epochs; mean (least-most) of {len(seeds)}",
                    "seeds. The runs differ in nothing but the messages between stages.",
                ),
                "",
                table(record, task),
                "",
                point(
                    f"Test losses that do not overlap with those of exact messages: {listed(apart(record, task))}.",
                    "Runs as short as these show no small differences.",
                ),
                "",
            ]
        lines += [source(name, record), ""]
    return lines
