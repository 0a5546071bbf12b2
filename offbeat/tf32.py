"""Torch's switches for TF32: float32 multiplied with 10 bits of mantissa, on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def switch_tf32(products: str, convolutions: bool | None = None) -> tuple[str, bool]:
    """Set both switches (that of convolutions stays if None); returns their old values.

    Raises RuntimeError beside newer settings that were made by hand. (Torch 2.9 to 2.12 warn of these names, but mixing
    them with the newer ones raises wherever torch reads the older, and these set both.)
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*new API settings", category=UserWarning)
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = before[1] if convolutions is None else convolutions
        return before


@contextmanager
def tf32_products(device: torch.device) -> Iterator[None]:
    """Around products of matrices that may be computed in TF32 on a GPU; settings that were made by hand stay."""
    try:
        before = switch_tf32("high") if device.type == "cuda" else None
    except RuntimeError:
        before = None
    try:
        yield
    finally:
        if before is not None:
            switch_tf32(*before)
