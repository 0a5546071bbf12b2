"""Staleness and versions of a stage with a lag, as the paper's formulas give them."""

from __future__ import annotations


def staleness(lag: int, M: int, j: int) -> int:
    """Staleness of the j-th gradient of a window in steady state, eq. (17): ceil((lag - j) / M)."""
    return -((j - lag) // M)


def mean_staleness(lag: int, M: int) -> float:
    """Mean over the window, eq. (19): exactly lag / M (Hermite's identity)."""
    return lag / M


def versions_held(lag: int, M: int) -> int:
    """Versions that batches in flight can need, including the newest: ceil(lag / M) + 1."""
    return -(-lag // M) + 1
