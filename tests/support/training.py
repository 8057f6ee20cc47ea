"""Short training runs under any strategy, to compare the results of strategies.

A case is a line of words, for example `scratch algorithm=ring clipped`: a strategy of
conf/strategy/, then options of it, keys of the config, and names of PRESETS and MARKS. By default
the last batch is partial, and its size is not divisible by 2, 3 or 4.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from configs import CONF, config
from image_folders import write_folder
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.checkpoints.state import State, content_of, gather_full_state, merge
from ddp_lab.config.types import Every
from ddp_lab.data.loader import Loader
from ddp_lab.models.book_resnet import Residual, book_resnet18
from ddp_lab.models.chain import Chain
from ddp_lab.models.initial_weights import InitialWeights
from ddp_lab.models.lenet import lenet
from ddp_lab.models.resnet import resnet18
from ddp_lab.models.vit import vit
from ddp_lab.observe.logger import Logger
from ddp_lab.run.build import build
from ddp_lab.run.job import Job
from ddp_lab.speed.fastest import build_step
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import local
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.loop import fit
from ddp_lab.training.metrics import evaluate
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import Step
from ddp_lab.training.sync import Sync
from ddp_lab.world.runtime import Runtime

SEED = 7
TEST_SAMPLES = 31


def narrow_resnet(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network of six layers of ResNet-18's kinds.

    It tests BatchNorm as well as twenty, in a tenth of the time.
    """
    return Chain(
        (in_channels, image_size, image_size),
        stem=nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        ),
        layer1=Residual(8, 8),
        layer2=Residual(8, 16, stride=2),
        head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)),
    )


