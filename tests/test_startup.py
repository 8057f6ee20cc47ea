"""train.py imports only what it needs.

The tests read sys.modules, because durations depend on the machine's load.
"""

import json
import os
import subprocess
import sys

import pytest
from launches import ROOT, SUPPORT, only_run
from PIL import Image

# Import times in seconds on 2 cores: torchvision 1.5, torch._dynamo 1.2, scikit-learn 1, the rest
# 0.1 to 0.5.
AT_FIRST_USE = [
    "torchvision",
    "torch._dynamo",
    "sklearn",
    "scipy",
    "tensorboard",
    "matplotlib",
    "torch.distributed.checkpoint",
]
AT_FIRST_USE += ["wandb", "mlflow", "torchmetrics"]

IMPORT_ALL = f"""
import importlib, json, pkgutil, sys
import ddp_lab
files, loaded = {{}}, set()
modules = pkgutil.walk_packages(ddp_lab.__path__, "ddp_lab.")
for name in ["train", *(module.name for module in modules)]:
    importlib.import_module(name)
    if new := [heavy for heavy in {AT_FIRST_USE} if heavy in sys.modules and heavy not in loaded]:
        files[name] = new
    loaded.update(new)
print(json.dumps([files, len(sys.modules)]))
"""

RUN = """
import runpy, sys
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    code = end.code
else:
    code = 0
from paths import loaded_files
print()
print(" ".join(loaded_files()))
print(code, *sys.modules)
"""
# Files of ddp_lab that a plain run loads, those of trackers left out, the pictures at its end
# included. A change that exceeds it adds a detour to every reader's way: find a shorter one before
# raising it.
MOST_LOADED = 75


def interpret(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_modules_do_not_import_heavy_packages_at_the_top():
    ended = interpret(IMPORT_ALL)
    assert ended.returncode == 0, ended.stderr
    importers, modules = json.loads(ended.stdout.splitlines()[-1])
    assert modules > 1000, "the modules were not imported at all"
    # This module is imported where a run has sharded checkpoints, and only there.
    assert importers == {"ddp_lab.checkpoints.sharded": ["torch.distributed.checkpoint"]}, (
        f"imported by: {importers}"
    )


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        pytest.param(
            "--help",
            0,
            "torchrun --nproc_per_node=4 train.py strategy=ddp",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "batchsize=32",
            2,
            "batchsize=32: there is no such key; did you mean batch_size?",
            marks=pytest.mark.slow,
        ),
        ("epochs=0", 2, "epochs=0: must be an integer of at least 1"),
    ],
)
def test_help_and_config_errors_do_not_load_torch(override, code, message):
    ended = interpret(RUN, override)
    exit_code, *modules = ended.stdout.splitlines()[-1].split()
    assert (int(exit_code), message in ended.stdout + ended.stderr) == (code, True), ended.stderr
    assert "torch" not in modules


@pytest.mark.slow
def test_default_run_loads_few_files_and_no_large_package_and_warns_of_nothing(tmp_path):
    ended = interpret(RUN, "epochs=1", f"runs_dir={tmp_path}")
    *_, files, last = ended.stdout.splitlines()
    exit_code, *modules = last.split()
    assert int(exit_code) == 0, ended.stderr
    of_trackers = {name for name in files.split() if name.startswith("observe/trackers/")}
    names = ("__init__", "background", "base", "tensorboard")  # the default
    assert of_trackers == {f"observe/trackers/{name}.py" for name in names}
    others = set(files.split()) - of_trackers - {"data/trees.py"}  # for their pictures
    assert len(others) <= MOST_LOADED, sorted(others)
    folders = {name.partition("/")[0] for name in others}
    assert not folders & {"advise", "lab", "speed", "exercises", "proof"}
    assert "arning" not in ended.stderr + ended.stdout.rpartition("\n\n")[0], ended.stderr
    assert "ddp_lab.training.loop" in modules
    assert not {"torchvision", "torchmetrics", "sklearn", "scipy"} & set(modules)
    assert Image.open(only_run(tmp_path) / "curves.png").width > 500, (
        "a cold run draws its pictures"
    )
