"""Cut anywhere, a model computes what it computed: outputs, gradients, buffers and names, bit for bit in float64."""

from __future__ import annotations

import copy
import random
import re
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from selected import only
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat import models
from offbeat.errors import UserError
from offbeat.partitioning import partition
from offbeat.partitioning.trace import trace
from offbeat.partitioning.walk import run_units, verify

sys.path.insert(0, str(Path(__file__).parent))

import zoo
from chains import call, cross, in_stages, same, tensors, wholly

MOST = 20


def build(case):
    torch.manual_seed(1)
    model = case.make().double()
    for buffer in model.buffers():  # batch statistics that are not all alike
        if buffer.is_floating_point() and buffer.dim() == 1:
            buffer.uniform_(0.5, 1.5)
    return model, case.sample()


def evenly(legal, K):
    return [legal[(len(legal) * k) // K] for k in range(1, K)]


@pytest.mark.parametrize(
    ("training", "every"),  # cut in every number of stages, in every second, or in every third
    [
        pytest.param(True, 2, id="train"),
        pytest.param(False, 3, id="eval", marks=pytest.mark.slow),
        pytest.param(True, 1, id="train, more cuts", marks=pytest.mark.slow),
        pytest.param(False, 1, id="eval, more cuts", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", only([name for name in zoo.CASES if name != "resnet18"], zoo.CASES))
def test_a_chain_of_stages_is_the_model_bit_for_bit(name, training, every):
    model, x = build(zoo.CASES[name])
    model.train(training)
    names = list(model.state_dict())
    traced = trace(model)
    assert list(model.state_dict()) == names
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    expected = wholly(copy.deepcopy(model), x)
    legal = traced.legal_cuts
    draw = random.Random(name)
    chosen = [evenly(legal, K) for K in range(2, min(MOST, len(legal) + 1) + 1, every)]
    chosen.append(legal)
    chosen += [sorted(draw.sample(legal, draw.randint(1, min(9, len(legal))))) for _ in range(4 // every)]
    for number, cuts in enumerate(chosen):
        with torch.no_grad():
            for key, value in model.state_dict().items():
                value.copy_(saved[key])
        parts = traced.split(cuts)
        held = [key for part in parts for key in part.state_dict()]
        assert sorted(held) == sorted(names)
        own = dict(model.named_parameters(remove_duplicate=False))
        assert all(own[key] is p for part in parts for key, p in part.named_parameters())
        same(in_stages(model, parts, x, snapshots=number % 3 == 1), expected)


def test_random_networks_with_views_and_in_place_ops_are_exact_at_every_legal_cut():
    chains = 0
    for seed in range(40):
        torch.manual_seed(seed)
        model = zoo.Random(seed).double().train(seed % 2 == 0)
        x = torch.randn(5, 6, dtype=torch.float64)
        traced = trace(model)
        assert not traced.notes
        saved = copy.deepcopy(model.state_dict())
        try:
            expected = wholly(copy.deepcopy(model), x)
        except RuntimeError:  # it changes what its own backward needs
            continue
        for cuts in [*([cut] for cut in traced.legal_cuts), traced.legal_cuts]:
            model.load_state_dict(saved)
            same(in_stages(model, traced.split(cuts), x), expected)
            chains += 1
    assert chains > 100


@pytest.mark.parametrize(("name", "K"), [("resnet18", 20), ("resnet56", 56)])
def test_the_papers_networks_split_inside_their_blocks(name, K):
    model = models.build(name, shape=(3, 32, 32), classes=10).double()
    traced = trace(model)
    convolutions = [unit.index for unit in traced.units if "conv" in unit.name and "shortcut" not in unit.name]
    cuts = [*convolutions[1:], *[unit.index for unit in traced.units if unit.name == "head.linear"]]
    cuts = sorted({*cuts, traced.legal_cuts[-2], *traced.legal_cuts[1 : 3 + K - len(cuts)]})[-(K - 1) :]
    parts = traced.split(cuts)
    assert len(parts) == K
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = wholly(copy.deepcopy(model), x)
    same(in_stages(model, parts, x), expected)
    assert sorted(key for part in parts for key in part.state_dict()) == sorted(model.state_dict())


def test_cutting_a_block_carries_the_branch_and_the_shortcut():
    traced = trace(zoo.ResNet())
    names = [unit.name for unit in traced.units]
    assert names[:8] == [
        "conv1",
        "bn1",
        "relu",
        "maxpool",
        "layer1.0.conv1",
        "layer1.0.bn1",
        "layer1.0.relu",
        "layer1.0.conv2",
    ]
    assert "layer1.0.iadd" in names
    assert "layer1.0.relu#2" in names
    cut = names.index("layer1.0.conv2")
    assert traced.boundary(cut) == ["maxpool", "layer1.0.relu"]
    assert traced.units[cut].parameters == ("layer1.0.conv2.weight",)
    assert traced.units[names.index("layer1.0.iadd")].module == "layer1.0"
    first, second = traced.split([cut])
    sent = first(torch.randn(2, 3, 16, 16))
    assert isinstance(sent, tuple)
    assert [t.shape for t in sent] == [(2, 6, 8, 8)] * 2
    assert second(sent).shape == (2, 5)


def test_tracing_is_the_same_every_time_and_leaves_the_model_alone():
    model, _ = build(zoo.CASES["stochastic"])
    before = copy.deepcopy(model.state_dict())
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    state = torch.get_rng_state(), random.getstate()
    traced, again = trace(model), trace(copy.deepcopy(model))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert [unit.name for unit in traced.units] == [unit.name for unit in again.units]
    assert traced.legal_cuts == again.legal_cuts
    same(before, model.state_dict())
    assert attributes == {key: set(vars(module)) for key, module in model.named_modules()}
    assert model.training


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class WithThread(nn.Module):
    """Another thread computes while forward runs, as heartbeats and loaders of batches do."""

    found: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        def compute() -> None:
            self.found.append(nn.Sequential(nn.ReLU())(Doubled.apply(torch.tensor([1.0]) + torch.ones(1))))

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        return self.fc2(self.fc1(x))


@pytest.mark.parametrize("way", ["fx", "sample"])
def test_what_another_thread_computes_is_not_traced(way):
    WithThread.found.clear()
    traced = trace(WithThread(), torch.zeros(4, 2), way=way)
    assert [unit.name for unit in traced.units] == ["fc1", "fc2"]
    assert traced.notes == []
    assert [value.tolist() for value in WithThread.found] == [[4.0]] * len(WithThread.found) != []


def test_a_part_and_the_model_share_their_mode():
    model, x = build(zoo.CASES["stochastic"])
    traced = trace(model)
    parts = traced.split(evenly(traced.legal_cuts, 3))
    for part in parts:
        part.eval()
    assert not model.training
    assert not any(layer.training for layer in model.layers)
    same(in_stages(model, parts, x), wholly(model, x))
    model.train()
    assert all(module.training for part in parts for module in part.modules())


def test_what_a_user_froze_in_evaluation_mode_stays_so():
    model = nn.Sequential(zoo.Stochastic(), zoo.Stochastic()).double()
    model[0].eval()
    traced = trace(model)
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = wholly(copy.deepcopy(model), x)
    same(in_stages(model, traced.split(evenly(traced.legal_cuts, 5)), x), expected)


def test_parts_can_be_copied():
    model, x = build(zoo.CASES["gpt"])
    traced = trace(model)
    parts = traced.split(evenly(traced.legal_cuts, 5))
    copies = copy.deepcopy(parts)
    expected = wholly(copy.deepcopy(model), x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    same(in_stages(nn.ModuleList(), copies, x), {k: v for k, v in expected.items() if "mask" not in k})
    copies[0].eval()
    assert model.training
    assert parts[0].training


# ---- what cannot be traced


class Sampling(nn.Module):
    """Python's random numbers decide."""

    def forward(self, x):
        return x * 2 if random.random() < 0.5 else x


class Iterating(nn.Module):
    def forward(self, x):
        return torch.stack([row * 2 for row in x])


class Measuring(nn.Module):
    def forward(self, x):
        return x * len(x) if max(x.shape) > 2 else x


class Typed(nn.Module):
    """Asks for the type of what a layer returns: not known before it runs."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(6, 6)

    def forward(self, x):
        y = self.rnn(x)
        return y if isinstance(y, Tensor) else y[0]


class Casting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x)


class Rolling(nn.Module):
    """Torch's random numbers decide."""

    def forward(self, x):
        return x * 2 if self.training and torch.rand(1).item() < 0.5 else x


class Shaped(nn.Module):
    """Tests a shape, which is no branch on values."""

    def forward(self, x):
        return x * 2 if x.shape[0] > 2 and x.dim() == 2 else x


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(6, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(self.first(x))))


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        (zoo.Branching, "branches on the values of tensors"),
        (Shaped, "branches on the sizes or types of tensors"),
        (Sampling, "random numbers outside torch"),
        (Iterating, "cannot be iterated"),
        (Measuring, "not iterable|cannot be iterated|'len'"),
        (Typed, "tests the type of a value"),
        (Casting, "autocast"),
        (Rolling, "branches on the values of tensors"),
    ],
)
def test_what_cannot_be_traced_stays_one_unit_with_a_note(inner, why):
    torch.manual_seed(0)
    model = Around(inner()).double()
    traced = trace(model)
    assert [unit.name for unit in traced.units] == ["first", "inner", "tanh", "last"]
    (note,) = traced.notes
    assert note.startswith(f"inner ({inner.__name__}) stays one unit: ")
    assert re.search(why, note)
    x = torch.randn(4, 6, dtype=torch.float64)
    random.seed(4)
    expected = wholly(copy.deepcopy(model), x)
    random.seed(4)
    same(in_stages(model, traced.split([1, 2, 3]), x), expected)


def test_a_model_that_cannot_be_traced_at_all_is_one_unit():
    model = zoo.Branching()
    traced = trace(model)
    assert traced.notes == ["the model (Branching) stays one unit: it branches on the values of tensors"]
    assert traced.legal_cuts == []
    assert traced.split([])[0] is model
    with pytest.raises(UserError, match=r"cuts \[1\] of 1 units: there is nothing to cut .*branches on the values"):
        traced.split([1])


def test_many_untraceable_blocks_are_found_in_few_passes():
    model = nn.Sequential(*[zoo.Branching() for _ in range(300)])
    traced = trace(model)
    assert len(traced.units) == 300
    assert traced.notes == ["0 (Branching) and 299 more stay one unit each: it branches on the values of tensors"]


def test_hooks_of_submodules_run():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)).double()
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append("block") or output * 2)
    model[2].register_forward_pre_hook(lambda module, args: seen.append("layer"))
    traced = trace(model)
    assert [unit.name for unit in traced.units] == ["0", "1", "2"]
    assert traced.notes == ["1 (Sequential) stays one unit: it has hooks"]
    x = torch.randn(2, 3, dtype=torch.float64)
    expected = wholly(copy.deepcopy(model), x)
    seen.clear()
    same(in_stages(model, traced.split([1, 2]), x), expected)
    assert seen == ["block", "layer"]


class Doubling(torch.autograd.Function):
    """Forward times two; its backward is deliberately not the derivative."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


class Odd(nn.Module):
    """A custom function, a parameter's shape, a lazily made mask, no_grad, a returned parameter, a plain tensor."""

    def __init__(self):
        super().__init__()
        self.linear, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.rand(4))
        self.plain = torch.arange(4, dtype=torch.float64)
        self.mask = None

    def forward(self, x):
        if self.gain.shape[0] == 4 and self.gain.dim() == 1:
            x = Doubling.apply(self.linear(x)) * self.gain
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], x.shape[1]).tril().to(x.dtype)
        with torch.no_grad():
            shift = x.mean(0)
        x = x @ self.mask - shift + self.plain.sqrt()
        size, kind = x.shape, x.dtype
        x = self.out(x.flatten()[: size.numel()].view(size))
        values, indices = x.max(dim=1)
        return torch.zeros(size, dtype=kind, device=x.device) + x * values[:, None], indices, self.gain


