"""Offbeat: train deep networks whose modules never wait for each other."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from offbeat.cutting import partition
    from offbeat.errors import NotFinite, StageLost, UserError
    from offbeat.method import Method
    from offbeat.methods import ADL, BP
    from offbeat.pipeline import Pipeline

# Names load when they are used, so that drawing a program does not wait for torch.
_HOME = {
    "ADL": "offbeat.methods",
    "BP": "offbeat.methods",
    "Method": "offbeat.method",
    "NotFinite": "offbeat.errors",
    "Pipeline": "offbeat.pipeline",
    "StageLost": "offbeat.errors",
    "partition": "offbeat.cutting",
    "UserError": "offbeat.errors",
}

__all__ = ["ADL", "BP", "Method", "NotFinite", "Pipeline", "StageLost", "UserError", "__version__", "partition"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'offbeat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
