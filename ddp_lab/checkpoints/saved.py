"""A checkpoint whose hashes have been checked: does it fit the launch, and how is it loaded."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddp_lab.checkpoints.same_optimizer import (
    SavedOptimizer,
    counters_of,
    describe_options,
    groups_as_saved,
    is_same,
    options_of,
    rates_set_by_loop,
)
from ddp_lab.checkpoints.state import KEYS, LOSS_SCALE, SET_BY_LOOP, Shapes, State, content_of
from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.log import log
from ddp_lab.strategies.base import Strategy


class SavedCheckpoint(ABC):
    """A checkpoint of either format.

    Args:
        path: its file or directory.
        key: what the user sets to the path, for messages.

    Attributes:
        state: everything but tensors: the keys "progress", "seed", "scheduler" and "optimizer".
        tensors: the full tensors by key, as in state.py; on the meta device if `read` reads them
            from the disk.

    Raises:
        ConfigError: its files are not those of a checkpoint of ddp_lab.
    """

    state: dict[str, Any]
    tensors: Mapping[str, torch.Tensor]

    def __init__(self, path: Path, key: str = "resume="):
        self.path = path
        self.about = f"{key}{path}"
        try:
            self.open()
        # the bytes of a file that somebody else wrote may mean anything to a parser
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            raise ConfigError(
                f"{self.about}: is not a checkpoint of ddp_lab ({reason}). Use a file step_* or "
                "best.* of a run's checkpoints"
            ) from None
        self.has_averages = any(key.startswith("ema.") for key in self.tensors)

    @abstractmethod
    def open(self) -> None:
        """Set `state` and `tensors`.

        Raises any exception if the files are not those of a checkpoint.
        """

    @abstractmethod
    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read into tensors by key, in place: full ones or DTensors, on any device.

        Not collective.
        """

    def check(self, shapes: Shapes) -> None:
        """Check that the weights and their averages are those of a model.

        Args:
            shapes: the shape of each tensor of the full model by name.

        Raises:
            ConfigError: a tensor differs; the message names the first one.
        """
        shapes_of = {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}
        weights = {
            key.removeprefix("model."): shape
            for key, shape in shapes_of.items()
            if key.startswith("model.")
        }

        averages = {
            key.removeprefix("ema."): shape
            for key, shape in shapes_of.items()
            if key.startswith("ema.")
        }
        for saved in (weights, weights | averages):
            for name in [*shapes, *saved]:
                here = shapes.get(name, "missing")
                there = saved.get(name, "missing")
                if here != there:
                    resumes = self.about.startswith("resume=")
                    other = ", another name, or resume=never" if resumes else ""
                    raise ConfigError(
                        f"{self.about}: does not match the model: {name} is {there} in the "
                        f"checkpoint, {here} in the model. Use the model and data that it was "
                        f"trained with{other}"
                    )

    def check_optimizer(self, state: State) -> None:
        """Check that the optimizer is this launch's, and has the same parameters.

        Its options need not be the same: they come from this launch, and a release of torch may add
        or remove one.

        Raises:
            ConfigError: it is another optimizer, or a parameter that is used is frozen in one of
                the two only.
        """
        groups = self.state["optimizer"]["param_groups"]
        saved = self._saved_optimizer()
        if not is_same(saved, state.optimizer):
            saved_text, expected = (
                ", ".join(sorted(names)) for names in (saved.options, options_of(state.optimizer))
            )
            raise ConfigError(
                f"{self.about}: was written with another optimizer: its options are {saved_text}; "
                f"expected {expected}. Use the optimizer that it was trained with, or another name"
            )

        if line := describe_options(saved, state.optimizer):
            log.info(line)
        trained = {name for group in groups for name in group["params"]}
        for name, parameter in state.strategy.module.named_parameters():
            if parameter.requires_grad != (name in trained) and name not in state.strategy.idle:
                if parameter.requires_grad:
                    now = "trained"
                    then = "frozen"
                else:
                    now = "frozen"
                    then = "trained"
                raise ConfigError(
                    f"{self.about}: the parameter {name} is {now} in this launch and was {then} "
                    "when the checkpoint was written. Freeze the same parameters, or begin a new "
                    f"run from these weights: model.weights={self.path} with another name"
                )

    def _saved_optimizer(self) -> SavedOptimizer:
        """Return what the checkpoint records of its optimizer."""
        optimizer = self.state["optimizer"]
        parts = (key.rpartition(".") for key in self.tensors if key.startswith("optimizer."))
        states = {name for _, _, name in parts} | {
            name
            for state_of_parameter in optimizer["state"].values()
            for name in state_of_parameter
        }
        return SavedOptimizer(
            optimizer.get("kind"), optimizer["param_groups"][0].keys() - {"params"}, states
        )

    def load_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """Read the weights to evaluate into tensors by their names in the model, in place.

        These are the averages of the weights, if there are any.
        """
        self.read(
            {
                f"{'ema' if f'ema.{name}' in self.tensors else 'model'}.{name}": tensors[name]
                for name in tensors
            }
        )

    def load_loss(self, strategy: Strategy) -> None:
        """Read the buffers of the loss that training had changed. Called after `Strategy.place`."""
        if strategy.task.has_buffers:
            from ddp_lab.checkpoints.loss_state import load_loss

            task = strategy.task_of_steps
            load_loss(task, strategy.device_of_loss, self.read, self.tensors)

    def load(self, state: State) -> None:
        """Load model, optimizer, averages, and the state and the scale of the loss.

        This rank's part of them. Averages start from the weights if there are none.
        """
        self.read({key: tensor for key, tensor in state.weights().items() if key in self.tensors})
        self.load_loss(state.strategy)
        if state.ema and not self.has_averages:
            state.ema.reset_to_weights()
        scale = state.strategy.loss_scale
        if scale is not None and LOSS_SCALE in self.state:
            scale.resume(self.state[LOSS_SCALE])
        self._load_optimizer(
            state.optimizer,
            {tensor: name for name, tensor in state.strategy.module.named_parameters()},
        )

    def counters(self, state: State) -> list[dict[str, Any]]:
        """Return what the optimizer has counted in each of its parameter groups, such as steps.

        Args:
            state: of this launch, whose groups may be others than those of the checkpoint.
        """
        names = {tensor: name for name, tensor in state.strategy.module.named_parameters()}
        return counters_of(state.optimizer, names, self.state["optimizer"]["param_groups"])

    def rates(self, state: State) -> list[float | None]:
        """Return the learning rate of each parameter group that a loop of the user had set.

        None: that of this launch counts.

        Args:
            state: of this launch, whose groups may be others than those of the checkpoint.
        """
        groups = state.optimizer.param_groups
        is_set = self.state["scheduler"].get(SET_BY_LOOP, False)
        if not is_set or not getattr(state.scheduler, SET_BY_LOOP, False):
            return [None] * len(groups)
        names = {tensor: name for name, tensor in state.strategy.module.named_parameters()}
        saved = groups_as_saved(state.optimizer, names, self.state["optimizer"]["param_groups"])
        return rates_set_by_loop(saved)

    def _load_optimizer(
        self, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
    ) -> None:
        """Load the optimizer's state.

        The parameter groups and their options stay those of the launch.
        """
        optimizer.state.clear()  # the memory is needed for the new one
        parameters = {
            f"optimizer.{names[tensor]}": tensor
            for group in optimizer.param_groups
            for tensor in group["params"]
        }
        state_by_parameter: dict[str, dict[str, Any]] = {name: {} for name in parameters}

        new: dict[str, torch.Tensor] = {}
        for key, tensor in self.tensors.items():
            name, _, entry = key.rpartition(".")
            if name in parameters:
                # In the layout of the parameter, which fused kernels require: channels_last is an
                # option of a launch.
                same = tensor.shape == parameters[name].shape
                like = parameters[name].detach() if same else torch.empty(tensor.shape)
                new[key] = torch.empty_like(like, dtype=tensor.dtype)
                state_by_parameter[name][entry] = new[key]

        self.read(new)
        for name, values in self.state["optimizer"]["state"].items():
            plain = {entry: value for entry, value in values.items() if not torch.is_tensor(value)}
            state_by_parameter.get(f"optimizer.{name}", {}).update(plain)
        states = {
            place: values for place, values in enumerate(state_by_parameter.values()) if values
        }
        optimizer.load_state_dict(optimizer.state_dict() | {"state": states})

    def content(self) -> dict[str, Any]:
        """Return the content of a checkpoint of one file: full tensors in host memory."""
        full = {key: torch.empty_like(tensor, device="cpu") for key, tensor in self.tensors.items()}
        self.read(full)
        keys = (*KEYS, LOSS_SCALE)
        return content_of(full, {key: self.state[key] for key in keys if key in self.state})


def require_keys(state: dict[str, Any], keys: set[str]) -> None:
    """Raise a ValueError if a checkpoint lacks one of its keys."""
    if missing := keys - state.keys():
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
