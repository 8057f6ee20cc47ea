"""The pictures of what a model predicts."""

from itertools import combinations

import pytest
import torch
from figures import texts

from ddp_lab.observe.pictures import confusion_figure, prediction_grid

LONG = "a class with a name that is far too long"


@pytest.mark.parametrize(("size", "named"), [(1, True), (30, True), (31, False)])
def test_labels_of_a_confusion_matrix_are_inside_and_left_out_of_large_ones(size, named):
    figure = confusion_figure(torch.eye(size).long() * 50_000, [LONG] * size)
    figure.draw_without_rendering()
    shown = texts(figure)
    for text in shown:
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width, text
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height, text
    matrix, _ = figure.axes
    assert matrix.get_window_extent().width >= max(100, 2 * size), "too little room is left for the cells"
    assert len(matrix.texts) == size * named
    assert sum(text.get_text()[:4] == LONG[:4] for text in shown) == 2 * size * named


def test_names_counts_and_colours_of_a_confusion_matrix_are_at_their_classes():
    figure = confusion_figure(torch.tensor([[7, 2, 0], [0, 0, 0], [0, 15_300, 5100]]), ["cat", "dog", "cow"])
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


@pytest.mark.parametrize(("count", "channels"), [(1, 1), (20, 2), (8, 3)])
def test_prediction_grid_shows_wrong_predictions_in_red_with_the_true_class(count, channels):
    figure = prediction_grid(torch.rand(count, channels, 20, 40), [0] * count, [0, 1] * count, ["sandal", LONG])
    figure.draw_without_rendering()
    below = [(axes.get_xlabel(), axes.xaxis.label.get_color()) for axes in figure.axes if axes.images]
    assert below == ([("sandal", "darkgreen"), (f"{LONG[:10]}\N{HORIZONTAL ELLIPSIS}\n(sandal)", "red")] * 4)[:count]
    boxes = [axes.xaxis.label.get_window_extent() for axes in figure.axes]
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
