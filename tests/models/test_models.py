"""The networks: published sizes, where they can be cut, and what they accept."""

from __future__ import annotations

import dataclasses
import time
from functools import cache

import pytest
import torch
from torch import nn

from offbeat import models
from offbeat.errors import UserError

PUBLISHED_PARAMETERS = {
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "resnet1202": 19_421_274,
    "resnet18-cifar": 11_173_962,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "seresnet18": 11_778_592,
    "seresnet50": 28_088_024,
}

UNITS = {
    "resnet8": 5,
    "resnet14": 8,
    "resnet20": 11,
    "resnet32": 17,
    "resnet44": 23,
    "resnet56": 29,
    "resnet98": 50,
    "resnet110": 56,
    "resnet164": 83,
    "resnet1202": 602,
    "resnet18-cifar": 10,
    "resnet18": 10,
    "resnet34": 18,
    "resnet50": 18,
    "resnet101": 35,
    "resnet152": 52,
    "seresnet18": 10,
    "seresnet50": 18,
    "mlp": 5,
    "gpt": 14,
}


@cache
def built(name: str) -> nn.Sequential:
    with torch.device("meta"):
        return models.build(name)


describe = cache(models.describe)


def test_the_registry_holds_exactly_the_expected_names() -> None:
    assert sorted(models.names()) == sorted(UNITS)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_are_the_published_number(name: str) -> None:
    assert sum(parameter.numel() for parameter in built(name).parameters()) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", UNITS)
def test_units_are_the_blocks_and_the_stem_and_the_head(name: str) -> None:
    assert len(built(name)) == UNITS[name]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if UNITS[name] > 30 else name for name in UNITS]
)
def test_a_description_repeats_the_defaults_of_the_built_model(name: str) -> None:
    description, model = describe(name), built(name)
    with torch.device("meta"):
        output = model(models.random_batch(2, description.shape, description.classes, device="meta"))
    assert description.name == name
    positions = description.shape if models.takes_tokens(description.shape) else ()
    assert output.shape == (2, *positions, description.classes)
    assert description.units == len(model)
    assert description.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert description.flops > 0


@pytest.mark.parametrize(
    ("name", "multiply_adds"),
    [
        # by hand: stem, then 6 convolutions a stage of which the first of stages 2 and 3 has half the input channels
        ("resnet20", 442_368 + 6 * 2_359_296 + 2 * (1_179_648 + 5 * 2_359_296) + 640),
        ("resnet18", 1_814_073_344),  # the widely quoted 1.81 and 4.09 GMACs at 224x224
        ("resnet50", 4_089_184_256),
        ("mlp", 64 * 256 + 3 * 256 * 256 + 256 * 10),
    ],
)
def test_flops_are_twice_the_multiply_adds(name: str, multiply_adds: int) -> None:
    assert describe(name).flops == 2 * multiply_adds


