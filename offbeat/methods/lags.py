"""Batches between the forward and the backward of one local iteration of stage k of K."""

from __future__ import annotations


def none(k: int, K: int) -> int:
    """Backward follows its own forward."""
    return 0


def one_way(k: int, K: int) -> int:
    """Stages from k up to the loss: K-k. Forwards run ahead at once, a gradient comes down one stage an iteration."""
    return K - k


def round_trip(k: int, K: int) -> int:
    """Ticks from stage k up to the loss and back, one stage a tick each way: 2(K-k)."""
    return 2 * (K - k)
