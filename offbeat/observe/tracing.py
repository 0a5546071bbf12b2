"""What every stage does, and when: its operations by a common clock, in a file that Perfetto and Chrome can show.

    pipe.trace(200, "trace.json")     200 local iterations of every stage, from when all of them are full

    forward, backward, update    the stage's own work
    send                         handing over a message (its transfer takes no time of a stage)
    wait                         from the request for a message until it is received; "there": only unpacked
    drain                        where the pipeline is drained before the recording is complete, which ends it

A stage is idle while it does no work, which is not only waiting: also while data are read. The time of evaluations is
not counted.

To record, the links and stages of the workers are replaced by ones that also take the time. On one GPU the time is that
of the device, by an event before and after each operation, so nothing waits for it; but there all stages are launched
together (graphs/ticks.py), and during a recording each operation is launched by itself, one after the other: it
measures how long each of them takes, not how they overlap.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.core.links import Link, Message
from offbeat.core.worker import Actor, Links, Worker
from offbeat.engines import Engine
from offbeat.errors import UserError, first_line, warn_caller
from offbeat.method import Method
from offbeat.observe.clock_offset import ClockOffset, clock_offsets
from offbeat.timeline import MOST_TURNS

KINDS = ("forward", "backward", "update", "send", "wait", "drain")
FORWARD, BACKWARD, UPDATE, SEND, WAIT, DRAIN = range(len(KINDS))
NOBODY = -1  # the batch of an event that belongs to none

Notify = Callable[[str], None]


class Watch(Protocol):
    """A clock: `now` takes a mark, which is read later."""

    def now(self) -> Any:
        """The time at which the work queued before the mark is done."""

    def read(self, mark: Any) -> int:
        """A mark in nanoseconds of `time.perf_counter_ns`."""


class HostWatch:
    """For work that is done when it returns."""

    now = staticmethod(time.perf_counter_ns)

    def read(self, mark: int) -> int:
        return mark


class DeviceWatch:
    """For work on the streams of a GPU: events on whichever is current, read against one whose time the host knows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.synchronize(device)
        self.base = self.now()
        self.base.synchronize()
        self.at = time.perf_counter_ns()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def read(self, mark: torch.cuda.Event) -> int:
        mark.synchronize()
        return self.at + round(1e6 * self.base.elapsed_time(mark))


class EventRecorder:
    """The events of one stage: kind, batch (or update), begin, end, and one more number."""

    def __init__(self, watch: Watch) -> None:
        self.now, self.read = watch.now, watch.read
        self.events: list[tuple[int, int, Any, Any, int]] = []

    def add(self, kind: int, number: int, begin: Any, more: int = 0) -> None:
        """An event that ends now."""
        self.events.append((kind, number, begin, self.now(), more))

    def rows(self) -> Tensor:
        """All events in nanoseconds, one row each."""
        rows = [(kind, n, self.read(begin), self.read(end), more) for kind, n, begin, end, more in self.events]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)


class TracedStage:
    """A stage whose operations are recorded; each is launched by itself, where a turn would be launched as a whole."""

    def __init__(self, worker: Worker, recorder: EventRecorder) -> None:
        self.actor, self.stage, self.recorder = worker.actor, worker.stage, recorder

    def forward(self, t: int, x: Any, target: Any, share: float = 1.0) -> Any:
        begin = self.recorder.now()
        output = self.actor.forward(t, x, target, share)
        self.stage.launcher.flush()
        self.recorder.add(FORWARD, t, begin)
        return output

    def backward(self, t: int, gradients: list[Tensor | None] | None) -> list[Tensor | None]:
        begin = self.recorder.now()
        below = self.actor.backward(t, gradients)
        self.stage.launcher.flush()
        self.recorder.add(BACKWARD, t, begin)
        return below

    def update(self, over: int) -> None:
        window, s = self.stage.window.batches, self.stage.update_index
        newest = window[-1] if window else NOBODY
        begin = self.recorder.now()
        self.actor.update(over)
        self.stage.launcher.flush()
        self.recorder.add(UPDATE, s, begin, newest)

    def teach(self, t: int, gradients: list[Tensor | None]) -> None:
        begin = self.recorder.now()
        self.actor.teach(t, gradients)
        self.recorder.add(UPDATE, self.stage.update_index, begin, t)  # of the synthesiser


