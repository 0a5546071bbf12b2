"""`offbeat bench` under torchrun: worker k of a row is started by process k, on its machine and core.

The first process runs the benchmark. Every other one connects to it and starts workers on request; a worker has a
connection of its own to the first process, where a worker of the same machine has pipes:

    {"spawn": {name: value}}    -> {"pid": ..}              a worker with these variables, which connects
    {"wait": pid, "kill": bool} -> {"code": .., "errors": ..}   when it has ended: its exit code and standard error

Connections begin with a token from torch's store, so that no other program is taken for a process of the group.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from offbeat.core.links import LOOPBACK_INTERFACE
from offbeat.errors import UserError
from offbeat.runs.launch import joined_group
from offbeat.studies.bench.fork_server import ForkedWorker, ForkServer, line_of

PLACE = "offbeat-bench"  # in torch's store: port and token
PATIENCE = timedelta(minutes=30)  # until the first process has its cuts, and the others have connected
LOCAL = "127.0.0.1"


def one_machine() -> bool:
    """Whether all processes of the group are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def check(K: int, device: str) -> None:
    """Refuse a group that does not have one process per worker."""
    if not joined_group():
        return
    if int(os.environ["WORLD_SIZE"]) != K:
        n = os.environ["WORLD_SIZE"]
        raise UserError(f"K={K} in {n} processes of torchrun: every worker needs one, use K={n} or start {K} processes")
    if device != "cpu":
        raise UserError(f"device={device!r} under torchrun: workers of several processes are timed on the cpu only")


def fork_server() -> ForkServer:
    """What starts workers: a process on this machine, or under torchrun every process of the group."""
    return GroupForkServer() if joined_group() else ForkServer()


class Connection:
    """A connection between two processes, by which lines of JSON go both ways."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stdin, self.stdout = connected.makefile("w", buffering=1), connected.makefile("r")

    def send(self, what: Any) -> None:
        with suppress(OSError):  # one that has gone is noticed when its answer is read
            print(json.dumps(what), file=self.stdin, flush=True)

    def receive(self) -> Any:
        """What the other end has sent; None when it has gone."""
        line = line_of(self.stdout)
        return json.loads(line) if line else None

    def close(self) -> None:
        for each in (self.stdin, self.stdout, self.socket):
            with suppress(OSError):  # what was not sent yet, to one that has gone
                each.close()


class RemoteWorker:
    """A worker of another process, seen from the first one; as ForkedWorker."""

    def __init__(self, group: GroupForkServer, rank: int, pid: int, connection: Connection, errors: Path) -> None:
        self.group, self.rank, self.pid, self.connection, self.errors = group, rank, pid, connection, errors
        self.stdin, self.stdout = connection.stdin, connection.stdout
        self.code: int | None = None
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int | None:
        if self.code is None:
            found = self.group.ask_process(self.rank, {"wait": self.pid, "kill": self.killed})
            self.code = found["code"]
            self.errors.write_text(found["errors"])
        return self.code

    def close(self) -> None:
        self.kill()
        with suppress(UserError):  # its process has ended, and it with it
            self.wait()
        self.connection.close()


class GroupForkServer(ForkServer):
    """Starts the first worker of a row on this machine, and the others in the other processes of torchrun's group,
    which end when it is closed."""

    def __init__(self) -> None:
        from torch import distributed

        super().__init__()
        self.others: dict[int, Connection] = {}
        self.turn = threading.Lock()
        self.token = secrets.token_hex()
        self.listener = socket.create_server((LOCAL if one_machine() else "", 0))
        store, _, world = next(iter(distributed.rendezvous("env://")))
        self.store = store  # of this process, where torchrun's agent has none
        store.set(PLACE, json.dumps([self.listener.getsockname()[1], self.token]))
        self.listener.settimeout(PATIENCE.total_seconds())
        while len(self.others) < world - 1:
            connection, rank = self._accepted()
            self.others[rank] = connection

    def _accepted(self) -> tuple[Connection, int]:
        while True:
            try:
                connection = Connection(self.listener.accept()[0])
            except TimeoutError:
                raise UserError("other processes of torchrun have not connected: start the benchmark again") from None
            hello = connection.receive()
            if isinstance(hello, list) and len(hello) == 2 and hmac.compare_digest(str(hello[0]), self.token):
                return connection, hello[1]
            connection.close()

    def spawn(self, surroundings: dict[str, str], errors: Path, rank: int = 0) -> ForkedWorker | RemoteWorker:
        surroundings = {**surroundings, **group_variables()}
        if rank == 0:
            return super().spawn(surroundings, errors)
        with self.turn:
            self.others[rank].send({"spawn": surroundings})
            connection, _ = self._accepted()
            answer = self._answer(rank)
        return RemoteWorker(self, rank, answer["pid"], connection, errors)

    def ask_process(self, rank: int, what: dict[str, Any]) -> dict[str, Any]:
        with self.turn:
            self.others[rank].send(what)
            return self._answer(rank)

    def _answer(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] | None = self.others[rank].receive()
        if found is None:
            raise UserError(f"process {rank} of torchrun has ended: start the benchmark again")
        return found

    def close(self) -> None:
        super().close()
        for connection in self.others.values():
            connection.close()
        self.listener.close()


def group_variables() -> dict[str, str]:
    """The variables by which the workers of a row find each other."""
    found = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    if one_machine() and sys.platform in LOOPBACK_INTERFACE:
        found["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE[sys.platform]
    return found


def serve() -> None:
    """A process that is not the first: start workers until the first one has ended."""
    from torch import distributed

    store, rank, _ = next(iter(distributed.rendezvous("env://")))
    store.wait([PLACE], PATIENCE)
    port, token = json.loads(store.get(PLACE))
    place = (LOCAL if one_machine() else os.environ["MASTER_ADDR"], port)
    first, server = Connection(socket.create_connection(place)), ForkServer()
    first.send([token, rank])
    errors: dict[int, Path] = {}
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        while (request := first.receive()) is not None:
            if "spawn" in request:
                connection = socket.create_connection(place)
                connection.sendall(json.dumps([token, rank]).encode() + b"\n")
                path = Path(folder) / f"{len(errors)}.err"
                variables = {**request["spawn"], "LOCAL_RANK": os.environ["LOCAL_RANK"]}
                with connection, path.open("w") as file:
                    pipes = [connection.fileno(), connection.fileno(), file.fileno()]
                    pid = server.ask({"spawn": variables}, pipes)["pid"]
                errors[pid] = path
                first.send({"pid": pid})
            else:
                pid = request["wait"]
                if request["kill"]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                code = server.ask({"wait": pid})["code"]
                first.send({"code": code, "errors": errors[pid].read_text(errors="replace")[-4000:]})
        server.close()
