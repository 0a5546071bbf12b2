"""Reports of all stages, sent to the process of the first stage; no stage waits for them."""

from __future__ import annotations

from offbeat.core.links import Link, Message
from offbeat.core.stage_report import Report
from offbeat.pipeline import Pipeline


class Telemetry:
    """Every process calls `send` at the same batches; the first process collects complete sets of K reports."""

    def __init__(self, pipe: Pipeline) -> None:
        self.pipe = pipe
        self.links: dict[int, Link] = {}
        for k in range(2, pipe.K + 1):
            link = pipe.engine.link("report", k, 1, capacity=64, patient=True)
            if link is not None:
                self.links[k] = link
        self.waiting: dict[int, list[Report]] = {k: [] for k in range(1, pipe.K + 1)}

    def send(self) -> None:
        """Send the reports of this process's stages."""
        for report in self.pipe.reports():
            if report.k in self.links:
                self.links[report.k].send(Message(report.t, report.as_dict()))
            else:
                self.waiting[report.k].append(report)

    def collect(self, *, wait: bool = False) -> list[list[Report]]:
        """Complete sets, oldest first, in the process of the first stage. wait=True waits for the set sent last."""
        if not self.pipe.first:
            return []
        for k, link in self.links.items():
            while len(self.waiting[k]) < len(self.waiting[1]) if wait else link.ready():  # after the last is a goodbye
                content = link.receive().content
                self.waiting[k].append(Report(**content))
        complete = min(len(reports) for reports in self.waiting.values())
        return [[self.waiting[k].pop(0) for k in self.waiting] for _ in range(complete)]
