"""Timelines: what happened when, in one row per rank or stream."""

from typing import TYPE_CHECKING

from ddp_lab.observe.axes import COLOURS, ROW, legend_below, legend_height, name_rows, round_numbers, short
from ddp_lab.observe.plot import HEIGHT, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Boxes = list[tuple[float, float, str]]  # a row of a timeline: start and end in seconds, and a label


def timeline(title: str, rows: dict[str, Boxes]) -> Plot:
    """Return a timeline with a row per name, a box per (start, end, label) and a colour per label.

    The x axis is in milliseconds since the first start. The legend is below the axes.

    Args:
        title: title of the plot.
        rows: the boxes of each row, by name; start and end are in seconds.

    Raises:
        ValueError: there is no box to draw.
    """
    boxes = [box for row in rows.values() for box in row]
    if not boxes:
        raise ValueError(f"{title}: no boxes to draw")
    first = min(start for start, _, _ in boxes)
    span = 1000 * (max(end for _, end, _ in boxes) - first) or 1.0
    labels = dict.fromkeys(label for _, _, label in boxes)
    colours = {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}

    def draw(axes: "Axes") -> None:
        for number, row in enumerate(rows.values()):
            # Every box is wide enough to be seen. Wide ones get a white edge, so that adjacent boxes can be counted.
            spans = [(1000 * (start - first), max(1000 * (end - start), span / 250)) for start, end, _ in row]
            fills = [colours[label] for _, _, label in row]
            edges = ["white" if width > span / 100 else "none" for _, width in spans]
            axes.broken_barh(spans, (number - 0.38, 0.76), facecolors=fills, edgecolors=edges, linewidth=0.7)
        name_rows(axes, rows)
        axes.set_xlim(-0.01 * span, 1.01 * span)  # a short box at either end remains visible
        axes.set_xlabel("ms")
        axes.xaxis.set_major_locator(round_numbers())
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        legend_below(axes, colours)

    return Plot(title, max(HEIGHT, ROW * len(rows) + legend_height(labels) + 1.5), draw)
