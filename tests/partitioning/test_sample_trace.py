"""Models that torch.fx cannot follow, recorded on a sample: exact, and free in batch size, mode and padding."""

from __future__ import annotations

import copy
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

import zoo
from chains import call, in_stages, same, wholly

from offbeat.errors import UserError
from offbeat.partitioning import partition, trace
from offbeat.partitioning.walk import verify


def rows(n: int = 4, width: int = 6) -> Tensor:
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


class Deciding(nn.Module):
    """A block that torch.fx cannot follow, as it branches on values."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.norm(self.linear(x))
        if y.sum() > 0:
            y = F.dropout(y, 0.3, self.training)
        return torch.tanh(y if scale is None else y * scale)


class Looping(nn.Module):
    """Loops over blocks, and does what stops torch.fx in its own forward."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Deciding() for _ in range(blocks)])
        self.head = nn.Linear(6, 3)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor, *extra: Tensor) -> Tensor:
        if len(x) < 1 or x.shape[1] > 64:
            raise ValueError("rows, please")
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) * self.table + x
        return self.head(x.reshape(x.shape[0], -1))


def test_blocks_of_a_list_are_units_and_other_batch_sizes_run():
    torch.manual_seed(0)
    model = Looping().double()
    traced = trace(model, rows(), way="sample")
    assert [unit.name for unit in traced.units] == ["stem", *(f"blocks.{n}" for n in range(6)), "head"]
    assert traced.legal_cuts == list(range(1, 8))
    assert traced.notes == []
    saved = copy.deepcopy(model.state_dict())
    for training in (True, False):
        for n in (4, 2, 7):
            model.load_state_dict(saved)
            twin = copy.deepcopy(model).train(training)
            model.train(training)
            expected = wholly(twin, rows(n))
            same(in_stages(model, traced.split([2, 4, 7]), rows(n), snapshots=n == 2), expected)


def test_tracing_on_a_sample_leaves_model_sample_and_random_numbers_alone():
    model, x = Looping().double(), rows()
    before, given = copy.deepcopy(model.state_dict()), x.clone()
    attributes = {key: set(vars(module)) for key, module in model.named_modules()}
    calls = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    state = torch.get_rng_state()
    traced, again = trace(model, x, way="sample"), trace(copy.deepcopy(model), x, way="sample")
    assert torch.equal(torch.get_rng_state(), state)
    same(before, model.state_dict())
    assert torch.equal(x, given)
    assert attributes == {key: set(vars(module)) for key, module in model.named_modules()}
    assert [unit.name for unit in traced.units] == [unit.name for unit in again.units]
    assert calls == (nn.Module.__call__, torch.autograd.Function.__dict__["apply"])
    assert all(p.grad is None for p in model.parameters())


def test_auto_takes_the_sample_where_fx_gives_too_few_units():
    model = Looping().double()
    made = partition(model, 4, rows())
    assert made.trace == "sample"
    assert made.balance > 0.85
    assert partition(zoo.ResNet().double(), 4, torch.randn(2, 3, 16, 16, dtype=torch.float64)).trace == "fx"
    with pytest.raises(UserError, match=r"4 stages but only 1 unit.*its forward takes \*arguments"):
        partition(model, 4, rows(), trace="fx")
    with pytest.raises(UserError, match="unknown trace 'xf': did you mean 'fx'"):
        partition(model, 4, rows(), trace="xf")


