"""Kill a worker or the launcher of a run at a random moment, let it go on, and compare the end with a whole run's.

A trial is drawn from (seed, number): method, K, victim, moment, and whether the run is taken up by --max-restarts or by
--resume. What is checked, none of it by asking offbeat:

    same bits     model.safetensors of the run, byte for byte that of the run of the same recipe that nobody killed
    nothing lost  the run goes on from the newest checkpoint that was complete: not older than the newest at the kill,
                  and with --resume the newest there was once all its processes had ended
    no hang       all within TIME_OUT
    no orphan     no process that names the run's folder
    nothing left  no socket of its processes still listens, nothing in /dev/shm that is theirs, and its temporary folder
                  (its alone; torch's cache for compiled code, which all runs of a user share, is elsewhere) is empty
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from start import say
from torture import write

TIME_OUT = 180.0  # seconds for a run that takes some 10 alone, on a busy machine
LEAVING = 15.0  # seconds for workers to notice that their launcher is gone
BATCHES = 128
RECIPE = shlex.split(
    "--model resnet8 --data synthetic --shape 3,8,8 --samples 256 --batch-size 8 --epochs 4 --warmup 1 "
    "--threads-per-stage 1 --engine processes --checkpoint-every 5b --json"
)
METHODS = {
    "adl-stash": ["--method", "adl", "-M", "2", "--weights", "stash"],
    "adl-hybrid": ["--method", "adl", "-M", "2", "--weights", "hybrid"],
    "adl-replay": ["--method", "adl", "-M", "3", "--weights", "replay"],
    "fr": ["--method", "fr"],
    "gpipe": ["--method", "gpipe"],
    "dgl": ["--method", "dgl"],
}
STAGES = (2, 3, 4)


def drawn(seed: int, number: int) -> dict[str, Any]:
    """What trial `number` does; methods and K go round, so that any count covers them evenly."""
    draw = random.Random(f"{seed}/{number}")
    K = STAGES[number // len(METHODS) % len(STAGES)]
    victim = draw.choice(["launcher", *range(1, K + 1)])
    return {
        "number": number,
        "method": list(METHODS)[number % len(METHODS)],
        "K": K,
        "victim": victim,
        "moment": draw.choice(["any", "while writing"]),
        "behind": draw.randrange(5, BATCHES - 25),  # batches that must be saved before
        "delay": round(draw.uniform(0.0, 0.15), 3),
        "taken_up": "resume" if victim == "launcher" else draw.choice(["resume", "max-restarts"]),
    }


# ---- looking from outside


def processes(folder: Path) -> dict[int, str]:
    """Live processes that name the folder on their command line, with their rank ('' for the launcher)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.fsencode(folder) not in (entry / "cmdline").read_bytes().split(b"\0"):
                continue
            pairs = (pair.partition(b"=")[::2] for pair in (entry / "environ").read_bytes().split(b"\0"))
            if (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found[int(entry.name)] = dict(pairs).get(b"RANK", b"").decode()
        except OSError:  # gone meanwhile
            continue
    return found


def listening() -> set[str]:
    """Inodes of all sockets of this machine that listen."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(fields[9])
    return found


def sockets(pids: list[int]) -> set[str]:
    """Inodes of the sockets that these processes hold."""
    found = set()
    for pid in pids:
        try:
            for handle in (Path("/proc") / str(pid) / "fd").iterdir():
                target = os.readlink(handle)
                if target.startswith("socket:["):
                    found.add(target[8:-1])
        except OSError:
            continue
    return found


def complete(run: Path) -> int:
    """Batches behind the newest checkpoint that has its final name, 0 where there is none."""
    try:
        names = [entry.name for entry in (run / "checkpoints").iterdir() if entry.name.isdigit()]
    except OSError:
        return 0
    return max((int(name) for name in names if (run / "checkpoints" / name / "manifest.json").exists()), default=0)


def being_written(run: Path) -> bool:
    """Whether a checkpoint is being written: unfinished, and newer than all that are complete."""
    try:
        names = [entry.name for entry in (run / "checkpoints").iterdir() if entry.name.endswith(".part")]
    except OSError:
        return False
    return any(name[:-5].isdigit() and int(name[:-5]) > complete(run) for name in names)


def wait_for(condition: Callable[[], object], seconds: float, every: float = 0.002) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def digest(run: Path) -> str | None:
    file = run / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


# ---- running


class Command:
    """An offbeat command in a session and with a temporary folder of its own."""

    def __init__(self, place: Path, name: str, *parts: str) -> None:
        self.temporary = place / f"{name}-tmp"
        self.temporary.mkdir()
        self.errors = place / f"{name}-stderr"
        surroundings = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        surroundings |= {"TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(place / "torchinductor")}
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "offbeat", "train", *parts],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=surroundings,
                start_new_session=True,
            )

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> int | None:
        """The exit code, None where it hangs: then it is killed."""
        try:
            return self.process.wait(TIME_OUT)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return None

    def left(self) -> list[str]:
        return sorted(entry.name for entry in self.temporary.iterdir())


class Whole:
    """What runs that nobody kills end in, each made once."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.lock = threading.Lock()
        self.locks: dict[str, threading.Lock] = {}

    def digest(self, method: str, K: int) -> str:
        name = f"{method}-{K}"
        with self.lock:
            mine = self.locks.setdefault(name, threading.Lock())
        with mine:
            run = self.place / name
            if digest(run) is None:
                command = Command(self.place, name, *RECIPE, "-K", str(K), *METHODS[method], "--out", str(run))
                if command.end() != 0:
                    raise RuntimeError(f"the whole run {name} failed: {command.errors.read_text()}")
            found = digest(run)
            assert found
            return found


def trial(asked: dict[str, Any], place: Path, whole: Whole) -> dict[str, Any] | None:
    """One kill; None where the run was over before it came."""
    expected = whole.digest(asked["method"], asked["K"])
    run = place / "run"
    automatic = asked["taken_up"] == "max-restarts"
    restarts = ["--max-restarts", "1"] if automatic else []
    given = [*RECIPE, "-K", str(asked["K"]), *METHODS[asked["method"]], "--out", str(run), *restarts]
    broken = Command(place, "broken", *given)
    began = time.monotonic()
    wait_for(lambda: complete(run) >= asked["behind"] or broken.over, TIME_OUT, 0.005)
    pids = processes(run)
    owned = sockets(list(pids)) & listening()
    time.sleep(asked["delay"])
    if asked["moment"] == "while writing":
        wait_for(lambda: being_written(run) or broken.over, TIME_OUT, 0.0002)
    wanted = "" if asked["victim"] == "launcher" else str(asked["victim"] - 1)
    victim = next((pid for pid, rank in pids.items() if rank == wanted), None)
    before, writing = complete(run), being_written(run)
    if broken.over or victim is None or digest(run) is not None:
        broken.end()
        return None
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        broken.end()
        return None
    code = broken.end()
    stopped = wait_for(lambda: not processes(run), LEAVING, 0.05)
    found: dict[str, Any] = {
        **asked,
        "complete_at_kill": before,
        "writing_at_kill": writing,
        "exit_codes": [code],
        "orphans": [] if stopped else sorted(processes(run).values()),
        "temporary_left": broken.left(),
    }
    pids |= processes(run)
    on_disk = complete(run)
    if not automatic and digest(run) is None:
        again = Command(place, "again", "--resume", str(run), "--json")
        found["exit_codes"].append(again.end())
        found["temporary_left"] += again.left()
        if not wait_for(lambda: not processes(run), LEAVING, 0.05):
            found["orphans"] += sorted(processes(run).values())
        found["errors"] = again.errors.read_text()[-300:] if found["exit_codes"][-1] else ""
    else:
        found["errors"] = broken.errors.read_text()[-300:] if code else ""
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    resumed = [line["batch"] for line in lines if line["kind"] == "resumed" and line["batch"]]
    found["resumed_at"] = resumed[-1] if resumed else None
    found["on_disk"] = None if automatic else on_disk
    found["seconds"] = round(time.monotonic() - began, 1)
    found["same_bits"] = digest(run) == expected
    found["nothing_lost"] = found["resumed_at"] is not None and (
        found["resumed_at"] >= before if automatic else found["resumed_at"] == on_disk >= before
    )
    found["hung"] = None in found["exit_codes"]
    found["still_listening"] = len(owned & listening())
    found["shared_memory"] = [
        entry.name for entry in Path("/dev/shm").iterdir() if any(str(pid) in entry.name.split("_") for pid in pids)
    ]
    left = any(found[what] for what in ("hung", "orphans", "still_listening", "shared_memory", "temporary_left"))
    found["good"] = found["same_bits"] and found["nothing_lost"] and found["exit_codes"][-1] == 0 and not left
    return found


COUNTED = {  # in how many trials there is what
    "good": "good",
    "same_bits": "same_bits",
    "nothing_lost": "nothing_lost",
    "hangs": "hung",
    "with_orphans": "orphans",
    "still_listening": "still_listening",
    "with_shared_memory_left": "shared_memory",
    "with_temporary_folders_left": "temporary_left",
    "while_writing": "writing_at_kill",
}


def summary(trials: list[dict[str, Any]], missed: int) -> dict[str, Any]:
    return {
        "trials": len(trials),
        **{what: sum(bool(each[key]) for each in trials) for what, key in COUNTED.items()},
        "missed": missed,
        **{
            what: dict(sorted(Counter(str(each[key]) for each in trials).items()))
            for what, key in (("methods", "method"), ("stages", "K"), ("victims", "victim"), ("taken_up", "taken_up"))
        },
    }


def run(options: argparse.Namespace) -> bool:
    before = json.loads(Path(options.out).read_text()) if options.out and Path(options.out).exists() else {}
    if before and before["settings"]["seed"] != options.seed:
        raise SystemExit(f"{options.out} holds trials of another seed: choose another --out")
    trials: list[dict[str, Any]] = before.get("each", [])
    missed: list[int] = before.get("missed", [])
    place = Path(tempfile.mkdtemp(prefix="torture-kills-"))
    whole, lock, begun = Whole(place), threading.Lock(), time.monotonic()
    under_way: set[int] = set()
    done = {each["number"] for each in trials} | set(missed)
    numbers = iter(number for number in range(10 * options.count + 100) if number not in done)

    def late() -> bool:
        return options.minutes is not None and time.monotonic() - begun > 60 * options.minutes

    def work() -> None:
        while True:
            with lock:
                if len(trials) + len(under_way) >= options.count or late():
                    return
                number = next(numbers)
                under_way.add(number)
            folder = place / f"trial-{number}"
            folder.mkdir()
            found = trial(drawn(options.seed, number), folder, whole)
            with lock:
                under_way.remove(number)
                if found is None:
                    missed.append(number)
                    say(f"trial {number}: the run was over before it was killed")
                    continue
                trials.append(found)
                say(
                    f"{len(trials)} of {options.count}: {found['method']}, K={found['K']}, {found['victim']} killed "
                    f"{'while writing' if found['writing_at_kill'] else 'behind'} {found['complete_at_kill']}, "
                    f"{found['taken_up']} at {found['resumed_at']}: {'good' if found['good'] else found}"
                )
                if found["good"]:
                    shutil.rmtree(folder)
                write(
                    options.out,
                    {
                        "settings": {"seed": options.seed, "recipe": RECIPE, "methods": METHODS},
                        "summary": summary(trials, len(missed)),
                        "missed": missed,
                        "each": sorted(trials, key=lambda each: each["number"]),
                    },
                )

    with ThreadPoolExecutor(options.jobs) as pool:
        for each in [pool.submit(work) for _ in range(options.jobs)]:
            each.result()
    told = summary(trials, len(missed))
    print(json.dumps(told, indent=1))
    good = told["good"] == len(trials) >= options.count
    if good:
        shutil.rmtree(place)
    else:
        print(f"the folders of trials that were not good are kept: {place}")
    return good
