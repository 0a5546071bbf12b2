"""Muon: the equations of one parameter at a time, torch's own, and training with it in all engines."""

from __future__ import annotations

import copy
import math
import random
import re
from functools import partial
from itertools import chain

import pytest
import torch
from counted_operations import CountedOperations
from literal_optimizers import CLOSE, HIDDEN, SHAPES, adamw, gradients, muon, parameters, take
from torch import Tensor, nn

from offbeat.errors import UserError, number
from offbeat.models.gpt import gpt
from offbeat.optim import Muon, RotatedAdam, is_hidden_matrix
from offbeat.optim.compensated import CompensatedOptimizer
from offbeat.optim.muon import MOST_PADDING, WIDE, batches, newton_schulz

SIZES = tuple((SHAPES[name][0], math.prod(SHAPES[name][1:])) for name in HIDDEN)


@pytest.mark.parametrize("scale", ["rms", "spectral"])
@pytest.mark.parametrize(("nesterov", "compensation"), [(True, 0.0), (False, 0.0), (True, 2.75), (False, 1.5)])
def test_every_parameter_follows_its_equations(scale, nesterov, compensation):
    theta, steps = parameters(), gradients(4)
    optimizer = Muon(theta.items(), 0.01, nesterov=nesterov, scale=scale)
    for group in optimizer.param_groups:
        group["compensation"] = compensation
    take(optimizer, theta, steps)
    for name, start in parameters().items():
        given = [step[name] for step in steps]
        if name in HIDDEN:
            expected = muon(start.detach(), given, lr=0.01, exponent=compensation + nesterov, scale=scale)
        else:
            expected = adamw(start.detach(), given, lr=0.01, exponent=compensation)
        torch.testing.assert_close(theta[name].detach(), expected, **CLOSE, msg=name)


def test_the_other_parameters_are_those_of_torchs_adamw():
    theta, same, steps = parameters(), parameters(), gradients(5)
    optimizer = Muon(theta.items(), 0.01, adam_lr=0.003, betas=(0.8, 0.9), weight_decay=0.2)
    rest = {name: p for name, p in same.items() if name not in HIDDEN}
    torchs = torch.optim.AdamW(rest.values(), lr=0.003, betas=(0.8, 0.9), weight_decay=0.2)
    take(optimizer, theta, steps)
    take(torchs, rest, steps)
    for name, p in rest.items():
        torch.testing.assert_close(theta[name], p, **CLOSE)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("scale", "torchs"), [("rms", "match_rms_adamw"), ("spectral", "original")])
def test_matrices_are_those_of_torchs_muon(monkeypatch, nesterov, scale, torchs):
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)  # torch's iterations in float64, too
    theta, same, steps = parameters(), parameters(), gradients(4)
    matrices = {name: p for name, p in same.items() if name in HIDDEN and p.ndim == 2}
    take(Muon(theta.items(), 0.02, nesterov=nesterov, scale=scale), theta, steps)
    take(torch.optim.Muon(matrices.values(), lr=0.02, nesterov=nesterov, adjust_lr_fn=torchs), matrices, steps)
    for name, p in matrices.items():
        torch.testing.assert_close(theta[name], p, **CLOSE)


@pytest.mark.parametrize("shape", [(8, 8), (8, 11), (8, 13), (8, 40), (1, 7)])
@pytest.mark.parametrize("smallest", [1.0, 1e-6], ids=["well conditioned", "ill conditioned"])
def test_wide_matrices_are_orthogonalised_as_by_the_literal_iteration(shape, smallest):
    torch.manual_seed(0)
    u, s, v = torch.linalg.svd(torch.randn(3, *shape, dtype=torch.float64), full_matrices=False)
    given = (u * s[:, None] * torch.logspace(0, math.log10(smallest), min(shape), dtype=torch.float64)) @ v
    wanted = []
    for matrix in given:
        x = matrix / matrix.norm()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        wanted.append(x)
    torch.testing.assert_close(newton_schulz(given), torch.stack(wanted), rtol=0, atol=1e-10)
    single = newton_schulz(given.float()).double()
    torch.testing.assert_close(single, torch.stack(wanted), rtol=0, atol=1e-3)


