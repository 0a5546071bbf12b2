"""A tensor whose values are not computed yet, for a caller who does not wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class DeferredTensor(Tensor):
    """The first operation on it launches all queued work, after which its values are computed in stream order."""

    settle: Callable[[], None] | None

    @classmethod
    def of(cls, tensor: Tensor, settle: Callable[[], None]) -> DeferredTensor:
        later = tensor.as_subclass(cls)
        later.settle = settle
        return later

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in pytree.tree_leaves((arguments, options)):
                if isinstance(leaf, DeferredTensor) and leaf.settle is not None:
                    settle, leaf.settle = leaf.settle, None
                    settle()
            # Plain tensors, since the function may check the type.
            made = pytree.tree_map_only(DeferredTensor, _plain, (arguments, options or {}))
            return function(*made[0], **made[1])


def _plain(later: DeferredTensor) -> Tensor:
    return later.as_subclass(Tensor)
