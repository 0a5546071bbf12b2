"""What a host asks of a GPU without torch, since that takes too long or torch has no way to say it.

Several captured CUDA graphs become one, which a single call launches: their host time is that of one of them. Where
that cannot be done (a torch before 2.8, which does not tell its graphs; no such driver), the graphs are launched one
after the other, which gives the same numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def new_graph() -> torch.cuda.CUDAGraph:
    """A graph to capture in, of which torch keeps the description where it can."""
    return torch.cuda.CUDAGraph(keep_graph=True) if _kept() else torch.cuda.CUDAGraph()


def join(graphs: list[torch.cuda.CUDAGraph]) -> Callable[[], None] | None:
    """A function that launches them, one after the other, on the current stream; None where they cannot be joined."""
    if len(graphs) < 2 or not _kept() or _driver() is None:
        return None
    return _Joined(graphs)


def copy(place: Tensor, tensor: Tensor) -> None:
    """Copy a tensor to one that is `alike`, on the current stream, as plain bytes."""
    driver = _driver() if place.is_cuda else None
    if driver is None:
        place.copy_(tensor)
        return
    stream = torch._C._cuda_getCurrentRawStream(place.get_device())
    failed = driver.cuMemcpyDtoDAsync_v2(place.data_ptr(), tensor.data_ptr(), tensor.nbytes, stream)
    if failed:
        raise RuntimeError(f"cuMemcpyDtoDAsync: error {failed}")


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same bytes if they have the same values."""
    return (one.device == other.device and one.dtype == other.dtype and one.shape == other.shape
            and one.stride() == other.stride() and torch.ops.aten.is_non_overlapping_and_dense(other))  # fmt: skip


@cache
def _kept() -> bool:
    return hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        driver.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        driver.cuGraphExecDestroy.argtypes = [ctypes.c_void_p]
        driver.cuGraphInstantiateWithFlags.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong]
    except (OSError, AttributeError):
        return None
    return driver


class _Joined:
    """A chain of child graphs, ready to be launched; holds the graphs, whose memory it works on."""

    def __init__(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        self.graphs, self.driver = graphs, _driver()
        self.device = torch.cuda.current_device()
        self.executable = ctypes.c_void_p()
        whole, before = ctypes.c_void_p(), None
        self._ask("cuGraphCreate", ctypes.byref(whole), 0)
        try:
            for graph in graphs:
                node = ctypes.c_void_p()
                behind = None if before is None else (ctypes.c_void_p * 1)(before)
                child = ctypes.c_void_p(graph.raw_cuda_graph())
                self._ask("cuGraphAddChildGraphNode", ctypes.byref(node), whole, behind, int(bool(behind)), child)
                before = node.value
            self._ask("cuGraphInstantiateWithFlags", ctypes.byref(self.executable), whole, 0)
        finally:
            self.driver.cuGraphDestroy(whole)

    def _ask(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self.driver, name)(*arguments))

    def _check(self, name: str, failed: int) -> None:
        if failed:
            told = ctypes.c_char_p()
            self.driver.cuGetErrorString(failed, ctypes.byref(told))
            raise RuntimeError(f"{name}: {told.value.decode() if told.value else failed}")

    def __call__(self) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self._check("cuGraphLaunch", self.driver.cuGraphLaunch(self.executable, stream))

    def __del__(self) -> None:
        if self.executable:
            self.driver.cuGraphExecDestroy(self.executable)
