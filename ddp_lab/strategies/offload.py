"""Training state in host memory: parameters, gradients and the optimizer's state, of which the GPU gets one block at a time.

    host:  shards of parameters --copy--> GPU: all_gather -> block -> reduce_scatter --copy--> host: shards of gradients
           optimizer's step on the CPU

It costs a copy of the rank's shards to the GPU for every gather, one of the gradients back, and a slower optimizer's step. It
leaves the GPU's memory to activations and one gathered block (Ren et al. 2021, ZeRO-Offload, arXiv:2101.06840).
"""

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from ddp_lab.config.errors import ConfigError
from ddp_lab.observe.log import log

HOST = torch.device("cpu")


def offload_policy(offload: bool, device: torch.device) -> OffloadPolicy:
    """Return the argument of `fully_shard`. On a GPU, shards are in pinned memory, so that copies overlap with computation.

    On the CPU it is logged that `offload` has no effect.
    """
    if offload and device.type == "cpu":
        log.info("strategy.offload=true has no effect: the device is the CPU, whose memory is that of the host")
    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()


def require_no_buffers(model: nn.Module, offload: bool) -> None:
    """Check that a model can be trained with its state in host memory.

    Raises:
        ConfigError: it has buffers, which stay on the GPU; torch cannot load a state whose tensors are on two devices.
    """
    if offload and (buffers := [name for name, _ in model.named_buffers()]):
        raise ConfigError(
            f"strategy.offload=true: is not supported by models with buffers, such as BatchNorm's statistics; this one has "
            f"{buffers[0]}. Use strategy.offload=false"
        )


def wait_for_copies(offload: bool, device: torch.device) -> None:
    """Wait until no copy of parameters to the GPU is queued any more, so that the parameters can be changed.

    The optimizer's step need not wait, because its gradients come after all copies.
    """
    if offload and device.type == "cuda":
        torch.cuda.synchronize(device)
