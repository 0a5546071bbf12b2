"""Heartbeats between neighbours, sent by threads of their own, however busy the computation is.

A process that dies closes its connections, which is noticed at once. One that is stopped or cut off is only silent. A
slow stage still sends heartbeats; a stopped process stops with all its threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

LONGEST_PAUSE = 1.0  # seconds between heartbeats
ALIVE, GOODBYE = 1, 0


class Heartbeat:
    """Heartbeats to and from some ranks. The callbacks are called in a thread, at most once per rank:

    silent(rank)    no heartbeat for `silence` seconds
    broken(rank)    its connection is lost, without a goodbye
    """

    def __init__(
        self,
        ranks: Iterable[int],
        tag: Callable[[int], int],
        group: dist.ProcessGroup,
        *,
        silence: float,
        silent: Callable[[int], None],
        broken: Callable[[int], None],
    ) -> None:
        self.group, self.silence, self.silent, self.broken = group, silence, silent, broken
        self.quiet = dict.fromkeys(ranks, 0.0)  # seconds since the last heartbeat, of ranks without a goodbye
        self.leaving = threading.Event()
        watching = threading.Thread(target=self._watch, name="offbeat-heartbeat", daemon=True)
        self.threads = [watching] if self.quiet else []
        for rank in self.quiet:
            for work in (self._send, self._receive):
                name = f"offbeat-heartbeat{work.__name__}-{rank}"
                self.threads.append(threading.Thread(target=work, args=(rank, tag(rank)), name=name, daemon=True))
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Send a goodbye; the threads end with the goodbyes of the neighbours."""
        self.leaving.set()

    def _send(self, rank: int, tag: int) -> None:
        try:
            while True:
                beat = GOODBYE if self.leaving.is_set() else ALIVE
                work = dist.isend(torch.tensor([beat], dtype=torch.uint8), rank, self.group, tag)
                assert work is not None
                work.wait()
                if beat == GOODBYE:
                    return
                self.leaving.wait(min(self.silence / 4, LONGEST_PAUSE))
        except (RuntimeError, ValueError):  # connection lost; the receiving thread reports it
            return

    def _receive(self, rank: int, tag: int) -> None:
        beat = torch.empty(1, dtype=torch.uint8)
        try:
            while True:
                work = dist.irecv(beat, rank, self.group, tag)
                assert work is not None
                work.wait()
                if int(beat) == GOODBYE:
                    self.quiet.pop(rank, None)
                    return
                if rank in self.quiet:
                    self.quiet[rank] = 0.0
        except (RuntimeError, ValueError):
            if self.quiet.pop(rank, None) is not None and not self.leaving.is_set():
                self.broken(rank)

    def _watch(self) -> None:
        """Add up the silence in short steps, none of which counts for more than twice its length: a process that was
        stopped itself must not report others when it continues."""
        step = min(self.silence / 10, 1.0)
        before = time.monotonic()
        while self.quiet and not self.leaving.wait(step):
            now = time.monotonic()
            passed, before = min(now - before, 2 * step), now
            for rank in list(self.quiet):
                if (quiet := self.quiet.get(rank)) is None:
                    continue
                self.quiet[rank] = quiet + passed
                if quiet + passed >= self.silence:
                    self.quiet.clear()  # connections lost from now on are a consequence
                    self.silent(rank)
                    return
