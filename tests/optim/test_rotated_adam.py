"""Adam in a rotated basis: the equations of one parameter at a time, and training with it."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator

import pytest
import torch
from counted_operations import CountedOperations
from literal_optimizers import CLOSE, HIDDEN, adamw, gradients, parameters, rotated_adam, take
from torch import nn

from offbeat.errors import UserError
from offbeat.models.gpt import gpt
from offbeat.optim import RotatedAdam
from offbeat.optim.rotated_adam import largest, refreshed

EPS = 1e-4  # above the rounding of directions in which there has been no gradient yet
NEAR = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("block", [3, 4])
@pytest.mark.parametrize(("nesterov", "compensation"), [(False, 0.0), (True, 1.5), (False, 2.0)])
def test_every_parameter_follows_its_equations(block, nesterov, compensation):
    """In blocks that have at most one direction without a gradient, which rounding would choose."""
    theta, steps = parameters(), gradients(7)
    optimizer = RotatedAdam(theta.items(), 0.01, nesterov=nesterov, block=block, eps=EPS)
    for group in optimizer.param_groups:
        group["compensation"] = compensation
    take(optimizer, theta, steps)
    for name, start in parameters().items():
        given = [step[name] for step in steps]
        if name in HIDDEN:
            options = {"exponent": compensation + nesterov, "block": block, "eps": EPS}
            expected = rotated_adam(start.detach(), given, lr=0.01, **options)
        else:
            expected = adamw(start.detach(), given, lr=0.01, betas=(0.95, 0.95), exponent=compensation, eps=EPS)
        torch.testing.assert_close(theta[name].detach(), expected, **NEAR, msg=name)


def test_matrices_of_one_batch_do_not_mix():
    """A step of one matrix has the same bits whatever the others are."""
    theta, other, steps = parameters(), parameters(), gradients(4)
    name = "block.down.weight"
    take(RotatedAdam(theta.items(), 0.01, block=3), theta, steps)
    changed = [{key: g if key == name else g.flip(0) * (1 + g.abs()) for key, g in step.items()} for step in steps]
    take(RotatedAdam(other.items(), 0.01, block=3), other, changed)
    assert torch.equal(theta[name], other[name])
    assert not any(torch.equal(theta[key], other[key]) for key in HIDDEN if key != name)


def test_matrices_without_gradient_keep_value_and_state():
    """Those that are stepped are another batch each time, and have counts of their own."""
    theta, steps = parameters(), gradients(8)
    seen = {name: [t for t in range(8) if t % 3 != place % 3] for place, name in enumerate(HIDDEN)}
    given = [{name: g for name, g in step.items() if t in seen.get(name, ())} for t, step in enumerate(steps)]
    take(RotatedAdam(theta.items(), 0.01, block=3, eps=EPS), theta, given)
    for name in HIDDEN:
        alone = [steps[t][name] for t in seen[name]]
        expected = rotated_adam(parameters()[name].detach(), alone, lr=0.01, block=3, eps=EPS)
        torch.testing.assert_close(theta[name].detach(), expected, **NEAR, msg=name)


@pytest.mark.parametrize("order", [1, -1], ids=["from the first", "from the last"])
def test_states_that_are_no_longer_stepped_do_not_keep_their_batch(order):
    """One that was left in it kept all of it: layers that are frozen one by one took 4 times the memory."""
    theta = [nn.Parameter(torch.randn(6, 6)) for _ in range(5)]
    optimizer = RotatedAdam(theta, 0.01)
    for p in theta:
        p.grad = torch.randn_like(p)
    for p in theta[::order]:
        optimizer.step()
        assert held(optimizer) == sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        p.grad = None


def held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the memory that the states are in."""
    storages = [value.untyped_storage() for state in optimizer.state.values() for value in state.values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_a_pickled_optimizer_has_each_state_once():
    theta = [nn.Parameter(torch.randn(32, 32)) for _ in range(6)]
    optimizer = RotatedAdam(theta, 0.01)
    for p in theta:
        p.grad = torch.randn_like(p)
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    assert held(again) == held(optimizer)
    for p, other in zip(theta, again.param_groups[0]["params"], strict=True):
        assert all(torch.equal(value, again.state[other][name]) for name, value in optimizer.state[p].items())


def test_a_copy_and_its_original_do_not_share_state():
    theta, steps = parameters(torch.float32), gradients(9, torch.float32)
    optimizer = RotatedAdam(theta.items(), 0.01, block=4)
    take(optimizer, theta, steps[:3])
    again, other = copy.deepcopy((theta, optimizer))
    take(optimizer, theta, steps[3:])
    take(other, again, steps[3:])
    assert all(torch.equal(p, again[name]) for name, p in theta.items())


def test_all_matrices_of_a_transformer_block_are_one_batch():
    """Were they computed one by one, they would take more than a hundred operations: on a GPU, small kernels one after
    the other are what an update costs."""
    block = gpt(layers=3, width=32, heads=2, context=8).block1
    optimizer = RotatedAdam(block.named_parameters(), torch.tensor(0.01), block=16, capturable=True)
    for p in block.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    with CountedOperations() as counted:
        optimizer.step()
    assert counted.number <= 73


def test_blocks_of_one_element_are_torchs_adamw():
    theta, same, steps = parameters(), parameters(), gradients(5)
    take(RotatedAdam(theta.items(), 0.01, betas=(0.9, 0.99), weight_decay=0.1, block=1), theta, steps)
    take(torch.optim.AdamW(same.values(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), same, steps)
    for name, p in theta.items():
        torch.testing.assert_close(p, same[name], **CLOSE)


@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_no_update_is_far_larger_than_those_of_adam(scale):
    """The second one was 7 to 14 times as large as lr, and with it the loss of a GPT without a warm-up."""
    given, theta = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(64, 64))
    signal = torch.randn(64, 8, generator=given) @ torch.randn(8, 64, generator=given) / 3
    optimizer = RotatedAdam([("block.weight", theta)], 1.0, weight_decay=0.0)
    for t in range(10):
        before = theta.detach().clone()
        theta.grad = scale * (signal + torch.randn(64, 64, generator=given))
        optimizer.step()
        size = float((theta.detach() - before).square().mean().sqrt())
        assert size < 1.2 or (t == 0 and size < 2.5), t  # rounding is most of the first, with large gradients


def few(kind: str, given: torch.Generator) -> torch.Tensor:
    """A gradient that leaves directions of its rows or columns out."""
    wide = torch.randn(64, 32, generator=given)
    if kind == "samples":
        return torch.randn(64, 5, generator=given) @ torch.randn(5, 32, generator=given)
    return wide if kind == "columns" else wide * (torch.rand(64, 1, generator=given) < 0.3)


@pytest.mark.parametrize("kind", ["columns", "samples", "rows"])
def test_updates_do_not_depend_on_how_the_first_gradients_are_rounded(kind):
    """As another machine rounds them. The first basis was that of a factorization where there was no gradient, so that
    updates differed by as much as they have; most of the first update was rounding."""
    found = []
    for noise in (0.0, 1e-7):
        theta, given, rounding = nn.Parameter(torch.zeros(64, 32)), *(torch.Generator().manual_seed(s) for s in (1, 2))
        optimizer, updates = RotatedAdam([("block.weight", theta)], 1.0, weight_decay=0.0), []
        for _ in range(5):
            before = theta.detach().clone()
            theta.grad = few(kind, given) * (1 + noise * torch.randn(64, 32, generator=rounding))
            optimizer.step()
            updates.append(theta.detach() - before)
        found.append(torch.stack(updates))
    assert (found[0] - found[1]).abs().max() < 0.01


def test_rows_without_a_gradient_keep_their_axes_and_the_first_update_leaves_them():
    theta, given = nn.Parameter(torch.zeros(12, 6)), torch.Generator().manual_seed(0)
    theta.grad = torch.randn(12, 6, generator=given)
    seen = torch.tensor([0, 3, 4, 9])
    unseen = [row for row in range(12) if row not in seen.tolist()]
    theta.grad[unseen] = 0
    optimizer = RotatedAdam([("block.weight", theta)], 1.0, weight_decay=0.0)
    optimizer.step()
    basis = optimizer.state[theta]["left_basis"][0]
    torch.testing.assert_close(basis[unseen, : len(unseen)].abs(), torch.eye(8), atol=1e-6, rtol=0)
    assert theta[unseen].abs().max() < 1e-12
    left, _, right = torch.linalg.svd(theta.grad[seen], full_matrices=False)
    torch.testing.assert_close(theta.detach()[seen], -left @ right, atol=1e-4, rtol=0)


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.95), (0.0, 0.9)])
@pytest.mark.parametrize("compensation", [0.0, 11.0])
def test_the_bound_of_directions_is_the_largest_that_adam_has(betas, compensation):
    """Gradients in proportion to the weights in d, relative to those in v, reach it."""
    b, b2 = betas
    a = b**compensation
    weights = [1 - a * b, *(a * (1 - b) * b**age for age in range(1, 500))]
    others = [(1 - b2) * b2**age for age in range(500)]
    gradients = [weight / other for weight, other in zip(weights, others, strict=True)]
    d = sum(weight * g for weight, g in zip(weights, gradients, strict=True))
    v = sum(weight * g * g for weight, g in zip(others, gradients, strict=True))
    assert d / v**0.5 == pytest.approx(largest(a, b, b2), rel=1e-9)
    assert largest(0.9, 0.5, 0.25) == math.inf, "a sum of equal terms"


