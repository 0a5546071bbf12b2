"""Engine `streams` without a GPU: the ring, the versions and the recordings, which there run anew at every call.

What only a GPU can show (that captured graphs do the same, and that nothing races) is in tests/gpu.
"""

from __future__ import annotations

import math
import runpy
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from captured import capture
from cases import Steep
from selected import only, some
from torch import nn
from torch.utils import _pytree as pytree

import offbeat
from offbeat.engines.simulate import Simulate
from offbeat.engines.streams import Streams
from offbeat.errors import NotFinite, NotRecorded, UserError
from offbeat.graphs import join as joining
from offbeat.graphs import recorder
from offbeat.graphs.device_counters import DeviceCounters
from offbeat.graphs.device_guard import CHECK_INTERVAL
from offbeat.graphs.launch_queue import RecordedOperation
from offbeat.graphs.recorded_stage import RecordedStage
from offbeat.graphs.recorder import Recorder
from offbeat.graphs.ring import MAX_LEAD, Ring, _period
from offbeat.methods import METHODS, named, parsed, settings_of, with_settings
from offbeat.models.gpt import gpt
from offbeat.runs.build import cross_entropy
from offbeat.runs.optimizers import OPTIMIZERS

K, N, CPU = 4, 23, torch.device("cpu")
ALIKE = [name for name in METHODS if not named(name).why_not_capturable()]


def network(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(wide, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for wide in (2, 4, 4)]
    end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout) if dropout else nn.Identity())
    return nn.Sequential(*blocks, nn.Sequential(end, nn.Linear(4, 3)))


def batches(n: int = N, poisoned: tuple[int, ...] = (), short: bool = True) -> list:
    generator = torch.Generator().manual_seed(7)
    sizes = [5] * (n - 1) + [3 if short else 5]
    made = [(torch.randn(b, 2, 4, 4, generator=generator), torch.randint(3, (b,), generator=generator)) for b in sizes]
    return [(x * math.nan if t in poisoned else x, y) for t, (x, y) in enumerate(made)]


def sgd(parameters, **options) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3, **options)


def on_device(parameters, make=None) -> torch.optim.Optimizer:
    """With a learning rate as on a GPU."""
    made = (make or partial(sgd, fused=True))(parameters)
    for group in made.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], torch.tensor(group["lr"])
    return made


def pipeline(method: offbeat.Method, engine: str = "streams", *, model: nn.Module | None = None, **options):
    stages = 1 if method.workers > 1 else K
    made = Streams(stages, CPU) if engine == "streams" else engine
    return offbeat.Pipeline(
        model or network(),
        stages,
        method=method,
        cuts=[1, 2, 3][: stages - 1],
        loss=nn.functional.cross_entropy,
        engine=made,
        seed=3,
        **{"optimizer": sgd, **options},
    )


def recorded(pipe: offbeat.Pipeline) -> list[RecordedStage]:
    """The recordings of its stages."""
    return [worker.executor for worker in pipe.workers]


def train(pipe: offbeat.Pipeline, data: list, drains: tuple[int, ...] = ()) -> list[str]:
    losses = []
    for t, (x, y) in enumerate(data):
        losses.append(pipe.step(x, y))
        x.fill_(7.0)  # the caller may use its memory again
        if t % 5 == 4 and t < 15:
            losses[-1].item()  # waits for it, and for all that was asked for
        if t in drains:
            pipe.drain()
    pipe.drain()
    return [loss.item().hex() for loss in losses]


def check_same(method: offbeat.Method, *, drains: tuple[int, ...] = (), data=batches, **options) -> offbeat.Pipeline:
    """Streams and simulate end in the same bits, and have told the same on the way."""
    one, other = pipeline(method, "simulate", **options), pipeline(method, **options)
    assert train(one, data(), drains) == train(other, data(), drains)
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert one.staleness == other.staleness
    told = [[(r.updates, r.samples, r.versions, r.lr, r.loss, r.error) for r in p.reports()] for p in (one, other)]
    for (*here, loss, error), (*there, loss_there, error_there) in zip(*told, strict=True):
        assert here == there
        assert loss is None or (loss, error) == pytest.approx((loss_there, error_there), rel=1e-6)
    return other


@pytest.mark.parametrize("name", some(ALIKE))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_launched_together_may_run_in_any_order(monkeypatch, name, seed):
    capture(monkeypatch, seed)
    check_same(named(name), drains=(14,), optimizer=lambda p: sgd(p, fused=True), data=lambda: batches(40))


@pytest.mark.parametrize("phases", ["3", "bp@2+adl-1f1b@3", "bp@4"])
@pytest.mark.parametrize("captured", only([True], [False, True]))
def test_methods_that_follow_each_other_are_each_recorded(monkeypatch, phases, captured):
    if captured:
        capture(monkeypatch, 1)
    method = with_settings(*parsed(f"adl:M=2,corrector=sc,staleness_warmup={phases}"))
    check_same(method, drains=(25,), optimizer=lambda p: sgd(p, fused=True), data=lambda: batches(40))
    pipe = pipeline(method)
    train(pipe, batches(40))
    assert [stage.eager for stage in recorded(pipe)] == [None] * K


