"""Whether ranks of a machine that see one GPU each see different ones."""

from datetime import timedelta

# Documented as torch.distributed.DistError, but the module does not export it explicitly.
from torch.distributed import DistError  # pyright: ignore[reportPrivateImportUsage]

from ddp_lab.world.ranks import Ranks

# seconds for the other ranks of the machine to start; one that sees several GPUs does not answer
PATIENCE = 60.0


def differ(ranks: Ranks, uuid: str) -> bool:
    """Return whether all ranks of this machine have different GPUs. Collective on the machine.

    Args:
        ranks: of the launch.
        uuid: of the GPU that this rank sees.
    """
    keys = [f"gpu/{ranks.node}/{local}" for local in range(ranks.local_world_size)]
    ranks.store.set(keys[ranks.local_rank], uuid)
    try:
        ranks.store.wait(keys, timedelta(seconds=PATIENCE))
    except DistError:
        return False
    return len(set(ranks.store.multi_get(keys))) == len(keys)
