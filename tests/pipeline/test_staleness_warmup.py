"""The first updates by another method: the hand-over, checkpoints around it, and what is reported."""

from __future__ import annotations

import itertools
import json
import warnings
from functools import partial

import pytest
import torch
from cases import convolutions, images
from engine import Layer
from reference import DECAY, LR, MOMENTUM, data, mean_square, network
from selected import only
from torch import nn

import offbeat
from offbeat.core import state as stage_state
from offbeat.engines import MakeExecutor
from offbeat.engines.simulate import Simulate
from offbeat.engines.streams import Streams
from offbeat.errors import UserError
from offbeat.graphs.launch_queue import LaunchQueue
from offbeat.graphs.recorded_stage import RecordedStage
from offbeat.pipeline import state_trees


def sgd(parameters) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def chain(K: int, method: offbeat.Method | str = "adl", **options) -> offbeat.Pipeline:
    layers = [Layer(*theta) for theta in network(K)]
    return offbeat.Pipeline(layers, **{"method": method, "loss": mean_square, "optimizer": sgd, **options})


def pipeline(
    method: offbeat.Method, engine: str | Simulate = "simulate", *, dropout: bool = True, **options
) -> offbeat.Pipeline:
    """With BatchNorm, dropout (which is not recorded), momentum and a schedule: all that has to continue."""
    torch.manual_seed(0)
    model = convolutions(torch.float32)
    if not dropout:
        model[3], model[6][0] = nn.Identity(), nn.Identity()
    return offbeat.Pipeline(
        model,
        3,
        method=method,
        cuts=[1, 4],
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s)),
        engine={"streams": Streams(3, torch.device("cpu")), "simulate": Simulate(3)}.get(engine, engine),
        seed=3,
        **options,
    )


def train(pipe: offbeat.Pipeline, batches: list) -> list[float]:
    return [float(pipe.step(x, y)) for x, y in batches]


def bits(pipe: offbeat.Pipeline) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in pipe.drain().state_dict().items()}


def check_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# ---- what is computed


@pytest.mark.parametrize(
    "method",
    [
        offbeat.ADL(M=2),
        offbeat.ADL(M=2, weights="hybrid"),
        offbeat.ADL(M=2, weights="replay"),
        offbeat.ADL(M=2, window="aligned"),
        offbeat.ADL1F1B(M=2, corrector="lwp+sc"),
        offbeat.TwoBW(M=2),
        offbeat.PipeMare(),
    ],
    ids=lambda method: f"{method.name}-{method.weights}-{method.window}",
)
def test_the_switch_is_a_hand_over_of_a_saved_state(method):
    batches, end = images(20, torch.float32), 3 * method.M
    synchronous, late = pipeline(offbeat.BP(M=method.M)), pipeline(method)
    losses = train(synchronous, batches[:end])
    synchronous.drain()
    for k, saved in synchronous.stage_states().items():  # by hand what a run does that is resumed with another method
        stage, tree = late.stages[k], saved["stage"]
        stage_state.load_model(stage, tree["model"], tree["optimizer"], {})
        stage.resume_schedule(3)
        stage.network.random.state = list(tree["random"])
        stage.batch_weights.full_batch = tree["counters"]["full_batch"]
    late.start_at(end)
    losses += train(late, batches[end:])

    pipe = pipeline(method, staleness_warmup=3)
    assert train(pipe, batches) == losses
    check_same_bits(bits(pipe), bits(late))
    assert pipe.staleness == late.staleness
    assert [stage.update_index for stage in pipe.stages.values()] == [
        stage.update_index for stage in late.stages.values()
    ]


