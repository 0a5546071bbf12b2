"""The timeline of a method (the paper's Fig. 1) as boxes, for the chart and for the text: its spans, with the versions
of the weights that they use."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.method import Method
from offbeat.timeline import Costs, Span, timeline


@dataclass(frozen=True, slots=True)
class SpanBox:
    """A span as it is drawn.

    version    of the weights: those that a forward or backward computes with, or that an update makes
    replayed   seconds at the start of a backward in which it repeats its forward
    """

    span: Span
    version: int
    replayed: float = 0.0


def boxes(method: Method, costs: Costs, batches: int) -> list[SpanBox]:
    """All spans of that many batches with the versions of their weights, in the order of each stage's program.

    >>> from offbeat.methods import ADL
    >>> stage_1 = [box for box in boxes(ADL(M=1), Costs([1, 1], [2, 2]), 4) if box.span.k == 1]
    >>> print(" ".join(f"{box.span.operation}@v{box.version}" for box in stage_1))
    F0@v0 F1@v0 F2@v0 B0@v0 U@v1 F3@v1 B1@v0 U@v2 B2@v0 U@v3 B3@v1 U@v4
    """
    return [SpanBox(span, span.version, span.replayed) for span in timeline(method, batches, costs)]


def heading(method: Method, costs: Costs, batches: int) -> str:
    """What is drawn, in a line."""
    letters = f"K={costs.K}" + (f", M={method.M}" if method.M > 1 else "")
    if method.m > 1:
        return f"{method.name}, {letters}, {batches} batches of m={method.m} micro-batches (numbered through)"
    return f"{method.name}, {letters}, {batches} batches"


def unit(costs: Costs) -> tuple[float, str]:
    """Seconds that the axis counts as one, and their name: the forward where all forwards cost 1, otherwise ms."""
    return (1.0, "F") if all(forward == 1 for forward in costs.forward) else (0.001, "ms")
