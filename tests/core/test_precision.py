"""bf16, tf32 and torch.compile: exact where they are said to be, and near float32 otherwise."""

from __future__ import annotations

import json
from functools import partial
from typing import get_args, get_type_hints

import pytest
import torch
from cases import MeanPool
from command import Command, check_refused
from torch import nn
from torch.func import functional_call

import offbeat
from offbeat import checkpoint
from offbeat.core import compiled, precision
from offbeat.core.links import Message
from offbeat.core.links.wire import pack, unpack
from offbeat.core.precision import PrecisionPolicy
from offbeat.engines.simulate import Simulate
from offbeat.errors import UserError
from offbeat.methods import METHODS
from offbeat.runs import resuming
from offbeat.runs.recipe import Recipe, make_recipe

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2)),
        MeanPool(),
        nn.Linear(8, 4),
    )


def batches(n: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(6, 3, 6, 6, generator=g), torch.randint(4, (6,), generator=g)) for _ in range(n)]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def pipeline(method: offbeat.Method, model: nn.Module | None = None, K: int = 2, **options) -> offbeat.Pipeline:
    options = {"loss": nn.functional.cross_entropy, "optimizer": sgd, "precision": "bf16", **options}
    if model is None and K > 1:
        options["cuts"] = (1, 2)[: K - 1]
    return offbeat.Pipeline(model or network(), K, method=method, sample=batches(1)[0][0], **options)


def finish(pipe: offbeat.Pipeline, data: list) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [pipe.step(x, y) for x, y in data]
    losses = [None if loss is None else float(loss) for loss in losses]
    pipe.drain()
    return losses, {name: tensor.clone() for name, tensor in pipe.model.state_dict().items()}


def spy(seen: list, send, message: Message) -> None:
    seen.append(message.content[0])
    send(message)


def same(found: tuple, expected: tuple) -> bool:
    return found[0] == expected[0] and all(torch.equal(tensor, expected[1][name]) for name, tensor in found[1].items())


# ---- bf16 is what it says


def test_bf16_is_the_literal_loop_on_copies_with_float32_sums():
    """K=1, BP, M=2, written out: no code of the engine."""
    model = network()[0:1] + network()[2:]  # no dropout, whose stream is the engine's
    pipe = pipeline(offbeat.BP(M=2), network()[0:1] + network()[2:], K=1)
    data = batches(8)
    found = finish(pipe, data)

    optimizer, losses = sgd(model.parameters()), []
    names = [name for name, _ in model.named_parameters()]
    for t, (x, y) in enumerate(data):
        if t % 2 == 0:
            copies = {
                name: (p.detach().to(torch.bfloat16) if p.dim() > 1 else p.detach().clone()).requires_grad_()
                for name, p in model.named_parameters()
            }
            sums = [torch.zeros_like(p) for p in model.parameters()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = functional_call(model, copies, (x.to(torch.bfloat16),))
        loss = nn.functional.cross_entropy(scores.float(), y)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, [copies[name] for name in names])
        assert {g.dtype for g in gradients} == {torch.bfloat16, torch.float32}
        for total, gradient in zip(sums, gradients):
            total += gradient.float()
        if t % 2:
            for p, total in zip(model.parameters(), sums):
                p.grad = total / 2
            optimizer.step()
    assert same(found, (losses, model.state_dict()))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_in_bf16_near_float32(name):
    K = 1 if METHODS[name]().limit and METHODS[name]().limit(2) else 2
    data = batches(7)
    options = {"K": K, "optimizer": lambda p: torch.optim.SGD(p, lr=0.005, momentum=0.9)}  # not yet chaotic
    pipe = pipeline(METHODS[name](), **options)
    low, weights = finish(pipe, data)
    full, expected = finish(pipeline(METHODS[name](), precision="fp32", **options), data)
    assert low != full
    assert low[:2] == pytest.approx(full[:2], abs=0.05)
    for key, tensor in weights.items():
        assert tensor.dtype == expected[key].dtype
        assert torch.allclose(tensor, expected[key], atol=0.1), key
    for stage in pipe.stages.values():
        states = [
            state
            for values in stage.optimization.optimizer.state.values()
            for state in values.values()
            if state is not None
        ]
        kept = [*stage.parameters.values(), *(p.grad for p in stage.parameters.values() if p.grad is not None), *states]
        assert {tensor.dtype for tensor in kept if isinstance(tensor, torch.Tensor)} == {torch.float32}
    assert pipe.evaluate(data)["samples"] == 42


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_a_run_in_bf16_resumes_bit_for_bit_with_batches_in_flight(weights, tmp_path):
    data, at = batches(12), 7
    method = offbeat.ADL(M=2, weights=weights)
    whole = finish(pipeline(method), data)
    first = pipeline(method)
    for t, (x, y) in enumerate(data[:at]):
        if t == 3:
            first.keep()
        first.step(x, y)
    trees = {}
    for k, tree in first.stage_states().items():
        facts = {fact.name: fact for fact in checkpoint.write_part(tmp_path, f"stage-{k}", tree)}
        trees[k] = checkpoint.parts.read_part(tmp_path, f"stage-{k}", facts)
    kinds = {tensor.dtype for version in trees[1]["stage"]["versions"] for tensor in version.values()}
    assert kinds == (set() if weights == "replay" else {torch.bfloat16, torch.float32})
    second = pipeline(method)
    second.load_stage_states(trees, batches=at)
    assert same(finish(second, data[at:]), (whole[0][at:], whole[1]))


