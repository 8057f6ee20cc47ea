"""Short training runs under any strategy, to compare the results of strategies."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from image_folders import write_folder
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.checkpoints.state import collect, content_of, merge
from ddp_lab.data.datasets import Synthetic
from ddp_lab.data.folder import Folder
from ddp_lab.models.book_resnet import Residual, book_resnet18
from ddp_lab.models.chain import Chain
from ddp_lab.models.initial_weights import InitialWeights
from ddp_lab.models.lenet import lenet
from ddp_lab.models.resnet import resnet18
from ddp_lab.models.vit import vit
from ddp_lab.observe.logger import Logger
from ddp_lab.run.job import Job, build
from ddp_lab.speed.fastest import AUTO, build_step
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.sharding import local
from ddp_lab.strategies.single import Single
from ddp_lab.tasks.classification import Classification, CrossEntropy
from ddp_lab.training.loop import Hooks
from ddp_lab.training.metrics import evaluate
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import cosine, multi_step
from ddp_lab.world.runtime import Runtime

SEED = 7
TEST_SAMPLES = 31


class Performance(NamedTuple):
    """The config keys of performance options."""

    cuda_graph: bool | str = False
    compile: bool | str = False
    channels_last: bool | str = False


OFF = Performance()


def narrow_resnet(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network of six layers of ResNet-18's kinds. It tests BatchNorm as well as twenty, in a tenth of the time."""
    return Chain(
        (in_channels, image_size, image_size),
        stem=nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
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
    """Return a network with a frozen block, a frozen bias, parameters that are never used, and others that are trained."""
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
        body=nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()),
        pair=nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)),
        spare=Spare(),
        head=nn.Linear(16, num_classes),
    )
    model.pair[2].weight = model.pair[0].weight
    model.body[1].bias.requires_grad = False
    return model


def small_vit(in_channels: int, image_size: int, num_classes: int, init_std: None, drop_path: float = 0.0) -> Chain:
    """Return a Vision Transformer of two blocks and 16 tokens."""
    sizes = {"depth": 2, "width": 16, "heads": 4, "mlp_ratio": 2.0, "patch_size": 4}
    return vit(in_channels, image_size, num_classes, **sizes, pool="mean", drop_path=drop_path)


