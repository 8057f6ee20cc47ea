"""The table of scripts/planted_errors.py matches the code and the tests.

Planting all errors takes too long for `make test`.
"""

import ast
import re
import shlex

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression
from conftest import COLLECTED
from launches import ROOT

from scripts.planted_errors import ERRORS, planted


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error["name"])
def test_error_can_be_planted_and_its_tests_exist(error):
    text = planted(error, ROOT)
    if error["file"].endswith(".py"):
        ast.parse(text)
    assert all((ROOT / file).exists() for file in re.findall(r"tests/\S+\.py", error["test"]))


def selected(test: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items that pytest runs for the arguments of an entry: a path, and perhaps -k."""
    path, *options = shlex.split(test)
    assert options[::2] in ([], ["-k"]), f"this test does not know the options {options}"
    matching = [item for item in items if item.nodeid.startswith(path)]
    for text in options[1::2]:
        chosen = Expression.compile(text)
        matching = [item for item in matching if chosen.evaluate(KeywordMatcher.from_item(item))]
    return matching


def test_errors_have_tests_in_the_gate(request):
    """Of the files that are collected, which are all of them in `make test`."""
    in_gate = [
        item for item in request.config.stash[COLLECTED] if not item.get_closest_marker("extra")
    ]
    files = {item.nodeid.partition("::")[0] for item in in_gate}
    lacking = [
        (error["name"], error["test"])
        for error in ERRORS
        if shlex.split(error["test"])[0].partition("::")[0] in files
        and not selected(error["test"], in_gate)
    ]
    assert not lacking
    assert len(selected("tests/scripts/test_planted_errors.py -k in_the_gate", in_gate)) == 1
    assert not selected("tests/scripts/test_planted_errors.py -k no_such_test", in_gate)