@pytest.mark.parametrize("engine", ["simulate", "streams"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_options_that_depend_on_the_delay_of_a_stage_change_with_the_method(engine, scheduled):
    """They were those of the first phase, without a delay, to the end."""
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda s: 1 / (1 + s))
    pipe = chain(
        3,
        offbeat.ADL(M=1),
        staleness_warmup=2,
        optimizer=lambda p, stage: torch.optim.SGD(p, lr=0.1 / (1 + stage.delay), momentum=0.5 if stage.delay else 0.9),
        scheduler=schedule if scheduled else None,
        engine=Streams(3, torch.device("cpu")) if engine == "streams" else engine,
    )

    def options(name: str) -> list[float]:
        return [stage.optimization.optimizer.param_groups[0][name] for stage in pipe.stages.values()]

    batches = data(6)
    train(pipe, batches[:1])
    assert options("momentum") == [0.9, 0.9, 0.9]
    assert options("lr") == pytest.approx([0.1 / (2 if scheduled else 1)] * 3)
    train(pipe, batches[1:2])  # the last one of the warm-up: what follows is the next method's
    assert options("momentum") == [0.5, 0.5, 0.9]
    assert options("lr") == pytest.approx([rate / (3 if scheduled else 1) for rate in (0.1 / 5, 0.1 / 3, 0.1)])
    train(pipe, batches[2:])
    pipe.drain()
    assert options("lr") == pytest.approx([rate / (7 if scheduled else 1) for rate in (0.1 / 5, 0.1 / 3, 0.1)])


def test_options_that_do_not_depend_on_the_stage_continue_as_they_were_set():
    pipe = chain(3, offbeat.ADL(M=1), staleness_warmup=2)
    batches = data(4)
    train(pipe, batches[:1])
    for stage in pipe.stages.values():
        stage.optimization.optimizer.param_groups[0]["lr"] = 0.03
    train(pipe, batches[1:])
    assert [stage.optimization.optimizer.param_groups[0]["lr"] for stage in pipe.stages.values()] == [0.03] * 3


@pytest.mark.parametrize("M", [1, 3, 8])
@pytest.mark.parametrize("window", ["count", "aligned"])
def test_pipelined_back_propagation_is_back_propagation_bit_for_bit(M, window):
    batches = images(20, torch.float32)
    plain = pipeline(offbeat.BP(M=M, window=window))
    losses = train(plain, batches[:7])
    plain.drain()  # within a window
    losses += train(plain, batches[7:])
    for recompute, shuffle in ((False, None), (False, 1), (True, 2)):
        method = offbeat.BP(M=M, window=window, pipelined=True, recompute=recompute)
        pipe = pipeline(method, Simulate(3, shuffle=shuffle))
        found = train(pipe, batches[:7])
        pipe.drain()
        assert found + train(pipe, batches[7:]) == losses
        check_same_bits(bits(pipe), bits(plain))
        assert pipe.staleness == plain.staleness


@pytest.mark.parametrize(("before", "after"), [*itertools.product(["plain", "pipelined", "streams"], repeat=2)])
def test_a_state_within_a_window_is_that_of_one_batch_after_the_other(before, after):
    batches = images(9, torch.float32)[:8]

    def make(kind: str) -> offbeat.Pipeline:
        method = offbeat.BP(M=4, pipelined=kind != "plain")
        return pipeline(method, "streams" if kind == "streams" else "simulate", dropout=False)

    whole = make("plain")
    losses, expected = train(whole, batches), bits(whole)
    for at in (1, 2, 3, 6):
        pipe, again = make(before), make(after)
        train(pipe, batches[:at])
        states = pipe.stage_states()
        assert not any(state["stage"]["in_flight"] or state["worker"]["messages"] for state in states.values())
        again.load_stage_states(states, batches=at)
        for each in (again, pipe):  # also the one that was saved continues
            assert train(each, batches[at:]) == losses[at:], at
            check_same_bits(bits(each), expected)


def test_only_pipelined_windows_have_several_batches_in_flight():
    pipe, batches = chain(4, offbeat.ADL1F1B(M=3), staleness_warmup=2), data(20)
    held = []
    for x, y in batches[:7]:
        pipe.step(x, y)
        held.append([len(stage.in_flight) for stage in pipe.stages.values()])
    assert held == [[1, 1, 1, 0], [2, 2, 1, 0], [0, 0, 0, 0]] * 2 + [[1, 1, 1, 0]]  # then K-k batches


class Recorded(Simulate):
    """Records its stages as processes on GPUs do."""

    def executor_maker(self, method: offbeat.Method) -> MakeExecutor:
        return partial(RecordedStage, launch_queue=LaunchQueue())


@pytest.mark.parametrize("M", [2, 3, 8])
def test_rings_have_slots_for_all_batches_of_a_pipelined_window(M):
    pipe, plain = (pipeline(offbeat.BP(M=M, pipelined=wanted), Recorded(3), dropout=False) for wanted in (True, False))
    batches = images(24, torch.float32)[:-1]
    assert train(pipe, batches) == train(plain, batches)
    assert [worker.executor.irregular for worker in pipe.workers] == [0, 0, 0]
    check_same_bits(bits(pipe), bits(plain))


def test_correctors_do_nothing_in_the_warmup():
    batches = images(7, torch.float32)[:6]
    method = offbeat.ADL(M=2, corrector="sc")
    pipe, synchronous = pipeline(method, staleness_warmup=3), pipeline(offbeat.BP(M=2))
    assert train(pipe, batches) == train(synchronous, batches)
    check_same_bits(bits(pipe), bits(synchronous))


@pytest.mark.parametrize(
    "settings", only(["", "corrector=t1:6"], ["", "corrector=t1:6", "weights=hybrid", "weights=replay"])
)
@pytest.mark.parametrize(
    ("engine", "into"), [("simulate", "simulate"), ("streams", "simulate"), ("streams", "streams")]
)
def test_a_checkpoint_around_the_switch_resumes_bit_for_bit(settings, engine, into):
    name, given = offbeat.methods.parsed(f"adl:M=2,staleness_warmup=bp@2+adl-1f1b@2,{settings}".rstrip(","))
    method = offbeat.methods.with_settings(name, given)
    batches, dropout = images(22, torch.float32), engine == "simulate"
    whole = pipeline(method, dropout=dropout)
    losses = train(whole, batches)
    expected = bits(whole)
    for at in (3, 4, 5, 8, 9, 16):
        saved, again = pipeline(method, engine, dropout=dropout), pipeline(method, into, dropout=dropout)
        saved.keep()
        train(saved, batches[:at])
        again.load_stage_states(saved.stage_states(), batches=at)
        assert train(again, batches[at:]) == losses[at:], at
        check_same_bits(bits(again), expected)


def test_what_is_kept_for_a_state_is_kept_after_loading_into_another_phase():
    method = offbeat.methods.with_staleness_warmup(offbeat.ADL(M=2, weights="hybrid"), "bp@2")
    batches = images(16, torch.float32)
    first, second = pipeline(method), pipeline(method)
    for each in (first, second):
        each.keep()  # the second one in its synchronous phase
    train(first, batches[:9])
    second.load_stage_states(first.stage_states(), batches=9)
    train(second, batches[9:])
    assert sorted(second.stage_states()) == sorted(first.stages)


# ---- updates with late gradients, which t1 counts


@pytest.mark.parametrize("engine", ["simulate", "streams"])
def test_late_updates_are_counted_from_the_end_of_the_synchronous_phases(engine):
    method = offbeat.methods.with_staleness_warmup(offbeat.ADL(M=1, corrector="t1:updates=4"), "bp@3+adl-1f1b@2")
    pipe = chain(3, method, engine=Streams(3, torch.device("cpu")) if engine == "streams" else engine)
    counted = []
    for x, y in data(8):
        pipe.step(x, y)
        counted.append([stage.late_updates for stage in pipe.stages.values()])
    # bp, adl-1f1b with a lag of 2, 1, 0 batches and a drain, adl with a lag of 4, 2, 0
    assert counted == [[0, 0, 0]] * 3 + [[0, 0, 1], [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 5]]


def test_a_state_without_late_updates_has_counted_all_as_earlier_versions_did():
    batches = data(9)
    for method, expected in ((offbeat.ADL(M=1, corrector="t1:20"), [5, 7, 9]), (offbeat.BP(), [0, 0, 0])):
        saved, pipe = chain(3, method), chain(3, method)
        saved.keep()
        train(saved, batches)
        states = saved.stage_states()
        for tree in states.values():
            del tree["stage"]["counters"]["late_updates"]
        pipe.load_stage_states(states, batches=9)
        assert [stage.late_updates for stage in pipe.stages.values()] == expected


def test_a_checkpoint_of_back_propagation_begins_t1_of_a_late_method(tmp_path):
    """As a warm-up by hand: T3 of PipeMare."""
    method, batches = offbeat.ADL(M=1, corrector="t1:updates=6"), data(16)
    first, late, whole = chain(3, offbeat.BP()), chain(3, method), chain(3, method, staleness_warmup=6)
    train(first, batches[:6])
    first.save(tmp_path)
    late.load(tmp_path)
    assert train(late, batches[6:]) == train(whole, batches)[6:]
    check_same_bits(bits(late), bits(whole))


def test_older_states_have_late_updates_if_any_gradient_was_late():
    def parts(*levels: list[list[int]]) -> list[dict]:
        return [{"counters": {"update_index": 200}, "staleness": each} for each in levels]

    assert state_trees.late_updates_after(parts([[0, 200]], [[0, 200]]), 200) == 0
    assert state_trees.late_updates_after(parts([[1, 150], [0, 50]], [[0, 200]]), 100) == 100


@pytest.mark.parametrize(("K", "M", "updates"), [(3, 1, [6, 6, 6]), (2, 1, [6, 6]), (2, 2, [3, 3])])
def test_t1_continues_in_a_changed_pipeline(K, M, updates, tmp_path):
    layers = [Layer(*theta) for theta in network(3)]

    def made(K: int, M: int, **options) -> offbeat.Pipeline:
        method = offbeat.ADL(M=M, corrector="t1:updates=20")
        given = {"loss": mean_square, "optimizer": sgd, "cuts": [1, 2][: K - 1], **options}
        return offbeat.Pipeline(nn.Sequential(*layers), K, method=method, **given)

    pipe = made(3, 1, staleness_warmup=6)
    train(pipe, data(12))
    pipe.save(tmp_path, drain=True)
    again = made(K, M)
    again.load(tmp_path)
    assert [stage.late_updates for stage in again.stages.values()] == updates


# ---- what is reported


def test_staleness_is_zero_in_the_warmup_and_the_formula_after_it():
    pipe, batches = chain(3, offbeat.ADL(M=2), staleness_warmup=4), data(40)
    train(pipe, batches[:7])
    assert [dict(stage) for stage in pipe.staleness] == [{0: 6}] * 3
    assert [report.staleness for report in pipe.reports()] == [{0: 6}] * 3
    train(pipe, batches[7:])
    assert [stage.mean for stage in pipe.staleness] == [2.0, 1.0, 0.0]
    reports = pipe.reports()
    assert [report.updates for report in reports] == [18, 19, 20]
    assert [report.samples for report in reports] == [3 * 33] * 3  # since the last report


def test_a_trace_begins_after_the_warmup(tmp_path):
    pipe = chain(3, offbeat.ADL(M=2), staleness_warmup=4)
    pipe.trace(4, tmp_path / "trace.json")
    train(pipe, data(40))
    pipe.drain()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    batches = [event["args"]["batch"] for event in events if "batch" in event.get("args", {})]
    assert batches
    assert min(batches) >= 8


def test_diagnosis_continues_through_the_switch():
    pipe, method = chain(3, offbeat.ADL(M=2), staleness_warmup=4), offbeat.ADL(M=2)
    pipe.diagnose(every=1)
    train(pipe, data(40))
    pipe.drain()
    lines = [line for report in pipe.reports() for line in report.diagnosis if line["stage"] == 1]
    assert [line["update"] for line in lines] == list(range(20))
    assert {line["lag"] for line in lines[:4]} == {0}
    assert lines[-1]["lag"] == method.staleness(1, 3)


# ---- bad input


@pytest.mark.parametrize(
    ("method", "given", "line"),
    [
        ("adl:M=2", -1, "staleness_warmup=-1: use a number of updates from 1 up"),
        ("adl:M=2", "bp@0", "staleness_warmup with 0 updates of bp: use an integer from 1 up"),
        ("adl:M=2", 2.5, "staleness_warmup=2.5: use a number of updates, text such as"),
        ("adl:M=2", "bp", "staleness_warmup='bp': use the number of updates of back-propagation, or methods"),
        ("adl:M=2", "gpipe@3", "staleness_warmup='gpipe@3': gpipe takes no M"),
        ("adl:M=2", "bp@3+adk@2", r"staleness_warmup='bp@3\+adk@2': unknown method 'adk': did you mean 'adl'"),
        ("adl:M=2", "auto@3", "staleness_warmup='auto@3': method auto is chosen for a model and a device"),
        ("adl:M=2", [(offbeat.BP(M=1), 3)], "staleness_warmup with bp M=1 before adl M=2: use the same M"),
        ("adl:M=1", [(offbeat.GPipe(), 3)], "staleness_warmup with gpipe: use methods in which whole batches pass"),
        ("adl:M=2", [3], r"staleness_warmup with 3: use pairs \(method, updates\)"),
        ("bp:M=2", 3, "staleness_warmup of bp, whose gradients are not late: leave it out"),
        ("dgl", 3, "staleness_warmup of dgl: use methods in which whole batches pass through"),
        ("adl:M=2,staleness_warmup=3", 3, "staleness_warmup=3 for a method that has one: give it once"),
        ("bp:staleness_warmup=3", None, "bp takes no staleness_warmup"),
    ],
)
def test_a_warmup_that_is_not_possible_is_refused_in_one_line(method, given, line):
    with pytest.raises(UserError, match=line) as caught:
        chain(3, method, staleness_warmup=given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("adl:M=2,corrector=sc", 500),
        ("adl:M=2", [(offbeat.BP(M=2), 200), (offbeat.ADL1F1B(M=2, corrector="sc"), 300)]),
    ],
)
def test_correctors_of_later_phases_that_cannot_work_are_refused_at_once(method, given):
    """It was refused at the switch, after all updates of the warm-up."""
    with pytest.raises(UserError, match=r"^corrector sc with optimizer torch.optim.RMSprop: use SGD, .*") as caught:
        chain(3, method, staleness_warmup=given, optimizer=torch.optim.RMSprop)
    assert "\n" not in str(caught.value)


