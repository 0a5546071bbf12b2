"""Batches between the forward and the backward of one local iteration of stage k of K."""

from __future__ import annotations


def none(k: int, K: int) -> int:
    """The backward follows its own forward."""
    return 0


def one_way(k: int, K: int) -> int:
    """Number of stages from k to the last: K-k. A gradient passes through one stage per local iteration."""
    return K - k


def round_trip(k: int, K: int) -> int:
    """Ticks from stage k to the last stage and back, one stage per tick: 2(K-k)."""
    return 2 * (K - k)
