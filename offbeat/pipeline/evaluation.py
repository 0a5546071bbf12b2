"""A pass of a loader through the stages on their newest weights, beside training and without draining."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.links import Message
from offbeat.core.metrics import Meter
from offbeat.core.stage_network import Loss
from offbeat.pipeline.assembly import Assembly

END = Message(-1, kind="end")


def forward_next(
    assembly: Assembly, batches: Iterator[tuple[Any, Any]], meter: Meter, *, loss: Loss, device: torch.device
) -> bool:
    """Forward one batch through the stages of this process, and add its loss to the meter at the last; False at the
    end of the batches, which enter at the first stage."""
    message = END
    for k, stage in assembly.stages.items():
        below, above = assembly.evaluation_links.get(k - 1), assembly.evaluation_links.get(k)
        if below is None:
            batch = next(batches, None)
            message = END if batch is None else Message(0, batch)
        else:
            message = below.receive()
        if message.kind == "batch":
            x, y = message.content
            output = stage.evaluate(x)
            if above is None:
                y = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), y)
                meter.add(float(loss(output, y)), output, y)
            message = Message(0, (output, y))
        if above is not None:
            above.send(message)
    return message.kind == "batch"
