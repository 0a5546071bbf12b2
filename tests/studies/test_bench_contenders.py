"""What the rows of `offbeat bench` compute: those called exact are back-propagation, on every cut."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from bench_cases import SETTING
from preloaded import PYTHON
from processes import ENVIRONMENT
from torch import nn

import offbeat
from offbeat.methods import ADL
from offbeat.runs.build import cross_entropy
from offbeat.studies.bench.contenders import PipelineRow, Task
from offbeat.studies.bench.cuts import counted
from offbeat.studies.bench.flat_stage import Counter, Flat, as_floats, restored, tried
from offbeat.studies.bench.rows import (
    BenchSetting,
)

pytestmark = pytest.mark.usefixtures("forked_children")


TRAIN = """
import sys, json, torch, torch.distributed as dist
from offbeat.studies.bench.contenders import Loop, Task, make
from offbeat.studies.bench.rows import ROWS, BenchSetting
from offbeat.studies.bench.cuts import placed

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.set_num_threads(1)
setting = placed(BenchSetting.of(json.loads(sys.argv[3])), by="flops")
whole = Task.of(setting, 0)
plain = Loop(whole)
losses = [plain.step() for _ in range(2)]
wanted = {name: tensor.clone() for name, tensor in whole.model.named_parameters()}
for name in ("torch-gpipe", "torch-1f1b", "torch-interleaved", "ddp", "gpipe"):
    row, task = ROWS[name], Task.of(setting, rank)
    contender = make(row, task, 4)
    found = [contender.step() for _ in range(2)]
    if name == "gpipe":
        contender.pipe.gather()
    if name == "ddp":
        for loss in found:
            dist.all_reduce(loss)
            loss /= 2
    told = [[float(loss) for loss in found]] if found[0] is not None else []
    trained = dict(task.model.named_parameters())
    mine = {key for key, value in trained.items()
            if not hasattr(contender, "parameters") or any(value is own for own in contender.parameters)}
    apart = max(float((trained[key] - wanted[key]).abs().max()) for key in mine)
    print(json.dumps([name, told, [float(loss) for loss in losses], apart, sorted(mine), contender.sent()]), flush=True)
    contender.close()
    dist.barrier()
"""


def in_two_workers(script: str, store: Path, *arguments: str) -> dict[str, list]:
    """What both print, by its first entry and by rank."""
    workers = [
        subprocess.Popen(
            [PYTHON, "-c", script, str(rank), str(store), *arguments],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [worker.communicate(timeout=120) for worker in workers]
    for worker, (_, errors) in zip(workers, said):
        assert worker.returncode == 0, errors
    found: dict[str, list] = {}
    for out, _ in said:
        for name, *values in map(json.loads, out.splitlines()):
            found.setdefault(name, []).append(values)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By row and rank: losses where there are any, those of BP, how far parameters are apart, their names, bytes."""
    return in_two_workers(TRAIN, tmp_path_factory.mktemp("store") / "store", json.dumps(SETTING.as_dict()))


def test_stages_of_torch_exchange_contiguous_values_and_gradients():
    """Where a cut is within a block, neither may be: gloo would refuse to send it."""

    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(1, 2)

    x = torch.zeros(2, 3, 4, requires_grad=True)
    y = Flat(Turned(), x, Counter(), last=False)(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.is_contiguous()
    assert gradient.is_contiguous()


@pytest.mark.parametrize("cuts", [[7], [12], [27], [9, 14, 22]])
def test_every_value_that_stages_of_torch_receive_gets_a_gradient(cuts):
    """Also the tables of rotary positions, which have none, and are passed on by stages between: torch's older
    versions announce all values as requiring one, and raise an error where there is none."""
    setting = BenchSetting("gpt:layers=1,width=16,context=8", (8,), 256, batch_size=4, K=len(cuts) + 1, M=2)
    unsplit, task = Task.of(setting, 0), Task.of(setting, 0)
    cross_entropy(unsplit.model(unsplit.x), unsplit.y).backward()
    received, sent, message, tables = [(task.x,)], [], task.x, 0
    for part in (parts := task.parts(tuple(cuts), "layers")):
        outputs, unused = tried(part, message)
        last = part is parts[-1]
        output = Flat(part, message, Counter(), unused=unused, last=last)(*received[-1])
        sent.append(output if isinstance(output, tuple) else (output,))
        received.append(tuple(tensor.detach().requires_grad_() for tensor in sent[-1]))
        message, tables = outputs, tables + (len(unused) if received[1:-1] else 0)
    assert tables >= len(cuts)
    gradients = torch.autograd.grad(cross_entropy(*sent[-1], unsplit.y), sent[-1], retain_graph=True)
    for outputs, inputs in reversed(list(zip(sent, received, strict=False))):
        assert all(tensor.requires_grad for tensor in outputs)
        torch.autograd.backward(outputs, gradients)
        gradients = tuple(tensor.grad for tensor in inputs)
    for name, parameter in task.model.named_parameters():
        assert torch.equal(parameter.grad, unsplit.model.get_parameter(name).grad), name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([-(2**40), 7]),
        torch.tensor([[1, -2]], dtype=torch.int32),
        torch.tensor([3, -4], dtype=torch.int16),
        torch.arange(256).to(torch.uint8),
        torch.arange(-128, 128).to(torch.int8),
        torch.tensor([True, False]),
        torch.tensor(5),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.arange(6).reshape(2, 3).T,
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tensor.dim()}",
)
def test_values_that_are_no_floating_point_numbers_arrive_as_they_were(tensor):
    sent = as_floats(tensor)
    assert sent.is_floating_point()
    assert sent.requires_grad
    assert sent.is_contiguous()
    arrived = restored(sent.detach().clone(), tensor.dtype)
    assert arrived.dtype == tensor.dtype
    assert torch.equal(arrived, tensor)


