"""Plots and pictures: marks are where the values are, and every text is readable."""

import warnings
from itertools import combinations

import numpy as np
import pytest
import torch
from figures import texts
from matplotlib import rc_context, rcParams
from matplotlib.figure import SubFigure
from PIL import Image

from ddp_lab.observe.pictures import confusion_figure, prediction_grid
from ddp_lab.observe.plot import (
    ALGORITHMS,
    STRATEGIES,
    Curve,
    Plot,
    beside,
    curves,
    dots,
    figure,
    short,
    stacked,
    timeline,
    write,
)

LONG = "a name that is far too long for the axis of a plot of this width"
PARTS = ("compute", "communication", "waiting", "data", "idle")


def assert_inside(drawn: list, box) -> None:
    """Check that texts are within a box, and do not overlap."""
    boxes = {text: text.get_window_extent() for text in drawn}
    for text, text_box in boxes.items():
        assert box.x0 <= text_box.x0 < text_box.x1 <= box.x1, text
        assert box.y0 <= text_box.y0 < text_box.y1 <= box.y1, text
    for one, other in combinations(boxes, 2):
        assert not boxes[one].overlaps(boxes[other]), (one, other)


def panel_of(plot: Plot) -> SubFigure:
    whole = figure([plot])
    whole.draw_without_rendering()
    (panel,) = whole.subfigs
    return panel


EPOCHS = curves(
    "a title",
    "epoch",
    "accuracy",
    [Curve(name, [(1, 0.5), (2, 0.9)]) for name in ("train", "test")],
)
PLOTS = {  # and the number of entries of their legends
    "curves": (EPOCHS, 2),
    "curves of long names": (
        curves(
            f"{LONG}, and its $\\title",
            "devices",
            LONG[:24],
            [Curve(LONG, [(1, 1e6), (2, 2e6)]), Curve("b", [(1, 3e6)])],
        ),
        2,
    ),
    "many curves": (
        curves(
            "many",
            "epoch",
            "loss",
            [Curve(f"{i}", [(i, i) for i in range(50)]) for i in range(31)],
            zero=True,
        ),
        31,
    ),
    "logarithmic curves": (
        curves(
            "log",
            "bytes",
            "s",
            [Curve("a", [(4096, 1e-5), (2**26, 1e-3)]), Curve("b", [(1, 1)], dashed=True)],
            log="xy",
        ),
        2,
    ),
    "nothing measured": (stacked("zero", "ms", {"one": {"time": 0.0}}), 1),
    "many stacked": (
        stacked("stacked", "ms", {f"{i} cuda:{i}": dict.fromkeys(PARTS, 3.0) for i in range(64)}),
        5,
    ),
    "stacked long names": (
        stacked(LONG, "ms", {f"{number} {LONG}": {LONG: 1234.5 * number} for number in range(9)}),
        1,
    ),
    "timeline": (
        timeline(
            "a",
            "ms",
            {
                "host": [(5.0, 5.1, "issue", "")],
                "device": [(5.1, 6.2, "product", "1"), (6.2, 7, "copy", "2")],
            },
        ),
        3,
    ),
}


@pytest.mark.parametrize("name", PLOTS)
def test_texts_and_legends_of_a_plot_are_readable(name):
    plot, entries = PLOTS[name]
    panel = panel_of(plot)
    (axes,) = panel.axes
    (legend,) = panel.legends
    assert panel.get_suptitle()
    assert_inside(texts(panel), panel.bbox)
    assert len(legend.get_texts()) == entries
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox()), (
        "the legend covers the axes"
    )
    assert axes.get_window_extent().width > 0.25 * panel.bbox.width, (
        "too little room is left for the values"
    )


