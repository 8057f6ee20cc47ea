"""A loss that compares the samples of the global batch: InfoNCE of two views of each sample.

python examples/contrastive.py, or torchrun --nproc_per_node=2 examples/contrastive.py ddp.
"""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ddp_lab import Lab, gather, own_rows

KEPT = 8  # numbers of a sample that both views have; in the others they differ


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
        first, second = (F.normalize(self.layers(view), dim=1) for view in (first, second))
        return {"first": first, "second": second}


def two_views(samples: int) -> TensorDataset:
    """Return two views of each sample, [32] each, of which 8 numbers are the same."""
    views = torch.randn(2, samples, 32)
    views[1, :, :KEPT] = views[0, :, :KEPT]
    return TensorDataset(*views)


def info_nce(outputs: dict[str, torch.Tensor], targets: None) -> torch.Tensor:
    """Return a loss for each sample of this rank: its second view, among those of all ranks."""
    similarity = outputs["first"] @ gather(outputs["second"]).T
    return F.cross_entropy(similarity / 0.1, own_rows(), reduction="none")


with Lab(strategy=sys.argv[1] if len(sys.argv) > 1 else "single", seed=0) as lab:
    training = two_views(1500)
    validation = two_views(200)
    adamw = partial(torch.optim.AdamW, lr=3e-3)
    # The two parts of a sample are the inputs; there is no target.
    trainer = lab.trainer(
        Encoder(), info_nce, adamw, batch_size=100, targets=None, example=training[0]
    )
    for epoch in range(3):
        for views, _ in trainer.batches(training, epoch):
            loss = trainer.step(views)
        lab.log(epoch=epoch + 1, train_loss=loss, **trainer.evaluate(validation))
