"""The end of a script in several processes: no thread may be left to wake up in what remains of the interpreter.

In Python before 3.14 such a thread ends by unwinding its stack, which a C++ frame that must not throw answers with
"terminate called without an active exception": the results are printed, and the exit code is that of an abort.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENVIRONMENT, free_ports

TRAIN = """
import os, pathlib, sys, time
import torch
import offbeat

rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
pipe = offbeat.Pipeline(
    torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)), K=2, cuts=[1],
    method=offbeat.ADL(M=2), loss=torch.nn.functional.mse_loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
for _ in range(3):
    pipe.step(torch.ones(4, 2), torch.zeros(4, 3))
pipe.drain()
"""


def in_two_processes(script: str, folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each rank."""
    (port,) = free_ports(1)
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    both = [
        subprocess.Popen([sys.executable, "-c", TRAIN + script, str(folder)], stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, **group, "RANK": rank})
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=90) for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    return [(process.returncode, *words) for process, words in zip(both, said, strict=True)]


LOOK = """
def gloo():
    found = 0
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            found += "gloo" in task.joinpath("comm").read_text()
        except OSError:  # it has just ended
            pass
    return found

before = gloo()
pipe.close()
print(before > 0, gloo())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of threads")
def test_a_pipeline_that_is_closed_leaves_no_thread_of_gloo(tmp_path):
    """They let go of a collective's tensors some time after its end, for which they take the interpreter's lock."""
    assert in_two_processes(LOOK, tmp_path) == [(0, "True 0\n", "")] * 2


# The first process is held up at its very end, and only then the second one goes, which wakes whatever waits for it.
LEFT_BEHIND = """
from offbeat.engines import processes

processes.PARTING = 0.3
left = folder / "left"

class Last:
    def __del__(self, touch=left.touch, sleep=time.sleep):
        touch()
        sleep(2)

if rank == 0:
    last = Last()
    print("trained", flush=True)
else:
    while not left.exists():
        time.sleep(0.05)
    os._exit(0)
"""


@pytest.mark.slow
def test_a_script_that_does_not_close_ends_well_before_its_neighbour_does(tmp_path):
    assert in_two_processes(LEFT_BEHIND, tmp_path) == [(0, "trained\n", ""), (0, "", "")]
