"""Learning curves: the median and the range of the runs, epoch by epoch, one line a method."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from offbeat.errors import UserError
from offbeat.report import draw_curves
from offbeat.report.curves import COLOURS, curves_figure, points

RUNS = {"bp": [[60.0, 30.0, 9.0], [70.0, 20.0, 8.0], [65.0, 28.0, 7.0]], "adl": [[80.0, 40.0, 10.0]]}


def test_a_point_is_the_median_of_the_runs_with_the_lowest_and_the_highest():
    found = [(point.epoch, point.middle, point.lowest, point.highest) for point in points(RUNS["bp"])]
    assert found == [(1, 65.0, 60.0, 70.0), (2, 28.0, 20.0, 30.0), (3, 8.0, 7.0, 9.0)]


def test_a_run_that_stopped_early_counts_as_far_as_it_came():
    assert [point.middle for point in points([[10.0, 4.0], [20.0]])] == [15.0, 4.0]


def test_a_line_a_method_and_a_band_where_it_has_several_runs():
    axes = curves_figure(RUNS, title="a title").axes[0]
    assert {line.get_gid(): list(line.get_ydata()) for line in axes.lines} == {
        "bp": [65.0, 28.0, 8.0],
        "adl": [80.0, 40.0, 10.0],
    }
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 2, 3]] * 2
    (band,) = axes.collections
    assert band.get_gid() == "bp-band"
    heights = {(x, y) for x, y in band.get_paths()[0].vertices}
    assert {(1, 60.0), (1, 70.0), (2, 20.0), (2, 30.0), (3, 7.0), (3, 9.0)} <= heights
    assert axes.get_title(loc="left") == "a title"
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["bp  8.00 %", "adl  10.00 %"]


@pytest.mark.parametrize(("lowest", "scale"), [(9.0, "linear"), (1.0, "log"), (0.0, "linear")])
def test_errors_far_apart_are_drawn_on_a_logarithmic_scale_unless_one_is_zero(lowest, scale):
    assert curves_figure({"bp": [[60.0, lowest]]}, title="").axes[0].get_yscale() == scale


def test_every_method_looks_different():
    names = [f"method {number}" for number in range(3 * len(COLOURS))]
    lines = curves_figure({name: [[2.0, 1.0]] for name in names}, title="").axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)


def test_the_curves_are_drawn_in_every_kind_of_file_and_the_same_twice(tmp_path):
    for suffix, start in {"svg": b"<?xml", "png": b"\x89PNG", "txt": b"a title"}.items():
        for name in ("a", "b"):
            draw_curves(RUNS, tmp_path / f"{name}.{suffix}", title="a title")
        assert (tmp_path / f"a.{suffix}").read_bytes().startswith(start)
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()
    ids = {element.get("id") for element in ElementTree.parse(tmp_path / "a.svg").iter()}
    assert {"bp", "bp-band", "adl"} <= ids


@pytest.mark.parametrize("runs", [{}, {"bp": []}, {"bp": [[], []]}], ids=["no method", "no run", "no epoch"])
def test_nothing_to_draw_is_an_empty_picture(runs, tmp_path):
    for suffix in ("svg", "png", "txt"):
        draw_curves(runs, tmp_path / f"curves.{suffix}", title="nothing yet")


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="ends in"):
        draw_curves(RUNS, tmp_path / "curves.bmp", title="")
