"""strategy=fsdp"""

import torch.distributed as dist
from settings import HAS_UNITS, RESHARD, UNITS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard(model: nn.Module, device_type: str) -> None:
    """Shard the parameters of each block over the ranks, and then what is left of the model."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    if HAS_UNITS:
        blocks = [model.get_submodule(name) for name in UNITS]
    else:
        blocks = list(model.children())
    for part in [*blocks, model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=RESHARD)
        # the sum of the gradients, not their mean: the loss is divided by the global batch
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
