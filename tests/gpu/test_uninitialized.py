"""Results do not depend on what the memory of the device held before."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import offbeat
from offbeat import models
from offbeat.engines.streams import Streams
from offbeat.methods import with_staleness_warmup
from offbeat.models.gpt import gpt
from offbeat.optim import Muon
from offbeat.runs.build import cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU, N = torch.device("cuda"), 24
FILLED = 4 << 30  # bytes, more than the pipelines below use
PIECES = (1 << 20, 8 << 20, 64 << 20, 512 << 20)  # sizes of blocks that the allocator hands out again
METHODS = [
    offbeat.BP(),
    offbeat.BP(M=4),
    offbeat.ADL(M=2),
    with_staleness_warmup(offbeat.ADL1F1B(M=1, corrector="auto"), 6),
    offbeat.ADL1F1B(M=2, corrector="lwp+sc"),
    offbeat.TwoBW(M=4),
]


def fill_free_memory(value: float, *, give_back: bool) -> None:
    """Write a value to memory that is free afterwards: to torch's allocator or, given back, to the driver, from which
    recordings get their own."""
    held = [
        torch.full((size // 4,), value, device=GPU) for size in PIECES for _ in range(FILLED // len(PIECES) // size)
    ]
    torch.cuda.synchronize()
    del held
    if give_back:
        torch.cuda.empty_cache()


def trained(make_model, make_optimizer, batches, method: offbeat.Method, precision: str) -> list[float]:
    torch.manual_seed(0)
    pipe = offbeat.Pipeline(
        make_model(),
        4,
        method=method,
        sample=batches[0][0],
        loss=cross_entropy,
        optimizer=make_optimizer,
        device=GPU,
        engine=Streams(4, GPU),
        precision=precision,
        seed=3,
    )
    losses = [pipe.step(x, y) for x, y in batches]
    pipe.drain()
    sums = [float(value.double().sum()) for value in pipe.model.state_dict().values()]
    pipe.close()
    return [*map(float, losses), *sums]


def gpt_case():
    given = torch.Generator().manual_seed(7)
    batches = [torch.randint(256, (2, 8, 32), generator=given).to(GPU) for _ in range(N)]
    return partial(gpt, layers=4, width=64, heads=2, context=32), partial(Muon, lr=3e-3, capturable=True), batches


def resnet_case():
    given = torch.Generator().manual_seed(7)
    batches = [
        (torch.randn(8, 3, 16, 16, generator=given).to(GPU), torch.randint(10, (8,), generator=given).to(GPU))
        for _ in range(N)
    ]
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True)
    return partial(models.build, "resnet8", shape=(3, 16, 16), classes=10), sgd, batches


@pytest.mark.parametrize("give_back", [False, True], ids=["kept", "given-back"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: f"{m.name}-{m.M}")
@pytest.mark.parametrize("case", [gpt_case, resnet_case], ids=["gpt", "resnet"])
def test_results_do_not_depend_on_what_free_memory_held(case, method, precision, give_back):
    make_model, make_optimizer, batches = case()
    found = []
    for value in (0.0, float("nan")):
        fill_free_memory(value, give_back=give_back)
        found.append(trained(make_model, make_optimizer, batches, method, precision))
    assert found[0] == found[1]
    assert all(map(math.isfinite, found[0]))
