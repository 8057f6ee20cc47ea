"""The first recorded loss in which two runs differ."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ddp_lab.observe.metrics_file import read_rows

ROUNDING = 1e-4  # relative difference of a loss up to which another order of addition explains it
# Loss that no other kind of row has, by kind
LOSSES = {
    "step": ("loss",),
    "evaluation": ("val_loss", "test_loss"),
    "epoch": ("train_loss", "val_loss", "test_loss"),
}


class FirstLoss(NamedTuple):
    """The first recorded loss that differs.

    Attributes:
        name: of the loss, for example train_loss.
        step: number of the last step that counts in it.
        equal_until: number of the last step before whose recorded losses are all equal; 0: none.
        values: of both runs.
        epoch: its epoch.
    """

    name: str
    step: int
    equal_until: int
    values: tuple[float | None, float | None]
    epoch: int

    @property
    def is_rounding(self) -> bool:
        """Whether the difference is as small as that of another order of addition."""
        one, other = self.values
        if one is None or other is None:
            return False
        return abs(one - other) <= ROUNDING * max(abs(one), abs(other))

    def __str__(self) -> str:
        one, other = self.values
        before = f"; equal up to step {self.equal_until}" if self.equal_until else ""
        where = (
            f"step {self.step}" if self.name == "loss" else f"epoch {self.epoch}, step {self.step}"
        )
        size = " (in the last digits)" if self.is_rounding else ""
        return f"{where}: {self.name} {one} -> {other}{size}{before}"


def first_loss(one: Path, other: Path) -> tuple[FirstLoss | None, int]:
    """Return the first recorded loss that differs, and the number of those that were compared.

    Rows of steps are means since the row before, so that only those after the same row count.
    """
    before = dict(losses_of(one))
    compared = 0
    equal_until = 0
    for place, values in losses_of(other):
        if place not in before:
            continue
        (step, epoch, _, _) = place
        for name, value in values.items():
            if name not in before[place]:
                continue
            compared += 1
            first = before[place][name]
            if first != value:
                return FirstLoss(name, step, equal_until, (first, value), epoch), compared
        equal_until = step
    return None, compared


def losses_of(folder: Path) -> Iterable[tuple[tuple[int, int, str, int], dict[str, float | None]]]:
    """Yield place and losses of each row: step, epoch, kind, and step of the row before."""
    last = 0
    for row in read_rows(folder / "metrics.jsonl"):
        kind = row.get("kind", "epoch")
        names = LOSSES.get(kind, ())
        before = last if kind == "step" else 0
        step = int(row.get("step", 0))
        if kind == "step":
            last = step
        losses = {name: row[name] for name in names if name in row}
        yield (step, int(row.get("epoch", 0)), kind, before), losses