def drifting(n: int, size: int) -> Iterator[torch.Tensor]:
    """Gradients of size x size whose covariance turns slowly, with eigenvalues from 1 to 1e-6."""
    given = torch.Generator().manual_seed(3)
    scales = torch.logspace(0, -3, size)
    turn = torch.randn(size, size, generator=given)
    turn = torch.linalg.matrix_exp((turn - turn.T) * 3e-4)
    frame = torch.linalg.qr(torch.randn(size, size, generator=given)).Q
    for _ in range(n):
        frame = frame @ turn
        yield frame @ (scales[:, None] * torch.randn(size, size, generator=given))


def left_over(basis: torch.Tensor, average: torch.Tensor) -> float:
    """What U' L U has beside its diagonal, relative to the sizes of its rows and columns."""
    turned = basis.mT @ average @ basis
    scale = turned.diagonal().clamp(min=1e-12).rsqrt()
    turned = scale[:, None] * turned * scale
    return float((turned - turned.diagonal().diag()).norm() / turned.diagonal().norm())


def test_bases_follow_eigenvectors_better_than_rare_factorizations_do():
    theta = nn.Parameter(torch.zeros(24, 24))
    optimizer, rare, left, factorized = RotatedAdam([("block.weight", theta)], 1e-3), None, [], []
    for t, g in enumerate(drifting(400, 24)):
        theta.grad = g
        optimizer.step()
        state = optimizer.state[theta]
        average, basis = state["left_average"][0], state["left_basis"][0]
        if t % 10 == 0:
            rare = basis.clone() if rare is None else torch.linalg.qr(average @ rare).Q
        left.append(left_over(basis, average))
        factorized.append(left_over(rare, average))
    assert sum(left[100:]) < 0.2 * sum(factorized[100:])


