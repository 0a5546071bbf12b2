"""Runs whose final weights must not depend on the engine: everything that could, is in one of them.

As a script under torchrun it trains every case that fits the number of processes and writes the final weights:

    torchrun --nproc-per-node 2 tests/cases.py OUT plain recorded apart
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import offbeat
from offbeat.engines import eager
from offbeat.engines.processes import Processes
from offbeat.methods import METHODS
from offbeat.methods import with_staleness_warmup as warmed_up
from offbeat.pipeline import choice


class _Cliff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("inf")


class Steep(nn.Module):
    """Gives what it is given, and gradients that are not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return _Cliff.apply(x)


class Transposed(nn.Module):
    """Gives its output as a transposed view, so that a boundary tensor is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(-1, -2)


class Pair(nn.Module):
    """A boundary of two tensors and an integer tensor, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"branch": torch.relu(self.linear(x)), "way": (x, torch.arange(len(x)))}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, boundary: dict[str, Any]) -> Tensor:
        x, index = boundary["way"]
        return self.linear(boundary["branch"] + x) * (1 + 0.1 * index[:, None])


class Attended(nn.Module):
    """A boundary of an activation and of two floating-point arguments of the batch, which need no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(batch["x"]), 9.0 * (batch["keep"][:, None] - 1.0), batch["scale"]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, boundary: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, mask, scale = boundary
        assert not mask.requires_grad
        assert not scale.requires_grad
        attended = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return self.linear(attended.mean(1)) * scale[:, None]


def masked(n: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    g = torch.Generator().manual_seed(7)
    return [
        ({"x": x, "keep": (torch.rand(5, 3, generator=g) < 0.7).float(), "scale": torch.rand(5, generator=g)}, y)
        for x, y in vectors(n, (3, 6))
    ]


class MeanPool(nn.Module):
    """Its gradient is expanded: stride 0 over space."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def convolutions(dtype: torch.dtype, memory_format: torch.memory_format = torch.contiguous_format) -> nn.Sequential:
    layers = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
        nn.ReLU(inplace=True),  # an in-place first operation of a stage
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Dropout(0.3),
        nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        MeanPool(),
        nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 4)),
    )
    return layers.to(dtype=dtype, memory_format=memory_format)


