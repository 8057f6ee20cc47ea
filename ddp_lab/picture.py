"""Test images with what the model took them for, as one picture."""

import torch
from PIL import Image, ImageDraw
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

TILE, CAPTION = 84, 26  # pixels


def prediction_grid(
    inputs: torch.Tensor, targets: list[int], predicted: list[int], classes: list[str], most: int = 16
) -> torch.Tensor:
    """uint8 [3, height, width]: up to `most` images, eight a row, the prediction beneath; a wrong one in red over the truth.

    Args:
        inputs: float [n, 1 or 3, height, width], in any range.
    """
    tiles = []
    for image, target, guess in zip(inputs[:most], targets, predicted, strict=False):
        low, high = image.min(), image.max()
        picture = to_pil_image(((image - low) / (high - low).clamp(min=1e-6)).expand(3, -1, -1))
        tile = Image.new("RGB", (TILE, TILE + CAPTION), "white")
        tile.paste(picture.resize((TILE, TILE), Image.Resampling.NEAREST))
        draw = ImageDraw.Draw(tile)
        draw.text((3, TILE + 1), classes[guess], fill="darkgreen" if guess == target else "red")
        if guess != target:
            draw.text((3, TILE + 13), f"({classes[target]})", fill="black")
        tiles.append(pil_to_tensor(tile))
    return make_grid(torch.stack(tiles), nrow=8, padding=4, pad_value=255)
