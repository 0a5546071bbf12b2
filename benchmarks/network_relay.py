"""Hosts on one machine: network namespaces, joined by lines of a given rate and delay that can be cut.

    python benchmarks/network_relay.py              measure round trip and throughput of every profile

Each host is a namespace with a TUN device. One process, the relay, reads the packets that leave the hosts and writes
each to the host of its address when it would arrive: packets of one line leave one after the other at the rate of the
line, and arrive after the delay. The queue before a line holds whatever TCP sends, so a line loses nothing unless it is
cut; then it loses everything. The devices offer segmentation offload: a read returns up to 64 KiB of segments of 1,448
bytes, so TCP's windows are those of Ethernet and the relay handles some thousands of packets per second.

Needs Linux, root and /dev/net/tun, no other program; uses addresses of its own namespaces alone. A namespace has no
name: it is there as long as a process has it open, so nothing is left of a process that was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

DEVICE = "ob0"
NETWORK = "10.213.77"
LOOPBACK = "loopback"
TCP_SETTINGS = ("tcp_congestion_control", "tcp_slow_start_after_idle")  # of the machine; hosts have the same
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x1, 0x1000, 0x4000
OFFLOADS = 0x1 | 0x2 | 0x4  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFTXQLEN = 0x8913, 0x8914, 0x8916, 0x891C, 0x8943
IFF_UP = 0x1
CLONE_NEWNET = 0x40000000
NAMESPACE = "/proc/thread-self/ns/net"
PR_SET_TIMERSLACK = 29
HEADER = 10  # bytes of virtio's header in front of a packet
DESTINATION = HEADER + 19  # last byte of the destination address in an IPv4 header
LARGEST = HEADER + 65536
READS = 64  # packets read from a device before packets that are due are written
BUFFERED = 1 << 27  # bytes in the relay, after which it reads no more


@dataclass(frozen=True)
class Profile:
    """A line between every two hosts: bits per second and seconds, each way."""

    name: str
    rate: float
    delay: float


PROFILES = (
    Profile(LOOPBACK, float("inf"), 0.0),
    Profile("10gbit-0.1ms", 10e9, 0.1e-3),
    Profile("1gbit-1ms", 1e9, 1e-3),
    Profile("200mbit-20ms", 200e6, 20e-3),
    Profile("100mbit-10ms", 100e6, 10e-3),
    Profile("50mbit-80ms", 50e6, 80e-3),
)


# ---- the relay, a process of its own


@dataclass
class Relay:
    """Forwards packets between devices. Commands are lines of JSON on standard input, answered on standard output:

    {"rate": bits per second, "delay": seconds}     of all lines from now on
    {"cut": true}                                   lose every packet, until {"cut": false}
    {"counters": null}                              no change

    The answer is the bytes and packets forwarded, those lost in cuts, and the processor time of the relay.
    """

    devices: list[int]
    rate: float = float("inf")
    delay: float = 0.0
    cut: bool = False
    free: dict[tuple[int, int], float] = field(default_factory=dict)  # when a line has sent what it holds
    queue: list[tuple[float, int, int, bytes]] = field(default_factory=list)  # arrival, number, device, packet
    held: int = 0  # bytes in the queue
    bytes: int = 0
    packets: int = 0
    lost: int = 0

    def run(self) -> None:
        number = {device: place for place, device in enumerate(self.devices)}
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        while True:
            wait = None if not self.queue else max(0.0, self.queue[0][0] - time.monotonic())
            devices = self.devices if self.held < BUFFERED else []
            ready, _, _ = select.select([0, *devices], [], [], wait)
            for descriptor in ready:
                if descriptor == 0:
                    if not self._command():
                        return
                else:
                    self._read(descriptor, number[descriptor])
            self._write()

    def _command(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        command = json.loads(line)
        self.rate, self.delay = command.get("rate", self.rate), command.get("delay", self.delay)
        self.cut = command.get("cut", self.cut)
        counters = {
            "bytes": self.bytes,
            "packets": self.packets,
            "lost": self.lost,
            "processor_seconds": time.process_time(),
        }
        print(json.dumps(counters), flush=True)
        return True

    def _read(self, device: int, source: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(READS):
                packet = os.read(device, LARGEST)
                if packet[HEADER] >> 4 != 4:
                    continue
                target = packet[DESTINATION] - 1
                if not 0 <= target < len(self.devices):
                    continue
                if self.cut:
                    self.lost += 1
                    continue
                line = (source, target)
                leaves = max(time.monotonic(), self.free.get(line, 0.0)) + 8 * (len(packet) - HEADER) / self.rate
                self.free[line] = leaves
                heapq.heappush(self.queue, (leaves + self.delay, self.packets, target, packet))
                self.packets += 1
                self.held += len(packet)

    def _write(self) -> None:
        queue, now = self.queue, time.monotonic()
        while queue and queue[0][0] <= now:
            _, _, target, packet = heapq.heappop(queue)
            self.held -= len(packet)
            if self.cut:
                self.lost += 1
                continue
            with contextlib.suppress(OSError):  # a device that is full or down loses the packet
                os.write(self.devices[target], packet)
                self.bytes += len(packet) - HEADER


# ---- the hosts


class CannotMakeHostsError(Exception):
    """Namespaces or devices cannot be made here; the reason in one line."""


def why_not() -> str | None:
    """The reason why no hosts can be made here, or None."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root: run this command as root (with sudo)"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun is missing: load the kernel module tun"
    return None


