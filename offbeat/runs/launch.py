"""Start K local worker processes through torch's elastic launcher, and tell in one line why they stopped."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.core.links import LOOPBACK_INTERFACE
from offbeat.errors import Interrupted, NotFinite, StageLost, UserError

ERRORS = "OFFBEAT_WORKER_ERRORS"  # set for workers that were started here: the folder for their last words
LAUNCHER = "OFFBEAT_LAUNCHER"  # and the process that started them
WORDS = "offbeat-launch-"  # temporary folders: behind it goes the launcher's process
STOP_SECONDS = 30  # from the first failure or Ctrl-C until what still runs is killed: time for a checkpoint


def is_worker() -> bool:
    """Whether this process was started by `launch`."""
    return ERRORS in os.environ


def joined_group() -> bool:
    """Whether torchrun (or `launch`) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    K: int, arguments: list[str], *, max_restarts: int = 0, environment: Mapping[str, str] | None = None
) -> None:
    """Run `offbeat ARGUMENTS` in K processes on this machine; raises UserError or Interrupted if they fail.

    When one fails, all are stopped; they are started again as a group up to `max_restarts` times.

    environment: more variables of the workers. Those of this process stay as they are.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from offbeat.runs import rendezvous

    logging.disable(logging.CRITICAL)  # torch's own account of a failure; ours is one line
    sweep()
    with tempfile.TemporaryDirectory(prefix=f"{WORDS}{os.getpid()}-") as words:
        given = {**(environment or {}), ERRORS: words, LAUNCHER: str(os.getpid())}
        given["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        if sys.platform in LOOPBACK_INTERFACE:
            given["GLOO_SOCKET_IFNAME"] = LOOPBACK_INTERFACE[sys.platform]  # nothing needs to leave the machine
        later: dict[str, Any] = {}
        if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:
            later["shutdown_timeout"] = STOP_SECONDS
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=K,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.register(),
            local_addr=rendezvous.LOOPBACK,
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=words),
            **later,
        )
        over = threading.Event()
        threading.Thread(target=wake_the_stopped, args=(words, over), name="offbeat-wake", daemon=True).start()
        try:
            # torch starts workers with the environment of this process: env(1) adds to theirs alone
            variables = [f"{name}={value}" for name, value in given.items()]
            elastic_launch(config, "env")(*variables, sys.executable, "-m", "offbeat", *arguments)
        except SignalException as error:
            plain = "" if error.sigval == signal.SIGINT else f"stopped by {error.sigval.name}"
            raise Interrupted(interrupted(words) or plain) from None
        except ChildFailedError as error:
            if interrupted(words) is not None:
                raise Interrupted(interrupted(words)) from None
            for entry in told(words):
                if entry["kind"] == NotFinite.__name__:
                    raise NotFinite(str(entry["text"]), entry["batches"]) from None
            raise UserError(reason(words, error.failures)) from None
        finally:
            over.set()
            logging.disable(logging.NOTSET)
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h")  # a killed worker cannot show the cursor that its progress bar hid


def sweep() -> None:
    """Remove what launchers that were killed could not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{WORDS}*-*"):
        with contextlib.suppress(OSError, ValueError):
            launcher = int(folder.name.removeprefix(WORDS).partition("-")[0])
            if folder.stat().st_uid == os.getuid() and not Path(f"/proc/{launcher}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def last_words(error: BaseException) -> None:
    """Leave for the launcher why this worker stops."""
    rank, attempt = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    told = {
        "kind": type(error).__name__,
        "text": str(error),
        "time": time.time(),
        "rank": rank,
        "attempt": attempt,
        "batches": list(getattr(error, "batches", ())),
    }
    (Path(os.environ[ERRORS]) / f"{attempt}-{rank}.json").write_text(json.dumps(told))


def told(words: str) -> list[dict[str, Any]]:
    """What the workers of the last attempt left, in order of time."""
    found = []
    for file in Path(words).glob("*.json"):
        try:
            found.append(json.loads(file.read_text()))
        except ValueError:  # killed while writing
            continue
    last = max((entry["attempt"] for entry in found), default=0)
    return sorted((entry for entry in found if entry["attempt"] == last), key=lambda entry: entry["time"])


def interrupted(words: str) -> str | None:
    """What a worker said that was stopped by a signal, if one was."""
    return next((str(entry["text"]) for entry in told(words) if entry["kind"] == Interrupted.__name__), None)


def reason(words: str, failures: dict[int, Any]) -> str:
    """The cause among the failures: what a worker said of itself, a death by signal, then what the others noticed."""
    said = told(words)
    for entry in said:
        if entry["kind"] != StageLost.__name__:
            return str(entry["text"])
    silent = {rank: f for rank, f in sorted(failures.items()) if rank not in {entry["rank"] for entry in said}}
    killed = {rank: f for rank, f in silent.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
    for rank, failure in (killed or silent).items():
        how = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        found = [match[1] for entry in said if (match := re.search(r"message was of batch (\d+)", entry["text"]))]
        where = f", its last message was of batch {found[0]}" if found else ""
        return f"stage {rank + 1} has died ({how}, process {failure.pid}{where}); the other stages were stopped"
    return str(said[0]["text"]) if said else "the workers stopped without a word"


def wake_the_stopped(words: str, over: threading.Event) -> None:
    """Once a worker has told why it stops, let those that are stopped (SIGSTOP) go on, so that they hear of it.

    A stopped process does not take the launcher's SIGTERM; it would be waited for until it is killed.
    """
    while not over.wait(0.5):
        if any(Path(words).glob("*.json")):
            for pid in stopped_children():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)


def stopped_children() -> list[int]:
    """Stopped processes that this one has started, where the system tells."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if state == "T" and int(parent) == os.getpid():
                found.append(int(file.parent.name))
    return found


def die_with_parent() -> None:
    """End this worker if its launcher disappears, so that no process is left behind."""
    launcher = int(os.environ[LAUNCHER])

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        if is_worker():  # the launcher would have done it
            shutil.rmtree(os.environ[ERRORS], ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="offbeat-parent", daemon=True).start()
