"""One stage: its module, optimizer, batches in flight and weight versions."""

from offbeat.stage.stage import Report, Stage, Staleness

__all__ = ["Report", "Stage", "Staleness"]
