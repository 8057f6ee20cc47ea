"""Plots: marks are where the values are, and every text is readable."""

from itertools import combinations

import pytest
from figures import texts
from matplotlib import rcParams
from matplotlib.figure import SubFigure

from ddp_lab.observe.plot import Curve, Plot, beside, curves, figure, short, stacked, timeline

LONG = "a name that is far too long for the axis of a plot of this width"
PARTS = ("compute", "communication", "waiting", "data", "idle")


def panel_of(plot: Plot) -> SubFigure:
    whole = figure([plot])
    whole.draw_without_rendering()
    (panel,) = whole.subfigs
    return panel


EPOCHS = curves("a title", "epoch", "accuracy", [Curve(name, [(1, 0.5), (2, 0.9)]) for name in ("train", "test")])
PLOTS = {  # and the number of entries of their legends
    "curves": (EPOCHS, 2),
    "curves of long names": (
        curves(f"{LONG}, and its $\\title", "devices", LONG[:24], [Curve(LONG, [(1, 1e6), (2, 2e6)]), Curve("b", [(1, 3e6)])]),
        2,
    ),
    "many curves": (
        curves("many", "epoch", "loss", [Curve(f"{i}", [(i, i) for i in range(50)]) for i in range(31)], zero=True),
        31,
    ),
    "logarithmic curves": (
        curves("log", "bytes", "s", [Curve("a", [(4096, 1e-5), (2**26, 1e-3)]), Curve("b", [(1, 1)], dashed=True)], log=True),
        2,
    ),
    "nothing measured": (stacked("zero", "ms", {"one": {"time": 0.0}}), 1),
    "many stacked": (stacked("stacked", "ms", {f"{i} cuda:{i}": dict.fromkeys(PARTS, 3.0) for i in range(64)}), 5),
    "stacked long names": (stacked(LONG, "ms", {f"{number} {LONG}": {LONG: 1234.5 * number} for number in range(9)}), 1),
    "timeline": (
        timeline("a", "ms", {"host": [(5.0, 5.1, "issue", "")], "device": [(5.1, 6.2, "product", "1"), (6.2, 7, "copy", "2")]}),
        3,
    ),
}


@pytest.mark.parametrize("name", PLOTS)
def test_texts_and_legends_of_a_plot_are_readable(name):
    plot, entries = PLOTS[name]
    panel = panel_of(plot)
    (axes,), (legend,) = panel.axes, panel.legends
    assert panel.get_suptitle()
    boxes = {text: text.get_window_extent() for text in texts(panel)}
    for text, box in boxes.items():
        assert panel.bbox.x0 <= box.x0 < box.x1 <= panel.bbox.x1, text
        assert panel.bbox.y0 <= box.y0 < box.y1 <= panel.bbox.y1, text
    for one, other in combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)
    assert len(legend.get_texts()) == entries
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox()), "the legend covers the axes"
    assert axes.get_window_extent().width > 0.25 * panel.bbox.width, "too little room is left for the values"


def test_stacked_bars_start_at_zero_and_parts_are_adjacent():
    values = {"first": {"compute": 1.0, "idle": 3.0}, "second": {"compute": 2.0, "idle": 0.5}}
    (axes,) = panel_of(stacked("a title", "ms", values)).axes
    assert axes.get_xlim()[0] == 0
    compute, idle = axes.containers
    assert [(bar.get_x(), bar.get_width()) for bar in compute] == [(0, 1), (0, 2)]
    assert [(bar.get_x(), bar.get_width()) for bar in idle] == [(1, 3), (2, 0.5)]
    assert [text.get_text() for text in axes.texts] == [" 4", " 2.5"]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(values)
    tops = [bar.get_window_extent().y1 for bar in compute]
    assert tops == sorted(tops, reverse=True), "the first bar is not on top"


def test_curves_match_the_order_and_colours_of_the_legend():
    lines = [Curve("low", [(1, 1), (2, 1)]), Curve("ideal", [(1, 2)], dashed=True), Curve("high", [(1, 0), (2, 3)])]
    panel = panel_of(curves("a title", "x", "y", lines, zero=True))
    (axes,), (legend,) = panel.axes, panel.legends
    assert [list(zip(*line.get_data(), strict=True)) for line in axes.lines] == [curve.points for curve in lines]
    assert axes.get_ylim() == (0, pytest.approx(1.05 * 3))
    assert [text.get_text() for text in legend.get_texts()] == ["high", "ideal", "low"]
    assert [handle.get_color() for handle in legend.legend_handles] == [axes.lines[i].get_color() for i in (2, 1, 0)]
    low, high = axes.get_xlim()
    assert [label.get_text() for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high] == ["1", "2"]
    assert [short(value) for value in (0.5, 1500, 2e6, 3e9, -1500)] == ["0.5", "1.5k", "2M", "3G", "-1.5k"]


def test_boxes_of_a_timeline_are_at_their_times_in_the_rows_and_colours_of_the_legend():
    rows = {"host": [(0.0, 2.0, "issue", ""), (6.0, 7.0, "wait", "")], "device": [(1.0, 5.0, "wait", "7")]}
    panel = panel_of(timeline("a title", "ms", rows))
    (axes,), (legend,) = panel.axes, panel.legends
    assert [label.get_text() for label in axes.get_yticklabels()] == ["host", "device"]
    boxes = {(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()): bar.get_facecolor() for bar in axes.patches}
    assert list(boxes) == [(0, 0, 2), (0, 6, 1), (1, 1, 4)]
    shown = {text.get_text(): patch.get_facecolor() for text, patch in zip(legend.texts, legend.legend_handles, strict=True)}
    assert shown == {"issue": boxes[0, 0, 2], "wait": boxes[0, 6, 1]}
    assert boxes[1, 1, 4] == boxes[0, 6, 1]
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["7"]


def test_plot_changes_no_global_setting_of_matplotlib(tmp_path):
    beside([EPOCHS], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert rcParams["figure.dpi"] == 100
