"""Real file systems of a given size, to be filled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A file system of that many bytes; where none may be mounted, the test is skipped."""
    if sys.platform != "linux":
        pytest.skip("mounts a tmpfs, which needs Linux")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def taken(path: Path) -> int:
    """Bytes that a file, or all files of a folder, take on a disk that hands out whole pages."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in files)


def free(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def fill(folder: Path, left: int) -> Path:
    """A file that leaves so many bytes free, or less than a page more."""
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(max(0, free(folder) - left) // PAGE * PAGE))
    return ballast
