"""What is predicted of compiled blocks: they keep what AOTAutograd keeps, and elementwise operations become few kernels."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from launches import ROOT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training import MODELS, make_model

from ddp_lab.estimate.blocks import Tracer
from ddp_lab.estimate.compiled import graphs_of
from ddp_lab.estimate.copies import fake_copy
from ddp_lab.estimate.fusion import Kernel, kernels_of
from ddp_lab.estimate.memory import kept_by
from ddp_lab.estimate.planned import PlannedRuntime
from ddp_lab.estimate.recorder import key_of
from ddp_lab.estimate.trace import Traced, mixed_precision
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.compilation import Fuse
from ddp_lab.strategies.loss import CrossEntropy
from ddp_lab.strategies.share import Share
from ddp_lab.strategies.single import Single
from ddp_lab.strategies.split import Split
from ddp_lab.world.runtime import Runtime

BATCH = 6


class InPieces(Single):
    """It compiles a model in pieces of a few blocks, as strategies with buckets do."""

    def graphs(self, model: nn.Module) -> list[nn.Module]:
        assert isinstance(model, Chain)
        return [*model.pieces(4000)]

    def compile_model(self, fuse: Fuse) -> str:
        return self.compile_pieces(fuse)


class InBlocks(Single):
    """It compiles each block by itself, as strategies that shard or cut a model do."""

    graphs, compile_model = Split.graphs, Split.compile_model


def records(name: str, precision: str, compiled: bool, strategy: type[Strategy] = Single) -> dict[str, Traced]:
    _, channels, size = MODELS[name]
    tracer = Tracer(make_model(name, 0), CrossEntropy(), (channels, size, size), precision)
    return tracer.blocks(strategy(PlannedRuntime(1, 1, precision)), Share(), BATCH, compiled)


def predicted(name: str, precision: str, strategy: type[Strategy]) -> float:
    """Return the same as `saved`, from the traces."""
    found = records(name, precision, compiled=True, strategy=strategy)
    return sum(kept_by([record for block, record in found.items() if block != "loss"], "none"))


def saved(name: str, precision: str, strategy: type[Strategy]) -> int:
    """Return the bytes that a compiled model saves, but for parameters, images and what the loss saves."""
    _, channels, size = MODELS[name]
    model, images = make_model(name, 0), torch.rand(BATCH, channels, size, size)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    torch.compiler.reset()
    compiled = strategy(Runtime("cpu", precision))
    compiled.setup(model)
    compiled.compile(partial(torch.compile, backend="aot_eager_decomp_partition"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mixed_precision(precision == "bf16"):
        assert compiled.forward(images).requires_grad
    others = {key_of(tensor) for tensor in [*model.parameters(), images]}
    return sum({key_of(tensor): tensor.untyped_storage().nbytes() for tensor in kept if key_of(tensor) not in others}.values())


@pytest.mark.parametrize(
    ("name", "precision", "strategy", "graphs"),
    [
        ("vit", "float32", Single, 4),
        ("vit", "bf16", Single, 4),
        ("narrow", "float32", Single, 1),
        ("narrow", "bf16", Single, 1),
        ("narrow", "float32", InPieces, 3),
        ("narrow", "float32", InBlocks, 4),
    ],
)
def test_compiled_models_keep_what_the_partitioner_keeps(name, precision, strategy, graphs):
    """By the same partitioner with real tensors. The loss, which is traced in eager mode, is left out.

    A Vision Transformer is compiled by block, other models as the strategy decides.
    """
    assert len(records(name, precision, compiled=True, strategy=strategy)) == graphs + 1
    assert predicted(name, precision, strategy) == pytest.approx(saved(name, precision, strategy), rel=0.05)


def test_one_graph_keeps_less_than_its_blocks():
    """The output of one block and what the next one keeps of it are the same tensor."""
    whole, blocks = (predicted("narrow", "bf16", strategy) for strategy in (Single, InBlocks))
    assert whole < 0.95 * blocks
    ((record, _),) = [records("narrow", "bf16", compiled=True).values()]
    assert record.gradients == sum(tensor.nbytes for tensor in make_model("narrow", 0).parameters())


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
    assert records("vit", "float32", compiled=True) == records("vit", "float32", compiled=False)
    whole, blocks = (list(records("lenet", "float32", compiled).values()) for compiled in (True, False))
    assert sum(kept_by(whole, "none")) == sum(kept_by(blocks, "none"))


POOLING = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from ddp_lab.estimate.compiled import trace_compiled
with FakeTensorMode():
    trace_compiled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), torch.empty(2, 3, 8, 8), autocast=False)
"""


def test_max_pooling_is_traced_first_in_a_process():
    """Its decomposition uses a module of Inductor that other traces import."""
    done = subprocess.run([sys.executable, "-c", POOLING], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


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


def test_both_sums_of_batch_norm_are_one_kernel():
    """One is of the gradient and one of the gradient times the image, and the ReLU belongs to both.

    Inductor fuses reductions over the same loops that share a tensor. By its own count (GraphLowering.count_bytes, torch 2.14,
    2026-11-23) the backward pass of a ResNet-18 with 32 images moves 766.7 MB in float32; these kernels move 767.1.
    """
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    sizes = {name: tensor.shape for name, tensor in block.named_parameters()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        graphs, _ = graphs_of(fake_copy(block, sizes, None), torch.empty(16, 8, 8, 8))
    assert graphs.backward is not None
    size = 4 * 16 * 8 * 8 * 8
    found = [kernel.operation.nbytes / size for kernel in kernels_of(graphs.backward)]
    # Sums and gradient read the gradient, the mask of the ReLU (one byte) and the images; the convolution also reads weights.
    assert [each for each in found if each > 1] == pytest.approx([2.25, 3.25, 2.14], abs=0.02)
