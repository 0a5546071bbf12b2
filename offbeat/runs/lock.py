"""One run at a time in a folder: every process of a run holds a shared lock on `run.lock` there, as long as it lives.

    first process   takes the lock alone, which fails while anybody holds it; names itself in the file; shares the lock
    the others      share it: workers of a launcher, stages on other machines
    kill -9         the system releases the locks of a process that ends, however it ends

The last process to leave removes the file. One that a killed run has left holds nothing up: the lock counts, the file
says whose it is. Where a file system has no locks, runs go on without.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from offbeat.checkpoint import with_room
from offbeat.errors import FolderTaken, UserError, first_line
from offbeat.runs import launch

FILE = "run.lock"
HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
LEAVING = 10.0  # seconds for the last processes of a run whose first one is gone to end, too


@dataclass(frozen=True)
class Holder:
    """Who has begun to use a folder."""

    process: int
    host: str
    token: str  # of one use of the folder

    @property
    def is_own(self) -> bool:
        """Whether it is this process, or the launcher whose worker this is."""
        launcher = int(os.environ[launch.LAUNCHER]) if launch.is_worker() else None
        return self.host == platform.node() and self.process in (os.getpid(), launcher)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, as far as can be seen from here."""
        if self.host != platform.node():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:  # of another user
            return False
        return False


@contextmanager
def held(folder: Path) -> Iterator[str]:
    """Hold a folder for a run of this process, or share it with the run that this process is part of.

    Yields the token with which other processes join. FolderTaken where processes of another run use it. The folder is
    made where there is none, and removed again where nothing was written.
    """
    made: list[Path] = []
    try:
        try:
            made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, token = _take(folder)
        except OSError as error:
            raise UserError(f"cannot write to {folder} ({first_line(error)}): give another folder as out=") from error
        try:
            yield token
        finally:
            _leave(folder, descriptor)
    finally:
        for path in made:
            with suppress(OSError):  # not empty
                path.rmdir()


@contextmanager
def joined(folder: Path, token: str) -> Iterator[bool]:
    """Share a folder that another process of this run holds; yields whether this process sees that very folder."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDWR)
    except OSError:
        yield False
        return
    holder = _holder(descriptor)
    if holder is None or holder.token != token or not _lock(descriptor, fcntl.LOCK_SH):
        os.close(descriptor)
        yield False
        return
    try:
        yield True
    finally:
        _leave(folder, descriptor)


def _take(folder: Path) -> tuple[int, str]:
    """An open file with a shared lock on it, and the token of who has begun to use the folder."""
    until = time.monotonic() + LEAVING
    while True:
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            alone = _lock(descriptor, fcntl.LOCK_EX)
            if alone and not _is_current(folder, descriptor):
                continue  # it was removed since it was opened, by the last to leave
            holder = _name(folder, descriptor) if alone else _holder(descriptor)
            if holder and holder.is_own and _lock(descriptor, fcntl.LOCK_SH):
                taken, descriptor = descriptor, -1
                return taken, holder.token
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if time.monotonic() > until or (holder and not holder.is_own and not holder.is_gone):
            who = f"process {holder.process} on {holder.host}" if holder else "another process"
            raise FolderTaken(
                f"{folder} is in use by the run of {who}: a folder takes one run at a time; wait until "
                "that one has ended or stop it, then repeat the command"
            )
        time.sleep(0.1)


def _lock(descriptor: int, kind: int) -> bool:
    """Take or change a lock at once; False where others hold it. True also where the file system has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in HELD
    return True


def _leave(folder: Path, descriptor: int) -> None:
    """Release the lock; whoever is the last also removes the file."""
    if _lock(descriptor, fcntl.LOCK_EX) and _is_current(folder, descriptor):
        with suppress(OSError):
            (folder / FILE).unlink()
    os.close(descriptor)


def _is_current(folder: Path, descriptor: int) -> bool:
    """Whether the open file is still the one in the folder."""
    try:
        return os.path.samestat(os.fstat(descriptor), (folder / FILE).stat())
    except OSError:
        return False


def _name(folder: Path, descriptor: int) -> Holder:
    """Write into the file that this process has begun to use the folder."""
    holder = Holder(os.getpid(), platform.node(), uuid.uuid4().hex)
    text = (json.dumps(asdict(holder)) + "\n").encode()

    def write() -> None:
        os.ftruncate(descriptor, 0)
        if os.pwrite(descriptor, text, 0) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        with_room(folder, write)
    except OSError:
        (folder / FILE).unlink()
        raise
    return holder


def _holder(descriptor: int) -> Holder | None:
    """Who is named in the file; None while nobody is, or not yet."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (OSError, ValueError, TypeError):
        return None
