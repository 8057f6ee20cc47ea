"""The evaluation of a trained run under any strategy."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ddp_lab.checkpoints.find import open_checkpoint
from ddp_lab.config.errors import ConfigError
from ddp_lab.launch.preflight import check_network
from ddp_lab.observe.log import log
from ddp_lab.run.data_record import compare_data
from ddp_lab.run.job import build
from ddp_lab.run.materialize import place
from ddp_lab.run.trained import checkpoint_of
from ddp_lab.training.metrics import Evaluation, evaluate
from ddp_lab.training.progress import Progress
from ddp_lab.world.precision import float32_matmul
from ddp_lab.world.runtime import Runtime


@dataclass(frozen=True)
class EvaluatedRun:
    """The metrics of a checkpoint on the test set or the validation set.

    Attributes:
        split: name of the set, test or val.
        checkpoint: path of the file.
        progress: its position in the training.
        metrics: the sums over all samples, divided once.
        where: number and kind of the devices.
    """

    split: str
    checkpoint: str
    progress: Progress
    metrics: Evaluation
    where: str

    @property
    def epoch(self) -> int:
        """The last epoch that the checkpoint has been trained in, at least in part."""
        return self.progress.epoch - (self.progress.samples == 0)

    def __str__(self) -> str:
        values = " ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in self.metrics.values.items())
        found = f"{self.split} {values} on {self.metrics.samples:,} samples"
        return f"{self.checkpoint}, epoch {self.epoch}: {found} ({self.where})"

    def values(self) -> dict[str, Any]:
        """Return the metrics under the names that they have in metrics.jsonl."""
        metrics = self.metrics
        values = {"checkpoint": self.checkpoint, "epoch": self.epoch, "step": self.progress.step, "samples": metrics.samples}
        return values | metrics.metrics(self.split)


def evaluate_run(cfg: DictConfig, runtime: Runtime, folder: Path, checkpoint: str, split: str | None = None) -> EvaluatedRun:
    """Evaluate a checkpoint on a set of the config's data. Collective.

    Args:
        cfg: the run's config, with overrides.
        folder: the run directory.
        checkpoint: as in `find_checkpoint`.
        split: val or test; None: test or, if there is no test set, val.

    Raises:
        ConfigError: the checkpoint, the data or the strategy cannot be used.
    """
    check_network(runtime)
    path = checkpoint_of(folder, checkpoint, runtime)
    job = build(cfg, runtime, with_weights=False)
    other = runtime.agree("data", partial(compare_data, folder, job.dataset, resumes=False))
    sets = list(job.dataset.evaluation_sets)
    split = split or sets[-1]
    if split not in sets:
        raise ConfigError(f"split={split}: must be {' or '.join(sets)}: these data have no other set to evaluate with")
    if other and split == "val" and runtime.rank == 0:
        log.warning(other)
    saved = open_checkpoint(path, key="--checkpoint ")
    saved.check(job.shapes)
    place(job)
    saved.load_weights(job.strategy)
    with float32_matmul(cfg.float32_matmul):
        metrics = evaluate(job.strategy, job.loaders[split])
    return EvaluatedRun(split, str(path), Progress.of(saved.state["progress"]), metrics, job.strategy.where)
