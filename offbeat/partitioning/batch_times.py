"""How long batches of different sizes take: forward and backward of a whole model, on its device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offbeat.core.metrics import batch_size
from offbeat.core.precision import FULL, PrecisionPolicy
from offbeat.graphs.capture import Recorded, own_stream, recording
from offbeat.partitioning.chunk import as_stage
from offbeat.partitioning.copies import copy_model
from offbeat.partitioning.inputs import Inputs, as_dict

LAPS, SHORTEST = 3, 0.1  # at least so many, and seconds of them; the shortest counts: other work only ever adds
LONG = 1.0  # seconds, after which fewer laps are enough


def batch_seconds(
    model: nn.Module, sample: Any, *, device: torch.device, precision: PrecisionPolicy = FULL
) -> Callable[[int], float]:
    """A function of a number of samples: seconds of forward and backward, on batches made of the sample's rows.

    A copy of the model is used, and random generators are restored. On a GPU the work is recorded as a CUDA graph if
    possible, as stages are: launches of small kernels would count otherwise. inf if there is not enough memory.
    """
    sample = as_dict(sample)

    def seconds(samples: int) -> float:
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), precision.switched(), torch.enable_grad():
            try:
                twin = copy_model(model).to(device).train()
                precision.lay_out(twin)
                x = _rows(sample, samples, device)
                return _shortest(_work(as_stage(twin, Inputs.of(twin, sample)), x, precision), device)
            except torch.OutOfMemoryError:
                return float("inf")

    return seconds


def smallest_batch(model: nn.Module, normalized: int) -> int:
    """Samples that a micro-batch should have at least: `normalized` for a model with BatchNorm, else 1."""
    return normalized if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()) else 1


def _rows(sample: Any, samples: int, device: torch.device) -> Any:
    """A batch of that many samples: the rows of the sample, repeated as often as needed."""
    there = batch_size(sample)
    chosen = torch.arange(samples) % there
    return pytree.tree_map_only(
        Tensor,
        lambda leaf: (leaf[chosen.to(leaf.device)] if leaf.dim() and len(leaf) == there else leaf).to(device),
        sample,
    )


def _work(stage: nn.Module, x: Any, precision: PrecisionPolicy) -> Callable[[], None]:
    """Forward and backward."""
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]

    def work() -> None:
        with precision.computing():
            outputs = stage(precision.entering(pytree.tree_map_only(Tensor, torch.clone, x)))
        roots = [out for out in pytree.tree_leaves(outputs) if isinstance(out, Tensor) and out.requires_grad]
        if roots and parameters:
            torch.autograd.grad(roots, parameters, [torch.ones_like(root) for root in roots], allow_unused=True)

    return work


def _shortest(work: Callable[[], None], device: torch.device) -> float:
    def lap() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    lap()  # pays for memory, for choosing kernels, and in a new process for much else
    if device.type == "cuda":
        work = _recorded(work, device)
        lap()
    laps = [lap()]
    while sum(laps) < SHORTEST or (len(laps) < LAPS and sum(laps) < LONG):
        laps.append(lap())
    return min(laps)


def _recorded(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The work as a CUDA graph; itself if it cannot be recorded."""
    try:
        with recording(device, own_stream(device)):
            work()  # libraries allocate their workspace of the stream
            return Recorded(work, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # it waits for the device, or copies from the host
        torch.cuda.synchronize(device)
        return work
