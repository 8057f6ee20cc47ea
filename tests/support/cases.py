"""The equivalence matrix: the cases that must equal `single`, and the comparison."""

import json

import pytest
from case import Case
from planned_models import PAIRS
from training import Outcome, largest_difference

# as on the command line, but without spaces
PLAN = f"plan={json.dumps(PAIRS, separators=(',', ':'))}"
CHUNKS = "task.head_chunks=5"
MATRIX = [
    Case("single", settings="accumulate=5", ranks=(1,)),
    Case("single", settings="data.loader=workers accumulate=3 recipe", ranks=(1,)),
    Case("dp", settings="accumulate=2", ranks=(1,)),
    Case("split", "num_microbatches=1", ranks=(1,)),
    Case(
        "split",
        "devices=[cpu,cpu,cpu,cpu] num_microbatches=24",
        settings="almost-empty",
        ranks=(1,),
    ),
    Case(
        "split", "devices=[cpu,cpu,cpu] num_microbatches=5", settings="recipe", ranks=(1,)
    ),  # 24 is not divisible by 5
    Case("split", "devices=[cpu,cpu] num_microbatches=3", settings="focal", ranks=(1,)),
    Case("split", "devices=[cpu,cpu]", model="partly_frozen", ranks=(1,)),
    Case(
        "split",
        "devices=[cpu,cpu] num_microbatches=3",
        model="vit",
        settings="accumulate=3 clipped",
        ranks=(1,),
    ),
    # activation checkpointing
    Case("single", settings="checkpoint_activations=block accumulate=3 clipped", ranks=(1,)),
    Case("dp", model="vit", settings="checkpoint_activations=block", ranks=(1,)),
    Case("split", "num_microbatches=3", settings="checkpoint_activations=block recipe", slow=(1,)),
    Case(
        "scratch",
        "algorithm=bucketed",
        model="vit",
        settings="checkpoint_activations=block accumulate=3",
        extra=(2,),
    ),
    Case(
        "ddp", settings="checkpoint_activations=block recipe almost-empty", ranks=(2,), extra=(3,)
    ),
    Case(
        "ddp",
        "batch_norm=sync",
        model="narrow",
        settings="checkpoint_activations=block samples=61",
        extra=(2, 4),
    ),
    Case(
        "fsdp",
        "batch_norm=sync",
        model="narrow",
        settings="checkpoint_activations=block samples=49",
        extra=(2,),
    ),
    Case(
        "fsdp",
        model="own=vision_transformer",
        settings="checkpoint_activations=block data.dataset.channels=3",
        slow=(2,),
    ),
    Case(
        "pipeline",
        "num_microbatches=5",
        model="vit",
        settings="checkpoint_activations=block clipped",
        ranks=(2,),
    ),
    Case(
        "pipeline",
        "schedule=interleavedzerobubble",
        settings="checkpoint_activations=block",
        extra=(2,),
    ),
    Case(
        "ddp_pipeline",
        model="vit_drop",
        settings="checkpoint_activations=block accumulate=2",
        extra=(4,),
    ),
    Case(
        "tp",
        "tp=2",
        model="vit_drop",
        settings="checkpoint_activations=block accumulate=2 almost-empty",
        ranks=(2,),
        extra=(4,),
    ),
    Case("tp", settings="checkpoint_activations=block recipe", extra=(2,)),
    Case("scratch", "algorithm=per_tensor", settings="shifted", ranks=(2,)),
    Case("scratch", "algorithm=star", settings="almost-empty", ranks=(3,), extra=(2,)),
    Case("scratch", "algorithm=ring", settings="clipped", ranks=(3,), extra=(4,)),
    Case(
        "scratch",
        "algorithm=bucketed",
        settings="accumulate=3 channels_last=true clipped float64",
        ranks=(3,),
        extra=(2, 4),
    ),
    Case("scratch", "algorithm=bucketed", model="vit", settings="accumulate=3 clipped", extra=(2,)),
    Case("scratch", settings="augmented", slow=(2,), extra=(4,)),
    Case("ddp", settings="shifted", ranks=(2,), extra=(3,)),
    Case("ddp", settings="accumulate=3 clipped", ranks=(2,), extra=(1, 4)),
    Case("ddp", settings="data.loader=workers recipe almost-empty", extra=(2, 3)),
    Case("ddp", settings="focal almost-empty", extra=(2, 4)),
    Case("ddp", settings="files", extra=(2, 4)),
    Case("ddp", model="vit_drop", settings="accumulate=3", slow=(2,)),
    Case("fsdp", "reshard_after_forward=false", settings="clipped", ranks=(2,), extra=(4,)),
    Case("fsdp", settings="almost-empty", ranks=(3,), extra=(1, 2)),
    Case("fsdp", settings="accumulate=2 clipped", extra=(2, 4)),
    Case("fsdp", settings="recipe", extra=(2, 4)),
    Case("fsdp", settings="files", extra=(4,)),
    # streams
    Case("single", settings="readers accumulate=3 data.num_workers=2", ranks=(1,)),
    Case("scratch", settings="stream", extra=(2, 4)),
    Case("ddp", settings="readers data.num_workers=0 clipped", slow=(2,), extra=(4,)),
    Case("fsdp", settings="readers", extra=(2, 4)),
    Case("pipeline", "num_microbatches=5", settings="readers", slow=(2,), extra=(4,)),
    Case("tp", settings="stream", extra=(2,)),
    Case("ddp_pipeline", settings="readers data.num_workers=0", extra=(4,)),
    Case("fsdp", settings="model.init=by_block", extra=(2,)),
    Case("fsdp", model="vit", ranks=(2,)),
    Case("fsdp", model="vit", settings="almost-empty", extra=(4,)),
    Case("fsdp", model="vit_drop", extra=(2,)),
    Case("pipeline", extra=(1,)),
    Case(
        "pipeline",
        "schedule=gpipe num_microbatches=24 cut=[fc2]",
        settings="data.loader=workers",
        extra=(2,),
    ),
    Case("pipeline", "schedule=interleaved1f1b", settings="accumulate=2 clipped", ranks=(2,)),
    Case("pipeline", "schedule=interleavedzerobubble", extra=(2,)),
    Case("pipeline", "num_microbatches=5", settings="recipe", extra=(2,)),
    Case("pipeline", settings="files", extra=(2,)),
    # the first stage has neither parameters nor buffers
    Case("pipeline", "cut=[first]", model="unbiased", settings="clipped", ranks=(2,)),
    Case("pipeline", "num_microbatches=7", settings="almost-empty", ranks=(3,), extra=(2,)),
    Case("pipeline", "num_microbatches=5", settings="clipped", extra=(4,)),
    Case("pipeline", model="vit", settings="clipped", extra=(2,)),
    Case("pipeline", "num_microbatches=5", model="vit_drop", extra=(2,)),
    Case("pipeline", "num_microbatches=5", model="vit", settings="almost-empty", extra=(4,)),
    Case(
        "ddp_pipeline",
        "pp=1 schedule=gpipe",
        settings="accumulate=2 clipped",
        extra=(1, 2),
    ),
    Case("ddp_pipeline", "num_microbatches=5", settings="almost-empty", ranks=(4,)),
    Case("ddp_pipeline", settings="accumulate=2 recipe", extra=(4,)),
    Case(
        "ddp_pipeline",
        "schedule=interleavedzerobubble cut=[conv2,fc1,fc2]",
        settings="accumulate=2 clipped",
        slow=(4,),
    ),
    Case("ddp_pipeline", model="vit", settings="clipped", extra=(4,)),
    Case("ddp_pipeline", "schedule=gpipe num_microbatches=3", settings="almost-empty", extra=(4,)),
    Case("ddp_pipeline", "schedule=interleaved1f1b", settings="clipped", extra=(4,)),
    Case("tp", "tp=1", settings="clipped", extra=(1,)),
    Case("tp", settings="data.loader=workers almost-empty", ranks=(2,)),
    Case("tp", "tp=2", settings="accumulate=3 clipped", extra=(2, 4)),
    Case("tp", settings="recipe", extra=(2,)),
    Case("tp", settings="clipped", extra=(4,)),  # which does not divide 50 channels and 10 units
    Case("tp", "tp=2", model="vit", settings="clipped", extra=(2, 4)),
    Case(
        "tp",
        "tp=2",
        model="vit_drop",
        settings="accumulate=2 recipe almost-empty",
        extra=(2, 4),
    ),
    Case("tp", model="vit", settings="adamw optimizer.fused=true clipped", extra=(4,)),
    Case("mesh", model="short", slow=(2,), extra=(1,)),
    Case("mesh", "shard=null", model="short", settings="almost-empty clipped", extra=(1, 2)),
    # clipping would hide a wrong factor
    Case(
        "mesh",
        "shard=null",
        model="short",
        settings="checkpoint_activations=block accumulate=2 ema=0.8",
        ranks=(2,),
    ),
    # with the learning rate of `short`
    Case("mesh", "shard=2", settings="adamw short almost-empty", extra=(4,)),
    Case(
        "mesh",
        "tp=2 sequence_parallel=true",
        model="short",
        settings="accumulate=2 clipped",
        ranks=(2,),
    ),
    Case(
        "mesh",
        "tp=2 sequence_parallel=true",
        model="short",
        settings="checkpoint_activations=block data.loader=workers almost-empty",
        extra=(2,),
    ),
    Case("mesh", "tp=2", model="short", settings="recipe", extra=(2,)),
    Case(
        "mesh",
        "shard=null tp=2 sequence_parallel=true",
        model="short",
        settings="accumulate=2 clipped",
        extra=(4,),
    ),
    Case(
        "mesh", "shard=null tp=2", model="short", settings="adamw optimizer.fused=true", extra=(4,)
    ),
    Case(
        "mesh", "shard=2 tp=2 sequence_parallel=true", model="short", settings="clipped", extra=(8,)
    ),
    Case("mesh", "pp=2", settings="samples=48 epochs=1 clipped", ranks=(2,)),
    Case(
        "mesh",
        "pp=2",
        model="short",
        settings="checkpoint_activations=block accumulate=2",
        extra=(2,),
    ),
    Case(
        "mesh", "pp=2 num_microbatches=5", model="short", settings="recipe almost-empty", extra=(2,)
    ),
    Case(
        "mesh",
        "shard=null pp=2 cut=[first]",
        model="unbiased",
        settings="samples=48 epochs=1",
        extra=(4,),
    ),
    Case(
        "mesh",
        "shard=null pp=2 schedule=gpipe num_microbatches=3 cut=[block1]",
        model="short",
        settings="adamw almost-empty",
        extra=(4,),
    ),
    Case("mesh", "shard=2 pp=2", model="short", settings="almost-empty", extra=(8,)),
    Case("mesh", "pp=2 tp=2 sequence_parallel=true", model="short", settings="clipped", ranks=(4,)),
    Case(
        "mesh", "pp=2 tp=2 schedule=interleaved1f1b", model="short", settings="recipe", extra=(4,)
    ),
    Case("mesh", "shard=null pp=2 tp=2", model="short", settings="adamw clipped", extra=(8,)),
    Case("mesh", "pp=4 tp=2 sequence_parallel=true", model="short", extra=(8,)),
    # BatchNorm. With 61 samples the last batch has padding, with 49 some ranks have only padding in
    # it.
    Case("split", "num_microbatches=1", model="narrow", ranks=(1,)),
    # a full batch follows the padding
    Case(
        "scratch",
        "batch_norm=sync",
        model="narrow",
        settings="samples=25 epochs=2",
        ranks=(2,),
        extra=(4,),
    ),
    Case("ddp", "batch_norm=sync", model="narrow", settings="samples=61", ranks=(2,), extra=(4,)),
    Case("fsdp", "batch_norm=sync", model="narrow", settings="samples=49", extra=(2, 4)),
    Case(
        "fsdp", "batch_norm=sync", model="narrow-step", settings="model.init=by_block", ranks=(2,)
    ),
    Case("tp", "tp=2 batch_norm=sync", model="narrow", extra=(2, 4)),
    Case("pipeline", "schedule=gpipe num_microbatches=1", model="narrow-step", slow=(2,)),
    Case(
        "ddp_pipeline",
        "schedule=gpipe num_microbatches=1 batch_norm=sync",
        model="narrow-step",
        extra=(4,),
    ),
    Case(
        "ddp_pipeline",
        "schedule=gpipe num_microbatches=1 batch_norm=sync",
        model="narrow",
        settings="samples=49",
        extra=(4,),
    ),
    Case(
        "mesh",
        "shard=null pp=2 schedule=gpipe num_microbatches=1 batch_norm=sync",
        model="narrow",
        settings="samples=49",
        extra=(4,),
    ),
    # BatchNorm of each kind. The last batch has two samples, of which a rank has one or none, so
    # one value per channel.
    Case("scratch", "batch_norm=sync", model="normalized", ranks=(3,), extra=(2,)),
    Case("ddp", "batch_norm=sync", model="normalized", extra=(2, 3)),
    Case("fsdp", "batch_norm=sync", model="normalized", ranks=(3,), extra=(2, 4)),
    Case("tp", "tp=2 batch_norm=sync", model="normalized", ranks=(2,), extra=(4,)),
    Case("mesh", "batch_norm=sync", model="normalized", slow=(2,), extra=(3,)),
    Case("mesh", "shard=null batch_norm=sync", model="normalized", extra=(3,)),
    Case(
        "mesh",
        "shard=null pp=2 schedule=gpipe num_microbatches=1 batch_norm=sync",
        model="normalized",
        ranks=(4,),
    ),
    Case(
        "ddp_pipeline",
        "schedule=gpipe num_microbatches=1 batch_norm=sync",
        model="normalized",
        slow=(4,),
    ),
    # The complete models, in float64: in float32 it depends on the processor whether rounding
    # changes the sign of a ReLU's input.
    Case("fsdp", "batch_norm=sync", model="resnet18", settings="step", extra=(2,)),
    # convolutions with biases, and shortcuts without BatchNorm
    Case("scratch", "batch_norm=sync", model="book_resnet18", settings="step", extra=(2,)),
    # Parts that are not trained. Some pipelines have a stage without trainable parameters.
    Case(
        "scratch", "algorithm=bucketed", model="partly_frozen", settings="accumulate=2", ranks=(2,)
    ),
    Case("ddp", model="partly_frozen", settings="accumulate=2 clipped", ranks=(2,)),
    Case("fsdp", model="partly_frozen", settings="accumulate=2 clipped", ranks=(2,)),
    Case("pipeline", "cut=[fc1]", model="partly_frozen", settings="clipped", ranks=(2,)),
    Case("pipeline", "schedule=interleavedzerobubble", model="partly_frozen", ranks=(2,)),
    Case("mesh", "pp=2 cut=[fc1]", model="partly_frozen", settings="epochs=1 clipped", extra=(2,)),
    Case("tp", model="partly_frozen", settings="clipped", slow=(2,)),
    # Models of users.
    Case(
        "scratch",
        "algorithm=bucketed bucket_mb=0.001",
        model="own=finetuned",
        settings="max_grad_norm=0.05",
        slow=(2,),
    ),
    Case("scratch", "algorithm=bucketed bucket_mb=0.001", model="own=SeveralTypes", ranks=(2,)),
    Case("scratch", model="own=SeveralTypes", extra=(2,)),
    Case("ddp", model="own=SeveralTypes", extra=(2,)),
    Case("fsdp", model="own=SomeSteps", settings="max_grad_norm=0.05", slow=(2,)),
    # Parameters that only some steps, and of them only some ranks, use. With weight decay, momentum
    # and Adam's averages a gradient of zeros is not the same as none.
    Case(
        "scratch",
        "find_unused_parameters=true",
        model="own=SomeSteps",
        settings="unused max_grad_norm=0.05",
        extra=(2,),
    ),
    Case(
        "ddp",
        "find_unused_parameters=true",
        model="own=SomeSteps",
        settings="unused max_grad_norm=0.05",
        ranks=(2,),
    ),
    Case("scratch", "find_unused_parameters=true", model="experts", ranks=(1,), extra=(2, 4)),
    Case(
        "scratch",
        "find_unused_parameters=true",
        model="experts",
        settings="almost-empty accumulate=3",
        ranks=(3,),
        extra=(2,),
    ),
    Case(
        "scratch",
        "find_unused_parameters=true algorithm=star",
        model="own=RareExperts",
        settings="unused",
        extra=(3,),
    ),
    Case(
        "ddp", "find_unused_parameters=true", model="own=RareExperts", settings="unused", slow=(2,)
    ),
    Case(
        "fsdp",
        "find_unused_parameters=true keep_whole=[experts.*]",
        model="own=RareExperts",
        settings="unused",
        ranks=(2,),
    ),
    Case(
        "fsdp",
        "find_unused_parameters=true keep_whole=[experts.*]",
        model="experts",
        settings="almost-empty accumulate=3",
        extra=(2, 3),
    ),
    Case(
        "scratch",
        "find_unused_parameters=true algorithm=per_tensor",
        model="experts",
        settings="on_nan=skip",
        ranks=(2,),
    ),
    Case(
        "scratch",
        "find_unused_parameters=true algorithm=ring",
        model="experts",
        settings="clipped",
        extra=(3,),
    ),
    Case(
        "scratch",
        "find_unused_parameters=true algorithm=bucketed bucket_mb=0.0001",
        model="experts",
        settings="accumulate=2 clipped",
        ranks=(2,),
        extra=(3,),
    ),
    Case(
        "scratch",
        "find_unused_parameters=true algorithm=bucketed bucket_mb=0.0001",
        model="experts",
        settings="adamw weights almost-empty",
        extra=(3,),
    ),
    Case(
        "ddp",
        "find_unused_parameters=true",
        model="experts",
        settings="almost-empty",
        ranks=(3,),
        extra=(2, 4),
    ),
    Case(
        "ddp",
        "find_unused_parameters=true",
        model="experts",
        settings="accumulate=3 clipped",
        ranks=(2,),
        extra=(3,),
    ),
    Case(
        "ddp",
        "find_unused_parameters=true",
        model="experts",
        settings="adamw weights on_nan=skip",
        extra=(2,),
    ),
    Case("tp", "tp=2", model="own=stretched", ranks=(2,)),
    Case("ddp", model="own=stretched", settings="on_nan=skip clipped", slow=(2,)),
    Case("scratch", model="own=stretched", settings="on_nan=skip", extra=(2,)),
    Case("scratch", "algorithm=star", model="own=stretched", extra=(3,)),
    Case("scratch", "algorithm=per_tensor", model="own=stretched", extra=(3,)),
    Case("fsdp", model="own=masked", ranks=(2,)),
    Case("fsdp", model="own=changed_views", ranks=(2,)),
    Case("fsdp", model="own=one_layer", slow=(2,)),
    Case("fsdp", model="own=finetuned", settings="max_grad_norm=0.05", extra=(2,)),
    Case("fsdp", model="own=vision_transformer", settings="data.dataset.channels=3", extra=(2,)),
    Case("ddp", model="own=lazy_blocks", extra=(2,)),
    Case("fsdp", model="own=lazy_blocks", extra=(2,)),
    Case("fsdp", model="own=lazy_blocks", settings="model.init=by_block", ranks=(2,)),
    Case("pipeline", "cut=[2]", model="own=lazy_blocks", slow=(2,)),
    Case("tp", model="own=lazy_blocks", extra=(2,)),
    # Units of fsdp: containers, tied weights, parts used without their forward pass; parts that
    # only some steps and ranks use.
    Case(
        "fsdp",
        model="units=Containers",
        settings="accumulate=3 adamw max_grad_norm=0.05 almost-empty",
        ranks=(2,),
        extra=(1, 3),
    ),
    Case("fsdp", "reshard_after_forward=false", model="units=Containers", extra=(2,)),
    Case("fsdp", model="units=Around", settings="clipped", ranks=(3,), extra=(2,)),
    Case(
        "fsdp", model="units=Mixture", settings="decayed max_grad_norm=0.05", ranks=(2,), extra=(1,)
    ),
    Case(
        "fsdp",
        model="units=Mixture",
        settings="accumulate=3 adamw optimizer.weight_decay=0.1 almost-empty",
        extra=(2, 3),
    ),
    Case(
        "fsdp",
        "reshard_after_forward=false",
        model="units=Mixture",
        settings="accumulate=2 decayed ema=0.8",
        extra=(2,),
    ),
    Case(
        "fsdp",
        "keep_whole=[experts.*]",
        model="units=Mixture model.where=units",
        settings="decayed",
        ranks=(2,),
        extra=(3,),
    ),
    Case(
        "fsdp",
        "keep_whole=[experts]",
        model="units=Mixture model.where=units",
        settings="accumulate=3 adamw clipped almost-empty",
        extra=(3,),
    ),
    Case(
        "fsdp", model="units=InTurn", settings="decayed max_grad_norm=0.05", slow=(2,), extra=(3,)
    ),
    Case("fsdp", model="units=Recomputed", settings="decayed", ranks=(2,)),
    Case(
        "fsdp",
        model="units=Recomputed",
        settings="accumulate=3 adamw max_grad_norm=0.05 almost-empty",
        extra=(3,),
    ),
    Case("fsdp", model="units=Carried", settings="decayed", ranks=(2,)),
    Case(
        "fsdp",
        model="units=Carried",
        settings="accumulate=3 adamw max_grad_norm=0.05 almost-empty",
        extra=(3,),
    ),
    # GPT-2's tied head: embedding and head have one weight, in two blocks
    Case("single", model="tied_head", settings="accumulate=3", extra=(1,)),
    Case("dp", model="tied_head", settings="accumulate=2", extra=(1,)),
    Case("split", "num_microbatches=3", model="tied_head", settings="accumulate=2", slow=(1,)),
    Case("scratch", model="tied_head", settings="accumulate=2", extra=(2,)),
    Case("scratch", "algorithm=bucketed", model="tied_head", extra=(2, 3)),
    Case("ddp", model="tied_head", settings="accumulate=2", slow=(2,), extra=(3,)),
    Case("fsdp", model="tied_head", settings="accumulate=2", slow=(2,), extra=(3, 4)),
    Case(
        "fsdp",
        "reshard_after_forward=false",
        model="tied_head",
        settings="model.init=default",
        extra=(3,),
    ),
    Case("tp", "tp=2", model="tied_head", settings="accumulate=2", slow=(2,), extra=(4,)),
    Case("pipeline", model="tied_head", settings="accumulate=2", ranks=(2,), extra=(3,)),
    Case("pipeline", model="tied_head", settings="checkpoint_activations=block", extra=(2,)),
    Case("pipeline", "schedule=interleaved1f1b", model="tied_head", extra=(2,)),
    Case("pipeline", "schedule=interleavedzerobubble", model="tied_head", extra=(2,)),
    Case("pipeline", model="tied_head", settings="model.init=default", extra=(2,)),
    Case("pipeline", "cut=['3']", model="own=one_weight", settings="clipped", slow=(2,)),
    Case("ddp_pipeline", model="tied_head", settings="accumulate=2", extra=(4,)),
    Case("mesh", "shard=null", model="tied_head", settings="accumulate=2", extra=(2, 3)),
    Case("mesh", "shard=2", model="tied_head", extra=(4,)),
    Case(
        "mesh",
        "tp=2 sequence_parallel=true",
        model="tied_head",
        settings="accumulate=2",
        slow=(2,),
    ),
    Case("mesh", "pp=2", model="tied_head", settings="accumulate=2", slow=(2,)),
    Case("mesh", "pp=2 schedule=interleaved1f1b", model="tied_head", extra=(2,)),
    Case("mesh", "shard=null pp=2", model="tied_head", settings="accumulate=2", extra=(4,)),
    Case("mesh", "pp=2 tp=2 sequence_parallel=true", model="tied_head", extra=(4,)),
    Case("mesh", "shard=null", model="own=one_weight", extra=(2,)),
    Case("split", model="own=one_weight", extra=(1,)),
    Case("pipeline", "cut=[3]", model="own=sequential", extra=(2,)),
    Case("pipeline", "cut=['5']", model="own=one_weight", extra=(2,)),
    # plans of any module
    Case("tp", PLAN, model="pairs", settings="accumulate=3 clipped", extra=(2,)),
    # Without the bias of the keys, whose gradients are rounding errors of 1e-19. AdamW divides them
    # by their own size, and the bias would differ by 4e-12.
    Case(
        "tp",
        f"tp=2 {PLAN}",
        model="pairs model.key_bias=false",
        settings="adamw almost-empty",
        ranks=(2,),
        extra=(4,),
    ),
    Case("tp", "tp=2", model="planned", settings="accumulate=2 clipped", extra=(2, 4)),
    Case("tp", "plan={}", model="planned", extra=(2,)),
    Case("mesh", f"tp=2 {PLAN}", model="pairs", settings="accumulate=3 clipped", extra=(2,)),
    Case(
        "mesh",
        f"tp=2 shard=null {PLAN}",
        model="pairs",
        settings="clipped almost-empty",
        extra=(4,),
    ),
    Case("mesh", f"tp=2 {PLAN}", model="pairs", settings="accumulate=2", extra=(4,)),
    Case("mesh", f"shard=null {PLAN}", model="pairs", extra=(2,)),
    # any module without a plan
    Case("mesh", "shard=2", model="pairs", settings="accumulate=2 clipped almost-empty", slow=(4,)),
    Case("mesh", "tp=2", model="planned", settings="accumulate=2 clipped", extra=(2,)),
    Case("mesh", "pp=2", model="pairs", settings="clipped almost-empty", extra=(2,)),
    Case(
        "mesh",
        "pp=2 schedule=gpipe num_microbatches=2 cut=[layers.1]",
        model="pairs",
        settings="accumulate=3 decayed ema=0.8",
        extra=(4,),
    ),
    Case("tp", "plan={}", model="vit", extra=(2,)),
    Case("tp", model="own=one_weight", extra=(2,)),
    Case("tp", model="own=attention", slow=(2,)),
    Case("tp", model="own=special_layers", slow=(2,)),
    Case("tp", model="own=Plain", slow=(2,)),  # no chain
    Case("tp", model="own=InPlace", settings="float64 clipped", ranks=(2,), extra=(4,)),
    Case("tp", "tp=2", model="own=DirectWeights", settings="float64", slow=(2,), extra=(4,)),
    Case("tp", model="own=SomeSteps", settings="max_grad_norm=0.05", slow=(2,)),
    # Other tasks. Some samples of segmentation and tokens have more targets to ignore, so ranks and
    # batches weigh unequally.
    Case("ddp", task="regression", settings="accumulate=2", slow=(2,)),
    Case("pipeline", task="regression", settings="accumulate=2", extra=(2,)),
    Case(
        "split",
        "devices=[cpu,cpu] num_microbatches=3",
        task="multi_label",
        settings="accumulate=2",
        extra=(1,),
    ),
    Case("fsdp", task="multi_label", extra=(2,)),
    Case("dp", task="tokens", settings="accumulate=2", ranks=(1,)),
    Case(
        "split",
        "devices=[cpu,cpu] num_microbatches=3",
        task="segmentation",
        settings="accumulate=2",
        slow=(1,),
    ),
    Case("scratch", task="segmentation", settings="accumulate=2", extra=(2,)),
    Case("ddp", task="segmentation", settings="accumulate=2", ranks=(2,)),
    Case("ddp", task="sums", settings="accumulate=2 clipped", ranks=(3,), extra=(2,)),
    Case("fsdp", task="sums", settings="accumulate=2", slow=(2,), extra=(3,)),
    Case("scratch", task="sums", extra=(3,)),
    Case(
        "split",
        "devices=[cpu,cpu] num_microbatches=3",
        task="sums",
        settings="accumulate=2",
        ranks=(1,),
    ),
    Case("pipeline", task="sums", settings="accumulate=2", extra=(2,)),
    Case("ddp_pipeline", "pp=1", task="sums", extra=(2,)),
    Case("mesh", "pp=2", task="sums", extra=(2,)),
    Case("ddp", task="tokens", settings="accumulate=2", slow=(2,)),
    Case("fsdp", task="segmentation", extra=(2,)),
    Case("fsdp", task="tokens", settings="accumulate=2", extra=(2,)),
    Case("pipeline", task="segmentation", settings="accumulate=2", slow=(2,)),
    Case("pipeline", task="tokens", extra=(2,)),
    Case("ddp_pipeline", "pp=1", task="segmentation", settings="accumulate=2", extra=(2,)),
    Case("tp", task="segmentation", settings="accumulate=2", slow=(2,)),
    Case("mesh", task="tokens", settings="accumulate=2", slow=(2,)),
    Case("mesh", "pp=2", task="tokens", settings="accumulate=2", extra=(2,)),
    Case("mesh", "tp=2", task="tokens", settings="accumulate=2", extra=(2,)),
    # losses that the last layer computes in chunks of rows, of unequal sizes
    Case("single", task="tokens", settings=f"{CHUNKS} accumulate=3 float64", ranks=(1,)),
    Case(
        "single",
        model="tied_head",
        settings=f"{CHUNKS} checkpoint_activations=block",
        ranks=(1,),
    ),
    Case("single", task="one_left", settings=f"{CHUNKS} float64", extra=(1,)),
    Case("scratch", task="one_left", settings=f"{CHUNKS} float64", extra=(2, 3)),
    Case(
        "scratch",
        "algorithm=bucketed",
        model="tied_head",
        settings=f"{CHUNKS} accumulate=2",
        slow=(2,),
    ),
    Case("ddp", model="tied_head", settings=f"{CHUNKS} accumulate=2", extra=(2, 4)),
    Case(
        "ddp",
        "find_unused_parameters=true",
        task="one_left",
        settings=f"{CHUNKS} float64",
        extra=(2, 3),
    ),
    Case("ddp", task="one_left", settings=f"{CHUNKS} checkpoint_activations=block", extra=(2,)),
    Case("fsdp", model="tied_head", settings=f"{CHUNKS} accumulate=2", ranks=(2,), extra=(3,)),
    Case("fsdp", task="one_left", settings=f"{CHUNKS} float64 clipped", slow=(2,), extra=(4,)),
    Case(
        "fsdp",
        "reshard_after_forward=false",
        task="tokens",
        settings=f"{CHUNKS} checkpoint_activations=block",
        extra=(2,),
    ),
    Case("mesh", "shard=null", model="tied_head", settings=f"{CHUNKS} accumulate=2", extra=(2,)),
    Case("mesh", "shard=1", task="one_left", settings=f"{CHUNKS} float64", extra=(2,)),
    Case("mesh", "shard=2", model="tied_head", settings=CHUNKS, extra=(4,)),
]


def tolerance_of(case: str) -> float:
    """Return by how much weights may differ from those of `single`.

    Cases with BatchNorm, with parameters that some steps do not use or that are used directly, and
    with `units` are computed in float64.
    """
    parts = {*case.split()}
    in_float64 = {
        "pairs",
        "planned",
        "normalized",
        "find_unused_parameters=true",
        "own=InPlace",
        "own=DirectWeights",
    }
    if in_float64 & parts or "units=" in case or {CHUNKS, "float64"} <= parts:
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
    for evaluated, expected in zip(outcome.evaluations, reference.evaluations, strict=True):
        assert evaluated == pytest.approx(expected, rel=relative)


def assert_averages_equal(outcome: Outcome, reference: Outcome, tolerance: float) -> None:
    assert bool(outcome.averages) == bool(reference.averages)
    if reference.averages:
        assert largest_difference(outcome.averages, reference.averages) <= tolerance
        assert largest_difference(outcome.averages, outcome.weights) > 100 * tolerance, (
            "nothing was averaged"
        )