def test_parts_of_stacked_bars_look_different_and_the_limit_has_a_name():
    parts = {f"part {number}": 1.0 for number in range(11)} | {"none": 0.0}
    panel = panel_of(stacked("memory", "GiB", {"one": parts, "two": parts}, 12.0, "of a GPU"))
    (legend,) = panel.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [*(f"part {number}" for number in range(11)), "of a GPU"]
    looks = {(patch.get_facecolor(), patch.get_hatch()) for patch in legend.get_patches()}
    assert len(looks) == 11
    (axes,) = panel.axes
    rows = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert not rows[0].overlaps(rows[1])


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
    lines = [
        Curve("low", [(1, 1), (2, 1)]),
        Curve("ideal", [(1, 2)], dashed=True),
        Curve("high", [(1, 0), (2, 3)]),
    ]
    panel = panel_of(curves("a title", "x", "y", lines, zero=True))
    (axes,) = panel.axes
    (legend,) = panel.legends
    assert [list(zip(*line.get_data(), strict=True)) for line in axes.lines] == [
        curve.points for curve in lines
    ]
    assert axes.get_ylim() == (0, pytest.approx(1.05 * 3))
    assert [text.get_text() for text in legend.get_texts()] == ["high", "ideal", "low"]
    assert [handle.get_color() for handle in legend.legend_handles] == [
        axes.lines[i].get_color() for i in (2, 1, 0)
    ]
    low, high = axes.get_xlim()
    assert [
        label.get_text()
        for label in axes.get_xticklabels()
        if low <= label.get_position()[0] <= high
    ] == ["1", "2"]
    assert [short(value) for value in (0.5, 1500, 2e6, 3e9, -1500)] == [
        "0.5",
        "1.5k",
        "2M",
        "3G",
        "-1.5k",
    ]


def test_boxes_of_a_timeline_are_at_their_times_in_the_rows_and_colours_of_the_legend():
    rows = {
        "host": [(0.0, 2.0, "issue", ""), (6.0, 7.0, "wait", "")],
        "device": [(1.0, 5.0, "wait", "7")],
    }
    panel = panel_of(timeline("a title", "ms", rows))
    (axes,) = panel.axes
    (legend,) = panel.legends
    assert [label.get_text() for label in axes.get_yticklabels()] == ["host", "device"]
    boxes = {
        (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()): bar.get_facecolor()
        for bar in axes.patches
    }
    assert list(boxes) == [(0, 0, 2), (0, 6, 1), (1, 1, 4)]
    shown = {
        text.get_text(): patch.get_facecolor()
        for text, patch in zip(legend.texts, legend.legend_handles, strict=True)
    }
    assert shown == {"issue": boxes[0, 0, 2], "wait": boxes[0, 6, 1]}
    assert boxes[1, 1, 4] == boxes[0, 6, 1]
    assert [text.get_text() for text in axes.texts if text.get_text()] == ["7"]


