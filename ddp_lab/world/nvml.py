"""The energy counters of NVIDIA's GPUs, from NVML, a library of the driver.

nvmlDeviceGetTotalEnergyConsumption counts the millijoules of a GPU since the driver was loaded, on
Volta and later (https://docs.nvidia.com/deploy/nvml-api/, device queries). Three functions of C are
called by ctypes, as torch.cuda calls NVML for the number of devices: what would be a package has
thousands of lines for them.
"""

import ctypes
from collections.abc import Sequence

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0


class EnergyCounter:
    """The counter of a GPU.

    Args:
        library: NVML.
        handle: of the GPU.
        uuid: of the GPU.
    """

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p, uuid: str):
        self.uuid = uuid
        self._library = library
        self._handle = handle
        self._last = 0.0

    def joules(self) -> float:
        """Return the energy of the GPU since the driver was loaded.

        If the driver does not answer any more, it is the last one that is known.
        """
        energy = self._read()
        if energy is not None:
            self._last = energy
        return self._last

    def is_supported(self) -> bool:
        """Return whether the GPU has a counter; one before Volta and a part of one (MIG) do not."""
        return self._read() is not None

    def _read(self) -> float | None:
        millijoules = ctypes.c_ulonglong()
        code = self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(millijoules)
        )
        return millijoules.value / 1000 if code == SUCCESS else None


def open_counters(uuids: Sequence[str]) -> list[EnergyCounter]:
    """Return the counters of those GPUs that have one; none where there is no NVML.

    Args:
        uuids: as `nvidia-smi -L` has them, "GPU-...".
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    if library.nvmlInit_v2() != SUCCESS:
        return []
    counters: list[EnergyCounter] = []
    for uuid in uuids:
        handle = ctypes.c_void_p()
        code = library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        counter = EnergyCounter(library, handle, uuid)
        if code == SUCCESS and counter.is_supported():
            counters.append(counter)
    return counters
