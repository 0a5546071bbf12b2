"""The folders of a run's checkpoints: written under a temporary name, finished, found, verified, removed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from offbeat.checkpoint.files import (
    CheckpointDamaged,
    CheckpointFailed,
    FileFacts,
    check,
    load,
    measure,
    parse,
    reading,
    sync_folder,
    write_file,
    writing,
)
from offbeat.checkpoint.parts import FORMAT, TENSORS, TREE, check_part, read_part
from offbeat.errors import UserError, first_line

FOLDER, MANIFEST, RUN = "checkpoints", "manifest.json", "run.json"
UNFINISHED, REPLACED = ".part", ".old.part"
STAGE, CALLBACKS = "stage", "callbacks"  # kinds of parts
MODES = ("in-flight", "drained")
DIGITS = 9


def part_name(k: int, replica: int = 0, *, kind: str = STAGE) -> str:
    """The name of the part of stage k of a replica, or of the callbacks of its process.

    >>> part_name(2), part_name(2, 1), part_name(1, kind=CALLBACKS)
    ('stage-02', 'stage-02-replica-01', 'callbacks-01')
    """
    return f"{kind}-{k:02d}{f'-replica-{replica:02d}' if replica else ''}"


def part_names(K: int, replicas: int) -> list[str]:
    """The names of the parts of all stages."""
    return [part_name(k, replica) for replica in range(replicas) for k in range(1, K + 1)]


def callback_parts(files: Iterable[str]) -> list[str]:
    """The names of the parts of callbacks among files; not every process has one.

    >>> callback_parts(["stage-01.json", "callbacks-01.json", "callbacks-01.safetensors"])
    ['callbacks-01']
    """
    return sorted({name.partition(".")[0] for name in files if name.startswith(f"{CALLBACKS}-")})


def part_files(names: Iterable[str]) -> set[str]:
    """The files of parts."""
    return {f"{name}{suffix}" for name in names for suffix in (TENSORS, TREE)}


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint, as its manifest describes it; its files are checked when they are read."""

    path: Path
    t: int  # batches that have entered the first stage
    mode: str
    K: int
    method: str
    written: str
    files: tuple[FileFacts, ...]
    replicas: int = 1

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(facts.size for facts in self.files)

    @cached_property
    def facts(self) -> dict[str, FileFacts]:
        return {facts.name: facts for facts in self.files}

    def stage(self, k: int, *, replica: int = 0) -> Any:
        """The tree of stage k; of another replica than 0 it has only what differs."""
        if not 1 <= k <= self.K:
            raise UserError(f"stage {k} of {self.path}: it has the stages 1 to {self.K}, use one of these")
        if not 0 <= replica < self.replicas:
            raise UserError(
                f"replica {replica} of {self.path}: it has {self.replicas}, counted from 0, use one of these"
            )
        return self.part(part_name(k, replica))

    @property
    def callbacks(self) -> list[str]:
        """The names of the parts of callbacks."""
        return callback_parts(self.facts)

    @property
    def parts(self) -> list[str]:
        """The names of all parts."""
        return part_names(self.K, self.replicas) + self.callbacks

    def part(self, name: str) -> Any:
        """The tree of a part by its name."""
        return read_part(self.path, name, self.facts)

    def run(self) -> dict[str, Any]:
        """What belongs to the run rather than to a stage."""
        found = parse(load(self.path, self.facts[RUN]), self.path / RUN)
        if not isinstance(found, dict):
            raise CheckpointDamaged(f"{self.path / RUN} is not a JSON object")
        return found


@dataclass(frozen=True)
class Listed:
    """A folder among a run's checkpoints: a checkpoint, or the reason why it cannot be used."""

    path: Path
    checkpoint: Checkpoint | None
    problem: str | None = None


# ---- writing


