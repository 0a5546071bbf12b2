"""The run folder: the recipe, the records and the trained model.

config.json         the complete recipe, cuts, versions, commit, host
metrics.jsonl       a line per report, epoch and event
diagnosis.jsonl     with `diagnose`: how far late gradients are from fresh ones, a line per diagnosis of a stage
trace.json          with `trace`: what the stages did and when
events.out.*        the metrics for TensorBoard
model.safetensors   the whole model, with the names of the unsplit module
run.lock            during the run: which process uses the folder (see lock.py)
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from offbeat.checkpoint import CheckpointFailed, free, is_full, ls, with_room
from offbeat.errors import FolderTaken, PackageMissing, UserError, first_line, print_once, require
from offbeat.runs.provenance import provenance
from offbeat.runs.recipe import Recipe

EVENTS = 1 << 16  # bytes that must be free for TensorBoard, whose writer does not handle errors
RETRIES, RETRY_SECONDS = 20, 0.1  # to write a line if the disk is full


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._events: Any = None

    @classmethod
    def create(cls, path: Path, recipe: Recipe, *, again: bool = False, command: list[str] | None = None) -> RunFolder:
        """Make the folder and write config.json. again: a resumed run, whose earlier config.json is kept beside it."""
        if not again:
            check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if again:
                kept, number = (path / "config.json").read_bytes(), len(list(path.glob("config-*.json"))) + 1
                with_room(path, lambda: write(path / f"config-{number}.json", kept))
            text = json.dumps(
                {"recipe": recipe.as_dict(), "provenance": provenance(command, device=recipe.device)}, indent=2
            )
            with_room(path, lambda: write(path / "config.json", text + "\n"))
        except OSError as error:
            raise UserError(f"cannot write to {path} ({first_line(error)}): give another folder as out=") from error
        return cls(path)

    def resumed(self, batch: int, notes: list[str], *, exact: bool) -> None:
        """Record that the run continues after this many batches. `lines` leaves out the records of later batches, which
        happen again; nothing is deleted but an incomplete last line.
        """
        file = self.path / "metrics.jsonl"
        text = file.read_bytes() if file.exists() else b""
        if text and not text.endswith(b"\n"):
            with file.open("r+b") as open_file:
                open_file.truncate(text.rfind(b"\n") + 1)
        for note in notes:
            self.line("note", text=note)
        if text or batch or RunState.of(self.path).recipes:
            self.line("resumed", batch=batch, exact=exact)

    def text(self, values: dict[str, Any]) -> list[str]:
        """Record which text a run reads; a note if it read another one before it was resumed."""
        before = [line for line in lines(self.path) if line["kind"] == "text"]
        self.line("text", **values)
        if before and before[-1]["sha256"] != values["sha256"]:
            return ["the text is not the one that the run began with: its windows and its results are those of another"]
        return []

    def line(self, kind: str, **values: Any) -> None:
        """Add one line to metrics.jsonl."""
        text = json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n"
        try:
            append(self.path, "metrics.jsonl", text)
        except OSError as error:
            raise _full(self.path, error) from error

    def scalars(self, step: int, **values: float | None) -> None:
        """Add points to the TensorBoard events; `step` counts batches. Points that cannot be written are lost."""
        try:
            if free(self.path) < EVENTS:
                return
            if self._events is None:
                require(["tensorboard"], "they need")
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(str(self.path))
            for name, value in values.items():
                if value is not None:
                    self._events.add_scalar(name.replace("__", "/"), value, step)
        except PackageMissing as error:  # metrics.jsonl has them
            print_once(f"offbeat: no events for TensorBoard: {error}")
        except OSError:  # start another file
            self._events = None

    def model(self, state: dict[str, Any]) -> None:
        """Write the tensors of the model, completely or not at all."""
        from offbeat.checkpoint.parts import save_tensors

        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        try:
            with_room(self.path, lambda: save_tensors(self.path / "model.safetensors", tensors))
        except CheckpointFailed as error:
            raise _full(self.path, error.__cause__ or error) from error

    def close(self) -> None:
        if self._events is not None:
            with suppress(OSError):
                self._events.close()


@dataclass(frozen=True)
class RunState:
    """How often the recipe of a run folder has been written again, and how often the run has been resumed."""

    recipes: int
    resumed: int

    @classmethod
    def of(cls, path: Path) -> RunState:
        file = path / "metrics.jsonl"
        text = file.read_bytes() if file.exists() else b""
        return cls(len(list(path.glob("config-*.json"))), text.count(b'{"kind": "resumed"'))

    def put_back(self, path: Path) -> None:
        """Put back the recipe that the run had, if it could not be resumed with the new one."""
        if RunState.of(path) == RunState(self.recipes + 1, self.resumed):
            with suppress(OSError):
                os.replace(path / f"config-{self.recipes + 1}.json", path / "config.json")


def _full(path: Path, error: BaseException) -> UserError:
    again = "; continue from a checkpoint with resume=" if any(found.checkpoint for found in ls(path)) else ""
    return UserError(f"cannot write to {path} ({first_line(error)}): free some space{again}")


def append(run: Path, name: str, text: str) -> None:
    """Add whole lines to a file of a run, or nothing. If the disk is full, old checkpoints are removed.

    A checkpoint that another process is about to abandon may fill the disk, so that writing is tried again.
    """

    def add() -> None:
        with (run / name).open("ab", buffering=0) as file:
            end, left = file.tell(), memoryview(text.encode())
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(end)
                raise

    for _ in range(RETRIES):
        try:
            return with_room(run, add)
        except OSError as error:
            if not is_full(error):
                raise
        time.sleep(RETRY_SECONDS)
    add()


def write(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all; raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Diagnoses:
    """The lines of diagnosis.jsonl: one per stage and batch, also in a run that was resumed.

    Lines of an earlier process after the first `batches` turns are removed: they are measured again.
    """

    def __init__(self, folder: Path, batches: int) -> None:
        self.file = folder / "diagnosis.jsonl"
        kept = [line for line in whole_lines(self.file, "turn", "stage", "batch") if line["turn"] < batches]
        self.written = {_place(line): _lag_and_changes(line) for line in kept}
        if self.file.exists():
            write(self.file, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Append new lines; a checkpoint may bring back lines that were written before."""
        new = [line for line in lines if _place(line) not in self.written]
        self.written.update({_place(line): _lag_and_changes(line) for line in new})
        if new:
            append(self.file.parent, self.file.name, "".join(json.dumps(line) + "\n" for line in new))

    def summary(self) -> str | None:
        """One line with the share of each stage, if there is one."""
        stages = sorted({stage for stage, _ in self.written})
        shares = [
            share_of_decrease(update for (stage, _), update in self.written.items() if stage == k) for k in stages
        ]
        if all(share is None for share in shares):
            return None
        texts = ", ".join("-" if share is None else f"{100 * share:.0f} %" for share in shares)
        return f"diagnosis: share of the predicted decrease of the loss that stages 1 to {stages[-1]} get: {texts}"


