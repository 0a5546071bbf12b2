"""Pictures: what is drawn is what the spans say, for every declared method, and a file is whole or not there."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest

from offbeat.errors import UserError
from offbeat.methods import ADL, BP, DECLARED, DSP, GPipe
from offbeat.ops import Backward, Update
from offbeat.report import draw_staleness, draw_timeline
from offbeat.report.gantt import boxes, timeline_figure
from offbeat.report.lateness import staleness_figure
from offbeat.report.text import timeline_text
from offbeat.timeline import Costs, balanced, timeline

UNEQUAL = Costs([0.011, 0.014, 0.009], [0.023, 0.027, 0.019], update=[0.001] * 3, up=[0.003] * 2, down=[0.002] * 2)

DRAWN = """\
adl, K=3, M=2, 4 batches
a column is 1 F; F forward, B backward, U update, . idle
stage 1 | F0  F1  F2  F3  .   .   .   B0  B0  .   B1  B1U .   B2  B2  .   B3  B3U
stage 2 | .   F0  F1  F2  .   B0  B0  F3  B1  B1U .   B2  B2  .   B3  B3U .   .
stage 3 | .   .   F0  B0  B0  F1  B1  B1U F2  B2  B2  F3  B3  B3U .   .   .   .

tick | stage 1             | stage 2             | stage 3
0    | F0@v0               | -                   | -
1    | F1@v0               | F0@v0               | -
2    | F2@v0               | F1@v0               | F0@v0 B0@v0
3    | F3@v0               | F2@v0 B0@v0         | F1@v0 B1@v0 U->v1
4    | B0@v0               | F3@v0 B1@v0 U->v1   | F2@v1 B2@v1
5    | B1@v0 U->v1         | B2@v0 (LoS 1)       | F3@v1 B3@v1 U->v2
6    | B2@v0 (LoS 1)       | B3@v0 (LoS 1) U->v2 | -
7    | B3@v0 (LoS 1) U->v2 | -                   | -
"""


def drawn_patches(figure):
    """gid -> (stage, start, width) of every rectangle of the chart."""
    return {
        patch.get_gid(): (round(patch.get_y() + patch.get_height() / 2), patch.get_x(), patch.get_width())
        for patch in figure.axes[0].patches
    }


@pytest.mark.parametrize("name", DECLARED)
def test_every_declared_method_draws_in_every_kind_of_file(name, tmp_path):
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "txt": name.encode()}
    for kind, start in starts.items():
        draw_timeline(DECLARED[name](), UNEQUAL, tmp_path / f"timeline.{kind}", batches=3)
        assert (tmp_path / f"timeline.{kind}").read_bytes().startswith(start)
        draw_staleness(lambda M: DECLARED[name](), 3, tmp_path / f"staleness.{kind}", largest_M=3)
        assert (tmp_path / f"staleness.{kind}").read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 6, "nothing temporary is left"


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize(("costs", "scale"), [(balanced(3), 1.0), (UNEQUAL, 0.001)], ids=["units of F", "ms"])
def test_the_boxes_drawn_are_the_spans(name, costs, scale):
    method, made = DECLARED[name](), Counter()
    expected = {}
    for span in timeline(method, 4, costs):
        gid = f"stage{span.k}-{span.operation}"
        if isinstance(span.operation, Update):
            made[span.k] += 1
            gid += str(made[span.k])
        expected[gid] = (span.k, span.start / scale, (span.end - span.start) / scale)
        if isinstance(span.operation, Backward) and method.replays(span.k, 3):
            expected[f"{gid}-replay"] = (span.k, span.start / scale, costs.forward[span.k - 1] / method.m / scale)
    found = drawn_patches(timeline_figure(method, costs, batches=4))
    assert found.keys() == expected.keys()
    for gid, place in expected.items():
        assert found[gid] == pytest.approx(place), gid


def test_the_boxes_can_be_found_in_the_svg_by_name(tmp_path):
    draw_timeline(ADL(M=2), balanced(3), tmp_path / "timeline.svg", batches=4)
    ids = [element.get("id") for element in ElementTree.parse(tmp_path / "timeline.svg").iter()]
    assert len([name for name in ids if name and name.startswith("stage")]) == len(timeline(ADL(M=2), 4, balanced(3)))


def test_stage_1_is_at_the_bottom_and_time_is_in_units_of_f_only_for_unit_costs():
    axes = timeline_figure(ADL(), balanced(3)).axes[0]
    assert axes.get_ylim()[0] < axes.get_ylim()[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 1", "stage 2", "stage 3"]
    assert "F" in axes.get_xlabel()
    assert "ms" in timeline_figure(ADL(), UNEQUAL).axes[0].get_xlabel()


@pytest.mark.parametrize(("K", "batches"), [(4, 8), (8, 12)])
def test_every_box_is_labelled_up_to_8_stages_and_12_batches(K, batches):
    drawn = boxes(ADL(M=4), balanced(K), batches)
    texts = Counter(text.get_text() for text in timeline_figure(ADL(M=4), balanced(K), batches=batches).axes[0].texts)
    for t in range(batches):
        assert texts[str(t)] == 2 * K
    assert texts["v0"] == sum(box.version == 0 for box in drawn)


def test_labels_that_do_not_fit_are_left_out():
    assert not timeline_figure(GPipe(32), balanced(4), batches=8).axes[0].texts


def test_a_replaying_backward_uses_the_newest_weights_and_a_stashing_one_those_of_its_forward():
    def versions(method):
        return [box.version for box in boxes(method, balanced(2), 5)
                if box.span.k == 1 and isinstance(box.span.operation, Backward)]  # fmt: skip

    assert versions(DSP()) == [0, 1, 2, 3, 4]
    assert versions(ADL(M=1)) == [0, 0, 0, 1, 2]


def test_the_text_of_adl_is_the_drawn_one(tmp_path):
    draw_timeline(ADL(M=2), balanced(3), tmp_path / "timeline.txt", batches=4)
    assert (tmp_path / "timeline.txt").read_text() == DRAWN


@pytest.mark.parametrize("name", DECLARED)
def test_the_text_shows_every_operation_in_the_order_of_its_program(name):
    method = DECLARED[name]()
    lines = timeline_text(method, UNEQUAL, batches=4).splitlines()[2:5]
    for k, line in enumerate(lines, start=1):
        cells = [cell.rstrip("U") for cell in line.split("|")[1].split() if cell[0] in "FB"]
        seen = [cell for at, cell in enumerate(cells) if at == 0 or cells[at - 1] != cell]
        program = [op for iteration in method.program(k, 3, range(4)) for op in iteration]
        assert seen == [str(op) for op in program if str(op)[0] in "FB"]
        assert line.count("U") == sum(isinstance(op, Update) for op in program)


def test_a_very_short_stage_does_not_make_the_text_endless():
    text = timeline_text(BP(), Costs([1e-6, 1.0], [2e-6, 2.0]), batches=4)
    assert max(map(len, text.splitlines())) < 2500
    assert "F3" in text.splitlines()[2]


def test_the_staleness_drawn_is_lag_over_m():
    lines = {line.get_gid(): line for line in staleness_figure(ADL, 4, largest_M=6).axes[0].lines}
    for k in range(1, 5):
        assert list(lines[f"stage{k}"].get_ydata()) == pytest.approx([2 * (4 - k) / M for M in range(1, 7)])
    assert lines["stage1"].get_linewidth() > 2 * lines["stage2"].get_linewidth()


@pytest.mark.parametrize("kind", ["svg", "png", "txt"])
def test_the_same_picture_is_the_same_bytes_whatever_the_users_settings(kind, tmp_path):
    import matplotlib

    for folder, size in (("one", 10.0), ("two", 20.0)):
        (tmp_path / folder).mkdir()
        with matplotlib.rc_context({"font.size": size}):
            draw_timeline(DSP(), UNEQUAL, tmp_path / folder / f"timeline.{kind}", batches=3)
            draw_staleness(ADL, 3, tmp_path / folder / f"staleness.{kind}")
            assert matplotlib.rcParams["font.size"] == size
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def draw_either(which, path):
    if which == "timeline":
        draw_timeline(ADL(), balanced(2), path, batches=2)
    else:
        draw_staleness(ADL, 2, path)


@pytest.mark.parametrize("which", ["timeline", "staleness"])
def test_an_unknown_kind_of_file_a_missing_folder_and_an_unwritable_place_are_refused_in_one_line(which, tmp_path):
    (tmp_path / "taken.svg").mkdir()
    refused = {"a.pdf": r"\.svg, \.png, \.txt", "a": r"\.svg", "none/a.svg": "no folder", "taken.svg": "written"}
    for name, reason in refused.items():
        with pytest.raises(UserError, match=reason) as error:
            draw_either(which, tmp_path / name)
        assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["taken.svg"]


def test_a_picture_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "staleness.svg"
    path.write_text("old")
    with pytest.raises(UserError, match="M = 0"):
        draw_staleness(lambda M: ADL(M=3 - M), 2, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_counts_below_one_are_refused(tmp_path):
    with pytest.raises(UserError, match="0 batches"):
        draw_timeline(ADL(), balanced(2), tmp_path / "a.svg", batches=0)
    with pytest.raises(UserError, match="largest M = 0"):
        draw_staleness(ADL, 2, tmp_path / "a.svg", largest_M=0)
