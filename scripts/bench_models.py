"""The models that scripts/bench.py measures, and the made-up samples that they are trained on."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab import Hook  # noqa: E402
from ddp_lab.models.gpt import gpt  # noqa: E402
from ddp_lab.models.lenet import lenet  # noqa: E402
from ddp_lab.models.resnet import resnet18  # noqa: E402
from ddp_lab.models.vit import vit  # noqa: E402
from ddp_lab.world.device import peak_memory_bytes  # noqa: E402

# so low that the weights hardly change: with dead ReLUs or denormal numbers a CPU takes longer
LR = 1e-4


def fused_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum in one kernel."""
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, fused=True)


def fused_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW in one kernel."""
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


ADAMW = ["optimizer=adamw"]


@dataclass(frozen=True)
class Model:
    """A model to measure.

    Attributes:
        make: constructs it on the default device.
        overrides: of train.py, which choose it.
        shape: of a sample's input: (channels, height, width) of an image, or (tokens,).
        classes: number of classes, or of different tokens.
        batch: usual samples on each device.
        steps: usual steps of a repeat.
        cpu_batch, cpu_steps: the same on a CPU, which take a second or so.
        optimizer: makes the optimizer of the stock loops.
        is_transformer: whether its blocks are added to an embedding.
        counts_memory: whether the memory of train.py is measured, by a callback, which costs a
            few microseconds a step.
    """

    make: Callable[[], nn.Module]
    overrides: list[str]
    shape: tuple[int, ...]
    classes: int = 10
    batch: int = 256
    steps: int = 235
    cpu_batch: int = 64
    cpu_steps: int = 20
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = field(default=fused_sgd)
    is_transformer: bool = False
    counts_memory: bool = True

    @property
    def has_tokens(self) -> bool:
        """Whether a sample is a text, of which rates count the tokens."""
        return len(self.shape) == 1

    @property
    def units(self) -> int:
        """What a sample counts in a rate: 1, or its tokens."""
        return self.shape[0] if self.has_tokens else 1

    def data(self, train_size: int) -> list[str]:
        """Return the overrides of train.py for so many made-up training samples."""
        if self.has_tokens:
            sizes = {"samples": train_size, "context": self.shape[0], "vocabulary": self.classes}
            dataset = [f"+data.dataset.{key}={value}" for key, value in sizes.items()]
            target = "data.dataset._target_=scripts.bench_models.MadeUpTokens"
            return ["task=tokens", "data=own", target, *dataset, f"data.num_classes={self.classes}"]
        channels, size, _ = self.shape
        sizes = {"channels": channels, "image_size": size, "num_classes": self.classes}
        sizes |= {"train_size": train_size, "test_size": 64}
        return ["data=synthetic", *(f"data.dataset.{key}={value}" for key, value in sizes.items())]


VIT_L16 = partial(
    vit, depth=24, width=1024, heads=16, mlp_ratio=4.0, patch_size=16, pool="mean", drop_path=0.0
)
TINY = [
    "depth=2",
    "width=16",
    "heads=2",
    "mlp_ratio=2.0",
    "patch_size=7",
    "pool=mean",
    "drop_path=0.0",
]
SMALL = ["model.width=16", "model.heads=4"]
MODELS = {
    "lenet": Model(  # whose step takes 0.2 ms on a GPU
        lambda: lenet(1, 28, 10, None), ["model=lenet"], (1, 28, 28), counts_memory=False
    ),
    "resnet18": Model(
        lambda: resnet18(1, 28, 10, None), ["model=resnet18"], (1, 28, 28), cpu_batch=4, cpu_steps=5
    ),
    "resnet50": Model(
        lambda: torchvision.models.resnet50(num_classes=10),
        ["model=torchvision", "model.name=resnet50"],
        (3, 224, 224),
    ),
    "vit_l16": Model(
        lambda: VIT_L16(3, 224, 1000),
        ["model=vit_l16", *ADAMW],
        (3, 224, 224),
        classes=1000,
        batch=64,
        steps=20,
        optimizer=fused_adamw,
        is_transformer=True,
    ),
    "vit_tiny": Model(  # for tests of the loops
        lambda: vit(
            1,
            28,
            10,
            depth=2,
            width=16,
            heads=2,
            mlp_ratio=2.0,
            patch_size=7,
            pool="mean",
            drop_path=0.0,
        ),
        ["model=vit", *(f"model.{name}" for name in TINY), *ADAMW],
        (1, 28, 28),
        batch=8,
        steps=4,
        optimizer=fused_adamw,
        is_transformer=True,
    ),
    "gpt2": Model(
        lambda: gpt(50304, 1024, depth=12, width=768, heads=12),
        ["model=gpt2", *ADAMW],
        (1024,),
        classes=50304,
        batch=32,
        steps=20,
        optimizer=fused_adamw,
        is_transformer=True,
    ),
    "gpt2_tied": Model(
        lambda: gpt(50304, 1024, depth=12, width=768, heads=12, tied=True),
        ["model=gpt2", "model.tied=true", *ADAMW],
        (1024,),
        classes=50304,
        batch=32,
        steps=20,
        optimizer=fused_adamw,
        is_transformer=True,
    ),
    "gpt_tiny": Model(  # for tests of the loops
        lambda: gpt(64, 16, depth=2, width=16, heads=4, tied=True),
        ["model=gpt", "model.tied=true", "model.depth=2", *SMALL, *ADAMW],
        (16,),
        classes=64,
        batch=8,
        steps=4,
        optimizer=fused_adamw,
        is_transformer=True,
    ),
}


class PeakMemory(Hook):
    """Writes the peak memory of each rank, in bytes, when the training ends.

    Args:
        out: beginning of the name of the files, which ends with the rank.
    """

    def __init__(self, out: str):
        self.out = out
        self.rank = 0

    def on_start(self, run: Any) -> None:
        """Keep the rank."""
        self.rank = run.rank

    def close(self, status: str) -> None:
        """Write the file of this rank."""
        Path(f"{self.out}{self.rank}").write_text(str(peak_memory_bytes()))


def made_up(count: int, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random samples: images in uint8 and their classes, or tokens and the next ones."""
    generator = torch.Generator().manual_seed(0)
    if model.has_tokens:
        tokens = torch.randint(model.classes, (count, model.units + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    images = torch.randint(256, (count, *model.shape), dtype=torch.uint8, generator=generator)
    return images, torch.randint(model.classes, (count,), generator=generator)


class MadeUpTokens(TensorDataset):
    """Random tokens, each with the next one as its target.

    Args:
        samples: number of samples.
        context: tokens of a sample.
        vocabulary: number of different tokens.
    """

    def __init__(self, samples: int, context: int, vocabulary: int):
        model = Model(nn.Identity, [], (context,), vocabulary)
        super().__init__(*made_up(samples, model))
