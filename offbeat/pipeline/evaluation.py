"""A pass of a loader through the stages on their newest weights, beside training and without draining.

A failure of the loader, of a stage or of the metric ends the pass in all processes, and leaves the links empty:

    stage 1   batch | batch | batch | end
    stage 2   batch | fails: sends the reason up, and receives the rest
    stage 3   batch | the reason
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.links import Message
from offbeat.core.metrics import Meter, Metric
from offbeat.core.stage import Stage
from offbeat.core.stage_network import Loss
from offbeat.errors import UserError, first_line
from offbeat.pipeline import batches, checks
from offbeat.pipeline.assembly import Assembly
from offbeat.pipeline.loading import Batches
from offbeat.pipeline.local_stages import LocalStages

END = Message(-1, kind="end")
FAILED = "failed"  # the kind of a message with the reason why an evaluation failed


@dataclass
class EvaluationFailure:
    """Why an evaluation failed: the error of this process, and the reason as all processes know it."""

    error: Exception | None = None
    reason: str | None = None

    def trying(self, k: int, work: Callable[[], Message]) -> Message:
        """The message of stage k that `work`, which calls the user's code, returns; or the one with its failure."""
        try:
            return work()
        except Exception as error:
            self.error = error
            return Message(0, f"evaluate failed in stage {k} ({type(error).__name__}: {first_line(error)})", FAILED)

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.error is not None:
            raise self.error
        if self.reason is not None:
            raise UserError(f"{self.reason}: correct it there; training can continue")


def evaluate(local: LocalStages, loader: Batches | None, metric: Metric | None) -> dict[str, Any]:
    """The whole pass at once."""
    steps = evaluating(local, loader, metric)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: dict[str, Any] = end.value
            return result


def evaluating(
    local: LocalStages, loader: Batches | None, metric: Metric | None
) -> Generator[None, None, dict[str, Any]]:
    """The pass, which yields after every batch; returns the figures. See `Pipeline.evaluate`."""
    checks.check_functions(metric=metric)
    entering = batches_of(loader if local.engine.leads and loader is not None else ())
    with local.engine.guard():  # without stages, other processes cannot continue
        ahead = next(entering, None) if local.assembly is None else None
    assembly = local.assembled(ahead[0] if ahead else None)
    entering_all = chain([ahead] if ahead else [], entering)
    meter, failure, began = Meter(metric), EvaluationFailure(), time.perf_counter_ns()
    with local.guard():
        assembly.settle()
        while assembly.replica == 0 and forward_next(
            assembly, entering_all, meter, failure, loss=local.loss, device=local.device
        ):
            yield
            assembly = local.assembled(None)
            local.engine.settle()  # the caller may have trained meanwhile
        read = (None if failure.reason else meter.read(), failure.reason) if local.last else None
        result, failure.reason = local.engine.share(read, local.K)
        local.observation.share_staleness(assembly)
    local.observation.evaluated(time.perf_counter_ns() - began)
    failure.check()
    if not result["samples"]:
        raise UserError("the loader is empty: give at least one batch")
    return result


def batches_of(loader: Batches) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of a loader, which is checked first."""
    checks.check_loader(loader, functions=False)
    for t, batch in enumerate(loader):
        yield batches.input_and_target(*batches.pair(batch, t))


def forward_next(
    assembly: Assembly,
    entering: Iterator[tuple[Any, Any]],
    meter: Meter,
    failure: EvaluationFailure,
    *,
    loss: Loss,
    device: torch.device,
) -> bool:
    """Forward one batch through the stages of this process, and add its loss to the meter at the last; False at the
    end of the batches, which enter at the first stage, and after a failure."""
    message = END
    for k, stage in assembly.stages.items():
        below, above = assembly.evaluation_links.get(k - 1), assembly.evaluation_links.get(k)
        message = failure.trying(k, partial(_read, entering)) if below is None else below.receive()
        if message.kind == "batch":
            add = partial(_add, meter, loss, device) if above is None else None
            message = failure.trying(k, partial(_forward, stage, *message.content, add=add))
            if message.kind == FAILED and below is not None and k - 1 not in assembly.stages:
                while below.receive().kind == "batch":
                    pass
        if message.kind == FAILED:
            failure.reason = message.content
        if above is not None:
            above.send(message)
    return message.kind == "batch"


def _read(entering: Iterator[tuple[Any, Any]]) -> Message:
    batch = next(entering, None)
    return END if batch is None else Message(0, batch)


def _forward(stage: Stage, x: Any, y: Any, *, add: Callable[[Any, Any], None] | None) -> Message:
    output = stage.evaluate(x)
    if add is not None:
        add(output, y)
    return Message(0, (output, y))


def _add(meter: Meter, loss: Loss, device: torch.device, output: Any, y: Any) -> None:
    y = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), y)
    meter.add(float(loss(output, y)), output, y)
