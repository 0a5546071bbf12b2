"""Programs as drawn text, and as data that every interpreter can rely on."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from formulas import staleness, versions_held
from hypothesis import given
from hypothesis import strategies as st

from offbeat.clock import draw, ticks
from offbeat.methods import ADL, BP
from offbeat.ops import Backward, Forward, Update, lagged

TRACE = """\
tick | stage 1             | stage 2                   | stage 3
0    | F0@v0               | -                         | -
1    | F1@v0               | F0@v0                     | -
2    | F2@v0               | F1@v0                     | F0@v0 B0@v0
3    | F3@v0               | F2@v0 B0@v0               | F1@v0 B1@v0 U->v1
4    | F4@v0 B0@v0         | F3@v0 B1@v0 U->v1         | F2@v1 B2@v1
5    | F5@v0 B1@v0 U->v1   | F4@v1 B2@v0 (LoS 1)       | F3@v1 B3@v1 U->v2
6    | F6@v1 B2@v0 (LoS 1) | F5@v1 B3@v0 (LoS 1) U->v2 | F4@v2 B4@v2
7    | B3@v0 (LoS 1) U->v2 | F6@v2 B4@v1 (LoS 1)       | F5@v2 B5@v2 U->v3
8    | B4@v0 (LoS 2)       | B5@v1 (LoS 1) U->v3       | F6@v3 B6@v3
9    | B5@v0 (LoS 2) U->v3 | B6@v2 (LoS 1) U->v4       | U->v4
10   | B6@v1 (LoS 2) U->v4 | -                         | -"""


def test_the_trace_of_three_stages_and_two_gradients_an_update_is_the_published_one():
    assert draw(ADL(M=2), 3, range(7)) == TRACE


def test_drawing_needs_no_torch():
    code = "import sys, offbeat.clock, offbeat.theory; from offbeat import ADL; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@given(
    lag=st.integers(0, 9),
    M=st.integers(1, 5),
    N=st.integers(0, 30),
    start=st.integers(0, 50),
    window=st.sampled_from(["count", "aligned"]),
)
def test_every_batch_is_forwarded_then_backwarded_then_applied_exactly_once(lag, M, N, start, window):
    batches = range(start, start + N)
    operations = [op for iteration in lagged(batches, lag=lag, M=M, window=window) for op in iteration]
    assert [op.t for op in operations if isinstance(op, Forward)] == list(batches)
    assert [op.t for op in operations if isinstance(op, Backward)] == list(batches)
    in_flight = 0
    for op in operations:
        in_flight += isinstance(op, Forward) - isinstance(op, Backward)
        assert 0 <= in_flight <= lag + 1
    if N:
        assert isinstance(operations[-1], Update)
    held = 0
    for position, op in enumerate(operations):
        if isinstance(op, Update):
            last = position == len(operations) - 1
            assert op.over == M or (last and op.over == held), "M, or at the very end what there is"
            assert window == "aligned" or op.over == held
            assert held == M or last or window == "aligned"
            held = 0
        held += isinstance(op, Backward)


def test_a_program_takes_a_batch_only_after_the_iteration_before_it_is_over():
    asked = []

    def batches():
        for t in range(3):
            asked.append(t)
            yield t

    program = lagged(batches(), lag=1, M=1)
    assert [str(op) for op in next(program)] == ["F0"]
    assert asked == [0]
    assert [str(op) for op in next(program)] == ["F1", "B0", "U"]
    assert asked == [0, 1]


@pytest.mark.parametrize("K", range(1, 11))
def test_the_clock_takes_n_plus_twice_k_minus_one_ticks_and_counts_staleness(K):
    for M in range(1, 9):
        N = 2 * K + 3 * M
        counted = Counter()
        ticked = list(ticks(ADL(M=M), K, range(N)))
        assert N + 2 * (K - 1) <= len(ticked) <= N + 2 * (K - 1) + 1  # one more where the last window is short
        for event in (event for events in ticked for event in events):
            if isinstance(event.operation, Backward):
                lag = 2 * (K - event.k)
                counted[event.k] += 1
                if event.operation.t >= lag:
                    assert event.staleness == staleness(lag, M, event.operation.t % M)
                assert event.staleness <= versions_held(lag, M) - 1
        assert counted == dict.fromkeys(range(1, K + 1), N)


def test_backpropagation_keeps_all_stages_but_one_idle():
    for events in ticks(BP(M=2), 4, range(4)):
        assert len({event.k for event in events if not isinstance(event.operation, Update)}) <= 1
