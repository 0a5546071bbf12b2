"""How long whole stages take: one after the other in this process, or all at once, a process each, as they will run.

A stage alone on a machine is faster than one among others: K of them share the memory's bandwidth and the processor's
turbo. So where there are cores enough, `TimingWorkers` keeps K processes, one pinned to the cores of each stage, that
get a stage each and run it at the same time. They run the stage as training does (a snapshot of the weights per update,
batches in flight, gradients summed, momentum), because for deep networks and small batches that is no small part.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.core.layout import as_leaf, dense_copy
from offbeat.core.stage import Stage
from offbeat.errors import first_line
from offbeat.method import Method
from offbeat.ops import Backward, Forward, Update
from offbeat.partitioning.trace import Traced

LEAST, SHORTEST = 3, 0.1  # laps, and seconds of laps: the quicker a stage, the more of them a median needs
ROUNDS = 3  # of which the shortest counts
ROUND, ENOUGH = 5.0, 20.0  # seconds of a round of short laps, one stage after the other; and after which no more begin
CHILD = "from offbeat.partitioning.timing import serve; serve()"


@dataclass(frozen=True)
class StageTime:
    """Median seconds: forward and backward of one batch, and one update with the copy of the weights that it needs."""

    forward: float
    backward: float
    update: float = 0.0

    def batch(self, M: int = 1) -> float:
        """Seconds per batch with M batches per update."""
        return self.forward + self.backward + self.update / M


@dataclass(frozen=True)
class Load:
    """How stages are run: the batches that each holds (the lag), batches per update, the number of rounds, and for
    stages that run at the same time the least seconds of all rounds together."""

    lags: Sequence[int]
    M: int = 1
    seconds: float = 0.0
    rounds: int = ROUNDS


Timings = list[list[StageTime]]  # by round, then by stage
Meter = Callable[[Sequence[Sequence[int]], Load], list[Timings]]  # of each of several lists of cuts


def shortest(timings: Timings, M: int) -> list[StageTime]:
    """Of each stage the round in which it was the fastest: other work on the machine can only slow it down.

    >>> [time.forward for time in shortest([[StageTime(2, 1), StageTime(1, 1)], [StageTime(1, 1), StageTime(3, 1)]], 1)]
    [1, 1]
    """
    return [min(rounds, key=lambda taken: taken.batch(M)) for rounds in zip(*timings, strict=True)]


class Runner:
    """One stage on one batch, again and again, as a worker runs it; nothing is sent, and the weights stay."""

    def __init__(self, module: nn.Module, x: Any, *, first: bool, lag: int, M: int) -> None:
        self.x, self.M = x, M
        device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        method = Method(name="timed", lag=lambda k, K: lag, M=M)
        k, K = 1 if first else 2, 3
        self.program = method.program(k, K, count())
        self.stage = Stage(k, K, module.train(), method=method, optimizer=_momentum, device=device)
        self.wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.gradients: list[Tensor | None] | None = None
        self.share = math.inf  # seconds of a round in which many stages are run
        self.laps: tuple[list[float], list[float], list[float]] = ([], [], [])

    def warm_up(self) -> None:
        """Fill the stage, and once do everything: the first time pays for memory and for choosing kernels."""
        while not self.laps[2]:
            self._lap()

    def run(self, seconds: float) -> StageTime:
        """Laps for that long and not too short a time, at least a few of them and one update; earlier ones do not
        count."""
        for laps in self.laps:
            laps.clear()
        seconds, began = max(seconds, min(SHORTEST, self.share)), time.perf_counter()
        while min(len(self.laps[1]), LEAST * len(self.laps[2])) < LEAST or time.perf_counter() - began < seconds:
            self._lap()
        return StageTime(*(statistics.median(laps) for laps in self.laps))

    def _lap(self) -> None:
        """The next local iteration."""
        output: Any = None
        for operation in next(self.program):
            began = self._now()
            if isinstance(operation, Forward):
                output = self.stage.forward(operation.t, self.x, None)
                self.laps[0].append(self._now() - began)
            elif isinstance(operation, Backward):
                self.stage.backward(operation.t, self.gradients)
                self.laps[1].append(self._now() - began)
            elif isinstance(operation, Update):
                self.stage.update(operation.over)
                self.stage.weights.current()  # the next forward's copy, which belongs to the update
                self.laps[2].append(self._now() - began)
            if self.gradients is None:
                leaves = pytree.tree_leaves(output)
                self.gradients = [torch.ones_like(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]

    def _now(self) -> float:
        self.wait()
        return time.perf_counter()


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    """All the work of SGD with momentum and weight decay, without its effect."""
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9, weight_decay=5e-4)


def whole_time(twin: Traced, sample: Any) -> StageTime:
    """The model as one stage without a lag: back-propagation on one worker, all others idle."""
    runner = Runner(twin.split([])[0], sample, first=True, lag=0, M=1)
    runner.warm_up()
    return shortest([[runner.run(0.0)] for _ in range(ROUNDS)], 1)[0]


def one_by_one(twin: Traced, sample: Any) -> Meter:
    """A meter that runs one stage after the other in this process, with at most one batch in flight each.

    A round runs every stage of all cuts once; a stage that several cuts have is run once for all of them. So other work
    on the machine slows down different stages and cuts alike. Hundreds of stages have fewer laps each, and stages that
    take long fewer rounds.
    """
    runners: dict[tuple[Any, ...], Runner] = {}  # of the last call: the next one may need some of them again

    def times(several: Sequence[Sequence[int]], load: Load) -> list[Timings]:
        wanted = [_stage_keys(twin, cuts, load) for cuts in several]
        for key in set(runners).difference(*wanted):
            del runners[key]
        for cuts, keys in zip(several, wanted, strict=True):
            if all(key in runners for key in keys):
                continue
            for k, (key, (part, x)) in enumerate(zip(keys, _parts(twin.twin(), cuts, sample), strict=True)):
                if key not in runners:
                    runners[key] = Runner(part, x, first=k == 0, lag=min(1, load.lags[k]), M=load.M)
                    runners[key].warm_up()
        for runner in runners.values():
            runner.share = ROUND / len(runners)
        began = time.monotonic()
        rounds: list[dict[tuple[Any, ...], StageTime]] = []
        while len(rounds) < load.rounds and not (rounds and time.monotonic() - began > ENOUGH):
            rounds.append({key: runner.run(0.0) for key, runner in runners.items()})
        return [[[each[key] for key in keys] for each in rounds] for keys in wanted]

    return times


def _stage_keys(twin: Traced, cuts: Sequence[int], load: Load) -> list[tuple[Any, ...]]:
    """What the stages between the cuts are known by: number, units and load."""
    edges = pairwise([0, *cuts, len(twin.units)])
    return [(k, start, end, load.lags[k], load.M) for k, (start, end) in enumerate(edges)]


def _parts(twin: Traced, cuts: Sequence[int], sample: Any) -> Iterator[tuple[nn.Module, Any]]:
    """The stages, each with its input."""
    x = sample
    for part in twin.split(list(cuts), tied="copies"):  # whether they may be separated was decided before
        yield part, x
        with torch.enable_grad():
            x = pytree.tree_map_only(Tensor, as_leaf, part.train()(pytree.tree_map_only(Tensor, torch.clone, x)))


class Stopwatch:
    """A Meter: all stages at once where that can be, otherwise one after the other, and a note with the reason."""

    def __init__(self, twin: Traced, sample: Any, K: int) -> None:
        self.alone, self.notes = one_by_one(twin, sample), list[str]()
        self.workers: TimingWorkers | None = TimingWorkers(twin, sample, K) if TimingWorkers.possible(twin, K) else None
        if self.workers is None and K > 1:
            self.notes.append(f"the {K} stages were timed one after the other: there are no cores for all of them")

    def __enter__(self) -> Stopwatch:
        if self.workers:
            self.workers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.workers:
            self.workers.__exit__(kind, value, trace)

    def __call__(self, several: Sequence[Sequence[int]], load: Load) -> list[Timings]:
        if self.workers:
            try:
                return self.workers.times(several, load)
            except WorkersFailed as reason:
                self.workers.__exit__(None, None, None)
                self.workers = None
                self.notes.append(f"the stages were timed one after the other: {reason}")
        return self.alone(several, load)


# ---- all at once


class WorkersFailed(RuntimeError):
    """Why stages cannot be timed at the same time."""


class TimingWorkers:
    """K processes that run a stage each at the same time; `times` is a Meter. For models on the CPU.

    They are started by a command line of their own and not by multiprocessing, which would run the user's script again
    where it has no __main__ guard. A stage reaches its process as a pickle in a private folder.
    """

    def __init__(self, twin: Traced, sample: Any, K: int) -> None:
        self.twin, self.sample, self.K = twin, sample, K
        self.threads = torch.get_num_threads()
        self.processes: list[subprocess.Popen[str]] = []

    @staticmethod
    def possible(twin: Traced, K: int) -> bool:
        """Whether this machine has cores for K stages of as many threads as this process uses."""
        device = next((parameter.device.type for parameter in twin.model.parameters()), "cpu")
        return K > 1 and device == "cpu" and len(os.sched_getaffinity(0)) >= K * torch.get_num_threads()

    def __enter__(self) -> TimingWorkers:
        self.folder = tempfile.TemporaryDirectory(prefix="offbeat-")
        cores, n = sorted(os.sched_getaffinity(0)), self.threads
        environment = {**os.environ, "OMP_NUM_THREADS": str(n), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for rank in range(self.K):
            mine = ",".join(map(str, cores[rank * n : (rank + 1) * n]))
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", CHILD, mine],
                    env=environment,
                    text=True,
                    bufsize=1,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()
        self.processes.clear()
        self.folder.cleanup()

    def times(self, several: Sequence[Sequence[int]], load: Load) -> list[Timings]:
        """Raises WorkersFailed where a stage cannot be sent, or run. A round runs the stages of each of the cuts."""
        for number, cuts in enumerate(several):
            self._load(number, cuts, load)
        found: list[Timings] = [[] for _ in several]
        for _ in range(load.rounds):
            for number, timings in enumerate(found):
                timings.append(
                    [StageTime(**reply) for reply in self._ask({"run": number, "seconds": load.seconds / load.rounds})]
                )
        return found

    def _load(self, number: int, cuts: Sequence[int], load: Load) -> None:
        """Send each process its stage between these cuts, under a number, and let it warm up."""
        for k, (part, x) in enumerate(_parts(self.twin, cuts, self.sample)):
            path = Path(self.folder.name) / f"stage-{k + 1}"
            try:
                torch.save((part, x), path)
            except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
                raise WorkersFailed(f"stage {k + 1} cannot be sent to a process ({first_line(error)})") from error
            self._send(k, {"load": number, "path": str(path), "first": k == 0, "lag": load.lags[k], "M": load.M})
        for k in range(self.K):
            self._receive(k)

    def _ask(self, what: dict[str, Any]) -> list[dict[str, Any]]:
        """The replies of all processes to the same request, which all get at the same time."""
        for k in range(self.K):
            self._send(k, what)
        return [self._receive(k) for k in range(self.K)]

    def _send(self, k: int, what: dict[str, Any]) -> None:
        pipe = self.processes[k].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()
        except OSError as error:
            raise WorkersFailed(f"the process of stage {k + 1} has ended") from error

    def _receive(self, k: int) -> dict[str, Any]:
        pipe = self.processes[k].stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise WorkersFailed(f"the process of stage {k + 1} has ended")
        reply: dict[str, Any] = json.loads(line)
        if "failed" in reply:
            raise WorkersFailed(f"stage {k + 1} cannot run in a process of its own ({reply['failed']})")
        return reply


def serve() -> None:
    """The loop of a timing process: stages from its standard input until that closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the user's modules print is no reply
    cores = {int(core) for core in sys.argv[1].split(",")}
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    runners: dict[int, Runner] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            print(json.dumps(_reply(request, runners)), file=replies)
        except Exception as error:
            print(json.dumps({"failed": first_line(error)}), file=replies)
            return


def _reply(request: dict[str, Any], runners: dict[int, Runner]) -> dict[str, Any]:
    """Load a stage under a number, in place of those of the last request for number 0; or run a loaded one."""
    if "run" in request:
        return asdict(runners[request["run"]].run(request["seconds"]))
    if request["load"] == 0:
        runners.clear()
    module, x = torch.load(request["path"], weights_only=False)  # written by our parent, in a folder of its own
    x = pytree.tree_map_only(Tensor, dense_copy, x)  # into memory that stages may copy lazily
    runner = Runner(module, x, first=request["first"], lag=request["lag"], M=request["M"])
    runner.warm_up()
    runners[request["load"]] = runner
    return {}