class Hosts:
    """Some hosts with lines between them; a context manager that removes them.

    cores       those of the relay; empty: any
    addresses   of the hosts
    profile     of the lines, as last set
    """

    def __init__(self, count: int, *, cores: Sequence[int] = ()) -> None:
        if reason := why_not():
            raise CannotMakeHostsError(reason)
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]
        self.cores, self.namespaces = cores, list[int]()
        self.relay: subprocess.Popen[str] | None = None
        self.profile = PROFILES[0]

    def __enter__(self) -> Hosts:
        devices: list[int] = []
        try:
            for address in self.addresses:
                with _new_namespace() as namespace:
                    self.namespaces.append(namespace)
                    devices.append(_device(address))
            self.relay = subprocess.Popen(
                [sys.executable, __file__, "--relay", *map(str, devices)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=devices,
                start_new_session=True,  # Ctrl-C is for the process that removes the hosts
            )
            if self.cores:
                os.sched_setaffinity(self.relay.pid, self.cores)
            self.counters()
        except BaseException:
            self._remove()
            raise
        finally:
            for device in devices:
                os.close(device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        if self.relay is not None:
            with self.relay:  # closes its standard input, which ends it
                pass
        while self.namespaces:
            os.close(self.namespaces.pop())

    def command(self, number: int, *words: str) -> list[str]:
        """A command line on a host, counted from 0."""
        return [sys.executable, __file__, "--in", f"/proc/{os.getpid()}/fd/{self.namespaces[number]}", *words]

    def tcp(self) -> dict[str, str]:
        """The settings of TCP in the hosts on which the time of a message depends."""
        read = "import sys; [print(open(path).read(), end='') for path in sys.argv[1:]]"
        files = [f"/proc/sys/net/ipv4/{name}" for name in TCP_SETTINGS]
        command = self.command(0, sys.executable, "-c", read, *files)
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return dict(zip(TCP_SETTINGS, found.split(), strict=True))

    def set(self, profile: Profile) -> None:
        self.profile = profile
        self._ask(rate=profile.rate, delay=profile.delay)

    def cut(self) -> None:
        self._ask(cut=True)

    def mend(self) -> None:
        self._ask(cut=False)

    def counters(self) -> dict[str, Any]:
        """Bytes and packets forwarded so far, packets lost, and processor seconds of the relay."""
        return self._ask(counters=None)

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self.relay is not None
        assert self.relay.stdin is not None
        assert self.relay.stdout is not None
        self.relay.stdin.write(json.dumps(command) + "\n")
        self.relay.stdin.flush()
        answer = self.relay.stdout.readline()
        if not answer:
            raise CannotMakeHostsError(f"the relay has ended with exit code {self.relay.wait()}")
        found: dict[str, Any] = json.loads(answer)
        return found


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise CannotMakeHostsError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


@contextlib.contextmanager
def _new_namespace() -> Iterator[int]:
    """A network namespace, in which this thread is within the block; its descriptor stays open."""
    libc, here = ctypes.CDLL(None, use_errno=True), os.open(NAMESPACE, os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET):
            raise CannotMakeHostsError(f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}")
        try:
            yield os.open(NAMESPACE, os.O_RDONLY)
        finally:
            _enter(here)
    finally:
        os.close(here)


def _device(address: str) -> int:
    """A TUN device with this address in the namespace of this thread; its descriptor works from any."""
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        wanted = struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR)
        fcntl.ioctl(device, TUNSETIFF, wanted)
        fcntl.ioctl(device, TUNSETOFFLOAD, OFFLOADS)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for command, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, "255.255.255.0")):
                internet = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(control, command, struct.pack("16s24s", DEVICE.encode(), internet))
            fcntl.ioctl(control, SIOCSIFTXQLEN, struct.pack("16si20x", DEVICE.encode(), 10000))
            for name in (DEVICE, "lo"):
                found = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16s24x", name.encode()))
                (flags,) = struct.unpack_from("H", found, 16)
                fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags | IFF_UP))
    except OSError as error:
        raise CannotMakeHostsError(f"cannot make a TUN device: {error}") from error
    return device


