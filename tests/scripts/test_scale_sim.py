"""The control plane of simulated ranks: constant traffic, and failures known in time."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from launches import ROOT

from ddp_lab.resilience.heartbeats import VANISHED
from scripts.scale_sim import CONTEXT, FAULTS, PRELOAD, Training, fail, train

SECONDS = 3.0
STEP = 0.2
TIMEOUT = 4.0
SIZES = 2, 8, 32  # numbers of ranks, two on each node
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
    """Return what launches without a fault have done, by number of ranks."""
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda ranks: train(SECONDS, ranks, ranks // 2, step_seconds=STEP), SIZES)
        return dict(zip(SIZES, made, strict=True))


@pytest.mark.slow
def test_operations_per_rank_do_not_grow_with_the_number_of_ranks(trained):
    for part in ("start", "training", "end"):
        made = {ranks: getattr(counts, part) for ranks, counts in trained.items()}
        for of in (lambda counts: counts.store[""], lambda counts: counts.files):
            few, some, many = (of(made[ranks]) / ranks for ranks in SIZES)
            assert many <= max(few, some) * 1.1, part
    assert trained[32].start.store[""] <= 20 * 32
    for ranks, made in trained.items():
        looks = 8 + made.start_seconds  # at the name of the start, until the last rank is there
        assert made.start.store["attempt"] <= (2 * looks + 3) * ranks
    # there are more of them if the start is slow
    heartbeats = 1000 * trained[32].start.store["nodes"]
    assert (
        trained[32].start.size <= 1500 * 32 + heartbeats + 200 * trained[32].start.store["attempt"]
    )
    assert trained[32].start.files <= 4 * 32


@pytest.mark.slow
def test_training_uses_the_store_once_per_node_and_second_and_no_shared_file(trained):
    assert trained[2].training.store.total() == 0, "a single node needs no store"
    for ranks in SIZES:
        assert trained[ranks].training.store.keys() <= {"nodes"}
        assert trained[ranks].training.store.total() <= (2 * ranks // 2 + 2) * (SECONDS + 2)
        assert trained[ranks].training.files == 0


@pytest.mark.slow
def test_operations_after_a_failure_do_not_grow_with_the_number_of_ranks():
    with ThreadPoolExecutor() as pool:
        made = list(
            pool.map(lambda ranks: fail(FAULTS[0], ranks, ranks // 2, STEP, TIMEOUT), SIZES)
        )
    for nodes, failure in zip((ranks // 2 for ranks in SIZES), made, strict=True):
        assert failure.counts.files <= 8, "only the rank that reports writes"
        heartbeats = (2 * nodes + 2) * (failure.known_seconds + 2) if nodes > 1 else 0
        assert failure.counts.store.total() <= heartbeats, nodes


@pytest.mark.slow
def test_failures_are_reported_and_known_everywhere_in_time():
    limits = {
        "rank killed": (2, 5),
        "node vanished": (VANISHED + 2, 12),
        "rank hangs": (6, 9),
        "rank suspended": (9, 12),
    }
    with ThreadPoolExecutor() as pool:
        made = dict(
            zip(
                limits,
                pool.map(lambda fault: fail(fault, 16, 4, STEP, TIMEOUT), FAULTS),
                strict=True,
            )
        )
    for fault, (reported, known) in limits.items():
        assert made[fault].reported_seconds <= reported + SLOW, fault
        assert made[fault].known_seconds <= known + SLOW, fault
        others = made[fault].message.split("The other ranks at that time: ")[1]
        assert others.count("rank ") == 8, "the report lists eight other ranks"
    assert "its node has sent no heartbeat" in made["node vanished"].message
    assert "scale_ranks.py" in made["rank hangs"].message, "the stack of the rank that hangs"
    assert "the process is suspended" in made["rank suspended"].message
