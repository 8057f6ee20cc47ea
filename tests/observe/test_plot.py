"""Plots: marks are where the values are, and every text is readable."""

import subprocess
import sys
from itertools import combinations, pairwise

import pytest
from figures import texts
from launches import ROOT
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure, SubFigure
from PIL import Image

from ddp_lab.observe.figure import COLOURS, STYLE, house_style, pixels, short
from ddp_lab.observe.plot import (
    Curve,
    Plot,
    bars,
    beside,
    curves,
    figure,
    stacked,
    timeline,
)

LONG = "a name that is far too long for the axis of a plot of this width"
PARTS = ("compute", "communication", "waiting", "data", "idle")


def drawn(*plots: Plot) -> Figure:
    whole = figure(plots)
    whole.canvas.draw()
    return whole


def panel_of(plot: Plot) -> SubFigure:
    (panel,) = drawn(plot).subfigs
    return panel


def names(count: int) -> list[str]:
    return [f"ddp_pipeline-{number}" for number in range(count)]


PLOTS = {
    "curves": curves("a title", "epoch", "accuracy", [Curve(name, [(1, 0.5), (2, 0.9)]) for name in ("train", "test")]),
    "curves of long names": curves(
        f"{LONG}, and its $\\title", "devices", LONG[:24], [Curve(LONG, [(1, 1e6), (2, 2e6)]), Curve("b", [(1, 3e6)])]
    ),
    "many curves": curves("many", "epoch", "loss", [Curve(name, [(i, i) for i in range(50)]) for name in names(31)], zero=True),
    "logarithmic curves": curves(
        "log", "bytes", "seconds", [Curve("a", [(4096, 1e-5), (2**26, 1e-3)]), Curve("model", [(1, 1)], dashed=True)], log=True
    ),
    "coinciding curves": curves("coinciding", "epoch", "loss", [Curve(name, [(1, 2), (2, 1), (3, 0)]) for name in names(7)]),
    "uneven places": curves("uneven", "devices", "images/s", [Curve("a", [(x, x) for x in (1, 2, 4, 64)])]),
    "large places": curves("large", "s", "y", [Curve("a", [(x, x) for x in (1.19e6, 1.5e6 + 0.5, 2.38e6)])]),
    "bars": bars("bars", "images/s", {"one": 1.0, "two": 2e6}),
    "bars of long names": bars(LONG, "ms", {f"{number} {LONG}": 1234.5 * number for number in range(9)}),
    "nothing measured": bars("zero", "ms", {"one": 0.0}),
    "stacked": stacked("stacked", "ms", {name: dict.fromkeys(PARTS, 3.0) for name in ("0 cuda:0", "1 cuda:1")}),
    "many stacked": stacked("stacked", "ms", {f"{i} cuda:{i}": dict.fromkeys(PARTS, 3.0) for i in range(64)}),
    "timeline": timeline("time", {"host": [(5.0, 5.1, "issue")], "device": [(5.1, 6.2, "product"), (6.2, 7, "copy")]}),
    "timeline of long names": timeline(
        LONG, {f"{number} {LONG}": [(i, i + 1, f"kernel {i} {LONG}") for i in range(30)] for number in range(14)}
    ),
}


@pytest.fixture(scope="module", params=PLOTS)
def picture(request) -> Figure:
    return drawn(PLOTS[request.param])


def test_every_text_is_inside_the_picture(picture):
    assert picture.subfigs[0].get_suptitle()
    for text in texts(picture):
        box = text.get_window_extent()
        assert picture.bbox.x0 <= box.x0 < box.x1 <= picture.bbox.x1, text
        assert picture.bbox.y0 <= box.y0 < box.y1 <= picture.bbox.y1, text


def test_no_text_overlaps_another(picture):
    boxes = {text: text.get_window_extent() for text in texts(picture)}
    for one, other in combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)


