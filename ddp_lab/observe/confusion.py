"""The confusion matrix as a picture and the accuracy of each class as a file."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ddp_lab.observe.axes import clipped
from ddp_lab.observe.canvas import empty_figure, house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELLED, NUMBERED = 30, 12  # largest numbers of classes whose names, and whose counts, are drawn


@house_style()
def confusion_figure(counts: torch.Tensor, classes: list[str]) -> "Figure":
    """Draw a confusion matrix. The darker a cell, the larger its fraction of the samples of its row.

    Args:
        counts: int64 [classes, classes], a row per true class and a column per predicted class.
        classes: the names of the classes.
    """
    size = len(counts)
    names = [clipped(name) for name in classes] if size <= LABELLED else []
    labels = 0.11 * max(map(len, names), default=6)  # inches
    side = max(3.5, 0.45 * size if size <= NUMBERED else 0.27 * size if names else size / 150)  # a pixel per class or more
    figure = empty_figure(side + labels + 1.8, side + labels + 0.8)
    axes = figure.subplots()
    fractions = counts / counts.sum(1, keepdim=True).clamp(min=1)
    image = axes.imshow(fractions.numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.grid(visible=False)
    if names:
        axes.set_xticks(range(size), names, rotation=90)
        axes.set_yticks(range(size), names)
    for row, column in counts.nonzero().tolist() if size <= NUMBERED else ():
        count, colour = int(counts[row, column]), "white" if fractions[row, column] > 0.5 else "black"
        text = str(count) if count < 10_000 else f"{count / 1000:.0f}k"
        axes.text(column, row, text, color=colour, size=10, ha="center", va="center")
    figure.colorbar(image, label="fraction of the true class", shrink=0.8)
    return figure


def write_classes(counts: torch.Tensor, classes: list[str], path: Path) -> None:
    """Write a CSV file with the columns class, samples, correct and accuracy; the accuracy of a class without samples is empty.

    Args:
        counts: as in `confusion_figure`.
        classes: the names of the classes.
        path: the file.
    """
    rows = zip(classes, counts.sum(1).tolist(), counts.diag().tolist(), strict=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("class", "samples", "correct", "accuracy"))
        writer.writerows(
            (name, samples, correct, f"{correct / samples:.6g}" if samples else "") for name, samples, correct in rows
        )
