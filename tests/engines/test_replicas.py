"""Replicas of all stages: the mean of their gradients, in one process and in several, against literal references."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import reference
import torch
from cases import fingerprint
from preloaded import PYTHON
from processes import START, last_line, two_processes
from replica_cases import CASES, EXACT, RESUMED, WAYS, Case, at, images, layers, pipeline, sgd, train
from selected import some
from torch import nn

import offbeat
from offbeat.core.replicas import LocalReplicas, LocalWindowSum
from offbeat.core.window import GradientWindow
from offbeat.engines.simulate import Simulate
from offbeat.errors import UserError

HERE = Path(__file__).parent.parent


@cache
def simulated(name: str) -> dict:
    return train(CASES[name])


def torchrun(*arguments: str, nproc: int) -> None:
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def trained_by(tmp_path_factory) -> Callable[[int], list[dict]]:
    """What each of several processes found, in all ways: they are started once."""

    @cache
    def run(size: int) -> list[dict]:
        out = tmp_path_factory.mktemp("replicas")
        torchrun(str(HERE / "replica_cases.py"), str(out), *WAYS, nproc=size)
        return [json.loads((out / f"{size}-{rank}.json").read_text()) for rank in range(size)]

    return run


@pytest.mark.parametrize("name", some(CASES, of=2))
def test_interleaving_replicas_at_random_changes_no_bit(name):
    case = CASES[name]
    assert train(case, engine=lambda: Simulate(case.K, replicas=case.R, shuffle=1)) == simulated(name)


@pytest.mark.parametrize("name", RESUMED)
def test_replicas_continue_from_a_checkpoint_bit_for_bit(name, tmp_path):
    assert train(CASES[name], folder=str(tmp_path)) == simulated(name)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_replicas_in_processes_equal_the_simulator_bit_for_bit(size, how, trained_by):
    names = {name for name, case in CASES.items() if size == case.K * case.R}
    for rank, found in enumerate(trained_by(size)):
        assert set(found[how]) == names & set(WAYS[how])
        for name, result in found[how].items():
            expected, case = simulated(name), CASES[name]
            assert result["replica"] == rank // case.K
            for part in ("weights", "evaluate", "staleness"):
                assert result[part] == expected[part], f"{name}, rank {rank}, {part}"
            if result["replica"] == 0:
                assert result["buffers"] == expected["buffers"], f"{name}, rank {rank}"
    for name in trained_by(size)[0][how]:
        K, R = CASES[name].K, CASES[name].R
        last = [trained_by(size)[replica * K + K - 1][how][name]["losses"] for replica in range(R)]
        means = [None if None in at else sum(at) / R for at in zip(*last, strict=True)]
        for found, expected in zip(means, simulated(name)["losses"], strict=True):
            assert found == (None if expected is None else pytest.approx(expected, rel=1e-6, nan_ok=True)), name


@pytest.mark.parametrize(
    "options",
    [{}, {"on_nan": "skip"}, {"messages": "int8"}, {"clip_norm": 0.1, "clip_over": "model"}, {"left_out": (2, 3)}],
    ids=str,
)
def test_pipelined_back_propagation_of_replicas_is_back_propagation(options):
    plain, pipelined = (
        replace(
            CASES["skipped" if "on_nan" in options else "uneven"], method=method, options=tuple(options.items()), K=3
        )
        for method in (offbeat.BP(M=3), offbeat.BP(M=3, pipelined=True))
    )
    assert str(train(pipelined)) == str(train(plain))  # losses that are not finite are equal, too


def test_bp_with_two_replicas_equals_ddp_on_the_same_shares(tmp_path):
    torchrun(str(HERE / "replica_cases.py"), str(tmp_path), "ddp", nproc=2)
    expected = torch.load(tmp_path / "ddp.pt")
    pipe = pipeline(EXACT, scheduler=None)
    for t in range(EXACT.N):
        pipe.step(*at(pipe, EXACT, t))
    found = pipe.drain().state_dict()
    assert set(found) == set(expected)
    for name, tensor in expected.items():  # also BatchNorm's statistics, which are those of replica 0
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14, msg=name)


UNEQUAL = """
import torch, offbeat
layers, loss = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.functional.mse_loss
pipe = offbeat.Pipeline(layers, 1, method=offbeat.BP(M=2), replicas=2, loss=loss, optimizer=torch.optim.SGD)
for _ in range(3 + pipe.replica):
    pipe.step(torch.ones(1, 2), torch.ones(1, 2))
