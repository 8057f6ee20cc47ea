"""The cases of the equivalence matrix, by strategy and world size, and the comparison of two outcomes."""

import pytest
import torch
from training import Case, largest_difference

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
SMOOTHED = {"loss": (("_target_", "ddp_lab.strategies.loss.CrossEntropy"), ("label_smoothing", 0.2))}
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
CHECKPOINTING = {"none": ()} | {mode: (("checkpoint_activations", mode),) for mode in ("block", "selective")}
OFFLOAD = {False: (), True: (("offload", True),)}
LENET = {"model": "lenet", "init": "default", "lr": 0.05}
HALF = (("conv2", "replicate"), ("fc2", "replicate"))  # 50 channels and 10 units are not divisible by 4


def scratch(algorithm: str = "flat", batch_norm: str = "local", **case) -> Case:
    """Return a case of `scratch` whose buckets have at least 16 KiB, so that LeNet has three."""
    return Case(Scratch, (("algorithm", algorithm), ("bucket_mb", 1 / 64), ("batch_norm", batch_norm)), **case)


def ddp(batch_norm: str = "local", view: bool = True, static: bool = False, hook: str = "none", **case) -> Case:
    options = {"bucket_cap_mb": 25.0, "gradient_as_bucket_view": view, "static_graph": static, "comm_hook": hook}
    return Case(DDP, (("batch_norm", batch_norm), *options.items()), **case)


def fsdp(
    reshard: bool = True,
    batch_norm: str = "local",
    wrap: tuple[str, ...] | None = None,
    checkpointing: str = "none",
    offload: bool = False,
    **case,
) -> Case:
    options = (("reshard_after_forward", reshard), ("batch_norm", batch_norm), ("wrap", wrap))
    return Case(FSDP, options + CHECKPOINTING[checkpointing] + OFFLOAD[offload], **case)


def split(devices: int | None, m: int, **case) -> Case:
    return Case(Split, (("devices", devices and ("cpu",) * devices), ("num_microbatches", m)), **case)


def pipeline_options(schedule: str, m: int, stages: int | None, cut: tuple[str, ...] | None) -> tuple:
    return (("schedule", schedule), ("num_microbatches", m), ("num_stages", stages), ("cut", cut))


def pipeline(schedule: str, m: int = 4, stages: int | None = None, cut: tuple[str, ...] | None = None, **case) -> Case:
    return Case(Pipeline, pipeline_options(schedule, m, stages, cut), **case)


def ddp_pipeline(
    pp: int,
    schedule: str,
    m: int = 4,
    stages: int | None = None,
    cut: tuple[str, ...] | None = None,
    batch_norm: str = "local",
    **case,
) -> Case:
    options = (("pp", pp), *pipeline_options(schedule, m, stages, cut), ("batch_norm", batch_norm))
    return Case(DDPPipeline, options, **case)


def tp(tp: int | None, plan: tuple[tuple[str, str], ...] = (), batch_norm: str = "local", **case) -> Case:
    return Case(TP, (("tp", tp), ("plan", plan), ("batch_norm", batch_norm)), **case)


def mesh(
    dp: int | None = None,
    shard: int | None = 1,
    tp: int = 1,
    pp: int = 1,
    sequence: bool = False,
    schedule: str = "1f1b",
    m: int = 4,
    stages: int | None = None,
    cut: tuple[str, ...] | None = None,
    batch_norm: str = "local",
    checkpointing: str = "none",
    offload: bool = False,
    **case,
) -> Case:
    """Return a case of `mesh`; by default it is one epoch of two steps of the ViT."""
    axes = (("dp", dp), ("shard", shard), ("tp", tp), ("pp", pp), ("sequence_parallel", sequence))
    options = (*axes, *pipeline_options(schedule, m, stages, cut), ("batch_norm", batch_norm))
    return Case(Mesh, options + CHECKPOINTING[checkpointing] + OFFLOAD[offload], **(SHORT | case))


