"""Exports: the model of a run as one safetensors file, under the names of the unsplit module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.checkpoint import safetensors_format
from offbeat.checkpoint.files import CheckpointFailed
from offbeat.checkpoint.folder import FOLDER, MANIFEST, Checkpoint, newest, read
from offbeat.checkpoint.parts import read_tensors, save_tensors
from offbeat.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "model.safetensors"


def export(run: Path, out: Path) -> dict[str, Any]:
    """Write the newest model of a run (or of one checkpoint) to a new safetensors file; returns its source and size."""
    if out.exists():
        raise UserError(f"{out} exists already: choose another name")
    if not out.parent.is_dir():
        raise UserError(f"{out}: {out.parent} is not a folder: create it, or choose another name")
    tensors, source, notes = newest_model(run)
    try:
        facts = save_tensors(out, tensors)
    except CheckpointFailed as error:
        raise UserError(f"cannot write {out} ({first_line(error.__cause__ or error)}): choose another name") from error
    return {"out": str(out), "source": str(source), "tensors": len(tensors), "bytes": facts.size, "notes": notes}


def newest_model(run: Path) -> tuple[dict[str, Tensor], Path, list[str]]:
    """The model of a finished run, or of its newest sound checkpoint where that is newer; its path; and notes."""
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
            raise UserError(
                f"stage {k} of {checkpoint.path} holds no model: give a checkpoint that a training run wrote"
            )
        for name, tensor in state["model"].items():
            if not isinstance(tensor, torch.Tensor):
                raise UserError(f"{name} in stage {k} of {checkpoint.path} is not a tensor: use another checkpoint")
            if name in tensors and not torch.equal(tensors[name], tensor):
                raise UserError(f"{name} differs between two stages of {checkpoint.path}: use another checkpoint")
            tensors[name] = tensor.contiguous()
    return tensors


def _finished(path: Path) -> dict[str, Tensor]:
    try:
        raw = bytearray(path.read_bytes())
        return read_tensors(raw, safetensors_format.read_header(raw, len(raw)))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a complete safetensors file ({first_line(error)})") from error


def _age(path: Path) -> int:
    return path.stat().st_mtime_ns
