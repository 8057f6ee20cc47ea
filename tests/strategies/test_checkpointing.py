"""Activation checkpointing: blocks are computed twice, and the result is the same to the last bit.

The equivalence matrix has more cases.
"""

from collections import Counter

import pytest
import torch
from configs import config
from small_networks import make_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import Outcome, run_cases
from worlds import once, run_world

from ddp_lab.config.build import call_target
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.run.speed import unsupported_options
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.checkpointing import Recomputed, recompute_blocks
from ddp_lab.world.runtime import Runtime

AGAIN = "checkpoint_activations=block"
DROPOUT = "regression model.dropout=0.5"
ALIKE = {
    1: [
        "single accumulate=2 vit clipped",
        f"single {DROPOUT}",
        "single narrow",
        "single own=vision_transformer data.dataset.channels=3",
        f"dp {DROPOUT}",
        f"split num_microbatches=3 {DROPOUT}",
    ],
    2: [
        f"scratch algorithm=bucketed {DROPOUT}",
        f"ddp accumulate=2 {DROPOUT}",
        "ddp batch_norm=sync narrow",
        "fsdp vit",
        f"fsdp {DROPOUT}",
        f"pipeline {DROPOUT}",
        "pipeline schedule=interleavedzerobubble",
        "ddp_pipeline pp=1 vit",
        "tp tp=2 vit",
        "tp lenet",
        "mesh pp=2 short",
        "mesh tp=2 sequence_parallel=true short",
    ],
}


@once
def outcomes(ranks: int) -> dict[str, Outcome]:
    """Return the outcome of each case, with and without activation checkpointing."""
    cases = [f"{case}{option}" for case in ALIKE[ranks] for option in ("", f" {AGAIN}")]
    return run_world(ranks, run_cases, cases, timeout=300)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "case"),
    [(ranks, case) for ranks, cases in ALIKE.items() for case in cases],
)
def test_weights_and_statistics_are_the_same_to_the_last_bit(ranks, case):
    by_case = outcomes(ranks)
    kept = by_case[case]
    again = by_case[f"{case} {AGAIN}"]
    assert kept.weights.keys() == again.weights.keys()
    assert all(torch.equal(kept.weights[name], again.weights[name]) for name in kept.weights)
    assert kept.sums == again.sums
    assert kept.evaluations == again.evaluations


class Calls(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **kwargs or {})


def backward_of_block(again: bool) -> tuple[list[int], list[torch.Tensor]]:
    """Return how often the backward pass of a block calls forward operations, and its gradients."""
    model = nn.Sequential(make_model("vit", 0).block0)
    if again:
        recompute_blocks(model, Recomputed(("0",), draws=False))
    torch.manual_seed(0)
    output = model(torch.randn(2, 16, 16, requires_grad=True))
    with Calls() as counter:
        output.sum().backward()
    kinds = (
        torch.ops.aten.addmm.default,
        torch.ops.aten.native_layer_norm.default,
        torch.ops.aten.gelu.default,
    )
    return [counter.calls[kind] for kind in kinds], [
        parameter.grad for parameter in model.parameters()
    ]


def test_backward_pass_computes_a_block_again():
    kept, gradients = backward_of_block(again=False)
    block, block_gradients = backward_of_block(again=True)
    assert kept == [0, 0, 0]
    assert block == [5, 2, 1]  # the result of the sixth layer, fc2, is not needed
    assert all(map(torch.equal, gradients, block_gradients))


def test_block_keeps_the_name_of_its_class_its_parameters_and_no_activations_in_evaluation():
    model = make_model("vit", 0)
    names = [*model.state_dict()]
    recompute_blocks(model, Recomputed(("block0", "elsewhere"), draws=True))
    assert type(model.block0).__name__ == type(model.block1).__name__
    assert isinstance(model.block0, type(model.block1))
    assert [*model.state_dict()] == names
    with torch.no_grad():
        assert torch.equal(model.block0(torch.ones(2, 16, 16)), model.block0(torch.ones(2, 16, 16)))


def strategy_of(name: str, model: nn.Module, *inputs: int) -> Strategy:
    strategy = call_target(config(f"strategy={name}").strategy, Runtime("cpu"))
    example = torch.empty(2, *inputs, device="meta") if inputs else None
    strategy.expect(example=example, checkpoint_activations="block")
    strategy.partition(model, 4)
    return strategy


class Lists(nn.Module):
    """A model with a list of blocks."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(layer, nn.Tanh()) for layer in layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


class Counting(nn.Linear):
    """A layer that counts its passes."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(input) / self.passes


class Caching(Lists):
    """A model that keeps the keys of earlier tokens, as those of transformers."""

    config = type("Config", (), {"use_cache": True})


def linear_layers(number: int = 2) -> list[nn.Module]:
    return [nn.Linear(3, 3) for _ in range(number)]


@pytest.mark.parametrize(
    ("strategy", "model", "message"),
    [
        ("single", nn.Linear(3, 3), "needs a model with blocks, and Linear has no list of several"),
        ("pipeline", Lists(*linear_layers()), "is not supported by strategy=pipeline for a model"),
        ("ddp", Caching(*linear_layers()), "the model has config.use_cache=True, so that its "),
        (
            "single",
            Lists(Counting(), *linear_layers()),
            "the buffer blocks.0.0.passes of the model changes in every",
        ),
    ],
)
def test_models_that_cannot_be_computed_twice_are_refused(strategy, model, message):
    with pytest.raises(ConfigError, match=f"^{AGAIN}: .*{message}") as error:
        strategy_of(strategy, model, 3)
    assert "se checkpoint_activations=none" in str(error.value)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_cuda_graph_is_supported_by_models_that_draw_nothing(dropout):
    model = Lists(*linear_layers())
    model.blocks.append(nn.Sequential(nn.Linear(3, 3), nn.Dropout(dropout)))
    strategy = strategy_of("single", model, 3)
    assert strategy.recomputed == (("blocks.0", "blocks.1", "blocks.2"), dropout > 0)
    strategy.device = torch.device("cuda")
    reason = unsupported_options(strategy, model).get("cuda_graph", "")
    assert bool(reason) == (dropout > 0)
    assert not reason or "keeps the state of the random generators on the host" in reason


def test_block_that_changes_its_input_is_reported():
    model = Lists(*linear_layers())
    model.blocks.append(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)))
    strategy = strategy_of("single", model, 3)
    strategy.setup(model)
    recompute_blocks(strategy.module, strategy.recomputed)
    with pytest.raises(TrainingError, match=r"the block blocks\.2 changes its input in place"):
        strategy.forward(torch.zeros(2, 3))


class Collects(nn.Module):
    """A block that adds its output to a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        outputs.append(self.layer(sum(outputs)).tanh())
        return sum(outputs)


def test_block_that_changes_a_list_gets_the_same_list_again():
    inputs = torch.ones(2, 3, requires_grad=True)
    gradients = []
    torch.manual_seed(0)
    block = Collects()
    for again in (False, True):
        model = nn.Sequential(block)
        if again:
            recompute_blocks(model, Recomputed(("0",), draws=False))
        (gradient,) = torch.autograd.grad(model([inputs]).square().sum(), inputs)
        gradients.append(gradient)
    assert torch.equal(*gradients)
