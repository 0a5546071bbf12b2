"""Everything that a stage holds, by the memory of its tensors: versions and activations are held once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_contract import sgd
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import offbeat
from offbeat import models
from offbeat.core.stage import Stage
from offbeat.runs.build import cross_entropy

WIDTH, CLASSES, B = 6, 3, 5


class Part(nn.Module):
    """Has a weight that no forward uses, so that no update changes it."""

    def __init__(self, out: int = WIDTH) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, out), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class DataSGD(torch.optim.Optimizer):
    """Writes its parameters through `.data`, which counts as no write, all of them."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.99)
                if parameter.grad is not None:
                    parameter.data.sub_(0.1 * parameter.grad)


def trained(method: offbeat.Method, *, batches: int = 12, **options) -> offbeat.Pipeline:
    torch.manual_seed(0)
    given = {"loss": nn.functional.cross_entropy, "optimizer": sgd, **options}
    pipe = offbeat.Pipeline([Part(), Part(), Part(CLASSES)], method=method, **given)
    random = torch.Generator().manual_seed(1)
    for _ in range(batches):
        pipe.step(torch.randn(B, WIDTH, generator=random), torch.randint(CLASSES, (B,), generator=random))
    return pipe


def storages(tensors: list[Tensor]) -> dict[int, Tensor]:
    """The tensors by where their storage is; `data_ptr` would copy what is shared until it is written."""
    return {torch._C._data_address(t) - t.storage_offset() * t.element_size(): t for t in tensors}


def nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in storages(tensors).values())


def versions(stage: Stage) -> list[dict[str, Tensor]]:
    found = {id(version): version.tensors or {} for version in stage.weights.alive()}
    return list(found.values())


def saved(roots: list[Tensor]) -> Iterator[Tensor]:
    """The tensors that autograd keeps for the backward of these."""
    todo, seen = [root.grad_fn for root in roots if isinstance(root, Tensor)], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        yield from (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))
        todo += [following for following, _ in node.next_functions]


# ---- versions


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("method", "held"),
    [(offbeat.ADL(M=1), 5), (offbeat.ADL(M=2), 3), (offbeat.PipeDream(), 3), (offbeat.TwoBW(M=2), 2)],
    ids=lambda given: getattr(given, "name", None),
)
def test_a_parameter_that_no_update_changed_is_in_memory_once(method, held, precision):
    stage = trained(method, precision=precision).stages[1]
    found = versions(stage)
    assert len(found) in (held - 1, held), "another may follow at the next forward"
    for name in stage.parameters:
        each = [version[name] for version in found]
        once = 1 if "unused" in name else len(found)
        assert nbytes(each) == once * each[0].nbytes


def test_an_optimizer_whose_writes_are_not_counted_still_makes_new_versions():
    stage = trained(offbeat.ADL(M=1), optimizer=DataSGD).stages[1]
    found = versions(stage)
    for name in stage.parameters:
        each = [version[name] for version in found]
        assert len(storages(each)) == len({tuple(tensor.flatten().tolist()) for tensor in each}) == len(found)


def test_a_window_that_is_not_applied_copies_nothing():
    method = offbeat.TwoBW(M=2)
    pipe = trained(method, on_nan="skip")
    x, y = torch.full((B, WIDTH), torch.nan), torch.zeros(B, dtype=torch.long)
    for _ in range(8):
        pipe.step(x, y)
    both = versions(pipe.stages[1])
    assert len(both) == 2
    for name in pipe.stages[1].parameters:
        assert both[0][name] is both[1][name]


# ---- activations


@pytest.mark.parametrize(("name", "shape"), [("resnet8", (3, 8, 8)), ("gpt", (8,))])
def test_no_activation_is_in_memory_twice(name, shape):
    torch.manual_seed(0)
    random, tokens = torch.Generator().manual_seed(1), models.takes_tokens(shape)
    batches = [models.random_batch(B, shape, CLASSES, generator=random) for _ in range(8)]
    options = {"loss": cross_entropy, "optimizer": sgd, "sample": batches[0]}
    pipe = offbeat.Pipeline(models.build(name, shape=shape, classes=CLASSES), 2, method=offbeat.ADL(M=2), **options)
    for x in batches:
        pipe.step(x, torch.zeros((B, *shape) if tokens else (B,), dtype=torch.long))
    stage = pipe.stages[1]
    known = storages([*stage.network.module.parameters(), *stage.network.module.buffers()])
    known |= storages([tensor for version in versions(stage) for tensor in version.values()])
    for batch in stage.in_flight.values():
        held = storages([*batch.inputs, *batch.roots, *saved(batch.roots)])
        large = [tensor for place, tensor in held.items() if place not in known and tensor.numel() > 4 * B]
        assert len(large) > 6
        contents = {tuple(tensor.detach().clone().flatten().tolist()) for tensor in large}
        assert len(contents) == len(large)
