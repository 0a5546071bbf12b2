"""The advice of a plan to use fewer stages: decided by bounds of the periods, as by the periods themselves."""

from __future__ import annotations

import random

import pytest

from offbeat.method import Method
from offbeat.methods import ADL, ADL1F1B, TwoBW
from offbeat.partitioning.profile import Profile, UnitCost
from offbeat.partitioning.refine import stage_sums
from offbeat.partitioning.solve import solve
from offbeat.partitioning.timing import StageTime
from offbeat.studies import plan
from offbeat.timeline import Costs, bounds, period

UNITS, K = 24, 8


def drawn(seed: int) -> tuple[Profile, plan.LinkCost]:
    """Units of different times and sizes, and a link whose messages take about as long as a stage."""
    draw = random.Random(seed)
    units = [
        UnitCost(f"{number}", 1, draw.choice([1, 5, 20]), 1, 1, 1, draw.uniform(0.5, 1.5), draw.uniform(1.0, 3.0))
        for number in range(UNITS)
    ]
    sizes = [0, *(draw.choice([1, 4]) for _ in range(UNITS - 1))]
    return Profile("cpu", True, [[1]], units, sizes, list(range(1, UNITS))), plan.LinkCost(draw.uniform(0.0, 8.0), 1.0)


def fewest(method: Method, seed: int) -> int:
    profile, link = drawn(seed)
    solution = solve([unit.forward + unit.backward for unit in profile.units], K)
    sums = (
        stage_sums([getattr(unit, part) for unit in profile.units], solution.cuts)
        for part in ("forward", "backward", "parameter_bytes")
    )
    taken = [StageTime(*times) for times in zip(*sums, strict=True)]
    return plan._fewest(method, profile, link, solution, taken)


@pytest.mark.parametrize(
    "method", [ADL1F1B(M=4), ADL(M=2), TwoBW(M=8), ADL(M=4, window="aligned")], ids=lambda method: method.name
)
def test_bounds_decide_as_the_periods_do(method, monkeypatch):
    found = [fewest(method, seed) for seed in range(40)]
    assert len(set(found)) > 2
    loose = []

    def exact(method: Method, costs: Costs) -> tuple[float, float]:
        least, most = bounds(method, costs)
        seconds = period(method, costs)
        assert least <= seconds * (1 + 1e-12)
        assert seconds <= most * (1 + 1e-12)
        loose.append(least < most)
        return seconds, seconds

    monkeypatch.setattr(plan, "bounds", exact)
    assert [fewest(method, seed) for seed in range(40)] == found
    assert any(loose)
