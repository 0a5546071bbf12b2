"""Whoever interprets a program finds the same: clock, timeline, picture, plan, and the pipeline that really trains.

Every method x K x M, with one of two windows in turn (with the slow tests: with both, and K=5 too); the pipelines have
K linear stages of a few parameters.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import count

import pytest
import torch
from formulas import mean_staleness, staleness, versions_held
from torch import nn

import offbeat
from offbeat.clock import Event, ticks
from offbeat.engines.streams import Streams
from offbeat.interpreter import interpreted, steady_state, steps
from offbeat.method import Method
from offbeat.methods import METHODS, named
from offbeat.ops import Backward, Update
from offbeat.studies.plan import Kept
from offbeat.timeline import balanced, timeline

STAGES, ACCUMULATED, WINDOWS = range(1, 7), (1, 2, 3, 8), ("count", "aligned")
WIDTH, SAMPLES = 3, 4


def settings(name: str) -> list[dict[str, object]]:
    """What the method may be given of M and the window; weights other than its own for a few of them."""
    takes = inspect.signature(METHODS[name]).parameters
    made: list[dict[str, object]] = [{}]
    if "M" in takes:
        made = [{"M": M} for M in ACCUMULATED]
    if "window" in takes:
        made = [{**given, "window": window} for given in made for window in WINDOWS]
    if "weights" in takes:
        made += [{**made[0], "weights": weights} for weights in ("hybrid", "replay")]
    if "pipelined" in takes:
        made += [{**given, "pipelined": True} for given in made if "M" in given]
    return made


@dataclass(frozen=True)
class Run:
    """One method at one K, as all interpreters see it.

    measured   staleness of each stage, as the pipeline counted it
    held       most batches in flight and most versions of each stage, as the pipeline had them
    """

    method: Method
    K: int
    batches: int
    events: list[Event]
    measured: list[Counter[int]]
    held: list[tuple[int, int]]

    def __str__(self) -> str:
        return f"{self.method.name} K={self.K} M={self.method.M} {self.method.window} {self.method.weights}"

    @property
    def stages(self) -> range:
        return range(1, self.K + 1)

    def of(self, k: int) -> list[Event]:
        return [event for event in self.events if event.k == k]

    def counted(self, k: int) -> Counter[int]:
        """Levels of staleness by the clock, over whole windows of batches that came long after the stage was full."""
        late, levels, window = Counter[int](), list[int](), list[int]()
        for event in self.of(k):
            if isinstance(event.operation, Backward):
                window.append(event.operation.t // self.method.m)
                levels.append(event.staleness)
            elif isinstance(event.operation, Update):
                if window and min(window) >= self.fill and len(window) == self.method.M * self.method.m:
                    late.update(levels)
                levels, window = [], []
        return late

    @property
    def fill(self) -> int:
        return max(self.method.lag(1, self.K), self.method.M)


def in_turn(
    K: int, *, M: int = 1, window: str | None = None, weights: str | None = None, pipelined: bool = False
) -> bool:
    """Whether it is this window's turn: both occur with every K and with every M. K=5 has none."""
    if K == 5:
        return False
    return window is None or weights is not None or window == WINDOWS[(K + ACCUMULATED.index(M)) % 2]


@cache
def runs(name: str, windows: str) -> list[Run]:
    """The grid of one method; a pipeline is trained for each point of it."""
    found = []
    for given in settings(name):
        method = named(name, **given)
        for K in STAGES:
            if (method.limit is None or method.limit(K) is None) and (windows == "both" or in_turn(K, **given)):
                batches = 2 * method.lag(1, K) + 3 * method.M + (6 * K if method.order else 2)
                events = [event for tick in ticks(method, K, range(batches)) for event in tick]
                found.append(Run(method, K, batches, events, *trained(method, K, batches)))
    return found


