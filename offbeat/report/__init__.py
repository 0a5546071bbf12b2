"""What is shown: when every stage does what, how stale its gradients are, and how methods compare."""

from __future__ import annotations

from offbeat.report.pictures import draw_curves, draw_staleness, draw_timeline

__all__ = ["draw_curves", "draw_staleness", "draw_timeline"]
