"""The section of docs/results.md on the paper's rows, run again, from records of benchmarks/reproduced.py."""

from __future__ import annotations

import json
from itertools import groupby
from statistics import median

from page import RECORDS, Picture, Record, Records, listed, point, prose

from offbeat.report.formatting import markdown
from offbeat.runs.task import CLASSIFICATION, LANGUAGE, LearningTask

TITLE = "The paper's rows again"
LANGUAGE_TITLE = "Language models with late gradients"
ANCHOR = "the-papers-rows-again"
STATED = ("error: ", "loss: ", "bits per byte: ", "to BP: ")  # notes that the introduction of a table contains
STATES = ("done", "diverged", "failed")
EPOCHS = 300  # of the paper's schedule on CIFAR-10
MOST_NAMED = 12  # rows that a sentence names; more are counted


# ---- a row


def task_of(record: Record) -> LearningTask:
    """Records of earlier versions are of images."""
    return LANGUAGE if record.get("task") == LANGUAGE.name else CLASSIFICATION


def runs_of(record: Record, row: Record) -> list[Record]:
    """The runs of a row that have begun."""
    return [told for name, told in record["runs"].items() if name.rpartition("-seed")[0] == row["name"]]


def state(row: Record, epochs: int) -> str:
    """The states of the seeds of a row; of an unfinished one also its error so far."""
    runs = row["runs"]
    if all(run["state"] == "done" for run in runs):
        return "done"
    words = []
    for name in STATES:
        those = [run for run in runs if run["state"] == name]
        where = ", ".join(str(min(run["epochs"] + 1, epochs)) for run in those)
        words += [f"{len(those)} {name}" + f" in epoch {where}" * (name == "diverged")] if those else []
    for run in runs:
        if run["state"] == "under way":
            so_far = f" ({run['errors'][-1]:.2f} there)" if run["errors"] else ""
            words.append(f"at epoch {run['epochs']} of {epochs}{so_far}")
    missing = sum(run["state"] == "missing" for run in runs)
    words += [f"{missing} missing"] if missing else []
    return words[0].removeprefix("1 ") if len(runs) == 1 else ", ".join(words)


def paper(row: Record) -> str:
    return "-" if row["paper"] is None else "div." if row["paper"]["error"] is None else f"{row['paper']['error']:.2f}"


def ours(row: Record, key: str = "error", digits: int = 2) -> str:
    """Median (lowest-highest); of a single seed there is only one."""
    if row[key] is None:
        return "div." if any(run["state"] == "diverged" for run in row["runs"]) else "-"
    lowest, highest = row[f"{key}_range"]
    spread = f" ({lowest:.{digits}f}-{highest:.{digits}f})" if row["n"] > 1 else ""
    return f"{row[key]:.{digits}f}{spread}"


def signed(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:+.{digits}f}"


def kind(record: Record, row: Record) -> tuple[object, ...]:
    """What a row and the BP beside it share: network, batch, M and learning rate."""
    told = runs_of(record, row)[0]
    return told["model"], told["batch_size"], told["M"], told["lr"]


def is_bp(record: Record, row: Record) -> bool:
    return all(told["method"] == "bp" for told in runs_of(record, row))


def to_bp(record: Record, row: Record) -> float | None:
    """Ours minus our BP of the same network, b, M and rate; None where one of them is not done, or it is that BP. Rows
    of text name the BP that they are compared with."""
    if task_of(record) is LANGUAGE:
        difference: float | None = row["difference"]
        return difference
    if row["error"] is None or is_bp(record, row):
        return None
    beside = [one for one in record["rows"] if is_bp(record, one) and kind(record, one) == kind(record, row)]
    return next((row["error"] - one["error"] for one in beside if one["error"] is not None), None)


def staleness(record: Record, row: Record) -> str:
    measured = [told["staleness"][0] for told in runs_of(record, row) if told["staleness"]]
    return f"{median(measured):.2f}" if measured else ""


# ---- tables and words


def named(titles: list[str]) -> str:
    """The rows by name, or their number where they are many."""
    return listed(titles) if len(titles) <= MOST_NAMED else f"{len(titles)} rows"


def compared(record: Record) -> bool:
    """Whether the paper has values for any of the rows; of other images it has none."""
    return any(row["paper"] for row in record["rows"])


