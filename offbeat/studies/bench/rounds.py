"""The run: all rows are built, then every round times every row once; what is known is written as it comes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import models
from offbeat.errors import Interrupted, UserError, first_line, unknown
from offbeat.report import bench_table
from offbeat.report.draw import by_the_way, draw_bench
from offbeat.runs import record
from offbeat.runs.provenance import gpu_name, provenance
from offbeat.settings import shown
from offbeat.studies.bench.cuts import check, placed
from offbeat.studies.bench.fork_server import ForkServer
from offbeat.studies.bench.rows import (
    ALWAYS,
    OURS,
    Row,
    Setting,
    chosen,
    cores_here,
    left_out,
    method_of,
    micro_batches,
    settings_by_method,
)
from offbeat.studies.bench.worker_group import PATIENCE, RowFailedError, WorkerGroup

LEAST = 2  # batches timed in a round, where time is short
QUICK = 0.5  # seconds a batch below which one is too few to choose micro-batches by
WORSE = 1.05  # times the best: more micro-batches would be worse still
GPU_TIMES = 25  # as many batches on a GPU
SPARE = 0.3  # of the memory: with less of it left, rows give theirs back between rounds
MEMORY = {
    "cpu": "peak resident memory of the worker with the most, less what torch takes without a network",
    "cuda": "peak of torch's allocator on the GPU, of all stages together",
}
BOUND = "the slowest stage of these cuts (ADL), all stages computing at the same time on canned messages, nothing sent"


@dataclass(frozen=True)
class Request:
    """What a user asked for."""

    model: str = "resnet110"
    batch_size: int = 128
    K: int = 4
    M: int | None = None  # of all rows that take one; None: 4
    methods: tuple[str, ...] = ()  # of ours with settings, as text
    against: str = "all"
    shape: tuple[int, int, int] | None = None
    device: str = "cpu"
    precision: str = "fp32"
    partition: str = "measured"
    cuts: tuple[int, ...] | None = None
    units: str | None = None
    profile: Path | None = None
    micro_batches: tuple[int, ...] | None = None
    repetitions: int = 3
    batches: int = 8
    minutes: float | None = None
    out: Path | None = None

    def setting(self) -> Setting:
        """Checked as far as nothing has to be computed for it."""
        for name, number in (
            ("-K", self.K),
            ("-M", 1 if self.M is None else self.M),
            ("--batch-size", self.batch_size),
            ("--repetitions", self.repetitions),
            ("--batches", self.batches),
        ):
            if number < 1:
                raise UserError(f"{name} {number}: use a whole number from 1 up")
        if self.K < 2:
            raise UserError("-K 1: one stage leaves nothing to compare, use 2 or more")
        if self.minutes is not None and not self.minutes > 0:
            raise UserError(f"--budget-minutes {self.minutes:g}: use a number above 0")
        for kind, value, allowed in (
            ("device", self.device, ("cpu", "cuda")),
            ("partition", self.partition, ("measured", "flops")),
            ("precision", self.precision, ("fp32", "tf32", "bf16")),
        ):
            if value not in allowed:
                raise unknown(kind, value, allowed)
        if self.device == "cpu" and self.precision != "fp32":
            raise UserError(f"--precision {self.precision} on the cpu: the other rows there are fp32, leave it out")
        if any(m < 1 for m in self.micro_batches or ()):
            raise UserError(f"--micro-batches {self.micro_batches}: use whole numbers from 1 up")
        known = models.describe(self.model)
        setting = Setting(
            self.model,
            self.shape or known.shape,
            known.classes,
            self.batch_size,
            self.K,
            4 if self.M is None else self.M,
            self.device,
            self.precision,
            methods=settings_by_method(self.methods, self.M),
        )
        check(setting)
        return setting


class Spoken:
    """Progress on standard error, with the seconds so far; or silence."""

    def __init__(self, *, show: bool) -> None:
        self.begun, self.show = time.monotonic(), show

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def __call__(self, line: str) -> None:
        if self.show:
            print(f"[{self.seconds:4.0f} s] {line}", file=sys.stderr, flush=True)


@dataclass
class Bench:
    """A run under way: its worker groups, and what they have found."""

    request: Request
    setting: Setting
    out: Path
    say: Spoken
    rows: list[Row]
    groups: dict[str, WorkerGroup] = field(default_factory=dict)
    fork_server: ForkServer = field(default_factory=ForkServer)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    thrifty: bool = False
    batches: int = 0
    rounds: int = 0
    load: float = 0.0  # of others, before anything was started here
    origin: dict[str, Any] = field(default_factory=lambda: origin())  # once: it asks git, which is a process

    # ---- before the rounds

    def start(self, folder: Path) -> None:
        """All processes at once."""
        for row in self.rows:
            if reason := left_out(row, self.setting):
                self.left_out[row.name] = reason
                continue
            place = len(self.groups) % self._side_by_side()
            self.groups[row.name] = WorkerGroup(
                row,
                self.setting,
                folder,
                self.fork_server,
                first_core=place * self.setting.K,
                patience=self._patience(),
            )
            self.groups[row.name].start()
        count = sum(workers.count for workers in self.groups.values())
        self.say(f"{len(self.groups)} rows in {count} processes")
        for workers in list(self.groups.values()):
            with self._row(workers.row):
                workers.ready()

    def prepare(self) -> None:
        """Build every row, with its best number of micro-batches; count what it sends and holds.

        Rows that only have to be filled are built side by side, as far as there are cores: nothing of it is compared.
        """
        groups = [self.groups[row.name] for row in self._there()]
        plain = [workers for workers in groups if not workers.row.swept and workers.row.cores == "one"]
        for at in range(0, len(plain), self._side_by_side()):
            self._fill_together(plain[at : at + self._side_by_side()])
        for workers in [workers for workers in groups if workers not in plain]:
            with self._row(workers.row):
                tried = self._sweep(workers) if workers.row.swept else {}
                self._enter(workers, tried, *self._fill(workers, min(tried, key=lambda m: tried[m]) if tried else None))
        self.found = {row.name: self.found[row.name] for row in self._there()}
        self.batches = self._fitting()

    def _patience(self) -> float:
        """One row whose workers wait for each other must not take the time of all."""
        minutes = self.request.minutes
        return PATIENCE if minutes is None else min(PATIENCE, max(60.0, 20 * minutes))

    def _fill_together(self, group: list[WorkerGroup]) -> None:
        pool = ThreadPoolExecutor(len(group))
        try:
            for workers, filled in [(workers, pool.submit(self._fill, workers, None)) for workers in group]:
                with self._row(workers.row):
                    self._enter(workers, {}, *filled.result())
        except BaseException:
            self.close()  # so that nobody is waited for: who waits for an answer sees the end of its worker
            raise
        finally:
            pool.shutdown()

    def _side_by_side(self) -> int:
        """Rows that have cores of their own at the same time."""
        return max(1, len(cores_here()) // self.setting.K) if self.setting.device == "cpu" else 1

    def _sweep(self, workers: WorkerGroup) -> dict[int, float]:
        """Seconds a batch by the number of micro-batches: until more of them are clearly slower."""
        tried: dict[int, float] = {}
        for m in micro_batches(workers.row, self.setting, self.request.micro_batches):
            workers.ask("build", m)
            workers.m = m
            tried[m] = max(workers.seconds(0, 1)[0])
            if tried[m] < QUICK:
                tried[m] = max(workers.seconds(0, LEAST)[0])
            self.say(f"{workers.row.name}, {m} micro-batches: {1000 * tried[m]:.0f} ms a batch")
            if tried[m] > WORSE * min(tried.values()):
                break
        return tried

    def _fill(self, workers: WorkerGroup, m: int | None) -> tuple[float, list[int], list[dict[str, Any]]]:
        """Seconds of a first batch, bytes sent by each worker for one, and what they hold."""
        if m is None or workers.m != m:
            workers.ask("build", m)
            workers.m = m
        first = median(workers.seconds(0, 1)[0])  # of which the last stages only wait for the first ones
        return first, [said["bytes"] for said in workers.ask("sent")], workers.ask("look")

    def _enter(
        self, workers: WorkerGroup, tried: dict[int, float], first: float, sent: list[int], looked: list[dict[str, Any]]
    ) -> None:
        self.found[workers.row.name] = {**self._described(workers.row, workers, tried, sent, looked), "first": first}
        self.say(f"{workers.row.name} is ready, {1000 * first:.0f} ms a batch")
        self._rest(workers)

    def _described(
        self, row: Row, workers: WorkerGroup, tried: dict[int, float], sent: list[int], looked: list[dict[str, Any]]
    ) -> dict[str, Any]:
        K = self.setting.K
        levels = (
            [method_of(row, self.setting, workers.m).staleness(k, K) for k in range(1, K + 1)]
            if row.kind == "pipeline"
            else []
        )
        return {
            "name": row.name,
            "title": row.title_on(self.setting.device),
            "family": row.family,
            "exact": not any(levels),
            "workers": K if row.workers == "K" else 1,
            "staleness": levels,
            "micro_batches": workers.m,
            "sweep": {str(m): seconds for m, seconds in tried.items()},
            "samples_per_second": [],
            "seconds_per_batch": [],
            "processor_seconds": [],
            "memory_per_worker": max(said["memory"] for said in looked),
            "memory": [said["memory"] for said in looked],
            "bytes_moved": sum(sent),
            "note": note(row, self.setting, workers.m, len(tried)),
        }

    def _fitting(self) -> int:
        """Batches that a row times in a round, so that the rounds fit into the time that there is."""
        if self.request.minutes is None:
            return self.request.batches
        left = 60 * self.request.minutes - self.say.seconds
        fixed = sum(self._warm_up(row) * self.found[row.name]["first"] for row in self._there())
        each = sum(self.found[row.name]["first"] * self._timed(row, 100) / 100 for row in self._there())
        fits = (0.95 * left / self.request.repetitions - fixed) / max(each, 1e-9)
        return int(min(self.request.batches, max(LEAST, fits)))

    # ---- rounds

    def go(self) -> None:
        for number in range(self.request.repetitions):
            began = self.say.seconds
            for row in self._there():
                with self._row(row):
                    self._time(row)
                    self.write()
            self.rounds = number + 1
            took = self.say.seconds - began
            self.say(f"round {self.rounds} of {self.request.repetitions}, {took:.0f} s")
            minutes = self.request.minutes
            if minutes is not None and self.say.seconds + took > 60 * minutes:
                if self.rounds < self.request.repetitions:
                    self.say(f"no time for another round in {minutes:g} minutes")
                break

    def _time(self, row: Row) -> None:
        workers, found = self.groups[row.name], self.found[row.name]
        batches = self._timed(row, self.batches)
        each, busy = workers.seconds(self._warm_up(row), batches)
        seconds = max(each)
        found["seconds_per_batch"].append(seconds)
        found["processor_seconds"].append(busy)
        found["samples_per_second"].append(self.setting.batch_size / seconds)
        self.say(f"{row.name}: {1000 * seconds:.0f} ms a batch, {self.setting.batch_size / seconds:,.0f} samples/s")
        if row.name == OURS and self.setting.device == "cpu":
            stages, _ = workers.seconds(LEAST, batches, what="bound")
            self.bound.setdefault("stages", []).append(stages)
            self.bound.setdefault("seconds_per_batch", []).append(max(stages))
            self.bound.setdefault("samples_per_second", []).append(self.setting.batch_size / max(stages))
            self.say(f"bound: {1000 * max(stages):.0f} ms a batch")
        found["staleness_measured"] = [level for said in workers.ask("look") for level in said["staleness"]]
        self._rest(workers)

    def _warm_up(self, row: Row) -> int:
        """Every worker counts from the end of its own: stages that do not wait for each other need two, in which each
        comes as far ahead of the next as the messages between them allow."""
        return 1 if self.found[row.name]["exact"] else 2

    def _timed(self, row: Row, batches: int) -> int:
        """One worker takes as long for a batch as K together for K of them; a GPU takes milliseconds."""
        on_gpu = self.setting.device != "cpu"
        if row.workers == "one":
            return GPU_TIMES * batches if on_gpu else max(LEAST, 2 * batches // self.setting.K)
        batches *= GPU_TIMES if on_gpu else 1
        M = method_of(row, self.setting, self.groups[row.name].m).M if row.kind == "pipeline" else 1
        return -(-batches // M) * M  # whole windows: as many updates in every stage

    def _there(self) -> list[Row]:
        return [row for row in self.rows if row.name in self.groups]

    def _rest(self, workers: WorkerGroup) -> None:
        """Where memory is short, only the row that is being timed holds its batches in flight."""
        if not self.thrifty and memory_left() < SPARE:
            self.say("memory is short: rows give theirs back between rounds, and are filled again")
            self.thrifty = True
            for other in self.groups.values():
                if other.row.name in self.found:
                    other.ask("rest")
        if self.thrifty:
            workers.ask("rest")

    @contextlib.contextmanager
    def _row(self, row: Row) -> Iterator[None]:
        """A row that fails is left out, and the others go on."""
        try:
            yield
        except RowFailedError as error:
            self.left_out[row.name] = str(error)
            self.say(f"{row.name} is left out: {error}")
            self.groups.pop(row.name).close()
            if row.name in ALWAYS:
                raise UserError(f"{row.name}, which all others are compared with, failed: {error}") from None

    def close(self) -> None:
        for workers in self.groups.values():
            workers.close()
        self.fork_server.close()

    # ---- what is known

    def as_dict(self) -> dict[str, Any]:
        request, setting = self.request, self.setting
        rows = [{name: value for name, value in found.items() if name != "first"} for found in self.found.values()]
        settings = {
            **setting.as_dict(),
            "against": request.against,
            "repetitions": request.repetitions,
            "rounds": self.rounds,
            "batches": self.batches,
            "partition": request.partition,
            "budget_minutes": request.minutes,
            "cores": len(cores_here()),
            "cores_shared": setting.device == "cpu" and len(cores_here()) < setting.K,
            "load": round(self.load, 2),
            "memory": MEMORY[setting.device],
            "seconds": round(self.say.seconds, 1),
        }
        bound = (
            {**self.bound, "meaning": BOUND}
            if self.bound
            else {
                "seconds_per_batch": [],
                "samples_per_second": [],
                "stages": [],
                "meaning": "not measured: all stages share one GPU" if setting.device != "cpu" else BOUND,
            }
        )
        return {
            "settings": settings,
            "rows": rows,
            "left_out": self.left_out,
            "bound": bound,
            "provenance": self.origin,
        }

    def write(self) -> None:
        """bench.json, complete or not at all."""
        save(self.out / "bench.json", self.as_dict())


def note(row: Row, setting: Setting, m: int | None, tried: int = 1) -> str:
    """What the figures of a row mean beyond its name; m is the best of so many that were tried."""
    parts = []
    if row.kind == "loop":
        parts.append(
            "a hand-written loop"
            if setting.device == "cpu"
            else "recorded as CUDA graphs"
            if row.cores == "all"
            else "eager"
        )
    if m:
        best = "the best of those tried" if tried > 1 else "no other number tried"
        parts.append(f"{m} micro-batches of {setting.batch_size // m}, {best}")
    if row.kind == "pipelining":
        parts.append("BatchNorm sees micro-batches, and its running statistics move with each of them")
    if row.setting == "ScheduleInterleaved1F1B":
        parts.append(f"{2 * setting.K} chunks, two a worker, cut for themselves")
    if row.kind == "ddp":
        parts.append(
            f"{setting.batch_size // setting.K} samples a worker, by which BatchNorm normalises; bytes by the "
            "formula of a ring"
        )
    if row.kind == "pipeline":
        method = method_of(row, setting, m)
        if own := setting.methods.get(row.setting):
            parts.append(", ".join(f"{name}={shown(value)}" for name, value in own.items()))
        if method.m > 1:
            parts.append("BatchNorm normalises by micro-batch, its running statistics move once a batch")
        if method.M > 1:
            parts.append(f"an update every {method.M} batches")
        if method.barrier:
            parts.append("all stages wait for each other after every forward, as published")
        if method.weights == "replay":
            parts.append("forwards are repeated")
    return "; ".join(parts)


def memory_left() -> float:
    """Share of this machine's memory that is free."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])


