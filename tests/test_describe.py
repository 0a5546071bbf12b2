"""`offbeat methods`: the table of all methods and the page of one, from declarations and the clock."""

from __future__ import annotations

import json

import pytest
from command import check_refused

from offbeat.clock import draw
from offbeat.describe import LOCKS, describe, lag_text
from offbeat.methods import ADL, METHODS, named

# METHODS 4: ideal speed-ups of K equal stages with B = 2F, at K = 4 and 8; m = 4 for GPipe, barriers for DDG and FR
LAWS = {
    "bp": (1, 1),
    "ddg": (12 / 6, 24 / 10),
    "fr": (12 / 7, 24 / 11),
    "fdg": (4, 8),
    "dsp": (3, 6),
    "adl": (4, 8),
    "gpipe": (16 / 7, 32 / 11),
    "pipedream": (4, 8),
    "2bw": (4, 8),
    "adl-1f1b": (4, 8),
    "dgl": (4, 8),
    "asgd": (4, 8),
    "dc-asgd": (4, 8),
}
LAGS = {
    "bp": "0",
    "gpipe": "0",
    "ddg": "K-k",
    "fr": "K-k",
    "fdg": "2(K-k)",
    "dsp": "2(K-k)",
    "adl": "2(K-k)",
    "adl-1f1b": "K-k",
    "asgd": "N-1",
    "dgl": "0",
}
LOCKS_LEFT = {
    "bp": ["forward", "backward", "update"],
    "gpipe": ["update"],
    "ddg": ["forward"],
    "fr": ["forward"],
    "fdg": [],
    "adl": [],
    "dsp": [],
}
STAGE_1_OF_4 = {"bp": (0, 1), "ddg": (3, 4), "fr": (3, 1), "fdg": (6, 7), "dsp": (6, 1), "adl": (1.5, 3)}  # versions


@pytest.mark.parametrize("name", METHODS)
def test_every_method_describes_itself(name):
    described = describe(name)
    assert described.title
    assert described.reference
    assert sorted(described.locks_left + described.locks_removed) == sorted(LOCKS)
    assert len(described.staleness) == len(described.versions) == len(described.held) == described.K
    assert all(value is None or 1 <= value <= K + 1e-9 for K, value in described.speed_up.items())


@pytest.mark.parametrize("name", LAWS)
def test_the_ideal_speed_ups_are_the_time_laws(name):
    assert list(describe(name).speed_up.values()) == pytest.approx(LAWS[name], rel=1e-6)


def test_lags_locks_staleness_and_versions_are_those_of_the_papers():
    assert {name: describe(name).lag for name in LAGS} == LAGS
    assert {name: describe(name).locks_left for name in LOCKS_LEFT} == LOCKS_LEFT
    assert {name: (describe(name).staleness[0], describe(name).versions[0]) for name in STAGE_1_OF_4} == STAGE_1_OF_4


def test_a_lag_that_is_no_formula_is_described_by_its_docstring():
    def odd(k: int, K: int) -> int:
        """Twice what is left, but never above 3."""
        return min(3, 2 * (K - k))

    assert lag_text(odd) == "Twice what is left, but never above 3"
    assert lag_text(lambda k, K: 2 * (K - k) + 1) == "2(K-k)+1"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_has_a_line_a_method_and_shortens_nothing(offbeat, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = offbeat("methods")
    assert (printed.code, printed.err) == (0, "")
    assert max(map(len, printed.out.splitlines())) <= columns
    assert "…" not in printed.out
    rows = {line.split()[0]: line for line in printed.out.splitlines() if line.strip() and line.startswith("  ")}
    for name in METHODS:
        described = describe(name)
        assert described.lag in rows[name]
        assert all(f"{value:.2f}" in rows[name] for value in described.speed_up.values() if value is not None)
        assert columns < 120 or described.reference in rows[name]


@pytest.mark.parametrize("name", METHODS)
def test_one_method_is_described_with_its_docstring_and_its_timeline(offbeat, name):
    printed = offbeat("methods", name)
    assert (printed.code, printed.err) == (0, "")
    assert named(name).title in printed.out
    assert "stage 1 | " in printed.out
    page = json.loads(offbeat("methods", name, "--json").out)
    assert page["text"] in printed.out
    assert page["timeline"] in printed.out
    assert page["name"] == name


def test_the_timeline_is_drawn_by_the_clock_for_the_given_k_and_m(offbeat):
    timeline = json.loads(offbeat("methods", "adl", "-K", 2, "-M", 2, "--json").out)["timeline"]
    assert draw(ADL(M=2), 2, range(6)) in timeline


def test_the_json_holds_every_method_in_the_order_of_the_list(offbeat):
    entries = json.loads(offbeat("methods", "--json").out)
    assert [entry["name"] for entry in entries] == list(METHODS)
    adl = next(entry for entry in entries if entry["name"] == "adl")
    assert (adl["lag"], adl["M"], adl["weights"], adl["staleness"]) == ("2(K-k)", 4, "stash", [1.5, 1, 0.5, 0])
    assert (adl["versions"], adl["held"], adl["speed_up"]) == ([3, 2, 2, 1], [7, 5, 3, 1], {"4": 4, "8": 8})


REFUSED = {
    "an unknown name": (("ald",), ("'ald'", "did you mean 'adl'")),
    "two names": (("adl", "bp"), ("bp",)),
    "K without a name": (("-K", 3), ("name it",)),
    "K=0": (("adl", "-K", 0), ("-K 0",)),
    "M=0": (("adl", "-M", 0), ("-M 0 gradients per update",)),
    "M where none is taken": (("fr", "-M", 2), ("fr takes no M",)),
    "stages of whole networks": (("asgd", "-K", 3), ("asgd with -K 3",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line(offbeat, name):
    arguments, words = REFUSED[name]
    check_refused(offbeat, ("methods", *arguments), *words)
