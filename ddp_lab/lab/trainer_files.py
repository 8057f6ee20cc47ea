"""The files of a trainer in a Lab: its weights, and its checkpoints."""

from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.checkpoints.state import State, gather_full_state
from ddp_lab.config.errors import ConfigError
from ddp_lab.lab.pretrained import Pretrained
from ddp_lab.models.weights import write_weights
from ddp_lab.training.progress import Progress
from ddp_lab.world.write_errors import explain_write


class TrainerFiles:
    """Writes what a trainer has, and reads it again. Every method is collective.

    Args:
        state: of the trainer.
        number: of the trainer in its Lab.
        folders: those of checkpoints, with the number of the trainer that writes there. They are
            shared by the trainers of a Lab.
        pretrained: how the library of the model saves it; None: it has no such way.
    """

    def __init__(
        self,
        state: State,
        number: int,
        folders: dict[Path, int],
        pretrained: Pretrained | None = None,
    ):
        self.state = state
        self.number = number
        self.folders = folders
        self.pretrained = pretrained
        self.runtime = state.strategy.runtime
        self._checkpoints: dict[Path, Checkpoints] = {}
        self._resumed: set[Path] = set()  # folders from which this trainer has resumed

    def save_weights(self, path: Path) -> None:
        """Write the weights of the complete model, or their averages, as safetensors.

        Raises:
            ConfigError: the file cannot be written, or the path is that of a directory.
        """
        if self.pretrained is None and path.is_dir():
            raise ConfigError(
                f"save: {path} is a directory, but a model that is not of transformers or PEFT is "
                f"written as one file. Use the name of a file, for example "
                f"{path / 'model.safetensors'}"
            )
        pretrained = self.pretrained if path.suffix != ".safetensors" else None
        names = {*self.state.shapes} if pretrained is None else pretrained.names
        tensors = {
            key: tensor
            for key, tensor in self.state.weights().items()
            if key.partition(".")[2] in names
        }
        full, _ = gather_full_state(self.state.strategy, tensors)
        weights = {}
        if full:
            weights = {
                name: full.get(f"ema.{name}", full[f"model.{name}"])
                for name in self.state.shapes
                if name in names
            }

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if pretrained is not None:
                pretrained.write(path, weights)
                return
            temporary = path.with_name(f"{path.name}.tmp")
            write_weights(temporary, weights, {})
            temporary.replace(path)

        self._on_rank_0(path, write)

    def save_checkpoint(self, folder: Path, position: Progress) -> None:
        """Write a checkpoint of the trainer at a position, and wait until it is complete.

        Raises:
            ConfigError: it cannot be written, or another trainer of the Lab writes there.
        """
        owner = self.folders.get(folder.resolve(), self.number)
        if owner != self.number and folder.resolve() not in self._resumed:
            raise ConfigError(
                f"checkpoint: {folder} has the checkpoints of another trainer of this Lab, which "
                f"would be overwritten. Use a folder for each, for example "
                f"{folder / str(self.number)}"
            )
        self.folders[folder.resolve()] = self.number
        self._on_rank_0(folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        checkpoints = self._checkpoints_in(folder)
        checkpoints.save(position)
        checkpoints.wait()
        problem = self.runtime.broadcast_from_rank0("checkpoint", lambda: checkpoints.problem)
        if problem:
            raise ConfigError(problem)

    def load_newest(self, folder: Path) -> Progress:
        """Load the newest checkpoint in a folder into the trainer, and return its position.

        Its step is 0 if there is no checkpoint yet. The trainer may then continue the checkpoints
        of this folder.

        Raises:
            ConfigError: the checkpoint is damaged, or is that of another model or optimizer.
        """
        checkpoints = self._checkpoints_in(folder)
        progress = checkpoints.resume(checkpoints.folder, lambda progress: progress.step)
        self._resumed.add(folder.resolve())
        return progress

    def _checkpoints_in(self, folder: Path) -> Checkpoints:
        folder = folder.resolve()
        if folder not in self._checkpoints:
            self._checkpoints[folder] = Checkpoints(folder, self.state)
        return self._checkpoints[folder]

    def _on_rank_0(self, path: Path, write: Callable[[], object]) -> None:
        """Call `write` on rank 0, and return on all ranks when it is done.

        Raises:
            ConfigError: `path` could not be written; on all ranks.
        """

        def attempt() -> None:
            try:
                write()
            except (OSError, SafetensorError) as error:
                reason, remedy = explain_write(error, path.absolute().parent)
                raise ConfigError(f"{path}: cannot be written ({reason}). {remedy}") from None

        self.runtime.broadcast_from_rank0("write", attempt)