ONE = [
    Case(Single, loader="workers"),
    Case(Single, accumulate=5),
    Case(DP, (("devices", None),)),
    Case(DP, (("devices", None),), accumulate=2),
    split(None, 1),
    split(None, 4),
    split(3, 5),  # 24 is not divisible by 5
    split(4, 24, **ALMOST_EMPTY),
    split(2, 3, accumulate=3, **CLIPPED),
    Case(Single, loader="workers", accumulate=3, **RECIPE),
    split(3, 5, **RECIPE),
    split(2, 3, **FOCAL),
    split(2, 4, **FROZEN),
    Case(DP, (("devices", None),), **VIT),
    split(2, 3, **VIT, **CLIPPED),
]
REPLICAS = [
    scratch("per_tensor", start=1),
    scratch("flat", start=1),
    scratch("star", **ALMOST_EMPTY),
    scratch("ring", **CLIPPED),
    scratch("bucketed"),
    scratch("bucketed", accumulate=3, **CLIPPED),
    scratch(loader="workers"),
    scratch(**ALMOST_EMPTY),
    scratch(accumulate=3, **CLIPPED),
    scratch(**AUGMENTED),
    ddp(start=1),
    ddp(loader="workers"),
    ddp(**ALMOST_EMPTY),
    ddp(accumulate=3, **CLIPPED),
    ddp(view=False),
    ddp(static=True, accumulate=2),
    scratch(accumulate=3, **RECIPE),
    ddp(loader="workers", **RECIPE, **ALMOST_EMPTY),
    ddp(**FOCAL, **ALMOST_EMPTY),
    ddp(**FILES),
]
SHARDED = [
    fsdp(),
    fsdp(reshard=False, **CLIPPED),
    fsdp(**ALMOST_EMPTY),
    fsdp(accumulate=2, **CLIPPED),
    fsdp(**RECIPE),
    fsdp(**FILES),
]
# On two ranks all of them run; on the others every strategy, and what depends on the number of ranks or on which are empty.
DATA_PARALLEL = {
    1: [REPLICAS[1], REPLICAS[13], SHARDED[2]],
    2: REPLICAS + SHARDED,
    3: [*(REPLICAS[i] for i in (2, 3, 5, 7, 10, 12, 17)), SHARDED[2], SHARDED[4]],
    4: [*(REPLICAS[i] for i in (0, 2, 3, 5, 9, 13, 15, 18, 19)), SHARDED[1], *SHARDED[3:]],
    8: [],
}
MODEL_PARALLEL = {
    1: [pipeline("1f1b"), ddp_pipeline(1, "gpipe"), tp(None), tp(1, **CLIPPED)],
    2: [
        *(pipeline(schedule) for schedule in ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble")),
        pipeline("gpipe", m=1),
        pipeline("1f1b", m=5, **ALMOST_EMPTY),  # 24 is not divisible by 5
        pipeline("gpipe", m=24, cut=("fc2",), loader="workers"),
        pipeline("1f1b", accumulate=3, **CLIPPED),
        pipeline("interleaved1f1b", stages=4, accumulate=2, **CLIPPED),
        ddp_pipeline(2, "1f1b"),
        ddp_pipeline(1, "gpipe", accumulate=2, **CLIPPED),
        tp(2),
        tp(None, loader="workers", **ALMOST_EMPTY),
        tp(2, (("fc1", "replicate"),), accumulate=3, **CLIPPED),
        tp(2, (("conv1", "replicate"), ("fc2", "shard"))),
        tp(1),
        pipeline("1f1b", m=5, **RECIPE),
        pipeline("1f1b", m=5, **FOCAL, **ALMOST_EMPTY),
        tp(2, **RECIPE),
        pipeline("1f1b", **FILES),
        tp(2, **FILES),
        pipeline("1f1b", init="by_block"),
        pipeline("1f1b", **EMPTY_STAGE, **CLIPPED),
        fsdp(init="by_block"),
    ],
    3: [pipeline("gpipe"), pipeline("1f1b", m=7, **ALMOST_EMPTY), ddp_pipeline(3, "1f1b")],
    4: [
        pipeline("1f1b", m=5, **CLIPPED),
        *(ddp_pipeline(2, schedule) for schedule in ("gpipe", "interleaved1f1b", "loopedbfs")),
        ddp_pipeline(2, "1f1b", m=5, **ALMOST_EMPTY),
        ddp_pipeline(2, "1f1b", accumulate=2, **RECIPE),
        ddp_pipeline(2, "1f1b", cut=("fc1",), accumulate=2, loader="workers", **CLIPPED),
        tp(2, accumulate=2, **CLIPPED),
        tp(2, **ALMOST_EMPTY),
        tp(None, HALF, **CLIPPED),
    ],
    8: [ddp_pipeline(2, "gpipe", m=3, **ALMOST_EMPTY), ddp_pipeline(2, "interleaved1f1b", **CLIPPED)],
}
VISION_TRANSFORMER = {
    2: [
        scratch("bucketed", accumulate=3, **VIT, **CLIPPED),
        ddp(accumulate=2, **VIT, **ALMOST_EMPTY),
        fsdp(**VIT),
        fsdp(accumulate=2, **VIT, **CLIPPED),
        fsdp(**VIT, **RECIPE),
        pipeline("1f1b", **VIT, **CLIPPED),
        pipeline("interleaved1f1b", accumulate=2, **VIT),
        tp(2, (("head", "replicate"),), **VIT, **CLIPPED),
        ddp(accumulate=3, **DROPPING),
        fsdp(**DROPPING),
        pipeline("1f1b", m=5, **DROPPING),
    ],
    4: [
        ddp(**VIT, **CLIPPED),
        fsdp(**VIT, **ALMOST_EMPTY),
        pipeline("1f1b", m=5, **VIT, **ALMOST_EMPTY),
        ddp_pipeline(2, "1f1b", **VIT, **CLIPPED),
        tp(2, (("head", "replicate"),), **VIT),
    ],
}
# `make test` has the first of each and OFFLOADED; on 8 ranks all are slow.
OFFLOADED = fsdp(offload=True, accumulate=2, **SHORT, **CLIPPED)
MESHES = {
    1: [mesh(), mesh(pp=1, shard=None, **ALMOST_EMPTY, **CLIPPED)],
    2: [
        mesh(shard=None, checkpointing="selective", accumulate=2, ema=0.8),  # not clipped: that would hide a wrong factor
        mesh(shard=None, accumulate=2, **CLIPPED),
        mesh(),
        mesh(pp=2, **LENET, **CLIPPED),
        mesh(shard=None, **ALMOST_EMPTY),
        mesh(tp=2, sequence=True, accumulate=2, **CLIPPED),
        mesh(tp=2, sequence=True, checkpointing="block", loader="workers", **ALMOST_EMPTY),
        mesh(pp=2, checkpointing="block", accumulate=2),
        mesh(pp=2, schedule="interleaved1f1b", checkpointing="selective"),
        fsdp(checkpointing="block", **SHORT, **CLIPPED),
        fsdp(False, checkpointing="selective", accumulate=2, **SHORT),
        mesh(tp=2, sequence=True, **ADAMW, **CLIPPED),
        mesh(tp=2, **RECIPE),
        *(mesh(pp=2, schedule=schedule, accumulate=2) for schedule in ("gpipe", "loopedbfs")),
        mesh(pp=2, m=5, **RECIPE, **ALMOST_EMPTY),
        OFFLOADED,
        mesh(shard=None, offload=True, **ADAMW | {"optimizer": "fused_adamw"}, **CLIPPED),
        mesh(tp=2, offload=True),
        mesh(pp=2, offload=True, accumulate=2, **CLIPPED),
    ],
    4: [
        mesh(pp=2, tp=2, sequence=True, **CLIPPED),
        mesh(shard=None, pp=2),
        mesh(shard=None, pp=2, **LENET | EMPTY_STAGE),
        mesh(shard=2, **ADAMW, **ALMOST_EMPTY),
        mesh(shard=2, accumulate=2, checkpointing="selective", **CLIPPED),
        mesh(pp=2, tp=2, sequence=True, checkpointing="selective"),
        mesh(tp=2, **CLIPPED),
        mesh(shard=None, tp=2, sequence=True, accumulate=2, **CLIPPED),
        mesh(shard=None, tp=2, **ADAMW | {"optimizer": "fused_adamw"}),
        mesh(tp=4, sequence=True),
        mesh(pp=2, accumulate=2, **CLIPPED),
        mesh(pp=2, tp=2, schedule="interleaved1f1b", **RECIPE),
        mesh(shard=None, pp=2, schedule="gpipe", m=3, cut=("block1",), **ADAMW, **ALMOST_EMPTY),
        mesh(pp=4, **LENET, **CLIPPED),
    ],
    8: [
        mesh(pp=2, tp=2, sequence=True, accumulate=2, **CLIPPED),
        mesh(shard=None, pp=2, tp=2, **ADAMW, **CLIPPED),
        mesh(shard=2, tp=2, sequence=True, **CLIPPED),
        mesh(shard=2, pp=2, **ALMOST_EMPTY),
        mesh(pp=4, tp=2, sequence=True),
        mesh(dp=8, shard=4),
    ],
}

# On two ranks. The pipelines have a stage without trainable parameters.
PARTLY_FROZEN = [
    scratch(**FROZEN, **CLIPPED),
    scratch("bucketed", accumulate=2, **FROZEN),
    ddp(static=True, **FROZEN),
    ddp(accumulate=2, **FROZEN, **CLIPPED),
    fsdp(accumulate=2, **FROZEN, **CLIPPED),
    pipeline("1f1b", cut=("fc1",), **FROZEN, **CLIPPED),
    pipeline("interleaved1f1b", **FROZEN),
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


def name(case: Case) -> str:
    changed = [case.loader] * (case.loader != "device") + [f"{case.samples} samples"] * (case.samples != 59)
    changed += ["files"] * case.files
    changed += [f"accumulate {case.accumulate}"] * (case.accumulate > 1) + ["clipped"] * (case.max_grad_norm is not None)
    changed += ["augmented"] * (case.crop_padding > 0 or case.flip) + [case.model] * (case.model == "book_resnet18")
    changed += [case.optimizer] * (case.optimizer != "sgd")
    changed += [case.model] * case.model.startswith("vit")
    changed += ["recipe"] * (case.mixup > 0) + ["focal"] * ("own_losses.Focal" in str(case.loss))
    changed += [case.init] * (case.init != "default" and not case.model.startswith("vit"))
    return "-".join([case.strategy.__name__, *(str(value) for _, value in case.options), *changed]).replace("'", "")
