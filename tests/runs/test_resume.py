"""Runs that were stopped in any way go on to the very weights of one that was not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from command import Command, check_refused, train_here, weights
from preloaded import PYTHON
from processes import ENVIRONMENT, free_ports, processes_of
from selected import only
from stopped_runs import METHODS, RUN, SMALL, done, killed, recorded, start, until

from offbeat.checkpoint import begin, finish, ls
from offbeat.runs.record import lines


def resumed(run: Path, *arguments: str, code: int = 0) -> str:
    command = [PYTHON, "-m", "offbeat", "train", "--resume", str(run), "--json", *arguments]
    return done(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), code)


@pytest.mark.parametrize("name", only(("adl-hybrid", "warm-up", "int8-messages"), METHODS))
def test_a_killed_run_resumes_bit_for_bit(name, tmp_path, offbeat: Command):
    settings = [*SMALL, "-K", "3", "--checkpoint-every", "7b", *METHODS[name]]
    train_here(offbeat, *settings, "--out", tmp_path / "whole")
    killed(tmp_path / "broken", 19, *settings)
    assert [each.checkpoint.t for each in ls(tmp_path / "broken")] == [7, 14]
    train_here(offbeat, "--resume", tmp_path / "broken", "--json")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    assert recorded(tmp_path / "broken") == recorded(tmp_path / "whole"), "the records are those of one run"


def test_a_drained_checkpoint_holds_nothing_in_flight_and_resumes_bit_for_bit(tmp_path, offbeat: Command):
    settings = [*SMALL, "-K", "3", "-M", "2", "--checkpoint-every", "7b"]
    drained = ("--checkpoint-mode", "drained")
    train_here(offbeat, *settings, *drained, "--out", tmp_path / "whole")
    train_here(offbeat, *settings, "--out", tmp_path / "in flight")
    killed(tmp_path / "broken", 19, *settings, *drained)
    for run, mode, empty in (("broken", "drained", True), ("in flight", "in-flight", False)):
        for listed in ls(tmp_path / run):
            assert listed.checkpoint.mode == mode
            parts = [listed.checkpoint.stage(k) for k in (1, 2, 3)]
            held = [part["stage"][name] for part in parts for name in ("in_flight", "versions")]
            held += [part["stage"]["window"]["levels"] for part in parts]
            held += [part["worker"][name] for part in parts for name in ("messages", "buffer")]
            assert not any(held) if empty else any(held)
    train_here(offbeat, "--resume", tmp_path / "broken", "--json")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    assert weights(tmp_path / "broken") != weights(tmp_path / "in flight"), "a drain is part of the numbers"


# fields of their own in recipes of earlier versions, which had no settings
FIELDS = ("M", "weights", "window", "corrector", "m", "beta", "N", "recompute", "barrier", "conditional", "buffer")


def in_earlier_form(run: Path) -> None:
    """Rewrite the recipes of a run folder as an earlier version wrote them."""

    def flat(recipe: dict) -> dict:
        values = {**recipe, **dict.fromkeys(FIELDS), **recipe["settings"]}
        return {name: value for name, value in values.items() if name != "settings"}

    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "recipe": flat(config["recipe"])}))
    for made in [each.checkpoint for each in ls(run)]:
        folder = begin(run, made.t)
        folder.rmdir()
        content = made.run()
        made.path.rename(folder)
        finish(
            folder,
            t=made.t,
            mode=made.mode,
            K=made.K,
            method=made.method,
            run={**content, "recipe": flat(content["recipe"])},
        )


@pytest.mark.parametrize("method", ["fdg:beta=0.5,corrector=sc", "gpipe:m=2,recompute=yes"])
def test_a_run_of_an_earlier_version_resumes_bit_for_bit(method, tmp_path, offbeat: Command):
    settings = [*SMALL, "-K", "3", "--checkpoint-every", "7b", "--method", method]
    train_here(offbeat, *settings, "--out", tmp_path / "whole")
    killed(tmp_path / "broken", 19, *settings)
    in_earlier_form(tmp_path / "broken")
    assert "settings" not in ls(tmp_path / "broken")[-1].checkpoint.run()["recipe"]
    train_here(offbeat, "--resume", tmp_path / "broken", "--json")
    assert [line["exact"] for line in lines(tmp_path / "broken") if line["kind"] == "resumed"] == [True]
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    there = json.loads((tmp_path / "broken/config.json").read_text())["recipe"]
    assert there == json.loads((tmp_path / "whole/config.json").read_text())["recipe"]


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_the_run_continues(tmp_path, offbeat: Command):
    settings = [*RUN, "-K", "2", "--checkpoint-every", "5b", "-M", "2", "--weights", "hybrid"]
    train_here(offbeat, *settings, "--engine", "simulate", "--out", tmp_path / "whole")
    broken = start(tmp_path / "broken", *settings, "--engine", "processes", "--max-restarts", "2")
    until(lambda: len(ls(tmp_path / "broken")) >= 1)
    victims = [pid for pid, rank in processes_of(tmp_path / "broken").items() if rank == "1"]
    os.kill(victims[0], signal.SIGKILL)
    done(broken)
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")
    assert any(line["kind"] == "resumed" and line["batch"] > 0 for line in lines(tmp_path / "broken"))


def test_a_restart_is_printed_with_the_stage_and_its_error(tmp_path):
    settings = ["--model", "mlp", "--data", "synthetic", "--samples", "640", "-K", "2", "-M", "1", "--json"]
    broken = start(tmp_path / "broken", *settings, "--lr", "1e38", "--warmup", "0", "--max-restarts", "2")
    printed = done(broken, 2).splitlines()
    first, second, last = (line for line in printed if "uneven cuts" not in line)
    assert first.startswith("offbeat: restart 1 of 2: stage 2 failed: ")
    assert second.startswith("offbeat: restart 2 of 2: stage 2 failed: ")
    for line in (first, second, last):
        assert re.search(r"batch \d+.*stage 2 of 2.*learning rate", line), line
    assert last.startswith("offbeat: ")


@pytest.mark.parametrize("sent", only([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
@pytest.mark.parametrize("engine", only(["processes"], ["simulate", "processes"]))
def test_one_signal_saves_and_stops(engine, sent, tmp_path, offbeat: Command):
    settings = [*RUN, "--shape", "3,16,16", "-K", "2", "-M", "2"]
    train_here(offbeat, *settings, "--engine", "simulate", "--out", tmp_path / "whole")
    broken = start(tmp_path / "broken", *settings, "--engine", engine)
    until(lambda: any(line["kind"] == "train" for line in lines(tmp_path / "broken")))
    broken.send_signal(sent)
    printed = done(broken, 130)
    assert "with a checkpoint: continue with --resume" in printed, printed
    assert printed.count("\n") == 1
    assert len(ls(tmp_path / "broken")) == 1
    assert processes_of(tmp_path / "broken") == {}
    train_here(offbeat, "--resume", tmp_path / "broken", "--engine", "simulate", "--json")
    assert weights(tmp_path / "broken") == weights(tmp_path / "whole")


# The command in one of two processes, with a shorter default of the time between checkpoints.
SOON = """
from offbeat import cli
from offbeat.runs import saving