@pytest.mark.parametrize(
    ("M", "weights", "drains"),
    [
        (1, "stash", True),
        (4, "stash", False),
        (2, "hybrid", True),
        (3, "replay", False),
        *(
            pytest.param(M, weights, drains, marks=pytest.mark.slow)
            for M, weights, drains in (
                (1, "stash", False),
                (4, "stash", True),
                (2, "hybrid", False),
                (3, "replay", True),
            )
        ),
    ],
)
def test_short_batches_and_drains_do_not_make_ever_new_ticks(monkeypatch, M, weights, drains):
    capture(monkeypatch)
    method = offbeat.ADL(M=M, weights=weights)
    pipe = pipeline(method, optimizer=lambda p: sgd(p, fused=True))
    epoch, known = batches(2 * _period(method, K)), []
    for _ in range(6):
        for x, y in epoch:
            pipe.step(x, y)
        if drains:
            pipe.drain()
        known.append((set(pipe.engine.launch_queue.joined), [len(stage.copies.copies) for stage in recorded(pipe)]))
    assert known[-1] == known[-2] == known[-3]


@pytest.mark.parametrize("epoch", some([2, 3, 5, 7, 9], of=2))
@pytest.mark.parametrize("captured", [False, True])
def test_epochs_shorter_than_the_rings_give_the_bits_of_simulate(monkeypatch, captured, epoch):
    """Short batches are in flight when the backwards of all slots are recorded."""
    if captured:
        capture(monkeypatch)
    whole, short = batches(12 * epoch, short=False), batches(12 * epoch)[-1]

    def data() -> list:
        return [
            tuple(part.clone() for part in (short if t % epoch == epoch - 1 else batch))
            for t, batch in enumerate(whole)
        ]

    check_same(offbeat.ADL(M=4), optimizer=lambda p: sgd(p, fused=True), data=data)


def test_ticks_in_which_stages_are_missing_are_not_joined(monkeypatch):
    """Behind a look at the weights the stages find their distance again, each time in ticks of another kind."""
    launched = capture(monkeypatch)
    pipe = pipeline(offbeat.ADL(M=2), optimizer=lambda p: sgd(p, fused=True))
    for t, (x, y) in enumerate(batches(200, short=False)):
        pipe.step(x, y)
        if t % 7 == 6:
            pipe.reports()
    assert all(len(key) >= 2 * K for key in pipe.engine.launch_queue.joined)
    assert all(pieces == 1 or pieces >= 2 * K for pieces in launched)


@pytest.mark.parametrize(
    ("M", "stages", "precision"),
    [
        (1, 4, "fp32"),
        (2, 1, "bf16"),
        (4, 4, "fp32"),
        pytest.param(4, 2, "bf16", marks=pytest.mark.slow),
        (6, 4, "bf16"),
        pytest.param(6, 2, "fp32", marks=pytest.mark.slow),
        (16, 3, "fp32"),
    ],
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_of_a_window_without_lag_run_in_any_order_that_leaves_the_bits(monkeypatch, M, stages, precision, seed):
    """A window ends in the middle of an epoch, the middle of a window is looked at, and a batch is short."""
    launched, windows = capture(monkeypatch, seed), 5 if M > 8 else 7

    def trained(engine) -> tuple[list, list, offbeat.Pipeline]:
        pipe = offbeat.Pipeline(
            network(),
            stages,
            method=offbeat.BP(M=M),
            cuts=[1, 2, 3][: stages - 1],
            seed=3,
            engine=engine,
            loss=nn.functional.cross_entropy,
            optimizer=on_device,
            precision=precision,
            clip_norm=1.0,
            scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s / 10)),
        )
        losses, told = [], []
        for epoch in range(3):
            for x, y in batches(windows * M + 3):
                losses.append(pipe.step(x, y))
                x.fill_(7.0)
            told += [(r.updates, r.samples, r.lr, r.loss and round(r.loss, 6)) for r in pipe.reports()]
            told.append(pipe.evaluate(batches(2))["loss"])
            if epoch == 1:
                pipe.drain()
        pipe.drain()
        return [loss.item() for loss in losses], told, pipe

    (losses, told, one), (losses_there, told_there, other) = trained("simulate"), trained(Streams(stages, CPU))
    assert losses == losses_there
    assert told == told_there
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name
    assert all(stage.eager is None and stage.irregular == 3 for stage in recorded(other))
    together = other.engine.launch_queue.together
    assert together == max(n for n in range(1, 2 * stages) if M % n == 0)
    assert sum(pieces >= 2 * together * stages for pieces in launched) >= 3 * (windows * M // together - 4)


@pytest.mark.parametrize(("M", "stages"), [(1, 4), (5, 2), (4, 4), (2, 3)])
def test_what_is_left_of_a_turn_that_was_launched_in_part_keeps_its_order(monkeypatch, M, stages):
    """Where batches in flight are to be saved, every forward launches what was asked for before it."""
    capture(monkeypatch, seed=3)
    losses = []
    for engine in ("simulate", Streams(stages, CPU)):
        pipe = offbeat.Pipeline(
            network(),
            stages,
            method=offbeat.BP(M=M),
            cuts=[1, 2, 3][: stages - 1],
            engine=engine,
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: sgd(p, fused=True),
        )
        losses.append([])
        for t, (x, y) in enumerate(batches(60, short=False)):
            if t == 20:
                pipe.keep()
            losses[-1].append(pipe.step(x, y))
        pipe.drain()
        losses[-1] = [loss.item() for loss in losses[-1]]
    assert losses[0] == losses[1]


def test_no_more_turns_are_launched_at_once_than_there_are_slots(monkeypatch):
    capture(monkeypatch)
    pipe = offbeat.Pipeline(
        network(),
        2,
        method=offbeat.BP(M=8),
        cuts=[1],
        engine=Streams(2, CPU, together=8),
        loss=nn.functional.cross_entropy,
        optimizer=sgd,
    )
    assert pipe.engine.launch_queue.together == recorded(pipe)[0].slots.ring.slots == 2


def test_a_backward_that_cannot_be_recorded_leaves_no_version(monkeypatch):
    capture(monkeypatch)
    record, stages = Recorder.record, []

    def refusing(recorder, work, pool=None):
        if recorder is stages[0].recorder and "SlotRecordings.backward" in repr(work):
            raise RuntimeError("not here")
        return record(recorder, work, pool)

    def noting(stage, *given, original=RecordedStage.__init__, **options):
        original(stage, *given, **options)
        stages.append(stage)

    monkeypatch.setattr(RecordedStage, "__init__", noting)
    monkeypatch.setattr(Recorder, "record", refusing)
    with pytest.warns(offbeat.NotRecorded, match="stage 1 is not recorded and runs eagerly: not here"):
        check_same(offbeat.ADL(M=2), data=lambda: batches(60), optimizer=lambda p: sgd(p, fused=True))


@pytest.mark.parametrize("method", [offbeat.ADL(M=2), named("2bw")], ids=lambda method: method.name)
def test_a_tool_that_holds_what_functions_work_on_changes_nothing(monkeypatch, method):
    """As compute-sanitizer does with the frames of Python in which work was launched."""
    capture(monkeypatch)
    held = []
    pipe = pipeline(method, optimizer=lambda p: sgd(p, fused=True))
    sys.setprofile(lambda frame, event, _: held.append(frame) if "/graphs/" in frame.f_code.co_filename else None)
    try:
        train(pipe, batches())
    finally:
        sys.setprofile(None)
    assert len(held) > N
    assert [stage.irregular for stage in recorded(pipe)] == [1] * K


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (sgd, "SGD has fused=False: give fused=True"),
        (torch.optim.Adam, "Adam has capturable=False: give capturable=True"),
        (lambda parameters: torch.optim.Adagrad(parameters), "Adagrad has fused=False: give fused=True"),
    ],
)
def test_an_optimizer_whose_updates_are_not_recorded_is_reported(monkeypatch, optimizer, why):
    capture(monkeypatch)
    monkeypatch.setattr(recorder, "captures", lambda device: True)
    pipe = pipeline(offbeat.ADL(M=2), optimizer=optimizer)
    with pytest.warns(NotRecorded) as told:
        train(pipe, batches())
    line = f"updates are not recorded, so that stages wait for them: {why}"
    assert [str(one.message) for one in told] == [line] * K  # of which Python shows one


