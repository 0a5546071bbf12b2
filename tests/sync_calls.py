"""Calls of fsync and rename, recorded in order while they are made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Call = tuple[str, Path]


class Recorded:
    """The calls of fsync and rename from now on, each with the path that it concerned at the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self.before: dict[Path, Path] = {}  # the name under which a file was written, by the one that it got
        self.bytes: dict[Path, int] = {}  # that a file had when it was synced
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            sync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.bytes[path] = os.fstat(descriptor).st_size
            self.calls.append(("fsync", path))

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "replace", self._renaming(os.replace))
        monkeypatch.setattr(os, "rename", self._renaming(os.rename))

    def _renaming(self, real: Callable[..., None]) -> Callable[..., None]:
        def rename(source: Path, target: Path, **options: int) -> None:
            real(source, target, **options)
            self.before[Path(target)] = Path(source)
            self.calls.append(("rename", Path(target)))

        return rename

    def check_order(self, *expected: Call) -> None:
        """Each of these was done, after the one before it."""
        position = 0
        for wanted in expected:
            assert wanted in self.calls[position:], (wanted, self.calls)
            position = self.calls.index(wanted, position) + 1
