"""Compare train.py with a training loop written by hand that shares only networks and images.

The other end-to-end tests compare runs of train.py with each other, so they cannot detect an error
that all runs have. Here every key that changes numbers differs from its default.
"""

import copy
import hashlib
import math
from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from launches import NARROW, main_in_world, newest, read_metrics
from small_networks import MODELS
from training import largest_difference
from worlds import run_world

from ddp_lab.data.datasets import Synthetic

SEED = 6
EPOCHS = 2
BATCH = 20
ACCUMULATE = 2
SHIFT = 2
MEAN = 0.3
STD = 0.4
LR = 0.03 * math.sqrt(BATCH / 5)
MOMENTUM = 0.8
WEIGHT_DECAY = 0.01
SMOOTHING = 0.1
MIXUP = 0.4
CUTMIX = 1.0
# With some other seeds and norms, the hand-written loop itself differs by 1e-4 between float32 and
# float64 (a ReLU switches).
LARGEST_NORM = {"lenet": 1.5, "narrow": 0.55}  # max_grad_norm, by model
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
    "decay_norms_and_biases=false",
    f"loss.label_smoothing={SMOOTHING}",
    f"mixup={MIXUP}",
    f"cutmix={CUTMIX}",
    f"data.mean=[{MEAN}]",
    f"data.std=[{STD}]",
    f"data.crop_padding={SHIFT}",
    "data.flip=true",
]


def moved(image: torch.Tensor, down: int, right: int, mirrored: int) -> torch.Tensor:
    """Return one image, shifted and perhaps mirrored, cropped from a copy with a zero border."""
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