def test_forwards_of_a_window_do_not_wait_for_backwards(monkeypatch):
    found = []
    launched = capture(monkeypatch)
    join = joining.join
    monkeypatch.setattr(joining, "join", lambda nodes: found.append(nodes) or join(nodes))
    pipe = pipeline(offbeat.BP(M=4), optimizer=lambda p: sgd(p, fused=True))
    train(pipe, batches(40, short=False))
    longest = [0]
    for nodes in found[-1:]:
        for _, waits in nodes:
            longest.append(1 + max((longest[before + 1] for before in waits), default=0))
    pieces = len(found[-1])
    assert pieces == max(launched)
    # Of 4 batches through 4 stages and back (a copy ahead of most), and an update: one behind the other it is all.
    assert max(longest) < pieces / 2


class Halves(nn.Module):
    """Takes and gives several tensors, as stages may."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, given):
        whole = self.layer(torch.cat(given, dim=1) if isinstance(given, tuple) else given)
        return tuple(whole.chunk(2, dim=1)) if whole.dim() == 4 else whole


@pytest.mark.parametrize("name", ["adl", "pipedream"])  # neighbours a tick apart, and in the same
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_stages_that_give_several_tensors_wait_for_all_of_them(monkeypatch, name, seed):
    launched = capture(monkeypatch, seed)
    pipes = [
        offbeat.Pipeline(
            [Halves(layer) for layer in network()],
            method=named(name),
            engine=engine,
            seed=3,
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: sgd(p, fused=True),
        )
        for engine in ("simulate", Streams(K, CPU))
    ]
    assert train(pipes[0], batches(120)) == train(pipes[1], batches(120))
    assert all(map(torch.equal, pipes[0].model.parameters(), pipes[1].model.parameters()))
    assert sum(pieces >= 2 * K for pieces in launched) > 20


QUICK = [(1, "stash"), (2, "hybrid"), (3, "replay")]
LAUNCHED = product([(1, "fp32"), (2, "bf16"), (3, "fp32")], ["stash", "hybrid", "replay"])


@pytest.mark.parametrize(
    ("M", "precision", "weights"),
    [
        pytest.param(*how, weights, marks=[] if (how[0], weights) in QUICK else pytest.mark.slow)
        for how, weights in LAUNCHED
    ],
)
def test_adl_launches_a_tick_at_a_time_and_in_any_order_gives_the_bits_of_simulate(monkeypatch, M, weights, precision):
    launched = capture(monkeypatch, seed=M)
    pipe = check_same(
        offbeat.ADL(M=M, weights=weights, corrector="sc"),
        drains=(20,),
        precision=precision,
        optimizer=on_device,
        data=lambda: batches(90 if M == 3 else 60),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s / 10)),
    )
    assert [stage.irregular for stage in recorded(pipe)] == [1] * K
    assert sum(pieces >= 2 * K for pieces in launched) > 20


@pytest.mark.parametrize(
    ("spec", "rate", "launches"),
    [
        pytest.param("adl-1f1b:M=4,corrector=sc", 1.0, 12, marks=pytest.mark.slow),
        ("adl-1f1b:M=4,corrector=sc", 0.9, 12),
        ("adl-1f1b:M=1,corrector=sc", 1.0, 12),
        ("adl-1f1b:M=1", 0.9, 12),  # whose ticks have the learning rates of their own updates
        pytest.param("adl-1f1b:M=2", 0.9, 12, marks=pytest.mark.slow),
        ("adl-1f1b:M=3,recompute=yes", 1.0, 8),
        ("adl-1f1b:M=4,corrector=lwp", 0.9, 12),  # predictions need them, too
        ("adl-1f1b:M=1,corrector=lwp+sc", 0.9, 12),
        ("adl-1f1b:M=2,weights=hybrid,corrector=lwp", 0.9, 12),
        ("pipedream", 1.0, 12),
        ("2bw:M=4", 0.9, 12),
    ],
)
def test_ticks_of_a_chain_are_launched_several_at_once_in_any_order(monkeypatch, spec, rate, launches):
    launched = capture(monkeypatch, seed=2)
    pipe = check_same(
        with_settings(*parsed(spec)),
        drains=(30,),
        optimizer=on_device,
        data=lambda: batches(100),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: rate**s),
    )
    if not spec.startswith("2bw"):  # whose first version serves two windows, for which the first stage has no slots
        assert [stage.irregular for stage in recorded(pipe)] == [1] * K
    several = sum(pieces >= 4 * 2 * K for pieces in launched)
    assert several >= launches
    assert launches or not several


@pytest.mark.parametrize("seed", [1, 2])
def test_a_stage_is_not_further_ahead_of_its_neighbours_than_its_slots_allow(monkeypatch, seed):
    """The stage before the last has fewer slots than there are turns in a launch."""
    capture(monkeypatch, seed)
    stages, trained = 9, []
    given = torch.Generator().manual_seed(7)
    data = [(torch.randn(3, 4, generator=given), torch.randint(4, (3,), generator=given)) for _ in range(80)]
    for engine in ("simulate", Streams(stages, CPU)):
        torch.manual_seed(0)
        pipe = offbeat.Pipeline(
            [nn.Linear(4, 4) for _ in range(stages)],
            method=offbeat.ADL1F1B(M=1),
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: sgd(p, fused=True),
            engine=engine,
        )
        losses = [pipe.step(x.clone(), y.clone()) for x, y in data]
        pipe.drain()
        trained.append([loss.item().hex() for loss in losses])
    slots = [stage.slots.ring.slots for stage in recorded(pipe)]
    assert slots[-2] < pipe.engine.launch_queue.together
    assert trained[0] == trained[1]


@pytest.mark.parametrize("weights", ["stash", pytest.param("hybrid", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "corrector",
    ["lwp+sc", "lwp:form=weight:fraction=0.5", "t1:power=1+lookahead+sc:extra=1", "lwp:fraction=0.5+t1:power=1+sc"],
)
def test_predicted_weights_are_recorded_and_launched_with_the_other_work(monkeypatch, corrector, weights):
    launched = capture(monkeypatch, seed=1)
    check_same(
        offbeat.ADL(M=2, weights=weights, corrector=corrector),
        drains=(20,),
        optimizer=on_device,
        data=lambda: batches(90),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (1 + s / 10)),
    )
    assert sum(pieces >= 2 * K for pieces in launched) > 20


@pytest.mark.parametrize("weights", ["stash", "hybrid"])
def test_predictions_at_rates_that_the_host_computes_are_not_recorded(monkeypatch, weights):
    capture(monkeypatch, seed=1)
    method = offbeat.ADL(M=2, weights=weights, corrector="lwp+t1:updates=8+sc")
    pipe = check_same(method, drains=(20,), optimizer=on_device, data=lambda: batches(60))
    assert [stage.eager for stage in recorded(pipe)] == [None] * K


def test_an_update_of_other_parameters_than_recorded_is_recorded_anew(monkeypatch):
    """Adam's bias corrections are shared by parameters that have been stepped equally often."""
    capture(monkeypatch)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.whole = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.always(x) + self.whole(x) if len(x) == 6 else self.always(x)

    def run(engine) -> tuple[offbeat.Pipeline, list]:
        torch.manual_seed(0)
        pipe = offbeat.Pipeline(
            [nn.Linear(4, 4), Gated()],
            method=offbeat.ADL(M=1, corrector="lwp+sc"),
            engine=engine,
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.AdamW(p, lr=0.05, fused=True, capturable=True),
        )
        generator, operations = torch.Generator().manual_seed(1), []
        for t in range(40):
            size = 3 if t in (17, 18) else 6
            pipe.step(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
            operations.append(getattr(pipe.stages[2].optimization, "operation", None))
        pipe.drain()
        return pipe, operations

    (here, _), (there, operations) = run("simulate"), run(Streams(2, CPU))
    assert all(map(torch.equal, here.model.parameters(), there.model.parameters()))
    assert isinstance(operations[16], RecordedOperation)
    assert isinstance(operations[-1], RecordedOperation)
    assert operations[16] is not operations[-1]


@pytest.mark.parametrize("name", some(ALIKE))
def test_every_lagged_method_gives_the_bits_of_simulate(name):
    check_same(named(name), drains=(8,))


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize("M", [1, 2, 3])
@pytest.mark.parametrize("window", ["count", "aligned"])
def test_adl_gives_the_bits_of_simulate(M, weights, window):
    pipe = check_same(offbeat.ADL(M=M, weights=weights, window=window), drains=(5, 12))
    if window == "count":
        assert [stage.irregular for stage in recorded(pipe)] == [1] * K, "the short batch alone"


RECOMPUTING = [name for name in ALIKE if "recompute" in settings_of(name)]


@pytest.mark.parametrize(
    ("name", "captured"),
    [
        pytest.param(name, captured, marks=[] if captured and name in ("bp", *RECOMPUTING[::3]) else pytest.mark.slow)
        for name, captured in product(RECOMPUTING, [False, True])
    ],
)
def test_forwards_are_repeated_by_the_recorded_backward_with_the_same_bits(monkeypatch, name, captured):
    if captured:
        capture(monkeypatch, 1)
    stashed = {"pb": {"weights": "stash"}, "spectrain": {"version": 2}, "bp": {"pipelined": True}}.get(name, {})
    method = with_settings(name, {**stashed, "recompute": True})
    optimizer = partial(sgd, fused=True)
    pipe = check_same(method, drains=(14,), optimizer=optimizer, data=lambda: batches(40))
    plain = pipeline(with_settings(name, stashed), "simulate", optimizer=optimizer)
    train(plain, batches(40), (14,))
    assert all(map(torch.equal, plain.model.state_dict().values(), pipe.model.state_dict().values()))
    for stage in recorded(pipe):
        assert stage.eager is None
        assert stage.irregular == 1, "the short batch alone"
        if stage.stage.weights.replays:
            assert not any(slot.batch.roots for slot in stage.slots), "no graph is held"
            assert stage.stage.network.batch_bytes < stage.stage.network.graph_bytes


@pytest.mark.parametrize("M", [1, 3])
@pytest.mark.parametrize("stages", [[1], [2, 3]])
def test_some_stages_alone_may_repeat_their_recorded_forwards(monkeypatch, M, stages):
    capture(monkeypatch, M)
    pipe = check_same(offbeat.ADL(M=M, recompute=stages), data=lambda: batches(40), precision="bf16")
    assert [k for k, stage in pipe.stages.items() if stage.weights.replays] == stages
    assert [stage.irregular for stage in recorded(pipe)] == [1] * K


def test_recomputing_is_recorded_where_an_output_needs_no_gradient():
    class Pass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, given):
            x, mask = given if isinstance(given, tuple) else (given, torch.ones(given.shape[0], 1))
            return self.linear(x) * mask, mask.detach()

    def model() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Pass(), Pass(), Pass(), nn.Sequential(Pass(), Take())]

    class Take(nn.Module):
        def forward(self, given):
            return given[0]

    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(5, 3, generator=generator), torch.arange(5) % 3) for _ in range(20)]
    options = {"method": offbeat.ADL(M=2, recompute=True), "loss": nn.functional.cross_entropy, "optimizer": sgd}
    one, other = (offbeat.Pipeline(model(), engine=engine, **options) for engine in ("simulate", Streams(K, CPU)))
    assert train(one, [(x.clone(), y) for x, y in data]) == train(other, [(x.clone(), y) for x, y in data])
    assert [stage.eager for stage in recorded(other)] == [None] * K


