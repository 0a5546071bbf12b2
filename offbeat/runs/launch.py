"""Start local worker processes, one per stage, with the elastic launcher of torch, and raise one error when they fail.

The launcher passes two environment variables to its workers, as torchrun passes RANK: where to report errors, and the
process of the launcher.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.core.links import LOOPBACK_INTERFACE
from offbeat.errors import Interrupted, NotFinite, StageLost, UserError, named, stage_name

if TYPE_CHECKING:
    from offbeat.runs.recipe import Recipe

ERRORS = "OFFBEAT_WORKER_ERRORS"  # of workers: the folder to which they write their errors
LAUNCHER = "OFFBEAT_LAUNCHER"  # of workers: the process that started them
PREFIX = "offbeat-launch-"  # of temporary folders; followed by the process of the launcher
PER_CORE = 8  # processes at most: with more, hundreds of them take minutes to start, or use up the memory
STOP_SECONDS = 30  # from the first failure or Ctrl-C until workers are killed: time for a checkpoint


def is_worker() -> bool:
    """Whether this process was started by `launch`."""
    return ERRORS in os.environ


def joined_group() -> bool:
    """Whether torchrun (or `launch`) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_cores(
    K: int, replicas: int = 1, *, instead: str = "engine='simulate', which gives the same numbers, "
) -> None:
    """Refuse more than PER_CORE processes per core of this machine. `instead`: what else there is to use."""
    n, given = cores(), f"K={K}" if replicas == 1 else f"K={K} with replicas={replicas}"
    if K * replicas > PER_CORE * n:
        raise UserError(
            f"{given}: {K * replicas} processes on {n} core{'s' * (n > 1)}, use {PER_CORE * n} or fewer ({PER_CORE} "
            f"per core), {instead}or a machine with more cores"
        )


