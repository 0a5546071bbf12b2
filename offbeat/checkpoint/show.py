"""What `offbeat checkpoint` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offbeat.checkpoint.files import CheckpointDamaged
from offbeat.checkpoint.folder import (
    FOLDER,
    MANIFEST,
    Checkpoint,
    Listed,
    check_content,
    ls,
    newest,
    part_name,
    read,
    verify,
)
from offbeat.errors import UserError


def show_list(folder: Path, *, as_json: bool) -> None:
    """One line per checkpoint of a run, the oldest first."""
    listed = _of_run(folder)
    if as_json:
        print(json.dumps([_listed(each) for each in listed]))
        return
    for each in listed:
        if each.checkpoint is None:
            print(f"{each.path.name}  damaged: {each.problem}")
        else:
            print(f"{each.path.name}  {_line(each.checkpoint)}")


def show_one(folder: Path, *, as_json: bool) -> None:
    """The contents of a checkpoint by stage; of a run, those of its newest checkpoint."""
    checkpoint = _one(folder)
    stages = [_stage(checkpoint, k) for k in range(1, checkpoint.K + 1)]
    if as_json:
        print(json.dumps({**_facts(checkpoint), "stages": stages, "run": checkpoint.run()}))
        return
    print(f"{checkpoint.path}  batch {checkpoint.t}  {_line(checkpoint)}")
    for k, stage in enumerate(stages, start=1):
        held = ", ".join(f"{key} {_mega(size)}" if size else key for key, size in stage["keys"].items())
        print(f"stage {k}: {stage['tensors']} tensors, {_mega(stage['bytes'])} ({held})")


def show_verified(folder: Path, *, as_json: bool) -> None:
    """Check every byte of a checkpoint, or of all checkpoints of a run; UserError if one is damaged."""
    paths = [folder] if _is_one(folder) else [each.path for each in _of_run(folder)]
    problems = {path: verify(path) for path in paths}
    if as_json:
        print(json.dumps([{"path": str(path), "problems": found} for path, found in problems.items()]))
    else:
        for path, found in problems.items():
            if not found:
                print(f"{path.name}  sound: {len(read(path).files) + 1} files, {_mega(read(path).size)}")
            for problem in found:
                print(f"{path.name}  damaged: {problem}")
    damaged = [path.name for path, found in problems.items() if found]
    if damaged:
        raise UserError(f"{len(damaged)} of {len(paths)} checkpoints damaged ({', '.join(damaged)}): use another")


def _is_one(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or folder.parent.name == FOLDER


def _of_run(folder: Path) -> list[Listed]:
    run = folder.parent if folder.name == FOLDER else folder
    if _is_one(folder):
        run = folder.parent.parent
    if not run.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder of a run")
    listed = ls(run)
    if not listed:
        raise UserError(f"{folder} holds no checkpoint: give the folder of a run that wrote some")
    return listed


def _one(folder: Path) -> Checkpoint:
    if _is_one(folder):
        if problems := verify(folder):
            raise CheckpointDamaged(problems[0])
        return read(folder)
    listed = _of_run(folder)
    found, notes = newest(listed[-1].path.parent.parent)
    if found is None:
        raise UserError(f"{folder} holds no sound checkpoint: {notes[0]}")
    return found


def _stage(checkpoint: Checkpoint, k: int) -> dict[str, Any]:
    tree, stored = check_content(checkpoint, part_name(k))
    sizes = {str(key): 0 for key, _ in tree[1]} if isinstance(tree, list) and tree[0] == "dict" else {}
    for name, each in stored.items():
        key = name.partition("/")[0]
        sizes[key] = sizes.get(key, 0) + each.end - each.start
    return {"tensors": len(stored), "bytes": checkpoint.facts[f"stage-{k:02d}.safetensors"].size, "keys": sizes}


def _listed(each: Listed) -> dict[str, Any]:
    if each.checkpoint is None:
        return {"path": str(each.path), "problem": each.problem}
    return _facts(each.checkpoint)


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "t": checkpoint.t,
        "mode": checkpoint.mode,
        "K": checkpoint.K,
        **({"replicas": checkpoint.replicas} if checkpoint.replicas > 1 else {}),
        "method": checkpoint.method,
        "written": checkpoint.written,
        "bytes": checkpoint.size,
    }


def _line(checkpoint: Checkpoint) -> str:
    copies = f" replicas={checkpoint.replicas}" if checkpoint.replicas > 1 else ""
    line = f"{checkpoint.mode}  {checkpoint.method} K={checkpoint.K}{copies}  {_mega(checkpoint.size)}"
    return f"{line}  written {checkpoint.written}"


def _mega(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
