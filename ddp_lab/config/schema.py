"""The schema of the config keys. The options of a group are defined by the constructor that its `_target_` names.

`python scripts/configuration.py` writes docs/configuration.md from it.
"""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from ddp_lab.config.data_schema import DataConfig, Keys
from ddp_lab.config.types import (
    Allowed,
    Count,
    DeviceName,
    Fraction,
    Group,
    Injection,
    NonNegative,
    Positive,
    Resume,
    RunName,
    Seed,
)


class ModelConfig(Keys):
    """The keys that all options of the group `model` have in common."""

    weights: str | None = Field(
        None,
        description="File of weights (safetensors, or of torch.save) to begin from, also a checkpoint of ddp_lab; with "
        "model=torchvision also a name such as IMAGENET1K_V1; null draws the initial weights. A run that resumes from a "
        "checkpoint does not need it.",
    )
    init: Literal["default", "by_block"] = Field(
        "default",
        description="How the initial weights are drawn: by the model's constructor, from one generator (default); or for each "
        "block from a generator of its own, seeded by seed and the block's name, so that each rank allocates and draws no more "
        "than its own part of the model (by_block; for models made of blocks).",
    )


class CheckpointConfig(Keys):
    """The keys of the group `checkpoint`."""

    every_epochs: Count = Field(description="Write a checkpoint every N epochs.")
    every_steps: Count | None = Field(description="Also write a checkpoint every N steps within an epoch.")
    at_steps: list[Count] = Field(description="Also write a checkpoint after these steps of the run, for example [1,2,5].")
    keep: Annotated[int, Field(ge=2), Allowed("an integer of at least 2")] = Field(
        description="Number of newest checkpoints to keep."
    )
    best: Literal["auto", "val_loss", "val_accuracy"] | None = Field(
        description="Metric of the validation set whose best checkpoint is kept as best.pt, besides the newest ones; null "
        "keeps none; auto: val_loss if there is a validation set, else none."
    )
    on_error: Literal["stop", "continue"] = Field(description="What training does when a checkpoint cannot be written.")
    format: Literal["auto", "whole", "sharded"] = Field(
        description="whole: one file, which rank 0 collects and writes; sharded: a directory to which each rank writes its "
        "share; auto: sharded if there are several ranks and a checkpoint has at least 4 GiB. A run resumes from both.",
    )


class OptimizerConfig(Keys):
    """The ranges of the optimizer options that conf/ sets; torch annotates only their types."""

    model_config = ConfigDict(extra="ignore")

    lr: Positive = Field(description="Learning rate before lr_scaling, warm-up and schedule.")
    momentum: Fraction = Field(0.0, description="Momentum factor.")
    weight_decay: NonNegative = Field(0.0, description="Weight decay coefficient.")
    nesterov: bool = Field(False, description="Whether to use Nesterov momentum.")
    fused: bool | None = Field(
        None, description="Whether to use torch's fused kernel; null: for AdamW on GPUs, and for others by speed=auto."
    )


