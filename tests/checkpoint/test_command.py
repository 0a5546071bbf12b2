"""The commands checkpoint and export: what they say, and one line with exit code 2 where there is nothing to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from command import check_refused
from safetensors.torch import load_file, save_file

from offbeat import checkpoint as checkpoints


def write(run, t: int, value: float = 1.0) -> checkpoints.Checkpoint:
    folder = checkpoints.begin(run, t)
    parts = [
        {"model": {"0.weight": torch.full((2, 3), value), "0.running": torch.ones(2)}, "counters": {"t": t}},
        {"model": {"1.weight": torch.full((3, 4), value).T, "tied": torch.ones(2)}},
    ]
    facts = [
        each
        for k, tree in enumerate(parts, 1)
        for each in checkpoints.write_part(folder, checkpoints.part_name(k), tree)
    ]
    return checkpoints.finish(folder, facts, t=t, mode="in-flight", K=2, method="adl", run={"epoch": 3})


def damage(made: checkpoints.Checkpoint) -> None:
    file = made.path / "stage-02.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def test_ls_has_a_line_for_each(offbeat, tmp_path):
    write(tmp_path / "run", 5)
    made = write(tmp_path / "run", 10)
    printed = offbeat("checkpoint", "ls", "run")
    assert (printed.code, printed.err) == (0, "")
    assert [line.split()[0] for line in printed.out.splitlines()] == ["000000005", "000000010"]
    assert "in-flight  adl K=2" in printed.out
    listed = json.loads(offbeat("checkpoint", "ls", "run", "--json").out)
    assert [each["t"] for each in listed] == [5, 10]
    assert listed[1]["bytes"] == made.size
    assert offbeat("checkpoint", "ls", "run/checkpoints").out == printed.out


def test_show_prints_what_a_checkpoint_holds(offbeat, tmp_path):
    made = write(tmp_path / "run", 10)
    printed = offbeat("checkpoint", "show", "run")
    assert printed.code == 0
    assert "stage 1: 2 tensors" in printed.out
    assert "counters" in printed.out
    assert offbeat("checkpoint", "show", made.path).out.count("\n") == 3
    content = json.loads(offbeat("checkpoint", "show", made.path, "--json").out)
    assert content["run"] == {"epoch": 3}
    assert [stage["tensors"] for stage in content["stages"]] == [2, 2]
    assert content["stages"][0]["keys"] == {"model": 32, "counters": 0}


def test_verify_reads_every_byte_and_fails_in_one_line(offbeat, tmp_path):
    write(tmp_path / "run", 5)
    damage(write(tmp_path / "run", 10))
    printed = offbeat("checkpoint", "verify", "run")
    assert printed.code == 2
    assert printed.err == "offbeat: 1 of 2 checkpoints damaged (000000010): use another\n"
    assert "000000005  sound: 6 files" in printed.out
    assert "000000010  damaged: run/checkpoints/000000010/stage-02.safetensors does not have the bytes" in printed.out
    assert offbeat("checkpoint", "verify", "run/checkpoints/000000005").code == 0
    content = json.loads(offbeat("checkpoint", "verify", "run", "--json").out)
    assert [len(each["problems"]) for each in content] == [0, 1]


def test_export_writes_the_plain_model_of_the_newest_sound_checkpoint(offbeat, tmp_path):
    write(tmp_path / "run", 5, value=5.0)
    damage(write(tmp_path / "run", 10, value=10.0))
    printed = offbeat("export", "run", "plain.safetensors")
    assert printed.code == 0
    assert "4 tensors" in printed.out
    assert "checkpoint 000000010 is damaged" in printed.err
    held = load_file("plain.safetensors")
    assert set(held) == {"0.weight", "0.running", "1.weight", "tied"}
    assert torch.equal(held["1.weight"], torch.full((4, 3), 5.0))
    assert offbeat("export", "run/checkpoints/000000005", "one.safetensors", "--json").code == 0
    assert torch.equal(load_file("one.safetensors")["0.weight"], torch.full((2, 3), 5.0))
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".part")]


def test_export_takes_the_model_of_a_finished_run_unless_a_checkpoint_is_newer(offbeat, tmp_path):
    made = write(tmp_path / "run", 5, value=5.0)
    save_file({"0.weight": torch.full((2,), 7.0)}, "run/model.safetensors")
    assert offbeat("export", "run").code == 0
    assert torch.equal(load_file("model.safetensors")["0.weight"], torch.full((2,), 7.0))
    later = (made.path / "manifest.json").stat().st_mtime + 100
    os.utime(made.path / "manifest.json", (later, later))
    assert offbeat("export", "run", "later.safetensors").code == 0
    assert torch.equal(load_file("later.safetensors")["0.weight"], torch.full((2, 3), 5.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("checkpoint", "ls", "nowhere"), ["nowhere", "is not a folder"]),
        (("checkpoint", "ls", "empty"), ["empty", "holds no checkpoint"]),
        (("checkpoint", "show", "empty"), ["holds no checkpoint"]),
        (("checkpoint", "show", "bad"), ["bad holds no sound checkpoint", "000000005 is damaged"]),
        (("checkpoint", "show", "bad/checkpoints/000000005"), ["manifest.json"]),
        (("checkpoint", "verify", "file"), ["is not a folder"]),
        (("checkpoint", "verify"), ["DIR"]),
        (("checkpoint", "burn", "run"), ["burn"]),
        (("export", "nowhere", "x.safetensors"), ["nowhere", "neither"]),
        (("export", "bad", "x.safetensors"), ["no sound checkpoint"]),
        (("export", "run", "run/stored.safetensors"), ["exists already"]),
        (("export", "run", "no/such/x.safetensors"), ["is not a folder"]),
        (("export", "torn", "x.safetensors"), ["model.safetensors is not a complete safetensors file"]),
        (("export", "file", "x.safetensors"), ["neither"]),
        (("export", "run", "m.pt"), ["m.pt", "is written as safetensors", "m.safetensors"]),
        (("export", "run", "m"), ["m.safetensors"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_reported_in_one_line(offbeat, tmp_path, arguments, words):
    write(tmp_path / "run", 5)
    (write(tmp_path / "bad", 5).path / "manifest.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"12345678")
    (tmp_path / "file").touch()
    (tmp_path / "run" / "stored.safetensors").touch()
    check_refused(offbeat, arguments, *words)


def test_looking_at_checkpoints_needs_no_torch(tmp_path):
    write(tmp_path / "run", 5)
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom pathlib import Path\n"
        "from offbeat.checkpoint.show import show_list, show_one, show_verified\n"
        "for show in (show_list, show_one, show_verified): show(Path(sys.argv[1]), as_json=False)"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("000000005") == 3
