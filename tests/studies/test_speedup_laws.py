"""Ideal speed-ups of every method against the time laws: K balanced stages, B = 2F, no communication."""

from __future__ import annotations

import pytest

from offbeat.methods import ORDER, GPipe, named
from offbeat.timeline import balanced, speed_up

# law(K): period of a batch in units of F; BP takes 3K
LAWS = {
    "bp": lambda K: 3 * K,
    "gpipe": lambda K: 3 * (4 + K - 1) / 4,
    "ddg": lambda K: K + 2,
    "fr": lambda K: K + 3 if K > 1 else 3,
    "dsp": lambda K: 4 if K > 1 else 3,
    **dict.fromkeys(
        [
            "fdg",
            "adl",
            "dgl",
            "dgl-async",
            "dni",
            "mostafa",
            "pred",
            "sim",
            "predsim",
            "pipedream",
            "2bw",
            "adl-1f1b",
            "pipemare",
            "spectrain",
            "pb",
            "nag-async",
        ],
        lambda K: 3,
    ),
}
REPORTED = {"ddg": 1.68, "fr": 1.45, "gpipe": 2.20, "dsp": 2.70, "adl": 3.32}  # ResNet-101, K=4, in the paper


@pytest.mark.parametrize("K", [1, 2, 4, 8])
@pytest.mark.parametrize("name", LAWS)
def test_the_clock_agrees_with_the_law(name, K):
    assert speed_up(named(name), balanced(K)) == pytest.approx(3 * K / LAWS[name](K), rel=1e-9)


def test_every_published_method_has_its_law():
    assert set(LAWS) | {"asgd", "dc-asgd"} == set(ORDER)


@pytest.mark.parametrize("N", [1, 4, 8])
def test_data_parallel_workers_divide_the_time(N):
    for name in ("asgd", "dc-asgd"):
        assert speed_up(named(name, N=N), balanced(1)) == pytest.approx(N)


@pytest.mark.parametrize(
    ("K", "m", "recompute", "expected"),
    [
        (2, 4, False, 1.60),
        (2, 4, True, 1.20),
        (4, 8, False, 2.91),
        (4, 8, True, 2.18),
        (8, 32, False, 6.56),
        (8, 32, True, 4.92),
    ],
)
def test_gpipe_agrees_with_the_table(K, m, recompute, expected):
    assert speed_up(GPipe(m, recompute=recompute), balanced(K)) == pytest.approx(expected, abs=0.006)


def test_what_the_paper_measured_is_below_each_law_and_in_the_same_order():
    laws = {name: speed_up(named(name), balanced(4)) for name in REPORTED}
    assert all(REPORTED[name] < laws[name] for name in REPORTED)
    assert sorted(REPORTED, key=REPORTED.get) == sorted(laws, key=laws.get)
