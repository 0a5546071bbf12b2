"""A process that dies while another one sends to it: gloo forgets a send that is being written at that moment."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from processes import START, STOP, last_line, stopped, two_processes, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the state of a process in /proc")

# The second process stops when its receives are posted. Then the first sends more than a connection takes.
BEGIN = """
import os, signal, threading, time

import torch
from torch import nn

import offbeat
from offbeat.core.links import Message
from offbeat.core.replica_group import GroupWindowSum
from offbeat.engines.processes import Processes

torch.set_num_threads(1)


def stop_soon():
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()


def wait_for_stop(pid):
    while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
"""
COLLECTIVE = """
engine = Processes(2)
_, pid = engine.exchange(os.getpid())
stop_soon() if engine.rank == 1 else wait_for_stop(pid)
engine.share_tensors([torch.zeros(16 << 20)], 1)
"""
SUM = """
engine = Processes(1, replicas=2)
_, pid = engine.exchange(os.getpid())
start = GroupWindowSum.start


def stopped_start(self, *given, **named):
    stop_soon() if engine.rank == 1 else wait_for_stop(pid)
    start(self, *given, **named)


GroupWindowSum.start = stopped_start
pipe = offbeat.Pipeline(nn.Linear(4096, 4096), 1, replicas=2, engine=engine, method="bp", loss=nn.functional.mse_loss,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
pipe.step(torch.ones(2, 4096), torch.zeros(2, 4096))
pipe.drain()
"""
LINK = """
engine = Processes(2)
_, pid = engine.exchange(os.getpid())
link = engine.link("activations", 1, 2, capacity=1)
if engine.rank == 1:
    link.receive()  # the next receive is as long
    stop_soon()
else:
    link.send(Message(0, [torch.zeros(16 << 20)]))
    wait_for_stop(pid)
    link.send(Message(1, [torch.zeros(16 << 20)]))
engine.share(None, 2)
"""


@pytest.mark.parametrize(
    ("script", "name"),
    [(COLLECTIVE, "stage 2"), (SUM, "stage 1 of replica 1"), (LINK, "stage 2")],
    ids=["collective", "sum over replicas", "link"],
)
def test_a_send_that_a_death_interrupts_is_not_waited_for(script, name):
    with two_processes(BEGIN + script) as (first, second):
        assert wait_for(lambda: stopped(second.pid), START)
        time.sleep(1)  # until the connection is full
        os.kill(second.pid, signal.SIGKILL)
        last = last_line(first, STOP)
        assert f"{name} is gone: its process has died" in last, last