def workers_here(K: int) -> int:
    """Workers of a row on this machine: all, unless processes of torchrun run the others elsewhere."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", K)) if joined_group() else K


def check_workers(recipes: Iterable[Recipe]) -> None:
    """Refuse runs that start more workers than `check_cores` allows."""
    for recipe in recipes:
        if recipe.engine == "processes":
            check_cores(recipe.K, recipe.replicas)


def launch(
    K: int,
    arguments: list[str],
    *,
    replicas: int = 1,
    max_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run `offbeat ARGUMENTS` in K processes per replica on this machine; raises UserError or Interrupted if they fail.

    When one fails, all are stopped; they are started again as a group up to `max_restarts` times, each time after a
    line with the reason.

    environment: more variables of the workers. Those of this process stay as they are.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    check_cores(K, replicas)
    logging.disable(logging.CRITICAL)  # the traceback of torch; the error here is one line
    remove_leftovers()
    try:
        for restart in range(max_restarts + 1):
            given = {**(environment or {}), "TORCHELASTIC_RESTART_COUNT": str(restart)}
            failure = run_group(K, arguments, replicas=replicas, environment=given)
            if failure is None:
                return
            if restart == max_restarts:
                raise failure.error
            print(f"offbeat: restart {restart + 1} of {max_restarts}: {failure.line}", file=sys.stderr)
    except SignalException as error:  # between two groups
        raise Interrupted(stopped_by(error.sigval)) from None
    finally:
        logging.disable(logging.NOTSET)
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a killed worker cannot show the cursor that its progress bar hid


class GroupFailure(NamedTuple):
    """Why a group has ended: the error, and a line with the stage."""

    error: Exception
    line: str


def run_group(K: int, arguments: list[str], *, replicas: int, environment: Mapping[str, str]) -> GroupFailure | None:
    """Run the workers once; the reason if they fail. Interrupted if this process gets a signal."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from offbeat.runs import rendezvous

    with tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-") as folder:
        given = {**environment, ERRORS: folder, LAUNCHER: str(os.getpid())}
        given["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        if sys.platform in LOOPBACK_INTERFACE:
            given["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE[sys.platform]  # nothing needs to leave the machine
        later: dict[str, Any] = {}
        if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:
            later["shutdown_timeout"] = STOP_SECONDS
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=K * replicas,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.register(),
            local_addr=rendezvous.LOOPBACK,
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **later,
        )
        over = threading.Event()
        threading.Thread(
            target=continue_stopped_workers, args=(folder, over), name="offbeat-continue", daemon=True
        ).start()
        try:
            # torch starts workers with the environment of this process: env(1) adds to theirs alone
            variables = [f"{name}={value}" for name, value in given.items()]
            elastic_launch(config, "env")(*variables, sys.executable, "-m", "offbeat", *arguments)
        except SignalException as error:
            raise Interrupted(interrupted(folder) or stopped_by(error.sigval)) from None
        except ChildFailedError as error:
            return failure_of(folder, error.failures, K, replicas)
        finally:
            over.set()
    return None


def stopped_by(signal_number: signal.Signals) -> str:
    """The line about a signal; the command line has one of its own about Ctrl-C."""
    return "" if signal_number == signal.SIGINT else f"stopped by {signal_number.name}"


def remove_leftovers() -> None:
    """Remove the temporary folders of launchers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError, ValueError):
            launcher = int(folder.name.removeprefix(PREFIX).partition("-")[0])
            if folder.stat().st_uid == os.getuid() and not Path(f"/proc/{launcher}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def leave_error(error: BaseException) -> None:
    """Write the error that stops this worker to a file for the launcher."""
    rank = int(os.environ.get("RANK", "0"))
    content = {
        "kind": type(error).__name__,
        "text": str(error),
        "line": named(error),
        "time": time.time(),
        "rank": rank,
        "batches": list(getattr(error, "batches", ())),
    }
    (Path(os.environ[ERRORS]) / f"{rank}.json").write_text(json.dumps(content))


def worker_errors(folder: str) -> list[dict[str, Any]]:
    """The errors of the workers, in order of time."""
    found = []
    for file in Path(folder).glob("*.json"):
        try:
            found.append(json.loads(file.read_text()))
        except ValueError:  # killed while writing
            continue
    return sorted(found, key=lambda entry: entry["time"])


def interrupted(folder: str) -> str | None:
    """The message of a worker that was stopped by a signal, if there is one."""
    return next((str(entry["text"]) for entry in worker_errors(folder) if entry["kind"] == Interrupted.__name__), None)


def failure_of(folder: str, failures: dict[int, Any], K: int, replicas: int = 1) -> GroupFailure:
    """The cause of a failure: a worker's own error, else the first signal that killed a worker, else what others
    noticed. Workers that do not stop in time are killed, too, later.

    failures: as torch reports them, by rank, in the order in which they were found
    """
    errors = worker_errors(folder)
    own = [entry for entry in errors if entry["kind"] != StageLost.__name__]
    in_order = sorted(failures.items(), key=lambda item: item[1].timestamp)
    silent = {rank: f for rank, f in in_order if rank not in {entry["rank"] for entry in errors}}
    if silent and not own:
        killed = {rank: f for rank, f in silent.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
        rank, failure = next(iter((killed or silent).items()))
        how = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        found = [match[1] for entry in errors if (match := re.search(r"message was of batch (\d+)", entry["text"]))]
        where = f", its last message was of batch {found[0]}" if found else ""
        line = f"{stage_name(rank, K, replicas)} has died ({how}, process {failure.pid}{where})"
        return GroupFailure(UserError(f"{line}; the other stages were stopped"), line)
    if not errors:
        line = "the workers stopped without an error message"
        return GroupFailure(UserError(line), line)
    kinds = {Interrupted.__name__: Interrupted, NotFinite.__name__: NotFinite}
    cause = next((entry for kind in kinds for entry in own if entry["kind"] == kind), (own or errors)[0])
    error = kinds.get(cause["kind"], UserError)(cause["text"])
    if isinstance(error, NotFinite):
        error.batches = tuple(cause["batches"])
    return GroupFailure(error, f"{stage_name(cause['rank'], K, replicas)} failed: {cause['line']}")


def continue_stopped_workers(folder: str, over: threading.Event) -> None:
    """Once a worker has failed, send SIGCONT to workers that are stopped (SIGSTOP), so that they end too.

    A stopped process does not handle SIGTERM from the launcher, which would wait until it kills the process.
    """
    while not over.wait(0.5):
        if any(Path(folder).glob("*.json")):
            for pid in stopped_children():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)


def stopped_children() -> list[int]:
    """Stopped child processes, on systems with /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if state == "T" and int(parent) == os.getpid():
                found.append(int(file.parent.name))
    return found


def die_with_parent() -> None:
    """End this worker if its launcher ends, so that no process is left over."""
    launcher = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        if is_worker():  # which the launcher could not remove
            shutil.rmtree(os.environ[ERRORS], ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="offbeat-parent", daemon=True).start()
