"""Captured work without a GPU: what is asked for runs later, in any order that the recorded graphs allow.

A captured piece gives its results a place before it has run, and does its work whenever it is launched; the pieces of
one launch run at once, held back only by what they wait for. Here they run one after the other, in a random order.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree

from offbeat.engines import streams
from offbeat.graphs import join as joining
from offbeat.graphs import launch_queue, recorded_stage, recorder
from offbeat.graphs.capture import Recorded
from offbeat.graphs.slot_recordings import SlotRecordings


def capture(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> list[int]:
    """Have everything captured from now on; how many pieces are launched at once is noted in the list."""
    order, launched = random.Random(seed), []

    class Captured(Recorded):
        def __init__(self, work, *, device: torch.device, pool=None) -> None:
            self.repeat, self.graph = work, self

        def __call__(self) -> None:
            launched.append(1)
            self.repeat()

    def join(nodes):
        for number, (_, waits) in enumerate(nodes):
            assert all(before < number for before in waits)

        def launch() -> None:
            launched.append(len(nodes))
            todo = dict(enumerate(nodes))
            while todo:
                free = [number for number, (_, waits) in todo.items() if not any(before in todo for before in waits)]
                todo.pop(order.choice(free))[0].repeat()

        return launch

    forward, record = SlotRecordings.forward, SlotRecordings.record_forwards

    def into_its_place(recordings, slot) -> None:
        place = slot.output
        forward(recordings, slot)
        if place is not None:
            for old, new in zip(pytree.tree_leaves(place), pytree.tree_leaves(slot.output), strict=True):
                old.data.copy_(new.detach())
            slot.output = place

    def with_places(recordings, x, target, ring):
        """A capture runs the code, and nothing comes of it."""
        counters = recordings.guard.counters
        written = (*recordings.network.module.buffers(), counters.sums, counters.counts, counters.steps)
        kept = [tensor.clone() for tensor in written]
        groups = record(recordings, x, target, ring)
        for _, slots in groups:
            for slot in slots:
                forward(recordings, slot)
        for tensor, old in zip(written, kept, strict=True):
            tensor.data.copy_(old)
        return groups

    monkeypatch.setattr(recorder, "Recorded", Captured)
    monkeypatch.setattr(recorded_stage, "gc", SimpleNamespace(collect=lambda: None))  # no memory of a GPU to return
    monkeypatch.setattr(streams, "captures", lambda device: True)
    monkeypatch.setattr(launch_queue.Deferring, "_keep_up", lambda self, work, turns=1: None)
    monkeypatch.setattr(joining, "join", join)
    monkeypatch.setattr(SlotRecordings, "forward", into_its_place)
    monkeypatch.setattr(SlotRecordings, "record_forwards", with_places)
    return launched
