"""Hooks of a user: their exceptions become one message, and they get values that they may read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddp_lab.config.errors import ConfigError, TrainingError, describe_error
from ddp_lab.data.batch import Batch
from ddp_lab.observe.log import log
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.metrics import Evaluation
from ddp_lab.training.progress import Progress
from ddp_lab.training.user_parts import make_part

if TYPE_CHECKING:
    from ddp_lab.observe.trackers.base import Status

KEY = "callbacks"
METHODS = tuple(name for name in vars(Hook) if not name.startswith("_"))


@dataclass(frozen=True)
class RunInfo:
    """What a callback knows of its run.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
        device: of this rank.
        folder: the run directory; None if there is none.
        epochs: number of the last epoch; None: other limits end the run.
        position: where the training begins or resumes.
    """

    rank: int
    world_size: int
    device: torch.device
    folder: Path | None
    epochs: int | None
    position: Progress
    _run: Run = field(repr=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which should print and write files."""
        return self.rank == 0

    def samples(self, number: int) -> Batch:
        """Return the first samples of this rank: of the validation set, or else of the test set.

        Args:
            number: of samples, at most.

        Returns:
            Inputs and targets, [b, ...], and the number of samples over all ranks. With W ranks
                that read different samples, this one has the samples r, r + W, r + 2W, ...

        Raises:
            ConfigError: there is neither set.
        """
        loaders = self._run.loaders
        name = next((each for each in ("val", "test") if each in loaders), None)
        if name is None:
            raise ConfigError("samples: there is neither a validation set nor a test set")
        return loaders[name].first(number)

    def predict(self, inputs: Any) -> Any:
        """Return the outputs of the model for some inputs. Collective.

        To be called in `on_evaluate`, on all ranks with as many samples, while the model has the
        evaluated weights.

        Args:
            inputs: as from `samples`, [b, ...], on the rank's device.

        Raises:
            ConfigError: the model is in training.
        """
        strategy = self._run.strategy
        if strategy.module.training:
            raise ConfigError("predict: is called in on_evaluate only, when the model is evaluated")
        return strategy.predict(inputs)


class Callback(Hook):
    """Calls a hook of the user, with values in place of the objects of the run.

    Args:
        hook: of the user.
        label: import path of its class, for messages.

    Attributes:
        folder: the run directory; None if there is none.
    """

    def __init__(self, hook: Hook, label: str):
        self.hook = hook
        self.label = label
        self.folder: Path | None = None
        self._is_closed = False
        self._rank = 0

    def use_folder(self, folder: Path | None) -> None:
        """Let the hook know the run directory; None: there is none."""
        self.folder = folder

    def _call(self, method: str, *values: Any) -> Any:
        """Return what a method of the hook returns.

        Raises:
            TrainingError: it raised an exception, also that of sys.exit.
        """
        try:
            return getattr(self.hook, method)(*values)
        except (Exception, SystemExit) as error:
            raise TrainingError(
                f"{KEY}: {self.label}.{method} raised {describe_error(error)}", rank=self._rank
            ) from error

    def on_start(self, run: Run) -> None:
        self._is_closed = False
        runtime = run.strategy.runtime
        self._rank = runtime.rank
        info = RunInfo(
            rank=runtime.rank,
            world_size=runtime.world_size,
            device=run.strategy.device,
            folder=self.folder,
            epochs=run.settings.epochs,
            position=replace(run.position),
            _run=run,
        )
        self._call("on_start", info)

    def before_step(self, batch: Any) -> Any:
        changed = self._call("before_step", batch)
        if not isinstance(changed, type(batch)):
            returned = "None" if changed is None else f"an object of type {type(changed).__name__}"
            raise TrainingError(
                f"{KEY}: {self.label}.before_step returned {returned}; it must return the batch to "
                "train on: end it with `return batch`, or `return batch._replace(inputs=...)`",
                rank=self._rank,
            )
        return changed

    def on_step_end(self, position: Progress) -> None:
        self._call("on_step_end", replace(position))

    def on_evaluation_batch(self, position: Progress, number: int) -> None:
        self._call("on_evaluation_batch", replace(position), number)

    def on_evaluate(self, results: Mapping[str, Evaluation]) -> None:
        self._call("on_evaluate", dict(results))

    def on_evaluated(
        self, position: Progress, results: Mapping[str, Evaluation], seconds: float
    ) -> None:
        self._call("on_evaluated", replace(position), dict(results), seconds)

    def on_checkpoint(self, path: Path) -> None:
        self._call("on_checkpoint", path)

    def on_epoch_end(self, position: Progress) -> None:
        self._call("on_epoch_end", replace(position))

    def close(self, status: "Status") -> None:
        if self._is_closed:  # after an error in this method the hooks are closed again, as failed
            return
        self._is_closed = True
        try:
            self._call("close", status)
        except TrainingError as error:
            if status != "failed":
                raise
            log.error(str(error))  # the first error is the one that ends the run


def make_callbacks(values: Sequence[Any]) -> list[Callback]:
    """Construct the callbacks that a user names.

    Args:
        values: each an import path, a dict with `_target_` and options, a class or an instance.

    Raises:
        ConfigError: one cannot be constructed, is no Hook, or has none of its methods.
    """
    hooks: list[Callback] = []
    for value in values:
        part = make_part(KEY, value, check=require_hook)
        hooks.append(Callback(part.value, part.label))
    return hooks


def require_hook(kind: type, label: str) -> None:
    """Check that a class is that of a hook.

    Args:
        kind: the class.
        label: import path, for messages.

    Raises:
        ConfigError: it is no subclass of Hook, or has none of its methods.
    """
    if not issubclass(kind, Hook):
        raise ConfigError(f"{KEY}: {label} is no hook: it must be a subclass of ddp_lab.Hook")
    if not any(is_own(kind, method) for method in METHODS):
        raise ConfigError(f"{KEY}: {label} has none of the methods of a hook: {', '.join(METHODS)}")


def is_own(kind: type[Hook], method: str) -> bool:
    """Return whether the class of a hook has its own implementation of a method."""
    of_class: Callable[..., Any] = getattr(kind, method)
    return of_class is not getattr(Hook, method)
