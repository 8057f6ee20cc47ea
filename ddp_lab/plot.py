"""Curves, bars and timelines as PNG, by Pillow, which torchvision brings along."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 720, 440  # pixels of one plot
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 40, 52
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#17becf")
SMALL, LARGE = ImageFont.load_default(size=13), ImageFont.load_default(size=16)
Boxes = list[tuple[float, float, str]]  # start and end in seconds, and what ran: the row of a timeline


class Curve(NamedTuple):
    """Points of one line; `dashed` for what is no measurement: an ideal, a formula."""

    label: str
    points: list[tuple[float, float]]
    dashed: bool = False


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if raw <= power * factor * 1.0001)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """1500 as 1.5k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def canvas(title: str, y_label: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    draw.text((LEFT, 3), title, font=LARGE, fill="black")
    draw.text((8, TOP - 18), y_label, font=SMALL, fill="black")
    return image, draw


def curves(title: str, x_label: str, y_label: str, lines: Sequence[Curve], log: bool = False) -> Image.Image:
    """Lines over x; with `log` both axes are logarithmic.

    Raises:
        ValueError: there is no point to draw.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        raise ValueError(f"{title}: no points to draw")
    scale = math.log10 if log else float
    xs, ys = [scale(x) for x, _ in points], [scale(y) for _, y in points]
    x0, x1 = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    y0, y1 = min(ys) - 0.05 * (max(ys) - min(ys)), max(ys) if max(ys) > min(ys) else min(ys) + 1

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (scale(x) - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return right, HEIGHT - BOTTOM - (scale(y) - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    image, draw = canvas(title, y_label)
    if log:
        x_ticks = [10**power for power in range(math.ceil(x0), math.floor(x1) + 1)]
        y_ticks = [10**power for power in range(math.ceil(y0), math.floor(y1) + 1)]
    else:
        places = sorted({x for x, _ in points})
        x_ticks, y_ticks = places if len(places) <= 6 else ticks(x0, x1), ticks(y0, y1)
    for value in x_ticks:
        x, _ = place(value, points[0][1])
        draw.line([(x, TOP), (x, HEIGHT - BOTTOM)], fill="#eeeeee")
        draw.text((x, HEIGHT - BOTTOM + 6), short(value), font=SMALL, fill="black", anchor="ma")
    for value in y_ticks:
        _, y = place(points[0][0], value)
        draw.line([(LEFT, y), (WIDTH - RIGHT, y)], fill="#eeeeee")
        draw.text((LEFT - 8, y), short(value), font=SMALL, fill="black", anchor="rm")
    draw.text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 20), x_label, font=SMALL, fill="black", anchor="ma")
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = [place(x, y) for x, y in line.points]
        draw_path(draw, path, colour, line.dashed)
        y = TOP + 6 + 18 * number
        draw_path(draw, [(LEFT + 10, y + 7), (LEFT + 34, y + 7)], colour, line.dashed)
        draw.text((LEFT + 40, y), line.label, font=SMALL, fill=colour)
    draw.rectangle([LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM], outline="#888888")
    return image


def draw_path(draw: ImageDraw.ImageDraw, path: list[tuple[float, float]], colour: str, dashed: bool) -> None:
    if not dashed:
        draw.line(path, fill=colour, width=2)
        for x, y in path if len(path) < 40 else []:
            draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=colour)
        return
    for (xa, ya), (xb, yb) in pairwise(path):
        pieces = max(1, int(math.hypot(xb - xa, yb - ya) / 6))
        for i in range(0, pieces, 2):
            start, stop = i / pieces, min(1.0, (i + 1) / pieces)
            draw.line(
                [(xa + (xb - xa) * start, ya + (yb - ya) * start), (xa + (xb - xa) * stop, ya + (yb - ya) * stop)], fill=colour
            )


def bars(title: str, y_label: str, values: dict[str, float]) -> Image.Image:
    """One bar for each name, its value on top."""
    image, draw = canvas(title, y_label)
    most, room = max(values.values()), (WIDTH - LEFT - RIGHT) / len(values)
    for number, (label, value) in enumerate(values.items()):
        left, top = LEFT + (number + 0.15) * room, HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM - 20)
        draw.rectangle([left, top, left + 0.7 * room, HEIGHT - BOTTOM], fill=COLOURS[number % len(COLOURS)])
        draw.text((left + 0.35 * room, top - 4), short(float(f"{value:.3g}")), font=SMALL, fill="black", anchor="mb")
        draw_name(draw, label, number, room)
    draw.line([(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)], fill="#888888")
    return image


def draw_name(draw: ImageDraw.ImageDraw, name: str, number: int, room: float) -> None:
    """Under bar `number` of such that have `room` each; where that is little, every second name a line lower."""
    lower = 16 * (number % 2) if room < 90 else 0
    draw.text((LEFT + (number + 0.5) * room, HEIGHT - BOTTOM + 6 + lower), name, font=SMALL, fill="black", anchor="ma")


def stacked(title: str, y_label: str, values: dict[str, dict[str, float]]) -> Image.Image:
    """One bar for each name, its parts on top of each other; all have the same parts."""
    image, draw = canvas(title, y_label)
    names = list(next(iter(values.values())))
    most, room = max(sum(parts.values()) for parts in values.values()), (WIDTH - LEFT - RIGHT) / len(values)
    scale = (HEIGHT - TOP - BOTTOM - 44) / most
    for number, (label, parts) in enumerate(values.items()):
        left, bottom = LEFT + (number + 0.15) * room, HEIGHT - BOTTOM
        for colour, name in zip(COLOURS, names, strict=False):
            draw.rectangle([left, bottom - parts[name] * scale, left + 0.7 * room, bottom], fill=colour)
            bottom -= parts[name] * scale
        total = short(float(f"{sum(parts.values()):.3g}"))
        draw.text((left + 0.35 * room, bottom - 4), total, font=SMALL, fill="black", anchor="mb")
        draw_name(draw, label, number, room)
    draw_legend(draw, dict(zip(names, COLOURS, strict=False)), LEFT)
    draw.line([(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)], fill="#888888")
    return image


def timeline(title: str, rows: dict[str, Boxes]) -> Image.Image:
    """What ran when: a row for each name, a box for each (start, end, label), a colour for each label. x is in ms since the
    first start; the names take what room they need, at most half of the plot.

    Raises:
        ValueError: there is no box to draw.
    """
    boxes = [box for row in rows.values() for box in row]
    if not boxes:
        raise ValueError(f"{title}: no boxes to draw")
    first = min(start for start, _, _ in boxes)
    span = 1000 * (max(end for _, end, _ in boxes) - first) or 1.0
    left = min(WIDTH / 2, max(LEFT, *(SMALL.getlength(name) + 16 for name in rows)))
    height = (HEIGHT - TOP - BOTTOM) / len(rows)

    def place(seconds: float) -> float:
        return left + 1000 * (seconds - first) / span * (WIDTH - RIGHT - left)

    image, draw = canvas(title, "")
    for value in ticks(0, span):
        x = place(first + value / 1000)
        draw.line([(x, TOP), (x, HEIGHT - BOTTOM)], fill="#eeeeee")
        draw.text((x, HEIGHT - BOTTOM + 6), short(value), font=SMALL, fill="black", anchor="ma")
    draw.text(((left + WIDTH - RIGHT) / 2, HEIGHT - 20), "ms", font=SMALL, fill="black", anchor="ma")
    labels = list(dict.fromkeys(label for _, _, label in boxes))
    colours = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}
    for number, (name, row) in enumerate(rows.items()):
        top = TOP + number * height
        draw.text((left - 8, top + height / 2), name, font=SMALL, fill="black", anchor="rm")
        for start, end, label in row:
            x0, x1 = place(start), max(place(start) + 1, place(end))
            outline = "white" if x1 - x0 > 3 else None  # boxes side by side can be counted where there is room
            draw.rectangle([x0, top + 0.15 * height, x1, top + 0.85 * height], fill=colours[label], outline=outline)
    draw_legend(draw, colours, left)
    draw.rectangle([left, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM], outline="#888888")
    return image


def draw_legend(draw: ImageDraw.ImageDraw, colours: dict[str, str], x: float) -> None:
    """Above the plot, from x on; ends with the last label that there is room for."""
    for label, colour in colours.items():
        if x + 16 + SMALL.getlength(label) > WIDTH:
            return
        draw.rectangle([x, TOP - 14, x + 10, TOP - 4], fill=colour)
        draw.text((x + 14, TOP - 9), label, font=SMALL, fill=colour, anchor="lm")
        x += 30 + SMALL.getlength(label)


def beside(images: Sequence[Image.Image], path: Path, columns: int = 2) -> None:
    """Writes the plots as one picture, `columns` in a row."""
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    whole = Image.new("RGB", (columns * WIDTH, rows * HEIGHT), "white")
    for number, image in enumerate(images):
        whole.paste(image, (number % columns * WIDTH, number // columns * HEIGHT))
    whole.save(path)
