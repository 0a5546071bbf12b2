"""Links between processes that have a device each: tensors go from device to device, all else as ever.

A message is its header, which takes the way of `distributed.py` and says what is in the payload, and the payload, the
tensors in one flat buffer on the device, sent and received by a group that can do that (NCCL): a group for each link,
since what such a group is asked for is done in order. The header goes when the payload is complete, and the receiver
asks for a payload when it has the header: a kernel that waits on one device for the work of another could hold up the
work that the other one waits for (streams share queues), and would have every synchronization wait with it.

With NCCL this has not been tried: that takes a machine with several GPUs. The tests run it with gloo on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.links import Message
from offbeat.core.links.distributed import Receiver, Sender
from offbeat.core.links.wire import pack_apart, read_header, unpack
from offbeat.errors import StageLost


class Parcel(NamedTuple):
    """A header, the payload if there is one, and when it is complete."""

    header: Tensor
    payload: Tensor | None = None
    ready: torch.cuda.Event | None = None


class Carrier:
    """One end of the way of the payloads: a group of two, and on a GPU a stream, so that no stage waits for it."""

    def __init__(self, other: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.other, self.group, self.device = other, group, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ended = False  # what comes from now on is nothing that was sent

    def enter(self) -> None:
        """In the link's thread, ahead of anything on the device: for good, since going back to the stream that was
        there before would take memory on the first GPU, which is that of another process."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)  # and with it the device

    def send(self, payload: Tensor) -> None:
        """Returns when it is sent."""
        self._wait(dist.isend(payload, self.other, self.group))

    def receive(self, size: int) -> Tensor:
        self.enter()
        payload = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._wait(dist.irecv(payload, self.other, self.group))
        return payload

    def _wait(self, work: Any) -> None:
        assert work is not None
        work.wait()  # on a GPU that only has the stream wait
        if self.stream is not None:
            self.stream.synchronize()
        if self.ended:
            raise RuntimeError("another stage is gone")

    def abort(self) -> None:
        """End what waits on the device for a process that is gone, which nothing else would."""
        self.ended = True
        if self.stream is not None:
            with suppress(RuntimeError):
                self.group._get_backend(self.device).abort()


class DeviceSender(Sender):
    """The sending end."""

    def __init__(
        self,
        to_rank: int,
        tag: int,
        group: dist.ProcessGroup,
        *,
        carrier: Carrier,
        capacity: int,
        patient: bool,
        lost: Callable[[str], StageLost],
    ) -> None:
        self.carrier = carrier
        super().__init__(to_rank, tag, group, capacity=capacity, patient=patient, lost=lost)

    def send(self, message: Message) -> None:
        header, payload = pack_apart(message, self.carrier.device)
        ready = None
        if payload is not None and payload.is_cuda:
            ready = torch.cuda.Event(blocking=True)
            ready.record()
        self._put(Parcel(header, payload, ready))

    def _deliver(self, parcel: Any) -> None:
        self.carrier.enter()
        if parcel.ready is not None:
            parcel.ready.synchronize()
        super()._deliver(parcel.header)
        if parcel.payload is not None:
            self.carrier.send(parcel.payload)


class DeviceReceiver(Receiver):
    """The receiving end."""

    def __init__(
        self,
        from_rank: int,
        tag: int,
        group: dist.ProcessGroup,
        *,
        carrier: Carrier,
        capacity: int,
        lost: Callable[[str], StageLost],
    ) -> None:
        self.carrier = carrier
        self.payload: Tensor | None = None  # of the next message
        super().__init__(from_rank, tag, group, capacity=capacity, lost=lost)

    def _complete(self, header: Tensor) -> Any:
        size = read_header(header).apart
        return Parcel(header, self.carrier.receive(size) if size else None)

    def _read(self, arrived: Any) -> Message:
        self.payload = arrived.payload
        return unpack(arrived.header, arrived.payload)

    def receive(self) -> Message:
        """On the stream that is current, which is to be that of the stage; whoever only peeks may be on another."""
        message = super().receive()
        if self.payload is not None and self.payload.is_cuda:
            self.payload.record_stream(torch.cuda.current_stream(self.carrier.device))
        self.payload = None
        return message
