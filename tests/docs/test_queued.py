"""benchmarks/queued.py runs commands side by side, within a time limit, and continues them."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest
from preloaded import PYTHON

ROOT = Path(__file__).parent.parent.parent
SHORT = "train --model mlp --data digits --epochs 1 --method bp"


def queued(tmp_path: Path, commands: str, *more: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "commands").write_text(commands)
    command = [PYTHON, "benchmarks/queued.py", tmp_path / "commands", "--out", tmp_path / "out", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_commands_run_once_and_a_failure_is_reported(tmp_path):
    given = f"# a comment\nfirst {SHORT}\nwrong train --model nothing\n"
    done = queued(tmp_path, given, "--at-once", "2", "--cores", "0")
    assert done.returncode == 1
    assert "1 of 2 done, 0 not started" in done.stdout
    assert "wrong, exit code 2: offbeat: unknown model 'nothing'" in done.stdout
    assert (tmp_path / "out/first/metrics.jsonl").exists()
    written = (tmp_path / "out/first.log").stat().st_size
    again = queued(tmp_path, f"first {SHORT}\n")
    assert (again.returncode, (tmp_path / "out/first.log").stat().st_size) == (0, written)


def test_commands_that_run_too_long_are_interrupted_and_saved(tmp_path):
    given = "long train --model mlp --data digits --epochs 100000 --method bp\nlater train --model mlp --data digits\n"
    done = queued(tmp_path, given, "--at-once", "1", "--minutes", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 2 done, 1 not started, 0 s left" in done.stdout
    assert "stopped by Ctrl-C" in (tmp_path / "out/long.log").read_text()


def test_the_archive_has_the_records_and_logs_of_all_commands(tmp_path):
    queued(tmp_path, f"first {SHORT}\nsecond {SHORT} --seed 1\n", "--archive", str(tmp_path / "all.tar.gz"))
    with tarfile.open(tmp_path / "all.tar.gz") as archive:
        archive.extractall(tmp_path / "copy", filter="data")
    for name in ("first", "second"):
        for file in (f"{name}.log", f"{name}.done", f"{name}/metrics.jsonl", f"{name}/config.json"):
            assert (tmp_path / "copy" / file).read_bytes() == (tmp_path / "out" / file).read_bytes(), file
    assert not [*tmp_path.glob("copy/**/*.safetensors"), *tmp_path.glob("*.part")]


@pytest.mark.parametrize(
    ("commands", "more", "message"),
    [
        ("", (), "has no commands"),
        ("name\n", (), "line 1 of"),
        ("a train\na train\n", (), "line 2 of"),
        ("a train --out x\n", (), "leave out --out"),
        ("a train\n", ("--cores", "x"), "--cores x: give numbers and ranges"),
        ("a train\n", ("--cores", "900"), "--cores 900: this process may use"),
        ("a train\n", ("--at-once", "0"), "--at-once 0"),
        ("a train\n", ("--share", "0"), "--share 0: give a percentage"),
        ("a train\n", ("--archive", "nowhere/all.tar.gz"), "its folder does not exist"),
    ],
)
def test_misuse_gets_one_line(tmp_path, commands, more, message):
    done = queued(tmp_path, commands, *more)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
