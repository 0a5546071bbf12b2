"""Whole stages timed: alone, all at once, and what becomes of it."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from fixed_times import few_laps
from torch import nn

from offbeat.methods import ADL, DDG
from offbeat.partitioning import batch_times, profile, solve, trace
from offbeat.partitioning import refine as refine_module
from offbeat.partitioning import timing as timing_module
from offbeat.partitioning.loopback import measure_links
from offbeat.partitioning.refine import refine, rescaled
from offbeat.partitioning.timing import (
    Load,
    Runner,
    StageTime,
    Stopwatch,
    TimingWorkers,
    WorkersFailed,
    one_by_one,
    shortest,
    whole_time,
)
from offbeat.studies.plan import LinkCost, Measured, _fewest, exposure, make_plan

pytestmark = pytest.mark.usefixtures("forked_children")


def layers(n: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(n)))


class Local:
    """Makes layers of a class that no other process can find."""

    @staticmethod
    def model() -> nn.Module:
        class Hidden(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x if x.sum() > 0 else -x)  # so it stays one unit, of this very class

        return nn.Sequential(Hidden(8, 8), Hidden(8, 8))


# ---- a stage as training runs it


@pytest.mark.parametrize(("lag", "M"), [(0, 1), (1, 1), (3, 2), (4, 4)])
def test_timing_a_stage_runs_batches_in_flight_and_windows_and_keeps_its_weights(lag, M):
    model = layers(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    runner = Runner(model, torch.randn(4, 8), first=False, lag=lag, M=M)
    runner.warm_up()
    assert len(runner.stage.in_flight) == lag
    found = runner.run(0.0)
    assert len(runner.stage.in_flight) == lag
    assert min(found.forward, found.backward, found.update) > 0
    assert runner.stage.update_index == runner.stage.figures.backwards // M
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_update_counts_for_its_batches():
    assert StageTime(1.0, 2.0, 4.0).batch(4) == 4.0


def test_a_twin_has_the_same_units_over_a_model_of_its_own():
    traced = trace(layers())
    twin = traced.twin()
    assert [unit.name for unit in twin.units] == [unit.name for unit in traced.units]
    assert twin.legal_cuts == traced.legal_cuts
    with torch.no_grad():
        next(twin.split([3])[0].parameters()).zero_()
    assert next(traced.model.parameters()).abs().sum() > 0


# ---- all at once


def test_timing_workers_time_all_stages_at_once_and_again_for_other_cuts():
    twin, x = trace(layers()).twin(), torch.randn(4, 8)
    workers = TimingWorkers(twin, x, 2)
    with workers:
        for cuts in ([[2], [3]], [[4]]):
            timings = workers.times(cuts, Load([2, 0], M=2, seconds=0.05, rounds=2))
            assert [[len(stages) for stages in rounds] for rounds in timings] == [[2, 2]] * len(cuts)
            times = [time for rounds in timings for stages in rounds for time in stages]
            assert all(min(time.forward, time.backward, time.update) > 0 for time in times)
        processes = list(workers.processes)
    assert all(process.poll() is not None for process in processes)


def test_a_model_that_cannot_be_sent_is_timed_here_with_a_note_of_the_reason(monkeypatch):
    monkeypatch.setattr(TimingWorkers, "possible", staticmethod(lambda twin, K: True))
    twin, x = trace(Local.model()).twin(), torch.randn(4, 8)
    with Stopwatch(twin, x, 2) as stopwatch:
        assert len(stopwatch([[1]], Load([2, 0]))[0][0]) == 2
        assert stopwatch.workers is None
    assert len(stopwatch.notes) == 1
    assert "one after the other: stage 1 cannot be sent to a process" in stopwatch.notes[0]


def test_a_process_that_dies_is_noticed():
    workers = TimingWorkers(trace(layers()).twin(), torch.randn(4, 8), 2)
    with workers:
        workers.processes[1].kill()
        workers.processes[1].wait()
        with pytest.raises(WorkersFailed, match="process of stage 2 has ended"):
            workers.times([[2]], Load([0, 0]))


def test_stages_are_timed_one_by_one_where_there_are_not_cores_enough(monkeypatch):
    monkeypatch.setattr(timing_module.os, "sched_getaffinity", lambda _: {0, 1, 2})
    twin = trace(layers()).twin()
    assert TimingWorkers.possible(twin, 3)
    assert not TimingWorkers.possible(twin, 4)
    assert not TimingWorkers.possible(twin, 1)
    torch.set_num_threads(2)
    assert not TimingWorkers.possible(twin, 2)
    torch.set_num_threads(1)
    with Stopwatch(twin, torch.randn(4, 8), 4) as stopwatch:
        assert stopwatch.workers is None
        assert "4 stages were timed one after the other" in stopwatch.notes[0]


@pytest.mark.slow
def test_a_script_without_a_main_guard_can_plan(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom torch import nn\nfrom offbeat import ADL\n"
        "from offbeat.studies.plan import Measured, make_plan\n"
        "print('once')\ntorch.set_num_threads(1)\nmodel = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))\n"
        "plan, _ = make_plan(Measured.of('own', model, torch.ones(2, 8), 2), ADL(), 2)\nprint(len(plan.cuts))\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout.split()) == (0, ["once", "1"]), ran.stderr[-2000:]


# ---- cuts that whole stages move


def test_units_are_scaled_to_what_their_stage_took():
    assert rescaled([1, 1, 2], [2], [6.0, 1.0]) == [3, 3, 1]
    assert rescaled([0, 0, 2], [2], [6.0, 1.0]) == [3, 3, 1]


class FixedTimes:
    """A meter with given seconds of a stage of the units from `start` to `end`; it keeps the cuts that it was given."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, []

    def __call__(self, several, load):
        self.asked.append([tuple(cuts) for cuts in several])
        found = []
        for cuts in several:
            stages = [self.seconds(start, end) for start, end in pairwise([0, *cuts, 10])]
            found.append([stages] * load.rounds)
        return found


