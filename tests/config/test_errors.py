"""The parts of messages."""

from fnmatch import fnmatch

import pytest

from ddp_lab.config.errors import count, count_with_verb, first_few
from ddp_lab.training.group_entries import Entry
from ddp_lab.training.groups import describe


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


def test_verb_agrees_with_the_number():
    assert count_with_verb(1, "layer") == "1 layer is"
    assert count_with_verb(2, "layer") == "2 layers are"


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (["*.bias"], "2 parameters match *.bias; 2 are in the default group"),
        (["1.*"], "1 parameter matches 1.*; 3 are in the default group"),
        (["0.*", "1.*"], "2 parameters match 0.*, 1 parameter matches 1.*; 1 is in the default"),
    ],
)
def test_log_of_groups_counts_one_parameter_without_a_plural(patterns, text):
    names = ["0.weight", "0.bias", "1.weight", "2.bias"]
    entries = [Entry(pattern, 1.0, {}) for pattern in patterns]
    matched = {
        name: next((n for n, each in enumerate(patterns, 1) if fnmatch(name, each)), 0)
        for name in names
    }
    assert text in describe(names, entries, matched, {})[0]


@pytest.mark.parametrize(
    ("values", "text"),
    [([], ""), ([4, 5], "4, 5"), ([4, 5, 6], "4, 5, 6"), ([*"abcd"], "a, b, c, ...")],
)
def test_first_few_has_dots_in_place_of_the_other_values(values, text):
    assert first_few(values, 3) == text
