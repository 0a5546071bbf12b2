"""Two machines that share no folder: torchrun agents with working directories of their own, and a relative --out.

Stages that do not see the run folder send their parts of a checkpoint to the first process, and get them from there.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command import Command, weights
from disks import small_disk, taken
from preloaded import PYTHON
from processes import ENVIRONMENT, free_ports, group

from offbeat import checkpoint as checkpoints
from offbeat.runs.record import lines

LIMIT = 200  # seconds; a run that hangs, not one that is slow
SMALL = (
    "--model",
    "resnet8",
    "--data",
    "synthetic",
    "--samples",
    "256",
    "--shape",
    "3,8,8",
    "--batch-size",
    "8",
    "-M",
    "2",
    "--threads-per-stage",
    "1",
)


def torchrun(disks: list[Path], *arguments: object) -> list[subprocess.CompletedProcess]:
    """The command on as many machines as there are disks, a stage each, in the folder of its disk."""
    (port,) = free_ports(1)

    def agent(node: int) -> subprocess.CompletedProcess:
        command = [
            PYTHON,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            len(disks),
            "--node-rank",
            node,
            "--nproc-per-node",
            1,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
            "-m",
            "offbeat",
            "train",
            *arguments,
            "--json",
        ]
        disks[node].mkdir(exist_ok=True)
        scratch = disks[node].with_name(f"{disks[node].name}-tmp")
        scratch.mkdir(exist_ok=True)
        return subprocess.run(
            [str(part) for part in command],
            cwd=disks[node],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
            env={**ENVIRONMENT, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
        )

    with ThreadPoolExecutor(len(disks)) as pool:
        return list(pool.map(agent, range(len(disks))))


def succeeded(all_done: list[subprocess.CompletedProcess]) -> None:
    for done in all_done:
        assert done.returncode == 0, done.stderr[-3000:]
        ours = [line for line in done.stderr.splitlines() if line.startswith("offbeat: ") or "Traceback" in line]
        assert ours == [], done.stderr


def untouched(disk: Path) -> None:
    """Nothing of a run is on that machine, nor was left in its temporary folder."""
    assert list(disk.iterdir()) == []
    scratch = disk.with_name(f"{disk.name}-tmp")
    assert [path.name for path in scratch.iterdir() if path.name.startswith("offbeat")] == []


def members(disks: list[Path], *arguments: object) -> list[subprocess.CompletedProcess]:
    """The same without torchrun, which takes longer to start."""
    for disk in disks:
        disk.mkdir(exist_ok=True)
        disk.with_name(f"{disk.name}-tmp").mkdir(exist_ok=True)
    return group(disks, "train", *arguments, "--json")


@pytest.mark.parametrize("start", [members, pytest.param(torchrun, marks=pytest.mark.slow)])
def test_checkpoints_without_a_shared_folder_are_whole_and_resume(start, tmp_path, offbeat: Command):
    disks = [tmp_path / "a", tmp_path / "b"]
    schedule = ("--checkpoint-every", "7b", "--milestones", "0.5")
    succeeded(start(disks, *SMALL, "-K", 2, "--epochs", 1, *schedule, "--out", "run"))
    run = disks[0] / "run"
    assert [line["batch"] for line in lines(run) if line["kind"] == "checkpoint"] == [7, 14, 21, 28]
    assert not [line for line in lines(run) if line["kind"] == "checkpoint failed"]
    assert [checkpoints.verify(each.path) for each in checkpoints.ls(run)] == [[], [], []]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["000000014", "000000021", "000000028"]
    untouched(disks[1])

    alone = ("-K", 2, "--engine", "simulate", "--json")
    assert offbeat("train", *SMALL, *alone, "--epochs", 1, *schedule, "--out", "whole").code == 0
    assert weights(run) == weights(tmp_path / "whole")
    for t in (14, 21, 28):
        mine, theirs = (checkpoints.read(path / "checkpoints" / f"{t:09d}") for path in (run, tmp_path / "whole"))
        assert mine.facts["stage-02.safetensors"] == theirs.facts["stage-02.safetensors"]

    succeeded(start(disks, "--resume", "run", "--epochs", 2))
    assert offbeat("train", "--resume", "whole", "--epochs", 2, "--json").code == 0
    assert weights(run) == weights(tmp_path / "whole")
    assert [line["batch"] for line in lines(run) if line["kind"] == "resumed"] == [28]
    untouched(disks[1])


@pytest.mark.slow
def test_replicas_without_a_shared_folder_save_and_resume(tmp_path, offbeat: Command):
    disks = [tmp_path / name for name in "abcd"]
    settings = (*SMALL, "-K", 2, "--replicas", 2, "-M", 2, "--checkpoint-every", "4b")
    succeeded(members(disks, *settings, "--epochs", 1, "--out", "run"))
    run = disks[0] / "run"
    assert [checkpoints.verify(each.path) for each in checkpoints.ls(run)] == [[], [], []]
    assert offbeat("train", *settings, "--epochs", 1, "--engine", "simulate", "--json", "--out", "whole").code == 0
    succeeded(members(disks, "--resume", "run", "--epochs", 2))
    assert offbeat("train", "--resume", "whole", "--epochs", 2, "--engine", "simulate", "--json").code == 0
    assert weights(run) == weights(tmp_path / "whole")
    for disk in disks[1:]:
        untouched(disk)


@pytest.mark.slow
def test_a_run_without_checkpoints_needs_no_shared_folder(tmp_path, offbeat: Command):
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    settings = ("train", *SMALL, "-K", 2, "--epochs", 1)
    done = group(disks, *settings, "--out", "run")
    assert [each.returncode for each in done] == [0, 0], done
    assert "do not see run send their parts of checkpoints to stage 1: stage 2" in done[0].stderr
    assert list(disks[1].iterdir()) == []
    assert offbeat(*settings, "--engine", "simulate", "--json", "--out", "whole").code == 0
    assert weights(disks[0] / "run") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_on_separate_disks_resumes_with_more_stages(tmp_path):
    disks = [tmp_path / name for name in "abc"]
    settings = (*SMALL, "--epochs", 1, "--checkpoint-every", "7b")
    succeeded(torchrun(disks[:2], *settings, "-K", 2, "--out", "run"))
    succeeded(torchrun(disks, "--resume", "run", "-K", 3, "--epochs", 2))
    run = disks[0] / "run"
    assert [checkpoints.verify(each.path) for each in checkpoints.ls(run)] == [[], [], []]
    assert checkpoints.ls(run)[-1].checkpoint.K == 3
    assert any("lost by the change" in line["text"] for line in lines(run) if line["kind"] == "note")
    for disk in disks[1:]:
        untouched(disk)


# Parts in pieces of 512 bytes: more of them than links hold.
IN_PIECES = "from offbeat import cli; from offbeat.runs import transfer; transfer.CHUNK = 512; cli.main()"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["adl", "gpipe", "dgl-async"])
def test_parts_of_many_pieces_hold_no_stage_up_for_ever(method, tmp_path, offbeat: Command):
    disks = [tmp_path / name for name in "abc"]
    for disk in disks:
        disk.mkdir()
    given = (
        "train",
        *(part for part in SMALL if part not in ("-M", "2")),
        "--method",
        method,
        "-K",
        3,
        "--epochs",
        1,
        "--checkpoint-every",
        "7b",
        "--json",
    )
    done = group(disks, *given, "--out", "run", program=("-c", IN_PIECES))
    assert [each.returncode for each in done] == [0, 0, 0], done
    assert offbeat(*given, "--engine", "simulate", "--out", "whole").code == 0
    assert weights(disks[0] / "run") == weights(tmp_path / "whole")
    assert [checkpoints.verify(each.path) for each in checkpoints.ls(disks[0] / "run")] == [[], [], []]


@pytest.mark.slow
def test_a_full_disk_of_the_first_machine_fails_checkpoints_not_the_run(tmp_path, offbeat: Command):
    settings = ("train", *SMALL, "-K", 2, "--epochs", 1, "--checkpoint-every", "7b", "--json")
    assert offbeat(*settings, "--engine", "simulate", "--out", "whole").code == 0
    checkpoint = max(taken(each.path) for each in checkpoints.ls(tmp_path / "whole"))
    away = tmp_path / "b"
    away.mkdir()
    with small_disk(tmp_path / "a", int(1.5 * checkpoint)) as disk:
        done = group([disk, away], *settings, "--out", "run")
        assert [(each.returncode, each.stderr) for each in done] == [(0, ""), (0, "")]
        assert weights(disk / "run") == weights(tmp_path / "whole")
        assert any(line["kind"] == "checkpoint failed" for line in lines(disk / "run"))
        assert [checkpoints.verify(each.path) for each in checkpoints.ls(disk / "run")] == [[]]
