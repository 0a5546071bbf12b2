"""What the chart and the text of a timeline (the paper's Fig. 1) share: its title, and the unit of its axis."""

from __future__ import annotations

from offbeat.method import Method
from offbeat.timeline import Costs


def heading(method: Method, costs: Costs, batches: int) -> str:
    """What is drawn, in a line."""
    letters = f"K={costs.K}" + (f", M={method.M}" if method.M > 1 else "")
    if method.m > 1:
        return f"{method.name}, {letters}, {batches} batches of m={method.m} micro-batches (numbered through)"
    return f"{method.name}, {letters}, {batches} batches"


def unit(costs: Costs) -> tuple[float, str]:
    """Seconds that the axis counts as one, and their name: the forward where all forwards cost 1, otherwise ms."""
    return (1.0, "F") if all(forward == 1 for forward in costs.forward) else (0.001, "ms")
