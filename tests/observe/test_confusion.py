import numpy as np
import pytest
import torch

from ddp_lab.observe.axes import COLOURS
from ddp_lab.observe.confusion import confusion_picture, write_classes

BLUE = tuple(int(COLOURS[0][i : i + 2], 16) for i in (1, 3, 5))


def pixels_of(picture, colour: tuple[int, ...]) -> int:
    return (np.array(picture) == colour).all(2).sum()


@pytest.mark.parametrize(("size", "cell"), [(10, 44), (20, 24), (40, 18), (1000, 1)])
def test_picture_has_a_cell_for_every_pair_of_classes(size, cell):
    names = [str(number) for number in range(size)]
    correct, shifted = (confusion_picture(torch.eye(size).roll(by, 1).long() * 7, names) for by in (0, 1))
    numbers = 60 * size if size <= 12 else 0  # pixels of the numbers in the cells, and of their edges
    for picture in (correct, shifted):
        assert size * cell**2 - numbers <= pixels_of(picture, BLUE) <= size * cell**2
    assert correct.size == shifted.size
    assert np.array(correct).tobytes() != np.array(shifted).tobytes()


def test_colour_is_the_fraction_of_the_row():
    """A class with few samples has the colours of one with many. A class without samples is white."""
    many, few = (confusion_picture(torch.tensor([[3, 1], [0, 0]]) * factor, [""] * 2) for factor in (1000, 1))
    quarter = tuple(round(255 - 0.25 * (255 - value)) for value in BLUE)
    assert pixels_of(few, quarter) > 44 * 44 / 2
    assert abs(pixels_of(few, quarter) - pixels_of(many, quarter)) < 300
    assert pixels_of(few, BLUE) == 0


def test_names_are_drawn_for_up_to_thirty_classes():
    def black(size: int) -> int:
        return pixels_of(confusion_picture(torch.zeros(size, size).long(), ["WWWWWWWW"] * size), (0, 0, 0))

    assert black(30) > 5 * black(31) > 0, "the line above the matrix is black, too"


def test_classes_file_has_the_accuracy_of_each_class(tmp_path):
    write_classes(torch.tensor([[3, 1, 0], [0, 0, 0], [1, 1, 1]]), ["a, b", "none", "c"], tmp_path / "classes.csv")
    assert (tmp_path / "classes.csv").read_text().splitlines() == [
        "class,samples,correct,accuracy",
        '"a, b",4,3,0.75',
        "none,0,0,",
        "c,3,1,0.333333",
    ]
