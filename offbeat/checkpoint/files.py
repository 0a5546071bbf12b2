"""Files that are synced to the disk when they are written, and checked by size and SHA-256 when they are read."""

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
    """A checkpoint could not be written (full disk, for example); nothing of it is left, and training can continue."""


class CheckpointDamaged(UserError):
    """A checkpoint is not what was written; nothing of it was used."""


@dataclass(frozen=True)
class FileFacts:
    """What a manifest states about a file."""

    name: str
    size: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, facts: FileFacts | Mapping[str, Any]) -> FileFacts:
        """From the dictionary that processes send each other."""
        return facts if isinstance(facts, FileFacts) else cls(**facts)


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """For code that writes: an OSError becomes a CheckpointFailed in one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        step = "free some space" if error.errno in FULL else "check the folder"
        raise CheckpointFailed(f"cannot write {what} ({reason}): {step}, or checkpoint elsewhere") from error


@contextmanager
def reading(what: Path) -> Iterator[None]:
    """For code that reads: an OSError becomes a CheckpointDamaged in one line."""
    try:
        yield
    except OSError as error:
        raise CheckpointDamaged(f"{what} cannot be read ({error.strerror or first_line(error)})") from error


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileFacts:
    """Write and sync a file; returns the facts of the bytes given, not of those read back."""
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
                path.unlink()  # leaves the space to other files
            raise
    return FileFacts(path.name, size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to the disk; file systems that cannot do that do not need it."""
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
    """The bytes of a file, checked after they were read."""
    path = folder / facts.name
    with reading(path):
        _check_size(path, facts)
        raw = bytearray(path.read_bytes())
    _check_hash(path, facts, hashlib.sha256(raw).hexdigest())
    return raw


def check(folder: Path, facts: FileFacts) -> None:
    """Read a file in pieces; CheckpointDamaged where it is not the one that the manifest lists."""
    path = folder / facts.name
    with reading(path):
        _check_size(path, facts)
        _check_hash(path, facts, measure(path).sha256)


def _check_size(path: Path, facts: FileFacts) -> None:
    if (size := path.stat().st_size) != facts.size:
        raise CheckpointDamaged(f"{path} has {size} bytes, its manifest states {facts.size}")


def _check_hash(path: Path, facts: FileFacts, sha256: str) -> None:
    if sha256 != facts.sha256:
        raise CheckpointDamaged(f"{path} does not have the bytes that were written (SHA-256)")


def parse(raw: bytes | bytearray, path: Path) -> Any:
    """The value of a JSON text; NaN and Infinity, which Python also reads, are refused."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not allowed in JSON")

    try:
        return json.loads(raw, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} is not valid JSON ({first_line(error)})") from error
