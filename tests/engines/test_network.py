"""The network below the links: where gloo listens, and how its connections are set up."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
from processes import ENVIRONMENT, START, longest_pause, two_processes

from offbeat.core.links.network import descriptors, interfaces, local_address, shorten_retransmission

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up on Linux alone")


@pytest.fixture
def connection() -> socket.socket:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as made:
        if longest_pause(made) is None:
            pytest.skip("needs Linux 6.15")
        yield made


def test_the_loopback_interface_is_known_by_its_address_and_leads_nowhere_else():
    assert interfaces()["127.0.0.1"] == "lo"
    assert local_address("127.0.0.1") == local_address("localhost") == "127.0.0.1"
    assert local_address("no-such-host.invalid") == ""


@pytest.mark.parametrize(("silence", "pause"), [(1, 1.0), (40, 5.0), (100_000, 120.0), (float("inf"), 120.0)])
def test_connections_send_again_after_an_eighth_of_the_silence(connection, silence, pause):
    reading, writing = os.pipe()
    with socket.socket(socket.AF_UNIX) as other:
        shorten_retransmission([reading, writing, other.fileno(), connection.fileno(), 10**6], silence)
    assert longest_pause(connection) == 1000 * pause
    os.close(reading)
    os.close(writing)
    assert connection.fileno() in descriptors()


LISTENING = """
import ctypes, os, socket

CLONE_NEWUTS, CLONE_NEWUSER = 0x04000000, 0x10000000
if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWUTS):
    os._exit(77)  # no host name of its own
socket.sethostname("127.0.0.2")

import torch
import torch.distributed as dist
from processes import listeners, longest_pause

from offbeat.engines.processes import Processes
from offbeat.errors import UserError
from offbeat.core.links.network import descriptors

before = descriptors()
engine = Processes(2, silence=16)
print(sorted(listeners({os.getpid()})["tcp"]))
pauses = []
for descriptor in descriptors() - before:
    try:
        with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as one:
            one.getpeername()
            pauses.append(longest_pause(one))
    except OSError:
        pass
print(sorted(set(pauses)))
if engine.rank == 0:
    dist.broadcast(torch.tensor([2**34 + 1]), 0, group=engine.collectives)
else:
    try:
        engine.share(None, 1)
    except UserError as error:
        print(error)
engine.close()
Processes(2).close()
print("again", flush=True)
"""


@pytest.fixture(scope="module", params=["2", ""], ids=["torchrun", "without LOCAL_WORLD_SIZE"])
def printed(request) -> list[list[str]]:
    """By two processes of one machine, whose name is that of another of its addresses."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    surroundings = {**ENVIRONMENT, "PYTHONPATH": path, "LOCAL_WORLD_SIZE": request.param}
    del surroundings["GLOO_SOCKET_IFNAME"]
    with two_processes(LISTENING, surroundings=surroundings) as started:
        ended = [process.communicate(timeout=START) for process in started]
        if all(process.returncode == 77 for process in started):
            pytest.skip("cannot make a host name of its own (unshare)")
        assert [process.returncode for process in started] == [0, 0], ended
        return [out.splitlines() for out, _ in ended]


def test_processes_of_one_machine_listen_on_loopback_under_any_host_name(printed):
    assert [lines[0] for lines in printed] == ["['127.0.0.1']"] * 2


def test_the_connections_of_a_group_send_again_after_an_eighth_of_the_silence(printed, connection):
    assert [lines[1] for lines in printed] == ["[2000]"] * 2


def test_no_memory_is_taken_for_a_shared_value_beyond_the_limits(printed):
    assert printed[1][2] == f"malformed message: {2**34 + 1} bytes announced"


def test_a_group_can_follow_another_in_the_same_processes(printed):
    assert [lines[-1] for lines in printed] == ["again"] * 2
