"""A process that has imported what workers need, and forks a worker on request.

Importing torch takes seconds of a processor; a benchmark of K = 8 has 82 workers.

    {"spawn": {name: value}}, three files  -> {"pid": ..}   a worker with these variables, and these files as 0, 1, 2
    {"wait": pid}                          -> {"code": ..}  when it has ended

It imports and forks, nothing else, so that it has no threads. It ends when its maker does, and its workers with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from offbeat.errors import UserError
from offbeat.runs import launch

CHILD = "from offbeat.studies.bench.fork_server import serve; serve()"
MOST = 65536  # bytes of a line
GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # of somebody else


class ForkedWorker:
    """A worker, with the pipes to it, as subprocess.Popen has them."""

    def __init__(self, fork_server: ForkServer, pid: int, stdin: int, stdout: int) -> None:
        self.fork_server, self.pid = fork_server, pid
        self.code: int | None = None
        self.lock = threading.Lock()
        self.stdin = os.fdopen(stdin, "w", buffering=1)
        self.stdout = os.fdopen(stdout)

    def kill(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int | None:
        """Its exit code, when it has ended."""
        with self.lock:
            if self.code is None:
                self.code = self.fork_server.ask({"wait": self.pid})["code"]
        return self.code

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(UserError):
            self.wait()
        for pipe in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class ForkServer:
    """The same seen from its maker; started at the first worker, and once."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.socket: socket.socket | None = None
        self.lock = threading.Lock()

    def spawn(self, surroundings: dict[str, str], errors: Path, rank: int = 0) -> Any:
        """A worker with these environment variables added to ours; its standard error goes to a file. `rank`: of the
        worker, for a fork server that has several machines."""
        (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
        try:
            with errors.open("w") as file:
                pid = self.ask({"spawn": surroundings}, [its_in, its_out, file.fileno()])["pid"]
        except BaseException:
            os.close(our_in)
            os.close(our_out)
            raise
        finally:
            os.close(its_in)
            os.close(its_out)
        return ForkedWorker(self, pid, our_out, our_in)

    def ask(self, what: dict[str, Any], files: list[int] | None = None) -> dict[str, Any]:
        with self.lock:  # rows are filled by several threads
            if self.process is None:
                self.socket = self._started()
            try:
                assert self.socket is not None
                socket.send_fds(self.socket, [json.dumps(what).encode() + b"\n"], files or [])
                line = _line(self.socket)[0]
            except OSError:
                line = b""
            except BaseException:  # its answer would be taken for that to the next question
                assert self.socket is not None
                self.socket.close()
                raise
        if not line:
            raise UserError("the process that starts the workers has ended: run the benchmark again")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        surroundings = {name: value for name, value in os.environ.items() if name not in GROUP}
        surroundings |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(theirs.fileno())],
                env=surroundings,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return ours

    def close(self) -> None:
        if self.socket is not None and self.process is not None:
            self.socket.close()
            self.process.wait()


def line_of(pipe: Any) -> str:
    """The next line of a worker; empty when it has gone, or the connection to it."""
    try:
        line: str = pipe.readline()
    except OSError:
        return ""
    return line if line.endswith("\n") else ""


def _line(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One line, and the files that came with it; nothing when the other end has gone."""
    line, files = b"", list[int]()
    while not line.endswith(b"\n"):
        data, came, _, _ = socket.recv_fds(connection, MOST, 3)
        if not data:
            return b"", files
        line, files = line + data, files + list(came)
    return line, files


def serve() -> None:
    """Fork until the socket closes."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    import torch

    from offbeat.studies.bench import worker
    from offbeat.studies.bench.timing import sgd

    sgd([torch.nn.Parameter(torch.zeros(1))])  # for which torch loads as much again
    own = os.getpid()
    while True:
        line, files = _line(connection)
        if not line:
            break
        request = json.loads(line)
        if "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        else:
            pid = os.fork()
            if pid == 0:
                connection.close()
                os.setsid()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                os.environ.update(request["spawn"], **{launch.LAUNCHER: str(own)})
                worker.serve()
            answer = {"pid": pid}
        for file in files:
            os.close(file)
        try:
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:  # nobody is there any more
            break
    os._exit(0)
