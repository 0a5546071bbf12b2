"""`offbeat bench`: its rows compute what they claim, its record keeps its contract, the clock keeps to closed forms."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch
from command import check_refused, offbeat  # noqa: F401
from preloaded import PYTHON
from processes import ENVIRONMENT, START, STOP, alive, wait_for
from torch import nn

import offbeat as offbeat_package
from offbeat.errors import UserError
from offbeat.methods import ADL, ADL1F1B, GPipe
from offbeat.partitioning.loopback import LinkMeasurement
from offbeat.partitioning.profile import Profile, UnitCost
from offbeat.report import bench_table
from offbeat.report.draw import draw_bench, draw_scaling
from offbeat.runs.build import cross_entropy
from offbeat.studies.bench import fork_server as fork_server_module
from offbeat.studies.bench import request as request_module
from offbeat.studies.bench import rounds, scaling
from offbeat.studies.bench.contenders import Ours, Task
from offbeat.studies.bench.cuts import check, counted, placed
from offbeat.studies.bench.flat_stage import Counter, Flat, as_floats, restored, tried
from offbeat.studies.bench.fork_server import ForkServer
from offbeat.studies.bench.prediction import PredictionHere, period_on
from offbeat.studies.bench.request import BenchRequest
from offbeat.studies.bench.rows import (
    ROWS,
    BenchSetting,
    chosen,
    left_out,
    method_of,
    micro_batches,
    note,
    of_row,
    row_of,
    samples_at_once,
    samples_per_update,
    settings_by_method,
    title_of,
)
from offbeat.studies.link_speeds import LINKS, PUBLISHED
from offbeat.studies.plan import LinkCost
from offbeat.studies.runner import StudyRunner

pytestmark = pytest.mark.usefixtures("forked_children", "pictures")

ROOT = Path(__file__).resolve().parents[2]
SETTING = BenchSetting("mlp", (1, 8, 8), 10, batch_size=16, K=2, M=2)


@pytest.fixture
def one_core():
    """This process, and what it starts, on one core alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


# ---- what the rows compute

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


# ---- the command

