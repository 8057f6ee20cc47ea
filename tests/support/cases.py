"""The cases of the equivalence matrix, by strategy and world size, and the comparison of two outcomes."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from configs import CONF
from omegaconf import OmegaConf
from training import Case, largest_difference

from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.ddp_pipeline import DDPPipeline
from ddp_lab.strategies.dp import DP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.single import Single
from ddp_lab.strategies.split import Split
from ddp_lab.strategies.tp import TP

REFERENCE = Case(Single)
# The last of three batches has one sample. With two or more ranks, some rank has only padding in it, which must not count.
# Twelve more are the validation set, which is evaluated under every strategy, too.
ALMOST_EMPTY = {"samples": 61, "val_fraction": 0.2}
CLIPPED = {"max_grad_norm": 0.1, "ema": 0.8}  # also averages the weights, over about five steps
# In float64: in float32, with 97 samples, the input of a ReLU in the seventh step was 2e-8 below zero on one rank and 3e-8
# above it on two, so the final weights differed by 3e-5. In float64 they differ by 6e-17.
AUGMENTED = {"crop_padding": 3, "flip": True, "dtype": torch.float64}
SMOOTHED = {"loss": (("_target_", "ddp_lab.tasks.classification.CrossEntropy"), ("label_smoothing", 0.2))}
UNDECAYED = {"weight_decay": 0.1, "decay_norms_and_biases": False}
RECIPE = {"mixup": 0.4, "cutmix": 1.0, "lr_schedule": "multi_step", **SMOOTHED, **UNDECAYED}
FOCAL = {"loss": (("_target_", "own_losses.Focal"), ("gamma", 1.0))}
FROZEN = {"model": "partly_frozen"}
EMPTY_STAGE = {"model": "unbiased", "cut": ("first",)}  # without parameters or buffers
FILES = {"files": True, "loader": "workers", "samples": 49}
VIT = {"model": "vit", "init": "by_block", "lr": 0.2}  # its logits are 0 at first, so smaller steps change too little
DROPPING = VIT | {"model": "vit_drop"}
SHORT = VIT | {"epochs": 1, "samples": 48}  # two complete batches
# In float64: where a gradient is mathematically zero, as that of a key's bias, AdamW divides one rounding error by another.
ADAMW = {"optimizer": "adamw", "lr": 0.01, "dtype": torch.float64}
LENET = {"model": "lenet", "init": "default", "lr": 0.05}


# Names of options in a case, where they are not those in conf/strategy/.
LONG = {
    **{"m": "num_microbatches", "reshard": "reshard_after_forward"},
    **{"sequence": "sequence_parallel", "checkpointing": "checkpoint_activations"},
}


@cache
def usual_options(strategy: type[Strategy]) -> dict[str, Any]:
    """Return the options of a case that names none: those in conf/, but four micro-batches, and three buckets for LeNet."""
    names = [base.__module__.rpartition(".")[2] for base in strategy.__mro__ if base.__module__.startswith("ddp_lab.")]
    options = OmegaConf.to_container(OmegaConf.load(CONF / "strategy" / f"{names[0]}.yaml"))
    changed = {"num_microbatches": 4, "bucket_mb": 1 / 64}
    return {key: changed.get(key, value) for key, value in options.items() if key != "_target_"}


def maker(strategy: type[Strategy], *positional: str, **base: Any) -> Callable[..., Case]:
    """Return a function that makes cases of a strategy of its options and of fields of Case.

    Args:
        positional: names of the options that it also takes without their names.
        base: fields of Case.
    """

    def make(*values: Any, **given: Any) -> Case:
        given = base | dict(zip(positional, values, strict=False)) | {LONG.get(key, key): value for key, value in given.items()}
        options = {key: given.pop(key, value) for key, value in usual_options(strategy).items()}
        return Case(strategy, tuple(options.items()), **given)

    return make


scratch = maker(Scratch, "algorithm")
ddp = maker(DDP, "batch_norm")
fsdp = maker(FSDP, "reshard_after_forward")
pipeline = maker(Pipeline, "schedule")
ddp_pipeline = maker(DDPPipeline, "pp", "schedule")
tp = maker(TP, "tp")
mesh = maker(Mesh, **SHORT)  # one epoch of two steps of the ViT


def split(devices: int | None, m: int, **case) -> Case:
    return maker(Split, "devices", "num_microbatches")(devices and ("cpu",) * devices, m, **case)


# BatchNorm, in float64: rounding errors grow fast through its layers, more so if the sign of a ReLU's input changes.
NARROW = {"model": "narrow", "samples": 60, "epochs": 1, "dtype": torch.float64, "keep_momentum": False, "ema": 0.8}
PADDED = NARROW | {"samples": 61}  # the last batch has padding
SPARSE = NARROW | {"samples": 49}  # some ranks have only padding in the last batch
ONE_STEP = {"model": "narrow", "samples": 24, "epochs": 1}
# The complete models, in float64: in float32 it depends on the processor whether rounding changes the sign of a ReLU's input.
RESNET = {"samples": 24, "epochs": 1, "batch_norm": "sync", "dtype": torch.float64}


class Row(NamedTuple):
    """A case of the matrix, and the numbers of ranks on which it must equal `single`.

    Attributes:
        quick: those in `make test`, as digits: "12" is on one rank and on two.
        slow: those in `make test-slow`.
    """

    case: Case
    quick: str = ""
    slow: str = ""


MATRIX = [
    Row(Case(Single, loader="workers"), "1"),
    Row(Case(Single, accumulate=5), "1"),
    Row(Case(Single, loader="workers", accumulate=3, **RECIPE), "1"),
    Row(maker(DP)(accumulate=2), "1"),
    Row(split(None, 1), "1"),
    Row(split(3, 5), "1"),  # 24 is not divisible by 5
    Row(split(4, 24, **ALMOST_EMPTY), "1"),
    Row(split(3, 5, **RECIPE), "1"),
    Row(split(2, 3, **FOCAL), "1"),
    Row(split(2, 4, **FROZEN), "1"),
    Row(split(2, 3, accumulate=3, **VIT, **CLIPPED), "1"),
    Row(scratch("per_tensor", start=1), "2"),
    Row(scratch("star", **ALMOST_EMPTY), "3", "2"),
    Row(scratch("ring", **CLIPPED), "3", "4"),
    Row(scratch("bucketed", accumulate=3, **CLIPPED), "3", "24"),
    Row(scratch("bucketed", accumulate=3, **VIT, **CLIPPED), "2"),
    Row(scratch(**AUGMENTED), "2", "4"),
    Row(scratch(accumulate=3, **RECIPE), "", "2"),
    Row(ddp(start=1), "2", "3"),
    Row(ddp(accumulate=2), "2", "4"),
    Row(ddp(accumulate=3, **CLIPPED), "4", "1"),
    Row(ddp(loader="workers", **RECIPE, **ALMOST_EMPTY), "2", "3"),
    Row(ddp(**FOCAL, **ALMOST_EMPTY), "", "24"),
    Row(ddp(**FILES), "2", "4"),
    Row(ddp(accumulate=2, **VIT, **ALMOST_EMPTY), "", "2"),
    Row(ddp(accumulate=3, **DROPPING), "2"),
    Row(fsdp(reshard=False, **CLIPPED), "2", "4"),
    Row(fsdp(reshard=False, samples=97), "2"),
    Row(fsdp(**ALMOST_EMPTY), "3", "12"),
    Row(fsdp(accumulate=2, **CLIPPED), "2", "4"),
    Row(fsdp(**RECIPE), "", "234"),
    Row(fsdp(**FILES), "", "4"),
    Row(fsdp(init="by_block"), "2"),
    Row(fsdp(**VIT), "2"),
    Row(fsdp(**VIT, **ALMOST_EMPTY), "4"),
    Row(fsdp(accumulate=2, **VIT, **CLIPPED), "", "2"),
    Row(fsdp(**DROPPING), "", "2"),
    Row(fsdp(checkpointing="block", **SHORT, **CLIPPED), "", "2"),
    Row(pipeline("1f1b"), "1"),
    Row(pipeline("gpipe", m=24, cut=("fc2",), loader="workers"), "2"),
    Row(pipeline("interleaved1f1b", accumulate=2, **CLIPPED), "2"),
    Row(pipeline("interleavedzerobubble"), "2"),
    Row(pipeline("1f1b", accumulate=3, **CLIPPED), "2"),
    Row(pipeline("1f1b", m=5, **RECIPE), "2"),
    Row(pipeline("1f1b", **FILES), "2"),
    Row(pipeline("1f1b", init="by_block"), "2"),
    Row(pipeline("1f1b", **EMPTY_STAGE, **CLIPPED), "2"),
    Row(pipeline("1f1b", m=7, **ALMOST_EMPTY), "3", "2"),
    Row(pipeline("1f1b", m=5, **CLIPPED), "", "4"),
    Row(pipeline("1f1b", **VIT, **CLIPPED), "2"),
    Row(pipeline("1f1b", m=5, **DROPPING), "", "2"),
    Row(pipeline("1f1b", m=5, **VIT, **ALMOST_EMPTY), "", "4"),
    Row(ddp_pipeline(1, "gpipe", accumulate=2, **CLIPPED), "2", "1"),
    Row(ddp_pipeline(3, "1f1b"), "", "3"),
    Row(ddp_pipeline(2, "1f1b", m=5, **ALMOST_EMPTY), "4"),
    Row(ddp_pipeline(2, "1f1b", accumulate=2, **RECIPE), "4"),
    Row(ddp_pipeline(2, "interleavedzerobubble", accumulate=2, cut=("conv2", "fc1", "fc2"), **CLIPPED), "4"),
    Row(ddp_pipeline(2, "1f1b", **VIT, **CLIPPED), "4"),
    Row(ddp_pipeline(2, "gpipe", m=3, **ALMOST_EMPTY), "", "8"),
    Row(ddp_pipeline(2, "interleaved1f1b", **CLIPPED), "", "8"),
    Row(tp(1, **CLIPPED), "1"),
    Row(tp(None, loader="workers", **ALMOST_EMPTY), "2"),
    Row(tp(2, (("fc1", "replicate"),), accumulate=3, **CLIPPED), "2"),
    Row(tp(2, **RECIPE), "", "2"),
    Row(tp(2, **FILES), "", "2"),
    Row(tp(2, accumulate=2, **CLIPPED), "4"),
    Row(tp(None, **CLIPPED), "4"),  # 4 does not divide 50 channels and 10 units
    Row(tp(2, (("head", "replicate"),), **VIT, **CLIPPED), "2", "4"),
    Row(mesh(), "1", "2"),
    Row(mesh(shard=None, **ALMOST_EMPTY, **CLIPPED), "1", "2"),
    Row(mesh(shard=None, checkpointing="block", accumulate=2, ema=0.8), "2"),  # clipping would hide a wrong factor
    Row(mesh(shard=2, **ADAMW, **ALMOST_EMPTY), "", "4"),
    Row(mesh(shard=4), "", "8"),
    Row(mesh(tp=2, sequence=True, accumulate=2, **CLIPPED), "2"),
    Row(mesh(tp=2, sequence=True, checkpointing="block", loader="workers", **ALMOST_EMPTY), "", "2"),
    Row(mesh(tp=2, sequence=True, **ADAMW, **CLIPPED), "", "2"),
    Row(mesh(tp=2, **RECIPE), "", "2"),
    Row(mesh(tp=4, sequence=True), "", "4"),
    Row(mesh(shard=None, tp=2, sequence=True, accumulate=2, **CLIPPED), "", "4"),
    Row(mesh(shard=None, tp=2, **ADAMW | {"optimizer": "fused_adamw"}), "", "4"),
    Row(mesh(shard=2, tp=2, sequence=True, **CLIPPED), "", "8"),
    Row(mesh(pp=2, **LENET, **CLIPPED), "2"),
    Row(mesh(pp=2, checkpointing="block", accumulate=2), "", "2"),
    Row(mesh(pp=2, schedule="interleaved1f1b"), "", "2"),
    Row(mesh(pp=2, schedule="gpipe", accumulate=2), "", "2"),
    Row(mesh(pp=2, m=5, **RECIPE, **ALMOST_EMPTY), "", "2"),
    Row(mesh(shard=None, pp=2, **LENET | EMPTY_STAGE), "", "4"),
    Row(mesh(shard=None, pp=2, schedule="gpipe", m=3, cut=("block1",), **ADAMW, **ALMOST_EMPTY), "", "4"),
    Row(mesh(shard=2, pp=2, **ALMOST_EMPTY), "", "8"),
    Row(mesh(pp=2, tp=2, sequence=True, **CLIPPED), "4"),
    Row(mesh(pp=2, tp=2, schedule="interleaved1f1b", **RECIPE), "", "4"),
    Row(mesh(shard=None, pp=2, tp=2, **ADAMW, **CLIPPED), "", "8"),
    Row(mesh(pp=4, tp=2, sequence=True), "", "8"),
    Row(split(None, 1, **NARROW), "1"),
    Row(scratch(batch_norm="sync", **SPARSE), "2", "4"),
    Row(ddp("sync", **PADDED), "2", "4"),
    Row(fsdp(batch_norm="sync", **SPARSE), "2", "4"),
    Row(fsdp(batch_norm="sync", init="by_block", **ONE_STEP), "2"),
    Row(tp(2, batch_norm="sync", **NARROW), "2", "4"),
    Row(pipeline("gpipe", m=1, **ONE_STEP), "2"),
    Row(ddp_pipeline(2, "gpipe", m=1, batch_norm="sync", **ONE_STEP), "4"),
    Row(ddp("sync", **ONE_STEP), "", "3"),
    Row(fsdp(model="resnet18", **RESNET), "", "2"),
    Row(scratch(model="book_resnet18", **RESNET), "", "2"),  # convolutions with biases, and shortcuts without BatchNorm
]
ON_EIGHT = [row.case for row in MATRIX if "8" in row.slow]

# On two ranks. The pipelines have a stage without trainable parameters.
PARTLY_FROZEN = [
    scratch("bucketed", accumulate=2, **FROZEN),
    ddp(accumulate=2, **FROZEN, **CLIPPED),
    fsdp(accumulate=2, **FROZEN, **CLIPPED),
    pipeline("1f1b", cut=("fc1",), **FROZEN, **CLIPPED),
    pipeline("interleavedzerobubble", **FROZEN),
    ddp_pipeline(1, "gpipe", **FROZEN),
    mesh(pp=2, cut=("fc1",), **LENET | FROZEN | CLIPPED | {"samples": 59}),
    tp(2, **FROZEN, **CLIPPED),
]


def assert_equal(outcome, reference, tolerance: float = 1e-6) -> None:
    assert largest_difference(outcome.weights, reference.weights) <= tolerance
    assert_averages_equal(outcome, reference, tolerance)
    assert largest_difference(outcome.momentum, reference.momentum) <= 10 * tolerance  # about 1/lr times a weight's change
    for sums, expected in zip(outcome.sums, reference.sums, strict=True):
        assert sums[1:] == expected[1:]  # correct and count, exactly
        assert sums[0] == pytest.approx(expected[0], rel=1e-5)
    assert outcome.evaluation[1:] == reference.evaluation[1:]
    assert outcome.evaluation[0] == pytest.approx(reference.evaluation[0], rel=1e-5)
    for (loss, accuracy), expected in zip(outcome.validation, reference.validation, strict=True):
        assert loss == pytest.approx(expected[0], rel=1e-5)
        assert accuracy == expected[1]


def assert_averages_equal(outcome, reference, tolerance: float) -> None:
    assert bool(outcome.averages) == bool(reference.averages)
    if reference.averages:
        assert largest_difference(outcome.averages, reference.averages) <= tolerance
        assert largest_difference(outcome.averages, outcome.weights) > 100 * tolerance, "nothing was averaged"


UNNAMED = ("strategy", "options", "epochs", "lr", "keep_momentum", "dtype", "resume", "save")
PRESETS = {
    **{"recipe": RECIPE, "clipped": CLIPPED, "focal": FOCAL, "almost empty": ALMOST_EMPTY, "files": FILES},
    **{"vit": {"model": "vit", "init": "by_block"}, "vit_drop": {"model": "vit_drop", "init": "by_block"}},
}


def name(case: Case) -> str:
    """Return the words of a case: its strategy, and the options, presets and fields that are not the usual ones."""
    words, usual = [case.strategy.__module__.rpartition(".")[2]], usual_options(case.strategy)
    for key, value in case.options:
        if usual[key] != value:
            words.append(value if isinstance(value, str) else f"{key} {word(value)}")
    values = {field.name: getattr(case, field.name) for field in fields(Case) if getattr(case, field.name) != field.default}
    for preset, changed in PRESETS.items():
        if all(values.get(key) == value for key, value in changed.items() if key not in UNNAMED):
            words.append(preset)
            values = {key: value for key, value in values.items() if key not in changed}
    words += [f"{key} {word(value)}" for key, value in values.items() if key not in UNNAMED]
    return " ".join(words)


def word(value: object) -> str:
    """Return a value as words, without the characters that pytest would escape."""
    return " ".join(map(word, value)) if isinstance(value, tuple) else "all" if value is None else str(value).lower()
