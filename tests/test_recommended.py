"""method="auto": the recommended lag and M, from injected times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import offbeat
from offbeat.correctors.optimizer_rules import RULES, AdamRule
from offbeat.methods import named, with_settings
from offbeat.recommended import (
    ONE_IN,
    SYNCHRONOUS,
    candidates,
    correctors_by_optimizer,
    measured_times,
    needs_times,
    parsed_auto,
    recommend,
)


def flat(size: int) -> float:
    """No size is less efficient than another."""
    return 1e-3 * size


def overhead(size: int) -> float:
    """As long as 4 samples, for each batch."""
    return 1e-3 * (size + 4)


def refuse(size: int) -> float:
    raise AssertionError("measured without a reason")


def test_one_stage_is_trained_by_back_propagation_without_measuring():
    found = recommend(1, batch=64, settings={}, seconds=refuse)
    assert found.method == named("bp", M=1)
    assert found.measured == ()
    assert recommend(1, batch=64, settings={"staleness_warmup": 5}, seconds=refuse).method == named("bp", M=1)


@pytest.mark.parametrize(
    ("K", "batch", "settings", "sizes"),
    [
        (1, 64, {}, []),
        (1, 64, {"latency": 0.1}, []),
        (4, None, {}, []),
        (4, None, {"latency": 0.1}, [1]),  # a batch is a sample, for want of its size
        (4, None, {"latency": None}, []),
        (4, 7, {}, []),
        (4, 64, {"M": 8}, []),
        (4, 64, {"M": 8, "latency": 0.0}, [8]),
        (2, 64, {}, [64, 32, 16]),
        (4, 64, {"latency": 0.9e-3}, [64, 32, 16, 8, 4]),
        (4, 64, {"latency": 1.1e-3}, [64, 32, 16, 8, 4, 2]),  # the last for the lag of ADL, the others once
    ],
)
def test_every_size_is_measured_once_and_only_where_there_is_something_to_choose(K, batch, settings, sizes):
    asked = []

    def counted(size: int) -> float:
        asked.append(size)
        return flat(size)

    found = measured_times(K, batch=batch, settings=settings, seconds=counted)
    assert asked == sizes
    assert found == [(size, flat(size)) for size in sizes]
    assert needs_times(K, batch=batch, settings=settings) == bool(sizes)


def test_m_is_no_larger_than_a_quarter_of_an_update_of_delay_needs():
    for K, M in ((2, 4), (3, 8), (4, 16), (12, 64)):
        found = recommend(K, batch=64, settings={}, seconds=flat)
        assert (found.method.name, found.M, found.method.correctors) == (
            "adl-1f1b",
            M,
            (offbeat.AutoCorrector(),),
        )
        assert found.method.staleness(1, K) <= 0.25


def test_m_is_limited_by_the_measured_time_per_sample():
    found = recommend(12, batch=64, settings={}, seconds=overhead)
    # per sample 1 + 4/b ms: 1.0625 at b=64, 1.125 at b=32, 1.25 at b=16, which is more than 1.15 times the shortest
    assert found.M == 2
    assert [(row.M, row.size, row.delay) for row in found.measured][:3] == [(1, 64, 11.0), (2, 32, 5.5), (4, 16, 2.75)]
    assert found.measured[1].seconds == pytest.approx(1.125e-3)
    assert (
        found.as_text()
        == "adl-1f1b, M=2 of 32 samples, stage 1 is 5.5 updates late, corrector auto, after 300 updates of bp "
        "(at most 10 % of a run)"
    )


def test_training_begins_synchronously_if_stage_1_is_over_half_an_update_late():
    for K, M, updates in ((3, 4, 0), (3, 2, 300), (3, 1, 300), (5, 8, 0), (6, 8, 300)):
        found = recommend(K, batch=64, settings={"M": M}, seconds=refuse).method
        phases = ((offbeat.BP(M=M, pipelined=True), updates),) if updates else ()
        assert found == replace(named("adl-1f1b", M=M, corrector="auto"), staleness_warmup=phases), (K, M)
    late = recommend(12, batch=64, settings={"latency": 1.0}, seconds=overhead)
    assert (late.method.name, late.M, len(late.method.staleness_warmup)) == ("adl", 2, 1)
    for left_out in (0, None):
        given = {"M": 1, "staleness_warmup": left_out}
        assert recommend(12, batch=64, settings=given, seconds=refuse).method.staleness_warmup == ()


@pytest.mark.parametrize(("updates", "synchronous"), [(8000, 300), (3000, 300), (2999, 299), (40, 4), (9, 0), (0, 0)])
def test_the_synchronous_start_is_at_most_a_tenth_of_a_run_whose_length_is_known(updates, synchronous):
    found = recommend(12, batch=64, settings={"M": 1}, seconds=refuse, updates=lambda: updates)
    assert [number for _, number in found.method.staleness_warmup] == [synchronous] * bool(synchronous)
    start = f", after {synchronous} updates of bp" if synchronous else ""
    assert found.as_text() == f"adl-1f1b, M=1, corrector auto{start}"


def test_texts_state_the_length_of_the_synchronous_start():
    root = Path(__file__).parents[1]
    paths = [*(root / f"docs/{name}.md" for name in ("choosing", "tutorial", "commands")), root / "CHANGELOG.md"]
    pages = {path.stem: " ".join(path.read_text().split()) for path in paths}
    assert f"training starts with {SYNCHRONOUS} synchronous updates" in pages["CHANGELOG"]
    assert f"the first {SYNCHRONOUS} updates are synchronous" in pages["choosing"]
    assert f"Method `auto` has {SYNCHRONOUS} such updates" in pages["choosing"]
    assert f"by default the first {SYNCHRONOUS} updates are synchronous" in pages["tutorial"]
    assert f"method auto: {SYNCHRONOUS}, at most {100 // ONE_IN} % of the run" in pages["commands"]


def test_the_length_of_a_run_is_not_asked_for_without_a_reason():
    for given in ({"M": 32}, {"M": 1, "staleness_warmup": 7}, {"M": 1, "staleness_warmup": 0}):
        found = recommend(12, batch=64, settings=given, seconds=refuse, updates=lambda: refuse(0))
        assert sum(number for _, number in found.method.staleness_warmup) == given.get("staleness_warmup", 0)
        assert "at most" not in found.as_text()


def test_sizes_that_do_not_fit_into_memory_are_left_out():
    found = recommend(4, batch=64, settings={}, seconds=lambda size: float("inf") if size > 8 else flat(size))
    assert found.M == 16
    found = recommend(2, batch=64, settings={}, seconds=lambda size: float("inf") if size < 33 else flat(size))
    assert found.M == 1


def test_m_divides_the_batch_and_keeps_micro_batches_for_batch_norm():
    assert recommend(12, batch=24, settings={}, seconds=flat).M == 8
    assert recommend(12, batch=7, settings={}, seconds=flat).M == 1
    assert recommend(12, batch=64, settings={}, seconds=flat, smallest=16).M == 4
    assert candidates(8, 11, smallest=16) == [1]


def test_the_lag_of_adl_is_chosen_where_a_message_takes_longer_than_a_stage():
    # 16 micro-batches of 4 samples, 1 ms per sample, 4 stages: 1 ms per stage
    near = recommend(4, batch=64, settings={"latency": 0.9e-3}, seconds=flat)
    far = recommend(4, batch=64, settings={"latency": 1.1e-3}, seconds=flat)
    assert (near.method.name, near.M) == ("adl-1f1b", 16)
    assert (far.method.name, far.M) == ("adl", 32)
    assert far.method.staleness(1, 4) <= 0.25


def test_given_settings_are_kept_and_nothing_is_measured_for_a_given_m():
    found = recommend(4, batch=64, settings={"M": 8, "corrector": "sc", "weights": "hybrid"}, seconds=refuse)
    assert found.method == named("adl-1f1b", M=8, corrector="sc", weights="hybrid")
    without = recommend(4, batch=None, settings={}, seconds=refuse).method
    assert without == named("adl-1f1b", M=1, corrector="auto", staleness_warmup=300)
    warmed = recommend(4, batch=64, settings={"M": 2, "staleness_warmup": 5}, seconds=refuse).method
    assert [(method.name, method.M, updates) for method, updates in warmed.staleness_warmup] == [("bp", 2, 5)]


def test_settings_of_auto_are_read_and_wrong_ones_refused_in_one_line():
    assert parsed_auto("auto:latency=0.01,weights=hybrid", M=2) == {"latency": 0.01, "weights": "hybrid", "M": 2}
    for text, said in (
        ("auto:latency=long", "'latency=long': use a number or none"),
        (
            "auto:beta=1",
            r"auto takes no beta \(given: '1'\): leave it out; its settings are M, window, weights, recompute, "
            "corrector, staleness_warmup, latency$",
        ),
    ):
        with pytest.raises(offbeat.UserError, match=said):
            recommend(4, batch=64, settings=parsed_auto(text), seconds=flat)
    with pytest.raises(offbeat.UserError, match="latency=-1: use a number of seconds from 0 up"):
        recommend(4, batch=64, settings={"latency": -1.0}, seconds=flat)
    with pytest.raises(offbeat.UserError, match="method auto is chosen for a model and a device: use it in Pipeline"):
        named("auto")


def test_correctors_are_listed_for_every_optimizer_that_has_a_rule(monkeypatch):
    monkeypatch.setitem(RULES, "RAdam", AdamRule)
    found = correctors_by_optimizer(with_settings("adl-1f1b", {"M": 1, "corrector": "auto"}), 3)
    assert found == {
        "SGD with momentum": "stages 1-2 sc, stage 3 none",
        "Adam, AdamW, RAdam, Muon, RotatedAdam": "stages 1-2 lookahead:least=1+sc, stage 3 none",
        "NAdam": "stages 1-3 none",
        "others": "stages 1-3 none",
    }
