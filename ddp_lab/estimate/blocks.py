"""The blocks of a model as a rank computes them, traced on fake tensors; equal blocks are traced once.

Blocks that train.py compiles as one graph are traced as one: what autograd keeps between them is shared.
"""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.estimate.compiled import trace_compiled
from ddp_lab.estimate.copies import fake_copy, fake_mode, real_copy
from ddp_lab.estimate.division import Division, division_of
from ddp_lab.estimate.real_trace import trace_values
from ddp_lab.estimate.trace import Traced, trace
from ddp_lab.models.chain import Chain
from ddp_lab.models.fingerprint import fingerprint
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.compilation import repeats
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.loss import Loss
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.share import Share

LOSS = "loss"  # name of the record of the loss
REMEDIES = {  # for a block that needs complete layers, by strategy
    "tp": "Replicate it: ++strategy.plan.{}=replicate",
    "mesh": "Correct the attribute tensor_parallel of {}, or use strategy.tp=1",
}


class Graph(nn.Sequential):
    """Blocks that are compiled as one graph."""


class Tracer:
    """Traces the blocks of a model, as any strategy divides them, and keeps the records for the other strategies.

    Args:
        model: the complete model, which may be on the meta device.
        loss: the training loss.
        input_shape: of a sample.
        precision: "float32" or "bf16".

    Attributes:
        named: the blocks of the model with their names.
        not_compiled: why what is compiled is predicted as in eager mode, by name of the block, or of the class of the model.
    """

    def __init__(self, model: nn.Module, loss: Loss, input_shape: Sequence[int], precision: str):
        self.model, self.loss, self.input_shape, self.precision = model, loss, tuple(input_shape), precision
        self.named = list(model.named_children()) if isinstance(model, Chain) else [("", model)]
        self.not_compiled: dict[str, str] = {}
        self._known: dict[tuple[Any, ...], tuple[Traced, torch.Tensor]] = {}

    def blocks(self, strategy: Strategy, share: Share, samples: int, compiled: bool = False) -> dict[str, Traced]:
        """Return the record of each block of a rank by name, and of the loss on a rank that has the last block.

        A model that is no Chain is one block, called "". Blocks that are compiled as one graph have one record, under the name
        of the first.

        Args:
            strategy: after `partition`.
            share: what the rank holds.
            samples: number of samples that pass through a block at once.
            compiled: whether torch.compile compiles the model; the loss, which is small, is traced in eager mode.

        Raises:
            ConfigError: the model fails with so many samples or, if it reads values, with a few.
        """
        blocks = self._graphs(strategy) if compiled else self.named
        # fully_shard casts parameters and inputs by itself; all other strategies use autocast.
        casts = isinstance(strategy, FSDP | Mesh) and self.precision == "bf16"
        given = torch.empty(samples, *self.input_shape, device="meta")
        records: dict[str, Traced] = {}
        for name, block in blocks:
            several = isinstance(block, Graph)  # whose parameters have their complete names
            division = Division() if several else division_of(strategy, name, block)
            paths = {path: path if several or not name else f"{name}.{path}" for path, _ in block.named_parameters()}
            sizes = {path: torch.Size(share.size(paths[path], tensor)) for path, tensor in block.named_parameters()}
            key = (
                fingerprint(block),
                *sizes.values(),
                given.shape,
                given.stride(),
                given.dtype,
                given.requires_grad,
                casts,
                division,
                compiled,
            )
            if key not in self._known:
                try:
                    self._known[key] = self._trace(name, block, sizes, given, casts, division, compiled)
                except Exception as error:
                    if division.tp > 1 and self._is_traced(name, block, given, casts, compiled):
                        raise ConfigError(
                            f"strategy={strategy.name}: cannot predict {name} with layers divided over {division.tp} ranks, in "
                            f"contrast to complete ones: {describe_error(error)}. {REMEDIES[strategy.name].format(name)}"
                        ) from error
                    if any(tensor.is_meta for tensor in block.parameters()):
                        if not isinstance(error, RuntimeError | ValueError):  # the model's, such as of a batch of one sample
                            raise
                        text = f"the model failed with {samples} samples at a time: {describe_error(error)}"
                        raise ConfigError(f"{text}. Correct the model, or change batch_size") from error
                    self._known[key] = self._trace_values(block, sizes, given, casts, division)
            records[name], given = self._known[key]
        key = (LOSS, given.shape, given.dtype)
        if key not in self._known:
            self._known[key] = self._trace_loss(given)
        records[LOSS], _ = self._known[key]
        last = blocks[-1][0]
        return {name: record for name, record in records.items() if share.has(last if name == LOSS else name)}

    def _is_traced(self, name: str, block: nn.Module, given: torch.Tensor, casts: bool, compiled: bool) -> bool:
        """Return whether a block can be traced with complete layers. The arguments are as in `_trace`."""
        sizes = {path: tensor.shape for path, tensor in block.named_parameters()}
        try:
            self._trace(name, block, sizes, given, casts, Division(), compiled)
        except Exception:
            return False
        return True

    def _graphs(self, strategy: Strategy) -> list[tuple[str, nn.Module]]:
        """Return what is compiled as one graph each: a block, or several under the name of the first."""
        if repeats(self.model) or not isinstance(self.model, Chain):
            return self.named
        names, found = {block: name for name, block in self.named}, list[tuple[str, nn.Module]]()
        for graph in strategy.graphs(self.model):
            blocks = [graph] if graph in names else list(graph.children())
            first = names[blocks[0]]
            found.append((first, graph if graph in names else Graph(OrderedDict((names[block], block) for block in blocks))))
        return found

    def _trace(
        self,
        name: str,
        block: nn.Module,
        sizes: dict[str, torch.Size],
        given: torch.Tensor,
        casts: bool,
        division: Division,
        compiled: bool,
    ) -> tuple[Traced, torch.Tensor]:
        dtype = torch.bfloat16 if casts else None
        autocast = self.precision == "bf16" and not casts
        with fake_mode():
            inputs = torch.empty_strided(
                given.shape, given.stride(), dtype=dtype or given.dtype, requires_grad=given.requires_grad
            )

            def own() -> nn.Module:
                copied = fake_copy(block, sizes, dtype).train()
                division.apply(copied)
                return copied

            if compiled:
                try:
                    return trace_compiled(own(), inputs, autocast)
                except Exception as error:  # torch.compile may compile parts of it
                    self.not_compiled[name or type(block).__name__] = describe_error(error)
            eager = own()
            return trace(eager, list(eager.parameters()), inputs, autocast)

    def _trace_values(
        self, block: nn.Module, sizes: dict[str, torch.Size], given: torch.Tensor, casts: bool, division: Division
    ) -> tuple[Traced, torch.Tensor]:
        def own() -> nn.Module:
            copied = real_copy(block, sizes, dtype).train()
            division.apply(copied)
            return copied

        dtype = torch.bfloat16 if casts else None
        inputs = given.to(dtype or given.dtype).requires_grad_(given.requires_grad)
        try:
            return trace_values(own, inputs, autocast=self.precision == "bf16" and not casts)
        except Exception as error:
            text = f"the model failed with samples of {inputs.dtype}: {describe_error(error)}. Correct the model"
            raise ConfigError(text) from error

    def _trace_loss(self, given: torch.Tensor) -> tuple[Traced, torch.Tensor]:
        with fake_mode():
            loss = copy.deepcopy(self.loss)
            targets = torch.zeros(len(given), dtype=torch.int64)
            logits = torch.empty(given.shape, dtype=given.dtype, requires_grad=True)
            return trace(lambda logits: loss(logits, targets), [targets], logits, autocast=False)
