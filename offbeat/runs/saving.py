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
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from offbeat import checkpoint
from offbeat.checkpoint import Checkpoint, CheckpointFailed
from offbeat.core import state as stage_state
from offbeat.core.links import Link, Message
from offbeat.core.stage import Stage
from offbeat.errors import Interrupted, UserError
from offbeat.methods import settings_of
from offbeat.pipeline import Pipeline
from offbeat.runs import transfer
from offbeat.runs.epochs import Epochs
from offbeat.runs.recipe import Recipe, upgraded

# What must not change if the batches in flight are to go on, and what recipes had before they had a choice.
SAME = ("model", "method", "K", "cuts", "units", "seed", "batch_size", "drop_last", "weighting", "precision")
EARLIER = {"precision": "fp32", "drop_last": False, "weighting": "batches"}
RATES = ("lr", "momentum", "weight_decay")
SCHEDULE = ("lr", "epochs", "warmup", "milestones")
RECORDS = 1 << 20  # bytes to keep free for all that is small


@dataclass(frozen=True)
class Every:
    """How often: every so many batches, epochs or seconds.

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
                f"--checkpoint-every {text}: give a number above 0 and b (whole batches), e (epochs), s or "
                "min, such as 500b, 1e or 10min"
            )
        if found[2] == "b":
            return cls(batches=int(amount))
        return cls(epochs=amount) if found[2] == "e" else cls(seconds=amount * (60 if found[2] == "min" else 1))

    def counted(self, batches: int, epochs: Epochs) -> bool:
        """Whether one is due after so many batches, by a count that every process knows.

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
    """Refuse a schedule that makes no sense."""
    every = Every.of(recipe.checkpoint_every)
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
        """apart: stages whose processes do not see the folder."""
        self.recipe, self.epochs, self.pipe, self.folder, self.note = recipe, epochs, pipe, folder, note
        self.every = Every.of(recipe.checkpoint_every)
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
        return self.every.counted(batches, self.epochs)

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
            self.pending[t] = Pending(
                folder, mode, {**run, "batches": t, "recipe": self.recipe.as_dict(), "epochs": self.epochs.as_dict()}
            )
            for k, writer in self.writers.items():
                self.pending[t].coming[k] = writer.submit(transfer.receive_part, self.links[k], folder, k)
            self._hear(t, told)
        else:
            for k in self.pipe.stages:
                self.links[k].send(Message(t, told))
        if stop:
            self.close()
            raise Interrupted(
                f"stopped by {stop} behind batch {t - 1}, with a checkpoint: go on with "
                f"'offbeat train --resume {self.folder}'"
            )

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
                pending.folder,
                pending.facts,
                t=t,
                mode=pending.mode,
                K=self.pipe.K,
                method=self.pipe.method.name,
                run=pending.run,
            )
            checkpoint.prune(self.folder, self.recipe.keep)
            early = checkpoint.make_room(self.folder, needed=made.size + self.model_bytes + RECORDS)
        except CheckpointFailed as error:
            self.note("checkpoint failed", batch=t, reason=str(error))
        else:
            self.saved = t
            self.note("checkpoint", batch=t, bytes=made.size, pause=pending.pause, mode=made.mode)
            if early and not self.short:
                self.short = True
                self.note(
                    "disk nearly full",
                    batch=t,
                    reason=f"no room for {self.recipe.keep} checkpoints, the next "
                    "one and the model: the oldest are removed early",
                )


def exact(recipe: Recipe, saved: dict[str, Any]) -> bool:
    """Whether a run of this recipe can go on with the batches that were in flight."""
    now, before = recipe.as_dict(), {**EARLIER, **upgraded(saved)}
    if any(_listed(now[name]) != _listed(before.get(name)) for name in SAME):
        return False
    defaults = {name: setting.default for name, setting in settings_of(recipe.method).items()}
    return {**defaults, **recipe.settings} == {**defaults, **before["settings"]}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def continued(recipe: Recipe, samples: int, run: dict[str, Any]) -> Epochs:
    """The epochs of a run of this recipe that goes on from a checkpoint with this run.json; {}: from the beginning."""
    new = recipe.count(samples)
    if not run:
        return new
    before = {"samples": samples, "batch_size": run["recipe"]["batch_size"], **run.get("epochs", {})}
    epochs = Epochs(**before).continued(run["batches"], new)
    if epochs.position(run["batches"]) > (recipe.epochs, 0):
        done = epochs.progress(run["batches"]) / epochs.per_epoch
        raise UserError(f"epochs = {recipe.epochs}, but the checkpoint was made after {done:.4g}: give more epochs")
    return epochs


