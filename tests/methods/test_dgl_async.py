"""Asynchronous greedy learning: its buffers and turns, as Algorithm 2 and its code have them."""

from __future__ import annotations

import itertools

import pytest

import offbeat
from offbeat.methods.dgl_async import Buffer
from offbeat.ops import Drop, Forward, Take


def text(operations) -> str:
    return " ".join(map(str, operations))


def test_a_new_batch_takes_the_place_of_the_oldest():
    buffer = Buffer(2)
    assert [text(buffer.add(t)) for t in (0, 1, 2, 3)] == ["+0", "+1", "-0 +2", "-1 +3"]


def test_the_least_used_is_drawn_and_of_those_the_newest():
    buffer = Buffer(3)
    assert buffer.draw() is None
    for t in (0, 1, 2):
        buffer.add(t)
    assert [buffer.draw() for _ in range(7)] == [2, 1, 0, 2, 1, 0, 2]
    buffer.add(3)
    assert [buffer.draw() for _ in range(2)] == [3, 3], "not used before"


def test_a_batch_that_is_added_again_is_the_newest_and_unused():
    """Its new features take the place of its old ones, and nothing else goes for it."""
    buffer = Buffer(2)
    buffer.add(0)
    buffer.add(1)
    assert buffer.draw() == 1
    assert text(buffer.add(0)) == "+0"
    assert buffer.draw() == 0
    assert text(buffer.add(2)) == "-1 +2", "batch 0 is newer by now"


def programs(K: int, n: int, **settings: int) -> list[list]:
    method = offbeat.AsyncDGL(**settings)
    return [list(itertools.chain(*method.program(k, K, range(n)))) for k in range(1, K + 1)]


@pytest.mark.parametrize("K", [2, 3, 5])
def test_every_stage_takes_what_the_one_below_sends_in_its_order(K):
    for below, above in itertools.pairwise(programs(K, 40)):
        sent = [op.t for op in below if isinstance(op, Forward)]
        assert [op.t for op in above if isinstance(op, Take)] == sent


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_buffer_holds_as_many_batches_as_it_was_given(size):
    for program in programs(4, 60, buffer=size)[1:]:
        held, most = set(), 0
        for op in program:
            held |= {op.t} if isinstance(op, Take) else set()
            held -= {op.t} if isinstance(op, Drop) else set()
            most = max(most, len(held))
        assert most == size


def test_turns_are_drawn_anew_for_every_batch_and_by_the_seed():
    counts = [[len(iteration) for iteration in offbeat.AsyncDGL(seed=seed).program(2, 3, range(40))] for seed in (0, 1)]
    assert len(set(counts[0])) > 3
    assert counts[0] != counts[1]


@pytest.mark.parametrize("K", [2, 4, 8])
def test_every_stage_has_as_many_turns_as_the_first_in_the_long_run(K):
    """So a batch is learnt from twice, or never; and some are."""
    n = 2000
    for k, program in enumerate(programs(K, n), start=1):
        learnt = [op.t for op in program if isinstance(op, Forward)]
        assert abs(len(learnt) - n) < 0.15 * n, f"stage {k}"
        if k > 1:
            assert len(set(learnt)) < n
            assert len(set(learnt)) < len(learnt)
