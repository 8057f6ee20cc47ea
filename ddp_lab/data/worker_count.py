"""data.num_workers=auto: how many processes load the samples of a rank.

Every rank loads a few samples, spread over the training set. What a dataset draws for them is
seeded by their numbers, so neither the order of the samples nor the state of a generator depends on
it; and a training has the same result with any number of processes. Rank 0 decides for all:

    wanted    = time of a local batch / READY      processes that have a batch ready every 10 ms
    available = CPUs of the machine / its ranks - 1    the rank needs one CPU itself

The smaller one counts, of all machines the smallest. Where shared memory, to which processes write
their batches, is small, there are fewer of them.
"""

import math
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.data.dataset import Samples
from ddp_lab.world.cpus import allowed_cpus, cpu_quota
from ddp_lab.world.ranks import Ranks

READY = 0.010  # seconds in which a batch should be ready: about the shortest step of such models
CHEAP = 0.002  # seconds of a batch which a rank loads by itself: a process would cost as much
SAMPLES = 8  # that are loaded
LONGEST = 0.5  # seconds after which no other sample is loaded
SHARED_MEMORY = Path("/dev/shm")  # where torch's worker processes put tensors on Linux


class Place(NamedTuple):
    """What a rank knows of its machine and of its samples, as JSON.

    Attributes:
        node: number of the machine.
        cpus: numbers of the CPUs on which the rank may run.
        quota: CPUs whose time the cgroup of the rank may use; None: it has no limit.
        most: number of processes whose batches fit in shared memory; None: it has no limit.
        seconds: that a sample takes to load; None: it was not loaded.
    """

    node: int
    cpus: list[int]
    quota: float | None
    most: int | None
    seconds: float | None


def find_number(
    ranks: Ranks, sets: Mapping[str, Samples], batch_size: int, batches: int
) -> tuple[int, str]:
    """Return the number of processes of each rank, the same on all ranks, and why. Collective.

    Args:
        ranks: of the launch.
        sets: the training set, `train`, and those of evaluations, by name.
        batch_size: samples of a local batch.
        batches: of an epoch of each rank.
    """
    training = sets["train"]
    cpus = allowed_cpus()
    seconds = None
    most = None
    if not training.is_endless:
        seconds = seconds_of_sample(training)
        most = most_in_shared_memory(sets, batch_size, ranks.local_world_size, len(cpus))
    place = Place(ranks.node, cpus, cpu_quota(), most, seconds)
    number, why = ranks.gather_and_decide(
        "data.num_workers", place, partial(choose, batch_size=batch_size, batches=batches)
    )
    return number, why


def seconds_of_sample(data: Samples) -> float:
    """Return the median time of loading a sample, after the first one, which may open files."""
    times: list[float] = []
    begun = time.perf_counter()
    for number in range(SAMPLES):
        start = time.perf_counter()
        with suppress(ConfigError):  # a sample that cannot be read is reported by the training
            data.sample(1, number * data.size // SAMPLES)
            times.append(time.perf_counter() - start)
        if time.perf_counter() - begun > LONGEST:
            break
    return statistics.median_low(times) if times else 0.0


def free_shared_memory() -> float:
    """Return the free bytes of this machine's shared memory; inf if it has no limit."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else math.inf


def most_in_shared_memory(
    sets: Mapping[str, Samples], batch_size: int, ranks: int, most: int
) -> int:
    """Return how many processes of each rank write batches that fit in shared memory.

    Args:
        sets: that have a loader each.
        batch_size: samples of a local batch.
        ranks: of this machine.
        most: as many are enough.
    """
    from ddp_lab.data.workers import bytes_of_batches

    free = free_shared_memory() / ranks
    fitting = [
        number
        for number in range(1, most + 1)
        if sum(bytes_of_batches(data, batch_size, number) for data in sets.values()) <= free
    ]
    return max(fitting, default=0)


def choose(places: Sequence[Sequence[Any]], batch_size: int, batches: int) -> list[Any]:
    """Return the number of processes of each rank, and why.

    Args:
        places: the `Place` of each rank, in order of rank.
        batch_size: samples of a local batch.
        batches: of an epoch of each rank.
    """
    everywhere = [Place(*place) for place in places]
    by_node: dict[int, list[Place]] = {}
    for place in everywhere:
        by_node.setdefault(place.node, []).append(place)
    available, cpus, ranks = min(map(available_on, by_node.values()))
    machine = f"{count_cpus(cpus)} for {count(ranks, 'rank')}"
    times = [place.seconds for place in everywhere if place.seconds is not None]
    if not times:
        return [available, f"no sample of a stream is tried; a machine has {machine}"]

    seconds = batch_size * statistics.median_low(times)
    loading = (
        f"loading a local batch, {count(batch_size, 'sample')}, takes {1000 * seconds:,.1f} ms"
    )
    if seconds <= CHEAP:
        return [0, f"{loading}, which each rank does itself"]
    wanted = min(math.ceil(seconds / READY), batches)
    number = min(wanted, available)
    why = f"{loading}; a machine has {machine}"
    fitting = min(place.most for place in everywhere if place.most is not None)
    if fitting < number:
        return [fitting, f"{why}; the batches of {number} do not fit in {SHARED_MEMORY}"]
    if wanted < available:
        why += f"; more than a batch every {1000 * READY:g} ms is not needed"
    return [number, why]


def count_cpus(cpus: float) -> str:
    """Return a number of CPUs, which may be a fraction, with its noun."""
    return f"{cpus:g} CPU{'' if cpus == 1 else 's'}"


def available_on(ranks: Sequence[Place]) -> tuple[int, float, int]:
    """Return the processes that each rank of a machine may have, its CPUs, and its ranks.

    A scheduler may give each rank CPUs of its own. The time of the cgroup is that of all of them.
    One process is available also where a rank has one CPU: it reads while the rank waits.
    """
    numbers = {cpu for place in ranks for cpu in place.cpus}
    quotas = [place.quota for place in ranks if place.quota is not None]
    cpus = min([float(len(numbers)), *quotas])
    return max(1, math.floor(cpus / len(ranks)) - 1), cpus, len(ranks)
