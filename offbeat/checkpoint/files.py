"""Files that are on the disk when they say so, and that are checked before they are believed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import UserError, first_line

CHUNK = 1 << 22
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointFailed(UserError):
    """A checkpoint could not be written (a full disk, say); nothing of it is left, and training can go on."""


class CheckpointDamaged(UserError):
    """A checkpoint is not what was written; nothing of it was used."""


@dataclass(frozen=True)
class FileFacts:
    """What a manifest says of a file."""

    name: str
    size: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, facts: FileFacts | Mapping[str, Any]) -> FileFacts:
        """From what travelled between processes."""
        return facts if isinstance(facts, FileFacts) else cls(**facts)


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """Around all that writes: an error of the system becomes a CheckpointFailed in one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        step = "free some space" if error.errno in FULL else "check the folder"
        raise CheckpointFailed(f"cannot write {what} ({reason}): {step}, or checkpoint elsewhere") from error


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileFacts:
    """Write and sync a file; facts of what was handed over, not of what the disk says it has."""
    digest, size = hashlib.sha256(), 0
    with writing(path):
        try:
            with path.open("wb", buffering=0) as file:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    digest.update(view)
                    size += len(view)
                    while len(view):  # an unbuffered write may take less than it is given
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()  # what is full has room for other things
            raise
    return FileFacts(path.name, size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make names in a folder last; some file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def measure(path: Path) -> FileFacts:
    """The facts of a file as it is now."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(path.name, size, digest.hexdigest())


def load(folder: Path, facts: FileFacts) -> bytearray:
    """A file's bytes, of which the very bytes returned were checked."""
    path = folder / facts.name
    try:
        size = path.stat().st_size
        if size != facts.size:
            raise CheckpointDamaged(f"{path} has {size} bytes, its manifest says {facts.size}")
        raw = bytearray(path.read_bytes())
    except OSError as error:
        raise CheckpointDamaged(f"{path} cannot be read ({error.strerror or first_line(error)})") from error
    if hashlib.sha256(raw).hexdigest() != facts.sha256:
        raise CheckpointDamaged(f"{path} does not have the bytes that were written (SHA-256)")
    return raw


def parse(raw: bytes | bytearray, path: Path) -> Any:
    """JSON, and nothing that JSON does not have."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(raw, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is no valid JSON ({first_line(error)})") from error
