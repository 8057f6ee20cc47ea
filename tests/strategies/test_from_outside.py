"""Strategies, all-reduce algorithms and schedules of a user, as docs/your-own.md shows them."""

import re

import pytest
import torch
from launches import ROOT, SMALL, launch, read_metrics

from ddp_lab.config.errors import ConfigError
from ddp_lab.lab.lab import Lab
from ddp_lab.strategies.base import Strategy

SECTION = "## Strategies, all-reduce algorithms and schedules"
TWO_RANKS = f"torchrun --standalone --nproc_per_node=2 {ROOT}/train.py"
RUN = [*SMALL, "epochs=2", "device=cpu", "runs_dir=runs"]


def documented() -> tuple[str, list[list[str]]]:
    """Return the Python of the section as one file, and the overrides of its commands."""
    text = (ROOT / "docs" / "your-own.md").read_text()
    section = text.partition(SECTION)[2].partition("\n## ")[0]
    blocks = re.findall(r"```(python)?\n(.*?)```", section, re.DOTALL)
    code = "\n\n".join(body for language, body in blocks if language)
    commands = [body.partition("train.py ")[2].split() for language, body in blocks if not language]
    return code, commands


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A directory with the file of the documentation, and the losses of one device."""
    folder = tmp_path_factory.mktemp("outside")
    code, _ = documented()
    (folder / "mine.py").write_text(code)
    return folder


def losses(folder, line: str, overrides: list[str]) -> list[float]:
    code, output = launch(
        line, *RUN, *overrides, f"name=run{len(list(folder.glob('runs/*')))}", cwd=folder
    )
    assert code == 0, output
    newest = max((folder / "runs").iterdir(), key=lambda path: int(path.name.removeprefix("run")))
    return [row["train_loss"] for row in read_metrics(newest)]


def test_documented_commands_train_with_what_the_file_defines(project):
    strategy, algorithm, schedule = documented()[1]
    assert "mine.OneByOne" in strategy[0]
    assert "mine.hypercube" in algorithm[1]
    assert "mine.ramp" in schedule[1]
    expected = losses(project, f"python {ROOT}/train.py", ["strategy=single"])
    assert losses(project, TWO_RANKS, strategy) == pytest.approx(expected, abs=1e-6)
    assert losses(project, TWO_RANKS, algorithm) == pytest.approx(expected, abs=1e-6)
    constant = losses(project, f"python {ROOT}/train.py", ["scheduler=constant"])
    ramped = losses(project, f"python {ROOT}/train.py", schedule)
    assert ramped != constant


def test_algorithm_refuses_a_number_of_ranks_in_one_line(project):
    line = TWO_RANKS.replace("=2 ", "=3 ")
    options = ["strategy=scratch", "strategy.algorithm=mine.hypercube", "runs_dir=started"]
    code, output = launch(line, *RUN[:-1], *options, cwd=project)
    assert code != 0
    assert "error: hypercube: needs a power of two of ranks, got 3. Use 2 or 4" in output
    assert "mine.py" not in output, "the traceback of a rank"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere.sum", "No module named 'nowhere'"),
        ("math.pi", "it is a float"),
        ("math.tau2", "tau2"),
    ],
)
def test_algorithm_that_is_no_function_is_refused(name, reason, project):
    options = ["strategy=scratch", f"strategy.algorithm={name}", "runs_dir=refused"]
    code, output = launch(f"python {ROOT}/train.py", *RUN[:-1], *options, cwd=project)
    assert code == 2
    assert (
        f"error: strategy.algorithm={name}: must be star, per_tensor, flat, ring or bucketed"
        in output
    )
    assert reason in output
    assert not (project / "refused").exists()


class Doubled(Strategy):
    """One device, whose gradients are multiplied."""

    def __init__(self, runtime, factor: float = 2.0):
        super().__init__(runtime)
        self.factor = factor

    def setup(self, model):
        self.forward = model.to(self.device)
        self.module = self.forward

    def reduce_gradients(self):
        for parameter in self.module.parameters():
            parameter.grad *= self.factor


def weight_after_a_step(strategy, **options) -> float:
    with Lab(strategy, device="cpu", **options) as lab:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        trainer = lab.trainer(
            model,
            lambda outputs, targets: (outputs - targets)[:, 0],
            lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            batch_size=2,
        )
        trainer.step(torch.ones(2, 1), torch.zeros(2, 1))
        return model.weight.item()


def test_lab_takes_the_class_of_a_strategy_and_its_options():
    """The gradient of the mean of w x is 1."""
    assert weight_after_a_step("single") == 0
    assert weight_after_a_step(Doubled) == 1 - 2
    assert weight_after_a_step(Doubled, factor=5.0) == 1 - 5


def test_lab_refuses_wrong_options_of_a_class_and_other_classes():
    with pytest.raises(ConfigError, match=r"^strategy\.factor=much: must be a number"):
        Lab(Doubled, factor="much")
    with pytest.raises(
        ConfigError,
        match=r"^strategy\.fctor=3\.0: there is no such key; did you mean strategy\.factor",
    ):
        Lab(Doubled, fctor=3.0)
    with pytest.raises(ConfigError, match=r"or a subclass of ddp_lab\.strategies\.base\.Strategy"):
        Lab(torch.nn.Linear)


def test_strategy_is_named_by_its_class_in_the_log(project):
    """Not by its file, as those of ddp_lab are."""
    line = f"python {ROOT}/train.py"
    options = ["strategy._target_=mine.OneByOne", "runs_dir=named"]
    code, output = launch(line, *RUN[:-1], *options, cwd=project)
    assert code == 0, output
    assert "\nOneByOne on 1 x cpu\n" in output
