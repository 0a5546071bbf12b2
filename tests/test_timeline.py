"""Times of the schedules: those of the papers, and those of a literal reading of every program."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from offbeat import Method, UserError, critical_cycle
from offbeat.critical_cycle import longest_period
from offbeat.methods import ADL, ADL1F1B, BP, DDG, DECLARED, DSP, FR, AsyncDGL, GPipe, TwoBW
from offbeat.ops import Backward, Barrier, Forward
from offbeat.timeline import (
    Costs,
    _drained_events,
    _lagged_events,
    _loops,
    _sequences,
    balanced,
    longer_than,
    period,
    speed_up,
    timeline,
)

LAWS = {  # ideal speed-ups at K = 2, 4, 8, balanced, B = 2F
    "bp": (BP(), (1, 1, 1)),
    "bp pipelined M=4": (BP(4, pipelined=True), (1.60, 2.29, 2.91)),  # K M / (M + K - 1)
    "bp pipelined M=8": (BP(8, pipelined=True), (1.78, 2.91, 4.27)),
    "bp pipelined M=1": (BP(1, pipelined=True), (1, 1, 1)),
    "ddg": (DDG(), (1.50, 2.00, 2.40)),
    "ddg-dataflow": (DDG(barrier=False), (2, 4, 8)),
    "fr": (FR(), (1.20, 1.71, 2.18)),
    "dsp": (DSP(), (1.50, 3.00, 6.00)),
    "adl": (ADL(M=4), (2, 4, 8)),
    "gpipe m=4": (GPipe(4), (1.60, 2.29, 2.91)),
    "gpipe m=8": (GPipe(8), (1.78, 2.91, 4.27)),
    "gpipe m=32": (GPipe(32), (1.94, 3.66, 6.56)),
    "gpipe m=4, recompute": (GPipe(4, recompute=True), (1.20, 1.71, 2.18)),
    "gpipe m=32, recompute": (GPipe(32, recompute=True), (1.45, 2.74, 4.92)),
}


@pytest.mark.parametrize("name", LAWS)
def test_balanced_stages_obey_the_published_laws(name):
    method, laws = LAWS[name]
    for K, law in zip((2, 4, 8), laws, strict=True):
        found = speed_up(method, balanced(K))
        assert found == pytest.approx(law, abs=0.006), f"K={K}"


def test_unbalanced_stages_run_at_the_pace_of_the_slowest():
    costs = Costs([1.0, 2.0, 0.5], [2.0, 3.5, 1.5])
    assert period(ADL(M=2), costs) == pytest.approx(5.5)
    assert speed_up(ADL(M=2), costs) == pytest.approx(10.5 / 5.5)
    assert period(BP(), costs) == pytest.approx(10.5)


def test_adl_hides_a_latency_that_the_lag_of_1f1b_does_not():
    slow = {"up": [0.9] * 3, "down": [0.9] * 3}
    costs = Costs([1.0] * 4, [2.0] * 4, **slow)
    assert period(ADL(M=2), costs) == pytest.approx(3.0)
    # K-k+1 = 4 batches go around stages 1 to 4, which takes 3 hops up and down and the last stage's own F + B
    assert period(DDG(barrier=False), costs) == pytest.approx((3 * (3.0 + 2 * 0.9) + 3.0) / 4)


def test_fill_and_drain_cost_twice_k_minus_one_ticks():
    spans = timeline(ADL(M=1), 10, balanced(4))
    ticks = max(span.end for span in spans) / 3
    assert ticks <= 10 + 2 * 3
    assert speed_up(ADL(M=1), balanced(4), batches=10) == pytest.approx(4 * 10 / ticks)
    assert speed_up(ADL(M=1), balanced(4), batches=2000) == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("name", DECLARED)
def test_spans_of_a_stage_never_overlap_and_messages_never_come_early(name):
    costs = Costs([1.0, 1.5, 0.7], [2.0, 2.2, 1.9], up=[0.3, 0.2], down=[0.1, 0.4])
    method = DECLARED[name]()
    spans = timeline(method, 9, costs)
    for k in (1, 2, 3):
        own = [span for span in spans if span.k == k]
        assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(own))
        assert [span.operation for span in own] == [
            op for iteration in method.program(k, 3, range(9)) for op in iteration if not isinstance(op, Barrier)
        ]
    when: dict = {}
    for span in spans:
        when.setdefault((span.k, str(span.operation)), span)  # the first: a method with buffers repeats batches
    for (k, operation), span in when.items():
        if isinstance(span.operation, Forward) and k > 1:
            assert span.start >= when[k - 1, operation].end
        if isinstance(span.operation, Backward) and method.receives(span.operation, k, 3):
            assert span.start >= when[k + 1, operation].end


def test_updates_are_counted_evenly_for_all_k_and_m():
    costs = Costs((1.0,) * 5, (2.0,) * 5, (0.9,) * 5)
    assert speed_up(ADL(M=3), costs) == pytest.approx(costs.alone / 3.3, rel=1e-12)


def drawn(K: int, seed: int) -> Costs:
    rng = random.Random(seed)

    def some(n: int, least: float, most: float) -> list[float]:
        return [rng.uniform(least, most) for _ in range(n)]

    hops = {"up": some(K - 1, 0.0, 1.0), "down": some(K - 1, 0.0, 1.0)}
    return Costs(some(K, 0.5, 1.5), some(K, 1.0, 3.0), some(K, 0.0, 0.5), **hops)


def read_literally(method: Method, batches: int, costs: Costs) -> dict[int, list[tuple[str, float, float]]]:
    """Start and end of every operation, by asking each stage again and again whether it can continue."""
    K, stages = costs.K, range(1, costs.K + 1)
    programs = {k: [op for each in method.program(k, K, range(batches)) for op in each] for k in stages}
    spans: dict[int, list[tuple[str, float, float]]] = {k: [] for k in stages}
    done, free = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0.0)
    links: dict[tuple[int, int], list[float]] = {}
    while any(done[k] < len(programs[k]) for k in stages):
        waiting = [k for k in stages if done[k] < len(programs[k])]
        if all(isinstance(programs[k][done[k]], Barrier) for k in waiting):
            free.update(dict.fromkeys(waiting, max(free.values())))
            done.update({k: done[k] + 1 for k in waiting})
            continue
        for k in waiting:
            op = programs[k][done[k]]
            source, target = method.receives(op, k, K), method.sends(op, k, K)
            if isinstance(op, Barrier) or (source and not links.get((source, k))):
                continue
            start = max(free[k], links[source, k].pop(0) if source else 0.0)
            free[k] = start + costs.of(op, k, method)
            if target:
                links.setdefault((k, target), []).append(free[k] + costs.message_seconds(k, target, method))
            spans[k].append((str(op), start, free[k]))
            done[k] += 1
    return spans


@pytest.mark.parametrize("name", DECLARED)
def test_a_timeline_is_that_of_a_literal_reading_of_the_programs(name):
    method = DECLARED[name]()
    for K, seed in itertools.product((1, 2, 4), range(2)):
        if method.limit is None or method.limit(K) is None:
            costs = drawn(K, seed)
            spans = timeline(method, 11, costs)
            found = {
                k: [(str(span.operation), span.start, span.end) for span in spans if span.k == k]
                for k in range(1, K + 1)
            }
            assert found == read_literally(method, 11, costs)


@pytest.mark.parametrize("name", [name for name in DECLARED if not DECLARED[name]().order])
def test_the_period_is_the_mean_over_many_batches_of_a_timeline(name):
    method = DECLARED[name]()
    for K in (2, 3):
        costs = drawn(K, 7)
        many = method.M * math.lcm(*range(1, 2 * K + 1))  # whole turns around any number of stages
        first = 40 * method.M
        ends = {
            (span.k, span.operation.t): span.end
            for span in timeline(method, first + many + 9, costs)
            if isinstance(span.operation, Backward)
        }
        slowest = max(ends[k, (first + many) * method.m] - ends[k, first * method.m] for k in range(1, K + 1))
        assert period(method, costs) == pytest.approx(slowest / many, rel=1e-9), K


@pytest.mark.parametrize("exclusive", [False, True])
def test_the_period_of_a_free_running_method_is_the_mean_over_many_batches(exclusive):
    """Its turns are random, so the mean over n batches differs by an order of 1 / sqrt(n)."""
    costs = Costs(
        [1.0, 2.0, 1.0], [2.0, 2.5, 1.0], [0.1, 0.5, 0.1], up=[1.0, 7.0], down=[9.0, 9.0], exclusive=exclusive
    )
    n = 8000
    mean = max(span.end for span in timeline(AsyncDGL(), n, costs)) / n
    assert period(AsyncDGL(), costs) == (7.0 if exclusive else 5.0) == pytest.approx(mean, rel=0.03)


def test_a_free_running_method_has_an_order_and_a_local_loss():
    for settings in ({"order": None}, {"feedback": "above", "head": None}, {"M": 2}):
        with pytest.raises(UserError, match="free_running needs an order, a local loss and M=1"):
            replace(AsyncDGL(), **settings)


FOUND = [(ADL(M=4), 3.0), (ADL1F1B(M=4), 3.0), (AsyncDGL(), 3.0), (GPipe(32), 3 * 287 / 32)]


@pytest.mark.parametrize(("method", "expected"), FOUND, ids=lambda value: getattr(value, "name", ""))
def test_the_period_of_many_stages_is_found_without_running_the_schedule(method, expected, monkeypatch):
    monkeypatch.setattr("offbeat.timeline.timeline", None)
    assert period(method, balanced(256)) == pytest.approx(expected)


MANY = [
    *(BP(), BP(M=64), BP(M=64, pipelined=True), DDG(), GPipe(32), GPipe(256), TwoBW(M=255)),
    *(ADL(M=4), ADL(M=256), ADL(M=64, window="aligned"), ADL1F1B(M=4), ADL1F1B(M=64)),
]


@pytest.mark.parametrize(("hop", "longest_update", "most"), [(0.3, 0.0, 20), (30.0, 1.0, 60)])
@pytest.mark.parametrize("method", MANY, ids=lambda method: f"{method.name}-{method.M}-{method.window}")
def test_a_plan_of_256_stages_takes_a_bounded_amount_of_work(method, hop, longest_update, most, monkeypatch):
    """Operations of programs: only with barriers, three fills of each stage; events: in proportion to K M; a few
    evaluations, more on slow links."""
    K, drawn_operations, passes, program = 256, 0, [], Method.program

    def counted(self, k, stages, batches):
        nonlocal drawn_operations
        for operations in program(self, k, stages, batches):
            drawn_operations += len(operations)
            yield operations

    def evaluated(policy):
        passes.append(len(policy.ends))
        return evaluate(policy)

    evaluate = critical_cycle._Policy.evaluate
    monkeypatch.setattr(Method, "program", counted)
    monkeypatch.setattr(critical_cycle._Policy, "evaluate", evaluated)
    forward, hops = drawn(K, 3).forward, [hop] * (K - 1)
    update = [longest_update * each for each in forward]
    assert period(method, Costs(forward, forward, update, up=hops, down=hops)) > 0
    assert drawn_operations <= 3 * sum(3 * (method.lag(k, K) + method.M + 4) for k in range(1, K + 1) if method.barrier)
    assert max(passes, default=0) <= 6 * K * method.M * method.m
    assert len(passes) <= most


@pytest.mark.parametrize("method", [ADL(M=1), ADL1F1B(M=1), DSP(), BP(), ADL(M=1, window="aligned"), ADL(M=8)])
def test_the_loops_of_stages_are_all_that_a_period_needs_without_uneven_updates(method, monkeypatch):
    """The slowest loop, against the critical cycle of all events; with updates at every M-th batch it is a bound."""
    for K, seed, slow in itertools.product((1, 2, 3, 8), range(4), (0.1, 1, 20)):
        costs = drawn(K, seed)
        hops = {name: [slow * each for each in getattr(costs, name)] for name in ("up", "down")}
        costs = replace(costs, **hops, update=() if method.M > 1 else costs.update)
        loops = _loops(method, costs)
        assert loops.least == loops.most == period(method, costs)
        assert loops.least == pytest.approx(longest_period(_sequences(method, costs)) / method.M, rel=1e-12)


@pytest.mark.parametrize("method", [ADL(M=4), ADL1F1B(M=6), TwoBW(M=8), ADL(M=5, window="aligned"), BP(M=3)])
def test_the_loops_of_stages_bound_the_period(method):
    gaps, between = [], 0  # to the lower bound
    for K, seed, slow in itertools.product((1, 2, 3, 8), range(4), (0.1, 1, 20)):
        costs = drawn(K, seed)
        costs = replace(costs, **{name: [slow * each for each in getattr(costs, name)] for name in ("up", "down")})
        loops, seconds = _loops(method, costs), period(method, costs)
        assert loops.least <= seconds * (1 + 1e-12)
        assert seconds <= loops.most * (1 + 1e-12)
        between += loops.least < loops.most
        assert seconds == pytest.approx(longest_period(_sequences(method, costs)) / method.M, rel=1e-12)
        gaps.append(seconds / loops.least - 1)
    assert max(gaps) < 0.2
    assert between > 10


@pytest.mark.parametrize(("K", "M", "seed"), [(1, 4, 0), (3, 1, 0), (5, 3, 0), (6, 4, 1), (4, 3, 220), (9, 6, 127)])
def test_the_period_of_pipelined_back_propagation_is_that_of_a_long_timeline(K, M, seed):
    """With the last two, an event that the one before it delays comes after one that the last period delays."""
    draw = random.Random(seed)
    forward, backward = ([draw.uniform(least, 3 * least) for _ in range(K)] for least in (0.5, 1.0))
    up, down = ([draw.uniform(0, 0.05) for _ in range(K - 1)] for _ in range(2))
    method, costs = BP(M=M, pipelined=True), Costs(forward, backward, up=up, down=down, latency=0.005)
    spans = (span for span in timeline(method, 50 * M, costs) if span.k == 1)
    ends = {span.operation.t: span.end for span in spans if isinstance(span.operation, Backward)}
    mean = (ends[40 * M] - ends[20 * M]) / 20
    assert period(method, costs) == pytest.approx(mean / M, rel=1e-9)
    assert longest_period(_sequences(method, costs)) == pytest.approx(mean, rel=1e-9)


def test_programs_that_wait_for_each_other_are_refused():
    method = Method(name="stuck", lag=lambda k, K: k - 1)
    for answer in (lambda: timeline(method, 4, balanced(2)), lambda: period(method, balanced(2))):
        with pytest.raises(UserError, match="stuck with K=2: the programs of its stages wait for each other"):
            answer()


# ---- links that transfer one message at a time


def test_an_exclusive_link_transfers_micro_batches_one_after_the_other():
    slow = {"up": [5.0], "down": [5.0]}  # 1.25 per micro-batch
    assert period(GPipe(4), Costs([1.0] * 2, [2.0] * 2, **slow)) == pytest.approx(6.25)
    # forwards end at 0.25 .. 1, arrive at 1.5, 2.75, 4, 5.25; backwards end at 6 .. 7.5, arrive at 7.25, 8.5, 9.75, 11
    assert period(GPipe(4), Costs([1.0] * 2, [2.0] * 2, **slow, exclusive=True)) == pytest.approx(11.5)


def test_an_exclusive_link_that_takes_longer_than_any_stage_sets_the_pace_of_adl():
    up = {"up": [3.5], "down": [0.0]}
    assert period(ADL(M=1), Costs([1.0] * 2, [2.0] * 2, **up)) == pytest.approx((1 + 3.5 + 3 + 2) / 3)
    assert period(ADL(M=1), Costs([1.0] * 2, [2.0] * 2, **up, exclusive=True)) == pytest.approx(3.5)


def test_a_latency_is_of_every_message_and_micro_batches_share_a_transfer():
    whole = Costs([1.0] * 2, [2.0] * 2, up=[0.8], down=[0.8], latency=0.3)
    assert whole.message_seconds(1, 2, GPipe(4)) == pytest.approx(0.8 / 4 + 0.3)
    assert whole.transfer_seconds(2, 1, GPipe(4)) == pytest.approx(0.8 / 4)


def test_a_barrier_has_no_latency():
    assert period(DDG(), Costs([1.0], [2.0], latency=0.5)) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "method",
    [BP(M=2), ADL(M=1), ADL(M=4), ADL1F1B(M=2), DSP(), GPipe(4), GPipe(2)],
    ids=lambda m: f"{m.name}-{m.M}-{m.m}",
)
def test_the_period_with_exclusive_links_is_that_of_a_long_timeline(method):
    draw = random.Random(2)
    for K in (2, 3, 4):
        forward, backward = ([draw.uniform(0.5, 2) for _ in range(K)] for _ in range(2))
        up, down = ([draw.uniform(0, 4) for _ in range(K - 1)] for _ in range(2))
        costs = Costs(forward, backward, up=up, down=down, latency=draw.uniform(0, 2), exclusive=True)
        first, last = (Forward(t * method.m) for t in (60, 60 + 840))  # a multiple of all cycles
        begun = {
            s.operation: s.start for s in timeline(method, 910, costs) if s.k == 1 and s.operation in (first, last)
        }
        assert (begun[last] - begun[first]) / 840 == pytest.approx(period(method, costs))


@pytest.mark.parametrize("name", ["bp", "adl", "pipedream", "2bw", "adl-1f1b", "pipemare", "dsp", "dgl", "predsim"])
@pytest.mark.parametrize("M", [1, 2, 3, 7])
@pytest.mark.parametrize("window", ["count", "aligned"])
def test_lagged_events_are_those_of_the_programs(name, M, window):
    method = replace(DECLARED[name](), M=M, window=window)
    if method.forward == "before" and window == "aligned":
        return
    draw = random.Random(0).random
    for K in (1, 2, 5, 9):
        forward, backward, update, up, down = ([draw() for _ in range(K)] for _ in range(5))
        costs = Costs(forward, backward, update, up=up, down=down, latency=draw())
        check_events(_lagged_events(method, costs), method, costs)


@pytest.mark.parametrize("m", [2, 3, 8])
@pytest.mark.parametrize("recompute", [False, True])
def test_events_of_micro_batches_are_those_of_the_programs(m, recompute):
    method, draw = GPipe(m, recompute=recompute), random.Random(0).random
    for K in (1, 2, 5, 9):
        forward, backward, update, up, down = ([draw() for _ in range(K)] for _ in range(5))
        costs = Costs(forward, backward, update, up=up, down=down, latency=draw())
        check_events(_drained_events(method, costs), method, costs)


def check_events(found, method, costs) -> None:
    assert found is not None
    for one, other in zip(found, critical_cycle.EventArrays.of(_sequences(method, costs)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", DECLARED)
def test_a_period_is_longer_than_what_is_below_it(name):
    method = DECLARED[name]()
    for K in (1, 2, 6):
        costs = drawn(K, 3)
        seconds = period(method, costs)
        assert longer_than(method, costs, seconds * (1 - 1e-6))
        assert not longer_than(method, costs, seconds * (1 + 1e-6))
        assert longer_than(method, costs, 0.5 * seconds)
        assert not longer_than(method, costs, 2 * seconds)
