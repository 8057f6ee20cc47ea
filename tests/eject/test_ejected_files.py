"""The text of ejected files: valid, short, clean, and without ddp_lab; and how it is assembled."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from ejected import eject_to
from launches import ROOT

from ddp_lab.data.datasets import Synthetic, Torchvision
from ddp_lab.eject.assemble import TEMPLATES, fold, sorted_imports, without_unused
from ddp_lab.eject.plain_file import MOST_LINES

SYNTHETIC = "data=synthetic data.dataset.train_size=20 data.dataset.test_size=10"
MODELS = {
    "lenet": f"{SYNTHETIC} model=lenet",
    "simple_cnn": f"{SYNTHETIC} model=simple_cnn model.init=by_block",
    "resnet18": f"{SYNTHETIC} model=resnet18 model.init_std=0.1",
    "book_resnet18": f"{SYNTHETIC} model=book_resnet18 model.init_std=0.1",
    "vit": f"{SYNTHETIC} model=vit",
    "gpt": "task=tokens data=text data.root={text} model=gpt model.tied=true data.context=8",
    "own": f"{SYNTHETIC} model=own model._target_=plain_nets.Dropping",
    "digits": "data=digits model=simple_cnn",
    "mnist": "data=mnist model=simple_cnn",
    "cifar10": "data=cifar10 model=simple_cnn",
}
OPTIONS = {
    "plain": "",
    "step": "accumulate=2 max_grad_norm=1 scheduler=trapezoid decay_norms_and_biases=false",
    "ends": "max_steps=30 warmup_steps=2 evaluate_test=end float32_matmul=high",
    "epochs": "scheduler=multi_step optimizer=adamw data.val_fraction=0.2",
    "constant": "scheduler=constant device=cpu optimizer.weight_decay=0.1",
}
PUBLIC = (("MNIST", 1), ("CIFAR10", 3))
IMAGES = "data.crop_padding=2 data.flip=true loss.label_smoothing=0.1"
STRATEGIES = ("single", "scratch", "ddp", "fsdp")


def write_some(folder, monkeypatch, everything):
    """Write the files of each model with one option, or `everything`; return them by path."""
    made_up = {name: Synthetic(20, 10, channels, 28, 10).load() for name, channels in PUBLIC}
    monkeypatch.setattr(Torchvision, "load", lambda self: made_up[self.name])
    (folder / "text.txt").write_text("abcdefgh" * 40)
    texts = {}
    for number, (model, line) in enumerate(MODELS.items()):
        for place, (option, more) in enumerate(OPTIONS.items()):
            if not everything and place != number % len(OPTIONS):
                continue
            # each model with each option, and with each strategy
            strategy = STRATEGIES[(number + place // 2) % 4]
            images = IMAGES if model in ("lenet", "digits") else ""
            overrides = f"{line} {more} {images} strategy={strategy}"
            file = folder / f"{model}_{option}_{strategy}.py"
            texts[file] = eject_to(file, overrides.format(text=folder / "text.txt"))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.extra)])
def test_files_are_short_and_clean_and_import_no_ddp_lab(everything, tmp_path, monkeypatch):
    texts = write_some(tmp_path, monkeypatch, everything)
    assert len(texts) == len(MODELS) * (len(OPTIONS) if everything else 1)
    for file, text in texts.items():
        assert text.count("\n") <= MOST_LINES, file.name
        modules = imported(compile(text, file, "exec", ast.PyCF_ONLY_AST))
        assert not {"ddp_lab", "hydra", "omegaconf"} & modules, file.name
        assert not [name for name in ("STRATEGY", "INPUTS", "SCHEDULE") if name in text], file.name
    ruff = Path(sys.executable).with_name("ruff")
    config = ["--no-cache", "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
    for check in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *check, *config], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def imported(tree: ast.AST) -> set[str]:
    """Return the packages that code imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def test_file_that_would_be_too_long_is_refused(tmp_path, command):
    from ddp_lab.commands import eject

    line = f"model=vit strategy=scratch accumulate=2 max_grad_norm=1 {IMAGES} {OPTIONS['epochs']}"
    code, _, errors = command(eject.main, *line.split(), "-o", tmp_path / "plain.py")
    assert code == 2
    assert f"lines, more than the {MOST_LINES} that a person reads" in " ".join(errors.split())


@pytest.mark.slow
def test_templates_are_a_program(tmp_path):
    """Of the folder's own train.py, with the examples of settings.py."""
    program = tmp_path / "program"
    program.mkdir()
    for path in TEMPLATES.glob("*.py"):
        text = path.read_text().replace("EPOCHS = 20\n", "EPOCHS = 1\n")
        (program / path.name).write_text(text)
    done = subprocess.run(
        [sys.executable, program / "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 1: train loss ")


CODE = """
def run():
    if KIND == "a":
        x = 1
        # a comment of the branch
        y = 2
    elif KIND == "b":
        x = 3
    else:
        x = 4
    if KIND == "b" and x > 2:
        x = 5
    if KIND == "a" or x > 2:
        x = 6
    return x
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("a", "x = 1\n    # a comment of the branch\n    y = 2\n    x = 6\n    return x"),
        ("b", "x = 3\n    if x > 2:\n        x = 5\n    if x > 2:\n        x = 6\n    return x"),
        ("c", "x = 4\n    if x > 2:\n        x = 6\n    return x"),
    ],
)
def test_branch_that_a_setting_chooses_remains(kind, expected):
    assert fold(CODE, {"KIND": kind}).strip() == f"def run():\n    {expected}"


def test_functions_and_imports_that_nothing_uses_are_left_out():
    code = "def a():\n    return b()\n\n\ndef b():\n    return c\n\n\nc = 1\n\n\nprint(c)\n"
    assert without_unused(code) == "c = 1\n\n\nprint(c)\n"
    lines = ["import torch.nn.functional as F", "import os", "from a import b", "from a import C"]
    assert sorted_imports(lines, {"os", "b", "C"}) == ["import os", "from a import C, b"]
