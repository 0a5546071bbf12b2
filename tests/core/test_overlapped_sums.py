"""Sums over replicas that are under way while a stage continues: what it does meanwhile, by its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import fingerprint
from torch import nn

import offbeat
from offbeat.core.replicas import WindowShare, add_in_order, replace_sums, request_of
from offbeat.core.window import GradientWindow

N = 8


class RecordedSum:
    """The sum over a single replica, which notes when it starts and ends in the log of its stage."""

    overlaps, replicas = True, 1
    complete: Callable[[], None] | None = None

    def __init__(self, log: list[str]) -> None:
        self.log, self.request, self.requested = log, 0, 0

    def start(self, window: GradientWindow, *, update: int, over: int, unit: int) -> None:
        self.log.append("(")
        share = WindowShare.of(window, update=update, over=over, unit=unit, request=self.request)
        sums = [None if term is None else add_in_order([term], [share.facts]) for term in share.sums]
        self.share = WindowShare(sums, share.facts)

    def ready(self) -> bool:
        return True

    def finish(self, window: GradientWindow) -> int:
        self.log.append(")")
        replace_sums(window, self.share.sums, [self.share.facts])
        return request_of([self.share.facts])

    def end(self, window: GradientWindow, *, batches: int) -> None:  # at the start of a drain
        self.log.append("end")


class RecordedActor:
    """Notes the operations of a stage."""

    def __init__(self, actor: Any, log: list[str]) -> None:
        self.actor, self.log = actor, log

    def forward(self, t: int, *arguments: Any) -> Any:
        self.log.append(f"F{t}")
        return self.actor.forward(t, *arguments)

    def backward(self, t: int, gradients: Any) -> Any:
        self.log.append(f"B{t}")
        return self.actor.backward(t, gradients)

    def update(self, over: int) -> None:
        self.log.append("U")
        self.actor.update(over)


class RecordedLink:
    """Notes what is received."""

    def __init__(self, link: Any, log: list[str]) -> None:
        self.link, self.log = link, log

    def receive(self) -> Any:
        self.log.append("receive")
        return self.link.receive()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)


def trained(method: offbeat.Method, *, overlapped: bool, **options: Any) -> tuple[str, list[Any], list[str]]:
    """(fingerprint of the weights, staleness, logs of the stages) after N batches and a drain."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()), nn.Linear(6, 3))
    pipe = offbeat.Pipeline(
        layers,
        K=2,
        cuts=[1],
        method=method,
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s)),
        sample=torch.ones(5, 4),
        **options,
    )
    logs: list[list[str]] = [[], []]
    for worker, log in zip(pipe.workers, logs, strict=True) if overlapped else ():
        worker.window_sum, worker.actor = RecordedSum(log), RecordedActor(worker.actor, log)
        worker.links.inputs = RecordedLink(worker.links.inputs, log)
    g = torch.Generator().manual_seed(1)
    for _ in range(N):
        pipe.step(torch.randn(5, 4, generator=g), torch.randint(3, (5,), generator=g))
    weights = fingerprint(pipe.drain().state_dict())
    return weights, [dict(stage) for stage in pipe.staleness], [" ".join(log) for log in logs]


def without_receives(log: str) -> str:
    return log.replace("receive ", "")


def test_with_2bw_the_sum_is_under_way_until_a_forward_uses_its_version():
    *_, (first, second) = trained(offbeat.TwoBW(M=4), overlapped=True)
    # the lag of stage 1 is 1: the last forward of a window uses the version of the window before
    assert without_receives(first).startswith("F0 F1 B0 F2 B1 F3 B2 F4 B3 ( F5 B4 F6 B5 F7 B6 end B7 ) U (")
    assert without_receives(second).startswith("F0 B0 F1 B1 F2 B2 F3 B3 ( F4 B4 F5 B5 F6 B6 F7 B7 ) U ( end ) U")


@pytest.mark.parametrize(
    "method",
    [offbeat.ADL(M=2), offbeat.ADL1F1B(M=2), offbeat.ADL(M=2, weights="hybrid"), offbeat.BP(M=2)],
    ids=lambda method: f"{method.name}-{method.weights}",
)
def test_with_other_methods_the_next_batch_is_received_while_the_sum_is_under_way(method):
    *_, logs = trained(method, overlapped=True)
    assert "B1 ( receive ) U F2 B2 receive F3 B3 ( receive ) U F4" in logs[1]
    assert all("( receive ) U F" in log for log in logs)
    assert all("( F" not in without_receives(log) for log in logs)


def test_backwards_of_a_drain_on_kept_versions_do_not_wait_for_the_sum():
    *_, (first, _) = trained(offbeat.ADL(M=1), overlapped=True)
    assert without_receives(first).endswith("B5 ( end B6 ) U ( B7 ) U ( ) U")
    *_, (first, _) = trained(offbeat.ADL(M=1, weights="hybrid"), overlapped=True)
    assert without_receives(first).endswith("B5 ( end ) U B6 ( ) U B7 ( ) U")


METHODS = {
    f"{number}-{method.name}": method
    for number, method in enumerate(
        [
            offbeat.TwoBW(M=2),
            offbeat.TwoBW(M=3),
            offbeat.TwoBW(M=3, recompute=True),
            offbeat.TwoBW(M=3, corrector="sc"),
            offbeat.ADL(M=1),
            offbeat.ADL(M=3),
            offbeat.ADL(M=2, weights="hybrid"),
            offbeat.ADL(M=2, weights="replay"),
            offbeat.ADL1F1B(M=2),
            offbeat.BP(M=2),
            offbeat.GPipe(m=2),
            offbeat.AsyncDGL(),
        ]
    )
}


CLIPPED = {"clip_norm": 0.1}


@pytest.mark.parametrize("options", [{}, CLIPPED, {**CLIPPED, "clip_over": "model"}], ids=["plain", "stage", "model"])
@pytest.mark.parametrize("name", METHODS)
def test_what_a_stage_does_meanwhile_changes_no_bit(name, options):
    method = METHODS[name]
    if method.feedback == "local":
        options = {**options, "clip_over": "stage"}  # the only one that it has
    plain = trained(method, overlapped=False, **options)
    assert trained(method, overlapped=True, **options)[:2] == plain[:2]


def test_updates_that_read_norms_of_other_stages_are_made_at_once():
    *_, logs = trained(offbeat.TwoBW(M=2), overlapped=True, clip_norm=0.1, clip_over="model")
    assert all(") U" in log and "( )" in log and log.count("(") == log.count("( ) U") for log in logs)
