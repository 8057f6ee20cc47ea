"""Sharded checkpoints of a linear layer, of one rank."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ddp_lab.resilience.checkpoint import Checkpoints
from ddp_lab.resilience.sharded_read import ShardedCheckpoint
from ddp_lab.strategies.single import Single
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import cosine, make_scheduler
from ddp_lab.world.runtime import Runtime


def tiny(folder: Path, best: str | None = "val_loss", sharded: bool = True) -> Checkpoints:
    """Return the checkpoints of a linear layer with AdamW, of which the bias is the number of the epoch."""
    runtime = Runtime("cpu")
    strategy = Single(runtime)
    strategy.setup(nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(strategy.parameters(), lr=0.1, weight_decay=0.0)
    shapes = {name: tuple(tensor.shape) for name, tensor in strategy.module.state_dict().items()}
    scheduler = make_scheduler(optimizer, cosine, 10, 1, 0)
    return Checkpoints(folder, runtime, strategy, optimizer, scheduler, shapes, best=best, sharded=sharded)


def step(checkpoints: Checkpoints) -> None:
    """Take an optimizer step that changes the weight only."""
    module = checkpoints.strategy.module
    module.weight.grad, module.bias.grad = torch.ones(1, 2), torch.zeros(1)
    checkpoints.optimizer.step()


def save_epochs(checkpoints: Checkpoints, losses: list[float], start: Progress | None = None) -> None:
    """Save a checkpoint after each epoch, which has one step."""
    progress = start or Progress()
    for loss in losses:
        checkpoints.strategy.module.bias.data.fill_(progress.epoch)
        step(checkpoints)
        progress = replace(progress, step=progress.step + 1, samples=1).next_epoch({"val_loss": loss, "val_accuracy": 0.5})
        checkpoints.save(progress)
    checkpoints.wait()
    assert checkpoints.problem is None


def resume(checkpoints: Checkpoints, choice: str = "auto") -> Progress:
    return checkpoints.resume(choice, lambda progress: progress.step)


def bias_in(path: Path) -> float:
    return ShardedCheckpoint(path).whole()["model"]["bias"].item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