def test_newton_schulz_makes_singular_values_close_to_one():
    theta, steps = parameters(torch.float32), gradients(1, torch.float32)
    optimizer = Muon(theta.items(), 1.0, weight_decay=0.0, scale="spectral")
    take(optimizer, theta, steps)
    for name, start in parameters(torch.float32).items():
        if name in HIDDEN:
            step = (start - theta[name]).detach().flatten(1) / max(
                1, theta[name].flatten(1).shape[0] / theta[name][0].numel()
            ) ** 0.5
            values = torch.linalg.svdvals(step)
            assert 0.6 < values.min() <= values.max() < 1.3, name


@pytest.mark.parametrize(("padding", "count"), [(1.0, 3), (2.5, 2), (1e9, 1)])
def test_a_batch_of_matrices_is_computed_as_one_by_one(monkeypatch, padding, count):
    """Also of matrices of other shapes, which are padded with zeros."""
    monkeypatch.setitem(MOST_PADDING, "cpu", padding)
    made = batches(SIZES, padding)
    assert len(made) == count
    theta, alone, steps = parameters(), parameters(), gradients(3)
    with monkeypatch.context() as recorded:
        shapes: list[tuple[int, ...]] = []
        recorded.setattr(
            "offbeat.optim.muon.newton_schulz",
            lambda given: (shapes.append(tuple(given.shape)), newton_schulz(given))[1],
        )
        take(Muon(theta.items(), 0.01), theta, steps)
    wide = [[(min(SIZES[index]), max(SIZES[index])) for index in batch] for batch in made]
    assert shapes == [(len(each), *map(max, zip(*each, strict=True))) for each in wide] * 3, "padded to the largest"
    for name, p in alone.items():
        take(Muon([(name, p)], 0.01), {name: p}, steps)
        torch.testing.assert_close(theta[name], p, **CLOSE)


def test_no_batch_takes_more_multiplications_than_its_padding_allows():
    draw = random.Random(0)
    for _ in range(100):
        shapes = tuple((draw.choice([8, 16, 24, 64]), draw.choice([8, 32, 64, 100])) for _ in range(draw.randrange(9)))
        found = batches(shapes, 1.5)
        assert sorted(chain(*found)) == list(range(len(shapes)))
        for batch in found:
            sizes = [(min(shapes[index]), max(shapes[index])) for index in batch]
            rows, columns = (max(side) for side in zip(*sizes, strict=True))
            alone = sum(2 * m * m * n + m * m * m for m, n in sizes)
            assert len(batch) * (2 * rows * rows * columns + rows**3) <= 1.5 * alone


def test_all_matrices_of_a_block_take_the_iterations_of_one(monkeypatch):
    """They were 94 operations: on a GPU, small kernels one after the other are what an update costs."""
    monkeypatch.setitem(MOST_PADDING, "cpu", MOST_PADDING["cuda"])
    monkeypatch.delitem(WIDE, "cpu")
    block = gpt(layers=3, width=32, heads=2, context=8).block1
    optimizer = Muon(block.named_parameters(), torch.tensor(0.01), capturable=True)
    for p in block.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    with CountedOperations() as counted:
        optimizer.step()
    assert counted.number <= 49


@pytest.mark.parametrize("capturable", [True, False])
def test_parameters_without_gradient_keep_value_and_count(capturable):
    theta, steps = parameters(), gradients(3)
    optimizer = Muon(theta.items(), 0.01, capturable=capturable)
    sometimes = ("block.down.weight", "head.weight")
    take(
        optimizer,
        theta,
        [{n: g for n, g in step.items() if t != 1 or n not in sometimes} for t, step in enumerate(steps)],
    )
    start = parameters()
    for name, equation in zip(sometimes, (muon, adamw), strict=True):
        expected = equation(start[name].detach(), [steps[0][name], steps[2][name]], lr=0.01)
        # on a device steps are counted, and their powers computed, in float32
        close = {"rtol": 1e-5, "atol": 1e-6} if capturable else CLOSE
        torch.testing.assert_close(theta[name].detach(), expected, **close)


