"""The memory that strategies need for gradients and training state, and the data types of what they keep."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from training import make_model
from worlds import once, run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.speed.options import PerformanceOptions, configure_optimizer
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.sharding import local
from ddp_lab.world.runtime import Runtime


def spans_of(view: bool) -> tuple[list[range], list[range]]:
    """Return the addresses of ddp's buckets and of the gradients, after the second of two steps."""
    buckets: list[range] = []

    def noting(group, bucket):
        buckets.append(addresses(bucket.buffer()))
        return allreduce_hook(group, bucket)

    with Runtime("cpu") as runtime:
        runtime.open_group()
        strategy = DDP(runtime, "local", 0.1, view, False, "none")
        strategy.setup(make_model("lenet", 0))
        strategy.wrapper.register_comm_hook(None, noting)
        optimizer = torch.optim.SGD(strategy.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            buckets.clear()
            strategy.forward_backward(torch.randn(4, 1, 28, 28), torch.arange(4), 4)
        gradients = [addresses(parameter.grad) for parameter in strategy.parameters()]
        del strategy, optimizer
    return buckets, gradients


def addresses(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


@pytest.mark.parametrize("view", [True, False])
def test_gradients_of_ddp_take_no_memory_besides_the_buckets_if_they_are_views(view):
    buckets, gradients = spans_of(view)
    assert len(buckets) > 1
    assert sum(map(len, gradients)) == sum(map(len, buckets)) == 4 * 129_068
    inside = [
        any(bucket.start <= gradient.start < gradient.stop <= bucket.stop for bucket in buckets) for gradient in gradients
    ]
    assert inside == [view] * len(gradients)


SHARDING = {"fsdp": (FSDP, (True, "local", None)), "mesh": (Mesh, (None, None, 1, 1, False, "1f1b", 4, None, None, "local"))}
GPU = torch.device("cuda")  # only its type is read


def train_in_bf16() -> dict[str, tuple[dict[str, set], torch.dtype, bool, float]]:
    """Take a step under each sharding strategy, with fused AdamW.

    Returns:
        By strategy: the types of the weights, gradients and states; the type of the weights in a block's forward pass; whether
        a gradient is a sum that bf16 cannot represent; and how far AdamW's step is from that of its simplest form.
    """
    found = {}
    with Runtime("cpu", precision="bf16") as runtime:
        runtime.open_group()
        for name, (strategy_of, options) in SHARDING.items():
            strategy = strategy_of(runtime, *options)
            model = make_model("vit", 0)
            strategy.partition(model, 4)
            strategy.setup(model)
            found[name] = step_in_bf16(strategy)
            del strategy, model
    return found


def step_in_bf16(strategy: Strategy) -> tuple[dict[str, set], torch.dtype, bool, float]:
    used = []
    strategy.module.block0.fc1.register_forward_hook(lambda layer, *_: used.append(layer.weight.dtype))
    with torch.no_grad():
        strategy.module.head.linear.weight.fill_(0.1)  # it is 0 at first, and so are the gradients of the blocks
    parameters = list(strategy.parameters())
    optimizer = configure_optimizer(torch.optim.AdamW(strategy.parameters(), lr=0.1), PerformanceOptions(), GPU)
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
    summed_in_float32 = any(bool((gradient.bfloat16().float() != gradient).any()) for gradient in gradients)
    apart = max((local(own) - other).abs().max().item() for own, other in zip(parameters, single, strict=True) if other.numel())
    return kept, used[0], summed_in_float32, apart


@once
def trained_in_bf16() -> list[dict]:
    return run_world(2, train_in_bf16)


@pytest.mark.parametrize("name", SHARDING)
def test_bf16_computes_with_copies_of_weights_that_are_kept_and_summed_in_float32(name):
    for rank in trained_in_bf16():
        kept, used, summed_in_float32, _ = rank[name]
        assert kept == {key: {torch.float32} for key in ("weights", "gradients", "state")}
        assert used == torch.bfloat16
        assert summed_in_float32


@pytest.mark.parametrize("name", SHARDING)
def test_fused_adamw_takes_the_step_of_the_simplest_adamw_on_shards(name):
    assert all(rank[name][-1] <= 1e-6 for rank in trained_in_bf16())


@pytest.mark.parametrize(
    ("options", "device", "fused"),
    [
        ({}, GPU, True),
        ({}, torch.device("cpu"), None),
        ({"fused": False}, GPU, False),
        ({"foreach": False}, GPU, None),
    ],
)
def test_adamw_is_fused_on_gpus_unless_the_config_or_the_strategy_says_otherwise(options, device, fused):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], **options)
    assert configure_optimizer(optimizer, PerformanceOptions(), device).param_groups[0]["fused"] is fused


@pytest.mark.parametrize("name", SHARDING)
def test_models_with_buffers_are_refused_with_the_state_on_the_host(name):
    strategy_of, options = SHARDING[name]
    strategy = strategy_of(Runtime("cpu"), *options, offload=True)
    with pytest.raises(
        ConfigError, match=r"strategy.offload=true: is not supported by models with buffers.* has stem.1.running"
    ):
        strategy.partition(make_model("narrow", 0), 4)
