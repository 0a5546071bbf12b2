"""Training over slow networks: DDP, torch's pipelines and ours, each worker on a host of its own.

    python benchmarks/network.py --out docs/results/network-2cores-k2.json
    python benchmarks/network.py --rows adl,ddp --profiles loopback,100mbit-10ms --rounds 1 --seconds 1 --out FILE
    python benchmarks/network_relay.py              round trip and throughput of every profile

Hosts are network namespaces on this machine, with lines of a given rate and delay between them (network_relay.py): it
needs Linux and root. Every worker has one core, the relay those that are left. All rows train the same network with the
same samples per update. A round times every row on every profile; the workers of a row stay the same on all lines,
loopback has its own.

The record is written after every measurement. A command continues a record that is there with what it does not have:
more rounds, and other networks, profiles and rows. --budget-minutes ends a command before a measurement for which the
time is not left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from network_prediction import MeasuredCosts, predicted
from network_relay import (
    DEVICE,
    LOOPBACK,
    PROFILES,
    CannotMakeHostsError,
    Hosts,
    Profile,
    ending_on_terminate,
    measured,
)
from network_rows import INNER_STEPS, LISTED, MEASURED, ROWS, SAMPLES, TINY, M, Network, NetworkRow
from start import BEGUN, origin, say, write_record

from offbeat.runs.launch import LAUNCHER
from offbeat.studies.bench.worker_group import RowFailedError, Workers

PATIENCE = 300.0  # seconds until a worker must answer
WORKER = Path(__file__).with_name("network_worker.py")
REPEATS = 10  # of the times that predictions need
LEAST_UPDATES, MOST_UPDATES = 2, 50  # of a measurement
STARTING = 20.0  # seconds that the workers of a row may need
LISTS = ("networks", "profiles", "rows")  # settings that may differ between the commands of a record


class OutOfTimeError(Exception):
    """The next measurement would end after the budget."""


class HostProcess(subprocess.Popen[str]):
    """A process on a host, with text in its pipes; in a session of its own, since Ctrl-C is for the process that writes
    the record."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, **options)

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError), self:
            pass


class Group(Workers):
    """The workers of a row, on hosts of their own or, without lines, all on the first."""

    def __init__(
        self, row: NetworkRow, network: Network, hosts: Hosts, *, cuts: Sequence[int], lines: bool, folder: Path
    ) -> None:
        super().__init__(PATIENCE)
        K, cores = len(cuts) + 1, sorted(os.sched_getaffinity(0))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", LAUNCHER: str(os.getpid())}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self.place = Path(tempfile.mkdtemp(dir=folder))
        for rank in range(K):
            command = hosts.command(rank if lines else 0, sys.executable, str(WORKER))
            with self.errors(rank).open("w") as errors:
                self.processes.append(HostProcess(command, stderr=errors, env=environment))
            self.send(
                rank,
                {
                    "row": row.name,
                    "network": network.as_dict(),
                    "K": K,
                    "rank": rank,
                    "cuts": list(cuts),
                    "store": str(self.place / "store"),
                    "interface": DEVICE if lines else "lo",
                    "core": cores[rank % len(cores)],
                },
            )

    def errors(self, rank: int) -> Path:
        return self.place / f"{rank}.err"


# ---- the record


class NetworkRecord:
    """What was measured so far, in a file that is always complete."""

    def __init__(self, path: Path, settings: dict[str, Any], provenance: dict[str, Any]) -> None:
        self.path = path
        self.found: dict[str, Any] = {
            "settings": settings,
            "lines": {},
            "costs": {},
            "measurements": [],
            "failed": [],
            "provenance": provenance,
        }
        if path.exists():
            try:
                before = json.loads(path.read_text())
                merged = {name: _in_order(name, before["settings"][name], settings[name]) for name in LISTS}
                merged["rounds"] = max(before["settings"]["rounds"], settings["rounds"])
            except (OSError, ValueError, KeyError, TypeError):
                sys.exit(f"{path} is not a record: use another --out")
            if {**before["settings"], **merged} != {**settings, **merged}:
                sys.exit(f"{path} has other settings: use them, or another --out")
            self.found = {**before, "settings": {**settings, **merged}}
            self.found.setdefault("continued", []).append(provenance)

    def write(self) -> None:
        write_record(self.path, self.found)

    def has(self, **key: Any) -> bool:
        return any(key.items() <= one.items() for kind in ("measurements", "failed") for one in self.found[kind])

    def add(self, kind: str, **measurement: Any) -> None:
        self.found[kind].append(measurement)
        self.write()


