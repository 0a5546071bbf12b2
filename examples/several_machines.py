"""Several machines: two agents of torchrun with one stage each. Here both run on this machine, over loopback.

    python examples/several_machines.py

With real machines, run this on the machine with address HOST (R=0) and on the other (R=1), with a free PORT of HOST:

    torchrun --nnodes 2 --nproc-per-node 1 --node-rank R --master-addr HOST --master-port PORT \\
        -m offbeat train --model resnet56 --data cifar10 --data-dir DIR -K 2 -M 4 \\
        --checkpoint-every 10min --out /shared/runs/x

Links use the network interface of the route to HOST; GLOO_SOCKET_IFNAME sets another. If --out is not a shared folder,
the run is stored on the first machine. Only the first machine reads data. Messages are neither encrypted nor
authenticated, and torch's store listens on all addresses of HOST: use a trusted network.
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
    """Start the command of one machine."""
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as shared:
        out, port = Path(shared) / "run", free_port()
        agents = [agent(rank, port, out) for rank in range(MACHINES)]
        try:
            outputs = [started.communicate(timeout=100) for started in agents]
        finally:
            for started in agents:
                if started.poll() is None:
                    started.terminate()  # it waits for an agent that failed; its workers end with it
        if any(started.returncode for started in agents):
            print("\n".join(errors for _, errors in outputs), file=sys.stderr)
            return 1
        result = json.loads("".join(printed for printed, _ in outputs))
        print(f"{MACHINES} agents, one stage each: test error {result['error']:.2f} %, staleness {result['staleness']}")
        print("run folder:", ", ".join(sorted(path.name.split(".out.")[0] for path in out.iterdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
