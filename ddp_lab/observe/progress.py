"""How far an epoch is: a bar on a terminal, else lines of the log."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from tqdm import tqdm

from ddp_lab.observe.log import log

T = TypeVar("T")
BAR, LINE = 1.0, 10.0  # seconds from one set of numbers to the next: of a bar, and of lines in a file
HIDDEN = ("epoch", "step", "lr", "samples_per_second", "data_wait", "peak_memory_MiB", "mfu", "eta_epoch", "eta")


def describe_steps(row: Mapping[str, Any]) -> str:
    """Return the metrics of some steps, as "loss 0.1234, lr 0.05, 1,234 samples/s, ...". The arguments are as for `Meter`."""
    parts = [f"{name.replace('_', ' ')} {value:.4f}" for name, value in row.items() if name not in HIDDEN]
    parts += [f"lr {row['lr']:.4g}", f"{row['samples_per_second']:,.0f} samples/s", f"{row['data_wait']:.0%} data"]
    parts += [f"{row['mfu']:.1%} MFU"] if "mfu" in row else []
    parts += [f"{row['peak_memory_MiB']:,.0f} MiB", f"{clock(row['eta_epoch'])} left, {clock(row['eta'])} of the run"]
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """Return a duration as h:mm:ss or mm:ss."""
    return tqdm.format_interval(seconds)


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
        self._bar = tqdm(batches, label, total=total, initial=done, unit="step", leave=False, disable=None)
        self.every = LINE if self._bar.disable else BAR
        return self._bar

    def show(self, row: Mapping[str, Any]) -> None:
        """Show the metrics of some steps behind the bar or as a line of the log."""
        if self._bar.disable:
            log.info(f"epoch {row['epoch']}, step {row['step']}: {describe_steps(row)}")
        else:
            self._bar.set_postfix_str(describe_steps(row), refresh=False)
