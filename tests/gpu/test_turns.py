"""Runs that take turns on one GPU, each on streams of its own: the bits that each has alone."""

from __future__ import annotations

import pytest
import torch

from offbeat.runs.begin import begin
from offbeat.runs.recipe import make_recipe
from offbeat.runs.round_robin import Ending, RoundRobin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
RUNS = {
    name: make_recipe(
        model="resnet8",
        data="synthetic",
        shape=(3, 16, 16),
        samples=600,
        classes=5,
        batch_size=16,
        epochs=3,
        device="cuda",
        engine="streams",
        threads_per_stage=1,
        seed=seed,
        **method,
    )
    for name, seed, method in (
        ("bp", 0, {"method": "bp", "M": 2}),
        ("adl", 0, {"method": "adl", "K": 3, "M": 2}),
        ("adl again", 1, {"method": "adl", "K": 2, "M": 1}),
        ("pipedream", 2, {"method": "pipedream", "K": 3}),
    )
}


def test_no_run_sees_the_others(tmp_path):
    def trained(together: int) -> dict[str, bytes]:
        ended: dict[str, Ending] = {}
        folder = tmp_path / str(together)
        turns = RoundRobin(lambda name: begin(RUNS[name], folder / name, show=False), ended.__setitem__, together)
        turns.all(RUNS)
        assert {name: ending.error for name, ending in ended.items()} == dict.fromkeys(RUNS)
        return {name: (folder / name / "model.safetensors").read_bytes() for name in RUNS}

    alone = trained(1)
    assert trained(3) == alone
    assert trained(4) == alone
    assert len(set(alone.values())) == len(RUNS)
