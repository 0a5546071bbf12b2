"""Links: one direction between two stages, buffered, in order, never blocking the compute."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

LOOPBACK_INTERFACE = {"linux": "lo", "darwin": "lo0"}  # for links that need not leave the machine


class Message(NamedTuple):
    """Content for batch t: a pytree of tensors and plain values.

    kind "batch" belongs to a batch; any other kind is a mark that travels between batches (the end of an epoch).
    """

    t: int
    content: Any = None
    kind: str = "batch"


class Link(Protocol):
    """The contract that both ends rely on; a process may hold only one of them."""

    def send(self, message: Message) -> None:
        """Hand over a message and return at once; the link holds its own copy."""

    def receive(self) -> Message:
        """The next message in order; waits for it where another process sends."""

    def peek(self) -> Message:
        """The next message, left in place; waits like `receive`."""

    def ready(self) -> bool:
        """Whether `receive` would return at once."""

    def close(self, word: str = "") -> None:
        """No more messages; the word says why, where that is not the end of all."""
