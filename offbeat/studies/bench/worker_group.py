"""The workers of one row, seen from the process that started them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offbeat.core.links import LOOPBACK_INTERFACE
from offbeat.errors import UserError
from offbeat.runs.launch import joined_group
from offbeat.studies.bench.fork_server import ForkServer, line_of
from offbeat.studies.bench.rows import BenchRow, BenchSetting, batches_per_update, cores_here

PATIENCE = 600.0  # seconds until a worker must answer: workers that wait for each other never do
CAUSE = 10.0  # seconds in which a worker that has failed says why, after another has noticed it
QUICK = 0.5  # seconds: batches that take less are too few to choose the number of micro-batches, and more are timed


class RowFailedError(UserError):
    """A row cannot be timed or trained; the reason in one line. `diverged`: its loss is not finite."""

    def __init__(self, text: str, *, diverged: bool = False) -> None:
        super().__init__(text)
        self.diverged = diverged


class Workers:
    """Processes that get the same requests as lines of JSON, and each answer for themselves (worker.py).

    processes   with their pipes, as subprocess.Popen has them, and a `close`; in the order of their ranks
    errors      the file with the standard error of a rank
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.processes: list[Any] = []

    def errors(self, rank: int) -> Path:
        raise NotImplementedError

    def ready(self) -> None:
        """Wait until all have started, however many start at the same time."""
        self._receive(PATIENCE)

    def ask(self, what: str, given: Any = None) -> list[dict[str, Any]]:
        """The answer of every worker; RowFailedError as soon as one fails."""
        for rank in range(len(self.processes)):
            self.send(rank, {what: given})
        return self._receive(self.patience)

    def send(self, rank: int, what: dict[str, Any]) -> None:
        pipe = self.processes[rank].stdin
        with contextlib.suppress(OSError):  # one that has ended is noticed when its answer is read
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()

    def _receive(self, patience: float) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        count = len(self.processes)
        lost: RowFailedError | None = None  # what a worker noticed of the failure of another, which may answer later
        deadline = time.monotonic() + patience
        while len(found) < count:
            waited = [rank for rank in range(count) if rank not in found]
            pipes: dict[Any, int] = {self.processes[rank].stdout: rank for rank in waited}
            there, _, _ = select.select(list(pipes), [], [], max(0.0, deadline - time.monotonic()))
            if not there:
                raise lost or RowFailedError(f"worker {min(pipes.values())} did not answer within {patience:.0f} s")
            for pipe in there:
                rank = pipes[pipe]
                line = line_of(pipe)  # an answer is one line, so nothing is left in the buffer
                if not line:
                    raise RowFailedError(f"worker {rank} has ended: {self._last_line(rank)}")
                found[rank] = json.loads(line)
                if "failed" in found[rank]:
                    error = RowFailedError(found[rank]["failed"], diverged=bool(found[rank].get("diverged")))
                    if not found[rank].get("lost"):
                        raise error
                    lost, deadline = lost or error, min(deadline, time.monotonic() + CAUSE)
        if lost:
            raise lost
        return [found[rank] for rank in range(count)]

    def _last_line(self, rank: int) -> str:
        code = self.processes[rank].wait()
        lines = self.errors(rank).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {code}"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.close()
        self.processes.clear()


class WorkerGroup(Workers):
    """The processes of a row, one core each; all get the same requests, and each answers for itself.

    Under torchrun each is started by a process of its own (machines.py).

    They are in a session of their own, so that Ctrl-C reaches only the process that writes the record.
    """

    def __init__(
        self,
        row: BenchRow,
        setting: BenchSetting,
        folder: Path,
        fork_server: ForkServer,
        *,
        first_core: int = 0,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(patience)
        self.row, self.setting, self.folder, self.fork_server = row, setting, folder, fork_server
        self.first_core = first_core
        self.count = setting.K * setting.replicas if not row.alone and setting.device == "cpu" else 1
        self.m: int | None = None

    def start(self) -> None:
        """Start them and send them their ranks; `ready` waits until they have started."""
        cores = cores_here()
        threads = len(cores) if self.row.all_cores else 1
        loopback = LOOPBACK_INTERFACE.get(sys.platform)
        surroundings = {"OMP_NUM_THREADS": str(threads)}
        if self.setting.device != "cpu":
            queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # or streams wait for each other
            surroundings["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
        if loopback and not joined_group():
            surroundings["GLOO_SOCKET_IFNAME"] = loopback
        for rank in range(self.count):
            self.processes.append(self.fork_server.spawn(surroundings, self.errors(rank), rank))
            mine = None if joined_group() else [cores[(self.first_core + rank) % len(cores)]]  # None: of its process
            if self.row.all_cores or self.setting.device != "cpu":
                mine = cores
            self.send(
                rank,
                {
                    "row": self.row.name,
                    "setting": self.setting.as_dict(),
                    "rank": rank,
                    "world": self.count,
                    "store": str(self.folder / f"{self.row.name}.store"),
                    "cores": mine,
                    "threads": threads,
                },
            )

    def seconds(self, warm_up: int, batches: int, *, what: str = "time") -> tuple[list[float], float]:
        """Seconds per batch of each worker, and processor seconds of all together."""
        answers = self.ask(what, [warm_up, batches])
        return [answer["seconds"] for answer in answers], sum(answer["busy"] for answer in answers)

    def sweep(self, numbers: Sequence[int], *, worse: float, report: Callable[[str], None]) -> dict[int, float]:
        """Seconds per batch, or per update of micro-batches, by their number. Ends at one with more than `worse` times
        the shortest: more of them would take longer still."""
        tried: dict[int, float] = {}
        for m in numbers:
            self.ask("build", m)
            self.m = m
            parts = batches_per_update(self.row, self.setting, m)
            # whole updates, of about as many micro-batches each, after those that late stages need to spread out
            warm_up, batches = (2, -(-max(numbers) // m) * m) if self.row.micro else (0, 1)
            each = max(self.seconds(warm_up, batches)[0])
            if each * batches < QUICK:
                batches *= max(2, math.ceil(QUICK / (each * batches)))
                each = max(self.seconds(0, batches)[0])
            tried[m] = parts * each
            report(f"{self.row.name}, {m} micro-batches: {1000 * tried[m]:.0f} ms")
            if tried[m] > worse * min(tried.values()):
                break
        return tried

    def errors(self, rank: int) -> Path:
        return self.folder / f"{self.row.name}-{rank}.err"
