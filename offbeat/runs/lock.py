"""One run at a time in a folder: every process of a run holds a shared lock on `run.lock` while it is alive.

    first process   takes an exclusive lock, which fails while another process holds one; writes its name to the file;
                    changes the lock to a shared one
    the others      take a shared lock: workers of a launcher, stages on other machines
    kill -9         the system releases the locks of a process that ends, for whatever reason

The last process removes the file. A file that a killed run has left does not block other runs: the lock counts, and the
file only names the process. On a file system without locks, runs are not protected.
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
LEAVING = 10.0  # seconds for the other processes of a run to end after its first process has ended


@dataclass(frozen=True)
class Holder:
    """The process that uses a folder."""

    process: int
    host: str
    token: str  # random, per use of the folder

    @property
    def is_own(self) -> bool:
        """Whether it is this process, or the one that launched it."""
        launched = os.environ.get(launch.LAUNCHER) == str(os.getppid())
        return self.host == platform.node() and self.process in (os.getpid(), os.getppid() if launched else None)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended; False if that cannot be seen from here."""
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
    """Lock a folder for a run of this process, or for the run that this process is part of.

    Yields the token with which other processes join. Raises FolderTaken if another run uses the folder. A folder that
    does not exist is made, and removed again if it stays empty.
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
    """Join the lock of another process of this run; yields whether this process sees the same folder."""
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
    """An open file with a shared lock on it, and the token of the process that uses the folder."""
    until = time.monotonic() + LEAVING
    while True:
        descriptor = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            alone = _lock(descriptor, fcntl.LOCK_EX)
            if alone and not _is_current(folder, descriptor):
                continue  # removed since it was opened, by the last process of a run
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
                "that run has ended or stop it, then try again"
            )
        time.sleep(0.1)


def _lock(descriptor: int, kind: int) -> bool:
    """Take or change a lock without waiting; False if others hold it. True on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in HELD
    return True


def _leave(folder: Path, descriptor: int) -> None:
    """Release the lock; the last process also removes the file."""
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
    """Write to the file that this process uses the folder."""
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
    """The process that the file names; None if it names none."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (OSError, ValueError, TypeError):
        return None
