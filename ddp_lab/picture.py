"""Test images with what the model took them for, as one picture."""

import torch
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import make_grid

TILE, LINE = 84, 18  # pixels
FONT = ImageFont.load_default(size=15)


def prediction_grid(
    inputs: torch.Tensor, targets: list[int], predicted: list[int], classes: list[str], most: int = 8
) -> torch.Tensor:
    """uint8 [3, height, width]: up to `most` images, four a row, the prediction beneath; a wrong one in red over the truth.

    Args:
        inputs: float [n, channels, height, width], in any range.
    """
    tiles = []
    inputs = inputs[:most] if inputs.shape[1] == 3 else inputs[:most, :1]  # of other numbers of channels the first, in grey
    for image, target, guess in zip(inputs, targets, predicted, strict=False):
        low, high = image.min(), image.max()
        picture = to_pil_image(((image - low) / (high - low).clamp(min=1e-6)).expand(3, -1, -1))
        tile = Image.new("RGB", (TILE, TILE + 2 * LINE), "white")
        tile.paste(picture.resize((TILE, TILE), Image.Resampling.NEAREST))
        draw = ImageDraw.Draw(tile)
        draw.text((2, TILE), classes[guess], font=FONT, fill="darkgreen" if guess == target else "red")
        if guess != target:
            draw.text((2, TILE + LINE), f"({classes[target]})", font=FONT, fill="black")
        tiles.append(pil_to_tensor(tile))
    return make_grid(torch.stack(tiles), nrow=4, padding=4, pad_value=255)
