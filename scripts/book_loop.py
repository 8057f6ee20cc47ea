"""Train the ResNet-18 of Dive into Deep Learning, section 13.6, with the training loop of that section.

    python scripts/book_loop.py --data-root data                         a new network for each run
    python scripts/book_loop.py --data-root data --keep                  one network for all batch sizes, as in section 13.6
    python scripts/book_loop.py --data-root data --keep --lazy           also with lazy convolutions
    python scripts/book_loop.py --smoke                                  seconds on a CPU, on random images

The script is a reference for experiment=book_resnet18. It uses nn.DataParallel, plain SGD, cross-entropy, shuffled batches and
a partial last batch. Only the network is from ddp_lab: a new one has the weights with which `train.py experiment=book_resnet18
seed=N` begins. The images are kept on the device instead of being loaded by DataLoader processes. Every run prints one line and
appends a line of JSON to --json.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from ddp_lab.models.book_resnet import Residual, book_resnet18, draw_weights

Samples = tuple[torch.Tensor, torch.Tensor]  # uint8 [n, 1, 28, 28] and int64 [n]


def load(root: Path, device: torch.device) -> tuple[Samples, Samples]:
    """Return the training and test samples of Fashion-MNIST on the device."""
    from torchvision.datasets import FashionMNIST

    try:
        splits = [FashionMNIST(str(root), train, download=False) for train in (True, False)]
    except RuntimeError:
        sys.exit(f"error: --data-root {root}: FashionMNIST not found; expected its four files in {root}/FashionMNIST/raw")
    return tuple((split.data.unsqueeze(1).to(device), split.targets.to(device)) for split in splits)


def random_samples(device: torch.device) -> tuple[Samples, Samples]:
    """Return 64 training and 32 test samples of random pixels and classes on the device."""
    sizes = (64, 32)
    return tuple((torch.randint(256, (n, 1, 28, 28)).byte().to(device), torch.randint(10, (n,)).to(device)) for n in sizes)


def lazy_weights(net: nn.Module) -> None:
    """Give residual blocks torch's default weights.

    In section 13.6 their convolutions are LazyConv2d until the first batch. The initialiser, which tests
    `type(m) in [nn.Linear, nn.Conv2d]`, therefore skips them in the first run of a network object.
    """
    for block in net.modules():
        if isinstance(block, Residual):
            for layer in block.modules():
                if isinstance(layer, nn.Conv2d):
                    nn.init.kaiming_uniform_(layer.weight, a=5**0.5)


@torch.no_grad()
def accuracy(net: nn.Module, samples: Samples, batch_size: int) -> float:
    """Return the fraction of samples that the network classifies correctly."""
    net.eval()
    batches = zip(*(part.split(batch_size) for part in samples), strict=True)
    return sum((net(x.float() / 255).argmax(1) == y).sum().item() for x, y in batches) / len(samples[1])


def train(
    net: nn.Module, devices: list[torch.device], data: tuple[Samples, Samples], batch: int, lr: float, epochs: int
) -> list[float]:
    """Return the test accuracy after each epoch."""
    (images, targets), test = data
    if devices:
        net = nn.DataParallel(net, device_ids=devices)
    trainer, loss, accuracies = torch.optim.SGD(net.parameters(), lr), nn.CrossEntropyLoss(), []
    for _ in range(epochs):
        net.train()
        for indices in torch.randperm(len(images)).to(images.device).split(batch):
            trainer.zero_grad()
            loss(net(images[indices].float() / 255), targets[indices]).backward()
            trainer.step()
        accuracies.append(accuracy(net, test, batch))
    return accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.1, 0.2, 0.4], help="learning rates, one per batch size")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--keep", action="store_true", help="redraw only the weights and keep biases and BatchNorm's state")
    parser.add_argument("--lazy", action="store_true", help="give a new network's residual blocks torch's default weights")
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[1], help="number of GPUs, for all batch sizes or one per batch size; 0: the CPU"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="file to which a line of JSON is appended for each run")
    parser.add_argument("--smoke", action="store_true", help="random images, 1 epoch, on the CPU")
    args = parser.parse_args()
    gpus = [0] if args.smoke else args.gpus
    gpus = gpus * len(args.batches) if len(gpus) == 1 else gpus
    for option, values in (("--lrs", args.lrs), ("--gpus", gpus)):
        if len(values) != len(args.batches):
            parser.error(f"{option}: expected {len(args.batches)} values, one per batch size of --batches, got {len(values)}")
    if max(gpus) > torch.cuda.device_count():
        parser.error(
            f"--gpus {max(gpus)}: only {torch.cuda.device_count()} GPUs are visible; use --gpus 0 or --smoke to run on the CPU"
        )
    device = torch.device("cuda", 0) if max(gpus) else torch.device("cpu")
    data = random_samples(device) if args.smoke else load(args.data_root, device)

    for seed in args.seeds:
        net = None
        for batch, lr, count in zip(args.batches, args.lrs, gpus, strict=True):
            torch.manual_seed(seed)
            first = net is None or not args.keep
            if first:
                net = book_resnet18(1, 28, 10, init_std=0.01).to(device)
            else:
                draw_weights(net, std=0.01)
            if first and args.lazy:
                lazy_weights(net)
            devices = [torch.device("cuda", i) for i in range(count)]
            start = time.perf_counter()
            accuracies = train(net, devices, data, batch, lr, 1 if args.smoke else args.epochs)
            run = {"batch": batch, "lr": lr, "seed": seed, "gpus": count, "keep": args.keep, "lazy": args.lazy}
            run |= {"accuracies": accuracies, "seconds": round(time.perf_counter() - start, 1), "torch": torch.__version__}
            kind = ("kept object" if args.keep else "new object") + (", lazy" if args.lazy else "")
            last = " ".join(f"{value:.4f}" for value in accuracies[-3:])
            print(f"batch {batch}, lr {lr:g}, seed {seed}, {kind}: {last} ({run['seconds']} s)", flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(run) + "\n")


if __name__ == "__main__":
    main()
