"""Batches and tensors as error messages describe them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

USER_CODE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)  # a model may raise them


def batch_name(t: int, m: int) -> str:
    """The name of batch t, where operations index m micro-batches per batch.

    >>> batch_name(7, 1), batch_name(7, 4)
    ('batch 7', 'micro-batch 4 of 4 of batch 1')
    """
    return f"batch {t}" if m == 1 else f"micro-batch {t % m + 1} of {m} of batch {t // m}"


def shapes(content: Any) -> str:
    """Shapes and types of the tensors in a pytree.

    >>> import torch
    >>> shapes([torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)]), shapes("text")
    ('shape (2, 3) float32, (2,) int64', 'type str')
    """
    found = [
        f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        for leaf in pytree.tree_leaves(content)
        if isinstance(leaf, Tensor)
    ]
    return "shape " + ", ".join(found) if found else f"type {type(content).__name__}"
