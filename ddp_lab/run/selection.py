"""What is chosen by the validation set, and by nothing else: the best checkpoint, and when training stops early."""

from omegaconf import DictConfig

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.dataset import Dataset
from ddp_lab.training.progress import Criterion

# By the set that a metric needs: how it is called, and what to use without it.
NEEDED = {
    "val": ("validation", "data.val_fraction=0.1, or with data=folder a folder val/"),
    "test": ("test", "val_loss or val_accuracy, or add a test set"),
}


def criterion(cfg: DictConfig, dataset: Dataset) -> Criterion | None:
    """Return the metric by which the best checkpoint is chosen; None: the last weights are the result."""
    best = cfg.checkpoint.best
    return ("val_loss" if dataset.val is not None else None) if best == "auto" else best


def check_selection(cfg: DictConfig, dataset: Dataset) -> None:
    """Check that the sets exist whose metrics are to choose.

    Raises:
        ConfigError: one does not.
    """
    wanted = {"checkpoint.best": cfg.checkpoint.best, "optimize": cfg.optimize, "patience": cfg.patience}
    for key, value in wanted.items():
        name = "val" if key == "patience" and value else str(value).partition("_")[0]
        if name in NEEDED and name not in dataset.sets:
            what, remedy = NEEDED[name]
            raise ConfigError(f"{key}={value}: needs a {what} set, which these data do not have. Use {remedy}")