def test_buffers_that_repeated_forwards_compute_with_are_not_recorded():
    def model() -> nn.Sequential:
        made = network()
        made[1][0] = nn.utils.parametrizations.spectral_norm(made[1][0])
        return made

    method = offbeat.ADL(M=2, recompute=True)
    one, other = (pipeline(method, engine, model=model()) for engine in ("simulate", "streams"))
    losses = train(one, batches())
    with pytest.warns(NotRecorded, match="stage 2 .*compute with buffers that it writes"):
        assert train(other, batches()) == losses
    assert all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))
    assert [stage.eager is None for stage in recorded(other)] == [True, False, True, True]


@pytest.mark.parametrize("into", ["streams", "simulate"])
def test_a_state_with_repeated_forwards_resumes_bit_for_bit_in_either_engine(into):
    method = offbeat.ADL(M=2, recompute=True)
    whole, saved, again = pipeline(method), pipeline(method), pipeline(method, into)
    train(whole, batches())
    for x, y in batches()[:14]:
        saved.step(x, y)
    again.load_stage_states(saved.stage_states(), batches=14)
    train(again, batches()[14:])
    assert all(map(torch.equal, whole.model.state_dict().values(), again.model.state_dict().values()))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("corrector", ["sc", "lwp+sc", "dc"])
