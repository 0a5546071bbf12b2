"""Training losses as floats in every process, without a stage waiting for them.

The last stage reads its losses, on a GPU several at a time, and sends them down from process to process, in messages of
their own. Each process passes on after every batch what has arrived by then:

    stage 3   F4 -> loss of batch 4
    stage 2   F5, then receives the loss of batch 4, and passes it on
    stage 1   F7, then receives the loss of batch 4

The order of the messages of training, its checkpoints and its results stay as they are. A request to stop travels in
the same messages: it ends at the first stage, which ends training for all processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offbeat.core.links import Link, Message

if TYPE_CHECKING:
    from offbeat.pipeline.pipeline import Pipeline

READ_TOGETHER = 16  # losses on a GPU: reading one waits for the device
LOSSES, END = "losses", "end"  # kinds of messages; END: the last one before a checkpoint, or of a call of fit
CAPACITY = 64  # messages; a process receives after each batch, and one above it is at most a batch ahead


class LossReader:
    """The losses of the last stage of this process, which are tensors, as floats."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe = pipe
        self.waiting: dict[int, Tensor] = {}  # by batch
        self.newest = -1

    def read(self, *, wait: bool = False) -> dict[int, float]:
        """Losses by batch, each returned once; wait=True: all of them."""
        pipe = self.pipe
        batch = pipe.stages[pipe.K].figures.last_batch // pipe.method.m if pipe.stages else self.newest
        losses = pipe.newest_losses() if batch != self.newest else []
        if losses:
            self.newest = batch
            self.waiting[batch] = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        enough = READ_TOGETHER if pipe.device.type == "cuda" or pipe.engine.defers else 1
        if not self.waiting or (len(self.waiting) < enough and not wait):
            return {}
        values = torch.stack(list(self.waiting.values())).tolist()
        found = dict(zip(self.waiting, values, strict=True))
        self.waiting.clear()
        return found


class LossChain:
    """Carries losses and requests to stop from each process to that of the stage below; empty where one process has
    all stages. Made once per pipeline."""

    def __init__(self, pipe: Pipeline) -> None:
        engine = pipe.engine
        self.above: Link | None = None
        self.below: Link | None = None
        self.ended = False  # an END has arrived that nothing has waited for yet
        if len(engine.here) < pipe.K:
            (k,) = engine.here
            if k < pipe.K:
                self.above = engine.link("training", k + 1, k, capacity=CAPACITY, patient=True)
            if k > 1:
                self.below = engine.link("training", k, k - 1, capacity=CAPACITY, patient=True)

    def receive(self, *, wait: bool = False) -> tuple[dict[int, float], bool]:
        """Losses that have arrived, by batch, and whether a stage above requests a stop; wait=True: until the last
        message before a checkpoint, or of this call of fit."""
        losses: dict[int, float] = {}
        stop = False
        while self.above is not None and not self.ended and (wait or self.above.ready()):
            message = self.above.receive()
            batches, values, requested = message.content
            losses |= dict(zip(batches, values, strict=True))
            stop = stop or requested
            self.ended = message.kind == END
        if wait:
            self.ended = False
        return losses, stop

    def send(self, losses: dict[int, float], *, stop: bool, t: int, end: bool = False) -> None:
        """Pass on to the stage below; nothing is sent where there is nothing new."""
        if self.below is not None and (losses or stop or end):
            content = (list(losses), list(losses.values()), stop)
            self.below.send(Message(t, content, kind=END if end else LOSSES))
