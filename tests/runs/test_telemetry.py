"""Reports come to the first process, and nothing else is taken for one."""

from __future__ import annotations

import torch
from torch import nn

import offbeat
from offbeat.core.links import Message
from offbeat.core.links.distributed import GOODBYE
from offbeat.runs.telemetry import Telemetry


def test_the_last_reports_are_awaited_and_the_goodbye_after_them_is_left():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    pipe = offbeat.Pipeline(
        model,
        2,
        method=offbeat.ADL(M=1),
        loss=nn.functional.cross_entropy,
        cuts=[1],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    pipe.step(torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))
    telemetry = Telemetry(pipe)
    telemetry.send()
    telemetry.links[2].send(Message(-1, kind=GOODBYE))
    (reports,) = telemetry.collect(wait=True)
    assert [report.k for report in reports] == [1, 2]
    assert telemetry.links[2].receive().kind == GOODBYE