class TracedLink:
    """A link whose messages are recorded, each once; marks between batches are not."""

    def __init__(self, link: Link, recorder: EventRecorder) -> None:
        self.link, self.recorder = link, recorder
        self.ready, self.close = link.ready, link.close
        self.peeked = False

    def send(self, message: Message) -> None:
        begin = self.recorder.now()
        self.link.send(message)
        if message.kind == "batch":
            self.recorder.add(SEND, message.t, begin)

    def peek(self) -> Message:
        return self.link.peek() if self.peeked else self._recorded(self.link.peek, peeked=True)

    def receive(self) -> Message:
        if self.peeked:
            self.peeked = False
            return self.link.receive()
        return self._recorded(self.link.receive, peeked=False)

    def _recorded(self, take: Callable[[], Message], *, peeked: bool) -> Message:
        begin, there = self.recorder.now(), self.link.ready()
        message = take()
        self.peeked = peeked
        if message.kind == "batch":
            self.recorder.add(WAIT, message.t, begin, int(there))
        return message


def traced_barrier(barrier: Callable[[], None], recorder: EventRecorder) -> None:
    begin = recorder.now()
    barrier()
    recorder.add(WAIT, NOBODY, begin)


@dataclass
class TraceLinks:
    """Links between the first stage and those in other processes, by the other one."""

    down: dict[int, Link] = field(default_factory=dict)
    up: dict[int, Link] = field(default_factory=dict)

    @classmethod
    def of(cls, engine: Engine) -> TraceLinks:
        made = cls()
        if len(engine.here) == engine.K:
            return made
        for k in range(2, engine.K + 1):
            for links, source, target in ((made.down, 1, k), (made.up, k, 1)):
                link = engine.link("trace", source, target, capacity=4, patient=True)
                if link is not None:
                    links[k] = link
        return made


class Tracing:
    """One recording: waits until all stages are full, records, and sends all to the first process, which writes it.

    All processes make it before the same batch (it compares clocks), and run every later turn through it.
    """

    def __init__(
        self,
        engine: Engine,
        workers: list[Worker],
        method: Method,
        *,
        turns: int,
        path: Path,
        at: int,
        links: TraceLinks,
        device: torch.device,
        notify: Notify | None,
    ) -> None:
        check(turns)
        if engine.leads and not path.parent.is_dir():
            raise UserError(f"trace in {path}: there is no folder {path.parent}, make it first")
        self.engine, self.workers, self.method = engine, workers, method
        self.turns, self.path, self.links, self.device, self.notify = turns, path, links, device, notify
        self.start = at + self.filling
        self.done = 0  # turns recorded
        self.away = 0  # nanoseconds of evaluations among them
        self.recorders: dict[int, EventRecorder] = {}
        self.plain: list[tuple[Links, Actor, Callable[[], None]]] = []
        self.found: dict[int, tuple[Tensor, int]] = {}  # what was recorded, in the first process
        self.finished = False  # nothing more to do in this process
        self.clock_offsets = clock_offsets(engine, links.down, links.up)

    @property
    def filling(self) -> int:
        """Turns until all stages are full, and have closed two windows (an engine may record updates then)."""
        method, K = self.method, self.engine.K
        free = 4 * K if method.order else 0  # stages of such an order start at different times
        return method.fill(K) + 2 * method.M + free

    @property
    def recording(self) -> bool:
        return bool(self.plain)

    def run(self, t: int, work: list[Iterator[bool]]) -> None:
        """Turn t of this process's stages."""
        if t >= self.start and not self.recorders:
            self._begin()
        self.engine.run(work)
        if self.recording:
            self.done += 1
            if self.done == self.turns:
                self._detach()
                self._hand_over()
        if self.recorders and not self.recording:
            self._collect()

    def _begin(self) -> None:
        watch: Watch = DeviceWatch(self.device) if self.device.type == "cuda" else HostWatch()
        for worker in self.workers:
            recorder = self.recorders[worker.stage.k] = EventRecorder(watch)
            self.plain.append((worker.links, worker.actor, worker.barrier))
            traced: dict[str, Any] = {
                name: None if link is None else TracedLink(link, recorder) for name, link in vars(worker.links).items()
            }
            worker.links = Links(**traced)
            worker.actor = TracedStage(worker, recorder)
            worker.barrier = partial(traced_barrier, worker.barrier, recorder)

    def _hand_over(self) -> None:
        """Send the events of the stages to the first process."""
        for k, recorder in self.recorders.items():
            recorded = recorder.rows(), self.away
            if k in self.links.up:
                self.links.up[k].send(Message(self.done, recorded))
            else:
                self.found[k] = recorded

    def _detach(self) -> None:
        """Give the workers their own links and stages back."""
        for worker, (links, actor, barrier) in zip(self.workers, self.plain, strict=True):
            worker.links, worker.actor, worker.barrier = links, actor, barrier
        self.plain = []

    @contextmanager
    def draining(self, at: int) -> Iterator[None]:
        """Around a drain after `at` batches. It ends a recording; one that has not begun waits until all stages are
        full again."""
        begun = {k: recorder.now() for k, recorder in self.recorders.items()} if self.recording else {}
        if self.recording:
            self._detach()
        yield
        for k, begin in begun.items():
            self.recorders[k].add(DRAIN, NOBODY, begin)
        if begun:
            self._hand_over()
        if self.recorders:
            self._collect(wait=True)
        else:
            self.start = at + self.filling

    def evaluated(self, nanoseconds: int) -> None:
        """The time of an evaluation, which does not count as idle."""
        if self.recording:
            self.away += nanoseconds

    def _collect(self, *, wait: bool = False) -> None:
        """In the first process: take what has arrived (or wait for it), and write once all is there."""
        if 1 in self.engine.here:
            for k, link in self.links.up.items():
                if k not in self.found and (wait or link.ready()):
                    self.found[k] = link.receive().content
            if len(self.found) < self.engine.K:
                return
            if self.engine.leads:  # the trace of replica 0
                self._write()
        self.finished = True

    def _write(self) -> None:
        stages = {k: self.found[k][0] for k in range(1, self.engine.K + 1)}
        idle = [_idle(rows, away) for rows, away in (self.found[k] for k in stages)]
        trace = {
            "traceEvents": chrome(stages, self.clock_offsets, m=self.method.m),
            "displayTimeUnit": "ms",
            "otherData": {
                "K": self.engine.K,
                "M": self.method.M,
                "method": self.method.name,
                "turns": self.done,
                "asked": self.turns,
                "idle": idle,
                "clock_uncertainty_us": [self.clock_offsets[k].uncertainty / 1e3 for k in stages],
            },
        }
        what = f"{self.done} iteration{'s' * (self.done > 1)} of {len(stages)} stage{'s' * (len(stages) > 1)}"
        found = (
            "each operation by itself"
            if self.engine.defers
            else f"idle {' '.join(f'{100 * share:.0f} %' for share in idle)}"
        )
        line = f"trace: {what} in {self.path}; {found}"
        part = self.path.with_name(self.path.name + ".part")
        try:
            part.write_text(json.dumps(trace, separators=(",", ":")) + "\n")
            os.replace(part, self.path)
        except OSError as error:
            line = f"trace failed (training continues): {self.path}: {error.strerror or first_line(error)}"
            if self.notify is None:
                warn_caller(line)
        if self.notify is not None:
            self.notify(line)


