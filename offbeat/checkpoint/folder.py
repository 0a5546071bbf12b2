"""The folders of a run's checkpoints: made under another name, finished, found, verified, thrown away."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.checkpoint.files import (
    CheckpointDamaged,
    CheckpointFailed,
    FileFacts,
    load,
    measure,
    parse,
    sync_folder,
    write_file,
    writing,
)
from offbeat.checkpoint.parts import FORMAT, TENSORS, TREE, check_part, read_part
from offbeat.errors import UserError, first_line

if TYPE_CHECKING:
    import torch

FOLDER, MANIFEST, RUN = "checkpoints", "manifest.json", "run.json"
UNFINISHED, REPLACED = ".part", ".old.part"
MODES = ("in-flight", "drained")
DIGITS = 9


def part_name(k: int) -> str:
    """The name of stage k's part.

    >>> part_name(2)
    'stage-02'
    """
    return f"stage-{k:02d}"


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint, as its manifest tells it; what it holds is checked as it is read."""

    path: Path
    t: int  # batches that had entered
    mode: str
    K: int
    method: str
    written: str
    files: tuple[FileFacts, ...]

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(facts.size for facts in self.files)

    @cached_property
    def facts(self) -> dict[str, FileFacts]:
        return {facts.name: facts for facts in self.files}

    def stage(self, k: int, *, device: torch.device | str | None = None) -> Any:
        """The tree of stage k."""
        if not 1 <= k <= self.K:
            raise UserError(f"{self.path} has the stages 1 to {self.K}, not {k}")
        return read_part(self.path, part_name(k), self.facts, device=device)

    def run(self) -> dict[str, Any]:
        """What belongs to no stage."""
        said = parse(load(self.path, self.facts[RUN]), self.path / RUN)
        if not isinstance(said, dict):
            raise CheckpointDamaged(f"{self.path / RUN} is no JSON object")
        return said


@dataclass(frozen=True)
class Listed:
    """A folder among a run's checkpoints: a checkpoint, or why it is none."""

    path: Path
    checkpoint: Checkpoint | None
    problem: str | None = None


# ---- writing


def begin(run: Path, t: int) -> Path:
    """The folder to write the parts of a checkpoint at batch index t into; every process may call it."""
    folder = run / FOLDER / f"{t:0{DIGITS}d}{UNFINISHED}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def finish(
    folder: Path,
    facts: Iterable[FileFacts | Mapping[str, Any]] | None = None,
    *,
    t: int,
    mode: str,
    K: int,
    method: str,
    run: Mapping[str, Any],
) -> Checkpoint:
    """Check what the stages wrote, add run.json and the manifest, and give the folder its name.

    `facts` are those that write_part returned, of all stages; without them the files are believed as they are. After a
    CheckpointFailed nothing of the checkpoint is left.
    """
    if mode not in MODES:
        raise UserError(f"mode {mode!r}: use {' or '.join(MODES)}")
    try:
        expected = {f"{part_name(k)}{suffix}" for k in range(1, K + 1) for suffix in (TENSORS, TREE)}
        told = {each.name: each for each in map(FileFacts.of, facts)} if facts is not None else None
        text = json.dumps(dict(run), allow_nan=False, indent=1) + "\n"
        with writing(folder):
            for stranger in folder.iterdir():  # of an attempt that was broken off
                if stranger.name not in expected:
                    stranger.unlink()
        files = [_facts(folder / name, told) for name in sorted(expected)]
        files.append(write_file(folder / RUN, [text.encode()]))
        manifest = {
            "format": FORMAT,
            "t": t,
            "mode": mode,
            "K": K,
            "method": method,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "files": [each.as_dict() for each in files],
        }
        write_file(folder / MANIFEST, [render(manifest)])
        if problems := verify(folder):
            raise CheckpointFailed(f"a checkpoint was written but does not read back, check the disk: {problems[0]}")
        with writing(folder):
            return read(_named(folder, t))
    except BaseException:
        abandon(folder)
        raise


def _facts(path: Path, told: Mapping[str, FileFacts] | None) -> FileFacts:
    """What its stage told of a file, or what is there."""
    try:
        return measure(path) if told is None else told[path.name]
    except (OSError, KeyError) as error:
        raise CheckpointFailed(f"{path} was not written by its stage") from error


def _named(folder: Path, t: int) -> Path:
    """Rename the complete folder; one of that name gives way only now."""
    final = folder.with_name(f"{t:0{DIGITS}d}")
    old = folder.with_name(final.name + REPLACED)
    sync_folder(folder)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    folder.rename(final)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def abandon(folder: Path) -> None:
    """Throw an unfinished checkpoint away."""
    if folder.name.endswith(UNFINISHED):
        shutil.rmtree(folder, ignore_errors=True)


def clean(run: Path) -> list[Path]:
    """Throw away what was left unfinished by runs that are over; returns what went. Not while one is writing."""
    gone = []
    for folder in sorted((run / FOLDER).glob(f"*{UNFINISHED}")):
        final = folder.with_name(folder.name.removesuffix(REPLACED))
        if folder.name.endswith(REPLACED) and not final.exists():
            folder.rename(final)  # broken off between the two renames
            continue
        shutil.rmtree(folder, ignore_errors=True)
        gone.append(folder)
    return gone


