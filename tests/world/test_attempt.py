"""The ranks of several nodes agree on a name for each start, in a store that outlives restarts."""

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ddp_lab.config.errors import NodeError
from ddp_lab.world.store import agree_on_attempt

RANKS = 3
LONG = timedelta(seconds=30)
SHORT = timedelta(seconds=1)


@pytest.fixture(scope="module")
def server() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def start(server: TCPStore, order: Iterable[int]) -> list[str]:
    """Start ranks in this order, each 0.15 s after the last; return the names by rank."""
    with ThreadPoolExecutor(RANKS) as pool:
        results = {}
        for rank in order:
            client = TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
            results[rank] = pool.submit(agree_on_attempt, client, rank, RANKS, LONG)
            threading.Event().wait(0.15)
        return [results[rank].result() for rank in range(RANKS)]


def test_start_that_failed_before_its_ranks_agreed_leaves_nothing_that_the_next_start_uses(server):
    """Rank 0 publishes a name, and rank 1 answers it, but rank 2 does not come."""
    with ThreadPoolExecutor(2) as pool:
        client = TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
        waiting = [
            pool.submit(agree_on_attempt, store, rank, RANKS, SHORT)
            for rank, store in enumerate((server, client))
        ]
    with pytest.raises(
        NodeError, match=r"^rank 2 did not start within 1 s after the others\..*ddp-lab train"
    ):
        waiting[0].result()
    with pytest.raises(NodeError, match=r"^rank 0 or another one did not start within 1 s"):
        waiting[1].result()
    failed = server.get("attempt").decode()
    names = start(server, [1, 2, 0])
    assert len(set(names)) == 1
    assert names[0] != failed
