"""Learning curves: the median and the range of the runs, epoch by epoch."""

from __future__ import annotations

from offbeat.report.curves import points


def test_a_point_is_the_median_of_the_runs_with_the_lowest_and_the_highest():
    runs = [[60.0, 30.0, 9.0], [70.0, 20.0, 8.0], [65.0, 28.0, 7.0]]
    assert points(runs) == [(65.0, 60.0, 70.0), (28.0, 20.0, 30.0), (8.0, 7.0, 9.0)]


def test_a_run_that_stopped_early_counts_as_far_as_it_came():
    assert [point.middle for point in points([[10.0, 4.0], [20.0]])] == [15.0, 4.0]