def test_odd_things_are_right_at_every_cut():
    torch.manual_seed(0)
    model = Odd().double()
    traced = trace(model)
    assert model.mask is None
    assert not traced.notes
    x = torch.randn(3, 4, dtype=torch.float64)
    expected = copy.deepcopy(model)(x)
    assert len(traced.legal_cuts) == len(traced.units) - 1
    for cut in traced.legal_cuts:
        parts = traced.split([cut])
        values = cross(parts[0](x))
        scores, indices, gain = parts[1](values)
        assert torch.equal(scores, expected[0])
        assert torch.equal(indices, expected[1])
        assert torch.equal(gain, model.gain)
        assert (gain is model.gain) != bool(traced.ties)  # else it is received
    one, two = traced.split([traced.legal_cuts[0]])
    leaf = cross(one(x))
    (two(leaf)[0].sum()).backward()
    gradients = {name: p.grad for name, p in two.named_parameters()}
    whole = copy.deepcopy(model)
    whole(x)[0].sum().backward()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, whole.get_parameter(name).grad)


# ---- refusals


def test_a_parameter_on_both_sides_of_a_cut_is_received_by_the_later_stage():
    torch.manual_seed(0)
    model = zoo.GPT(tied=True).double()
    traced = trace(model)
    cut = [unit.name for unit in traced.units].index("blocks.1.ln1")
    parts = traced.split([cut])
    assert traced.notes == [
        "tokens.weight of stage 1, 704 bytes, is sent with every batch: it is head.weight of stage 2"
    ]
    assert parts[0].get_parameter("tokens.weight") is model.tokens.weight
    assert "head.weight" not in dict(parts[1].named_parameters())
    assert model.head.weight is model.tokens.weight
    x = torch.randint(11, (3, 7))
    same(in_stages(model, parts, x), wholly(copy.deepcopy(model), x))


