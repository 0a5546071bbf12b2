"""The auxiliary networks, layer by layer as the papers and their code have them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import offbeat
from offbeat.heads import LocalErrors, pooled_sides, similarity


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def make(method: offbeat.Method, shape: tuple[int, ...], classes: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return method.head(shape, classes).double()


def named_layers(net: nn.Module) -> list[str]:
    return [str(layer) for layer in net.children()]


# ---- DGL


def test_the_classifier_of_greedy_learning_is_mlp_sr():
    """Pool to a quarter of each side, three 1x1 convolutions, pool to 2x2, three linear layers, then the classes."""
    convolution = ["Conv2d(6, 6, kernel_size=(1, 1), stride=(1, 1), bias=False)", str(nn.BatchNorm2d(6)), "ReLU()"]
    linear = ["Linear(in_features=24, out_features=24, bias=True)", str(nn.BatchNorm1d(24)), "ReLU()"]
    assert named_layers(make(offbeat.DGL(), (6, 13, 7)).net) == [
        "AdaptiveAvgPool2d(output_size=(4, 2))",
        *convolution * 3,
        "AdaptiveAvgPool2d(output_size=2)",
        str(nn.Flatten()),
        *linear * 3,
        "Linear(in_features=24, out_features=5, bias=True)",
    ]
    assert named_layers(make(offbeat.DGL(), (24,)).net) == [*linear * 3, str(nn.Linear(24, 5))]


# ---- pred-sim


@pytest.mark.parametrize("C", [1, 3, 16, 64, 300, 4000])
@pytest.mark.parametrize("sides", [(1, 1), (8, 8), (32, 32), (5, 7), (64, 2), (1, 40)])
def test_images_are_pooled_as_little_as_the_limit_of_features_allows(C, sides):
    H, W = pooled_sides((C, *sides), 2048)
    assert 1 <= H <= sides[0]
    assert 1 <= W <= sides[1]
    assert C * H * W <= 2048 or (H, W) == (1, 1)
    if sides[0] == sides[1] and sides[0] > H:
        assert H == W
        assert C * (H + 1) ** 2 > 2048
    if C * sides[0] * sides[1] <= 2048:
        assert sides == (H, W)


def test_the_local_classifier_starts_at_zero_and_the_projection_has_no_bias():
    head = make(offbeat.PredSim(), (128, 8, 8))
    assert named_layers(head.net) == [
        "AdaptiveAvgPool2d(output_size=(4, 4))",
        str(nn.Flatten()),
        str(nn.Linear(2048, 5)),
    ]
    assert not any(p.any() for p in head.net.parameters())
    assert str(head.project) == str(nn.Conv2d(128, 128, 3, padding=1, bias=False))
    assert named_layers(make(offbeat.Pred(), (7,)).net) == [str(nn.Linear(7, 5))]
    assert str(make(offbeat.Sim(), (7,)).project) == str(nn.Linear(7, 7, bias=False))
    assert not hasattr(make(offbeat.Pred(), (7,)), "project")
    assert not hasattr(make(offbeat.Sim(), (7,)), "net")


def cosine(features: list[Tensor]) -> Tensor:
    """Pair by pair, each sample's mean subtracted."""
    vectors = [f - f.mean() for f in features]
    return torch.stack(
        [torch.stack([(a @ b) / ((a.norm() + 1e-8) * (b.norm() + 1e-8)) for b in vectors]) for a in vectors]
    )


@pytest.mark.parametrize(
    ("shape", "by_channel"),
    [
        ((6, 4, 3), True),
        ((6, 2, 1), True),
        ((4, 5, 5), True),
        ((3, 5, 5), False),
        ((6, 1, 4), False),
        ((9,), False),
    ],
)
def test_similarity_compares_standard_deviations_over_space_from_four_channels_on(shape, by_channel):
    x = random(5, *shape)
    features = [torch.stack([channel.flatten().std() for channel in z]) if by_channel else z.flatten() for z in x]
    torch.testing.assert_close(similarity(x), cosine(features), rtol=0, atol=1e-12)


def test_no_similarity_is_beyond_one_by_rounding():
    x = torch.randn(200, 9, generator=generator())
    unit = nn.functional.normalize(x - x.mean(1, keepdim=True))
    assert (unit @ unit.T).max() > 1, "rounding alone"
    assert similarity(x).abs().max() <= 1


def test_the_local_error_of_images_is_its_formula():
    head, z, y = make(offbeat.PredSim(beta=0.7), (6, 4, 4)), random(5, 6, 4, 4), torch.tensor([0, 1, 1, 4, 2])
    with torch.no_grad():
        head.net[-1].weight.copy_(random(*head.net[-1].weight.shape, seed=1))
    h = nn.functional.conv2d(z, head.project.weight, padding=1)
    wanted = cosine(list(one_hot(y, 5).double()))
    alike = ((cosine([torch.stack([c.flatten().std() for c in one]) for one in h]) - wanted) ** 2).mean()
    scores = z.flatten(1) @ head.net[-1].weight.T
    torch.testing.assert_close(head(z, y, cross_entropy), 0.3 * cross_entropy(scores, y) + 0.7 * alike)