def test_a_description_is_quick_repeatable_frozen_and_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    start = time.process_time()
    first = models.describe("resnet56")
    assert time.process_time() - start < 10
    assert models.describe("resnet56") == first
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.units = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [
        ("resnet8", (1, 8, 8), 10),
        ("resnet8", (1, 16, 16), 3),
        ("resnet20", (3, 32, 32), 10),
        ("resnet20", (3, 4, 4), 10),
        ("resnet14", (5, 9, 7), 1),
        ("resnet18-cifar", (1, 8, 8), 10),
        ("resnet18-cifar", (3, 32, 32), 100),
        ("resnet18", (3, 64, 64), 1000),
        ("seresnet18", (1, 32, 32), 7),
        ("seresnet50", (3, 45, 33), 4),
        ("mlp", (1, 8, 8), 10),
        ("mlp", (3, 1, 2), 2),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_the_output_is_one_score_a_class(name: str, shape: models.Shape, classes: int, training: bool) -> None:
    torch.manual_seed(0)
    model = models.build(name, shape=shape, classes=classes).train(training)
    output = model(torch.randn(2, *shape))
    assert output.shape == (2, classes)
    assert output.isfinite().all()


def test_the_deepest_network_runs_forward_and_backward_without_deep_recursion() -> None:
    torch.manual_seed(0)
    model = models.build("resnet1202", shape=(1, 4, 4))
    model(torch.randn(2, 1, 4, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("height", [8, 9])
def test_the_option_a_shortcut_takes_every_second_pixel_and_pads_channels_with_zeros(height: int) -> None:
    torch.manual_seed(0)
    width = 6
    block = models.build("resnet8").get_submodule("layer2_0").eval()
    with torch.no_grad():  # a zero scale silences the branch, so that only the shortcut is left
        block.get_parameter("branch.norm2.weight").zero_()
    x = torch.randn(2, 16, height, width)
    expected = torch.zeros(2, 32, (height + 1) // 2, (width + 1) // 2)
    for sample in range(2):
        for channel in range(16):
            for row in range(0, height, 2):
                for column in range(0, width, 2):
                    value = x[sample, channel, row, column].item()
                    expected[sample, channel, row // 2, column // 2] = max(value, 0.0)
    assert torch.equal(block(x), expected)


def test_option_a_shortcuts_have_no_parameters_and_equal_sizes_pass_unchanged() -> None:
    model = models.build("resnet20")
    shortcuts = [unit.get_submodule("shortcut") for name, unit in model.named_children() if name.startswith("layer")]
    assert len(shortcuts) == 9
    assert not any(list(shortcut.parameters()) for shortcut in shortcuts)
    assert [index for index, shortcut in enumerate(shortcuts) if not isinstance(shortcut, nn.Identity)] == [3, 6]


def test_squeeze_excitation_scales_the_branch_before_the_add() -> None:
    torch.manual_seed(0)
    block = models.build("seresnet18", shape=(3, 32, 32)).get_submodule("layer1_0").eval()
    x = torch.randn(2, 64, 5, 5)
    branch = nn.Sequential(*list(block.get_submodule("branch").children())[:-1])(x)
    value = {name: parameter for name, parameter in block.named_parameters() if "squeeze" in name}
    down, down_bias, up, up_bias = value.values()
    assert down.shape == (4, 64)
    hidden = (branch.mean((2, 3)) @ down.T + down_bias).clamp(min=0)
    gate = 1 / (1 + torch.exp(-(hidden @ up.T + up_bias)))
    torch.testing.assert_close(block(x), (x + branch * gate[:, :, None, None]).clamp(min=0))


def test_a_bottleneck_strides_on_its_three_by_three_convolution() -> None:
    branch = built("resnet50").get_submodule("layer2_0.branch")
    convolutions = [module for module in branch.modules() if isinstance(module, nn.Conv2d)]
    assert [(c.kernel_size, c.stride) for c in convolutions] == [((1, 1), (1, 1)), ((3, 3), (2, 2)), ((1, 1), (1, 1))]


@pytest.mark.parametrize("name", ["resnet8", "resnet18-cifar", "seresnet18", "mlp"])
def test_every_unit_leaves_its_input_alone_and_gives_it_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    shape = (3, 32, 32)
    x = torch.randn(2, *shape)
    for unit in models.build(name, shape=shape):
        given = x.clone().requires_grad_()
        output = unit(given)
        output.sum().backward()
        assert torch.equal(given, x)
        assert given.grad is not None
        x = output.detach()


def test_nothing_works_in_place() -> None:
    for name in models.names():
        assert not any(getattr(module, "inplace", False) for module in built(name).modules()), name


@pytest.mark.parametrize("name", ["resnet20", "seresnet18", "mlp"])
def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(name: str) -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return models.build(name).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert list(first) == list(again)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["head.linear.weight"], other["head.linear.weight"])


def test_convolutions_start_from_he_and_normalisations_as_the_identity() -> None:
    torch.manual_seed(0)
    model = models.build("resnet18-cifar")
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)
            assert module.bias is None
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def test_hidden_linear_layers_of_the_mlp_start_from_he_with_zero_bias() -> None:
    torch.manual_seed(0)
    state = models.build("mlp").state_dict()
    assert state["hidden2.linear.weight"].std().item() == pytest.approx((2 / 256) ** 0.5, rel=0.05)
    assert (state["hidden2.linear.bias"] == 0).all()


def test_children_and_state_have_meaningful_names() -> None:
    children = [name for name, _ in models.build("resnet14").named_children()]
    assert children == ["stem", "layer1_0", "layer1_1", "layer2_0", "layer2_1", "layer3_0", "layer3_1", "head"]
    trained = [name for name, _ in models.build("resnet8").named_parameters()]
    assert trained == [
        "stem.conv.weight",
        "stem.norm.weight",
        "stem.norm.bias",
        *(
            f"layer{stage}_0.branch.{part}"
            for stage in (1, 2, 3)
            for part in (
                "conv1.weight",
                "norm1.weight",
                "norm1.bias",
                "conv2.weight",
                "norm2.weight",
                "norm2.bias",
            )
        ),
        "head.linear.weight",
        "head.linear.bias",
    ]
    assert [name for name, _ in models.build("mlp").named_children()] == [
        *(f"hidden{layer}" for layer in (1, 2, 3, 4)),
        "head",
    ]


@pytest.mark.parametrize("name", models.names())
def test_a_model_is_a_plain_sequential(name: str) -> None:
    assert type(built(name)) is nn.Sequential


@pytest.mark.parametrize("name", ["resnet8", "seresnet18", "mlp"])
def test_double_precision_works(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, shape=(3, 32, 32)).double()
    output = model(torch.randn(2, 3, 32, 32, dtype=torch.float64))
    assert output.dtype == torch.float64
    output.sum().backward()


def test_a_wrong_name_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown model 'resnet65': did you mean 'resnet56'"):
        models.build("resnet65")
    with pytest.raises(UserError, match="did you mean 'seresnet50'"):
        models.describe("se-resnet50")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet20", (3, 3, 8)),
        ("resnet20", (0, 32, 32)),
        ("resnet20", (32, 32)),
        ("resnet20", (2, 3, 32, 32)),
        ("resnet20", (3, 32.0, 32)),
        ("resnet20", (3, True, 32)),
        ("resnet20", "abc"),
        ("resnet20", 32),
        ("resnet18", (3, 31, 64)),
        ("mlp", (1, 0, 8)),
    ],
)
def test_an_unusable_shape_is_reported_in_one_line(name: str, shape: object) -> None:
    with pytest.raises(UserError, match=r"shape=.* for .*: use \(channels, height, width\) of at least ") as caught:
        models.build(name, shape=shape)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("classes", [0, -1, 2.5, True, "10"])
def test_unusable_classes_are_reported_in_one_line(classes: object) -> None:
    with pytest.raises(UserError, match=r"classes=.* for mlp: use ") as caught:
        models.build("mlp", classes=classes)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
