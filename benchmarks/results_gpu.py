"""The section of docs/results.md on one GPU, from the records of benchmarks/gpu.py."""

from __future__ import annotations

from statistics import median

from page import Record, Records, made, point, prose, source

from offbeat.report.formatting import markdown_rows

# What was aimed at, by network and how its kernels are made: how much faster than BP that is recorded in the same way,
# at b=32. What is joined, by torch.compile or by us, has the same aims: it takes most of BP's idle time away.
AIMS = {
    ("resnet56", "plain"): 3.3,
    ("resnet110", "plain"): 3.6,
    ("resnet18-cifar", "plain"): 1.6,
    ("resnet56", "joined"): 3.0,
    ("resnet110", "joined"): 3.2,
    ("resnet18-cifar", "joined"): 1.6,
}
AIMED_AT, AT_ONCE = "ADL, K=8", "BP, K=8, at once"


def how(record: Record) -> str:
    """What was done to the kernels of all recorded rows."""
    settings = record["settings"]
    return "compiled" if settings["compile"] else "fused" if settings.get("fuse") else ""


def aim_of(record: Record, case: Record) -> float | None:
    if case["batch_size"] != 32:
        return None
    return AIMS.get((case["model"], "joined" if how(record) else "plain"))


def ratios_of(rows: list[Record], row: Record) -> list[float]:
    """How many times faster than recorded BP, in each round."""
    recorded = next(other for other in rows if other["name"] == "BP, recorded")
    return [one / other for one, other in zip(recorded["ms"], row["ms"], strict=True)]


def at_once(rows: list[Record], row: Record) -> list[float]:
    """How many times faster than BP whose windows run at once, in each round; none where that was not measured."""
    other = next((other for other in rows if other["name"] == AT_ONCE), None)
    return [one / two for one, two in zip(other["ms"], row["ms"], strict=True)] if other else []