def _in_order(name: str, *given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What any of them has, in the order of this file's lists."""
    listed: Sequence[Any] = {"networks": (*MEASURED, TINY), "profiles": PROFILES, "rows": LISTED}[name]
    both = {each["name"]: each for some in given for each in some}
    return [both[one.name] for one in listed if one.name in both]


# ---- measuring


def updates_within(seconds: float, update: float) -> int:
    """The updates of a measurement of about that many seconds.

    >>> updates_within(8.0, 0.5), updates_within(8.0, 30.0)
    (16, 2)
    """
    return max(LEAST_UPDATES, min(MOST_UPDATES, round(seconds / update)))


def time_on_line(group: Group, hosts: Hosts, profile: Profile, *, seconds: float) -> dict[str, Any]:
    """Seconds per update of the slowest worker, after a warm-up on the same line; the idle share of the workers; bytes
    on all lines per update; cores that the relay used. An update of more than the wished seconds is measured once."""
    if profile.name != LOOPBACK:
        hosts.set(profile)
    group.ask("run", 1)
    updates = 1
    while True:
        before, began = hosts.counters(), time.monotonic()
        answers = group.ask("run", updates)
        after, wall = hosts.counters(), time.monotonic() - began
        update = max(answer["seconds"] for answer in answers)
        if updates > 1 or update > seconds:
            break
        updates = updates_within(seconds, update)
    lines = profile.name != LOOPBACK
    return {
        "seconds": update,
        "idle": 1 - sum(answer["busy"] / answer["seconds"] for answer in answers) / len(answers),
        "updates": answers[0]["updates"],
        "bytes": (after["bytes"] - before["bytes"]) / answers[0]["updates"] if lines else None,
        "relay": (after["processor_seconds"] - before["processor_seconds"]) / wall,
    }


def measure_row(
    row: NetworkRow,
    network: Network,
    cuts: Sequence[int],
    *,
    hosts: Hosts,
    profiles: Sequence[Profile],
    number: int,
    seconds: float,
    end: float,
    record: NetworkRecord,
    folder: Path,
) -> None:
    """One round of a row on all profiles that the record does not have; OutOfTimeError before one that would not have
    ended at `end`."""
    costs = MeasuredCosts(record.found["costs"][f"{network.name}-{len(cuts) + 1}"]["workers"])

    def fits(profile: Profile, more: float = 0.0) -> None:
        outer = INNER_STEPS if row.kind == "local-sgd" else 1  # of which a measurement takes at least one
        if time.monotonic() + more + seconds + 2 * outer * predicted(row, costs, profile) > end:
            raise OutOfTimeError

    key: dict[str, Any] = {"network": network.name, "K": len(cuts) + 1, "row": row.name, "round": number}
    for lines in (False, True):
        left = [one for one in profiles if (one.name != LOOPBACK) == lines and not record.has(**key, profile=one.name)]
        if not left:
            continue
        fits(left[0], STARTING)
        hosts.set(PROFILES[1] if lines else PROFILES[0])  # workers join on a fast line
        try:
            with closing(Group(row, network, hosts, cuts=cuts, lines=lines, folder=folder)) as group:
                group.ready()
                for profile in left:
                    fits(profile)
                    found = time_on_line(group, hosts, profile, seconds=seconds)
                    record.add("measurements", **key, profile=profile.name, **found)
                    say(
                        f"{network.name}, K={len(cuts) + 1}, round {number}, {profile.name}, {row.title}: "
                        f"{1000 * found['seconds']:.0f} ms per update, {SAMPLES / found['seconds']:.1f} samples/s, "
                        f"idle {100 * found['idle']:.0f} %"
                    )
        except RowFailedError as reason:
            for profile in left:
                if not record.has(**key, profile=profile.name):
                    record.add("failed", **key, profile=profile.name, reason=str(reason))
            say(f"{network.name}, {row.title}: left out, {reason}")


def measure_costs(network: Network, cuts: Sequence[int], *, hosts: Hosts, record: NetworkRecord, folder: Path) -> None:
    """Times of the stages and sizes of messages, once per network and K."""
    name = f"{network.name}-{len(cuts) + 1}"
    if name in record.found["costs"]:
        return
    with closing(Group(ROWS["adl"], network, hosts, cuts=cuts, lines=False, folder=folder)) as group:
        group.ready()
        record.found["costs"][name] = {"cuts": list(cuts), "workers": group.ask("costs", REPEATS)}
    record.write()
    say(f"{network.name}, K={len(cuts) + 1}: stages and messages measured")


def cuts_of(network: Network, K: int, record: NetworkRecord) -> list[int]:
    """Where the network is cut, between blocks: as in a record that is continued, else balanced by times on one core.

    FLOPs do not balance ResNet-50 on images of 32 pixels, whose last blocks take the time of reading their parameters.
    """
    import torch

    from offbeat import models
    from offbeat.partitioning import partition

    if known := record.found["costs"].get(f"{network.name}-{K}"):
        return list(known["cuts"])
    torch.set_num_threads(1)
    model = models.build(network.model, shape=network.shape, classes=network.classes)
    sample = models.random_batch(SAMPLES // M, network.shape, network.classes)
    blocks = [name for name, _ in model.named_children()]
    found = partition(model, K, sample, units="blocks", by="measured")  # whose cuts are numbers of layers
    return [blocks.index(found.names[cut].partition(".")[0]) for cut in found.cuts]


# ---- the command


def chosen(text: str | None, allowed: Sequence[Any], name: Callable[[Any], str]) -> list[Any]:
    """Those of the given names, in their order; all without any."""
    if text is None:
        return list(allowed)
    wanted = text.split(",")
    if unknown := [each for each in wanted if each not in map(name, allowed)]:
        sys.exit(f"unknown {', '.join(unknown)}: use some of {', '.join(map(name, allowed))}")
    return [one for one in allowed if name(one) in wanted]


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="gpt,resnet50", help="gpt, resnet50, tiny (default gpt,resnet50)")
    parser.add_argument("--rows", help=", ".join(ROWS))
    parser.add_argument("--profiles", help=", ".join(profile.name for profile in PROFILES))
    parser.add_argument("-K", type=int, default=2, help="workers, one core each (default 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a measurement (default 5)")
    parser.add_argument(
        "--budget-minutes", type=float, default=float("inf"), help="of this command (default: no limit)"
    )
    parser.add_argument("--share-cores", action="store_true", help="several workers on a core, to try it: no times")
    parser.add_argument("--out", required=True, help="the record, which is continued if it is there")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    if options.K < 2 or (cores < options.K and not options.share_cores):
        sys.exit(f"-K {options.K} on {cores} cores: every worker needs one, use -K 2 to {cores}")
    if SAMPLES % (options.K * M):
        sys.exit(f"-K {options.K}: an update of {SAMPLES} samples cannot be split into {M} batches for every worker")
    if options.rounds < 1 or not options.seconds > 0 or not options.budget_minutes > 0:  # or no number
        given = f"--rounds {options.rounds} --seconds {options.seconds:g} --budget-minutes {options.budget_minutes:g}"
        sys.exit(f"{given}: use numbers above 0")
    if not (folder := Path(options.out).absolute().parent).is_dir():
        sys.exit(f"--out {options.out}: there is no folder {folder}, make it first")
    return options


def measure(options: argparse.Namespace, hosts: Hosts, folder: Path) -> None:
    networks = chosen(options.networks, (*MEASURED, TINY), lambda network: network.name)
    profiles = chosen(options.profiles, PROFILES, lambda profile: profile.name)
    rows = chosen(options.rows, LISTED, lambda row: row.name)
    settings = {
        "K": options.K,
        "samples_per_update": SAMPLES,
        "M": M,
        "networks": [network.as_dict() for network in networks],
        "profiles": [{**asdict(profile), "rate": min(profile.rate, 1e15)} for profile in profiles],
        "rows": [asdict(row) for row in rows],
        "rounds": options.rounds,
        "seconds": options.seconds,
        "tcp": hosts.tcp(),
        **({"share_cores": True} if options.share_cores else {}),
    }
    record = NetworkRecord(Path(options.out), settings, origin())
    for profile in profiles:
        if profile.name != LOOPBACK and profile.name not in record.found["lines"]:
            record.found["lines"][profile.name] = measured(hosts, profile)
            record.write()
    cuts = {network.name: cuts_of(network, options.K, record) for network in networks}
    for network in networks:
        measure_costs(network, cuts[network.name], hosts=hosts, record=record, folder=folder)
    for number in range(1, options.rounds + 1):
        for network in networks:
            for row in rows:
                measure_row(
                    row,
                    network,
                    cuts[network.name],
                    hosts=hosts,
                    profiles=profiles,
                    number=number,
                    seconds=options.seconds,
                    end=BEGUN + 60 * options.budget_minutes,
                    record=record,
                    folder=folder,
                )
    say(f"written: {options.out}")


def main(arguments: Sequence[str]) -> None:
    options = options_of(arguments)
    try:
        with (
            ending_on_terminate(),
            Hosts(options.K, cores=sorted(os.sched_getaffinity(0))[options.K :]) as hosts,
            tempfile.TemporaryDirectory(prefix="offbeat-network-") as folder,
        ):
            measure(options, hosts, Path(folder))
    except (CannotMakeHostsError, RowFailedError) as reason:  # the latter: times of stages, which all rows need
        sys.exit(f"{reason}")
    except OutOfTimeError:
        say(f"no time is left; the same command continues {options.out}")
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command continues {options.out}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