def test_bases_stay_orthogonal_in_float32():
    theta = nn.Parameter(torch.zeros(24, 24))
    optimizer, worst = RotatedAdam([("block.weight", theta)], 1e-3), 0.0
    for t, g in enumerate(drifting(3000, 24)):
        theta.grad = g * (1e3 if t % 500 == 250 else 1.0)  # and one that is far larger than the average
        optimizer.step()
        basis = optimizer.state[theta]["left_basis"][0]
        worst = max(worst, float((basis.T @ basis - torch.eye(24)).norm()))
    assert worst < 0.05


@pytest.mark.parametrize("angle", [1e-3, 1.0, 1e3])
def test_any_rotations_leave_bases_orthogonal(angle):
    """Averages that have nothing to do with each other, also without a gradient."""
    given = torch.Generator().manual_seed(0)
    bases = torch.eye(16).repeat(3, 1, 1)
    for _ in range(300):
        roots = torch.randn(3, 16, 16, generator=given) * torch.tensor([angle, 1.0, 0.0])[:, None, None]
        bases = refreshed(bases, roots @ roots.mT)
        assert (bases.mT @ bases - torch.eye(16)).norm() < 0.1
    assert torch.equal(bases[2], torch.eye(16))


def test_rotated_gradients_give_rotated_steps():
    """What Adam, which goes by single weights, does not have."""
    given = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(5, 5, generator=given, dtype=torch.float64)).Q for _ in range(2))
    name = "block.square.weight"
    theta, turned, steps = parameters()[name], parameters()[name], [step[name] for step in gradients(6)]
    with torch.no_grad():
        turned.copy_(left @ turned @ right)
    take(RotatedAdam([(name, theta)], 0.01), {name: theta}, [{name: g} for g in steps])
    take(RotatedAdam([(name, turned)], 0.01), {name: turned}, [{name: left @ g @ right} for g in steps])
    torch.testing.assert_close(turned.detach(), left @ theta.detach() @ right, rtol=1e-8, atol=1e-8)


