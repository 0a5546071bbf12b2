"""What engine `streams` launches together, in which order, and with how much work of the host."""

from __future__ import annotations

import runpy
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from captured import capture
from selected import some
from stream_cases import ALIKE, CPU, K, batches, check_same, network, on_device, pipeline, recorded, sgd, train
from torch import nn

import offbeat
from offbeat.engines.streams import Streams
from offbeat.graphs import join as joining
from offbeat.graphs.ring import _period
from offbeat.methods import named, parsed, with_settings


@pytest.mark.parametrize("name", some(ALIKE))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_is_launched_together_may_run_in_any_order(monkeypatch, name, seed):
    capture(monkeypatch, seed)
    check_same(named(name), drains=(14,), optimizer=lambda p: sgd(p, fused=True), data=lambda: batches(40))


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


@pytest.mark.parametrize("name", ["adl", "adl-1f1b", "bp"])
def test_the_training_that_sanitizers_watch_launches_whole_ticks(monkeypatch, name):
    launched = capture(monkeypatch)
    trained = runpy.run_path(str(Path(__file__).parent.parent / "gpu" / "small.py"))["trained"]
    assert 0 < trained(name, "fp32", CPU) < 2.4
    assert sum(pieces for pieces in launched if pieces >= 2 * 4) >= 5 * 2 * 4


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