def test_what_crosses_a_cut_is_bf16_and_halves_the_message():
    sizes = {}
    for kind in ("bf16", "fp32"):
        pipe = pipeline(offbeat.ADL(M=2), precision=kind)
        sent = []
        for link in (pipe.workers[0].links.outputs, pipe.workers[1].links.feedback):
            link.send = partial(spy, sent, link.send)
        finish(pipe, batches(3))
        assert {tensor.dtype for tensor in sent} == {torch.bfloat16 if kind == "bf16" else torch.float32}
        sizes[kind] = sum(tensor.nbytes for tensor in sent)
    assert sizes["fp32"] == 2 * sizes["bf16"]


def test_a_link_carries_bf16_and_its_layout():
    tensor = torch.randn(2, 3, 4, 5).to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
    found = unpack(pack(Message(3, (tensor, None)))).content[0]
    assert torch.equal(found, tensor)
    assert found.dtype == torch.bfloat16
    assert found.stride() == tensor.stride()


@pytest.mark.parametrize("weights", ["stash", "hybrid", "replay"])
def test_copies_are_made_once_an_update(weights, monkeypatch):
    """And one of two kept versions is in bfloat16, matrices alone."""
    pipe = pipeline(offbeat.ADL(M=3, weights=weights))
    stage, made = pipe.stages[1], []

    def lower(self, value, original=PrecisionPolicy.lower):
        made.append(value.shape)
        return original(self, value)

    def refresh(copies, values, original=torch._foreach_copy_):
        made.extend(value.shape for value in values)
        return original(copies, values)

    for k in (2,):
        pipe.stages[k].weights.current()
    finish(pipe, batches(2))  # nothing is applied yet at stage 1 but by the drain
    monkeypatch.setattr(PrecisionPolicy, "lower", lower)
    monkeypatch.setattr(torch, "_foreach_copy_", refresh)
    for _ in range(5):
        version = stage.weights.current()
    assert made == [stage.parameters["0.0.weight"].shape]
    types = {name: tensor.dtype for name, tensor in version.tensors.items()}
    assert types == {
        "0.0.weight": torch.bfloat16,
        "0.0.bias": torch.float32,
        "0.1.weight": torch.float32,
        "0.1.bias": torch.float32,
    }
    assert torch.equal(version.tensors["0.0.weight"], stage.parameters["0.0.weight"].to(torch.bfloat16))


def test_whole_numbers_enter_as_they_are():
    model = nn.Sequential(nn.Embedding(300, 6), nn.Flatten(), nn.Linear(12, 4))
    pipe = offbeat.Pipeline(
        model,
        2,
        method=offbeat.ADL(M=1),
        loss=nn.functional.cross_entropy,
        cuts=(1,),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        precision="bf16",
    )
    x = torch.tensor([[257, 259], [299, 1]])  # of which bfloat16 has but the last
    before = model[0].weight.detach().clone()
    finish(pipe, [(x, torch.tensor([0, 1]))] * 3)
    moved = (model[0].weight.detach() != before).any(1)
    assert set(torch.nonzero(moved).flatten().tolist()) == {257, 259, 299, 1}


