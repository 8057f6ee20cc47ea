"""The examples of the library: each is short, runs on one process and on two ranks, and learns."""

import contextlib
import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from launches import ROOT
from worlds import run_world

EXAMPLES = ROOT / "examples"
SCRIPTS = {
    "segment.py": ([], "mean_iou", 0.8, 1.0),
    "gpt.py": ([str(ROOT / "README.md")], "bits_per_byte", 1.0, 4.5),
    "bert.py": ([], "accuracy", 0.8, 1.01),
    "gan.py": ([], "radius", 0.7, 1.2),
    "contrastive.py": ([], " loss", 0.3, 1.2),
    "detector.py": ([], " loss", 0.01, 0.08),
}

# These take the longest. Of the slow tests, one has two models and one a dict of inputs.
SLOW = ("gan.py", "bert.py")
EXTRA = ("detector.py", "gpt.py", "segment.py")


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    if name in EXTRA:
        return [pytest.mark.extra]
    return [pytest.mark.slow] if name in SLOW else []


def run_example(name: str, *arguments: str) -> str:
    """Run an example in this process, and return what it prints."""
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in SCRIPTS])
def test_script_gives_the_same_metric_on_two_ranks_as_alone(name):
    arguments, metric, low, high = SCRIPTS[name]
    values = []
    for ranks, strategy in ((1, "single"), (2, "ddp")):
        first, *others = run_world(ranks, run_example, name, *arguments, strategy)
        assert not any(others)
        values.append(float(re.findall(rf"{metric} (\S+)", first)[-1]))
    assert low < values[0] < high
    assert values[1] == pytest.approx(values[0], rel=0.01)


@pytest.mark.slow
def test_notebook_trains_on_two_ranks_and_plots():
    import nbclient  # takes 1 s, which all processes of pytest would spend
    import nbformat

    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]
    printed = "".join(
        output.text
        for output in outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    lines = dict(re.findall(r"ranks (\d) .*accuracy (\S+)", printed))
    assert lines.keys() == {"1", "2"}
    assert lines["1"] == lines["2"]
    assert float(re.findall(r"largest difference (\S+)", printed)[0]) < 1e-5
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize(
    "path", [EXAMPLES / name for name in (*SCRIPTS, "notebook.ipynb")], ids=lambda path: path.name
)
def test_example_is_short(path: Path):
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    assert len(text.splitlines()) <= 66


def test_code_of_the_document_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.DOTALL
    ):
        exec(code, names)
    assert (tmp_path / "weights.safetensors").exists()
    logged = re.findall(r"^epoch (\d)", capsys.readouterr().out, re.MULTILINE)
    assert logged == ["1", "2", "3"], "epochs in the log count from 1"
    assert names["sums"].shape == (2,)
    assert 0 <= names["accuracy"] <= 1
