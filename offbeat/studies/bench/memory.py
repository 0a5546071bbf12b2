"""Whether the memory of this machine is enough for the workers of a benchmark, estimated before any is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offbeat.errors import UserError
from offbeat.runs.launch import workers_here
from offbeat.studies.bench.cuts import Network
from offbeat.studies.bench.rows import BenchRow, BenchSetting

PROCESS = 80_000_000  # bytes that a worker has for itself, without a network
MEMORY = Path("/proc/meminfo")
STATES = 3  # parameters, gradients and momentum


def available() -> tuple[int, int]:
    """Bytes of this machine's memory that are free, and all of it."""
    lines = dict(line.split(":") for line in MEMORY.read_text().splitlines())
    free, total = (1024 * int(lines[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    return free, total


def memory_left() -> float:
    """Share of this machine's memory that is free."""
    free, total = available()
    return free / total


def check_memory(setting: BenchSetting, rows: Sequence[BenchRow]) -> None:
    """Refuse rows whose workers, which all run at the same time, need more memory than is free even without batches."""
    if setting.device != "cpu" or not MEMORY.exists():
        return
    many, free = sum(not row.alone for row in rows), available()[0]
    each = workers_here(setting.K)
    processes = len(rows) - many + many * each
    network = sum(p.numel() * p.element_size() for p in Network.of(setting, device="meta").model.parameters())
    states = len(rows) * STATES * network * each / setting.K
    needed = processes * PROCESS + states
    if needed <= free:
        return
    most = int((free - states - (len(rows) - many) * PROCESS) / (many * PROCESS)) if many else 0
    fewer = f"K={most} or fewer, " if most > 1 and each == setting.K else ""
    raise UserError(
        f"K={setting.K}: {processes} processes of {len(rows)} rows need at least {needed / 1e9:.1f} GB of memory, and "
        f"{free / 1e9:.1f} GB are free: use {fewer}fewer rows (against=), or a machine with more memory"
    )
