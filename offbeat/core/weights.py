"""Which parameters a forward and its backward run on when there are updates between the two.

An optimizer changes its parameters in place, and autograd refuses (or, through `.data`, silently mixes) a graph whose
parameters changed. So a graph never holds the parameters themselves unless no update precedes its backward:

    live      no lag: the module's own parameters, plain PyTorch
    stash     a snapshot per update, shared by the batches forwarded until the next one: backward is exact; versions
              share the tensors of parameters that did not change between them
    before    snapshots of the last two versions: every batch of a window on the version of the window before
    hybrid    aliases of the storage with a version counter of their own: old activations, current parameters
    replay    no graph: the forward is repeated on the current parameters when the gradient arrives

With live, stash and before, the graph of a forward may be dropped and made again when the gradient arrives, from the
same parameters, random numbers and buffers (`Method.recompute`): the same gradient, with less memory.

A forward, and in hybrid and replay a backward, may run on predicted values instead of the parameters.

Where forwards compute in another type than the parameters', snapshots are in that type, and live, hybrid and replay
have one set of such copies, which is refreshed once per update.

Buffers (BatchNorm statistics) are not versioned; a repeated forward runs on copies of their present values, so that
each batch counts once. A module that computes with a buffer that it writes, unlike BatchNorm, needs the values of the
first forward, which is repeated to recompute or from a state: they are kept with the batch. With replay, and in states
of recorded stages, later values are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.stateless import _reparametrize_module

from offbeat.core.precision import FULL, PrecisionPolicy

Tensors = dict[str, Tensor]


class Version:
    """The parameters of one forward, by name in the stage; None stands for the module's own.

    age: by how many updates they are older than the newest; number: of which version they are a copy, where that counts
    writes: how often each parameter had been written when it was copied, where that counts
    batches: in flight on them
    """

    __slots__ = ("age", "batches", "number", "tensors", "writes")

    def __init__(
        self, tensors: Tensors | None, age: int = 0, number: int = 0, writes: Mapping[str, int] | None = None
    ) -> None:
        self.tensors, self.age, self.number, self.writes, self.batches = tensors, age, number, writes or {}, 0


InFlightOn = Callable[[], Iterable[Version]]  # what the batches in flight were forwarded on
Prediction = Callable[[], list[Tensor]]  # values to use instead of the parameters, in their order
Work = Callable[[], object]


def at_once(key: object, work: Work) -> None:
    """Do tensor work of a policy now. Work of the same key reads and writes the same memory every time; that of key
    None does not."""
    work()


@dataclass(frozen=True)
class WeightSources:
    """What a policy is made of: the parameters, and what replaces them in forwards and backwards (None: nothing).

    version        (forwards, newest) -> version of a forward, for policies that do not use the newest
    precision      the types in which forwards use the values
    """

    parameters: Tensors
    forward: Prediction | None = None
    backward: Prediction | None = None
    version: Callable[[int, int], int] | None = None
    precision: PrecisionPolicy = FULL

    def named(self, values: list[Tensor]) -> Tensors:
        return {name: value.requires_grad_() for name, value in zip(self.parameters, values, strict=True)}

    def snapshot(self, place: Tensors | None = None, *, earlier: Version | None = None) -> Tensors:
        """A copy of what forwards use now, in new memory or in that of `place`.

        A parameter that has not changed since an earlier version is not copied: both have the same tensor.
        """
        if place is None and self.forward:
            return self.named([self.precision.lower(value) for value in self.forward()])
        if place is None:
            return self.named(self.copies(self._unwritten(earlier) if earlier else {}))
        if place:
            values = self.forward() if self.forward else [parameter.detach() for parameter in self.parameters.values()]
            copy_all([tensor.data for tensor in place.values()], values)  # whose graphs are kept
        return place

    def copies(self, candidates: Tensors | None = None) -> list[Tensor]:
        """Tensors with the parameters as forwards use them: new ones, or those of the candidates that are equal."""
        return [self._copy(p, (candidates or {}).get(name)) for name, p in self.parameters.items()]

    def _copy(self, parameter: Tensor, candidate: Tensor | None) -> Tensor:
        lowered = self.precision.lowered(parameter)
        value = self.precision.lower(parameter.detach()) if lowered else parameter.detach()
        if candidate is not None and torch.equal(candidate, value):
            return candidate
        return value if lowered else value.clone()

    def writes(self) -> dict[str, int]:
        """How often torch has counted a write to each parameter; writes through `.data` do not count."""
        return {name: parameter._version for name, parameter in self.parameters.items()}

    def _unwritten(self, version: Version) -> Tensors:
        """The tensors of a version whose parameters have not been written since, as far as torch counts."""
        writes = self.writes()
        return {n: tensor for n, tensor in (version.tensors or {}).items() if version.writes.get(n) == writes[n]}


def copy_all(places: list[Tensor], values: list[Tensor]) -> None:
    """Copy tensor by tensor; on a GPU in as many kernels as there are types, where a mixed list would take one each."""
    for dtype in dict.fromkeys(place.dtype for place in places):
        alike = [(place, value) for place, value in zip(places, values, strict=True) if place.dtype == dtype]
        torch._foreach_copy_([place for place, _ in alike], [value for _, value in alike])


class WeightPolicy(Protocol):
    """The parameters that forwards run on, and whether their backwards repeat them."""

    sources: WeightSources
    replays: bool  # whether backwards repeat their forward
    replays_on_current: bool  # whether they do so on the current weights, not on those of the forward
    forgets: bool  # whether the next update overwrites what a forward used
    keeps: bool  # whether backwards use tensors of their forward, which no update changes
    copies: int  # sets of parameters of its own, besides the optimizer's and the older versions
    forwards: int  # of this program, where the version depends on their number
    do: Callable[[object, Work], None]  # how its copies are made

    @property
    def recomputes(self) -> bool:
        """Whether backwards repeat their forward on its own weights."""

    def current(self) -> Version:
        """What a forward uses now."""

    def needs_next(self) -> bool:
        """While an update is under way: whether the next forward uses the version that it makes."""

    def returning(self, version: Version) -> Version:
        """What the backward of a batch uses whose forward used that version."""

    def changed(self) -> None:
        """The optimizer has made a new version."""

    def passed(self) -> None:
        """A window has closed without an update: something in it was not finite, or there are no parameters."""

    def restart(self) -> None:
        """All batches are done; the program starts again."""

    def versions(self) -> int:
        """Versions that are held, for batches in flight or as the newest."""

    def remember(self) -> Version | None:
        """A lasting copy of what the last forward used, where the policy keeps none; shared until the next update."""

    def forget(self) -> None:
        """Drop the lasting copy."""

    def save(self, versions: list[Version]) -> dict[str, Any]:
        """What else the policy holds; versions that are not yet in the list are added to it."""

    def load(self, saved: dict[str, Any], versions: list[Version]) -> None:
        """Restore what was saved."""

    def again(self, version: Version) -> AbstractContextManager[Version]:
        """Around a repeated forward of a batch in flight: the version to run it on."""


class Live:
    """The module's own parameters; correct when there is no update between a forward and its backward.

    In another type: copies of those that have it, refreshed in place, so that forwards and graphs keep using them.
    """

    replays_on_current = False
    forgets = False
    keeps = False
    copies = forwards = 0
    outdated = False  # whether the copies are older than the parameters
    do: Callable[[object, Work], None]

    def __init__(self, sources: WeightSources, *, replays: bool = False) -> None:
        self.sources, precision, self.do, self.replays = sources, sources.precision, at_once, replays
        self.storage: list[Tensor] = [precision.lower(parameter.data) for parameter in sources.parameters.values()]
        if precision.lowers:
            self.copies, self.outdated = 1, True
        self.own = self._aliases() if precision.lowers else Version(None)

    @property
    def recomputes(self) -> bool:
        return self.replays and not self.replays_on_current

    def _aliases(self) -> Version:
        """`.data` shares storage but not the version counter."""
        return Version(self.sources.named([tensor.data for tensor in self.storage]))

    def _refresh(self) -> None:
        self.do("refresh", self._lower)
        self.outdated = False

    def _lower(self) -> None:
        pairs = [
            (copy, parameter.detach())
            for copy, parameter in zip(self.storage, self.sources.parameters.values(), strict=True)
            if self.sources.precision.lowered(parameter)
        ]
        copy_all([copy for copy, _ in pairs], [parameter for _, parameter in pairs])

    def current(self) -> Version:
        if self.outdated:
            self._refresh()
        return self.own

    def needs_next(self) -> bool:
        return True

    def returning(self, version: Version) -> Version:
        if self.outdated:
            self._refresh()
        return version

    def changed(self) -> None:
        self.outdated = self.sources.precision.lowers

    def passed(self) -> None:
        pass

    def restart(self) -> None:
        pass

    def versions(self) -> int:
        return 1

    def remember(self) -> Version | None:
        return None

    def forget(self) -> None:
        pass

    def save(self, versions: list[Version]) -> dict[str, Any]:
        return {}

    def load(self, saved: dict[str, Any], versions: list[Version]) -> None:
        self.changed()

    @contextmanager
    def again(self, version: Version) -> Iterator[Version]:
        yield version


class Replay(Live):
    """The module's own parameters (or predicted ones), at the forward without a graph and again at the backward."""

    replays_on_current = True

    def __init__(self, sources: WeightSources) -> None:
        super().__init__(sources, replays=True)

    def current(self) -> Version:
        return Version(self.sources.snapshot()) if self.sources.forward else super().current()

    def returning(self, version: Version) -> Version:
        if not self.sources.backward:
            return super().returning(self.own)
        return Version(self.sources.named([self.sources.precision.lower(value) for value in self.sources.backward()]))