@contextlib.contextmanager
def ending_on_terminate() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does, so that hosts are removed."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- what a profile gives

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print(flush=True)
while True:
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(1 << 20)
    while (kind := connection.recv(1)):
        if kind == b"e":
            connection.sendall(b"e")
        else:
            left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            while left:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            connection.sendall(b"e")
"""
PROBE = """
import json, socket, statistics, sys, time
host, seconds, rate = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
connection = socket.create_connection((host, 5000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(20):
    began = time.perf_counter()
    connection.sendall(b"e")
    connection.recv(1)
    trips.append(time.perf_counter() - began)
def bulk(count):
    began = time.perf_counter()
    connection.sendall(b"b" + count.to_bytes(8, "little"))
    left, block = count, bytes(1 << 20)
    while left:
        connection.sendall(block[:left])
        left -= min(left, len(block))
    connection.recv(1)
    return time.perf_counter() - began
count = int(min(rate, 4e9) * seconds / 8)
bulk(count // 2)  # until TCP's window has grown
found = count / (bulk(count) - statistics.median(trips))  # the last trip is no part of the transfer
print(json.dumps({"round_trip": statistics.median(trips), "rate": 8 * found}))
"""


def measured(hosts: Hosts, profile: Profile, *, seconds: float = 1.0) -> dict[str, float]:
    """Round trip in seconds and throughput in bits per second of one TCP connection between the first two hosts."""
    hosts.set(profile)
    with subprocess.Popen(
        hosts.command(0, sys.executable, "-c", ECHO, hosts.addresses[0]), stdout=subprocess.PIPE
    ) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            probe = hosts.command(1, sys.executable, "-c", PROBE, hosts.addresses[0], str(seconds), str(profile.rate))
            done = subprocess.run(probe, stdout=subprocess.PIPE, check=True, text=True)
        finally:
            server.kill()
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--relay"]:
        with contextlib.suppress(OSError):
            os.nice(-10)  # its packets are to be in time
        Relay([int(device) for device in arguments[1:]]).run()
        return
    if arguments[:1] == ["--in"]:  # a namespace
        _enter(os.open(arguments[1], os.O_RDONLY))
        os.execvp(arguments[2], arguments[2:])
    try:
        with ending_on_terminate(), Hosts(2) as hosts:
            print(f"2 hosts, {', '.join(f'{name} {value}' for name, value in hosts.tcp().items())}", flush=True)
            for profile in PROFILES[1:]:
                before = hosts.counters()["processor_seconds"]
                found = measured(hosts, profile)
                used = hosts.counters()["processor_seconds"] - before
                asked = f"asked {profile.rate / 1e6:6,.0f} Mbit/s, round trip {2e3 * profile.delay:5.1f} ms"
                got = f"measured {found['rate'] / 1e6:6,.0f} Mbit/s, {1e3 * found['round_trip']:6.2f} ms"
                print(f"{profile.name:14s} {asked}; {got}; the relay used {used:.2f} s of a core", flush=True)
    except CannotMakeHostsError as reason:
        sys.exit(str(reason))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