def check(turns: int) -> None:
    """Refuse a recording of no turns, or of too many to be useful."""
    if isinstance(turns, bool) or not isinstance(turns, int) or not 1 <= turns <= MOST_TURNS:
        raise UserError(f"trace={turns!r} local iterations: use a whole number from 1 to {MOST_TURNS}")


def _idle(rows: Tensor, away: int) -> float:
    """Share of the recording's time in which the stage did no work."""
    kind, begin, end, more = rows[:, 0], rows[:, 2], rows[:, 3], rows[:, 4]
    steady = kind != DRAIN
    if not steady.any():  # a stage may not have had its turn yet
        return 1.0
    own = (end - begin)[steady & ((kind != WAIT) | (more == 1))].sum()
    span = end[steady].max() - begin[steady].min() - away
    return max(0.0, 1 - float(own) / max(1.0, float(span)))


def chrome(stages: dict[int, Tensor], clock_offsets: dict[int, ClockOffset], *, m: int = 1) -> list[dict[str, Any]]:
    """Trace events as Chrome defines them: microseconds from the first event on, by the first stage's clock."""
    zero = min(int(rows[:, 2].min()) - clock_offsets[k].offset for k, rows in stages.items() if len(rows))
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": k, "args": {"name": f"stage {k} of {len(stages)}"}}
        for k in stages
    ]
    for k, rows in stages.items():
        for kind, number, begin, end, more in rows.tolist():
            events.append(
                {
                    **_named(kind, number, more, m),
                    "cat": KINDS[kind],
                    "ph": "X",
                    "ts": (begin - clock_offsets[k].offset - zero) / 1e3,
                    "dur": (end - begin) / 1e3,
                    "pid": 0,
                    "tid": k,
                }
            )
    return sorted(events, key=lambda event: event.get("ts", -1.0))


def _named(kind: int, number: int, more: int, m: int) -> dict[str, Any]:
    """Name and arguments of an event; operations count micro-batches, where there are some."""
    if kind == DRAIN:
        return {"name": "drain", "args": {"batch": None}}
    if number == NOBODY:
        return {"name": "barrier", "args": {"batch": None}}
    if kind == UPDATE:
        return {"name": f"update {number}", "args": {"batch": None if more == NOBODY else more // m, "update": number}}
    arguments: dict[str, Any] = {"batch": number // m}
    if m > 1:
        arguments["micro_batch"] = number % m
    if kind == WAIT:
        arguments["there"] = bool(more)
    return {"name": f"{KINDS[kind]} {number // m}", "args": arguments}