def images(n: int, dtype: torch.dtype, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(5)
    sizes = [6] * (n - 1) + [3]  # a short last batch
    return [
        (torch.randn(b, 3, size, size, generator=g, dtype=torch.float64).to(dtype), torch.randint(4, (b,), generator=g))
        for b in sizes
    ]


def vectors(n: int, shape: tuple[int, ...] = (6,)) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(6)
    return [(torch.randn(5, *shape, generator=g), torch.randint(4, (5,), generator=g)) for _ in range(n)]


@dataclass(frozen=True)
class Case:
    model: Callable[[], Any]
    batches: Callable[[], list]
    method: offbeat.Method | str
    K: int
    cuts: tuple[int, ...] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    scheduler: Callable[[Any], Any] | None = None
    clip_norm: float | None = None
    precision: str = "fp32"
    pauses: tuple[int, ...] = ()  # drain before these batches and go on
    batch: int | None = None  # samples per update
    messages: str = "exact"


def nets(dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    return {"model": lambda: convolutions(dtype, **options), "batches": lambda: images(11, dtype)}


ADAM = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)}
CASES: dict[str, Case] = {
    "conv64": Case(**nets(torch.float64), method=offbeat.ADL(M=2), K=2, cuts=(1,)),
    "conv32": Case(**nets(torch.float32), method=offbeat.ADL(M=3), K=2, cuts=(4,)),
    "conv32-flops": Case(**nets(torch.float32), method=offbeat.ADL(M=2), K=2),
    "hybrid": Case(**nets(torch.float32), method=offbeat.ADL(M=1, weights="hybrid"), K=2, cuts=(3,)),
    "recompute": Case(**nets(torch.float32), method=offbeat.ADL(M=2, recompute=True), K=2, cuts=(4,), pauses=(7,)),
    "recompute-2bw": Case(**nets(torch.float32), method=offbeat.TwoBW(M=3, recompute=True), K=3, cuts=(1, 4)),
    "recompute-one": Case(**nets(torch.float64), method=offbeat.ADL(M=2, recompute=[2]), K=3, cuts=(1, 3)),
    "replay": Case(**nets(torch.float32), method=offbeat.ADL(M=2, weights="replay"), K=2, cuts=(1,)),
    "channels-last": Case(
        **nets(torch.float32, memory_format=torch.channels_last), method=offbeat.ADL(M=2), K=2, cuts=(2,)
    ),
    "expanded": Case(**nets(torch.float32), method=offbeat.ADL(M=2), K=2, cuts=(6,)),
    "aligned-adam": Case(**nets(torch.float32), method=offbeat.ADL(M=3, window="aligned"), K=2, cuts=(2,), **ADAM),
    "bp": Case(**nets(torch.float32), method=offbeat.BP(M=2), K=2, cuts=(2,)),
    "pipelined": Case(
        **nets(torch.float32), method=offbeat.BP(M=3, pipelined=True, recompute=True), K=2, cuts=(2,), pauses=(4,)
    ),
    "scheduled": Case(
        **nets(torch.float32),
        method=offbeat.ADL(M=2),
        K=2,
        cuts=(2,),
        clip_norm=0.5,
        pauses=(4, 7),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    ),
    "transposed": Case(
        lambda: nn.Sequential(nn.Linear(6, 6), Transposed(), nn.Linear(3, 5), nn.Flatten(), nn.Linear(30, 4)),
        lambda: vectors(9, (3, 6)),
        method=offbeat.ADL(M=2),
        K=2,
        cuts=(2,),
    ),
    "tree": Case(lambda: [Pair(), Join()], lambda: vectors(9), method=offbeat.ADL(M=2), K=2),
    **{
        f"mask-{weights}": Case(
            lambda: [Attended(), Weighted()], lambda: masked(9), method=offbeat.ADL(M=2, weights=weights), K=2
        )
        for weights in ("stash", "replay")
    },
    "bf16": Case(**nets(torch.float32), method=offbeat.ADL(M=2), K=2, cuts=(2,), precision="bf16"),
    "bf16-hybrid": Case(
        **nets(torch.float32), method=offbeat.ADL(M=2, weights="hybrid"), K=2, cuts=(3,), precision="bf16"
    ),
    "bf16-replay": Case(
        **nets(torch.float32), method=offbeat.ADL(M=2, weights="replay"), K=2, cuts=(1,), precision="bf16"
    ),
    "bf16-bp": Case(**nets(torch.float32), method=offbeat.BP(M=2), K=2, cuts=(4,), precision="bf16"),
    "warm-up": Case(
        **nets(torch.float32),
        method=warmed_up(offbeat.ADL(M=2), 2),
        K=2,
        cuts=(2,),
        pauses=(7,),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    ),
    "warm-up-bf16": Case(
        **nets(torch.float32), method=warmed_up(offbeat.ADL(M=1), 3), K=2, cuts=(4,), precision="bf16", **ADAM
    ),
    "three-growing": Case(
        **nets(torch.float32),
        method=warmed_up(offbeat.ADL(M=2, weights="hybrid", corrector="sc"), "bp@1+adl-1f1b@2"),
        K=3,
        cuts=(1, 4),
    ),
    "three-annealed": Case(
        **nets(torch.float32),
        method=warmed_up(offbeat.ADL(M=1, corrector="t1:updates=4"), "bp@3+adl-1f1b@2"),
        K=3,
        cuts=(1, 4),
    ),
    "three": Case(**nets(torch.float32), method=offbeat.ADL(M=2), K=3, cuts=(1, 4)),
    "three-replay": Case(**nets(torch.float64), method=offbeat.ADL(M=1, weights="replay"), K=3, cuts=(1, 3)),
    "three-pipelined": Case(
        **nets(torch.float32), method=offbeat.BP(M=4, pipelined=True), K=3, cuts=(1, 4), pauses=(6,)
    ),
    "three-bp": Case(**nets(torch.float32), method=offbeat.BP(), K=3, cuts=(1, 4)),
}
CORRECTED: dict[str, tuple[str, Any]] = {
    "sgd": ("lookahead+sc:extra=1", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adam": ("lwp:fraction=0.5+sc", lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-2)),
    "adamw": ("lookahead+sc", lambda p, stage: torch.optim.AdamW(p, lr=1e-2 / (1 + stage.delay))),
    "nadam": ("lwp:form=weight+sc", lambda p, stage: torch.optim.NAdam(p, lr=1e-2 * stage.k / stage.K)),
    "auto": ("auto", lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "rates": ("lwp+t1:updates=6+sc", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "rates-by-delay": ("lwp+t1:power=1", lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "adagrad": ("t1:power=1+lookahead:k=1", lambda p: torch.optim.Adagrad(p, lr=1e-2)),
}
CASES |= {
    f"corrected-{name}": Case(
        **nets(torch.float32), method=offbeat.ADL(M=1, corrector=text), K=2, cuts=(2,), pauses=(5,), optimizer=make
    )
    for name, (text, make) in CORRECTED.items()
}
CASES["auto"] = Case(
    lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 4)),
    lambda: [(torch.cat([x, x[:3]]), torch.cat([y, y[:3]])) for x, y in vectors(9)],
    method="auto",
    K=2,
    batch=8,
    pauses=(5,),
    **ADAM,
)
CASES |= {
    f"{messages}-messages-{name}": replace(CASES[name], messages=messages)
    for messages, name in [
        ("bf16", "conv64"),
        ("bf16", "tree"),
        *(
            ("int8", name)
            for name in ("conv64", "conv32", "channels-last", "expanded", "transposed", "tree", "mask-replay", "bf16")
        ),
        ("int8", "warm-up"),
        ("int8", "three"),
    ]
}
CASES |= {
    f"method-{name}": Case(**nets(torch.float32), method=make(), K=3, cuts=(1, 3), pauses=(5,))
    for name, make in METHODS.items()
    if not make().limit or not make().limit(3)
}


def train(case: Case, *, mine: bool = True, **options: Any) -> dict[str, Any]:
    """Train a case; its final weights, evaluation and staleness. mine=False: another process brings the batches.

    Other processes would measure other times for method auto: the first one's must win.
    """
    seconds = float if mine else lambda size: 1.0
    with mock.patch.object(choice, "batch_seconds", return_value=seconds):
        return _train(case, mine, options)


def _train(case: Case, mine: bool, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0 if mine else 1)  # other processes start from other weights: the first one's must win
    pipe = offbeat.Pipeline(
        case.model(),
        case.K,
        method=case.method,
        loss=nn.functional.cross_entropy,
        optimizer=case.optimizer,
        scheduler=case.scheduler,
        clip_norm=case.clip_norm,
        cuts=case.cuts,
        batch=case.batch,
        seed=3,
        **{"precision": case.precision, "messages": case.messages, **options},
    )
    losses: list[float | None] = []
    batches = case.batches()
    middle: dict[str, Any] = {}
    for t, (x, y) in enumerate(batches):
        if t in case.pauses:
            pipe.drain()
        loss = pipe.step(x, y) if mine else pipe.step()
        losses.append(None if loss is None else float(loss))
        if t == 6:
            middle = pipe.evaluate(batches[-3:] if mine else None)
    pipe.drain()
    result = {
        "weights": fingerprint(pipe.model.state_dict()),
        "middle": middle,
        "evaluate": pipe.evaluate(batches[-3:] if mine else None),
        "staleness": [dict(stage) for stage in pipe.staleness],
        "loss": losses[-1],
        "M": pipe.method.M,
    }
    pipe.close()
    return json.loads(json.dumps(result))  # keys as they come back from a file


def fingerprint(state: dict[str, Tensor]) -> dict[str, str]:
    """The bits of every tensor."""
    return {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in state.items()}


# Each form of message once: how payloads travel that go apart from their headers depends on nothing else.
FORMS = (
    "conv64",
    "channels-last",
    "expanded",
    "transposed",
    "tree",
    "mask-replay",
    "bf16",
    "warm-up",
    "bf16-messages-conv64",
    "int8-messages-tree",
)


def cases_of(K: int, how: str) -> dict[str, Case]:
    """The cases of K stages that are trained in this way."""
    return {name: case for name, case in CASES.items() if case.K == K and (how != "forms apart" or name in FORMS)}


def main(out: str, *ways: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    results: dict[str, dict[str, dict]] = {how: {} for how in ways}
    for how in ways:
        apart = how.endswith("apart")
        for name, case in cases_of(size, how).items():
            options = {}
            if how != "plain":
                options["engine"] = Processes(size, recorded=how == "recorded", payloads="gloo" if apart else None)
                assert bool(options["engine"].carriers) == apart
                assert apart or options["engine"].executor_maker(offbeat.ADL()) is not eager
            results[how][name] = train(case, mine=rank == 0, **options)
    with open(f"{out}/{size}-{rank}.json", "w") as file:
        json.dump(results, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
