"""Pictures of what a model predicts: the confusion matrix, and images with their predictions."""

import textwrap
from typing import TYPE_CHECKING

import torch

from ddp_lab.observe.plot import clipped, house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 30  # largest number of classes whose names and counts are drawn
SHORT = 2  # characters of a name that fits below its column without being turned
SHOWN = 8  # images of a prediction grid


def drawable_names(classes: list[str]) -> list[str]:
    """Return the names of classes that the font can draw, or the class's number."""
    if all(name.isascii() for name in classes):
        return classes
    from ddp_lab.observe.glyphs import drawable

    return drawable(classes)


@house_style()
def confusion_figure(counts: torch.Tensor, classes: list[str], title: str = "") -> "Figure":
    """Draw a confusion matrix.

    The darker a cell, the larger its fraction of the samples of its row.

    Args:
        counts: int64 [classes, classes], a row per true class and a column per predicted class.
        classes: the names of the classes; a name that the font cannot draw is replaced by its
            number.
        title: what was evaluated: run, set and epoch.
    """
    from matplotlib.figure import Figure

    size = len(counts)
    side = 4 + 0.45 * min(size, NAMED)  # inches
    figure = Figure((side, side), layout="constrained")
    axes = figure.subplots()
    fractions = counts / counts.sum(1, keepdim=True).clamp(min=1)
    image = axes.imshow(fractions.numpy(), cmap="Blues", vmin=0, vmax=1)
    characters = int(6 * side)  # of a line at the title's size
    axes.set_title(textwrap.fill(title, characters), loc="left", size=15, weight="bold", pad=12)
    axes.set(xlabel="predicted class", ylabel="true class")
    axes.grid(visible=False)

    if size <= NAMED:
        names = [clipped(name) for name in drawable_names(classes)]
        are_short = all(len(name) <= SHORT for name in names)
        axes.set_xticks(range(size), names, rotation=0 if are_short else 90)
        axes.set_yticks(range(size), names)
        for row, column in counts.nonzero().tolist():
            colour = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(
                column,
                row,
                str(int(counts[row, column])),
                color=colour,
                size=8,
                ha="center",
                va="center",
            )
    figure.colorbar(image, label="fraction of the true class", shrink=0.8)
    return figure


@house_style()
def prediction_grid(
    inputs: torch.Tensor, targets: list[int], predicted: list[int], classes: list[str]
) -> "Figure":
    """Draw the first images with the true class above and the prediction below each.

    The prediction is green if correct, else red.

    Args:
        inputs: float [n, channels, height, width], in any range.
        targets: the true class of each image.
        predicted: the predicted class of each image.
        classes: the names of the classes; a name that the font cannot draw is replaced by its
            number.
    """
    from matplotlib.figure import Figure

    names = [clipped(name, 11) for name in drawable_names(classes)]
    # not RGB: the first channel in grey
    inputs = inputs[:SHOWN] if inputs.shape[1] == 3 else inputs[:SHOWN, :1]
    figure = Figure((SHOWN * 1.6, 2.6), layout="constrained")
    text = "above: the true class; below: the prediction, in red where it is wrong"
    figure.suptitle(text, x=0.01, ha="left", size=9, weight="normal")
    for axes, image, target, guess in zip(
        figure.subplots(1, len(inputs), squeeze=False)[0], inputs, targets, predicted, strict=False
    ):
        low = image.min()
        high = image.max()
        axes.imshow(
            ((image - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0).numpy(),
            cmap="gray",
            vmin=0,
            vmax=1,
        )
        axes.set_title(names[target], size=9)
        axes.set_xlabel(names[guess], size=9, color="darkgreen" if guess == target else "red")
        axes.set(xticks=[], yticks=[])
    return figure
