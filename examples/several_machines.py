"""Several machines: two agents of torchrun, each with one stage. Here both are on this machine, over loopback.

    python examples/several_machines.py

On real ones, type on the machine whose address is HOST (R=0) and on the other (R=1), with a free PORT of HOST:

    torchrun --nnodes 2 --nproc-per-node 1 --node-rank R --master-addr HOST --master-port PORT \\
        -m offbeat train --model resnet56 --data cifar10 --data-dir DIR -K 2 -M 4 \\
        --checkpoint-every 10min --out /shared/runs/x

Links use the interface that leads to HOST; GLOO_SOCKET_IFNAME sets another.
--out may be a folder that all of them see; where it is not, the first machine holds the run. The data are read there
alone. What crosses the network is neither encrypted nor authenticated, and torch's store listens on all addresses of
HOST: use a network of your own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HOST, INTERFACE, MACHINES = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo", 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def agent(rank: int, port: int, out: Path) -> subprocess.Popen[str]:
    """What is typed on one machine."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(MACHINES),
        "--nproc-per-node",
        "1",
        "--node-rank",
        str(rank),
        "--master-addr",
        HOST,
        "--master-port",
        str(port),
        "-m",
        "offbeat",
        "train",
        "--model",
        "resnet8",
        "--data",
        "digits",
        "-K",
        str(MACHINES),
        "-M",
        "2",
        "--epochs",
        "2",
        "--out",
        str(out),
        "--json",
    ]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    return subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as shared:
        out, port = Path(shared) / "run", free_port()
        agents = [agent(rank, port, out) for rank in range(MACHINES)]
        try:
            said = [started.communicate(timeout=100) for started in agents]
        finally:
            for started in agents:
                if started.poll() is None:
                    started.terminate()  # left waiting for one that failed; it takes its workers along
        if any(started.returncode for started in agents):
            print("\n".join(errors for _, errors in said), file=sys.stderr)
            return 1
        result = json.loads("".join(printed for printed, _ in said))
        print(f"{MACHINES} agents, a stage each: test error {result['error']:.2f} %, staleness {result['staleness']}")
        print("run folder:", ", ".join(sorted(path.name.split(".out.")[0] for path in out.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
