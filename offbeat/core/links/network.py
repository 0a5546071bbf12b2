"""The network between machines: the interface that gloo's links use, and how soon TCP retransmits after a cut.

gloo listens at the address of the interface in GLOO_SOCKET_IFNAME; without one, at the address of the host name, which
many systems resolve to 127.0.0.1, where no other machine can connect.
"""

from __future__ import annotations

import array
import ipaddress
import os
import re
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from offbeat.errors import StageLost, first_line

INTERFACE = "GLOO_SOCKET_IFNAME"
CONNECTING = timedelta(seconds=8)  # per connection; gloo waits five times as long for the other end
SIOCGIFCONF, IFREQ = 0x8912, struct.Struct("16s2x2x4s16x")  # Linux: addresses of interfaces, and an entry of its answer
TCP_RTO_MAX_MS = 44  # Linux 6.15 and later


def connect(store: dist.Store, rank: int, K: int, *, patience: timedelta) -> dist.ProcessGroupGloo:
    """Choose the interface of this process, unless the user has, and connect all processes to each other once.

    Every process calls this; `patience` is how long to wait for all of them. Returns the group of this trial, to be
    kept until all others have theirs. Raises StageLost within a minute in each process that cannot connect to another.
    """
    route = local_address(os.environ["MASTER_ADDR"])
    elsewhere = [address for address in _exchange(store, "route", route, rank, K, patience) if not is_local(address)]
    if is_local(route) and elsewhere:  # the store is on this machine: use the route to another
        route = local_address(elsewhere[0])
    if INTERFACE not in os.environ and route in interfaces():
        os.environ[INTERFACE] = interfaces()[route]
    tried = _exchange(store, "address", _gloo_address(), rank, K, patience)
    try:
        return dist.ProcessGroupGloo(dist.PrefixStore("trial", store), rank, K, timeout=CONNECTING)
    except RuntimeError as error:
        reason = re.sub(r"\[[^]]*/[^]]*\] ", "", first_line(error))  # without gloo's file names
        others = ", ".join(dict.fromkeys(tried[:rank] + tried[rank + 1 :]))
        raise StageLost(
            f"the {K} processes cannot connect to each other: this one listens at {tried[rank]}, the others at "
            f"{others}; set {INTERFACE} on every machine to the interface that leads to the others ({reason})"
        ) from error


def _exchange(store: dist.Store, key: str, value: str, rank: int, K: int, patience: timedelta) -> list[str]:
    """The values of all processes, by rank."""
    keys = [f"{key}/{other}" for other in range(K)]
    store.set(keys[rank], value)
    store.wait(keys, patience)
    return [store.get(each).decode() for each in keys]


def local_address(host: str) -> str:
    """The address of this machine on the route to a host; "" without a route.

    >>> local_address("127.0.0.1")
    '127.0.0.1'
    """
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a datagram socket chooses the route and sends nothing
                return str(probe.getsockname()[0])
    return ""


def is_local(address: str) -> bool:
    """Whether an address is only for connections within this machine."""
    return not address or ipaddress.ip_address(address).is_loopback


def interfaces() -> dict[str, str]:
    """The names of this machine's interfaces by address on Linux; empty on other systems."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    entries = array.array("B", bytes(IFREQ.size * 1024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("iP", len(entries), entries.buffer_info()[0])
        (length,) = struct.unpack_from("i", fcntl.ioctl(asking, SIOCGIFCONF, request))
    for name, address in IFREQ.iter_unpack(entries[:length]):
        found[socket.inet_ntoa(address)] = name.partition(b"\0")[0].decode()
    with suppress(OSError):  # missing without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return found


def _gloo_address() -> str:
    """Where gloo will listen, as far as that is known."""
    name = os.environ.get(INTERFACE)
    if name is None:
        with suppress(OSError):
            return f"{socket.gethostbyname(socket.gethostname())} (its host name)"
        return "no address (its host name has none)"
    address = next((address for address, its in interfaces().items() if its == name), "no address")
    return f"{address} (interface {name})"


def descriptors() -> set[int]:
    """The open file descriptors of this process, where the system lists them."""
    listed = Path("/proc/self/fd")
    return {int(entry.name) for entry in listed.iterdir()} if listed.exists() else set()


def shorten_retransmission(opened: Iterable[int], silence: float) -> None:
    """Make TCP connections among these descriptors retransmit at least every `silence` / 8 seconds.

    TCP doubles its timeouts, so that a link that was cut for 20 s may be silent for 40. The timeout is not shorter:
    some of the kernel's timers give up after 15 of them; heartbeats are to decide. Needs Linux 6.15 or later.
    """
    timeout = int(1000 * min(max(silence / 8, 1), 120))  # milliseconds, in the range that the kernel accepts
    for descriptor in opened:
        with suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, timeout)
