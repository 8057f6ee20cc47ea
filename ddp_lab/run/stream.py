"""What a run on a stream needs, and which keys it cannot have."""

from collections.abc import Callable, Mapping
from typing import Any

from ddp_lab.config.errors import ConfigError
from ddp_lab.config.types import LIMITS
from ddp_lab.data.dataset import Dataset
from ddp_lab.training.schedule import by_epoch

NO_EPOCHS = "a stream has no epochs: it begins again at its end, and the run is one epoch"


def check_keys(values: Mapping[str, Any], shape: Callable[..., float]) -> list[str]:
    """Check that a stream supports the keys of a run; return notes for the log.

    Args:
        values: the config.
        shape: of the learning-rate schedule.

    Raises:
        ConfigError: it does not.
    """
    name = f"data.dataset._target_={values['data']['dataset']['_target_']}"
    if all(values.get(key) is None for key in LIMITS):
        raise ConfigError(
            f"{name}: is a stream, which has no end, and epochs={values['epochs']} does not end "
            f"it: {NO_EPOCHS}. Set {', '.join(LIMITS[:-1])} or {LIMITS[-1]}, and leave epochs out"
        )
    counted = {
        "epochs": "Leave it out; the limit that is set ends the run",
        "patience": "Leave it out; scheduler=plateau follows the evaluations of evaluate_every",
        "warmup_epochs": "Use warmup_steps",
    }
    for key, remedy in counted.items():
        if values[key]:
            raise ConfigError(f"{key}={values[key]:g}: {NO_EPOCHS}. {remedy}")
    if by_epoch(shape):
        target = values["scheduler"]["_target_"]
        raise ConfigError(
            f"scheduler._target_={target}: is a function of the epoch. {NO_EPOCHS.capitalize()}. "
            "Use scheduler=cosine, trapezoid, constant or plateau, or a function of the progress"
        )
    if values["data"]["loader"] == "device":
        raise ConfigError(
            f"data.loader=device: holds a complete dataset, but {name} is a stream, which has no "
            "end. Leave data.loader out"
        )

    notes: list[str] = []
    checkpoint = values["checkpoint"]
    if checkpoint["every_steps"] is None and checkpoint.get("every_minutes") is None:
        notes.append(
            "the run is one epoch, so checkpoints are written at its end or when it is asked to "
            "stop; set checkpoint.every_steps or checkpoint.every_minutes for others"
        )
    return notes


def check_sets(dataset: Dataset, fraction: float | None) -> None:
    """Check that a stream comes with a set to evaluate with.

    Args:
        dataset: whose training set is a stream.
        fraction: the key data.val_fraction.

    Raises:
        ConfigError: it has none, or samples are to be held out.
    """
    ways = (
        "Give its constructor a parameter split, which gets train, val and test, and return a "
        "map-style dataset or a stream that ends for val or test"
    )
    if fraction:
        raise ConfigError(
            f"data.val_fraction={fraction}: chooses samples by number, of which a stream has no "
            f"end. Leave it out. {ways}"
        )
    if not dataset.evaluation_sets:
        raise ConfigError(
            "the dataset: is a stream, of which no samples can be held out, and there is no other "
            f"set to evaluate with. {ways}"
        )
