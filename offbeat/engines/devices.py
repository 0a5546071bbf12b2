"""Checks of devices that all engines share."""

from __future__ import annotations

import torch

from offbeat.errors import UserError


def present(device: torch.device) -> torch.device:
    """The device, if this machine has one of its type."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device '{device}', but torch sees no CUDA device here: use device='cpu'")
    return device


def agreed(given: torch.device | None, own: torch.device) -> torch.device:
    """The device of an engine, if a pipeline that was given another one means the same type."""
    if given is not None and given.type != own.type:
        raise UserError(f"device '{given}', but an engine on {own}: give both the same device")
    return own
