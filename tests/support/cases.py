"""The equivalence matrix: cases, their numbers of ranks, and the comparison.

training.py has the cases; each must equal `single`.
"""

import pytest
from training import Outcome, largest_difference

# (case, numbers of ranks in `make test`, and in `make test-slow`), as digits: "12" is on one rank
# and on two.
MATRIX = [
    ("single accumulate=5", "1", ""),
    ("single data.loader=workers accumulate=3 recipe", "1", ""),
    ("dp accumulate=2", "1", ""),
    ("split num_microbatches=1", "1", ""),
    ("split devices=[cpu,cpu,cpu,cpu] num_microbatches=24 almost-empty", "1", ""),
    ("split devices=[cpu,cpu,cpu] num_microbatches=5 recipe", "1", ""),  # 24 is not divisible by 5
    ("split devices=[cpu,cpu] num_microbatches=3 focal", "1", ""),
    ("split devices=[cpu,cpu] partly_frozen", "1", ""),
    ("split devices=[cpu,cpu] num_microbatches=3 accumulate=3 vit clipped", "1", ""),
    # activation checkpointing
    ("single checkpoint_activations=block accumulate=3 clipped", "1", ""),
    ("dp checkpoint_activations=block vit", "1", ""),
    ("split checkpoint_activations=block num_microbatches=3 recipe", "1", ""),
    ("scratch checkpoint_activations=block algorithm=bucketed accumulate=3 vit", "2", ""),
    ("ddp checkpoint_activations=block recipe almost-empty", "2", "3"),
    ("ddp checkpoint_activations=block batch_norm=sync narrow samples=61", "2", "4"),
    ("fsdp checkpoint_activations=block batch_norm=sync narrow samples=49", "", "2"),
    ("fsdp checkpoint_activations=block own=vision_transformer data.dataset.channels=3", "", "2"),
    ("pipeline checkpoint_activations=block num_microbatches=5 vit clipped", "2", ""),
    ("pipeline checkpoint_activations=block schedule=interleavedzerobubble", "", "2"),
    ("ddp_pipeline checkpoint_activations=block accumulate=2 vit_drop", "", "4"),
    ("tp checkpoint_activations=block tp=2 vit_drop accumulate=2 almost-empty", "2", "4"),
    ("tp checkpoint_activations=block recipe", "", "2"),
    ("scratch algorithm=per_tensor shifted", "2", ""),
    ("scratch algorithm=star almost-empty", "3", "2"),
    ("scratch algorithm=ring clipped", "3", "4"),
    ("scratch algorithm=bucketed accumulate=3 channels_last=true clipped float64", "3", "24"),
    ("scratch algorithm=bucketed accumulate=3 vit clipped", "", "2"),
    ("scratch augmented", "2", "4"),
    ("ddp shifted", "2", "3"),
    ("ddp accumulate=3 clipped", "2", "14"),
    ("ddp data.loader=workers recipe almost-empty", "2", "3"),
    ("ddp focal almost-empty", "", "24"),
    ("ddp files", "2", "4"),
    ("ddp accumulate=3 vit_drop", "2", ""),
    ("fsdp reshard_after_forward=false clipped", "2", "4"),
    ("fsdp almost-empty", "3", "12"),
    ("fsdp accumulate=2 clipped", "", "24"),
    ("fsdp recipe", "", "24"),
    ("fsdp files", "", "4"),
    ("fsdp model.init=by_block", "", "2"),
    ("fsdp vit", "2", ""),
    ("fsdp vit almost-empty", "", "4"),
    ("fsdp vit_drop", "", "2"),
    ("pipeline", "1", ""),
    ("pipeline schedule=gpipe num_microbatches=24 cut=[fc2] data.loader=workers", "2", ""),
    ("pipeline schedule=interleaved1f1b accumulate=2 clipped", "2", ""),
    ("pipeline schedule=interleavedzerobubble", "", "2"),
    ("pipeline num_microbatches=5 recipe", "2", ""),
    ("pipeline files", "", "2"),
    # the first stage has neither parameters nor buffers
    ("pipeline unbiased cut=[first] clipped", "2", ""),
    ("pipeline num_microbatches=7 almost-empty", "3", "2"),
    ("pipeline num_microbatches=5 clipped", "", "4"),
    ("pipeline vit clipped", "2", ""),
    ("pipeline num_microbatches=5 vit_drop", "", "2"),
    ("pipeline num_microbatches=5 vit almost-empty", "", "4"),
    ("ddp_pipeline pp=1 schedule=gpipe accumulate=2 clipped", "", "12"),
    ("ddp_pipeline num_microbatches=5 almost-empty", "4", ""),
    ("ddp_pipeline accumulate=2 recipe", "", "4"),
    (
        "ddp_pipeline schedule=interleavedzerobubble accumulate=2 cut=[conv2,fc1,fc2] clipped",
        "",
        "4",
    ),
    ("ddp_pipeline vit clipped", "", "4"),
    ("ddp_pipeline schedule=gpipe num_microbatches=3 almost-empty", "", "4"),
    ("ddp_pipeline schedule=interleaved1f1b clipped", "", "4"),
    ("tp tp=1 clipped", "1", ""),
    ("tp data.loader=workers almost-empty", "2", ""),
    ("tp tp=2 accumulate=3 clipped", "", "24"),
    ("tp recipe", "", "2"),
    ("tp clipped", "4", ""),  # which does not divide 50 channels and 10 units
    ("tp tp=2 vit clipped", "", "24"),
    ("tp tp=2 vit_drop accumulate=2 recipe almost-empty", "2", "4"),
    ("tp vit adamw optimizer.fused=true clipped", "", "4"),
    ("mesh short", "", "12"),
    ("mesh shard=null short almost-empty clipped", "", "12"),
    # clipping would hide a wrong factor
    ("mesh shard=null checkpoint_activations=block accumulate=2 short ema=0.8", "2", ""),
    ("mesh shard=2 adamw short almost-empty", "", "4"),
    ("mesh tp=2 sequence_parallel=true accumulate=2 short clipped", "2", ""),
    (
        "mesh tp=2 sequence_parallel=true checkpoint_activations=block data.loader=workers short "
        "almost-empty",
        "",
        "2",
    ),
    ("mesh tp=2 recipe short", "", "2"),
    ("mesh shard=null tp=2 sequence_parallel=true accumulate=2 short clipped", "", "4"),
    ("mesh shard=null tp=2 short adamw optimizer.fused=true", "", "4"),
    ("mesh shard=2 tp=2 sequence_parallel=true short clipped", "", "8"),
    ("mesh pp=2 samples=48 epochs=1 clipped", "2", ""),
    ("mesh pp=2 checkpoint_activations=block accumulate=2 short", "", "2"),
    ("mesh pp=2 num_microbatches=5 recipe short almost-empty", "", "2"),
    ("mesh shard=null pp=2 unbiased cut=[first] samples=48 epochs=1", "", "4"),
    (
        "mesh shard=null pp=2 schedule=gpipe num_microbatches=3 cut=[block1] short adamw "
        "almost-empty",
        "",
        "4",
    ),
    ("mesh shard=2 pp=2 short almost-empty", "", "8"),
    ("mesh pp=2 tp=2 sequence_parallel=true short clipped", "4", ""),
    ("mesh pp=2 tp=2 schedule=interleaved1f1b short recipe", "", "4"),
    ("mesh shard=null pp=2 tp=2 short adamw clipped", "", "8"),
    ("mesh pp=4 tp=2 sequence_parallel=true short", "", "8"),
    # BatchNorm. With 61 samples the last batch has padding, with 49 some ranks have only padding in
    # it.
    ("split num_microbatches=1 narrow", "1", ""),
    # a full batch follows the padding
    ("scratch batch_norm=sync narrow samples=25 epochs=2", "2", "4"),
    ("ddp batch_norm=sync narrow samples=61", "2", "4"),
    ("fsdp batch_norm=sync narrow samples=49", "", "24"),
    ("fsdp batch_norm=sync model.init=by_block narrow-step", "2", ""),
    ("tp tp=2 batch_norm=sync narrow", "", "24"),
    ("pipeline schedule=gpipe num_microbatches=1 narrow-step", "2", ""),
    ("ddp_pipeline schedule=gpipe num_microbatches=1 batch_norm=sync narrow-step", "", "4"),
    ("ddp_pipeline schedule=gpipe num_microbatches=1 batch_norm=sync narrow samples=49", "", "4"),
    (
        "mesh shard=null pp=2 schedule=gpipe num_microbatches=1 batch_norm=sync narrow samples=49",
        "",
        "4",
    ),
    # BatchNorm of each kind. The last batch has two samples, of which a rank has one or none, so
    # one value per channel.
    ("scratch batch_norm=sync normalized", "3", "2"),
    ("ddp batch_norm=sync normalized", "3", "2"),
    ("fsdp batch_norm=sync normalized", "3", "24"),
    ("tp tp=2 batch_norm=sync normalized", "4", "2"),
    ("mesh batch_norm=sync normalized", "", "23"),
    ("mesh shard=null batch_norm=sync normalized", "", "3"),
    ("mesh shard=null pp=2 schedule=gpipe num_microbatches=1 batch_norm=sync normalized", "4", ""),
    ("ddp_pipeline schedule=gpipe num_microbatches=1 batch_norm=sync normalized", "4", ""),
    # The complete models, in float64: in float32 it depends on the processor whether rounding
    # changes the sign of a ReLU's input.
    ("fsdp batch_norm=sync resnet18 step", "", "2"),
    # convolutions with biases, and shortcuts without BatchNorm
    ("scratch batch_norm=sync book_resnet18 step", "", "2"),
    # Parts that are not trained. Some pipelines have a stage without trainable parameters.
    ("scratch algorithm=bucketed accumulate=2 partly_frozen", "2", ""),
    ("ddp accumulate=2 partly_frozen clipped", "2", ""),
    ("fsdp accumulate=2 partly_frozen clipped", "2", ""),
    ("pipeline cut=[fc1] partly_frozen clipped", "2", ""),
    ("pipeline schedule=interleavedzerobubble partly_frozen", "2", ""),
    ("mesh pp=2 cut=[fc1] partly_frozen epochs=1 clipped", "", "2"),
    ("tp partly_frozen clipped", "2", ""),
    # Models of users.
    ("scratch algorithm=bucketed bucket_mb=0.001 own=finetuned max_grad_norm=0.05", "2", ""),
    ("scratch algorithm=bucketed bucket_mb=0.001 own=SeveralTypes", "2", ""),
    ("scratch own=SeveralTypes", "2", ""),
    ("ddp own=SeveralTypes", "", "2"),
    ("fsdp own=SomeSteps max_grad_norm=0.05", "2", ""),
    # Parameters that only some steps, and of them only some ranks, use. With weight decay, momentum
    # and Adam's averages a gradient of zeros is not the same as none.
    ("scratch find_unused_parameters=true own=SomeSteps unused max_grad_norm=0.05", "", "2"),
    ("ddp find_unused_parameters=true own=SomeSteps unused max_grad_norm=0.05", "2", ""),
    ("scratch find_unused_parameters=true experts", "1", "24"),
    ("scratch find_unused_parameters=true experts almost-empty accumulate=3", "3", "2"),
    ("scratch find_unused_parameters=true algorithm=star own=RareExperts unused", "", "3"),
    ("ddp find_unused_parameters=true own=RareExperts unused", "2", ""),
    ("fsdp find_unused_parameters=true own=RareExperts unused keep_whole=[experts.*]", "2", ""),
    (
        "fsdp find_unused_parameters=true experts almost-empty accumulate=3 keep_whole=[experts.*]",
        "3",
        "2",
    ),
    ("scratch find_unused_parameters=true algorithm=per_tensor experts on_nan=skip", "2", ""),
    ("scratch find_unused_parameters=true algorithm=ring experts clipped", "3", ""),
    (
        "scratch find_unused_parameters=true algorithm=bucketed bucket_mb=0.0001 experts "
        "accumulate=2 clipped",
        "2",
        "3",
    ),
    (
        "scratch find_unused_parameters=true algorithm=bucketed bucket_mb=0.0001 experts adamw "
        "weights almost-empty",
        "3",
        "",
    ),
    ("ddp find_unused_parameters=true experts almost-empty", "3", "24"),
    ("ddp find_unused_parameters=true experts accumulate=3 clipped", "2", "3"),
    ("ddp find_unused_parameters=true experts adamw weights on_nan=skip", "2", ""),
    ("tp tp=2 own=stretched", "2", ""),
    ("ddp own=stretched on_nan=skip clipped", "2", ""),
    ("scratch own=stretched on_nan=skip", "2", ""),
    ("scratch own=stretched algorithm=star", "", "3"),
    ("scratch own=stretched algorithm=per_tensor", "3", ""),
    ("fsdp own=masked", "2", ""),
    ("fsdp own=changed_views", "2", ""),
    ("fsdp own=one_layer", "", "2"),
    ("fsdp own=finetuned max_grad_norm=0.05", "", "2"),
    ("fsdp own=vision_transformer data.dataset.channels=3", "", "2"),
    ("ddp own=lazy_blocks", "2", ""),
    ("fsdp own=lazy_blocks", "2", ""),
    ("fsdp model.init=by_block own=lazy_blocks", "2", ""),
    ("pipeline cut=[2] own=lazy_blocks", "2", ""),
    ("tp own=lazy_blocks", "", "2"),
    # Units of fsdp: containers, tied weights, parts used without their forward pass; parts that
    # only some steps and ranks use.
    ("fsdp units=Containers accumulate=3 adamw max_grad_norm=0.05 almost-empty", "2", "13"),
    ("fsdp units=Containers reshard_after_forward=false", "", "2"),
    ("fsdp units=Around clipped", "3", "2"),
    ("fsdp units=Mixture decayed max_grad_norm=0.05", "2", "1"),
    ("fsdp units=Mixture accumulate=3 adamw optimizer.weight_decay=0.1 almost-empty", "3", "2"),
    ("fsdp units=Mixture reshard_after_forward=false accumulate=2 decayed ema=0.8", "", "2"),
    ("fsdp units=Mixture model.where=units keep_whole=[experts.*] decayed", "2", "3"),
    (
        "fsdp units=Mixture model.where=units keep_whole=[experts] accumulate=3 adamw clipped "
        "almost-empty",
        "3",
        "",
    ),
    ("fsdp units=InTurn decayed max_grad_norm=0.05", "2", "3"),
    ("fsdp units=Recomputed decayed", "2", ""),
    ("fsdp units=Recomputed accumulate=3 adamw max_grad_norm=0.05 almost-empty", "", "3"),
    ("fsdp units=Carried decayed", "2", ""),
    ("fsdp units=Carried accumulate=3 adamw max_grad_norm=0.05 almost-empty", "", "3"),
    ("split own=one_weight", "", "1"),
    ("pipeline cut=[3] own=sequential", "2", ""),
    ("pipeline cut=['5'] own=one_weight", "2", ""),
    ("tp own=one_weight", "2", ""),
    ("tp own=attention", "2", ""),
    ("tp own=special_layers", "2", ""),
    ("tp own=Plain", "", "2"),  # no chain
    ("tp own=InPlace float64 clipped", "2", "4"),
    ("tp tp=2 own=DirectWeights float64", "2", "4"),
    ("tp own=SomeSteps max_grad_norm=0.05", "2", ""),
    # Other tasks. Some samples of segmentation and tokens have more targets to ignore, so ranks and
    # batches weigh unequally.
    ("ddp accumulate=2 regression", "2", ""),
    ("pipeline accumulate=2 regression", "", "2"),
    ("split devices=[cpu,cpu] num_microbatches=3 accumulate=2 multi_label", "1", ""),
    ("fsdp multi_label", "2", ""),
    ("dp accumulate=2 tokens", "1", ""),
    ("split devices=[cpu,cpu] num_microbatches=3 accumulate=2 segmentation", "1", ""),
    ("scratch accumulate=2 segmentation", "2", ""),
    ("ddp accumulate=2 segmentation", "2", ""),
    ("ddp accumulate=2 sums clipped", "3", "2"),
    ("fsdp accumulate=2 sums", "", "23"),
    ("scratch sums", "", "3"),
    ("split devices=[cpu,cpu] num_microbatches=3 accumulate=2 sums", "1", ""),
    ("pipeline accumulate=2 sums", "2", ""),
    ("ddp_pipeline pp=1 sums", "", "2"),
    ("mesh pp=2 sums", "", "2"),
    ("ddp accumulate=2 tokens", "2", ""),
    ("fsdp segmentation", "2", ""),
    ("fsdp accumulate=2 tokens", "", "2"),
    ("pipeline accumulate=2 segmentation", "2", ""),
    ("pipeline tokens", "2", ""),
    ("ddp_pipeline pp=1 accumulate=2 segmentation", "2", ""),
    ("tp accumulate=2 segmentation", "2", ""),
    ("mesh accumulate=2 tokens", "2", ""),
    ("mesh pp=2 accumulate=2 tokens", "", "2"),
    ("mesh tp=2 accumulate=2 tokens", "", "2"),
]