def without_out(command: list[str]) -> list[str]:
    """A command without the places of its files, which are nobody else's."""
    kept, skip = [], False
    for part in command:
        if not skip and part not in ("--out", "--profile") and not part.startswith(("--out=", "--profile=")):
            kept.append(part)
        skip = part in ("--out", "--profile")
    return kept


def save(path: Path, content: dict[str, Any]) -> None:
    """JSON, complete or not at all."""
    record.write(path, json.dumps(content, indent=1) + "\n")


def folder_for(out: Path | None, default: str, file: str) -> Path:
    """A folder that can be written to, and holds no such record yet."""
    folder, count = out or Path("runs") / default, 1
    while out is None and (folder / file).exists():
        count += 1
        folder = Path("runs") / f"{default}-{count}"
    if (folder / file).exists():
        raise UserError(f"{folder} already holds {file}: choose another --out")
    record.check_free(folder)
    return folder


def bench(request: Request, *, show: bool = True) -> tuple[dict[str, Any], Path]:
    """The whole run; what was measured is in the folder also where it is stopped by Ctrl-C."""
    setting = request.setting()
    rows = chosen(request.against, request.device, methods=tuple(setting.methods))
    name = f"bench-{setting.model}-b{setting.batch_size}-K{setting.K}"
    out = folder_for(request.out, name, "bench.json")
    say, load = Spoken(show=show), os.getloadavg()[0]
    if setting.device == "cuda":
        check_gpu()
    setting = placed(
        setting, by=request.partition, cuts=request.cuts, units=request.units, file=request.profile, say=say
    )
    if setting.device == "cpu" and (shared := shared_cores(setting.K)):
        print(f"offbeat: {shared}", file=sys.stderr)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({first_line(error)}): choose another --out") from error
    run = Bench(request, setting, out, say, rows, load=load)
    if setting.device == "cuda":
        run.origin["machine"] = f"{gpu_name()}, {run.origin['machine']}"
    say(f"{setting.model}, b={setting.batch_size}, K={setting.K}, cuts {list(setting.cuts)}")
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        try:
            run.start(Path(folder))
            run.prepare()
            run.go()
        except KeyboardInterrupt:
            raise Interrupted(finish(run) or "stopped by Ctrl-C before anything was measured") from None
        finally:
            run.close()
    finish(run)
    return run.as_dict(), out


def finish(run: Bench) -> str | None:
    """Write table and picture of what there is; says where, for one who stopped it."""
    if not any(found["seconds_per_batch"] for found in run.found.values()):
        return None
    run.write()
    content = run.as_dict()
    (run.out / "table.md").write_text(bench_table.page(content))
    by_the_way(lambda path: draw_bench(content, path), run.out / "bench.svg", run.out / "bench.png")
    return f"stopped by Ctrl-C; what was measured so far is in {run.out}"


def shared_cores(K: int) -> str | None:
    """The warning where workers have to share cores."""
    n = len(cores_here())
    if n >= K:
        return None
    return f"{K} workers on {n} core{'s' * (n > 1)}: cores are shared, so that times are not those of one core a stage"


def origin() -> dict[str, Any]:
    """Where a record comes from, without the places of its files."""
    made = provenance()
    return {**made, "command": without_out(made["command"])}


def check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("--device cuda, but torch finds no GPU here: leave it out, or use a machine that has one")