def restore(pipe: Pipeline, recipe: Recipe, path: str, saved: dict[str, Any], *, same: bool) -> list[str]:
    """Put this process's stages into the state of a checkpoint of the recipe `saved`; notes on what was lost."""
    made = checkpoint.read(Path(path))
    if same:
        pipe.load({k: made.stage(k) for k in pipe.stages}, batches=made.t)
        for stage in pipe.stages.values():
            change_rates(stage, recipe, saved)
        return []
    parts = [made.stage(k)["stage"] for k in range(1, made.K + 1)]
    updates = made.t // recipe.M
    if upgraded(saved)["settings"]["M"] == recipe.M:  # drains on the way have ended windows early
        updates = max(part["counters"]["update_index"] for part in parts)
    merged = merge(parts)
    heads = heads_by_cut(parts, saved)
    for stage in pipe.stages.values():
        stage_state.load_model(stage, merged["model"], merged["optimizer"], merged["corrections"])
        stage_state.load_head(stage, heads.get(_end(recipe.as_dict(), stage.k)))
        stage.resume_schedule(updates)
    pipe.batches = made.t
    return [*_lost_batches(parts), *_lost_heads(pipe, heads, recipe, parts), *_new_rate(recipe, saved)]


def merge(parts: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The whole model of a checkpoint by name, with what optimizers and correctors remember of it. Heads are left out:
    several stages have one, under the same names."""
    merged: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "corrections": {}}
    for part in parts:
        for kind, values in merged.items():
            values.update({name: value for name, value in part[kind].items() if name in part["model"]})
    return merged


def _end(recipe: Mapping[str, Any], k: int) -> tuple[Any, ...]:
    """Where stage k ends: what its head is fitted to."""
    return (recipe["model"], recipe["method"], recipe["units"], *list(recipe["cuts"])[k - 1 : k])


def heads_by_cut(parts: list[dict[str, Any]], saved: Mapping[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The stages of a checkpoint that have a head, by where they end."""
    return {_end(saved, part["k"]): part for part in parts if part["head"] is not None}


def _lost_batches(parts: list[dict[str, Any]]) -> list[str]:
    lost = sorted({entry["t"] for part in parts for entry in part["in_flight"]})
    return [f"{len(lost)} batches that were in flight ({lost[0]} to {lost[-1]}) are lost to the change"] if lost else []


def _lost_heads(
    pipe: Pipeline, heads: Mapping[tuple[Any, ...], Any], recipe: Recipe, parts: list[dict[str, Any]]
) -> list[str]:
    """Heads that start anew, of all stages, and trained ones that no stage has a place for."""
    wanted = {_end(recipe.as_dict(), k): k for k in range(1, pipe.K)} if pipe.method.head else {}
    new = [str(k) for end, k in wanted.items() if end not in heads]
    gone = [str(part["k"]) for end, part in heads.items() if end not in wanted]
    notes = []
    if new:
        notes.append(f"the heads of stages {', '.join(new)} start anew: the checkpoint has no such heads at their cuts")
    if gone:
        notes.append(f"the heads of stages {', '.join(gone)} of the checkpoint are not used")
    return notes


def _new_rate(recipe: Recipe, saved: Mapping[str, Any]) -> list[str]:
    return [f"the learning rate is {recipe.lr:g}, it was {saved['lr']:g}"] if recipe.lr != saved["lr"] else []


def change_rates(stage: Stage, recipe: Recipe, saved: dict[str, Any]) -> None:
    """Rate, momentum, weight decay and schedule of the recipe, from the next update on."""
    changed = [name for name in {*RATES, *SCHEDULE} if _listed(getattr(recipe, name)) != _listed(saved[name])]
    optimizer, scheduler = stage.optimization.optimizer, stage.optimization.scheduler
    if optimizer is None or not changed:
        return
    for group in optimizer.param_groups:
        group.update(initial_lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    if scheduler:
        scheduler.base_lrs = [recipe.lr for _ in scheduler.base_lrs]
    stage.resume_schedule(stage.update_index)


def find(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint of a run, after clearing away what was left unfinished."""
    checkpoint.clean(run)
    return checkpoint.newest(run)
