"""Python processes that are forked from one that has imported torch, for tests that start many of them.

Importing torch, and what its optimizers import, takes 3 seconds of a processor. `subprocess` starts a command whose
first part is `PYTHON` by forking a process that has done so, the server. All else is as for other commands: arguments,
environment, folder, files, session, cores, parent, exit. In a process started in this way `sys.executable` is PYTHON,
so that the processes it starts are forked too.

With OFFBEAT_TESTS_EXEC=1 in the environment (`make slow`) PYTHON is the interpreter, and nothing is forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import inspect
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXEC = sys.platform != "linux" or bool(os.environ.get("OFFBEAT_TESTS_EXEC"))
INTERPRETER = sys.executable  # which tests may replace by PYTHON
PYTHON = INTERPRETER if EXEC else "python-with-torch"
SET_CHILD_SUBREAPER = 36  # of prctl
TITLE = 16384  # bytes for the arguments of a process in /proc
MOST_FILES = 16

_exec_child = subprocess.Popen._execute_child
_lock = threading.Lock()
_server: socket.socket | None = None  # the connection to it
_started: subprocess.Popen | None = None


def install() -> None:
    """Have `subprocess` fork commands that begin with PYTHON."""
    subprocess.Popen._execute_child = _execute_child


def close() -> None:
    """Stop the server."""
    global _server, _started
    if _server is not None and _started is not None:
        _server.close()
        _started.wait()
        _server = _started = None


def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others) -> None:
    variables, command = _without_env(args)
    if EXEC or not command or command[0] != PYTHON:
        return _exec_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
    _, _, _, stdin, _, _, stdout, _, stderr, *_, new_session, _ = others
    files = [number if file == -1 else file for number, file in enumerate((stdin, stdout, stderr))]
    request = {
        "arguments": [os.fspath(part) for part in command[1:]],
        "folder": os.fspath(cwd or Path.cwd()),
        "environment": {**(os.environ if env is None else env), **variables},
        "new session": bool(new_session),
        "cores": sorted(os.sched_getaffinity(0)),
        "numbers": [0, 1, 2, *pass_fds],
    }
    self.pid = _ask(request, [*files, *pass_fds])
    self._child_created = True
    self._close_pipe_fds(*others[3:9])


def _without_env(args: Any) -> tuple[dict[str, str], list[Any]]:
    """Variables that env(1) sets at the beginning of a command, and the rest of the command."""
    parts = list(args) if isinstance(args, list | tuple) else []
    variables: dict[str, str] = {}
    if parts and parts[0] == "env":
        parts.pop(0)
        while parts and "=" in str(parts[0]):
            name, _, value = str(parts.pop(0)).partition("=")
            variables[name] = value
    return variables, parts


def _ask(request: dict[str, Any], files: list[int]) -> int:
    """The id of a new process, which is a child of this one."""
    global _server
    with _lock:
        if _server is None:
            _server = _start_server()
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        text = json.dumps(request).encode()
        socket.send_fds(_server, [len(text).to_bytes(8, "big")], files)
        _server.sendall(text)
        return int.from_bytes(_receive(_server, 8), "big")


def _start_server() -> socket.socket:
    global _started
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with theirs:
        _started = subprocess.Popen(
            [INTERPRETER, __file__, str(theirs.fileno()), " " * TITLE],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    return ours


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise EOFError("the server of forked processes has ended")
        data += more
    return data


# ---- the server, and the processes that it becomes


def serve(connection: socket.socket) -> Callable[[], None]:
    """Fork for every request, until the other end closes. Returns in the forked processes, what they are to do."""
    assert len(os.listdir("/proc/self/task")) == 1, "a process that forks must have one thread"
    while True:
        head, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
        if not head:
            os._exit(0)
        request = json.loads(_receive(connection, int.from_bytes(head, "big")))
        ours, theirs = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            forked = os.fork()
            if forked:
                os.write(theirs, forked.to_bytes(8, "big"))
                os._exit(0)
            for file in (ours, theirs, connection.detach()):
                os.close(file)
            while os.getppid() == between:
                time.sleep(0.001)
            return _become(request, files)
        os.waitpid(between, 0)  # its child is now the child of whoever asked
        connection.sendall(os.read(ours, 8))
        for file in (ours, theirs, *files):
            os.close(file)


def _become(request: dict[str, Any], files: list[int]) -> Callable[[], None]:
    import fcntl

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
    if request["new session"]:
        os.setsid()
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(request["numbers"], apart, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if "RANK" not in os.environ:  # it may start others
        work = _fork_own_server()
        if work is not None:
            return work
    _set_title([PYTHON, *request["arguments"]], request["environment"])
    return lambda: _run(request["arguments"])


def _fork_own_server() -> Callable[[], None] | None:
    """In this process None; in those that are forked later, what they are to do."""
    global _server
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        _server = ours
        return None
    ours.close()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # it ends with the process it serves
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # nobody shall wait for the end of a pipe because of it
        os.dup2(null, number)
    os.closerange(3, theirs.fileno())
    os.closerange(theirs.fileno() + 1, 1024)
    return serve(theirs)


def _set_title(arguments: list[str], environment: dict[str, str]) -> None:
    """Have /proc show these arguments, and the environment as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    starts = [int(field) for field in fields[45:49]]
    rank = {name: value for name, value in environment.items() if name == "RANK"}
    for texts, begin, end in ((arguments, *starts[:2]), ([f"{n}={v}" for n, v in rank.items()], *starts[2:])):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)[: end - begin]
        ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def _run(arguments: list[str]) -> None:
    """What the interpreter does with its arguments."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        arguments = arguments[2:]
    name, *rest = arguments
    if name == "-m":
        sys.path[0] = os.getcwd()
        spec = importlib.util.find_spec(rest[0])
        if spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{rest[0]}.__main__")
        sys.argv, code = [spec.origin, *rest[1:]], spec.loader.get_code(spec.name)
        attributes = {"__file__": spec.origin, "__spec__": spec, "__package__": spec.parent}
    elif name == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        code, attributes = compile(rest[0], "<string>", "exec"), {}
    else:
        sys.argv, sys.path[0] = arguments, str(Path(name).parent.resolve())
        code, attributes = compile(Path(name).read_bytes(), name, "exec"), {"__file__": name}
    # not by runpy: its frames have no file, for which inspect.stack in torchrun looks through all modules many times
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__dict__.update(attributes)
    exec(code, main.__dict__)


def _end(work: Callable[[], None]) -> None:
    """Do the work, and end as the interpreter does, but leave what was imported in memory: to clear it copies what is
    shared with the server, which takes 0.3 seconds of a processor. With an exception, and with threads that the end
    would stop, the end is the interpreter's."""
    code: Any = None
    try:
        work()
    except SystemExit as asked:
        code = asked.code
    threading._shutdown()
    atexit._run_exitfuncs()
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if not others and isinstance(code, int | None):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit((code or 0) & 0xFF)
    sys.exit(code)


def _import_everything() -> None:
    import altair  # noqa: F401  for pages with pictures
    import sklearn.datasets  # noqa: F401  with scipy, for the digits
    import torch.distributed.launcher.api
    import torch.utils.flop_counter
    import torch.utils.tensorboard

    import offbeat.cli
    import offbeat.runs.train
    import offbeat.studies.bench.worker
    import offbeat.studies.compare

    with contextlib.redirect_stdout(io.StringIO()):
        offbeat.cli.app(["methods"], standalone_mode=False)  # which imports pydantic
    inspect.stack()  # which finds the file of every module, as torchrun does
    with torch.device("meta"):
        torch.nn.init.kaiming_normal_(torch.empty(2, 2))  # which imports sympy
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=0.1).step()  # which imports torch._dynamo


if __name__ == "__main__":
    sys.modules["preloaded"] = sys.modules["__main__"]  # one copy of what is above
    _import_everything()
    install()
    sys.executable = PYTHON
    gc.collect()
    gc.freeze()  # nothing imported is garbage; looking would copy its memory
    _end(serve(socket.socket(fileno=int(sys.argv[1]))))
