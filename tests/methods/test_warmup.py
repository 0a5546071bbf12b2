"""Methods that follow each other (staleness_warmup) against the same sequence of literal computations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import serial
from engine import agree, pipeline, trained

import offbeat
from offbeat.methods import with_staleness_warmup

M, N = 2, 23
RULES = {"bp": serial.bp(M), "adl-1f1b": serial.adl_1f1b(M), "adl": serial.adl(M)}


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("phases", ["bp@3", "bp@2+adl-1f1b@4", "adl@1+bp@2"])
@pytest.mark.parametrize(
    ("method", "rules"),
    [
        (offbeat.ADL(M=M), serial.adl(M)),
        (offbeat.ADL(M=M, weights="replay"), serial.adl(M, "replay")),
        (offbeat.TwoBW(M=M), serial.two_bw(M)),
        (offbeat.ADL(M=M, corrector="t1:updates=5"), replace(serial.adl(M), anneal=5)),
    ],
    ids=["adl", "adl-replay", "2bw", "adl-t1"],
)
def test_a_warmup_is_the_sequence_of_its_methods(method, rules, phases, K):
    batches, done, stages = serial.data(N), 0, None
    for name, updates in (part.split("@") for part in phases.split("+")):
        same = {"weights": rules.weights, "anneal": rules.anneal}
        first = replace(RULES[name], **same) if name != "bp" else RULES[name]
        stages = serial.lagged(K, batches[done : done + M * int(updates)], first, after=stages)
        done += M * int(updates)
    stages = serial.lagged(K, batches[done:], rules, after=stages)
    found = trained(pipeline(K, with_staleness_warmup(method, phases)), batches)
    for k, theta in enumerate(serial.final(stages)):
        agree(found[k], theta, f"stage {k + 1} of {K}")


@pytest.mark.parametrize("at", [3, 4, 5, 7])
def test_t1_counts_late_updates_where_a_drain_has_closed_windows_early(at):
    """It counted all updates: with three or more of them before, it was over before it had begun."""
    K, batches, anneal = 3, serial.data(N), 3
    rules, stages = replace(serial.adl(M), anneal=anneal), None
    phases = [(0, at, RULES["bp"]), (at, 10, RULES["bp"]), (10, N, rules)]
    for begin, end, phase in phases:
        stages = serial.lagged(K, batches[begin:end], phase, after=stages)
    pipe = pipeline(K, with_staleness_warmup(offbeat.ADL(M=M, corrector=f"t1:updates={anneal}"), 5))
    for x, y in batches[:at]:
        pipe.step(x, y)
    pipe.drain()
    found = trained(pipe, batches[at:])
    for k, theta in enumerate(serial.final(stages)):
        agree(found[k], theta, f"stage {k + 1} of {K}")
