"""Checkpoints of a run: when they are due, how all stages take one at the same batch, and how a run goes on from one.

Counts of batches and epochs are known to every process. Clock time and Ctrl-C are not: there the first stage decides,
and sends a mark ahead of a batch, far enough before the one to save at that every stage can keep what it needs.

    first stage   ... F6 [save at 12] F7 ...            F11 | save |  F12
    last stage    ...          F6 [save at 12] F7 ...       F11 | save |  F12

Each process writes its own parts and tells the first, which finishes the checkpoint once it has heard of all. Nobody
waits for anybody, unless the run stops there. A process that does not see the run folder sends its parts to the first,
which writes them in a thread (see transfer.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from offbeat import checkpoint, transfer
from offbeat.checkpoint import Checkpoint, CheckpointFailed
from offbeat.errors import Interrupted, UserError
from offbeat.links import Link, Message
from offbeat.pipeline import Pipeline
from offbeat.recipe import ANSWERS, Recipe
from offbeat.stage import Stage
from offbeat.stage import state as stage_state

SAME = ("model", "method", "K", "cuts", "units", "seed", "batch_size", "precision", *ANSWERS)  # batches in flight do
RATES = ("lr", "momentum", "weight_decay")
RECORDS = 1 << 20  # bytes to keep free for all that is small


@dataclass(frozen=True)
class Every:
    """How often: after so many batches, or after so many seconds."""

    batches: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, text: str | None, batches_an_epoch: int) -> Every:
        """
        >>> Every.of("500b", 100), Every.of("0.5e", 100), Every.of("10min", 100)
        (Every(batches=500, seconds=None), Every(batches=50, seconds=None), Every(batches=None, seconds=600.0))
        """
        if text is None:
            return cls()
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(b|e|s|min)", text.strip())
        amount = float(found[1]) if found else 0.0
        if not found or amount <= 0 or (found[2] == "b" and not amount.is_integer()):
            raise UserError(f"--checkpoint-every {text}: give a number above 0 and b (whole batches), e (epochs), s or "
                            "min, such as 500b, 1e or 10min")  # fmt: skip
        if found[2] in ("b", "e"):
            return cls(batches=max(1, round(amount * (batches_an_epoch if found[2] == "e" else 1))))
        return cls(seconds=amount * (60 if found[2] == "min" else 1))


def check(recipe: Recipe, batches_an_epoch: int) -> None:
    """Refuse a schedule that makes no sense."""
    every = Every.of(recipe.checkpoint_every, batches_an_epoch)
    if every.seconds is not None and recipe.checkpoint_mode == "drained":
        raise UserError(
            f"--checkpoint-every {recipe.checkpoint_every} with --checkpoint-mode drained, which changes the numbers "
            "and must be repeatable: count in batches or epochs"
        )


@dataclass
class Pending:
    """A checkpoint whose parts are being written."""

    folder: Path | None  # None where not even that could be made
    mode: str
    run: dict[str, Any]
    facts: list[Any] = field(default_factory=list)
    heard: list[Link] = field(default_factory=list)  # of the stages elsewhere that have told
    coming: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)  # parts that stages send, being written
    failed: str | None = None
    pause: float = 0.0


class Saver:
    """The checkpoints of one run, in one process."""

    def __init__(self, recipe: Recipe, batches_an_epoch: int, pipe: Pipeline, folder: Path,
                 note: Callable[..., None], *, apart: Collection[int] = ()) -> None:  # fmt: skip
        """apart: stages whose processes do not see the folder."""
        self.recipe, self.pipe, self.folder, self.note = recipe, pipe, folder, note
        self.every = Every.of(recipe.checkpoint_every, batches_an_epoch)
        self.began = time.monotonic()
        self.requested: int | None = None  # a mark is under way for this batch
        self.stop_wanted = ""  # why
        self.saved: int | None = None  # batches behind which the newest checkpoint of this process was made
        self.pending: dict[int, Pending] = {}
        self.model_bytes = sum(tensor.nbytes for tensor in pipe.model.state_dict().values())
        self.short = False  # whether checkpoints were removed for lack of space
        self.links: dict[int, Link] = {}  # from stages to the first process, where they are not in it
        for k in range(2, pipe.K + 1):
            if pipe.first and k in pipe.stages:
                continue
            link = pipe.engine.link("checkpoint", k, 1, capacity=16, patient=True)
            if link is not None:
                self.links[k] = link
        self.apart = apart
        self.writers = {k: ThreadPoolExecutor(1, f"offbeat-part-{k}") for k in apart if pipe.first}
        self.ahead = max(pipe.method.lag(k, pipe.K) for k in range(1, pipe.K + 1)) + 2
        if pipe.method.order:  # stages that run freely may be long without a message from below
            self.ahead += 16 * pipe.K
        if any(self._counted(batches) for batches in range(pipe.batches + 1, pipe.batches + self.ahead + 1)):
            pipe.keep()

    def _counted(self, batches: int) -> bool:
        return self.every.batches is not None and batches % self.every.batches == 0

    def stop(self, why: str) -> None:
        """Save as soon as may be, then end the run."""
        self.stop_wanted = why

    def before(self, t: int) -> None:
        """Ahead of batch t: start to keep what the next checkpoint needs, or ask all stages for one."""
        if self._counted(t + self.ahead):
            self.pipe.keep()
        overdue = self.every.seconds is not None and time.monotonic() - self.began >= self.every.seconds
        if self.pipe.first and self.requested is None and (overdue or self.stop_wanted):
            self.requested = t + self.ahead
            self.pipe.mark(self.requested, stop=self.stop_wanted)
            self.stop_wanted = ""

    def due(self, batches: int) -> bool:
        """Whether to save behind that many batches."""
        return self._counted(batches) or batches in self.pipe.marks

    def save(self, run: dict[str, Any]) -> None:
        """Write this process's parts, and what belongs to the run; raises Interrupted where the run stops here."""
        t, began = self.pipe.batches, time.perf_counter()
        stop = self.pipe.marks.pop(t, "")
        if self.recipe.checkpoint_mode == "drained" and self._counted(t):
            self.pipe.drain()
        self.requested, self.began = None if t == self.requested else self.requested, time.monotonic()
        told: dict[str, Any] = {"facts": [], "failed": None}
        folder = None
        try:
            near = any(self.due(batches) for batches in range(t + 1, t + self.ahead + 1))
            for k, tree in self.pipe.state(keep_on=near).items():
                if k in self.apart:
                    made = transfer.send_part(self.links[k], t, k, tree)
                else:
                    folder = checkpoint.begin(self.folder, t)
                    write = partial(checkpoint.write_part, folder, checkpoint.part_name(k), tree)
                    made = checkpoint.with_room(self.folder, write)
                told["facts"] += [facts.as_dict() for facts in made]
        except UserError as error:  # CheckpointFailed, or a state that cannot be written down
            told["failed"] = str(error)
        told["pause"] = time.perf_counter() - began
        if self.pipe.first:
            mode = "in-flight" if any(stage.in_flight for stage in self.pipe.stages.values()) else "drained"
            self.pending[t] = Pending(folder, mode, {**run, "batches": t, "recipe": self.recipe.as_dict()})
            for k, writer in self.writers.items():
                self.pending[t].coming[k] = writer.submit(transfer.receive_part, self.links[k], folder, k)
            self._hear(t, told)
        else:
            for k in self.pipe.stages:
                self.links[k].send(Message(t, told))
        if stop:
            self.close()
            raise Interrupted(f"stopped by {stop} behind batch {t - 1}, with a checkpoint: go on with "
                              f"'offbeat train --resume {self.folder}'")  # fmt: skip

    def collect(self, *, wait: bool = False) -> None:
        """Finish the checkpoints of which all stages have told; with wait=True all that are pending."""
        if not self.pipe.first:
            return
        for k, link in self.links.items():  # each stage tells once of each checkpoint, in order
            if k in self.apart:
                self._collect_sent(k, wait=wait)
                continue
            while any(link not in pending.heard for pending in self.pending.values()) and (wait or link.ready()):
                message = link.receive()
                self.pending[message.t].heard.append(link)
                self._hear(message.t, message.content)

    def _collect_sent(self, k: int, *, wait: bool) -> None:
        for t, pending in list(self.pending.items()):
            if k in pending.coming and (wait or pending.coming[k].done()):
                told = pending.coming.pop(k).result()
                pending.heard.append(self.links[k])
                self._hear(t, told)

    def close(self) -> None:
        """Finish what is pending; nobody leaves before all have saved."""
        self.pipe.engine.barrier()
        self.collect(wait=True)
        self.pipe.engine.barrier()
        for writer in self.writers.values():
            writer.shutdown()

    def _hear(self, t: int, told: dict[str, Any]) -> None:
        pending = self.pending[t]
        pending.facts += told["facts"]
        pending.failed = pending.failed or told["failed"]
        pending.pause = max(pending.pause, told["pause"])
        if len(pending.heard) == len(self.links):
            self._finish(t, self.pending.pop(t))

    def _finish(self, t: int, pending: Pending) -> None:
        """Give it its name, or say why there is none; training goes on either way."""
        try:
            if pending.folder is None or pending.failed:
                if pending.folder is not None:
                    checkpoint.abandon(pending.folder)
                raise CheckpointFailed(pending.failed or "no folder for it could be made")
            checkpoint.make_room(self.folder, needed=RECORDS)
            made = checkpoint.finish(
                pending.folder, pending.facts, t=t, mode=pending.mode, K=self.pipe.K,
                method=self.pipe.method.name, run=pending.run,
            )  # fmt: skip
            checkpoint.prune(self.folder, self.recipe.keep)
            early = checkpoint.make_room(self.folder, needed=made.size + self.model_bytes + RECORDS)
        except CheckpointFailed as error:
            self.note("checkpoint failed", batch=t, reason=str(error))
        else:
            self.saved = t
            self.note("checkpoint", batch=t, bytes=made.size, pause=pending.pause, mode=made.mode)
            if early and not self.short:
                self.short = True
                self.note("disk nearly full", batch=t, reason=f"no room for {self.recipe.keep} checkpoints, the next "
                          "one and the model: the oldest are removed early")  # fmt: skip


