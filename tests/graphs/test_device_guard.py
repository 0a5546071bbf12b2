"""Losses and gradients that are not finite, which recorded stages find on the device; batches that are left out."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Steep
from stream_cases import CPU, batches, check_same, network, pipeline, sgd, train

import offbeat
from offbeat.errors import NotFinite, UserError
from offbeat.graphs.device_counters import DeviceCounters
from offbeat.graphs.device_guard import CHECK_INTERVAL


def test_counters_name_the_first_that_is_not_finite_until_they_are_cleared():
    counters, good, bad = DeviceCounters(CPU), torch.ones(3), torch.tensor([1.0, math.nan])
    for gradients in ([good], [good, bad], [good], [bad]):
        counters.gradients(gradients)
    counters.loss(torch.tensor(math.inf), torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    assert counters.now() == [1, 2]
    assert torch.equal(good, torch.ones(3))
    counters.clear()
    counters.gradients([good])
    counters.loss(torch.tensor(1.0), torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    assert counters.now() == [None, None]


@pytest.mark.parametrize("far", [3, CHECK_INTERVAL + 7])
def test_a_loss_that_is_not_finite_is_reported_without_synchronising(far):
    pipe = pipeline(offbeat.ADL(M=2))
    data = batches(3 * CHECK_INTERVAL, poisoned=(far,))
    with pytest.raises(NotFinite, match=f"the loss of batch {far} is not finite .seen at stage 4 of 4") as told:
        train(pipe, data)
    assert told.value.batches == (far,)
    assert pipe.batches <= far + 2 * CHECK_INTERVAL
    with pytest.raises(UserError, match="this pipeline has stopped"):
        pipe.step(*batches(1)[0])


def test_a_gradient_that_is_not_finite_is_named_with_its_update():
    model = network()
    model[1].append(Steep())
    with pytest.raises(NotFinite, match=r"gradient of stage [12] of 4 is not finite in update 0 \(batches 0 to 1\)"):
        train(pipeline(offbeat.ADL(M=2), model=model), batches())


@pytest.mark.parametrize(("M", "out"), [(2, [6]), (2, [6, 7]), (1, [6])])
@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_that_is_left_out_gives_the_bits_of_simulate(M, out, fused):
    """Also where its window has no other: then the optimizer has no gradients, and changes nothing."""
    check_same(
        offbeat.ADL(M=M),
        left_out=out,
        data=lambda: batches(poisoned=tuple(out)),
        optimizer=lambda p: sgd(p, fused=fused),
    )