def test_legend_covers_neither_the_axes_nor_their_labels(picture):
    (panel,) = picture.subfigs
    (axes,) = panel.axes
    assert axes.get_legend() is None
    for legend in panel.legends:
        assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
    room = axes.get_window_extent()
    assert room.width > 0.25 * panel.bbox.width, "too little room is left for the values"
    assert room.height > 0.25 * panel.bbox.height


@pytest.mark.parametrize(("plot", "explained"), [("curves", 2), ("many curves", 31), ("stacked", 5), ("timeline", 3)])
def test_legend_names_every_curve_part_and_label(plot, explained):
    (legend,) = panel_of(PLOTS[plot]).legends
    assert len(legend.get_texts()) == explained


def test_timeline_legend_counts_the_labels_it_has_no_room_for():
    (legend,) = panel_of(PLOTS["timeline of long names"]).legends
    assert legend.get_texts()[-1].get_text() == "and 19 more"


def test_bars_start_at_zero_and_end_at_their_value():
    values = {"first": 130.0, "second": 980.0, "third": 975.0}
    (axes,) = panel_of(bars("a title", "ms", values)).axes
    assert axes.get_xlim()[0] == 0
    assert [bar.get_x() for bar in axes.patches] == [0, 0, 0]
    assert [bar.get_width() for bar in axes.patches] == list(values.values())
    assert [label.get_text() for label in axes.get_yticklabels()] == list(values)
    tops = [bar.get_window_extent().y1 for bar in axes.patches]
    assert tops == sorted(tops, reverse=True), "the first bar is not on top"
    assert [text.get_text() for text in axes.texts] == ["130", "980", "975"]


def test_stacked_bars_start_at_zero_and_parts_are_adjacent():
    values = {"first": {"compute": 1.0, "idle": 3.0}, "second": {"compute": 2.0, "idle": 0.5}}
    (axes,) = panel_of(stacked("a title", "ms", values)).axes
    assert axes.get_xlim()[0] == 0
    compute, idle = axes.containers
    assert [(bar.get_x(), bar.get_width()) for bar in compute] == [(0, 1), (0, 2)]
    assert [(bar.get_x(), bar.get_width()) for bar in idle] == [(1, 3), (2, 0.5)]
    assert [text.get_text() for text in axes.texts] == ["4", "2.5"]


def test_curves_match_the_order_and_colours_of_the_legend():
    lines = [Curve("low", [(1, 1), (2, 1)]), Curve("ideal", [(1, 2)], dashed=True), Curve("high", [(1, 0), (2, 3)])]
    panel = panel_of(curves("a title", "x", "y", lines, zero=True))
    (axes,), (legend,) = panel.axes, panel.legends
    for line, curve in zip(axes.lines, lines, strict=True):
        assert list(zip(*line.get_data(), strict=True)) == curve.points
        assert line.is_dashed() == curve.dashed
    assert axes.get_ylim()[0] == 0
    assert [text.get_text() for text in legend.get_texts()] == ["high", "ideal", "low"]
    assert [handle.get_color() for handle in legend.legend_handles] == [axes.lines[i].get_color() for i in (2, 1, 0)]


def colours_in_axes(plot: Plot) -> dict[tuple[int, ...], int]:
    """Return how many pixels between the axes have each of the colours of the curves, without the legend."""
    whole = drawn(plot)
    box = whole.axes[0].get_window_extent()
    height = whole.bbox.height
    area = pixels(whole)[int(height - box.y1) : int(height - box.y0), int(box.x0) : int(box.x1)]
    wanted = [tuple(round(255 * part) for part in to_rgb(colour)) for colour in COLOURS]
    return {colour: int((area == colour).all(2).sum()) for colour in wanted}


FALLING = [(x, 1 / x) for x in range(1, 31)]


