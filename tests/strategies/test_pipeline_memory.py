"""The activations that docs/strategies.md promises, counted on a rank of a fake group."""

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from traffic import set_up, step, world

MICRO_BATCHES = 8
STAGES = 4


@dataclass
class Saved:
    """Elements of the tensors that autograd keeps for the backward pass."""

    now: int = 0
    peak: int = 0
    total: int = 0

    def keep(self, tensor: torch.Tensor) -> "Kept":
        size = tensor.numel()
        self.now += size
        self.total += size
        self.peak = max(self.peak, self.now)
        kept = Kept(tensor)
        weakref.finalize(kept, self.free, size)
        return kept

    def free(self, size: int) -> None:
        self.now -= size


class Kept:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def kept_micro_batches(monkeypatch: Any, case: str, rank: int) -> float:
    """Return the most micro-batches whose activations a rank keeps at a time."""
    saved = Saved()
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda kept: kept.tensor)
    with world(monkeypatch, rank, STAGES) as runtime:
        strategy = set_up(f"{case} num_microbatches={MICRO_BATCHES}", runtime, "lenet", 1)
        with hooks:
            step(strategy, 1)
    assert saved.now == 0
    return saved.peak / (saved.total / MICRO_BATCHES)


@pytest.mark.parametrize("rank", range(STAGES))
def test_gpipe_keeps_the_activations_of_all_micro_batches(rank, monkeypatch):
    assert kept_micro_batches(monkeypatch, "pipeline schedule=gpipe", rank) == MICRO_BATCHES


@pytest.mark.parametrize("rank", range(STAGES))
def test_1f1b_keeps_those_of_as_many_micro_batches_as_stages_follow(rank, monkeypatch):
    """The first stage keeps the most: those of as many micro-batches as there are stages."""
    case = "pipeline schedule=1f1b"
    assert kept_micro_batches(monkeypatch, case, rank) == STAGES - rank
