"""Join folders of `offbeat reproduce` that hold rows of one table with the same settings into one record.

    python benchmarks/reproduced.py FOLDER... --out docs/results/reproduction-NAME.json
    python benchmarks/reproduced.py FOLDER... --out RECORD --into DIR      leave the joined folder, too: it can go on

The record is the table as `offbeat reproduce` gives it for all runs together, with

    invocations   of all folders, by time: command, commit, machine, started
    runs          the settings of each run, its updates until the end of each epoch, and the staleness that it measured
    missing       rows of the table of which no run has begun, and whether they were asked for

A run of which two folders know is refused: which of them counts, only you can say.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from offbeat.errors import UserError, first_line
from offbeat.report import reproduction as report
from offbeat.runs import record
from offbeat.runs import tables as recipes
from offbeat.runs.recipe import load, make_recipe
from offbeat.runs.tables import Images, Table, TableRow
from offbeat.studies import reproduce as reproducing
from offbeat.studies.runner import StudyRunner
from offbeat.studies.training import StudyRun, stored_recipe

DIGITS = 4  # of errors and times, behind the point
RECIPE_FIELDS = (
    "method",
    "model",
    "K",
    "M",
    "batch_size",
    "batch_per_update",
    "optimizer",
    "lr",
    "weights",
    "corrector",
    "staleness_warmup",
    "cuts",
    "units",
    "engine",
    "device",
    "precision",
    "compile",
    "fuse",
    "tune",
)
INVOCATION_FIELDS = (
    "command",
    "commit",
    "machine",
    "gpu",
    "started",
    "versions",
)  # of an invocation; not the host's name


@dataclass(frozen=True)
class Joined:
    """Folders of one table with the same settings; `runs` are where they lie, by name."""

    table: Table
    settings: dict[str, Any]
    images: Images | None
    text: dict[str, Any] | None
    invocations: list[dict[str, Any]]
    runs: dict[str, Path]

    def row(self, run: str) -> TableRow:
        name = run.rpartition("-seed")[0]
        return next(row for row in self.table.rows if row.name == name)

    @property
    def rows(self) -> list[TableRow]:
        """Those of which a run has begun."""
        begun = {self.row(run).name for run in self.runs}
        return [row for row in self.table.rows if row.name in begun]


# ---- what the folders hold


def joined(folders: list[Path]) -> Joined:
    """What all folders hold together; refuses what does not belong together."""
    first: tuple[Path, Table, dict[str, Any]] | None = None
    images: Images | None = None
    text: dict[str, Any] | None = None
    invocations: list[dict[str, Any]] = []
    runs: dict[str, Path] = {}
    for folder in folders:
        there = reproducing.stored(folder)
        if there is None:
            raise UserError(f"{folder} holds no {reproducing.ASKED}: give folders of 'offbeat reproduce'")
        settings = {name: value for name, value in there["settings"].items() if value is not None}
        if first is None:
            if there["table"] not in recipes.TABLES:
                raise UserError(
                    f"{folder} holds a reproduction of {there['table']}, which is none of "
                    f"{', '.join(recipes.TABLES)}: leave it out"
                )
            first = folder, recipes.TABLES[there["table"]], settings
        check_alike(first, folder, there["table"], settings)
        if images and there["images"] and images != there["images"]:
            raise UserError(f"{first[0]} has {images}, {folder} has {there['images']}: join those of the same data")
        images = images or there["images"]
        if text and there["text"] and text != there["text"]:
            raise UserError(f"{first[0]} and {folder} have different texts: join those of the same data")
        text = text or there["text"]
        invocations += there["invocations"]
        for path in sorted((folder / "runs").iterdir()) if (folder / "runs").is_dir() else ():
            check_run(path, first[1], settings)
            if path.name in runs:
                raise UserError(f"{path.name} is in {runs[path.name].parents[1]} and in {folder}: move one away")
            runs[path.name] = path
    assert first is not None
    if not runs:
        raise UserError(f"no run in {', '.join(map(str, folders))}: there is nothing to join yet")
    invocations.sort(key=lambda invocation: invocation["started"])
    return Joined(first[1], first[2], images, text, invocations, runs)


def check_alike(first: tuple[Path, Table, dict[str, Any]], folder: Path, table: str, settings: dict[str, Any]) -> None:
    one, known, wanted = first
    if table != known.name:
        raise UserError(f"{folder} holds a reproduction of {table}, {one} of {known.name}: join those of one table")
    for name in [*wanted, *settings]:
        if wanted.get(name) != settings.get(name):
            told = ["default" if values.get(name) is None else values[name] for values in (wanted, settings)]
            raise UserError(f"{one} has {name} = {told[0]}, {folder} has {told[1]}: join those of the same settings")


def check_run(path: Path, table: Table, settings: dict[str, Any]) -> None:
    """A run of a row of the table, with the recipe that it has by these settings."""
    found = re.fullmatch(r"(.+)-seed(\d+)", path.name)
    row = next((row for row in table.rows if found and row.name == found[1]), None)
    if found is None or row is None:
        raise UserError(f"{path} is not a run of {table.name}: move it away")
    seed = int(found[2])
    stored_recipe(path, StudyRun(row.name, seed, reproducing.recipe_of(row, seed, settings)))


def option(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


def asked(all_of: Joined) -> dict[str, set[int]]:
    """The rows that the invocations asked for, and their seeds."""
    seeds: dict[str, set[int]] = {}
    for invocation in all_of.invocations:
        command = invocation["command"]
        request = reproducing.ReproductionRequest(
            table=all_of.table.name,
            only=option(command, "--only"),
            seeds=int(option(command, "--seeds") or 1),
            first_seed=int(option(command, "--first-seed") or 0),
        )
        for row in reproducing.rows_of(request)[1]:
            seeds.setdefault(row.name, set()).update(request.seeds_trained)
    return seeds


# ---- the record


def run_record(path: Path, seed: int) -> dict[str, Any]:
    """What tells a run from the others; staleness is that of its result, or of its last epoch if it has none yet."""
    recipe = make_recipe(**load(path / "config.json"))
    lines = record.lines(path)
    ends = [line for line in lines if line["kind"] in ("epoch", "result") and line.get("staleness")]
    last = ends[-1] if ends else {"kind": None, "staleness": None}
    return {
        "seed": seed,
        **{name: getattr(recipe, name) for name in RECIPE_FIELDS},
        "updates": [line["batches"] // recipe.M for line in lines if line["kind"] == "epoch"],
        "staleness": last["staleness"],
        "staleness_of": last["kind"],
    }


def rounded(run: dict[str, Any]) -> dict[str, Any]:
    return {**run, **{name: [round(value, DIGITS) for value in run[name]] for name in ("errors", "losses", "times")}}


def made(all_of: Joined, found: report.Reproduction) -> dict[str, Any]:
    """The record of a table that was read from all folders together."""
    content = found.as_dict()
    for row in content["rows"]:
        row["runs"] = [rounded(run) for run in row["runs"]]
    names = asked(all_of)
    begun = {row.name for row in all_of.rows}
    return {
        **content,
        "provenance": {name: value for name, value in found.provenance.items() if name != "host"},
        "tiers": {row.name: row.tier for row in all_of.rows},
        "runs": {run: run_record(path, int(run.rpartition("-seed")[2])) for run, path in all_of.runs.items()},
        "missing": [
            {
                "name": row.name,
                "title": row.title,
                "tier": row.tier,
                "asked": row.name in names,
                "paper": row.paper and asdict(row.paper),
            }
            for row in all_of.table.rows
            if row.name not in begun
        ],
        **({"text": all_of.text} if all_of.text else {}),
        "invocations": [
            {name: one[name] for name in [*INVOCATION_FIELDS, "commit_set", "gpu_set"] if name in one}
            for one in all_of.invocations
        ],
    }


def text(content: dict[str, Any]) -> str:
    """JSON that people can read, with a list of numbers on one line."""
    spread = json.dumps(content, indent=1)
    numbers = re.compile(r"\[\s+((?:[-+\d.eE]+|NaN|-?Infinity)(?:,\s+(?:[-+\d.eE]+|NaN|-?Infinity))*)\s+\]")
    return numbers.sub(lambda match: f"[{' '.join(match[1].split())}]", spread) + "\n"


# ---- the folder


@contextmanager
def together(all_of: Joined, into: Path | None) -> Iterator[Path]:
    """A folder with all runs: for a while and by links, or `into` a copy, complete or not at all."""
    with tempfile.TemporaryDirectory(prefix=".joining-", dir=into.absolute().parent if into else None) as place:
        folder = Path(place) / "joined"
        (folder / "runs").mkdir(parents=True)
        for run, path in all_of.runs.items():
            if into is None:
                (folder / "runs" / run).symlink_to(path.absolute(), target_is_directory=True)
            else:
                shutil.copytree(path, folder / "runs" / run)
        yield folder
        if into is not None:
            os.replace(folder, into)


def join(folders: list[Path], into: Path | None = None, given: dict[str, str | None] | None = None) -> dict[str, Any]:
    """The record of all folders; `given` says what invocations do not know of themselves: commit, gpu."""
    all_of = joined(folders)
    for invocation in all_of.invocations:
        for name, value in (given or {}).items():
            if value is not None and invocation.get(name) is None:
                invocation |= {name: value, f"{name}_set": "was not recorded, given when the folders were joined"}
    taken = into is not None and into.exists() and (not into.is_dir() or any(into.iterdir()))
    if taken or (into is not None and not into.absolute().parent.is_dir()):
        raise UserError(f"--into {into}: give a folder that is empty or not there yet, in one that is")
    made_of = {row.name: reproducing.recipe_of(row, 0, all_of.settings) for row in all_of.rows}
    seeds = {name: numbers for name, numbers in asked(all_of).items() if name in made_of}
    with together(all_of, into) as folder:
        found = report.read(
            folder, all_of.table, made_of, seeds, all_of.settings, all_of.invocations[-1], all_of.images
        )
        content = {
            "table": all_of.table.name,
            "settings": all_of.settings,
            "images": all_of.images,
            "text": all_of.text,
            "invocations": all_of.invocations,
        }
        if into is not None:
            (folder / reproducing.ASKED).write_text(reproducing.content_text(content))
            reproducing.written(StudyRunner(folder), found)
        return made(all_of, found)


def fail(line: str) -> NoReturn:
    print(f"reproduced: {' '.join(line.split())}", file=sys.stderr)
    sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, help="the record, such as docs/results/reproduction-X.json")
    parser.add_argument("--into", type=Path, help="leave the joined folder here")
    parser.add_argument("--commit", help="of invocations that could not tell theirs")
    parser.add_argument("--gpu", help="its name, for invocations that do not tell it")
    parser.add_argument("--images", metavar="NAME", help="what other images than the paper's are called")
    parser.add_argument("--title", help="of the record, where there are several of one table")
    parser.add_argument("--remark", action="append", default=[], help="what else a reader of the record should know")
    options = parser.parse_args()
    try:
        if options.commit is not None and not re.fullmatch(r"[0-9a-f]{40}\+?", options.commit):
            raise UserError(f"--commit {options.commit}: give its 40 digits, as 'git rev-parse HEAD' does")
        if not options.out.absolute().parent.is_dir():
            raise UserError(f"--out {options.out}: there is no folder {options.out.parent}, make it first")
        content = join(options.folders, options.into, {"commit": options.commit, "gpu": options.gpu})
        content["notes"] = [*content["notes"], *options.remark]
        if options.images:
            if report.OTHERS not in content["title"]:
                raise UserError(f"--images {options.images}: these runs have those of the paper, leave it out")
            content["title"] = content["title"].replace(report.OTHERS, f"on {options.images}")
        content["title"] = options.title or content["title"]
        record.write(options.out, text(content))
    except UserError as error:
        fail(str(error))
    except (OSError, shutil.Error) as error:
        fail(f"{first_line(error)}: give folders that can be read, and places that can be written to")
    states = [run["state"] for row in content["rows"] for run in row["runs"]]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print(f"{options.out}: {len(content['rows'])} rows, {counts}; {len(content['missing'])} rows have not begun")


if __name__ == "__main__":
    main()
