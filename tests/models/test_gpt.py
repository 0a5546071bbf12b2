"""The GPT: causal, aware of positions, initialised as it says."""

from __future__ import annotations

import math

import pytest
import torch

from offbeat.errors import UserError
from offbeat.models.gpt import Attention, gpt


def tokens(b: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(256, (b, length), generator=torch.Generator().manual_seed(1))


def small(**options: int) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return gpt(**{"layers": 3, "width": 32, "heads": 4, "context": 16, **options}).double()


def test_a_token_changes_no_logits_before_it():
    model, before = small(), tokens()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 256
    change = (model(before) - model(after)).abs().amax(dim=(0, 2))
    assert change[:9].max() == 0
    assert (change[9:] > 0).all()


def test_the_order_of_earlier_tokens_matters():
    model, before = small(), tokens()
    after = before.clone()
    after[:, [2, 3]] = after[:, [3, 2]]
    assert (model(before) - model(after))[:, -1].abs().max() > 0


def test_attention_depends_on_relative_positions_alone():
    torch.manual_seed(0)
    attention = Attention(32, 4, 16).double()
    query, key = torch.randn(2, 1, 4, 1, 8, dtype=torch.float64).unbind(0)
    rotated = [attention._rotated(x.expand(1, 4, 16, 8)) for x in (query, key)]
    scores = rotated[0] @ rotated[1].transpose(-1, -2)
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(-distance, -2, -1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal), rtol=0, atol=1e-6)


def test_shorter_sequences_give_the_same_logits():
    model, x = small(), tokens()
    torch.testing.assert_close(model(x[:, :7]), model(x)[:, :7], rtol=0, atol=1e-12)


def test_the_initial_loss_is_that_of_a_uniform_guess():
    model, x = small(), tokens(8)
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), tokens(8).flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_parameters_are_those_of_its_size():
    layers, width = 12, 256
    blocks = layers * (12 * width**2 + 5 * width + 4 * width)
    counted = sum(p.numel() for p in gpt(layers=layers, width=width).parameters())
    assert counted == blocks + 2 * 256 * width + 2 * width


def test_positions_are_no_part_of_the_state():
    assert not any("cosine" in name or "sine" in name for name in small().state_dict())


@pytest.mark.parametrize("options", [{"layers": 0}, {"width": 30}, {"heads": 3}, {"context": True}])
def test_unusable_sizes_are_refused_in_one_line(options):
    with pytest.raises(UserError, match=f"{next(iter(options))}=") as error:
        small(**options)
    assert "\n" not in str(error.value)
