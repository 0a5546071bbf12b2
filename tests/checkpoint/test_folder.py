"""Checkpoint folders: complete or absent; whatever was changed in one is found before a tensor of it is used."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from disks import fill, small_disk
from preloaded import PYTHON
from safetensors.torch import load_file
from sync_calls import Recorded
from trees import same

from offbeat import checkpoint as checkpoints
from offbeat.checkpoint import CheckpointDamaged, CheckpointFailed, FileFacts
from offbeat.checkpoint.files import write_file

MUTATIONS = 500


def tree(seed: int, k: int) -> dict:
    draw = torch.Generator().manual_seed(1000 * seed + k)
    weight = torch.randn(8, 3, 3, 3, generator=draw).to(memory_format=torch.channels_last)
    return {
        "model": {f"{k}.weight": weight, f"{k}.count": torch.tensor(seed)},
        "optimizer": {f"{k}.weight": {"momentum_buffer": torch.randn(8, 3, 3, 3, generator=draw), "step": seed}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "names": [f"{k}.weight"]}],
        "scheduler": None,
        "in_flight": [{"t": seed, "input": torch.zeros(4, 6, dtype=torch.bfloat16), "loss": float("nan")}],
        "gradient": torch.tensor(2.0).expand(1),
        "versions": {3: {f"{k}.weight": weight}},
    }


def write(run: Path, t: int, K: int = 2, seed: int | None = None) -> checkpoints.Checkpoint:
    folder = checkpoints.begin(run, t)
    facts = []
    for k in range(1, K + 1):
        facts += checkpoints.write_part(folder, checkpoints.part_name(k), tree(t if seed is None else seed, k))
    progress = {"epoch": 1, "position": t}
    return checkpoints.finish(folder, facts, t=t, mode="in-flight", K=K, method="adl", run=progress)


def test_what_is_written_is_what_is_found(tmp_path):
    write(tmp_path, 500)
    found, notes = checkpoints.newest(tmp_path)
    assert found is not None
    assert notes == []
    assert (found.path, found.t, found.mode, found.K, found.method) == (
        tmp_path / "checkpoints" / "000000500",
        500,
        "in-flight",
        2,
        "adl",
    )
    assert found.run() == {"epoch": 1, "position": 500}
    assert found.size == sum(path.stat().st_size for path in found.path.iterdir() if path.name != "manifest.json")
    for k in (1, 2):
        assert same(found.stage(k), tree(500, k))
    assert sorted(path.name for path in found.path.iterdir()) == [
        "manifest.json",
        "run.json",
        "stage-01.json",
        "stage-01.safetensors",
        "stage-02.json",
        "stage-02.safetensors",
    ]


@pytest.mark.parametrize("again", [False, True], ids=["first", "replaced"])
def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, again):
    """Else a machine that loses its power could keep the name and lose what it names."""
    if again:
        write(tmp_path, 500, seed=1)
    calls = Recorded(monkeypatch)
    made = write(tmp_path, 500)
    part = made.path.with_name("000000500.part")
    for facts in made.files:
        calls.check_order(("fsync", part / facts.name), ("fsync", part / "manifest.json"), ("rename", made.path))
        assert calls.bytes[part / facts.name] == facts.size, "all of it"
    calls.check_order(
        ("fsync", part / "manifest.json"), ("fsync", part), ("rename", made.path), ("fsync", made.path.parent)
    )
    assert calls.bytes[part / "manifest.json"] == (made.path / "manifest.json").stat().st_size
    assert calls.before[made.path] == part


def test_any_program_can_read_the_tensors(tmp_path):
    made = write(tmp_path, 500)
    held = load_file(made.path / "stage-01.safetensors")
    assert torch.equal(held["model/1.weight"], tree(500, 1)["model"]["1.weight"])
    assert held["in_flight/0/input"].dtype == torch.bfloat16


def test_stages_may_write_their_parts_in_any_process_and_order(tmp_path):
    folder = checkpoints.begin(tmp_path, 7)

    def part(k: int) -> list[dict]:
        checkpoints.begin(tmp_path, 7)
        return [facts.as_dict() for facts in checkpoints.write_part(folder, checkpoints.part_name(k), tree(7, k))]

    with ThreadPoolExecutor(4) as pool:
        reported = [facts for part in pool.map(part, (4, 2, 1, 3)) for facts in part]
    made = checkpoints.finish(folder, reported, t=7, mode="drained", K=4, method="bp", run={})
    assert checkpoints.verify(made.path) == []
    assert all(same(made.stage(k), tree(7, k)) for k in (1, 2, 3, 4))


def test_facts_can_be_read_from_the_files(tmp_path):
    folder = checkpoints.begin(tmp_path, 7)
    checkpoints.write_part(folder, "stage-01", tree(7, 1))
    assert same(checkpoints.finish(folder, t=7, mode="drained", K=1, method="bp", run={}).stage(1), tree(7, 1))


def test_a_missing_or_different_part_fails_the_checkpoint_and_leaves_nothing(tmp_path):
    for damage in ("missing", "differs", "untold"):
        folder = checkpoints.begin(tmp_path, 7)
        facts = checkpoints.write_part(folder, "stage-01", tree(7, 1))
        if damage != "missing":
            facts += checkpoints.write_part(folder, "stage-02", tree(7, 2))
        if damage == "differs":
            (folder / "stage-02.json").write_text("{}")
        with pytest.raises(CheckpointFailed, match="stage-02"):
            checkpoints.finish(
                folder, facts[:2] if damage == "untold" else facts, t=7, mode="drained", K=2, method="bp", run={}
            )
        assert list((tmp_path / "checkpoints").iterdir()) == []


def test_an_unfinished_checkpoint_is_none_and_is_cleaned_away(tmp_path):
    write(tmp_path, 5)
    folder = checkpoints.begin(tmp_path, 10)
    checkpoints.write_part(folder, "stage-01", tree(10, 1))
    assert checkpoints.newest(tmp_path)[0].t == 5
    assert [listed.path.name for listed in checkpoints.ls(tmp_path)] == ["000000005"]
    assert checkpoints.clean(tmp_path) == [folder]
    assert not folder.exists()
    assert checkpoints.clean(tmp_path) == []


def test_files_of_an_interrupted_attempt_do_not_get_into_the_next_one(tmp_path):
    folder = checkpoints.begin(tmp_path, 10)
    for k in (1, 2, 3):
        checkpoints.write_part(folder, checkpoints.part_name(k), tree(9, k))
    (folder / "manifest.json").write_text("{")
    made = write(tmp_path, 10)
    assert checkpoints.verify(made.path) == []
    assert same(made.stage(1), tree(10, 1))


def test_a_checkpoint_is_replaced_by_a_later_one_with_the_same_index(tmp_path):
    first = write(tmp_path, 10, seed=1)
    write(tmp_path, 10, seed=2)
    assert same(checkpoints.newest(tmp_path)[0].stage(1), tree(2, 1))
    first.path.rename(first.path.with_name("000000010.old.part"))  # as between the two renames
    assert checkpoints.newest(tmp_path)[0] is None
    assert checkpoints.clean(tmp_path) == []
    assert same(checkpoints.newest(tmp_path)[0].stage(1), tree(2, 1))


def test_the_newest_few_are_kept_and_folders_that_are_none_do_not_count(tmp_path):
    for t in (1, 2, 3, 4, 5):
        write(tmp_path, t)
    (tmp_path / "checkpoints" / "000000004" / "manifest.json").unlink()
    (tmp_path / "checkpoints" / "000000001" / "manifest.json").unlink()
    gone = checkpoints.prune(tmp_path, 2)
    assert sorted(path.name for path in gone) == ["000000001", "000000002"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000000003", "000000004", "000000005"]
    with pytest.raises(ValueError, match="1 or more"):
        checkpoints.prune(tmp_path, 0)


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert checkpoints.newest(tmp_path) == (None, [])
    assert checkpoints.ls(tmp_path / "nowhere") == []
    assert checkpoints.clean(tmp_path) == []


# ---- damage


def flip(files: list[Path], draw: random.Random) -> None:
    path = draw.choice(files)
    raw = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 5))):
        raw[draw.randrange(len(raw))] ^= draw.randrange(1, 256)
    path.write_bytes(raw)


def flip_in_header(files: list[Path], draw: random.Random) -> None:
    path = draw.choice([file for file in files if file.suffix == ".safetensors"])
    raw = bytearray(path.read_bytes())
    raw[draw.randrange(8 + int.from_bytes(raw[:8], "little"))] ^= 1 << draw.randrange(8)
    path.write_bytes(raw)


def truncate(files: list[Path], draw: random.Random) -> None:
    path = draw.choice(files)
    os.truncate(path, draw.randrange(path.stat().st_size))


def extend(files: list[Path], draw: random.Random) -> None:
    with draw.choice(files).open("ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 100)))


def swap(files: list[Path], draw: random.Random) -> None:
    one, other = draw.sample(files, 2)
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def delete(files: list[Path], draw: random.Random) -> None:
    draw.choice(files).unlink()


def zero(files: list[Path], draw: random.Random) -> None:
    path = draw.choice(files)
    raw = bytearray(path.read_bytes())
    start = draw.randrange(len(raw))
    end = min(len(raw), start + draw.choice((1, 16, 512, 4096)))
    raw[start:end] = bytes(end - start)
    path.write_bytes(raw)


def borrow(files: list[Path], draw: random.Random) -> None:
    """The file of the checkpoint before."""
    path = draw.choice(files)
    shutil.copy(path.parent.with_name("000000500") / path.name, path)


def add(files: list[Path], draw: random.Random) -> None:
    (files[0].parent / f"stage-{draw.randrange(3, 9):02d}.json").write_text("{}")


DAMAGE: list[Callable[[list[Path], random.Random], None]] = [
    flip,
    flip_in_header,
    truncate,
    extend,
    swap,
    delete,
    zero,
    borrow,
    add,
]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_500_mutations_are_all_found_before_any_tensor_is_returned(tmp_path, monkeypatch):
    """Verification says so, the checkpoint before is used instead, and a reader who does not verify is refused too."""
    write(tmp_path, 500)
    sound = write(tmp_path, 1000)
    spare = tmp_path / "spare"
    shutil.copytree(sound.path, spare)
    original = contents(spare)
    made: list[str] = []
    monkeypatch.setattr("offbeat.checkpoint.parts.read_tensors", lambda *_: made.append("tensors") or {})
    draw = random.Random(5)
    kinds = {damage.__name__: 0 for damage in DAMAGE}
    while sum(kinds.values()) < MUTATIONS:
        damage = draw.choice(DAMAGE)
        damage(sorted(sound.path.iterdir()), draw)
        if contents(sound.path) == original:  # zeros over zeros
            continue
        kinds[damage.__name__] += 1
        assert checkpoints.verify(sound.path), damage
        found, notes = checkpoints.newest(tmp_path)
        assert found.t == 500, damage
        assert len(notes) == 1
        assert notes[0].startswith("checkpoint 000001000 is damaged and not used: ")
        changed = {name.partition(".")[0] for name, raw in original.items() if contents(sound.path).get(name) != raw}
        for k in (1, 2):
            if checkpoints.part_name(k) in changed:
                with pytest.raises(CheckpointDamaged):
                    sound.stage(k)  # by the manifest as it was
        shutil.rmtree(sound.path)
        shutil.copytree(spare, sound.path)
    assert made == []
    assert min(kinds.values()) > 20, kinds
    assert checkpoints.verify(sound.path) == []


def test_every_single_byte_of_a_manifest_matters(tmp_path):
    made = write(tmp_path, 3, K=1)
    file = made.path / "manifest.json"
    raw = file.read_bytes()
    for position in range(len(raw)):
        file.write_bytes(raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :])
        with pytest.raises(CheckpointDamaged):
            checkpoints.read(made.path)


def test_a_checkpoint_under_the_name_of_another_is_damaged(tmp_path):
    made = write(tmp_path, 3)
    other = made.path.rename(made.path.with_name("000000004"))
    assert "belongs to checkpoint 000000003" in checkpoints.verify(other)[0]


def forge(path: Path, **changes: object) -> None:
    """A manifest that lies with a right hash."""
    from offbeat.checkpoint.folder import render

    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    files = {each["name"]: each for each in manifest["files"]}
    for name in files:
        if (path / name).exists():
            files[name] = checkpoints.files.measure(path / name).as_dict()
    (path / "manifest.json").write_bytes(render({**manifest, "files": list(files.values()), **changes}))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("stage-01.safetensors", b""),
        ("stage-01.safetensors", (1 << 62).to_bytes(8, "little") + b"{}"),
        ("stage-01.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("stage-01.safetensors", (2).to_bytes(8, "little") + b"{}"),
        ("stage-01.json", b"NaN"),
        ("stage-01.json", b"[" * 100_000),
        ("stage-01.json", b'{"format": 1, "part": "stage-01", "tree": ["tensor", "nothing"]}'),
        ("stage-01.json", b'{"format": 1, "part": "stage-02", "tree": null}'),
        ("run.json", b"[1]"),
        ("run.json", b"{"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_files_with_a_right_hash_and_a_wrong_content_are_found_too(tmp_path, file, content):
    made = write(tmp_path, 3)
    (made.path / file).write_bytes(content)
    forge(made.path)
    problems = checkpoints.verify(made.path)
    assert problems
    assert file.partition(".")[0] in problems[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": "1"},
        {"t": -3},
        {"t": "3"},
        {"K": 3},
        {"K": 1},
        {"mode": "other"},
        {"files": None},
        {"files": [{"name": "../../etc/passwd", "size": 1, "sha256": ""}]},
        {"files": [{"name": "/x.json"}]},
    ],
    ids=str,
)
def test_manifests_that_lie_are_refused(tmp_path, changes):
    made = write(tmp_path, 3)
    forge(made.path, **changes)
    assert checkpoints.verify(made.path)


# ---- full disks


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1 << 16) as folder:
        yield folder


def test_a_full_disk_stops_the_checkpoint_and_leaves_the_one_before(disk):
    write(disk, 1)
    big = {"model": {"w": torch.zeros(40_000)}}
    folder = checkpoints.begin(disk, 2)
    with pytest.raises(CheckpointFailed, match=r"stage-01.safetensors \(No space left on device\): free some space"):
        checkpoints.write_part(folder, "stage-01", big)
    assert list(folder.iterdir()) == []
    checkpoints.abandon(folder)
    assert checkpoints.newest(disk)[0].t == 1
    assert checkpoints.newest(disk)[1] == []
    write(disk, 3, K=1)  # there is room again
    assert checkpoints.newest(disk)[0].t == 3


@pytest.mark.parametrize("left", range(0, 12_000, 1000))
def test_a_disk_that_fills_up_anywhere_never_leaves_a_partial_checkpoint(disk, left):
    fill(disk, left)
    reported = None
    try:
        write(disk, 1, K=1)
    except CheckpointFailed as error:
        reported = str(error)
    checkpoints.clean(disk)
    assert [checkpoints.verify(listed.path) for listed in checkpoints.ls(disk)] == ([[]] if reported is None else [])
    assert reported is None or "No space left" in reported


def test_a_file_size_limit_fails_the_checkpoint(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointFailed, match="File too large"):
            write_file(tmp_path / "x", [bytes(10_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_written_to_fails_the_checkpoint(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointFailed, match="check the folder"):
        checkpoints.begin(tmp_path, 1)


KILLED = """
import sys, torch
from pathlib import Path
from offbeat import checkpoint as checkpoints
run = Path(sys.argv[1])
print("ready", flush=True)
for t in range(1, 100000):
    folder = checkpoints.begin(run, t)
    tree = {"model": {"w": torch.full((50_000,), float(t))}}
    facts = [each for k in (1, 2) for each in checkpoints.write_part(folder, checkpoints.part_name(k), tree)]
    checkpoints.finish(folder, facts, t=t, mode="drained", K=2, method="bp", run={"t": t})
    checkpoints.prune(run, 2)
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_a_sound_checkpoint(tmp_path):
    draw = random.Random(3)
    for attempt in range(3):
        run = tmp_path / str(attempt)
        run.mkdir()
        writer = subprocess.Popen([PYTHON, "-c", KILLED, str(run)], stdout=subprocess.PIPE)
        assert writer.stdout.readline()
        while checkpoints.newest(run)[0] is None:
            assert writer.poll() is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            writer.wait(draw.uniform(0, 0.2))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        found, notes = checkpoints.newest(run)
        assert notes == []
        assert torch.equal(found.stage(2)["model"]["w"], torch.full((50_000,), float(found.t)))
        checkpoints.clean(run)
        assert {path.name for path in (run / "checkpoints").iterdir()} <= {f"{found.t - back:09d}" for back in range(3)}


def test_facts_travel_as_plain_values():
    facts = FileFacts("a.json", 3, "00")
    assert FileFacts.of(facts.as_dict()) == facts
