"""Links within one process."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from offbeat.links import Message
from offbeat.links.wire import pack, unpack


class LocalLink:
    """Between two stages of one process; packs like any other link, so that no bit depends on where a stage lives."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.buffers: deque[Tensor] = deque()

    def send(self, message: Message) -> None:
        assert len(self.buffers) < self.capacity, "more messages on a link than its program can leave there"
        self.buffers.append(pack(message))

    def receive(self) -> Message:
        return unpack(self.buffers.popleft())

    def peek(self) -> Message:
        return unpack(self.buffers[0])

    def ready(self) -> bool:
        return bool(self.buffers)

    def close(self) -> None:
        self.buffers.clear()


class Entrance:
    """Where batches enter the first stage: the user's own tensors, uncopied."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()

    def send(self, message: Message) -> None:
        self.messages.append(message)

    def receive(self) -> Message:
        return self.messages.popleft()

    def peek(self) -> Message:
        return self.messages[0]

    def ready(self) -> bool:
        return bool(self.messages)

    def close(self) -> None:
        self.messages.clear()