@pytest.mark.parametrize(
    ("count", "points", "log"), [(2, FALLING, False), (2, FALLING[:1], False), (7, FALLING[:3], False), (7, FALLING, True)]
)
def test_each_of_several_coinciding_curves_is_visible(count, points, log):
    alone = [Curve("far away", [(x, y + 3) for x, y in points])]
    lines = [Curve(name, [(x, y * (1 + number * 1e-6)) for x, y in points]) for number, name in enumerate(names(count))]
    seen = list(colours_in_axes(curves("a title", "x", "y", lines + alone, log=log)).values())
    assert min(seen[: count + 1]) > 40, "a curve is hidden by another"


def test_curve_is_visible_where_a_part_of_it_coincides_with_another():
    both = [(x, 1.0) for x in range(11)]
    later = [(x, x - 9.0) for x in range(11, 21)]
    lines = [Curve("flat", [*both, (20, 1.0)]), Curve("rises", both + later)]
    whole = drawn(curves("a title", "x", "y", lines))
    (x0, y), (x1, _) = whole.axes[0].transData.transform([(0, 1), (10, 1)])
    row = pixels(whole)[round(whole.bbox.height - y), round(x0) : round(x1)]
    shown = {tuple(pixel / 255) for pixel in row.astype(float)}
    assert {to_rgb(COLOURS[0]), to_rgb(COLOURS[1])} <= shown
    assert [line.is_dashed() for line in whole.axes[0].lines[:2]] == [False, True], "one line covers the other between markers"


def test_curves_that_only_cross_or_begin_together_are_solid():
    lines = [
        Curve("up", [(0, 0), (1, 0.5), (2, 1)]),
        Curve("down", [(0, 1), (1, 0.5), (2, 0)]),
        Curve("flat", [(0, 0), (2, 0.3)]),
    ]
    whole = drawn(curves("a title", "x", "y", lines))
    assert len(whole.axes[0].lines) == 3
    assert not any(line.is_dashed() for line in whole.axes[0].lines)


def test_flat_curve_stays_below_the_top_of_axes_that_start_at_zero():
    (axes,) = panel_of(curves("a title", "epoch", "loss", [Curve("train", [(1, 2.3), (2, 2.3001)])], zero=True)).axes
    assert axes.get_ylim() == (0, pytest.approx(1.05 * 2.3001))


def test_18_curves_all_look_different():
    (axes,) = panel_of(curves("a title", "x", "y", [Curve(name, [(1, y)]) for y, name in enumerate(names(18))])).axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 18
    assert len({line.get_color() for line in axes.lines}) == len(COLOURS)


def test_colours_are_those_of_the_house_style():
    with house_style():
        from matplotlib import rcParams

        cycle = rcParams["axes.prop_cycle"].by_key()["color"]
        assert rcParams["font.size"] >= 11
        assert rcParams["figure.dpi"] >= 150, "at half its size a picture has less than 75 dpi"
    assert tuple(f"#{colour.lstrip('#')}" for colour in cycle[: len(COLOURS)]) == COLOURS
    assert STYLE.is_file()


@pytest.mark.parametrize(
    "values", [(0, 0.5, 1), (130, 500.5, 980), (1.19e6, 1.5e6 + 0.5, 2.38e6), (1e-5, 2e-5, 9e-5), (-1, 0.5, 1)]
)
def test_linear_ticks_are_round_numbers(values):
    (axes,) = panel_of(curves("a title", "x", "y", [Curve("a", [(value, value) for value in values])])).axes
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        shown = [tick for tick in axis.get_ticklocs() if low <= tick <= high]
        assert 3 <= len(shown) <= 8
        for one, other in pairwise(shown):
            assert f"{other - one:e}".partition("e")[0] in ("1.000000", "2.000000", "5.000000")
            assert f"{one / (other - one):.6f}".endswith(".000000"), "a tick is not a multiple of the step"


@pytest.mark.parametrize(
    ("places", "ticks"),
    [((1, 2, 4, 8), [1, 2, 4, 8]), ((1,), [1]), ((1, 2, 4, 64), [0, 20, 40, 60]), ((1, 2, 3), [1, 2, 3])],
)
def test_ticks_are_at_the_integers_if_there_is_room(places, ticks):
    (axes,) = panel_of(curves("a title", "devices", "y", [Curve("a", [(x, 1) for x in places])])).axes
    low, high = axes.get_xlim()
    assert [label.get_text() for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high] == [
        str(tick) for tick in ticks if low <= tick <= high
    ]


