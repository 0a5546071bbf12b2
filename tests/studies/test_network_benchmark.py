"""benchmarks/network.py: rows on slow lines, a record that is continued, and the section of the results about it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import network_worker  # noqa: E402
import results_network  # noqa: E402
from network import NetworkRecord, cuts_of  # noqa: E402
from network_prediction import MeasuredCosts, one_f_one_b, predicted  # noqa: E402
from network_prediction import _costs as stage_costs  # noqa: E402
from network_relay import PROFILES, Profile, why_not  # noqa: E402
from network_rows import LISTED, ROWS, TINY  # noqa: E402

from offbeat.studies.bench.rows import BenchSetting  # noqa: E402

FEW = "ddp-accumulate,local-sgd,torch-gpipe-4,torch-1f1b-4,gpipe-4,adl,adl-int8,2bw"


def command(out: Path, *more: str) -> subprocess.Popen:
    given = [
        "--networks",
        "tiny",
        "--rows",
        FEW,
        "--profiles",
        "loopback,1gbit-1ms",
        "--rounds",
        "1",
        "--seconds",
        "0.1",
    ]
    return subprocess.Popen(
        [sys.executable, ROOT / "benchmarks/network.py", *given, "--out", out, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_an_interrupted_record_is_continued_and_every_row_is_in_it_once(tmp_path, pictures):
    out = tmp_path / "network-2cores-k2.json"
    first = command(out)
    while "ms per update" not in (line := first.stdout.readline()):
        assert line, first.stderr.read()
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 130
    assert errors.splitlines()[-1] == f"interrupted; the same command continues {out}"
    begun = json.loads(out.read_text())["measurements"]
    assert begun
    short = command(out, "--budget-minutes", "0.1")
    said, errors = short.communicate(timeout=60)
    assert short.returncode == 0, errors
    assert said.splitlines()[-1].endswith(f"no time is left; the same command continues {out}")
    assert json.loads(out.read_text())["measurements"] == begun
    second = command(out)
    _, errors = second.communicate(timeout=600)
    assert second.returncode == 0, errors
    record = json.loads(out.read_text())
    assert record["failed"] == []
    assert record["measurements"][: len(begun)] == begun
    done = [(one["row"], one["profile"]) for one in record["measurements"]]
    assert sorted(done) == sorted((row, line) for row in FEW.split(",") for line in ("loopback", "1gbit-1ms"))
    sent = {one["row"]: one["bytes"] for one in record["measurements"] if one["profile"] == "1gbit-1ms"}
    assert sent["adl-int8"] < 0.6 * sent["adl"]
    page = "\n".join(results_network.record_section(out.name, record))
    assert "Offbeat ADL, int8 messages" in page
    assert "of 16 predictions are within 20 %" in page
    assert "### tiny, K=2, 32 samples per update, 1 round\n" in page
    picture = replace(results_network.picture(out.name, record), path=tmp_path / "map.svg")
    picture.draw()
    assert picture.current
    more = command(out, "--rows", "ddp", "--profiles", "loopback,200mbit-20ms")
    _, errors = more.communicate(timeout=100)
    assert more.returncode == 0, errors
    wider = json.loads(out.read_text())
    assert [row["name"] for row in wider["settings"]["rows"]] == ["ddp", *FEW.split(",")]
    assert [one["name"] for one in wider["settings"]["profiles"]] == ["loopback", "1gbit-1ms", "200mbit-20ms"]
    assert [(one["row"], one["profile"]) for one in wider["measurements"][16:]] == [
        ("ddp", "loopback"),
        ("ddp", "200mbit-20ms"),
    ]
    assert wider["measurements"][:16] == record["measurements"]
    other = command(out, "--seconds", "0.2")
    _, errors = other.communicate(timeout=100)
    assert other.returncode == 1
    assert errors == f"{out} has other settings: use them, or another --out\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--rows", "adl,dpp"], "unknown dpp"),
        (["-K", "1000"], "every worker needs one"),
        (["--rounds", "0"], "use numbers above 0"),
        (["--seconds", "nan"], "use numbers above 0"),
        (["--out", "/no/such/folder/record.json"], "there is no folder /no/such/folder"),
        (["--out", "/dev/null"], "is not a record"),
    ],
)
def test_wrong_options_are_refused_in_one_line(tmp_path, given, said):
    done = command(tmp_path / "record.json", *given)
    _, errors = done.communicate(timeout=60)
    assert done.returncode == 1
    assert said in errors or "need" in errors  # without root, that is said first
    assert errors.count("\n") == 1


def costs(K: int = 2) -> MeasuredCosts:
    """Equal stages: 10 ms forward and 20 ms backward per batch of 8, and 1 MB messages."""
    worker = {
        "stages": {"8": [0.01, 0.02, 0.0], "4": [0.005, 0.01, 0.0]},
        "whole": {"16": [0.04, 0.08], "4": [0.01, 0.02]},
        "bytes": {"exact": [1_000_000] * 2, "bf16": [500_000] * 2, "int8": [250_000] * 2},
        "encoding": {"exact": 0.0, "bf16": 0.0, "int8": 0.0},
        "parameters": 40_000_000,
    }
    return MeasuredCosts([worker] * K)


FAST, SLOW = PROFILES[0], Profile("slow", 100e6, 10e-3)


def test_networks_are_cut_by_time_between_blocks_and_as_in_a_record_before(tmp_path, monkeypatch):
    given = []

    def by_time(model, K, sample, **options):
        given.append(options)
        names = ["embedding.tokens", "block0.norm", "block0.linear", "block1.norm", "block1.linear", "head.linear"]
        return SimpleNamespace(cuts=[3], names=names)  # before block1, numbered in layers

    monkeypatch.setattr("offbeat.partitioning.partition", by_time)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    record = NetworkRecord(tmp_path / "record.json", {}, {})
    assert cuts_of(TINY, 2, record) == [2]  # of embedding, block0, block1, head
    assert given == [{"units": "blocks", "by": "measured"}]
    record.found["costs"]["tiny-2"] = {"cuts": [1], "workers": []}
    assert cuts_of(TINY, 2, record) == [1]
    assert len(given) == 1


def test_no_row_is_the_fastest_on_a_line_where_a_kind_of_rows_is_missing():
    rows = [asdict(ROWS[name]) for name in ("ddp", "gpipe-4", "adl-1f1b", "adl", "adl-int8")]
    lines = [asdict(line) for line in PROFILES if line.name in ("1gbit-1ms", "100mbit-10ms")]

    def measured(line: str, **seconds: float) -> list[dict]:
        return [
            {"network": "gpt", "row": row.replace("_", "-"), "profile": line, "round": 1, "seconds": taken}
            for row, taken in seconds.items()
        ]

    everywhere = measured("100mbit-10ms", ddp=4.0, gpipe_4=3.0, adl_1f1b=2.0, adl=1.0)
    settings = {"rows": rows, "profiles": lines, "networks": [{"name": "gpt"}]}
    record = {"settings": settings, "measurements": [*everywhere, *measured("1gbit-1ms", ddp=1.0, gpipe_4=2.0)]}
    assert [point["row"] for point in results_network.measured_points(record, "gpt")] == ["adl"]
    assert results_network.fastest_of_all(record, "gpt", "1gbit-1ms") is None
    table = results_network.ratios_table(record, "gpt")[0]
    (fastest,) = (line for line in table.splitlines() if line.startswith("| fastest |"))
    assert sorted(cell.strip() for cell in fastest.strip("|").split("|")) == ["", "Offbeat ADL", "fastest"]


def test_local_sgd_applies_the_mean_change_since_the_last_outer_step(monkeypatch):
    """Its weights were changed in place by the inner steps, so that every change after the first was zero."""
    theirs = []  # changes of the other worker
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda change: change.add_(theirs[-1]))
    setting = BenchSetting("mlp", (1, 8, 8), 10, batch_size=8, K=2, M=1)
    worker = network_worker.LocalSgd(network_worker.Task.of(setting, 0))
    weights = [weight.detach().clone().requires_grad_() for weight in worker.model.parameters()]
    outer = torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(1, 4):
        for _ in range(2):
            worker.step()
        inner = [weight.detach().clone() for weight in worker.model.parameters()]
        theirs.append(torch.cat([torch.full_like(weight, 0.01 * step).flatten() for weight in weights]))
        for weight, own in zip(weights, inner, strict=True):
            weight.grad = (weight.detach() - own + 0.01 * step) / 2
            assert not torch.equal(own, weight)
        outer.step()
        worker.outer_step()
        for weight, found in zip(weights, worker.model.parameters(), strict=True):
            torch.testing.assert_close(found.detach(), weight.detach())


def test_predictions_on_a_fast_line_are_those_of_the_computation():
    assert predicted(ROWS["adl"], costs(), FAST) == pytest.approx(4 * 0.03)
    assert predicted(ROWS["gpipe-4"], costs(), FAST) == pytest.approx(5 * 0.03)
    assert predicted(ROWS["torch-1f1b-8"], costs(), FAST) == pytest.approx(9 * 0.015)
    assert predicted(ROWS["ddp"], costs(), FAST) == pytest.approx(0.12)
    assert predicted(ROWS["local-sgd"], costs(), FAST) == pytest.approx(0.12)


def test_predictions_on_a_slow_line_are_those_of_its_transfers():
    assert predicted(ROWS["adl"], costs(), SLOW) == pytest.approx(4 * 0.08)  # 1 MB at 100 Mbit/s
    assert predicted(ROWS["adl-int8"], costs(), SLOW) == pytest.approx(
        4 * 0.12 / 3
    )  # 3 batches around stages and lines
    assert predicted(ROWS["ddp"], costs(), SLOW) == pytest.approx(0.04 + 0.02 + 3.2 + 8 * 0.01)  # 40 MB, 2 buckets
    assert predicted(ROWS["local-sgd"], costs(), SLOW) == pytest.approx(0.12 + (3.2 + 0.04) / 50)
    for row in LISTED:
        assert predicted(row, costs(), SLOW) > predicted(row, costs(), FAST)


def test_torch_waits_for_a_notice_of_every_receive_and_this_package_does_not():
    """Stages that take no time, on a line of 10 ms without transfers: in torch each of 3 more micro-batches waits for a
    round trip up and one down, after the first way up and down."""
    worker = {**costs().workers[0], "stages": {"8": [0.0] * 3, "4": [0.0] * 3}}
    idle, line = MeasuredCosts([worker] * 2), Profile("far", float("inf"), 10e-3)
    assert predicted(ROWS["gpipe-4"], idle, line) == pytest.approx(0.02)
    assert predicted(ROWS["torch-gpipe-4"], idle, line) > 4 * predicted(ROWS["gpipe-4"], idle, line)
    assert predicted(ROWS["adl"], idle, line) == pytest.approx(4 * 0.02 / 3)


def test_torch_waits_for_a_notice_of_every_receive_in_1f1b_as_in_gpipe():
    """By hand, 4 micro-batches on two stages. GPipe: each way the receive of the first is posted long before, so that
    it takes its transfer and one delay; the other three are posted when the one before has arrived, so that each takes
    a transfer and two delays. 1F1B: a stage also waits until its send is accepted; one direction hides the other."""
    none = {"stages": {"8": [0.0] * 3, "4": [0.0] * 3}}
    idle = MeasuredCosts([{**worker, **none} for worker in costs().workers])
    far = Profile("far", float("inf"), 10e-3)
    assert predicted(ROWS["torch-gpipe-4"], idle, far) == pytest.approx(14 * 0.01)
    assert predicted(ROWS["torch-1f1b-4"], idle, far) == pytest.approx(8 * 0.01)
    assert predicted(ROWS["torch-gpipe-4"], idle, SLOW) == pytest.approx(8 * 0.08 + 14 * 0.01)
    assert predicted(ROWS["torch-gpipe-4"], costs(), SLOW) == pytest.approx(5 * 0.03 + 8 * 0.08 + 14 * 0.01)


def test_data_parallel_rows_send_their_gradients_around_a_ring():
    """Three workers, two buckets: a ring has 4 turns, in which a worker sends 4/3 of the gradients."""
    slow = {"whole": {"10": [0.03, 0.07], "2": [0.004, 0.009]}}
    fast = {"whole": {"10": [0.02, 0.08], "2": [0.003, 0.008]}}
    mixed = MeasuredCosts([{**costs().workers[0], **one} for one in (slow, fast, fast)])
    ring = 2 * 4 * 2 * 0.01 + 4 / 3 * 8 * 40_000_000 / 100e6
    assert predicted(ROWS["ddp"], mixed, SLOW) == pytest.approx(0.03 + 0.02 + ring)
    accumulated = 4 * 0.004 + 3 * 0.009 + 0.02 + ring
    assert predicted(ROWS["ddp-accumulate"], mixed, SLOW) == pytest.approx(accumulated)
    one = 4 * 2 * 0.01 + 4 / 3 * 8 * 40_000_000 / 100e6
    assert predicted(ROWS["local-sgd"], mixed, SLOW) == pytest.approx(0.03 + 0.08 + one / 50)
    # on a line that is faster than the backward, half of the gradients are sent when it has ended
    quick = Profile("quick", 100e9, 0.0)
    assert predicted(ROWS["ddp"], mixed, quick) == pytest.approx(0.03 + 0.08 + 4 / 3 * 8 * 40_000_000 / 100e9 / 2)


def test_costs_of_stages_and_messages_are_those_of_their_own_workers():
    workers = [
        {
            "stages": {"8": [0.1 * k, 0.2 * k, 0.3 * k], "4": [0.06 * k, 0.11 * k, 0.31 * k]},
            "bytes": {"exact": [1000 * k, 2000 * k], "int8": [300 * k, 600 * k]},
            "encoding": {"exact": 9.0, "int8": 0.01 * k},
        }
        for k in (1, 2, 3)
    ]
    line = Profile("line", 1000.0, 0.5)
    whole = stage_costs(ROWS["adl-int8"], MeasuredCosts(workers), line)  # the slower of two that encode: 0.02
    assert whole.forward == pytest.approx([0.12, 0.22, 0.32])
    assert whole.backward == pytest.approx([0.22, 0.42, 0.62])
    assert (list(whole.update), whole.latency, whole.exclusive) == ([0.3, 0.6, pytest.approx(0.9)], 0.5, True)
    assert (whole.up, whole.down) == (pytest.approx([2.4, 4.8]), pytest.approx([4.8, 9.6]))  # without the last
    split = stage_costs(ROWS["gpipe-8"], MeasuredCosts(workers), line)  # 8 micro-batches of half a batch
    assert split.forward == pytest.approx([0.48, 0.96, 1.44])
    assert split.backward == pytest.approx([0.88, 1.76, 2.64])
    assert list(split.update) == pytest.approx([0.31, 0.62, 0.93])
    assert (split.up, split.down) == (pytest.approx([32.0, 64.0]), pytest.approx([64.0, 128.0]))


def test_a_synchronous_1f1b_holds_no_more_than_its_distance_to_the_end():
    (first,), (last,) = ([" ".join(map(str, each)) for each in one_f_one_b(k, 2, range(1), m=3)] for k in (1, 2))
    assert first == "F0 F1 B0 F2 B1 B2 U"
    assert last == "F0 B0 F1 B1 F2 B2 U"
