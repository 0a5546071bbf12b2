"""How often a batch, or what is left of it, is copied before a stage computes with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from captured import capture
from preloaded import PYTHON
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import offbeat
from offbeat.core.links import Message
from offbeat.engines.streams import Streams

COPIES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
POLICIES = ("stash", "hybrid", "replay")


def address(tensor: Tensor) -> int:
    """Where a tensor begins; unlike data_ptr() it leaves a lazy copy lazy."""
    return torch._C._data_address(tensor)


class Copies(TorchDispatchMode):
    """Counts copies of some tensors, and of their copies."""

    def __init__(self) -> None:
        super().__init__()
        self.followed: dict[int, Tensor] = {}  # by address; held, so that no other tensor takes their place
        self.count = 0

    def follow(self, content) -> None:
        self.followed |= {address(leaf): leaf for leaf in pytree.tree_leaves(content) if isinstance(leaf, Tensor)}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function in COPIES:
            self._copied(arguments[0], result)
        elif function is torch.ops.aten.copy_.default:
            self._copied(arguments[1], arguments[0])
        return result

    def _copied(self, source: Tensor, copy: Tensor) -> None:
        if address(source) in self.followed:
            self.count += 1
            self.follow(copy)


class Sending:
    """A link that has what is sent followed."""

    def __init__(self, link, copies: Copies) -> None:
        self.link, self.copies = link, copies

    def send(self, message: Message) -> None:
        if message.kind == "batch":
            self.copies.follow(message.content[0])
        self.link.send(message)

    def __getattr__(self, name: str):
        return getattr(self.link, name)


class Receiving(Sending):
    """The same of what is received."""

    def receive(self) -> Message:
        message = self.link.receive()
        if message.kind == "batch":
            self.copies.follow(message.content[0])
        return message


class Noting(nn.Module):
    """A layer that remembers where its last inputs were."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(*widths), set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add(address(x))
        return self.layer(x)


def pipeline(method, **options) -> offbeat.Pipeline:
    torch.manual_seed(0)
    return offbeat.Pipeline(
        [Noting(3, 4), Noting(4, 2)],
        method=method,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **options,
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 3, generator=generator), torch.randn(5, 2, generator=generator)) for _ in range(count)]


def counted(pipe: offbeat.Pipeline, *, filled: int = 12) -> dict[str, int]:
    """Copies of a batch, of the activations sent and of those received, in one step of a pipeline that is full."""
    for batch in batches(filled):
        pipe.step(*batch)
    entering, sent, received = Copies(), Copies(), Copies()
    noting = {
        worker.stage.k: next(m for m in worker.stage.network.module.modules() if "seen" in vars(m))
        for worker in pipe.workers
    }
    for worker in pipe.workers:
        noting[worker.stage.k].seen.clear()
        if worker.links.outputs is not None:
            worker.links.outputs = Sending(worker.links.outputs, sent)
        if worker.stage.k > 1:
            worker.links.inputs = Receiving(worker.links.inputs, received)
    x, y = batches(filled + 1)[-1]
    entering.follow(x)
    with entering, sent, received:
        pipe.step(x, y)
        pipe.engine.settle()
    for k, module in noting.items():
        assert module.seen & (entering if k == 1 else received).followed.keys(), (
            f"stage {k} computed with something else"
        )
    return {"entering": entering.count, "sent": sent.count, "received": received.count}


@pytest.mark.parametrize("method", [offbeat.BP(), *(offbeat.ADL(M=2, weights=weights) for weights in POLICIES)])
def test_one_process_copies_a_batch_and_each_activation_once(method):
    assert counted(pipeline(method)) == {"entering": 1, "sent": 1, "received": 0}


@pytest.mark.parametrize("weights", POLICIES)
def test_a_recorded_stage_copies_an_activation_twice(monkeypatch, weights):
    """Into its slot, and from there into the recording. A batch is also copied from the caller, who does not wait."""
    capture(monkeypatch)
    found = counted(pipeline(offbeat.ADL(M=2, weights=weights), engine=Streams(2, torch.device("cpu"))), filled=40)
    assert found == {"entering": 3, "sent": 2, "received": 2}


def test_a_recorded_stage_that_recomputes_also_copies_what_it_sends(monkeypatch):
    """Its graphs share memory, in which an output would not last."""
    capture(monkeypatch)
    engine = Streams(2, torch.device("cpu"))
    found = counted(pipeline(offbeat.ADL(M=2, recompute=True), engine=engine), filled=40)
    assert found == {"entering": 3, "sent": 3, "received": 3}


def test_two_processes_copy_a_batch_once_and_an_activation_into_its_message(tmp_path):
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, tmp_path]
    found = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": found}, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"entering": 1, "sent": 1, "received": 0}, {"entering": 0, "sent": 0, "received": 0}]


class Sometimes(nn.Module):
    """Writes its input in place in some forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2) if torch.rand(()) < 0.5 else x)


@pytest.mark.parametrize("weights", POLICIES)
def test_a_stage_that_writes_its_input_in_some_forwards_is_saved_exactly(weights):
    def made() -> offbeat.Pipeline:
        torch.manual_seed(0)
        return offbeat.Pipeline(
            [Sometimes(), nn.Linear(4, 4), nn.Linear(4, 2)],
            method=offbeat.ADL(M=2, weights=weights),
            loss=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )

    whole, first, second = made(), made(), made()
    first.keep()
    given = batches(16)
    for t, (x, y) in enumerate(given):
        whole.step(x, y)
        (first if t < 9 else second).step(x, y)
        if t == 8:
            second.load_stage_states(first.stage_states(), batches=9)
    for one, other in zip(whole.drain().parameters(), second.drain().parameters(), strict=True):
        assert torch.equal(one, other)


def main(out: str) -> None:
    torch.set_num_threads(1)
    pipe = pipeline(offbeat.ADL(M=2))
    found = counted(pipe)
    Path(out, f"{pipe.engine.rank}.json").write_text(json.dumps(found))
    pipe.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
