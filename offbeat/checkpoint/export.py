"""Exports: the plain model of a run, under the names of the unsplit module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.checkpoint import container
from offbeat.checkpoint.files import CheckpointFailed
from offbeat.checkpoint.folder import FOLDER, MANIFEST, Checkpoint, newest, read
from offbeat.checkpoint.parts import read_tensors, save_tensors
from offbeat.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "model.safetensors"


def export(run: Path, out: Path) -> dict[str, Any]:
    """Write the newest model of a run (or of one checkpoint) to a new safetensors file; says from where."""
    if out.exists():
        raise UserError(f"{out} exists already: choose another name")
    if not out.parent.is_dir():
        raise UserError(f"{out}: {out.parent} is no folder: make it, or choose another name")
    tensors, source, notes = newest_model(run)
    try:
        facts = save_tensors(out, tensors)
    except CheckpointFailed as error:
        raise UserError(f"cannot write {out} ({first_line(error.__cause__ or error)}): choose another name") from error
    return {"out": str(out), "source": str(source), "tensors": len(tensors), "bytes": facts.size, "notes": notes}


def newest_model(run: Path) -> tuple[dict[str, Tensor], Path, list[str]]:
    """The tensors of a finished run's model, or of its newest sound checkpoint where that is newer; and from where."""
    if (run / MANIFEST).exists():
        return model_of(read(run)), run, []
    finished = run / MODEL
    if not finished.exists() and not (run / FOLDER).is_dir():
        raise UserError(f"{run} holds neither {MODEL} nor {FOLDER}: give the folder of a run")
    checkpoint, notes = newest(run)
    if checkpoint is None or (finished.exists() and _age(finished) >= _age(checkpoint.path / MANIFEST)):
        if not finished.exists():
            raise UserError(f"{run} holds no sound checkpoint{': ' * bool(notes)}{'; '.join(notes)}")
        return _finished(finished), finished, notes
    return model_of(checkpoint), checkpoint.path, notes


def model_of(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The model in the parts of a checkpoint, row-major."""
    import torch

    tensors: dict[str, Tensor] = {}
    for k in range(1, checkpoint.K + 1):
        part = checkpoint.stage(k)
        state = part.get("stage", part) if isinstance(part, dict) else None
        if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
            raise UserError(f"stage {k} of {checkpoint.path} holds no model")
        for name, tensor in state["model"].items():
            if not isinstance(tensor, torch.Tensor):
                raise UserError(f"{name} in stage {k} of {checkpoint.path} is no tensor")
            if name in tensors and not torch.equal(tensors[name], tensor):
                raise UserError(f"{name} is in two stages of {checkpoint.path} and not the same")
            tensors[name] = tensor.contiguous()
    return tensors


def _finished(path: Path) -> dict[str, Tensor]:
    try:
        raw = bytearray(path.read_bytes())
        return read_tensors(raw, container.entries(raw, len(raw)))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no whole safetensors file ({first_line(error)})") from error


def _age(path: Path) -> int:
    return path.stat().st_mtime_ns