@pytest.mark.parametrize("way", ["a copy", "load_state_dict", "other tensors"])
def test_other_counts_of_steps_are_found_in_a_copy_and_after_loading(way):
    steps, once, twice = gradients(3), "head.weight", "embedding.weight"
    optimizer = Muon((theta := parameters()).items(), 0.01, capturable=True)
    take(optimizer, theta, [steps[0], {twice: steps[1][twice]}])  # counts 1 and 2
    made = Muon((other := parameters()).items(), 0.01, capturable=True)
    take(made, other, steps[:2])  # counts 2 everywhere, compared by its last step
    if way == "a copy":
        made, other = copy.deepcopy((optimizer, theta))
    elif way == "load_state_dict":
        made.load_state_dict(optimizer.state_dict())
    else:  # as checkpoints are loaded; new tensors may be where old ones were
        made.state.clear()
        for name, p in other.items():
            made.state[p] = {key: value.clone() for key, value in optimizer.state[theta[name]].items()}
    for name, p in other.items():
        p.data.copy_(theta[name].data)
    take(made, other, steps[2:])
    start, close = parameters(), {"rtol": 1e-5, "atol": 1e-6}
    for name, seen in ((once, (0, 2)), (twice, (0, 1, 2))):
        expected = adamw(start[name].detach(), [steps[t][name] for t in seen], lr=0.01)
        torch.testing.assert_close(other[name].detach(), expected, **close)


def test_the_direction_is_the_change_per_rate_where_it_is_kept():
    theta, steps = parameters(), gradients(2)
    optimizer = Muon(theta.items(), 0.01, adam_lr=0.02, weight_decay=0.0)
    take(optimizer, theta, steps[:1])
    assert all(optimizer.direction(p) is None for p in theta.values())
    assert all("direction" not in state for state in optimizer.state.values())
    for group in optimizer.param_groups:
        group["keep_direction"] = True
    before = copy.deepcopy(theta)
    take(optimizer, theta, steps[1:])
    for name, p in theta.items():
        lr = 0.01 if name in HIDDEN else 0.02
        torch.testing.assert_close(before[name] - lr * optimizer.direction(p), p, **CLOSE)
        assert (before[name] - p).abs().min() > 1e-9, name


@pytest.mark.parametrize("capturable", [True, False])
def test_rates_as_tensors_give_the_steps_of_numbers(capturable):
    theta, same, steps = parameters(torch.float32), parameters(torch.float32), gradients(3, torch.float32)
    take(Muon(theta.items(), torch.tensor(0.01), capturable=capturable), theta, steps)
    take(Muon(same.items(), 0.01), same, steps)
    for name, p in theta.items():
        torch.testing.assert_close(p, same[name], rtol=1e-5, atol=1e-6)


def test_the_state_dict_continues_bit_for_bit():
    theta, steps = parameters(torch.float32), gradients(5, torch.float32)
    optimizer = Muon(theta.items(), 0.01)
    take(optimizer, theta, steps[:2])
    again = copy.deepcopy(theta)
    other = Muon(again.items(), 0.5, momentum=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(optimizer, theta, steps[2:])
    take(other, again, steps[2:])
    assert all(torch.equal(p, again[name]) for name, p in theta.items())


def test_groups_keep_their_options_and_divide_by_kind():
    theta = parameters()
    slow = {"params": [(n, p) for n, p in theta.items() if n.startswith("block")], "lr": 1e-4}
    fast = {"params": [(n, p) for n, p in theta.items() if not n.startswith("block")]}
    optimizer = Muon([slow, fast], 0.01, adam_lr=0.1)
    assert [(g["hidden"], g["lr"], len(g["params"])) for g in optimizer.param_groups] == [
        (True, 1e-4, 5),
        (False, 1e-4, 1),
        (False, 0.1, 2),
    ]
    assert optimizer.param_groups[1]["param_names"] == ["block.up.bias"]


def test_without_names_only_the_number_of_dimensions_counts():
    theta = parameters()
    optimizer = Muon(theta.values(), 0.01)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in theta.values() if p.ndim >= 2}


