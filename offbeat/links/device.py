"""Links between processes that have a device each: tensors go from device to device, all else as ever.

A message is its header, which takes the way of `distributed.py` and says what is in the payload, and the payload, the
tensors in one flat buffer on the device, sent and received by a group that can do that (NCCL): a group for each link,
since what such a group is asked for is done in order. The receiver asks for a payload when it has the header, so nobody
waits on a device for something that was not sent.

With NCCL this has not been tried: that takes a machine with several GPUs. The tests run it with gloo on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import StageLost
from offbeat.links import Message
from offbeat.links.distributed import Receiver, Sender
from offbeat.links.wire import described, parted, whole


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

    @contextmanager
    def _aside(self) -> Iterator[None]:
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield
        self.stream.synchronize()

    def send(self, parcel: Parcel) -> None:
        """Returns when it is sent."""
        assert parcel.payload is not None
        with self._aside():
            if parcel.ready is not None:
                parcel.ready.wait()
            self._wait(dist.isend(parcel.payload, self.other, self.group))

    def receive(self, size: int) -> Tensor:
        with self._aside():
            payload = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._wait(dist.irecv(payload, self.other, self.group))
        return payload

    def _wait(self, work: Any) -> None:
        assert work is not None
        work.wait()


class DeviceSender(Sender):
    """The sending end."""

    def __init__(self, to_rank: int, tag: int, group: dist.ProcessGroup, *, carrier: Carrier, capacity: int,
                 patient: bool, lost: Callable[[str], StageLost]) -> None:  # fmt: skip
        self.carrier = carrier
        super().__init__(to_rank, tag, group, capacity=capacity, patient=patient, lost=lost)

    def send(self, message: Message) -> None:
        header, payload = parted(message, self.carrier.device)
        ready = None
        if payload is not None and payload.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        self._put(Parcel(header, payload, ready))

    def _deliver(self, parcel: Any) -> None:
        super()._deliver(parcel.header)
        if parcel.payload is not None:
            self.carrier.send(parcel)


class DeviceReceiver(Receiver):
    """The receiving end."""

    def __init__(self, from_rank: int, tag: int, group: dist.ProcessGroup, *, carrier: Carrier, capacity: int,
                 lost: Callable[[str], StageLost]) -> None:  # fmt: skip
        self.carrier = carrier
        super().__init__(from_rank, tag, group, capacity=capacity, lost=lost)

    def _complete(self, header: Tensor) -> Any:
        size = described(header)
        return Parcel(header, self.carrier.receive(size) if size else None)

    def _read(self, arrived: Any) -> Message:
        if arrived.payload is not None and arrived.payload.is_cuda:
            arrived.payload.record_stream(torch.cuda.current_stream(self.carrier.device))
        return whole(arrived.header, arrived.payload)