pipe.drain()
"""


def test_replicas_with_other_numbers_of_batches_are_refused():
    with two_processes(UNEQUAL) as started:
        ends = [last_line(process) for process in started]
    assert all("call step() and drain() equally often in every process" in end for end in ends), ends
    assert "replica 1 is at update 1 of 2 gradients where replica 0 is at the end of an epoch or a drain" in ends[0]


UNEQUAL_EPOCHS = """
import torch, offbeat
layers, loss = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.functional.mse_loss
pipe = offbeat.Pipeline(layers, 1, method="bp", M={M}, replicas=2, loss=loss, optimizer=torch.optim.SGD)
loader = [(torch.ones(1, 2), torch.ones(1, 2))] * (2 + pipe.replica)
pipe.fit(loader, epochs=2, own_share=True, evaluate=loader)
"""


@pytest.mark.parametrize(
    ("M", "place"), [(1, "at update 2 of 1 gradients"), (2, "at the end of an epoch or a drain after 3 batches")]
)
def test_epochs_of_replicas_with_other_numbers_of_batches_are_refused(M, place):
    with two_processes(UNEQUAL_EPOCHS.replace("{M}", str(M))) as started:
        ends = [last_line(process) for process in started]
    assert f"replica 1 is {place} where replica 0 is at the end of an epoch or a drain after 2 batches" in ends[0], ends
    assert all("equally often in every process" in end for end in ends), ends


TOO_FEW = """
import os, pathlib, sys, time, torch, offbeat
layers, loss = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.nn.functional.mse_loss
pipe = offbeat.Pipeline(layers, 2, replicas=2, loss=loss, optimizer=torch.optim.SGD, timeout=20)
began = time.monotonic()
try:
    pipe.fit([(torch.ones(1, 2), torch.ones(1, 2))])
except offbeat.UserError as error:
    assert time.monotonic() - began < 15
    out = pathlib.Path(sys.argv[1])
    (out / os.environ["RANK"]).write_text(str(error))
    while len(list(out.iterdir())) < 5 and time.monotonic() - began < 25:  # lives on, with the script
        time.sleep(0.1)
"""


def test_a_loader_with_too_few_batches_ends_all_processes_at_once(tmp_path):
    (tmp_path / "script.py").write_text(TOO_FEW)
    torchrun(str(tmp_path / "script.py"), str(tmp_path), nproc=4)
    for rank in range(4):
        assert "a loader of 1 batch with replicas=2: give at least one" in (tmp_path / str(rank)).read_text()


UNDER_WAY = """
import torch, offbeat
layers, loss = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.functional.mse_loss
pipe = offbeat.Pipeline(layers, 1, method="2bw", M=1, replicas=2, loss=loss, optimizer=torch.optim.SGD)
worker, x = pipe.workers[0], torch.ones(1, 2) * (1 + pipe.replica)
readers = [pipe.state_dict, pipe.reports, pipe.stage_states, pipe.engine.settle, lambda: pipe.model]
for t, read in enumerate([*readers, lambda: pipe.staleness]):
    pipe.step(x, x)
    assert worker.under_way and worker.stage.update_index == t
    read()
    assert worker.under_way is None and worker.stage.update_index == t + 1
pipe.step(x, x)
assert worker.under_way
before = layers[0].weight.clone()
pipe.close()
assert not torch.equal(layers[0].weight, before)
"""


def test_an_update_that_is_under_way_is_completed_by_whatever_reads_it():
    with two_processes(UNDER_WAY) as started:
        ends = [process.communicate(timeout=START)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], ends


FAILS_MEANWHILE = """
import sys, time, torch, offbeat
layers, loss = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.functional.mse_loss
pipe = offbeat.Pipeline(layers, 1, method="2bw", M=1, replicas=2, loss=loss, optimizer=torch.optim.SGD)
x = torch.ones(1, 2)
pipe.step(x, x)
if pipe.replica == 1:
    time.sleep(1000)
pipe.step(x, x)
assert pipe.workers[0].under_way
try:
    pipe.step(torch.ones(1, 3), x)
except offbeat.UserError:
    sys.exit(2)
"""


def test_a_process_that_fails_while_an_update_is_under_way_ends_without_it():
    with two_processes(FAILS_MEANWHILE) as (first, _):
        printed = first.communicate(timeout=START)[1]
    assert (first.returncode, printed) == (2, "")


FAILING = """
import time, torch, offbeat
from offbeat.engines import processes