class Hybrid(Live):
    """Aliases of the parameters (or of the copies), whose version counter is their own: a stored graph stays usable
    while the optimizer changes the values that its backward will read."""

    forgets = True

    def __init__(self, sources: WeightSources) -> None:
        super().__init__(sources)
        self.own = self._aliases()
        self.lasting: Version | None = None

    def changed(self) -> None:
        super().changed()
        self.lasting = None

    def remember(self) -> Version | None:
        if self.lasting is None:
            self.lasting = Version(self.sources.named([tensor.clone() for tensor in self.storage]))
        return self.lasting

    def forget(self) -> None:
        self.lasting = None

    @contextmanager
    def again(self, version: Version) -> Iterator[Version]:
        """The aliases have the old values while the graph is made, then the present ones."""
        if self.outdated:
            self._refresh()
        present = [tensor.clone() for tensor in self.storage]
        if version.tensors:
            copy_all(self.storage, [tensor.detach() for tensor in version.tensors.values()])
        try:
            yield self.own
        finally:
            copy_all(self.storage, present)


class PredictedHybrid(Hybrid):
    """Aliases of a second set of parameters, which gets the predicted values before each forward and each backward."""

    copies = 1

    def __init__(self, sources: WeightSources) -> None:
        super().__init__(sources)
        self.storage, self.copies = sources.copies(), 1
        self.own = self._aliases()

    def _fill(self, prediction: Prediction | None) -> None:
        values = prediction() if prediction else [p.detach() for p in self.sources.parameters.values()]
        copy_all(self.storage, values)

    def current(self) -> Version:
        self.do("forward", partial(self._fill, self.sources.forward))
        return self.own

    def returning(self, version: Version) -> Version:
        self.do("backward", partial(self._fill, self.sources.backward))
        return version


