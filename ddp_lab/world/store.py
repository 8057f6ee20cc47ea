"""A name for each start of the ranks in their key-value store.

torchrun's store outlives an elastic restart, with the addresses of dead ranks in it, so the ranks
of each start need keys of their own. The number of restarts cannot be their prefix. Each agent
counts its own: an agent whose ranks were healthy, or that was itself started again, has another
number. And a restart because a node joins or leaves (--nnodes=1:2) does not count.
"""

import time
import uuid
from datetime import timedelta

# Documented as torch.distributed.Store etc., but the module does not export them explicitly.
from torch.distributed import DistError, Store  # pyright: ignore[reportPrivateImportUsage]

from ddp_lab.config.errors import NodeError, first_few

# seconds between the first two looks at the store, which double, and the most within the first 10 s
POLL = 0.01, 1.0
# of the time waited so far, the most after that: 60 looks in 10 minutes, and a start that is 10 %
# later
LATER = 0.1
LISTED = 8  # the most ranks that the message names
NEW_TORCHRUN = (
    "If torchrun was started again on one node only, its ranks and those of the other nodes do not "
    "find each other: use `ddp-lab train` in place of torchrun on every node, or start torchrun "
    "again on all nodes"
)


def agree_on_attempt(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of this start get, and that no other start had. Collective.

    Rank 0 publishes a new name. The name that another rank reads first may still be that of an
    earlier start. So it answers with a random word, and uses the name only if rank 0 repeats that
    word: the rank 0 of an earlier start cannot have seen it.

    Args:
        store: torchrun's store.
        rank, world_size: Index of this rank, and number of ranks.
        timeout: How long to wait for the other ranks.

    Raises:
        NodeError: Another rank has not answered in time.
    """
    word = uuid.uuid4().hex
    if rank == 0:
        return publish(store, word, world_size, timeout)
    begin = time.monotonic()
    pause = POLL[0]
    waited = 0.0
    name = ""
    while waited < timeout.total_seconds():
        if name or store.check(["attempt"]):
            published = store.get("attempt").decode()
            if published != name:
                name = published
                store.set(f"{name}/{rank}", word)
        answer = f"{name}/{rank}/repeated"
        if name and store.check([answer]) and store.get(answer).decode() == word:
            return name
        time.sleep(pause)  # a `wait` that times out would print two warnings
        waited = time.monotonic() - begin
        pause = min(2 * pause, max(POLL[1], LATER * waited))
    raise not_started("rank 0 or another one", timeout)


def publish(store: Store, name: str, world_size: int, timeout: timedelta) -> str:
    """Publish the name on rank 0, repeat the words of the other ranks, and return the name."""
    store.set("attempt", name)
    keys = [f"{name}/{other}" for other in range(1, world_size)]
    try:
        store.wait(keys, timeout)
    except DistError:
        if late := [str(other) for other, key in enumerate(keys, 1) if not store.check([key])]:
            noun = "rank" if len(late) == 1 else "ranks"
            raise not_started(f"{noun} {first_few(late, LISTED)}", timeout) from None
    words = [word.decode() for word in store.multi_get(keys)]
    store.multi_set([f"{key}/repeated" for key in keys], words)  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
    return name


def not_started(ranks: str, timeout: timedelta) -> NodeError:
    """Return the error that these ranks have not started, but others have."""
    return NodeError(
        f"{ranks} did not start within {timeout.total_seconds():.0f} s after the others. "
        f"{NEW_TORCHRUN}"
    )