def test_untying_gives_the_model_a_copy_under_the_name_of_the_later_stage():
    torch.manual_seed(0)
    model = zoo.GPT(tied=True).double()
    names = list(model.state_dict())
    traced = trace(model)
    parts = traced.split([[unit.name for unit in traced.units].index("blocks.1.ln1")], tied="copies")
    assert parts[0].get_parameter("tokens.weight") is model.tokens.weight
    assert parts[1].get_parameter("head.weight") is model.head.weight
    assert model.head.weight is not model.tokens.weight
    assert list(model.state_dict()) == names
    x = torch.randint(11, (3, 7))
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(parts[1](cross(parts[0](x))), expected)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        x = self.twice(torch.tanh(self.twice(self.first(x))))
        return self.last(x * self.table) + self.table


def test_a_layer_that_two_stages_call_is_shared_or_untied():
    model = Shared()
    traced = trace(model)
    assert [unit.name for unit in traced.units] == ["first", "twice", "tanh", "twice#2", "mul", "last", "add"]
    assert traced.legal_cuts == [1, 2, 3, 4, 5, 6]
    x = torch.randn(2, 4)
    for cuts in ([3], [2, 3], [3, 6], [1, 2, 3, 4, 5, 6]):
        same(in_stages(model, traced.split(cuts), x), wholly(copy.deepcopy(model), x))
    traced = trace(model)
    parts = traced.split([3, 6], tied="copies")
    assert [list(part.state_dict()) for part in parts] == [
        ["first.weight", "first.bias", "twice.weight", "twice.bias"],
        ["table", "twice.weight", "twice.bias", "last.weight", "last.bias"],
        [],
    ]
    assert len(traced.notes) == 2
    assert torch.equal(parts[2](parts[1](parts[0](x))), model(x))


