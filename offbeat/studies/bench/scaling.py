"""`offbeat bench scaling`: how time per batch, memory and staleness grow with K, the batch and the depth.

strong   one network and batch on K = 1, 2, 4, ... workers
weak     a network that grows with K, so that a stage has the same amount of work: ResNet-(6K+2)
batch    more samples at one K;  depth: deeper networks at one K

Beyond the cores of the machine the clock predicts: memory and staleness follow from the method's program, and time from
measured units, cut for every K, on links of stated latency and bandwidth. With `out`, the record there is continued.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import models
from offbeat.method import Method
from offbeat.methods import named, parsed, with_settings
from offbeat.partitioning import Profile, solve
from offbeat.partitioning.refine import stage_sums
from offbeat.report.draw import by_the_way, draw_scaling
from offbeat.runs.train import file_name
from offbeat.studies.bench.cuts import counted, measured
from offbeat.studies.bench.fork_server import ForkServer
from offbeat.studies.bench.records import folder_for, origin, stored
from offbeat.studies.bench.request import check_numbers
from offbeat.studies.bench.rows import ROWS, BenchSetting, cores_here, left_out, row_of
from offbeat.studies.bench.worker_group import RowFailedError, WorkerGroup
from offbeat.studies.plan import Kept, LinkCost
from offbeat.studies.runner import Failure, StudyRunner
from offbeat.timeline import Costs, period

# Latency in seconds and bandwidth in bytes per second, one way, as makers or operators state them, rounded.
LINKS = {
    "no cost": LinkCost(0.0, float("inf")),
    "NVLink": LinkCost(5e-6, 450e9),
    "PCIe 4.0 x16": LinkCost(1e-5, 25e9),
    "10 GbE": LinkCost(5e-5, 1.17e9),
    "Internet, 50 ms": LinkCost(5e-2, 12.5e6),
}
SIMULATED = ("adl", "adl-1f1b", "gpipe")
STAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GROWING = (1, 2, 3, 5, 7, 9, 16)  # K of ResNet-(6K+2) as far as there are such networks
MOST_MICRO = 4  # micro-batches per stage, as far as there are samples for them
GROWS = 4  # times as long as for half as many stages, the clock takes
MEANING = (
    "measured seconds of every unit on one core of this machine, cut anew for every K; a message is under "
    "way for latency + bytes / bandwidth, and a link carries no more than its bandwidth; updates are not "
    "counted"
)


@dataclass(frozen=True)
class ScalingRequest:
    """The options of `offbeat bench scaling`."""

    model: str = "resnet110"
    batch_size: int = 32
    K: int = 4  # where the batch or the depth is what changes
    method: str = "adl"  # with settings, as text
    M: int | None = None
    stages: tuple[int, ...] = (1, 2, 4, 8, 16)
    batch_sizes: tuple[int, ...] = (16, 64, 128)
    depths: tuple[str, ...] = ("resnet20", "resnet56", "resnet110", "resnet164", "resnet1202")
    most_stages: int = STAGES[-1]
    repetitions: int = 3
    batches: int = 4
    minutes: float | None = None
    out: Path | None = None

    def make_method(self) -> Method:
        return with_settings(*parsed(self.method, M=self.M))

    def setting(self) -> BenchSetting:
        """What all points share, checked."""
        check_numbers(
            self.minutes,
            {
                "K": [self.K],
                "M": [1 if self.M is None else self.M],
                "batch_size": [self.batch_size],
                "stages": self.stages,
                "batch_sizes": self.batch_sizes,
                "most_stages": [self.most_stages],
                "repetitions": [self.repetitions],
                "batches": [self.batches],
            },
        )
        name, settings = parsed(self.method, M=self.M)
        for depth in self.depths:
            models.default_size(depth)
        shape, classes = models.default_size(self.model)
        M = with_settings(name, settings).M
        return BenchSetting(self.model, shape, classes, self.batch_size, self.K, M, methods={name: settings})


@dataclass
class ScalingStudy:
    """A study that runs, and what it has measured."""

    request: ScalingRequest
    runner: StudyRunner
    base: BenchSetting
    origin: dict[str, Any]
    points: list[dict[str, Any]] = field(default_factory=list)
    counted: list[dict[str, Any]] = field(default_factory=list)
    simulation: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    fork_server: ForkServer = field(default_factory=ForkServer)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings by which a record is that of this request."""
        method = self.request.make_method()
        request = {name: value for name, value in asdict(self.request).items() if name not in ("out", "minutes")}
        own = {name: value for name, value in self.base.methods[method.name].items() if name != "M"}
        made = {**request, "method": method.name, "M": method.M, "cores": len(cores_here())}
        return {**made, "method_settings": own} if own else made

    def as_dict(self) -> dict[str, Any]:
        spent = {"minutes": self.request.minutes, "seconds": round(self.runner.seconds, 1)}
        return {
            "settings": {**self.identity, **spent},
            "points": self.points,
            "counted": self.counted,
            "simulation": self.simulation,
            "left_out": self.left_out,
            "provenance": self.origin,
        }

    def write(self) -> None:
        self.runner.write("scaling.json", self.as_dict(), indent=1)

    def finish(self) -> None:
        """Write the record and its picture."""
        self.write()
        content, out = self.as_dict(), self.runner.folder
        if self.simulation:
            by_the_way(lambda path: draw_scaling(content, path), out / "scaling.svg", out / "scaling.png")