class Spare(nn.Module):
    """A layer that passes its input on, and whose parameters are never used."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def partly_frozen(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network with a frozen block, a frozen bias, unused parameters, and trained ones."""
    model = Chain(
        (in_channels, image_size, image_size),
        conv=nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.Tanh(), nn.AvgPool2d(2)),
        fc1=nn.Sequential(nn.Flatten(), nn.Linear(8 * (image_size // 2 - 1) ** 2, 16), nn.Tanh()),
        spare=Spare(),
        fc2=nn.Linear(16, num_classes),
    )
    model.conv.requires_grad_(False)
    model.fc1[1].bias.requires_grad = False
    return model


def tied(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network with tied weights, a frozen bias, and parameters that are never used."""
    model = Chain(
        (in_channels, image_size, image_size),
        body=nn.Sequential(
            nn.Flatten(),
            nn.Linear(in_channels * image_size**2, 16),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.Tanh(),
        ),
        pair=nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)),
        spare=Spare(),
        head=nn.Linear(16, num_classes),
    )
    model.pair[2].weight = model.pair[0].weight
    model.body[1].bias.requires_grad = False
    return model


def small_vit(
    in_channels: int, image_size: int, num_classes: int, init_std: None, drop_path: float = 0.0
) -> Chain:
    """Return a Vision Transformer of two blocks and 16 tokens."""
    sizes = {"depth": 2, "width": 16, "heads": 4, "mlp_ratio": 2.0, "patch_size": 4}
    return vit(in_channels, image_size, num_classes, **sizes, pool="mean", drop_path=drop_path)


class BatchNormAct(nn.BatchNorm2d):
    """A BatchNorm that drops and activates its outputs like timm's BatchNormAct2d."""

    def __init__(self, channels: int, drop: nn.Module, act: nn.Module):
        super().__init__(channels)
        self.drop = drop
        self.act = act

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(input)))


def normalized(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network with BatchNorm of each kind.

    1d over samples and over sequences, 2d, 3d, and one that activates.
    """
    return Chain(
        (in_channels, image_size, image_size),
        images=nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        ),
        activated=nn.Sequential(
            nn.Conv2d(8, 8, 3, bias=False), BatchNormAct(8, nn.Identity(), nn.ReLU(inplace=True))
        ),
        volumes=nn.Sequential(
            nn.Unflatten(1, (4, 2)), nn.BatchNorm3d(4), nn.Tanh(), nn.Flatten(1, 2)
        ),
        sequences=nn.Sequential(
            nn.Flatten(2), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.Tanh()
        ),
        samples=nn.Sequential(
            nn.Flatten(),
            nn.Linear(8 * ((image_size - 4) ** 2 - 2), 16),
            nn.BatchNorm1d(16, affine=False, momentum=None),
            nn.Tanh(),
        ),
        head=nn.Linear(16, num_classes),
    )


def unbiased(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network whose first of two stages has neither biases nor normalization layers.

    Its first block is empty.
    """
    return Chain(
        (in_channels, image_size, image_size),
        flatten=nn.Flatten(),
        first=nn.Sequential(nn.Linear(in_channels * image_size**2, 32, bias=False), nn.Tanh()),
        second=nn.Linear(32, num_classes),
    )


MODELS = {
    "partly_frozen": (partly_frozen, 1, 16),
    "unbiased": (unbiased, 1, 28),
    "tied": (tied, 1, 16),
    "lenet": (lenet, 1, 28),
    "vit": (small_vit, 3, 16),
    "narrow": (narrow_resnet, 3, 16),
    "normalized": (normalized, 3, 8),
    "resnet18": (resnet18, 3, 16),
    "book_resnet18": (book_resnet18, 3, 16),
}
NETWORKS = {f"model={name}": network for name, network in MODELS.items()}

# Most keys that change numbers differ from their defaults.
BASE = (
    "data.dataset.train_size=59 data.dataset.test_size=31 data.dataset.channels=1 "
    "data.num_workers=1 "
)
BASE += "data.val_seed=7 data.loader=device epochs=2 batch_size=24 seed=7 lr_scaling=linear "
BASE += "lr_base_batch_size=24 warmup_epochs=0.6 optimizer.lr=0.05 speed=off"
GROUPS = tuple(f"{group}=" for group in ("data", "model", "task", "loss", "optimizer", "scheduler"))
ONE_PROCESS = ("single", "dp", "split")
FORMS = ("pt", "sharded")
LONG = {"samples": "data.dataset.train_size"}  # keys that have shorter names in cases
# Keys of which the result must not depend.
DIFFERENT = {
    "accumulate",
    "data.loader",
    "data.num_workers",
    "save",
    "checkpoint.at_steps",
    "resume",
    "shifted",
    "speed",
}
DIFFERENT |= {"cuda_graph", "compile", "channels_last"}
# What a word says that is no key: compute in float64; begin with other weights on ranks other than
# 0, which must not matter.
MARKS = ("float64", "shifted")
PRESETS = {
    # The last of three batches has one sample. With two or more ranks, some rank has only padding
    # in it, which must not count. Twelve more are the validation set, which is evaluated under
    # every strategy, too.
    "almost-empty": "samples=61 data.val_fraction=0.2",
    "clipped": "max_grad_norm=0.1 ema=0.8",  # also averages the weights, over about five steps
    # In float64: in float32, with 97 samples, the input of a ReLU in the seventh step was 2e-8
    # below zero on one rank and 3e-8 above it on two, so the final weights differed by 3e-5. In
    # float64 they differ by 6e-17.
    "augmented": "data.crop_padding=3 data.flip=true float64",
    "decayed": "optimizer.weight_decay=0.1",
    "undecayed": "optimizer.weight_decay=0.1 decay_norms_and_biases=false",
    "recipe": "mixup=0.4 cutmix=1.0 scheduler=multi_step scheduler.milestones=[1.6] "
    "scheduler.gamma=0.2 smoothed undecayed",
    "smoothed": "loss.label_smoothing=0.2",
    "focal": "loss=own loss._target_=own_losses.Focal loss.gamma=1.0",
    # In float64: where a gradient is mathematically zero, as that of a key's bias, AdamW divides
    # one rounding error by another.
    "adamw": "optimizer=adamw optimizer.lr=0.01 optimizer.weight_decay=0.0 float64",
    "files": "data=folder data.loader=workers data.channels=1 data.image_size=28 "
    "data.crop_scale=[0.3,1.0] data.flip=false data.randaugment=9 data.erasing=0.5 "
    "data.mean=[0.5] data.std=[0.2] data.num_workers=1",
    # Their logits are 0 at first, so smaller steps change too little.
    "vit": "model=vit model.init=by_block optimizer.lr=0.2",
    # drops either residual branch of the last block in half of the steps
    "vit_drop": "vit model.drop_path=0.5",
    "short": "vit epochs=1 samples=48",  # two complete batches
    # BatchNorm, in float64: rounding errors grow fast through its layers, more so if the sign of a
    # ReLU's input changes.
    **{
        name: f"model={name}"
        for name in ("lenet", "partly_frozen", "unbiased", "tied", "resnet18", "book_resnet18")
    },
    "narrow": "model=narrow samples=60 epochs=1 ema=0.8 float64",
    "normalized": "model=normalized samples=50 epochs=1 ema=0.8 float64",
    "narrow-step": "model=narrow samples=24 epochs=1",
    "step": "samples=24 epochs=1 float64",
    "regression": "task=regression data=own data.dataset._target_=own_datasets.numbers model=own "
    "model._target_=own_models.regressor model.dropout=0.0",
    # a loss that returns the sum of a batch and its weight
    "sums": "regression task._target_=ddp_lab.tasks.Task loss=own "
    "loss._target_=own_losses.of_large",
    "unused": "optimizer.weight_decay=0.1 float64",
    "experts": "own=Experts unused",
    "weights": "optimizer.weight_decay=0.1",
    "multi_label": "regression task=multi_label data.dataset._target_=own_datasets.signs",
    "segmentation": "task=segmentation data=own data.loader=workers data.num_workers=0 "
    "data.num_classes=2 data.flip=true data.crop_padding=2 "
    "data.dataset._target_=own_datasets.Masks model=own "
    "model._target_=own_models.segmenter",
    "tokens": "task=tokens data=own data.dataset._target_=own_datasets.Tokens data.num_classes=11 "
    "data.dataset.ignored=true model=gpt model.depth=2 model.width=16",
}


def words_of(case: str) -> list[str]:
    """Return the words of a case after its strategy, with those of its presets.

    `own=NAME` is a model of own_models.py.
    """
    found = []
    for word in case.split()[1:]:
        if word in PRESETS:
            found += words_of(f"- {PRESETS[word]}")
        else:
            found += own_model(word)
    return found


def own_model(word: str) -> list[str]:
    """Return the words that choose the model of `own=NAME`, or `units=NAME` in float64."""
    key, _, name = word.partition("=")
    if key == "units":
        return ["model=own", f"model._target_=unit_models.{name}", "float64"]
    return ["model=own", f"model._target_=own_models.{name}"] if key == "own" else [word]


@cache
def options_of(strategy: str) -> dict[str, Any]:
    """Return the options of a strategy: conf/, but four micro-batches and three buckets."""
    options = OmegaConf.to_container(OmegaConf.load(CONF / "strategy" / f"{strategy}.yaml"))
    if strategy == "single":
        options["find_unused_parameters"] = False  # conf/ does not list it
    changed = {"num_microbatches": 4, "bucket_mb": 1 / 64}
    return {key: changed.get(key, value) for key, value in options.items()}


@cache
def with_groups(*groups: str) -> DictConfig:
    """Return the config with these groups, and of BASE what it has keys for."""
    cfg = config(*groups)
    for word in BASE.split():
        key, _, value = word.partition("=")
        if OmegaConf.select(cfg, key) is not None:
            OmegaConf.update(cfg, key, yaml.safe_load(value))
    return cfg


def config_of(case: str) -> DictConfig:
    """Return the config with which train.py would run the case."""
    words = [word for word in words_of(case) if word not in MARKS]
    chosen = {
        word.partition("=")[0]: word
        for word in ("data=synthetic", *words)
        if word.startswith(GROUPS)
    }
    cfg = with_groups(*(word for word in chosen.values() if word not in NETWORKS)).copy()
    strategy = case.split()[0]
    cfg.strategy = options_of(strategy)
    for word in words:
        key, _, value = word.partition("=")
        if word in NETWORKS:
            make, channels, size = NETWORKS[word]
            cfg.model = {
                "_target_": f"{make.__module__}.{make.__name__}",
                "init_std": None,
                "init": "default",
                "weights": None,
            }
            cfg.data.dataset.update(channels=channels, image_size=size)
        elif not word.startswith(GROUPS):
            key = LONG.get(
                key, f"strategy.{key}" if key.split(".")[0] in options_of(strategy) else key
            )
            OmegaConf.update(cfg, key, yaml.safe_load(value), force_add=True)
    return cfg


def reference_of(case: str) -> str:
    """Return the run on one device, without worker processes, whose results a case must equal."""
    strategy, *words = case.split()
    keys = {word: word.partition("=")[0] for word in words}
    own = options_of(strategy).keys() - {"find_unused_parameters"}  # which single has, too
    kept = [
        word for word, key in keys.items() if key not in DIFFERENT and key.split(".")[0] not in own
    ]
    return " ".join(["single", *kept, "data.num_workers=0"])


@contextmanager
def dtype_of(case: str) -> Iterator[None]:
    """Compute in float64 if the case says so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if "float64" in words_of(case) else before)
    yield
    torch.set_default_dtype(before)


def make_model(name: str, seed: int) -> Chain:
    make, channels, image_size = MODELS[name]
    torch.manual_seed(seed)
    return make(channels, image_size, 10, None)


def make_step(*words: str) -> tuple[Step, Loader]:
    """Return the training step of `single`, and its loader.

    It always starts from the same weights; the batches have 24, 24 and 12 samples.
    """
    job = build(
        config_of(" ".join(["single samples=60 data.crop_padding=1 data.flip=true", *words])),
        Runtime("cpu"),
    )
    return job.trainer().eager_step, job.loaders["train"]


@dataclass
class Outcome:
    """The result of a run on one rank. Only rank 0 has the tensors."""

    weights: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]  # of the weights; empty without ema
    digest: str  # hash of this rank's part of the model
    # hash of the complete model before the first step, on rank 0, of models that start on the meta
    # device
    initial: str
    held: int  # bytes of parameters and buffers that this rank has allocated before the first step
    # largest number of such bytes while it drew them, with the complete block that it had drawn
    # last
    peak: int
    sums: list[list[float]]  # of each training epoch
    # the metrics of all sets after each epoch, and once more at the end
    evaluations: list[dict[str, float]]
    confusion: list[float]  # the cells of the last confusion matrix, of classification


class Watched(InitialWeights):
    """Initial weights that count the bytes in memory: the model's, and the last drawn block's."""

    def __init__(self, model: Chain, seed: int):
        super().__init__(model, seed)
        self.model = model
        self.peak = 0

    def of(self, name: str) -> dict[str, torch.Tensor]:
        block = super().of(name)
        self.peak = max(
            self.peak, held_bytes(self.model) + sum(tensor.nbytes for tensor in block.values())
        )
        return block


class Recorder(Hook, Logger):
    """Record what `fit` reports of each epoch, and save checkpoints in both formats.

    Their folders are `pt` and `sharded`.
    """

    def __init__(self, checkpoints: list[Checkpoints], save_at: list[int]):
        self.checkpoints = checkpoints
        self.save_at = save_at
        self.sums: list[list[float]] = []
        self.evaluations: list[dict[str, float]] = []

    def on_start(self, run: Run) -> None:
        self.run = run

    def on_evaluate(self, results: object) -> None:
        self.sums.append(self.run.position.sums)

    def epoch(self, epoch: int, **metrics: float) -> None:
        self.evaluations.append(
            {key: metrics[key] for key in metrics if key.startswith(("val_", "test_"))}
        )

    def on_step_end(self, position: Progress) -> None:
        if position.step in self.save_at:
            self.save(self.run.current())

    def on_epoch_end(self, position: Progress) -> None:
        self.save(position)

    def save(self, progress: Progress) -> None:
        for checkpoints in self.checkpoints:
            checkpoints.save(progress)
            checkpoints.wait()
            assert not checkpoints.problem, checkpoints.problem


def run_case(runtime: Runtime, case: str) -> Outcome:
    """Train as train.py does. Several ranks need an open process group."""
    cfg = config_of(case)
    with TemporaryDirectory() as own:
        if "files" in case.split():  # images of ten classes
            sizes = {"train": 49, "val": 12, "test": TEST_SAMPLES}
            cfg.data.root = runtime.broadcast_from_rank0(
                "root", lambda: str(write_folder(Path(own), sizes, classes=10, sides=(28, 48)))
            )
        job = build(cfg, runtime)
        if "shifted" in case.split() and runtime.rank:
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.add_(1)
        with job.options.backend_flags(runtime):
            return run_job(runtime, cfg, job)


def run_job(runtime: Runtime, cfg: DictConfig, job: Job) -> Outcome:
    """Train with a job. Its files must exist until the last rank has ended."""
    strategy = job.strategy
    names = job.model.state_dict().keys()
    by_block = cfg.model.init == "by_block"
    assert bool(held_bytes(job.model)) != by_block, (
        "the model does not start on the device that it should"
    )
    weights = strategy.initial_weights
    if weights is not None:
        strategy.initial_weights = weights = Watched(job.model, SEED)
    trainer = job.trainer()
    held = held_bytes(job.model)
    peak = weights.peak if weights else 0
    initial = hash_of(full_weights(strategy)) if by_block else ""
    state = State.of(trainer, job.shapes)
    folder = cfg.get("save")
    if folder:
        Path(folder).mkdir(exist_ok=True)
    checkpoints = [
        Checkpoints(Path(folder, form), state, sharded=form == "sharded")
        for form in FORMS
        if folder
    ]
    source = None if cfg.resume == "auto" else Path(cfg.resume)
    position = Checkpoints(Path(folder or ""), state).resume(source, lambda progress: progress.step)
    steps_left = cfg.epochs * job.sizes.steps_per_epoch
    step: Any = build_step(job.options, trainer.eager_step, job.loaders["train"], steps_left)
    recorder = Recorder(checkpoints, cfg.checkpoint.at_steps)
    eager = trainer.eager_step
    settings = job.fit_settings
    sync = Sync(strategy, eager.running_sums, Every())
    position = fit(Run(eager, step, job.loaders, settings, recorder, [recorder], sync, position))
    chosen = "test" if "test" in job.loaders else "val"
    with trainer.ema.in_use() if trainer.ema else nullcontext():
        tested = evaluate(strategy, job.loaders[chosen])
    again = {f"{chosen}_{key}": value for key, value in tested.values.items()}
    assert again.items() <= recorder.evaluations[-1].items(), (
        "a second evaluation has another result"
    )
    confusion = tested.sums.get("confusion", torch.zeros(0))
    if chosen == "test":
        assert tested.samples == confusion.sum() == TEST_SAMPLES
        assert tested.values["accuracy"] == confusion.trace().item() / TEST_SAMPLES
    full, rests = gather_full_state(strategy, *state.part(position))
    state = content_of(full, merge(rests)) if rests else {"model": {}, "optimizer": {}}
    averages = state.get("ema", {})
    own = {
        name: value.detach().cpu().clone() for name, value in strategy.module.state_dict().items()
    }
    full = not any(isinstance(value, DTensor) for value in own.values()) and own.keys() == names
    if runtime.rank == 0 and full:
        assert largest_difference(own, state["model"]) == 0
    # the checkpoint of a sharded or cut model is on rank 0 only
    weights = own if full else state["model"]
    kept = state["optimizer"].get("state", {})
    momentum = {
        name: values.get("momentum_buffer", values.get("exp_avg")) for name, values in kept.items()
    }
    digest = hash_of(weights)
    if runtime.rank > 0:
        weights = {}
        momentum = {}
        averages = {}
    measured = recorder.sums, [*recorder.evaluations, again], confusion.flatten().tolist()
    return Outcome(weights, momentum, averages, digest, initial, held, peak, *measured)


def full_weights(strategy: Strategy) -> dict[str, torch.Tensor]:
    """Return the complete model's weights on rank 0, else {}. Collective."""
    return gather_full_state(strategy, strategy.module.state_dict())[0]


def hash_of(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(state[name].numpy().tobytes() for name in sorted(state))
    ).hexdigest()


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of memory in which this process has parts of the model.

    A tensor on the meta device has none.
    """
    held = [local(tensor) for tensor in model.state_dict().values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in held if not tensor.is_meta)


def run_cases(cases: list[str], device: str = "cpu") -> dict[str, Outcome]:
    """Run all cases in this rank's world, one after the other.

    cuDNN is disabled, because it chooses the algorithm by the size of the local batch, and some
    algorithms lose two digits of float32 (on an H200 gradients differ from float64's by 2e-6 at
    batch 24 and by 1e-8 at batch 6). This is enough to change the sign of a ReLU's input. The fast
    path of nn.MultiheadAttention in evaluations, which tp does not take, has errors of 4e-6 on
    GPUs, in float64, too (an H100, torch 2.11, 2026-11-25).
    """
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.enabled = False
    with Runtime(device, timeout=30) as runtime:
        if runtime.world_size > 1 or any(case.split()[0] not in ONE_PROCESS for case in cases):
            runtime.open_group()  # once for all cases
        outcomes = {}
        for case in cases:
            with dtype_of(case):
                outcomes[case] = run_case(runtime, case)
        return outcomes


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    assert one, "nothing to compare"
    assert all(one[name].shape == other[name].shape for name in one)
    filled = {name: tensor for name, tensor in one.items() if tensor.numel()}
    precise = {
        name: torch.promote_types(torch.float64, tensor.dtype) for name, tensor in filled.items()
    }
    return max(
        (one[name].to(dtype) - other[name].to(dtype)).abs().max().item()
        for name, dtype in precise.items()
    )
