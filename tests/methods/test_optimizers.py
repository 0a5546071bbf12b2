"""Correctors with every optimizer that they work with, beside a literal serial computation in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import serial
import torch
from engine import agree, pipeline, trained
from selected import only
from serial import Rules, adl, data, final, lagged
from torch import Tensor

import offbeat
from offbeat.methods import with_staleness_warmup

K, N = 3, 17


class Averaging(torch.optim.Optimizer):
    """theta <- theta - lr d, d = a m + (1-a) g: the smallest optimizer that is `SelfCompensating`."""

    def __init__(self, parameters: Iterable[Any], lr: float, *, momentum: float = 0.8, nesterov: bool = False) -> None:
        options = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "compensation": 0.0, "keep_direction": False}
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            a = group["momentum"] ** (group["compensation"] + group["nesterov"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                d = a * m + (1 - a) * p.grad
                p -= group["lr"] * d
                if group["keep_direction"]:
                    self.state[p].setdefault("direction", torch.zeros_like(p)).copy_(d)

    def direction(self, parameter: Tensor) -> Tensor | None:
        return self.state[parameter].get("direction")


ADAM = {"lr": serial.ADAM_LR, "betas": serial.BETAS, "eps": serial.EPS, "weight_decay": serial.DECAY}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=serial.LR, momentum=serial.MOMENTUM, weight_decay=serial.DECAY),
    "adam": lambda p: torch.optim.Adam(p, **ADAM),
    "adamw": lambda p: torch.optim.AdamW(p, **ADAM),
    "nadam": lambda p: torch.optim.NAdam(p, momentum_decay=serial.MU_DECAY, **ADAM),
    "own": lambda p: Averaging(p, lr=serial.LR),
}
SHARED = {"lr": serial.ADAM_LR, "eps": serial.EPS, "weight_decay": serial.DECAY}
OURS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "muon": lambda p: offbeat.optim.Muon(p, momentum=serial.AVERAGE, betas=serial.BETAS, **SHARED),
    "rotated-adam": lambda p: offbeat.optim.RotatedAdam(p, betas=(serial.AVERAGE, serial.BETAS[1]), **SHARED),
}
CORRECTED: dict[str, dict[str, Any]] = {
    "sc": {"spike": True},
    "sc:extra=1": {"spike": True, "extra": 1.0},
    "sc:2.5": {"spike": True, "spike_delay": 2.5},
    "lwp": {"predict": "velocity"},
    "lwp:fraction=0.5": {"predict": "velocity", "fraction": 0.5},
    "lwp:form=weight:fraction=0.5": {"predict": "weight", "fraction": 0.5},
    "lwp:1+sc": {"predict": "velocity", "horizon": 1.0, "spike": True},
    "lookahead": {"ahead": 0.5},
    "lookahead:least=1+sc": {"ahead": 0.5, "ahead_least": 1.0, "spike": True},
    "lookahead:1+sc:extra=1": {"ahead": 1.0, "spike": True, "extra": 1.0},
    "lookahead+lwp:form=weight": {"ahead": 0.5, "predict": "weight"},
    "t1:power=1": {"rate_power": 1.0},
    "t1:power=0.5+lookahead+sc": {"rate_power": 0.5, "ahead": 0.5, "spike": True},
    "lwp+t1:power=1": {"predict": "velocity", "rate_power": 1.0},
    "lwp:fraction=0.5+t1:power=0.5+sc": {"predict": "velocity", "fraction": 0.5, "rate_power": 0.5, "spike": True},
    "dc:3+lookahead": {"compensate": 3.0, "ahead": 0.5},
    "nag:0.95": {"look_ahead": 0.95},
}


def expected(optimizer: str, M: int, corrector: str) -> list:
    rules = CORRECTED[corrector]
    if optimizer == "own":  # the velocity of SGD is its average times 1/(1-b), at a rate of lr (1-b)
        if "predict" in rules:  # along its last step, which has been compensated
            rules = {**rules, "predict": "weight"}
        own = replace(adl(M), momentum=0.8, decay=0.0, lr=serial.LR * (1 - 0.8), **rules)
        return final(lagged(K, data(N), own))
    made: Rules = replace(adl(M), optimizer=optimizer, **rules)
    return final(lagged(K, data(N), made if optimizer == "sgd" else replace(made, lr=serial.ADAM_LR)))


def found(optimizer: str, M: int, corrector: str) -> list:
    return trained(pipeline(K, offbeat.ADL(M=M, corrector=corrector), optimizer=OPTIMIZERS[optimizer]), data(N))


@cache
def uncorrected(optimizer: str) -> list:
    return trained(pipeline(K, offbeat.ADL(M=2), optimizer=OPTIMIZERS[optimizer]), data(N))


@pytest.mark.parametrize("optimizer", only(("sgd", "adamw", "nadam"), OPTIMIZERS))
@pytest.mark.parametrize("corrector", CORRECTED)
def test_a_corrector_and_an_optimizer_are_their_serial_computation(corrector, optimizer):
    if corrector.startswith("nag") and optimizer in ("adam", "adamw"):
        pytest.skip("refused, as another test shows")
    for M in (1, 2):
        wanted = expected(optimizer, M, corrector)
        for k, (mine, theta) in enumerate(zip(found(optimizer, M, corrector), wanted, strict=True), start=1):
            agree(mine, theta, f"M={M} stage {k}")
    assert (uncorrected(optimizer)[0][0] - wanted[0][0]).abs().max() > 1e-6, "the corrector changed nothing"


LATER: dict[str, dict[str, Any]] = {
    name: CORRECTED[name]
    for name in (
        "sc:extra=1",
        "lwp:fraction=0.5+t1:power=0.5+sc",
        "lookahead:least=1+sc",
        "lookahead+lwp:form=weight",
        "dc:3+lookahead",
    )
} | {"lwp+t1:5": {"predict": "velocity", "anneal": 5}}


@pytest.mark.parametrize("optimizer", ["adamw", "nadam", *OURS])
@pytest.mark.parametrize("corrector", LATER)
def test_correctors_after_a_warmup_are_their_serial_computation(corrector, optimizer):
    """The state of the optimizer continues, that of the corrector begins in every phase with late gradients."""
    batches, M, stages = data(N), 1 if optimizer == "muon" else 2, None
    lr = serial.ADAM_LR
    late = {"optimizer": optimizer, "lr": lr, **LATER[corrector]}
    phases = [
        (0, 2 * M, replace(serial.bp(M), optimizer=optimizer, lr=lr)),
        (2 * M, 4 * M, replace(serial.adl_1f1b(M), **late)),
        (4 * M, N, replace(adl(M), **late)),
    ]
    for begin, end, rules in phases:
        stages = lagged(K, batches[begin:end], rules, after=stages)
    method = with_staleness_warmup(offbeat.ADL(M=M, corrector=corrector), "bp@2+adl-1f1b@2")
    mine = trained(pipeline(K, method, optimizer=(OPTIMIZERS | OURS)[optimizer]), batches)
    for k, (one, theta) in enumerate(zip(mine, final(stages), strict=True), start=1):
        agree(one, theta, f"stage {k}")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_a_corrector_sets_for_a_step_is_restored_after_it(optimizer):
    def options(corrector: str | None) -> list[dict]:
        pipe = pipeline(K, offbeat.ADL(M=1, corrector=corrector), optimizer=OPTIMIZERS[optimizer])
        trained(pipe, data(5))
        groups = (stage.optimization.optimizer.param_groups for stage in pipe.stages.values())
        return [{name: value for name, value in group.items() if name != "params"} for (group,) in groups]

    plain = options(None)
    for corrector in ("lookahead+sc", "t1:power=1", *(("nag",) if optimizer in ("sgd", "nadam", "own") else ())):
        assert options(corrector) == plain, corrector


@pytest.mark.parametrize("optimizer", ["sgd", "own"])
def test_the_first_late_forwards_are_predicted_from_the_last_synchronous_step(optimizer):
    """An optimizer that keeps directions on request had kept none, so that these forwards were not predicted."""
    sums = {"momentum": 0.8, "decay": 0.0, "lr": serial.LR * (1 - 0.8)} if optimizer == "own" else {}
    first = lagged(K, data(N)[:6], replace(serial.bp(2), **sums))
    wanted = final(lagged(K, data(N)[6:], replace(adl(2), predict="velocity", **sums), after=first))
    method = with_staleness_warmup(offbeat.ADL(M=2, corrector="lwp"), 3)
    for mine, theta in zip(trained(pipeline(K, method, optimizer=OPTIMIZERS[optimizer]), data(N)), wanted, strict=True):
        agree(mine, theta, optimizer)


def test_directions_are_kept_only_for_a_corrector_that_needs_them():
    for corrector, kept in (("lwp", True), ("sc", False), ("lwp:form=weight", False)):
        pipe = pipeline(K, offbeat.ADL(M=1, corrector=corrector), optimizer=OPTIMIZERS["own"])
        groups = [stage.optimization.optimizer.param_groups[0] for stage in pipe.stages.values()]
        assert [group["keep_direction"] for group in groups] == [kept, kept, False], corrector  # stage 3 is not late


def test_nag_is_refused_by_an_optimizer_of_its_own_without_nesterov_momentum():
    def without(parameters):
        made = Averaging(parameters, lr=0.1)
        del made.param_groups[0]["nesterov"]
        return made

    with pytest.raises(offbeat.UserError, match="nag with optimizer Averaging: use"):
        pipeline(K, offbeat.ADL(M=1, corrector="nag"), optimizer=without)


@pytest.mark.parametrize("optimizer", OPTIMIZERS | OURS)
@pytest.mark.parametrize("corrector", ["lwp+sc", "lookahead+sc:extra=1", "lwp:form=weight+lookahead", "lwp+t1:9"])
def test_a_pipeline_resumes_with_the_correctors_memory_bit_for_bit(corrector, optimizer):
    def made() -> offbeat.Pipeline:
        return pipeline(K, offbeat.ADL(M=2, corrector=corrector), optimizer=(OPTIMIZERS | OURS)[optimizer])

    batches, whole, first, second = data(N), made(), made(), made()
    for pipe in (first, second):
        pipe.keep()
    for x, y in batches[:9]:
        first.step(x, y)
    second.load_stage_states(first.stage_states(), batches=9)
    there = trained(second, batches[9:])
    here = trained(whole, batches)
    assert all(
        torch.equal(a, b) for one, other in zip(here, there, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_parameters_with_different_numbers_of_steps_are_corrected_each_at_its_own():
    """A parameter that gets its first gradient later has its own bias correction."""
    from offbeat.correctors.optimizer_rules import AdamRule

    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(2)]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    together = torch.optim.Adam(parameters, lr=0.1)
    apart = [torch.optim.Adam([p], lr=0.1) for p in alone]
    for present in ((0,), (0,), (0, 1), (1,), (0, 1)):
        gradients = {at: torch.randn(3, dtype=torch.float64) for at in present}
        for at in range(2):
            parameters[at].grad = gradients.get(at)
            alone[at].grad = gradients.get(at)
        for optimizer in (together, *apart):
            rule = AdamRule(optimizer)
            rule.before_step()
            kept = rule.before_compensated_step(1.5)
            optimizer.step()
            with torch.no_grad():
                rule.after_compensated_step(1.5, kept)
    for one, other in zip(parameters, alone, strict=True):
        assert torch.equal(one, other)


class Rotation(torch.nn.Module):
    """z -> |z W| with a complex W, given as such or as pairs of real numbers."""

    def __init__(self, *, real: bool, seed: int) -> None:
        super().__init__()
        W = torch.randn(4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(seed))
        self.real, self.W = real, torch.nn.Parameter(torch.view_as_real(W).clone() if real else W)

    def forward(self, z: Tensor) -> Tensor:
        return (z.to(torch.complex128) @ (torch.view_as_complex(self.W) if self.real else self.W)).abs()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "nadam"])
@pytest.mark.parametrize("corrector", ["sc", "lwp", "lookahead+sc:extra=1", "dc:2", "dc:2:adaptive=yes"])
def test_complex_parameters_are_corrected_as_pairs_of_real_ones(corrector, optimizer):
    """Roots of Adam's second moments, and squares, were those of complex numbers, which torch's steps do not use."""

    def weights(real: bool) -> Tensor:
        pipe = offbeat.Pipeline(
            [Rotation(real=real, seed=k) for k in range(2)],
            method=offbeat.ADL(M=1, corrector=corrector),
            loss=serial.mean_square,
            optimizer=OPTIMIZERS[optimizer],
        )
        for x, y in data(8):
            pipe.step(x, y)
        W = pipe.drain()[0].W.detach()
        return W if real else torch.view_as_real(W)

    torch.testing.assert_close(weights(real=False), weights(real=True), rtol=1e-9, atol=1e-12)