def prune(run: Path, keep: int) -> list[Path]:
    """Throw away all but the newest `keep` checkpoints, and whatever older folders are none; returns what went."""
    if keep < 1:
        raise UserError(f"keep = {keep}: use 1 or more")
    gone: list[Path] = []
    kept = 0
    for listed in reversed(ls(run)):
        if kept < keep:
            kept += listed.checkpoint is not None
            continue
        gone += [listed.path] * remove(listed.path)
    return gone


def remove(path: Path) -> bool:
    """Throw a checkpoint away; False where that fails, or another process was faster."""
    doomed = path.with_name(path.name + UNFINISHED)
    with contextlib.suppress(OSError):
        path.rename(doomed)  # half of it must not look like a checkpoint
        shutil.rmtree(doomed)
        return True
    return False


# ---- finding


def ls(run: Path) -> list[Listed]:
    """The checkpoints of a run in order, by their manifests; `verify` looks at the rest."""
    found = []
    for folder in sorted((run / FOLDER).glob("[0-9]" * DIGITS + "*")):
        if folder.is_dir() and folder.name.isdigit():
            try:
                found.append(Listed(folder, read(folder)))
            except CheckpointDamaged as error:
                found.append(Listed(folder, None, str(error)))
    return sorted(found, key=lambda listed: int(listed.path.name))


def newest(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, every byte verified; the notes say which newer ones are not, and why."""
    notes: list[str] = []
    for listed in reversed(ls(run)):
        problems = [listed.problem] if listed.problem else verify(listed.path)
        if not problems:
            return listed.checkpoint, notes
        notes.append(f"checkpoint {listed.path.name} is damaged and not used: {problems[0]}")
    return None, notes


def read(path: Path) -> Checkpoint:
    """A checkpoint by its manifest, which is checked; CheckpointDamaged where there is none."""
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointDamaged(f"{file} cannot be read ({error.strerror or first_line(error)})") from error
    said = parse(raw, file)
    if not isinstance(said, dict) or type(said.get("format")) is not int:
        raise CheckpointDamaged(f"{file} is no manifest")
    if said["format"] != FORMAT:
        raise CheckpointDamaged(f"{file} has format {said['format']}, this version reads {FORMAT}")
    said.pop("sha256", None)
    if render(said) != raw:  # its own hash, and every byte as it is written
        raise CheckpointDamaged(f"{file} does not have the bytes that were written (SHA-256)")
    try:
        files = tuple(FileFacts(**each) for each in said["files"])
        made = Checkpoint(path, said["t"], said["mode"], said["K"], said["method"], said["written"], files)
    except (KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{file} is no manifest ({first_line(error)})") from error
    whole = all(type(number) is int and number >= 0 for number in (made.t, made.K, *(each.size for each in files)))
    if not whole or made.mode not in MODES or any(not re.fullmatch(r"[\w-]+\.\w+", each.name) for each in files):
        raise CheckpointDamaged(f"{file} is no manifest")
    if path.name.removesuffix(UNFINISHED) != f"{made.t:0{DIGITS}d}":
        raise CheckpointDamaged(f"{file} belongs to checkpoint {made.t:0{DIGITS}d}")
    return made


def render(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as it is written: with its own hash, in one form only."""
    body = json.dumps(dict(manifest), sort_keys=True, indent=1)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def verify(path: Path) -> list[str]:
    """All that is wrong with a checkpoint: nothing, if every byte is as it was written."""
    try:
        checkpoint = read(path)
    except CheckpointDamaged as error:
        return [str(error)]
    expected = {f"{part_name(k)}{suffix}" for k in range(1, checkpoint.K + 1) for suffix in (TENSORS, TREE)} | {RUN}
    problems = []
    if set(checkpoint.facts) != expected or len(checkpoint.files) != len(expected):
        problems.append(f"{path / MANIFEST} does not list the files of {checkpoint.K} stages")
    try:
        there = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror or first_line(error)})"]
    problems += [f"{path / name} is in no manifest" for name in sorted(there - expected - {MANIFEST})]
    for facts in checkpoint.files:
        problems += _file_problems(path, facts)
    return problems or _content_problems(checkpoint)


def _file_problems(folder: Path, facts: FileFacts) -> list[str]:
    path = folder / facts.name
    try:
        size = path.stat().st_size
        if size != facts.size:
            return [f"{path} has {size} bytes, its manifest says {facts.size}"]
        if measure(path) != facts:
            return [f"{path} does not have the bytes that were written (SHA-256)"]
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror or first_line(error)})"]
    return []


def _content_problems(checkpoint: Checkpoint) -> list[str]:
    """The files have the bytes that were written; was it a checkpoint that was written?"""
    problems = []
    for k in range(1, checkpoint.K + 1):
        try:
            check_content(checkpoint, k)
        except CheckpointDamaged as error:
            problems.append(str(error))
    with contextlib.suppress(CheckpointDamaged):
        checkpoint.run()
        return problems
    return [*problems, f"{checkpoint.path / RUN} is no JSON object"]


def check_content(checkpoint: Checkpoint, k: int) -> tuple[Any, dict[str, Any]]:
    """The tree of stage k as JSON and its tensors' places, without reading the tensors."""
    name = part_name(k)
    facts = checkpoint.facts[f"{name}{TENSORS}"]
    try:
        with (checkpoint.path / facts.name).open("rb") as file:
            raw = file.read(8)
            raw += file.read(min(int.from_bytes(raw, "little"), os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise CheckpointDamaged(f"{checkpoint.path / facts.name} cannot be read ({first_line(error)})") from error
    return check_part(checkpoint.path, name, raw, load(checkpoint.path, checkpoint.facts[f"{name}{TREE}"]), facts.size)
