"""What a plan shows: pictures of when every stage does what, and of how stale its gradients are."""

from __future__ import annotations

from offbeat.report.pictures import draw_staleness, draw_timeline

__all__ = ["draw_staleness", "draw_timeline"]