def test_correctors_and_recorded_updates_give_the_bits_of_simulate(corrector, fused):
    pipe = check_same(offbeat.ADL(M=2, corrector=corrector), optimizer=lambda p: sgd(p, fused=fused))
    assert all(isinstance(stage.optimization.operation, RecordedOperation) == fused for stage in recorded(pipe))


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_bfloat16_gives_the_bits_of_simulate(weights):
    check_same(offbeat.ADL(M=2, weights=weights), precision="bf16", drains=(8,))


def test_schedules_and_clipping_give_the_bits_of_simulate():
    check_same(
        offbeat.ADL(M=2),
        clip_norm=0.3,
        optimizer=lambda p: sgd(p, fused=True),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (s + 1)),
    )


def test_an_evaluation_during_training_sees_all_updates_so_far(monkeypatch):
    capture(monkeypatch)

    def losses(engine: str) -> list[float]:
        pipe = pipeline(offbeat.ADL(M=1), engine, optimizer=lambda p: sgd(p, fused=True))
        data = batches(20, short=False)
        for x, y in data[:12]:
            pipe.step(x, y)
        found, left = [], iter(data[12:])
        evaluation = pipe.evaluating([data[0]] * 4)
        while True:
            try:
                next(evaluation)
            except StopIteration as over:
                return [*found, over.value["loss"]]
            pipe.step(*next(left))

    assert losses("simulate") == pytest.approx(losses("streams"), rel=1e-6)