CONTRACT = {
    "name": str,
    "family": str,
    "exact": bool,
    "workers": int,
    "samples_per_second": list,
    "seconds_per_batch": list,
    "memory_per_worker": int,
    "bytes_moved": int,
    "note": str,
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_the_command_writes_all_results_and_continues_after_a_row_fails(offbeat, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(rounds.WorkerGroup, "seconds", failing(rounds.WorkerGroup.seconds))
    monkeypatch.setattr(rounds, "StudyRunner", partial(speaking, rounds.StudyRunner))
    done = offbeat(
        "bench",
        "-K",
        2,
        "--model",
        "resnet8",
        "--batch-size",
        32,
        "--shape",
        "3,16,16",
        "--partition",
        "flops",
        "--against",
        "torch-1f1b,gpipe",
        "--micro-batches",
        4,
        "--repetitions",
        2,
        "--batches",
        2,
        "--out",
        "found",
        "--json",
    )
    assert done.code == 0, done.err
    cuts, shared, *_ = done.err.splitlines()
    assert cuts.endswith("resnet8, 8 of 32 samples, cuts [11]")
    assert shared.startswith("offbeat: 2 workers on 1 core: cores are shared")
    assert "gpipe is left out: worker 0 has ended" in done.err
    out = tmp_path / "found"
    record = json.loads((out / "bench.json").read_text())
    assert json.loads(done.out)["rows"] == record["rows"]
    assert {path.name for path in out.iterdir()} == {"bench.json", "bench.svg", "bench.png", "table.md"}
    assert record["left_out"] == {"gpipe": "worker 0 has ended: exit code -9"}
    timed = [row for row in record["rows"] if row["seconds_per_batch"]]
    assert [row["name"] for row in timed] == ["bp", "torch-1f1b", "adl"]
    for row in timed:
        assert all(isinstance(row[key], kind) for key, kind in CONTRACT.items()), row
        assert len(row["seconds_per_batch"]) == len(row["samples_per_second"]) == 2
        assert all(value > 0 for value in row["seconds_per_batch"])
        assert row["samples_per_second"] == pytest.approx([32 / value for value in row["seconds_per_batch"]])
        assert row["memory_per_worker"] > 0
        assert (row["bytes_moved"] > 0) == (row["workers"] > 1)
    adl = timed[2]
    assert (adl["exact"], adl["staleness"], adl["staleness_measured"]) == (False, [0.5, 0.0], [0.5, 0.0])
    assert [len(stages) for stages in record["bound"]["stages"]] == [2, 2]
    assert record["bound"]["seconds_per_batch"] == [max(stages) for stages in record["bound"]["stages"]]
    assert record["settings"]["rounds"] == 2
    assert record["settings"]["cores_shared"] is True
    assert "--out" not in record["provenance"]["command"]
    page = (out / "table.md").read_text()
    assert re.search(r"^\| Offbeat ADL, 128 samples per update \|.*\| late by 0.5 \|", page, re.MULTILINE)
    assert "m=4" in page
    assert "gpipe is left out: worker 0 has ended" in page


@pytest.mark.usefixtures("one_core")
def test_a_benchmark_with_the_same_folder_adds_the_rounds_it_does_not_have(offbeat, tmp_path):  # noqa: F811
    command = ("bench", "-K", 2, "--model", "mlp", "--batch-size", 8, "--partition", "flops", "--against", "adl")
    command = (*command, "--batches", 2, "--json", "--out", "found")
    first = json.loads(offbeat(*command, "--repetitions", 1).out)
    both = json.loads(offbeat(*command, "--repetitions", 2).out)
    assert both["settings"]["rounds"] == 2
    for before, after in zip(first["rows"], both["rows"], strict=True):
        assert (len(before["seconds_per_batch"]), len(after["seconds_per_batch"])) == (1, 2)
        assert after["seconds_per_batch"][0] == before["seconds_per_batch"][0]
    assert both["bound"]["seconds_per_batch"][0] == first["bound"]["seconds_per_batch"][0]
    assert both["settings"]["cuts"] == first["settings"]["cuts"]
    check_refused(
        offbeat, (*command, "-M", 2), "already holds bench.json with M = 4, not 2", "give another folder as --out"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_rows_with_the_same_samples_per_update_split_them_into_m_batches(offbeat):  # noqa: F811
    command = ("bench", "-K", 2, "--model", "mlp", "--batch-per-update", 16, "-M", 4, "--partition", "flops")
    done = offbeat(*command, "--against", "ddg", "--batches", 2, "--repetitions", 1, "--json", "--out", "found")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    rows = {row["name"]: row for row in record["rows"]}
    for row in rows.values():
        assert row["samples_per_second"] == pytest.approx([16 / value for value in row["seconds_per_batch"]])
    headers = rows["adl"]["bytes_moved"] / rows["ddg"]["bytes_moved"]  # of four messages per update instead of one
    assert 1 <= headers < 1.1
    assert rows["adl"]["note"] == "an update is split into 4 batches of 4"
    assert rows["adl"]["staleness_measured"] == rows["adl"]["staleness"]
    assert record["bound"]["seconds_per_batch"] == [max(stages) for stages in record["bound"]["stages"]]
    assert (record["settings"]["batch_per_update"], record["settings"]["batch_size"]) == (16, 16)
    page = Path("found/table.md").read_text()
    assert page.startswith("# mlp, 16 samples per update, K=2, M=4")
    assert "by all workers together in one update" in page


def test_a_row_gets_its_part_of_the_samples_per_update():
    setting = replace(SETTING, batch_per_update=16, M=4)
    assert [of_row(ROWS[name], setting).batch_size for name in ("bp", "ddp", "ddg", "gpipe", "adl")] == [16] * 4 + [4]
    assert of_row(ROWS["adl"], SETTING).batch_size == 16
    assert left_out(ROWS["adl-1f1b"], replace(setting, M=3)) == (
        "an update of 16 samples cannot be split into 3 equal batches"
    )


def test_rows_of_micro_batches_have_the_samples_per_update_of_the_others():
    setting = replace(SETTING, M=3, methods={"adl": {"corrector": "sc"}})
    for name, recompute in (("adl-micro", False), ("adl-recompute", True)):
        row = ROWS[name]
        method = method_of(row, setting, 8)
        assert (method.M, method.recompute, [c.name for c in method.correctors]) == (8, recompute, ["sc"])
        assert of_row(row, setting, 8).batch_size == 2
        assert samples_per_update(row, setting, 8) == 16
        assert "an update is one batch, in 8 micro-batches of 2, the best of those tried" in note(row, setting, 8, 2)
        assert ("hold inputs" in note(row, setting, 8)) == recompute
    assert title_of(ROWS["adl"], setting) == "Offbeat ADL, 48 samples per update"
    assert title_of(ROWS["ddg"], setting) == "Offbeat DDG"
    assert title_of(ROWS["gpipe"], setting, 4) == "Offbeat GPipe"
    assert title_of(ROWS["adl"], replace(setting, batch_per_update=16, M=4)) == "Offbeat ADL"
    hybrid = replace(setting, methods={"adl": {"weights": "hybrid"}})
    assert left_out(ROWS["adl-recompute"], hybrid) == "recompute needs weights=stash, not hybrid"
    assert left_out(ROWS["adl-micro"], hybrid) is None
    assert "micro-batches" in left_out(ROWS["adl-micro"], replace(setting, batch_size=15))


@pytest.mark.usefixtures("one_core")
def test_every_row_has_the_number_of_micro_batches_with_which_it_is_the_fastest(offbeat):  # noqa: F811
    command = ("bench", "-K", 2, "--model", "mlp", "--batch-size", 16, "-M", 3, "--partition", "flops")
    against = ("--against", "gpipe,adl-micro,adl-recompute", "--batches", 2, "--repetitions", 1)
    done = offbeat(*command, *against, "--json", "--out", "found")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["bp", "adl", "adl-micro", "adl-recompute", "gpipe"]
    for name in ("gpipe", "adl-micro", "adl-recompute"):
        sweep = rows[name]["sweep"]
        assert {"2", "4"} <= {*sweep}
        assert str(rows[name]["micro_batches"]) == min(sweep, key=sweep.get)
    assert {name: row["samples_per_update"] for name, row in rows.items()} == dict.fromkeys(rows, 16) | {"adl": 48}
    for name in ("adl-micro", "adl-recompute"):
        row, m = rows[name], rows[name]["micro_batches"]
        assert row["staleness"] == row["staleness_measured"] == [2 / m, 0]
        assert row["samples_per_second"] == pytest.approx([16 / value for value in row["seconds_per_batch"]])
        assert row["bytes_moved"] >= rows["adl"]["bytes_moved"], "of as many samples, with a header per micro-batch"
    page = Path("found/table.md").read_text()
    assert "Offbeat ADL, 48 samples per update" in page
    assert f"Offbeat ADL, micro-batches, recompute, m={m}" in page
    assert "At 16 samples per update, " in page


def test_rows_for_which_no_given_number_of_micro_batches_fits_are_left_out():
    for name in ("adl-micro", "adl-recompute", "gpipe", "torch-1f1b"):
        assert left_out(ROWS[name], SETTING, (3, 4)) is None
        reason = "a batch of 16 cannot be split into 3 or 5 micro-batches for 2 workers"
        assert left_out(ROWS[name], SETTING, (3, 5)) == reason


def test_a_row_has_the_cuts_for_the_samples_on_which_its_stages_compute():
    setting = replace(SETTING, cuts=(5,), chunk_cuts=(3, 5, 7), replicas=2)
    setting = replace(setting, cuts_by_samples={"4": {"cuts": (6,), "chunk_cuts": (2, 6, 7)}})
    assert BenchSetting.of(json.loads(json.dumps(setting.as_dict()))) == setting
    for name, m, samples in (
        ("adl", None, 16),
        ("ddg", None, 16),
        ("torch-gpipe", 4, 4),
        ("torch-1f1b", 8, 2),
        ("gpipe", 4, 4),
        ("adl-micro", 4, 4),
        ("adl-recompute", 8, 2),
    ):
        row = ROWS[name]
        assert samples_at_once(row, setting, m) == samples
        assert of_row(row, setting, m).cuts == ((6,) if samples == 4 else (5,)), name
    assert of_row(ROWS["torch-interleaved"], setting, 4).chunk_cuts == (2, 6, 7)
    assert of_row(ROWS["adl"], replace(setting, batch_per_update=16, M=4)).cuts == (6,)


@pytest.mark.usefixtures("one_core")
def test_cuts_are_planned_for_every_number_of_samples_that_rows_compute_on(offbeat):  # noqa: F811
    command = ("bench", "-K", 2, "--model", "resnet8", "--shape", "3,8,8", "--batch-size", 16, "--micro-batches", 4)
    command = (*command, "--partition", "flops", "--against", "torch-gpipe,adl-micro,gpipe", "--batches", 2, "--json")
    first = json.loads(offbeat(*command, "--repetitions", 1, "--out", "found").out)
    whole, part = (
        list(placed(replace(SETTING, model="resnet8", shape=(3, 8, 8), batch_size=b), by="flops").cuts) for b in (16, 4)
    )
    assert whole != part
    assert first["settings"]["cuts"] == whole
    assert first["settings"]["cuts_by_samples"]["4"]["cuts"] == part
    wanted = {"bp": None, "torch-gpipe": part, "adl": whole, "adl-micro": part, "gpipe": part}
    rows = {row["name"]: row for row in first["rows"]}
    assert {name: row["cuts"] for name, row in rows.items()} == wanted
    assert len(rows["adl-micro"]["bound"]["seconds_per_batch"]) == 1
    assert f"stages compute: {whole}; torch-gpipe, adl-micro, gpipe: {part}." in Path("found/table.md").read_text()
    both = json.loads(offbeat(*command, "--repetitions", 2, "--out", "found").out)
    assert both["settings"]["cuts_by_samples"] == first["settings"]["cuts_by_samples"]
    rows = {row["name"]: row for row in both["rows"]}
    assert {name: row["cuts"] for name, row in rows.items()} == wanted
    assert len(rows["adl-micro"]["bound"]["seconds_per_batch"]) == 2
    given = json.loads(offbeat(*command, "--repetitions", 1, "--cuts", whole[0], "--out", "given").out)
    assert [row["cuts"] for row in given["rows"]] == [None, *[whole] * 4]
    assert not [row for row in given["rows"] if "bound" in row]
    moved = {row["name"]: row["bytes_moved"] for row in given["rows"]}
    assert moved["adl"] == rows["adl"]["bytes_moved"]
    assert moved["torch-gpipe"] != rows["torch-gpipe"]["bytes_moved"]
    assert moved["adl-micro"] != rows["adl-micro"]["bytes_moved"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="cuts are measured with a core per stage")
def test_planning_leaves_time_to_time_the_rows(offbeat):  # noqa: F811
    command = ("bench", "-K", 2, "--model", "mlp", "--batch-size", 16, "--micro-batches", 4, "--against", "torch-gpipe")
    done = offbeat(*command, "--budget-minutes", 0.001, "--out", "found")
    assert done.code == 0, done.err
    assert "units into 2 stages by the times of the units: no time to time stages" in done.err
    assert "no time to plan cuts for 4 of 16 samples: those for 16 are used" in done.err
    assert "no time for 2 more rounds in 0.001 minutes" in done.err
    record = json.loads(Path("found/bench.json").read_text())
    assert record["settings"]["rounds"] == 1
    assert "cuts_by_samples" not in record["settings"]
    assert [len(row["seconds_per_batch"]) for row in record["rows"]] == [1, 1, 1]
    assert {tuple(row["cuts"]) for row in record["rows"] if row["cuts"]} == {tuple(record["settings"]["cuts"])}


class Ticking:
    """A clock of a study that a test moves."""

    def __init__(self) -> None:
        self.seconds, self.lines = 0.0, []

    def report(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(("minutes", "limits"), [(None, [math.inf] * 3), (5, [100 / 3, 35.0, 40.0]), (1, [20 / 3])])
def test_planning_takes_a_third_of_the_time_limit(monkeypatch, minutes, limits):
    """Each size takes 30 s here."""
    runner, given = Ticking(), []

    def timed(setting, *, seconds=math.inf, **options):
        given.append(seconds)
        runner.seconds += 30.0
        return placed(setting, **{**options, "by": "flops"})

    monkeypatch.setattr(request_module, "placed", timed)
    request = BenchRequest("mlp", batch_size=16, K=2, micro_batches=(2, 4), minutes=minutes)
    made = request.placed(request.setting(), [ROWS["adl"], ROWS["torch-gpipe"]], None, runner)
    assert given == pytest.approx(limits)
    assert list(made.cuts_by_samples) == ["8", "4"][: len(limits) - 1]
    left = [line for line in runner.lines if line.startswith("no time")]
    assert len(left) == 3 - len(limits)


def below(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_leaves_no_process(tmp_path):
    out = tmp_path / "found"
    command = [
        PYTHON,
        "-m",
        "offbeat",
        "bench",
        "-K",
        "2",
        "--model",
        "mlp",
        "--batch-size",
        "8",
        "--against",
        "adl",
        "--repetitions",
        "100000",
        "--partition",
        "flops",
        "--out",
        str(out),
    ]
    run = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )

    def rounds_done() -> bool:
        return run.poll() is not None or (
            (out / "bench.json").exists()
            and len(json.loads((out / "bench.json").read_text())["bound"]["seconds_per_batch"]) > 2
        )

    try:
        assert wait_for(rounds_done, START)
        (fork_server,) = children = below(run.pid)
        children += below(fork_server)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=STOP)
    finally:
        run.kill()
    assert run.returncode == 130, errors
    assert errors.splitlines()[-1].startswith(f"offbeat: stopped by Ctrl-C; repeat the command with --out {out}")
    assert len(json.loads((out / "bench.json").read_text())["rows"]) == 2
    assert (out / "table.md").exists()
    assert len(children) == 1 + 3
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), STOP)


def speaking(runner, out, minutes, show):
    assert not show  # --json prints the record alone
    return runner(out, minutes, show=True)


def failing(seconds):
    def killed_first(workers, *given, **more):
        if workers.row.name == "gpipe":
            workers.processes[0].kill()
            workers.processes[0].wait()
        return seconds(workers, *given, **more)

    return killed_first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--against", "torch-gpip"), ("unknown row 'torch-gpip'", "torch-gpipe")),
        (("--against", ","), ("names no row",)),
        (("--model", "resnet2"), ("unknown model 'resnet2'",)),
        (("--model", "resnet8", "-K", "500"), ("500 stages", "only", "a deeper model than resnet8")),
        (("-K", "1"), ("-K 1", "use 2 or more")),
        (("-K", "0"), ("-K 0", "from 1 up")),
        (("--batches", "0"), ("--batches 0",)),
        (("--budget-minutes", "0"), ("--budget-minutes 0",)),
        (("--partition", "mesured"), ("unknown partition", "measured")),
        (("--device", "gpu"), ("unknown device",)),
        (("--micro-batches", "4,x"), ("--micro-batches", "use numbers")),
        (("--precision", "bf16"), ("--precision bf16 on the cpu",)),
        (("-M", 0), ("-M 0",)),
        (("--batch-per-update", 0), ("--batch-per-update 0",)),
        (("--batch-per-update", 16, "-M", 3), ("--batch-per-update 16 with M = 3", "use a multiple of 3")),
        (("--batch-per-update", 16, "--batch-size", 16), ("--batch-size 16 with --batch-per-update 16",)),
        (("-M", 2, "--method", "adl:M=3"), ("M is 3 in 'adl:M=3' and 2", "give it once")),
        (("--method", "adl:beta=3"), ("adl takes no beta",)),
        (("--method", "adl:M=3", "--method", "adl:M=2"), ("'adl' is given twice in --method",)),
        (("--model", "resnet20", "-K", "3", "--cuts", "5"), ("--cuts 5 gives 2 stages, not -K 3: give 2 cuts",)),
        (("scaling", "--depths", "resnet21"), ("unknown model 'resnet21'",)),
        (("scaling", "--stages", "2,0"), ("--stages 0",)),
    ],
)
def test_misuse_is_reported_in_one_line(offbeat, arguments, words):  # noqa: F811
    check_refused(offbeat, ("bench", *arguments), *words)


