"""Heartbeats between neighbours: a sign of life from threads of their own, whatever the compute is busy with.

A process that has died closes its connections and is noticed at once. One that is stopped, or whose link is cut, just
says no more. A slow stage goes on giving signs; a stopped process stops with all of its threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

LONGEST_PAUSE = 1.0  # seconds between signs
ALIVE, GOODBYE = 1, 0


class Heartbeat:
    """Signs of life to and from some ranks. The callbacks come from a thread, once for each rank at most:

    silent(rank)    nothing was heard for `silence` seconds
    broken(rank)    its connection is gone, and it had not said goodbye
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
        self.quiet = dict.fromkeys(ranks, 0.0)  # seconds without a sign, of those that have not said goodbye
        self.leaving = threading.Event()
        watching = threading.Thread(target=self._watch, name="offbeat-heartbeat", daemon=True)
        self.threads = [watching] if self.quiet else []
        for rank in self.quiet:
            for work in (self._give, self._hear):
                name = f"offbeat-heartbeat{work.__name__}-{rank}"
                self.threads.append(threading.Thread(target=work, args=(rank, tag(rank)), name=name, daemon=True))
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Say goodbye; the threads end with the neighbours' goodbyes."""
        self.leaving.set()

    def _give(self, rank: int, tag: int) -> None:
        try:
            while True:
                sign = GOODBYE if self.leaving.is_set() else ALIVE
                work = dist.isend(torch.tensor([sign], dtype=torch.uint8), rank, self.group, tag)
                assert work is not None
                work.wait()
                if sign == GOODBYE:
                    return
                self.leaving.wait(min(self.silence / 4, LONGEST_PAUSE))
        except (RuntimeError, ValueError):  # gone; the thread that hears tells
            return

    def _hear(self, rank: int, tag: int) -> None:
        sign = torch.empty(1, dtype=torch.uint8)
        try:
            while True:
                work = dist.irecv(sign, rank, self.group, tag)
                assert work is not None
                work.wait()
                if int(sign) == GOODBYE:
                    self.quiet.pop(rank, None)
                    return
                if rank in self.quiet:
                    self.quiet[rank] = 0.0
        except (RuntimeError, ValueError):
            if self.quiet.pop(rank, None) is not None and not self.leaving.is_set():
                self.broken(rank)

    def _watch(self) -> None:
        """Adds up the silence in short steps, of which none counts for more than it should have taken: a process that
        was stopped itself, and goes on, has no reason to complain of others."""
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
                    self.quiet.clear()  # what breaks from now on is a consequence
                    self.silent(rank)
                    return