def spread(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(found: Records) -> str:
    lines = []
    for record in found.values():
        for case in record["found"]:
            for row in case["rows"]:
                ratios, more = ratios_of(case["rows"], row), at_once(case["rows"], row)
                aim = aim_of(record, case) if row["name"] == AIMED_AT else None
                lines.append(
                    {
                        "network, b": f"{case['model']}, {case['batch_size']}",
                        "kernels": how(record) if row["name"] != "BP, eager" else "",
                        "row": row["name"],
                        "ms per batch": spread(row["ms"], 2),
                        "times recorded BP": "" if row["name"] == "BP, recorded" else spread(ratios, 2),
                        "aim": f"{aim}" if aim else "",
                        "times BP at once": spread(more, 2) if more and row["name"].startswith("ADL") else "",
                        "host's share": f"{median(row['host']):.2f}",
                        "stage 1 stale": f"{row['staleness'][0]:.1f}",
                        "GiB held": f"{row['held'] / 2**30:.2f}" if "held" in row else "",
                    }
                )
    return markdown_rows(lines)


def lines_on_exactness(found: Records) -> list[str]:
    """ADL beside the fastest BP there is."""
    pairs = [
        (case, {row["name"]: row for row in case["rows"]})
        for record in found.values()
        for case in record["found"]
        if case["batch_size"] == 32
    ]
    both = [
        (at_once(case["rows"], rows[AIMED_AT]), rows[AIMED_AT], rows[AT_ONCE])
        for case, rows in pairs
        if AIMED_AT in rows and AT_ONCE in rows
    ]
    if not both:
        return []
    faster = [median(ratios) for ratios, _, _ in both]
    memory = [adl["held"] / bp["held"] for _, adl, bp in both]
    return [
        point(
            f"BP with the batches of a window at once is exact, and the stronger baseline: at b=32 ADL is "
            f"{min(faster):.2f} to {max(faster):.2f} times as fast as it, holds {min(memory):.1f} to {max(memory):.1f} "
            f"times its memory, and its gradients are {both[0][1]['staleness'][0]:g} updates old in stage 1."
        )
    ]


def lines_on_misses(found: Records) -> list[str]:
    missed = []
    for record in found.values():
        for case in record["found"]:
            aim = aim_of(record, case)
            row = next((row for row in case["rows"] if row["name"] == AIMED_AT), None)
            if row and aim and (ratio := median(ratios_of(case["rows"], row))) < aim:
                name = ", ".join(word for word in (case["model"], how(record)) if word)
                missed.append(f"{name} {ratio:.2f} of {aim}")
    return [point("Aims that were missed: " + "; ".join(missed) + ".")] if missed else []


def lines_on_rings(found: Records) -> list[str]:
    """How many more slots and versions there are than a method needs, so that recordings repeat themselves."""
    rings = [
        row["rings"]
        for record in found.values()
        for case in record["found"]
        for row in case["rows"]
        if row["name"].startswith("ADL") and row.get("rings")
    ]
    if not rings:
        return []
    slots, groups = (
        [sum(stage[there] for stage in ring) / sum(stage[least] for stage in ring) for ring in rings]
        for there, least in (("slots", "batches"), ("groups", "versions"))
    )
    return [
        point(
            f"The price of recording is memory: a pipeline has {min(slots):.2f} to {max(slots):.2f} times as many "
            f"slots for batches as the lag + 1 of its stages, and {min(groups):.2f} to {max(groups):.2f} times their "
            "ceil(lag/M) + 1 versions of the weights."
        )
    ]


def lines_on_gaps(found: Records) -> list[str]:
    """Networks that a command names and that did not come to an end in the time there was."""
    gaps = []
    for record in found.values():
        there = {case["model"] for case in record["found"]}
        lost = [model for model in record["settings"]["models"].split(",") if model not in there]
        gaps += [f"{model}{', ' * bool(how(record))}{how(record)}" for model in lost]
    return [point(f"Asked for and not there, since the time was over: {'; '.join(gaps)}.")] if gaps else []


def lines_on_age(found: Records) -> list[str]:
    old = [
        name
        for name, record in found.items()
        if not any(row["name"] == AT_ONCE for case in record["found"] for row in case["rows"])
    ]
    return [point(f"Of an earlier engine, without BP at once: {', '.join(old)}.")] if old else []


def lines_on_host(found: Records) -> list[str]:
    slow = [
        f"{case['model']}, b={case['batch_size']}{', ' * bool(how(record))}{how(record)}, {row['name']}"
        for record in found.values()
        for case in record["found"]
        for row in case["rows"]
        if row["K"] > 1 and median(row["host"]) > 0.8
    ]
    return [point(f"Here the host is the bottleneck (a share above 0.8): {'; '.join(slow)}.")] if slow else []


def section(found: Records) -> list[str]:
    if not found:
        return []
    any_record = next(iter(found.values()))
    settings = any_record["settings"]
    lines = [
        f"## One GPU ({made(any_record)['machine']})",
        "",
        prose(
            f"Time per batch with {settings['precision']}, M = {settings['M']} and `{settings['weights']}` weights: BP "
            "as plain PyTorch runs it, BP recorded as CUDA graphs (one batch after the other; at once: the M batches "
            "of a window in K stages, to the same bits), and ADL with its K stages at once (engine `streams`), all "
            "in the same rounds, cuDNN's algorithms tuned for all of them; median (least-most). The "
            "host's share is the time in which it launches a batch, divided by the time that the batch takes. Nothing "
            "is read or augmented."
        ),
        "",
        table(found),
        "",
    ]
    lines += [
        *lines_on_misses(found),
        *lines_on_exactness(found),
        *lines_on_rings(found),
        *lines_on_gaps(found),
        *lines_on_age(found),
    ]
    if any(case["model"] == "resnet18" for record in found.values() for case in record["found"]):
        lines += [point("resnet18 is ImageNet's network on images of 224x224; resnet18-cifar has those of 32x32.")]
    unsettled = [
        f"{case['model']} b={case['batch_size']} {row['name']}"
        for record in found.values()
        for case in record["found"]
        for row in case["rows"]
        if row["name"].startswith("ADL") and max(row["ms"]) > 1.5 * min(row["ms"])
    ]
    if unsettled:
        lines += [
            point(
                f"Not settled when they were measured (the slowest round took more than 1.5 times the fastest, "
                f"since ticks were still being joined): {', '.join(unsettled)}."
            )
        ]
    return [*lines, *lines_on_host(found), "", *(source(name, record) for name, record in found.items()), ""]
