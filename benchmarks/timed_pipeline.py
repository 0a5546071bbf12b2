"""A pipeline that benchmarks on one GPU time: turns with the same batch, which lies on the device."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

import offbeat
from offbeat.engines.streams import Streams
from offbeat.graphs.launch_queue import AHEAD
from offbeat.graphs.recorded_stage import RecordedStage

MOST_PASSES = 20  # of turns before a measurement
FEW = AHEAD // 2  # turns that the host can ask for without waiting


def held(device: torch.device) -> int:
    """Bytes of the device that nobody else can have."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


class TimedPipeline:
    """Times turns of a pipeline, after a warm-up in which its stages fill and record.

    figures   of each measurement: `ms` per turn, and `host`, the share of it that the host needs to ask for the work
    """

    def __init__(self, name: str, pipe: offbeat.Pipeline, batch: Any) -> None:
        self.name, self.pipe, self.batch = name, pipe, batch
        self._settle(4 * (2 * pipe.K + pipe.method.M) + 20)
        self.figures: dict[str, list[float]] = {"ms": [], "host": []}

    def turns(self, n: int) -> tuple[float, float]:
        """Seconds, and seconds until the last of them was asked for."""
        self._wait()
        began = time.perf_counter()
        for _ in range(n):
            self.pipe._local.step([self.batch])
        asked = time.perf_counter() - began
        self._wait()
        return time.perf_counter() - began, asked

    def _settle(self, turns: int) -> None:
        """Turns until all kinds of ticks have been joined: none comes that is not known."""
        self.turns(turns)
        joined = getattr(getattr(self.pipe.engine, "launch_queue", None), "joined", {})
        for _ in range(MOST_PASSES):
            known = sum(together is not None for together in joined.values())
            self.turns(turns)
            if sum(together is not None for together in joined.values()) == known:
                return

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def measure(self, turns: int) -> None:
        turns = turns if isinstance(self.pipe.engine, Streams) else max(1, turns // 5)
        seconds, _ = self.turns(turns)
        self.figures["ms"].append(1000 * seconds / turns)
        asked = min(self.turns(FEW)[1] for _ in range(5))
        self.figures["host"].append(asked / FEW / (seconds / turns))

    def _rings(self) -> list[dict[str, int]]:
        """Of every stage: slots and versions, and how many batches in flight and versions its lag asks for."""
        method, K = self.pipe.method, self.pipe.K
        return [
            {
                "slots": worker.executor.slots.ring.slots,
                "batches": method.lag(k, K) + 1,
                "groups": worker.executor.slots.ring.groups,
                "versions": -(-method.lag(k, K) // method.M) + 1,
            }
            for k, worker in enumerate(self.pipe.workers, start=1)
            if isinstance(worker.executor, RecordedStage)
        ]

    def as_dict(self) -> dict[str, Any]:
        reasons = {k: getattr(worker.executor, "eager", None) for k, worker in enumerate(self.pipe.workers, start=1)}
        return {
            "name": self.name,
            "K": self.pipe.K,
            **self.figures,
            "rings": self._rings(),
            "cuts": self.pipe.cuts,
            "eager": {k: reason for k, reason in reasons.items() if reason},
            "staleness": [stage.mean for stage in self.pipe.staleness],
        }
