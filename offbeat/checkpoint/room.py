"""Space on a full disk: old checkpoints are removed for what is to be written, never the newest sound one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from offbeat.checkpoint.files import CheckpointFailed
from offbeat.checkpoint.folder import ls, remove, verify

FULL = (errno.ENOSPC, errno.EDQUOT)  # where removing files helps

Made = TypeVar("Made")


def is_full(error: BaseException | None) -> bool:
    """Whether something could not be written for lack of space."""
    cause = error.__cause__ if isinstance(error, CheckpointFailed) else error
    return isinstance(cause, OSError) and cause.errno in FULL


def make_room(run: Path, *, needed: int | None = None) -> list[Path]:
    """Remove checkpoints until `needed` bytes are free, by default all that may be removed; returns their paths.

    Damaged ones are removed first, then the oldest. The newest one of which every byte is verified is kept; where there
    is none, all are kept. Any process of a run may call it: a checkpoint completed meanwhile is newer, and is kept.
    """
    if needed is not None and free(run) >= needed:
        return []
    listed = ls(run)
    damaged: list[Path] = []
    while listed and (listed[-1].checkpoint is None or verify(listed[-1].path)):
        damaged.append(listed.pop().path)
    gone: list[Path] = []
    for path in [*damaged, *(each.path for each in listed[:-1])] if listed else ():
        if needed is not None and free(run) >= needed:
            break
        gone += [path] * remove(path)
    return gone


def free(folder: Path) -> int:
    """Bytes that can still be written to the disk of a folder; quotas are not considered."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def with_room(run: Path, write: Callable[[], Made]) -> Made:
    """The result of `write`; where the disk is full, old checkpoints of the run are removed and it is called again."""
    try:
        return write()
    except (OSError, CheckpointFailed) as error:
        if not is_full(error) or not make_room(run):
            raise
    return write()
