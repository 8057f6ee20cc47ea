"""Pictures of what a model predicts: the confusion matrix, the accuracy of each class, and images with their predictions."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ddp_lab.observe.plot import clipped, house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELLED, NUMBERED = 30, 12  # largest numbers of classes whose names, and whose counts, are drawn
TILE, COLUMNS = 1.6, 4  # width of an image in inches, images in a row
LONGEST_NAME = 11  # maximum number of characters of a name below an image


@house_style()
def confusion_figure(counts: torch.Tensor, classes: list[str]) -> "Figure":
    """Draw a confusion matrix. The darker a cell, the larger its fraction of the samples of its row.

    Args:
        counts: int64 [classes, classes], a row per true class and a column per predicted class.
        classes: the names of the classes.
    """
    from matplotlib.figure import Figure

    size = len(counts)
    names = [clipped(name) for name in classes] if size <= LABELLED else []
    labels = 0.11 * max(map(len, names), default=6)  # inches
    side = max(3.5, 0.45 * size if size <= NUMBERED else 0.27 * size if names else size / 150)  # a pixel per class or more
    figure = Figure((side + labels + 1.8, side + labels + 0.8), layout="constrained")
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


@house_style()
def prediction_grid(
    inputs: torch.Tensor, targets: list[int], predicted: list[int], classes: list[str], most: int = 8
) -> "Figure":
    """Draw images in rows of four with the prediction below each: green if correct, else red with the true class below.

    Args:
        inputs: float [n, channels, height, width], in any range.
        targets: the true class of each image.
        predicted: the predicted class of each image.
        classes: the names of the classes.
        most: largest number of images to draw.
    """
    from matplotlib.figure import Figure

    names = [clipped(name, LONGEST_NAME) for name in classes]
    inputs = inputs[:most] if inputs.shape[1] == 3 else inputs[:most, :1]  # not RGB: the first channel in grey
    columns, rows = min(COLUMNS, len(inputs)), -(-len(inputs) // COLUMNS)
    figure = Figure((columns * TILE, rows * (TILE + 0.5)), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in places:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for axes, image, target, guess in zip(places, inputs, targets, predicted, strict=False):
        low, high = image.min(), image.max()
        axes.imshow(((image - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
        right = guess == target
        text = names[guess] if right else f"{names[guess]}\n({names[target]})"
        axes.set_xlabel(text, size=9, color="darkgreen" if right else "red")
    return figure