def test_a_folder_that_holds_a_record_is_refused(offbeat, tmp_path):  # noqa: F811
    (tmp_path / "found").mkdir()
    (tmp_path / "found/bench.json").write_text("{}")
    check_refused(offbeat, ("bench", "--model", "mlp", "-K", "2", "--out", "found"), "already holds bench.json")


# ---- which rows there are


def test_rows_are_named_once_and_all_are_those_listed():
    assert [row.name for row in chosen("all", "cuda")] == list(ROWS)
    assert set(ROWS) - {row.name for row in chosen("all")} == {"bp-windows"}  # which is for GPUs
    assert [row.name for row in chosen("ddp, bp")] == ["bp", "ddp", "adl"]


def test_a_method_of_ours_is_timed_with_the_settings_that_are_given():
    given = settings_by_method(["adl:corrector=sc", "gpipe:m=2", "pipedream:weights=hybrid"], None)
    setting = BenchSetting("mlp", (1, 8, 8), 10, batch_size=16, K=2, M=3, methods=given)
    rows = {row.name: row for row in chosen("ddg", methods=list(given))}
    assert list(rows) == ["bp", "adl", "ddg", "gpipe", "pipedream"]
    adl, pipedream = method_of(rows["adl"], setting), method_of(rows["pipedream"], setting)
    assert (adl.M, [corrector.name for corrector in adl.correctors]) == (3, ["sc"])
    assert (pipedream.M, pipedream.weights) == (1, "hybrid")
    assert micro_batches(rows["gpipe"], setting) == [2]
    assert note(rows["adl"], setting, None).startswith("corrector=sc; ")
    assert BenchSetting.of(json.loads(json.dumps(setting.as_dict()))) == setting
    assert "methods" not in replace(setting, methods={}).as_dict()
    assert settings_by_method(["adl:M=2"], 2) == {"adl": {"M": 2}}
    assert left_out(row_of("asgd"), setting).startswith("its workers hold the whole model")