class Stash(Live):
    """Snapshots, made at the first forward after an update and dropped with the last batch that needs them.

    `reuse` gives tensors to put them in, which are used again when nothing needs their contents.

    memory    these tensors, the least recently used first; contents: the version in each of them, by id
    """

    copies = 1  # of the newest version
    keeps = True

    def __init__(self, sources: WeightSources, in_flight: InFlightOn, *, replays: bool = False) -> None:
        self.sources, self.in_flight, self.do, self.replays = sources, in_flight, at_once, replays
        self.newest: Version | None = None
        self.reuse([])
        self.made = 0  # versions so far

    def reuse(self, memory: list[Tensors]) -> None:
        """Put the next versions into these tensors."""
        self.memory = memory
        self.contents: dict[int, Version] = {}

    def current(self) -> Version:
        if self.newest is None:
            self.newest = self._make()
        return self.newest

    def _make(self) -> Version:
        free = self.room()
        if free is None:
            made: list[Tensors] = []
            # memory that is reused, or written by queued work, belongs to one version
            separate = self.memory or self.do is not at_once
            earlier = None if separate else max(self.alive(), key=lambda version: version.number, default=None)
            self.do(None, lambda: made.append(self.sources.snapshot(earlier=earlier)))
            return Version(made[0], number=self.made, writes=self.sources.writes())
        place = self.memory.pop(free)
        self.memory.append(place)
        self.do(id(place), partial(self.sources.snapshot, place))
        version = self.contents[id(place)] = Version(place, number=self.made)
        return version

    def ready(self) -> list[Version]:
        """Those that the next forwards may use."""
        return [] if self.newest is None else [self.newest]

    def alive(self) -> list[Version]:
        """Those, and the ones that batches in flight need."""
        return [*self.in_flight(), *self.ready()]

    def room(self) -> int | None:
        """The index of memory for another version, if there is some."""
        ready = self.ready()
        for index, place in enumerate(self.memory):
            version = self.contents.get(id(place))
            if version is None or (not version.batches and version not in ready):
                return index
        return None

    def again_elsewhere(self) -> Version:
        """The newest version once more, in memory of its own."""
        self.newest = self._make()
        return self.newest

    def changed(self) -> None:
        self.newest = None
        self.made += 1

    def restart(self) -> None:
        self.newest = None  # the next one goes where the first one was

    def versions(self) -> int:
        return len({version.number for version in self.alive()} | {self.made})  # the parameters themselves

    def save(self, versions: list[Version]) -> dict[str, Any]:
        return {
            "newest": versions.index(self.newest) if self.newest in versions else None,
            "numbers": [version.number - self.made for version in versions],
        }

    def load(self, saved: dict[str, Any], versions: list[Version]) -> None:
        self.newest = None if saved["newest"] is None else versions[saved["newest"]]
        numbers = saved.get("numbers")  # not in older files
        for place, version in enumerate(versions):
            apart = 0 if version is self.newest else -1 - place
            version.number = self.made + (apart if numbers is None else numbers[place])


