"""Training over slow lines between hosts (benchmarks/network_relay.py): several messages in flight, and lines that are
cut for seconds."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import ENVIRONMENT, START, free_ports, longest_pause, wait_for
from torch import nn

import offbeat

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from network_relay import DEVICE, CannotMakeHostsError, Hosts, Profile  # noqa: E402

LINE = Profile("slow", 50e6, 40e-3)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(2))
        except CannotMakeHostsError as reason:
            pytest.skip(str(reason))
        made.set(LINE)
        yield made


@contextlib.contextmanager
def started(hosts: Hosts, *arguments: str, **surroundings: str) -> Iterator[list[subprocess.Popen]]:
    """A Python command on each host, with what torchrun would set."""
    group = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": str(free_ports(1)[0]),
        "GLOO_SOCKET_IFNAME": DEVICE,
    }
    processes = [
        subprocess.Popen(
            hosts.command(rank, sys.executable, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**ENVIRONMENT, **group, **surroundings, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


MESSAGES = """
import time
import torch
from offbeat.core.links import Message
from offbeat.engines.processes import Processes

engine = Processes(2)
up, down = engine.link("activations", 1, 2, capacity=64), engine.link("gradients", 2, 1, capacity=64)
for count in (8, 40):  # the first ones are sent in two pieces
    began = time.monotonic()
    for t in range(count):
        if engine.rank == 0:
            up.send(Message(t, torch.zeros(100)))
        else:
            up.receive()
    down.receive() if engine.rank == 0 else down.send(Message(0))
print(time.monotonic() - began, flush=True)
engine.close()
"""


@pytest.mark.slow  # by the clock
def test_messages_do_not_wait_for_a_round_trip_each(hosts):
    with started(hosts, "-c", MESSAGES) as processes:
        printed = [process.communicate(timeout=START) for process in processes]
    assert float(printed[0][0]) < 0.6 * 40 * 2 * LINE.delay, printed


LONG = """
import torch
from offbeat.core.links import Message
from offbeat.engines.processes import Processes

engine = Processes(2, silence=2)
up, down = engine.link("activations", 1, 2, capacity=4), engine.link("gradients", 2, 1, capacity=4)
with engine.guard():
    for t in range(2):
        if engine.rank == 0:
            up.send(Message(t, torch.zeros(25_000_000, dtype=torch.uint8)))  # 4 s
            down.receive()
        else:
            up.receive()
            down.send(Message(t))
print("sent", flush=True)
engine.close()
"""


@pytest.mark.slow  # by the clock
def test_a_message_may_take_longer_than_the_silence(hosts):
    """Heartbeats waited on the connection of the message, and the other stage seemed to have died."""
    with started(hosts, "-c", LONG) as processes:
        printed = [process.communicate(timeout=START) for process in processes]
    assert [out for out, _ in printed] == ["sent\n"] * 2, printed


TRAINING = """
import hashlib, os, sys
import torch
sys.path.insert(0, os.environ["HERE"])
from test_slow_lines import trained

print(trained(), flush=True)
"""
BATCHES = 40


def trained(engine: str | None = None) -> str:
    """The bits of a network after some batches; prints the index of each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 4))
    pipe = offbeat.Pipeline(
        layers,
        2,
        method=offbeat.ADL(M=2),
        loss=nn.functional.cross_entropy,
        cuts=[2],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        engine=engine,
        messages="int8",
    )
    draw = torch.Generator().manual_seed(1)
    for t in range(BATCHES):
        pipe.step(torch.randn(8, 16, generator=draw), torch.randint(4, (8,), generator=draw))
        if engine is None:
            print(t, flush=True)
    pipe.drain()
    pipe.close()
    return str([parameter.double().sum().item().hex() for parameter in layers.parameters()])


@pytest.mark.slow
def test_a_line_that_is_cut_for_seconds_changes_no_bit_and_training_continues(hosts, tmp_path):
    import socket

    with socket.socket() as fresh:
        if longest_pause(fresh) is None:
            pytest.skip("needs Linux 6.15")
    here = {"HERE": str(Path(__file__).parent), "OFFBEAT_SILENCE": "16", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with started(hosts, "-c", TRAINING, **here) as processes:
        first = processes[0]
        for t in range(BATCHES // 2):
            assert first.stdout.readline() == f"{t}\n", first.stderr.read()
        hosts.cut()
        time.sleep(5)
        lost = hosts.counters()["lost"]
        hosts.mend()
        printed = [process.communicate(timeout=START) for process in processes]
    assert lost > 0
    for out, errors in printed:
        assert out.splitlines()[-1] == trained("simulate"), errors


RUN = (
    "--data",
    "synthetic",
    "--samples",
    "1024",
    "--model",
    "resnet8",
    "--shape",
    "3,8,8",
    "--batch-size",
    "16",
    "-M",
    "2",
)


@pytest.mark.slow
def test_a_line_that_stays_cut_ends_the_run_with_a_checkpoint_to_resume_from(hosts, tmp_path, offbeat):
    out = tmp_path / "run"
    settings = (*RUN, "--epochs", "2", "-K", "2", "--checkpoint-every", "5b", "--json")
    train = ("-m", "offbeat", "train")
    with started(hosts, *train, *settings, "--out", str(out), OFFBEAT_SILENCE="4") as processes:
        checkpoints = out / "checkpoints"
        begun = wait_for(lambda: checkpoints.is_dir() and len(list(checkpoints.iterdir())) > 1, START)
        assert begun, [process.poll() for process in processes]
        hosts.cut()
        printed = [process.communicate(timeout=START) for process in processes]
    for rank, (_, errors) in enumerate(printed):
        assert f"stage {2 - rank} has not answered for 4 s" in errors
    hosts.mend()
    with started(hosts, *train, "--resume", str(out), "--json") as processes:
        printed = [process.communicate(timeout=2 * START) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], printed
    one_host = ("--engine", "simulate", "--threads-per-stage", 1, "--out", tmp_path / "here")
    assert offbeat("train", *settings, *one_host).code == 0
    whole, resumed = (folder / "model.safetensors" for folder in (tmp_path / "here", out))
    assert whole.read_bytes() == resumed.read_bytes()
