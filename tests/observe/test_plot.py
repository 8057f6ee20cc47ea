"""Plots: marks are where the values are, and every text is readable."""

import subprocess
import sys
from itertools import combinations

import pytest
from figures import texts
from launches import ROOT
from matplotlib.colors import to_rgb
from matplotlib.figure import SubFigure
from PIL import Image

from ddp_lab.observe.plot import COLOURS, Curve, Plot, beside, curves, figure, house_style, short, stacked, timeline

LONG = "a name that is far too long for the axis of a plot of this width"
PARTS = ("compute", "communication", "waiting", "data", "idle")


def panel_of(plot: Plot) -> SubFigure:
    whole = figure([plot])
    whole.draw_without_rendering()
    (panel,) = whole.subfigs
    return panel


def names(count: int) -> list[str]:
    return [f"ddp_pipeline-{number}" for number in range(count)]


PLOTS = {  # and the number of entries of their legends
    "curves": (curves("a title", "epoch", "accuracy", [Curve(name, [(1, 0.5), (2, 0.9)]) for name in ("train", "test")]), 2),
    "curves of long names": (
        curves(f"{LONG}, and its $\\title", "devices", LONG[:24], [Curve(LONG, [(1, 1e6), (2, 2e6)]), Curve("b", [(1, 3e6)])]),
        2,
    ),
    "many curves": (
        curves("many", "epoch", "loss", [Curve(name, [(i, i) for i in range(50)]) for name in names(31)], zero=True),
        31,
    ),
    "logarithmic curves": (
        curves("log", "bytes", "s", [Curve("a", [(4096, 1e-5), (2**26, 1e-3)]), Curve("b", [(1, 1)], dashed=True)], log=True),
        2,
    ),
    "large places": (curves("large", "s", "y", [Curve("a", [(x, x) for x in (1.19e6, 1.5e6 + 0.5, 2.38e6)])]), 1),
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
    room = axes.get_window_extent()
    assert room.width > 0.25 * panel.bbox.width, "too little room is left for the values"
    assert room.height > 0.25 * panel.bbox.height


def test_stacked_bars_start_at_zero_and_parts_are_adjacent():
    values = {"first": {"compute": 1.0, "idle": 3.0}, "second": {"compute": 2.0, "idle": 0.5}}
    (axes,) = panel_of(stacked("a title", "ms", values)).axes
    assert axes.get_xlim()[0] == 0
    compute, idle = axes.containers
    assert [(bar.get_x(), bar.get_width()) for bar in compute] == [(0, 1), (0, 2)]
    assert [(bar.get_x(), bar.get_width()) for bar in idle] == [(1, 3), (2, 0.5)]
    assert [text.get_text() for text in axes.texts] == ["4", "2.5"]
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


def test_18_curves_look_different_and_coinciding_ones_have_gaps_and_hollow_markers():
    (axes,) = panel_of(curves("a title", "x", "y", [Curve(name, [(1, y)]) for y, name in enumerate(names(18))])).axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 18
    assert tuple(line.get_color().upper() for line in axes.lines[: len(COLOURS)]) == COLOURS
    assert not any(one.get_linestyle() == other.get_linestyle() for one, other in zip(axes.lines, axes.lines[1:], strict=False))
    assert {line.get_markerfacecolor() for line in axes.lines} == {"none"}
    with house_style():
        from matplotlib import rcParams

        assert rcParams["font.size"] >= 11
        assert rcParams["figure.dpi"] >= 150, "at half its size a picture has less than 75 dpi"


@pytest.mark.parametrize(
    ("places", "ticks"),
    [
        ((1, 2, 3), ["1", "2", "3"]),
        ((1,), ["1"]),
        ((1, 2, 4, 64), ["0", "20", "40", "60"]),
        ((0, 0.5, 1), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ((1.2e6, 1.5e6 + 0.5, 2.4e6), ["1.2M", "1.4M", "1.6M", "1.8M", "2M", "2.2M", "2.4M"]),
    ],
)
def test_ticks_are_round_numbers_and_integers_between_integers(places, ticks):
    (axes,) = panel_of(curves("a title", "devices", "y", [Curve("a", [(x, 1) for x in places])])).axes
    low, high = axes.get_xlim()
    assert [label.get_text() for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high] == ticks
    assert [short(value) for value in (0.5, 1500, 2e6, 3e9, -1500)] == ["0.5", "1.5k", "2M", "3G", "-1.5k"]


def test_plots_without_values_are_refused():
    for make in (
        lambda: curves("a", "x", "y", [Curve("a", [])]),
        lambda: stacked("a", "ms", {}),
        lambda: timeline("a", "ms", {}),
    ):
        with pytest.raises(ValueError, match=r"^a: no (points|values|boxes) to draw"):
            make()


def test_timeline_boxes_are_where_and_as_long_as_they_ran_and_never_too_short_to_be_seen():
    rows = {"first": [(5.0, 6.0, "product", "7"), (8.0, 9.0, "copy", "")], "second": [(6.0, 6.0, "product", "")], "idle": []}
    (axes,) = panel_of(timeline("a title", "ms", rows)).axes
    found = [
        (bar.get_x(), round(bar.get_width(), 6), round(bar.get_y() + 0.38), bar.get_facecolor()[:3]) for bar in axes.patches
    ]
    product, copy = map(to_rgb, COLOURS[:2])
    assert found == [(5, 1, 0, product), (8, 1, 0, copy), (6, 4 / 250, 1, product)]
    assert [text.get_text() for text in axes.texts] == ["7", "", ""]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(rows)


def test_beside_writes_all_panels_in_rows(tmp_path):
    one, two = PLOTS["curves"][0], PLOTS["large places"][0]
    beside([one], tmp_path / "one.png")
    beside([one, two, one], tmp_path / "three.png")
    single, three = Image.open(tmp_path / "one.png"), Image.open(tmp_path / "three.png")
    assert three.size == (2 * single.width, 2 * single.height)
    quarters = [(0, 0), (single.width, 0), (0, single.height), (single.width, single.height)]
    panels = [three.convert("RGB").crop((x, y, x + single.width, y + single.height)) for x, y in quarters]
    filled = [len(panel.getcolors(single.width * single.height)) > 1 for panel in panels]
    assert filled == [True, True, True, False]


def test_plot_imports_matplotlib_at_the_first_picture_and_changes_no_global_setting(tmp_path):
    script = (
        "import sys, train, ddp_lab.observe.plot as plot\n"
        "assert not any(name.startswith('matplotlib') for name in sys.modules)\n"
        "from pathlib import Path\n"
        f"plot.beside([plot.stacked('a', 'ms', {{'b': {{'c': 1.0}}}})], Path({str(tmp_path / 'a.png')!r}))\n"
        "assert sys.modules['matplotlib'].rcParams['figure.dpi'] == 100, 'global settings were changed'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
