"""Which stage failed first, as all processes report it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from offbeat.core.links.distributed import LATE, STOPPED, Receiver
from offbeat.engines.calls import Calls
from offbeat.errors import CallTimeout, StageLost, StageSilent

WAITED = "the processes have waited for each other"
DIFFERENT = "the processes are in different calls"
STORE_SECONDS = 2.0  # for the store to answer, which may be on a machine that is cut off


class Failures:
    """The errors of this process for stages that are lost.

    One failure makes others: a process that ends is missed by its neighbours, whose ends are missed by theirs. So the
    first process to notice one reports it in the store of the group, and all others repeat that report.
    """

    def __init__(
        self, rank: int, name: Callable[[int], str], store: Any, links: Callable[[], list[Any]], calls: Calls
    ) -> None:
        """name: of the stage of a rank."""
        self.rank, self.name, self.store, self.links, self.calls = rank, name, store, links, calls
        self.store_answers = True
        self.silent: str | None = None  # the report of a neighbour that does not answer

    def error(self, report: str) -> StageLost:
        """The error for a lost stage: with the first report, which is the cause, while later ones are consequences."""
        if self.silent:
            return StageSilent(self.silent)
        first = self.first_report(report)
        return CallTimeout(first) if first.startswith((WAITED, DIFFERENT)) else StageLost(first)

    def timed_out(self) -> StageLost:
        """The error for a wait that is over, while all processes are alive."""
        return self.error(
            f"{WAITED} for more than {self.calls.timeout:g} s ({self.calls.report()}): make the same calls in every "
            "process, or set a longer timeout="
        )

    def calls_differ(self, rank: int, call: str) -> StageLost:
        """The error for a process that communicates in another call than this one."""
        return self.error(
            f"{DIFFERENT} ({self.name(rank)}: {call}, {self.name(self.rank)}: {self.calls}): make the same calls in "
            "every process"
        )

    def error_of_link(self, rank: int) -> Callable[[str], StageLost]:
        """What a link to that process raises, with the reason that it knows."""

        def lost(reason: str) -> StageLost:
            if reason == LATE:
                return self.timed_out()
            why = "it no longer heard this stage" if self._is_about_this_stage(reason) else reason
            own = f", while {self.name(self.rank)} was in {self.calls}" if why.startswith(STOPPED) else ""
            return self.error(f"{self.name(rank)} is gone: {why}{self.last_message(rank)}{own}")

        return lost

    def first_report(self, report: str) -> str:
        """The report of the first process to notice a failure, if the store answers and it is not about this stage;
        otherwise the given one."""
        answer: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store ended with its process
                answer.append(self.store.compare_set("offbeat/failed", "", report).decode())

        if self.store_answers:
            asking = threading.Thread(target=ask, name="offbeat-store", daemon=True)
            asking.start()
            asking.join(STORE_SECONDS)
            self.store_answers = bool(answer)
        first = answer[0] if answer else ""
        return report if self._is_about_this_stage(first) else first or report

    def last_message(self, rank: int) -> str:
        """The batch of the last message from a process, in brackets, if there was one."""
        received = [link.last_batch for link in self.links() if isinstance(link, Receiver) and link.from_rank == rank]
        batches = [t for t in received if t is not None]
        return f" (its last message was of batch {max(batches)})" if batches else ""

    def _is_about_this_stage(self, report: str) -> bool:
        """Whether another process reports the loss of this one, whose own report must be another."""
        own = self.name(self.rank)
        return report.startswith((f"{own} has not answered", f"{own} is gone"))
