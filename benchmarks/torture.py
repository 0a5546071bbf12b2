"""What must hold when everything goes wrong, tried for long: kills, bad input, slow links, checkpoints, hours.

    make torture                                        all of them, with what they take by default
    python benchmarks/torture.py kills [--count 100] [--seed 0] [--jobs 1] [--out FILE]
    python benchmarks/torture.py configs [--count 1000] [--seed 0] [--out FILE]
    python benchmarks/torture.py latency [--out FILE]
    python benchmarks/torture.py overhead [--out FILE]
    python benchmarks/torture.py soak [--minutes 20] [--out FILE]

Each prints its progress, then what was wanted and what was seen, and exits with 1 where they differ. --out writes the
record; `kills` goes on with a record that is there, until it holds --count trials.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from start import arguments, in_processes, origin, write_record

MADE = origin()  # of what was there at the beginning
COMMANDS = ("kills", "configs", "latency", "overhead", "soak")


def write(out: str | None, found: dict[str, Any]) -> None:
    """The record with where it comes from."""
    write_record(out, {**found, "provenance": MADE})


def as_workers(options: argparse.Namespace, K: int) -> bool:
    """Run this very command in K processes; whether its record says that all was good."""
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or f"{folder}/record.json"
        code = in_processes(K, [*arguments(), "--out", out])
        return code == 0 and bool(json.loads(Path(out).read_text())["good"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        command = commands.add_parser(name)
        command.add_argument("--out")
        command.add_argument("--seed", type=int, default=0)
        if name in ("kills", "configs"):
            command.add_argument("--count", type=int, default={"kills": 100, "configs": 1000}[name])
        if name == "kills":
            command.add_argument("--jobs", type=int, default=1, help="trials at the same time")
        if name in ("kills", "soak"):
            command.add_argument(
                "--minutes", type=float, default={"kills": None, "soak": 20.0}[name], help="begin nothing after so long"
            )
        if name == "soak":
            command.add_argument("--every", type=float, default=10.0, help="seconds between samples")
        if name in ("latency", "overhead"):
            command.add_argument("--rounds", type=int, default={"latency": 3, "overhead": 6}[name])
            command.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command == "kills":
        from torture_kills import run
    elif options.command == "configs":
        from torture_configs import run
    elif options.command == "latency":
        from torture_latency import run
    elif options.command == "overhead":
        from torture_overhead import run
    else:
        from torture_soak import run
    sys.exit(0 if run(options) else 1)


if __name__ == "__main__":
    main()
