"""The schema of the config keys: their types.

Their meanings are comments in conf/, where their defaults are.

The options of a group are the parameters of the constructor that its `_target_` names (build.py).
`python scripts/configuration.py` writes docs/configuration.md from all of these.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ddp_lab.config.types import (
    Allowed,
    Best,
    Checkpointing,
    Count,
    DeviceName,
    Fraction,
    Group,
    Injection,
    LayerDecay,
    LogEvery,
    NaturalNumber,
    NonNegative,
    Optimize,
    ParameterGroups,
    Positive,
    Probability,
    Resume,
    RunName,
    Seed,
    Trackers,
    UserParts,
)


class Keys(BaseModel):
    """A set of keys; other keys are rejected.

    An integer is accepted as a float; a bool or a string is not.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True, defer_build=True
    )


class DataConfig(Keys):
    """The keys of the group `data`."""

    root: str
    val_root: str | None = None
    loader: Literal["auto", "device", "workers"]
    num_workers: NaturalNumber | Literal["auto"]
    crop_padding: NaturalNumber
    flip: bool
    val_fraction: Fraction | None = 0.0
    val_seed: NaturalNumber = 0
    channels: Literal[1, 3] = 3
    image_size: Count = 224
    resize: Count | None = None
    crop_scale: list[Positive] | None = None
    randaugment: Annotated[int, Field(ge=0, le=30), Allowed("an integer from 0 to 30")] | None = (
        None
    )
    erasing: Probability = 0.0
    context: Count = 256
    num_classes: Count | None = None
    targets: str | int | None = 1
    collate_fn: Group = {}
    readers: Count = 1
    val_split: str | None = "val"
    test_split: str | None = None
    dataset: Group
    mean: list[float]
    std: list[Positive]


class ModelConfig(Keys):
    """The keys that all options of the group `model` have in common."""

    weights: str | None = None
    weights_except: list[str] = []
    init: Literal["default", "by_block"] = "default"


class CheckpointConfig(Keys):
    """The keys of the group `checkpoint`."""

    every_epochs: Count
    every_steps: Count | None
    every_minutes: Positive | None = None
    at_steps: list[Count]
    keep: Annotated[int, Field(ge=2), Allowed("an integer of at least 2")]
    best: Best | None
    on_error: Literal["stop", "continue"]
    format: Literal["auto", "full", "sharded"]
    mirror: str | None


class StragglerConfig(Keys):
    """The keys of the group `straggler`."""

    slower: Positive = 0.2
    seconds: Positive | None = 60.0


class OptimizerConfig(Keys):
    """The ranges of the optimizer options that conf/ sets; torch annotates only their types."""

    model_config = ConfigDict(extra="ignore")

    lr: Positive
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False
    fused: bool | None = None
    groups: ParameterGroups = []
    layer_decay: LayerDecay | None = None


class RunConfig(Keys):
    """All keys of a run."""

    seed: Seed
    epochs: Count | None
    max_steps: Count | None = None
    max_tokens: Count | None = None
    max_minutes: Positive | None = None
    batch_size: Count | Literal["auto"]
    scaling: Literal["strong", "weak"]
    lr_scaling: Literal["none", "linear", "sqrt"]
    lr_base_batch_size: Count
    warmup_epochs: NonNegative
    warmup_steps: NaturalNumber | None = None
    accumulate: Count | Literal["auto"]
    loss_over_batch: bool
    checkpoint_activations: Checkpointing
    memory_limit: Positive | None
    max_grad_norm: Positive | None
    ema: Fraction | None
    ema_warmup: bool
    decay_norms_and_biases: bool
    mixup: NonNegative
    cutmix: NonNegative
    device: Literal["auto", "mps"] | DeviceName
    precision: Literal["float32", "bf16", "fp16"]
    float32_matmul: Literal["highest", "high"]
    speed: Literal["auto", "off"]
    cuda_graph: bool | Literal["auto"]
    compile: bool | Literal["auto"]
    channels_last: bool | Literal["auto"]
    timeout: Positive
    name: RunName | None
    runs_dir: str
    resume: Resume
    on_nan: Literal["stop", "skip"]
    patience: Count | None
    evaluate_test: Literal["every_epoch", "end"]
    evaluate_every: Count | None = None
    optimize: Optimize
    check_replicas: Count | None
    log_every: LogEvery | None
    profile: bool
    metrics: UserParts = []
    callbacks: UserParts = []
    inject: Injection | None
    tracker: Trackers
    tracker_options: Group
    checkpoint: CheckpointConfig
    straggler: StragglerConfig = StragglerConfig()
    data: DataConfig
    model: Group
    strategy: Group
    task: Group
    loss: Group
    optimizer: Group
    scheduler: Group
