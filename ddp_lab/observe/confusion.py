"""The confusion matrix as a picture and the accuracy of each class as a file.

Pillow draws the picture, because matplotlib would take 0.3 s of every run.
"""

import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ddp_lab.observe.axes import COLOURS, clipped

LABELLED, NUMBERED = 30, 12  # largest numbers of classes whose names, and whose counts, are drawn
SIDE, GAP, LINE = 720, 8, 20  # pixels: of a matrix without names, between parts, of a line of text
AXES = "rows: true class, columns: predicted class, colour: fraction of the row"


def confusion_picture(counts: torch.Tensor, classes: list[str]) -> Image.Image:
    """Draw a confusion matrix. The darker a cell, the larger its fraction of the samples of its row.

    Args:
        counts: int64 [classes, classes], a row per true class and a column per predicted class.
        classes: the names of the classes.
    """
    size = len(counts)
    cell = 44 if size <= NUMBERED else 24 if size <= LABELLED else max(1, SIDE // size)
    fractions = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    dark = np.array([int(COLOURS[0][i : i + 2], 16) for i in (1, 3, 5)])
    pixels = 255 - fractions.numpy()[..., None] * (255 - dark)
    matrix = Image.fromarray(pixels.round().astype(np.uint8)).resize((size * cell, size * cell), Image.Resampling.NEAREST)
    if size <= NUMBERED:
        number(matrix, counts, fractions, cell)
    names = [clipped(name) for name in classes] if size <= LABELLED else []
    font = ImageFont.load_default(size=15)
    margin = max((int(font.getlength(name)) for name in names), default=0) + GAP
    width = max(margin + size * cell, int(font.getlength(AXES))) + 2 * GAP
    picture = Image.new("RGB", (width, LINE + margin + size * cell + 3 * GAP), "white")
    left, top = margin + GAP, LINE + 2 * GAP
    picture.paste(matrix, (left, top))
    draw = ImageDraw.Draw(picture)
    draw.text((GAP, GAP), AXES, "black", font)
    draw.rectangle((left - 1, top - 1, left + size * cell, top + size * cell), outline="#8C8C8C")
    for place, name in enumerate(names):
        middle = place * cell + cell // 2
        draw.text((left - GAP, top + middle), name, "black", font, anchor="rm")
        below = Image.new("RGB", (margin - GAP, LINE), "white")
        ImageDraw.Draw(below).text((margin - GAP, LINE // 2), name, "black", font, anchor="rm")
        picture.paste(below.rotate(90, expand=True), (left + middle - LINE // 2, top + size * cell + GAP // 2))
    return picture


def number(matrix: Image.Image, counts: torch.Tensor, fractions: torch.Tensor, cell: int) -> None:
    """Write the counts that are not zero into the cells of the picture `matrix`."""
    draw, font = ImageDraw.Draw(matrix), ImageFont.load_default(size=13)
    for row, column in counts.nonzero().tolist():
        count = int(counts[row, column])
        text = str(count) if count < 10_000 else f"{count / 1000:.0f}k"
        colour = "white" if fractions[row, column] > 0.5 else "black"
        draw.text(((column + 0.5) * cell, (row + 0.5) * cell), text, colour, font, anchor="mm")


def write_classes(counts: torch.Tensor, classes: list[str], path: Path) -> None:
    """Write a CSV file with the columns class, samples, correct and accuracy; the accuracy of a class without samples is empty.

    Args:
        counts: as in `confusion_picture`.
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