def cells(record: Record, row: Record) -> dict[str, str]:
    """The cells of a row, by column."""
    if task_of(record) is LANGUAGE:
        return {
            "row": row["title"],
            "loss": ours(row, "loss", 3),
            "n": str(row["n"]),
            "to BP": signed(row["difference"], 3),
            LANGUAGE.heading: "-" if row["error"] is None else LANGUAGE.cell(row["error"]),
            "staleness of stage 1": staleness(record, row),
            "state": state(row, record["settings"]["epochs"]),
        }
    told = {
        "row": row["title"],
        "paper": paper(row),
        "ours": ours(row),
        "top-5": "-" if row["top5"] is None else f"{row['top5']:.2f}",
        "n": str(row["n"]),
        "to the paper": signed(row["difference"]),
        "to BP, same b and M": signed(to_bp(record, row)),
        "staleness of stage 1": staleness(record, row),
        "state": state(row, record["settings"]["epochs"]),
    }
    unknown = [] if compared(record) else ["paper", "to the paper"]
    unknown += [] if record["top5"] else ["top-5"]
    return {name: value for name, value in told.items() if name not in unknown}


def table(record: Record) -> str:
    told = [cells(record, row) for row in record["rows"]]
    return markdown(list(told[0]), [list(row.values()) for row in told])


def verdicts(record: Record) -> list[str]:
    """What the table shows, the unfavourable first."""
    rows = record["rows"]
    done = [row for row in rows if row["error"] is not None]
    late = {row["title"]: found for row in done if (found := to_bp(record, row)) is not None}
    far = {row["title"]: row["difference"] for row in done if row["difference"] is not None}

    text = task_of(record) is LANGUAGE
    bp, digits = ("BP with the same optimizer and stages", 3) if text else ("our BP at the same b and M", 2)
    far = {} if text else far

    def those(found: dict[str, float], worse: bool) -> str:
        return named([f"{title} ({value:+.{digits}f})" for title, value in found.items() if (value > 0) == worse])

    lines = []
    if late:
        lines.append(point(f"Worse than {bp}: {those(late, True)}. Not worse: {those(late, False)}."))
    if far:
        lines.append(point(f"Above the paper's value: {those(far, True)}. Not above: {those(far, False)}."))
    fallen = [
        row["title"]
        for row in rows
        if (row["paper"] or {}).get("error") is not None and any(run["state"] == "diverged" for run in row["runs"])
    ]
    if fallen:
        lines.append(point(f"Diverged here, though not in the paper: {named(fallen)}."))
    for row in rows:
        if row["paper"] is not None and row["paper"]["error"] is None:
            here = "here it did not" if row["n"] else "here it is not done"
            if any(run["state"] == "diverged" for run in row["runs"]):
                here = "here some runs did" if row["n"] else "so it did here"
            reached = [f"{ours(row)} %"] if row["n"] else []
            told = ", ".join([*reached, state(row, record["settings"]["epochs"])])
            lines.append(point(f"{row['title']}: diverged in the paper; {here}: {told}."))
    single = [row["title"] for row in done if row["n"] == 1]
    if single and len(single) == len(done):
        lines.append(point("One seed per row: there is no spread, and a small difference means little."))
    elif single:
        lines.append(point(f"One seed has no spread, and a small difference means little: {named(single)}."))
    if any(run["state"] == "under way" for row in rows for run in row["runs"]):
        lines.append(
            point("An error at an epoch before the last is not a result: the learning rate drops late in the schedule.")
        )
    return lines


def without_bp(record: Record) -> list[str]:
    """Rows that are done and have no BP of the same setting yet."""
    setting = "with the same optimizer and stages" if task_of(record) is LANGUAGE else "at the same b and M"
    alone = [
        row["title"]
        for row in record["rows"]
        if row["error"] is not None and not is_bp(record, row) and to_bp(record, row) is None
    ]
    return [point(f"BP {setting} has not been run for: {named(alone)}.")] if alone else []


def missing(record: Record) -> list[str]:
    lines = []
    for asked, words in ((True, "Missing, though asked for"), (False, "Rows of the table that were not asked for")):
        found = [row for row in record["missing"] if row["asked"] == asked]
        near = [row["title"] for row in found if asked or row["tier"] <= 2]
        rest = len(found) - len(near)
        more = [f"and {rest} more of less worth" if near else f"{rest} of less worth"] if rest else []
        lines += [point(f"{words}: {listed([named(near), *more] if near else more)}.")] if found else []
    return lines


def notes(record: Record) -> list[str]:
    """Those of the table, but for what stands above it anyway."""
    return [point(f"{note}.") for note in record["notes"] if not note.startswith(STATED)]


