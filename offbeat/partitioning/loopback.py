"""What a message between two processes of this machine costs, over the links that training uses."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from offbeat.core.links import Link, Message
from offbeat.engines.processes import Processes
from offbeat.errors import UserError, first_line

SMALL, LARGE = 1 << 10, 1 << 22  # bytes
TURNS, WARM_UP = 20, 3
TIMEOUT = 60.0  # seconds for both processes
CHILD = "from offbeat.partitioning.loopback import measure_one_end; measure_one_end()"


@dataclass(frozen=True)
class LinkMeasurement:
    """Latency in seconds, bandwidth in bytes per second, and processor seconds that each of the two processes spends
    on a message, whatever its size, and on each of its bytes."""

    latency: float
    bandwidth: float
    work_per_message: float
    work_per_byte: float


def measure_links() -> LinkMeasurement:
    """Of two processes that exchange messages over gloo."""
    with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(rank), str(Path(folder) / "store")],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in (0, 1)
        ]
        try:
            printed = [process.communicate(timeout=TIMEOUT) for process in processes]
        except subprocess.TimeoutExpired:
            raise _failed(f"no answer within {TIMEOUT:.0f} s") from None
        finally:
            for process in processes:
                process.kill()
                process.communicate()
    for process, (_, err) in zip(processes, printed, strict=True):
        if process.returncode:
            raise _failed(err.strip().splitlines()[-1] if err.strip() else f"exit code {process.returncode}")
    (small, small_work), (large, large_work) = json.loads(printed[0][0].splitlines()[-1])
    per_byte = max(large_work - small_work, 0.0) / (LARGE - SMALL)
    return LinkMeasurement(small, (LARGE - SMALL) / max(large - small, 1e-9), small_work, per_byte)


def _failed(reason: str) -> UserError:
    return UserError(f"links cannot be measured ({first_line(ValueError(reason))}): give latency= and bandwidth=")


def measure_one_end() -> None:
    """Run one of the two processes; the first prints the seconds, and those of its processor, that a small and a
    large message take one way."""
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    engine = Processes(2)
    up = engine.link("activations", 1, 2, capacity=4)
    down = engine.link("gradients", 2, 1, capacity=4)
    assert up is not None
    assert down is not None
    times = [_one_way(rank, up, down, size) for size in (SMALL, LARGE)]
    if rank == 0:
        print(json.dumps(times), flush=True)
    engine.close()
    dist.destroy_process_group()


def _one_way(rank: int, up: Link, down: Link, size: int) -> tuple[float, float]:
    """Seconds that a message takes, and processor seconds of this process (all threads) per message."""
    content, laps, work = torch.zeros(size // 4), [], []
    for t in range(TURNS + WARM_UP):  # the first long message is sent in two pieces
        began, busy = time.perf_counter(), time.process_time()
        if rank == 0:
            up.send(Message(t, content))
            down.receive()
        else:
            down.send(Message(t, up.receive().content))
        laps.append((time.perf_counter() - began) / 2)
        work.append((time.process_time() - busy) / 2)
    return statistics.median(laps[WARM_UP:]), statistics.median(work[WARM_UP:])