def test_numbers_are_short():
    assert [short(value) for value in (0.5, 1500, 2e6, 3e9, -1500)] == ["0.5", "1.5k", "2M", "3G", "-1.5k"]


def test_curves_without_points_bars_without_values_and_timelines_without_boxes_are_refused():
    with pytest.raises(ValueError, match="empty: no points"):
        curves("empty", "x", "y", [Curve("a", [])])
    with pytest.raises(ValueError, match="empty: no values"):
        bars("empty", "ms", {})
    with pytest.raises(ValueError, match="empty: no boxes"):
        timeline("empty", {"idle": []})


def colour_at(whole: Figure, milliseconds: float, row: float) -> tuple[float, ...]:
    """Return the colour of the pixel at this place of the first panel's axes."""
    x, y = whole.axes[0].transData.transform((milliseconds, row))
    drawn = pixels(whole)
    return tuple(drawn[len(drawn) - 1 - int(y), int(x)] / 255)


def test_timeline_boxes_are_where_and_as_long_as_they_ran():
    rows = {"first": [(5.0, 5.001, "product"), (5.003, 5.004, "copy")], "second": [(5.001, 5.003, "product")], "idle": []}
    whole = drawn(timeline("a title", rows))
    colours = {to_rgb(COLOURS[0]): "product", to_rgb(COLOURS[1]): "copy", (1, 1, 1): ""}
    seen = {
        name: [colours[colour_at(whole, at, number)] for at in (0.1, 0.9, 1.1, 1.9, 2.1, 2.9, 3.1, 3.9)]
        for number, name in enumerate(rows)
    }
    assert seen["first"] == ["product", "product", "", "", "", "", "copy", "copy"]
    assert seen["second"] == ["", "", "product", "product", "product", "product", "", ""]
    assert seen["idle"] == [""] * 8
    assert [label.get_text() for label in whole.axes[0].get_yticklabels()] == list(rows)


@pytest.mark.parametrize(("end", "milliseconds"), [(5.0, 1), (6.0, 1000)])
def test_no_box_of_a_timeline_is_too_short_to_be_seen(end, milliseconds):
    whole = drawn(timeline("a title", {"now": [(5.0, 5.0, "product")], "later": [(5.0, end, "copy")]}))
    assert colour_at(whole, milliseconds / 500, 0) == to_rgb(COLOURS[0])


def test_beside_writes_all_panels_in_rows(tmp_path):
    one, two = PLOTS["curves"], PLOTS["timeline"]
    beside([one], tmp_path / "one.png")
    beside([one, two, one], tmp_path / "three.png")
    single, three = Image.open(tmp_path / "one.png"), Image.open(tmp_path / "three.png")
    assert three.size == (2 * single.width, 2 * single.height)
    quarters = [(0, 0), (single.width, 0), (0, single.height), (single.width, single.height)]
    panels = [three.convert("RGB").crop((x, y, x + single.width, y + single.height)) for x, y in quarters]
    filled = [len(panel.getcolors(single.width * single.height)) > 1 for panel in panels]
    assert filled == [True, True, True, False]


def test_plot_imports_matplotlib_at_the_first_picture_and_never_pyplot(tmp_path):
    script = (
        "import sys, train, ddp_lab.observe.plot as plot\n"
        "assert not any(name.startswith('matplotlib') for name in sys.modules)\n"
        "from pathlib import Path\n"
        f"plot.beside([plot.bars('a', 'ms', {{'b': 1.0}})], Path({str(tmp_path / 'a.png')!r}))\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
        "assert sys.modules['matplotlib'].rcParams['figure.dpi'] == 100, 'global settings were changed'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
