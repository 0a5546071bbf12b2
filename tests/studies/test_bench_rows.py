"""Which rows `offbeat bench` has: their samples per update, micro-batches and cuts, and why some are left out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bench_cases import SETTING

from offbeat.errors import UserError
from offbeat.studies.bench import memory
from offbeat.studies.bench.cuts import check, placed
from offbeat.studies.bench.rows import (
    ROWS,
    BenchSetting,
    chosen,
    left_out,
    method_of,
    micro_batches,
    note,
    of_row,
    row_of,
    samples_at_once,
    samples_per_update,
    settings_by_method,
    title_of,
)


def test_a_row_gets_its_part_of_the_samples_per_update():
    setting = replace(SETTING, batch_per_update=16, M=4)
    assert [of_row(ROWS[name], setting).batch_size for name in ("bp", "ddp", "ddg", "gpipe", "adl")] == [16] * 4 + [4]
    assert of_row(ROWS["adl"], SETTING).batch_size == 16
    assert left_out(ROWS["adl-1f1b"], replace(setting, M=3)) == (
        "an update of 16 samples cannot be split into 3 equal batches"
    )


def test_rows_of_micro_batches_have_the_samples_per_update_of_the_others():
    setting = replace(SETTING, M=3, methods={"adl": {"corrector": "sc"}})
    for name, recompute in (("adl-micro", False), ("adl-recompute", True), ("adl-1f1b-micro", False)):
        row, setting = ROWS[name], replace(setting, methods={ROWS[name].setting: {"corrector": "sc"}})
        method = method_of(row, setting, 8)
        assert (method.M, method.recompute, [c.name for c in method.correctors]) == (8, recompute, ["sc"])
        assert of_row(row, setting, 8).batch_size == 2
        assert samples_per_update(row, setting, 8) == 16
        assert "an update is one batch, in 8 micro-batches of 2, the best of those tried" in note(row, setting, 8, 2)
        assert ("hold inputs" in note(row, setting, 8)) == recompute
    assert title_of(ROWS["adl"], setting) == "Offbeat ADL, 48 samples per update"
    assert title_of(ROWS["ddg"], setting) == "Offbeat DDG"
    assert title_of(ROWS["gpipe"], setting, 4) == "Offbeat GPipe"
    assert title_of(ROWS["adl"], replace(setting, batch_per_update=16, M=4)) == "Offbeat ADL"
    hybrid = replace(setting, methods={"adl": {"weights": "hybrid"}})
    assert left_out(ROWS["adl-recompute"], hybrid) == "recompute needs weights=stash, not hybrid"
    assert left_out(ROWS["adl-micro"], hybrid) is None
    assert "micro-batches" in left_out(ROWS["adl-micro"], replace(setting, batch_size=15))


def test_rows_for_which_no_given_number_of_micro_batches_fits_are_left_out():
    for name in ("adl-micro", "adl-recompute", "gpipe", "torch-1f1b"):
        assert left_out(ROWS[name], SETTING, (3, 4)) is None
        reason = "a batch of 16 cannot be split into 3 or 5 micro-batches for 2 workers"
        assert left_out(ROWS[name], SETTING, (3, 5)) == reason


def test_a_row_has_the_cuts_for_the_samples_on_which_its_stages_compute():
    setting = replace(SETTING, cuts=(5,), chunk_cuts=(3, 5, 7), replicas=2)
    setting = replace(setting, cuts_by_samples={"4": {"cuts": (6,), "chunk_cuts": (2, 6, 7)}})
    assert BenchSetting.of(json.loads(json.dumps(setting.as_dict()))) == setting
    for name, m, samples in (
        ("adl", None, 16),
        ("ddg", None, 16),
        ("torch-gpipe", 4, 4),
        ("torch-1f1b", 8, 2),
        ("gpipe", 4, 4),
        ("adl-micro", 4, 4),
        ("adl-recompute", 8, 2),
    ):
        row = ROWS[name]
        assert samples_at_once(row, setting, m) == samples
        assert of_row(row, setting, m).cuts == ((6,) if samples == 4 else (5,)), name
    assert of_row(ROWS["torch-interleaved"], setting, 4).chunk_cuts == (2, 6, 7)
    assert of_row(ROWS["adl"], replace(setting, batch_per_update=16, M=4)).cuts == (6,)


def test_rows_are_named_once_and_all_are_those_listed():
    assert [row.name for row in chosen("all", "cuda")] == list(ROWS)
    assert set(ROWS) - {row.name for row in chosen("all")} == {"bp-windows"}  # which is for GPUs
    assert [row.name for row in chosen("ddp, bp")] == ["bp", "ddp", "adl"]


def test_a_method_of_ours_is_timed_with_the_settings_that_are_given():
    given = settings_by_method(["adl:corrector=sc", "gpipe:m=2", "pipedream:weights=hybrid"], None)
    setting = BenchSetting("mlp", (1, 8, 8), 10, batch_size=16, K=2, M=3, methods=given)
    rows = {row.name: row for row in chosen("ddg", methods=list(given))}
    assert list(rows) == ["bp", "adl", "ddg", "gpipe", "pipedream"]
    adl, pipedream = method_of(rows["adl"], setting), method_of(rows["pipedream"], setting)
    assert (adl.M, [corrector.name for corrector in adl.correctors]) == (3, ["sc"])
    assert (pipedream.M, pipedream.weights) == (1, "hybrid")
    assert micro_batches(rows["gpipe"], setting) == [2]
    assert note(rows["adl"], setting, None).startswith("corrector=sc; ")
    assert BenchSetting.of(json.loads(json.dumps(setting.as_dict()))) == setting
    assert "methods" not in replace(setting, methods={}).as_dict()
    assert settings_by_method(["adl:M=2"], 2) == {"adl": {"M": 2}}
    assert left_out(row_of("asgd"), setting).startswith("its workers hold the whole model")


def test_rows_that_cannot_be_are_left_out_with_a_reason():
    odd = BenchSetting("mlp", (1, 8, 8), 10, batch_size=15, K=2, M=4)
    assert left_out(ROWS["ddp"], odd) == "a batch of 15 cannot be divided equally among 2 workers"
    assert "micro-batches" in left_out(ROWS["torch-gpipe"], odd)
    assert "fewer than 4 units" in left_out(ROWS["torch-interleaved"], SETTING)
    assert left_out(ROWS["torch-interleaved"], placed(SETTING, by="flops")) is None
    gpu = BenchSetting("mlp", (1, 8, 8), 10, batch_size=16, K=2, M=4, device="cuda")
    assert {name for name, row in ROWS.items() if left_out(row, gpu) is None} == {
        "bp",
        "bp-cores",
        "bp-windows",
        "adl",
        "adl-1f1b",
        "ddg",
        "fr",
        "dsp",
    }
    assert left_out(ROWS["bp-windows"], SETTING) == ("batches of a window run at the same time only on a GPU")
    assert left_out(ROWS["ddp"], gpu) == "one GPU: its workers need one each"


def test_micro_batches_divide_the_batch_and_come_in_whole_rounds_where_they_must():
    assert micro_batches(ROWS["gpipe"], SETTING) == [2, 4, 8]
    assert micro_batches(ROWS["gpipe"], SETTING, (1, 3, 4, 32)) == [1, 4]
    assert micro_batches(ROWS["torch-interleaved"], SETTING, (1, 4)) == [4]
    assert method_of(ROWS["gpipe"], SETTING, 8).m == 8
    assert (method_of(ROWS["adl"], SETTING).M, method_of(ROWS["ddg"], SETTING).M) == (2, 1)


def test_more_stages_than_units_are_refused():
    with pytest.raises(UserError, match="only"):
        check(BenchSetting("mlp", (1, 8, 8), 10, batch_size=4, K=40, M=1))


def test_a_number_of_micro_batches_is_the_best_only_of_several():
    assert "the best of those tried" in note(ROWS["gpipe"], SETTING, 4, tried=3)
    assert "no other number tried" in note(ROWS["gpipe"], SETTING, 4, tried=1)


def test_rows_that_need_more_memory_than_is_free_are_refused(monkeypatch):
    rows = [ROWS[name] for name in ("bp", "adl", "ddp")]
    setting = replace(SETTING, K=10)  # 21 processes of 80 MB, and a small network
    monkeypatch.setattr(memory, "available", lambda: (1_900_000_000, 4_000_000_000))
    memory.check_memory(setting, rows)
    memory.check_memory(replace(setting, device="cuda"), rows)
    monkeypatch.setattr(memory, "available", lambda: (1_000_000_000, 4_000_000_000))
    with pytest.raises(UserError) as refused:
        memory.check_memory(setting, rows)
    assert str(refused.value) == (
        "K=10: 21 processes of 3 rows need at least 1.7 GB of memory, and 1.0 GB are free: use K=5 or fewer, fewer "
        "rows (against=), or a machine with more memory"
    )
    memory.check_memory(replace(setting, K=5), rows)
