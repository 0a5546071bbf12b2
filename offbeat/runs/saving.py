"""Checkpoints of a run: when they are due, and how all stages save after the same batch.

Counts of batches and epochs are known to every process. Clock time and Ctrl-C are not: there the first stage decides,
and sends a mark ahead of a batch, early enough that every stage can keep the weights of its batches in flight.

    first stage   ... F6 [save at 12] F7 ...            F11 | save |  F12
    last stage    ...          F6 [save at 12] F7 ...       F11 | save |  F12

Each process writes its own parts and reports to the first, which completes the checkpoint once all have reported. No
process waits for another, unless the run stops there. A process that does not see the run folder sends its parts to the
first, which writes them in a thread (see transfer.py).
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

from offbeat import checkpoint
from offbeat.checkpoint import CheckpointFailed
from offbeat.core.links import Link, Message
from offbeat.errors import Interrupted, UserError
from offbeat.pipeline import Pipeline
from offbeat.runs import transfer
from offbeat.runs.epochs import Epochs
from offbeat.runs.recipe import Recipe

RECORDS = 1 << 20  # bytes to keep free for records
ROOM = 5  # sizes of the model to keep free before a checkpoint at the end: its parts, and the model itself
UNASKED = 600.0  # seconds between checkpoints of a run in several processes without an interval
LARGEST_SHARE = 0.01  # of the time of a run that such checkpoints may take
REASONS = ("", "Ctrl-C", "SIGTERM")  # why a run stops at a checkpoint, as replicas send it; "": it does not stop


@dataclass(frozen=True)
class Every:
    """An interval of checkpoints, in batches, epochs or seconds.

    >>> Every.of("500b"), Every.of("0.5e"), Every.of("10min").seconds
    (Every(batches=500, epochs=None, seconds=None), Every(batches=None, epochs=0.5, seconds=None), 600.0)
    """

    batches: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, text: str | None) -> Every:
        if text is None:
            return cls()
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(b|e|s|min)", text.strip())
        amount = float(found[1]) if found else 0.0
        if not found or amount <= 0 or (found[2] == "b" and not amount.is_integer()):
            raise UserError(
                f"checkpoint_every={text!r}: use a number above 0 and a unit: b (an integer of batches), e (epochs), "
                "s or min, such as 500b, 1e or 10min"
            )
        if found[2] == "b":
            return cls(batches=int(amount))
        return cls(epochs=amount) if found[2] == "e" else cls(seconds=amount * (60 if found[2] == "min" else 1))

    def counted(self, batches: int, epochs: Epochs) -> bool:
        """Whether a checkpoint is due after this many batches, by a count that every process knows.

        >>> epochs = Epochs(samples=10, batch_size=1)
        >>> [n for n in range(1, 31) if Every.of("1.5e").counted(n, epochs)]
        [15, 30]
        """
        if self.batches is not None:
            return batches % self.batches == 0
        if self.epochs is None:
            return False
        interval = max(1, round(self.epochs * epochs.per_epoch))
        return epochs.progress(batches) // interval > epochs.progress(batches - 1) // interval


def check(recipe: Recipe) -> None:
    """Raise UserError for an interval that is not possible."""
    every = Every.of(recipe.checkpoint_every)
    if every.seconds is not None and recipe.checkpoint_mode == "drained":
        raise UserError(
            f"checkpoint_every={recipe.checkpoint_every!r} with checkpoint_mode='drained': draining changes results, "
            "so its time must be reproducible: use batches (500b) or epochs (1e)"
        )
    if recipe.checkpoint_every is not None and recipe.keep == 0:
        raise UserError(
            f"keep=0 with checkpoint_every={recipe.checkpoint_every!r}: use keep=1 or more, or leave one out"
        )


@dataclass
class Pending:
    """A checkpoint whose parts are being written."""

    folder: Path | None  # None if it could not be made
    mode: str
    run: dict[str, Any]
    facts: list[Any] = field(default_factory=list)
    heard: list[Link] = field(default_factory=list)  # from other processes that have reported
    coming: dict[int, Future[dict[str, Any]]] = field(default_factory=dict)  # parts that other processes send
    failed: str | None = None
    pause: float = 0.0


class Saver:
    """The checkpoints of one run, in one process."""

    def __init__(
        self,
        recipe: Recipe,
        epochs: Epochs,
        pipe: Pipeline,
        folder: Path,
        note: Callable[..., None],
        *,
        apart: Collection[int] = (),
    ) -> None:
        """apart: processes that do not see the folder, from 1 in the order of stages and replicas."""
        self.recipe, self.epochs, self.pipe, self.folder, self.note = recipe, epochs, pipe, folder, note
        self.every = Every.of(recipe.checkpoint_every)
        self.began = time.monotonic()
        self.requested: int | None = None  # batches after which a mark in flight asks to save
        self.stop_reason = ""
        self.saved: int | None = None  # batches before the newest checkpoint that is complete
        self.failed = ""  # why the newest one that failed did
        self.begun: int | None = None  # batches before the newest checkpoint that this process has written parts of
        self.pending: dict[int, Pending] = {}
        self.model_bytes = sum(tensor.nbytes for part in pipe.parts for tensor in part.state_dict().values())
        self.disk_full = False  # whether checkpoints were removed for lack of space
        self.links = self._links()
        self.unasked = recipe.checkpoint_every is None and recipe.keep > 0 and bool(self.links)
        if self.unasked:  # a process that is lost must not end with all training lost
            self.every = Every(seconds=UNASKED)
        self.apart = apart
        self.writers = {number: ThreadPoolExecutor(1, f"offbeat-part-{number}") for number in apart if pipe.leads}
        self.window_sum = pipe.workers[0].window_sum if len(pipe.engine.replicas_here) < pipe.replicas else None
        self.notice = pipe.method.notice(pipe.K)
        if any(self._counted(batches) for batches in range(pipe.batches + 1, pipe.batches + self.notice + 1)):
            pipe.keep()

    def _links(self) -> dict[int, Link]:
        """From other processes to the first; by number, from 1 in the order of stages and replicas."""
        pipe, found = self.pipe, {}
        for number in range(2, pipe.K * pipe.replicas + 1):
            replica, k = divmod(number - 1, pipe.K)
            if pipe.leads and replica in pipe.engine.replicas_here and k + 1 in pipe.stages:
                continue
            link = pipe.engine.link("checkpoint", k + 1, 1, capacity=16, patient=True, from_replica=replica)
            if link is not None:
                found[number] = link
        return found

    def _part(self, number: int) -> str:
        """The name of the part of a process."""
        replica, k = divmod(number - 1, self.pipe.K)
        return checkpoint.part_name(k + 1, replica)

    def _counted(self, batches: int) -> bool:
        return self.every.counted(batches, self.epochs)

    def stop(self, why: str) -> None:
        """Save as soon as possible, then stop the run."""
        self.stop_reason = why

    def before(self, t: int) -> None:
        """Before batch t: start keeping what the next checkpoint needs, or send a mark that asks all stages to save."""
        if self._counted(t + self.notice):
            self.pipe.keep()
        overdue = self.every.seconds is not None and time.monotonic() - self.began >= self.every.seconds
        wanted = self.pipe.leads and self.requested is None and (overdue or bool(self.stop_reason))
        reason = self._of_replicas(wanted) if self.window_sum else self.stop_reason if wanted else None
        if self.pipe.first and self.requested is None and reason is not None:
            self.requested = t + self.pipe.method.reach(self.pipe.K, t) + self.notice
            self.pipe.mark(self.requested, stop=reason)
            self.stop_reason = ""

    def _of_replicas(self, wanted: bool) -> str | None:
        """Why to save, or an empty text, if the first replica wants to: with its next window the request reaches all
        replicas ahead of the same batch."""
        assert self.window_sum is not None
        if wanted:
            self.window_sum.request = REASONS.index(self.stop_reason) + 1
        number, self.window_sum.requested = self.window_sum.requested, 0
        return REASONS[number - 1] if number else None

    def due(self, batches: int) -> bool:
        """Whether to save after this many batches."""
        return self._counted(batches) or batches in self.pipe.marks

    def save(self, run: dict[str, Any]) -> None:
        """Write the parts of this process, and run.json; raises Interrupted if the run stops here."""
        t, began = self.pipe.batches, time.perf_counter()
        self.begun = t
        stop = self.pipe.marks.pop(t, "")
        if self.recipe.checkpoint_mode == "drained" and self._counted(t):
            self.pipe.drain()
        self.requested, self.began = None if t == self.requested else self.requested, time.monotonic()
        report: dict[str, Any] = {"facts": [], "failed": None}
        folder = None
        try:
            near = any(self.due(batches) for batches in range(t + 1, t + self.notice + 1))
            for number, tree in self.pipe.stage_states(keep_on=near).items():
                if number in self.apart:
                    made = transfer.send_part(self.links[number], t, self._part(number), tree)
                else:
                    folder = checkpoint.begin(self.folder, t)
                    write = partial(checkpoint.write_part, folder, self._part(number), tree)
                    made = checkpoint.with_room(self.folder, write)
                report["facts"] += [facts.as_dict() for facts in made]
        except UserError as error:  # CheckpointFailed, or a state that cannot be written down
            report["failed"] = str(error)
        report["pause"] = time.perf_counter() - began
        if self.pipe.leads:
            mode = "in-flight" if any(stage.in_flight for stage in self.pipe.stages.values()) else "drained"
            self.pending[t] = Pending(
                folder, mode, {**run, "batches": t, "recipe": self.recipe.as_dict(), "epochs": self.epochs.as_dict()}
            )
            for number, writer in self.writers.items():
                receive = partial(transfer.receive_part, self.links[number], folder, self._part(number))
                self.pending[t].coming[number] = writer.submit(receive)
            self._add(t, report)
        else:
            for link in self.links.values():
                link.send(Message(t, report))
        if stop:
            self.close()
            saved = self.pipe.engine.share(self._saved(t) if self.pipe.leads else None, 1)
            raise Interrupted(f"stopped by {stop} after batch {t - 1}, {saved}")

    def _saved(self, t: int) -> str:
        """Which checkpoint there is after a stop after t batches."""
        again = f"continue with resume={str(self.folder)!r}"
        if self.saved == t:
            return f"with a checkpoint: {again}"
        earlier = [found.checkpoint.t for found in checkpoint.ls(self.folder) if found.checkpoint]
        there = f"{again}, after batch {earlier[-1] - 1}" if earlier else "there is no earlier one"
        return f"and its checkpoint failed ({self.failed}): {there}"

    def save_end(self, run: dict[str, Any]) -> None:
        """Write a checkpoint of the drained pipeline at the end of a run without intervals, so that it can be extended;
        unless keep=0, or the disk may not have room for it and the model."""
        if self.recipe.checkpoint_every is not None or self.recipe.keep == 0 or self.begun == self.pipe.batches:
            return
        needed, free = ROOM * self.model_bytes + RECORDS, checkpoint.free(self.folder) if self.pipe.leads else 0
        if self.pipe.engine.share(free >= needed, 1):
            self.save(run)
        elif self.pipe.leads:
            self.note("no checkpoint at the end", batch=self.pipe.batches, free=free, needed=needed)

    def collect(self, *, wait: bool = False) -> None:
        """Complete the checkpoints of which all stages have reported; with wait=True, wait for all."""
        if not self.pipe.leads:
            return
        for k, link in self.links.items():  # each stage reports each checkpoint once, in order
            if k in self.apart:
                self._collect_sent(k, wait=wait)
                continue
            while any(link not in pending.heard for pending in self.pending.values()) and (wait or link.ready()):
                message = link.receive()
                self.pending[message.t].heard.append(link)
                self._add(message.t, message.content)

    def _collect_sent(self, k: int, *, wait: bool) -> None:
        for t, pending in list(self.pending.items()):
            if k in pending.coming and (wait or pending.coming[k].done()):
                report = pending.coming.pop(k).result()
                pending.heard.append(self.links[k])
                self._add(t, report)

    def close(self) -> None:
        """Complete all checkpoints; waits until all processes have saved."""
        self.pipe.engine.barrier()
        self.collect(wait=True)
        self.pipe.engine.barrier()
        for writer in self.writers.values():
            writer.shutdown()

    def _add(self, t: int, report: dict[str, Any]) -> None:
        pending = self.pending[t]
        pending.facts += report["facts"]
        pending.failed = pending.failed or report["failed"]
        pending.pause = max(pending.pause, report["pause"])
        if len(pending.heard) == len(self.links):
            self._finish(t, self.pending.pop(t))

    def _finish(self, t: int, pending: Pending) -> None:
        """Rename the folder to its final name, or note why it failed; training continues in either case."""
        try:
            if pending.folder is None or pending.failed:
                if pending.folder is not None:
                    checkpoint.abandon(pending.folder)
                raise CheckpointFailed(pending.failed or "no folder for it could be made")
            checkpoint.make_room(self.folder, needed=RECORDS)
            made = checkpoint.finish(
                pending.folder,
                pending.facts,
                t=t,
                mode=pending.mode,
                K=self.pipe.K,
                replicas=self.pipe.replicas,
                method=self.pipe.method.name,
                run=pending.run,
            )
            checkpoint.prune(self.folder, max(1, self.recipe.keep))
            early = checkpoint.make_room(self.folder, needed=made.size + self.model_bytes + RECORDS)
        except CheckpointFailed as error:
            self.failed = str(error)
            self.note("checkpoint failed", batch=t, reason=str(error))
        else:
            self.saved = t
            if self.unasked:
                self.every = Every(seconds=max(UNASKED, pending.pause / LARGEST_SHARE))
            self.note("checkpoint", batch=t, bytes=made.size, pause=pending.pause, mode=made.mode)
            if early and not self.disk_full:
                self.disk_full = True
                self.note(
                    "disk nearly full",
                    batch=t,
                    reason=f"not enough space for {self.recipe.keep} checkpoints, the next "
                    "one and the model: the oldest are removed early",
                )
