"""The console command, which ends in one line also where Ctrl-C comes before its modules are imported."""

from __future__ import annotations

import os
import sys


def main() -> None:
    try:
        from offbeat.cli import main as command
    except KeyboardInterrupt:
        if "OFFBEAT_WORKER_ERRORS" not in os.environ:  # of a worker, whose launcher prints the line
            print("offbeat: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
