"""The benchmark: all rows are built, then every round times every row once. The record is written after each."""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from offbeat.errors import UserError
from offbeat.report import bench_table
from offbeat.report.draw import draw_bench, draw_if_possible
from offbeat.runs.launch import check_cores, joined_group, workers_here
from offbeat.runs.train import file_name
from offbeat.studies.bench import machines
from offbeat.studies.bench.fork_server import ForkServer
from offbeat.studies.bench.memory import check_memory, memory_left
from offbeat.studies.bench.records import folder_for, origin, stored
from offbeat.studies.bench.request import BenchRequest
from offbeat.studies.bench.rows import (
    ALWAYS,
    OURS,
    BenchRow,
    BenchSetting,
    batches_per_update,
    chosen,
    cores_here,
    described,
    left_out,
    method_of,
    micro_batches,
)
from offbeat.studies.bench.worker_group import PATIENCE, RowFailedError, WorkerGroup
from offbeat.studies.runner import Failure, StudyRunner, isolated

LEAST = 2  # batches timed per round where time is short
WORSE = 1.05  # times the best: more micro-batches would be slower still
GPU_TIMES = 25  # times as many batches on a GPU
SPARE = 0.3  # of all memory: with less of it free, rows release theirs between rounds
MEMORY = {
    "cpu": "peak resident memory of the worker with the most, less what torch takes without a network",
    "cuda": "peak of torch's allocator on the GPU, of all stages together",
}
BOUND = (
    "the slowest stage of ADL, all stages computing at the same time on fixed messages, nothing sent; of rows with "
    "other cuts, that of ADL with micro-batches on the same cuts, where it was timed"
)
TIMES = ("samples_per_second", "seconds_per_batch", "processor_seconds")  # one of each per round