def test_a_buffer_that_nobody_writes_is_read_in_several_stages():
    model = Shared().double()
    parts = trace(model).split([4, 6])
    assert [name for part in parts for name in part.state_dict()].count("table") == 1
    assert all(dict(part.named_buffers())["table"] is model.table for part in parts[1:])
    x = torch.randn(2, 4, dtype=torch.float64)
    expected = wholly(copy.deepcopy(model), x)
    same(in_stages(model, parts, x), expected)
    model.load_state_dict({**model.state_dict(), "table": torch.full((4,), 3.0)})
    assert torch.equal(parts[2](parts[1](parts[0](x))), model(x))


def test_a_buffer_that_is_written_stays_in_one_stage():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x):
            x = F.batch_norm(self.a(x) + self.seen, self.mean, self.var, training=self.training)
            self.seen.add_(x.detach().mean(0))
            return self.b(x) + self.seen + self.mean

    traced = trace(Averaging())
    assert [unit.name for unit in traced.units][:3] == ["a", "add", "batch_norm"]
    assert traced.legal_cuts == [1]
    with pytest.raises(UserError, match="separates the uses of"):
        traced.split([4])


def test_a_counter_that_nobody_reads_forbids_no_cut():
    model = nn.Sequential(*[zoo.CountingBlock() for _ in range(8)]).double()
    x = torch.randn(4, 16, dtype=torch.float64)
    traced = trace(model)
    assert len(traced.legal_cuts) == len(traced.units) - 1
    made = partition(model, 4, x, units="layers")
    assert [sum(p.numel() for p in stage.parameters()) for stage in made.stages] == [2 * 272] * 4
    expected = wholly(copy.deepcopy(model), x)
    same(in_stages(model, made.stages, x), expected)
    assert all(block.calls == 1 for block in model)


def test_a_cut_between_two_names_of_a_value_that_changes_in_place_is_refused():
    traced = trace(zoo.InPlace())
    names = [unit.name for unit in traced.units]
    cut = names.index("mul_")  # e and its view `left` cross, then e changes
    assert cut not in traced.legal_cuts
    with pytest.raises(UserError, match=r"cut 8 \(before mul_\) separates a value and a view of it, .* legal cuts are"):
        traced.split([cut])
    assert len(traced.legal_cuts) > len(names) / 2


