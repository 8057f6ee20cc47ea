"""Compare train.py with a training loop written by hand, which shares only the networks and the images with it.

The other end-to-end tests compare runs of train.py with each other, so they cannot detect an error that all runs have.
Here every key that changes numbers differs from its default.
"""

import copy
import hashlib
import math

import pytest
import torch
import torch.nn.functional as F
from launches import NARROW, launch, read_metrics
from training import MODELS, largest_difference

from ddp_lab.data.datasets import Synthetic

SEED, EPOCHS, BATCH, ACCUMULATE, SHIFT = 5, 2, 20, 2, 2
MEAN, STD = 0.3, 0.4
LR, MOMENTUM, WEIGHT_DECAY = 0.03 * math.sqrt(BATCH / 5), 0.8, 0.01
LARGEST_NORM = {"lenet": 2.5, "narrow": 0.7}  # max_grad_norm, by model
EMA = 0.7
WARMUP = 3  # steps: half an epoch of six
CHANGED = [
    "data=synthetic",
    "data.dataset.train_size=101",
    "data.dataset.test_size=53",
    f"seed={SEED}",
    f"epochs={EPOCHS}",
    "lr_scaling=sqrt",
    "lr_base_batch_size=5",
    "warmup_epochs=0.5",
    f"accumulate={ACCUMULATE}",
    "optimizer.lr=0.03",
    f"optimizer.momentum={MOMENTUM}",
    f"optimizer.weight_decay={WEIGHT_DECAY}",
    "optimizer.nesterov=true",
    f"data.mean=[{MEAN}]",
    f"data.std=[{STD}]",
    f"data.shift={SHIFT}",
    "data.flip=true",
]


def moved(image: torch.Tensor, down: int, right: int, mirrored: int) -> torch.Tensor:
    """Return one image, shifted and perhaps mirrored, by cropping it from a copy with a border of zeros."""
    _, height, width = image.shape
    bordered = F.pad(image.flip(-1) if mirrored else image, (SHIFT, SHIFT, SHIFT, SHIFT))
    return bordered[:, SHIFT - down :, SHIFT - right :][:, :height, :width]


def moves(samples: int, epoch: int) -> list[tuple[int, int, int]]:
    """Return (down, right, mirrored) of each sample, drawn from a seed of (seed, epoch)."""
    digest = hashlib.sha256(f"augment seed={SEED} epoch={epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    down, right = torch.randint(-SHIFT, SHIFT + 1, (2, samples), generator=generator)
    (mirrored,) = torch.randint(0, 2, (1, samples), generator=generator)
    return list(zip(down.tolist(), right.tolist(), mirrored.tolist(), strict=True))


def train_by_hand(
    model: torch.nn.Module, train, test, cosine: bool, largest_norm: float, average: torch.nn.Module | None
) -> list[dict[str, float]]:
    """Train with SGD and Nesterov momentum in plain PyTorch and float64. Return the metrics of each epoch.

    `average` is a copy of the model, which becomes the moving average of its weights and is evaluated in its place.
    """
    normal = lambda images: (images.double() / 255 - MEAN) / STD  # noqa: E731
    velocity = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    steps, step, clipped, records = math.ceil(len(train.targets) / BATCH) * EPOCHS, 0, 0, []
    for epoch in range(1, EPOCHS + 1):
        model.train()
        order = torch.randperm(len(train.targets), generator=torch.Generator().manual_seed(SEED + epoch))
        movement, loss_sum, correct = moves(len(order), epoch), 0.0, 0
        for index in order.split(BATCH):
            images = normal(torch.stack([moved(train.images[i], *movement[i]) for i in index.tolist()]))
            model.zero_grad()
            for micro_batch, targets in zip(images.chunk(ACCUMULATE), train.targets[index].chunk(ACCUMULATE), strict=True):
                logits = model(micro_batch)
                loss = F.cross_entropy(logits, targets, reduction="sum")
                (loss / len(index)).backward()
                loss_sum, correct = loss_sum + loss.item(), correct + (logits.argmax(1) == targets).sum().item()
            norm = math.sqrt(sum((parameter.grad**2).sum().item() for parameter in model.parameters()))
            clipped += norm > largest_norm
            after = (step - WARMUP) / (steps - WARMUP)
            shape = (step + 1) / (WARMUP + 1) if step < WARMUP else (1 + math.cos(math.pi * after)) / 2 if cosine else 1.0
            for name, parameter in model.named_parameters():
                gradient = parameter.grad * min(1.0, largest_norm / norm) + WEIGHT_DECAY * parameter.detach()
                velocity[name] = gradient if step == 0 else MOMENTUM * velocity[name] + gradient
                parameter.data -= LR * shape * (gradient + MOMENTUM * velocity[name])
            for name, value in average.state_dict().items() if average else ():
                now = model.state_dict()[name]
                value.copy_(EMA * value + (1 - EMA) * now if value.is_floating_point() else now)
            step += 1
        model.eval()
        tested = average.eval() if average else model
        with torch.no_grad():
            logits = tested(normal(test.images))
        records.append(
            {
                "train_loss": loss_sum / len(order),
                "train_accuracy": correct / len(order),
                "test_loss": F.cross_entropy(logits, test.targets).item(),
                "test_accuracy": (logits.argmax(1) == test.targets).double().mean().item(),
                "lr": LR * shape,
            }
        )
    assert steps / 3 < clipped < steps, "if every step is clipped, a gradient that is wrong by a factor goes undetected"
    return records


@pytest.mark.parametrize(
    ("line", "model", "overrides", "cosine"),
    [
        ("python train.py", "lenet", ["model.init_std=0.1", f"batch_size={BATCH}", "scheduler=constant"], False),
        (
            "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp",
            "lenet",
            ["model.init_std=0.1", "scaling=weak", f"batch_size={BATCH // 2}", "data.loader=workers"],
            True,
        ),
        ("python train.py", "narrow", [*NARROW, f"batch_size={BATCH}", f"ema={EMA}"], True),
    ],
    ids=["lenet", "lenet-ddp", "batch_norm"],
)
def test_train_equals_a_loop_written_by_hand(line, model, overrides, cosine, tmp_path):
    largest_norm = LARGEST_NORM[model]
    code, output = launch(line, *CHANGED, *overrides, f"max_grad_norm={largest_norm}", f"runs_dir={tmp_path}", "name=run")
    assert code == 0, output
    make, _, size = MODELS[model]
    dataset = Synthetic(101, 53, 3, size, 10).load()
    torch.manual_seed(SEED)
    network = make(3, size, 10, 0.1 if model == "lenet" else None)
    average = copy.deepcopy(network.double()) if f"ema={EMA}" in overrides else None
    expected = train_by_hand(network.double(), dataset.train, dataset.test, cosine, largest_norm, average)
    metrics = read_metrics(tmp_path / "run")
    assert [{key: record[key] for key in expected[0]} for record in metrics] == [
        pytest.approx(record, rel=1e-5) for record in expected
    ]
    saved = torch.load(max((tmp_path / "run" / "checkpoints").glob("step_*.pt")), weights_only=True)
    assert largest_difference(saved["model"], network.state_dict()) <= 1e-6
    if average:
        assert largest_difference(saved["ema"], average.state_dict()) <= 1e-6