class RunConfig(Keys):
    """All keys of a run."""

    seed: Seed = Field(description="Seed of the initial weights, the sample order and the augmentation.")
    epochs: Count = Field(description="Number of passes over the training set.")
    batch_size: Count | Literal["auto"] = Field(
        description="Number of samples in the global batch, over all ranks (see scaling); auto: the largest that the plan of a "
        "step says fits on the devices, checked by a real step. A run that is resumed keeps it."
    )
    scaling: Literal["strong", "weak"] = Field(
        description="What batch_size counts: the global batch (strong) or the batch of each replica (weak)."
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        description="How the learning rate scales with global batch size / lr_base_batch_size."
    )
    lr_base_batch_size: Count = Field(description="Global batch size for which optimizer.lr is tuned.")
    warmup_epochs: NonNegative = Field(description="Epochs of linear learning-rate warm-up; may be a fraction.")
    accumulate: Count | Literal["auto"] = Field(
        description="Gradient-accumulation steps per batch on each rank, to save memory; the result is the same. auto: as few "
        "as fit on the devices."
    )
    memory_limit: Positive | None = Field(
        description="GiB of a device that batch_size=auto, accumulate=auto and the check of the state may count on; null: the "
        "memory of the GPU, of a CPU rank its part of the host's."
    )
    max_grad_norm: Positive | None = Field(
        description="Maximum L2 norm of the whole model's gradient; null disables gradient clipping."
    )
    ema: Fraction | None = Field(
        description="Decay per step of the exponential moving average of the weights, which is then what is evaluated; null "
        "keeps no average."
    )
    decay_norms_and_biases: bool = Field(
        description="Whether optimizer.weight_decay also applies to parameters with fewer than two dimensions: biases and the "
        "weights of normalization layers."
    )
    mixup: NonNegative = Field(
        description="Alpha of mixup, which mixes the images of each full batch in pairs (Zhang et al. 2018); 0: off."
    )
    cutmix: NonNegative = Field(
        description="Alpha of CutMix, which replaces a rectangle of each image by another image's (Yun et al. 2019); 0: off. "
        "With mixup, too, either is chosen for each batch."
    )
    device: Literal["auto", "mps"] | DeviceName = Field(
        description="Device of this process; auto is a visible CUDA GPU if there is one, else the CPU, and never mps."
    )
    precision: Literal["float32", "bf16"] = Field(
        description="Data type of the computation; bf16 is mixed precision by torch.autocast."
    )
    float32_matmul: Literal["highest", "high"] = Field(
        description="Matrix multiplications in float32 on CUDA GPUs: full precision (highest), or TF32, which is faster and "
        "rounds the factors to 3 digits (high). cuDNN's convolutions use TF32 with both."
    )
    speed: Literal["auto", "off"] = Field(
        description="auto: on a CUDA GPU, choose those of data.loader, cuda_graph, channels_last, optimizer.fused (null) and "
        "compile that are left to auto, by what the strategy, the model, the memory and the length of the run allow; the log "
        "gives the reasons. off: auto means false, and device for data.loader, as it does on other devices.",
    )
    cuda_graph: bool | Literal["auto"] = Field(
        description="Whether a whole step runs as one CUDA graph (not under pipelines, dp and split; needs data.loader=device);"
        " auto: see speed."
    )
    compile: bool | Literal["tuned", "auto"] = Field(
        description="Whether to use torch.compile (not under dp); tuned also times more kernels, which takes minutes; auto: if "
        "the rest of the run is long enough to earn the time, see speed."
    )
    channels_last: bool | Literal["auto"] = Field(
        description="Whether images and convolutions use the channels-last memory format (single, scratch, ddp, dp, split); "
        "auto: see speed."
    )
    timeout: Positive = Field(
        description="Seconds without progress after which the watchdog ends the launch and reports the rank that hangs."
    )
    name: RunName | None = Field(
        description="Name of the run directory; null composes one from the model, the data, the strategy and the time."
    )
    runs_dir: str = Field(description="Directory in which run directories are created.")
    resume: Resume = Field(
        description="What to resume from: the run directory's newest checkpoint if it has one (auto), nothing (never), or the "
        "checkpoint at a path, written by any strategy on any number of ranks."
    )
    on_nan: Literal["stop", "skip"] = Field(
        description="What to do when the loss is not finite: end training (stop) or count the batch's gradient as zero (skip)."
    )
    patience: Count | None = Field(
        description="Epochs without a lower val_loss after which training stops (needs a validation set); null disables early "
        "stopping."
    )
    evaluate_test: Literal["every_epoch", "end"] = Field(
        description="When the test set is evaluated: after every epoch, or after the last one only. Nothing is chosen by it."
    )
    optimize: Literal["auto", "val_loss", "val_accuracy", "test_accuracy"] = Field(
        description="Metric that the run returns to a Hydra sweeper: the best val_loss or val_accuracy of all epochs, or the "
        "last test_accuracy; auto: val_loss if there is a validation set, else test_accuracy."
    )
    check_replicas: Count | None = Field(
        description="Compare the replicas' weights bit by bit every N steps and report the first tensor that differs; null "
        "disables the comparison."
    )
    profile: bool = Field(
        description="Whether to profile ten steps on every rank: report where their time goes, and write a trace."
    )
    inject: Injection | None = Field(description="Fault to inject, for tests; for example crash@rank=1,step=50.")
    checkpoint: CheckpointConfig = Field(description="When checkpoints are written.")
    data: DataConfig = Field(description="The dataset, and how it is loaded and augmented.")
    model: Group = Field(description="Constructor of the model, with its options.")
    strategy: Group = Field(description="Constructor of the strategy, with its options.")
    loss: Group = Field(description="Constructor of the training loss, with its options; or a function that is the loss.")
    optimizer: Group = Field(description="Constructor of the optimizer, with its options.")
    scheduler: Group = Field(description="Shape of the learning-rate schedule, with its options.")
