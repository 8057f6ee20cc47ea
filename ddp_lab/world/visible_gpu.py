"""Whether ranks of a machine that see one GPU each see different ones."""

import time

from ddp_lab.world.ranks import Ranks

# seconds for the other ranks of the machine to start; one that sees several GPUs does not answer
PATIENCE = 60.0
POLL = 0.05  # seconds between looks at the store


def differ(ranks: Ranks, uuid: str) -> bool:
    """Return whether all ranks of this machine have different GPUs. Collective on the machine.

    Args:
        ranks: of the launch.
        uuid: of the GPU that this rank sees.
    """
    keys = [f"gpu/{ranks.node}/{local}" for local in range(ranks.local_world_size)]
    ranks.store.set(keys[ranks.local_rank], uuid)
    deadline = time.monotonic() + PATIENCE
    while not ranks.store.check(keys):  # a `wait` that times out would print two warnings
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return len(set(ranks.store.multi_get(keys))) == len(keys)