saving.UNASKED, saving.LARGEST_SHARE = 0.3, {share}
cli.main()
"""


def group(out: Path, *arguments: str, share: float = 1.0) -> list[subprocess.Popen]:
    """A run in two processes as torchrun starts them, saved every 0.3 s by default, in that share of the time."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    return [
        subprocess.Popen(
            [PYTHON, "-c", SOON.format(share=share), "train", *arguments, "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **shared, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]


def test_a_run_without_an_interval_has_a_checkpoint_when_a_worker_is_lost(tmp_path):
    lost = tmp_path / "lost"
    first, second = group(lost, *RUN, "-K", "2", "-M", "2", "--epochs", "1000")
    try:
        until(lambda: lost.exists() and ls(lost))
    finally:
        second.kill()
    assert "stage 2" in done(first, 2)
    second.communicate()
    made = [each.checkpoint.t for each in ls(lost) if each.checkpoint]
    assert 1 <= len(made) <= 3, "keep"
    resumed(lost, "--engine", "simulate", "--epochs", str(max(made) // 32 + 1))
    assert any(line["kind"] == "resumed" and line["batch"] == max(made) for line in lines(lost))


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["0", "50"])
def test_checkpoints_by_default_change_no_bit_and_keep_0_has_none(keep, tmp_path, offbeat: Command):
    settings = [*RUN, "-K", "2", "-M", "2", "--keep", keep]
    train_here(offbeat, *settings, "--engine", "simulate", "--out", tmp_path / "whole")
    for process in group(tmp_path / "saved", *settings):
        done(process)
    assert len(ls(tmp_path / "saved")) == 0 if keep == "0" else len(ls(tmp_path / "saved")) > 1
    assert weights(tmp_path / "saved") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_checkpoints_by_default_take_a_small_share_of_the_time(tmp_path):
    for process in group(tmp_path / "run", *RUN, "-K", "2", "-M", "2", "--keep", "50", share=1e-9):
        done(process)
    assert len(ls(tmp_path / "run")) == 2, "the first, and that of the end"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_checkpoints_by_the_clock_are_agreed_upon(engine, tmp_path):
    settings = [*RUN, "-K", "2", "--engine", engine, "-M", "2", "--weights", "hybrid"]
    done(start(tmp_path / "whole", *settings))
    done(start(tmp_path / "timed", *settings, "--checkpoint-every", "0.3s", "--keep", "20"))
    made = ls(tmp_path / "timed")
    assert made
    assert all(each.checkpoint for each in made)
    assert weights(tmp_path / "timed") == weights(tmp_path / "whole"), "saving changes no bit"


@pytest.mark.parametrize(
    "change",
    only([("-K", "3")], [("-K", "3"), ("-K", "1"), ("-M", "4"), ("--method", "fr"), ("--engine", "processes")]),
)
def test_a_run_resumes_with_other_stages_windows_methods_or_engines(change, tmp_path, offbeat: Command):
    run = tmp_path / "run"
    killed(run, 12, *SMALL, "-K", "2", "-M", "2", "--checkpoint-every", "9b")
    if change[0] == "--engine":
        resumed(run, *change)
    else:
        train_here(offbeat, "--resume", run, "--json", "--engine", "simulate", *change)
    kept = [line for line in lines(run) if line["kind"] in ("note", "resumed")]
    lost = [line["text"] for line in kept if line["kind"] == "note"]
    if change[0] == "--engine":
        assert not lost
    else:
        assert "in flight" in lost[0]
        assert "lost by the change" in lost[0]
    assert [line["epoch"] for line in lines(run) if line["kind"] == "epoch"] == [0, 1]
    recipe = json.loads((run / "config.json").read_text())["recipe"]
    assert str({**recipe, **recipe["settings"]}[change[0].lstrip("-")]) == change[1]
    assert (run / "config-1.json").exists()


@pytest.mark.slow
def test_a_finished_run_resumes_for_more_epochs(tmp_path, offbeat: Command):
    run = tmp_path / "run"
    train_here(offbeat, *SMALL, "-K", "2", "--checkpoint-every", "1e", "--out", run)
    check_refused(offbeat, ("train", "--resume", run), "is finished (--epochs 2)")
    train_here(offbeat, "--resume", run, "--json", "--epochs", "3")
    assert [line["epoch"] for line in lines(run) if line["kind"] == "epoch"] == [0, 1, 2]


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, offbeat: Command):
    run = tmp_path / "run"
    settings = [*SMALL, "-K", "2", "--checkpoint-every", "7b"]
    train_here(offbeat, *settings, "--out", tmp_path / "whole")
    killed(run, 23, *settings)
    newest = ls(run)[-1].path / "stage-02.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    train_here(offbeat, "--resume", run, "--json")
    assert any("is damaged and not used" in line.get("text", "") for line in lines(run))
    assert weights(run) == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_disk_that_is_full_stops_the_checkpoint_not_the_training(tmp_path):
    run = tmp_path / "run"
    settings = [*RUN, "-K", "2", "--engine", "simulate", "--checkpoint-every", "7b"]
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000)); "
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "sys.argv = ['offbeat', *sys.argv[1:]]; from offbeat.cli import main; main()"
    )
    command = [PYTHON, "-c", limited, "train", *settings, "--out", str(run)]
    done(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    assert any(line["kind"] == "checkpoint failed" and "reason" in line for line in lines(run))
    assert any(line["kind"] == "result" for line in lines(run))
    assert not ls(run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint-every", "7"], "use a number above 0 and a unit: b"),
        (["--checkpoint-every", "0e"], "use a number above 0 and a unit: b"),
        (["--checkpoint-every", "1.5b"], "integer of batches"),
        (["--checkpoint-every", "1min", "--checkpoint-mode", "drained"], "use batches (500b) or epochs (1e)"),
        (["--checkpoint-mode", "drain"], "did you mean 'drained'"),
        (["--keep", "0", "--checkpoint-every", "1e"], "--keep 0 with --checkpoint-every"),
        (["--on-nan", "stp"], "did you mean 'stop'"),
        (["--max-restarts", "-1"], "--max-restarts -1"),
        (["--resume", "nowhere"], "--resume nowhere holds no config.json"),
    ],
)
def test_misuse_is_reported_in_one_line(offbeat: Command, arguments, message, tmp_path):
    extra = [] if "--resume" in arguments else ["--dry-run", "--out", tmp_path / "x"]
    check_refused(offbeat, ("train", "--data", "digits", "--model", "resnet8", *arguments, *extra), message)


def test_rates_can_be_changed_when_a_run_resumes(tmp_path, offbeat: Command):
    run = tmp_path / "run"
    train_here(offbeat, *SMALL, "-K", "2", "--checkpoint-every", "1e", "--warmup", "0", "--out", run)
    before = [line["lr"] for line in lines(run) if line["kind"] == "train"][-1]
    train_here(offbeat, "--resume", run, "--json", "--epochs", "3", "--lr", "0.001", "--milestones", "0.9")
    after = [line["lr"] for line in lines(run) if line["kind"] == "train"][-10:]
    assert before != 0.001
    assert 0.001 in after
