"""The control plane of simulated ranks: its traffic does not grow with their number, and failures are known in time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from launches import ROOT

from ddp_lab.resilience.heartbeats import VANISHED
from scripts.scale_launch import CONTEXT, PRELOAD
from scripts.scale_sim import FAULTS, Failure, Training, simulation

SECONDS, TIMEOUT = 3.0, 4.0
SLOW = 10.0  # additional seconds allowed where the machine is busy


@pytest.fixture(scope="module", autouse=True)
def server():
    """Let the ranks be forked from a server that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        CONTEXT.set_forkserver_preload(PRELOAD)
        yield


@pytest.fixture(scope="module")
def trained() -> dict[int, Training]:
    """Return what launches without a fault have done, by number of ranks, two on each node."""

    def train(ranks: int) -> Training:
        with simulation(ranks, ranks // 2, seconds=SECONDS, step_seconds=0.2) as simulated:
            return simulated.train()

    sizes = 2, 8, 32
    with ThreadPoolExecutor() as pool:
        return dict(zip(sizes, pool.map(train, sizes), strict=True))


def test_operations_per_rank_do_not_grow_with_the_number_of_ranks(trained):
    for part in ("start", "training", "end"):
        made = {ranks: getattr(counts, part) for ranks, counts in trained.items()}
        for of in (lambda counts: counts.store[""], lambda counts: counts.file_operations):
            few, some, many = (of(made[ranks]) / ranks for ranks in (2, 8, 32))
            assert many <= max(few, some) * 1.1, part
    assert trained[32].start.store[""] <= 20 * 32
    for ranks, made in trained.items():
        looks = 8 + made.start_seconds  # at the name of the start, until the last rank is there
        assert made.start.store["attempt"] <= (2 * looks + 3) * ranks
    heartbeats = 1000 * trained[32].start.store["nodes"]  # there are more of them if the start is slow
    assert trained[32].start.size <= 1500 * 32 + heartbeats + 200 * trained[32].start.store["attempt"]
    assert trained[32].start.file_operations <= 4 * 32


def test_training_uses_the_store_once_per_node_and_second_and_no_shared_file(trained):
    assert trained[2].training.operations == 0, "a single node needs no store"
    for ranks in (8, 32):
        assert trained[ranks].training.store.keys() == {"nodes"}
        assert trained[ranks].training.operations <= (2 * ranks // 2 + 2) * (SECONDS + 2)
        assert trained[ranks].training.file_operations == 0
    assert trained[2].training.file_operations == 0


def test_operations_after_a_failure_do_not_grow_with_the_number_of_ranks():
    def fail(ranks: int) -> Failure:
        with simulation(ranks, ranks // 2, step_seconds=0.2, timeout=TIMEOUT) as simulated:
            return simulated.fail(FAULTS[0])

    sizes = 2, 8, 32
    with ThreadPoolExecutor() as pool:
        failures = dict(zip(sizes, pool.map(fail, sizes), strict=True))
    for ranks, made in failures.items():
        nodes = ranks // 2
        assert made.counts.file_operations <= 8, "only the rank that reports writes"
        heartbeats = (2 * nodes + 2) * (made.known_seconds + 2) + 1 if nodes > 1 else 0
        assert made.counts.operations <= heartbeats, ranks


@pytest.fixture(scope="module")
def failed() -> dict[str, Failure]:
    """Return what launches of 16 ranks on 4 nodes have done, by fault. They run side by side."""
    with simulation(16, 4, step_seconds=0.2, timeout=TIMEOUT) as simulated, ThreadPoolExecutor() as pool:
        return dict(zip((fault.name for fault in FAULTS), pool.map(simulated.fail, FAULTS), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reported", "known"),
    [
        ("rank killed", 2, 5),
        ("node vanished", VANISHED + 2, 12),
        ("rank hangs", 6, 9),
        ("rank suspended", 9, 12),
    ],
)
def test_failure_is_reported_and_known_everywhere_in_time(fault, reported, known, failed):
    made = failed[fault]
    assert made.reported_seconds <= reported + SLOW
    assert made.known_seconds <= known + SLOW
    assert made.counts.file_operations <= 3 * 16


@pytest.mark.slow
def test_report_of_a_failure_lists_eight_other_ranks_and_sums_up_all(failed):
    for made in failed.values():
        line = made.message.split("The other ranks at that time: ")[1]
        assert line.split(". All ranks: ")[0].count("rank ") == 8
        assert ". All ranks: " in line
    assert "its node has sent no heartbeat" in failed["node vanished"].message
    assert "scale_ranks.py" in failed["rank hangs"].message, "the stack of the rank that hangs"
    assert "the process is suspended" in failed["rank suspended"].message
