"""Compressed messages: what rounding may change, what it must not, and the error feedback of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offbeat
from offbeat.core.compression import LEVELS, Compression, check_messages, decoded, encoded, row_dimensions
from offbeat.core.links import Message
from offbeat.core.links.wire import pack, unpack
from offbeat.engines.streams import Streams
from offbeat.errors import UserError


def passed(tensor: torch.Tensor, messages: str) -> torch.Tensor:
    """The tensor as the other end of a link has it."""
    return decoded(unpack(pack(Message(0, encoded(tensor, messages)))).content)


@pytest.mark.parametrize("shape", [(4, 7, 256), (3, 16, 8, 8), (5, 10), (6,), (2, 1, 1, 1)])
def test_int8_is_wrong_by_at_most_half_the_scale_of_its_row(shape):
    tensor = torch.randn(shape, dtype=torch.float64) * torch.logspace(-6, 6, shape[0]).view(-1, *[1] * (len(shape) - 1))
    scales = tensor.abs().amax(dim=row_dimensions(shape), keepdim=True) / LEVELS
    assert ((passed(tensor, "int8") - tensor).abs() <= 0.5000001 * scales).all()


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_floats_of_a_type_stay_finite(dtype):
    """127 scales were above the largest float, so that values near it became infinite."""
    largest = torch.finfo(dtype).max
    tensor = torch.tensor([[1.0, -1.0, 0.5], [1 - 1e-7, -1.0, 0.0]], dtype=torch.float64).mul(largest).to(dtype)
    found = passed(tensor, "int8")
    assert found.isfinite().all()
    wrong = (found.double() / largest - tensor.double() / largest).abs()
    assert (wrong <= 0.51 / LEVELS + torch.finfo(dtype).eps / 2).all()  # its own rounding is added


@pytest.mark.parametrize("dtype", FLOATS)
def test_feedback_does_not_exceed_the_largest_float(dtype):
    compression, largest = Compression("int8"), torch.finfo(dtype).max
    gradient = torch.linspace(0.3, 1.0, 64, dtype=torch.float64).repeat(2, 1).mul(largest).to(dtype)
    for _ in range(50):
        (code,) = compression.gradients([gradient])
        assert decoded(code).isfinite().all()
        assert compression.residuals[0].isfinite().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_residual_that_a_gradient_has_no_room_for_is_left_out(dtype):
    """The sum was infinite, and the neighbour received NaN in the whole row."""
    compression, largest = Compression("int8"), torch.finfo(dtype).max
    small = torch.full((2, 64), 0.4 / LEVELS, dtype=torch.float64)
    small[:, 0] = 1
    compression.gradients([small.mul(largest).to(dtype)])
    assert (compression.residuals[0][:, 1:] > 0).all()
    for _ in range(3):
        (code,) = compression.gradients([torch.full((2, 64), largest, dtype=dtype)])
        found = decoded(unpack(pack(Message(0, code))).content)
        assert (found == largest).all()
        assert compression.residuals[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 60, 63, 64, 190, 191, 255, 10**4])
def test_rows_of_subnormal_numbers_are_wrong_by_at_most_half_their_scale(dtype, steps):
    """A scale that was rounded to 0, or down, lost up to half of the values."""
    tensor = torch.linspace(-steps, steps, 64).round().to(dtype) * torch.finfo(dtype).smallest_normal
    tensor = tensor * torch.finfo(dtype).eps
    scale = encoded(tensor, "int8")["scales"].item()
    assert 0 < scale <= tensor.max().item()
    assert ((passed(tensor, "int8") - tensor).abs() <= scale / 2).all()


@pytest.mark.parametrize("messages", ["bf16", "int8"])
def test_type_layout_and_need_of_gradients_are_those_of_the_tensor(messages):
    tensor = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    found = passed(tensor, messages)
    assert (found.dtype, found.stride(), found.requires_grad) == (torch.float32, tensor.stride(), True)
    assert found.is_leaf
    assert not passed(tensor.detach(), messages).requires_grad


def test_integers_and_what_is_short_already_are_sent_as_they_are():
    numbers, empty, half = torch.arange(5), torch.empty(0, 3), torch.randn(3).to(torch.bfloat16)
    assert all(encoded(tensor, "int8") is tensor for tensor in (numbers, empty))
    assert encoded(half, "bf16") is half


def test_int8_messages_have_about_a_quarter_of_the_bytes_and_bf16_half():
    tensor = torch.randn(8, 64, 256)
    exact, bf16, int8 = (pack(Message(0, encoded(tensor, messages))).numel() for messages in ("exact", "bf16", "int8"))
    assert bf16 < 0.51 * exact
    assert int8 < 0.27 * exact


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_stays_so_and_leaves_no_residual(value):
    tensor = torch.ones(3, 64)
    tensor[1, 5] = value
    assert not passed(tensor, "int8")[1].isfinite().all()
    assert passed(tensor, "int8")[0].isfinite().all()
    compression = Compression("int8")
    compression.gradients([tensor])
    assert compression.residuals[0].isfinite().all()


def test_rows_of_zeros_are_exact():
    assert torch.equal(passed(torch.zeros(2, 64), "int8"), torch.zeros(2, 64))


@pytest.mark.parametrize("messages", ["bf16", "int8"])
def test_tensors_without_elements_are_sent_as_they_are(messages):
    sent = Compression(messages).gradients([torch.zeros(4, 0), torch.zeros(0, 3), None])
    assert [getattr(each, "shape", None) for each in sent] == [(4, 0), (0, 3), None]


def test_the_sum_of_gradients_with_feedback_stays_within_half_a_scale():
    torch.manual_seed(0)
    compression, plain = Compression("int8"), torch.zeros(4, 64, dtype=torch.float64)
    sent, wanted = plain.clone(), plain.clone()
    for _ in range(200):
        gradient = torch.randn(4, 64, dtype=torch.float64)
        (code,) = compression.gradients([gradient])
        wanted += gradient
        sent += decoded(code)
        plain += passed(gradient, "int8")
    scales = code["scales"]
    assert ((sent - wanted).abs() <= 0.51 * scales).all()
    assert not ((plain - wanted).abs() <= 0.51 * scales).all()  # without feedback the errors add up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_short_type_rounds_at_the_other_end_is_fed_back_too(dtype):
    """A restored gradient is rounded to its type once more, which the residual did not have."""
    torch.manual_seed(0)
    compression, wanted = Compression("int8"), torch.zeros(4, 64, dtype=torch.float64)
    sent = wanted.clone()
    for _ in range(500):
        gradient = torch.randn(4, 64).to(dtype)
        (code,) = compression.gradients([gradient])
        wanted += gradient
        sent += decoded(code)
        rounding = torch.finfo(dtype).eps / 2 * (LEVELS * code["scales"])
        assert ((sent - wanted).abs() <= 0.51 * code["scales"] + rounding).all()


def test_a_batch_of_another_shape_starts_without_a_residual():
    compression = Compression("int8")
    compression.gradients([torch.rand(4, 64)])
    short = torch.rand(2, 64)
    (found,) = compression.gradients([short])
    assert torch.equal(decoded(found), passed(short, "int8"))


def test_compression_is_refused_where_it_makes_no_sense():
    with pytest.raises(UserError, match=r"messages 'int4'.*exact.*bf16.*int8"):
        check_messages("int4", 2)
    with pytest.raises(UserError, match="messages='int8' with K=1, which sends none"):
        check_messages("int8", 1)
    with pytest.raises(UserError, match="stay on one GPU"):
        check_messages("bf16", 2, streams=True)
    check_messages("exact", 1, streams=True)


def pipeline(messages: str) -> offbeat.Pipeline:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 4))
    return offbeat.Pipeline(
        layers,
        2,
        method=offbeat.ADL(M=2),
        loss=nn.functional.cross_entropy,
        cuts=[1],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        messages=messages,
    )


def test_engine_streams_is_refused_however_it_is_given():
    with pytest.raises(UserError, match="messages='int8' with engine='streams'"):
        offbeat.Pipeline(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            2,
            loss=nn.functional.cross_entropy,
            optimizer=torch.optim.SGD,
            engine=Streams(2, torch.device("cpu")),
            messages="int8",
        )


def test_a_state_with_other_messages_in_flight_is_refused():
    first, second = pipeline("int8"), pipeline("exact")
    for t in range(4):
        first.step(torch.full((5, 6), float(t)), torch.tensor([0, 1, 2, 3, 0]))
    with pytest.raises(UserError, match="messages='int8' in flight, this pipeline messages='exact'"):
        second.load_stage_states(first.stage_states(), batches=4)


@pytest.mark.parametrize("messages", ["exact", "bf16"])
def test_a_drained_state_is_loaded_with_other_messages(messages):
    first, second = pipeline("int8"), pipeline(messages)
    for t in range(4):
        first.step(torch.full((5, 6), float(t)), torch.tensor([0, 1, 2, 3, 0]))
    first.drain()
    second.load_stage_states(first.stage_states(), batches=4)
    assert [worker.compression.residuals for worker in second.workers] == [{}, {}]
    x, y = torch.ones(5, 6), torch.tensor([0, 1, 2, 3, 0])
    assert second.evaluate([(x, y)]) == first.evaluate([(x, y)])
