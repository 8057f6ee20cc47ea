"""The table of scripts/planted_errors.py matches the code.

Planting all errors takes too long for `make test`.
"""

import ast
import re

import pytest
from launches import ROOT

from scripts.planted_errors import ERRORS, planted


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error["name"])
def test_error_can_be_planted_and_its_tests_exist(error):
    text = planted(error, ROOT)
    if error["file"].endswith(".py"):
        ast.parse(text)
    assert all((ROOT / file).exists() for file in re.findall(r"tests/\S+\.py", error["test"]))
