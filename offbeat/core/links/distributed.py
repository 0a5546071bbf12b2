"""Links between processes, on torch.distributed.

A gloo send completes only once its receive is posted, and a posted receive cannot be polled. So each end has a thread:
the receiving one has the next receives posted, the sending one waits instead of the computation. As many messages can
be in flight as receives are posted; with a single one, each message would wait for a round trip. Header and payload are
one message. The receiver does not know its length in advance, so both ends know the size of each posted receive
(`ReceiveSizes`): a longer message is sent in two pieces.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.links import Message
from offbeat.core.links.wire import PREFIX, pack, read_header, size, unpack
from offbeat.errors import StageLost, UserError, first_line

FIRST_SIZE = 1 << 16  # bytes of a receive, before there was a longer message
MOST_POSTED = 8  # receives of a link
GOODBYE = "close"  # kind of the last message; its content is the reason, "" where all is done
GOODBYE_LIMIT = 4096  # bytes of it
STOPPED = "it has stopped"  # where it gives no reason
LATE = "no message in time"  # the reason of a link whose timeout has passed
REASON_LIMIT = 300  # characters of its reason


class ReceiveSizes:
    """Bytes of each receive, computed alike at both ends: a receive is posted once the message `posted` before its own
    is complete, and is as long as the longest message up to that one.

    >>> sizes = ReceiveSizes(posted=2)
    >>> [sizes.next_size() for _ in range(2)], sizes.complete(100_000), sizes.next_size()
    ([65536, 65536], None, 100000)
    """

    def __init__(self, posted: int) -> None:
        self.posted, self.longest = posted, FIRST_SIZE
        self.messages = 0  # whose size was asked for
        self.lengths: deque[int] = deque()  # of complete messages that later receives have not counted

    def next_size(self) -> int:
        """Of the receive of the next message."""
        if self.messages >= self.posted:
            self.longest = max(self.longest, self.lengths.popleft())
        self.messages += 1
        return self.longest

    def complete(self, length: int) -> None:
        """The next message is complete."""
        self.lengths.append(length)


class Sender:
    """The sending end. `patient`: where the link is full, wait (evaluation) instead of failing (training), for at most
    `timeout` seconds."""

    timeout = math.inf

    def __init__(
        self,
        to_rank: int,
        tag: int,
        group: dist.ProcessGroup,
        *,
        capacity: int,
        patient: bool,
        lost: Callable[[str], StageLost],
    ) -> None:
        self.to_rank, self.tag, self.group, self.patient, self.lost = to_rank, tag, group, patient, lost
        self.outbox: queue.Queue[Any] = queue.Queue(capacity)  # None ends it
        self.sizes = ReceiveSizes(min(capacity, MOST_POSTED))
        self.failure: str | None = None  # why nothing more can be sent
        self.closing, self.reason = False, ""
        self.thread = threading.Thread(target=self._post, name=f"offbeat-send-{tag}", daemon=True)
        self.thread.start()

    def send(self, message: Message) -> None:
        self._put(pack(message))

    def _put(self, parcel: Any) -> None:
        began = time.monotonic()
        while self.failure is None:
            if time.monotonic() - began > self.timeout:
                raise self.lost(LATE)
            try:
                self.outbox.put(parcel, block=self.patient, timeout=1.0 if self.patient else None)
                return
            except queue.Full:
                assert self.patient, "more messages on a link than its capacity"
        raise self.lost(self.failure)

    def _post(self) -> None:
        try:
            while True:
                parcel = None if self.closing and self.outbox.empty() else self.outbox.get()
                if parcel is None:
                    self._send(pack(Message(-1, self.reason[:REASON_LIMIT], kind=GOODBYE)), self.tag)
                    return
                self._deliver(parcel)
        except RuntimeError as error:
            self.failure = cause(error)

    def _deliver(self, buffer: Any) -> None:
        size = self.sizes.next_size()
        self._send(buffer[:size], self.tag)
        if buffer.numel() > size:
            self._send(buffer[size:], self.tag + 1)
        self.sizes.complete(buffer.numel())

    def _send(self, buffer: Tensor, tag: int) -> None:
        work = dist.isend(buffer, self.to_rank, self.group, tag)
        assert work is not None
        work.wait()

    def close(self, reason: str = "") -> None:
        """Send a goodbye with the reason after all other messages, which ends the thread at the other end."""
        self.closing, self.reason = True, self.reason or reason
        with contextlib.suppress(queue.Full):  # then the thread is not waiting, and reads `closing`
            self.outbox.put_nowait(None)

    def receive(self) -> Message:
        raise RuntimeError("this is the sending end of a link: use send")

    peek = receive

    def ready(self) -> bool:
        return False


class Receiver:
    """The receiving end; waits for at most `timeout` seconds."""

    timeout = math.inf

    def __init__(
        self, from_rank: int, tag: int, group: dist.ProcessGroup, *, capacity: int, lost: Callable[[str], StageLost]
    ) -> None:
        self.from_rank, self.tag, self.group, self.lost = from_rank, tag, group, lost
        self.inbox: queue.Queue[Any] = queue.Queue(capacity)  # a text is the reason why no more will come
        self.failure: str | None = None  # why it does not wait any longer
        self.sizes = ReceiveSizes(min(capacity, MOST_POSTED))
        self.posted: deque[tuple[Tensor, Any]] = deque()  # receives in order: memory and gloo's handle
        self.next: Message | None = None
        self.last_batch: int | None = None  # index of the last batch received
        self.thread = threading.Thread(target=self._listen, name=f"offbeat-receive-{tag}", daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        try:
            for _ in range(self.sizes.posted):
                self._post_next()
            while True:
                head, work = self.posted.popleft()
                work.wait()
                length = size(head)
                if length > head.numel():
                    whole = torch.empty(length, dtype=torch.uint8)
                    whole[: head.numel()] = head
                    self._receive(whole[head.numel() :], self.tag + 1).wait()
                    head = whole
                self.sizes.complete(length)
                goodbye = length <= GOODBYE_LIMIT and read_header(head[:length]).kind == GOODBYE
                if not goodbye:
                    self._post_next()
                self.inbox.put(head[:length] if goodbye else self._complete(head[:length]))
                if goodbye:
                    return
        except (RuntimeError, UserError) as error:  # connection lost, or malformed message
            self.inbox.put(cause(error))

    def _post_next(self) -> None:
        buffer = torch.empty(self.sizes.next_size(), dtype=torch.uint8)
        buffer[:PREFIX].zero_()  # old memory must not complete a message that is too short
        self.posted.append((buffer, self._receive(buffer, self.tag)))

    def _complete(self, buffer: Tensor) -> Any:
        """The message that arrived, with its payload where that is sent apart."""
        return buffer

    def _read(self, arrived: Any) -> Message:
        return unpack(arrived)

    def _receive(self, buffer: Tensor, tag: int) -> Any:
        """Post a receive; the result is to be waited for."""
        work = dist.irecv(buffer, self.from_rank, self.group, tag)
        assert work is not None
        return work

    def peek(self) -> Message:
        if self.next is None:
            arrived = self._wait()
            if isinstance(arrived, str):
                self.inbox.put(arrived)  # for every later call
                raise self.lost(arrived)
            try:
                message = unpack(arrived) if isinstance(arrived, Tensor) else self._read(arrived)
            except UserError as error:
                self.inbox.put(str(error))
                raise self.lost(str(error)) from error
            if message.kind == GOODBYE:
                reason = message.content or STOPPED
                self.inbox.put(reason)
                raise self.lost(reason)
            self.next = message
            self.last_batch = message.t if message.kind == "batch" else self.last_batch
        return self.next

    def _wait(self) -> Any:
        began = time.monotonic()
        while True:  # with timeouts, so that Ctrl-C is handled
            if time.monotonic() - began > self.timeout:
                return LATE
            try:
                return self.inbox.get(timeout=0.5)
            except queue.Empty:
                if self.failure is not None:
                    return self.failure

    def receive(self) -> Message:
        message = self.peek()
        self.next = None
        return message

    def ready(self) -> bool:
        return self.next is not None or not self.inbox.empty()

    def send(self, message: Message) -> None:
        raise RuntimeError("this is the receiving end of a link: use receive")

    def close(self, reason: str = "") -> None:
        """The goodbye of the sending end closes this one."""


def cause(error: Exception) -> str:
    """The error of gloo for a lost connection, without its file names."""
    text = first_line(error)
    return "its process has died" if "onnection" in text and "gloo" in text else text
