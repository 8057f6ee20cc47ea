"""Checkpoints: one file after every epoch, written beside its place and renamed, the last two kept."""

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from ddp_lab.errors import ConfigError
from ddp_lab.logger import log
from ddp_lab.runtime import Runtime
from ddp_lab.strategies.base import Strategy

KEEP = 2


class Checkpoints:
    """The files `epoch_NNNN.pt` of one run: {"epoch", "model", "optimizer", "scheduler"}, the whole of each, tensors under
    plain names, so that any strategy at any world size loads what any other saved.

    Args:
        shapes: of the whole model's tensors, by name; what a file must have to be resumed from.
    """

    def __init__(
        self,
        folder: Path,
        runtime: Runtime,
        strategy: Strategy,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LambdaLR,
        shapes: dict[str, tuple[int, ...]],
    ):
        self.folder, self.runtime = folder, runtime
        self.strategy, self.optimizer, self.scheduler, self.shapes = strategy, optimizer, scheduler, shapes

    def resume(self, word: str) -> int:
        """Loads what `word` (auto, never or a path) asks for, and returns the epoch to go on with, 1 without a checkpoint.

        Raises:
            ConfigError: the file cannot be used.
        """
        path = self.runtime.agree("checkpoint", lambda: self.find(word))
        if path is None:
            return 1
        state = load_checkpoint(path, self.shapes)
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        if groups[0].keys() != state["optimizer"]["param_groups"][0].keys() - {"params"}:
            raise ConfigError(f"resume={path}: was written with another optimizer; choose that one, or another name")
        self.strategy.load_state_dict(self.optimizer, state)
        # Learning rate, momentum and the like are the config's of this launch; the file has the state and the step.
        self.scheduler.load_state_dict(state["scheduler"] | {"base_lrs": self.scheduler.base_lrs})
        step = self.scheduler.last_epoch
        for group, options, factor in zip(self.optimizer.param_groups, groups, self.scheduler.lr_lambdas, strict=True):
            group.update(options, lr=options["initial_lr"] * factor(step))
        log.info(f"resumed from {path}, after epoch {state['epoch']}")
        return state["epoch"] + 1

    def find(self, word: str) -> str | None:
        if word == "auto":
            return str(self.files()[-1]) if self.files() else None
        return None if word == "never" else word

    def files(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("epoch_*.pt"), key=lambda path: (len(path.name), path.name))

    def save(self, epoch: int) -> None:
        """Writes a checkpoint, whole or not at all, and removes those before the last two. Collective; rank 0 writes."""
        state = {"epoch": epoch, "scheduler": self.scheduler.state_dict(), **self.strategy.state_dict(self.optimizer)}
        if self.runtime.rank != 0:
            return
        self.folder.mkdir(exist_ok=True)
        target = self.folder / f"epoch_{epoch:04d}.pt"
        temporary = target.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        # Files of later epochs belong to a branch that this run has left, as its records do.
        files = self.files()
        last = files.index(target) + 1
        for path in files[: max(0, last - KEEP)] + files[last:]:
            path.unlink()


def load_checkpoint(path: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Reads a checkpoint for a model with these tensors; tensors and plain values only, so a malicious file cannot run code.

    Raises:
        ConfigError: not a checkpoint of this project, or of another model: names the first tensor that differs.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"epoch", "model", "optimizer", "scheduler"} - state.keys()
    except (RuntimeError, OSError, EOFError, AttributeError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = f"{type(error).__name__} {error}".split("\n")[0]
        raise ConfigError(f"resume={path}: cannot be read as a checkpoint ({reason})") from None
    if missing:
        raise ConfigError(f"resume={path}: is no checkpoint of ddp_lab; it lacks {', '.join(sorted(missing))}")
    saved = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
    for name in [*shapes, *saved]:
        here, there = shapes.get(name, "missing"), saved.get(name, "missing")
        if here != there:
            raise ConfigError(
                f"resume={path}: does not fit the model: {name} is {there} in the checkpoint, {here} in the model. "
                "Choose the model and data it was made with, another name, or resume=never"
            )
    return state
