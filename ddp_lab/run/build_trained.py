"""A trained run, opened from its directory without data or evaluated on a set of them."""

from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from ddp_lab.launchers.preflight import check_network
from ddp_lab.launchers.read_config import read_config
from ddp_lab.models.make import build_model
from ddp_lab.run.build import build, model_spec
from ddp_lab.run.build_data import image_options
from ddp_lab.run.data_record import read_data
from ddp_lab.run.trained import (
    InputFormat,
    TrainedRun,
    checkpoint_of,
    evaluate_job,
    load_trained,
)
from ddp_lab.world.device import float32_matmul
from ddp_lab.world.runtime import Runtime


def open_run(folder: Path, choice: str) -> "TrainedRun":
    """Open a trained run in one process. It needs no data.

    Args:
        folder: the run directory.
        choice: its checkpoint, as in `find_checkpoint`.

    Raises:
        ConfigError: the directory is not that of a run, or the file is not a checkpoint of its
            model.
    """
    cfg = read_config(folder)
    data = read_data(folder)
    path = checkpoint_of(folder, choice, Runtime("cpu"))
    model = load_trained(build_model(model_spec(cfg.model, data.shape)), path)
    collates = OmegaConf.select(cfg, "data.collate_fn._target_") is not None
    inputs = InputFormat(
        list(cfg.data.mean), list(cfg.data.std), image_options(cfg.data), is_fixed=not collates
    )
    task = get_object(cfg.task["_target_"])
    return TrainedRun(
        data=data,
        checkpoint=path,
        model=model,
        task=task,
        inputs=inputs,
        precision=cfg.precision,
        float32_matmul=cfg.float32_matmul,
    )


def evaluate_run(
    cfg: DictConfig, runtime: Runtime, folder: Path, checkpoint: str, split: str | None = None
) -> dict[str, Any]:
    """Evaluate a checkpoint on a set of the config's data. Collective.

    Args:
        cfg: the run's config, with overrides.
        runtime: the ranks.
        folder: the run directory.
        checkpoint: as in `find_checkpoint`.
        split: val or test; None: test or, if there is no test set, val.

    Returns:
        As `evaluate_job`.

    Raises:
        ConfigError: the checkpoint, the data or the strategy cannot be used.
    """
    check_network(runtime)
    path = checkpoint_of(folder, checkpoint, runtime)
    job = build(cfg, runtime, with_weights=False)
    with float32_matmul(cfg.float32_matmul):
        return evaluate_job(job, folder, path, split)
