"""Links within one process."""

from __future__ import annotations

from collections import deque

from offbeat.core.links import Message
from offbeat.core.links.wire import copied


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

    def close(self, word: str = "") -> None:
        self.messages.clear()


class LocalLink(Entrance):
    """Between two stages of one process; lays tensors out like any other link, so that no bit depends on where a stage
    lives."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def send(self, message: Message) -> None:
        assert len(self.messages) < self.capacity, "more messages on a link than its program can leave there"
        super().send(copied(message))
