"""What Python finds by a bare name in a command: the user's modules, and none of ours."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from launches import ROOT, launch, only_run, read_metrics

PACKAGE = ROOT / "ddp_lab"
# Modules of a user that are called as modules of ours, in launchers/ and elsewhere, and as the
# clone's train.py.
USERS = {
    "schedulers.py": """
import models
def network(num_classes): return models.network(num_classes)
""",
    "models.py": """
from torch import nn
def network(num_classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
""",
    "sweep.py": """
from torch.optim import SGD
class Descent(SGD): pass
""",
    "arguments.py": """
from ddp_lab.tasks import Classification
class Labels(Classification): pass
""",
    "command.py": """
from ddp_lab.strategies.single import Single
class Alone(Single): pass
""",
    "preflight.py": """
from pathlib import Path
class Notes:
    def __init__(self, run): self.run = run
    def log_metrics(self, metrics, step, epoch): pass
    def log_media(self, name, media, step, epoch): pass
    def finish(self, status, summary): (self.run.path / "notes").write_text(status)
""",
    "train.py": """
def ramp(progress): return 1 - progress / 2
""",
    "data.py": """
import torch
class Squares(torch.utils.data.TensorDataset):
    classes = ("dark", "light")
    def __init__(self): super().__init__(torch.rand(32, 1, 8, 8), torch.arange(32) % 2)
""",
    "errors.py": """
from torch.nn.functional import cross_entropy
def loss(logits, targets): return cross_entropy(logits, targets, reduction="none")
""",
}
LINE = [
    *(
        "model=own",
        "model._target_=schedulers.network",
        "optimizer._target_=sweep.Descent",
        "task._target_=arguments.Labels",
    ),
    *(
        "strategy._target_=command.Alone",
        "tracker=preflight.Notes",
        "scheduler._target_=train.ramp",
    ),
    *(
        "data=own",
        "data.dataset._target_=data.Squares",
        "data.channels=1",
        "data.image_size=8",
        "data.mean=[0]",
    ),
    *(
        "data.std=[1]",
        "loss=own",
        "loss._target_=errors.loss",
        "device=cpu",
        "epochs=1",
        "batch_size=8",
        "runs_dir=runs",
    ),
]


@pytest.fixture
def project(tmp_path):
    """A directory of a user, and beside it a program like the `ddp-lab` that pip writes.

    That program's directory is no user's.
    """
    folder = tmp_path / "project"
    folder.mkdir()
    for name, text in USERS.items():
        (folder / name).write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ddp_lab_command.py").write_text(
        "from ddp_lab.__main__ import main\nmain()\n"
    )
    return folder


@pytest.mark.parametrize(
    "program", ["../bin/ddp_lab_command.py train", f"{ROOT}/train.py"], ids=["ddp-lab", "train.py"]
)
def test_modules_of_a_user_may_have_the_names_of_ours(program, project):
    code, output = launch(
        f"python {(project / program.partition(' ')[0]).resolve()}",
        *program.split()[1:],
        *LINE,
        cwd=project,
    )
    assert code == 0, output
    run = only_run(project / "runs")
    assert (run / "notes").read_text() == "finished"
    assert [row["epoch"] for row in read_metrics(run)] == [1]


def test_no_module_of_ours_can_be_imported_by_a_bare_name(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {path.stem for path in PACKAGE.rglob("*.py")} | {
        path.name for path in PACKAGE.rglob("*/")
    }
    names -= {"__init__", "__main__"}
    before = set(sys.path)
    after = set()
    ours = []

    def look(_: list[str]) -> None:
        after.update(sys.path)
        for name in names:
            spec = PathFinder.find_spec(name)
            places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
            ours.extend(
                name for place in places if place and PACKAGE in Path(place).resolve().parents
            )

    assert command(look)[0] == 0
    assert len(names) > 100
    assert ours == []
    assert after - before == {str(tmp_path)}
