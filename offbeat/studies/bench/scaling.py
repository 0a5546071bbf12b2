"""`offbeat bench scaling`: how time per batch, memory and staleness grow with K, the batch and the depth.

strong   one network and batch on K = 1, 2, 3, ... workers
replicas the same with R = 2, 3, ... copies of the K stages, on K x R workers
weak     a network that grows with K, so that a stage has the same amount of work: ResNet-(6K+2)
batch    more samples at one K;  depth: deeper networks at one K

Beyond the cores of the machine the clock predicts, and each such row is marked as simulated: memory and staleness
follow from the method's program, and time from measured units, cut for every K, on links of stated latency and
bandwidth. Next to measured points is the prediction for this machine, from units and links that were measured alone,
and calibrated by stages that compute at the same time. With `out`, the record there is continued.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import models
from offbeat.errors import UserError
from offbeat.method import Method
from offbeat.methods import named, parsed, with_settings
from offbeat.partitioning import Profile
from offbeat.report.draw import draw_if_possible, draw_scaling
from offbeat.runs.launch import joined_group
from offbeat.runs.train import file_name
from offbeat.studies.bench.cuts import best_cuts, counted, measured
from offbeat.studies.bench.fork_server import ForkServer
from offbeat.studies.bench.prediction import PredictionHere, period_on
from offbeat.studies.bench.records import folder_for, origin, stored
from offbeat.studies.bench.request import check_numbers
from offbeat.studies.bench.rows import ROWS, BenchSetting, cores_here, left_out, row_of
from offbeat.studies.bench.worker_group import RowFailedError, WorkerGroup
from offbeat.studies.link_speeds import LINKS, PUBLISHED
from offbeat.studies.plan import Kept
from offbeat.studies.runner import Failure, StudyRunner

SIMULATED = ("adl", "adl-1f1b", "gpipe")
STAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPLICAS = (2, 4, 8, 16, 32, 64)  # simulated, with K up to MOST_REPLICATED
MOST_REPLICATED = 64
GROWING = (1, 2, 3, 5, 7, 9, 16)  # K of ResNet-(6K+2) as far as there are such networks
MOST_MICRO = 4  # micro-batches per stage, as far as there are samples for them
GROWS = 4  # times as long as for half as many stages, the clock takes
MEANING = (
    "measured seconds of every unit on one core of this machine, cut anew for every K; a message is under "
    "way for latency + bytes / bandwidth, and a link carries no more than its bandwidth; updates are not "
    "counted, except that replicas add their gradients once per update, as in `offbeat plan`"
)
PREDICTED = (
    "seconds per batch on this machine: units scaled to the whole network alone, messages over links between two "
    "processes here and their processor time; 'predicted_alone' without, 'predicted' with the slow-down of all stages "
    "that compute at the same time"
)


@dataclass(frozen=True)
class ScalingRequest:
    """The options of `offbeat bench scaling`."""

    model: str = "resnet110"
    batch_size: int = 32
    K: int = 4  # where the batch or the depth is what changes
    method: str = "adl"  # with settings, as text
    M: int | None = None
    stages: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    replicas: tuple[int, ...] = (1, 2, 3, 4)
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
        names = ("K", "M", "batch_size", "stages", "replicas", "batch_sizes", "most_stages", "repetitions", "batches")
        check_numbers(self.minutes, {name: getattr(self, name) for name in names})
        if self.most_stages < STAGES[1]:
            raise UserError(f"most_stages={self.most_stages}: use {STAGES[1]} or more for a sweep")
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
            "predicted": PREDICTED,
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
            draw_if_possible(lambda path: draw_scaling(content, path), out / "scaling.svg", out / "scaling.png")


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
        "replicas": setting.replicas,
        "cuts": list(cuts),
        "staleness": kept.staleness,
        "in_flight": kept.in_flight,
        "versions": kept.versions,
        "memory_counted": [kept.bytes(costs, k, *piece) for k, piece in enumerate(pieces, 1)],
    }


# ---- measured


def points(request: ScalingRequest) -> Iterator[tuple[str, BenchSetting]]:
    """All points with their axis, the most informative first: a budget may leave out the last ones."""
    base = request.setting()
    n = len(cores_here())
    for K in request.stages:
        yield "strong", replace(base, K=K)
    for R in request.replicas:
        for K in request.stages:
            if R > 1:
                yield "replicas", replace(base, K=K, replicas=R)
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
    """Time per batch and memory: of the method on K x R workers, of back-propagation on one; and of the stages that
    compute at the same time on fixed messages, seconds per batch each.

    A repetition times both, one after the other, so that what else the machine does slows down both.
    """
    method = request.make_method()
    row = row_of(method.name) if setting.K * setting.replicas > 1 else ROWS["bp"]
    workers = WorkerGroup(row, setting, folder, fork_server)
    seconds: list[float] = []
    at_once: list[list[float]] = []
    busy: dict[str, list[float]] = {"time": [], "bound": []}
    memory: list[int] = []
    try:
        workers.start()
        workers.ready()
        workers.ask("build")
        several = workers.count > 1
        windows = -(-request.batches // method.M)  # whole ones: replicas add their gradients once per window
        warm_up, batches = (2, windows * method.M) if several else (1, 2)
        for _ in range(request.repetitions):
            each, processor = workers.seconds(warm_up, batches)
            seconds.append(max(each))
            busy["time"].append(processor)
            looked = workers.ask("look")
            memory = memory or [found["memory"] for found in looked]  # before stages on fixed messages are made
            if several:
                each, processor = workers.seconds(warm_up, batches, what="bound")
                at_once.append(each)
                busy["bound"].append(processor)
    finally:
        workers.close()
    return {
        "seconds_per_batch": seconds,
        "at_once": [median(of_worker) for of_worker in zip(*at_once, strict=True)],
        "processor_seconds": busy["time"],
        "processor_seconds_at_once": busy["bound"],
        "memory": memory,
        "staleness_measured": [level for found in looked for level in found["staleness"]],
    }


# ---- simulated


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
    replicated: list[dict[str, Any]] = []
    took = 0.0
    for K in sorted(K for K in {*STAGES, *request.stages} if request.most_stages >= K):
        cuts = best_cuts(costs, K)
        if cuts is None or (rows and runner.seconds + GROWS * took > half):
            study.left_out.append(f"simulation from K={K} on: {'too few units' if cuts is None else 'no time'}")
            break
        began = runner.seconds
        runner.report(f"simulating K={K}")
        copies = sorted({*REPLICAS, *request.replicas} - {1}) if K <= MOST_REPLICATED else []
        for (name, method), (link_name, link), R in product(
            simulated(request, setting, K).items(), LINKS.items(), (1, *copies)
        ):
            if R > 1 and method.why_no_replicas():
                continue
            seconds = period_on(link, method, costs, cuts, replicas=R)
            row = {"link": link_name, "method": name, "K": K, "replicas": R, "m": method.m, "simulated": True}
            (rows if R == 1 else replicated).append(
                {**row, "seconds_per_batch": seconds, "speedup": R * alone / seconds}
            )
        took = runner.seconds - began
    return {
        "model": setting.model,
        "batch_size": setting.batch_size,
        "M": setting.M,
        "alone": alone,
        "links": {
            name: {
                "latency": link.latency,
                "bandwidth": link.bandwidth if link.bandwidth < float("inf") else None,
                **({"source": PUBLISHED[name].source} if name in PUBLISHED else {}),
            }
            for name, link in LINKS.items()
        },
        "units": len(costs.units),
        "rows": rows,
        "replica_rows": replicated,
        "meaning": MEANING,
    }


# ---- the study


def scaling(request: ScalingRequest, *, show: bool = True) -> tuple[dict[str, Any], Path]:
    """The whole study; Ctrl-C keeps what was measured."""
    base = request.setting()
    if joined_group():
        raise UserError("bench scaling under torchrun: it starts its own processes, run it without")
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
    found = measured(base)
    costs, here = found.profile, cache(lambda: PredictionHere.of(found))
    study.simulation = study.simulation or simulate(study, costs)
    study.write()

    def measure_point(task: tuple[str, BenchSetting]) -> None:
        axis, setting = task
        own = counted(setting)
        same = axis in ("strong", "replicas")
        cuts = best_cuts(costs if same else own, setting.K)  # of the simulation, where the units are those
        if cuts is None:
            raise RowFailedError("too few units")
        place = Path(tempfile.mkdtemp(dir=folder))
        point = {"axis": axis, **kept_by(method, setting, own, cuts)}
        point |= measure(replace(setting, cuts=cuts), request, place, study.fork_server)
        if same:
            point |= here().beside(method, point)
        study.points.append(point)
        runner.report(f"{titled(task)}: {times_of(point)}")
        study.write()

    def leave_out(task: tuple[str, BenchSetting], failure: Failure) -> None:
        study.left_out.append(f"{titled(task)}: {failure.reason}")
        runner.report(f"{titled(task)} is left out: {failure.reason}")

    def late(task: tuple[str, BenchSetting]) -> None:
        study.left_out.append(f"{titled(task)}: no time in {request.minutes:g} minutes")

    done = {(had["axis"], had["model"], had["batch_size"], had["K"], had["replicas"]) for had in study.points}
    possible, cores = [], len(cores_here())
    for task in points(request):
        axis, setting = task
        workers = setting.K * setting.replicas
        limit = left_out(row_of(method.name), setting) if workers > 1 else None
        reason = f"only {cores} core{'s' * (cores > 1)}, simulated instead" if cores < workers else limit
        if reason:
            study.left_out.append(f"{titled(task)}: {reason}")
        elif (axis, setting.model, setting.batch_size, setting.K, setting.replicas) not in done:
            possible.append(task)
    runner.run(possible, measure_point, failed=leave_out, late=late, errors=RowFailedError)


def titled(task: tuple[str, BenchSetting]) -> str:
    axis, setting = task
    replicas = f", R={setting.replicas}" if setting.replicas > 1 else ""
    return f"{axis}: {setting.model}, b={setting.batch_size}, K={setting.K}{replicas}"


def times_of(point: dict[str, Any]) -> str:
    """Milliseconds per batch of a point as measured, and as predicted where that is known."""
    seconds = median(point["seconds_per_batch"])
    text = f"{1000 * seconds:.0f} ms per batch"
    if "predicted" not in point:
        return text
    predicted = f"{1000 * point['predicted']:.0f} ms, {point['predicted'] / seconds:.2f} of measured"
    return f"{text} (predicted {predicted}; alone {1000 * point['predicted_alone']:.0f} ms)"


def show(content: dict[str, Any], where: str) -> None:
    """On the terminal."""
    for line in lines(content):
        print(line)
    for reason in content["left_out"]:
        print(f"left out: {reason}", file=sys.stderr)
    print(f"records: {where}")


def lines(content: dict[str, Any]) -> list[str]:
    """A line per measured point, then what the clock simulates for the largest K, and for the largest K x R."""
    made = []
    for point in content["points"]:
        made.append(
            f"{point['axis']:8} {point['model']:10} b={point['batch_size']:<4} K={point['K']:<3} "
            f"R={point['replicas']:<3} {times_of(point)}, at most "
            f"{max(point['memory']) / 1e6:,.0f} MB per worker, staleness of stage 1 {point['staleness'][0]:.2f}"
        )
    simulation = content["simulation"]
    for rows in filter(None, (simulation["rows"], simulation["replica_rows"])):
        K, R = max((row["K"], row["replicas"]) for row in rows)
        for name in dict.fromkeys(row["method"] for row in rows):
            mine = [row for row in rows if (row["K"], row["replicas"], row["method"]) == (K, R, name)]
            each = ", ".join(f"{row['speedup']:.3g} ({row['link']})" for row in mine)
            made.append(f"simulated, K={K}, R={R}, {name}: {each} times BP")
    return made
