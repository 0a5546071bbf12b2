"""Time laws: what the clock says of every declared method is what the papers' schedules give."""

from __future__ import annotations

import itertools

import pytest

from offbeat.methods import ADL, BP, DDG, DECLARED, DSP, FR, GPipe
from offbeat.ops import Backward, Barrier, Forward
from offbeat.timeline import Costs, balanced, period, speed_up, timeline

LAWS = {  # ideal speed-ups at K = 2, 4, 8, balanced, B = 2F
    "bp": (BP(), (1, 1, 1)),
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
