"""Charts: their data is what they were given, and what they show of it."""

from __future__ import annotations

import pytest
from selected import some

from offbeat.methods import ADL, DECLARED, GPipe
from offbeat.ops import Backward, Forward, Update
from offbeat.report import figures
from offbeat.report.charts import Axis, Bar, Box, Line, bars, lanes, lines, shares
from offbeat.report.style import COLOURS, DARK, LIGHT, without_variables
from offbeat.timeline import Costs, balanced, timeline

UNEQUAL = Costs([0.011, 0.014, 0.009], [0.023, 0.027, 0.019], update=[0.001] * 3, up=[0.003] * 2, down=[0.002] * 2)
NAMES = {Forward: "forward", Backward: "backward", Update: "update"}
RUNS = {"bp": [[60.0, 30.0, 9.0], [70.0, 20.0, 8.0], [65.0, 28.0, 7.0]], "adl": [[80.0, 40.0, 10.0]]}


def rows(chart) -> list[dict]:
    """The data of a chart, of the largest of its sources."""
    return max(chart.to_dict()["datasets"].values(), key=len)


def encodings(chart) -> list[dict]:
    return [layer["encoding"] for layer in chart.to_dict()["layer"] if "encoding" in layer]


def scale(chart, channel: str) -> dict:
    return next(encoding[channel]["scale"] for encoding in encodings(chart) if "scale" in encoding.get(channel, {}))


def names_in_legend(chart) -> list[str]:
    return scale(chart, "color")["domain"]


# ---- lines


def test_a_line_has_the_median_of_its_runs_and_a_band_where_there_are_several():
    chart = figures.curves(figures.curve_lines(RUNS))
    drawn = {name: [(row["x"], row["y"]) for row in rows(chart) if row["series"] == name] for name in RUNS}
    assert drawn == {"bp": [(1, 65.0), (2, 28.0), (3, 8.0)], "adl": [(1, 80.0), (2, 40.0), (3, 10.0)]}
    bands = {name: [(row.get("low"), row.get("high")) for row in rows(chart) if row["series"] == name] for name in RUNS}
    assert bands == {"bp": [(60.0, 70.0), (20.0, 30.0), (7.0, 9.0)], "adl": [(None, None)] * 3}


def test_a_single_point_has_a_rule_over_the_range_of_its_runs():
    drawn = [Line("one", [(8, 5.5)], [(5.4, 5.7)]), Line("two", [(1, 5.0), (8, 6.0)], [(4.9, 5.1), (5.9, 6.1)])]
    chart = lines(drawn, x=Axis("K"), y=Axis("error"), width=400)
    assert [row["series"] for row in rows(chart) if row.get("alone")] == ["one"]
    rule = next(layer for layer in chart.to_dict()["layer"] if layer["mark"]["type"] == "rule")
    assert rule["transform"] == [{"filter": "datum.alone"}]
    assert (rule["encoding"]["y"]["field"], rule["encoding"]["y2"]["field"]) == ("low", "high")
    without = lines(drawn[1:], x=Axis("K"), y=Axis("error"), width=400)
    assert "rule" not in [layer["mark"]["type"] for layer in without.to_dict()["layer"]]


def test_a_line_against_time_is_at_the_median_minute():
    chart = figures.curves(
        figures.curve_lines(RUNS, {"bp": [[60, 120, 180]] * 3, "adl": [[90, 180, 270]]}), across="minutes of training"
    )
    assert [row["x"] for row in rows(chart)] == [1.0, 2.0, 3.0, 1.5, 3.0, 4.5]


def test_the_legend_has_the_last_value_of_each_line_and_filters_by_a_click():
    content = figures.curves(figures.curve_lines(RUNS)).to_dict()
    label = next(layer["encoding"]["color"]["legend"] for layer in content["layer"] if "color" in layer["encoding"])
    assert '"bp": "bp  8.00 %"' in label["labelExpr"]
    (chosen,) = content["params"]
    assert (chosen["bind"], chosen["select"]["fields"]) == ("legend", ["series"])
    for layer in content["layer"]:
        assert {"filter": {"param": "chosen"}} in layer["transform"]


@pytest.mark.parametrize(("lowest", "kind"), [(9.0, None), (1.0, "log"), (0.0, None)])
def test_errors_far_apart_are_on_a_logarithmic_scale_unless_one_is_zero(lowest, kind):
    assert scale(figures.curves(figures.curve_lines({"bp": [[60.0, lowest]]})), "y").get("type") == kind


def test_every_line_of_many_looks_different():
    drawn = [Line(f"method {number}", [(1, 2), (2, 1)]) for number in range(3 * COLOURS)]
    chart = lines(drawn, x=Axis("x"), y=Axis("y"))
    pairs = zip(scale(chart, "color")["range"], map(tuple, scale(chart, "strokeDash")["range"]))
    assert len(set(pairs)) == 3 * COLOURS


def test_charts_with_one_legend_give_each_line_the_same_colour():
    both = [Line("a", [(1, 2), (2, 1)]), Line("b", [(1, 1), (2, 2)])]
    charts = [lines(those, x=Axis("x"), y=Axis("y"), shared_legend=both) for those in (both, both[1:])]
    assert [scale(chart, "color")["domain"] for chart in charts] == [["a", "b"]] * 2
    assert len({tuple(scale(chart, "color")["range"]) for chart in charts}) == 1


