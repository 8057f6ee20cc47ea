"""The pictures of what a model predicts, and the file of the classes."""

from itertools import combinations

import pytest
import torch
from figures import texts

from ddp_lab.observe.pictures import confusion_figure, prediction_grid, write_classes

LONG = "a class with a name that is far too long"


@pytest.mark.parametrize(
    ("size", "name", "counts"), [(1, "one", 1), (2, LONG, 2), (12, "coat", 12), (13, "coat", 0), (30, LONG, 0), (31, "coat", 0)]
)
def test_labels_of_a_confusion_matrix_are_inside_and_left_out_of_large_ones(size, name, counts):
    figure = confusion_figure(torch.eye(size).long() * 123_456, [name] * size)
    figure.draw_without_rendering()
    shown = texts(figure)
    for text in shown:
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width, text
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height, text
    matrix, _ = figure.axes
    assert matrix.get_window_extent().width >= max(300, size), "too little room is left for the cells"
    assert len(matrix.texts) == counts
    assert sum(text.get_text()[:4] == name[:4] for text in shown) == (2 * size if size <= 30 else 0)


def test_names_counts_and_colours_of_a_confusion_matrix_are_at_their_classes():
    figure = confusion_figure(torch.tensor([[7, 2, 0], [0, 0, 0], [0, 15_300, 5100]]), ["cat", "dog", "cow"])
    figure.draw_without_rendering()
    matrix, bar = figure.axes
    for axis in (matrix.xaxis, matrix.yaxis):
        assert [label.get_text() for label in axis.get_ticklabels()] == ["cat", "dog", "cow"]
        assert list(axis.get_ticklocs()) == [0, 1, 2]
    assert (matrix.get_ylabel(), matrix.get_xlabel()) == ("true class", "predicted class")
    assert {text.get_position(): text.get_text() for text in matrix.texts} == {
        (0, 0): "7",
        (1, 0): "2",
        (1, 2): "15k",
        (2, 2): "5100",
    }
    (image,) = matrix.images
    expected = torch.tensor([[7 / 9, 2 / 9, 0], [0, 0, 0], [0, 0.75, 0.25]])
    assert torch.allclose(torch.tensor(image.get_array()), expected), "not the fraction of the row"
    assert image.to_rgba(0.1)[0] > image.to_rgba(0.9)[0], "a larger fraction is not darker"
    assert bar.get_ylabel() == "fraction of the true class"


def test_classes_file_has_the_accuracy_of_each_class(tmp_path):
    write_classes(torch.tensor([[3, 1, 0], [0, 0, 0], [1, 1, 1]]), ["a, b", "none", "c"], tmp_path / "classes.csv")
    assert (tmp_path / "classes.csv").read_text().splitlines() == [
        "class,samples,correct,accuracy",
        '"a, b",4,3,0.75',
        "none,0,0,",
        "c,3,1,0.333333",
    ]


@pytest.mark.parametrize(
    ("count", "channels", "name"), [(1, 1, "cat"), (3, 3, "W" * 40), (8, 3, "a class of many words"), (20, 2, "cat")]
)
def test_prediction_grid_has_its_names_inside_the_picture(count, channels, name):
    figure = prediction_grid(torch.rand(count, channels, 20, 40), [0] * count, [1] * count, [name] * 2)
    figure.draw_without_rendering()
    boxes = [axes.xaxis.label.get_window_extent() for axes in figure.axes if axes.images]
    assert len(boxes) == min(count, 8)
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert 0 <= box.y0 < box.y1 <= figure.bbox.height
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_prediction_grid_shows_wrong_predictions_in_red_with_the_true_class():
    figure = prediction_grid(torch.rand(6, 1, 28, 28), [0] * 6, [0, 1] * 3, ["sandal", "boot"])
    below = [(axes.get_xlabel(), axes.xaxis.label.get_color()) for axes in figure.axes[:6]]
    assert below == [("sandal", "darkgreen"), ("boot\n(sandal)", "red")] * 3
    assert [len(axes.images) for axes in figure.axes] == [1] * 6 + [0] * 2