def test_a_function_chooses_the_hidden_matrices():
    theta = parameters()
    optimizer = Muon(theta.items(), hidden=lambda name, p: name == "head.weight")
    assert optimizer.param_groups[0]["param_names"] == ["head.weight"]
    with pytest.raises(UserError, match=r"hidden= chooses block.up.bias of shape \[8\]"):
        Muon(theta.items(), hidden=lambda name, p: True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: use a finite number of at least 0"),
        ({"adam_lr": -1.0}, "adam_lr=-1.0: use a finite number of at least 0"),
        ({"momentum": 1.0}, "momentum=1.0: use a number of at least 0 and below 1"),
        ({"betas": (0.9, 1.0)}, "betas=.* use two numbers"),
        ({"scale": "rsm"}, "unknown scale 'rsm': did you mean 'rms'"),
        ({"lr": None}, "lr=None: use a finite number of at least 0"),
        ({"weight_decay": "x"}, "weight_decay='x': use a finite number of at least 0"),
        ({"lr": torch.ones(2)}, "lr=tensor.*: use a finite number of at least 0"),
        ({"betas": 0.9}, "betas=0.9: use two numbers"),
        ({"betas": ("a", "b")}, "betas=.* use two numbers"),
        ({"nesterov": 2}, "nesterov=2: use True or False"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Muon(parameters().items(), **options)
    if "adam_lr" not in options:
        with pytest.raises(UserError, match=message):  # it used the other scale for a group with a wrong one
            Muon([{"params": list(parameters().items()), **options}])


class Scaled(CompensatedOptimizer):
    """Another optimizer, with options that have names of Muon's and of RotatedAdam's, and a check of its own."""

    checks = CompensatedOptimizer.checks | {
        "steps": partial(number, allowed="use a number above 1", fits=lambda n: n > 1)
    }

    def __init__(self, parameters, **options) -> None:
        given = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "nesterov": False, **options}
        super().__init__(parameters, given)

    def hidden_directions(self, group: dict, parameters: list[Tensor]) -> list[Tensor]:
        return [group["scale"] * p.grad for p in parameters]


def test_a_class_checks_its_own_options_and_those_of_all_but_not_those_of_another():
    theta, steps = parameters(), gradients(1)
    take(Scaled(theta.items(), scale=0.5, momentum=(1, 2), refresh="never"), theta, steps)
    for name in HIDDEN:
        expected = parameters()[name].detach() - 0.1 * 0.5 * steps[0][name]
        torch.testing.assert_close(theta[name].detach(), expected, **CLOSE)
    with pytest.raises(UserError, match="lr=-1: use a finite number"):  # the first of several
        Scaled(theta.items(), lr=-1, eps=-1, steps=0)
    for options, message in (
        ({"steps": 1}, "steps=1: use a number above 1"),
        ({"lr": -1.0}, "lr=-1.0: use a finite number"),
    ):
        with pytest.raises(UserError, match=message):
            Scaled(theta.items(), **options)
        with pytest.raises(UserError, match=message):
            Scaled([{"params": list(theta.items()), **options}])
    Muon([{"params": list(theta.items()), "refresh": 0}])  # which it does not have
    RotatedAdam([{"params": list(theta.items()), "momentum": 1.0, "scale": "none"}])


@pytest.mark.parametrize("found", [re.compile("block").search, lambda name: name.startswith("block") or None])
def test_a_choice_of_hidden_matrices_counts_as_true_or_false(found):
    """Parameters for which it was neither True nor False were left out, and not trained."""
    theta = parameters()
    optimizer = Muon(theta.items(), hidden=lambda name, p: p.ndim >= 2 and found(name))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(theta)
    assert optimizer.param_groups[0]["param_names"] == [n for n, p in theta.items() if p.ndim >= 2 and "block" in n]
    with pytest.raises(UserError, match=r"hidden=\['block'\]: give a function \(name, parameter\) -> bool"):
        Muon(theta.items(), hidden=["block"])
    with pytest.raises(UserError, match="hidden='yes': use True or False"):
        Muon([{"params": list(theta.items()), "hidden": "yes"}])


@pytest.mark.parametrize("make", [Muon, RotatedAdam])
@pytest.mark.parametrize("shape", [(3, 2), (3,)])
def test_sparse_and_complex_gradients_are_refused_in_one_line(make, shape):
    for dtype, sparse in ((torch.float32, True), (torch.complex64, False)):
        p = nn.Parameter(torch.ones(shape, dtype=dtype))
        p.grad = torch.ones_like(p).to_sparse() if sparse else torch.ones_like(p)
        dense = nn.Parameter(torch.ones(shape))
        dense.grad = torch.ones_like(dense)
        for given in ([p], [dense, p]):
            with pytest.raises(UserError, match=r"^a gradient is sparse or complex: use .*$"):
                make(given).step()


def transformer(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {
        "vocab_size": 31,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    image = {**small, "image_size": 8, "patch_size": 4}
    image.pop("vocab_size")
    make = {
        "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=31, n_embd=8, n_layer=1, n_head=2, n_positions=16)),
        "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=2, **small)),
        "bert": lambda t: t.BertForPreTraining(t.BertConfig(**small)),
        "bert-classifier": lambda t: t.BertForSequenceClassification(t.BertConfig(**small)),
        "t5": lambda t: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=31, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, tie_word_embeddings=False)
        ),
        "vit": lambda t: t.ViTForImageClassification(t.ViTConfig(**image)),
    }
    return make[name](transformers)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "bert-classifier", "t5", "vit"])
