"""How many operations a computation takes: about as many kernels on a GPU."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class CountedOperations(TorchDispatchMode):
    """Counts operations that compute or copy: all but views and allocations."""

    number = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.__name__
        views = operation.is_view or name.startswith(
            ("empty", "new_empty", "split", "unbind", "_unsafe_view", "_record_function")
        )
        self.number += not views
        return operation(*args, **(kwargs or {}))