# ---- counted


def kept_by(method: Method, setting: BenchSetting, costs: Profile, cuts: tuple[int, ...]) -> dict[str, Any]:
    """Memory and staleness of every stage, by the program of the method."""
    K = len(cuts) + 1
    kept = Kept.of(method, K)
    pieces = list(pairwise([0, *cuts, len(costs.units)]))
    return {
        "model": setting.model,
        "batch_size": setting.batch_size,
        "K": K,
        "cuts": list(cuts),
        "staleness": kept.staleness,
        "in_flight": kept.in_flight,
        "versions": kept.versions,
        "memory_counted": [kept.bytes(costs, k, *piece) for k, piece in enumerate(pieces, 1)],
    }


def best_cuts(costs: Profile, K: int) -> tuple[int, ...] | None:
    """The cuts that balance, or None where there are too few units."""
    return solve(costs.costs(), K, legal=costs.legal_cuts).cuts if len(costs.legal_cuts) + 1 >= K else None


# ---- measured


def points(request: ScalingRequest) -> Iterator[tuple[str, BenchSetting]]:
    """All points with their axis, the most informative first: a budget may leave out the last ones."""
    base = request.setting()
    n = len(cores_here())
    for K in request.stages:
        yield "strong", replace(base, K=K)
    for K in GROWING:
        if n >= K:
            yield "weak", replace(base, model=f"resnet{6 * K + 2}", K=K)
    at = replace(base, K=min(request.K, n))
    for b in request.batch_sizes:
        if b != base.batch_size:
            yield "batch", replace(at, batch_size=b)
    for depth in request.depths:
        shape, classes = models.default_size(depth)
        yield "depth", replace(at, model=depth, shape=shape, classes=classes)


def measure(setting: BenchSetting, request: ScalingRequest, folder: Path, fork_server: ForkServer) -> dict[str, Any]:
    """Time per batch and memory: of the method on K workers, of back-propagation on one."""
    row = row_of(request.make_method().name) if setting.K > 1 else ROWS["bp"]
    workers = WorkerGroup(row, setting, folder, fork_server)
    try:
        workers.start()
        workers.ready()
        workers.ask("build")
        warm_up, batches = (2, request.batches) if setting.K > 1 else (1, 2)
        seconds = [max(workers.seconds(warm_up, batches)[0]) for _ in range(request.repetitions)]
        looked = workers.ask("look")
    finally:
        workers.close()
    return {
        "seconds_per_batch": seconds,
        "memory": [found["memory"] for found in looked],
        "staleness_measured": [level for found in looked for level in found["staleness"]],
    }


# ---- simulated


def period_on(link: LinkCost, method: Method, costs: Profile, cuts: tuple[int, ...]) -> float:
    """Seconds per batch of the measured units between these cuts, on that link.

    A message takes latency + bytes / bandwidth; a link, which carries one message per batch each way, carries no more
    batches than its bandwidth allows.
    """

    sizes = [costs.boundary_bytes[cut] for cut in cuts]
    # the clock divides a message's time by m; its latency is not less for a smaller one
    hops = [method.m * link.latency + size / link.bandwidth for size in sizes]
    forward = stage_sums([unit.forward for unit in costs.units], cuts)
    backward = stage_sums([unit.backward for unit in costs.units], cuts)
    given = Costs(forward, backward, up=hops, down=hops)
    return max([period(method, given), *(size / link.bandwidth for size in sizes)])


def simulated(request: ScalingRequest, setting: BenchSetting, K: int) -> dict[str, Method]:
    """The methods that are simulated, by name; GPipe with 4K micro-batches, or as many as there are samples."""
    own = request.make_method()
    m = max(2, min(MOST_MICRO * K, setting.batch_size))
    others = {name: named(name, m=m) if named(name).m > 1 else named(name, M=setting.M) for name in SIMULATED}
    return {**others, own.name: own}


def simulate(study: ScalingStudy, costs: Profile) -> dict[str, Any]:
    """The speed-up of every method on every link, K as far as there are units and half of the time."""
    request, runner, setting = study.request, study.runner, study.base
    alone = sum(unit.forward + unit.backward for unit in costs.units)
    half = float("inf") if request.minutes is None else 30 * request.minutes
    rows: list[dict[str, Any]] = []
    took = 0.0
    for K in [K for K in STAGES if request.most_stages >= K]:
        cuts = best_cuts(costs, K)
        if cuts is None or (rows and runner.seconds + GROWS * took > half):
            study.left_out.append(f"simulation from K={K} on: {'too few units' if cuts is None else 'no time'}")
            break
        began = runner.seconds
        runner.report(f"simulating K={K}")
        for name, method in simulated(request, setting, K).items():
            for link_name, link in LINKS.items():
                seconds = period_on(link, method, costs, cuts) if K > 1 else alone
                row = {"link": link_name, "method": name, "K": K, "m": method.m}
                rows.append({**row, "seconds_per_batch": seconds, "speedup": alone / seconds})
        took = runner.seconds - began
    return {
        "model": setting.model,
        "batch_size": setting.batch_size,
        "M": setting.M,
        "alone": alone,
        "links": {
            name: {"latency": link.latency, "bandwidth": link.bandwidth if link.bandwidth < float("inf") else None}
            for name, link in LINKS.items()
        },
        "units": len(costs.units),
        "rows": rows,
        "meaning": MEANING,
    }


