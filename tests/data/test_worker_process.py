"""When the worker process of a loader ends: after its rank says so, or with its rank."""

import os
import time
from types import SimpleNamespace

import pytest

from ddp_lab.data.worker_process import GRACE, LOOK, leave_with_rank


class Ended(Exception):
    pass


@pytest.mark.parametrize(
    ("is_orphan", "flags", "slept"),
    [
        (False, [True], [GRACE]),  # torch may end it without a loss meanwhile
        (False, [False, False, True], [LOOK, LOOK, GRACE]),
        (True, [False], []),
    ],
)
def test_worker_waits_for_its_queues_only_if_its_rank_lives(is_orphan, flags, slept, monkeypatch):
    waited: list[float] = []
    ended = SimpleNamespace(value=flags[0])

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        ended.value = flags[min(len(waited), len(flags) - 1)]

    def leave(code: int) -> None:
        assert code == 0, "torch would report a lost worker"
        raise Ended

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(Ended):
        leave_with_rank(ended, -1 if is_orphan else os.getppid())
    assert waited == slept
