"""A short training run under any strategy, for comparing what strategies compute."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_lab.data.datasets import LabelledImages, Synthetic
from ddp_lab.data.loaders import LOADERS
from ddp_lab.models.book_resnet import Residual, book_resnet18
from ddp_lab.models.chain import Chain
from ddp_lab.models.lenet import lenet
from ddp_lab.models.resnet import resnet18
from ddp_lab.resilience.checkpoint import Checkpoints
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.single import Single
from ddp_lab.training.loop import evaluate
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import cosine, make_scheduler
from ddp_lab.training.speed.options import Levers
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

SEED = 7
OFF = Levers(cuda_graph=False, compile=False, channels_last=False)


def narrow_resnet(in_channels: int, image_size: int, num_classes: int, init_std: None) -> Chain:
    """ResNet-18's kinds of layers, six times: what twenty of them prove of BatchNorm in a tenth of the time."""
    return Chain(
        (in_channels, image_size, image_size),
        stem=nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        layer1=Residual(8, 8),
        layer2=Residual(8, 16, stride=2),
        head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)),
    )


MODELS = {
    "lenet": (lenet, 1, 28),
    "narrow": (narrow_resnet, 3, 16),
    "resnet18": (resnet18, 3, 16),
    "book_resnet18": (book_resnet18, 3, 16),
}


@dataclass(frozen=True)
class Case:
    """`samples` is chosen so that the last batch is ragged: it neither fills nor divides by 2, 3 or 4."""

    strategy: type[Strategy]
    options: tuple[tuple[str, Any], ...] = ()
    model: str = "lenet"
    samples: int = 101
    batch_size: int = 24
    epochs: int = 3
    lr: float = 0.05
    loader: str = "device"
    shift: int = 0
    flip: bool = False
    accumulate: int = 1
    max_grad_norm: float | None = None
    dtype: torch.dtype = torch.float32
    save: str = ""  # folder for checkpoints
    keep_momentum: bool = True  # gigabytes add up where many ResNets are compared
    resume: str = "never"
    levers: Levers = OFF
    start: int = 0  # added to the seed on ranks other than 0: their start must not matter

    def reference(self) -> "Case":
        """The run on one device that this one must equal."""
        return replace(
            self, strategy=Single, options=(), loader="device", accumulate=1, save="", resume="never", start=0, levers=OFF
        )


@dataclass
class Outcome:
    """Of one rank; the tensors are rank 0's alone."""

    weights: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    digest: str  # of what this rank holds of the model
    sums: list[list[float]]  # of each training epoch
    evaluation: tuple[float, float, float]  # loss, accuracy, samples


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def make_model(name: str, seed: int) -> Chain:
    """The same weights in any default dtype."""
    make, channels, image_size = MODELS[name]
    torch.manual_seed(seed)
    with default_dtype(torch.float32):
        model = make(channels, image_size, 10, None)  # torch's initialisation: the books' is so small that every gradient is
    return model.to(torch.get_default_dtype())


def make_data(case: Case) -> tuple[LabelledImages, LabelledImages]:
    _, channels, image_size = MODELS[case.model]
    dataset = Synthetic(case.samples, 53, channels, image_size, 10).load()
    return dataset.train, dataset.test


def run_case(runtime: Runtime, case: Case) -> Outcome:
    """Trains as train.py does. With several ranks the runtime's process group must be open."""
    options = {key: dict(value) if key == "plan" else value for key, value in case.options}
    strategy = case.strategy(runtime, **options)
    train, test = make_data(case)
    share = {
        "batch_size": case.batch_size,
        "num_workers": 1,
        "dp_rank": strategy.dp_rank,
        "dp_size": strategy.dp_size,
        "device": strategy.device,
        "mean": [0.5],
        "std": [0.2],
    }
    make = partial(LOADERS[case.loader], **share)
    loaders = [make(train, shuffle=True, shift=case.shift, flip=case.flip), make(test, shuffle=False)]
    model = make_model(case.model, seed=SEED + (case.start if runtime.rank else 0))
    strategy.partition(model, case.batch_size // strategy.dp_size // case.accumulate)
    strategy.setup(case.levers.shape(model, runtime))
    optimizer = case.levers.settle(torch.optim.SGD(strategy.param_groups(), lr=case.lr, momentum=0.9))
    scheduler = make_scheduler(optimizer, cosine, case.epochs * len(loaders[0]), warmup_steps=2)
    step = Step(strategy, optimizer, scheduler, case.accumulate, case.max_grad_norm)
    shapes = {name: tuple(tensor.shape) for name, tensor in make_model(case.model, SEED).state_dict().items()}
    checkpoints = Checkpoints(Path(case.save), runtime, strategy, optimizer, scheduler, shapes)
    sums = []
    progress = checkpoints.resume(case.resume, lambda progress: progress.step)
    step = case.levers.build(step, loaders[0])
    for epoch in range(progress.epoch, case.epochs + 1):
        loaders[0].set_epoch(epoch)
        strategy.train()
        step.tally.totals.zero_()
        for batch in step.batches(loaders[0]):
            step(batch)
        sums.append(strategy.total(step.tally.totals))
        if case.save:
            strategy.train(False)
            checkpoints.save(Progress(epoch + 1, step=epoch * len(loaders[0])))
            checkpoints.wait()
    evaluation = evaluate(strategy, loaders[1])
    state = strategy.state_dict(optimizer)
    own = {name: value.detach().cpu().clone() for name, value in strategy.module.state_dict().items()}
    whole = not any(isinstance(value, DTensor) for value in own.values()) and own.keys() == model.state_dict().keys()
    if runtime.rank == 0 and whole:
        assert largest_difference(own, state["model"]) == 0
    weights = own if whole else state["model"]  # of a sharded or cut model the checkpoint, which rank 0 alone has
    momentum = {name: values["momentum_buffer"] for name, values in state["optimizer"].get("state", {}).items()}
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest()
    weights, momentum = (weights, momentum) if runtime.rank == 0 else ({}, {})
    return Outcome(weights, momentum if case.keep_momentum else {}, digest, sums, evaluation)


def run_cases(cases: list[Case], device: str = "cpu") -> dict[Case, Outcome]:
    """All cases in this rank's world, one after the other.

    Without cuDNN: it chooses the algorithm by the size of the local batch, and some lose two digits of float32 (measured on
    an H200: gradients 2e-6 from float64's at batch 24, 1e-8 at batch 6), enough to push a ReLU over its edge.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.enabled = False
    with Runtime(device, timeout=30) as runtime:
        if runtime.world_size > 1 or any(not case.strategy.one_process for case in cases):
            runtime.open_group()
        outcomes = {}
        for case in cases:
            with default_dtype(case.dtype), case.levers.switches(runtime):
                outcomes[case] = run_case(runtime, case)
        return outcomes


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    assert one, "nothing to compare"
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)
