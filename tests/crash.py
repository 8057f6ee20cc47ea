"""A strategy that dies once: rank 1 of the first attempt, before its third epoch."""

import os

from ddp_lab.strategies.ddp import DDP


class CrashOnce(DDP):
    epochs = 0

    def train(self, mode: bool = True) -> None:
        self.epochs += mode
        if self.epochs == 3 and self.dp_rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(17)
        super().train(mode)