def test_rows_that_cannot_be_are_left_out_with_a_reason():
    odd = BenchSetting("mlp", (1, 8, 8), 10, batch_size=15, K=2, M=4)
    assert left_out(ROWS["ddp"], odd) == "a batch of 15 cannot be divided equally among 2 workers"
    assert "micro-batches" in left_out(ROWS["torch-gpipe"], odd)
    assert "fewer than 4 units" in left_out(ROWS["torch-interleaved"], SETTING)
    assert left_out(ROWS["torch-interleaved"], placed(SETTING, by="flops")) is None
    gpu = BenchSetting("mlp", (1, 8, 8), 10, batch_size=16, K=2, M=4, device="cuda")
    assert {name for name, row in ROWS.items() if left_out(row, gpu) is None} == {
        "bp",
        "bp-cores",
        "bp-windows",
        "adl",
        "adl-1f1b",
        "ddg",
        "fr",
        "dsp",
    }
    assert left_out(ROWS["bp-windows"], SETTING) == ("batches of a window run at the same time only on a GPU")
    assert left_out(ROWS["ddp"], gpu) == "one GPU: its workers need one each"


def test_micro_batches_divide_the_batch_and_come_in_whole_rounds_where_they_must():
    assert micro_batches(ROWS["gpipe"], SETTING) == [2, 4, 8]
    assert micro_batches(ROWS["gpipe"], SETTING, (1, 3, 4, 32)) == [1, 4]
    assert micro_batches(ROWS["torch-interleaved"], SETTING, (1, 4)) == [4]
    assert method_of(ROWS["gpipe"], SETTING, 8).m == 8
    assert (method_of(ROWS["adl"], SETTING).M, method_of(ROWS["ddg"], SETTING).M) == (2, 1)


