"""Activation checkpointing: the backward pass computes each block's forward pass again.

    forward    input -> block 0 -> x1 -> block 1 -> x2 -> loss      kept: input, x1, x2
    backward   x1 -> block 1 again -> its activations -> gradients of block 1 and x1 -> block 0 ...

Of each block only the input is kept until its backward pass, and the activations of one block at a
time. That costs a second forward pass, about a third of a step (Chen et al. 2016,
arXiv:1604.06174).

The second pass must compute the same. Where the model draws at random, torch restores the state of
the random generators for it, which the host must read: a CUDA graph cannot. The second pass does
not count in the statistics of BatchNorm.

The class of a block is changed in place, so that the names of parameters, hooks and references to
the block stay. Hooks of fully_shard and compiled code of the block are called again, too.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.models.blocks import blocks_of
from ddp_lab.models.chain import Chain
from ddp_lab.models.random_draws import draws_at_random
from ddp_lab.strategies.batch_norm import is_batch_norm
from ddp_lab.strategies.batch_trial import changing_buffer

if TYPE_CHECKING:
    from ddp_lab.strategies.base import Strategy

KEY = "checkpoint_activations=block"


class Recomputed(NamedTuple):
    """What the backward pass computes again.

    Attributes:
        blocks: paths of the blocks in the complete model.
        draws: whether the model draws random numbers.
    """

    blocks: tuple[str, ...]
    draws: bool

    @property
    def unsupported(self) -> dict[str, str]:
        """Why a performance option is excluded, by its name."""
        if not self.draws:
            return {}
        return {
            "cuda_graph": f"{KEY} keeps the state of the random generators on the host, for a "
            "model that draws at random"
        }


class RecomputedBlock(nn.Module):
    """A block whose backward pass computes its forward pass again; a base of the block's class.

    Attributes:
        recomputed_path: in the model.
        recomputed_draws: whether the states of random generators are kept for the second pass.
    """

    # names that the class of the block does not have
    recomputed_path: str
    recomputed_draws: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the block.

        Raises:
            TrainingError: the block has changed an input in place, which the second pass needs.
        """
        call = super().__call__
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)

        # The first pass may change a list or dict of the caller. The second one gets it as it was
        # before. torch cares for the tensors that it gets by position only.
        leaves, form = tree_flatten((args, kwargs))
        first_arguments = [(args, kwargs)]

        def compute(*leaves: Any) -> Any:
            if first_arguments:
                call_args, call_kwargs = first_arguments.pop()
            else:
                call_args, call_kwargs = tree_unflatten(leaves, form)
            return call(*call_args, **call_kwargs)

        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in inputs]
        outputs = checkpoint(
            compute,
            *leaves,
            use_reentrant=False,
            preserve_rng_state=self.recomputed_draws,
            context_fn=partial(contexts, self),
        )
        if versions != [tensor._version for tensor in inputs]:
            raise TrainingError(
                f"{KEY}: the block {self.recomputed_path} changes its input in place, which the "
                "backward pass needs to compute the block again. Let it compute a new tensor, for "
                "example without inplace=True, or use checkpoint_activations=none"
            )
        return outputs


def contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the two forward passes of a block."""
    return nullcontext(), StatisticsKept(block)


class StatisticsKept(AbstractContextManager[None]):
    """Lets BatchNorm's running statistics of the body be those of copies.

    A schedule that cuts the backward pass in two enters it in each half.

    Args:
        module: with the BatchNorm layers.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        for layer in filter(is_batch_norm, self.module.modules()):
            buffers = layer._buffers  # pyright: ignore[reportPrivateUsage]
            self._kept.append((buffers, dict(buffers)))
            for name, tensor in self._kept[-1][1].items():
                buffers[name] = None if tensor is None else tensor.clone()

    def __exit__(self, *error: object) -> None:
        for buffers, before in self._kept:
            buffers |= before
        self._kept.clear()


@cache
def recomputing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a block's class whose backward pass computes it again.

    It has the name of the class, for messages.
    """
    return type(kind.__name__, (RecomputedBlock, kind), {"__module__": kind.__module__})


def choose_blocks(strategy: "Strategy", model: nn.Module) -> Recomputed:
    """Return what the backward pass computes again. Called in `Strategy.partition`.

    Args:
        strategy: with `example`.
        model: the complete model, on any device.

    Raises:
        ConfigError: the model has no blocks, cannot compute them twice, or is cut by a trace.
    """
    instead = "or use checkpoint_activations=none"
    if strategy.cuts_model and not isinstance(model, Chain):
        raise ConfigError(
            f"{KEY}: is not supported by strategy={strategy.name} for a model that is no Chain, "
            "whose stages are traces without its blocks. Return a Chain of blocks "
            f"(docs/your-own.md), use a strategy that does not cut the model, {instead}"
        )
    blocks = blocks_of(model)
    if not blocks:
        raise ConfigError(
            f"{KEY}: needs a model with blocks, and {type(model).__name__} has no list of several "
            "modules of one class that consist of others (a single layer of torch is no block). "
            "Return a Chain of blocks (docs/your-own.md), put them into an nn.ModuleList, "
            f"{instead}"
        )
    for path, module in model.named_modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            place = f"{path}.config" if path else "config"
            raise ConfigError(
                f"{KEY}: the model has {place}.use_cache=True, so that its blocks write to a cache "
                f"when they are computed again, too. Set it to False, {instead}"
            )
    if strategy.example is not None and (name := changing_buffer(model, strategy.example)):
        raise ConfigError(
            f"{KEY}: the buffer {name} of the model changes in every forward pass in training, as "
            "those of spectral_norm do, so that the backward pass would compute something else. "
            f"Use checkpoint_activations=none"
        )

    return Recomputed((*blocks,), draws_at_random(model, strategy.example))


def recompute_blocks(module: nn.Module, recomputed: Recomputed, head: str | None = None) -> None:
    """Let the backward pass compute blocks again, in place. Called after `Strategy.setup`.

    Args:
        module: of this rank, with all blocks or some.
        recomputed: from `choose_blocks`.
        head: path of the block that computes the losses and keeps no more than their gradients;
            None: there is none.
    """
    modules = dict(module.named_modules())
    for path in recomputed.blocks:
        if path in modules and path != head:
            block = modules[path]
            block.__class__ = recomputing(type(block))
            assert isinstance(block, RecomputedBlock)
            block.recomputed_path = path
            block.recomputed_draws = recomputed.draws
