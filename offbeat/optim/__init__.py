"""Optimizers that lose little when gradients are late: Muon, and Adam in a rotated basis. Plain torch.optim.Optimizers.

May import errors and torch.
"""

from __future__ import annotations

from offbeat.optim.muon import Muon
from offbeat.optim.names import is_hidden_matrix
from offbeat.optim.rotated_adam import RotatedAdam

__all__ = ["Muon", "RotatedAdam", "is_hidden_matrix"]