def test_more_stages_than_units_are_refused():
    with pytest.raises(UserError, match="only"):
        check(BenchSetting("mlp", (1, 8, 8), 10, batch_size=4, K=40, M=1))


# ---- what a record says


def row(name: str, seconds: list[float], *, staleness: tuple[float, ...] = (), m: int | None = None) -> dict:
    listed = ROWS[name]
    return {
        "name": name,
        "title": listed.title,
        "family": listed.family,
        "exact": not any(staleness),
        "workers": 2,
        "staleness": list(staleness),
        "micro_batches": m,
        "sweep": {str(m): seconds[0]} if m else {},
        "seconds_per_batch": seconds,
        "samples_per_second": [8 / value for value in seconds],
        "memory_per_worker": 20_000_000,
        "bytes_moved": 1_000_000,
        "note": "",
    }


def made(*rows: dict, bound: tuple[float, ...] = (0.9, 1.1)) -> dict:
    settings = {
        "model": "mlp",
        "batch_size": 8,
        "K": 2,
        "M": 4,
        "device": "cpu",
        "cores_shared": False,
        "rounds": 2,
        "batches": 2,
        "cores": 2,
        "load": 0.1,
        "cuts": [3],
        "memory": "counted",
    }
    provenance = {"command": ["offbeat", "bench"], "commit": "0" * 40, "versions": {"torch": "2"}, "machine": "m"}
    return {
        "settings": settings,
        "rows": list(rows),
        "left_out": {"ddg": "no reason"},
        "provenance": provenance,
        "bound": {
            "seconds_per_batch": list(bound),
            "samples_per_second": [8 / value for value in bound],
            "stages": [[value, value / 2] for value in bound],
            "meaning": "slowest",
        },
    }


def test_windows_at_once_are_a_synchronous_pipeline_to_be_compared_with():
    record = made(
        row("bp", [2.0, 2.0]),
        row("bp-windows", [1.5, 1.5], staleness=(0.0, 0.0)),
        row("adl", [1.0, 1.0], staleness=(0.5, 0.0)),
    )
    assert bench_table.best_synchronous(record)["name"] == "bp-windows"
    assert ROWS["bp-windows"].title_on("cuda") == "BP, windows at once"


def test_a_number_of_micro_batches_is_the_best_only_of_several():
    assert "the best of those tried" in note(ROWS["gpipe"], SETTING, 4, tried=3)
    assert "no other number tried" in note(ROWS["gpipe"], SETTING, 4, tried=1)


def test_ratios_are_taken_within_a_round():
    record = made(
        row("bp", [2.0, 4.0]),
        row("torch-gpipe", [1.0, 1.6], m=4),
        row("torch-1f1b", [1.25, 2.5], m=4),
        row("adl", [1.0, 1.25], staleness=(0.5, 0.0)),
    )
    rows = bench_table.measured(record)
    assert bench_table.times_faster(rows["adl"], rows["bp"]) == median([2.0, 3.2])
    assert bench_table.best_synchronous(record)["name"] == "torch-gpipe"
    assert bench_table.share_of_bound(rows["adl"], record) == pytest.approx(median([0.9 / 1.0, 1.1 / 1.25]))
    assert bench_table.share_of_bound(rows["bp"], record) is None  # the cuts bound no loop
    line = bench_table.cells(record)[3]
    assert line[2:6] == ["2.60", f"{median([1.0, 1.6 / 1.25]):.2f}", "0.89", "late by 0.5"]
    assert bench_table.cells(record)[-1][0] == "no-communication bound of the cuts"


def test_a_row_is_compared_with_the_bound_of_its_own_cuts():
    record = made(
        row("bp", [2.0, 4.0]),
        row("torch-gpipe", [1.0, 1.0], m=4) | {"cuts": [2]},
        row("torch-1f1b", [1.0, 1.0], m=8) | {"cuts": [1]},
        row("adl", [1.0, 1.0], staleness=(0.5, 0.0)) | {"cuts": [3]},
        row("adl-micro", [1.0, 1.0], staleness=(0.5, 0.0), m=4) | {"cuts": [2], "bound": {"seconds_per_batch": [0.8]}},
        row("ddg", [1.25, 1.25], staleness=(1.0, 0.0)) | {"cuts": [3]},
    )
    shares = {name: bench_table.share_of_bound(row, record) for name, row in bench_table.measured(record).items()}
    assert shares == {"bp": None, "torch-gpipe": 0.8, "torch-1f1b": None, "adl": 1.0, "adl-micro": 0.8, "ddg": 0.8}
    told = "Cuts, for the samples on which stages compute: [3]; torch-gpipe, adl-micro: [2]; torch-1f1b: [1]."
    assert told in bench_table.notes(record)
    assert bench_table.other_cuts(made(row("adl", [1.0], staleness=(0.5, 0.0)))) == []


def test_the_advice_follows_the_figures_in_both_directions():
    late = (0.5, 0.0)
    slower = made(row("bp", [3.0]), row("ddp", [1.0]), row("adl", [1.2], staleness=late), bound=(1.0,))
    assert bench_table.advice(slower)[0].startswith(
        "torch DistributedDataParallel is 1.20 times as fast as Offbeat ADL here: the network fits one worker"
    )
    faster = made(row("bp", [3.0]), row("ddp", [1.5]), row("adl", [1.0], staleness=late), bound=(1.0,))
    said = bench_table.advice(faster)[0]
    assert said.startswith("Offbeat ADL is 1.50 times as fast as torch DistributedDataParallel here")
    assert "exact" in said
    alike = made(
        row("bp", [3.0]), row("torch-gpipe", [1.0], m=2), row("gpipe", [1.01], m=2), row("adl", [1.0], staleness=late)
    )
    said = " ".join(bench_table.advice(alike))
    assert "Offbeat GPipe is as fast as torch pipelining, GPipe here (0.99)" in said
    assert "m=2: 0.99" in said