def trained(method: Method, K: int, batches: int) -> tuple[list[Counter[int]], list[tuple[int, int]]]:
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES) % WIDTH
    pipe = offbeat.Pipeline(
        [nn.Linear(WIDTH, WIDTH) for _ in range(K)],
        method=method,
        loss=nn.functional.cross_entropy,
        sample=x,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        engine="simulate",
    )
    versions = [1] * K
    for _ in range(batches):
        pipe.step(x, y)
        versions = [max(most, stage.weights.versions()) for most, stage in zip(versions, pipe.stages.values())]
    pipe.drain()
    in_flight = [stage.figures.most_held for stage in pipe.stages.values()]
    return [Counter(stage) for stage in pipe.staleness], list(zip(in_flight, versions))


def by_steps(run: Run, k: int) -> Counter[int]:
    """Levels of staleness that count, by the steps of the stage."""
    late, levels = Counter[int](), list[int | None]()
    for step in itertools.chain(*run.method.steps(k, run.K, range(run.batches))):
        if isinstance(step.operation, Backward):
            levels.append(step.staleness if step.steady else None)
        elif isinstance(step.operation, Update):
            late.update(run.method.counted(levels))
            levels = []
    return late


def shares(levels: Counter[int]) -> dict[int, float]:
    return {level: count / levels.total() for level, count in sorted(levels.items())}


every_method = pytest.mark.parametrize(
    ("name", "windows"),
    [
        *((name, "in turn") for name in METHODS),
        *(
            pytest.param(name, "both", marks=pytest.mark.slow)
            for name in METHODS
            if "window" in inspect.signature(METHODS[name]).parameters
        ),
    ],
)


@every_method
def test_timeline_and_picture_have_the_operations_and_versions_of_the_clock(name, windows):
    for run in runs(name, windows):
        spans = timeline(run.method, run.batches, balanced(run.K))
        for k in run.stages:
            operations = [event.operation for event in run.of(k)]
            assert [span.operation for span in spans if span.k == k] == operations, f"{run}, stage {k}"
            newest = 0
            for event, span in zip(run.of(k), [span for span in spans if span.k == k], strict=True):
                version = event.version
                if isinstance(event.operation, Update):
                    newest = event.version
                elif isinstance(event.operation, Backward) and run.method.weights != "stash":
                    version = newest  # with current weights, whichever the forward used
                assert (span.operation, span.version) == (event.operation, version), f"{run}, stage {k}"


@every_method
def test_measured_staleness_is_that_of_the_clock_and_of_the_method(name, windows):
    for run in runs(name, windows):
        for k, measured in enumerate(run.measured, start=1):
            counted = run.counted(k)
            assert counted, f"{run}, stage {k}: no whole window"
            if run.method.m == 1:
                assert shares(measured) == shares(counted), f"{run}, stage {k}"
            mean = sum(level * count for level, count in counted.items()) / counted.total()
            assert mean == run.method.staleness(k, run.K), f"{run}, stage {k}"


@every_method
def test_steps_count_the_staleness_that_the_pipeline_measures(name, windows):
    for run in runs(name, windows):
        for k, measured in enumerate(run.measured, start=1):
            assert measured == by_steps(run, k), f"{run}, stage {k}"


@every_method
def test_plan_and_method_hold_the_batches_and_versions_that_the_pipeline_holds(name, windows):
    for run in runs(name, windows):
        planned = Kept.of(run.method, run.K)
        assert list(zip(planned.in_flight, planned.versions, strict=True)) == run.held, run
        declared = [(run.method.held(k, run.K), run.method.versions(k, run.K)) for k in run.stages]
        assert declared == run.held, run


@every_method
def test_the_plan_expects_the_staleness_that_the_pipeline_measures(name, windows):
    for run in runs(name, windows):
        for expected, measured in zip(Kept.of(run.method, run.K).staleness, run.measured, strict=True):
            assert expected == sum(level * count for level, count in measured.items()) / max(1, measured.total()), run


def test_a_method_declared_with_lists_is_interpreted_as_well():
    method = Method(name="mine", lag=lambda k, K: K - k, locks=[], correctors=[offbeat.SpikeCompensation()])
    assert [method.staleness(k, 3) for k in (1, 2, 3)] == [2, 1, 0]


