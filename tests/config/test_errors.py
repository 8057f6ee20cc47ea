"""The parts of messages."""

import pytest

from ddp_lab.config.errors import count, first_few


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "file", "0 files"),
        (1, "rank", "1 rank"),
        (1024, "step", "1,024 steps"),
        (2, "epoch", "2 epochs"),
        (1, "micro-batch", "1 micro-batch"),
        (8, "micro-batch", "8 micro-batches"),
        (3, "class", "3 classes"),
    ],
)
def test_count_has_the_plural_of_all_numbers_but_one(number, noun, text):
    assert count(number, noun) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [([], ""), ([4, 5], "4, 5"), ([4, 5, 6], "4, 5, 6"), ([*"abcd"], "a, b, c, ...")],
)
def test_first_few_has_dots_in_place_of_the_other_values(values, text):
    assert first_few(values, 3) == text