def slow_start(start: int, end: int) -> StageTime:
    """The first two units take three times as long as they seem to, with an update of four batches."""
    slow = sum(place < 2 for place in range(start, end))
    return StageTime(3.0 * slow + (end - start - slow), 0.0, 4.0 * slow)


def test_a_stage_slower_than_its_units_gets_fewer_of_them():
    meter = FixedTimes(slow_start)
    found = refine([1.0] * 10, 2, meter, M=4)
    assert meter.asked[0] == [(5,)]
    assert found.solution.cuts == (2,)
    assert found.solution.times == pytest.approx((8.0, 8.0))
    assert sum(found.solution.costs[:2]) == pytest.approx(8.0)  # units are scaled to what their stages took
    assert found.solution.unit_bound == pytest.approx(4.0)
    assert found.before.balance == pytest.approx(16 / 22)
    assert found.after.balance == pytest.approx(1.0)
    assert 1 <= found.kept <= found.tried


def test_the_same_times_give_the_same_cuts_and_the_same_timings():
    meters = [FixedTimes(lambda start, end: StageTime(1.0 + 0.3 * (end - start), 0.1 * start)) for _ in range(2)]
    first, second = (refine([1.0] * 10, 3, meter) for meter in meters)
    assert first == second
    assert meters[0].asked == meters[1].asked


def test_cuts_that_are_slower_when_they_are_timed_are_not_kept():
    meter = FixedTimes(lambda start, end: StageTime({(0, 5): 6.0, (5, 10): 5.0}.get((start, end), 9.0), 0.0))
    found = refine([1.0] * 10, 2, meter)
    assert found.solution.cuts == (5,)
    assert (found.solution.times, found.kept) == ((6.0, 5.0), 0)
    assert found.tried == len({cuts for asked in meter.asked for cuts in asked}) - 1 > 0


def test_pinned_cuts_and_forbidden_positions_hold_when_cuts_move():
    meter = FixedTimes(slow_start)
    found = refine([1.0] * 10, 3, meter, pinned=[6], legal=[1, 2, 4, 6, 8])
    timed = {cuts for asked in meter.asked for cuts in asked}
    assert {(2, 6), (1, 6)} <= timed
    assert all(6 in cuts and 3 not in cuts for cuts in timed)
    assert (found.solution.cuts, found.kept) == ((1, 6), 1)


@pytest.mark.parametrize(("seconds", "timings"), [(1.0, 1), (35.0, 3), (1000.0, 6)])
def test_a_time_limit_leaves_time_for_the_last_comparison(monkeypatch, seconds, timings):
    """Each timing takes 10 s: another one is begun if it, and the comparison with the first cuts, end within it."""
    now = [0.0]
    monkeypatch.setattr(refine_module.time, "monotonic", lambda: now[0])
    times = FixedTimes(lambda start, end: StageTime(20.0 - 2 * end if start == 0 else 3.0 * end - start, 0.0))

    def meter(several, load):
        now[0] += 10.0
        return times(several, load)

    found = refine([1.0] * 10, 2, meter, seconds=seconds)
    assert len(times.asked) == timings
    assert found.solution.cuts in times.asked[-1]


def test_the_spread_of_the_rounds_is_in_the_balance():
    rounds = iter([[1.0, 1.0], [1.0, 2.0], [2.0, 1.0]])

    def meter(several, load):
        return [[[StageTime(time, 0.0) for time in next(rounds)] for _ in range(load.rounds)]]

    found = refine([1.0, 1.0], 2, meter)
    assert (found.after.balance, found.after.least, found.after.most) == (1.0, 0.75, 1.0)


# ---- what a method exposes, and how many stages it needs


