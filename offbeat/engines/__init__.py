"""Engines: where the stages of a pipeline run. All of them run the same workers over the same programs.

    simulate     all stages in this process, one after the other
    processes    one stage per process, on torch.distributed
    streams      all stages in this process, at the same time on one GPU

`choose.choose_engine` is the only place that chooses one. May import graphs, core and what describes methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from offbeat.core.clipping import NormExchange
from offbeat.core.links import Link
from offbeat.core.replicas import WindowSum
from offbeat.core.stage import Stage
from offbeat.core.worker import Actor
from offbeat.method import Method

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MakeExecutor = Callable[[Stage], Actor]  # what executes the operations of a stage


class Engine(Protocol):
    """The stages of this process, how they are made and run, and how messages and weights reach other processes.

    `link` and the collectives (share, share_tensors, exchange) name stages, not processes. Every process must reach a
    collective. With replicas, links are within the replica of this process, and a collective's source is in replica 0.
    """

    K: int
    here: Sequence[int]  # stages of this process, from 1, in order
    on_one_device: bool  # whether messages stay in the memory of one device, where they cannot be compressed
    replicas: int  # R: copies of all stages, each of which trains on its own share of the batches
    replicas_here: Sequence[int]  # those of this process, from 0

    @property
    def leads(self) -> bool:
        """Whether this process has the first stage of replica 0, which decides for all."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes as a mesh (see meshes.py), None in one process; to read it for the first time is collective."""

    @property
    def waits(self) -> bool:
        """Whether a worker may wait for a message: no other stage of this process could be the one to send it."""

    @property
    def interleaves(self) -> bool:
        """Whether a worker may be interrupted after each operation, not only where it waits for a message."""

    @property
    def defers(self) -> bool:
        """Whether stages queue their work, to be launched together with that of the others.

        Then calls return before the work is done, `settle` interrupts it, and an operation that is launched by itself
        (see observe/tracing.py) does not overlap with others. Known once there are stages.
        """

    def device_for(self, given: torch.device | None) -> torch.device:
        """The device of this process's stages in a pipeline that was given that device (None: no preference)."""

    def ordered(self, method: Method) -> Method:
        """The method in the order in which the stages run its operations; results are the same."""

    def executor_maker(self, method: Method) -> MakeExecutor:
        """What executes the operations of a stage: the stage itself, or its recordings. Called again when a
        drained pipeline continues with another method."""

    def take(self, batch: Any, device: torch.device) -> Any:
        """A batch of the caller, who may use its memory again, in memory of the first stage: its only copy, except
        where a recorded stage reads it from a fixed place."""

    def give(self, loss: Tensor) -> Tensor:
        """The newest loss of the last stage as a tensor for the caller, which later batches do not change."""

    def link(
        self,
        channel: str,
        source: int,
        target: int,
        *,
        capacity: int,
        patient: bool = False,
        from_replica: int | None = None,
    ) -> Link | None:
        """The end, or both ends, of a link that this process holds; None where it holds neither.

        from_replica: the source is in this replica and the target in replica 0; else both are in that of this process.
        """

    def window_sum(self, k: int, replica: int) -> WindowSum | None:
        """Adds the windows of the replicas of stage k, for one of this process; None without replicas."""

    def norm_exchange(self, k: int, replica: int) -> NormExchange:
        """Brings the norms of the stages of a replica together before an update, for stage k of this process."""

    def run(self, work: list[Iterator[bool]]) -> None:
        """Run the workers' generators of this process to their ends."""

    def share(self, value: Any, source: int) -> Any:
        """The value of the process that holds stage `source`, in every process."""

    def share_tensors(self, tensors: list[Tensor], source: int) -> None:
        """Overwrite the tensors with those of the process that holds stage `source`."""

    def exchange(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their stages; those of replica 0 first."""

    def barrier(self) -> None:
        """Wait until the workers of all processes reach this call."""

    def stage_context(self) -> AbstractContextManager[object]:
        """Around work on a stage that is not part of its program: on the stream on which the stage works."""

    def settle(self) -> None:
        """Launch all queued work, and order it: what the caller does next comes after it, and before later work of the
        stages."""

    def guard(self) -> AbstractContextManager[None]:
        """Around whatever may fail: reports an exception to the other processes."""

    def close(self) -> None:
        """End the links; safe to call twice."""


def eager(stage: Stage) -> Actor:
    """The stage itself: it does each operation when it is asked to."""
    return stage


__all__ = ["Engine", "MakeExecutor", "eager"]
