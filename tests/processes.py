"""Runs by the real command, looked at from outside: their processes, and how they end."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from preloaded import PYTHON

from offbeat.core.links.network import TCP_RTO_MAX_MS
from offbeat.runs.rendezvous import LOOPBACK, loopback_store

START = 90  # seconds until a run must have begun to train, on a busy machine
STOP = 20  # seconds for "within seconds", on a busy machine
Completed = subprocess.CompletedProcess
ENDLESS = ("--data", "synthetic", "--model", "resnet8", "--shape", "3,8,8", "--epochs", "100000", "-M", "2")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# Training by the command, whose first argument is the batch ahead of which the process kills itself.
KILLED = """
import os, signal, sys
from offbeat import cli
from offbeat.pipeline.local_stages import LocalStages

batch, step = int(sys.argv.pop(1)), LocalStages.step


def last(self, *given):
    if self.batches == batch:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *given)


LocalStages.step = last
cli.main()
"""
# A process that holds a folder, as a run does that is about to begin.
HOLDER = """
import sys
from pathlib import Path
from offbeat.runs import lock
with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def processes_of(out: Path) -> dict[int, str]:
    """Live processes of a run, told by its folder on their command line, with their rank ('' for the launcher)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.fsencode(out) not in (entry / "cmdline").read_bytes().split(b"\0"):
                continue
            surroundings = dict(pair.partition(b"=")[::2] for pair in (entry / "environ").read_bytes().split(b"\0"))
            if alive(int(entry.name)):
                found[int(entry.name)] = surroundings.get(b"RANK", b"").decode()
        except OSError:  # gone meanwhile
            continue
    return found


def alive(pid: int) -> bool:
    """Whether a process has not ended; one that has may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stopped(pid: int) -> bool:
    """Whether all threads of a process have stopped: each ends its system call first, which may write."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) <= {"T", "t", "Z"}


LISTENING = "0A"


def readable(text: str) -> str:
    """An address from the kernel's hexadecimal words in the machine's byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def listeners(pids: set[int]) -> dict[str, set[str]]:
    """Addresses on which processes listen, by the kernel's tables: tcp, tcp6."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found: dict[str, set[str]] = {"tcp": set(), "tcp6": set()}
    for table, addresses in found.items():
        file = Path("/proc/net") / table
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                addresses.add(readable(fields[1].partition(":")[0]))
    return found


def wait_for(condition: Callable[[], object], seconds: float, *, every: float = 0.1) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


class Run:
    """A run by the real command, in a session of its own."""

    def __init__(self, out: Path, *arguments: object, **surroundings: str) -> None:
        self.out = out
        self.streams = [out.with_suffix(suffix) for suffix in (".stdout", ".stderr")]
        command = [PYTHON, "-m", "offbeat", "train", *arguments, "--out", out]
        with self.streams[0].open("w") as stdout, self.streams[1].open("w") as stderr:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**ENVIRONMENT, "TMPDIR": str(out.parent), **surroundings},
                start_new_session=True,
            )

    def begin(self) -> None:
        """Wait until it trains."""
        trains = self.out / "metrics.jsonl"
        begun = wait_for(lambda: trains.exists() or self.process.poll() is not None, START)
        assert begun, "the run did not begin"
        assert self.process.poll() is None, self.stderr

    def worker(self, rank: int) -> int:
        (pid,) = (pid for pid, its in processes_of(self.out).items() if its == str(rank))
        return pid

    @property
    def stderr(self) -> str:
        return self.streams[1].read_text()

    def end(self) -> Ended:
        """How it ends from now on, by itself within the time allowed; then nothing of it is left in any case."""
        began = time.monotonic()
        try:
            code = self.process.wait(STOP + 10)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - began
        wait_for(lambda: not processes_of(self.out), 5)
        left = processes_of(self.out)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        metrics = self.out / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return Ended(code, seconds, self.streams[0].read_text(), self.stderr, lines, left, self.out)


@dataclass(frozen=True)
class Ended:
    code: int | None
    seconds: float
    stdout: str
    stderr: str
    lines: list[dict]
    left: dict[int, str]
    out: Path


def check_stopped(ended: Ended, *words: str, code: int = 2, kind: str = "failed") -> None:
    """One line with these words, that exit code, in time, the folder kept with a line about it, nobody left."""
    assert ended.code == code, ended
    assert ended.seconds < STOP
    assert ended.stdout == ""
    assert ended.stderr.startswith("offbeat: ")
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.count("records so far") == 1
    for word in (*words, str(ended.out)):
        assert word in ended.stderr
    assert ended.left == {}
    assert (ended.out / "config.json").exists()
    assert not (ended.out / "model.safetensors").exists()
    assert any(line["kind"] == "train" for line in ended.lines) or kind == "failed"
    assert ended.lines[-1]["kind"] == kind
    if kind == "failed":
        assert all(word in ended.lines[-1]["reason"] for word in words)


@contextmanager
def two_processes(script: str, *, surroundings: dict[str, str] = ENVIRONMENT) -> Iterator[list[subprocess.Popen]]:
    """A script in two processes, as torchrun starts them on one machine, with a store that outlives both."""
    _store, port = loopback_store()
    group = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    started = [
        subprocess.Popen(
            [PYTHON, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**group, **surroundings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def last_line(process: subprocess.Popen, seconds: float = START) -> str:
    """Of standard error, when it has ended, within that time."""
    return process.communicate(timeout=seconds)[1].strip().splitlines()[-1]


def longest_pause(connection: socket.socket) -> int | None:
    """The longest pause of TCP's retransmission in milliseconds; None on Linux before 6.15."""
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
    except OSError:
        return None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on. Below those that the system hands out by itself, which it might hand out again
    before they are used."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1_000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # somebody does
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} free ports")


def group(folders: list[Path], *arguments: object, program: tuple[str, ...] = ("-m", "offbeat")) -> list[Completed]:
    """The command in as many processes as there are folders, each in its own, as members of a group that it did not
    start itself, as under torchrun."""
    command = [PYTHON, *program, *map(str, arguments)]
    shared = {"WORLD_SIZE": str(len(folders)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}

    def member(rank: int) -> Completed:
        surroundings = {**ENVIRONMENT, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return subprocess.run(
            command,
            cwd=folders[rank],
            capture_output=True,
            text=True,
            timeout=2 * START,
            check=False,
            env=surroundings,
            stdin=subprocess.DEVNULL,
        )

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(member, range(len(folders))))


@contextmanager
def another_process(folder: Path) -> Iterator[subprocess.Popen]:
    """One that holds the folder, as a run does that is about to begin."""
    command = [PYTHON, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()