def test_what_a_method_exposes_follows_from_its_clock():
    short, long = 0.1, 50.0
    assert exposure(ADL(), 4, 4.0, 8.0, [short]) is None  # a whole tick to arrive in
    assert exposure(ADL(), 1, 4.0, 8.0, [short]) is None
    waiting = exposure(DDG(barrier=False), 4, 4.0, 8.0, [short, 2 * short])
    assert waiting[0] > 0
    assert waiting[1] == pytest.approx(2 * waiting[0])
    assert exposure(ADL(), 4, 4.0, 8.0, [long])[0] > 0  # no tick is that long


def timed_profile(seconds: list[float]):
    found = profile(layers(len(seconds)), torch.ones(2, 8))
    units = [
        type(unit)(**{**vars(unit), "forward": time / 3, "backward": 2 * time / 3})
        for unit, time in zip(found.units, seconds)
    ]
    return type(found)(**{**vars(found), "units": units})


def fewest(seconds: list[float], cuts: tuple[int, ...]) -> int:
    known = timed_profile(seconds)
    edges = [0, *cuts, len(seconds)]
    taken = [StageTime(sum(seconds[a:b]) / 3, 2 * sum(seconds[a:b]) / 3) for a, b in pairwise(edges)]

    return _fewest(ADL(), known, LinkCost(), solve(seconds, len(taken), pinned=cuts), taken)


def test_fewer_stages_are_advised_exactly_where_one_unit_makes_the_others_wait():
    assert fewest([1.0] * 8, (2, 4, 6)) == 4
    assert fewest([8.0, 1.0, 1.0, 1.0], (1, 2, 3)) == 2
    assert fewest([1.0, 1.0, 8.0, 1.0], (1, 2, 3)) == 3


def test_bp_alone_takes_at_most_what_its_stages_take():
    model, x = layers(), torch.randn(4, 8)
    with few_laps():
        plan, costs = make_plan(Measured.of("own", model, x, 4), ADL(), 2)
    assert costs.alone <= sum(costs.forward) + sum(costs.backward) + sum(costs.update) + 1e-12
    assert plan.bp_ms == pytest.approx(1000 * costs.alone)
    assert whole_time(trace(model).twin(), x).batch() > 0
    assert len(one_by_one(trace(model).twin(), x)([[3]], Load([2, 0]))[0][0]) == 2


def test_other_work_during_one_round_of_timing_does_not_slow_a_stage(monkeypatch):
    runs = []

    def run(runner, seconds):
        runs.append(runner)
        return StageTime(10.0 if len(runs) == 1 else 1.0, 1.0)  # the first run of the first stage is disturbed

    monkeypatch.setattr(Runner, "run", run)
    (timings,) = one_by_one(trace(layers()).twin(), torch.randn(4, 8))([[3]], Load([1, 1]))
    assert [time.batch() for time in shortest(timings, 1)] == [2.0, 2.0]
    assert runs[0] is not runs[1]  # rounds over all stages


def test_a_stage_of_several_cuts_runs_once_per_round(monkeypatch):
    runs = []

    def run(runner, seconds):
        runs.append(runner)
        return StageTime(1.0, 1.0)

    monkeypatch.setattr(Runner, "run", run)
    meter = one_by_one(trace(layers()).twin(), torch.randn(4, 8))
    meter([[2, 4], [2, 5]], Load([1, 1, 1], rounds=2))
    assert len(runs) == 2 * 5
    before = set(runs)
    meter([[2, 5]], Load([1, 1, 1], rounds=1))
    assert set(runs[10:]) <= before  # not made and warmed up again


def test_links_between_two_processes_are_measured():
    found = measure_links()
    assert 0 < found.latency < 10
    assert found.bandwidth > 0
    assert found.work_per_message > 0
    assert found.work_per_byte >= 0


def test_the_first_run_of_a_batch_is_not_its_time_however_long_it_takes(monkeypatch):
    """A new process loads libraries in it. From a second on it was the only run, and method auto chose M by it."""
    now = [0.0]

    class SlowAtFirst(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += 0.02 if now[0] else 1.5
            return super().forward(x)

    monkeypatch.setattr(batch_times.time, "perf_counter", lambda: now[0])
    seconds = batch_times.batch_seconds(SlowAtFirst(2, 2), torch.ones(4, 2), device=torch.device("cpu"))
    assert seconds(4) == pytest.approx(0.02)


@pytest.mark.parametrize(("seconds", "rounds"), [(8.0, 1), (5.0, 2), (1.0, 3)])
def test_stages_that_take_long_are_timed_in_fewer_rounds(monkeypatch, seconds, rounds):
    """A round of three stages takes three times as long, and none begins after 20 seconds."""
    now, shares = [0.0], []

    def run(runner, least):
        now[0] += seconds
        shares.append(runner.share)
        return StageTime(seconds, seconds)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(timing_module.time, "monotonic", lambda: now[0])
    (timings,) = one_by_one(trace(layers()).twin(), torch.randn(4, 8))([[2, 4]], Load([1, 1, 1]))
    assert len(timings) == rounds
    assert shares == [pytest.approx(5 / 3)] * 3 * rounds