# ---- the study


def scaling(request: ScalingRequest, *, show: bool = True) -> tuple[dict[str, Any], Path]:
    """The whole study; Ctrl-C keeps what was measured."""
    base = request.setting()
    out = folder_for(request.out, f"scaling-{file_name(request.model)}-b{request.batch_size}", "scaling.json")
    runner = StudyRunner(out, request.minutes, show)
    study = ScalingStudy(request, runner, base, origin())
    if earlier := stored(out / "scaling.json", study.identity, study.origin):
        study.points, study.simulation = earlier["points"], earlier["simulation"]
    with runner.opened(study.finish, arguments=f" with out={str(out)!r}"):
        try:
            with tempfile.TemporaryDirectory(prefix="offbeat-scaling-") as folder:
                measure_all(study, Path(folder))
        finally:
            study.fork_server.close()
        study.finish()
    return study.as_dict(), out


def measure_all(study: ScalingStudy, folder: Path) -> None:
    """Count, simulate, then measure every point that the record does not have yet."""
    request, runner, base = study.request, study.runner, study.base
    method = request.make_method()
    sizes = counted(base)
    for K in [K for K in STAGES if request.most_stages >= K]:
        cuts = best_cuts(sizes, K)
        if cuts is not None:
            study.counted.append(kept_by(method, base, sizes, cuts))
    runner.report(f"profiling {base.model}, b={base.batch_size}")
    costs = measured(base).profile
    study.simulation = study.simulation or simulate(study, costs)
    study.write()

    def point(task: tuple[str, BenchSetting]) -> None:
        axis, setting = task
        own = counted(setting)
        cuts = best_cuts(costs if axis == "strong" else own, setting.K)  # of the simulation, where the units are those
        if cuts is None:
            raise RowFailedError("too few units")
        place = Path(tempfile.mkdtemp(dir=folder))
        found = measure(replace(setting, cuts=cuts), request, place, study.fork_server)
        study.points.append({"axis": axis, **kept_by(method, setting, own, cuts), **found})
        runner.report(f"{titled(task)}: {1000 * median(found['seconds_per_batch']):.0f} ms per batch")
        study.write()

    def leave_out(task: tuple[str, BenchSetting], failure: Failure) -> None:
        study.left_out.append(f"{titled(task)}: {failure.reason}")
        runner.report(f"{titled(task)} is left out: {failure.reason}")

    def late(task: tuple[str, BenchSetting]) -> None:
        study.left_out.append(f"{titled(task)}: no time in {request.minutes:g} minutes")

    done = {(had["axis"], had["model"], had["batch_size"], had["K"]) for had in study.points}
    possible, cores = [], len(cores_here())
    for task in points(request):
        axis, setting = task
        limit = left_out(row_of(method.name), setting) if setting.K > 1 else None
        reason = f"only {cores} core{'s' * (cores > 1)}" if cores < setting.K else limit
        if reason:
            study.left_out.append(f"{titled(task)}: {reason}")
        elif (axis, setting.model, setting.batch_size, setting.K) not in done:
            possible.append(task)
    runner.run(possible, point, failed=leave_out, late=late, errors=RowFailedError)


def titled(task: tuple[str, BenchSetting]) -> str:
    axis, setting = task
    return f"{axis}: {setting.model}, b={setting.batch_size}, K={setting.K}"


def show(content: dict[str, Any], where: str) -> None:
    """On the terminal."""
    for line in lines(content):
        print(line)
    for reason in content["left_out"]:
        print(f"left out: {reason}", file=sys.stderr)
    print(f"records: {where}")


def lines(content: dict[str, Any]) -> list[str]:
    """A line per measured point, then what the clock predicts for the largest K."""
    made = []
    for point in content["points"]:
        made.append(
            f"{point['axis']:6} {point['model']:10} b={point['batch_size']:<4} K={point['K']:<3} "
            f"{1000 * median(point['seconds_per_batch']):8.0f} ms per batch, at most "
            f"{max(point['memory']) / 1e6:,.0f} MB per worker, staleness of stage 1 {point['staleness'][0]:.2f}"
        )
    rows = content["simulation"]["rows"]
    largest = max(row["K"] for row in rows)
    for name in dict.fromkeys(row["method"] for row in rows):
        each = ", ".join(
            f"{row['speedup']:.2g} ({row['link']})" for row in rows if row["K"] == largest and row["method"] == name
        )
        made.append(f"by the clock, K={largest}, {name}: {each} times BP")
    return made