def labels_of(axis) -> list[str]:
    """Return the labels of the major and minor ticks of an axis within its limits."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    shown = [tick.label1.get_text() for tick in ticks if low <= tick.get_loc() <= high]
    return [text for text in shown if text]


def test_logarithmic_axes_have_plain_numbers_also_within_a_decade():
    points = [(2000.0, 3.0), (5000.0, 7.0)]
    (axes,) = panel_of(curves("a title", "x", "y", [Curve("a", points)], log="xy")).axes
    assert {"2k", "3k"} <= {*labels_of(axes.xaxis)}, labels_of(axes.xaxis)
    assert {"3", "4"} <= {*labels_of(axes.yaxis)}, labels_of(axes.yaxis)
    (axes,) = panel_of(curves("a title", "x", "y", [Curve("a", points)], log="x")).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")


def test_markers_at_an_axis_are_drawn_completely():
    lines = [Curve("a", [(0, 0.0), (1, 2.0)])]
    (axes,) = panel_of(curves("a title", "x", "y", lines, zero=True)).axes
    assert not axes.lines[0].get_clip_on()
    (axes,) = panel_of(dots("a title", "x", {"lr=1": 0.0, "lr=2": 3.0})).axes
    assert not axes.lines[0].get_clip_on()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["lr=1", "lr=2"]
    assert axes.lines[0].get_xydata().tolist() == [[0, 0], [3, 1]]


@pytest.mark.parametrize("names", [ALGORITHMS, (*STRATEGIES, "mesh")])
def test_strategies_and_algorithms_have_one_colour_each_in_all_pictures(names):
    def colours(order) -> dict[str, str]:
        lines = [Curve(name, [(1, 1.0), (2, 2.0)]) for name in order]
        (axes,) = panel_of(curves("a title", "x", "y", lines)).axes
        return dict(zip(order, (line.get_color() for line in axes.lines), strict=True))

    first = colours(names)
    assert colours(names[::-1]) == first
    assert len({*first.values()}) == len(names)


def test_confusion_matrix_is_titled_with_what_was_evaluated():
    figure = confusion_figure(torch.eye(3).long(), ["a", "b", "c"], "mine: test set, epoch 2")
    figure.draw_without_rendering()
    matrix, _ = figure.axes
    assert matrix.get_title(loc="left") == "mine: test set, epoch 2"
    assert_inside([matrix._left_title], figure.bbox)


def test_plot_changes_no_global_setting_of_matplotlib(tmp_path):
    beside([EPOCHS], tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert rcParams["figure.dpi"] == 100


@pytest.mark.parametrize(("size", "named"), [(1, True), (30, True), (31, False)])
def test_labels_of_a_confusion_matrix_are_inside_and_left_out_of_large_ones(size, named):
    figure = confusion_figure(torch.eye(size).long() * 50_000, [LONG] * size)
    figure.draw_without_rendering()
    shown = texts(figure)
    assert_inside(shown, figure.bbox)
    matrix, _ = figure.axes
    assert matrix.get_window_extent().width >= max(100, 2 * size), (
        "too little room is left for the cells"
    )
    assert len(matrix.texts) == size * named
    assert sum(text.get_text()[:4] == LONG[:4] for text in shown) == 2 * size * named


def test_names_counts_and_colours_of_a_confusion_matrix_are_at_their_classes():
    figure = confusion_figure(
        torch.tensor([[7, 2, 0], [0, 0, 0], [0, 15_300, 5100]]), ["cat", "dog", "cow"]
    )
    figure.draw_without_rendering()
    matrix, bar = figure.axes
    for axis in (matrix.xaxis, matrix.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == ["cat", "dog", "cow"]
        assert list(axis.get_ticklocs()) == [0, 1, 2]
    assert (matrix.get_ylabel(), matrix.get_xlabel()) == ("true class", "predicted class")
    counts = {text.get_position(): text.get_text() for text in matrix.texts}
    assert counts == {(0, 0): "7", (1, 0): "2", (1, 2): "15300", (2, 2): "5100"}
    (image,) = matrix.images
    expected = torch.tensor([[7 / 9, 2 / 9, 0], [0, 0, 0], [0, 0.75, 0.25]])
    assert torch.allclose(torch.tensor(image.get_array()), expected), "not the fraction of the row"
    assert image.to_rgba(0.1)[0] > image.to_rgba(0.9)[0], "a larger fraction is not darker"
    assert bar.get_ylabel() == "fraction of the true class"


# of which the font has not the first and the third
CHINESE = ["\u732b", "dog", "\u725b and cow", "K\u00e4se"]


def test_class_that_the_font_cannot_draw_has_its_number_and_matplotlib_warns_of_nothing(tmp_path):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        matrix = confusion_figure(torch.eye(4).long(), CHINESE)
        grid = prediction_grid(torch.rand(4, 3, 8, 8), [0, 1, 2, 3], [0, 1, 2, 0], CHINESE)
        for number, drawn in enumerate((matrix, grid)):
            write(drawn, tmp_path / f"{number}.png")
        beside(
            [curves("\u732b: loss", "\u732b", "loss", [Curve("\u732b", [(1, 1)])])],
            tmp_path / "curves.png",
        )
    assert not [str(warning.message) for warning in warned]
    labels = [label.get_text() for label in matrix.axes[0].get_xticklabels()]
    assert labels == ["0", "dog", "2", "K\u00e4se"]
    drawn = [(axes.get_title(), axes.get_xlabel()) for axes in grid.axes if axes.images]
    assert drawn == [("0", "0"), ("dog", "dog"), ("2", "2"), ("K\u00e4se", "0")]


def test_file_has_the_pixels_and_the_resolution_of_the_figure_whatever_the_user_has_set(tmp_path):
    with rc_context({"image.origin": "lower"}):
        pixels = write(figure([EPOCHS]), tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as written:
        assert [round(dpi) for dpi in written.info["dpi"]] == [150, 150]
        assert np.array_equal(np.asarray(written)[..., :3], pixels)


@pytest.mark.parametrize(("count", "channels"), [(1, 1), (20, 2), (8, 3)])
def test_prediction_grid_shows_wrong_predictions_in_red_with_the_true_class(count, channels):
    figure = prediction_grid(
        torch.rand(count, channels, 20, 40), [0] * count, [0, 1] * count, ["sandal", LONG]
    )
    figure.draw_without_rendering()
    drawn = [
        (axes.get_title(), axes.get_xlabel(), axes.xaxis.label.get_color())
        for axes in figure.axes
        if axes.images
    ]
    right = ("sandal", "sandal", "darkgreen")
    wrong = ("sandal", f"{LONG[:10]}\N{HORIZONTAL ELLIPSIS}", "red")
    assert drawn == ([right, wrong] * 4)[:count]
    labels = [text for axes in figure.axes for text in (axes.title, axes.xaxis.label)]
    assert_inside([*labels, figure._suptitle], figure.bbox)
