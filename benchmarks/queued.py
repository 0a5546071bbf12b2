"""Run many `offbeat` commands, several at the same time, within a time limit: for the rows of tables on one GPU.

    python benchmarks/queued.py COMMANDS --out DIR --at-once 3 --minutes 9 [--cores 0-4] [--share 25] [--archive FILE]

COMMANDS is a file with one command per line: a name, then the arguments of `offbeat`, without --out:

    k28-0   reproduce cifar10-table --only resnet56-adl-1f1b-k28-m1-sc --seeds 1 --first-seed 0 --device cuda --data DIR
    bp-0    reproduce cifar10-table --only resnet56-bp-m1 --seeds 1 --first-seed 0 --device cuda --data DIR

They start in this order. Each writes to DIR/NAME (--out of the command) and DIR/NAME.log. When the time is up, those
that run are interrupted, so that they save their state. The same call continues: a command that has ended with exit
code 0 is not started again. Every half minute it prints the last line of each log. --archive keeps a copy of all
records and logs, without weights and pictures, in one .tar.gz, for machines that give few files back.

On a GPU with nvidia-cuda-mps-control, the processes run their kernels at the same time (MPS); --share limits each to a
percentage of the GPU.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

INTERVAL, POLL = 30.0, 0.2  # seconds between two reports, and between two looks at the processes
SAVING = 60.0  # seconds in which an interrupted command must have saved its state
SHOWN = 100  # characters of a log's last line
MPS = "nvidia-cuda-mps-control"
ARCHIVED = (".json", ".jsonl", ".md", ".log", ".done")  # ends of the names of files in the archive


def fail(text: str) -> NoReturn:
    print(f"queued.py: {text}", file=sys.stderr)
    sys.exit(2)


@dataclass
class Queue:
    """The commands by name, those that run, and how the others ended.

    deadline   time.monotonic() at which running commands are interrupted
    archive    a file with a copy of what they recorded, written with every report
    """

    commands: dict[str, list[str]]
    out: Path
    at_once: int
    cores: set[int]
    deadline: float
    archive: Path | None = None
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Run all commands, or as many as there is time for."""
        waiting = [name for name in self.commands if not self._done(name).exists()]
        reported = time.monotonic()
        try:
            while (waiting or self.running) and time.monotonic() < self.deadline:
                while waiting and len(self.running) < self.at_once:
                    self._start(waiting.pop(0))
                time.sleep(POLL)
                self._collect()
                if time.monotonic() - reported > INTERVAL:
                    reported = time.monotonic()
                    self.report(waiting)
        finally:
            self._interrupt()
        self.report(waiting)

    def _done(self, name: str) -> Path:
        return self.out / f"{name}.done"

    def _start(self, name: str) -> None:
        command = [sys.executable, "-m", "offbeat", *self.commands[name], "--out", str(self.out / name)]
        with (self.out / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        os.sched_setaffinity(self.running[name].pid, self.cores)

    def _collect(self) -> None:
        for name, process in list(self.running.items()):
            if process.poll() is not None:
                self.codes[name] = process.returncode
                del self.running[name]
                if process.returncode == 0:
                    self._done(name).touch()

    def _interrupt(self) -> None:
        """Interrupt all that run, once, and wait until they have saved their state."""
        for process in self.running.values():
            process.send_signal(signal.SIGINT)
        limit = time.monotonic() + SAVING
        for name, process in self.running.items():
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{name} is killed: it has not ended {SAVING:g} s after its interruption", flush=True)
                os.killpg(process.pid, signal.SIGKILL)
        self.running = {}

    def report(self, waiting: list[str]) -> None:
        done = sum(self._done(name).exists() for name in self.commands)
        failed = [name for name, code in self.codes.items() if code]
        left = max(0.0, self.deadline - time.monotonic())
        limit = f", {left:.0f} s left" if left < float("inf") else ""
        print(f"{done} of {len(self.commands)} done, {len(waiting)} not started{limit}", flush=True)
        for name in [*self.running, *failed]:
            ended = f", exit code {self.codes[name]}" if name in self.codes else ""
            print(f"  {name}{ended}: {self._last_line(name)}", flush=True)
        if self.archive is not None:
            self._write_archive(self.archive)

    def _write_archive(self, archive: Path) -> None:
        """Replace the archive when the new one is complete."""
        unfinished = archive.with_name(f"{archive.name}.part")
        with tarfile.open(unfinished, "w:gz") as tar:
            for path in sorted(self.out.rglob("*")):
                with suppress(FileNotFoundError):  # that a command has just removed
                    if path.suffix in ARCHIVED:
                        tar.add(path, path.relative_to(self.out))
        unfinished.replace(archive)

    def _last_line(self, name: str) -> str:
        lines = (self.out / f"{name}.log").read_bytes()[-1000:].decode(errors="replace").splitlines()
        return lines[-1][:SHOWN] if lines else ""


def read(path: str) -> dict[str, list[str]]:
    """The commands of a file, by name."""
    found: dict[str, list[str]] = {}
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    for number, line in enumerate(lines, 1):
        name, *given = shlex.split(line, comments=True) or [""]
        if not name:
            continue
        if not given or name in found or "/" in name:
            fail(f"line {number} of {path}: give a name that no other line has, then the arguments of offbeat")
        if "--out" in given:
            fail(f"line {number} of {path}: leave out --out, which is DIR/{name}")
        found[name] = given
    return found or fail(f"{path} has no commands: give a name and the arguments of offbeat in each line")


def cores_of(text: str) -> set[int]:
    """The cores of a text such as 0-3,8, of those that this process may use."""
    found, here = numbers_in(text), os.sched_getaffinity(0)
    return found if found <= here else fail(f"--cores {text}: this process may use {sorted(here)}")


def numbers_in(text: str) -> set[int]:
    """
    >>> sorted(numbers_in("0-2,5"))
    [0, 1, 2, 5]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found |= set(range(int(first), int(last or first) + 1))
        except ValueError:
            fail(f"--cores {text}: give numbers and ranges, such as 0-3,8")
    return found or fail(f"--cores {text}: give ranges from a smaller to a larger number, such as 0-3,8")


def start_mps(share: int | None) -> None:
    """Let processes share the GPU at the same time; nothing where that is not possible."""
    if shutil.which(MPS) is None:
        return
    subprocess.run([MPS, "-d"], capture_output=True, check=False)  # fails where it already runs
    if share is not None:
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", metavar="COMMANDS", help="file with a name and the arguments of offbeat per line")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of all runs and logs")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="commands that run at once (default 2)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of this call (default: no limit)")
    parser.add_argument("--cores", help="that the commands may use, such as 0-3,8 (default: all)")
    parser.add_argument("--share", type=int, help="percentage of the GPU per command, with MPS (default: all of it)")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="a .tar.gz with a copy of all records and logs")
    given = parser.parse_args()
    if given.at_once < 1 or given.minutes <= 0:
        fail(f"--at-once {given.at_once} --minutes {given.minutes:g}: give numbers above 0")
    if given.share is not None and not 1 <= given.share <= 100:
        fail(f"--share {given.share}: give a percentage from 1 to 100")
    if given.archive is not None and not given.archive.absolute().parent.is_dir():
        fail(f"--archive {given.archive}: its folder does not exist: make it first")
    commands, cores = read(given.commands), cores_of(given.cores) if given.cores else os.sched_getaffinity(0)
    given.out.mkdir(parents=True, exist_ok=True)
    start_mps(given.share)
    deadline = time.monotonic() + 60 * given.minutes
    queue = Queue(commands, given.out, given.at_once, cores, deadline, given.archive)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        queue.run()
    except KeyboardInterrupt:
        print("interrupted: the same command continues", flush=True)
        sys.exit(130)
    sys.exit(1 if any(code not in (0, -signal.SIGINT, 130) for code in queue.codes.values()) else 0)


if __name__ == "__main__":
    main()
