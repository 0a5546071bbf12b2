"""Asynchronous greedy learning: its buffers and turns, as Algorithm 2 and its code have them."""

from __future__ import annotations

import itertools
import random

import pytest

import offbeat
from offbeat.methods import dgl_async
from offbeat.methods.dgl_async import MOST_TURNS, Buffer
from offbeat.ops import Drop, Forward, Take
from offbeat.seeds import derive


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


def read_literally(k: int, K: int, batches, *, size: int, seed: int) -> list[str]:
    """The operations of stage k, from the turns and the buffers of all stages; all turns of a batch are drawn first."""
    buffers = {stage: Buffer(size) for stage in range(2, K + 1)}
    program = []
    for t in batches:
        rng = random.Random(derive(seed, "turns", t))
        drawn = [rng.randint(1, K) for _ in range(MOST_TURNS * K)]
        mine = []
        for stage in [*(drawn[: drawn.index(1)] if 1 in drawn else drawn), 1]:
            batch = t if stage == 1 else buffers[stage].draw()
            if batch is None:
                continue
            if stage == k:
                mine += [f"F{batch}", f"B{batch}", "U"]
            if stage < K:
                received = map(str, buffers[stage + 1].add(batch))
                mine += received if stage + 1 == k else ()
        program.append(" ".join(mine))
    return program


@pytest.mark.parametrize(("K", "size", "seed"), [(1, 2, 0), (2, 1, 3), (3, 2, 0), (5, 3, 1), (16, 2, 0)])
def test_programs_are_those_of_a_literal_reading(K, size, seed):
    method, batches = offbeat.AsyncDGL(buffer=size, seed=seed), range(3, 40)
    for k in range(1, K + 1):
        found = [text(iteration) for iteration in method.program(k, K, batches)]
        assert found == read_literally(k, K, batches, size=size, seed=seed)


def test_a_stage_draws_no_turns_after_that_of_stage_1_and_follows_no_stage_above(monkeypatch):
    """So that an iteration takes about K draws, and stage k the buffers of k-1 stages at most."""
    K, n, draws, followed = 64, 50, 0, 0

    class Counted(random.Random):
        def randint(self, a, b):
            nonlocal draws
            draws += 1
            return super().randint(a, b)

    class CountedBuffer(Buffer):
        def draw(self):
            nonlocal followed
            followed += 1
            return super().draw()

    monkeypatch.setattr("offbeat.methods.dgl_async.random.Random", Counted)
    monkeypatch.setattr("offbeat.methods.dgl_async.Buffer", CountedBuffer)
    for _ in offbeat.AsyncDGL().program(4, K, iter(range(n))):
        pass
    assert 0 < draws <= 2 * K * n
    assert 0 < followed <= 2 * 4 * n


def test_the_programs_of_a_range_of_batches_share_their_draws(monkeypatch):
    K, n, drawn = 20, 30, 0

    class CountedBuffer(Buffer):
        def draw(self):
            nonlocal drawn
            drawn += 1
            return super().draw()

    monkeypatch.setattr("offbeat.methods.dgl_async.Buffer", CountedBuffer)
    method = offbeat.AsyncDGL(seed=5)
    shared = [list(method.program(k, K, range(n))) for k in range(1, K + 1)]
    assert 0 < drawn <= 2 * K * n
    assert shared == [list(method.program(k, K, iter(range(n)))) for k in range(1, K + 1)]


def test_programs_are_whole_after_one_that_was_interrupted(monkeypatch):
    """Those of the same batches ended where Ctrl-C had stopped it."""
    method, batches = offbeat.AsyncDGL(seed=77), range(30)
    whole = list(method.program(2, 3, iter(batches)))
    turns = dgl_async.turns

    def interrupted(K, t, *, seed):
        if t == 20:
            raise KeyboardInterrupt
        return turns(K, t, seed=seed)

    going = method.program(2, 3, batches)
    assert [next(going) for _ in range(5)] == whole[:5]
    monkeypatch.setattr(dgl_async, "turns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(method.program(2, 3, batches))
    monkeypatch.undo()
    assert list(going) == whole[5:]
    assert list(method.program(2, 3, batches)) == whole
