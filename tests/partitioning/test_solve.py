"""The solver: equal to exhaustive search whatever is asked of it, quick, and clear about what cannot be."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import UserError
from offbeat.partitioning.solve import Memory, Way, fastest_changed, solve


def exhaustive(costs, K, *, speeds=None, exposed_below=None, exposed_above=None, memory=None, pinned=(), legal=None):
    """(slowest, sum of squares, cuts) of the best of all partitions, straight from the definition; None if none."""
    count = len(costs)
    speeds = speeds or [1] * K
    below = exposed_below or [0] * count
    above = exposed_above or [0] * count
    best = None
    for cuts in itertools.combinations(range(1, count) if legal is None else sorted(legal), K - 1):
        if not set(pinned) <= set(cuts):
            continue
        times = []
        for k, (a, b) in enumerate(itertools.pairwise([0, *cuts, count])):
            if memory is not None:
                limit = memory.limit[k] if isinstance(memory.limit, list) else memory.limit
                kept = sum(memory.parameters[a:b]) * memory.versions[k] + sum(memory.held[a:b]) * memory.in_flight[k]
                if kept > limit:
                    break
            times.append(sum(costs[a:b]) / speeds[k] + (above[a] if a else 0) + (below[b] if b < count else 0))
        else:
            found = max(times), sum(t * t for t in times), cuts
            best = found if best is None else min(best, found)
    return best


@st.composite
def problems(draw, numbers):
    """Any combination of speeds, communication, memory, pinned and illegal cuts; never more pins than cuts."""
    count = draw(st.integers(1, 12))
    legal = draw(st.none() | st.sets(st.integers(1, count - 1))) if count > 1 else None
    places = sorted(legal) if legal is not None else list(range(1, count))
    K = draw(st.integers(1, min(6, len(places) + 1)))

    def each(values, length=count):
        return draw(st.lists(values, min_size=length, max_size=length))

    asked = {"costs": each(numbers), "K": K, "legal": legal}
    if draw(st.booleans()):
        asked["speeds"] = each(st.sampled_from([0.5, 1, 2, 4]), K)
    for side in ("exposed_below", "exposed_above"):
        if draw(st.booleans()):
            asked[side] = each(numbers)
    if draw(st.booleans()):
        limit = st.integers(1, 400)
        asked["memory"] = Memory(
            parameters=each(st.integers(0, 20)),
            held=each(st.integers(0, 20)),
            versions=each(st.integers(0, 4), K),
            in_flight=each(st.integers(0, 4), K),
            limit=draw(limit) if draw(st.booleans()) else each(limit, K),
        )
    if K > 1:
        asked["pinned"] = draw(st.lists(st.sampled_from(places), unique=True, max_size=draw(st.integers(0, K - 1))))
    return asked


@settings(max_examples=400, deadline=None)
@given(problems(st.integers(0, 30)))
def test_the_partition_is_that_of_exhaustive_search(asked):
    best = exhaustive(**asked)
    if best is None:
        with pytest.raises(UserError, match="memory limit"):
            solve(**asked)
        return
    found = solve(**asked)
    assert (found.bottleneck, sum(t * t for t in found.times), found.cuts) == best
    assert found.bottleneck >= found.unit_bound
    assert found.balance <= found.balance_bound * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(problems(st.floats(0, 100)))
def test_measured_times_are_as_well_balanced_as_by_exhaustive_search(asked):
    best = exhaustive(**asked)
    if best is not None:
        assert solve(**asked).bottleneck == pytest.approx(best[0], rel=1e-12, abs=1e-11)


@settings(max_examples=100, deadline=None)
@given(problems(st.integers(0, 30)))
def test_the_smallest_limit_named_in_the_refusal_is_the_smallest(asked):
    memory = asked.get("memory")
    if memory is None or isinstance(memory.limit, list) or exhaustive(**asked) is not None:
        return
    with pytest.raises(UserError, match="use at least") as refused:
        solve(**asked)
    least = int(str(refused.value).split("use at least ")[1].split(",")[0])
    asked["memory"] = Memory(**{**vars(memory), "limit": least})
    assert max(solve(**asked).memory) == least
    asked["memory"] = Memory(**{**vars(memory), "limit": least - 0.5})
    assert exhaustive(**asked) is None


def test_what_the_method_cannot_hide_moves_the_cut():
    assert solve([1] * 6, 2).cuts == (3,)
    dear = [0, 0, 0, 5, 0, 0]  # only the cut before unit 3 is dear
    assert solve([1] * 6, 2, exposed_below=dear).cuts == (2,)
    assert solve([1] * 6, 2, exposed_above=lambda cut: 5 * (cut == 3)).times == (2, 4)


def test_a_slower_worker_gets_less():
    solution = solve([1] * 100, 3, speeds=[1, 1, 0.5])
    assert solution.cuts == (40, 80)
    assert solution.balance == 1


def test_early_stages_hold_more_batches_and_get_fewer_units_where_memory_is_short():
    kept = Memory(parameters=[1] * 12, held=[2] * 12, versions=[3, 2, 1], in_flight=[5, 3, 1], limit=26)
    solution = solve([1] * 12, 3, memory=kept)
    assert solution.cuts == (2, 5)
    assert solution.memory == (26, 24, 21)
    assert solve([1] * 12, 3).cuts == (4, 8)


def test_the_largest_unit_sets_the_bound_and_the_rest_still_balances():
    solution = solve([1, 1, 9, 1, 1, 1, 1], 3)
    assert (solution.largest, solution.unit_bound, solution.bottleneck) == ((2, 3), 9, 9)
    assert solution.cuts == (2, 3)
    assert solution.balance == solution.balance_bound == 15 / 27


def test_units_that_cannot_be_cut_apart_set_the_bound_together():
    solution = solve([1] * 8, 2, legal=[1, 6])
    assert (solution.largest, solution.unit_bound, solution.times) == ((1, 6), 5, (6, 2))


def test_nothing_to_do_is_balanced():
    solution = solve([0, 0, 0], 2)
    assert (solution.cuts, solution.times, solution.balance, solution.balance_bound) == ((1,), (0, 0), 1, 1)


@pytest.mark.parametrize(("count", "K"), [(400, 16), (400, 256), (4000, 256)])
def test_the_search_makes_as_many_passes_for_256_stages_as_for_few(count, K, monkeypatch):
    passes = []

    def counted(ways, limit):
        passes.append(limit)
        return windows(ways, limit)

    module = sys.modules["offbeat.partitioning.solve"]
    windows = module._windows
    monkeypatch.setattr(module, "_windows", counted)
    random = np.random.default_rng(0)
    exposed = random.uniform(0, 0.5, count)
    solve(random.uniform(0.5, 1.5, count), K, exposed_below=exposed if K == 256 else None)
    assert 0 < len(passes) <= 50


@pytest.mark.parametrize("shape", ["even", "one dear unit", "all at once"])
def test_two_thousand_units_into_32_stages_take_less_than_a_second(shape):
    count, K = 2000, 32
    random = np.random.default_rng(0)
    costs = random.uniform(0.5, 1.5, count)
    asked = {}
    if shape != "even":
        costs[1000] = count / 4  # leaves every other stage free: the widest search
    if shape == "all at once":
        kept = Memory(
            parameters=random.integers(1, 100, count),
            held=random.integers(1, 100, count),
            versions=range(K, 0, -1),
            in_flight=range(2 * K - 1, 0, -2),
            limit=1_000_000,
        )
        asked = {
            "speeds": random.uniform(0.5, 2, K),
            "exposed_below": random.uniform(0, 3, count),
            "exposed_above": random.uniform(0, 3, count),
            "memory": kept,
            "pinned": [700, 1500],
        }
    begun = time.process_time()
    solution = solve(costs, K, **asked)
    assert time.process_time() - begun < 1
    assert len(solution.cuts) == K - 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"costs": [1, 2], "K": 0}, r"K=0 stages: use a whole number from 1 up"),
        ({"costs": [1, 2], "K": 1.5}, r"K=1\.5 stages"),
        ({"costs": [1, 2], "K": 3}, r"3 stages but only 2 units to cut between: use K=2 or fewer"),
        (
            {"costs": [1] * 9, "K": 4, "legal": [2, 5]},
            r"4 stages but only 2 legal cuts among 9 units: use K=3 or fewer",
        ),
        ({"costs": [1] * 9, "K": 3, "legal": [2, 5], "pinned": [3]}, r"cut 3 is pinned .* pin 2 or 5"),
        ({"costs": [1] * 9, "K": 2, "pinned": [3, 4]}, r"2 pinned cuts \[3, 4\] but 2 stages have 1: use K=3 or more"),
        ({"costs": [1] * 9, "K": 2, "pinned": [9]}, r"pinned cut 9 of 9 units: cuts are from 1 to 8"),
        ({"costs": [1] * 9, "K": 2, "legal": [0, 4]}, r"legal cut 0 of 9 units"),
        ({"costs": [1, -2], "K": 2}, r"costs\[1\] = -2: use finite numbers from 0 up"),
        ({"costs": [1, float("nan")], "K": 2}, r"costs\[1\] = nan"),
        ({"costs": [1, 2], "K": 2, "speeds": [1]}, r"1 speeds for 2 stages"),
        ({"costs": [1, 2], "K": 2, "speeds": [1, 0]}, r"speeds\[1\] = 0: use finite numbers above 0"),
        ({"costs": [1, 2], "K": 2, "exposed_below": [1]}, r"1 exposed_below for 2 units"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(asked, message):
    with pytest.raises(UserError, match=message) as refused:
        solve(**asked)
    assert "\n" not in str(refused.value)


def test_memory_that_does_not_suffice_is_refused_with_what_would():
    kept = {"parameters": [10] * 4, "held": [0] * 4, "versions": [1, 1], "in_flight": [1, 1]}
    with pytest.raises(UserError, match=r"2 stages do not fit a memory limit of 15 per worker: use at least 20, or"):
        solve([1] * 4, 2, memory=Memory(**kept, limit=15))
    with pytest.raises(UserError, match=r"memory limits 12, 24: use limits at least 1\.250 times as large"):
        solve([1] * 4, 2, memory=Memory(**kept, limit=[12, 24]))


def test_the_solver_itself_imports_no_torch():
    source = Path(__file__).resolve().parents[2] / "offbeat/partitioning/solve.py"
    code = (
        "import importlib.util, sys; "
        f"spec = importlib.util.spec_from_file_location('solver', {str(source)!r}); "
        "module = sys.modules['solver'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "assert module.solve([1, 1], 2).cuts == (1,); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("within", [1.0, 1.1, float("inf")])
@pytest.mark.parametrize("seed", range(60))
def test_the_fastest_choice_of_stages_that_hold_inputs_is_made(seed, within):
    """Against all partitions and all choices of stages; of those within the tolerance the fewest."""
    draw = random.Random(seed)
    count, K = draw.randint(3, 7), draw.randint(2, 3)
    costs = [draw.randint(1, 9) for _ in range(count)]
    speeds = [draw.choice([0.5, 1.0]) for _ in range(K)]
    in_flight = [2 * (K - k) + 1 for k in range(1, K + 1)]
    sizes = {
        "parameters": [draw.randint(0, 3) for _ in range(count)],
        "held": [draw.randint(2, 9) for _ in range(count)],
        "versions": [4.0] * K,
    }
    entering = [draw.randint(0, 9) for _ in range(count)]
    limit = draw.randint(20, 120)
    both = {"limit": limit, "entering": entering, "inputs": in_flight}
    both["twice"] = [draw.randint(0, size) for size in entering]  # what a unit saves of its input
    plain, changed = (Memory(**sizes, **both, in_flight=graphs) for graphs in (in_flight, [1] * K))
    pace = [speeds, [0.75 * speed for speed in speeds]]

    def bytes_of(k, a, b, repeats):
        graphs = 1 if repeats else in_flight[k]
        held = (sum(sizes["held"][a:b]) - both["twice"][a]) * graphs + entering[a] * in_flight[k]
        return sum(sizes["parameters"][a:b]) * 4.0 + held

    possible = {}  # which stages repeat -> time of the slowest stage
    for cuts in itertools.combinations(range(1, count), K - 1):
        spans = list(enumerate(itertools.pairwise([0, *cuts, count])))
        for chosen in itertools.product((0, 1), repeat=K):
            if all(bytes_of(k, a, b, chosen[k]) <= limit for k, (a, b) in spans):
                slowest = max(sum(costs[a:b]) / pace[chosen[k]][k] for k, (a, b) in spans)
                possible[chosen] = min(slowest, possible.get(chosen, float("inf")))
    found = fastest_changed(costs, K, Way(plain, speeds), Way(changed, pace[1]), within=within)
    assert (found is None) == (not possible)
    if found is None:
        return
    fastest = min(possible.values())
    assert found.without == pytest.approx(possible.get((0,) * K, float("inf")) / fastest)
    good = {chosen: time for chosen, time in possible.items() if time <= within * fastest * (1 + 1e-12)}
    marks = tuple(int(k + 1 in found.stages) for k in range(K))
    assert marks in good
    assert sum(marks) == min(map(sum, good))
    graphs = [1 if repeats else n for n, repeats in zip(in_flight, marks, strict=True)]
    kept = Memory(**sizes, **both, in_flight=graphs)
    solution = solve(costs, K, speeds=[pace[repeats][k] for k, repeats in enumerate(marks)], memory=kept)
    spans = enumerate(itertools.pairwise([0, *solution.cuts, count]))
    assert solution.memory == tuple(bytes_of(k, a, b, marks[k]) for k, (a, b) in spans)
    assert solution.bottleneck == pytest.approx(possible[marks])


def test_a_stage_is_not_cut_where_its_input_is_too_large():
    sizes = {"parameters": [0] * 6, "held": [1] * 6, "versions": [1, 1], "in_flight": [1, 1], "inputs": [4, 4]}
    solution = solve([1] * 6, 2, memory=Memory(**sizes, entering=[1, 1, 9, 9, 1, 1], limit=12))
    assert solution.cuts == (4,)
    assert solution.memory == (8, 6)