def test_interleaving_stages_changes_no_bit_in_bf16():
    found = [
        finish(pipeline(offbeat.ADL(M=2), engine=engine), batches(6))[1]
        for engine in (Simulate(2), Simulate(2, shuffle=1))
    ]
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_versions_in_bf16_take_half_the_memory():
    model = [nn.Sequential(nn.Linear(64, 64, bias=False)), nn.Linear(64, 4)]
    memory = {}
    for kind in ("bf16", "fp32"):
        pipe = offbeat.Pipeline(
            model, method=offbeat.ADL(M=1), loss=nn.functional.cross_entropy, optimizer=sgd, precision=kind
        )
        stage = pipe.stages[1]
        memory[kind] = stage.memory()
        assert stage.figures.most_versions == 3
    assert memory["fp32"] - memory["bf16"] == 3 * 64 * 64 * 2  # two older, and the newest


# ---- tf32, layout


def test_tf32_switches_are_set_around_a_run_and_put_back():
    def switches():
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = switches()
    try:
        torch.backends.cudnn.allow_tf32 = False
        with PrecisionPolicy.of("tf32", CUDA).switched():
            assert switches() == ("high", True)
            with PrecisionPolicy.of("tf32", CUDA).switched():
                assert switches() == ("high", True)
            assert switches() == ("high", True)
        assert switches() == (before[0], False)
        with PrecisionPolicy.of("fp32", CUDA).switched(), PrecisionPolicy.of("bf16", CUDA).switched():
            assert switches() == (before[0], False), "other precisions leave them alone"
    finally:
        torch.backends.cudnn.allow_tf32 = before[1]


def test_what_a_device_does_not_have_is_refused():
    with pytest.raises(UserError, match="precision tf32 on cpu, which has no TF32: use fp32 or bf16, or device cuda"):
        pipeline(offbeat.BP(), K=1, precision="tf32")
    with pytest.raises(UserError, match="unknown precision 'bf15': did you mean 'bf16'"):
        pipeline(offbeat.BP(), K=1, precision="bf15")


def test_images_are_channels_last_on_cuda_below_fp32_alone():
    wanted = {
        (kind, device.type): precision.wants_channels_last(kind, device)
        for kind in get_args(precision.Precision)
        for device in (CPU, CUDA)
    }
    assert {place for place, yes in wanted.items() if yes} == {("tf32", "cuda"), ("bf16", "cuda")}


def test_channels_last_lays_out_filters_inputs_and_messages(monkeypatch):
    monkeypatch.setattr(precision, "wants_channels_last", lambda kind, device: True)
    pipe = pipeline(offbeat.ADL(M=2))
    seen = []
    send = pipe.workers[0].links.outputs.send
    pipe.workers[0].links.outputs.send = partial(spy, seen, send)
    pipe.step(*batches(1)[0])
    (kept,) = pipe.stages[1].in_flight.values()
    laid = [
        pipe.model[0][0].weight,
        kept.version.tensors["0.0.weight"],
        kept.inputs[0],
        *seen,
        next(iter(pipe.stages[2].in_flight.values()), kept).inputs[0],
    ]
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in laid)
    assert not any(tensor.is_contiguous() for tensor in laid)


# ---- torch.compile


