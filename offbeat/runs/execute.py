"""A recipe from its check to its result: here, in worker processes started here, or in those that torchrun started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.errors import FolderTaken, Interrupted, NotFinite, UserError
from offbeat.runs import launch
from offbeat.runs.recipe import Recipe, changed, complete, linear_rate, load

MOST_ROLLBACKS = 5  # of one run


def execute(
    recipe: Recipe, out: Path, *, dry_run: bool = False, show: bool = True, resumed: bool = False, max_restarts: int = 0
) -> dict[str, Any] | None:
    """Check and run a recipe here, in workers started here, or as a member of the group that torchrun started."""
    from offbeat import checkpoint
    from offbeat.runs import lock, record, saving
    from offbeat.runs.train import check
    from offbeat.runs.train import train as run

    if launch.joined_group():
        if dry_run:
            raise UserError("--dry-run under torchrun: run it once, without torchrun")
        ready = resumed or launch.is_worker()
        with nullcontext() if launch.is_worker() else kept(out):  # what ends a worker early, its launcher tells
            return run(replace(recipe, engine="processes"), out, show=show, folder_ready=ready)
    if not resumed:
        record.check_free(out)
    try:
        recipe, known = check(recipe)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise UserError("there is not enough memory here: use smaller --shape, --classes or --batch-size") from error
    if resumed and (found := checkpoint.newest(out)[0]):
        saving.continued(recipe, known.samples, found.run())
    if dry_run:
        epochs = recipe.count(known.samples)
        return {"recipe": recipe.as_dict(), "batches_an_epoch": epochs.per_epoch, "out": str(out)}
    for rollback in range(MOST_ROLLBACKS + 1):
        try:
            with lock.held(out), kept(out):
                record.RunFolder.create(out, recipe, again=resumed or rollback > 0)
                if recipe.engine != "processes":
                    return run(recipe, out, show=show, folder_ready=True)
                arguments = ["train", "--config", str(out / "config.json"), "--out", str(out)]
                launch.launch(recipe.K, arguments + ([] if show else ["--json"]), max_restarts=max_restarts)
                results = [line for line in record.lines(out) if line["kind"] == "result"]
                return {**results[-1], "out": str(out)} if results else None
        except NotFinite as error:
            if recipe.on_nan != "rollback" or rollback == MOST_ROLLBACKS:
                raise
            recipe = replace(recipe, left_out=tuple(sorted({*(recipe.left_out or ()), *error.batches})))
            print(f"offbeat: {error}; going back to the last checkpoint, without its batches", file=sys.stderr)
    raise AssertionError("unreachable")


def going_on(run: Path, chosen: dict[str, Any]) -> Recipe:
    """The recipe of a run that goes on, with what is to change; cuts and threads follow a new K."""
    from offbeat.runs import lock, record, saving

    before = load(run / "config.json")
    before.pop("trace", None)  # it has one
    finished = any(line["kind"] == "result" for line in record.lines(run))
    if finished and chosen.get("epochs", 0) <= before["epochs"]:
        raise UserError(f"{run} is finished, after {before['epochs']} epochs: give more --epochs to go on")
    with lock.held(run):  # it clears away what is unfinished
        found, _ = saving.find(run)
    if found is None:
        raise UserError(f"{run} has no sound checkpoint to go on from: start it anew, with --checkpoint-every")
    if chosen.get("K", before["K"]) != before["K"] or "units" in chosen:
        for name in ("cuts", "units", "threads_per_stage", "speeds", "engine"):
            before.pop(name, None)
    if before["lr"] == linear_rate(before["batch_size"], before["settings"]["M"]):  # which follows what changes
        before.pop("lr")
    return complete(**changed(before, chosen))


@contextmanager
def kept(out: Path) -> Iterator[None]:
    """Whatever ends a run early is the last line of its records, and the message says where they are.

    Under torchrun the first stage makes the folder once all processes have joined: before, there are none.
    """
    from offbeat.runs.record import RunFolder

    def last_line(kind: str, **values: str) -> None:
        if os.environ.get("RANK", "0") == "0" and (out / "config.json").exists():
            RunFolder(out).line(kind, **values)

    try:
        yield
    except (KeyboardInterrupt, Interrupted) as error:
        last_line("interrupted")
        where = f"; the records so far are in {out}" if out.exists() else ""
        raise Interrupted(f"{str(error) or 'stopped by Ctrl-C'}{where}") from None
    except NotFinite as error:
        last_line("failed", reason=str(error))
        raise NotFinite(f"{error} ({last_good(out)}; records so far: {out})", error.batches) from None
    except FolderTaken:  # the records there are those of another run
        raise
    except UserError as error:
        last_line("failed", reason=str(error))
        where = f" (records so far: {out})" if out.exists() else ""
        raise type(error)(f"{error}{where}") from None


def last_good(out: Path) -> str:
    """Which checkpoint a run can go on from."""
    from offbeat.checkpoint import ls

    found = [listed.path for listed in ls(out) if listed.checkpoint]
    return f"last good checkpoint: {found[-1]}" if found else "no checkpoint"


def free_folder(recipe: Recipe) -> Path:
    """The default run folder, with a number behind it where there is one already."""
    name = f"{recipe.data}-{recipe.model}-{recipe.method}-K{recipe.K}-M{recipe.M}-seed{recipe.seed}"
    folder, count = Path("runs") / name, 1
    while (folder / "config.json").exists() and not launch.is_worker():
        count += 1
        folder = Path("runs") / f"{name}-{count}"
    return folder