def exact(recipe: Recipe, saved: dict[str, Any]) -> bool:
    """Whether a run of this recipe can go on with the batches that were in flight."""
    now = recipe.as_dict()
    before = {"precision": "fp32", **saved}  # there was no other once
    return all(_listed(now[name]) == _listed(before.get(name)) for name in SAME)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def restore(pipe: Pipeline, recipe: Recipe, path: str, saved: dict[str, Any], *, same: bool) -> list[str]:
    """Put this process's stages into the state of a checkpoint of the recipe `saved`; what was lost on the way."""
    made = checkpoint.read(Path(path))
    if same:
        pipe.load({k: made.stage(k) for k in pipe.stages}, batches=made.t)
        for stage in pipe.stages.values():
            change_rates(stage, recipe, saved)
        return []
    parts = [made.stage(k)["stage"] for k in range(1, made.K + 1)]
    updates = made.t // recipe.M
    if saved["M"] == recipe.M:  # drains on the way have ended windows early
        updates = max(part["counters"]["update_index"] for part in parts)
    merged: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "corrections": {}}
    for part in parts:
        for kind, values in merged.items():
            values.update(part[kind])
    for stage in pipe.stages.values():
        stage_state.load_model(stage, merged["model"], merged["optimizer"], merged["corrections"])
        stage.resume_schedule(updates)
    pipe.batches = made.t
    lost = sorted({entry["t"] for part in parts for entry in part["in_flight"]})
    if not lost:
        return []
    return [f"{len(lost)} batches that were in flight ({lost[0]} to {lost[-1]}) are lost to the change"]


def change_rates(stage: Stage, recipe: Recipe, saved: dict[str, Any]) -> None:
    """Rate, momentum and weight decay of the recipe, where they are not those that were saved."""
    if stage.optimizer is None or all(getattr(recipe, name) == saved[name] for name in RATES):
        return
    for group in stage.optimizer.param_groups:
        group["lr"] = recipe.lr * (group["lr"] / saved["lr"]) if saved["lr"] else recipe.lr
        group.update(initial_lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    if stage.scheduler:
        stage.scheduler.base_lrs = [recipe.lr for _ in stage.scheduler.base_lrs]


def find(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint of a run, after clearing away what was left unfinished."""
    checkpoint.clean(run)
    return checkpoint.newest(run)

