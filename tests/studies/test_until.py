"""`offbeat bench --until-loss`: rows start alike, a target is reached where the curve says so, runs are kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import check_refused, offbeat  # noqa: F401
from torch import nn

from offbeat import data, models
from offbeat.errors import UserError
from offbeat.report import until_table
from offbeat.runs.task import LANGUAGE
from offbeat.seeds import derive
from offbeat.studies.bench import until
from offbeat.studies.bench.records import stored
from offbeat.studies.bench.row_training import validation_batches
from offbeat.studies.bench.rows import BenchSetting, chosen, left_out, micro_batches, row_of
from offbeat.studies.bench.target import Measurement, Target, best, reached
from offbeat.studies.bench.until import TrainedRow

pytestmark = pytest.mark.usefixtures("forked_children")

LOSS = Target("loss", 1.0)


def small(*more: object, M: int | None = 2, micro: str = "4") -> tuple[object, ...]:
    """A command whose runs take seconds."""
    return (
        *("bench", "--data", "digits", "--model", "mlp", "--shape", "1,8,8", "-K", 2, "--batch-size", 32),
        *(() if M is None else ("-M", M)),
        *("--samples", 640, "--every", 5, "--validation-samples", 200, "--partition", "flops"),
        *("--micro-batches", micro, "--out", "found", *more),
    )


def record() -> dict:
    return json.loads(Path("found/until.json").read_text())


def runs(content: dict) -> dict[tuple[str, float], dict]:
    return {(row["name"], run["rate"]): run for row in content["rows"] for run in row["runs"]}


# ---- when a target is reached


@pytest.mark.parametrize(
    ("losses", "wanted"),
    [
        ([3.0, 2.0, 1.0, 0.5], (20.0, 2.0)),  # at a validation
        ([3.0, 2.0, 0.5], (10 + 10 * 2 / 3, 1 + 2 / 3)),  # between two
        ([3.0, 0.5, 2.0, 0.1], (8.0, 0.8)),  # the first counts, though the loss increases afterwards
        ([3.0, 2.0, 1.001], None),
        ([3.0, float("nan"), 1.5], None),
        ([3.0], None),
        ([], None),
    ],
)
def test_a_target_is_reached_where_the_line_between_validations_crosses_it(losses, wanted):
    found = reached(LOSS, [Measurement(10 * at, float(at), loss) for at, loss in enumerate(losses)])
    assert found == (None if wanted is None else pytest.approx(wanted))


def test_the_best_loss_of_a_run_is_its_lowest_finite_one():
    assert best(LOSS, [Measurement(0, 0.0, 3.0), Measurement(1, 1.0, 2.0), Measurement(2, 2.0, float("nan"))]) == 2.0
    assert best(LOSS, [Measurement(0, 0.0, float("nan")), Measurement(1, 1.0, 2.0)]) == 2.0, "nan < 2 and 2 < nan fail"
    assert best(LOSS, [Measurement(0, 0.0, float("inf"))]) is None
    assert best(LOSS, []) is None
    assert best(Target("error", 5.0), [Measurement(0, 0.0, 3.0, 90.0), Measurement(1, 1.0, 9.0, 40.0)]) == 40.0


def test_validation_samples_are_spread_over_all_test_samples():
    found = data.open("synthetic", shape=(1, 2, 2), classes=2, samples=8000)
    batches = list(found.test(batch_size=100))
    assert len(batches) > 4
    some = list(validation_batches(found, 200))
    places = [at for at, (x, _) in enumerate(batches) if any(torch.equal(x, other) for other, _ in some)]
    assert places == [len(batches) // 2 - 1, len(batches) - 1]
    assert len(list(validation_batches(found, 10**9))) == len(batches)


# ---- which rows there are


def test_on_text_all_rows_have_the_optimizer_recommended_for_late_gradients_too():
    rows = chosen(until.COMPARED)

    def named(default: str, given: str | None = None) -> list[tuple[str, str]]:
        return [(one.name, one.optimizer) for one in TrainedRow.all_of(rows, default=default, given=given)]

    assert named("sgd") == [(name, "sgd") for name in ("bp", "torch-1f1b", "ddp", "adl", "adl-1f1b")]
    assert named(LANGUAGE.defaults["optimizer"])[:4] == [
        ("bp", "adamw"),
        ("bp-muon", "muon"),
        ("torch-1f1b", "adamw"),
        ("torch-1f1b-muon", "muon"),
    ]
    assert named("adamw", "muon") == [(name, "muon") for name in ("bp", "torch-1f1b", "ddp", "adl", "adl-1f1b")]


# ---- runs


def by_hand(*, lr: float, updates: int, every: int, seed: int = 0) -> list[float]:
    """Validation losses of back-propagation, without anything of the benchmark."""
    images = data.open("digits", shape=(1, 8, 8))
    torch.manual_seed(derive(seed, "model"))
    model = models.build("mlp", shape=(1, 8, 8), classes=10)
    velocity = [torch.zeros_like(weight) for weight in model.parameters()]

    def loss() -> float:
        with torch.no_grad():
            found = [(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)) for x, y in test]
        return float(sum(value for value, _ in found)) / sum(count for _, count in found)

    test = list(validation_batches(images, 200))
    losses, batches = [loss()], images.train(batch_size=32, seed=seed, epoch=0, drop_last=True)
    ramp = 0.05 * updates
    for update, (x, y) in zip(range(updates), batches, strict=False):
        factor = 0.01 + 0.99 * update / ramp if update < ramp else 1.0
        grads = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        with torch.no_grad():
            for weight, speed, grad in zip(model.parameters(), velocity, grads, strict=True):
                speed.mul_(0.9).add_(grad + 5e-4 * weight)
                weight.sub_(lr * factor * speed)
        if (update + 1) % every == 0:
            losses.append(loss())
    return losses


@pytest.mark.slow
def test_rows_start_alike_and_exact_ones_reach_a_known_loss_at_the_known_sample(offbeat, monkeypatch):  # noqa: F811
    monkeypatch.setattr(until, "RATES", (1.0,))
    wanted = by_hand(lr=0.1 * 32 / 256, updates=20, every=5, seed=1)
    done = offbeat(*small("--until-loss", 0.001, "--seed", 1))  # so that all rows read all samples
    assert done.code == 0, done.err
    content = record()
    assert content["left_out"] == {}
    assert [row["name"] for row in content["rows"]] == ["bp", "torch-1f1b", "ddp", "adl", "adl-1f1b"]
    assert {row["samples_per_update"] for row in content["rows"]} == {32}
    assert [max(row["staleness"], default=0) for row in content["rows"]] == [0, 0, 0, 1.0, 0.5]
    found = runs(content)
    assert {run["outcome"] for run in found.values()} == {"not reached"}
    assert len({run["weights"] for run in found.values()}) == 1
    assert len({run["order"] for run in found.values()}) == 1
    for (name, _), run in found.items():
        assert [point["samples"] for point in run["curve"]] == [0, 160, 320, 480, 640]
        assert run["best"] == min(point["loss"] for point in run["curve"])
        times = [point["seconds"] for point in run["curve"]]
        assert times == sorted(times)
        losses = [point["loss"] for point in run["curve"]]
        if name in ("bp", "torch-1f1b", "ddp"):
            assert losses == pytest.approx(wanted, rel=5e-4)  # rounding can change the sign of an activation
        else:
            assert losses[0] == pytest.approx(wanted[0], rel=1e-6)
            assert losses[-1] < losses[0]
    page = Path("found/until.md").read_text()
    assert "No row reached the target" in page
    assert "not reached, best loss" in page


@pytest.mark.parametrize(("M", "splits"), [(None, True), (4, False)])
def test_an_update_need_not_be_split_by_a_default_that_is_not_used(M, splits):
    request = until.UntilRequest(
        model="mlp", data="digits", shape=(1, 8, 8), K=3, M=M, batch_per_update=6, until_loss=1.0
    )
    if splits:
        assert request.setting().batch_size == 6
    else:
        with pytest.raises(UserError, match="6 samples cannot be split into 4"):
            request.setting()


@pytest.mark.parametrize("name", ["batch_size", "batch_per_update"])
def test_no_samples_per_update_are_refused_and_not_the_default(name):
    """The default of 128 was trained instead."""
    given = {name: 0, "until_loss": 1.0}
    request = until.UntilRequest(model="mlp", data="digits", shape=(1, 8, 8), K=3, **given)
    with pytest.raises(UserError, match=f"^{name}=0: use whole numbers from 1 up$"):
        request.setting()


def test_samples_that_no_number_divides_are_refused_by_all_that_were_tried():
    """The error named batch_per_update, where batch_size was given, and M, where none was."""
    request = until.UntilRequest(model="mlp", data="digits", shape=(1, 8, 8), K=3, batch_size=31, until_loss=1.0)
    words = "31 samples per update cannot be split into 3, 6, 12 or 4 equal batches: use a multiple of 3"
    with pytest.raises(UserError, match=f"^{words}$"):
        request.setting()


@pytest.mark.parametrize(
    ("K", "given", "tried"), [(8, None, [8, 16, 32]), (4, (2, 4, 8), [4, 8]), (8, (2, 4), None), (4, None, [4, 8, 16])]
)
def test_only_micro_batches_with_which_2bw_can_have_k_stages_are_tried(K, given, tried):
    request = until.UntilRequest(model="mlp", K=K, micro_batches=given, until_loss=1.0)
    setting = BenchSetting("mlp", (1, 8, 8), 10, batch_size=64, K=K, M=4, batch_per_update=64)
    row = until.split(row_of("2bw"), request, setting)
    reason = left_out(row, setting, given)
    if tried is None:
        assert reason == "two versions of the weights need M >= K-1: use M=7 or more, not 4"
    else:
        assert reason is None
        assert micro_batches(row, setting, given) == tried


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"M": None}, "already holds until.json with given_M = 4, not None"),
        ({"micro": "2,4"}, "already holds until.json with micro_batches = [4], not [2, 4]"),
    ],
)
def test_a_record_with_another_choice_of_m_is_not_continued(options, words, offbeat, monkeypatch):  # noqa: F811
    """-M 4 and no -M had the same settings: rows of the one were continued as rows of the other."""
    monkeypatch.setattr(until, "RATES", ())
    more = ("--until-loss", 0.001, "--against", "bp")
    assert offbeat(*small(*more, M=4)).code == 0
    check_refused(offbeat, small(*more, **{"M": 4, **options}), words)


def test_a_record_of_another_network_between_machines_is_not_continued(tmp_path):
    """Times on a slow line were continued with those on any other."""

    def origin(**network: str) -> dict:
        return {"machine": "M", "commit": "abc", "versions": {"torch": "2"}, **network}

    path = tmp_path / "until.json"
    line = "100 Mbit/s with a round trip of 20 ms"
    content = {"settings": {"K": 2}, "provenance": origin(network=f"{line} (measured: 99, 20.4)")}
    path.write_text(json.dumps(content))
    assert stored(path, {"K": 2}, origin(network=f"{line} (measured: 98, 20.3)")) == content
    for other, words in (({"network": "home"}, "not home"), ({}, "not None")):
        with pytest.raises(UserError, match=f"already holds until.json with network = {line}, {words}"):
            stored(path, {"K": 2}, origin(**other))
    path.write_text(json.dumps({**content, "provenance": origin()}))
    assert stored(path, {"K": 2}, origin()) is not None


def test_late_rows_split_an_update_into_the_micro_batches_that_are_tried(offbeat, monkeypatch):  # noqa: F811
    monkeypatch.setattr(until, "RATES", (1.0,))
    more = ("--against", "adl-1f1b", "--micro-batches", "4,8", "--until-loss", 0.001)
    done = offbeat(*small(*more, M=None))
    assert done.code == 0, done.err
    content = record()
    _, adl, one_f_one_b = content["rows"]
    for row, lag in ((adl, 2), (one_f_one_b, 1)):
        sweep = {int(m): seconds for m, seconds in row["sweep"].items()}
        assert 4 in sweep
        assert set(sweep) <= {4, 8}
        assert row["micro_batches"] == max(m for m in sweep if sweep[m] <= 1.15 * min(sweep.values()))
        assert row["staleness"] == [lag / row["micro_batches"], 0.0]
        assert f"{row['micro_batches']} micro-batches of {32 // row['micro_batches']}" in row["note"]
    assert len({run["order"] for run in runs(content).values()}) == 1


def test_a_run_ends_at_the_target_and_earlier_runs_are_kept_after_ctrl_c(offbeat, monkeypatch):  # noqa: F811
    monkeypatch.setattr(until, "RATES", (1.0,))
    losses = by_hand(lr=0.1 * 32 / 256, updates=20, every=5)
    target = (losses[1] + losses[2]) / 2  # reached between 160 and 320 samples
    work, calls = until.UntilBench._until, []

    def interrupted(self, *given):
        calls.append(given[-1])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return work(self, *given)

    monkeypatch.setattr(until.UntilBench, "_until", interrupted)
    command = small("--until-loss", target, "--against", "bp")
    done = offbeat(*command)
    assert done.code == 130
    assert done.err.splitlines()[-1].startswith("offbeat: stopped by Ctrl-C; repeat the command with --out found")
    first = runs(record())
    assert list(first) == [("bp", 1.0)]
    run = first["bp", 1.0]
    assert run["outcome"] == "reached"
    assert run["samples"] == pytest.approx(240, rel=1e-3)
    assert run["curve"][-1]["samples"] == 320
    assert run["curve"][1]["seconds"] < run["seconds"] < run["curve"][2]["seconds"]
    place = command.index("--every")
    done = offbeat(*command[:place], *command[place + 2 :])
    assert done.code == 0, done.err
    assert record()["settings"]["every"] == 5, "as in the runs that it had"
    assert runs(record())["adl", 1.0]["curve"][1]["samples"] == 160
    assert "continuing the record of 1 runs" in done.err
    assert len(calls) == 3
    assert list(runs(record())) == [("bp", 1.0), ("adl", 1.0)]
    assert record()["settings"]["warmup_samples"] == 32, "one update of 20"
    assert runs(record())["bp", 1.0] == run
    own = record()["settings"]["cuts_by_samples"]["16"]["cuts"]  # of an update of 32 samples in M=2 batches
    assert [row["cuts"] for row in record()["rows"]] == [None, own]
    check_refused(offbeat, small("--until-loss", target / 2, "--against", "bp"), "already holds until.json with target")


def test_the_time_of_a_run_is_that_of_its_slowest_worker_without_validations():
    losses = iter([3.0, 2.0, 1.5, 0.5])

    def ask(what: str, count: int | None = None) -> list[dict]:
        if what == "train":
            return [{"seconds": 0.1 * count}, {"seconds": 0.5 * count}]
        time.sleep(0.05)
        return [{"found": None, "order": None}, {"found": {"loss": next(losses), "error": None}, "order": "order"}]

    quiet = SimpleNamespace(report=lambda line: None, has_time=lambda: True)
    study = SimpleNamespace(
        request=SimpleNamespace(target=LOSS), setting=SimpleNamespace(batch_size=8), updates=10, every=4, runner=quiet
    )
    curve: list[Measurement] = []
    assert until.UntilBench._until(study, SimpleNamespace(ask=ask), curve, "adl") == ("reached", "order")
    assert [(point.samples, point.seconds) for point in curve] == [(0, 0.0), (32, 2.0), (64, 4.0), (80, 5.0)]
    assert reached(LOSS, curve) == (72.0, 4.5)


@pytest.mark.parametrize(
    ("losses", "time_left", "outcome", "samples"),
    [
        ([3.0, 2.0, 1.5, 1.25], True, "not reached", [0, 32, 64, 80]),
        ([3.0, 2.0, 1.0], True, "reached", [0, 32, 64]),
        ([3.0, float("nan")], True, "diverged", [0]),
        ([3.0], False, "no time", [0]),
    ],
)
def test_a_run_ends_at_its_target_its_last_sample_or_a_loss_that_is_not_finite(losses, time_left, outcome, samples):
    left = iter(losses)

    def ask(what: str, count: int | None = None) -> list[dict]:
        if what == "train":
            return [{"seconds": 1.0}]
        return [{"found": {"loss": next(left), "error": None}, "order": "order"}]

    runner = SimpleNamespace(report=lambda line: None, has_time=lambda: time_left)
    study = SimpleNamespace(
        request=SimpleNamespace(target=LOSS), setting=SimpleNamespace(batch_size=8), updates=10, every=4, runner=runner
    )
    curve: list[Measurement] = []
    assert until.UntilBench._until(study, SimpleNamespace(ask=ask), curve, "adl") == (outcome, "order")
    assert [point.samples for point in curve] == samples
    assert next(left, None) is None


def test_all_rows_begin_with_the_same_weights_and_a_twentieth_as_warm_up():
    """100 updates of 8 samples, of which 802 make an epoch of 100 updates: 5 updates are 0.05 epochs."""
    given = []
    study = SimpleNamespace(
        data=SimpleNamespace(train_samples=802),
        setting=SimpleNamespace(batch_size=8),
        updates=100,
        request=SimpleNamespace(recipe=lambda *each, **more: (each, more), data_dir="folder", validation_samples=7),
        found={"bp": {"runs": [{"weights": "ours"}, {"rate": 2.0}]}},
    )
    trained = TrainedRow(row_of("adl"), "muon", "adl-muon")

    def begun(*weights: str) -> str:
        workers = SimpleNamespace(ask=lambda what, how: given.append((what, how)) or [{"weights": w} for w in weights])
        return until.UntilBench._begin(study, workers, trained, 0.25, 4)

    assert begun("ours", "ours") == "ours"
    recipe = ((8,), {"optimizer": "muon", "lr": 0.25, "warmup": pytest.approx(0.05)})
    assert given == [("begin", {"recipe": recipe, "folder": "folder", "m": 4, "validation_samples": 7})]
    for others in (("theirs", "theirs"), ("ours", "theirs")):
        with pytest.raises(UserError, match="adl-muon does not have the initial weights of the other rows"):
            begun(*others)


def test_a_time_limit_that_ends_before_the_first_run_is_reported(offbeat):  # noqa: F811
    done = offbeat(*small("--until-loss", 0.001, "--budget-minutes", 1e-5))
    assert done.code == 0, done.err
    assert "no time for 15 more runs" in done.err
    page = Path("found/until.md").read_text()
    assert "The time ended before any run did." in page
    assert "No row has reached the target yet: repeat the command with more time to continue." in page
    assert "more samples" not in page


def test_a_run_that_the_time_limit_ends_is_trained_again(offbeat, monkeypatch):  # noqa: F811
    monkeypatch.setattr(until, "RATES", (1.0,))
    command = small("--until-loss", 0.001, "--against", "bp")
    starts = iter([True])  # and from then on there is no time
    with monkeypatch.context() as limited:
        limited.setattr(until.StudyRunner, "has_time", lambda self, seconds=0.0: next(starts, False))
        done = offbeat(*command, "--budget-minutes", 1)
    assert done.code == 0, done.err
    (run,) = runs(record()).values()
    assert run["outcome"] == "no time"
    assert [point["samples"] for point in run["curve"]] == [0]
    page = Path("found/until.md").read_text()
    assert "no time, best loss" in page
    assert "repeat the command with more time" in page
    assert "more samples" not in page
    done = offbeat(*command)
    assert done.code == 0, done.err
    assert {name: run["outcome"] for (name, _), run in runs(record()).items()} == dict.fromkeys(
        ["bp", "adl"], "not reached"
    )


@pytest.mark.slow
def test_a_rate_that_diverges_is_recorded_and_others_count(offbeat, monkeypatch):  # noqa: F811
    monkeypatch.setattr(until, "RATES", (1.0, 1e9))
    done = offbeat(*small("--until-error", 60, "--against", "bp"))
    assert done.code == 0, done.err
    found = runs(record())
    assert {rate: {run["outcome"] for (_, at), run in found.items() if at == rate} for rate in (1.0, 1e9)} == {
        1.0: {"reached"},
        1e9: {"diverged"},
    }
    assert ": diverged" in Path("found/until.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--until-loss", 1, "--until-error", 5), ("--until-loss with --until-error", "give one")),
        (("--until-loss", 0), ("--until-loss 0", "above 0")),
        (("--until-loss", "nan"), ("--until-loss nan", "above 0")),
        (("--until-error", 100), ("--until-error 100", "below 100")),
        (("--until-loss", 1, "--samples", 0), ("--samples 0", "from 1 up")),
        (("--until-loss", 1, "--samples", 10, "--data", "digits", "--shape", "1,8,8"), ("--samples 10", "128")),
        (("--until-loss", 1, "--every", 0), ("--every 0", "from 1 up")),
        (("--until-loss", 1, "--seed", -1), ("--seed -1",)),
        (("--until-loss", 1, "--validation-samples", 0), ("--validation-samples 0",)),
        (("--until-loss", 1, "--device", "cuda"), ("--device cuda", "on the cpu only")),
        (("--until-loss", 1, "--optimizer", "adam"), ("unknown optimizer 'adam'", "adamw")),
        (("--until-loss", 1, "--data", "cifar"), ("unknown data set 'cifar'",)),
        (("--until-loss", 1, "--data", "cifar10"), ("cifar10 needs --data-dir",)),
        (("--until-loss", 1, "--data", "text", "--model", "resnet20"), ("resnet20 takes images", "--model gpt")),
        (("--until-error", 5, "--model", "gpt:layers=2,width=16,heads=2"), ("has no error", "--until-loss")),
        (("--until-loss", 1, "--data", "digits", "--against", "dpd"), ("unknown row 'dpd'", "ddp")),
        (
            ("--until-loss", 1, "--data", "digits", "--batch-size", 9999, "-M", 1),
            ("--batch-size 9999", "training samples"),
        ),
        (
            ("--until-loss", 1, "--data", "digits", "--batch-per-update", 9999, "-M", 1),
            ("--batch-per-update 9999, but",),
        ),
        (("--until-loss", 1, "--batches", 3), ("--batches with --until-loss",)),
        (("--samples", 3), ("--samples without --until-loss",)),
        (("--data", "digits"), ("--data without --until-loss",)),
        (("--until-loss", 1, "-K", 1, "--data", "digits"), ("-K 1", "use 2 or more")),
    ],
)
def test_misuse_is_reported_in_one_line(offbeat, arguments, words):  # noqa: F811
    model = () if "--model" in arguments else ("--model", "mlp")
    stages = () if "-K" in arguments else ("-K", 2)
    check_refused(offbeat, ("bench", *arguments, *model, *stages), *words)


def test_a_target_that_the_initial_weights_have_is_refused(offbeat, monkeypatch):  # noqa: F811
    monkeypatch.setattr(until, "RATES", (1.0,))
    done = offbeat(*small("--until-loss", 50, "--against", "bp", "--json"))
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith("offbeat: --until-loss 50: the initial weights have 2.")


# ---- tables


def trained(name: str, *times: float | None, staleness: tuple[float, ...] = (), optimizer: str = "AdamW") -> dict:
    """A row with a run per time; None: not reached."""
    made = [
        {
            "rate": rate,
            "lr": rate / 1000,
            "outcome": "not reached" if time is None else "reached",
            "reason": None,
            "samples": None if time is None else 100 * time,
            "seconds": time,
            "best": 1.4 if time is None else 0.9,
            "curve": [{"samples": 1000, "seconds": time or 50.0, "loss": 0.9, "error": None}],
        }
        for rate, time in zip((1.0, 0.5, 2.0), times, strict=False)
    ]
    return {
        "name": name,
        "title": name.upper(),
        "optimizer": optimizer,
        "exact": not any(staleness),
        "staleness": list(staleness),
        "micro_batches": None,
        "note": "",
        "runs": made,
    }


def made(*rows: dict) -> dict:
    return {
        "settings": {
            "model": "gpt",
            "data": "text",
            "K": 4,
            "device": "cpu",
            "batch_size": 64,
            "cuts": [1, 2, 3],
            "cores": 4,
            "cores_shared": False,
            "metric": "loss",
            "target": 1.0,
            "samples": 5000,
            "every": 10,
            "validation_samples": 100,
            "warmup_samples": 250,
        },
        "rows": list(rows),
        "left_out": {"ddp": "a reason"},
        "provenance": {"command": ["offbeat"], "commit": "abc", "versions": {"torch": "2"}, "machine": "M"},
    }


def test_the_table_has_the_best_rate_of_every_row_and_its_ratio():
    content = made(trained("bp", 40.0, 30.0, None), trained("adl", 20.0, 60.0, 15.0, staleness=(0.5, 0.0)))
    lines = until_table.cells(content)
    assert lines[0] == [
        "BP",
        "AdamW",
        "0.0005",
        "30.0 s",
        "3,000",
        "1.00",
        "33",
        "exact",
        "0.001: 40.0 s; 0.002: not reached",
    ]
    assert lines[1][2:8] == ["0.002", "15.0 s", "1,500", "2.00", "67", "late by 0.5"]
    content["rows"].append(trained("adl-1f1b", None, None, staleness=(0.5, 0.0)))
    assert until_table.cells(content)[2][3:6] == ["not reached, best loss 1.4", "", ""]
    assert "ddp is left out: a reason." in until_table.page(content)
    content["rows"][1]["cuts"] = [1, 2, 4]
    assert "stages compute: [1, 2, 3]; adl: [1, 2, 4]." in until_table.page(content)


def test_the_advice_follows_the_times_in_both_directions():
    def advice(*rows: dict) -> str:
        return " ".join(until_table.advice(made(*rows)))

    late = (0.75, 0.0)
    won = advice(trained("bp", 90.0), trained("ddp", 30.0), trained("adl", 15.0, staleness=late))
    assert "ADL with AdamW reaches the target in 0.50 of the time of DDP with AdamW" in won
    assert "0.50 times the samples" in won
    lost = advice(trained("bp", 90.0), trained("ddp", 30.0), trained("adl", 60.0, staleness=late))
    assert "ADL with AdamW, takes 2.00 times as long" in lost
    assert "The synchronous row is the better choice here." in lost
    never = advice(trained("bp", 90.0), trained("adl", None, staleness=late))
    assert "No row with late gradients reached the target; BP with AdamW did after 1 min 30 s." in never
    assert "Only rows with late gradients" in advice(trained("bp", None), trained("adl", 9.0, staleness=late))
    assert "No row reached" in advice(trained("bp", None), trained("adl", None, staleness=late))
    other = advice(trained("bp", 90.0), trained("adl", 15.0, staleness=late, optimizer="Muon"))
    assert "different optimizers" in other
    both = advice(
        trained("bp", 30.0),
        trained("adl", 60.0, staleness=late),
        trained("adl-muon", 15.0, staleness=late, optimizer="Muon"),
    )
    assert "ADL-MUON with Muon reaches the target in 0.50 of the time of BP with AdamW" in both
    assert "With the same optimizer: BP with AdamW reaches the target first" in both


def test_a_record_makes_a_section_of_the_page(tmp_path, bench_page):
    assert bench_page.section() == []
    content = made(trained("bp", 40.0), trained("adl", 20.0, staleness=(0.5, 0.0)))
    (tmp_path / "until-4cores-gpt-k4.json").write_text(json.dumps(content))
    said = "\n".join(bench_page.section())
    assert "| ADL | AdamW | 0.001 | 20.0 s | 2,000 | 2.00 | 50 | late by 0.5 |" in said
    assert "## Time to a loss" in said