def momentum_by_delay(parameters, stage, *, synchronous: float, late: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=LR, momentum=late if stage.delay else synchronous)


def test_correctors_are_checked_with_the_optimizer_of_their_phase():
    method = offbeat.TwoBW(M=2, corrector="sc")  # with late gradients in all stages
    good, bad = (partial(momentum_by_delay, synchronous=0.9 - late, late=late) for late in (0.9, 0.0))
    pipe = chain(2, method, staleness_warmup=2, optimizer=good)
    train(pipe, data(12))
    assert [stage.optimization.made[0]["momentum"] for stage in pipe.stages.values()] == [0.9, 0.9]
    with pytest.raises(UserError, match=r"^corrector sc with optimizer torch.optim.SGD with momentum=0"):
        chain(2, method, staleness_warmup=2, optimizer=bad)


def test_directions_are_kept_for_a_later_phase_in_all_replicas():
    phases = [(offbeat.BP(M=1), 2), (offbeat.ADL1F1B(M=1), 2)]
    method = offbeat.ADL(M=1, corrector="lwp")
    pipe = chain(3, method, staleness_warmup=phases, optimizer=offbeat.optim.Muon, replicas=2)
    for _ in range(5):
        groups = [worker.stage.optimization.optimizer.param_groups for worker in pipe._local.all_workers]
        kept = [{group["keep_direction"] for group in each} for each in groups]
        assert kept == [{True}, {True}, {False}] * 2  # the last stage is never late
        pipe.step(*(list(each) for each in zip(*data(2), strict=True)))


@pytest.mark.filterwarnings("always::offbeat.errors.ScheduleLength")
def test_fit_warns_of_a_warmup_of_the_whole_training():
    """The method never trained, without a warning."""
    batches = [(torch.ones(4, 2), torch.zeros(4, 1))] * 8
    for updates, warned in ((8, True), (7, False)):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        pipe = offbeat.Pipeline(
            model, K=2, method="adl", M=2, optimizer=sgd, loss=nn.functional.mse_loss, staleness_warmup=updates
        )
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            pipe.fit(batches, epochs=2)
        words = f"staleness_warmup={updates} with 8 updates in this fit: adl does not begin in it; use fewer updates"
        assert (words in [str(one.message) for one in found]) == warned
