"""The performance options that a strategy supports, and how its passes are compiled."""

from typing import ClassVar

from torch import nn

from ddp_lab.models.chain import Chain
from ddp_lab.strategies.compilation import Fuse, compile_blocks, count, repeats
from ddp_lab.strategies.forward_backward import ForwardBackward
from ddp_lab.strategies.sums import measure

ALL_PERFORMANCE_OPTIONS = frozenset({"cuda_graph", "compile", "channels_last", "fused"})


class PerformanceSupport(ForwardBackward):
    """What `training/speed` asks a strategy; a strategy overrides what it supports, and what of its model is compiled.

    Attributes:
        performance_options: the supported ones of cuda_graph, compile, channels_last, and fused: optimizers' fused kernels.
    """

    performance_options: ClassVar[frozenset[str]] = frozenset()

    def why_not_capture(self) -> str | None:
        """Return why a step with these options cannot be captured as a CUDA graph, or None if it can."""
        return None

    def why_not_compile(self, model: nn.Module) -> str | None:
        """Return why `compile` does not support the model, or None if it does."""
        return None

    def compile(self, fuse: Fuse) -> str:
        """Compile forward, loss and backward. Called after `setup`, if "compile" is one of the `performance_options`.

        Returns:
            What of the model was compiled, for the log.
        """
        self.measure = fuse(measure)
        return compile_blocks(self.module.children(), fuse) if repeats(self.module) else self.compile_model(fuse)

    def compile_model(self, fuse: Fuse) -> str:
        """Compile a model whose blocks are not equal; part of `compile`."""
        self.forward = fuse(self.module)
        return "the complete model"

    def graphs(self, model: nn.Module) -> list[nn.Module]:
        """Return the parts of a model that `compile_model` compiles as one graph each, in forward order."""
        return [model]

    def compile_pieces(self, fuse: Fuse) -> str:
        """Compile the model in several pieces, so that the gradients of a piece are complete when its own backward pass ends.

        A bucket can then be sent while the next piece computes. Kernels are not fused across a cut, which costs some time
        (docs/log/benchmarks.md).

        Args:
            fuse: torch.compile with its options.
        """
        assert isinstance(self.module, Chain)
        pieces = self.graphs(self.module)
        self.module.execute_in(map(fuse, pieces))
        return f"the model in {count(len(pieces), 'piece')}"
