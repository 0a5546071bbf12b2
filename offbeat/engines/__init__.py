"""Engines: where the stages live. All of them run the same workers over the same programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from offbeat.core.links import Link
from offbeat.graphs.launch_queue import LaunchQueue
from offbeat.method import Method


class Engine(Protocol):
    """The stages of this process, and how messages and weights cross to the others.

    `link` and the collectives (share, share_tensors, exchange) name stages, not processes; every process must reach a
    collective.
    """

    K: int
    here: Sequence[int]  # stages of this process, from 1, in order
    records: bool  # whether stages record their operations, and nothing waits for the device

    def link(self, channel: str, source: int, target: int, *, capacity: int, patient: bool = False) -> Link | None:
        """The end, or both ends, of a link that this process holds; None where it holds neither."""

    def run(self, work: list[Iterator[bool]]) -> None:
        """Run the workers' generators of this process to their ends."""

    @property
    def waits(self) -> bool:
        """Whether a worker may wait for a message (no other stage of this process could send it)."""

    def make_launch_queue(self, method: Method) -> LaunchQueue | None:
        """Where the stages of a method put recorded work; None where nothing is recorded."""

    def share(self, value: Any, source: int) -> Any:
        """The value of the process that holds stage `source`, in every process."""

    def share_tensors(self, tensors: list[Tensor], source: int) -> None:
        """Overwrite the tensors with those of the process that holds stage `source`."""

    def exchange(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of their stages."""

    def barrier(self) -> None:
        """Wait until the workers of all processes have come here."""

    def beside(self, k: int) -> AbstractContextManager[object]:
        """Around work of the caller on stage k that must be done where the stage does its own."""

    def settle(self) -> None:
        """What the stages were asked for is done before what the caller does next; that, before what they do next."""

    def guard(self) -> AbstractContextManager[None]:
        """Around whatever may fail: tells the other processes why."""

    def close(self) -> None:
        """End the links; safe to call twice."""


__all__ = ["Engine"]