@pytest.mark.parametrize("training", [True, False])
def test_every_network_of_the_zoo_is_exact_when_traced_on_a_sample(training):
    for name, case in zoo.CASES.items():
        if name not in (
            "se-resnet",
            "vit",
            "gpt",
            "timm efficientnet",
            "timm densenet",
            "stochastic",
            "in place",
            "mixed",
        ):
            continue
        torch.manual_seed(1)
        model, x = case.make().double().train(training), case.sample()
        traced = trace(model, x, way="sample", inside_blocks=True)
        expected = wholly(copy.deepcopy(model), x)
        legal = traced.legal_cuts
        if legal:
            same(in_stages(model, traced.split(legal[:: max(1, len(legal) // 4)]), x), expected)


class Encoder(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=mask).mean(1))


def test_a_transformer_encoder_of_torch_is_one_unit_per_layer():
    torch.manual_seed(0)
    model = Encoder().double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    made = partition(model, 4, x)
    assert {f"encoder.layers.{n}" for n in range(4)} <= {".".join(name.split(".")[:3]) for name in made.names}
    same(in_stages(model, made.stages, x), wholly(copy.deepcopy(model), x))
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[0, 3:] = True
    batch = {"x": x, "mask": padding}
    made = partition(model, 4, batch)
    same(in_stages(model, made.stages, batch), wholly(copy.deepcopy(model), batch))


def maybe_mask(x: Tensor) -> Tensor | None:
    """None where no row is negative throughout."""
    mask = (x < 0).all(1, keepdim=True)
    return None if not mask.any() else (~mask).to(x.dtype)


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Deciding() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        mask = maybe_mask(x)
        for block in self.blocks:
            x = block(x, scale=mask)
        return x


def test_a_mask_that_depends_on_values_is_made_anew_for_every_batch():
    torch.manual_seed(0)
    model = Masking().double().eval()
    plain, masked = rows().abs(), -rows().abs()
    for sample in (plain, masked):
        traced = trace(model, sample, way="sample")
        assert len(traced.units) == 3
        for x in (plain, masked):
            same(in_stages(model, traced.split([1, 2]), x), wholly(copy.deepcopy(model), x))


class Sized(nn.Module):
    """Computes with its sizes in ways that a recording could freeze."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        steps = torch.arange(n, dtype=x.dtype, device=x.device).unsqueeze(1) / (n + 1)
        for block in self.blocks:
            x = block(x) + steps + torch.zeros(n, 6, dtype=x.dtype, device=x.device)
        return x.view(n * 2, x.size(1) // 2).sum(1) * x.numel()


class Frozen(Sized):
    """Its scale is a number of Python made from the batch size."""

    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.shape[0])
        for block in self.blocks:
            x = block(x) * scale
        return x


class Forked(Sized):
    """Large batches take another path."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.shape[0] < 6 else block(x) * 2
        return x


def test_sizes_are_not_frozen():
    model = Sized().double()
    traced = trace(model, rows(), way="sample")
    assert not any("batches" in note for note in traced.notes)
    for n in (1, 4, 9):
        same(in_stages(model, traced.split([1, 3]), rows(n)), wholly(copy.deepcopy(model), rows(n)))


def test_a_batch_size_that_is_frozen_is_noticed_and_others_are_refused():
    model = Frozen().double()
    traced = trace(model, rows(), way="sample")
    assert traced.notes == ["only batches of 4 samples can be run: the forward depends on the batch size"]
    first = traced.split([2])[0]
    first(rows())
    with pytest.raises(UserError, match=r"x of shape \(3, 6\) but the model was traced for \(4, 6\)"):
        first(rows(3))


def test_a_batch_that_takes_another_path_is_refused():
    model = Forked().double()
    first = trace(model, rows(), way="sample").split([2])[0]
    assert first(rows(5)).shape == (5, 6)
    with pytest.raises(UserError, match=r"another path .* than the sample \(8 < 6 is False\): partition the"):
        first(rows(8))


def test_layer_drop_of_zero_is_certain_and_keeps_its_draws():
    class Dropping(Looping):
        layerdrop = 0.0

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if self.training and torch.rand([]) < self.layerdrop:
                    continue
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Dropping(4).double()
    traced = trace(model, rows(), way="sample")
    assert len(traced.units) == 5
    expected = wholly(copy.deepcopy(model), rows())
    same(in_stages(model, traced.split([2]), rows()), expected)
    model.layerdrop = 0.5
    assert "branches on the values of tensors" in trace(model, rows(), way="sample").notes[0]


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


class Mixture(nn.Module):
    """Hooks, a custom function, no_grad, a tuple and a dict between blocks, in-place operations, checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.blocks[1].register_forward_hook(lambda module, args, output: output * 3)
        self.offset = nn.Parameter(torch.randn(6))

    def forward(self, *given: Tensor) -> dict[str, Tensor]:
        (x,) = given
        x = self.blocks[1](self.blocks[0](x)) + self.offset
        with torch.no_grad():
            scale = self.blocks[2](x).abs().mean() + 1
        x = Doubling.apply(x) / scale
        x += 1
        low, high = x.split(3, dim=1)
        best = torch.cat([low, high], 1).max(dim=1, keepdim=True)
        x = checkpoint(self.blocks[3], x * best.values, use_reentrant=False)
        x[:, 0] *= 2
        return {"out": self.blocks[4](x), "low": low}


def test_what_happens_between_blocks_is_exact_at_every_cut():
    torch.manual_seed(0)
    model = Mixture().double()
    traced = trace(model, rows(), way="sample")
    assert len(traced.units) >= 6
    expected = wholly(copy.deepcopy(model), rows())
    for cuts in [*([cut] for cut in traced.legal_cuts), traced.legal_cuts]:
        same(in_stages(model, traced.split(cuts), rows()), expected)


class Filling(nn.Module):
    """Gradients flow through what was made without them, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        z, total = torch.zeros_like(y), torch.zeros_like(y)
        z[:, 0] = y[:, 0] * 2
        row = total[1]
        row += y[0]
        y = self.blocks[1](y)
        return self.blocks[2](y + z) * total


@pytest.mark.parametrize("way", ["fx", "sample"])
def test_gradients_flow_through_what_is_written_in_place(way):
    torch.manual_seed(0)
    model = Filling().double()
    traced = trace(model, rows(), way=way)
    assert len(traced.legal_cuts) > 1
    expected = wholly(copy.deepcopy(model), rows())
    for cuts in [*([cut] for cut in traced.legal_cuts), traced.legal_cuts]:
        same(in_stages(model, traced.split(cuts), rows()), expected)


class Cautious(nn.Module):
    """A method reads values, and only warns of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def check(self, x: Tensor) -> None:
        if (x > 1e6).any():
            print("large")

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_method_that_only_warns_of_values_is_no_obstacle():
    model = Cautious().double()
    traced = trace(model, rows(), way="sample")
    assert [unit.name for unit in traced.units] == ["blocks.0", "blocks.1", "blocks.2"]
    same(in_stages(model, traced.split([1]), rows()), wholly(copy.deepcopy(model), rows()))


def test_a_frozen_parameter_can_be_trained_later():
    model = Looping(2).double()
    for parameter in model.stem.parameters():
        parameter.requires_grad_(False)
    first, second = trace(model, rows(), way="sample").split([2])
    model.stem.weight.requires_grad_(True)
    second(first(rows())).sum().backward()
    assert model.stem.weight.grad.abs().sum() > 0


def test_a_stage_runs_where_its_parameters_and_batch_are():
    model = Sized()
    parts = trace(model, rows().float(), way="sample").split([2])
    moved = copy.deepcopy(parts)
    with torch.device("meta"):
        x = torch.empty(5, 6)
    out = moved[1].to("meta")(moved[0].to("meta")(x))
    assert out.is_meta
    assert out.shape == (10,)


def test_stages_pickle_and_copy():
    import pickle

    model = Masking().double().eval()
    parts = trace(model, rows(), way="sample").split([1])
    again = pickle.loads(pickle.dumps(parts))
    x = -rows().abs()
    assert torch.equal(again[1](again[0](x)), model(x))


def test_what_no_way_can_trace_is_refused_with_both_reasons():
    class Opaque(Looping):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks[: int(x.sum().item() > 0) + 1]:
                x = block(x)
            return x

    with pytest.raises(UserError, match=r"2 stages but only 1 unit.*stays one unit: .*run on the sample, the model"):
        partition(Opaque().double(), 2, rows())


def test_a_trace_on_a_sample_passes_verification():
    for model in (Looping(), Sized(), Masking()):
        model.double()
        verify(trace(model, rows(), way="sample"), rows())
        assert call(model, rows()).shape[0] in (4, 8)


@pytest.mark.slow
def test_a_model_of_a_thousand_modules_is_traced_and_cut_within_a_minute():
    model = Looping(350).double()
    assert sum(1 for _ in model.modules()) > 1000
    began = time.perf_counter()
    made = partition(model, 4, rows())
    assert time.perf_counter() - began < 60
    assert made.trace == "sample"
    assert made.balance > 0.95


class Averaging(nn.Module):
    """Replaces its buffer, which a program cannot hold: exact as one unit alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return torch.tanh(x - self.mean)


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Averaging() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_cuts_between_blocks_are_kept_where_those_inside_are_not_exact():
    torch.manual_seed(0)
    model = Averages().double()
    made = partition(model, 4, rows())
    assert made.trace == "sample"
    assert made.names == [f"blocks.{n}" for n in range(6)]
    expected = wholly(copy.deepcopy(model).train(), rows(3))
    same(in_stages(model, made.stages, rows(3)), expected)


class Scaled(nn.Module):
    """In evaluation mode asks whether its weights have an attribute, which all values of torch.fx have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.training and hasattr(block.weight, "quantized"):
                x = x * block.weight.quantized
            x = torch.tanh(block(x))
        return x


def test_a_path_that_only_torch_fx_takes_leads_to_the_trace_on_a_sample():
    torch.manual_seed(0)
    model = Scaled().double()
    reference = copy.deepcopy(model)
    made = partition(model, 2, rows())
    assert made.trace == "sample"
    same(in_stages(model, made.stages, rows()), wholly(reference, rows()))


@pytest.mark.parametrize("made", [Looping, Scaled, lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))])
@pytest.mark.parametrize("by", ["flops", "measured"])
def test_a_model_that_keeps_values_of_an_earlier_run_can_be_cut(made, by):
    torch.manual_seed(0)
    model = made().double()
    reference = copy.deepcopy(model)
    model.state = next(model.children()).state = model(rows())  # with a graph
    model.load_state_dict(reference.state_dict())  # statistics as they were
    cut = partition(model, 2, rows(), by=by)
    same(in_stages(model, cut.stages, rows()), wholly(reference, rows()))


def test_a_model_that_cannot_be_copied_is_refused_in_one_line():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)).double()
    model.lock = threading.Lock()
    with pytest.raises(UserError, match=r"Sequential cannot be copied: cannot pickle '_thread.lock' object"):
        partition(model, 2, rows())
