"""Predicted seconds per batch of K stages in R replicas: on this machine, and on links of stated speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.method import Method
from offbeat.partitioning import Profile
from offbeat.partitioning.loopback import LinkMeasurement, measure_links
from offbeat.partitioning.refine import rescaled, stage_sums
from offbeat.partitioning.timing import whole_time
from offbeat.studies.plan import Calibration, LinkCost, Measured, message_work
from offbeat.timeline import Costs, period


@dataclass(frozen=True)
class PredictionHere:
    """Predicts points of the base network on this machine, from what was measured of one process at a time."""

    profile: Profile
    forward: Sequence[float]  # of the units, scaled to the whole network
    backward: Sequence[float]
    update: Sequence[float]
    alone: float  # seconds per batch of back-propagation
    link: LinkMeasurement

    @classmethod
    def of(cls, measured: Measured) -> PredictionHere:
        whole, units = whole_time(measured.traced.twin(), measured.sample), measured.profile.units
        return cls(
            measured.profile,
            rescaled([unit.forward for unit in units], (), [whole.forward]),
            rescaled([unit.backward for unit in units], (), [whole.backward]),
            rescaled([unit.parameter_bytes for unit in units], (), [whole.update]),
            whole.batch(),
            measure_links(),
        )

    def seconds(self, method: Method, cuts: Sequence[int], replicas: int, at_once: Sequence[float] = ()) -> float:
        """Per batch of a replica; `at_once`: seconds per batch of each worker's stage while all compute."""
        if not cuts and replicas == 1:
            return self.alone
        link = LinkCost(self.link.latency, self.link.bandwidth)
        sizes = [self.profile.boundary_bytes[cut] for cut in cuts]
        parameters = stage_sums([unit.parameter_bytes for unit in self.profile.units], cuts)
        f, b, u = (stage_sums(parts, cuts) for parts in (self.forward, self.backward, self.update))
        slower = [1.0] * len(f)
        if at_once:
            K, loads = len(f), [f + b + u / method.M for f, b, u in zip(f, b, u, strict=True)]
            slower = [max(at_once[k::K]) / load for k, load in enumerate(loads)]
        work = message_work(Calibration(1.0, self.link.work_per_message, self.link.work_per_byte), sizes)
        hops = [link.seconds(size) for size in sizes]
        return period(
            method,
            Costs(
                [time * slow + more for time, slow, more in zip(f, slower, work, strict=True)],
                [time * slow + more for time, slow, more in zip(b, slower, work, strict=True)],
                [
                    time * slow + link.sum_seconds(size, replicas)
                    for time, slow, size in zip(u, slower, parameters, strict=True)
                ],
                up=hops,
                down=hops,
            ),
        )

    def beside(self, method: Method, point: dict[str, Any]) -> dict[str, Any]:
        """What is recorded next to the measurement of a point."""
        alone = self.seconds(method, point["cuts"], point["replicas"])
        both = self.seconds(method, point["cuts"], point["replicas"], point["at_once"])
        return {"predicted_alone": alone, "predicted": both}


def period_on(link: LinkCost, method: Method, costs: Profile, cuts: tuple[int, ...], *, replicas: int = 1) -> float:
    """Seconds per batch of the measured units between these cuts, on that link.

    A message takes latency + bytes / bandwidth; a link, which carries one message per batch each way, carries no more
    batches than its bandwidth allows. Replicas add their gradients once per update.
    """

    sizes = [costs.boundary_bytes[cut] for cut in cuts]
    # the clock divides a message's time by m; its latency is not less for a smaller one
    hops = [method.m * link.latency + size / link.bandwidth for size in sizes]
    forward = stage_sums([unit.forward for unit in costs.units], cuts)
    backward = stage_sums([unit.backward for unit in costs.units], cuts)
    parameters = stage_sums([unit.parameter_bytes for unit in costs.units], cuts)
    sums = [link.sum_seconds(size, replicas) for size in parameters]
    if not cuts:
        return forward[0] + backward[0] + sums[0] / method.M
    given = Costs(forward, backward, sums if replicas > 1 else (), up=hops, down=hops)
    return max([period(method, given), *(size / link.bandwidth for size in sizes)])
