"""Layers that write to their weights in a forward pass are refused if ranks have other samples."""

from functools import partial

import pytest
import torch
from slow_rows import slow_but
from torch import nn
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError

SGD = partial(torch.optim.SGD, lr=0.1)


def message_of(strategy: str, layer: str) -> str:
    embedding = getattr(nn, layer)(5, 3, max_norm=0.5)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(3, 1))
    with Lab(strategy, device="cpu", timeout=30) as lab:
        try:
            sample = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
            lab.trainer(model, tasks.Regression(), SGD, batch_size=4, example=sample)
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "strategy",
    slow_but(["ddp", "pipeline"], ["scratch", "ddp", "fsdp", "tp", "pipeline", "mesh"]),
)
@pytest.mark.parametrize("layer", slow_but(["Embedding"], ["Embedding", "EmbeddingBag"]))
def test_max_norm_is_refused_by_name_on_several_ranks(strategy, layer):
    first, second = run_world(2, message_of, strategy, layer)
    assert first == second
    assert first.startswith(
        f"strategy={strategy}: the layer 0 has max_norm=0.5: it changes its weights in a "
    )


def test_max_norm_is_allowed_on_one_device():
    assert message_of("single", "Embedding") == ""