processes.PARTING = 0.5
layers, loss = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.functional.mse_loss
pipe = offbeat.Pipeline(layers, 1, method="bp", replicas=2, loss=loss, optimizer=torch.optim.SGD)
pipe.step(torch.ones(1, 2), torch.ones(1, 2))
try:
    pipe.step(torch.ones(1, 2 + pipe.replica), torch.ones(1, 2))
except offbeat.errors.UserError as error:
    if pipe.replica == 0:
        raise
    time.sleep(1000)
"""


def test_a_replica_that_fails_and_lives_on_stops_the_other_with_its_reason():
    with two_processes(FAILING) as (first, _):
        printed = first.communicate(timeout=START)[1]
    assert "StageLost: stage 1 of replica 1 failed: stage 1 cannot take batch 1 of shape (1, 3)" in printed


class Layer(nn.Module):
    """Normalised by the mean of its batch, so that a batch of all replicas gives other gradients."""

    def __init__(self, W: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.W, self.b = nn.Parameter(W.clone()), nn.Parameter(b.clone())

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return run_layer((self.W, self.b), z)


def run_layer(theta: tuple[torch.Tensor, ...], z: torch.Tensor) -> torch.Tensor:
    h = z @ theta[0]
    return torch.tanh(h - h.mean(0) + theta[1])


def literal(K: int, M: int, shares: list) -> list[tuple[torch.Tensor, ...]]:
    """ADL with R replicas, written down: the newest weights of every stage.

    g_k^r(t)      = d loss(batch t of replica r) / d theta_k    at theta_j^(v_j(t)) for every stage j
    v_k(t)        = floor(max(0, t - 2(K-k)) / M)
    theta_k^(s+1) = theta_k^s - lr u_s,    u_s = momentum u_(s-1) + (1/RM) sum_r sum_(j<M) g_k^r(Ms+j) + decay theta_k^s
    """
    N, versions, momentum = len(shares[0]), [[theta] for theta in reference.network(K)], [None] * K
    for s in range(-(-N // M)):
        window = range(M * s, min(M * (s + 1), N))
        sums = [[torch.zeros_like(p) for p in each[-1]] for each in versions]
        for share in shares:
            for t in window:
                at_t = [versions[k - 1][max(0, t - 2 * (K - k)) // M] for k in range(1, K + 1)]
                leaves = [tuple(p.clone().requires_grad_() for p in theta) for theta in at_t]
                z, y = share[t]
                for theta in leaves:
                    z = run_layer(theta, z)
                loss = reference.mean_square(z, y)
                for k, theta in enumerate(leaves):
                    for total, g in zip(sums[k], torch.autograd.grad(loss, theta, retain_graph=True), strict=True):
                        total += g
        for k in range(K):
            theta, over = versions[k][-1], len(shares) * len(window)
            step = [g / over + reference.DECAY * p for g, p in zip(sums[k], theta, strict=True)]
            before = momentum[k] or [torch.zeros_like(g) for g in step]
            momentum[k] = [reference.MOMENTUM * m + g for m, g in zip(before, step, strict=True)]
            versions[k].append(tuple(p - reference.LR * u for p, u in zip(theta, momentum[k], strict=True)))
    return [each[-1] for each in versions]


@pytest.mark.parametrize(("K", "M", "R"), [(1, 1, 2), (2, 2, 2), (3, 1, 3), (3, 4, 2)])
def test_adl_with_replicas_equals_the_literal_computation(K, M, R):
    N = 11
    given = reference.data(N * R)
    shares = [given[r::R] for r in range(R)]
    settings = {"lr": reference.LR, "momentum": reference.MOMENTUM, "weight_decay": reference.DECAY}
    pipe = offbeat.Pipeline(
        [Layer(*theta) for theta in reference.network(K)],
        method=offbeat.ADL(M=M),
        replicas=R,
        loss=reference.mean_square,
        optimizer=lambda parameters: torch.optim.SGD(parameters, **settings),
    )
    for t in range(N):
        pipe.step([share[t][0] for share in shares], [share[t][1] for share in shares])
    model = pipe.drain()
    for layer, expected in zip(model, literal(K, M, shares), strict=True):
        torch.testing.assert_close([layer.W.detach(), layer.b.detach()], list(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", [offbeat.BP(), offbeat.BP(M=2), offbeat.GPipe(m=2)], ids=["bp", "bp-2", "gpipe"])
@pytest.mark.parametrize("sizes", [(3, 8, 8, 5), (8, 3, 5, 8)])
def test_weighting_by_samples_is_the_mean_over_the_samples_of_all_replicas(method, sizes):
    given = [(x.double().flatten(1), y) for x, y in images(4, sizes=sizes)]
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Sequential(nn.Linear(48, 6), nn.Tanh()), nn.Linear(6, 4)).double()
    expected = copy.deepcopy(trained)
    pipe = offbeat.Pipeline(
        trained,
        K=2,
        cuts=[1],
        method=method,
        replicas=2,
        loss=nn.functional.cross_entropy,
        optimizer=sgd,
        weighting="samples",
    )
    for first, second in (given[:2], given[2:]):
        pipe.step(*map(list, zip(first, second, strict=True)))
    pipe.drain()
    optimizer = sgd(expected.parameters())
    for at_once in [given[i : i + 2 * method.M] for i in range(0, 4, 2 * method.M)]:
        optimizer.zero_grad()
        x, y = map(torch.cat, zip(*at_once, strict=True))
        nn.functional.cross_entropy(expected(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(trained.state_dict(), expected.state_dict(), rtol=0, atol=1e-12)


def test_fit_gives_each_replica_every_rth_batch():
    case = CASES["method-adl"]
    loader = images(2 * case.N + 1)  # the last has no partner
    fitted, stepped = pipeline(case), pipeline(case)
    fitted.fit(loader)
    for t in range(case.N):
        stepped.step(*at(stepped, case, t))
    assert fitted.batches == case.N
    with pytest.raises(UserError, match="a loader of 1 batch with replicas=2: give at least one for each replica"):
        pipeline(case).fit(loader[:1])
    with pytest.raises(UserError, match="own_share=True with all replicas in one process: leave it out"):
        fitted.fit(loader, own_share=True)
    assert fingerprint(fitted.model.state_dict()) == fingerprint(stepped.drain().state_dict())


def test_batch_is_split_over_replicas_and_micro_batches():
    options = {"batch": 12, "replicas": 2, "loss": nn.functional.cross_entropy, "optimizer": sgd, "K": 2, "cuts": [1]}
    whole = offbeat.Pipeline(layers(), method="adl", M=3, **options)
    x, y = images(1, sizes=(6,))[0]
    whole.step([x, x], [y, y])
    assert whole.batches == 3
    assert "batch=12, replicas=2" in repr(whole)
    with pytest.raises(UserError, match="batch=7 with replicas=2: use a multiple of 2, which splits it"):
        offbeat.Pipeline(layers(), method="adl", M=3, **{**options, "batch": 7})


@pytest.mark.parametrize(
    "name", ["method-adl", "method-dsp", "method-gpipe", "method-dgl", "uneven", "clipped", "adaptive"]
)
@pytest.mark.parametrize("stop", [3, 5])
def test_replicas_continue_from_a_state_bit_for_bit(name, stop):
    case = CASES[name]
    straight, before, after = pipeline(case), pipeline(case), pipeline(case)
    for t in range(case.N):
        straight.step(*at(straight, case, t))
    before.keep()
    for t in range(stop):
        before.step(*at(before, case, t))
    trees = before.stage_states()
    assert set(trees) == {1, 2, 3, 4}
    assert "optimizer" not in trees[3]["stage"]  # the same in replica 0
    after.load_stage_states(trees, stop)
    for t in range(stop, case.N):
        after.step(*at(after, case, t))
    assert fingerprint(after.drain().state_dict()) == fingerprint(straight.drain().state_dict())


@pytest.mark.parametrize("earlier", [True, False])
def test_the_memory_of_a_corrector_of_gradients_is_each_replicas_own(earlier):
    """Earlier versions saved that of replica 0 alone, and went on with it in all replicas."""
    case = CASES["adaptive"]
    before, after = pipeline(case), pipeline(case)
    for t in range(5):
        before.step(*at(before, case, t))
    trees = before.stage_states()
    if earlier:
        trees[3]["stage"].pop("corrections")
    after.load_stage_states(trees, 5)

    def mean_squares(pipe):
        memories = [stage.optimization.corrections.place.memory for stage in pipe.all_stages if stage.k == 1]
        return [fingerprint({str(i): kept["mean_square"] for i, kept in enumerate(m.values())}) for m in memories]

    first, second = mean_squares(before)
    assert first != second
    assert mean_squares(after) == [first, first if earlier else second]


def test_a_drained_state_is_loaded_with_another_number_of_replicas():
    case = CASES["method-adl"]
    before, other = pipeline(case), pipeline(replace(case, R=3))
    for t in range(4):
        before.step(*at(before, case, t))
    before.drain()
    other.load_stage_states(before.stage_states(), 4)
    assert fingerprint(other.gather().state_dict()) == fingerprint(before.gather().state_dict())
    for t in range(4, 8):
        other.step(*at(other, replace(case, R=3), t))
    copies = [dict(stage.parameters) for stage in other.all_stages]
    for first, *others in ((copies[k], copies[k + 2], copies[k + 4]) for k in range(2)):
        assert all(torch.equal(first[name], copy[name]) for copy in others for name in first)


def test_batches_in_flight_of_another_number_of_replicas_are_refused():
    case = CASES["method-adl"]
    before = pipeline(case)
    for t in range(4):
        before.step(*at(before, case, t))
    with pytest.raises(UserError, match=r"a state of 2 replicas with batches in flight .* replicas=1: give replicas=2"):
        pipeline(replace(case, R=1)).load_stage_states(before.stage_states(), 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 0}, "replicas=0: use a whole number from 1 up"),
        ({"replicas": True}, "replicas=True: use a whole number from 1 up"),
        (
            {"replicas": 2, "method": "dni"},
            "dni with replicas=2: it trains its synthesisers by an optimizer of their own",
        ),
        (
            {"replicas": 2, "method": "asgd", "K": 1, "cuts": None},
            "asgd with replicas=2: it has several workers itself",
        ),
        ({"replicas": 2, "engine": Simulate(2)}, "replicas=2, but an engine for 1: give both the same number"),
        ({"replicas": 2, "engine": "streams"}, "engine='streams' with replicas=2: on one GPU replicas share its time"),
        (
            {"replicas": 2, "engine": "processes"},
            "2 stages of 2 replicas but 1 process: start with torchrun --nproc-per",
        ),
    ],
)
def test_wrong_replicas_are_refused_in_one_line(options, words):
    given = {"K": 2, "method": "adl", "cuts": [1], **options}
    with pytest.raises(UserError, match=re.escape(words)):
        offbeat.Pipeline(layers(), loss=nn.functional.cross_entropy, optimizer=sgd, **given)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4, 4), [torch.zeros(2, 3, 4, 4)] * 3, None])
def test_step_needs_a_batch_for_each_replica_of_its_process(x):
    pipe = pipeline(CASES["method-adl"])
    with pytest.raises(UserError, match=r"step\(\) with replicas=2 in one process, but x is .*: give a list of 2"):
        pipe.step(x, [torch.zeros(2, dtype=torch.int64)] * 2)


@pytest.mark.parametrize("replica", [0, 1])
def test_a_loss_that_is_not_finite_is_reported_with_its_replica(replica):
    case = Case(offbeat.ADL(M=1))
    pipe, batches = pipeline(case), images(2)
    batches[replica][0][0] = torch.nan
    with pytest.raises(offbeat.NotFinite, match=rf"the loss of batch 0 of replica {replica} is nan \(seen at stage 2"):
        pipe.step(*map(list, zip(*batches, strict=True)))


def test_diagnosis_of_replicas_is_refused():
    with pytest.raises(UserError, match=r"diagnose\(\) with replicas=2: it compares an update with the batches of one"):
        pipeline(CASES["method-adl"]).diagnose(2)


def test_windows_of_one_process_are_added_with_what_replicas_lack_and_request():
    """Parameter a has a gradient in both replicas, b in one of them, c in none."""
    stage = LocalReplicas(2)
    sums = [LocalWindowSum(stage, replica) for replica in (0, 1)]

    def windows() -> list[GradientWindow]:
        made = [GradientWindow({name: nn.Parameter(torch.zeros(2)) for name in "abc"}) for _ in sums]
        made[0].add(0, [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0]), None], 0, [])
        made[1].add(0, [torch.tensor([10.0, 20.0]), None, None], 0, [])
        return made

    for requests in ((0, 5), (0, 0), (3, 4)):
        given = windows()
        for part, window, request in zip(sums, given, requests, strict=True):
            assert not sums[0].ready()
            part.request = request or part.request
            part.start(window, update=7, over=1, unit=1)
        for part, window in zip(sums, given, strict=True):
            assert part.ready()
            assert part.finish(window) == next(filter(None, requests), 0)
            found = {name: None if p.grad is None else p.grad.tolist() for name, p in window.parameters.items()}
            assert found == {"a": [11.0, 22.0], "b": [5.0, 6.0], "c": None}
            assert window.combined == (2, 0.0)
    for part, window, update in zip(sums, windows(), (7, 8), strict=True):
        part.start(window, update=update, over=1, unit=1)
    with pytest.raises(UserError, match="replica 1 is at update 8 of 1 gradients where replica 0 is at update 7 of 1"):
        sums[0].finish(windows()[0])
