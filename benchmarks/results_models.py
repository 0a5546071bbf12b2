"""The section of docs/results.md about benchmarks/models.py: models of other libraries, cut."""

from __future__ import annotations

from page import Record, point, prose, records, source

from offbeat.report.formatting import markdown

HEAD = ["library", "model", "parameters", "traced by", "units", "s"]
HEAD += ["balance, measured", "best", "largest unit permits", "by FLOPs", "exact"]


def row(found: Record) -> list[str]:
    if "failed" in found:
        return [found["library"], found["model"], *["-"] * (len(HEAD) - 3), f"failed: {found['failed']}"]
    exact = "bit for bit" if not found["difference"] else f"to {found['difference']:.0e}"
    if found["difference"] and "repeated" in found:
        exact += f", twice the same to {found['repeated']:.0e}" if found["repeated"] else ", twice the same bit for bit"
    return [
        found["library"],
        found["model"],
        f"{found['parameters'] / 1e6:.1f} M",
        found["trace"],
        str(found["units"]),
        f"{found['seconds']:.1f}",
        f"{found['balance']:.2f}",
        *(f"{found[name]:.2f}" if name in found else "-" for name in ("best_balance", "largest_unit_permits")),
        f"{found['balance_by_flops']:.2f}",
        exact,
    ]


def section() -> list[str]:
    found = records("models")
    if not found:
        return []
    settings = next(iter(found.values()))["settings"]  # the same in all
    lines = [
        f"## Models of other libraries, K={settings['K']}",
        "",
        prose(
            f"Random weights, batches of {settings['batch_size']}, {settings['pixels']} pixels or",
            f"{settings['tokens']} tokens, on {settings['device']}. Balance is the mean over the maximum of the",
            "stages' times; best is that of the best cuts between the same units by the same times, and",
            "the next column what the largest unit permits. s is the time to trace and cut. Exact: output and all",
            "gradients through the stages against the unsplit model, else the largest difference relative to the",
            "largest element; twice the same: two runs of the unsplit model against each other.",
        ),
        "",
    ]
    for name, record in found.items():
        lines += [markdown(HEAD, [row(each) for each in record["models"]]), ""]
        lines += [*[point(note) for note in record.get("notes", [])], source(name, record), ""]
    return lines
