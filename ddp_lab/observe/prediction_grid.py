"""Test images with the model's predictions, as one picture. Pillow draws it, because importing torchvision would take 1.5 s."""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

TILE, LINE, GAP = 84, 18, 4  # pixels
COLUMNS = 4


def prediction_grid(
    inputs: torch.Tensor, targets: list[int], predicted: list[int], classes: list[str], most: int = 8
) -> torch.Tensor:
    """Draw images in rows of four with the prediction below each: green if correct, else red with the true class below.

    Args:
        inputs: float [n, channels, height, width], in any range.
        targets: the true class of each image.
        predicted: the predicted class of each image.
        classes: the names of the classes.
        most: largest number of images to draw.

    Returns:
        uint8 [3, height, width].
    """
    font = ImageFont.load_default(size=15)
    inputs = inputs[:most] if inputs.shape[1] == 3 else inputs[:most, :1]  # not RGB: the first channel in grey
    columns, rows = min(COLUMNS, len(inputs)), -(-len(inputs) // COLUMNS)
    width, height = TILE + GAP, TILE + 2 * LINE + GAP
    grid = Image.new("RGB", (columns * width + GAP, rows * height + GAP), "white")
    draw = ImageDraw.Draw(grid)
    for i, (image, target, guess) in enumerate(zip(inputs, targets, predicted, strict=False)):
        x, y = GAP + i % COLUMNS * width, GAP + i // COLUMNS * height
        low, high = image.min(), image.max()
        pixels = ((image - low) / (high - low).clamp(min=1e-6) * 255).byte().expand(3, -1, -1)
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        grid.paste(picture.resize((TILE, TILE), Image.Resampling.NEAREST), (x, y))
        draw.text((x + 2, y + TILE), classes[guess], font=font, fill="darkgreen" if guess == target else "red")
        if guess != target:
            draw.text((x + 2, y + TILE + LINE), f"({classes[target]})", font=font, fill="black")
    return torch.from_numpy(np.array(grid)).permute(2, 0, 1)
