"""Traces, diagnoses, reports and measured staleness of the stages; none of them changes a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from offbeat.core.stage_report import Report, Staleness
from offbeat.engines import Engine
from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.observe import diagnosis as stage_diagnosis
from offbeat.observe import tracing as stage_tracing
from offbeat.observe.diagnosis import Diagnosis
from offbeat.observe.tracing import Notify, TraceLinks, Tracing
from offbeat.pipeline.assembly import Assembly

Begin = Callable[[Assembly, int], None]  # with the number of the next batch


@dataclass
class Observation:
    """What observes the stages of this process. It is requested at any time, and begins once there are stages."""

    engine: Engine
    method: Method
    device: torch.device
    tracing: Tracing | None = None  # while a trace is recorded, or collected
    diagnoses: dict[int, Diagnosis] = field(default_factory=dict)  # by stage of this process
    _requested: dict[str, Begin] = field(default_factory=dict)
    _trace_links: TraceLinks | None = None
    _elsewhere: dict[int, Staleness] = field(default_factory=dict)  # of stages of other processes

    # ---- requests

    def request_trace(self, turns: int, path: Path, notify: Notify | None) -> None:
        stage_tracing.check(turns)
        if self.tracing is not None or self.trace_requested:
            raise UserError("a trace is being recorded: wait until it is written before the next")
        self._requested["trace"] = partial(self._begin_trace, turns=turns, path=path, notify=notify)

    @property
    def trace_requested(self) -> bool:
        return "trace" in self._requested

    def request_diagnosis(self, every: int) -> None:
        stage_diagnosis.check(every, self.method)
        if self.tracing is not None and self.tracing.recording:
            raise UserError("a trace is being recorded: call diagnose() before it, or when it is written")
        self._requested["diagnosis"] = partial(self._begin_diagnosis, every=every)

    def begin(self, assembly: Assembly, batches: int) -> None:
        """Begin what was requested; a trace only after the warm-up of the staleness."""
        for name in list(self._requested):
            if name != "trace" or assembly.method == self.method.after_warmup:
                self._requested.pop(name)(assembly, batches)

    def _begin_trace(self, assembly: Assembly, batches: int, *, turns: int, path: Path, notify: Notify | None) -> None:
        self._trace_links = self._trace_links or TraceLinks.of(self.engine)
        self.tracing = Tracing(
            self.engine,
            assembly.workers,
            assembly.method,
            turns=turns,
            path=path,
            at=batches,
            links=self._trace_links,
            device=self.device,
            notify=notify,
        )

    def change_stages(self, assembly: Assembly, batches: int) -> None:
        """Observe new stages, which replace those that were observed."""
        for diagnosis in self.diagnoses.values():
            self._requested["diagnosis"] = partial(self._begin_diagnosis, every=diagnosis.every)
        self.begin(assembly, batches)

    def _begin_diagnosis(self, assembly: Assembly, batches: int, *, every: int) -> None:
        for worker in assembly.workers:
            worker.actor = self.diagnoses[worker.stage.k] = Diagnosis(worker, every)

    # ---- during training

    def run(self, t: int, work: list[Iterator[bool]]) -> None:
        """Run local iteration t of the stages, recorded if there is a trace."""
        if self.tracing is None:
            self.engine.run(work)
            return
        self.tracing.run(t, work)
        self._drop_finished()

    @contextmanager
    def draining(self, batches: int) -> Iterator[None]:
        """Around a drain after that many batches, which ends a trace."""
        if self.tracing is None:
            yield
            return
        with self.tracing.draining(batches):
            yield
        self._drop_finished()

    def evaluated(self, nanoseconds: int) -> None:
        """An evaluation took that long, which is not counted as idle time of the stages."""
        if self.tracing is not None:
            self.tracing.evaluated(nanoseconds)

    def _drop_finished(self) -> None:
        if self.tracing is not None and self.tracing.finished:
            self.tracing = None

    # ---- figures

    def reports(self, assembly: Assembly) -> list[Report]:
        """Figures of the stages of this process since the last report, which have settled."""
        lines = {k: diagnosis.take() for k, diagnosis in self.diagnoses.items()}
        return [replace(stage.report(), diagnosis=lines.get(k, [])) for k, stage in assembly.stages.items()]

    def staleness(self, assembly: Assembly | None) -> list[Staleness]:
        """Of every stage; of those elsewhere as last shared."""
        here = {k: stage.staleness for k, stage in assembly.stages.items()} if assembly else {}
        return [here.get(k) or self._elsewhere.get(k) or Staleness() for k in range(1, self.engine.K + 1)]

    def share_staleness(self, assembly: Assembly) -> None:
        here = {k: dict(stage.staleness) for k, stage in assembly.stages.items()}
        for shared in self.engine.exchange(here):
            self._elsewhere.update({k: Staleness(counts) for k, counts in shared.items()})