def test_each_group_has_its_own_blocks():
    theta, steps = parameters(), gradients(5)
    names = ("block.square.weight", "block.down.weight")
    groups = [{"params": [(name, theta[name])], "block": n} for name, n in zip(names, (5, 2), strict=True)]
    take(RotatedAdam(groups, 0.01, eps=EPS), {name: theta[name] for name in names}, steps)
    for name, block in zip(names, (5, 2), strict=True):
        given = [step[name] for step in steps]
        expected = rotated_adam(parameters()[name].detach(), given, lr=0.01, block=block, eps=EPS)
        torch.testing.assert_close(theta[name].detach(), expected, **NEAR)


def test_steps_counted_on_the_device_give_the_same_numbers():
    theta, same, steps = parameters(), parameters(), gradients(7)
    take(RotatedAdam(theta.items(), torch.tensor(0.01), block=4, capturable=True), theta, steps)
    take(RotatedAdam(same.items(), 0.01, block=4), same, steps)
    for name, p in theta.items():
        torch.testing.assert_close(p, same[name], rtol=1e-6, atol=1e-6, msg=name)  # the bias is corrected in float32


def test_the_direction_is_the_change_per_rate():
    theta, steps = parameters(), gradients(3)
    optimizer = RotatedAdam(theta.items(), 0.01, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["keep_direction"] = True
    take(optimizer, theta, steps[:2])
    before = copy.deepcopy(theta)
    take(optimizer, theta, steps[2:])
    for name, p in theta.items():
        torch.testing.assert_close(before[name] - 0.01 * optimizer.direction(p), p, **CLOSE)


def test_the_state_dict_continues_bit_for_bit():
    theta, steps = parameters(torch.float32), gradients(7, torch.float32)
    optimizer = RotatedAdam(theta.items(), 0.01, block=4)
    take(optimizer, theta, steps[:3])
    again = copy.deepcopy(theta)
    other = RotatedAdam(again.items(), 0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(optimizer, theta, steps[3:])
    take(other, again, steps[3:])
    assert all(torch.equal(p, again[name]) for name, p in theta.items())


def test_rounded_products_leave_bases_orthogonal():
    """As TF32 has them: beside the few directions of its gradients an average is no longer positive. Bases were NaN."""
    given = torch.Generator().manual_seed(0)
    bases, few = torch.eye(16)[None], torch.randn(16, 2, generator=given)
    for _ in range(300):
        noise = torch.randn(16, 16, generator=given)
        bases = refreshed(bases, (few @ few.T + 1e-3 * (noise + noise.T))[None])
        assert (bases.mT @ bases - torch.eye(16)).norm() < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block": 0}, "block=0: use a whole number from 1 up"),
        ({"eps": -1.0}, "eps=-1.0: use a finite number of at least 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        RotatedAdam(parameters().items(), **options)


def test_an_option_of_a_group_out_of_range_is_refused():
    with pytest.raises(UserError, match="block=0: use a whole number"):
        RotatedAdam([{"params": list(parameters().items()), "block": 0}])


def test_half_precision_parameters_are_refused():
    theta = parameters(torch.bfloat16)
    with pytest.raises(UserError, match=r"RotatedAdam with parameters of torch\.bfloat16: use float32"):
        take(RotatedAdam(theta.items()), theta, gradients(1, torch.bfloat16))


def test_a_state_with_other_blocks_is_refused():
    theta, steps = parameters(), gradients(2)
    optimizer = RotatedAdam(theta.items(), 0.01)
    take(optimizer, theta, steps[:1])
    optimizer.param_groups[0]["block"] = 2
    with pytest.raises(UserError, match="this state of RotatedAdam has other blocks: use the version and the block="):
        take(optimizer, theta, steps[1:])


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_first_gradient_that_is_not_finite_gives_nan_as_with_adam(value):
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.full((4, 4), value)
    RotatedAdam([weight], 0.1, hidden=lambda name, p: True).step()
    assert value == 1e30 or weight.isnan().all()


def test_a_matrix_without_elements_is_left_alone():
    empty, weight = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(4, 4))
    empty.grad, weight.grad = torch.ones(0, 4), torch.ones(4, 4)
    RotatedAdam([empty, weight], 0.1, hidden=lambda name, p: True).step()
    assert (weight != 1).all()
