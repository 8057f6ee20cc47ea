"""What fsdp and mesh keep, in which precision, and gather."""

import collections

import pytest
import torch
from configs import config
from small_networks import make_model
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import run_world

from ddp_lab.config.build import call_target
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import local
from ddp_lab.training.optimizer import configure_optimizer
from ddp_lab.world.runtime import Runtime

SHARDING = {"fsdp": "strategy=fsdp", "mesh": "strategy=mesh strategy.shard=null"}


def strategy_of(options: str, runtime: Runtime, model: torch.nn.Module) -> Strategy:
    strategy = call_target(config(*options.split()).strategy, runtime)
    strategy.partition(model, 4)
    return strategy


def set_up(name: str, runtime: Runtime) -> Strategy:
    model = make_model("vit", 0)
    strategy = strategy_of(SHARDING[name], runtime, model)
    strategy.setup(model)
    return strategy


class Counter(TorchDispatchMode):
    """Counts the calls of each operation, like CommDebugMode.

    Its hooks fail with accumulation on torch 2.11.
    """

    def __init__(self):
        super().__init__()
        self.calls = collections.Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.calls[function] += 1
        return function(*arguments, **keywords or {})


GPU = torch.device("cuda")  # only its type is read


def train_in_bf16() -> dict[str, tuple[dict[str, set], torch.dtype, bool, float]]:
    """Take a step under each sharding strategy, with fused AdamW.

    Returns:
        By strategy: the types of the weights, gradients and states; the type of the weights in a
        block's forward pass; whether a gradient is a sum that bf16 cannot represent; and how far
        AdamW's step is from that of its simplest form.
    """
    results = {}
    with Runtime("cpu", precision="bf16") as runtime:
        runtime.open_group()
        for name in SHARDING:
            strategy = set_up(name, runtime)
            results[name] = step_in_bf16(strategy)
            del strategy
    return results


def step_in_bf16(strategy: Strategy) -> tuple[dict[str, set], torch.dtype, bool, float]:
    used = []
    strategy.module.block0.fc1.register_forward_hook(
        lambda layer, *_: used.append(layer.weight.dtype)
    )
    with torch.no_grad():
        # it is 0 at first, and so are the gradients of the blocks
        strategy.module.head.linear.weight.fill_(0.1)
    parameters = list(strategy.module.parameters())
    optimizer = configure_optimizer(
        torch.optim.AdamW(strategy.module.parameters(), lr=0.1), GPU, None, False, False
    )
    torch.manual_seed(strategy.dp_rank)
    strategy.forward_backward(torch.randn(4, 3, 16, 16), torch.arange(4), 8)
    gradients = [local(parameter.grad).clone() for parameter in parameters]
    single = [torch.nn.Parameter(local(parameter.detach()).clone()) for parameter in parameters]
    for parameter, gradient in zip(single, gradients, strict=True):
        parameter.grad = gradient
    torch.optim.AdamW(single, lr=0.1, foreach=False, fused=False).step()
    optimizer.step()
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    assert optimizer.param_groups[0]["fused"] is True
    kept = {
        "weights": {parameter.dtype for parameter in parameters},
        "gradients": {gradient.dtype for gradient in gradients},
        "state": {tensor.dtype for state in optimizer.state.values() for tensor in state.values()},
    }
    summed_in_float32 = any(
        bool((gradient.bfloat16().float() != gradient).any()) for gradient in gradients
    )
    apart = max(
        (local(parameter) - other).abs().max().item()
        for parameter, other in zip(parameters, single, strict=True)
        if other.numel()
    )
    return kept, used[0], summed_in_float32, apart


def test_bf16_computes_with_copies_of_weights_that_are_kept_summed_and_updated_in_float32():
    for rank in run_world(2, train_in_bf16):
        for kept, used, summed_in_float32, apart in rank.values():
            assert kept == {key: {torch.float32} for key in ("weights", "gradients", "state")}
            assert used == torch.bfloat16
            assert summed_in_float32
            assert apart <= 1e-6, "fused AdamW differs from its simplest form on shards"


def gathers() -> dict[str, list[int]]:
    """Return the all_gathers in three steps of each strategy, the last after an evaluation."""
    results = collections.defaultdict(list)
    images = torch.ones(4, 3, 16, 16)
    targets = torch.arange(4)
    with Runtime("cpu", timeout=30) as runtime:
        runtime.open_group()
        for name in SHARDING:
            strategy = set_up(name, runtime)
            for evaluations in (0, 0, 2):
                for _ in range(evaluations):
                    strategy.predict(images)
                with Counter() as counter:
                    strategy.forward_backward(images, targets, global_size=8, accumulate=2)
                results[name].append(
                    sum(
                        calls
                        for function, calls in counter.calls.items()
                        if "allgather" in str(function)
                    )
                )
            del strategy
    return results


@pytest.mark.slow
def test_evaluation_does_not_change_what_a_step_gathers():
    """Otherwise the backward pass gathers one part too many.

    The next forward pass would then compute with wrong parameters.
    """
    for first, before, after in run_world(2, gathers)[0].values():
        assert 0 < first == before == after
