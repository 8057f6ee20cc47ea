"""CONTRIBUTING.md: the cases and helpers that it tells its readers to run exist."""

import re

import case
import training
import worlds
from cases import MATRIX
from launches import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_case_that_contributing_runs_exists():
    named = re.search(r"test_strategy_equals_single\[(.*) on (\d)\]", TEXT)
    quick = [(str(case), size) for case in MATRIX for size in case.ranks]
    assert (named[1], int(named[2])) in quick


def test_helpers_that_contributing_imports_exist():
    code = re.search(r"<<'END'\n(.*?)^END\n", TEXT, re.DOTALL | re.MULTILINE)[1]
    compile(code, "CONTRIBUTING.md", "exec")
    for module in (case, training, worlds):
        names = re.search(rf"^from {module.__name__} import (.*)$", code, re.MULTILINE)[1].split(
            ", "
        )
        assert all(hasattr(module, name) for name in names)


def test_config_of_the_case_that_contributing_prints_is_composed():
    line = re.search(r'^case, ranks = "(.*)", 2$', TEXT, re.MULTILINE)[1]
    assert case.config_of(line).strategy._target_.endswith("DDP")