def test_rows_of_a_round_that_was_not_finished_are_compared_as_far_as_it_went():
    record = made(row("bp", [2.0, 4.0]), row("adl", [1.0], staleness=(0.5, 0.0)))
    assert bench_table.times_faster(*(bench_table.measured(record)[name] for name in ("adl", "bp"))) == 2.0
    assert "ddg is left out: no reason." in bench_table.page(record)


def test_a_record_without_rounds_has_a_page_and_no_empty_table(capsys):
    record = made(row("bp", []), bound=())
    record["settings"]["rounds"] = 0
    bench_table.show(record, "runs/found")
    shown = capsys.readouterr().out
    assert "mlp, b=8, K=2, M=4, one core per worker; no row was timed" in shown
    assert "ddg is left out: no reason." in shown
    assert "samples/s" not in shown
    assert "Bound" not in shown
    assert bench_table.page(record).startswith("# mlp, b=8, K=2, M=4, one core per worker; no row was timed\n")


def test_a_round_that_was_not_finished_is_one():
    record = made(row("bp", [1.0]), bound=())
    record["settings"]["rounds"] = 0
    assert bench_table.heading(record).endswith("median (least-most) of 1 round")


def test_a_busy_machine_is_reported():
    record = made(row("bp", [2.0]), row("adl", [1.0], staleness=(0.5, 0.0)))
    assert "busy" not in bench_table.page(record)
    record["settings"]["load"] = 3.5
    assert "busy with something else when this began (load 3.5 on 2 cores)" in bench_table.page(record)


def test_a_bar_for_every_row_that_was_timed_and_a_line_for_the_bound(tmp_path):
    record = made(row("bp", [2.0]), row("ddg", []), row("adl", [1.0], staleness=(0.5, 0.0)))
    draw_bench(record, tmp_path / "bars.svg")
    texts = texts_in(tmp_path / "bars.svg")
    bars = {row["title"]: f"{median(row['samples_per_second']):,.0f}" for row in bench_table.measured(record).values()}
    assert len(bars) == 2
    for title, speed in bars.items():
        assert any(text.startswith(title) for text in texts)
        assert speed in texts
    assert "slowest stage alone" in texts
    assert not any("DDG" in text or "ddg" in text for text in texts)


def texts_in(picture):
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())


# ---- the clock


def profiled(n: int) -> Profile:
    units = [UnitCost(str(place), 1, 4, 1, 8, 16, forward=1.0, backward=2.0) for place in range(n)]
    return Profile("cpu", True, [[1]], units, [1000] * (n + 1), list(range(1, n)))


def test_a_link_adds_the_time_a_method_cannot_hide_and_obeys_its_bandwidth():
    costs, cuts = profiled(4), (1, 2, 3)
    assert period_on(LinkCost(0.0, float("inf")), ADL(M=4), costs, cuts) == pytest.approx(3.0)
    assert period_on(LinkCost(0.9, float("inf")), ADL(M=4), costs, cuts) == pytest.approx(3.0)  # hidden
    assert period_on(LinkCost(0.9, float("inf")), ADL1F1B(M=4), costs, cuts) > 3.5  # not hidden
    one = period_on(LinkCost(0.5, float("inf")), GPipe(m=4), costs, cuts)
    assert one == pytest.approx(3.0 * 7 / 4 + 2 * 3 * 0.5)  # three hops up and three down, once a batch
    assert period_on(LinkCost(0.0, 100.0), ADL(M=4), costs, cuts) >= 10.0  # 1000 bytes a batch


def test_replicas_add_the_sum_of_their_gradients_once_per_update():
    costs, slow = profiled(4), LinkCost(0.0, 4.0)  # bytes per second; a unit has 4 bytes of parameters
    adding = 2 * (3 / 4) * 4 / 4.0  # of one unit over 4 replicas
    for M in (1, 2):
        free = LinkCost(0.0, float("inf"))
        assert period_on(free, ADL(M=M), costs, (1, 2, 3), replicas=4) == pytest.approx(3.0)
        apart = replace(costs, boundary_bytes=[0] * 5)
        assert period_on(slow, ADL(M=M), apart, (1, 2, 3), replicas=4) == pytest.approx(3.0 + adding / M)
        assert period_on(slow, ADL(M=M), apart, (), replicas=4) == pytest.approx(12.0 + 4 * adding / M)


def test_the_prediction_for_this_machine_is_calibrated_by_stages_computing_at_once():
    costs, link = profiled(4), LinkMeasurement(0.0, float("inf"), work_per_message=0.1, work_per_byte=0.0)
    here = PredictionHere(costs, [1.0] * 4, [2.0] * 4, [0.5] * 4, 14.0, link)
    assert here.seconds(ADL(), (), 1) == 14.0
    alone = here.seconds(ADL(M=1), (2,), 1)
    assert alone == pytest.approx(7.0 + 2 * 0.1)  # a stage receives or sends one message each way
    point = {"cuts": (2,), "replicas": 2, "at_once": [7.0, 7.0, 7.0, 10.5]}  # of replica 0, then of replica 1
    assert here.beside(ADL(M=1), point) == pytest.approx({"predicted_alone": 7.2, "predicted": 10.7})


