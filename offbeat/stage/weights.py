"""Which parameters a forward and its backward run on when updates come in between.

An optimizer changes its parameters in place, and autograd refuses (or, through `.data`, silently mixes) a graph whose
parameters changed. So a graph never holds the parameters themselves unless no update can come before its backward:

    live      no lag: the module's own parameters, plain PyTorch
    stash     a snapshot an update, shared by the batches forwarded until the next one: backward is exact
    hybrid    aliases of the storage with a version counter of their own: old activations, current parameters
    replay    no graph: the forward is repeated on the current parameters when the gradient is there

Buffers (BatchNorm statistics) stay live in all of them; a replay runs on copies of what they are by then, so that each
batch counts once. (A module that computes with a buffer it writes, unlike BatchNorm, is replayed with a later value.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

Tensors = dict[str, Tensor]


class Version:
    """The parameters of one forward, by name in the stage; None stands for the module's own."""

    def __init__(self, tensors: Tensors | None) -> None:
        self.tensors = tensors


class WeightPolicy(Protocol):
    """The parameters that forwards run on, and whether their backwards repeat them."""

    replays: bool

    def current(self) -> Version:
        """What a forward uses now."""

    def changed(self) -> None:
        """The optimizer has made a new version."""

    def versions(self) -> int:
        """Versions that are held, for batches in flight or as the newest."""


class Live:
    """The module's own parameters; sound when no update comes between a forward and its backward."""

    replays = False

    def __init__(self, parameters: Tensors) -> None:
        self.own = Version(None)

    def current(self) -> Version:
        return self.own

    def changed(self) -> None:
        pass

    def versions(self) -> int:
        return 1


class Replay(Live):
    """The module's own parameters, at the forward without a graph and again at the backward."""

    replays = True


class Hybrid(Live):
    """Aliases of the parameters: `.data` shares storage but not the version counter, so a stored graph stays usable
    while the optimizer changes what its backward will read."""

    def __init__(self, parameters: Tensors) -> None:
        self.own = Version({name: parameter.data.requires_grad_() for name, parameter in parameters.items()})


class Stash:
    """Snapshots, made at the first forward after an update and dropped with the last batch that needs them."""

    replays = False

    def __init__(self, parameters: Tensors) -> None:
        self.parameters = parameters
        self.newest: Version | None = None
        self.alive: weakref.WeakSet[Version] = weakref.WeakSet()

    def current(self) -> Version:
        if self.newest is None:
            self.newest = Version({name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()})
            self.alive.add(self.newest)
        return self.newest

    def changed(self) -> None:
        self.newest = None

    def versions(self) -> int:
        return len(self.alive) + (self.newest is None)  # the parameters themselves are the newest version


POLICIES: dict[str, Callable[[Tensors], WeightPolicy]] = {"stash": Stash, "hybrid": Hybrid, "replay": Replay}


def substituted(module: nn.Module, version: Version) -> AbstractContextManager[object]:
    """The module with the version's tensors in place of its parameters, for a backward that recomputes
    (torch.utils.checkpoint)."""
    if version.tensors is None:
        return nullcontext()
    return _reparametrize_module(module, version.tensors, tie_weights=True)


def call(module: nn.Module, parameters: Tensors | None, arguments: tuple[Any, ...], *, buffers: bool = True) -> Any:
    """The module's output on those parameters; with buffers=False its buffers are left as they were."""
    replaced = dict(parameters or {})
    if not buffers:
        replaced.update({name: buffer.clone() for name, buffer in module.named_buffers()})
    return functional_call(module, replaced, arguments) if replaced else module(*arguments)
