"""The recorded trace: what is read from it, how idle the stages were, and the plan that stands beside it."""

from __future__ import annotations

import json
from math import isclose

import pytest
import run_folders as made

from offbeat.errors import UserError
from offbeat.methods import named
from offbeat.observe import tracing
from offbeat.report.traces import KINDS, Interval, Trace, planned, planned_idle, read_trace
from offbeat.timeline import Costs, balanced, period


@pytest.fixture
def recorded(tmp_path) -> Trace:
    made.trace(tmp_path)
    return read_trace(json.loads((tmp_path / "trace.json").read_text()))


def test_a_trace_by_the_contract_is_read_in_seconds_a_stage_each(recorded):
    assert recorded.K == 3
    assert recorded.stages == [1, 2, 3]
    first = recorded.of(1, "forward")[0]
    assert (first.batch, first.start) == (0, 0.0)
    assert isclose(first.end, 0.0099)
    assert [one.batch for one in recorded.of(3, "backward")] == list(range(60))


def test_the_costs_of_the_clock_are_the_medians_of_the_trace(recorded):
    costs = recorded.costs(named("adl", M=2))
    assert all(isclose(cost, 0.0099) for cost in costs.forward)
    assert all(isclose(cost, 0.0199) for cost in costs.backward)
    assert all(isclose(cost, 0.001) for cost in costs.update)


def test_of_a_replayed_backward_the_forward_is_taken_off_again():
    method = named("dsp")
    took = {"forward": 1.0, "backward": 3.0}
    intervals = [Interval(k, kind, 0.0, seconds, 0) for k in (1, 2) for kind, seconds in took.items()]
    costs = Trace(2, intervals).costs(method)
    assert costs.backward == [2.0 if method.replays(k, 2) else 3.0 for k in (1, 2)]
    assert 2.0 in costs.backward


def test_idle_is_what_is_neither_computed_nor_sent_while_all_stages_were_recorded():
    intervals = [
        Interval(1, "forward", 0.0, 4.0),
        Interval(1, "wait", 4.0, 10.0),
        Interval(1, "backward", 10.0, 12.0),
        Interval(2, "forward", 2.0, 6.0),
        Interval(2, "send", 6.0, 7.0),
        Interval(2, "update", 6.5, 8.0),
        Interval(2, "backward", 9.0, 20.0),
    ]
    assert Trace(2, intervals).window() == (2.0, 12.0)
    assert Trace(2, intervals).idle() == [pytest.approx(0.6), pytest.approx(0.1)]


def test_a_stage_that_was_not_recorded_has_no_idle_share():
    assert Trace(2, [Interval(1, "forward", 0.0, 1.0)]).idle() == [0.0, None]


@pytest.mark.parametrize("method", ["adl", "ddg", "fr", "dsp", "gpipe", "bp", "adl-1f1b", "dgl"])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_the_plan_of_a_method_is_its_steady_state(method, K):
    made_method = named(method)
    costs = balanced(K)
    plan = planned(made_method, costs, turns=12)
    assert isclose(plan.length, 12 * period(made_method, costs), rel_tol=0.02)
    busy = [sum(one.end - one.start for one in plan.of(k)) / plan.length for k in range(1, K + 1)]
    assert planned_idle(plan) == pytest.approx([1 - share for share in busy], abs=1e-9)


def test_equal_stages_are_planned_never_idle_with_adl_and_mostly_idle_with_bp():
    assert planned_idle(planned(named("adl", M=2), balanced(4), turns=20)) == pytest.approx([0.0] * 4, abs=1e-9)
    assert planned_idle(planned(named("bp"), balanced(4), turns=20)) == pytest.approx([0.75] * 4, abs=0.02)


def test_a_plan_beside_a_trace_calls_its_batches_alike_and_updates_where_it_does(recorded):
    method = named("adl", M=2)
    cut = recorded.excerpt(6)
    first = cut.of(1, "forward")[0].batch
    plan = planned(method, recorded.costs(method), turns=6, length=cut.length, first=first)
    assert [one.batch for one in plan.of(1, "forward")][:5] == [one.batch for one in cut.of(1, "forward")][:5]
    assert [one.batch for one in plan.of(1, "backward")][:5] == [one.batch for one in cut.of(1, "backward")][:5]
    assert len(plan.of(1, "update")) == pytest.approx(len(cut.of(1, "update")), abs=1)


def test_the_stretch_that_is_shown_is_the_one_of_median_length():
    starts = [0.0, 1.0, 8.0, 10.0]  # turns of 1, 7 and 2
    cut = Trace(1, [Interval(1, "forward", start, start + 0.5, t) for t, start in enumerate(starts)]).excerpt(1)
    assert [(one.batch, one.start, one.end) for one in cut.intervals] == [(2, 0.0, 0.5)]


def test_a_trace_with_too_few_turns_is_shown_whole(recorded):
    assert len(recorded.excerpt(1000).intervals) == len(recorded.intervals)


def test_unequal_stages_are_planned_at_the_pace_of_the_slowest():
    plan = planned(named("adl", M=2), Costs([1.0, 2.0], [2.0, 4.0]), turns=20)
    assert planned_idle(plan) == pytest.approx([0.5, 0.0], abs=0.03)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([], "no list traceEvents"),
        ({"traceEvents": 3}, "no list traceEvents"),
        ({"traceEvents": []}, "no operations"),
        ({"traceEvents": [{"ph": "X", "cat": "forward", "ts": "soon", "dur": 1, "tid": 1}]}, "no place in time"),
        ({"traceEvents": [{"ph": "X", "cat": "forward", "ts": 1, "dur": -1, "tid": 1}]}, "no place in time"),
        ({"traceEvents": [{"ph": "X", "cat": "forward", "ts": 1, "dur": 1, "tid": None}]}, "no place in time"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_reason(content, reason):
    with pytest.raises(UserError, match=reason):
        read_trace(content)


def test_idle_shares_in_a_recording_are_used_only_if_complete(tmp_path):
    made.trace(tmp_path)
    content = json.loads((tmp_path / "trace.json").read_text())
    counted = read_trace(content).idle()
    for reported, idle in (([0.1, 0.2, 0.3], [0.1, 0.2, 0.3]), ([0.1, 0.2], counted), ([0.1, 0.2, "x"], counted)):
        content["otherData"]["idle"] = reported
        assert read_trace(content).idle() == idle


def test_the_report_has_the_span_kinds_of_the_recorder():
    assert KINDS == tracing.KINDS
