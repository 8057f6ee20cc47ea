"""Test images with the model's predictions, as one picture."""

from typing import TYPE_CHECKING

import torch

from ddp_lab.observe.canvas import empty_figure, house_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TILE, COLUMNS = 1.6, 4  # width of an image in inches, images in a row
LONGEST = 11  # maximum number of characters of a name below an image


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
    names = [name if len(name) <= LONGEST else name[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}" for name in classes]
    inputs = inputs[:most] if inputs.shape[1] == 3 else inputs[:most, :1]  # not RGB: the first channel in grey
    columns, rows = min(COLUMNS, len(inputs)), -(-len(inputs) // COLUMNS)
    figure = empty_figure(columns * TILE, rows * (TILE + 0.5))
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