def begin(run: Path, t: int) -> Path:
    """Create the folder for the parts of a checkpoint at batch index t; every process may call this."""
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
    replicas: int = 1,
) -> Checkpoint:
    """Check what the stages wrote, add run.json and the manifest, and give the folder its final name.

    facts: what write_part returned, of all stages; without them the files are taken as they are. After a
    CheckpointFailed nothing of the checkpoint is left.
    """
    if mode not in MODES:
        raise UserError(f"mode={mode!r}: use {' or '.join(map(repr, MODES))}")
    try:
        given = {each.name: each for each in map(FileFacts.of, facts)} if facts is not None else None
        expected = part_files(part_names(K, replicas) + callback_parts(given or ()))
        text = _text(run)
        with writing(folder):
            for other in folder.iterdir():  # left by an attempt that was interrupted
                if other.name not in expected:
                    other.unlink()
        files = [_facts(folder / name, given) for name in sorted(expected)]
        files.append(write_file(folder / RUN, [text.encode()]))
        manifest = {
            "format": FORMAT,
            "t": t,
            "mode": mode,
            "K": K,
            **({"replicas": replicas} if replicas > 1 else {}),
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


def _text(run: Mapping[str, Any]) -> str:
    """The text of run.json; CheckpointFailed for values that JSON does not have, such as the loss of a diverged run."""
    try:
        return json.dumps(dict(run), allow_nan=False, indent=1) + "\n"
    except ValueError as error:
        raise CheckpointFailed(f"a value of the run cannot be written to {RUN} ({first_line(error)})") from error


def _facts(path: Path, given: Mapping[str, FileFacts] | None) -> FileFacts:
    """The facts that the stage returned for a file, or those of the file as it is."""
    try:
        return measure(path) if given is None else given[path.name]
    except (OSError, KeyError) as error:
        raise CheckpointFailed(f"{path} was not written by its stage") from error


def _named(folder: Path, t: int) -> Path:
    """Rename the complete folder; an older one of that name is removed only now."""
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
    """Remove an unfinished checkpoint."""
    if folder.name.endswith(UNFINISHED):
        shutil.rmtree(folder, ignore_errors=True)


def clean(run: Path) -> list[Path]:
    """Remove what earlier runs left unfinished, and return it; not to be called while a run is writing."""
    gone = []
    for folder in sorted((run / FOLDER).glob(f"*{UNFINISHED}")):
        final = folder.with_name(folder.name.removesuffix(REPLACED))
        if folder.name.endswith(REPLACED) and not final.exists():
            folder.rename(final)  # interrupted between the two renames
            continue
        shutil.rmtree(folder, ignore_errors=True)
        gone.append(folder)
    return gone


def prune(run: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` checkpoints, and older folders that are damaged; returns what was removed."""
    if keep < 1:
        raise UserError(f"keep={keep}: use 1 or more")
    gone: list[Path] = []
    kept = 0
    for listed in reversed(ls(run)):
        if kept < keep:
            kept += listed.checkpoint is not None
            continue
        gone += [listed.path] * remove(listed.path)
    return gone


def remove(path: Path) -> bool:
    """Remove a checkpoint; False where that fails, or another process has removed it."""
    doomed = path.with_name(path.name + UNFINISHED)
    with contextlib.suppress(OSError):
        path.rename(doomed)  # a half-removed folder must not look like a checkpoint
        shutil.rmtree(doomed)
        return True
    return False


# ---- finding


def ls(run: Path) -> list[Listed]:
    """The checkpoints of a run in order, by their manifests alone; `verify` checks their files."""
    found = []
    for folder in sorted((run / FOLDER).glob("[0-9]" * DIGITS + "*")):
        if folder.is_dir() and folder.name.isdigit():
            try:
                found.append(Listed(folder, read(folder)))
            except CheckpointDamaged as error:
                found.append(Listed(folder, None, str(error)))
    return sorted(found, key=lambda listed: int(listed.path.name))


def newest(run: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of which every byte is verified; the notes give the reason why newer ones are not used."""
    notes: list[str] = []
    for listed in reversed(ls(run)):
        problems = [listed.problem] if listed.problem else verify(listed.path)
        if not problems:
            return listed.checkpoint, notes
        notes.append(f"checkpoint {listed.path.name} is damaged and not used: {problems[0]}")
    return None, notes


def read(path: Path) -> Checkpoint:
    """A checkpoint by its manifest, which is checked; CheckpointDamaged where that is missing or damaged."""
    file = path / MANIFEST
    with reading(file):
        raw = file.read_bytes()
    found = parse(raw, file)
    if not isinstance(found, dict) or type(found.get("format")) is not int:
        raise CheckpointDamaged(f"{file} is not a manifest")
    if found["format"] != FORMAT:
        raise CheckpointDamaged(
            f"{file} has format {found['format']}, this version reads format {FORMAT}: use a newer version"
        )
    found.pop("sha256", None)
    if render(found) != raw:  # checks its own hash and every other byte
        raise CheckpointDamaged(f"{file} does not have the bytes that were written (SHA-256)")
    try:
        files = tuple(FileFacts(**each) for each in found["files"])
        given = {name: found[name] for name in ("t", "mode", "K", "method", "written")}
        made = Checkpoint(path, **given, files=files, replicas=found.get("replicas", 1))
    except (KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{file} is not a manifest ({first_line(error)})") from error
    numbers = (made.t, made.K, made.replicas, *(each.size for each in files))
    valid = all(type(number) is int and number >= 0 for number in numbers)
    if not valid or made.mode not in MODES or any(not re.fullmatch(r"[\w-]+\.\w+", each.name) for each in files):
        raise CheckpointDamaged(f"{file} is not a manifest")
    if path.name.removesuffix(UNFINISHED) != f"{made.t:0{DIGITS}d}":
        raise CheckpointDamaged(f"{file} belongs to checkpoint {made.t:0{DIGITS}d}")
    return made


def render(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as it is written, with its own hash."""
    body = json.dumps(dict(manifest), sort_keys=True, indent=1)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def verify(path: Path) -> list[str]:
    """The problems of a checkpoint; none where every byte is as it was written."""
    try:
        checkpoint = read(path)
        with reading(path):
            present = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    except CheckpointDamaged as error:
        return [str(error)]
    expected = part_files(checkpoint.parts) | {RUN}
    problems = []
    if set(checkpoint.facts) != expected or len(checkpoint.files) != len(expected):
        problems.append(f"{path / MANIFEST} does not list the files of {checkpoint.K} stages")
    problems += [f"{path / name} is not in the manifest" for name in sorted(present - expected - {MANIFEST})]
    for facts in checkpoint.files:
        problems += _problem(partial(check, path, facts))
    return problems or _content_problems(checkpoint)


def _problem(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except CheckpointDamaged as error:
        return [str(error)]
    return []


def _content_problems(checkpoint: Checkpoint) -> list[str]:
    """Problems of files that have the bytes that were written, but are not those of a checkpoint."""
    problems = [each for name in checkpoint.parts for each in _problem(partial(check_content, checkpoint, name))]
    return problems + _problem(checkpoint.run)


def check_content(checkpoint: Checkpoint, name: str) -> tuple[Any, dict[str, Any]]:
    """The tree of a part as JSON and the positions of its tensors, without reading the tensors."""
    facts = checkpoint.facts[f"{name}{TENSORS}"]
    path = checkpoint.path / facts.name
    with reading(path), path.open("rb") as file:
        raw = file.read(8)
        raw += file.read(min(int.from_bytes(raw, "little"), os.fstat(file.fileno()).st_size))
    return check_part(checkpoint.path, name, raw, load(checkpoint.path, checkpoint.facts[f"{name}{TREE}"]), facts.size)
