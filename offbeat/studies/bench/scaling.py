"""`offbeat bench scaling`: how time a batch, memory and staleness grow with K, the batch and the depth.

strong   one network and batch on K = 1, 2, 4, ... workers
weak     a network that grows with K, so that every stage has as much to do: ResNet-(6K+2)
batch    more samples at one K;  depth: deeper networks at one K

What there are no cores for is left to the clock: memory and staleness follow from the method's program, and time from
measured units, cut for every K, on links that are stated.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from offbeat import models
from offbeat.errors import Interrupted, UserError, first_line
from offbeat.method import Method
from offbeat.methods import named
from offbeat.ops import Backward
from offbeat.partitioning import Profile, solve
from offbeat.report.draw import by_the_way, draw_scaling
from offbeat.studies.bench.cuts import counted, measured
from offbeat.studies.bench.fork_server import ForkServer
from offbeat.studies.bench.rounds import Spoken, folder_for, origin, save
from offbeat.studies.bench.rows import ROWS, Setting, cores_here
from offbeat.studies.bench.worker_group import RowFailedError, WorkerGroup
from offbeat.studies.plan import Kept, Network
from offbeat.timeline import Costs, period, timeline

# Latency in seconds and bandwidth in bytes a second, one way, as their makers or operators state them, rounded.
LINKS = {
    "no cost": Network(0.0, float("inf")),
    "NVLink": Network(5e-6, 450e9),
    "PCIe 4.0 x16": Network(1e-5, 25e9),
    "10 GbE": Network(5e-5, 1.17e9),
    "Internet, 50 ms": Network(5e-2, 12.5e6),
}
SIMULATED = ("adl", "adl-1f1b", "gpipe")
STAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GROWING = (1, 2, 3, 5, 7, 9, 16)  # K of ResNet-(6K+2) as far as there are such networks
MOST_MICRO = 4  # micro-batches a stage, as far as there are samples for them
GROWS = 4  # times as long as half as many stages takes the clock
FEW = 32  # stages up to which a period is taken over many batches
WINDOWS = 8  # of M updates, over which a simulated period is taken


@dataclass(frozen=True)
class Request:
    """What a user asked for."""

    model: str = "resnet110"
    batch_size: int = 32
    K: int = 4  # where the batch or the depth is what changes
    M: int = 4
    stages: tuple[int, ...] = (1, 2, 4, 8, 16)
    batch_sizes: tuple[int, ...] = (16, 64, 128)
    depths: tuple[str, ...] = ("resnet20", "resnet56", "resnet110", "resnet164", "resnet1202")
    most_stages: int = STAGES[-1]
    repetitions: int = 3
    batches: int = 4
    minutes: float | None = None
    out: Path | None = None

    def setting(self) -> Setting:
        """Checked as far as nothing has to be computed for it."""
        numbers = {
            "-K": [self.K],
            "-M": [self.M],
            "--batch-size": [self.batch_size],
            "--stages": self.stages,
            "--batch-sizes": self.batch_sizes,
            "--most-stages": [self.most_stages],
            "--repetitions": [self.repetitions],
            "--batches": [self.batches],
        }
        for name, values in numbers.items():
            for number in values:
                if number < 1:
                    raise UserError(f"{name} {number}: use whole numbers from 1 up")
        if self.minutes is not None and not self.minutes > 0:
            raise UserError(f"--budget-minutes {self.minutes:g}: use a number above 0")
        for depth in self.depths:
            models.describe(depth)
        known = models.describe(self.model)
        return Setting(self.model, known.shape, known.classes, self.batch_size, self.K, self.M)


@dataclass
class Study:
    """A study under way, and what it has found."""

    request: Request
    out: Path
    say: Spoken
    points: list[dict[str, Any]] = field(default_factory=list)
    counted: list[dict[str, Any]] = field(default_factory=list)
    simulation: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    origin: dict[str, Any] = field(default_factory=origin)
    fork_server: ForkServer = field(default_factory=ForkServer)

    def as_dict(self) -> dict[str, Any]:
        request = {name: value for name, value in asdict(self.request).items() if name != "out"}
        return {
            "settings": {**request, "method": "adl", "cores": len(cores_here()), "seconds": round(self.say.seconds, 1)},
            "points": self.points,
            "counted": self.counted,
            "simulation": self.simulation,
            "left_out": self.left_out,
            "provenance": self.origin,
        }

    def write(self) -> None:
        save(self.out / "scaling.json", self.as_dict())


# ---- counted


def kept_by(method: Method, setting: Setting, costs: Profile, cuts: tuple[int, ...]) -> dict[str, Any]:
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


def wanted(request: Request) -> Iterator[tuple[str, Setting]]:
    """The points by worth: what a reader asks first comes first, as long as there is time."""
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
        known = models.describe(depth)
        yield "depth", replace(at, model=depth, shape=known.shape, classes=known.classes)


def measure(setting: Setting, request: Request, folder: Path, fork_server: ForkServer) -> dict[str, Any]:
    """Time a batch and memory of ADL on K workers, of back-propagation on one."""
    workers = WorkerGroup(ROWS["adl" if setting.K > 1 else "bp"], setting, folder, fork_server)
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
        "memory": [said["memory"] for said in looked],
        "staleness_measured": [level for said in looked for level in said["staleness"]],
    }


# ---- simulated


def steady(method: Method, costs: Costs) -> float:
    """Seconds a batch in steady state by the clock, also for so many stages that `timeline.period` would take minutes.

    Micro-batches: stage 1 ends a batch last, and begins the next right behind it, so that one batch tells. Otherwise,
    beyond FEW stages, the slowest stage over some windows behind the fill: exact where computing is what takes time,
    and within some per cent where it is the latency of links, since batches then come in bursts.
    """
    K = costs.K
    if method.m > 1:
        return max(span.end for span in timeline(method, 1, costs))
    if K <= FEW:
        return period(method, costs)
    fill = method.fill(K)
    first = fill + 4 * method.M
    last = first + WINDOWS * method.M
    ends = {
        (span.k, span.operation.t): span.end
        for span in timeline(method, last + fill + 1, costs)
        if isinstance(span.operation, Backward)
    }
    return max((ends[k, last - 1] - ends[k, first - 1]) / (last - first) for k in range(1, K + 1))


def period_on(link: Network, method: Method, costs: Profile, cuts: tuple[int, ...]) -> float:
    """Seconds a batch of the measured units between these cuts, on that link.

    A message is under way for latency + bytes / bandwidth; and a link that carries one message a batch each way cannot
    carry more batches than its bandwidth allows.
    """

    def sums(parts: list[float]) -> list[float]:
        total = list(accumulate(parts, initial=0.0))
        return [total[end] - total[start] for start, end in pairwise([0, *cuts, len(parts)])]

    sizes = [costs.boundary_bytes[cut] for cut in cuts]
    # the clock divides a message's time by m; its latency is not less for a smaller one
    hops = [method.m * link.latency + size / link.bandwidth for size in sizes]
    given = Costs(
        sums([unit.forward for unit in costs.units]), sums([unit.backward for unit in costs.units]), up=hops, down=hops
    )
    return max([steady(method, given), *(size / link.bandwidth for size in sizes)])


def method_at(name: str, setting: Setting, K: int) -> Method:
    """A simulated method; GPipe with 4K micro-batches, or as many as there are samples."""
    if named(name).m > 1:
        return named(name, m=max(2, min(MOST_MICRO * K, setting.batch_size)))
    return named(name, M=setting.M)


def simulate(study: Study, setting: Setting, costs: Profile) -> dict[str, Any]:
    """The speed-up of every method on every link, K as far as there are units and half of the time."""
    request, say = study.request, study.say
    alone = sum(unit.forward + unit.backward for unit in costs.units)
    half = float("inf") if request.minutes is None else 30 * request.minutes
    rows: list[dict[str, Any]] = []
    took = 0.0
    for K in [K for K in STAGES if request.most_stages >= K]:
        cuts = best_cuts(costs, K)
        if cuts is None or (rows and say.seconds + GROWS * took > half):
            study.left_out.append(f"simulation from K={K} on: {'too few units' if cuts is None else 'no time'}")
            break
        began = say.seconds
        say(f"simulating K={K}")
        for name in SIMULATED:
            method = method_at(name, setting, K)
            for link_name, link in LINKS.items():
                seconds = period_on(link, method, costs, cuts) if K > 1 else alone
                rows.append(
                    {
                        "link": link_name,
                        "method": name,
                        "K": K,
                        "m": method.m,
                        "seconds_per_batch": seconds,
                        "speedup": alone / seconds,
                    }
                )
        took = say.seconds - began
    links = {
        name: {"latency": link.latency, "bandwidth": link.bandwidth if link.bandwidth < float("inf") else None}
        for name, link in LINKS.items()
    }
    meaning = (
        "measured seconds of every unit on one core of this machine, cut anew for every K; a message is under "
        "way for latency + bytes / bandwidth, and a link carries no more than its bandwidth; updates are not "
        "counted"
    )
    return {
        "model": setting.model,
        "batch_size": setting.batch_size,
        "M": setting.M,
        "alone": alone,
        "links": links,
        "units": len(costs.units),
        "rows": rows,
        "meaning": meaning,
    }


# ---- the study


def scaling(request: Request, *, show: bool = True) -> tuple[dict[str, Any], Path]:
    """The whole study; what was found is in the folder also where it is stopped by Ctrl-C."""
    base = request.setting()
    out = folder_for(request.out, f"scaling-{request.model}-b{request.batch_size}", "scaling.json")
    study = Study(request, out, Spoken(show=show))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({first_line(error)}): choose another --out") from error
    try:
        with tempfile.TemporaryDirectory(prefix="offbeat-scaling-") as folder:
            go(study, base, Path(folder))
    except KeyboardInterrupt:
        finish(study)
        raise Interrupted(f"stopped by Ctrl-C; what was found so far is in {out}") from None
    finally:
        study.fork_server.close()
    finish(study)
    return study.as_dict(), out


def go(study: Study, base: Setting, folder: Path) -> None:
    request, say = study.request, study.say
    method = named("adl", M=request.M)
    sizes = counted(base)
    for K in [K for K in STAGES if request.most_stages >= K]:
        cuts = best_cuts(sizes, K)
        if cuts is not None:
            study.counted.append(kept_by(method, base, sizes, cuts))
    say(f"profiling {base.model}, b={base.batch_size}")
    costs = measured(base).profile
    study.simulation = simulate(study, base, costs)
    study.write()
    took = 0.0
    for number, (axis, setting) in enumerate(wanted(request)):
        told = f"{axis}: {setting.model}, b={setting.batch_size}, K={setting.K}"
        if len(cores_here()) < setting.K:
            study.left_out.append(f"{told}: only {len(cores_here())} core{'s' * (len(cores_here()) > 1)}")
            continue
        if request.minutes is not None and say.seconds + took > 60 * request.minutes:
            study.left_out.append(f"{told}: no time in {request.minutes:g} minutes")
            continue
        began = say.seconds
        own = counted(setting)
        same = axis == "strong"  # as many units, timed: these cuts are those of the simulation
        cuts = best_cuts(costs if same else own, setting.K)
        if cuts is None:
            study.left_out.append(f"{told}: too few units")
            continue
        place = folder / str(number)
        place.mkdir()
        try:
            found = measure(replace(setting, cuts=cuts), request, place, study.fork_server)
        except RowFailedError as error:
            study.left_out.append(f"{told}: {error}")
            say(f"{told} is left out: {error}")
            continue
        study.points.append({"axis": axis, **kept_by(method, setting, own, cuts), **found})
        say(f"{told}: {1000 * median(found['seconds_per_batch']):.0f} ms a batch")
        study.write()
        took = say.seconds - began


def finish(study: Study) -> None:
    study.write()
    content = study.as_dict()
    if content["simulation"]:
        by_the_way(lambda path: draw_scaling(content, path), study.out / "scaling.svg", study.out / "scaling.png")


def show(content: dict[str, Any], where: str) -> None:
    """On the terminal."""
    for line in lines(content):
        print(line)
    for reason in content["left_out"]:
        print(f"left out: {reason}", file=sys.stderr)
    print(f"records: {where}")


def lines(content: dict[str, Any]) -> list[str]:
    """A line a measured point, then what the clock says of the largest K."""
    said = []
    for point in content["points"]:
        said.append(
            f"{point['axis']:6} {point['model']:10} b={point['batch_size']:<4} K={point['K']:<3} "
            f"{1000 * median(point['seconds_per_batch']):8.0f} ms a batch, at most "
            f"{max(point['memory']) / 1e6:,.0f} MB a worker, staleness of stage 1 {point['staleness'][0]:.2f}"
        )
    rows = content["simulation"]["rows"]
    largest = max(row["K"] for row in rows)
    for name in dict.fromkeys(row["method"] for row in rows):
        each = ", ".join(
            f"{row['speedup']:.2g} ({row['link']})" for row in rows if row["K"] == largest and row["method"] == name
        )
        said.append(f"by the clock, K={largest}, {name}: {each} times BP")
    return said