def dropping_vit(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return the same with stochastic depth: either residual branch of the last block is dropped in half of the steps."""
    return small_vit(in_channels, image_size, num_classes, None, drop_path=0.5)


def unbiased(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """Return a network whose first stage of two has neither biases nor normalization layers, and whose first block is empty."""
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
    "vit_drop": (dropping_vit, 3, 16),
    "narrow": (narrow_resnet, 3, 16),
    "resnet18": (resnet18, 3, 16),
    "book_resnet18": (book_resnet18, 3, 16),
}


@dataclass(frozen=True)
class Case:
    """A training run. By default the last batch is partial, and its size is not divisible by 2, 3 or 4."""

    strategy: type[Strategy]
    options: tuple[tuple[str, Any], ...] = ()
    model: str = "lenet"
    init: str = "default"
    samples: int = 59
    val_fraction: float = 0.0
    batch_size: int = 24
    epochs: int = 2
    lr: float = 0.05
    loader: str = "device"
    crop_padding: int = 0
    flip: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    weight_decay: float = 0.0
    optimizer: str = "sgd"
    decay_norms_and_biases: bool = True
    lr_schedule: str = "cosine"
    loss: tuple[tuple[str, Any], ...] = ()  # the config group; (): the default
    files: bool = False  # read the images from files, with random crops, RandAugment and erasing
    accumulate: int = 1
    max_grad_norm: float | None = None
    ema: float | None = None
    dtype: torch.dtype = torch.float32
    save: str = ""  # folder for the folders `pt` and `sharded`, with checkpoints of both formats
    save_at: int = 0  # a step within an epoch after which another one is saved
    keep_momentum: bool = True  # False saves gigabytes of memory where many ResNets are compared
    resume: str | None = None
    performance: Performance = OFF
    start: int = 0  # added to the initial weights on ranks other than 0, which must not affect the result

    def reference(self) -> "Case":
        """Return the run on one device whose results this one must equal."""
        usual = ("options", "accumulate", "save", "save_at", "resume", "start", "performance")
        changed = {field.name: field.default for field in fields(Case) if field.name in usual}
        return replace(self, strategy=Single, loader="workers" if self.files else "device", **changed)


@dataclass
class Outcome:
    """The result of a run on one rank. Only rank 0 has the tensors."""

    weights: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]  # of the weights; empty without ema
    digest: str  # hash of this rank's part of the model
    initial: str  # hash of the complete model before the first step, on rank 0, of models that start on the meta device
    held: int  # bytes of parameters and buffers that this rank has allocated before the first step
    peak: int  # largest number of such bytes while it drew them, with the complete block that it had drawn last
    sums: list[list[float]]  # of each training epoch
    validation: list[tuple[float, float]]  # loss and accuracy after each epoch; empty without a validation set
    evaluation: tuple[float, ...]  # loss, accuracy, samples, top-5 accuracy, and the cells of the confusion matrix


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def make_model(name: str, seed: int) -> Chain:
    make, channels, image_size = MODELS[name]
    torch.manual_seed(seed)
    return make(channels, image_size, 10, None)


def target(function: Callable | type, **options: Any) -> dict[str, Any]:
    """Return a config group whose `_target_` is `function`."""
    return {"_target_": f"{function.__module__}.{function.__qualname__}", **options}


def data_of(case: Case, root: str) -> dict[str, Any]:
    """Return the keys of the config group `data` that determine the images."""
    _, channels, image_size = MODELS[case.model]
    if case.files:
        transforms = {"resize": None, "crop_scale": [0.3, 1.0], "randaugment": 9, "erasing": 0.5, "num_classes": None}
        dataset = target(Folder, root=root, seed=SEED)
        # `single` reads without worker processes, which must make no difference.
        workers = int(case.strategy is not Single)
        return {"dataset": dataset, "channels": channels, "image_size": image_size, "num_workers": workers} | transforms
    sizes = {"train_size": case.samples, "test_size": TEST_SAMPLES}
    dataset = target(Synthetic, **sizes, channels=channels, image_size=image_size, num_classes=10)
    return {"dataset": dataset, "num_workers": 1}


# Fields of Case that are keys of the config, and of its group `data`.
KEYS = ("epochs", "batch_size", "accumulate", "max_grad_norm", "ema", "decay_norms_and_biases", "mixup", "cutmix")
DATA_KEYS = ("val_fraction", "loader", "crop_padding", "flip")


def config_of(case: Case, root: str = "") -> DictConfig:
    """Return the config with which train.py would run the case. Most keys that change numbers differ from their defaults.

    Args:
        root: the directory of the images of a case with `files`.
    """
    model, _, _ = MODELS[case.model]
    options = {key: dict(value) if key == "plan" and value else value for key, value in case.options}
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    return OmegaConf.create(
        {
            **{key: getattr(case, key) for key in KEYS},
            "seed": SEED,
            "scaling": "strong",
            "lr_scaling": "linear",
            "lr_base_batch_size": case.batch_size,
            "warmup_epochs": 2 / -(-case.samples // case.batch_size),  # two steps
            "patience": None,
            "evaluate_test": "every_epoch",
            "optimize": "auto",
            "checkpoint": {"best": "auto"},
            "on_nan": "stop",
            "profile": False,
            "log_every": None,
            "speed": "auto" if AUTO in case.performance else "off",
            **case.performance._asdict(),
            "data": {
                **data_of(case, root),
                **{key: getattr(case, key) for key in DATA_KEYS},
                "val_seed": SEED,
                "mean": [0.5],
                "std": [0.2],
            },
            # None: torch's initial weights. LeNet's default ones are so small that every gradient is nearly zero.
            "model": target(model, init_std=None, init=case.init),
            "strategy": target(case.strategy, **options),
            "optimizer": OPTIMIZERS[case.optimizer] | {"lr": case.lr, "weight_decay": case.weight_decay, "_partial_": True},
            "scheduler": SCHEDULES[case.lr_schedule],
            "loss": dict(case.loss) or target(CrossEntropy),
            "task": target(Classification),
        }
    )


OPTIMIZERS = {
    "sgd": target(torch.optim.SGD, momentum=0.9),
    "adamw": target(torch.optim.AdamW),
    "fused_adamw": target(torch.optim.AdamW, fused=True),
}
SCHEDULES = {
    "cosine": target(cosine, _partial_=True),
    "multi_step": target(multi_step, milestones=[1.6], gamma=0.2, _partial_=True),
}


class Watched(InitialWeights):
    """Initial weights that count the bytes in memory: of the model, and of the block that was drawn last."""

    def __init__(self, model: Chain, seed: int):
        super().__init__(model, seed)
        self.model, self.peak = model, 0

    def of(self, name: str) -> dict[str, torch.Tensor]:
        block = super().of(name)
        self.peak = max(self.peak, held_bytes(self.model) + sum(tensor.nbytes for tensor in block.values()))
        return block


class Recorder(Hooks, Logger):
    """Record what `fit` reports of each epoch, and save checkpoints."""

    def __init__(self, checkpoints: list[Checkpoints], save_at: int):
        self.checkpoints, self.save_at = checkpoints, save_at
        self.sums: list[list[float]] = []
        self.tests: list[tuple[float, float]] = []
        self.validation: list[tuple[float, float]] = []

    def check(self, progress: Progress) -> None:
        self.sums.append(progress.sums)

    def epoch(self, epoch: int, **metrics: float) -> None:
        self.tests.append((metrics["test_loss"], metrics["test_accuracy"]))
        if "val_loss" in metrics:
            self.validation.append((metrics["val_loss"], metrics["val_accuracy"]))

    def after_step(self, progress: Progress, here: Callable[[], Progress]) -> None:
        if progress.step == self.save_at:
            self.save(here())

    def end_epoch(self, progress: Progress, last: bool) -> None:
        self.save(progress)

    def save(self, progress: Progress) -> None:
        for checkpoints in self.checkpoints:
            checkpoints.save(progress)
            checkpoints.wait()
            assert not checkpoints.problem, checkpoints.problem


def run_case(runtime: Runtime, case: Case) -> Outcome:
    """Train as train.py does. Several ranks need an open process group."""
    with TemporaryDirectory() as own:
        root = runtime.agree("root", lambda: write_images(Path(own), case.samples)) if case.files else ""
        job = build(config_of(case, root), runtime)
        with job.options.backend_flags(runtime):
            return run_job(runtime, case, job)


def write_images(root: Path, samples: int) -> str:
    """Write images of ten classes for a case with `files`, and return their directory."""
    write_folder(root, {"train": samples, "val": 12, "test": TEST_SAMPLES}, classes=10, sides=(28, 48))
    return str(root)


def run_job(runtime: Runtime, case: Case, job: Job) -> Outcome:
    """Train with a job. Its files must exist until the last rank has ended."""
    if case.start and runtime.rank:
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.add_(case.start)
    strategy, names = job.strategy, job.model.state_dict().keys()
    assert bool(held_bytes(job.model)) == (case.init == "default"), "the model does not start on the device that it should"
    weights = strategy.initial_weights
    if weights is not None:
        strategy.initial_weights = weights = Watched(job.model, SEED)
    trainer = job.trainer()
    held, peak = held_bytes(job.model), weights.peak if weights else 0
    initial = hash_of(full_weights(strategy)) if case.init == "by_block" else ""
    state = trainer.state
    folders = {Path(case.save, form): form == "sharded" for form in ("pt", "sharded") if case.save}
    checkpoints = [Checkpoints(folder, state, sharded=sharded) for folder, sharded in folders.items()]
    source = Path(case.resume) if case.resume else None
    trainer.progress = Checkpoints(Path(case.save), state).resume(source, lambda progress: progress.step)
    steps_left = case.epochs * job.plan.steps_per_epoch
    trainer.train_step = build_step(job.options, trainer.eager_step, job.loaders["train"], steps_left)
    recorder = Recorder(checkpoints, case.save_at)
    trainer.fit_loaders(job.loaders, job.fit_settings, recorder, recorder)
    with trainer.ema.in_use() if trainer.ema else nullcontext():
        tested = evaluate(strategy, job.loaders["test"])
    confusion = tested.sums["confusion"]
    assert tested.samples == confusion.sum() == TEST_SAMPLES
    assert tested.values["accuracy"] == confusion.trace().item() / TEST_SAMPLES
    values = tested.values
    evaluation = (values["loss"], values["accuracy"], tested.samples, values["top5_accuracy"], *confusion.flatten().tolist())
    assert not recorder.tests or evaluation[:2] == recorder.tests[-1], "a second evaluation has another result"
    assert len(recorder.validation) == len(recorder.tests) * (case.files or case.val_fraction > 0)
    full, rests = collect(strategy, *state.part(trainer.progress))
    state = content_of(full, merge(rests)) if rests else {"model": {}, "optimizer": {}}
    averages = state.get("ema", {})
    own = {name: value.detach().cpu().clone() for name, value in strategy.module.state_dict().items()}
    full = not any(isinstance(value, DTensor) for value in own.values()) and own.keys() == names
    if runtime.rank == 0 and full:
        assert largest_difference(own, state["model"]) == 0
    weights = own if full else state["model"]  # the checkpoint of a sharded or cut model is on rank 0 only
    kept = "momentum_buffer" if case.optimizer == "sgd" else "exp_avg"
    momentum = {name: values[kept] for name, values in state["optimizer"].get("state", {}).items()}
    digest = hash_of(weights)
    if runtime.rank > 0:
        weights, momentum, averages = {}, {}, {}
    momentum = momentum if case.keep_momentum else {}
    measured = recorder.sums, recorder.validation, evaluation
    return Outcome(weights, momentum, averages, digest, initial, held, peak, *measured)


def full_weights(strategy: Strategy) -> dict[str, torch.Tensor]:
    """Return the complete model's weights on rank 0, else {}. Collective."""
    return collect(strategy, strategy.module.state_dict())[0]


def hash_of(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of memory in which this process has parts of the model; a tensor on the meta device has none."""
    held = [local(tensor) for tensor in model.state_dict().values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in held if not tensor.is_meta)


def run_cases(cases: list[Case], device: str = "cpu") -> dict[Case, Outcome]:
    """Run all cases in this rank's world, one after the other.

    cuDNN is disabled, because it chooses the algorithm by the size of the local batch, and some algorithms lose two digits of
    float32 (on an H200 gradients differ from float64's by 2e-6 at batch 24 and by 1e-8 at batch 6). This is enough to change
    the sign of a ReLU's input.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.enabled = False
    with Runtime(device, timeout=30) as runtime:
        if runtime.world_size > 1 or any(not case.strategy.one_process for case in cases):
            runtime.open_group()  # once for all cases
        outcomes = {}
        for case in cases:
            with default_dtype(case.dtype):
                outcomes[case] = run_case(runtime, case)
        return outcomes


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    assert one, "nothing to compare"
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)
