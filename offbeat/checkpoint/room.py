"""Room on a disk that gets full: old checkpoints are removed for what is to be written, never the newest sound one."""

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
    """Remove checkpoints until that many bytes are free, without a number all that may go; returns which went.

    Those that are damaged go first, then the oldest. The newest one of which every byte is sound stays, and where there
    is none, all stay. Any process of a run may call it: what becomes complete meanwhile is newer, and stays too.
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
    """Bytes that may still be written there; quotas do not show."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def with_room(run: Path, write: Callable[[], Made]) -> Made:
    """What `write` returns; where the disk is full it is called once more, after old checkpoints of the run have made
    room."""
    try:
        return write()
    except (OSError, CheckpointFailed) as error:
        if not is_full(error) or not make_room(run):
            raise
    return write()
