"""What of a model a strategy refuses before it divides it, because the result would be another."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.written import require_no_max_norm
from ddp_lab.strategies.batch_norm import require_no_others, require_supported
from ddp_lab.strategies.batch_trial import changing_buffer
from ddp_lab.strategies.written_weights import Writes, check_written

if TYPE_CHECKING:
    from ddp_lab.data.trees import Tree
    from ddp_lab.strategies.base import Strategy


def check_model(strategy: "Strategy", model: nn.Module) -> Writes:
    """Check that the strategy trains a model as one device does; return what its passes write.

    Args:
        strategy: in `partition`.
        model: the complete model, on the CPU.

    Raises:
        ConfigError: a buffer or a parameter changes in a forward pass in a way that the ranks or
            micro-batches would see differently, or BatchNorm cannot have its statistics, or a
            module is compiled by TorchScript.
    """
    require_python(model, strategy.name)
    world_size = strategy.runtime.world_size
    example = strategy.example
    if strategy.num_microbatches > 1 and example is not None:
        require_constant_buffers(model, example, strategy.num_microbatches)
    writes = Writes()
    if world_size > 1 or strategy.copies_weights or strategy.num_microbatches > 1:
        writes = check_written(strategy, model)

    if strategy.batch_norm == "local" and strategy.one_process:
        return writes  # a batch is never divided between processes
    if world_size > 1:
        require_no_max_norm(model, strategy.name)
    require_supported(model, strategy.batch_norm, strategy.one_process)
    if strategy.batch_norm == "sync" and example is not None:
        require_no_others(model, example)
    return writes


def require_python(model: nn.Module, strategy: str) -> None:
    """Check that no module is compiled by TorchScript, which can neither be hooked nor divided.

    Raises:
        ConfigError: one is; the message has its name.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            part = f"the module {name} of the model" if name else "the model"
            raise ConfigError(
                f"strategy={strategy}: does not support {part}, which is compiled by "
                "torch.jit.script. Use the module that it was compiled from, or strategy=single"
            )


def require_constant_buffers(model: nn.Module, example: "Tree", num_microbatches: int) -> None:
    """Raise a ConfigError if a buffer changes in every forward pass: once per micro-batch.

    Those of BatchNorm are the exception: the log says that they are computed from micro-batches.
    """
    if name := changing_buffer(model, example):
        raise ConfigError(
            f"strategy.num_microbatches={num_microbatches}: the buffer {name} of the model changes "
            "in every forward pass in training, as those of spectral_norm do, and so "
            f"{num_microbatches} times in a step instead of once. Use strategy.num_microbatches=1, "
            "in a pipeline with strategy.schedule=gpipe, or another strategy, for example ddp"
        )
