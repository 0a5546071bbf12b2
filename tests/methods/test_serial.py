"""Every method: what the engine ends with is what a literal serial computation of its paper ends with."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import serial
import torch
from engine import agree, pipeline, trained
from serial import Rules, adl, data, final, lagged
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offbeat

BATCHES = (1, 6, 23)  # fewer than a round trip, not a whole number of windows, long enough to be stale


def check(found: list, expected: list, case: str) -> None:
    """Stage by stage within 1e-12; and there is something to compare: every tensor moved."""
    start = serial.network(len(expected))
    assert len(found) == len(expected), case
    for k, (mine, wanted, first) in enumerate(zip(found, expected, start, strict=True), start=1):
        for a, b in zip(wanted, first, strict=True):
            assert a.isfinite().all(), f"{case} stage {k}"
            assert (a - b).abs().max() > 1e-6, f"{case} stage {k} did not move"
        agree(mine, wanted, f"{case} stage {k}")


def on_adl(corrector: Callable[[], Any], weights: str = "stash", **rules: Any) -> tuple:
    return (
        lambda M: offbeat.ADL(M=M, corrector=corrector(), weights=weights),
        lambda M: replace(adl(M, weights), **rules),
        (1, 2, 3),
    )


def spike(**options: Any) -> Any:
    return offbeat.SpikeCompensation(**options)


def predict(**options: Any) -> Any:
    return offbeat.WeightPrediction(**options)


def compensate(**options: Any) -> Any:
    return offbeat.DelayCompensation(**options)


SOME, ONE = (1, 2, 3, 4), (1,)

# name -> the engine's method for M, the reference's rules for M, the M to try
LAGGED: dict[str, tuple[Callable[[int], Any], Callable[[int], Rules], tuple[int, ...]]] = {
    "bp": (lambda M: offbeat.BP(M=M), serial.bp, SOME),
    "adl": (lambda M: offbeat.ADL(M=M), serial.adl, SOME),
    "adl hybrid": (lambda M: offbeat.ADL(M=M, weights="hybrid"), lambda M: adl(M, "hybrid"), SOME),
    "adl replay": (lambda M: offbeat.ADL(M=M, weights="replay"), lambda M: adl(M, "replay"), SOME),
    "adl 1f1b": (lambda M: offbeat.ADL1F1B(M=M), serial.adl_1f1b, SOME),
    "pipedream": (lambda M: offbeat.PipeDream(), lambda M: serial.pipedream(), ONE),
    "ddg": (lambda M: offbeat.DDG(), lambda M: serial.pipedream(), ONE),
    "ddg dataflow": (lambda M: offbeat.DDG(barrier=False), lambda M: serial.pipedream(), ONE),
    "fdg": (lambda M: offbeat.FDG(), lambda M: serial.fdg(), ONE),
    "fdg shrunk": (lambda M: offbeat.FDG(beta=0.5), lambda M: serial.fdg(0.5), ONE),
    "fdg hybrid": (lambda M: offbeat.FDG(beta=0.7, weights="hybrid"), lambda M: serial.fdg(0.7, "hybrid"), ONE),
    "fr": (lambda M: offbeat.FR(), lambda M: serial.fr(), ONE),
    "fr dataflow": (lambda M: offbeat.FR(barrier=False), lambda M: serial.fr(), ONE),
    "dsp": (lambda M: offbeat.DSP(), lambda M: serial.dsp(), ONE),
    "2bw": (lambda M: offbeat.TwoBW(M=M), serial.two_bw, (1, 2, 3, 4, 8)),
    "pipemare": (lambda M: offbeat.PipeMare(M=M), serial.pipemare, (1, 2, 3)),
    "pipemare with T1": (lambda M: offbeat.PipeMare(M=M, anneal=3, C=0.3), lambda M: serial.pipemare(M, 3, 0.3), SOME),
    "spectrain": (lambda M: offbeat.SpecTrain(), lambda M: serial.spectrain(), ONE),
    "spectrain 2": (lambda M: offbeat.SpecTrain(version=2), lambda M: serial.spectrain(2), ONE),
    "pb": (lambda M: offbeat.PB(), lambda M: serial.pb(), ONE),
    "pb, plain": (lambda M: offbeat.PB(corrector=None), lambda M: adl(1, "hybrid"), ONE),
    "nag async": (lambda M: offbeat.NAGAsync(), lambda M: serial.nag_async(), ONE),
    "nag async 0.95": (lambda M: offbeat.NAGAsync(gamma=0.95), lambda M: serial.nag_async(0.95), ONE),
    "sc": on_adl(lambda: spike(), spike=True),
    "sc, a delay given": on_adl(lambda: spike(delay=2.5), spike=True, spike_delay=2.5),
    "lwp": on_adl(lambda: predict(), predict="velocity"),
    "lwp, weight form": on_adl(lambda: predict(form="weight"), predict="weight"),
    "lwp, a horizon given": on_adl(lambda: predict(horizon=1.5), predict="velocity", horizon=1.5),
    "lwp, weights, a horizon": on_adl(lambda: predict(horizon=1.5, form="weight"), predict="weight", horizon=1.5),
    "lwp hybrid": on_adl(lambda: predict(), "hybrid", predict="velocity"),
    "lwp replay": on_adl(lambda: predict(), "replay", predict="velocity"),
    "lwp and sc": on_adl(lambda: (predict(), spike()), predict="velocity", spike=True),
    "lwp and sc by name": on_adl(lambda: "lwp+sc", predict="velocity", spike=True),
    "lwp, weight form, and sc": on_adl(lambda: (predict(form="weight"), spike()), predict="weight", spike=True),
    "sc on bp": (
        lambda M: replace(offbeat.BP(M=M), correctors=(spike(delay=1.5),)),
        lambda M: replace(serial.bp(M), spike=True, spike_delay=1.5),
        SOME,
    ),
    "sc on 1f1b": (
        lambda M: offbeat.ADL1F1B(M=M, corrector=spike()),
        lambda M: replace(serial.adl_1f1b(M), spike=True),
        SOME,
    ),
    "sc on 2bw": (
        lambda M: offbeat.TwoBW(M=M, corrector=spike(delay=1)),
        lambda M: replace(serial.two_bw(M), spike=True, spike_delay=1),
        (3, 4),
    ),
    "sc on 2bw, its own delay": (
        lambda M: offbeat.TwoBW(M=M, corrector=spike()),
        lambda M: replace(serial.two_bw(M), spike=True),
        (3, 4),
    ),
    "dc on 2bw": (
        lambda M: offbeat.TwoBW(M=M, corrector=compensate(lambda_=3.0)),
        lambda M: replace(serial.two_bw(M), compensate=3.0),
        (3, 4),
    ),
    "sc on fr": (
        lambda M: replace(offbeat.FR(), correctors=(spike(),)),
        lambda M: replace(serial.fr(), spike=True),
        ONE,
    ),
    "sc on dsp": (
        lambda M: replace(offbeat.DSP(), correctors=(spike(),)),
        lambda M: replace(serial.dsp(), spike=True),
        ONE,
    ),
    "sc on ddg": (lambda M: offbeat.DDG(corrector=spike()), lambda M: replace(serial.pipedream(), spike=True), ONE),
    "lwp on pipedream": (
        lambda M: offbeat.PipeDream(corrector=predict()),
        lambda M: replace(serial.pipedream(), predict="velocity"),
        ONE,
    ),
    "dc on fdg": (
        lambda M: offbeat.FDG(beta=0.5, corrector=compensate(lambda_=3.0)),
        lambda M: replace(serial.fdg(0.5), compensate=3.0),
        ONE,
    ),
    "dc": on_adl(lambda: compensate(), compensate=0.04),
    "dc, strong": on_adl(lambda: compensate(lambda_=3.0), compensate=3.0),
    "dc, adaptive": on_adl(lambda: compensate(lambda_=2.0, adaptive=True), compensate=2.0, adaptive=True),
    "dc and sc": on_adl(lambda: (compensate(lambda_=3.0), spike()), compensate=3.0, spike=True),
    "dc and lwp": on_adl(lambda: (compensate(lambda_=3.0), predict()), compensate=3.0, predict="velocity"),
    "look-ahead": on_adl(lambda: offbeat.NesterovMomentum(0.95), look_ahead=0.95),
    "rescheduling": on_adl(lambda: offbeat.Rescheduling(updates=3), anneal=3),
    "rescheduling and sc": on_adl(lambda: (offbeat.Rescheduling(updates=3), spike()), anneal=3, spike=True),
    "rescheduling and lwp": on_adl(lambda: "t1:3+lwp", anneal=3, predict="velocity"),
    "rescheduling, lwp and sc": on_adl(lambda: "t1:3+lwp+sc", anneal=3, predict="velocity", spike=True),
    "rescheduling and lwp hybrid": on_adl(lambda: "t1:3+lwp", "hybrid", anneal=3, predict="velocity"),
    "rescheduling and lwp replay": on_adl(lambda: "t1:3+lwp", "replay", anneal=3, predict="velocity"),
    "rescheduling on spectrain": (
        lambda M: offbeat.SpecTrain(corrector="t1:3"),
        lambda M: replace(serial.spectrain(), anneal=3),
        ONE,
    ),
    "rates by delay on spectrain 2": (
        lambda M: offbeat.SpecTrain(version=2, corrector="t1:power=1"),
        lambda M: replace(serial.spectrain(2), rate_power=1.0),
        ONE,
    ),
    "discrepancy": on_adl(lambda: offbeat.Discrepancy(0.3), "hybrid", discrepancy=0.3),
    "discrepancy and sc": on_adl(lambda: (offbeat.Discrepancy(0.3), spike()), "hybrid", discrepancy=0.3, spike=True),
    "shrink, dc and sc": on_adl(
        lambda: (offbeat.Shrink(0.5), compensate(lambda_=3.0), spike()), shrink=0.5, compensate=3.0, spike=True
    ),
    "shrink": on_adl(lambda: offbeat.Shrink(0.5), shrink=0.5),
    "shrink hybrid": on_adl(lambda: offbeat.Shrink(0.5), "hybrid", shrink=0.5),
}


def every(windows: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    return itertools.product((1, 2, 3, 4), windows, BATCHES)


def pairwise(windows: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """K, M and N: all K with all M over many batches, and all K and all M over few."""
    for K, place in itertools.product((1, 2, 3, 4), range(len(windows))):
        short = [N for at, N in enumerate(BATCHES[:-1]) if (place - K - at) % len(windows) == 0]
        for N in (*short, stale(windows[place])):
            yield K, windows[place], N


def stale(M: int) -> int:
    """Batches for two windows of M and more, twice the lag of four stages at least: the first is stale by then."""
    return max(13, 2 * M + 7)


def test_pairwise_has_all_pairs():
    for windows in ((1,), (3, 4), (1, 2, 3), SOME):
        found = [(K, M, BATCHES[-1] if stale(M) == N else N) for K, M, N in pairwise(windows)]
        for one, other in itertools.combinations(range(3), 2):
            values = ((1, 2, 3, 4), windows, BATCHES)
            assert {(each[one], each[other]) for each in found} == set(itertools.product(values[one], values[other]))


@pytest.mark.parametrize("combined", [pairwise, pytest.param(every, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAGGED)
def test_a_lagged_method_is_its_serial_computation(name, combined):
    method, rules, windows = LAGGED[name]
    for K, M, N in combined(windows):
        if name == "2bw" and M < K - 1:
            continue
        expected = final(lagged(K, data(N), rules(M)))
        check(trained(pipeline(K, method(M)), data(N)), expected, f"{name} K={K} M={M} N={N}")


@pytest.mark.parametrize("M", [1, 2])
def test_2bw_refuses_a_window_shorter_than_its_round_trip(M):
    with pytest.raises(offbeat.errors.UserError):
        pipeline(M + 2, offbeat.TwoBW(M=M))


@pytest.mark.parametrize(
    ("m", "recompute"),
    [
        *((m, False) for m in (1, 2, 3, 4, 8)),
        *(pytest.param(m, True, marks=() if m in (3, 8) else pytest.mark.slow) for m in (1, 2, 3, 4, 8)),
    ],
)
def test_gpipe_is_its_serial_computation(m, recompute):
    """Batches of 3 to 6 samples: parts of unequal sizes, and fewer than m of them."""
    for K, N in itertools.product((1, 2, 3, 4), BATCHES):
        found = trained(pipeline(K, offbeat.GPipe(m=m, recompute=recompute)), data(N))
        check(found, serial.gpipe(K, data(N), m), f"K={K} N={N}")


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_asgd_is_its_serial_computation(workers):
    for N in BATCHES:
        cases = [
            (offbeat.ASGD(N=workers), serial.asgd(workers)),
            (offbeat.DCASGD(N=workers), serial.dc_asgd(workers)),
            (offbeat.DCASGD(N=workers, lambda_=3.0), serial.dc_asgd(workers, 3.0)),
            (offbeat.DCASGD(N=workers, lambda_=2.0, adaptive=True), serial.dc_asgd(workers, 2.0, True)),
        ]
        for method, rules in cases:
            check(trained(pipeline(1, method), data(N)), final(lagged(1, data(N), rules)), f"{method} N={N}")


# --- local losses: the heads start as the engine made them -----------------------------------------------------------


def local_pipeline(K: int, method: Any, N: int) -> tuple[Any, list]:
    """With a sample, so that the heads exist before the first batch."""
    batches = data(N, classes=True)
    return pipeline(K, method, cross_entropy, sample=batches[0][0]), batches


def heads(pipe: Any, K: int, *names: str) -> serial.Heads:
    return {
        k: serial.copies(**{name: getattr(pipe.stages[k].feedback.head, name) for name in names}) for k in range(1, K)
    }


def check_heads(pipe: Any, stages: list, names: tuple[str, ...], case: str) -> None:
    for stage in stages[:-1]:
        for name in names:
            mine, wanted = (
                part.parameters() for part in (getattr(pipe.stages[stage.k].feedback.head, name), stage.parts[name])
            )
            agree(mine, wanted, f"{case} head {stage.k}")


LOCAL: dict[str, tuple[Callable[[], Any], Callable[[], serial.LocalRule], tuple[str, ...]]] = {
    "dgl": (lambda: offbeat.DGL(), lambda: serial.DGL, ("net",)),
    "pred": (lambda: offbeat.Pred(), lambda: serial.PRED, ("net",)),
    "sim": (lambda: offbeat.Sim(), lambda: serial.sim(1.0), ("project",)),
    "predsim": (lambda: offbeat.PredSim(), lambda: serial.pred_sim(), ("net", "project")),
    "predsim, even": (lambda: offbeat.PredSim(beta=0.5), lambda: serial.pred_sim(0.5), ("net", "project")),
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_method_of_local_losses_is_its_serial_computation(name):
    method, rule, names = LOCAL[name]
    for K, N in itertools.product((1, 2, 3, 4), BATCHES):
        case = f"{name} K={K} N={N}"
        pipe, batches = local_pipeline(K, method(), N)
        stages = serial.local(K, batches, rule(), heads(pipe, K, *names))
        check(trained(pipe, batches), [stage.versions[-1] for stage in stages], case)
        check_heads(pipe, stages, names, case)


@pytest.mark.parametrize("feedback", ["transpose", "sign"])
def test_mostafa_is_its_serial_computation(feedback):
    for K, N in itertools.product((1, 2, 3, 4), BATCHES):
        pipe, batches = local_pipeline(K, offbeat.Mostafa(feedback=feedback), N)
        W = {k: pipe.stages[k].feedback.head.W.clone() for k in range(1, K)}
        back = W if feedback == "transpose" else {k: pipe.stages[k].feedback.head.S.clone() for k in range(1, K)}
        for k in range(1, K):
            assert torch.equal(back[k].sign(), W[k].sign())
            assert feedback == "transpose" or not torch.equal(back[k], W[k])
        check(trained(pipe, batches), serial.mostafa(K, batches, W, back), f"{feedback} K={K} N={N}")
        assert all(torch.equal(pipe.stages[k].feedback.head.W, W[k]) for k in range(1, K)), "the classifier is fixed"


@pytest.mark.parametrize(("buffer", "seed"), [(1, 0), (2, 0), (2, 5), (4, 1)])
def test_asynchronous_dgl_is_its_program_carried_out_stage_by_stage(buffer, seed):
    for K, N in itertools.product((1, 2, 3, 4), (1, 6, 23)):
        case = f"K={K} N={N}"
        method = offbeat.AsyncDGL(buffer=buffer, seed=seed)
        pipe, batches = local_pipeline(K, method, N)
        programs = {k: list(itertools.chain(*method.program(k, K, range(N)))) for k in range(1, K + 1)}
        stages = serial.async_dgl(K, batches, heads(pipe, K, "net"), programs)
        moved = [stage for stage in stages if len(stage.versions) > 1]
        assert moved[0].k == 1
        found = trained(pipe, batches)
        for stage in stages:
            agree(found[stage.k - 1], stage.versions[-1], f"{case} stage {stage.k}")
        if N >= 6:
            check(found, [stage.versions[-1] for stage in stages], case)
        check_heads(pipe, stages, ("net",), case)


class Smooth(nn.Module):
    """A synthesiser without BatchNorm: the bias in front of one has gradient zero, and Adam makes steps of rounding."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.label = nn.Linear(serial.WIDTH, 8), nn.Linear(classes, 8)
        self.last = nn.Linear(8, serial.WIDTH)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.double()

    def forward(self, h: Tensor, label: Tensor | None) -> Tensor:
        return self.last(torch.tanh(self.first(h) + (0 if label is None else self.label(label))))


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize(("lr", "smooth"), [(3e-5, False), (0.01, False), (0.01, True)])
def test_synthetic_gradients_are_their_serial_computation(lr, smooth, conditional):
    synthesiser = (lambda shape, classes: Smooth(classes)) if smooth else None
    for K, N in itertools.product((1, 2, 3, 4), (1, 2, 3, 6, 11)):
        case = f"K={K} N={N}"
        pipe, batches = local_pipeline(K, offbeat.DNI(conditional=conditional, lr=lr, synthesiser=synthesiser), N)
        nets = {k: copy.deepcopy(pipe.stages[k].feedback.head.net) for k in range(1, K)}
        start = {k: [p.detach().clone() for p in net.parameters()] for k, net in nets.items()}
        expected, nets = serial.dni(batches, serial.network(K), nets, lr=lr, conditional=conditional)
        check(trained(pipe, batches), expected, case)
        for k, net in nets.items():
            mine = list(pipe.stages[k].feedback.head.net.parameters())
            if smooth or lr < 0.01:
                agree(mine, net.parameters(), f"{case} synthesiser {k}")
            if N == 11:  # by then the loss has been heard of at the bottom
                assert not all(map(torch.equal, mine, start[k])), f"{case} synthesiser {k} learnt nothing"
