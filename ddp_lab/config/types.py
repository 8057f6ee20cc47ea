"""Types of config values: what pydantic checks, and how messages and documents describe it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Predicate
from pydantic import Field

# the sets of samples of a dataset, in the order in which their metrics are shown
SETS = ("train", "val", "test")
# number of samples of a stream, which has no end: more than any run reads
ENDLESS = 2**62
# kinds of injected faults
FAULTS = ("crash", "raise", "exit", "hang", "slow", "nan", "sigterm", "disk_full")
BatchNorm = Literal["local", "sync"]  # the ranks over which BatchNorm computes its statistics
# what the backward pass computes again instead of keeping it: nothing, or each block
Checkpointing = Literal["none", "block"]

# keys that end a run, also within an epoch, besides `epochs`
LIMITS = ("max_steps", "max_tokens", "max_minutes")

TRACKERS = {
    "tensorboard": "ddp_lab.observe.trackers.tensorboard.TensorBoard",
    "wandb": "ddp_lab.observe.trackers.wandb.WandB",
    "mlflow": "ddp_lab.observe.trackers.mlflow.MLflow",
}
# trackers that need a package of their name, which an extra of this name installs
EXTRAS = ("wandb", "mlflow")


@dataclass(frozen=True)
class Allowed:
    """A description of the allowed values of an annotated type, as the end of "must be ..."."""

    text: str


def parse_fault(text: str) -> tuple[str, int, int] | None:
    """Return kind, rank and step; None if `text` does not have this form or the kind is unknown."""
    match = re.fullmatch(r"(\w+)@rank=(\d+),step=([1-9]\d*)", text)
    return (match[1], int(match[2]), int(match[3])) if match and match[1] in FAULTS else None


def are_trackers(names: list[str]) -> bool:
    """Return whether these are different names of trackers or import paths, or only "none"."""
    dotted = [name for name in names if re.fullmatch(r"[\w.]+\.\w+", name)]
    return names == ["none"] or (len(set(names)) == len(names) and {*names} <= {*TRACKERS, *dotted})


def are_parts(values: list[Any]) -> bool:
    """Return whether each of these is an import path, or a dict with one and options."""
    paths = [value.get("_target_") if isinstance(value, dict) else value for value in values]
    return all(isinstance(path, str) and re.fullmatch(r"[\w.]+\.\w+", path) for path in paths)


def are_groups(values: list[Any]) -> bool:
    """Return whether each of these is a dict with a pattern, and with something that it sets."""
    return all(
        isinstance(value, dict) and isinstance(value.get("match"), str) and len(value) > 1
        for value in values
    )


class Every(NamedTuple):
    """When the metrics of steps are recorded: every N steps or about every N seconds."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: int | str | None) -> "Every | None":
        """Return the meaning of a value of the key `log_every`; None if it has none."""
        if value is None or value == "off":
            return cls()
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)s", str(value)):
            return cls(seconds=float(match[1])) if float(match[1]) else None
        return cls(steps=value) if isinstance(value, int) and value > 0 else None


Count = Annotated[int, Field(ge=1), Allowed("an integer of at least 1")]
NaturalNumber = Annotated[int, Field(ge=0), Allowed("an integer of at least 0")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a number above 0")]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("a number of at least 0")]
Fraction = Annotated[float, Field(ge=0, lt=1), Allowed("a number from 0 to below 1")]
Probability = Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")]
Seed = Annotated[int, Field(ge=0, lt=2**32), Allowed("an integer from 0 to 2**32 - 1")]
DeviceName = Annotated[str, Field(pattern=r"^(cpu|cuda|cuda:\d+)$"), Allowed("cpu, cuda or cuda:N")]
RunName = Annotated[
    str,
    Field(pattern=r"^[\w=,+-][\w.=,+-]*$"),
    Allowed("a plain directory name (letters, digits and . _ = , + -, not beginning with a dot)"),
]
Best = Annotated[
    str,
    Field(pattern=r"^(auto|val_\w+)$"),
    Allowed("auto or a metric of the validation set, as val_loss"),
]
ValidationMetric = Annotated[
    str,
    Field(pattern=r"^val_\w+$"),
    Allowed("a metric of the validation set, as val_loss"),
]
Optimize = Annotated[
    str,
    Field(pattern=r"^(auto|(val|test)_\w+)$"),
    Allowed("auto, or a metric as val_loss or test_accuracy"),
]
Injection = Annotated[
    str,
    Predicate(lambda value: parse_fault(value) is not None),
    Allowed(f"of the form KIND@rank=R,step=S, KIND one of {', '.join(FAULTS)}"),
]
LogEvery = Annotated[
    int | str,
    Predicate(lambda value: Every.parse(value) is not None),
    Allowed("a number of steps, as 100, or of seconds, as 10s, or off"),
]
# The blocks of an nn.Sequential are called 0, 1, 2, ..., which are integers in YAML and in Hydra's
# overrides.
BlockName = Annotated[str | int, Allowed("the name of a block")]
ModulePattern = Annotated[
    str | int, Allowed("the name of a module, or a pattern of names such as experts.*")
]
Trackers = Annotated[
    str | list[str],
    Predicate(lambda value: are_trackers([value] if isinstance(value, str) else value)),
    Allowed(
        f"none, or one or several of {', '.join(TRACKERS)} and import paths of classes of your "
        "own, such as mine.Tracker from a file mine.py in the current directory"
    ),
]
UserParts = Annotated[
    list[Any],
    Predicate(are_parts),
    Allowed(
        "a list, each the import path of a class, such as mine.Name from a file mine.py in the "
        "current directory, or with options {_target_: mine.Name, OPTION: VALUE}"
    ),
]
ParameterGroups = Annotated[
    list[Any],
    Predicate(are_groups),
    Allowed(
        "a list, each {match: PATTERN, ...} with a pattern of names of parameters such as head.*, "
        "and with lr_scale or options of the optimizer"
    ),
]
LayerDecay = Annotated[
    float, Field(gt=0, le=1), Allowed("a number above 0 and at most 1, for example 0.75")
]
# its options are checked by `options` of build.py
Group = Annotated[dict[str, Any], Allowed("a config group")]
Resume = Annotated[
    str,
    Predicate(
        lambda value: (
            value in ("auto", "never")
            or Path(value).is_file()
            or Path(value, "SHA256SUMS").is_file()
            or Path(value, "manifest.json").is_file()
        )  # of an earlier version, which find_checkpoint refuses by name
    ),
    Allowed("auto, never or the path of an existing checkpoint"),
]
