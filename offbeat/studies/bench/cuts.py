"""The cuts of rows: measured here, by FLOPs, or as given; and those of 2K chunks for the interleaved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from offbeat import models
from offbeat.partitioning import Profile, partition, profile, solve
from offbeat.partitioning.refine import refine
from offbeat.partitioning.solve import too_few_units
from offbeat.partitioning.timing import Stopwatch
from offbeat.partitioning.trace import trace
from offbeat.studies.bench.rows import BenchSetting, cores_here
from offbeat.studies.plan import Measured


@dataclass(frozen=True)
class Network:
    """The network and a batch for it, as every worker will have them."""

    setting: BenchSetting
    model: nn.Module
    sample: Tensor

    @classmethod
    def of(cls, setting: BenchSetting, *, device: str | None = None) -> Network:
        torch.manual_seed(0)
        where = torch.device(device or "cpu")
        with where:
            model = models.build(setting.model, shape=setting.shape, classes=setting.classes)
        return cls(
            setting, model, models.random_batch(setting.batch_size, setting.shape, setting.classes, device=where)
        )

    @property
    def most(self) -> int:
        """Stages that it can be cut into."""
        return len(trace(self.model).legal_cuts) + 1


def check(setting: BenchSetting) -> None:
    """Refuse what cannot be cut, before anything starts; on the meta device, so that it costs next to nothing."""
    most = Network.of(setting, device="meta").most
    if most < setting.K:
        raise too_few_units(setting.K, most, f", or a deeper model than {setting.model}")


def counted(setting: BenchSetting) -> Profile:
    """Sizes and FLOPs of all units: the same on every machine."""
    network = Network.of(setting, device="meta")
    return profile(network.model, network.sample, timed=False)


def measured(setting: BenchSetting, file: Path | None = None) -> Measured:
    """Seconds of all units on one core of this machine; kept in the file, or read from it where it is there."""
    torch.set_num_threads(1)
    network = Network.of(setting)
    known = Profile.load(file) if file and file.exists() else None
    found = Measured.of(setting.model, network.model, network.sample, setting.batch_size, known=known)
    if file and known is None:
        found.profile.save(file)
    return found


def placed(
    setting: BenchSetting,
    *,
    by: str,
    cuts: Sequence[int] | None = None,
    units: str | None = None,
    M: int = 1,
    seconds: float = math.inf,
    file: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> BenchSetting:
    """The setting with its cuts, for batches of its size; an update counts as a part of each of its M batches.

    seconds   for measuring; units are timed in any case, stages as far as there is time
    """
    K, began = setting.K, time.monotonic()
    if cuts is not None:
        kind = units or "layers"
        network = Network.of(setting, device="meta")
        partition(network.model, K, network.sample, cuts=list(cuts), units=kind)  # type: ignore[arg-type]
        setting, costs, made = replace(setting, units=kind), counted(setting), tuple(cuts)
    elif by == "flops" or setting.device != "cpu" or len(cores_here()) < K:
        costs = counted(setting)
        made = balanced(costs, K)
    else:
        report(f"profiling {setting.model}, b={setting.batch_size}")
        found = measured(setting, file)
        costs, left = found.profile, seconds - (time.monotonic() - began)
        cutting = f"cutting {len(costs.units)} units into {K} stages"
        report(cutting if left > 0 else f"{cutting} by the times of the units: no time to time stages")
        if left > 0:
            with Stopwatch(found.traced.twin(), found.sample, K) as stopwatch:
                made = refine(costs.costs(), K, stopwatch, M=M, seconds=left, legal=costs.legal_cuts).solution.cuts
        else:
            made = balanced(costs, K)
    return replace(setting, cuts=made, chunk_cuts=best_cuts(costs, 2 * K))


def balanced(costs: Profile, K: int) -> tuple[int, ...]:
    """The cuts that balance the stages by the costs of their units."""
    return solve(costs.costs(), K, legal=costs.legal_cuts).cuts


def best_cuts(costs: Profile, K: int) -> tuple[int, ...] | None:
    """The same; None where there are too few units."""
    return balanced(costs, K) if len(costs.legal_cuts) + 1 >= K else None
