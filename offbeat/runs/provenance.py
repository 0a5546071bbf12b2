"""Where a result comes from: versions, commit, host and command of the process that computed it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "safetensors")


NETWORK = "OFFBEAT_NETWORK"  # variable with a description of the network between the machines, for records


def provenance(command: list[str] | None = None, *, device: str | None = None) -> dict[str, Any]:
    """Versions, commit, host and command of this process. command: instead of its own, without paths for instance."""
    from offbeat import __version__

    versions = {"offbeat": __version__, "python": platform.python_version()}
    versions.update({package: metadata.version(package) for package in PACKAGES})
    return {
        "versions": versions,
        "commit": commit(),
        "host": platform.node(),
        "machine": f"{processor()}, {os.cpu_count()} cores{f', {gpu_name()}' if device == 'cuda' else ''}",
        "command": command or own_command(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **({"network": network} if (network := os.environ.get(NETWORK)) else {}),
    }


def own_command() -> list[str]:
    """The command line of this process: that of `offbeat`, or of a script without its folder."""
    program = Path(sys.argv[0])
    ours = program.name == "__main__.py" and program.parent.name == "offbeat"
    return ["offbeat" if ours else program.name, *sys.argv[1:]]


def gpu_name() -> str:
    """The name of the GPU."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "no GPU"


def processor() -> str:
    """The name of the processor, if the system provides it."""
    try:
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        return names[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of the environment variable OFFBEAT_COMMIT, else of the source tree, with + if it has changes."""
    return os.environ.get("OFFBEAT_COMMIT") or _commit_of_source()


@cache
def _commit_of_source() -> str | None:
    """Read once per process: the source tree may change while its modules run."""
    here = Path(__file__).resolve().parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        )
        changed = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
