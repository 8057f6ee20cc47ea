"""A name for each start of the ranks, on which the ranks of several nodes agree.

torchrun's store outlives an elastic restart, with the addresses of dead ranks in it, so the ranks of each start need keys of
their own. The number of restarts cannot be their prefix on several nodes, because each agent counts its own: an agent whose
ranks were healthy, or that was itself started again, has another number.
"""

import time
import uuid
from datetime import timedelta

# Documented as torch.distributed.Store, but the module does not export it explicitly.
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

POLL = 0.1  # seconds between two looks at the store


def agree_on_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of this start get, and that no other start had. Collective.

    Rank 0 publishes a new name. The name that another rank reads first may still be that of an earlier start. So it answers
    with a random word, and uses the name only if rank 0 repeats that word: the rank 0 of an earlier start cannot have seen it.

    Args:
        store: torchrun's store.
        rank, world_size: Index of this rank, and number of ranks.
        timeout: How long to wait for the other ranks.

    Raises:
        TimeoutError: Rank 0 has not answered in time.
    """
    word = uuid.uuid4().hex
    if rank == 0:
        store.set("attempt", word)
        keys = [f"{word}/{other}" for other in range(1, world_size)]
        store.wait(keys, timeout)
        store.multi_set([f"{key}/repeated" for key in keys], store.multi_get(keys))  # pyright: ignore[reportAttributeAccessIssue]
        return word
    store.wait(["attempt"], timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    name = ""
    while time.monotonic() < deadline:
        if (published := store.get("attempt").decode()) != name:
            name = published
            store.set(f"{name}/{rank}", word)
        answer = f"{name}/{rank}/repeated"
        if store.check([answer]) and store.get(answer).decode() == word:
            return name
        time.sleep(POLL)
    raise TimeoutError(f"rank 0 did not answer within {timeout.total_seconds():.0f} s")
