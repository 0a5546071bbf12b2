"""Run a command on several hosts of this machine, joined by slow lines, as torchrun starts it on several machines.

    python benchmarks/on_hosts.py --hosts 2 --profile 100mbit-10ms -- offbeat bench -K 2 --until-loss 2.4
    python benchmarks/on_hosts.py --hosts 2 --profile 50mbit-80ms -- offbeat train -K 2 --method adl --model gpt

Every host has one process of the group and the variables of torchrun; hosts and lines are those of network_relay.py,
and need what it needs. Each process has the core of its number. The round trip and the rate of the line are measured
first and printed. The exit code is that of the first process that fails; the others are ended then.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from network_relay import DEVICE, PROFILES, CannotMakeHostsError, Hosts, ending_on_terminate, measured

from offbeat.runs.provenance import NETWORK

PORT = "29577"  # of the first host, whose ports nobody else uses
SHOWN = 0  # the host whose standard output is shown; errors of all are
GRACE = 3.0  # seconds in which processes may end after one has failed, and after a signal


def variables(rank: int, hosts: Hosts, network: str) -> dict[str, str]:
    """The environment of a process, as on machines of their own; LOCAL_RANK selects its core on this one. Records of
    the command have the network."""
    count = str(len(hosts.addresses))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": count,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": count,
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": PORT,
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        NETWORK: network,
    }


def started(hosts: Hosts, command: Sequence[str], network: str) -> list[subprocess.Popen[bytes]]:
    """The processes, one per host. `offbeat` and `python` mean those of this interpreter."""
    words = {"offbeat": [sys.executable, "-m", "offbeat"], "python": [sys.executable]}.get(command[0], [command[0]])
    search = os.pathsep.join(filter(None, [*sys.path[1:], os.environ.get("PYTHONPATH", "")]))
    return [
        subprocess.Popen(
            hosts.command(rank, *words, *command[1:]),
            stdout=None if rank == SHOWN else subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": search, **variables(rank, hosts, network)},
        )
        for rank in range(len(hosts.addresses))
    ]


def ended(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes, or for one that fails; the exit code."""
    while True:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(0.1)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let processes that still run end by themselves for a while, then end them."""
    for sent in (None, signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if sent and process.poll() is None:
                process.send_signal(sent)
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.1)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Run a command on hosts joined by slow lines, as torchrun starts it.")
    parser.add_argument("--hosts", type=int, default=2, help="processes, each on a host of its own")
    parser.add_argument("--profile", choices=[profile.name for profile in PROFILES[1:]], default="100mbit-10ms")
    parser.add_argument("command", nargs="+", help="after --: the command, the same on every host")
    given = parser.parse_args(arguments)
    if given.hosts < 2:
        parser.error(f"--hosts {given.hosts}: use at least 2")
    profile = next(profile for profile in PROFILES if profile.name == given.profile)
    try:
        with ending_on_terminate(), Hosts(given.hosts) as hosts:
            found = measured(hosts, profile)
            asked = f"{profile.rate / 1e6:,.0f} Mbit/s with a round trip of {2e3 * profile.delay:g} ms"
            network = f"{asked} (measured: {found['rate'] / 1e6:,.0f}, {1e3 * found['round_trip']:.1f})"
            print(f"{given.hosts} hosts, {profile.name}: {network}", flush=True)
            processes = started(hosts, given.command, network)
            try:
                return ended(processes)
            finally:
                end(processes)
    except CannotMakeHostsError as reason:
        print(reason, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
