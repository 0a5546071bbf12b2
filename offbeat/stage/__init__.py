"""One stage: its module, optimizer, batches in flight and weight versions."""

from offbeat.stage.report import Report, Staleness
from offbeat.stage.stage import Stage

__all__ = ["Report", "Stage", "Staleness"]
