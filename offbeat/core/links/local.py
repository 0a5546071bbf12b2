"""Links within one process."""

from __future__ import annotations

from collections import deque

from offbeat.core.links import Message
from offbeat.core.links.wire import copied


class Entrance:
    """The input of the first stage: the user's own tensors, not copied."""

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

    def close(self, reason: str = "") -> None:
        self.messages.clear()


class LocalLink(Entrance):
    """Between two stages of one process; keeps the same memory layouts as any other link, so that engines agree bit for
    bit."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def send(self, message: Message) -> None:
        assert len(self.messages) < self.capacity, f"more than {self.capacity} messages on a link"
        super().send(copied(message))