@pytest.mark.parametrize("window", WINDOWS)
def test_the_formulas_of_the_theory_are_what_programs_do(window):
    for lag, M in itertools.product(range(13), range(1, 9)):
        method = Method(name="lagged", lag=lambda k, K, lag=lag: lag, M=M, window=window)
        assert method.staleness(1, 2) == mean_staleness(lag, M)
        assert method.versions(1, 2) == versions_held(lag, M)
        assert (method.held(1, 2), method.fill(2)) == (lag + 1, lag)
        assert [method.resting(1, 2, done) for done in range(20)] == [min(done, lag) for done in range(20)]
        done = itertools.chain(*method.steps(1, 2, range(lag + 5 * M)))
        late = {step.operation.t: step.staleness for step in done if isinstance(step.operation, Backward)}
        if window == "count":
            assert all(late[t] == staleness(lag, M, t % M) for t in late if t >= lag), (lag, M)


def test_a_recorded_stage_of_2bw_without_parameters_is_one_update_late_too():
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))]
    pipe = offbeat.Pipeline(
        stages,
        method=offbeat.TwoBW(M=4),
        loss=nn.functional.cross_entropy,
        engine=Streams(5, torch.device("cpu")),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    for _ in range(16):
        pipe.step(torch.randn(SAMPLES, WIDTH), torch.arange(SAMPLES) % WIDTH)
    pipe.drain()
    assert [dict(stage) for stage in pipe.staleness] == 5 * [{1: 12}]


def marked(method, K: int, t: int) -> int:
    """Pass a mark along by hand: stages in turn, an operation at a time, with a queue of messages to each."""
    queues: dict[int, list[str]] = {k: [] for k in range(2, K + 1)}
    programs = {k: steps(method, k, K, count(t)) for k in range(1, K + 1)}
    waiting: dict[int, list] = {k: [] for k in programs}
    begun, holds = dict.fromkeys(programs, -1), dict.fromkeys(programs, False)
    while True:
        for k, program in programs.items():
            while not waiting[k]:
                waiting[k] = list(next(program))
                begun[k] += 1
            step = waiting[k][0]
            if step.receives == k + 1:
                pass  # gradients carry no marks
            elif step.receives == k - 1 and k > 1:
                if queues[k][:1] == ["mark"]:
                    queues[k].pop(0)
                    holds[k] = True
                    if k < K:
                        queues[k + 1].append("mark")
                    if k == K:
                        return begun[K]
                    continue
                if not queues[k]:
                    continue
                queues[k].pop(0)
            elif step.receives == 0 and k == 1 and not holds[1]:
                holds[1] = True
                queues[2].append("mark")
            waiting[k].pop(0)
            if step.sends == k + 1:
                queues[k + 1].append("output")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("K", [2, 3, 5])
def test_a_mark_reaches_every_stage_when_the_interpreter_says(name, K):
    for t in (0, 1, 17, 400):
        assert named(name).reach(K, t) == marked(named(name), K, t)


@pytest.mark.parametrize("name", METHODS)
def test_the_steady_state_by_the_lag_alone_is_that_of_the_interpreted_program(name):
    for given in settings(name):
        method = named(name, **given)
        for K in (1, 2, 5, 9):
            if method.limit is None or method.limit(K) is None:
                for k in range(1, K + 1):
                    assert steady_state(method, k, K) == interpreted(method, k, K), (given, k, K)


def test_the_steady_state_of_hundreds_of_stages_interprets_no_program(monkeypatch):
    monkeypatch.setattr(Method, "program", None)
    for given in ("adl", {"M": 256, "window": "aligned"}), ("bp", {"M": 256, "pipelined": True}), ("gpipe", {"m": 256}):
        method = named(given[0], **given[1])
        held = {"adl": [511, 1], "bp": [256, 1], "gpipe": [256, 256]}[method.name]
        assert [steady_state(method, k, 256).held for k in (1, 256)] == held
    stages = [steady_state(named("adl", M=256), k, 256) for k in (1, 128, 256)]
    assert [(state.held, state.versions, state.staleness) for state in stages] == [
        (511, 3, 510 / 256),
        (257, 2, 1.0),
        (1, 1, 0.0),
    ]
    stages = [steady_state(named("2bw", M=256), k, 256) for k in (1, 256)]
    assert [(state.held, state.versions, state.staleness) for state in stages] == [(256, 2, 1.0), (1, 2, 1.0)]
