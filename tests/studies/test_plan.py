"""`offbeat plan`, and cuts inside blocks on the way through `offbeat train`."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from command import Command, Outcome, check_refused
from fixed_times import few_laps, fix_times
from rich.console import Console
from selected import some

from offbeat import Pipeline, models
from offbeat.methods import ADL, BP, DECLARED, DSP, GPipe, TwoBW
from offbeat.partitioning.loopback import LinkMeasurement
from offbeat.partitioning.profile import profile as profile_of
from offbeat.runs.build import cross_entropy
from offbeat.runs.provenance import provenance
from offbeat.studies import planning
from offbeat.studies.plan import Calibration, Kept, Plan, StagePlan, message_work

pytestmark = pytest.mark.usefixtures("forked_children", "pictures")

SMALL = ("plan", "--model", "mlp", "--batch-size", "4", "--shape", "3,8,8")
STAGE = {
    "k",
    "units",
    "params",
    "forward_ms",
    "backward_ms",
    "boundary_bytes",
    "in_flight",
    "versions",
    "memory_bytes",
    "mean_staleness",
    "update_ms",
    "recompute",
}
PLAN = {"bp_ms", "model", "method", "K", "M", "batch_size", "balance", "predicted_speedup", "stages", "methods"}


PROFILE: list[bytes] = []  # what the command writes, made once


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(autouse=True)
def few_laps_here():
    with few_laps() as patch:
        yield patch


@pytest.fixture
def profile(offbeat) -> Path:
    """A profile of SMALL, as the command writes it."""
    file = Path("p.json")
    if not PROFILE:
        planned(offbeat, "-K", 2, "--profile", file)
        PROFILE.append(file.read_bytes())
    file.write_bytes(PROFILE[0])
    return file


def done(outcome: Outcome) -> str:
    assert (outcome.code, outcome.err) == (0, ""), outcome
    return outcome.out


def planned(offbeat: Command, *arguments: object) -> dict:
    return json.loads(done(offbeat(*SMALL, *arguments, "--json")))


# ---- JSON


@pytest.mark.parametrize(("K", "M", "model"), [(1, 1, "resnet8"), (3, 2, "resnet8"), (4, 4, "resnet20"), (5, 3, "mlp")])
def test_the_json_has_the_promised_keys_and_sane_values(offbeat, K, M, model):
    shape = ("--shape", "1,8,8")
    plan = planned(offbeat, "--model", model, *shape, "-K", K, "-M", M)
    assert set(plan) >= PLAN
    assert (plan["model"], plan["method"], plan["K"], plan["M"], plan["batch_size"]) == (model, "adl", K, M, 4)
    assert 0 < plan["balance"] <= 1
    # BP on one worker makes an update for every batch; who makes fewer, or at the same time, may gain more than K
    computing = [stage["forward_ms"] + stage["backward_ms"] for stage in plan["stages"]]
    loads = [time + stage["update_ms"] / M for time, stage in zip(computing, plan["stages"])]
    assert 0 < plan["bp_ms"] <= sum(computing) + sum(stage["update_ms"] for stage in plan["stages"]) + 1e-6
    assert 0 < plan["predicted_speedup"] <= plan["bp_ms"] / max(loads) + 1e-6
    assert plan["balance"] == pytest.approx(sum(loads) / K / max(loads))
    assert set(plan["methods"]) == set(DECLARED)
    assert all(0 < speed <= plan["bp_ms"] / max(computing) + 1e-6 for speed in plan["methods"].values())
    assert plan["methods"]["bp"] <= plan["bp_ms"] / sum(computing) + 1e-6
    assert plan["methods"]["adl"] == pytest.approx(plan["predicted_speedup"], rel=0.01)
    stages = plan["stages"]
    assert [stage["k"] for stage in stages] == list(range(1, K + 1))
    for stage in stages:
        assert set(stage) >= STAGE
        lag = 2 * (K - stage["k"])
        assert stage["in_flight"] == lag + 1
        assert stage["versions"] == math.ceil(lag / M) + 1
        assert stage["mean_staleness"] == lag / M
        assert stage["forward_ms"] > 0
        assert stage["backward_ms"] >= 0
        assert stage["memory_bytes"] >= 4 * stage["params"] * (stage["versions"] + 1)
    built = models.build(model, shape=(1, 8, 8))
    assert sum(stage["params"] for stage in stages) == sum(p.numel() for p in built.parameters())
    assert all(stage["boundary_bytes"] > 0 for stage in stages[:-1])
    assert stages[-1]["boundary_bytes"] == 0
    edges = [stage["units"][:2] for stage in stages]
    assert edges[0][0] == 0
    assert all(end + 1 == start for (_, end), (start, _) in pairwise(edges))


def test_the_json_has_the_provenance_that_run_records_have(offbeat, monkeypatch):
    monkeypatch.setenv("OFFBEAT_COMMIT", 40 * "a")
    plan, made = planned(offbeat, "-K", 1), provenance()
    assert plan["commit"] == made["commit"] == 40 * "a"
    assert (plan["torch"], plan["hardware"]) == (torch.__version__, made["machine"])
    assert plan["command"] == ["offbeat", *SMALL, "-K", "1", "--json"]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two stages")
def test_where_there_are_cores_the_stages_are_timed_all_at_once(offbeat, few_laps_here):
    few_laps_here.undo()
    plan = planned(offbeat, "-K", 2)
    assert not any("one after the other" in note for note in plan["notes"])
    found = plan["calibration"]
    assert min(found["slow_down"], found["work_per_message"]) > 0
    assert found["work_per_byte"] >= 0
    assert all(min(stage["forward_ms"], stage["backward_ms"], stage["update_ms"]) > 0 for stage in plan["stages"])


def test_the_plan_reports_the_spread_of_the_balance_and_what_moving_cuts_gained(offbeat, profile):
    plan = planned(offbeat, "-K", 3, "--profile", profile)
    least, most = plan["balance_rounds"]
    assert 0 < least <= most <= 1
    moved = plan["refinement"]
    assert 0 <= moved["kept"] <= moved["tried"]
    assert set(moved["before"]) == set(moved["after"]) == {"balance", "least", "most"}
    assert plan["calibration"] is None  # timed one after the other
    said = done(offbeat(*SMALL, "-K", 3, "--profile", profile))
    assert re.search(r"- balance 0\.\d+, in single rounds 0\.\d+ to [01]\.\d+", said)
    counted = planned(offbeat, "-K", 3, "--partition", "flops", "--profile", profile)
    assert counted["refinement"] is None  # cuts by FLOPs do not move


def test_messages_take_time_of_the_processor_where_stages_run_at_once():
    found = message_work(Calibration(slow_down=1.2, work_per_message=0.1, work_per_byte=0.001), [100, 300])
    assert found == pytest.approx([0.2, 0.2 + 0.4, 0.4])
    assert message_work(None, [100, 300]) == [0, 0, 0]


@pytest.mark.parametrize("method", [*some(DECLARED), "all"])
def test_every_declared_method_can_be_planned(offbeat, method):
    plan = planned(offbeat, "--model", "mlp", "-K", 3, "--method", method)
    assert plan["method"] == ("adl" if method == "all" else method)
    assert plan["predicted_speedup"] == pytest.approx(plan["methods"][plan["method"]])
    expected = {"bp": [1, 1, 1], "ddg": [3, 2, 1], "adl": [5, 3, 1], "dsp": [5, 3, 1], "gpipe": [4, 4, 4]}
    if method in expected:
        assert [stage["in_flight"] for stage in plan["stages"]] == expected[method]
    if method in ("fr", "dsp"):
        assert [stage["versions"] for stage in plan["stages"]] == [1, 1, 1]


def test_cuts_by_flops_are_the_same_twice(offbeat):
    first, second = (planned(offbeat, "-K", 4, "--partition", "flops") for _ in range(2))
    assert first["cuts"] == second["cuts"]
    fixed = ("k", "units", "params", "boundary_bytes", "in_flight", "versions", "memory_bytes", "mean_staleness")
    for one, other in zip(first["stages"], second["stages"]):
        assert [one[key] for key in fixed] == [other[key] for key in fixed]


def test_a_pinned_cut_is_made(offbeat):
    assert 5 in planned(offbeat, "-K", 3, "--pin", "5")["cuts"]


def test_slow_links_slow_every_method_that_waits_for_them(offbeat):
    plan = planned(offbeat, "-K", 3, "--latency", "1000")
    assert all(speed < 0.5 for name, speed in plan["methods"].items() if name in ("bp", "ddg", "gpipe"))


@pytest.mark.slow
def test_a_slow_worker_gets_less_and_the_speed_up_is_over_one_fast_worker(offbeat):
    plan = planned(offbeat, "-K", 2, "--partition", "flops", "--speeds", "1,0.1")
    equal = planned(offbeat, "-K", 2, "--partition", "flops")
    assert plan["cuts"][0] > equal["cuts"][0]
    times = [stage["forward_ms"] + stage["backward_ms"] for stage in plan["stages"]]  # each on its own worker
    updates = [stage["update_ms"] for stage in plan["stages"]]
    alone = times[0] + updates[0] + 0.1 * (times[1] + updates[1])  # all of it on the fast one
    assert plan["bp_ms"] <= alone + 1e-6
    assert plan["predicted_speedup"] <= alone / max(times) + 1e-6


def test_a_memory_limit_that_fits_is_kept(offbeat):
    free = planned(offbeat, "-K", 3, "--partition", "flops")
    largest = max(stage["memory_bytes"] for stage in free["stages"])
    kept = planned(offbeat, "-K", 3, "--partition", "flops", "--memory-limit", largest / 1e6)
    assert max(stage["memory_bytes"] for stage in kept["stages"]) <= largest


def test_the_fewest_stages_recompute_so_that_a_memory_limit_is_kept(offbeat):
    """The smallest limit with recompute in all stages needs it; between that and the plain one, in some."""
    fixed = ("--model", "resnet8", "-K", 3, "--partition", "flops", "--method", "adl")
    plain = planned(offbeat, *fixed)
    assert not any(stage["recompute"] for stage in plain["stages"])
    outcome = offbeat(*SMALL, *fixed, "--memory-limit", "0.001")
    least = 1e6 * float(outcome.err.split("at least ")[1].split(" MB,")[0])
    largest = max(stage["memory_bytes"] for stage in plain["stages"])
    assert least < largest
    counts = []
    for limit in (1.001 * least, (least + largest) / 2, largest):
        plan = planned(offbeat, *fixed, "--memory-limit", limit / 1e6)
        repeating = [stage["k"] for stage in plan["stages"] if stage["recompute"]]
        counts.append(len(repeating))
        assert max(stage["memory_bytes"] for stage in plan["stages"]) <= limit
        told = [line for line in plan["advice"] if "recompute=" in line]
        assert told == [
            f"fits with adl:recompute={'+'.join(map(str, repeating))}: these stages repeat forwards"
        ] * bool(repeating)
        assert "recompute" not in plan["method"]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    assert counts[-1] == 0


def test_a_stage_recomputes_where_cuts_that_fit_without_it_are_slower(offbeat):
    """3.8 MB fit without recompute as well, by cuts with which the slowest stage has 1.4 times as much to compute."""
    network = ("--model", "resnet8", "--batch-size", 16, "--shape", "3,16,16", "--partition", "flops")
    file = Path("p.json")
    planned(offbeat, *network, "-K", 2, "--profile", file)
    measured = json.loads(file.read_text())
    for unit in measured["units"]:  # of the times only their sums matter: a stage that recomputes takes 4/3 as long
        unit["forward"], unit["backward"] = 0.001, 0.002
    file.write_text(json.dumps(measured))
    plan = planned(offbeat, *network, "-K", 3, "--method", "adl", "--memory-limit", 3.8, "--profile", file)
    assert [stage["recompute"] for stage in plan["stages"]] == [True, False, False]
    assert max(stage["memory_bytes"] for stage in plan["stages"]) <= 3.8e6
    (told,) = (line for line in plan["advice"] if "recompute=" in line)
    slower = re.fullmatch(
        "faster with adl:recompute=1: these stages repeat forwards, and the cuts are more even; without it the cuts "
        r"that fit take ([0-9.]+) times as long per batch",
        told,
    )
    assert slower[1] == "1.25"


def test_memory_with_recompute_is_that_of_inputs_and_one_graph(offbeat, profile):
    units = json.loads(profile.read_text())["units"]
    fixed = ("-K", 3, "--pin", "3,6", "--partition", "flops", "--profile", profile)
    plain, repeating = (planned(offbeat, *fixed, "--method", f"adl:recompute={given}") for given in ("no", "1"))
    assert [stage["recompute"] for stage in repeating["stages"]] == [True, False, False]
    before, after = (plan["stages"][0]["memory_bytes"] for plan in (plain, repeating))
    graph = (before - after) / 4  # 5 graphs became one; the inputs are held in any case
    assert graph == sum(unit["held_bytes"] for unit in units[:3]) > 0
    assert [s["memory_bytes"] for s in plain["stages"][1:]] == [s["memory_bytes"] for s in repeating["stages"][1:]]


@pytest.mark.parametrize(
    "method",
    [
        ADL(M=2),
        ADL(M=2, recompute=True),
        ADL(M=2, recompute=[2]),
        ADL(M=1, weights="hybrid"),
        DSP(),
        TwoBW(M=3),
        BP(),
        GPipe(m=4),
        GPipe(m=4, recompute=True),
    ],
    ids=lambda method: method.name,
)
@pytest.mark.parametrize(
    ("name", "shape", "b"), [("resnet8", (3, 16, 16), 8), ("gpt:layers=3,width=32", (16,), 4)], ids=["resnet", "gpt"]
)
def test_the_memory_that_is_planned_is_that_of_training(name, shape, b, method):
    torch.manual_seed(0)
    model = models.build(name, shape=shape, classes=10)
    x = models.random_batch(b, shape, 10)
    y = torch.zeros((b, *shape) if models.takes_tokens(shape) else (b,), dtype=torch.long)
    costs = profile_of(model, x, repeat=1)
    pipe = Pipeline(
        model,
        3,
        method=method,
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        sample=x,
        units="layers",
    )
    for _ in range(10):
        pipe.step(x, y)
    kept, ends = Kept.of(method, 3), pairwise([0, *pipe.cuts, len(costs.units)])
    for (k, stage), piece in zip(pipe.stages.items(), ends, strict=True):
        assert kept.bytes(costs, k, *piece) == pytest.approx(stage.memory(), rel=0.02), f"stage {k}"


def test_memory_is_given_in_the_same_terms_with_and_without_a_limit(offbeat):
    plan = planned(offbeat, "-K", 3, "--partition", "flops")
    largest = max(stage["memory_bytes"] for stage in plan["stages"])
    outcome = offbeat(*SMALL, "-K", 3, "--partition", "flops", "--memory-limit", "0.001")
    least = 1e6 * float(outcome.err.split("at least ")[1].split(" MB,")[0])
    assert least <= largest


# ---- profile and links


def test_a_profile_is_written_and_used_again(offbeat):
    planned(offbeat, "-K", 2, "--profile", "p.json")
    written = Path("p.json").read_bytes()
    known = json.loads(written)
    assert (known["model"], known["shapes"], known["threads"], known["timed"]) == ("mlp", [[4, 3, 8, 8]], 1, True)
    for unit in known["units"]:  # all of the time is in the first three units
        unit["forward"] = unit["backward"] = 1.0 if unit in known["units"][:3] else 0.0
    Path("p.json").write_text(json.dumps(known))
    changed = Path("p.json").read_bytes()
    assert planned(offbeat, "-K", 3, "--profile", "p.json")["K"] == 3
    assert Path("p.json").read_bytes() == changed  # read, not measured anew


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch-size", "8"), ("shape", "[[4, 3, 8, 8]]", "[[8, 3, 8, 8]]")),
        (("--shape", "3,16,16"), ("shape",)),
        (("--model", "resnet8"), ("model", "mlp", "resnet8")),
        (("--threads", "2"), ("threads is 1, here it is 2",)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_profile_of_something_else_is_refused(offbeat, profile, options, words):
    check_refused(offbeat, (*SMALL, "-K", 2, "--profile", profile, *options), "does not fit", *words)


@pytest.mark.slow
def test_links_are_measured_and_given_values_win(offbeat, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "offbeat.studies.planning.measure_links", lambda: calls.append(1) or LinkMeasurement(0.002, 3e9, 0, 0)
    )
    assert "2 ms and 3,000 MB/s, measured" in done(offbeat(*SMALL, "-K", 2, "--measure-links"))
    assert "7 ms and 3,000 MB/s" in done(offbeat(*SMALL, "-K", 2, "--measure-links", "--latency", 7))
    assert len(calls) == 2
    said = done(offbeat(*SMALL, "-K", 2, "--measure-links", "--latency", 7, "--bandwidth", 10))
    assert "7 ms and 10 MB/s" in said
    assert len(calls) == 2  # nothing was left to measure


def test_compressed_messages_are_smaller_and_faster_on_slow_links(offbeat, profile):
    options = ("-K", 2, "--partition", "flops", "--profile", profile, "--latency", 0, "--bandwidth", 0.1)
    exact, half, quarter = (planned(offbeat, *options, "--messages", name) for name in ("exact", "bf16", "int8"))
    assert [plan["messages"] for plan in (exact, half, quarter)] == ["exact", "bf16", "int8"]
    assert exact["cuts"] == half["cuts"] == quarter["cuts"]
    size = exact["stages"][0]["boundary_bytes"]
    assert half["stages"][0]["boundary_bytes"] == size / 2
    assert size / 4 < quarter["stages"][0]["boundary_bytes"] < size / 3
    assert exact["stages"][0]["memory_bytes"] == half["stages"][0]["memory_bytes"]  # what a stage holds is exact
    times = [plan["bp_ms"] / plan["methods"]["bp"] for plan in (exact, half, quarter)]  # of a batch that waits for both
    saved = [2e3 * (size - plan["stages"][0]["boundary_bytes"]) / 1e5 for plan in (half, quarter)]
    assert [times[0] - time for time in times[1:]] == pytest.approx(saved, rel=0.2)
    said = done(offbeat(*SMALL, *options, "--messages", "int8"))
    assert "int8 sends 27 % of the bytes of float32, and encoding is not part of the time" in " ".join(said.split())


# ---- text


def test_the_text_has_both_tables_the_balance_and_advice(offbeat):
    said = done(offbeat(*SMALL, "-K", 3, "-M", 2))
    assert "mlp, adl, K=3, M=2, b=4" in said
    lines = said.partition("──")[0].splitlines()
    assert lines[-2].split() == [
        "k",
        "units",
        "from",
        "params",
        "F",
        "ms",
        "B",
        "ms",
        "up",
        "flight",
        "sions",
        "MB",
        "LoS",
    ]
    assert lines[-3].split() == ["kB", "in", "ver-"]
    assert "mean staleness in updates" in " ".join(said.split())
    assert "balance (mean / slowest stage)" in said
    assert "predicted speed-up" in said
    for name in DECLARED:
        assert f" {name} " in said
    assert "- memory is largest at stage" in said


@pytest.mark.parametrize("width", [80, 200])
def test_no_number_of_a_stage_is_cut_in_80_columns(width):
    K = 256
    stages = [
        StagePlan(
            k=k,
            units=[24 * k - 24, 24 * k - 1, f"layer3.{k}.conv1", f"layer3.{k}.bn2"],
            params=739_840,
            forward_ms=112.3,
            backward_ms=232.2,
            update_ms=1.0,
            boundary_bytes=2_097_152,
            in_flight=2 * (K - k) + 1,
            versions=2 * (K - k) + 1,
            memory_bytes=12_345_000_000,
            mean_staleness=2.0 * (K - k),
            recompute=False,
        )
        for k in range(1, K + 1)
    ]
    figures = {"bp_ms": 1.0, "predicted_speedup": 1.0, "methods": {}, "advice": [], "notes": [], "cuts": []}
    balance = {"balance": 0.9, "balance_rounds": [0.9, 0.9], "balance_bound": 1.0}
    plan = Plan(model="resnet1202", method="adl", K=K, M=1, batch_size=32, stages=stages, **figures, **balance)
    printed = io.StringIO()
    planning.print_stages(plan, Console(file=printed, width=width))
    said = printed.getvalue()
    rows = [line.split() for line in said.partition("── \n")[2].splitlines()[:K]]
    assert max(map(len, said.splitlines())) <= width
    assert [(row[0], row[-1]) for row in rows] == [(str(stage.k), f"{stage.mean_staleness:.2f}") for stage in stages]
    assert {row[-8] for row in rows} == {"739,840"}
    assert {len(row) for row in rows} == {10 if width == 80 else 11}
    assert not any("…" in word for row in rows for word in row[-8:])


MLP = ("plan", "--model", "mlp", "--shape", "1,4,4", "-K", 3)  # without BatchNorm, which keeps micro-batches large


@pytest.fixture
def times(monkeypatch):
    return fix_times(monkeypatch, planning)


@pytest.mark.usefixtures("times")
def test_the_recommendation_is_printed_with_the_measured_table(offbeat):
    said = done(offbeat(*MLP, "--batch-size", 8, "-M", 2)).splitlines()
    heading = next(place for place, line in enumerate(said) if "updates that stage 1 is late" in line)
    rows = [line.split() for line in said[heading + 2 : heading + 7]]  # below a rule
    assert rows == [
        ["16", "1", "1000.000", "2"],
        ["8", "2", "1000.000", "1"],
        ["4", "4", "1000.000", "0.5", "recommended"],
        ["2", "8", "2000.000", "0.25"],
        [],
    ]
    assert (
        "- recommended (--method auto) for updates of 16 samples: adl-1f1b, M=4 of 4 samples, stage 1 is 0.5 updates "
        "late, corrector auto" in said
    )
    assert correctors_shown(said) == RECOMMENDED


@pytest.mark.usefixtures("times")
def test_a_terminal_shows_what_is_being_timed(offbeat, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    outcome = offbeat(*MLP, "--batch-size", 8, "-M", 2)
    shown = [outcome.err.find(f"timing {what}") for what in ("updates of 16 samples", "the units of", "3 stages")]
    assert outcome.code == 0
    assert -1 < shown[0] < shown[1] < shown[2]


RECOMMENDED = [
    "- corrector auto of adl-1f1b, M=4, with SGD with momentum: stages 1-2 sc, stage 3 none",
    "- corrector auto of adl-1f1b, M=4, with Adam, AdamW, Muon, RotatedAdam: stages 1-2 lookahead:least=1+sc, stage 3 "
    "none",
    "- corrector auto of adl-1f1b, M=4, with NAdam: stages 1-3 none",
    "- corrector auto of adl-1f1b, M=4, with others: stages 1-3 none",
]


def correctors_shown(said: list[str]) -> list[str]:
    return [line for line in said if line.startswith("- corrector")]


@pytest.mark.usefixtures("times")
def test_corrector_auto_is_shown_of_the_planned_method(offbeat):
    """Only that of the recommended method was, which has another lag and M."""
    given = (*MLP, "--batch-per-update", 16)
    said = done(offbeat(*given, "--method", "adl:M=1,corrector=auto,staleness_warmup=9")).splitlines()
    rate = "t1:power=1:above=3"
    assert correctors_shown(said) == [
        "- corrector auto of adl, M=1, with SGD with momentum: stages 1-2 sc, stage 3 none",
        "- corrector auto of adl, M=1, with Adam, AdamW, Muon, RotatedAdam: "
        f"stage 1 lookahead:least=1+{rate}+sc, stage 2 lookahead:least=1+sc, stage 3 none",
        "- corrector auto of adl, M=1, with NAdam: stages 1-3 none",
        f"- corrector auto of adl, M=1, with others: stage 1 {rate}, stages 2-3 none",
        *RECOMMENDED,
    ]
    for same in ("auto", "adl-1f1b:M=4,corrector=auto,staleness_warmup=9"):
        assert correctors_shown(done(offbeat(*given, "--method", same)).splitlines()) == RECOMMENDED


@pytest.mark.usefixtures("times")
def test_auto_is_planned_as_what_it_is(offbeat):
    plan = json.loads(done(offbeat(*MLP, "--method", "auto", "--batch-per-update", 16, "--json")))
    assert (plan["method"], plan["M"], plan["batch_size"]) == ("adl-1f1b", 4, 4)
    found = plan["recommendation"]
    assert (found["method"], found["M"], found["batch_per_update"], found["corrector"]) == ("adl-1f1b", 4, 16, "auto")
    assert found["measured"][2] == {"M": 4, "size": 4, "seconds": 1.0, "delay": 0.5}
    slow = json.loads(done(offbeat(*MLP, "--method", "auto", "--batch-per-update", 16, "--latency", 1500, "--json")))
    assert slow["method"] == slow["recommendation"]["method"] == "adl"
    given = json.loads(done(offbeat(*MLP, "--method", "adl", "-M", 2, "--batch-per-update", 16, "--json")))
    assert (given["method"], given["M"], given["batch_size"]) == ("adl", 2, 8)
    assert found["staleness_warmup"] == []
    own = json.loads(done(offbeat(*MLP, "--method", "auto:M=3", "--batch-size", 4, "--json")))
    assert (own["M"], own["batch_size"], own["recommendation"]["batch_per_update"]) == (3, 4, 12)
    late = json.loads(done(offbeat(*MLP, "--method", "auto", "-M", 1, "--batch-per-update", 16, "--json")))
    assert late["recommendation"]["staleness_warmup"] == [["bp", 300]]
    (line,) = (line for line in late["advice"] if "staleness_warmup" in line)
    assert re.fullmatch(
        r"300 updates are trained by bp before .*: [\d.e+]+ ms per update, [\d.]+ times as long as a later one", line
    )


def test_the_text_fits_eighty_columns(offbeat, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    said = done(offbeat(*SMALL, "-K", 3, "--method", "all"))
    tables = [line for line in said.splitlines() if not line.startswith("- ")]
    assert max(map(len, tables)) <= 80


@pytest.mark.parametrize(("K", "budget"), [(3, 1.5), (4, 1.5), (4, 6), (2, 0.3), (3, 100)])
def test_the_advice_for_a_staleness_budget_is_the_smallest_m(offbeat, K, budget):
    said = done(offbeat(*SMALL, "-K", K, "--max-staleness", budget))
    least = max(1, math.ceil(2 * (K - 1) / budget))
    assert f"M = {least} is the smallest" in said
    assert planned(offbeat, "-K", K, "--max-staleness", budget)["advice"][0].startswith(f"M = {least} ")


def test_the_plan_of_2bw_is_one_update_late_with_two_versions_everywhere(offbeat):
    plan = planned(offbeat, "-K", 4, "-M", 8, "--method", "2bw")
    assert [stage["mean_staleness"] for stage in plan["stages"]] == [1, 1, 1, 1]
    assert [stage["versions"] for stage in plan["stages"]] == [2, 2, 2, 2]
    assert [stage["in_flight"] for stage in plan["stages"]] == [4, 3, 2, 1]


@pytest.mark.parametrize(("method", "reason"), [("2bw", "with 2bw it is 1"), ("spectrain", "one update per batch")])
def test_no_m_is_advised_where_none_lowers_the_staleness(offbeat, method, reason):
    advice = planned(offbeat, "-K", 3, "--method", method, "--max-staleness", 0.5)["advice"][0]
    assert advice.startswith("no M keeps the mean staleness at or below 0.5: ")
    assert reason in advice


def test_theory_names_the_bound(offbeat):
    said = done(offbeat(*SMALL, "-K", 3, "--theory"))
    assert "as stated" in said
    assert "as corrected" in said
    assert "upper bounds on the mean squared gradient" in said


def test_theory_shows_how_the_bound_moves_with_k(offbeat):
    said = done(offbeat(*SMALL, "-K", 4, "--theory"))
    theory = said[said.index("upper bounds") :]
    header = next(line for line in theory.splitlines() if "as stated" in line)
    assert header.split()[0] == "K"  # "prints how the bound moves with K and M"


# ---- pictures


@pytest.mark.parametrize("suffix", ["svg", "png", "txt"])
def test_pictures_are_drawn(offbeat, suffix):
    done(offbeat(*SMALL, "-K", 3, "--picture", f"time.{suffix}", "--staleness-picture", f"late.{suffix}"))
    starts = {"svg": b"<svg", "png": b"\x89PNG", "txt": b""}
    for name in ("time", "late"):
        content = Path(f"{name}.{suffix}").read_bytes()
        assert content.startswith(starts[suffix])
        assert len(content) > 100
    if suffix == "txt":
        assert "F0" in Path("time.txt").read_text()


# ---- replicas


def test_replicas_multiply_the_speed_up_less_the_time_of_their_sum(offbeat, profile):
    fast, slow = (planned(offbeat, "-K", 2, "-M", 2, "--replicas", 3, "--bandwidth", rate) for rate in (1e9, 0.1))
    assert (fast["replicas"], fast["K"]) == (3, 2)
    for plan, bandwidth in ((fast, 1e15), (slow, 1e5)):
        for stage in plan["stages"]:
            assert stage["sum_ms"] == pytest.approx(1e3 * 2 * (1e-4 + 4 * stage["params"] * 2 / 3 / bandwidth))
        computing = [stage["forward_ms"] + stage["backward_ms"] for stage in plan["stages"]]
        loads = [time + (s["update_ms"] + s["sum_ms"]) / 2 for time, s in zip(computing, plan["stages"], strict=True)]
        assert plan["predicted_speedup"] <= 3 * plan["bp_ms"] / max(loads) + 1e-6
    assert slow["predicted_speedup"] < fast["predicted_speedup"] / 10
    assert "dni" not in fast["methods"]


def test_workers_are_divided_into_stages_and_replicas_within_the_limits(offbeat, profile):
    def rows(*options: object) -> dict[tuple[int, int], dict]:
        found = planned(offbeat, "--workers", 4, "--profile", profile, *options)
        made = {(row["K"], row["replicas"]): row for row in found["splits"]}
        fastest = max((row for row in made.values() if row["speedup"]), key=lambda row: row["speedup"])
        assert found["best"] == fastest
        return made

    free = rows("-M", 2)
    assert set(free) == {(1, 4), (2, 2), (4, 1)}
    assert [row["staleness"] for row in free.values()] == [0, 1, 3]
    assert [row["samples_per_update"] for row in free.values()] == [4 * 2 * 4, 4 * 2 * 2, 4 * 2]
    assert all(row["speedup"] > 0 for row in free.values())
    calm = rows("--max-staleness", 0.5)
    assert [(row["M"], row["staleness"]) for row in calm.values()] == [(1, 0), (4, 0.5), (12, 0.5)]
    most = free[1, 4]["memory_bytes"]
    small = rows("-M", 2, "--memory-limit", (most - 1) / 1e6)
    assert small[1, 4]["speedup"] is None
    assert f"use at least {math.ceil(most / 1e3) / 1e3:g} MB" in small[1, 4]["reason"]
    apart = rows("-M", 2, "--bandwidth", 0.01, "--latency", 0)  # on slow links replicas are as slow as their sums
    assert apart[1, 4]["speedup"] < 1 / 100


def test_the_table_of_divisions_names_the_fastest(offbeat, profile):
    text = done(offbeat(*SMALL, "--workers", 2, "--profile", profile))
    assert "replicas" in text
    options = re.search(
        r"- fastest: (-K . --replicas . -M .*); 'offbeat plan' with these in place of --workers 2", text
    )[1]
    assert text.count("fastest") == 2
    assert "- messages take 0.1 ms and 2,000 MB/s, assumed unless given" in text
    assert done(offbeat(*SMALL, *options.split(), "--profile", profile))


def test_the_fastest_division_that_fits_only_with_recompute_is_named_with_it(offbeat):
    network = ("--model", "resnet8", "--batch-size", 16, "--profile", "p.json")
    fixed = (*SMALL, *network, "--workers", 2, "-M", 2, "--method", "adl:corrector=sc")
    free = json.loads(done(offbeat(*fixed, "--json")))["splits"]
    assert [split["recompute"] for split in free] == ["", ""]
    limited = json.loads(done(offbeat(*fixed, "--memory-limit", 1.1, "--json")))
    alone, split = limited["splits"]
    assert alone["reason"].startswith("1 stage does not fit a memory limit of 1.1 MB")
    assert limited["best"] == split
    assert split["recompute"] == "1"
    assert split["memory_bytes"] <= 1.1e6
    assert split["speedup"] < free[1]["speedup"], "with the forwards that stage 1 repeats"
    text = done(offbeat(*fixed, "--memory-limit", 1.1))
    options = re.search(r"- fastest: (.*) \(these stages repeat forwards\); 'offbeat plan' with these", text)[1]
    assert options == "-K 2 --replicas 1 -M 2 --method adl:corrector=sc,recompute=1"
    plan = json.loads(done(offbeat(*SMALL, *network, *options.split(), "--memory-limit", 1.1, "--json")))
    assert [stage["recompute"] for stage in plan["stages"]] == [True, False]


def test_the_limit_that_an_error_names_is_one_that_fits(offbeat, profile):
    printed = check_refused(offbeat, (*SMALL, "-K", 2, "--profile", profile, "--memory-limit", 0.01))
    least = re.search(r"at least ([0-9.]+) MB", printed)[1]
    made = planned(offbeat, "-K", 2, "--profile", profile, "--memory-limit", least)
    assert max(stage["memory_bytes"] for stage in made["stages"]) <= float(least) * 1e6


@pytest.mark.parametrize(
    ("options", "shape", "classes"),
    [
        (("--data", "cifar100"), (3, 32, 32), 100),  # which needs no folder for this
        (("--data", "digits"), (1, 8, 8), 10),
        (("--data", "digits", "--shape", "1,16,16"), (1, 16, 16), 10),
        (("--data", "text", "--model", "gpt"), (128,), 256),
        (("--data", "text"), (128,), 256),
        (("--shape", "3,8,8"), (3, 8, 8), 10),
        ((), (3, 32, 32), 10),
    ],
)
def test_samples_and_classes_are_those_of_the_data(offbeat, monkeypatch, options, shape, classes):
    built = []
    monkeypatch.setattr(models, "build", lambda name, **size: built.append((name, size)) or sys.exit(3))
    assert offbeat("plan", *options).code == 3
    ((name, size),) = built
    assert size == {"shape": shape, "classes": classes}
    assert name == ("gpt" if "text" in options else "resnet56")


@pytest.mark.parametrize("option", ["--picture", "--staleness-picture"])
@pytest.mark.parametrize("name", ["time.xyz", "nowhere/time.svg"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_built(offbeat, monkeypatch, option, name):
    monkeypatch.setattr(models, "build", lambda *_, **__: pytest.fail("built a network"))
    check_refused(offbeat, (*SMALL, option, name), name)


# ---- bad input

OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "model": (("--model", "resnet65"), ("resnet65", "did you mean 'resnet56'")),
    "method": (("--method", "ald"), ("ald", "did you mean 'adl'")),
    "partition": (("--partition", "flop"), ("flop", "did you mean 'flops'")),
    "K=0": (("-K", "0"), ("-K 0", "from 1 up")),
    "K=-1": (("-K", "-1"), ("-K -1",)),
    "K above the units": (("-K", "500"), ("500 stages", "use -K ")),
    "M=0": (("-M", "0"), ("-M 0",)),
    "M with ddg": (("--method", "ddg", "-M", "4"), ("ddg takes no M (given: 4)",)),
    "batch size 0": (("--batch-size", "0"), ("--batch-size 0",)),
    "batch size beyond any memory": (("--batch-size", str(10**15)), ("batch",)),
    "shape of two": (("--shape", "8,8"), ("--shape 8,8", "(channels, height, width)")),
    "shape with a zero": (("--shape", "3,0,8"), ("shape",)),
    "device nonsense": (("--device", "toaster"), ("toaster", "use cpu, or cuda")),
    "device that is not here": (("--device", "cuda:99"), ("cuda:99",)),
    "device without values": (("--device", "meta"), ("meta",)),
    "no threads": (("--threads", "0"), ("threads",)),
    "negative latency": (("--latency", "-1"), ("latency -1",)),
    "nan latency": (("--latency", "nan"), ("latency nan",)),
    "infinite latency": (("--latency", "inf"), ("latency inf",)),
    "no bandwidth": (("--bandwidth", "0"), ("bandwidth 0",)),
    "unknown messages": (("--messages", "int4"), ("int4", "int8")),
    "messages of one stage": (("-K", "1", "--messages", "bf16"), ("messages", "bf16", "more stages")),
    "profile in no folder": (("--profile", "nowhere/p.json"), ("nowhere", "folder that exists")),
    "profile that is a folder": (("--profile", "."), ("profile .",)),
    "picture": (("--picture", "time.gif"), ("time.gif", ".svg")),
    "staleness picture": (("--staleness-picture", "late"), ("late", ".svg")),
    "picture in no folder": (("--picture", "nowhere/time.svg"), ("nowhere",)),
    "speeds in words": (("--speeds", "fast"), ("--speeds", "fast")),
    "too few speeds": (("-K", "3", "--speeds", "1,1"), ("2 speeds for 3 stages",)),
    "no speeds": (("-K", "3", "--speeds", ""), ("speeds",)),
    "a speed of nothing": (("-K", "2", "--speeds", "1,0"), ("speeds[1] = 0",)),
    "a pin outside": (("-K", "2", "--pin", "900"), ("900",)),
    "memory that nothing fits": (
        ("-K", "2", "--memory-limit", "0.001"),
        ("2 stages do not fit a memory limit of 0.001 MB per worker: use at least", "MB, or more stages"),
    ),
    "negative memory": (("-K", "2", "--memory-limit", "-1"), ("memory",)),
    "staleness of nothing": (("--max-staleness", "0"), ("staleness", "above 0")),
    "nan staleness": (("--max-staleness", "nan"), ("staleness",)),
    "no replicas": (("--replicas", "0"), ("--replicas 0", "from 1 up")),
    "replicas of dni": (("--method", "dni", "--replicas", "2"), ("dni with --replicas 2", "synthesisers")),
    "no workers": (("--workers", "0"), ("--workers 0", "from 1 up")),
    "workers and stages": (("--workers", "4", "-K", "2"), ("--workers 4 with -K: it compares divisions",)),
    "no setting of auto": (("--method", "auto:m=4"), ("auto takes no m (given: 4)", "its settings are M, ")),
    "samples that auto cannot split": (
        ("--method", "auto:M=3", "--batch-per-update", "16"),
        ("--batch-per-update 16 with M = 3: 16 samples cannot be split into 3 equal batches",),
    ),
    "workers of auto": (("--workers", "4", "--method", "auto"), ("--method auto with --workers 4", "name one method")),
    "workers without memory": (
        ("--workers", "2", "--memory-limit", "0.001"),
        ("no division of 2 workers", "do not fit"),
    ),
    "data": (("--data", "cifar1O"), ("cifar1O", "did you mean 'cifar10'")),
    "shape of data that has its own": (("--data", "cifar10"), ("cifar10 takes no shape",)),
    "images for a network of tokens": (("--model", "gpt", "--data", "digits"), ("gpt takes tokens",)),
    "data that needs its folder": (("--data", "imagefolder"), ("imagefolder needs --data-dir",)),
    "a folder of no data": (("--data-dir", "."), ("--data-dir . without --data",)),
    "no memory": (("--memory-limit", "0"), ("--memory-limit 0: give megabytes above 0",)),
    "staleness below 0": (("--max-staleness", "-1"), ("--max-staleness -1: give a number of updates from 0 up",)),
    "unknown option": (("--pictures", "a.svg"), ("--pictures", "plan --help")),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_bad_option_is_refused_in_one_line_and_nothing_is_written(offbeat, name):
    arguments, words = OPTIONS[name]
    check_refused(offbeat, (*SMALL, *arguments), *words)


# ---- cuts inside blocks in a run

TRAIN = (
    "train",
    "--data",
    "digits",
    "--model",
    "resnet8",
    "--engine",
    "simulate",
    "--epochs",
    1,
    "-K",
    3,
    "--threads-per-stage",
    1,
    "--json",
)


def recipe(folder: str) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())["recipe"]


def trained(folder: str) -> bytes:
    return (Path(folder) / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        ("--units", "layers"),
        *(
            pytest.param(given, marks=pytest.mark.slow)
            for given in (("--partition", "measured"), ("--speeds", "1,1,0.5"))
        ),
    ],
)
def test_a_run_records_its_cuts_and_is_repeated_by_its_config(offbeat, options):
    outcome = offbeat(*TRAIN, *options, "--out", "one")
    assert outcome.code == 0, outcome
    written = recipe("one")
    assert written["units"] == "layers"
    assert len(written["cuts"]) == 2
    assert written["partition"] == ("measured" if "measured" in options else "flops")
    result = json.loads(outcome.out)
    assert result["staleness"] == pytest.approx(result["staleness_formula"], abs=0.1)
    again = offbeat("train", "--config", "one/config.json", "--out", "two", "--json")
    assert again.code == 0, again
    assert recipe("two") == written
    assert trained("two") == trained("one")


def test_more_stages_than_blocks_are_cut_inside_blocks(offbeat):
    outcome = offbeat(*TRAIN, "-K", 8, "--dry-run")
    assert outcome.code == 0, outcome
    found = json.loads(outcome.out)["recipe"]
    assert (found["units"], len(found["cuts"])) == ("layers", 7)


def test_cuts_by_flops_do_not_depend_on_when_they_are_made(offbeat):
    found = [json.loads(offbeat(*TRAIN, "--units", "layers", "--dry-run").out)["recipe"]["cuts"] for _ in range(2)]
    assert found[0] == found[1]


TRAIN_OPTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "units": (("--units", "layer"), ("layer", "did you mean 'layers'")),
    "partition": (("--partition", "mesured"), ("mesured", "did you mean 'measured'")),
    "too few speeds": (("--speeds", "1,1"), ("2 speeds for 3 stages",)),
    "too many speeds": (("--speeds", "1,1,1,1"), ("4 speeds for 3 stages",)),
    "too many speeds for one stage": (("-K", "1", "--speeds", "1,1"), ("2 speeds for 1",)),
    "too few speeds beside cuts": (("--cuts", "1,2", "--speeds", "1,1"), ("2 speeds for 3 stages",)),
    "no speeds": (("--speeds", ""), ("speeds",)),
    "negative speed": (("--speeds", "1,1,-1"), ("speeds", "-1")),
    "speeds in words": (("--speeds", "a,b,c"), ("--speeds",)),
    "too many stages": (("--units", "layers", "-K", "500"), ("500 stages", "use -K ")),
    "more stages than blocks": (("--units", "blocks", "-K", "8"), ("8 stages", "use -K 5 or fewer")),
    "too few cuts between layers": (
        ("--units", "layers", "--cuts", "3"),
        ("--cuts 3 gives 2 stages, not -K 3: give 2 cuts",),
    ),
    "too many cuts between layers": (
        ("--units", "layers", "--cuts", "3,5,7"),
        ("--cuts 3,5,7 gives 4 stages, not -K 3",),
    ),
    "cuts beyond the layers": (("--units", "layers", "--cuts", "3,900"), ("[3, 900]",)),
}


@pytest.mark.parametrize("name", TRAIN_OPTIONS)
def test_an_invalid_partition_option_is_refused_before_a_run(offbeat, name):
    arguments, words = TRAIN_OPTIONS[name]
    check_refused(offbeat, (*TRAIN, *arguments), *words)