def how(record: Record) -> str:
    """By what the runs ran."""
    told = list(record["runs"].values())
    words = []
    for name in ("device", "precision", "engine"):
        words.append(f"{name} {' and '.join(f'`{value}`' for value in dict.fromkeys(run[name] for run in told))}")
    for name in ("fuse", "compile", "tune"):
        those = sum(run[name] for run in told)
        some = f" for {those} of {len(told)} runs" if those < len(told) else ""
        words += [f"`--{name}`{some}"] if those else []
    return ", ".join(words)


def sources(name: str, record: Record) -> list[str]:
    """The record, and every command that added to it."""
    lines = [f"- [{name}](results/{name}), joined from these invocations:"]

    def made(one: Record) -> tuple[str, ...]:
        commit = one["commit"] or "unknown"
        after = " (set afterwards)" if "commit_set" in one else ""
        on = [one["machine"]] + ([one["gpu"] + " (named afterwards)" * ("gpu_set" in one)] if one.get("gpu") else [])
        return (
            f"`{' '.join(one['command'])}`",
            f"commit {commit[:12]}{'+' * commit.endswith('+')}{after}",
            f"torch {one['versions']['torch']}",
            *on,
        )

    for told, group in groupby(sorted(record["invocations"], key=made), key=made):
        times = [one["started"] for one in group]
        when = times[0] if len(times) == 1 else f"{len(times)} times from {min(times)} to {max(times)}"
        lines.append(f"    - {', '.join(told)}, {when}")
    return lines


# ---- the picture


def drawn(record: Record) -> dict[str, list[list[float]]]:
    """Curves by row, BP first; the network's name is in the title where it is that of all."""
    rows = [row for row in record["rows"] if any(run["errors"] for run in row["runs"])]
    several = len({row["name"].partition("-")[0] for row in rows}) > 1
    found = {}
    for row in sorted(rows, key=lambda row: not is_bp(record, row)):
        name = row["name"] if several else row["name"].partition("-")[2]
        if not row["n"]:  # its last error is no result
            over = any(run["state"] == "diverged" for run in row["runs"])
            name += " (div.)" if over else f" (at {max(run['epochs'] for run in row['runs'])})"
        found[name] = [run["errors"] for run in row["runs"] if run["errors"]]
    return found


def caption(record: Record) -> str:
    networks = dict.fromkeys(row["title"].partition(",")[0] for row in record["rows"])
    return f"{record['title']}: {next(iter(networks))}" if len(networks) == 1 else record["title"]


def picture(name: str, record: Record) -> Picture:
    """The learning curves of a record."""

    def svg() -> str:
        from offbeat.report.draw import curves_rendered

        return curves_rendered(drawn(record), "svg", title=caption(record), task=task_of(record)).decode()

    content = json.dumps([caption(record), drawn(record)])
    return Picture((RECORDS / name).with_suffix(".svg"), content, svg)


# ---- the page


def repeated(found: Records) -> str:
    """What there is to say elsewhere of the paper's schedule."""
    whole = [record for record in found.values() if record["settings"]["epochs"] == EPOCHS]
    if not any(row["n"] for record in whole for row in record["rows"]):
        return "there is no record yet: to be repeated there."
    return f"there are results [below](#{ANCHOR})."


def introduction(record: Record) -> str:
    if task_of(record) is LANGUAGE:
        return prose(
            "Validation loss at the last epoch in nats per token, lower is better: median (lowest-highest) of n seeds;",
            "the same as bits per byte. `To BP`: loss minus that of BP with the same optimizer, learning rate and",
            "stages, so with the same clipping, where both are done. Staleness in updates, as measured. All runs:",
            f"{how(record)}.",
        )
    return prose(
        "Test error (%) at the last epoch. Ours: median (lowest-highest) of n seeds"
        + ("; the paper's are medians of 3." if compared(record) else "."),
        "`To BP`: ours minus our own BP with accumulation of the same network, b, M and learning rate,",
        "where both are done. Staleness in updates, as measured. All runs:",
        f"{how(record)}.",
    )


def section(found: Records) -> list[str]:
    if not found:
        return []
    lines = []
    for task, title in ((CLASSIFICATION, TITLE), (LANGUAGE, LANGUAGE_TITLE)):
        those = {name: record for name, record in found.items() if task_of(record) is task}
        lines += [f"## {title}", "", *tables(those)] if those else []
    return lines


def tables(found: Records) -> list[str]:
    lines = []
    for name, record in found.items():
        lines += [
            f"### {record['title']}",
            "",
            introduction(record),
            "",
            table(record),
            "",
            f"![{task_of(record).metric.capitalize()} against the epoch](results/{picture(name, record).name})",
            "",
            *verdicts(record),
            *without_bp(record),
            *missing(record),
            *notes(record),
            "",
            *sources(name, record),
            "",
        ]
    return lines
