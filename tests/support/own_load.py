"""A callback that stands for the energy of GPUs, in files that the library fake_nvml.c reads.

The file gpuN of the folder FAKE_GPUS has the millijoules of a GPU.
"""

import os
from pathlib import Path

from ddp_lab import Hook

STEP = 2_000  # millijoules
EVALUATION_BATCH = 300


def add(gpu: Path, millijoules: int) -> None:
    """Add millijoules to a GPU. A reader never finds a part of a number."""
    before = int(gpu.read_text())
    temporary = gpu.with_suffix(f".{os.getpid()}")
    temporary.write_text(str(before + millijoules))
    temporary.replace(gpu)


class Load(Hook):
    """Lets each rank use the energy of the GPU with its number, if there is such a GPU."""

    def on_start(self, run):
        self.gpu = Path(os.environ["FAKE_GPUS"]) / f"gpu{run.rank}"

    def on_step_end(self, position):
        self._use(STEP)

    def on_evaluation_batch(self, position, number):
        self._use(EVALUATION_BATCH)

    def _use(self, millijoules: int) -> None:
        if self.gpu.exists():
            add(self.gpu, millijoules)
