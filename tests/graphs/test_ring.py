"""The ring of slots of a recorded stage: its size, and the memory that its neighbours read."""

from __future__ import annotations

import math

import pytest
from stream_cases import K, batches, pipeline, recorded, train

import offbeat
from offbeat.graphs.recorded_stage import RecordedStage
from offbeat.graphs.ring import MAX_LEAD, Ring
from offbeat.methods import named


@pytest.mark.parametrize(
    "method",
    [
        offbeat.ADL(M=1),
        offbeat.ADL(M=3),
        offbeat.ADL(M=2, weights="hybrid"),
        offbeat.ADL1F1B(M=2),
        offbeat.PipeDream(),
        offbeat.TwoBW(M=4),
    ],
    ids=lambda m: m.name,
)
def test_no_stage_writes_memory_that_a_neighbour_may_still_read(monkeypatch, method):
    """A stream waits for its neighbours' turn before the last: what is read in turn n may be written in turn n + 2."""
    made: dict[int, tuple[int, int]] = {}  # memory -> stage that made what lies there, and until when it is read
    forward, backward = RecordedStage.forward, RecordedStage.backward

    def note(k, turn, tensors, until):
        for tensor in tensors:
            if tensor is not None:
                _, read = made.get(tensor.data_ptr(), (k, -9))
                assert turn >= read + MAX_LEAD, f"stage {k} in turn {turn}"
                made[tensor.data_ptr()] = k, until

    def forwards(recorded_stage, *given):
        slots, k = recorded_stage.slots, recorded_stage.stage.k
        kept = slots.used.keys() | set()
        output = forward(recorded_stage, *given)
        if slots.used.keys() - kept and k < K:
            places = [slot.batch.inputs[0] for t, slot in slots.used.items() if t not in kept]
            note(k, slots.turn, places, slots.turn)  # with its slot, the output is read in the same turn
        return output

    def backwards(recorded_stage, t, gradients):
        slots, k = recorded_stage.slots, recorded_stage.stage.k
        kept = t in slots.used
        below = backward(recorded_stage, t, gradients)
        if kept and k > 1:
            note(k, slots.turn, below, slots.turn + method.lag(k - 1, K) - method.lag(k, K))
        return below

    monkeypatch.setattr(RecordedStage, "forward", forwards)
    monkeypatch.setattr(RecordedStage, "backward", backwards)
    pipe = pipeline(method)
    for x, y in batches(40, short=False):
        pipe.step(x, y)
    assert {k for k, _ in made.values()} == {1, 2, 3, 4}


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize("M", [1, 2, 4, 5])
def test_a_ring_holds_the_batches_in_flight_and_their_versions_and_little_more(M, weights):
    method = offbeat.ADL(M=M, weights=weights)
    for stages in (1, 2, 3, 8, 28):
        for k in range(1, stages + 1):
            lag, copies = method.lag(k, stages), weights == "stash" and k < stages
            ring = Ring.of(method, k, stages, copies=copies)
            assert ring.slots >= method.held(k, stages) + 1
            assert ring.groups >= method.versions(k, stages) if copies else ring.groups == 1
            assert ring.slots <= 2 * (max(lag, 2) + MAX_LEAD + 2 * M)
        rings = [Ring.of(method, k, stages, copies=weights == "stash") for k in range(1, stages + 1)]
        assert math.lcm(*(ring.slots for ring in rings)) <= 4 * (2 * stages + M)
        assert sum(ring.slots for ring in rings) <= 1.5 * sum(
            max(method.lag(k, stages), 2) + MAX_LEAD + M for k in range(1, stages + 1)
        )


@pytest.mark.parametrize("M", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", ["adl", "adl-1f1b"])
def test_slots_are_reused_so_that_no_batch_runs_eagerly(name, M):
    pipe = pipeline(named(name, M=M))
    train(pipe, batches(50, short=False), drains=(20, 33))
    assert [stage.irregular for stage in recorded(pipe)] == [0] * K
    for stage in recorded(pipe):
        free = [slot for slots in stage.slots.free.values() for slot in slots]
        assert len(free) == stage.slots.ring.slots
        assert not stage.slots.used
        assert stage.stage.weights.versions() <= stage.stage.figures.most_versions