def test_embeddings_and_output_layers_of_transformers_are_not_hidden(name):
    model = transformer(name)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    outputs = {"gpt2": 1, "llama": 1, "bert": 2, "bert-classifier": 1, "t5": 1, "vit": 1}[name]
    narrow = {31, 2}  # the vocabulary and the classes: the sizes of output layers alone
    ends = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape[0] in narrow}
    assert len(ends) == outputs
    first = {id(p) for n, p in model.named_parameters() if "embed" in n}  # patches, positions and the class token
    for name, p in model.named_parameters():
        outside = id(p) in tables | ends | first
        assert is_hidden_matrix(name, p) == (p.ndim >= 2 and not outside), name


@pytest.mark.parametrize(
    ("spec", "shape", "classes", "outside"),
    [
        ("gpt:layers=2,width=8,heads=2,context=8", (8,), 16, ["embedding.weight", "head.linear.weight"]),
        ("resnet8", (3, 8, 8), 10, ["head.linear.weight"]),
        ("mlp", (3, 8, 8), 10, ["head.linear.weight"]),
    ],
)
def test_embeddings_and_output_layers_of_our_models_are_not_hidden(spec, shape, classes, outside):
    from offbeat import models

    model = models.build(spec, shape=shape, classes=classes)
    matrices = {name for name, p in model.named_parameters() if p.ndim >= 2}
    assert {n for n, p in model.named_parameters() if is_hidden_matrix(n, p)} == matrices - set(outside)


def test_a_group_that_states_hidden_is_not_divided():
    theta = parameters()
    tables = {"params": (p for p in [theta["block.up.weight"]]), "hidden": False}
    rest = {"params": [theta["block.down.weight"]], "hidden": True}
    optimizer = Muon([tables, rest], 0.01, adam_lr=0.0)
    assert [(g["hidden"], g["lr"], g["nesterov"]) for g in optimizer.param_groups] == [
        (False, 0.0, False),
        (True, 0.01, True),
    ]
    with pytest.raises(UserError, match=r"hidden= chooses a parameter of shape \[8\]"):
        Muon([{"params": [theta["block.up.bias"]], "hidden": True}])


@pytest.mark.parametrize("given", [[], [3], {torch.zeros(2)}], ids=["none", "a number", "a set"])
def test_what_torch_refuses_as_parameters_is_refused(given):
    for make in (torch.optim.AdamW, Muon):
        with pytest.raises((TypeError, ValueError), match=r"empty parameter list|only optimize Tensors|ordered"):
            make([{"params": given}] if isinstance(given, set) else given)