@pytest.mark.parametrize("cuts", [[0], [3, 2], [2, 2], [99], [1.5], [True]])
def test_cuts_that_are_none_are_refused(cuts):
    with pytest.raises(UserError, match="they must increase, from 1 to 6"):
        trace(Shared()).split(cuts)


def test_a_batch_of_the_wrong_number_of_values_is_refused():
    parts = trace(zoo.Mixed()).split([])
    with pytest.raises(UserError, match=r"a Tensor given where the model's forward takes \(x, y\): give a tuple"):
        parts[0](torch.zeros(2, 6))
    assert set(parts[0].state_dict()) == set(zoo.Mixed().state_dict())
    assert parts[0]((torch.zeros(2, 6), torch.zeros(2, 6)))["scores"].shape == (2, 3)


# ---- unit by unit


@pytest.mark.parametrize("name", [name for name in zoo.CASES if name != "in place"])
def test_units_run_one_by_one(name):
    model, x = build(zoo.CASES[name])
    model.eval()
    traced = trace(model)
    seen = []

    def visit(unit, call, inputs):
        outputs = call(inputs)
        assert all(t.is_leaf for t in tensors(inputs))
        roots = [t for t in tensors(call(inputs)) if t.requires_grad]
        leaves = [t for t in tensors(inputs) if t.requires_grad]
        if roots and leaves:
            torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True)
        seen.append(unit.name)
        return outputs

    outputs = run_units(traced, x, visit)
    assert seen == [unit.name for unit in traced.units]
    expected = tensors(call(model, x))
    assert all(torch.equal(a, b) for a, b in zip(tensors(outputs), expected, strict=True))


def test_units_run_on_the_meta_device():
    model = zoo.GPT().to("meta")
    shapes = {}

    def visit(unit, call, inputs):
        outputs = call(inputs)
        shapes.update({name: tuple(value.shape) for name, value in outputs.items() if isinstance(value, Tensor)})
        return outputs

    traced = trace(model)
    run_units(traced, torch.zeros(3, 7, dtype=torch.long, device="meta"), visit)
    assert shapes["head"] == (3, 7, 11)
    assert all(
        name in shapes or "getitem" in name or "size" in name
        for cut in traced.legal_cuts[1:]
        for name in traced.boundary(cut)
        if name != "index"
    )


def test_a_sample_that_does_not_fit_names_the_unit():
    with pytest.raises(UserError, match=r"unit conv1 cannot run on this sample: .*channels"):
        run_units(trace(zoo.ResNet()), torch.zeros(2, 4, 16, 16), lambda unit, call, inputs: call(inputs))
    with pytest.raises(UserError, match="unit arange cannot run on this sample: an assertion of the model failed"):
        run_units(trace(zoo.GPT()), torch.zeros(2, 9, dtype=torch.long), lambda unit, call, inputs: call(inputs))


class Aliased(nn.Module):
    """x += y, seen through the name that x had before; and a check of types that is no obstacle."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if isinstance(x, (list, tuple)) or not isinstance(x, Tensor) or not torch.is_tensor(x):
            raise TypeError("a tensor, please")
        x = self.a(x)
        y = x
        y += 1
        y[:, 0] *= 3
        return self.b(y) + x


@pytest.mark.parametrize("model", [Aliased, Odd, Shared])
def test_a_trace_that_is_its_model_passes_verification(model):
    verify(trace(model().double()), torch.randn(3, 4, dtype=torch.float64))


def test_a_trace_that_is_not_its_model_is_refused():
    class Counting(nn.Module):
        """Its own counter, which tracing freezes, decides."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.count = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x):
            return self.b(self.a(x)) * self.count

    model = Counting()
    traced = trace(model)
    model.count = 7
    with pytest.raises(UserError, match="Counting traced computes something else than untraced in training mode"):
        verify(traced, torch.randn(3, 4))
    with pytest.raises(UserError, match="the model cannot take this sample: mat1 and mat2"):
        verify(traced, torch.randn(3, 5))


def test_a_functional_dropout_follows_the_mode_of_its_part():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(F.dropout(self.a(x), 0.5, self.training))

    model = Dropping()
    parts = trace(model).split([1])
    sent = parts[0](torch.ones(1, 8))
    assert not torch.equal(parts[1](sent), parts[1](sent))
    parts[1].eval()
    assert torch.equal(parts[1](sent), parts[1](sent))