class Before(Stash):
    """Snapshots of the last two versions, of which a forward uses the one given by its position in the program."""

    def __init__(self, sources: WeightSources, in_flight: InFlightOn, *, replays: bool = False) -> None:
        super().__init__(sources, in_flight, replays=replays)
        self.kept: list[Version] = []  # none before the first forward, since parameters may be loaded until then
        self.forwards = 0

    def current(self) -> Version:
        assert self.sources.version is not None
        self.kept = self.kept or [self._make()]
        age = self.made - self.sources.version(self.forwards, self.made)
        self.forwards += 1
        version = self.kept[-1 - age]
        version.age = age
        return version

    def needs_next(self) -> bool:
        assert self.sources.version is not None
        return self.sources.version(self.forwards, self.made + 1) > self.made

    def ready(self) -> list[Version]:
        return self.kept

    def changed(self) -> None:
        self.made += 1
        self.kept = [*self.kept[-1:], self._make()]

    def passed(self) -> None:
        self.changed()  # the next version, with the same values

    def restart(self) -> None:
        self.kept = []
        self.forwards = self.made = 0

    def versions(self) -> int:
        return max(1, len(set(self.alive())))

    def save(self, versions: list[Version]) -> dict[str, Any]:
        versions += [version for version in self.kept if version not in versions]
        return {
            "kept": [versions.index(version) for version in self.kept],
            "forwards": self.forwards,
            "made": self.made,
        }

    def load(self, saved: dict[str, Any], versions: list[Version]) -> None:
        self.kept = [versions[number] for number in saved["kept"]]
        self.forwards, self.made = saved["forwards"], saved["made"]


def make_policy(
    weights: str, sources: WeightSources, *, lag: int, replays: bool, in_flight: InFlightOn
) -> WeightPolicy:
    """The policy for a stage of that lag; `replays`: its backwards repeat their forwards."""
    if sources.version:
        return Before(sources, in_flight, replays=replays)
    if weights == "replay" and replays:
        return Replay(sources)
    if weights == "hybrid" and (sources.forward or sources.backward):
        return PredictedHybrid(sources)
    if not lag and not sources.forward:
        return Live(sources, replays=replays)
    return Hybrid(sources) if weights == "hybrid" else Stash(sources, in_flight, replays=replays)


def substituted(module: nn.Module, version: Version) -> AbstractContextManager[object]:
    """The module with the version's tensors in place of its parameters, for a backward that recomputes
    (torch.utils.checkpoint)."""
    if version.tensors is None:
        return nullcontext()
    return _reparametrize_module(module, version.tensors, tie_weights=True)


def call(module: nn.Module, parameters: Tensors | None, arguments: tuple[Any, ...], *, buffers: bool = True) -> Any:
    """The module's output on those parameters; with buffers=False its buffers are left as they were."""
    replaced = replacements(module, parameters, buffers=buffers)
    return functional_call(module, replaced, arguments) if replaced else module(*arguments)


def replacements(module: nn.Module, parameters: Tensors | None, *, buffers: bool) -> Tensors:
    """What replaces the module's own tensors: those given (parameters, or buffers of an earlier forward), and copies of
    buffers that must not change."""
    replaced = dict(parameters or {})
    if not buffers:
        replaced |= {name: buffer.clone() for name, buffer in module.named_buffers() if name not in replaced}
    return replaced
