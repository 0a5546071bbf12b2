"""simulate == shuffled simulate == K processes, bit for bit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from cases import CASES, cases_of, train
from preloaded import PYTHON

from offbeat.engines.processes import own_device
from offbeat.engines.simulate import Simulate
from offbeat.errors import UserError

HERE = Path(__file__).parent.parent
SIMULATED: dict[str, dict] = {}


def simulated(name: str) -> dict:
    if name not in SIMULATED:
        SIMULATED[name] = train(CASES[name])
    return SIMULATED[name]


def torchrun(*arguments: str, nproc: int, timeout: float = 150) -> subprocess.CompletedProcess:
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def same_but_loss(found: dict, expected: dict) -> bool:
    return {**found, "loss": None} == {**expected, "loss": None}


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("method-")])  # those: the contract
def test_interleaving_stages_at_random_changes_no_bit(name):
    assert train(CASES[name], engine=Simulate(CASES[name].K, shuffle=1)) == simulated(name)


WAYS = {  # recorded as on GPUs; and with payloads that go apart from their headers
    2: ("plain", "recorded", "forms apart"),
    3: ("plain", "recorded", "apart"),
}


@pytest.fixture(scope="module")
def trained_by(tmp_path_factory) -> Callable[..., list[dict]]:
    """What each of K processes found, in all these ways: they are started once."""

    @cache
    def run(K: int, *ways: str) -> list[dict]:
        out = tmp_path_factory.mktemp("processes")
        done = torchrun(str(HERE / "cases.py"), str(out), *ways, nproc=K)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads((out / f"{K}-{rank}.json").read_text()) for rank in range(K)]

    return run


@pytest.mark.parametrize(
    ("K", "how"),
    [
        *((2, how) for how in WAYS[2]),
        *(pytest.param(K, how, marks=pytest.mark.slow) for K, how in ((2, "apart"), *((3, how) for how in WAYS[3]))),
    ],
)
def test_processes_equal_the_simulator_bit_for_bit(K, how, trained_by):
    for rank, found in enumerate(trained_by(K, *(WAYS[K] if how in WAYS[K] else (how,)))):
        results = found[how]
        assert set(results) == set(cases_of(K, how)) != set()
        for name, result in results.items():
            assert same_but_loss(result, simulated(name)), f"{name}, rank {rank}"
            assert result["loss"] == (simulated(name)["loss"] if rank == K - 1 else None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_process_on_a_gpu_that_is_not_there_is_refused_in_one_line(device):
    with pytest.raises(UserError, match=f"device '{device}', but torch sees no CUDA device here: use device='cpu'"):
        own_device(torch.device(device))
