"""What is predicted of compiled blocks: they keep what AOTAutograd keeps, and elementwise operations become few kernels."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training import MODELS, make_model

from ddp_lab.estimate.blocks import Tracer
from ddp_lab.estimate.compiled import graphs_of
from ddp_lab.estimate.fusion import Kernel, kernels_of
from ddp_lab.estimate.memory import kept_by
from ddp_lab.estimate.planned import PlannedRuntime
from ddp_lab.estimate.recorder import key_of
from ddp_lab.estimate.trace import Traced, mixed_precision
from ddp_lab.strategies.loss import CrossEntropy
from ddp_lab.strategies.share import Share
from ddp_lab.strategies.single import Single

BATCH = 6


def records(name: str, precision: str, compiled: bool) -> dict[str, Traced]:
    _, channels, size = MODELS[name]
    tracer = Tracer(make_model(name, 0), CrossEntropy(), (channels, size, size), precision)
    return tracer.blocks(Single(PlannedRuntime(1, 1, precision)), Share(), BATCH, compiled)


def saved(name: str, precision: str) -> int:
    """Return the bytes that compiled blocks save, but for parameters, images and what the loss saves."""
    _, channels, size = MODELS[name]
    model, images = make_model(name, 0), torch.rand(BATCH, channels, size, size)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    torch.compiler.reset()
    for block in model.children():
        block.compile(backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mixed_precision(precision == "bf16"):
        assert model(images).requires_grad
    others = {key_of(tensor) for tensor in [*model.parameters(), images]}
    return sum({key_of(tensor): tensor.untyped_storage().nbytes() for tensor in kept if key_of(tensor) not in others}.values())


@pytest.mark.parametrize(("name", "precision"), [("vit", "float32"), ("vit", "bf16"), ("narrow", "float32")])
def test_compiled_blocks_keep_what_the_partitioner_keeps(name, precision):
    """By the same partitioner with real tensors. The loss, which is traced in eager mode, is left out."""
    blocks = [record for block, record in records(name, precision, compiled=True).items() if block != "loss"]
    assert sum(kept_by(blocks, "none")) == pytest.approx(saved(name, precision), rel=0.05)


def test_compiled_transformer_keeps_and_moves_less_than_an_eager_one():
    eager, compiled = (records("vit", "bf16", compiled)["block0"] for compiled in (False, True))
    assert compiled.saved < 0.9 * eager.saved
    traffic = [
        sum(operation.nbytes for operation in (*record.forward, *record.backward) if not operation.flops)
        for record in (eager, compiled)
    ]
    assert traffic[1] < 0.8 * traffic[0]
    flops = [sum(operation.flops for operation in (*record.forward, *record.backward)) for record in (eager, compiled)]
    assert flops[0] == flops[1]


def test_fusion_is_the_same_each_time():
    first, second = (records("vit", "bf16", compiled=True)["block0"] for _ in range(2))
    assert (first.forward, first.backward) == (second.forward, second.backward)


def test_blocks_that_cannot_be_traced_are_predicted_as_in_eager_mode(monkeypatch):
    def refuse(*arguments: object) -> None:
        raise RuntimeError("data-dependent control flow")

    monkeypatch.setattr("ddp_lab.estimate.blocks.trace_compiled", refuse)
    assert records("lenet", "float32", compiled=True) == records("lenet", "float32", compiled=False)


class Small(nn.Module):
    """A matrix multiplication between elementwise operations."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 64)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.layer((given + 1).exp() * 2) * 3).tanh() + 1


def test_elementwise_operations_are_fused_and_read_and_write_once():
    with FakeTensorMode():
        graphs, _ = graphs_of(Small(), torch.empty(8, 32))
    before, product, after = kernels_of(graphs.forward)

    def sizes(kernel: Kernel) -> tuple[str, int]:
        return kernel.operation.kind, kernel.operation.nbytes

    assert sizes(before) == ("fused", 4 * 8 * (32 + 32))
    assert sizes(product) == ("matmul", 4 * (8 * 32 + 32 * 64 + 64 + 8 * 64))
    assert sizes(after) == ("fused", 4 * 8 * (64 + 64)), "tanh's result is not kept, but computed again"
    assert product.operation.flops == 2 * 8 * 32 * 64
    assert graphs.backward is not None
    kinds = [kernel.operation.kind for kernel in kernels_of(graphs.backward)]
    assert sorted(kinds) == ["fused", "fused", "matmul"], "tanh's gradient, that of the weight, and that of the bias"
