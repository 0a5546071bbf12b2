"""Two hosts: network namespaces with addresses of their own and a cable between them, joined as torchrun joins them.

Both hosts are called localhost, so that nothing is known of them by their names.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from processes import ENDLESS, ENVIRONMENT, START, free_ports, longest_pause, processes_of, wait_for

SILENCE = 6.0  # seconds
SHORT = ("--data", "synthetic", "--samples", "256", "--model", "resnet8", "--shape", "3,8,8", "--epochs", "1")
RENAMED = ("unshare", "--uts", "sh", "-c", 'echo localhost > /proc/sys/kernel/hostname && exec "$@"', "sh")
NOBODY = "02:00:00:00:00:99"  # a hardware address that no host has
SURROUNDINGS = {name: value for name, value in ENVIRONMENT.items() if name != "GLOO_SOCKET_IFNAME"}


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    namespace: str
    interface: str
    address: str
    address6: str

    def cable(self, state: str) -> None:
        ip("-n", self.namespace, "link", "set", self.interface, state)

    def misdirect(self, address: str) -> None:
        """Lose whatever is sent to an address, while the interface stays up."""
        ip("-n", self.namespace, "neigh", "replace", address, "lladdr", NOBODY, "dev", self.interface)

    def redirect(self, address: str) -> None:
        ip("-n", self.namespace, "neigh", "del", address, "dev", self.interface)

    def start(self, command: list[str], surroundings: dict[str, str], *, output: Path) -> subprocess.Popen:
        with output.with_suffix(".out").open("w") as out, output.with_suffix(".err").open("w") as err:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *RENAMED, sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**SURROUNDINGS, **surroundings},
                start_new_session=True,
            )


@dataclass
class Pair:
    """Two hosts and what was started on them."""

    hosts: list[Host]
    folder: Path | None = None
    started: list[subprocess.Popen] = field(default_factory=list)

    def torchrun(self, folder: Path, *arguments: str, silence: float = SILENCE, **surroundings: str) -> None:
        """The command as the README has it, on each host."""
        port = str(free_ports(1)[0])
        self._start(
            folder,
            [
                [
                    "-m",
                    "torch.distributed.run",
                    "--nnodes",
                    "2",
                    "--nproc-per-node",
                    "1",
                    "--node-rank",
                    str(rank),
                    "--master-addr",
                    self.hosts[0].address,
                    "--master-port",
                    port,
                    "-m",
                    "offbeat",
                    "train",
                    *arguments,
                    "-K",
                    "2",
                    "--json",
                    "--out",
                    str(folder / "run"),
                ]
                for rank in range(2)
            ],
            [{"OFFBEAT_SILENCE": str(silence), **surroundings}] * 2,
        )

    def script(self, folder: Path, text: str, arguments: list[list[str]], **surroundings: str) -> None:
        """A script on each host, with what torchrun would set."""
        group = {
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.hosts[0].address,
            "MASTER_PORT": str(free_ports(1)[0]),
            **surroundings,
        }
        self._start(folder, [["-c", text, *given] for given in arguments], [{**group, "RANK": str(r)} for r in (0, 1)])

    def _start(self, folder: Path, commands: list[list[str]], surroundings: list[dict[str, str]]) -> None:
        folder.mkdir()
        self.folder = folder
        for rank, host in enumerate(self.hosts):
            self.started[rank:] = [host.start(commands[rank], surroundings[rank], output=folder / str(rank))]

    def errors(self, rank: int) -> str:
        return (self.folder / f"{rank}.err").read_text()

    def lines(self, rank: int) -> list[str]:
        """The lines of ours on standard error."""
        return [line for line in self.errors(rank).splitlines() if line.startswith("offbeat: ")]

    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.started)

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.started]

    def end(self) -> None:
        """Whatever runs on the hosts: torchrun's workers are in sessions of their own."""
        for host in self.hosts:
            for pid in ip("netns", "pids", host.namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process in self.started:
            process.wait()

    def cut(self, how: str) -> None:
        if how == "unplugged":
            return self.hosts[1].cable("down")
        for host, other in zip(self.hosts, self.hosts[::-1]):
            host.misdirect(other.address)

    def mend(self, how: str) -> None:
        if how == "unplugged":
            return self.hosts[1].cable("up")
        for host, other in zip(self.hosts, self.hosts[::-1]):
            host.redirect(other.address)


@pytest.fixture
def pair() -> Iterator[Pair]:
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs Linux, iproute2 and unshare")
    name = f"offbeat{os.getpid()}"
    ends = enumerate("ab", start=1)
    hosts = [Host(f"{name}-{end}", f"ob{os.getpid()}{end}", f"10.77.0.{n}", f"fd77::{n}") for n, end in ends]
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


JOIN = """
import os, sys

from offbeat.engines.processes import Processes

for case in range(1, len(sys.argv), 2):
    if not os.fork():  # what was imported is imported in every case
        os.environ.update(MASTER_ADDR=sys.argv[case], MASTER_PORT=sys.argv[case + 1])
        engine = Processes(2)
        print(sys.argv[case], engine.exchange("here"), flush=True)
        engine.close()
        os._exit(0)
    os.wait()
"""


def test_hosts_whose_names_are_loopback_connect_over_the_route_to_the_master(pair, tmp_path):
    """Also where the master's name leads only to itself there, and where its address is one of IPv6."""
    for host in pair.hosts:
        ip("-n", host.namespace, "addr", "replace", f"{host.address6}/64", "dev", host.interface, "nodad")
    ports = [str(port) for port in free_ports(3)]
    cases = [("10.77.0.1", "localhost", "fd77::1"), ("10.77.0.1", "10.77.0.1", "fd77::1")]
    pair.script(tmp_path / "joined", JOIN, [[part for one in zip(masters, ports) for part in one] for masters in cases])
    assert wait_for(pair.ended, START)
    for rank, masters in enumerate(cases):
        lines = (tmp_path / "joined" / f"{rank}.out").read_text().splitlines()
        assert lines == [f"{master} ['here', 'here']" for master in masters], pair.errors(rank)


IMPATIENT = """
import sys
from datetime import timedelta

from offbeat import cli
from offbeat.core.links import network

network.CONNECTING = timedelta(seconds=0.2)
cli.main()
"""


def check_not_connected(pair: Pair, interfaces: str) -> None:
    """One line on each host, with both addresses and what to set; nothing about a folder that nobody has made."""
    for rank in range(2):
        (line,) = pair.lines(rank)
        for word in ("cannot connect", "127.0.0.1", f"interface {interfaces}", "set GLOO_SOCKET_IFNAME"):
            assert word in line
        assert str(pair.folder) not in line
    assert not (pair.folder / "run").exists()


def test_hosts_that_cannot_connect_report_addresses_and_the_variable_to_set(pair, tmp_path):
    arguments = ["train", *SHORT, "-K", "2", "--json", "--out", str(tmp_path / "alone" / "run")]
    pair.script(tmp_path / "alone", IMPATIENT, [arguments] * 2, GLOO_SOCKET_IFNAME="lo")
    assert wait_for(pair.ended, START)
    assert pair.codes() == [2, 2]
    check_not_connected(pair, "lo")


@pytest.mark.slow
def test_hosts_that_cannot_connect_all_end_within_a_minute(pair, tmp_path):
    pair.torchrun(tmp_path / "alone", *SHORT, GLOO_SOCKET_IFNAME="lo")
    assert wait_for(pair.ended, START + 60)
    assert pair.codes() == [1, 1]
    check_not_connected(pair, "lo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "seconds", "silence"),
    [
        ("lost", 15, 30),
        ("lost", 20, 30),
        ("unplugged", 22, 30),
        ("lost", 7, 10),
    ],
)
def test_a_cut_of_three_quarters_of_the_silence_does_not_end_the_run(pair, tmp_path, how, seconds, silence):
    """Messages are lost while all interfaces are up, or the cable is unplugged. TCP's own pauses double from 0.2 s: it
    would send again 6.2 and 12.6 s after a cut began."""
    with socket.socket() as fresh:
        if longest_pause(fresh) is None:
            pytest.skip("needs Linux 6.15")
    folder = tmp_path / "cut"
    pair.torchrun(folder, *ENDLESS, silence=silence)
    metrics = folder / "run" / "metrics.jsonl"
    assert wait_for(lambda: metrics.exists() or pair.ended(), START)
    pair.cut(how)
    time.sleep(seconds)
    lines = metrics.read_text().count("\n")
    pair.mend(how)
    assert wait_for(lambda: metrics.read_text().count("\n") > lines + 2 or pair.ended(), 60)
    assert not pair.ended(), [pair.lines(rank) for rank in range(2)]


@pytest.mark.slow
def test_a_cable_that_is_cut_ends_the_run_on_both_hosts_and_mended_it_runs_again(pair, tmp_path, offbeat):
    first = tmp_path / "first"
    pair.torchrun(first, *ENDLESS)
    metrics = first / "run" / "metrics.jsonl"
    assert wait_for(lambda: metrics.exists() or pair.ended(), START)
    assert not pair.ended(), pair.errors(0)

    # A short break is none: what was sent is sent again.
    pair.hosts[1].cable("down")
    time.sleep(1)
    pair.hosts[1].cable("up")
    lines = metrics.read_text().count("\n")
    assert wait_for(lambda: metrics.read_text().count("\n") > lines + 2 or pair.ended(), 60)
    assert not pair.ended(), pair.errors(0)

    pair.hosts[1].cable("down")
    began = time.monotonic()
    assert wait_for(pair.ended, SILENCE + 20), "a host waits for ever"
    assert time.monotonic() - began > SILENCE * 0.7
    for rank, process in enumerate(pair.started):
        assert process.returncode != 0
        (line,) = pair.lines(rank)
        assert f"stage {2 - rank} has not answered for {SILENCE:g} s" in line
    assert processes_of(first / "run") == {}

    pair.hosts[1].cable("up")
    second = tmp_path / "second"
    pair.torchrun(second, *SHORT)
    assert wait_for(pair.ended, START)
    assert pair.codes() == [0, 0], pair.errors(0)
    one_host = ("-K", 2, "--engine", "simulate", "--threads-per-stage", 1, "--json", "--out", "here")
    assert offbeat("train", *SHORT, *one_host).code == 0
    models = [folder / "model.safetensors" for folder in (tmp_path / "here", second / "run")]
    assert models[0].read_bytes() == models[1].read_bytes()