def test_training_continues_during_an_evaluation():
    pipes = [pipeline(offbeat.ADL(M=2), engine) for engine in ("simulate", "streams")]
    seen = []
    for pipe in pipes:
        for t, (x, y) in enumerate(batches()):
            if t == 9:
                seen.append(pipe.evaluate(batches(4)))
            pipe.step(x, y)
        pipe.drain()
    assert seen[0] == seen[1]
    assert all(map(torch.equal, pipes[0].model.parameters(), pipes[1].model.parameters()))


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize("into", ["streams", "simulate"])
def test_a_state_saved_in_flight_resumes_bit_for_bit_in_either_engine(weights, into):
    method = offbeat.ADL(M=2, weights=weights)
    whole, saved, again = pipeline(method), pipeline(method), pipeline(method, into)
    train(whole, batches())
    for t, (x, y) in enumerate(batches()[:14]):
        if t == 14 - 2 * K:
            saved.keep()
        saved.step(x, y)
    again.load_stage_states(saved.stage_states(), batches=14)
    train(again, batches()[14:])
    assert all(map(torch.equal, whole.model.state_dict().values(), again.model.state_dict().values()))


@pytest.mark.parametrize("into", ["simulate", "streams"])
def test_copies_of_one_version_are_one_after_loading_too(into):
    """A drain in the middle of an aligned window leaves copies of a version in several places."""
    method = offbeat.ADL(M=4, window="aligned")
    one, other, data = pipeline(method), pipeline(method, into), batches(40, short=False)
    for t, (x, y) in enumerate(data[:12]):
        if t == 5:
            one.drain()
        one.step(x, y)
    other.load_stage_states(pytree.tree_map_only(torch.Tensor, torch.clone, one.stage_states()), batches=12)
    for pipe in (one, other):
        for x, y in data[12:]:
            pipe.step(x, y)
        pipe.drain()
    assert all(map(torch.equal, one.model.state_dict().values(), other.model.state_dict().values()))


def test_a_pipeline_that_has_trained_can_be_loaded_too():
    whole, other = pipeline(offbeat.ADL(M=2)), pipeline(offbeat.ADL(M=2))
    train(whole, batches())
    for x, y in batches()[:10]:
        other.step(x, y)
    early = {k: {part: _copied(tree) for part, tree in trees.items()} for k, trees in other.stage_states().items()}
    for x, y in batches()[10:14]:
        other.step(x, y)
    other.drain()
    other.load_stage_states(early, batches=10)
    train(other, batches()[10:])
    assert all(map(torch.equal, whole.model.state_dict().values(), other.model.state_dict().values()))


def _copied(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, tree)


