"""A batch as micro-batches, the messages in which it enters the first stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from offbeat.core.links import Message
from offbeat.core.metrics import batch_size
from offbeat.errors import UserError


def micro_batches(t: int, x: Any, y: Any, m: int) -> Iterator[Message]:
    """Batch t as m messages with the share of the samples in each; of short batches some are empty."""
    samples = batch_size(y, x)
    if not samples:
        raise UserError(f"batch {t} holds no samples: give some, or leave it out")
    if m == 1:
        yield Message(t, (x, y, 1.0))
        return
    for leaf in pytree.tree_leaves((x, y)):
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) != samples:
            raise UserError(
                f"batch {t} of {samples} samples cannot be split into micro-batches, one of its tensors is "
                f"of shape {tuple(leaf.shape)}: give one row per sample, or scalars"
            )

    def part(content: Any, i: int) -> Any:
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.tensor_split(m)[i] if leaf.dim() else leaf, content)

    for i in range(m):
        inputs, targets = part(x, i), part(y, i)
        yield Message(t * m + i, (inputs, targets, batch_size(targets, inputs) / samples))
