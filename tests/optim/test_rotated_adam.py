"""Adam in a rotated basis: the equations of one parameter at a time, and training with it."""

from __future__ import annotations

import copy

import pytest
import torch
from literal_optimizers import CLOSE, HIDDEN, adamw, gradients, parameters, rotated_adam, take

from offbeat.errors import UserError
from offbeat.optim import RotatedAdam

EPS = 1e-4  # above the rounding of directions in which there has been no gradient yet


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize(("nesterov", "compensation", "refresh"), [(False, 0.0, 2), (True, 1.5, 3), (False, 2.0, 1)])
def test_every_parameter_follows_its_equations(one_sided, nesterov, compensation, refresh):
    theta, steps = parameters(), gradients(7)
    optimizer = RotatedAdam(theta.items(), 0.01, nesterov=nesterov, refresh=refresh, one_sided=one_sided, eps=EPS)
    for group in optimizer.param_groups:
        group["compensation"] = compensation
    take(optimizer, theta, steps)
    for name, start in parameters().items():
        given = [step[name] for step in steps]
        if name in HIDDEN:
            rows, columns = start.flatten(1).shape
            sides = ("left" if rows <= columns else "right",) if one_sided else ("left", "right")
            options = {"exponent": compensation + nesterov, "refresh": refresh, "sides": sides, "eps": EPS}
            expected = rotated_adam(start.detach(), given, lr=0.01, **options)
        else:
            expected = adamw(start.detach(), given, lr=0.01, betas=(0.95, 0.95), exponent=compensation, eps=EPS)
        torch.testing.assert_close(theta[name].detach(), expected, **CLOSE, msg=name)


def test_only_sides_of_at_most_max_dim_are_rotated():
    theta, steps = parameters(), gradients(4)
    optimizer = RotatedAdam(theta.items(), 0.01, refresh=2, max_dim=4, eps=EPS)
    take(optimizer, theta, steps)
    for name, sides in {
        "block.up.weight": ("right",),
        "block.down.weight": ("left",),
        "block.square.weight": (),
    }.items():
        start, given = parameters()[name].detach(), [step[name] for step in steps]
        expected = rotated_adam(start, given, lr=0.01, refresh=2, sides=sides, eps=EPS)
        torch.testing.assert_close(theta[name].detach(), expected, **CLOSE)
        assert {key for key in optimizer.state[theta[name]] if "basis" in key} == {f"{side}_basis" for side in sides}


def test_without_rotation_it_is_torchs_adamw():
    theta, same, steps = parameters(), parameters(), gradients(5)
    take(RotatedAdam(theta.items(), 0.01, betas=(0.9, 0.99), weight_decay=0.1, max_dim=0), theta, steps)
    take(torch.optim.AdamW(same.values(), lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), same, steps)
    for name, p in theta.items():
        torch.testing.assert_close(p, same[name], **CLOSE)


def test_rotated_gradients_give_rotated_steps():
    """What Adam, which goes by single weights, does not have."""
    given = torch.Generator().manual_seed(2)
    left, right = (torch.linalg.qr(torch.randn(5, 5, generator=given, dtype=torch.float64)).Q for _ in range(2))
    name = "block.square.weight"
    theta, turned, steps = parameters()[name], parameters()[name], [step[name] for step in gradients(6)]
    with torch.no_grad():
        turned.copy_(left @ turned @ right)
    take(RotatedAdam([(name, theta)], 0.01, refresh=2), {name: theta}, [{name: g} for g in steps])
    take(RotatedAdam([(name, turned)], 0.01, refresh=2), {name: turned}, [{name: left @ g @ right} for g in steps])
    torch.testing.assert_close(turned.detach(), left @ theta.detach() @ right, rtol=1e-8, atol=1e-8)


def test_each_group_has_its_own_interval_of_refreshes():
    theta, steps = parameters(), gradients(5)
    names = ("block.square.weight", "block.down.weight")
    groups = [{"params": [(name, theta[name])], "refresh": n} for name, n in zip(names, (1, 4), strict=True)]
    take(RotatedAdam(groups, 0.01, eps=EPS), {name: theta[name] for name in names}, steps)
    for name, refresh in zip(names, (1, 4), strict=True):
        given = [step[name] for step in steps]
        expected = rotated_adam(parameters()[name].detach(), given, lr=0.01, refresh=refresh, eps=EPS)
        torch.testing.assert_close(theta[name].detach(), expected, **CLOSE)


def test_steps_counted_on_the_device_give_the_same_numbers():
    theta, same, steps = parameters(), parameters(), gradients(7)
    take(RotatedAdam(theta.items(), torch.tensor(0.01), refresh=3, capturable=True), theta, steps)
    take(RotatedAdam(same.items(), 0.01, refresh=3), same, steps)
    for name, p in theta.items():
        torch.testing.assert_close(p, same[name], rtol=1e-6, atol=1e-6, msg=name)  # the bias is corrected in float32


def test_a_loaded_state_decides_when_the_next_refresh_is():
    theta, steps = parameters(torch.float32), gradients(8, torch.float32)
    optimizer = RotatedAdam(theta.items(), 0.01, refresh=4)
    take(optimizer, theta, steps[:2])
    saved, kept = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(theta)
    take(optimizer, theta, steps[2:])
    expected = copy.deepcopy(theta)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for name, p in theta.items():
            p.copy_(kept[name])
    take(optimizer, theta, steps[2:])
    assert all(torch.equal(p, expected[name]) for name, p in theta.items())


def test_a_copy_counts_its_own_steps():
    theta, steps = parameters(torch.float32), gradients(9, torch.float32)
    optimizer = RotatedAdam(theta.items(), 0.01, refresh=4)
    take(optimizer, theta, steps[:3])
    again, other = copy.deepcopy((theta, optimizer))
    take(optimizer, theta, steps[3:])
    take(other, again, steps[3:])
    assert all(torch.equal(p, again[name]) for name, p in theta.items())


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
    optimizer = RotatedAdam(theta.items(), 0.01, refresh=2)
    take(optimizer, theta, steps[:3])
    again = copy.deepcopy(theta)
    other = RotatedAdam(again.items(), 0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(optimizer, theta, steps[3:])
    take(other, again, steps[3:])
    assert all(torch.equal(p, again[name]) for name, p in theta.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refresh": 0}, "refresh=0: use a whole number of updates from 1 up"),
        ({"max_dim": -1}, "max_dim=-1: use a whole number from 0 up"),
        ({"eps": -1.0}, "eps=-1.0: use a number of at least 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        RotatedAdam(parameters().items(), **options)


def test_an_option_of_a_group_out_of_range_is_refused():
    with pytest.raises(UserError, match="refresh=0: use a whole number"):
        RotatedAdam([{"params": list(parameters().items()), "refresh": 0}])


def test_half_precision_parameters_are_refused():
    theta = parameters(torch.bfloat16)
    with pytest.raises(UserError, match=r"RotatedAdam with parameters of torch\.bfloat16: use float32"):
        take(RotatedAdam(theta.items()), theta, gradients(1, torch.bfloat16))
