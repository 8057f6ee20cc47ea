"""The scripts of docs/verify.md, executed as a user would."""

import os
import re
import subprocess

import pytest
from launches import ROOT
from warm import programs

DOCUMENT = (ROOT / "docs/verify.md").read_text()
SCRIPTS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCUMENT, re.DOTALL))
EQUAL = ["1 rank equal", "2 ranks equal", "4 ranks equal"]


def run(name: str, folder) -> subprocess.CompletedProcess:
    (folder / name).write_text(SCRIPTS[name])
    return subprocess.run(
        [programs() / "python", name],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_step_without_a_division_prints_what_the_document_shows(tmp_path):
    (shown,) = re.findall(r"```\n\$ python my_step.py\n(.*?)```", DOCUMENT, re.DOTALL)
    ended = run("my_step.py", tmp_path)
    assert (ended.returncode, ended.stdout) == (1, shown), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate_step.py", "fabric_step.py"])
def test_adapters_of_other_libraries_are_equal(name, tmp_path):
    ended = run(name, tmp_path)
    assert ended.returncode == 0, ended.stderr
    rows = [" ".join(line.split()[:3]) for line in ended.stdout.splitlines()]
    assert rows == EQUAL, ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["accelerate_step.py", "fabric_step.py"])
def test_adapters_whose_gradients_are_summed_are_reported(name, tmp_path, monkeypatch):
    """The adapters really distribute: a loss that is not divided is found."""
    old = "nn.functional.cross_entropy(model(inputs), targets)"
    assert SCRIPTS[name].count(old) == 1
    monkeypatch.setitem(SCRIPTS, name, SCRIPTS[name].replace(old, f"{old} * world_size"))
    ended = run(name, tmp_path)
    assert "weight is x2 the expected tensor (all 2 tensors)." in ended.stdout, ended.stderr
    assert "x4 is the number of ranks" in ended.stdout