def test_few_whole_numbers_are_each_on_the_axis():
    chart = figures.curves(figures.curve_lines(RUNS))
    assert next(e["x"]["axis"]["values"] for e in encodings(chart) if "axis" in e["x"]) == [1, 2, 3]


def test_an_axis_can_have_a_tick_at_every_value():
    line = Line("a", [(1, 0.5), (28, 0.25), (8, 0.125)])
    chart = lines([line], x=Axis("x", doubling=True, each=True), y=Axis("y"))
    assert next(e["x"]["axis"]["values"] for e in encodings(chart) if "axis" in e["x"]) == [1, 8, 28]


# ---- bars and shares


def test_bars_hold_their_values_spreads_and_marks():
    drawn = [
        Bar("stage 1", 2.0, "2.00", "measured", mark=1.9),
        Bar("stage 2", 1.0, "1.00", "measured", spread=(0.5, 3)),
    ]
    chart = bars(drawn, title="updates", groups={"measured": "var(--c0)"}, mark="formula")
    assert [(row["label"], row["value"], row["mark"], row["low"], row["high"]) for row in rows(chart)] == [
        ("stage 1", 2.0, 1.9, None, None),
        ("stage 2", 1.0, None, 0.5, 3),
    ]
    assert names_in_legend(chart) == ["measured", "formula"]


def test_shares_of_stages_add_up():
    found = rows(shares([("parameters", [1, 3]), ("FLOPs", [2, 2])]))
    assert [(row["quantity"], row["stage"], row["start"], row["end"]) for row in found] == [
        ("parameters", "stage 1", 0.0, 0.25),
        ("parameters", "stage 2", 0.25, 1.0),
        ("FLOPs", "stage 1", 0.0, 0.5),
        ("FLOPs", "stage 2", 0.5, 1.0),
    ]


# ---- timelines


@pytest.mark.parametrize("name", some(DECLARED, of=3))
@pytest.mark.parametrize(("costs", "unit"), [(balanced(3), 1.0), (UNEQUAL, 0.001)], ids=["units of F", "ms"])
def test_the_boxes_of_a_method_are_its_spans(name, costs, unit):
    method = DECLARED[name]()
    expected = []
    for span in timeline(method, 4, costs):
        kind, start = NAMES.get(type(span.operation)), span.start / unit
        if kind == "backward" and method.replays(span.k, 3):
            repeated = costs.forward[span.k - 1] / method.m / unit
            expected.append((f"stage {span.k}", "forward repeated", start, start + repeated))
            start += repeated
        if kind:
            expected.append((f"stage {span.k}", kind, start, span.end / unit))
    found = [
        (row["stage"], row["kind"], row["start"], row["end"]) for row in rows(figures.method_timeline(method, costs, 4))
    ]
    wanted = [(*place[:2], pytest.approx(place[2], 1e-6), pytest.approx(place[3], 1e-6)) for place in sorted(expected)]
    assert sorted(found) == wanted


def test_stage_1_is_at_the_bottom_and_only_unit_costs_are_in_units_of_f():
    chart = figures.method_timeline(ADL(), balanced(3), 4)
    assert scale(chart, "y")["domain"] == ["stage 3", "stage 2", "stage 1"]
    for costs, unit in ((balanced(3), "F, the forward of a stage"), (UNEQUAL, "ms")):
        drawn = encodings(figures.method_timeline(ADL(), costs, 4))
        assert f"time, {unit}" in [encoding["x"].get("title") for encoding in drawn if "x" in encoding]


def test_a_timeline_can_be_moved_and_zoomed_and_its_legend_filters():
    params = {
        param["name"]: param
        for param in lanes([Box(1, "forward", 0, 1), Box(1, "backward", 1, 2)], K=1, unit="ms").to_dict()["params"]
    }
    assert (params["move"]["bind"], params["move"]["select"]["encodings"]) == ("scales", ["x"])
    assert params["chosen"]["select"]["fields"] == ["kind"]


def test_micro_batches_are_numbered_in_their_boxes():
    found = rows(figures.method_timeline(GPipe(4), balanced(2), 2))
    assert {row["number"] for row in found if row["kind"] == "forward"} == {str(number) for number in range(8)}


def test_the_staleness_drawn_is_lag_over_m():
    found = rows(figures.staleness(ADL, 4, 6))
    for k in range(1, 5):
        values = [row["y"] for row in found if row["series"] == f"stage {k}"]
        assert values == pytest.approx([2 * (4 - k) / M for M in range(1, 7)])


# ---- colours


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_letters_stand_out_from_the_page(theme):
    for name in ("ink", "soft", "warn", *(f"c{place}" for place in range(COLOURS))):
        high, low = sorted((luminance(theme[name]), luminance(theme["page"])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_every_colour_of_a_chart_is_in_both_themes():
    assert LIGHT.keys() == DARK.keys()
    content = without_variables(figures.method_timeline(ADL(), balanced(2), 2).to_dict())
    assert "var(" not in str(content)


def test_amounts_of_bytes_are_written_in_units_people_read():
    rows = [{"name": name, "family": "bp", "bytes_moved": value} for name, value in (("a", 3.43e9), ("b", 83.9e6))]
    chart = figures.amounts(rows, "bytes_moved", title="MB")
    (values,) = chart.to_dict()["datasets"].values()
    assert [row["text"] for row in values] == ["3.4 GB", "84 MB"]
