"""Two hosts: network namespaces with addresses of their own and a cable between them, joined by torchrun."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import ENDLESS, ENVIRONMENT, START, free_ports, processes_of, wait_for

SILENCE = 6.0  # seconds
SHORT = ("--data", "synthetic", "--samples", "256", "--model", "resnet8", "--shape", "3,8,8", "--epochs", "1")


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    namespace: str
    interface: str
    address: str

    def cable(self, state: str) -> None:
        ip("-n", self.namespace, "link", "set", self.interface, state)


@dataclass
class Pair:
    """Two hosts and what was started on them."""

    hosts: list[Host]
    started: list[subprocess.Popen] = field(default_factory=list)

    def torchrun(self, folder: Path, *arguments: str) -> None:
        """The command as the README has it, on each host."""
        folder.mkdir()
        port = str(free_ports(1)[0])
        self.started = []
        for rank, host in enumerate(self.hosts):
            command = [
                "ip", "netns", "exec", host.namespace, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--nproc-per-node", "1", "--node-rank", str(rank), "--master-addr", self.hosts[0].address,
                "--master-port", port, "-m", "offbeat", "train", *arguments, "-K", "2", "--json",
                "--out", str(folder / "run"),
            ]  # fmt: skip
            surroundings = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": host.interface, "OFFBEAT_SILENCE": str(SILENCE)}
            with (folder / f"{rank}.out").open("w") as out, (folder / f"{rank}.err").open("w") as err:
                self.started.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=surroundings,
                                     start_new_session=True)
                )  # fmt: skip

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.started)

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def pair() -> Iterator[Pair]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs Linux and iproute2")
    name = f"offbeat{os.getpid()}"
    ends = enumerate("ab", start=1)
    hosts = [Host(f"{name}-{end}", f"ob{os.getpid()}{end}", f"10.77.0.{number}") for number, end in ends]
    made = Pair(hosts)
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
        cable = [("name", host.interface, "netns", host.namespace) for host in hosts]
        ip("link", "add", *cable[0], "type", "veth", "peer", *cable[1])
        for host in hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            ip("-n", host.namespace, "link", "set", "lo", "up")
            host.cable("up")
    except subprocess.CalledProcessError as error:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
        pytest.skip(f"cannot make network namespaces: {error.stderr.strip()}")
    yield made
    made.end()
    for host in hosts:
        ip("netns", "del", host.namespace)


@pytest.mark.slow
def test_a_cable_that_is_cut_ends_the_run_on_both_hosts_and_mended_it_runs_again(pair, tmp_path, offbeat):
    first = tmp_path / "first"
    pair.torchrun(first, *ENDLESS)
    metrics = first / "run" / "metrics.jsonl"
    assert wait_for(lambda: metrics.exists() or pair.ended(), START)
    assert not pair.ended(), (first / "0.err").read_text()

    # A short break is none: what was sent is sent again.
    pair.hosts[1].cable("down")
    time.sleep(1)
    pair.hosts[1].cable("up")
    lines = metrics.read_text().count("\n")
    assert wait_for(lambda: metrics.read_text().count("\n") > lines + 2 or pair.ended(), 60)
    assert not pair.ended(), (first / "0.err").read_text()

    pair.hosts[1].cable("down")
    began = time.monotonic()
    assert wait_for(pair.ended, SILENCE + 20), "a host waits for ever"
    assert time.monotonic() - began > SILENCE * 0.7
    for rank, process in enumerate(pair.started):
        assert process.returncode != 0
        said = [line for line in (first / f"{rank}.err").read_text().splitlines() if line.startswith("offbeat: ")]
        assert len(said) == 1, said
        assert f"stage {2 - rank} has not answered for {SILENCE:g} s" in said[0]
    assert processes_of(first / "run") == {}

    pair.hosts[1].cable("up")
    second = tmp_path / "second"
    pair.torchrun(second, *SHORT)
    assert wait_for(pair.ended, START)
    assert [process.returncode for process in pair.started] == [0, 0], (second / "0.err").read_text()
    one_host = ("-K", 2, "--engine", "simulate", "--threads-per-stage", 1, "--json", "--out", "here")
    assert offbeat("train", *SHORT, *one_host).code == 0
    models = [folder / "model.safetensors" for folder in (tmp_path / "here", second / "run")]
    assert models[0].read_bytes() == models[1].read_bytes()