Changes = tuple[float, float] | None  # of the loss by one update: as its late gradients predict, and as fresh ones do


def changes_of(line: dict[str, Any]) -> Changes:
    """The changes in a line of diagnosis.jsonl; None where they are not known, as in older files."""
    predicted, fresh = line.get("predicted_change"), line.get("fresh_change")
    return None if predicted is None or fresh is None else (float(predicted), float(fresh))


def share_of_decrease(updates: Iterable[tuple[float, Changes]]) -> float | None:
    """How much of the decrease of the loss that a stage's late gradients predict it gets, summed over its updates, with
    the lag of each; None if they predict none. Updates before the first late one do not count, if any is late: those of
    a synchronous start get what they predict.

    >>> share_of_decrease([(0, (-2.0, -2.0)), (2, (-0.75, -0.5)), (2, None), (0, (0.25, 0.25))])
    0.5
    """
    given = list(updates)
    counted = list(dropwhile(lambda update: update[0] == 0, given)) or given
    known = [changes for _, changes in counted if changes is not None]
    predicted, fresh = sum(one for one, _ in known), sum(other for _, other in known)
    return fresh / predicted if predicted < 0 else None


def _lag_and_changes(line: dict[str, Any]) -> tuple[float, Changes]:
    return line.get("lag", 0), changes_of(line)


def _place(line: dict[str, Any]) -> tuple[int, int]:
    return line["stage"], line["batch"]


def check_free(path: Path) -> None:
    """Raise UserError if the folder contains a run, or cannot be made."""
    try:
        if (path / "config.json").exists():
            raise FolderTaken(f"{path} already contains a run: give another folder as out=")
        above = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise UserError(f"out={str(path)!r}: {above} is not a writable folder: choose another one")
    except OSError as error:
        raise UserError(
            f"out={str(path)!r}: {error.strerror or first_line(error)}; give another folder as out="
        ) from error


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that hold, as dicts.

    An incomplete last line is left out. What happened between a checkpoint and resuming from it happened twice, and the
    second time counts.
    """
    return standing(whole_lines(path / "metrics.jsonl", "kind"))


def whole_lines(file: Path, *keys: str) -> list[dict[str, Any]]:
    """The lines of a file as dicts, without an incomplete last one; UserError for one that does not have these keys."""
    texts = file.read_text(errors="replace").split("\n")[:-1] if file.exists() else ()
    found = []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not line.keys() >= {*keys}:
                raise ValueError(f"not a record with {', '.join(keys)}")
        except ValueError as error:
            raise UserError(f"{file}, line {number}, is damaged ({first_line(error)}): remove that line") from None
        found.append(line)
    return found


def standing(recorded: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a run that still hold: without those that were undone by resuming from a checkpoint."""
    found: list[dict[str, Any]] = []
    for line in recorded:
        if line["kind"] == "resumed":
            found = [earlier for earlier in found if not _undone(earlier, line["batch"])]
        found.append(line)
    return found


def _undone(line: dict[str, Any], batches: int) -> bool:
    """Whether a line is about something after this many batches."""
    ends = {"train": line.get("batch", -1) + 1, "epoch": line.get("batches", 0), "result": math.inf}
    return ends.get(line["kind"], 0) > batches