def tolerance_of(case: str) -> float:
    """Return by how much weights may differ from those of `single`.

    Cases with BatchNorm, with parameters that some steps do not use or that are used directly, and
    with `units` are computed in float64.
    """
    parts = {*case.split()}
    in_float64 = {"normalized", "find_unused_parameters=true", "own=InPlace", "own=DirectWeights"}
    if in_float64 & parts or "units=" in case:
        return 1e-12
    return 1e-9 if {"narrow", "resnet18", "book_resnet18"} & parts else 1e-6


def assert_equal(
    outcome: Outcome, reference: Outcome, tolerance: float = 1e-6, relative: float = 1e-5
) -> None:
    """Compare two trainings.

    Weights and averages are within `tolerance`, losses and metrics within `relative` of each other.
    """
    assert largest_difference(outcome.weights, reference.weights) <= tolerance
    assert_averages_equal(outcome, reference, tolerance)
    # about 1/lr times a weight's change
    assert largest_difference(outcome.momentum, reference.momentum) <= 10 * tolerance
    for sums, expected in zip(outcome.sums, reference.sums, strict=True):
        assert sums[1:] == expected[1:]  # correct and count, exactly
        assert sums[0] == pytest.approx(expected[0], rel=relative)
    assert outcome.confusion == reference.confusion
    for found, expected in zip(outcome.evaluations, reference.evaluations, strict=True):
        assert found == pytest.approx(expected, rel=relative)


def assert_averages_equal(outcome: Outcome, reference: Outcome, tolerance: float) -> None:
    assert bool(outcome.averages) == bool(reference.averages)
    if reference.averages:
        assert largest_difference(outcome.averages, reference.averages) <= tolerance
        assert largest_difference(outcome.averages, outcome.weights) > 100 * tolerance, (
            "nothing was averaged"
        )
