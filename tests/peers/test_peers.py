"""The same training by torch's DDP and FSDP2, by Accelerate and by Lightning Fabric, against ours.

`expected` computes, in one process and without any of these libraries, what each of them means by
the loss of a step. So a difference is not only measured, its cause is proven.
"""

from collections.abc import Callable, Sequence

import peer_training
import pytest
import torch
from peer_data import (
    ACCUMULATE,
    BATCH,
    MAX_NORM,
    RANKS,
    Weights,
    local_mean,
    loss_sum,
    net,
    samples,
    sgd,
    weights_of,
)
from torch.nn.utils import clip_grad_norm_
from worlds import once, run_world

pytestmark = pytest.mark.slow

TOLERANCE = 1e-12
UNCLIPPED = 1e9  # a largest norm that no gradient reaches
PEERS = ["ddp", "fsdp2", "accelerate", "fabric"]
STRATEGIES = ["single", "scratch", "ddp", "fsdp"]
COMPLETE = 2 * BATCH  # samples of two complete batches
REPEATED = COMPLETE + 5  # the last batch has 5 samples, of which the ranks have 3 and 2
SHORT = COMPLETE + 4  # the last batch has 4 samples: one micro-batch of each rank in place of two

MicroBatches = Sequence[Sequence[int]]  # of all ranks in one step, as numbers of samples


@once
def peer(
    name: str, number: int, weighted: bool, by_global_weight: bool, max_norm: float = MAX_NORM
) -> Weights:
    function = getattr(peer_training, name)
    first, second = run_world(
        RANKS, function, number, weighted, by_global_weight, max_norm, timeout=60
    )
    assert difference(first, second) == 0
    return first


@once
def ours(strategy: str, number: int, weighted: bool, max_norm: float = MAX_NORM) -> Weights:
    ranks = 1 if strategy == "single" else RANKS
    return run_world(ranks, peer_training.ours, strategy, number, weighted, max_norm, timeout=60)[0]


def difference(one: Weights, other: Weights) -> float:
    """Return the largest difference of two trainings' weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def train(
    number: int,
    weighted: bool,
    steps: Sequence[MicroBatches],
    loss_of: Callable,
    max_norm: float = MAX_NORM,
) -> Weights:
    """Train on one device; `loss_of` returns the loss of a step for its micro-batches."""
    data = samples(number, weighted)
    model = net()
    optimizer = sgd(model.parameters())
    for step in steps:
        loss_of(model, [data[list(indices)] for indices in step]).backward()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def mean_of_means(model, micro_batches) -> torch.Tensor:
    """Return the mean over ranks and micro-batches of their local means; a missing one is 0."""
    means = [local_mean(model(inputs), targets) for inputs, targets in micro_batches]
    return torch.stack(means).sum() / (RANKS * ACCUMULATE)


def global_mean(model, micro_batches) -> torch.Tensor:
    """Return the mean over all samples of a step: weighted losses by the sum of the weights."""
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    return loss_sum(model(inputs), targets) / targets[:, 1].sum()


def strided(step: int, *local_batches: int) -> MicroBatches:
    """Return the micro-batches of DistributedSampler, which deals samples to ranks in turn."""
    start = step * BATCH
    return [
        [start + rank + RANKS * (2 * part + position) for position in range(size)]
        for part, size in enumerate(local_batches)
        for rank in range(RANKS)
    ]


def consecutive(step: int) -> MicroBatches:
    """Return the micro-batches of a complete batch by Accelerate, which deals them in turn."""
    start = step * BATCH
    return [[start + first, start + first + 1] for first in range(0, BATCH, 2)]


def complete(name: str) -> list[MicroBatches]:
    if name == "accelerate":
        return [consecutive(0), consecutive(1)]
    return [strided(0, 2, 2), strided(1, 2, 2)]


ALL_SAMPLES = [[range(BATCH)], [range(BATCH, 2 * BATCH)]]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("number", [COMPLETE, REPEATED, SHORT])
def test_our_step_is_the_mean_over_the_weights_of_the_global_batch(strategy, number):
    steps = [*ALL_SAMPLES, [range(2 * BATCH, number)]] if number > COMPLETE else ALL_SAMPLES
    expected = train(number, True, steps, global_mean)
    assert difference(ours(strategy, number, True), expected) <= TOLERANCE


@pytest.mark.parametrize("name", PEERS)
def test_equal_weights_and_complete_batches_agree(name):
    assert difference(peer(name, COMPLETE, False, False), ours("ddp", COMPLETE, False)) <= TOLERANCE


@pytest.mark.parametrize("name", PEERS)
def test_peer_that_divides_by_the_global_weight_agrees(name):
    assert difference(peer(name, COMPLETE, True, True), ours("fsdp", COMPLETE, True)) <= TOLERANCE


@pytest.mark.parametrize("name", PEERS)
def test_peer_with_unequal_weights_takes_the_mean_of_local_means(name):
    weights = peer(name, COMPLETE, True, False)
    expected = train(COMPLETE, True, complete(name), mean_of_means)
    assert difference(weights, expected) <= TOLERANCE
    assert difference(weights, ours("ddp", COMPLETE, True)) > 0.01


@pytest.mark.parametrize("name", PEERS)
def test_peer_with_a_partial_batch_counts_repeated_samples(name):
    """Sample 0 is repeated by DistributedSampler; 0, 1 and 2 by Accelerate (even_batches)."""
    last = [[16, 18], [17, 19], [20], [0]]
    if name == "accelerate":
        last = [[16, 17], [18, 19], [20, 0], [1, 2]]
    weights = peer(name, REPEATED, False, False)
    expected = train(REPEATED, False, [*complete(name), last], mean_of_means)
    assert difference(weights, expected) <= TOLERANCE
    assert difference(weights, ours("ddp", REPEATED, False)) > 0.001


@pytest.mark.parametrize("name", PEERS)
def test_peer_with_missing_micro_batches_divides_by_all_of_them(name):
    """The gradient of the last step is half as large; Fabric's documented loop never takes it."""
    last = [[16, 17], [18, 19]] if name == "accelerate" else strided(2, 2)
    steps = complete(name) if name == "fabric" else [*complete(name), last]
    weights = peer(name, SHORT, False, False, UNCLIPPED)
    expected = train(SHORT, False, steps, mean_of_means, UNCLIPPED)
    assert difference(weights, expected) <= TOLERANCE
    assert difference(weights, ours("ddp", SHORT, False, UNCLIPPED)) > 0.001


@pytest.mark.parametrize("name", [name for name in PEERS if name != "fabric"])
def test_clipping_hides_a_gradient_that_is_half_as_large(name):
    """Up to the 1e-6 that clip_grad_norm_ adds to the norm by which it divides."""
    weights = peer(name, SHORT, False, False)
    assert 1e-9 < difference(weights, ours("ddp", SHORT, False)) < 1e-6