CUT_WITHIN = """
import sys, json, torch, torch.distributed as dist
from torch import nn
from offbeat.studies.bench.contenders import Loop, Task, make
from offbeat.studies.bench.rows import ROWS, BenchSetting

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.more, self.norm = nn.Embedding(10, 8), nn.Embedding(10, 8), nn.BatchNorm1d(6)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        self.register_buffer("table", torch.rand(6, 8))

    def forward(self, x):
        kept, table = (x > 3).unsqueeze(-1), self.table * 2
        h = self.first(self.words(x))
        h = self.second(h) + 0.0 * self.norm(h)  # sums of micro-batches are those of the batch
        h = h.masked_fill(kept, 0.5) * table + self.more(x)
        return self.head(h)

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.set_num_threads(1)
setting = BenchSetting.of(json.loads(sys.argv[3]))
def task(rank):
    torch.manual_seed(3)
    return Task.of(setting, rank, Masked())
plain = Loop(task(0))
for _ in range(2):
    plain.step()
wanted = dict(plain.model.named_parameters())
for name in ("torch-gpipe", "torch-1f1b", "torch-interleaved"):
    mine = task(rank)
    contender = make(ROWS[name], mine, 4)
    for _ in range(2):
        contender.step()
    trained = {key: value for key, value in mine.model.named_parameters()
               if any(value is own for own in contender.parameters)}
    apart = max((float((value - wanted[key]).abs().max()) for key, value in trained.items()), default=0.0)
    counted = int(mine.model.norm.num_batches_tracked) if "norm.weight" in trained else 8
    print(json.dumps([name, apart, counted, sorted(trained)]), flush=True)
    dist.barrier()
"""


@pytest.mark.parametrize(("cut", "chunks"), [(1, (4, 7, 10)), (10, (5, 9, 11))])
def test_torch_trains_on_cuts_that_masks_tables_and_tokens_cross(tmp_path, cut, chunks):
    setting = BenchSetting("gpt", (6,), 10, batch_size=16, K=2, M=2, cuts=(cut,), chunk_cuts=chunks)
    found = in_two_workers(CUT_WITHIN, tmp_path / "store", json.dumps(setting.as_dict()))
    for ranks in found.values():
        assert all(apart < 1e-6 for apart, _, _ in ranks)
        assert [counted for _, counted, _ in ranks] == [8, 8]  # micro-batches that BatchNorm has seen
        assert sum(len(names) for _, _, names in ranks) == 10
    assert list(found) == ["torch-gpipe", "torch-1f1b", "torch-interleaved"]


@pytest.mark.parametrize("name", ["torch-gpipe", "torch-1f1b", "torch-interleaved", "ddp", "gpipe"])
def test_rows_called_exact_have_the_losses_and_updates_of_back_propagation(trained, name):
    told = [loss for rank in trained[name] for loss in rank[0]]
    assert told
    for losses in told:
        assert losses == pytest.approx(trained[name][0][1], rel=1e-5)
    assert all(rank[2] < 1e-6 for rank in trained[name])
    assert {key for rank in trained[name] for key in rank[3]} == {
        f"{unit}.linear.{kind}"
        for unit in ("hidden1", "hidden2", "hidden3", "hidden4", "head")
        for kind in ("weight", "bias")
    }


def test_pipelines_on_the_same_cuts_move_the_same_tensors(trained):
    sent = {name: sum(rank[4] for rank in ranks) for name, ranks in trained.items()}
    assert sent["torch-gpipe"] == sent["torch-1f1b"] == 2 * SETTING.batch_size * 256 * 4  # up and down, one boundary
    assert sent["torch-interleaved"] == 3 * sent["torch-gpipe"]  # of four chunks of the same width
    labels_and_headers = sent["gpipe"] - sent["torch-gpipe"]
    assert 0 < labels_and_headers < 0.3 * sent["gpipe"]
    weights = sum(cost.parameter_bytes for cost in counted(SETTING).units)
    assert sent["ddp"] == 2 * weights  # 2 (K-1)/K of it by each of two


def test_staleness_is_unknown_until_a_batch_of_steady_state_is_applied():
    pipe = offbeat.Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 3)], method=ADL(M=1), loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD
    )
    row = object.__new__(PipelineRow)
    row.pipe = pipe
    found = []
    for _ in range(6):
        pipe.step(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
        found.append(row.staleness())
    assert found[0] == [None, 0.0]  # stage 1 is not full yet, and has applied nothing
    assert found[-1] == [2.0, 0.0]