class Undecided(nn.Module):
    """Looks at a number to decide: no single graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x


def test_a_stage_that_cannot_be_compiled_runs_uncompiled_with_one_message(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    model = [nn.Sequential(nn.Linear(4, 4), Undecided()), nn.Linear(4, 3)]
    options = {"method": offbeat.ADL(M=2), "loss": nn.functional.cross_entropy, "optimizer": sgd, "precision": "bf16"}
    data = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(4)]
    start = {name: tensor.clone() for name, tensor in nn.Sequential(*model).state_dict().items()}
    plain = finish(offbeat.Pipeline(model, **options), data)
    nn.Sequential(*model).load_state_dict(start)
    with pytest.warns(offbeat.NotCompiled) as warned:
        found = finish(offbeat.Pipeline(model, compile=True, **options), data)
    assert same(found, plain)
    assert len(warned) == 1
    assert str(warned[0].message).startswith("stage 1 is not compiled and runs as it is: ")


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (offbeat.ADL(M=2, weights="hybrid"), "hybrid weights"),
        (offbeat.GPipe(m=2), "sums up micro-batches"),
    ],
)
def test_what_a_compiled_stage_would_compute_otherwise_is_not_compiled(method, why):
    with pytest.warns(offbeat.NotCompiled) as warned:
        pipeline(method, compile=True)
    assert str(warned[0].message).startswith("stage 1 is not compiled and runs as it is: ")
    assert all(why in str(each.message) for each in warned)


def test_an_error_of_the_model_is_raised_as_without_compiling(monkeypatch):
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    pipe = offbeat.Pipeline(
        nn.Sequential(nn.Linear(4, 3)),
        method=offbeat.BP(),
        loss=nn.functional.cross_entropy,
        optimizer=sgd,
        compile=True,
    )
    with pytest.raises(UserError, match="stage 1 cannot take batch 0 of shape"):
        pipe.step(torch.randn(2, 5), torch.tensor([0, 1]))


def check_close(plain: offbeat.Pipeline, made: offbeat.Pipeline, data: list) -> None:
    """A pipeline that is compiled in all its stages ends near one that is not."""
    expected, found = finish(plain, data), finish(made, data)
    assert not any(stage.network.call.refused for stage in made.stages.values())
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    for name, tensor in found[1].items():
        assert torch.allclose(tensor, expected[1][name], atol=1e-5), name
    assert made.staleness == plain.staleness


@pytest.mark.slow
@pytest.mark.timeout(900)  # two stages of C++, on a busy machine
def test_kernels_of_the_compiler_agree_with_plain_ones():
    data = batches(5)
    plain, made = (pipeline(offbeat.ADL(M=2), precision="fp32", compile=compile) for compile in (False, True))
    check_close(plain, made, data)


@pytest.mark.slow
@pytest.mark.parametrize("method", [offbeat.ADL(M=2), offbeat.ADL(M=2, weights="replay"), offbeat.BP(M=2)])
def test_compiled_stages_agree_with_plain_ones(method, monkeypatch):
    """Dropout, BatchNorm's statistics, versions and staleness included; also for a short last batch."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")  # the graphs, without kernels of their own
    data = [*batches(7), tuple(part[:2] for part in batches(1)[0])]
    plain, made = pipeline(method, precision="fp32"), pipeline(method, precision="fp32", compile=True)
    check_close(plain, made, data)
    assert [stage.update_index for stage in made.stages.values()] == [4, 4]
    output = made.stages[1].network.call(None, (data[0][0],)).sum()
    torch.autograd.grad(output, list(made.stages[1].parameters.values()), retain_graph=True)
    torch.autograd.grad(output, list(made.stages[1].parameters.values()))


# ---- recipes and the command line


def test_recipes_know_the_precisions_that_there_are():
    assert get_type_hints(Recipe)["precision"] == precision.Precision
    assert make_recipe().precision == "fp32"
    assert not make_recipe().compile


def test_batches_in_flight_go_on_in_their_own_precision_alone():
    recipe = make_recipe(precision="bf16", K=2)
    assert resuming.exact(recipe, recipe.as_dict())
    assert not resuming.exact(recipe, {**recipe.as_dict(), "precision": "fp32"})
    old = make_recipe(K=2).as_dict()
    del old["precision"], old["compile"]
    assert resuming.exact(make_recipe(K=2), old), "of a time when there was float32 alone"


RUN = (
    "train",
    "--model",
    "resnet8",
    "--data",
    "synthetic",
    "--samples",
    "32",
    "--batch-size",
    "16",
    "--epochs",
    "1",
    "-K",
    "2",
    "--engine",
    "simulate",
    "--threads-per-stage",
    "1",
    "--out",
    "run",
)


def test_the_command_line_takes_records_and_shows_precision(offbeat: Command):
    dry = offbeat(*RUN, "--precision", "bf16", "--compile", "--dry-run")
    assert "(simulate, bf16, compiled)" in dry.out
    assert offbeat(*RUN, "--precision", "bf16", "--json").code == 0
    with open("run/config.json") as file:
        recipe = json.load(file)["recipe"]
    assert (recipe["precision"], recipe["compile"]) == ("bf16", False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tf32", "precision tf32 on cpu, which has no TF32: use fp32 or bf16"),
        ("bf61", "did you mean 'bf16'?"),
    ],
)
def test_an_unavailable_precision_is_reported_in_one_line(offbeat: Command, value, message):
    check_refused(offbeat, (*RUN, "--precision", value, "--dry-run"), message)


def test_comparisons_take_precision(offbeat: Command):
    done = offbeat(
        "compare", "--methods", "bp,adl", *RUN[1:-2], "--seeds", "1", "--precision", "bf16", "--out", "both", "--json"
    )
    assert done.code == 0, done.err
    with open("both/config.json") as file:
        runs = json.load(file)["comparison"]["runs"]
    assert [run["recipe"]["precision"] for run in runs] == ["bf16", "bf16"]
