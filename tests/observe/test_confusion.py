import numpy as np
import pytest
import torch
from figures import texts

from ddp_lab.observe.figure import pixels
from ddp_lab.observe.pictures import confusion_figure, write_classes

LONG = "a class with a name that is far too long"


@pytest.mark.parametrize(("size", "name"), [(1, "one"), (2, LONG), (10, "coat"), (30, LONG), (40, "coat"), (1000, "coat")])
def test_every_label_is_inside_the_picture(size, name):
    figure = confusion_figure(torch.eye(size).long() * 123_456, [name] * size)
    height, width, _ = pixels(figure).shape
    for text in texts(figure):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= width, text
        assert 0 <= box.y0 < box.y1 <= height, text
    matrix, _ = figure.axes
    assert matrix.get_window_extent().width >= max(300, size), "too little room is left for the cells"


def test_names_and_counts_are_at_their_classes():
    figure = confusion_figure(torch.tensor([[7, 2, 0], [0, 0, 0], [0, 20_400, 5]]), ["cat", "dog", "cow"])
    pixels(figure)
    matrix, bar = figure.axes
    for axis in (matrix.xaxis, matrix.yaxis):
        assert [(label.get_text(), at) for label, at in zip(axis.get_ticklabels(), axis.get_ticklocs(), strict=True)] == [
            ("cat", 0),
            ("dog", 1),
            ("cow", 2),
        ]
    assert (matrix.get_ylabel(), matrix.get_xlabel()) == ("true class", "predicted class")
    assert {text.get_position(): text.get_text() for text in matrix.texts} == {
        (0, 0): "7",
        (1, 0): "2",
        (1, 2): "20k",
        (2, 2): "5",
    }
    assert bar.get_ylabel() == "fraction of the true class"


def test_colour_is_the_fraction_of_the_row():
    """A class with few samples has the colours of one with many. A class without samples has that of an empty cell."""
    (image,) = confusion_figure(torch.tensor([[3, 1, 0], [3000, 1000, 0], [0, 0, 0]]), ["a", "b", "c"]).axes[0].images
    assert image.get_array().tolist() == [[0.75, 0.25, 0], [0.75, 0.25, 0], [0, 0, 0]]
    light, dark = (image.to_rgba(np.array([value])).sum() for value in (0.1, 0.9))
    assert light > dark


@pytest.mark.parametrize("size", [10, 20, 40, 1000])
def test_picture_shows_which_classes_are_confused(size):
    names = [str(number) for number in range(size)]
    correct, shifted = (pixels(confusion_figure(torch.eye(size).roll(by, 1).long() * 7, names)) for by in (0, 1))
    assert correct.shape == shifted.shape
    assert (correct != shifted).any()


@pytest.mark.parametrize(("size", "names", "counts"), [(12, 12, 12), (13, 13, 0), (30, 30, 0), (31, 0, 0)])
def test_larger_matrices_leave_out_counts_and_then_names(size, names, counts):
    figure = confusion_figure(torch.eye(size).long(), ["cat"] * size)
    shown = [text.get_text() for text in texts(figure)]
    assert shown.count("cat") == 2 * names
    assert len(figure.axes[0].texts) == counts


def test_classes_file_has_the_accuracy_of_each_class(tmp_path):
    write_classes(torch.tensor([[3, 1, 0], [0, 0, 0], [1, 1, 1]]), ["a, b", "none", "c"], tmp_path / "classes.csv")
    assert (tmp_path / "classes.csv").read_text().splitlines() == [
        "class,samples,correct,accuracy",
        '"a, b",4,3,0.75',
        "none,0,0,",
        "c,3,1,0.333333",
    ]
