"""Many captured CUDA graphs as one, which a single call launches, and whose branches the device runs at once.

Torch has no function for this, so the driver is called. Where that is impossible (a torch before 2.8, which does not
expose its graphs; no such driver), the graphs are launched one after the other, with the same results.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def new_graph() -> torch.cuda.CUDAGraph:
    """A graph to capture in, of which torch keeps the description where it can."""
    return torch.cuda.CUDAGraph(keep_graph=True) if _kept() else torch.cuda.CUDAGraph()


NON_BLOCKING = 1  # a stream that does not wait for the default one
Graph = torch.cuda.CUDAGraph
Nodes = list[tuple[Graph, list[int]]]  # graphs, each with the indices of those before it that it waits for


def join(nodes: Nodes) -> Callable[[], None] | None:
    """A function that launches all of them at once on the current stream; None where they cannot be joined."""
    return _Joined(nodes) if _kept() and _driver() is not None else None


def new_stream(device: int) -> torch.cuda.Stream | None:
    """A stream that nothing else uses; None where the driver cannot be called."""
    driver, handle = _driver(), ctypes.c_void_p()
    if driver is None:
        return None
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # so that the device has its context
        failed = driver.cuStreamCreate(ctypes.byref(handle), NON_BLOCKING)
    return None if failed or not handle.value else torch.cuda.ExternalStream(handle.value, device=device)


@cache
def _kept() -> bool:
    return hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph")


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuGraphLaunch.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        driver.cuGraphExecDestroy.argtypes = [ctypes.c_void_p]
        driver.cuGraphInstantiateWithFlags.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulonglong]
    except (OSError, AttributeError):
        return None
    return driver


class _Joined:
    """A graph of child graphs, ready to be launched; holds them, since it works on their memory."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.driver = nodes, _driver()
        self.device = torch.cuda.current_device()
        self.executable = ctypes.c_void_p()
        whole = ctypes.c_void_p()
        self._call("cuGraphCreate", ctypes.byref(whole), 0)
        added: list[Any] = []
        try:
            for graph, waits in nodes:
                added.append(self._add(whole, graph, [added[before] for before in waits]))
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(self.executable), whole, 0)
        finally:
            self.driver.cuGraphDestroy(whole)

    def _add(self, whole: Any, graph: Graph, before: list[Any]) -> Any:
        node, predecessors = ctypes.c_void_p(), (ctypes.c_void_p * len(before))(*before)
        child = ctypes.c_void_p(graph.raw_cuda_graph())
        self._call(
            "cuGraphAddChildGraphNode", ctypes.byref(node), whole, predecessors, ctypes.c_size_t(len(before)), child
        )
        return node.value

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self.driver, name)(*arguments))

    def _check(self, name: str, failed: int) -> None:
        if failed:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(failed, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else failed}")

    def __call__(self) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self._check("cuGraphLaunch", self.driver.cuGraphLaunch(self.executable, stream))

    def __del__(self) -> None:
        if self.executable:
            self.driver.cuGraphExecDestroy(self.executable)