def test_counters_name_the_first_that_is_not_finite_until_they_are_cleared():
    counters, good, bad = DeviceCounters(CPU), torch.ones(3), torch.tensor([1.0, math.nan])
    for gradients in ([good], [good, bad], [good], [bad]):
        counters.gradients(gradients)
    counters.loss(torch.tensor(math.inf), torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    assert counters.now() == [1, 2]
    assert torch.equal(good, torch.ones(3))
    counters.clear()
    counters.gradients([good])
    counters.loss(torch.tensor(1.0), torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    assert counters.now() == [None, None]


@pytest.mark.parametrize("far", [3, CHECK_INTERVAL + 7])
def test_a_loss_that_is_not_finite_is_reported_without_synchronising(far):
    pipe = pipeline(offbeat.ADL(M=2))
    data = batches(3 * CHECK_INTERVAL, poisoned=(far,))
    with pytest.raises(NotFinite, match=f"the loss of batch {far} is not finite .seen at stage 4 of 4") as told:
        train(pipe, data)
    assert told.value.batches == (far,)
    assert pipe.batches <= far + 2 * CHECK_INTERVAL
    with pytest.raises(UserError, match="this pipeline has stopped"):
        pipe.step(*batches(1)[0])


def test_a_gradient_that_is_not_finite_is_named_with_its_update():
    model = network()
    model[1].append(Steep())
    with pytest.raises(NotFinite, match=r"gradient of stage [12] of 4 is not finite in update 0 \(batches 0 to 1\)"):
        train(pipeline(offbeat.ADL(M=2), model=model), batches())


@pytest.mark.parametrize(("M", "out"), [(2, [6]), (2, [6, 7]), (1, [6])])
@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_that_is_left_out_gives_the_bits_of_simulate(M, out, fused):
    """Also where its window has no other: then the optimizer has no gradients, and changes nothing."""
    check_same(
        offbeat.ADL(M=M),
        left_out=out,
        data=lambda: batches(poisoned=tuple(out)),
        optimizer=lambda p: sgd(p, fused=fused),
    )


class BySize(nn.Module):
    """Parameters of which some get no gradient in some windows."""

    def __init__(self) -> None:
        super().__init__()
        self.long, self.short = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.long(x) if len(x) == 6 else self.short(x)


@pytest.mark.parametrize(
    ("M", "fused", "loaded"),
    [  # torch's fused one wants all of them in its first step
        (1, False, False),
        (2, False, False),
        (2, False, True),
        (2, True, False),
        (2, True, True),
    ],
)
def test_parameters_without_a_gradient_in_a_window_are_left_alone(M, fused, loaded):
    def trained(engine, loaded: bool = False) -> list[torch.Tensor]:
        torch.manual_seed(0)
        made = [
            offbeat.Pipeline(
                nn.Sequential(BySize(), nn.Linear(4, 3)),
                2,
                method=offbeat.ADL(M=M),
                cuts=[1],
                engine=engine(),
                loss=nn.functional.cross_entropy,
                optimizer=lambda p: sgd(p, fused=fused),
            )
            for _ in range(2)
        ]
        pipe, generator = made[0], torch.Generator().manual_seed(1)
        for t, size in enumerate([6, 3, 6, 6, 3, 6, 6, 3, 3, 3, 6, 6, 6, 6, 6, 3, 6, 6]):
            pipe.step(torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
            if loaded and t in (3, 6, 9, 10):
                state = pytree.tree_map_only(torch.Tensor, torch.clone, pipe.stage_states())
                pipe.drain()
                pipe = made[1] if pipe is made[0] else made[0]  # the other one may have trained, too
                pipe.load_stage_states(state, batches=t + 1)
        pipe.drain()
        return list(pipe.model.parameters())

    expected = trained(lambda: "simulate")
    assert all(map(torch.equal, expected, trained(lambda: "simulate", loaded)))
    assert all(map(torch.equal, expected, trained(lambda: Streams(2, CPU), loaded)))


def test_skipping_bad_batches_reads_every_loss_and_records_nothing():
    with pytest.warns(offbeat.NotRecorded, match=r"stage . is not recorded and runs eagerly: on_nan='skip'"):
        pipe = check_same(offbeat.ADL(M=2), on_nan="skip", data=lambda: batches(poisoned=(6,)))
    assert all("on_nan" in stage.eager for stage in recorded(pipe))


def test_a_stage_that_draws_random_numbers_runs_eagerly_and_reports_why():
    torch.manual_seed(5)
    pipe = pipeline(offbeat.ADL(M=2), model=network(dropout=0.5))
    one = pipeline(offbeat.ADL(M=2), "simulate", model=network(dropout=0.5))
    with pytest.warns(offbeat.NotRecorded, match="stage 4 is not recorded and runs eagerly: it draws random numbers"):
        assert train(pipe, batches()) == train(one, batches())
    assert [stage.eager for stage in recorded(pipe)] == [None, None, None, "it draws random numbers"]
    assert recorded(pipe)[3].irregular == N


def test_a_batch_of_the_wrong_shape_raises_the_usual_error():
    with pytest.warns(offbeat.NotRecorded), pytest.raises(UserError, match="stage 1 cannot take batch 0 of shape"):
        pipeline(offbeat.ADL(M=2)).step(torch.randn(5, 3, 4, 4), torch.zeros(5, dtype=torch.int64))


def test_streams_need_a_gpu_and_methods_whose_iterations_are_alike():
    with pytest.raises(UserError, match="engine='streams' on device 'cpu': it runs the stages on streams of one GPU"):
        offbeat.Pipeline(network(), 2, loss=nn.CrossEntropyLoss(), optimizer=sgd, engine="streams")
    assert {name for name in METHODS if named(name).why_not_capturable()} == {
        "gpipe",
        "dgl",
        "dgl-async",
        "dni",
        "mostafa",
        "pred",
        "sim",
        "predsim",
    }


@pytest.mark.parametrize("name", [name for name in ALIKE if name not in ("asgd", "dc-asgd")])
def test_work_that_is_done_only_when_it_is_recorded_raises_nowhere(monkeypatch, name):
    """As on a GPU, where autograd sees the capture and nothing else: forwards of all slots at the first batch,
    backwards of all slots at the first gradient, when weights and inputs of some have been written again."""

    class Captured(recorder.Recorded):
        def __init__(self, work, **_: object) -> None:
            work()
            self.repeat = lambda: None

    monkeypatch.setattr(recorder, "Recorded", Captured)
    monkeypatch.setattr(recorder, "captures", lambda device: True)
    pipe = pipeline(named(name), optimizer=lambda p: sgd(p, fused=True))
    train(pipe, batches(40, short=False), drains=(20,))
    assert all(stage.eager is None for stage in recorded(pipe))


def test_a_stage_that_changes_nothing_sends_gradients_of_its_own():
    models = [network(), network()]
    for model in models:
        model[2] = nn.Identity()
    one, other = pipeline(offbeat.ADL(M=2), "simulate", model=models[0]), pipeline(offbeat.ADL(M=2), model=models[1])
    assert train(one, batches()) == train(other, batches())
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))


def test_a_method_with_irregular_iterations_is_reported_and_simulated():
    with pytest.warns(offbeat.NotRecorded, match="gpipe splits batches into micro-batches: its stages are not"):
        pipe = offbeat.Pipeline(
            network(), 2, method="gpipe", loss=nn.CrossEntropyLoss(), optimizer=sgd, device="cuda", engine="streams"
        )
    assert type(pipe.engine) is Simulate


# ---- the ring


@pytest.mark.parametrize(
    "method",
    [
        offbeat.ADL(M=1),
        offbeat.ADL(M=3),
        offbeat.ADL(M=2, weights="hybrid"),
        offbeat.ADL1F1B(M=2),
        offbeat.PipeDream(),
        offbeat.TwoBW(M=4),
    ],
    ids=lambda m: m.name,
)
def test_no_stage_writes_memory_that_a_neighbour_may_still_read(monkeypatch, method):
    """A stream waits for its neighbours' turn before the last: what is read in turn n may be written in turn n + 2."""
    made: dict[int, tuple[int, int]] = {}  # memory -> stage that made what lies there, and until when it is read
    forward, backward = RecordedStage.forward, RecordedStage.backward

    def note(k, turn, tensors, until):
        for tensor in tensors:
            if tensor is not None:
                _, read = made.get(tensor.data_ptr(), (k, -9))
                assert turn >= read + MAX_LEAD, f"stage {k} in turn {turn}"
                made[tensor.data_ptr()] = k, until

    def forwards(recorded_stage, *given):
        slots, k = recorded_stage.slots, recorded_stage.stage.k
        kept = slots.used.keys() | set()
        output = forward(recorded_stage, *given)
        if slots.used.keys() - kept and k < K:
            places = [slot.batch.inputs[0] for t, slot in slots.used.items() if t not in kept]
            note(k, slots.turn, places, slots.turn)  # with its slot, the output is read in the same turn
        return output

    def backwards(recorded_stage, t, gradients):
        slots, k = recorded_stage.slots, recorded_stage.stage.k
        kept = t in slots.used
        below = backward(recorded_stage, t, gradients)
        if kept and k > 1:
            note(k, slots.turn, below, slots.turn + method.lag(k - 1, K) - method.lag(k, K))
        return below

    monkeypatch.setattr(RecordedStage, "forward", forwards)
    monkeypatch.setattr(RecordedStage, "backward", backwards)
    pipe = pipeline(method)
    for x, y in batches(40, short=False):
        pipe.step(x, y)
    assert {k for k, _ in made.values()} == {1, 2, 3, 4}


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
@pytest.mark.parametrize("M", [1, 2, 4, 5])
def test_a_ring_holds_the_batches_in_flight_and_their_versions_and_little_more(M, weights):
    method = offbeat.ADL(M=M, weights=weights)
    for stages in (1, 2, 3, 8, 28):
        for k in range(1, stages + 1):
            lag, copies = method.lag(k, stages), weights == "stash" and k < stages
            ring = Ring.of(method, k, stages, copies=copies)
            assert ring.slots >= method.held(k, stages) + 1
            assert ring.groups >= method.versions(k, stages) if copies else ring.groups == 1
            assert ring.slots <= 2 * (max(lag, 2) + MAX_LEAD + 2 * M)
        rings = [Ring.of(method, k, stages, copies=weights == "stash") for k in range(1, stages + 1)]
        assert math.lcm(*(ring.slots for ring in rings)) <= 4 * (2 * stages + M)
        assert sum(ring.slots for ring in rings) <= 1.5 * sum(
            max(method.lag(k, stages), 2) + MAX_LEAD + M for k in range(1, stages + 1)
        )


@pytest.mark.parametrize("M", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", ["adl", "adl-1f1b"])
def test_slots_are_reused_so_that_no_batch_runs_eagerly(name, M):
    pipe = pipeline(named(name, M=M))
    train(pipe, batches(50, short=False), drains=(20, 33))
    assert [stage.irregular for stage in recorded(pipe)] == [0] * K
    for stage in recorded(pipe):
        free = [slot for slots in stage.slots.free.values() for slot in slots]
        assert len(free) == stage.slots.ring.slots
        assert not stage.slots.used
        assert stage.stage.weights.versions() <= stage.stage.figures.most_versions


@pytest.mark.parametrize("name", ["adl", "adl-1f1b", "bp"])
def test_the_training_that_sanitizers_watch_launches_whole_ticks(monkeypatch, name):
    launched = capture(monkeypatch)
    trained = runpy.run_path(str(Path(__file__).parent.parent / "gpu" / "small.py"))["trained"]
    assert 0 < trained(name, "fp32", CPU) < 2.4
    assert sum(pieces for pieces in launched if pieces >= 2 * 4) >= 5 * 2 * 4


@pytest.mark.parametrize("optimizer", ["adamw", "nadam"])
def test_a_gpt_with_an_optimizer_of_a_gpu_gives_the_bits_of_simulate(monkeypatch, optimizer):
    capture(monkeypatch)
    monkeypatch.setattr(sys.modules["torch.optim.nadam"], "_get_capturable_supported_devices", lambda **_: ["cpu"])
    kind = OPTIMIZERS[optimizer]
    make = partial(getattr(torch.optim, kind.title), lr=1e-2, **kind.fixed, **kind.on_gpu)
    given = torch.Generator().manual_seed(7)
    data = [torch.randint(256, (2, 4, 8), generator=given) for _ in range(24)]

    def trained(engine: Streams | str) -> tuple[offbeat.Pipeline, list[str]]:
        torch.manual_seed(0)
        pipe = offbeat.Pipeline(
            gpt(layers=2, width=16, heads=2, context=8),
            4,
            method=offbeat.ADL(M=2),
            cuts=[1, 2, 3],
            loss=cross_entropy,
            optimizer=partial(on_device, make=make),
            scheduler=lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda s: 0.9**s),
            engine=engine,
        )
        losses = [pipe.step(x.clone(), y.clone()) for x, y in data]
        pipe.drain()
        return pipe, [loss.item().hex() for loss in losses]

    (one, losses), (other, streamed) = trained("simulate"), trained(Streams(4, CPU))
    assert losses == streamed
    assert all(isinstance(stage.optimization.operation, RecordedOperation) for stage in other.stages.values())
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[name]), name


def _opcodes(work) -> int:
    """Instructions of Python that the work executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def _counted(work, found: list[int]):
    """The function, which also notes how many instructions of Python it executes."""

    def counted(*given):
        made = []
        found.append(_opcodes(lambda: made.append(work(*given))))
        return made[0]

    return counted


def test_the_host_work_of_a_stage_does_not_grow_with_its_lag(monkeypatch):
    capture(monkeypatch)
    counts: dict[int, list[int]] = {2: [], 5: []}
    for stages, found in counts.items():
        pipe = offbeat.Pipeline(
            [nn.Linear(2, 2) for _ in range(stages)],
            method=offbeat.ADL(M=1),
            engine=Streams(stages, CPU),
            loss=nn.functional.cross_entropy,
            optimizer=lambda p: sgd(p, fused=True),
        )
        x, y = torch.ones(2, 2), torch.zeros(2, dtype=torch.int64)
        for _ in range(40):
            pipe.step(x, y)
        first = recorded(pipe)[0]
        for name in ("forward", "backward", "update"):
            setattr(first, name, _counted(getattr(first, name), found))
        pipe.step(x, y)
    assert len(counts[2]) == 3
    assert counts[2] == counts[5]
