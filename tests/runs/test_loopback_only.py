"""Closed by default: a run on one machine cannot be reached from another, and data cannot write where it likes."""

from __future__ import annotations

import io
import os
import socket
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from processes import listeners

from offbeat.data import cifar_files
from offbeat.errors import UserError
from offbeat.runs import launch


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's socket tables")
def test_the_look_at_the_socket_tables_sees_who_listens_where():
    with socket.socket() as open_to_all, socket.socket() as closed:
        open_to_all.bind(("0.0.0.0", 0))
        closed.bind(("127.0.0.1", 0))
        for each in (open_to_all, closed):
            each.listen()
        assert {"0.0.0.0", "127.0.0.1"} <= listeners({os.getpid()})["tcp"]
    with socket.socket(socket.AF_INET6) as sixth:
        sixth.bind(("::", 0))
        sixth.listen()
        assert "::" in listeners({os.getpid()})["tcp6"]


PROGRAM = """
import os, pathlib, signal, sys
import torch.distributed as dist
dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
pathlib.Path(sys.argv[1], f"{attempt}-{dist.get_rank()}").touch()
dist.barrier()
if attempt < 2 and dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_a_group_that_is_started_again_meets_in_a_store_of_its_own(tmp_path, monkeypatch):
    """Three attempts, the first two lose a worker; the last one ends well."""
    (tmp_path / "offbeat").mkdir()
    (tmp_path / "offbeat" / "__init__.py").touch()
    (tmp_path / "offbeat" / "__main__.py").write_text(PROGRAM)
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("RANK", "WORLD_SIZE", launch.LAUNCHER, "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # launch sets some of them: restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    launch.launch(2, [str(marks)], max_restarts=2)
    assert sorted(mark.name for mark in marks.iterdir()) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]


def archive_of(folder: Path, members: list[tarfile.TarInfo], content: bytes) -> Path:
    path = folder / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            member.size = len(content) if member.isfile() else 0
            tar.addfile(member, io.BytesIO(content) if member.isfile() else None)
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


@pytest.mark.parametrize(
    "hostile",
    [
        member("../../cifar-10-batches-bin/data_batch_1.bin"),
        member("/tmp/cifar-10-batches-bin/data_batch_1.bin"),
        member("cifar-10-batches-bin/../../evil"),
        member("cifar-10-batches-bin/data_batch_1.bin", tarfile.SYMTYPE, "/etc/passwd"),
        member("cifar-10-batches-bin/data_batch_1.bin", tarfile.LNKTYPE, "../../etc/passwd"),
        member("cifar-10-batches-bin/data_batch_1.bin", tarfile.FIFOTYPE),
        member("cifar-10-batches-bin/data_batch_1.bin", tarfile.CHRTYPE),
    ],
    ids=lambda hostile: f"{hostile.name} {hostile.type.decode()} {hostile.linkname}",
)
def test_no_path_in_an_archive_is_ever_used_as_one(hostile, tmp_path, monkeypatch):
    """Whatever an archive names, nothing is written anywhere, no link is followed, and what is missing is told."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    records = np.zeros((10_000, 3073), dtype=np.uint8).tobytes()
    archive = archive_of(inner, [hostile, member("cifar-10-batches-bin/data_batch_2.bin")], records)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="is missing"):
        list(cifar_files.read(*cifar_files.find(archive, cifar_files.CIFAR10)))
    assert sorted(tmp_path.rglob("*")) == before
    assert not (tmp_path / "evil").exists()
