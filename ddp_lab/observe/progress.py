"""How far an epoch is: a bar on a terminal, else lines of the log."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from tqdm import tqdm

from ddp_lab.observe.log import log

T = TypeVar("T")
BAR, LINE = 1.0, 10.0  # seconds from one set of numbers to the next: of a bar, and of lines in a file
FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
OTHERS = ("epoch", "step", "lr", "samples_per_second", "data_wait", "peak_memory_MiB", "mfu", "eta_epoch", "eta")


def describe_steps(row: Mapping[str, Any]) -> str:
    """Return the metrics of some steps, as "loss 0.1234, accuracy 0.9876, lr 0.05, 1,234 samples/s, ..."."""
    parts = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in row.items() if name not in OTHERS]
    parts += [f"lr {row['lr']:.4g}", f"{row['samples_per_second']:,.0f} samples/s", f"{row['data_wait']:.0%} waiting for data"]
    parts += [f"MFU {row['mfu']:.1%}"] if "mfu" in row else []
    epoch, run = (tqdm.format_interval(row[name]) for name in ("eta_epoch", "eta"))
    return ", ".join([*parts, f"{row['peak_memory_MiB']:,.0f} MiB, left: {epoch} of the epoch, {run} of the run"])


class Display:
    """Where rank 0 shows how far an epoch is.

    Attributes:
        every: seconds from one call of `show` to the next.
    """

    def __init__(self):
        self.every = LINE
        self._bar: Any = None

    def batches(self, batches: Iterable[T], label: str, done: int, total: int) -> Iterable[T]:
        """Return the batches. On a terminal, iterating over them shows a bar.

        Args:
            batches: the batches to iterate over.
            label: text in front of the bar.
            done: number of steps already taken.
            total: number of steps in all.
        """
        # disable=None shows the bar only on a terminal
        self._bar = tqdm(batches, label, total=total, initial=done, leave=False, disable=None, bar_format=FORMAT)
        self._on_terminal = not self._bar.disable  # which also becomes true at the end of the epoch
        self.every = BAR if self._on_terminal else LINE
        return self._bar

    def show(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of some steps after the bar or as a line of the log."""
        if self._on_terminal:
            self._bar.set_postfix_str(describe_steps(row), refresh=False)
        else:
            log.info(f"epoch {row['epoch']}, step {row['step']}: {describe_steps(row)}")
