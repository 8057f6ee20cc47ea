"""Small runs, the comparison of their checkpoints, and checkpoints of a linear layer alone."""

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from launches import SMALL, main_in_world, newest
from torch import nn
from worlds import run_world

from ddp_lab.checkpoints.checkpoints import Checkpoints, ignore
from ddp_lab.checkpoints.files import find_damage
from ddp_lab.checkpoints.find import open_checkpoint
from ddp_lab.checkpoints.state import State
from ddp_lab.strategies.single import Single
from ddp_lab.tasks.classification import Classification
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import Horizon, cosine, make_scheduler
from ddp_lab.world.runtime import Runtime


def start(run_dir: Path, ranks: int, overrides: tuple[str, ...]) -> None:
    """Train a small model, in float64 if that is one of the overrides.

    The learning rate is constant, so that a longer run begins with the same steps.
    """
    where = f"runs_dir={run_dir.parent}", f"name={run_dir.name}"
    main = in_float64 if "float64" in overrides else main_in_world
    chosen = [override for override in overrides if override != "float64"]
    run_world(ranks, main, *SMALL, "scheduler=constant", *where, *chosen)


def in_float64(*overrides: str) -> None:
    """Run train.py on this rank as `main_in_world`, with float64 as the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        main_in_world(*overrides)
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def first_launch(folder: Path, ranks: int, overrides: tuple[str, ...]) -> Path:
    run_dir = folder / f"first-{len(list(folder.glob('first-*')))}"
    start(run_dir, ranks, overrides)
    return run_dir


def train(tmp_path: Path, name: str, *overrides: str, ranks: int = 1) -> dict:
    """Start or resume a run and return its newest checkpoint.

    First launches are shared: each test gets a copy of the run.
    """
    run_dir = tmp_path / name
    if run_dir.exists() or "resume=" in str(overrides):
        start(run_dir, ranks, overrides)
    else:
        shutil.copytree(first_launch(tmp_path.parent, ranks, overrides), run_dir)
    return newest(run_dir)


def assert_same(one: dict, other: dict, tolerance: float) -> None:
    places = [
        {key: state["progress"][key] for key in ("epoch", "samples", "step")}
        for state in (one, other)
    ]
    assert places[0] == places[1]
    assert one["scheduler"] == other["scheduler"]
    for name, tensor in one["model"].items():
        assert torch.allclose(tensor, other["model"][name], rtol=0, atol=tolerance), name
        momenta = (state["optimizer"]["state"][name]["momentum_buffer"] for state in (one, other))
        assert torch.allclose(*momenta, rtol=0, atol=10 * tolerance), name


def tiny(
    folder: Path,
    best: str | None = "val_loss",
    sharded: bool = False,
    make: type = torch.optim.AdamW,
    model: nn.Module | None = None,
) -> Checkpoints:
    """Return the checkpoints of a layer, a linear one if `model` is None, in this process."""
    strategy = Single(Runtime("cpu"))
    strategy.setup(model or nn.Linear(2, 1))
    options = {"momentum": 0.9} if issubclass(make, torch.optim.SGD) else {"weight_decay": 0.0}
    optimizer = make(strategy.module.parameters(), lr=0.1, **options)
    shapes = {name: tuple(tensor.shape) for name, tensor in strategy.module.state_dict().items()}
    state = State(strategy, optimizer, make_scheduler(optimizer, cosine, Horizon(10), 1), shapes)
    return Checkpoints(folder, state, best=best, sharded=sharded)


def step(checkpoints: Checkpoints) -> None:
    """Take an optimizer step that changes the weight only."""
    module = checkpoints.state.strategy.module
    module.weight.grad = torch.ones(1, 2)
    module.bias.grad = torch.zeros(1)
    checkpoints.state.optimizer.step()


def save_epochs(
    checkpoints: Checkpoints,
    losses: list[float],
    start: Progress | None = None,
    accuracies: list[float] | None = None,
    after_write: Callable[[Path], None] = ignore,
) -> Progress:
    """Save a checkpoint after each epoch, which has one step.

    The bias is the number of the epoch. Return the last progress.
    """
    progress = start or Progress()
    for loss, accuracy in zip(losses, accuracies or [0.5] * len(losses), strict=True):
        checkpoints.state.strategy.module.bias.data.fill_(progress.epoch)
        step(checkpoints)
        progress = replace(progress, step=progress.step + 1, samples=1)
        validation = {"val_loss": loss, "val_accuracy": accuracy}
        progress = progress.evaluated(validation, Classification.lower_is_better).next_epoch()
        checkpoints.save(progress, after_write)
    checkpoints.wait()
    assert checkpoints.problem is None
    return progress


def resume(checkpoints: Checkpoints, choice: str = "auto") -> Progress:
    source = checkpoints.folder if choice == "auto" else Path(choice)
    return checkpoints.resume(source, lambda progress: progress.step)


def bias_in(path: Path) -> float:
    """Return the bias that a checkpoint is evaluated with, after a check of its hashes."""
    assert find_damage(path) is None
    open_checkpoint(path).load_weights({"bias": (bias := torch.empty(1))})
    return bias.item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".sha256")
