"""The files of CIFAR as its authors publish them: finding them, checking their sizes, decoding them.

Archives are read member by member in memory; nothing is extracted, so no path in an archive is ever used as one.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
from numpy.typing import NDArray

from offbeat.data.pickles import load_plain
from offbeat.errors import UserError

IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32

Decoded = tuple[str, NDArray[np.uint8], NDArray[np.int64]]  # file, images (n,3,32,32), labels (n,)


@dataclass(frozen=True)
class CifarFormat:
    """A published format of the data set: its folder, its archive, its files with their number of records."""

    folder: str
    archive: str
    classes: int
    files: dict[str, int]  # the test file last
    label_bytes: int = 0  # binary format: before each image, the class in the last of them
    label_key: str = ""  # python format: the key of the classes in the pickled dictionary

    @property
    def test(self) -> str:
        return list(self.files)[-1]

    def sizes(self, file: str) -> range:
        """The allowed sizes of a file in bytes: one for the binary format, up to twice the pixels for a pickle."""
        records = self.files[file]
        if self.label_bytes:
            exact = records * (self.label_bytes + PIXELS)
            return range(exact, exact + 1)
        return range(records * PIXELS, 2 * records * PIXELS)


_TEN = {f"data_batch_{number}": 10_000 for number in range(1, 6)} | {"test_batch": 10_000}
_HUNDRED = {"train": 50_000, "test": 10_000}


def _binary(files: dict[str, int]) -> dict[str, int]:
    return {f"{file}.bin": records for file, records in files.items()}


CIFAR10 = (
    CifarFormat("cifar-10-batches-bin", "cifar-10-binary.tar.gz", 10, _binary(_TEN), label_bytes=1),
    CifarFormat("cifar-10-batches-py", "cifar-10-python.tar.gz", 10, _TEN, label_key="labels"),
)
CIFAR100 = (  # the first of the two label bytes is the coarse class
    CifarFormat("cifar-100-binary", "cifar-100-binary.tar.gz", 100, _binary(_HUNDRED), label_bytes=2),
    CifarFormat("cifar-100-python", "cifar-100-python.tar.gz", 100, _HUNDRED, label_key="fine_labels"),
)


def find(path: Path, formats: tuple[CifarFormat, ...]) -> tuple[Path, CifarFormat]:
    """The folder or archive to read, and its format: `path` itself, or one in it."""
    if path.is_file():
        return path, _format_of(path, formats)
    for inside in (False, True):
        for format in formats:
            place = path / format.folder if inside else path
            if any((place / file).is_file() for file in format.files):
                return place, format
    for format in formats:
        if (path / format.archive).is_file():
            return path / format.archive, format
    for format in formats:
        if format.folder in (path.name, *(child.name for child in path.iterdir() if child.is_dir())):
            # The right folder without its files: the reader names the one that is missing.
            return (path if path.name == format.folder else path / format.folder), format
    wanted = ", ".join(f"{format.folder}, {format.archive}" for format in formats)
    raise UserError(f"no CIFAR-{formats[0].classes} in {path}: give the folder that holds one of {wanted}")


def read(place: Path, format: CifarFormat) -> Iterator[Decoded]:
    """Every file of the data set, decoded and checked, in any order."""
    for file, raw in _archived(place, format) if place.is_file() else _plain(place, format):
        where = f"{place}/{file}"
        images, labels = _decoded_binary(raw, format) if format.label_bytes else _decoded_pickle(raw, format, where)
        if images.shape != (format.files[file], PIXELS) or labels.shape != (format.files[file],):
            held = f"images {images.shape} and labels {labels.shape}, expected {format.files[file]} of each"
            raise UserError(f"{where} holds {held}: fetch {format.archive} again")
        if labels.min() < 0 or labels.max() >= format.classes:
            worst = labels[(labels < 0) | (labels >= format.classes)][0]
            raise UserError(
                f"{where} holds the label {worst}, expected 0 to {format.classes - 1}: fetch {format.archive} again"
            )
        yield file, images.reshape(-1, *IMAGE), labels


def _plain(folder: Path, format: CifarFormat) -> Iterator[tuple[str, bytes]]:
    for file in format.files:
        path = folder / file
        if not path.is_file():
            raise _missing(folder, file, format)
        _check_size(folder, file, format, size=path.stat().st_size)
        yield file, path.read_bytes()


def _archived(archive: Path, format: CifarFormat) -> Iterator[tuple[str, bytes]]:
    left = set(format.files)
    for tar, member in _members(archive):
        file = _file_of(member, format)
        if file not in left:
            continue
        _check_size(archive, file, format, size=member.size)
        stream: IO[bytes] | None = tar.extractfile(member)
        assert stream is not None  # only links and folders have none, and _file_of passes neither
        try:
            raw = stream.read()
        except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
            raise _truncated(archive, error) from error
        _check_size(archive, file, format, size=len(raw))
        left.remove(file)
        yield file, raw
    if left:
        raise _missing(archive, min(left), format)


def _members(archive: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                yield tar, member
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise _truncated(archive, error) from error


def _file_of(member: tarfile.TarInfo, format: CifarFormat) -> str:
    parts = PurePosixPath(member.name).parts
    known = member.isfile() and len(parts) > 1 and parts[-2] == format.folder and parts[-1] in format.files
    return parts[-1] if known else ""


def _format_of(archive: Path, formats: tuple[CifarFormat, ...]) -> CifarFormat:
    for _, member in _members(archive):
        for format in formats:
            if _file_of(member, format):
                return format
    wanted = " or ".join(format.archive for format in formats)
    raise UserError(f"{archive} holds no file of CIFAR-{formats[0].classes}: give {wanted}")


def _decoded_binary(raw: bytes, format: CifarFormat) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    records = np.frombuffer(raw, dtype=np.uint8).reshape(-1, format.label_bytes + PIXELS)
    return records[:, format.label_bytes :], records[:, format.label_bytes - 1].astype(np.int64)


def _decoded_pickle(raw: bytes, format: CifarFormat, where: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = load_plain(raw, where=where)
    try:
        images, labels = content["data"], np.array(content[format.label_key], dtype=np.int64)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where} has no 'data' and '{format.label_key}': use the files of {format.archive}") from error
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise UserError(f"{where}: 'data' is not an array of bytes: use the files of {format.archive}")
    return images, labels


def _check_size(place: Path, file: str, format: CifarFormat, *, size: int) -> None:
    allowed = format.sizes(file)
    if size not in allowed:
        least = f"{allowed[0]}" if len(allowed) == 1 else f"{allowed[0]} to {allowed[-1]}"
        raise UserError(f"{place}/{file} has {size} bytes, expected {least}: fetch {format.archive} again")


def _missing(place: Path, file: str, format: CifarFormat) -> UserError:
    least = format.sizes(file)[0]
    return UserError(f"{place}/{file} is missing (0 of {least} bytes): fetch {format.archive} again")


def _truncated(archive: Path, error: Exception) -> UserError:
    size, reason = archive.stat().st_size, str(error).partition("\n")[0]
    return UserError(f"{archive} ({size} bytes) is truncated or not a tar.gz: fetch it again ({reason})")
