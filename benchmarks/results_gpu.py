"""The section of docs/results.md on one GPU, from the records of benchmarks/gpu.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from page import Record, Records, made, point, prose, source

from offbeat.report.formatting import markdown_rows, ranged

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


@dataclass(frozen=True)
class Case:
    """The rows of one network and batch size, by name."""

    record: Record
    model: str
    batch_size: int
    rows: dict[str, Record]

    @property
    def name(self) -> str:
        return ", ".join(word for word in (self.model, how(self.record)) if word)

    @property
    def aim(self) -> float | None:
        kernels = "joined" if how(self.record) else "plain"
        return AIMS.get((self.model, kernels)) if self.batch_size == 32 else None

    def ratios(self, row: str, base: str = "BP, recorded") -> list[float]:
        """How many times faster than another row, in each round; none where that was not measured."""
        other = self.rows.get(base, {"ms": []})
        return [one / two for one, two in zip(other["ms"], self.rows[row]["ms"], strict=bool(other["ms"]))]


def cases_of(found: Records) -> list[Case]:
    return [
        Case(record, case["model"], case["batch_size"], {row["name"]: row for row in case["rows"]})
        for record in found.values()
        for case in record["found"]
    ]


def table(cases: list[Case]) -> str:
    lines = []
    for case in cases:
        for name, row in case.rows.items():
            at_once, aim = case.ratios(name, AT_ONCE), case.aim if name == AIMED_AT else None
            lines.append(
                {
                    "network, b": f"{case.model}, {case.batch_size}",
                    "kernels": how(case.record) if name != "BP, eager" else "",
                    "row": name,
                    "ms per batch": ranged(row["ms"], 2),
                    "times recorded BP": "" if name == "BP, recorded" else ranged(case.ratios(name), 2),
                    "aim": f"{aim}" if aim else "",
                    "times BP at once": ranged(at_once, 2) if at_once and name.startswith("ADL") else "",
                    "host's share": f"{median(row['host']):.2f}",
                    "stage 1 stale": f"{row['staleness'][0]:.1f}",
                    "GiB held": f"{row['held'] / 2**30:.2f}" if "held" in row else "",
                }
            )
    return markdown_rows(lines)


def remarks(found: Records, cases: list[Case]) -> Iterator[str]:
    """What the table shows, and what is missing in it."""
    missed = [
        f"{case.name} {ratio:.2f} of {case.aim}"
        for case in cases
        if case.aim and AIMED_AT in case.rows and (ratio := median(case.ratios(AIMED_AT))) < case.aim
    ]
    if missed:
        yield f"Aims that were missed: {'; '.join(missed)}."
    both = [case for case in cases if case.batch_size == 32 and {AIMED_AT, AT_ONCE} <= case.rows.keys()]
    if both:
        faster = [median(case.ratios(AIMED_AT, AT_ONCE)) for case in both]
        memory = [case.rows[AIMED_AT]["held"] / case.rows[AT_ONCE]["held"] for case in both]
        late = both[0].rows[AIMED_AT]["staleness"][0]
        yield (
            f"BP with the batches of a window at once is exact, and the stronger baseline: at b=32 ADL is "
            f"{min(faster):.2f} to {max(faster):.2f} times as fast as it, holds {min(memory):.1f} to {max(memory):.1f} "
            f"times its memory, and its gradients are {late:g} updates old in stage 1."
        )
    adl = [(case, row) for case in cases for name, row in case.rows.items() if name.startswith("ADL")]
    if rings := [row["rings"] for _, row in adl if row.get("rings")]:
        slots, groups = (
            [sum(stage[there] for stage in ring) / sum(stage[least] for stage in ring) for ring in rings]
            for there, least in (("slots", "batches"), ("groups", "versions"))
        )
        yield (
            f"The price of recording is memory: a pipeline has {min(slots):.2f} to {max(slots):.2f} times as many "
            f"slots for batches as the lag + 1 of its stages, and {min(groups):.2f} to {max(groups):.2f} times their "
            "ceil(lag/M) + 1 versions of the weights."
        )
    gaps = [
        ", ".join(filter(None, (model, how(record))))
        for record in found.values()
        for model in record["settings"]["models"].split(",")
        if model not in {case["model"] for case in record["found"]}
    ]
    if gaps:
        yield f"Asked for and not there, since the time was over: {'; '.join(gaps)}."
    newer = [case.record for case in cases if AT_ONCE in case.rows]
    if old := [name for name, record in found.items() if record not in newer]:
        yield f"Of an earlier engine, without BP at once: {', '.join(old)}."
    if any(case.model == "resnet18" for case in cases):
        yield "resnet18 is ImageNet's network on images of 224x224; resnet18-cifar has those of 32x32."
    unsettled = [
        f"{case.model} b={case.batch_size} {row['name']}" for case, row in adl if max(row["ms"]) > 1.5 * min(row["ms"])
    ]
    if unsettled:
        yield (
            "Not settled when they were measured (the slowest round took more than 1.5 times the fastest, "
            f"since ticks were still being joined): {', '.join(unsettled)}."
        )
    slow = [
        ", ".join(filter(None, (case.model, f"b={case.batch_size}", how(case.record), name)))
        for case in cases
        for name, row in case.rows.items()
        if row["K"] > 1 and median(row["host"]) > 0.8
    ]
    if slow:
        yield f"Here the host is the bottleneck (a share above 0.8): {'; '.join(slow)}."


def section(found: Records) -> list[str]:
    if not found:
        return []
    any_record = next(iter(found.values()))
    settings = any_record["settings"]
    cases = cases_of(found)
    return [
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
        table(cases),
        "",
        *(point(remark) for remark in remarks(found, cases)),
        "",
        *(source(name, record) for name, record in found.items()),
        "",
    ]
