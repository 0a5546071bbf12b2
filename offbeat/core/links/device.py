"""Links between processes with a device each: tensors are sent from device to device.

A message is a header, sent as in `distributed.py`, and a payload: the tensors in one flat buffer on the device, sent by
a process group of NCCL. Each link has its own group, since the operations of a group run in order. The header is sent
once the payload is complete, and the receiver posts the receive of a payload once it has the header: a kernel that
waits on one device for another could block the work that the other one waits for (streams share hardware queues), and
every synchronization with it.

This is untested with NCCL, which needs a machine with several GPUs. The tests run it with gloo on CPUs.
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
    """A header, its payload if there is one, and the event after which that is complete."""

    header: Tensor
    payload: Tensor | None = None
    ready: torch.cuda.Event | None = None


class Carrier:
    """One end of a connection for payloads: a group of two processes and, on a GPU, a stream of its own."""

    def __init__(self, other: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.other, self.group, self.device = other, group, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ended = False  # what is received from now on was not sent

    def enter(self) -> None:
        """Make its stream the current one of this thread, before any other work on the device.

        It is not reset: setting the default stream would allocate memory on the first GPU, which another process uses.
        """
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)  # sets the device too

    def send(self, payload: Tensor) -> None:
        """Send, and wait until it is sent."""
        self._wait(dist.isend(payload, self.other, self.group))

    def receive(self, size: int) -> Tensor:
        self.enter()
        payload = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._wait(dist.irecv(payload, self.other, self.group))
        return payload

    def _wait(self, work: Any) -> None:
        assert work is not None
        work.wait()  # on a GPU only the stream waits
        if self.stream is not None:
            self.stream.synchronize()
        if self.ended:
            raise RuntimeError("the process of another stage is gone")

    def abort(self) -> None:
        """Abort operations on the device that wait for a process that is gone."""
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
        """To be called on the stream of the stage; `peek` may be called on any."""
        message = super().receive()
        if self.payload is not None and self.payload.is_cuda:
            self.payload.record_stream(torch.cuda.current_stream(self.carrier.device))
        self.payload = None
        return message
