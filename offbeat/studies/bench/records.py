"""The records of benchmarks: where they are written, where they come from, and which of them a command continues."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import UserError
from offbeat.runs import record
from offbeat.runs.launch import joined_group
from offbeat.runs.provenance import gpu_name, provenance

PATHS = ("--out", "--profile", "--data-dir")  # options that name files of this machine
ORIGIN = ("machine", "commit", "versions")  # times of another one are not mixed with those of this one


def folder_for(out: Path | None, default: str, file: str) -> Path:
    """The folder `out`, or a default one that holds no such record yet."""
    folder, count = out or Path("runs") / default, 1
    while out is None and (folder / file).exists():
        count += 1
        folder = Path("runs") / f"{default}-{count}"
    record.check_free(folder)
    return folder


def origin(*, on_gpu: bool = False) -> dict[str, Any]:
    """Where a record comes from, without the paths of this machine; the machine with its GPU, or with the processes of
    torchrun."""
    made, command, skip = provenance(), [], False
    for word in made["command"]:
        if not skip and word.partition("=")[0] not in PATHS:
            command.append(word)
        skip = word in PATHS
    machine = f"{gpu_name()}, {made['machine']}" if on_gpu else made["machine"]
    if joined_group():
        machine += f"; {os.environ['WORLD_SIZE']} processes, {os.environ.get('GROUP_WORLD_SIZE', '1')} machines"
    return {**made, "machine": machine, "command": command}


def network_of(made: Mapping[str, Any]) -> str | None:
    """The network between the machines, without what was measured of it, which is in brackets.

    >>> network_of({"network": "100 Mbit/s (measured: 99)"}), network_of({})
    ('100 Mbit/s', None)
    """
    return str(made["network"]).partition(" (")[0] if "network" in made else None


def stored(path: Path, settings: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record that a command with these settings continues; None where there is none yet."""
    if not path.exists():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        before = content["provenance"]
        had = {**content["settings"], **{name: before[name] for name in ORIGIN}, "network": network_of(before)}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{path.parent} already holds {path.name}, which is not a record: give another folder as out="
        ) from None
    origins = {**{name: made[name] for name in ORIGIN}, "network": network_of(made)}
    now = json.loads(json.dumps({**settings, **origins}))
    for name, value in now.items():
        if had.get(name) != value:
            differs = f"{name} = {had.get(name)}, not {value}"
            raise UserError(f"{path.parent} already holds {path.name} with {differs}: give another folder as out=")
    return content
