"""Times of batches on a GPU, by which method "auto" chooses M."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from offbeat.partitioning import batch_times
from offbeat.partitioning.batch_times import batch_seconds

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class Waits(nn.Module):
    """Reads a value from the device, which a CUDA graph cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(x.sum())


@pytest.mark.parametrize(("make", "recorded"), [(lambda: nn.Linear(8, 8), True), (Waits, False)])
def test_a_batch_is_timed_as_a_recording_where_that_is_possible(make, recorded, monkeypatch):
    made = []
    original = batch_times._recorded
    monkeypatch.setattr(batch_times, "_recorded", lambda *given: made.append(original(*given)) or made[-1])
    state = torch.cuda.get_rng_state()
    seconds = batch_seconds(make(), torch.ones(1, 8), device=CUDA)(16)
    assert 0 < seconds < math.inf
    assert isinstance(made[0], batch_times.Recorded) == recorded
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert float(nn.Dropout(0.5)(torch.ones(64, device=CUDA)).sum()) > 0  # random numbers outside of a capture
