"""Callbacks of Pipeline.fit: what they are given, in one process and in several, and what the ready ones do."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import torch
from callback_cases import (
    EPOCHS,
    LENGTH,
    METHODS,
    Recorder,
    StopAt,
    averaged,
    checkpoints,
    data,
    decaying,
    go_on,
    hexed,
    interrupt,
    network,
    observed,
    pipeline,
    resumed,
    sgd,
)
from captured import capture
from preloaded import PYTHON
from rich.console import Console
from selected import only
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offbeat
from offbeat import checkpoint
from offbeat.callbacks import (
    EMA,
    BestModel,
    CheckpointEvery,
    CSVLogger,
    EarlyStopping,
    LearningRateMonitor,
    ProgressBar,
    TensorBoardLogger,
    WandbLogger,
)
from offbeat.checkpoint import CheckpointFailed
from offbeat.engines.streams import Streams
from offbeat.errors import UserError

HERE = Path(__file__).parent.parent


def found_by(size: int, out: Path) -> list:
    """What each of several processes found."""
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    done = subprocess.run(
        [*command, str(HERE / "callback_cases.py"), str(out)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> list[dict]:
    """What three processes found; they are started once."""
    folder = tmp_path_factory.mktemp("callbacks")
    interrupt(folder / "one", 24)
    return [{**found, "folder": folder} for found in found_by(3, folder)]


# ---- in several processes


@pytest.mark.parametrize("name", METHODS)
def test_every_process_gets_what_the_simulator_gets(name, processes, tmp_path):
    expected = observed(name, METHODS[name], tmp_path)
    assert expected["unchanged"]
    assert list(expected["losses"]) == [str(batch) for batch in range(EPOCHS * LENGTH)]
    for found in processes:
        assert found[name] == expected


def test_a_stop_from_any_process_ends_all_after_the_same_batch(processes):
    for stops in ("stop 0", "stop 1", "stop 2"):
        ends = [found[stops] for found in processes]
        assert len({end["batches"] for end in ends}) == 1
        assert 11 <= ends[0]["batches"] <= 25, "late by the few batches that the request needs"
        assert len({json.dumps(end["updates"]) for end in ends}) == 1
        assert {end["last loss"] for end in ends} == {ends[0]["batches"] - 1}
        plain = pipeline()
        batches = (data() * 50)[: ends[0]["batches"]]
        plain.fit(batches)
        plain.fit(data(2))
        assert [end["weights"] for end in ends] == [hexed(plain.model.state_dict())] * 3


def test_a_stop_from_any_replica_ends_all_after_the_same_batch(tmp_path):
    for ends in zip(*found_by(4, tmp_path), strict=True):
        assert len({end["batches"] for end in ends}) == 1
        assert 13 <= ends[0]["batches"] <= 30
        assert len({json.dumps(end["weights"]) for end in ends}) == 1
        assert ends[0]["losses"] == ends[1]["losses"] != ends[2]["losses"] == ends[3]["losses"]
        assert list(ends[3]["losses"]) == [str(batch) for batch in range(ends[0]["batches"] - 2)]


def test_a_stop_after_an_evaluation_ends_at_the_epoch(processes):
    assert [found["stop at an epoch"]["batches"] for found in processes] == [14, 14, 14]
    assert [found["early"] for found in processes] == [21, 21, 21]


def test_what_communicates_in_one_process_alone_is_refused_in_all(processes):
    for found in processes:
        callbacks, evaluate, epochs, drain = found["refused"]
        assert "give the same ones to all processes" in callbacks
        assert "stage 2 EMA" in callbacks
        assert "give a function to all processes" in evaluate
        there = "but in the process of stage 2"
        assert epochs == f"fit() with epochs=1, {there} 2: give the same to all processes"
        assert drain == f"fit() with drain=True, {there} False: give the same to all processes"


def test_checkpoints_continue_with_the_same_bits(processes, tmp_path):
    for found in (checkpoints(tmp_path), *(each["checkpoints"] for each in processes)):
        assert found["adl"] == {"began": 20, "same": True, "batches": 21}
        assert found["hybrid"] == {"began": 18, "same": True, "batches": 21}
        assert found["minutes"]["began"] > 6
        assert found["minutes"] == {"began": found["minutes"]["began"], "same": True, "batches": 21}


def test_the_reason_of_a_failure_is_that_of_its_own_pipeline(processes):
    """Pipelines of the same processes have failed before, for other reasons."""
    told = "stage 2 failed: ValueError: mine"
    assert [found["lost"] for found in processes] == [told, "mine", told]


def plain(found: dict) -> dict:
    return json.loads(json.dumps(found))


def test_callbacks_of_a_resumed_fit_are_those_of_an_uninterrupted_one(tmp_path):
    found = resumed(tmp_path)
    assert found["whole"]["batches"] == 35, "three evaluations after the best, of the second epoch"
    assert found["whole"]["counter"][0] == 35
    for name in ("at 8", "at 17", "at 30"):
        assert found[name] == found["whole"], name


def test_callbacks_of_processes_resume_in_as_many_and_in_one(processes, tmp_path):
    whole = plain(go_on(tmp_path, load=False))
    history = whole.pop("history")
    names = whole.pop("names")
    for rank, process in enumerate(processes):
        for name in ("whole", "at 8", "at 17", "at 30", "one"):
            found = dict(process["resumed"][name])
            assert found.pop("history") == {str(rank + 1): history[str(rank + 1)]}
            assert set(found.pop("names")[0]) < set(names[0])
            assert found == whole, name
    several = plain(go_on(processes[0]["folder"] / "several"))
    assert several.pop("history") == history
    assert several.pop("names") == names
    assert several == whole


@pytest.mark.parametrize("K", [2, 4])
def test_averages_continue_at_another_k(K, tmp_path):
    first, ema = pipeline(), EMA(0.9)
    first.fit(data(), 2, callbacks=[ema])
    first.save(tmp_path)
    expected = {name: tensor.clone() for name, tensor in ema.weights.items()}

    class Average:
        """A moving average, written out."""

        def on_update(self, step):
            for k in step.updated:
                for name, tensor in step.pipe.stages[k].parameters.items():
                    expected[name] = torch.lerp(expected[name], tensor.detach(), 1 - 0.9)

    second, again = pipeline(K=K), EMA(0.9)
    second.load(tmp_path)
    second.fit(data(), 3, callbacks=[Average(), again], resume=True)
    assert hexed(again.weights) == hexed(expected)


def test_a_copy_of_a_checkpoint_has_the_states_of_callbacks(tmp_path):
    interrupt(tmp_path, 8)
    pipe = pipeline(sample=data()[0][0], scheduler=decaying)
    pipe.load(tmp_path)
    pipe.save(tmp_path / "copy")
    first, second = (checkpoint.newest(folder)[0].part("callbacks-01") for folder in (tmp_path, tmp_path / "copy"))
    assert hexed(first["callbacks"]["EMA"]["weights"]) == hexed(second["callbacks"]["EMA"]["weights"])
    assert first["callbacks"].keys() == second["callbacks"].keys()


def test_a_callback_without_a_saved_state_starts_anew_with_a_warning(tmp_path):
    pipe = pipeline()
    pipe.fit(data(), 1, callbacks=[EMA(0.9), Recorder()])
    pipe.save(tmp_path)
    again, ema, second = pipeline(), EMA(0.9), EMA(0.8)
    again.load(tmp_path)
    with pytest.warns(offbeat.NotRestored, match="no state of callback EMA 2, which starts anew"):
        again.fit(data(), 2, callbacks=[ema, Recorder(), second], resume=True)
    without = pipeline()
    without.fit(data(), 1)
    without.save(tmp_path / "without")
    later = pipeline()
    later.load(tmp_path / "without")
    with pytest.warns(offbeat.NotRestored, match="no state of callback EMA, which starts anew"):
        later.fit(data(), 2, callbacks=[EMA()], resume=True)
    fresh = pipeline()
    fresh.load(tmp_path)
    fresh.fit(data(), 2, callbacks=[EMA(0.9)])  # without resume, callbacks are new, as is the fit
    assert fresh.batches == 3 * LENGTH


def test_a_state_that_cannot_be_saved_or_loaded_is_one_line(tmp_path):
    class Odd(Recorder):
        state: object = object()

        def state_dict(self):
            if self.state is None:
                raise ValueError("not now")
            return {"state": self.state}

        def load_state_dict(self, state):
            raise KeyError("other")

    odd, pipe = Odd(), pipeline()
    pipe.fit(data(), callbacks=[odd])
    with pytest.raises(CheckpointFailed, match=r"the state of callback Odd .*: a object at state cannot be stored"):
        pipe.save(tmp_path)
    odd.state = None
    with pytest.raises(CheckpointFailed, match=r"state_dict\(\) of callback Odd raised ValueError: not now"):
        pipe.save(tmp_path)
    odd.state = 1
    pipe.save(tmp_path)
    again = pipeline()
    again.load(tmp_path)
    with pytest.raises(UserError, match=r"callback Odd cannot load its state \(KeyError: 'other'\)"):
        again.fit(data(), 2, callbacks=[Odd()], resume=True)


def test_a_log_of_another_training_is_not_cut_off(tmp_path):
    interrupt(tmp_path, 8)
    (tmp_path / "log.csv").write_text("batch,name,value\n" + "9,other,1.0\n" * 100)
    go_on(tmp_path)
    assert (tmp_path / "log.csv").read_text().count("other") == 100


def test_tensorboard_has_each_batch_once_after_resuming(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for load in (False, True):
        pipe = pipeline()
        callbacks = [TensorBoardLogger(tmp_path / "events"), CheckpointEvery(tmp_path, batches=5)]
        if load:
            pipe.load(tmp_path)
        pipe.fit(data(), 2, callbacks=callbacks if load else [*callbacks, StopAt(8)], resume=load)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(14))


def test_the_average_is_of_the_model_and_not_of_heads():
    pipe, ema = pipeline("dgl", M=None), EMA(0.9)
    pipe.fit(data(), callbacks=[ema])
    assert sorted(ema.weights) == sorted(network().state_dict())


def test_a_checkpoint_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    pipe = pipeline()
    with pytest.warns(UserWarning, match="no checkpoint after batch 4"):
        pipe.fit(data(), callbacks=[CheckpointEvery(tmp_path / "file", batches=5)])
    assert pipe.batches == LENGTH
    with pytest.raises(UserError, match=r"batches=2 with weights='hybrid', .* use batches=6 or more"):
        pipeline(offbeat.ADL(weights="hybrid"), M=None).fit(data(), callbacks=[CheckpointEvery(tmp_path, batches=2)])
    with pytest.raises(UserError, match="batches=None and minutes=None: give one of them"):
        CheckpointEvery(tmp_path)


# ---- what callbacks are given


def test_steps_have_batch_epoch_loss_rate_speed_and_staleness():
    steps, pipe = [], pipeline()

    class Keep:
        def on_step(self, step):
            steps.append((step.batch, step.epoch, step.loss, step.lr, step.samples_per_second, step.staleness))

    keep = Keep()
    losses, plain = [], pipeline()
    for x, y in data() * 2:
        losses.append(float(plain.step(x, y)))
    pipe.fit(data(), 2, callbacks=[keep])
    assert [step[:3] for step in steps] == [(t, t // LENGTH, loss) for t, loss in enumerate(losses)]
    assert {step[3] for step in steps} == {0.1}
    assert steps[0][4] is None
    assert steps[1][4] > 0
    assert steps[-1][5] == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("method", [offbeat.ADL(M=2), offbeat.BP(M=4)])
@pytest.mark.parametrize("clip_over", ["stage", "model"])
def test_work_that_is_queued_gives_callbacks_the_same(monkeypatch, method, clip_over):
    """Losses of queued work are read several at a time, and averages have every update."""
    capture(monkeypatch)
    found = []
    for engine in ("simulate", Streams(3, torch.device("cpu"))):
        recorder, ema = Recorder(), EMA(0.9)
        pipe = pipeline(
            method,
            M=None,
            engine=engine,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
            clip_norm=0.5,
            clip_over=clip_over,
        )
        pipe.fit(data(), 6, callbacks=[recorder, ema])
        late = max(recorder.late)
        found.append((recorder.found(), hexed(ema.weights), hexed(pipe.model.state_dict())))
    assert pipe.engine.defers
    assert late == 15
    assert found[0] == found[1]


def test_one_process_stops_after_the_batch_that_requests_it():
    pipe, recorder = pipeline(), Recorder()
    pipe.fit(data(), 5, callbacks=[recorder, StopAt(9)])
    assert pipe.batches == 10
    assert recorder.events == ["epoch 0 after batch 6"]
    assert not any(stage.in_flight for stage in pipe.stages.values())
    pipe.fit(data(3))
    assert pipe.batches == 13


@pytest.mark.parametrize("R", [1, 2])
def test_micro_batches_and_replicas_have_steps_of_their_own(R):
    pipe, recorder = pipeline("adl", M=2, batch=4 * R, replicas=R), Recorder()
    pipe.fit(data(), callbacks=[recorder])
    assert len(recorder.steps) == len(recorder.losses) == 2 * (LENGTH // R)


@pytest.mark.parametrize("name", [name for name in offbeat.methods.METHODS if name not in ("asgd", "dc-asgd")])
def test_updates_of_the_drain_are_observed(name):
    counts: dict[int, int] = {}

    class Count:
        def on_update(self, step):
            for k in step.updated:
                counts[k] = counts.get(k, 0) + 1

    pipe = pipeline(name, K=2, M=None)
    pipe.fit(data(9), callbacks=[Count()])
    most = pipe.updates(9)
    assert [stage.update_index for stage in pipe.stages.values()] == [most] * 2
    if pipe.method.order is None and pipe.method.window == "count":
        assert counts == {1: most, 2: most}
    plain = pipeline(name, K=2, M=None)
    plain.fit(data(9))
    assert hexed(plain.model.state_dict()) == hexed(pipe.model.state_dict())


def test_a_callback_is_an_object_with_known_methods():
    class Misspelled:
        def on_stpe(self, step): ...

    for given, text in (
        ([object()], "callback object has no method that fit calls: define one of on_step"),
        ([Misspelled()], "unknown method of callback Misspelled 'on_stpe': did you mean 'on_step'?"),
        ([EMA], "callback EMA is a class: give an object"),
        (EMA(), "callbacks is of type EMA: give a list"),
        ([EMA()] * 2, "callback EMA is given twice: give each object once"),
    ):
        with pytest.raises(UserError) as refused:
            pipeline().fit(data(), callbacks=given)
        assert text in str(refused.value)


def test_a_file_that_cannot_be_written_is_one_line_at_the_first_batch(tmp_path):
    (tmp_path / "file").write_text("")
    for name, callback in {"log.csv": CSVLogger, "best.pt": lambda path: BestModel(path=path)}.items():
        pipe = pipeline()
        with pytest.raises(UserError, match=rf"cannot write .*{name} \(.+\): give the name of a file"):
            pipe.fit(data(), callbacks=[callback(tmp_path / "file" / name)], evaluate=data())
        assert pipe.batches == 1
    for make in (CSVLogger, TensorBoardLogger, lambda path: CheckpointEvery(path, batches=1)):
        with pytest.raises(UserError, match="path=3: give a name"):
            make(3)


def test_an_error_in_a_callback_ends_training_and_closes_the_others(tmp_path):
    class Fails:
        def on_step(self, step):
            raise RuntimeError("no")

    log, pipe = CSVLogger(tmp_path / "log.csv"), pipeline()
    with pytest.raises(RuntimeError, match="no"):
        pipe.fit(data(), callbacks=[log, Fails()])
    assert log.file is None
    with pytest.raises(UserError, match="this pipeline has stopped"):
        pipe.fit(data())


# ---- evaluation, early stopping, best model


def test_evaluations_happen_every_so_many_epochs():
    pipe, recorder = pipeline(), Recorder()
    pipe.fit(data(), 4, callbacks=[recorder], evaluate=data(), evaluate_every=2)
    assert [event.split(" ", 1)[1] for event in recorder.events if not event.startswith("epoch")] == [
        "after batch 13",
        "after batch 27",
    ]


def test_a_function_may_evaluate():
    pipe, seen = pipeline(), []

    class See:
        def on_evaluate(self, step, result):
            seen.append(result)

    pipe.fit(data(), 2, callbacks=[See()], evaluate=lambda: {"score": float(pipe.batches)})
    assert seen == [{"score": 7.0}, {"score": 14.0}]
    with pytest.raises(UserError, match=r"evaluate\(\) returned a value of type float: return a dict"):
        pipeline().fit(data(), evaluate=lambda: 1.0)


def scores(*values: float):
    return iter({"score": value} for value in values).__next__


def test_early_stopping_waits_for_its_patience():
    pipe = pipeline()
    stopping = EarlyStopping("score", patience=2, mode="max", min_delta=0.5)
    pipe.fit(data(), 9, callbacks=[stopping], evaluate=scores(1.0, 1.4, 2.0, 2.1, float("nan"), 9.0))
    assert (pipe.batches, stopping.best.value, stopping.best.batch) == (35, 2.0, 20)
    with pytest.raises(UserError, match="monitor='acc': the evaluation has no such number, use one of score"):
        pipeline().fit(data(), callbacks=[EarlyStopping("acc")], evaluate=scores(1.0))


@pytest.mark.parametrize("callback", [EarlyStopping(), BestModel()])
def test_what_needs_evaluations_is_refused_without_them(callback):
    expected = f"callback {type(callback).__name__} without evaluations: give fit"
    with pytest.raises(UserError, match=expected):
        pipeline().fit(data(), callbacks=[callback])


def test_checkpoints_by_minutes_begin_again_with_another_pipeline(tmp_path):
    every = CheckpointEvery(tmp_path, minutes=1e-9)
    pipeline().fit(data(1), callbacks=[every])  # ends before the checkpoint
    pipeline().fit(data(), 3, callbacks=[every])
    assert list((tmp_path / "checkpoints").iterdir())


def test_the_best_model_has_the_weights_of_the_best_evaluation(tmp_path):
    pipe, states, path = pipeline(), [], tmp_path / "best.pt"

    class Keep:
        def on_evaluate(self, step, result):
            states.append(hexed(step.pipe.gather().state_dict()))

    best, written = BestModel("score"), BestModel("score", path=path)
    pipe.fit(data(), 3, callbacks=[Keep(), best, written], evaluate=scores(2.0, 1.0, 3.0))
    assert hexed(best.weights) == hexed(torch.load(path)) == states[1] != states[2]
    assert [file.name for file in tmp_path.iterdir()] == ["best.pt"]


# ---- the average of the weights


def test_the_average_of_bp_is_that_of_a_plain_loop():
    model = network()
    optimizer, average = sgd(model.parameters()), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for x, y in data():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    pipe, ema = pipeline("bp", M=1), EMA(0.9)
    pipe.fit(data(), callbacks=[ema])
    assert hexed(pipe.model.state_dict()) == hexed(model.state_dict())
    assert averaged(pipe, ema)["average"] == hexed(average.module.state_dict())


@pytest.mark.parametrize("weights", ["stash", "hybrid"])
def test_the_average_of_late_updates_has_every_update_of_every_stage(weights, monkeypatch):
    seen: dict[int, list[dict]] = {1: [], 2: [], 3: []}
    update = offbeat.core.stage.Stage.update

    def observed_update(stage, over):
        filled = stage.window.filled()
        update(stage, over)
        if filled:
            seen[stage.k].append({name: p.detach().clone() for name, p in stage.parameters.items()})

    monkeypatch.setattr(offbeat.core.stage.Stage, "update", observed_update)
    pipe, ema = pipeline(offbeat.ADL(M=1, weights=weights), M=None, staleness_warmup=2), EMA(0.8)
    pipe.fit(data(), callbacks=[ema])
    for states in seen.values():
        assert len(states) == LENGTH
        expected = states[0]
        for state in states[1:]:
            expected = {name: torch.lerp(expected[name], state[name], 1 - 0.8) for name in state}
        assert hexed({name: ema.weights[name] for name in expected}) == hexed(expected)


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_evaluating_the_average_does_not_change_training(weights):
    method = offbeat.ADL(M=2, weights=weights)
    pipe, ema, results = pipeline(method, M=None), EMA(0.5), []

    def evaluate():
        with ema.averaged(pipe):
            results.append(pipe.evaluate(data())["loss"])
        return {"loss": results[-1]}

    pipe.fit(data(), 3, callbacks=[ema], evaluate=evaluate)
    plain = pipeline(method, M=None)
    plain.fit(data(), 3)
    assert hexed(pipe.model.state_dict()) == hexed(plain.model.state_dict())
    other = network()
    pipe.gather()
    with ema.averaged(pipe):
        other.load_state_dict(pipe.model.state_dict())
    with torch.no_grad():
        losses = [float(nn.functional.cross_entropy(other(x), y)) for x, y in data()]
    with ema.averaged(pipe):
        assert pipe.evaluate(data())["loss"] == pytest.approx(sum(losses) / LENGTH)


def test_an_average_continues_from_its_state():
    whole, first, second = EMA(0.9), EMA(0.9), EMA(0.5)
    pipe = pipeline()
    pipe.fit(data(), 1, callbacks=[whole, first], drain=False)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    pipe.fit(data(), 1, callbacks=[whole, second])
    assert hexed(whole.weights) == hexed(second.weights)
    with pytest.raises(UserError, match="no averages"), EMA().averaged(pipe):
        pass


# ---- loggers, progress, learning rates


def test_the_csv_file_has_every_loss_with_its_batch(tmp_path):
    path, recorder = tmp_path / "new" / "log.csv", Recorder()
    pipe = pipeline()
    pipe.fit(data(), 2, callbacks=[recorder, CSVLogger(path)], evaluate=data())
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert rows[0] == ["batch", "name", "value"]
    assert {int(batch): float(value) for batch, name, value in rows if name == "train/loss"} == recorder.losses
    assert [batch for batch, name, _ in rows if name == "evaluate/loss"] == ["6", "13"]
    assert {name for _, name, _ in rows[1:]} >= {"lr", "samples_per_second", "epoch"}
    pipe.fit(data(1), callbacks=[CSVLogger(path)])
    assert path.read_text().count("batch,name,value") == 1


def test_tensorboard_gets_the_losses(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = Recorder()
    pipeline().fit(data(), callbacks=[recorder, TensorBoardLogger(tmp_path, every=2)])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {event.step: event.value for event in events.Scalars("train/loss")}
    assert found == pytest.approx({batch: loss for batch, loss in recorder.losses.items() if batch % 2 == 0})


def test_a_missing_tensorboard_is_a_warning_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.warns(UserWarning, match=r"TensorBoardLogger needs .* run `pip install 'offbeat\[tensorboard\]'`"):
        logger = TensorBoardLogger(tmp_path)
    pipeline().fit(data(), callbacks=[logger])
    assert not list(tmp_path.iterdir())


def test_training_continues_without_weights_and_biases(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    missing = "WandbLogger needs the package wandb, which is not installed: run `pip install wandb`"
    with pytest.warns(UserWarning, match=missing):
        logger = WandbLogger(project="digits")
    pipe = pipeline()
    pipe.fit(data(), callbacks=[logger])
    assert pipe.batches == LENGTH


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_bar_shows_epoch_loss_and_evaluations(terminal):
    text = StringIO()
    console = Console(file=text, force_terminal=terminal, width=100)
    pipeline().fit(data(), 2, callbacks=[ProgressBar(console=console)], evaluate=data())
    lines = text.getvalue()
    assert "epoch 1/2  train loss" in lines
    assert "epoch 2/2  train loss" in lines
    assert ("samples/s" in lines) == terminal


def test_the_monitor_has_the_rate_of_every_update():
    def halving(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    pipe, monitor = pipeline(scheduler=halving), LearningRateMonitor()
    pipe.fit(data(8), callbacks=[monitor])
    expected = [(1, [0.1]), (2, [0.05]), (3, [0.05]), (4, [0.025])]
    assert monitor.history == {1: expected, 2: expected, 3: expected}


# ---- schedules


@pytest.mark.parametrize("name", [name for name in offbeat.methods.METHODS if name not in ("asgd", "dc-asgd")])
@pytest.mark.parametrize("batches", only([40], [1, 3, 40]))
def test_the_number_of_updates_is_known_before_training(name, batches):
    pipe = pipeline(name, K=2, M=None, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000))
    expected = pipe.updates(batches)
    pipe.fit(data(batches))
    for stage in pipe.stages.values():
        assert stage.update_index == stage.optimization.scheduler.last_epoch == expected


def test_the_number_of_updates_counts_warm_ups_and_micro_batches():
    assert pipeline(M=4, staleness_warmup=3).updates(14) == 4
    assert pipeline(M=4).updates(1_000_000_001) == 250_000_001
    assert pipeline(M=2, batch=4).updates(5) == 5
    with pytest.raises(UserError, match='method="auto" before the first batch'):
        pipeline("auto", M=None, batch=4).updates(5)


def test_a_scheduler_that_raises_beyond_its_length_is_named_in_one_line():
    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)

    with pytest.raises(UserError, match=r"OneCycleLR cannot be .* steps is 3.*: it is stepped once per update, .*upd"):
        pipeline(scheduler=cycle).fit(data(), 2)


def test_a_scheduler_of_another_length_is_reported_at_the_end():
    def cycle(steps: int):
        return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)

    pipe = pipeline(scheduler=cycle(14))
    with pytest.warns(offbeat.ScheduleLength, match=r"OneCycleLR has 14 steps and was not used up: training made 7"):
        pipe.fit(data(), 2)
    cosine = pipeline(scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5))
    with pytest.warns(offbeat.ScheduleLength, match=r"CosineAnnealingLR has 5 steps and was passed: .* 7 updates"):
        cosine.fit(data(), 2)
    # warnings are errors
    pipeline(scheduler=cycle(pipe.updates(14))).fit(data(), 2)
    pipeline(scheduler=cycle(100)).fit(data(), 2, callbacks=[StopAt(5)])  # ended early on purpose
    warm_up = torch.optim.lr_scheduler.LinearLR
    pipeline(scheduler=lambda optimizer: warm_up(optimizer, total_iters=2)).fit(data(), 2)