@pytest.mark.parametrize("shape", [(6, 4, 4), (6,)])
def test_a_sample_whose_channels_are_all_dead_has_a_finite_gradient(shape):
    """torch's gradient of a square root at zero is infinite, and zero times it NaN."""
    head = LocalErrors(shape, 3, pred=0.0, sim=1.0, most=2048).double()
    z = random(4, *shape)
    z[1] = 0
    z.requires_grad_()
    head(z, torch.tensor([0, 1, 2, 0]), cross_entropy).backward()
    assert z.grad.isfinite().all()
    assert head.project.weight.grad.isfinite().all()
    assert z.grad[1].abs().max() < 10 * z.grad[[0, 2, 3]].abs().max()


# ---- Mostafa


@pytest.mark.parametrize("feedback", ["transpose", "sign"])
def test_fixed_classifiers_score_by_w_and_feed_back_by_w_or_its_signs(feedback):
    head, z, y = make(offbeat.Mostafa(feedback), (2, 3, 3)), random(4, 2, 3, 3), torch.tensor([0, 4, 2, 2])
    scores = z.flatten(1) @ head.W.T
    z.requires_grad_()
    loss = head(z, y, cross_entropy)
    torch.testing.assert_close(loss, cross_entropy(scores, y))
    back = head.W if feedback == "transpose" else head.S
    expected = (torch.softmax(scores, 1) - one_hot(y, 5)) / 4 @ back
    (found,) = torch.autograd.grad(loss, [z])
    torch.testing.assert_close(found.flatten(1), expected)
    assert not list(head.parameters()), "never trained"


def test_fixed_classifiers_are_uniform_within_the_root_of_their_features():
    head = make(offbeat.Mostafa("sign"), (8, 10, 10), classes=20)
    for matrix in (head.W, head.S):
        scaled = matrix * 800**0.5
        assert scaled.abs().max() <= 1
        assert abs(float(scaled.mean())) < 0.02
        assert abs(float(scaled.square().mean()) - 1 / 3) < 0.01


# ---- DNI


def test_the_synthesiser_of_images_is_two_hidden_5x5_convolutions_and_a_zero_one():
    net = make(offbeat.DNI(), (6, 8, 8)).net
    hidden = [str(nn.BatchNorm2d(128)), "ReLU()"]
    assert str(net.first) == str(nn.Conv2d(6, 128, 5, padding=2))
    assert named_layers(net.rest) == [
        *hidden,
        str(nn.Conv2d(128, 128, 5, padding=2)),
        *hidden,
        str(nn.Conv2d(128, 6, 5, padding=2)),
    ]
    assert not net.rest[-1].weight.any()
    assert not net.rest[-1].bias.any()
    assert net.embedding is None


@pytest.mark.parametrize("shape", [(6, 4, 4), (6,)])
def test_labels_that_condition_the_synthesiser_are_added_after_the_first_layer(shape):
    head, h, y = make(offbeat.DNI(conditional=True), shape), random(3, *shape), torch.tensor([1, 0, 4])
    assert not head(h, y).any(), "nothing at first"
    with torch.no_grad():
        head.net.rest[-1].weight.copy_(random(*head.net.rest[-1].weight.shape, seed=1) / 10)
    seen = []
    head.net.rest.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    head(h, y)
    added = one_hot(y, 5).double() @ head.net.embedding.weight.T
    torch.testing.assert_close(
        seen[0] - head.net.first(h), added.view(*added.shape, *[1] * (len(shape) - 1)).expand_as(seen[0])
    )
    assert not torch.equal(head(h, y), head(h, y.flip(0)))
    unconditional = make(offbeat.DNI(), shape)
    assert torch.equal(unconditional(h, y), unconditional(h, y.flip(0)))


def test_a_lesson_is_the_mean_squared_distance_from_b_times_the_gradient():
    head, h, g = make(offbeat.DNI(), (6,)), random(3, 6), random(3, 6, seed=1)
    guess = head(h, None)
    (found,) = torch.autograd.grad(head.lesson(h, None, g), [head.net.rest[-1].bias])
    torch.testing.assert_close(found, (2 / 3 * (guess - 3 * g)).sum(0))


@pytest.mark.parametrize(
    "method", [offbeat.DGL(), offbeat.PredSim(), offbeat.Mostafa(), offbeat.DNI()], ids=lambda method: method.name
)
@pytest.mark.parametrize("size", [(12, 2), (1, 9)])
def test_heads_take_images_that_are_not_square(method, size):
    head, z = make(method, (4, *size)), random(5, 4, *size)
    y = torch.tensor([0, 1, 2, 3, 4])
    if method.feedback == "local":
        assert head(z, y, cross_entropy).isfinite()
    else:
        assert head(z, y).shape == z.shape
