"""The energy that the GPUs of a run use, from the counters of the driver.

A counter is that of a GPU and not of a process: what other programs do on the GPU is in it. CPUs,
memory of the host and cooling are not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ddp_lab.world.nvml import EnergyCounter, open_counters
from ddp_lab.world.runtime import Runtime

JOULES_PER_KWH = 3.6e6


class Energy(NamedTuple):
    """Joules of all GPUs of a launch.

    Attributes:
        launch: since its beginning.
        steps: of the steps of the epoch, in this launch.
    """

    launch: float
    steps: float


class EnergyMeter:
    """The counters of the GPUs of all ranks.

    Args:
        runtime: of this rank.
        counters: of the GPUs that this rank reads: each GPU is read by one rank.
        before: joules of the run before this launch.
    """

    def __init__(self, runtime: Runtime, counters: Sequence[EnergyCounter], before: float):
        self.before = before
        self._runtime = runtime
        self._counters = counters
        self._began = self._count()
        self._epoch_began = self._began

    def _count(self) -> float:
        return sum(counter.joules() for counter in self._counters)

    def read_here(self) -> float:
        """Return the joules of the GPUs that this rank reads, since the beginning of the launch."""
        return self._count() - self._began

    def begin_epoch(self) -> None:
        """Begin with the remaining steps of an epoch."""
        self._epoch_began = self._count()

    def leave_out(self, joules: float) -> None:
        """Leave joules of `read_here` in which no step was taken out of those of the steps."""
        self._epoch_began += joules

    def read(self) -> Energy:
        """Return the joules of all ranks. Collective; waits for the device."""
        now = self._count()
        here = [now - self._began, now - self._epoch_began]
        tensor = torch.tensor(here, dtype=torch.float64, device=self._runtime.device)
        launch, steps = self._runtime.all_reduce(tensor).tolist()
        return Energy(launch, steps)


def open_meter(
    runtime: Runtime, devices: Sequence[torch.device], before: float
) -> EnergyMeter | None:
    """Return the meter of a launch; None if a GPU of a rank has no counter. Collective.

    A GPU that several ranks use is read by the first of them.

    Args:
        runtime: of this rank.
        devices: CUDA devices of this rank, with repetitions.
        before: joules of the run before this launch.
    """
    uuids = uuids_of(devices)
    counters = open_counters(uuids)
    value = [len(counters) == len(uuids), uuids]
    chosen = runtime.gather_and_decide("energy", value, choose_readers)
    if not chosen:
        return None
    readers: dict[str, int] = dict(chosen)
    read_here = [counter for counter in counters if readers[counter.uuid] == runtime.rank]
    return EnergyMeter(runtime, read_here, before)


def choose_readers(ranks: list[tuple[bool, list[str]]]) -> list[tuple[str, int]]:
    """Return the rank that reads each GPU, by UUID; none if the sum would lack a GPU.

    Args:
        ranks: of each rank whether all its GPUs have counters, and their UUIDs.
    """
    if not all(is_complete for is_complete, _ in ranks):
        return []
    readers: dict[str, int] = {}
    for rank, (_, uuids) in enumerate(ranks):
        for uuid in uuids:
            readers.setdefault(uuid, rank)
    return list(readers.items())


def uuids_of(devices: Sequence[torch.device]) -> list[str]:
    """Return the UUIDs of CUDA devices as NVML takes them, each once."""
    properties = [torch.cuda.get_device_properties(device) for device in devices]
    return list(dict.fromkeys(f"GPU-{each.uuid}" for each in properties))
