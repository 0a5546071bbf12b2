"""Staleness of lagged methods, by formula (METHODS: level of staleness, counted in updates)."""

from __future__ import annotations


def staleness(lag: int, M: int, j: int) -> int:
    """Level of staleness of the j-th gradient of a window in steady state: ceil((lag - j) / M).

    For ADL the lag is 2(K-k) and this is d_{k,j} of the paper.

    >>> [staleness(4, 2, j) for j in range(2)], [staleness(2, 4, j) for j in range(4)]
    ([2, 2], [1, 1, 0, 0])
    """
    return -((j - lag) // M)


def mean_staleness(lag: int, M: int) -> float:
    """Mean over the window, exactly lag / M (Hermite's identity).

    >>> mean_staleness(14, 4)
    3.5
    """
    return lag / M


def versions_held(lag: int, M: int) -> int:
    """Most parameter versions that batches in flight can need, the newest included: ceil(lag / M) + 1."""
    return -(-lag // M) + 1