def test_every_simulated_row_is_marked_and_reaches_64_stages_of_64_replicas(tmp_path):
    request = scaling.ScalingRequest(model="mlp", depths=(), most_stages=64)
    study = scaling.ScalingStudy(request, StudyRunner(tmp_path, show=False), request.setting(), {})
    made = scaling.simulate(study, profiled(64))
    rows = [*made["rows"], *made["replica_rows"]]
    assert all(row["simulated"] is True for row in rows)
    by = {(row["method"], row["link"], row["K"], row["replicas"]): row["speedup"] for row in rows}
    assert {link for _, link, K, R in by if (K, R) == (64, 64)} == set(LINKS)
    assert by["adl", "no cost", 64, 64] == pytest.approx(64 * 64)
    assert by["adl", "NVLink", 64, 64] >= by["adl", "InfiniBand", 64, 64] >= by["adl", "WAN", 64, 64]
    assert all(made["links"][name]["source"] for name in ("NVLink", "InfiniBand", "10 GbE", "WAN"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two workers")
def test_replicas_are_measured_on_workers_of_their_own(tmp_path):
    request, server = scaling.ScalingRequest(model="mlp", depths=(), repetitions=1, batches=1), ForkServer()
    setting = replace(request.setting(), K=1, replicas=2, batch_size=4, cuts=())
    try:
        found = scaling.measure(setting, request, tmp_path, server)
    finally:
        server.close()
    assert (len(found["memory"]), len(found["at_once"]), len(found["seconds_per_batch"])) == (2, 2, 1)
    assert min(*found["at_once"], *found["seconds_per_batch"]) > 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two workers")
@pytest.mark.parametrize("method", ["gpipe:m=3", "dgl-async", "dni", "ddg"])
def test_stages_of_every_kind_of_method_are_timed_on_canned_messages(tmp_path, method):
    request = scaling.ScalingRequest(model="mlp", method=method, depths=(), repetitions=1, batches=2)
    server = ForkServer()
    setting = replace(request.setting(), K=2, batch_size=8, cuts=(2,))  # micro-batches of 3, 3 and 2
    try:
        found = scaling.measure(setting, request, tmp_path, server)
    finally:
        server.close()
    assert len(found["at_once"]) == 2
    assert min(found["at_once"]) > 0


def test_the_published_link_speeds_are_in_the_documentation():
    text = " ".join((ROOT / "docs/architecture.md").read_text().split())
    for name, link in PUBLISHED.items():
        cells = (name, f"{link.cost.bandwidth / 1e9:g} GB/s", f"{1e3 * link.cost.latency:g} ms", link.source)
        assert f"| {' | '.join(cells)} |" in text


def test_memory_and_staleness_are_counted_by_the_program():
    found = scaling.kept_by(ADL(M=2), SETTING, profiled(4), (1, 2, 3))
    assert found["staleness"] == [3.0, 2.0, 1.0, 0.0]
    assert found["in_flight"] == [7, 5, 3, 1]
    assert found["memory_counted"] == [
        4 * (3 + versions) + 8 * held for versions, held in zip(found["versions"], found["in_flight"])
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_a_scaling_study_has_its_points_its_simulation_and_what_it_left_out(offbeat, tmp_path):  # noqa: F811
    out = tmp_path / "found"
    done = offbeat(
        "bench",
        "scaling",
        "--model",
        "resnet8",
        "--batch-size",
        4,
        "--stages",
        "1,2",
        "--replicas",
        "1",
        "--batch-sizes",
        4,
        "--depths",
        "",
        "--most-stages",
        8,
        "--repetitions",
        1,
        "--batches",
        1,
        "--json",
        "--out",
        out,
    )
    assert done.code == 0, done.err
    assert done.err == ""
    assert json.loads(done.out)["points"] == json.loads((out / "scaling.json").read_text())["points"]
    record = json.loads((out / "scaling.json").read_text())
    assert {path.name for path in out.iterdir()} == {"scaling.json", "scaling.svg", "scaling.png"}
    assert [(point["axis"], point["K"]) for point in record["points"]] == [("strong", 1), ("weak", 1)]
    assert record["left_out"] == ["strong: resnet8, b=4, K=2: only 1 core, simulated instead"]
    rows = record["simulation"]["rows"]
    assert {row["K"] for row in rows} == {1, 2, 4, 8}
    assert {row["method"] for row in rows} == {"adl", "adl-1f1b", "gpipe"}
    by = {(row["method"], row["link"], row["K"]): row["speedup"] for row in rows}
    for method in ("adl", "gpipe"):
        assert by[method, "no cost", 2] >= by[method, "10 GbE", 2] >= by[method, "WAN", 2]
    assert 1.0 < by["adl", "no cost", 2] <= 2.0 + 1e-9
    draw_scaling(record, tmp_path / "again.svg")
    assert {"NVLink", "measured, one core per stage", "ADL"} <= set(texts_in(tmp_path / "again.svg"))


TINY_SCALING = (
    "--model",
    "mlp",
    "--batch-size",
    4,
    "--stages",
    1,
    "--batch-sizes",
    4,
    "--most-stages",
    2,
    "--replicas",
    1,
)
TINY_SCALING = ("bench", "scaling", *TINY_SCALING, "--repetitions", 1, "--batches", 1, "--depths", "mlp", "--json")


def test_a_sweep_of_a_single_number_of_stages_is_refused(offbeat):  # noqa: F811
    done = offbeat("bench", "scaling", "--most-stages", 1)
    assert done.code == 2
    assert "--most-stages 1: use 2 or more for a sweep" in done.err


@pytest.mark.usefixtures("one_core")
def test_a_scaling_study_measures_only_what_its_record_does_not_have(offbeat, tmp_path, monkeypatch):  # noqa: F811
    file = tmp_path / "found/scaling.json"
    assert offbeat(*TINY_SCALING, "--out", "found").code == 0
    whole = json.loads(file.read_text())
    assert [point["axis"] for point in whole["points"]] == ["strong", "weak", "depth"]
    file.write_text(json.dumps({**whole, "points": whole["points"][:2], "left_out": ["an old line"]}))
    measured, real = [], scaling.measure

    def measure(setting, *rest):
        measured.append(setting.model)
        return real(setting, *rest)

    monkeypatch.setattr(scaling, "measure", measure)
    done = offbeat(*TINY_SCALING, "--out", "found")
    assert done.code == 0, done.err
    assert measured == ["mlp"]
    again = json.loads(file.read_text())
    assert (again["points"][:2], again["simulation"]) == (whole["points"][:2], whole["simulation"])
    assert (len(again["points"]), again["left_out"]) == (3, [])
    check_refused(
        offbeat, (*TINY_SCALING, "--batches", 3, "--out", "found"), "holds scaling.json with batches = 1, not 3"
    )


def test_scaling_takes_the_settings_of_its_method_as_the_other_commands_do(offbeat):  # noqa: F811
    small = partial(scaling.ScalingRequest, model="mlp", depths=())
    request = small(method="adl:M=2,corrector=sc")
    assert request.setting() == small(method="adl:corrector=sc", M=2).setting()
    assert request.setting().M == request.make_method().M == 2
    assert small().setting().M == 4
    made = scaling.simulated(request, request.setting(), 4)
    assert made["adl"] == request.make_method()
    assert (made["adl-1f1b"].M, made["gpipe"].m) == (2, 16)
    check_refused(offbeat, ("bench", "scaling", "--method", "adl:M=2", "-M", 3), "M is 2 in 'adl:M=2' and 3")


def test_the_picture_of_a_study_marks_the_stages_that_had_cores(tmp_path):
    record = json.loads((ROOT / "docs/results/scaling-2cores-resnet110.json").read_text())
    assert record["settings"]["K"] == 4
    draw_scaling(record, tmp_path / "study.svg")
    assert "(batch and depth: K=2)" in (tmp_path / "study.svg").read_text()


# ---- what is published


def test_records_make_sections_of_the_page_and_none_makes_none(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("results_bench", ROOT / "benchmarks/results_bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import page

    monkeypatch.setattr(page, "RECORDS", tmp_path)
    monkeypatch.setattr(module, "RECORDS", tmp_path)
    assert module.section() == []
    record = made(row("bp", [2.0, 2.0]), row("adl", [1.0, 1.0], staleness=(0.5, 0.0)))
    (tmp_path / "bench-2cores-mlp-k2.json").write_text(json.dumps(record))
    said = "\n".join(module.section())
    assert re.search(r"^\| Offbeat ADL \|.*\| late by 0.5 \|", said, re.MULTILINE)
    assert "bench-2cores-mlp-k2.svg" not in said
    draw_bench(record, tmp_path / "bench-2cores-mlp-k2.svg")
    assert "(results/bench-2cores-mlp-k2.svg)" in "\n".join(module.section())
    assert module.summary() == []  # no synchronous pipeline to compare with
    others = [
        row("bp", [2.0, 2.0]),
        row("bp-cores", [0.5, 0.5]),
        row("torch-1f1b", [1.3, 1.5], m=4),
        row("ddp", [0.8, 0.8]),
    ]
    record = made(*others, row("adl", [1.0, 1.0], staleness=(0.5, 0.0)), bound=(0.7, 0.7))
    (tmp_path / "bench-2cores-mlp-k2.json").write_text(json.dumps(record))
    said = " ".join(" ".join(module.summary()).split())
    assert "| mlp, b=8, K=2 | 2 | 2 | 4 | 16 | | 6 | | 10 | 8 | 1.40 (1.30-1.50) | 0.70 (0.70-0.70) |" in said
    assert "BP on all cores of a run is 2.00 times as fast as ADL on K of them" in said
    assert "ADL is 0.80 times as fast as DistributedDataParallel" in said
    assert "Missed: mlp, b=8, K=2 0.70 of 0.9 of the bound." in said
    assert "Not in every round: mlp, b=8, K=2 1.40 of 1.4 times (its rounds: 1.30, 1.50)." in said


# ---- where workers come from


@pytest.fixture
def fork_server():
    made = ForkServer()
    yield made
    made.close()


def test_a_worker_is_forked_with_its_own_surroundings_and_its_end_is_known(fork_server, tmp_path):
    born = [fork_server.spawn({"OFFBEAT_TOLD": str(n)}, tmp_path / f"{n}.err") for n in range(2)]
    for worker in born:
        told = {
            "row": "bp",
            "setting": SETTING.as_dict(),
            "rank": 0,
            "world": 1,
            "store": "",
            "threads": 1,
            "cores": sorted(os.sched_getaffinity(0))[:1],
        }
        worker.stdin.write(json.dumps(told) + "\n")
        assert json.loads(worker.stdout.readline()) == {}
    born[0].kill()
    assert born[0].wait() == -signal.SIGKILL
    born[1].stdin.close()
    assert born[1].wait() == 0
    for worker in born:
        worker.close()


def test_an_interrupted_request_ends_the_fork_server_and_it_can_still_be_closed(fork_server, tmp_path, monkeypatch):
    born = [fork_server.spawn({}, tmp_path / f"{n}.err") for n in range(2)]
    real = fork_server_module._line

    def broken_off(connection):
        monkeypatch.setattr(fork_server_module, "_line", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(fork_server_module, "_line", broken_off)
    with pytest.raises(KeyboardInterrupt):
        fork_server.spawn({}, tmp_path / "last.err")
    for worker in born:
        worker.close()
    fork_server.close()
    assert wait_for(lambda: not any(alive(worker.pid) for worker in born), STOP)


def test_workers_end_with_their_fork_server_and_the_benchmark_reports_it(fork_server, tmp_path):
    worker = fork_server.spawn({}, tmp_path / "err")
    fork_server.process.kill()
    assert worker.stdout.readline() == ""  # within the half second in which it looks for its parent
    with pytest.raises(UserError, match="the process that starts the workers has ended: run the benchmark again"):
        fork_server.spawn({}, tmp_path / "err")
    worker.close()


@pytest.mark.parametrize(
    ("load", "machine", "here", "expected"), [(9.3, 16, 8, 1.3), (4.2, 16, 8, 0.0), (3.0, 2, 2, 3.0)]
)
def test_load_that_other_cores_can_carry_does_not_count(monkeypatch, load, machine, here, expected):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(rounds, "cores_here", lambda: list(range(here)))
    assert rounds.load_here() == pytest.approx(expected)


def test_staleness_is_unknown_until_a_batch_of_steady_state_is_applied():
    pipe = offbeat_package.Pipeline(
        [nn.Linear(2, 2), nn.Linear(2, 3)], method=ADL(M=1), loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD
    )
    row = object.__new__(Ours)
    row.pipe = pipe
    found = []
    for _ in range(6):
        pipe.step(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
        found.append(row.staleness())
    assert found[0] == [None, 0.0]  # stage 1 is not full yet, and has applied nothing
    assert found[-1] == [2.0, 0.0]
