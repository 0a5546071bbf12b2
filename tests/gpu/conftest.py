"""On a GPU with deterministic algorithms in float32, so that bits can be compared."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic products

import torch


@pytest.fixture(autouse=True)
def _deterministic():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other torches have other names for it
        before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cudnn.allow_tf32 = before


@pytest.fixture
def no_synchronization():
    """A context in which an operation that waits for the device raises an error."""

    @contextmanager
    def refused() -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the mode is a prototype
                torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return refused
