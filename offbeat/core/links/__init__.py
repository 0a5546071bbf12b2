"""Links: one direction between two stages, buffered and in order; sending never blocks the computation."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

LOOPBACK_INTERFACE = {"linux": "lo", "darwin": "lo0"}  # for links that need not leave the machine


class Message(NamedTuple):
    """Content for batch t: nested containers of tensors and plain values.

    A message of kind "batch" belongs to a batch; any other kind is a mark between batches (the end of an epoch).
    """

    t: int
    content: Any = None
    kind: str = "batch"


class Link(Protocol):
    """The contract of both ends; a process may hold only one of them."""

    def send(self, message: Message) -> None:
        """Enqueue a copy of the message and return at once."""

    def receive(self) -> Message:
        """The next message in order; waits for it where another process sends it."""

    def peek(self) -> Message:
        """The next message, without removing it; waits like `receive`."""

    def ready(self) -> bool:
        """Whether `receive` would return at once."""

    def close(self, reason: str = "") -> None:
        """No more messages; the reason is sent where this is not the regular end."""
