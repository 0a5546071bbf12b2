"""benchmarks/network_relay.py: hosts in namespaces and lines with a rate and a delay, which are what was asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from network_relay import PROFILES, CannotMakeHostsError, Hosts, measured, why_not  # noqa: E402


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(3))
        except CannotMakeHostsError as reason:
            pytest.skip(str(reason))
        yield made


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(profile, id=profile.name, marks=[] if profile.name == "100mbit-10ms" else [pytest.mark.slow])
        for profile in PROFILES
        if profile.rate <= 1e9
    ],
)
def test_a_line_has_the_delay_and_the_rate_that_were_asked_for(hosts, profile):
    """Never faster; slower only by what a busy machine adds."""
    found = measured(hosts, profile, seconds=0.5)
    assert 2 * profile.delay <= found["round_trip"] < 2 * profile.delay + 0.02
    assert 0.5 * profile.rate < found["rate"] < 1.05 * profile.rate


def test_a_cut_line_loses_packets_and_a_mended_one_brings_what_was_sent_again(hosts):
    hosts.set(PROFILES[3])
    echo = "import socket; s = socket.create_server(('0.0.0.0', 5001)); print(flush=True); c, _ = s.accept(); \
print(c.recv(9, socket.MSG_WAITALL).decode(), flush=True)"
    send = f"import socket, sys; c = socket.create_connection(('{hosts.addresses[2]}', 5001)); c.sendall(b'one'); \
print(flush=True); sys.stdin.read(1); c.sendall(b'twotri'); sys.stdin.read()"
    with (
        subprocess.Popen(hosts.command(2, sys.executable, "-c", echo), stdout=subprocess.PIPE, text=True) as server,
        contextlib.ExitStack() as stack,
    ):
        assert server.stdout.readline() == "\n"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        client = stack.enter_context(subprocess.Popen(hosts.command(0, sys.executable, "-c", send), **pipes))
        assert client.stdout.readline() == "\n"
        lost = hosts.counters()["lost"]
        hosts.cut()
        client.stdin.write("x")
        client.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(1.0)
        assert hosts.counters()["lost"] > lost
        hosts.mend()
        assert server.stdout.readline() == "onetwotri\n"


def relays_of(maker: int) -> list[Path]:
    """Processes that a process has started to forward packets; the namespaces end with it, the devices with them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == maker and b"--relay" in (process / "cmdline").read_bytes():
                found.append(process)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_command_that_was_stopped(hosts, number):
    command = subprocess.Popen(
        [sys.executable, ROOT / "benchmarks/network_relay.py"],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's `&` ignores it
    )
    assert command.stdout.readline().startswith(b"2 hosts")
    (relay,) = relays_of(command.pid)
    command.send_signal(number)
    command.communicate(timeout=20)
    assert command.returncode == (-number if number == signal.SIGKILL else 130)
    assert wait_for(lambda: not (relay / "exe").exists(), 10)


def test_hosts_need_no_program_but_python(hosts):
    script = (
        "import network_relay; h = network_relay.Hosts(2).__enter__(); print(h.tcp()); h.__exit__(None, None, None)"
    )
    surroundings = {"PATH": "/nowhere", "PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run([sys.executable, "-c", script], env=surroundings, capture_output=True, text=True, check=False)
    assert "tcp_congestion_control" in done.stdout, done.stderr


def test_hosts_that_cannot_be_made_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = why_not()
    assert reason is not None
    assert "\n" not in reason
    with pytest.raises(CannotMakeHostsError, match=r"need (Linux|root)"):
        Hosts(2)