@dataclass
class Bench:
    """A benchmark that runs: its worker groups, and what they have measured."""

    request: BenchRequest
    setting: BenchSetting
    runner: StudyRunner
    rows: list[BenchRow]
    origin: dict[str, Any]
    earlier: dict[str, Any]  # the record that this continues, if there is one
    groups: dict[str, WorkerGroup] = field(default_factory=dict)
    fork_server: ForkServer = field(default_factory=machines.fork_server)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    short_of_memory: bool = False
    batches: int = 0
    rounds: int = 0
    load: float = 0.0  # of other processes, before anything was started here

    def __post_init__(self) -> None:
        if had := self.earlier.get("bound", {}).get("seconds_per_batch"):
            self.bound = {name: value for name, value in self.earlier["bound"].items() if name != "meaning"}
            self.runner.report(f"continuing the record of {len(had)} rounds")

    # ---- before the rounds

    def start(self, folder: Path) -> None:
        """Start the processes of all rows."""
        for row in self.rows:
            if reason := left_out(row, self.setting, self.request.micro_batches):
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
        self.runner.report(f"{len(self.groups)} rows in {count} processes")
        for workers in list(self.groups.values()):
            with self._isolated(workers.row):
                workers.ready()

    def prepare(self) -> None:
        """Build every row with its fastest number of micro-batches; measure what it sends and holds.

        Rows without micro-batches are built at the same time, as far as there are cores: nothing of it is compared.
        """
        groups = [self.groups[row.name] for row in self._there()]
        plain = [workers for workers in groups if not workers.row.swept and not workers.row.all_cores]
        for at in range(0, len(plain), self._side_by_side()):
            self._fill_together(plain[at : at + self._side_by_side()])
        for workers in [workers for workers in groups if workers not in plain]:
            with self._isolated(workers.row):
                tried = self._sweep(workers) if workers.row.swept else {}
                self._enter(workers, tried, *self._fill(workers, _fastest(tried)))
        self.found = {row.name: self.found[row.name] for row in self._there()}
        self.batches = self._fitting()

    def _patience(self) -> float:
        """Seconds until a worker must answer: one row that hangs must not take the time of all."""
        minutes = self.request.minutes
        return PATIENCE if minutes is None else min(PATIENCE, max(60.0, 20 * minutes))

    def _fill_together(self, group: list[WorkerGroup]) -> None:
        pool = ThreadPoolExecutor(len(group))
        try:
            for workers, filled in [(workers, pool.submit(self._fill, workers, None)) for workers in group]:
                with self._isolated(workers.row):
                    self._enter(workers, {}, *filled.result())
        except BaseException:
            self.close()  # threads that wait for an answer see that the worker has ended
            raise
        finally:
            pool.shutdown()

    def _side_by_side(self) -> int:
        """How many rows can run at the same time on cores of their own."""
        alone = self.setting.device == "cpu" and not joined_group()
        return max(1, len(cores_here()) // self.setting.K) if alone else 1

    def _sweep(self, workers: WorkerGroup) -> dict[int, float]:
        """Seconds per batch, or per update of micro-batches, by their number, until more of them are clearly slower."""
        earlier = self._earlier(workers.row)
        if had := earlier.get("sweep"):
            return {int(m): seconds for m, seconds in had.items()}
        if m := earlier.get("micro_batches"):  # a record in which another row chose it
            return {int(m): 0.0}
        numbers = micro_batches(workers.row, self.setting, self.request.micro_batches)
        return workers.sweep(numbers, worse=WORSE, report=self.runner.report)

    def _fill(self, workers: WorkerGroup, m: int | None) -> tuple[float, list[int], list[dict[str, Any]]]:
        """Seconds of a first batch, bytes that each worker sends per batch, and what the workers hold."""
        if m is None or workers.m != m:
            workers.ask("build", m)
            workers.m = m
        parts = batches_per_update(workers.row, self.setting, m)
        first = parts * median(workers.seconds(0, 1)[0])  # a stage waits for those before it in this one
        return first, [parts * answer["bytes"] for answer in workers.ask("sent")], workers.ask("look")

    def _enter(
        self, workers: WorkerGroup, tried: dict[int, float], first: float, sent: list[int], looked: list[dict[str, Any]]
    ) -> None:
        row, earlier = workers.row, self._earlier(workers.row)
        self.found[row.name] = {
            **described(row, self.setting, workers.m, tried),
            "family": row.family,
            **{name: list(earlier.get(name, [])) for name in TIMES},
            **({"bound": earlier["bound"]} if "bound" in earlier else {}),
            "memory_per_worker": max(answer["memory"] for answer in looked),
            "memory": [answer["memory"] for answer in looked],
            "bytes_moved": sum(sent),
            "first": first,
        }
        self.runner.report(f"{row.name} is ready, {1000 * first:.0f} ms per batch")
        self._release(workers)

    def _earlier(self, row: BenchRow) -> dict[str, Any]:
        """What the record that this continues has of a row."""
        return next((had for had in self.earlier.get("rows", []) if had["name"] == row.name), {})

    def _fitting(self) -> int:
        """Batches timed per row and round, so that all rounds fit into the budget."""
        if self.earlier:
            return int(self.earlier["settings"]["batches"])
        if self.request.minutes is None:
            return self.request.batches
        left = 60 * self.request.minutes - self.runner.seconds
        fixed = sum(self._warm_up(row) * self.found[row.name]["first"] for row in self._there())
        each = sum(self.found[row.name]["first"] * self._timed(row, 100) / 100 for row in self._there())
        fits = (0.95 * left / self.request.repetitions - fixed) / max(each, 1e-9)
        return int(min(self.request.batches, max(LEAST, fits)))

    # ---- rounds

    def go(self) -> None:
        """All rounds that are not in the record yet, as far as there is time; the first one in any case."""
        late: list[int] = []
        self.runner.run(range(self.request.repetitions), self._round, late=late.append, least=1)
        if late:
            self.runner.report(f"no time for {len(late)} more rounds in {self.request.minutes:g} minutes")

    def _round(self, number: int) -> None:
        began = self.runner.seconds
        for row in [row for row in self._there() if len(self.found[row.name]["seconds_per_batch"]) <= number]:
            with self._isolated(row):
                self._time(row)
                self.write()
        self.rounds = number + 1
        self.runner.report(f"round {self.rounds} of {self.request.repetitions}, {self.runner.seconds - began:.0f} s")

    def _time(self, row: BenchRow) -> None:
        workers, found = self.groups[row.name], self.found[row.name]
        batches, parts = self._timed(row, self.batches), batches_per_update(row, self.setting, workers.m)
        each, busy = workers.seconds(self._warm_up(row), batches)
        seconds = parts * max(each)
        found["seconds_per_batch"].append(seconds)
        found["processor_seconds"].append(parts * busy)
        speed = self.setting.batch_size / seconds
        found["samples_per_second"].append(speed)
        unit = "update" if self.setting.batch_per_update or row.micro else "batch"
        self.runner.report(f"{row.name}: {1000 * seconds:.0f} ms per {unit}, {speed:,.0f} samples/s")
        other_cuts = found["cuts"] != self.found[OURS]["cuts"]
        if row.bounds and (row.name == OURS or other_cuts) and self.setting.device == "cpu":
            bound = found.setdefault("bound", {}) if other_cuts else self.bound
            stages = [parts * seconds for seconds in workers.seconds(LEAST, batches, what="bound")[0]]
            bound.setdefault("stages", []).append(stages)
            bound.setdefault("seconds_per_batch", []).append(max(stages))
            bound.setdefault("samples_per_second", []).append(self.setting.batch_size / max(stages))
            self.runner.report(f"bound of {row.name}: {1000 * max(stages):.0f} ms per {unit}")
        found["staleness_measured"] = [level for answer in workers.ask("look") for level in answer["staleness"]]
        self._release(workers)

    def _warm_up(self, row: BenchRow) -> int:
        """Batches that are not timed. Stages that do not wait for each other need two: each then is as far ahead of
        the next as the buffered messages allow. Across machines messages are under way meanwhile: they need as many as
        fill the pipeline."""
        if self.found[row.name]["exact"]:
            return 1
        return 2 + (method_of(row, self.setting, self.groups[row.name].m).fill(self.setting.K) if joined_group() else 0)

    def _timed(self, row: BenchRow, batches: int) -> int:
        """One worker takes as long for one batch as K workers for K batches; a GPU takes milliseconds."""
        on_gpu = self.setting.device != "cpu"
        if row.alone:
            return GPU_TIMES * batches if on_gpu else max(LEAST, 2 * batches // self.setting.K)
        m = self.groups[row.name].m
        batches *= (GPU_TIMES if on_gpu else 1) * batches_per_update(row, self.setting, m)
        M = method_of(row, self.setting, m).M if row.kind == "pipeline" else 1
        return -(-batches // M) * M  # whole windows: every stage does the same number of updates

    def _there(self) -> list[BenchRow]:
        return [row for row in self.rows if row.name in self.groups]

    def _release(self, workers: WorkerGroup) -> None:
        """Where memory is short, only the row that is timed holds batches in flight."""
        if not self.short_of_memory and memory_left() < SPARE:
            self.runner.report("memory is short: rows release theirs between rounds, and are filled again")
            self.short_of_memory = True
            for other in self.groups.values():
                if other.row.name in self.found:
                    other.ask("release")
        if self.short_of_memory:
            workers.ask("release")

    def _isolated(self, row: BenchRow) -> AbstractContextManager[None]:
        return isolated(partial(self._leave_out, row), errors=RowFailedError)

    def _leave_out(self, row: BenchRow, failure: Failure) -> None:
        """A row that fails is left out; the others are timed."""
        self.left_out[row.name] = failure.reason
        self.runner.report(f"{row.name} is left out: {failure.reason}")
        self.groups.pop(row.name).close()
        if row.name in ALWAYS:
            raise UserError(f"{row.name}, with which all others are compared, failed: {failure.reason}")

    def close(self) -> None:
        for workers in self.groups.values():
            workers.close()
        self.fork_server.close()

    # ---- what is known

    def as_dict(self) -> dict[str, Any]:
        request, setting = self.request, self.setting
        on_gpu = setting.device != "cpu"
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
            "cores_shared": not on_gpu and len(cores_here()) < setting.K,
            "load": round(self.load, 2),
            "memory": MEMORY[setting.device],
            "seconds": round(self.runner.seconds, 1),
        }
        bound = self.bound or {"seconds_per_batch": [], "samples_per_second": [], "stages": []}
        return {
            "settings": settings,
            "rows": rows,
            "left_out": self.left_out,
            "bound": {**bound, "meaning": "not measured: all stages share one GPU" if on_gpu else BOUND},
            "provenance": self.origin,
        }

    def write(self) -> None:
        self.runner.write("bench.json", self.as_dict(), indent=1)


def _fastest(tried: dict[int, float]) -> int | None:
    return min(tried, key=lambda m: tried[m], default=None)


def bench(request: BenchRequest, *, show: bool = True) -> tuple[dict[str, Any], Path]:
    """The whole benchmark. With `out` it continues the record there; Ctrl-C keeps what was measured."""
    machines.check(request.K, request.device)
    setting = request.setting()
    if request.device == "cpu":
        check_cores(workers_here(request.K), instead="")
    rows = chosen(request.against, request.device, methods=tuple(setting.methods))
    check_memory(setting, [row for row in rows if left_out(row, setting, request.micro_batches) is None])
    out = folder_for(request.out, f"bench-{file_name(setting.model)}-b{setting.batch_size}-K{setting.K}", "bench.json")
    load = load_here()
    if setting.device == "cuda":
        check_gpu()
    made = origin(on_gpu=setting.device == "cuda")
    runner = StudyRunner(out, request.minutes, show)
    earlier = stored(out / "bench.json", identity(request, setting), made)
    setting = request.placed(setting, rows, earlier, runner)
    if setting.device == "cpu" and (shared := shared_cores(setting.K)):
        print(f"offbeat: {shared}", file=sys.stderr)
    runner.report(f"{setting.model}, b={setting.batch_size}, K={setting.K}, cuts {list(setting.cuts)}")
    run = Bench(request, setting, runner, rows, made, earlier or {}, load=load)
    with runner.opened(partial(finish, run), arguments=f" with out={str(out)!r}"):
        with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
            try:
                run.start(Path(folder))
                run.prepare()
                run.go()
            finally:
                run.close()
        finish(run)
    return run.as_dict(), out


def identity(request: BenchRequest, setting: BenchSetting) -> dict[str, Any]:
    """The settings by which a record is that of a request."""
    decided = () if request.cuts else ("cuts", "units", "chunk_cuts")  # here, by the first command
    given = {name: value for name, value in setting.as_dict().items() if name not in decided}
    given |= {"cuts": list(request.cuts), "units": request.units or "layers"} if request.cuts else {}
    given.pop("chunk_cuts", None)
    return {**given, "against": request.against, "partition": request.partition}


def finish(run: Bench) -> None:
    """Write the table and the picture of what was measured, if anything was."""
    if any(found["seconds_per_batch"] for found in run.found.values()):
        run.write()
        content, out = run.as_dict(), run.runner.folder
        run.runner.write("table.md", bench_table.page(content))
        draw_if_possible(lambda path: draw_bench(content, path), out / "bench.svg", out / "bench.png")


def load_here() -> float:
    """Other processes that may run on the cores of this one: all that do not fit on the others of the machine."""
    elsewhere = (os.cpu_count() or 1) - len(cores_here())
    return max(0.0, os.getloadavg()[0] - elsewhere)


def shared_cores(K: int) -> str | None:
    """The warning where workers have to share cores."""
    n = len(cores_here())
    K = workers_here(K)
    if n >= K:
        return None
    return f"{K} workers on {n} core{'s' * (n > 1)}: cores are shared, so these are not the times of one core per stage"


def check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("device='cuda', but torch finds no GPU here: leave it out, or use a machine that has one")
