"""The section of docs/results.md about benchmarks/torture.py: what was wanted, what was seen, what was missed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable

from page import RECORDS, Record, Records, listed, made, point, prose, shown, source

from offbeat.report.formatting import markdown, markdown_rows

TITLE = "What holds when something goes wrong"


def kind(name: str) -> str:
    """The torture of a record: torture-kills-second.json is one of kills."""
    return name.removesuffix(".json").split("-")[1]


def found() -> Records:
    """The records that are there, each kind together."""
    paths = sorted(RECORDS.glob("torture-*.json"), key=lambda path: path.stem)
    return {path.name: json.loads(path.read_text()) for path in paths}


def counted(items: Iterable[object]) -> str:
    """How often there is what."""
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(map(str, items)).items())) or "none"


def victims(trials: list[Record]) -> str:
    return counted("launcher" if trial["victim"] == "launcher" else "worker" for trial in trials)


# ---- kills


def asked(record: Record) -> int:
    """Trials that the command asked for; it may have ended before, at a time that it was given."""
    command = made(record)["command"]
    return int(command[command.index("--count") + 1]) if "--count" in command else 100


KILLS = {
    "as wanted": "good",
    "same bits": "same_bits",
    "nothing lost": "nothing_lost",
    "hung": "hangs",
    "orphans": "with_orphans",
    "still listening": "still_listening",
    "shared memory left": "with_shared_memory_left",
    "temporary folder left": "with_temporary_folders_left",
    "killed while a checkpoint was written": "while_writing",
}


def kills(records: Records) -> list[str]:
    rows, points = [], []
    for name, record in records.items():
        told, each = record["summary"], record["each"]
        rows.append([name, f"{told['trials']} of {asked(record)}", *(str(told[key]) for key in KILLS.values())])
        other = [trial for trial in each if not trial["same_bits"]]
        littered = [trial for trial in each if trial["temporary_left"]]
        stages = [f"K={trial['K']}" for trial in each]
        points.append(
            point(
                f"{name}: {counted(trial['method'] for trial in each)}; {counted(stages)}; killed: {victims(each)};",
                "taken up by",
                f"{counted('--' + trial['taken_up'] for trial in each)}. Not the same bits:",
                f"{counted(trial['method'] for trial in other)}. Temporary folder left, by who was killed:",
                f"{victims(littered)}.",
            )
        )
    return [
        prose(
            "Kills: a worker or the launcher of a run is killed (SIGKILL) at a random moment, the run continues, and",
            "its end is compared with that of a run that was not killed. Trials, of those that were requested:",
        ),
        "",
        markdown(["record", "trials", *KILLS], rows),
        "",
        *points,
        "",
    ]


def kills_seen(record: Record) -> str:
    told = record["summary"]
    return f"{told['good']} of {told['trials']} kills as wanted, {told['same_bits']} in the same bits"


# ---- configurations


def configs(records: Records) -> list[str]:
    lines = []
    for name, record in records.items():
        counts = ", ".join(f"{count} {what}" for what, count in sorted(record["counts"].items()))
        told = [f"{fault['reason']}: {fault['fault']}" for fault in record["faults"]]
        lines.append(point(f"{name}: {counts}. Faults: {listed(told)}."))
    return [
        prose(
            "Configurations: random command lines and files, good and bad, as dry runs. Which are valid is judged from",
            "the documentation, not by the code that is tried; unclear are those that it does not mention.",
        ),
        "",
        *lines,
        "",
    ]


def configs_seen(record: Record) -> str:
    return f"{len(record['faults'])} faults in {record['settings']['count']}"


# ---- slow links


def latency(records: Records) -> list[str]:
    lines = []
    for name, record in records.items():
        settings = record["settings"]
        rows = [
            [
                method,
                *(f"{1000 * seconds:.0f}" for seconds in row["clock_seconds"]),
                shown(row["throughput_kept"], settings["rounds"]),
                f"{row['clock']:.2f}",
            ]
            for method, row in record["rows"].items()
        ]
        lines += [
            prose(
                f"Slow links ({name}): K={settings['K']} processes whose stages sleep {1000 * settings['forward']:.0f}",
                f"ms in the forward and {1000 * settings['backward']:.0f} in the backward, on links that hold every",
                f"message back for {1000 * settings['latency']:.0f} ms. Median (least-most) of {settings['rounds']}",
                "rounds. A delay speeds nothing up: what is above 1 is noise.",
            ),
            "",
            markdown(
                ["method", "ms per batch by the clock", "with the delay", "throughput kept", "by the clock"], rows
            ),
            "",
        ]
    return lines


def latency_seen(record: Record) -> str:
    return f"adl keeps {shown(record['rows']['adl']['throughput_kept'], record['settings']['rounds'])}"


# ---- checkpoints


def limit(record: Record) -> float:
    """The number in what was wanted."""
    return float(re.findall(r"\d+\.\d+", record["wanted"])[-1])


def too_wide(record: Record) -> bool:
    """Whether rounds differ by more than the effect that was looked for."""
    _, least, most = record["ratios"]["wall"]
    return most - least > limit(record) - 1


def overhead(records: Records) -> list[str]:
    names = {"wall": "time", "processor": "processor time", "pause_share": "share that the stages stood still (%)"}
    lines = []
    for name, record in records.items():
        settings, ratios = record["settings"], record["ratios"]
        spreads = {
            what: [100 * value for value in ratios[what]] if what == "pause_share" else ratios[what] for what in names
        }
        size = max(note["bytes"] for note in record["checkpoints"])
        lines += [
            prose(
                f"Checkpoints ({name}): {settings['model']}, b={settings['batch_size']}, K={settings['K']},",
                f"M={settings['M']}, a checkpoint of {size / 1e6:.1f} MB every {settings['every']} batches, against",
                f"none: ratios of neighbouring stretches, median (least-most) of {settings['rounds']} rounds.",
            ),
            "",
            markdown([*names.values()], [[shown(spreads[what], settings["rounds"]) for what in names]]),
            "",
        ]
        if too_wide(record):
            lines += [
                point(
                    f"The rounds differ by {ratios['wall'][2] - ratios['wall'][1]:.2f}, more than the",
                    f"{limit(record) - 1:.2f} that are looked for: the ratio of times shows neither that the aim is",
                    "met nor that it is missed. The share that the stages stood still is the run's own account.",
                ),
                "",
            ]
    return lines


def overhead_seen(record: Record) -> str:
    return f"{shown(record['ratios']['wall'], record['settings']['rounds'])}" + ", too wide" * too_wide(record)


# ---- hours


def growing(row: Record) -> bool:
    return row["mb_an_hour"] > 2 * row["standard_error"]


def soak(records: Records) -> list[str]:
    lines = []
    for name, record in records.items():
        rows = [
            {
                "process": stage,
                "MB an hour (standard error)": f"{row['mb_an_hour']:+.1f} ({row['standard_error']:.1f})",
                "in that time (%)": f"{100 * row['growth'] / row['first']:+.2f}",
                "first MB": f"{row['first']:.0f}",
                "last": f"{row['last']:.0f}",
                "most": f"{row['most']:.0f}",
            }
            for stage, row in record["rows"].items()
        ]
        lines += [
            prose(
                f"Memory ({name}): {record['batches']} batches with {record['checkpoints']} checkpoints in",
                f"{record['settings']['minutes']:g} minutes, then Ctrl-C (exit code {record['exit_code']}). A line",
                f"through what came after the first {record['settings']['warm_up']:.0f} seconds:",
            ),
            "",
            markdown_rows(rows),
            "",
        ]
        grown = [stage for stage, row in record["rows"].items() if growing(row)]
        if grown:
            flat = "By the rule that was wanted it may count as flat; that it is zero is not shown."
            verdict = flat if record["good"] else "It is more than was wanted."
            lines += [point(f"Growth of more than two standard errors: {listed(grown)}. {verdict}"), ""]
    return lines


def soak_seen(record: Record) -> str:
    return ", ".join(f"{stage} {100 * row['growth'] / row['first']:+.1f} %" for stage, row in record["rows"].items())


# ---- the section

PARTS = {
    "kills": (kills, kills_seen),
    "configs": (configs, configs_seen),
    "latency": (latency, latency_seen),
    "overhead": (overhead, overhead_seen),
    "soak": (soak, soak_seen),
}


def wanted(name: str, record: Record) -> str:
    return record["wanted"] if "wanted" in record else f"{asked(record)} {kind(name)}, all as wanted"


def good(record: Record) -> bool:
    if "good" in record:
        return record["good"]
    return record["summary"]["good"] == record["summary"]["trials"] >= asked(record)


def verdict(name: str, record: Record) -> str:
    if not good(record):
        return "**missed**"
    return "by the median; not shown" if kind(name) == "overhead" and too_wide(record) else "yes"


def section() -> list[str]:
    """The records that are there; a kind that nobody has recorded has no part."""
    records = found()
    rows = [
        [name, wanted(name, record), PARTS[kind(name)][1](record), verdict(name, record)]
        for name, record in records.items()
    ]
    missed = [name for name, record in records.items() if not good(record)]
    lines = [
        f"## {TITLE}",
        "",
        prose(
            "Records of `make torture`; what each promises is in [reliability](reliability.md). Every record is a row,",
            "also those of code that was mended later: the commit is below.",
        ),
        "",
        markdown(["record", "wanted", "seen", "as wanted"], rows),
        "",
        point(f"Missed: {listed(missed)}."),
        "",
    ]
    for part, (write, _) in PARTS.items():
        these = {name: record for name, record in records.items() if kind(name) == part}
        lines += write(these) if these else []
    return [*lines, *(source(name, record) for name, record in records.items()), ""]
