"""`offbeat bench scaling`: the clock keeps to closed forms, and points are measured and continued."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from bench_cases import SETTING, texts_in
from command import check_refused

from offbeat.methods import ADL, ADL1F1B, GPipe
from offbeat.partitioning.loopback import LinkMeasurement
from offbeat.partitioning.profile import Profile, UnitCost
from offbeat.report.draw import draw_scaling
from offbeat.studies.bench import scaling
from offbeat.studies.bench.fork_server import ForkServer
from offbeat.studies.bench.prediction import PredictionHere, period_on
from offbeat.studies.link_speeds import LINKS, PUBLISHED
from offbeat.studies.plan import LinkCost
from offbeat.studies.runner import StudyRunner

pytestmark = pytest.mark.usefixtures("forked_children", "pictures")

ROOT = Path(__file__).resolve().parents[2]


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
def test_stages_of_every_kind_of_method_are_timed_on_fixed_messages(tmp_path, method):
    request = scaling.ScalingRequest(model="mlp", method=method, depths=(), repetitions=1, batches=2)
    server = ForkServer()
    setting = replace(request.setting(), K=2, batch_size=8, cuts=(2,))  # micro-batches of 3, 3 and 2
    try:
        found = scaling.measure(setting, request, tmp_path, server)
    finally:
        server.close()
    assert len(found["at_once"]) == 2
    assert min(found["at_once"]) > 0


def test_points_are_timed_in_whole_windows_with_and_without_messages_in_turn(tmp_path, monkeypatch):
    asked = []

    class Workers:
        count = 2

        def __init__(self, *given):
            pass

        def start(self):
            pass

        ready = close = start

        def ask(self, what):
            asked.append(what)
            return [{"memory": len(asked), "staleness": [float(len(asked))]}] * 2

        def seconds(self, warm_up, batches, what="time"):
            asked.append((what, batches))
            return [len(asked), 1.0], 2.0

    monkeypatch.setattr(scaling, "WorkerGroup", Workers)
    request = scaling.ScalingRequest(model="mlp", M=8, depths=(), repetitions=2, batches=4)
    found = scaling.measure(replace(request.setting(), K=2), request, tmp_path, ForkServer())
    assert asked == ["build", *[("time", 8), "look", ("bound", 8)] * 2]
    assert (found["seconds_per_batch"], found["at_once"]) == ([2, 5], [5.5, 1.0])
    assert (found["memory"], found["staleness_measured"]) == ([3, 3], [6.0, 6.0])
    assert found["processor_seconds"] == found["processor_seconds_at_once"] == [2.0, 2.0]


def test_the_published_link_speeds_are_in_the_documentation():
    text = " ".join((ROOT / "docs/architecture.md").read_text().split())
    for name, link in PUBLISHED.items():
        cells = (name, f"{link.cost.bandwidth / 1e9:g} GB/s", f"{1e3 * link.cost.latency:g} ms", link.source)
        assert f"| {' | '.join(cells)} |" in text


def test_memory_and_staleness_are_counted_by_the_program():
    found = scaling.kept_by(ADL(M=2), SETTING, profiled(4), (1, 2, 3))
    assert found["staleness"] == [3.0, 2.0, 1.0, 0.0]
    assert found["in_flight"] == [7, 5, 3, 1]
    copies = [*found["versions"][:3], 0]  # none without lag
    assert found["memory_counted"] == [
        4 * (3 + copied) + (8 + 1000) * held for copied, held in zip(copies, found["in_flight"])
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
def test_a_scaling_study_has_its_points_its_simulation_and_what_it_left_out(offbeat, tmp_path):
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


def test_a_sweep_of_a_single_number_of_stages_is_refused(offbeat):
    done = offbeat("bench", "scaling", "--most-stages", 1)
    assert done.code == 2
    assert "--most-stages 1: use 2 or more for a sweep" in done.err


@pytest.mark.usefixtures("one_core")
def test_a_scaling_study_measures_only_what_its_record_does_not_have(offbeat, tmp_path, monkeypatch):
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


def test_scaling_takes_the_settings_of_its_method_as_the_other_commands_do(offbeat):
    small = partial(scaling.ScalingRequest, model="mlp", depths=())
    request = small(method="adl:M=2,corrector=sc")
    assert request.setting() == small(method="adl:corrector=sc", M=2).setting()
    assert request.setting().M == request.make_method().M == 2
    assert small().setting().M == 4
    made = scaling.simulated(request, request.setting(), 4)
    assert made["adl"] == request.make_method()
    assert (made["adl-1f1b"].M, made["gpipe"].m) == (2, 16)
    check_refused(offbeat, ("bench", "scaling", "--method", "adl:M=2", "-M", 3), "M is 2 in 'adl:M=2' and 3")


def test_scaling_is_refused_under_torchrun(offbeat, monkeypatch):
    """All processes started it, and all but one reported that the folder is in use."""
    monkeypatch.setattr(scaling, "joined_group", lambda: True)
    check_refused(offbeat, ("bench", "scaling", "--model", "mlp"), "bench scaling under torchrun")


def test_the_picture_of_a_study_marks_the_stages_that_had_cores(tmp_path):
    record = json.loads((ROOT / "docs/results/scaling-2cores-resnet110.json").read_text())
    assert record["settings"]["K"] == 4
    draw_scaling(record, tmp_path / "study.svg")
    assert "(batch and depth: K=2)" in (tmp_path / "study.svg").read_text()