def mixed(
    images: torch.Tensor, targets: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and target probabilities.

    Those of a full batch are mixed as drawn from a seed of (seed, step).
    """
    wanted = F.one_hot(targets, 10).double()
    if len(images) < BATCH:
        return images, wanted
    random = Random(
        int.from_bytes(hashlib.sha256(f"mix seed={SEED} step={step}".encode()).digest(), "big")
    )
    partners = images.roll(BATCH // 2, 0)
    images = images.clone()
    size = images.shape[-1]
    if random.random() < 0.5:
        half = int(size * math.sqrt(1 - random.betavariate(CUTMIX, CUTMIX)) / 2)
        y = random.randrange(size)
        x = random.randrange(size)
        rows, columns = (slice(max(0, center - half), center + half) for center in (y, x))
        images[..., rows, columns] = partners[..., rows, columns]
        weight = 1 - images[0, 0, rows, columns].numel() / size**2
    else:
        weight = random.betavariate(MIXUP, MIXUP)
        images = weight * images + (1 - weight) * partners
    return images, weight * wanted + (1 - weight) * wanted.roll(BATCH // 2, 0)


def train_by_hand(
    model: torch.nn.Module,
    train,
    test,
    shape_of: Callable[[float, float], float],
    largest_norm: float,
    average: torch.nn.Module | None,
) -> list[dict[str, float]]:
    """Train with SGD and Nesterov momentum in plain PyTorch and float64.

    Return the metrics of each epoch.

    `average` is a copy of the model, which becomes the moving average of its weights and is
    evaluated in its place.
    """
    normal = lambda images: (images.double() / 255 - MEAN) / STD  # noqa: E731
    velocity = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    steps = math.ceil(len(train.targets) / BATCH) * EPOCHS
    step = 0
    clipped = 0
    records = []
    for epoch in range(1, EPOCHS + 1):
        model.train()
        order = torch.randperm(
            len(train.targets), generator=torch.Generator().manual_seed(SEED + epoch)
        )
        movement = moves(len(order), epoch)
        loss_sum = 0.0
        correct = 0
        for index in order.split(BATCH):
            images = normal(
                torch.stack([moved(train.inputs[i], *movement[i]) for i in index.tolist()])
            )
            images, wanted = mixed(images, train.targets[index], step)
            model.zero_grad()
            for micro_batch, targets in zip(
                images.chunk(ACCUMULATE), wanted.chunk(ACCUMULATE), strict=True
            ):
                logits = model(micro_batch)
                loss = -(((1 - SMOOTHING) * targets + SMOOTHING / 10) * logits.log_softmax(1)).sum()
                (loss / len(index)).backward()
                loss_sum = loss_sum + loss.item()
                correct = correct + (logits.argmax(1) == targets.argmax(1)).sum().item()
            norm = math.sqrt(
                sum((parameter.grad**2).sum().item() for parameter in model.parameters())
            )
            clipped += norm > largest_norm
            after = (step - WARMUP) / (steps - WARMUP)
            shape = (
                (step + 1) / (WARMUP + 1)
                if step < WARMUP
                else shape_of(after, step / (steps / EPOCHS))
            )
            for name, parameter in model.named_parameters():
                decay = WEIGHT_DECAY if parameter.dim() > 1 else 0
                gradient = (
                    parameter.grad * min(1.0, largest_norm / norm) + decay * parameter.detach()
                )
                velocity[name] = gradient if step == 0 else MOMENTUM * velocity[name] + gradient
                parameter.data -= LR * shape * (gradient + MOMENTUM * velocity[name])
            ema = min(EMA, (1 + step) / (10 + step))
            for name, value in average.state_dict().items() if average else ():
                now = model.state_dict()[name]
                value.copy_(ema * value + (1 - ema) * now if value.is_floating_point() else now)
            step += 1
        model.eval()
        tested = average.eval() if average else model
        with torch.no_grad():
            logits = tested(normal(test.inputs))
        records.append(
            {
                "train_loss": loss_sum / len(order),
                "train_accuracy": correct / len(order),
                "test_loss": F.cross_entropy(logits, test.targets).item(),
                "test_accuracy": (logits.argmax(1) == test.targets).double().mean().item(),
                "lr": LR * shape,
            }
        )
    assert steps / 3 < clipped < steps, (
        "if every step is clipped, a gradient that is wrong by a factor goes undetected"
    )
    return records


@pytest.mark.parametrize(
    ("ranks", "model", "overrides", "shape_of"),
    [
        (
            1,
            "lenet",
            ["model.init_std=0.1", f"batch_size={BATCH}", "scheduler=constant"],
            lambda progress, epoch: 1.0,
        ),
        (
            2,
            "lenet",
            [
                "strategy=ddp",
                "model.init_std=0.1",
                "scaling=weak",
                f"batch_size={BATCH // 2}",
                "data.loader=workers",
            ],
            lambda progress, epoch: (1 + math.cos(math.pi * progress)) / 2,
        ),
        (
            1,
            "narrow",
            [
                *NARROW,
                f"batch_size={BATCH}",
                "scheduler=multi_step",
                "scheduler.milestones=[1,1.5,1.5,9]",
                "scheduler.gamma=0.5",
                f"ema={EMA}",
            ],
            lambda progress, epoch: 0.5 ** ((epoch >= 1) + 2 * (epoch >= 1.5)),
        ),
    ],
    ids=["lenet", "lenet-ddp", "batch_norm"],
)
def test_train_equals_a_loop_written_by_hand(ranks, model, overrides, shape_of, tmp_path):
    largest_norm = LARGEST_NORM[model]
    run_world(
        ranks,
        main_in_world,
        *CHANGED,
        *overrides,
        f"max_grad_norm={largest_norm}",
        f"runs_dir={tmp_path}",
        "name=run",
    )
    make, _, size = MODELS[model]
    dataset = Synthetic(101, 53, 3, size, 10).load()
    torch.manual_seed(SEED)
    network = make(3, size, 10, 0.1 if model == "lenet" else None)
    average = copy.deepcopy(network.double()) if f"ema={EMA}" in overrides else None
    expected = train_by_hand(
        network.double(), dataset.train, dataset.test, shape_of, largest_norm, average
    )
    metrics = read_metrics(tmp_path / "run")
    assert [{key: record[key] for key in expected[0]} for record in metrics] == [
        pytest.approx(record, rel=1e-5) for record in expected
    ]
    saved = newest(tmp_path / "run")
    assert largest_difference(saved["model"], network.state_dict()) <= 1e-6
    if average:
        assert largest_difference(saved["ema"], average.state_dict()) <= 1e-6
