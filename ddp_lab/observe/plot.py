"""Curves and bars as PNG files, drawn by matplotlib in the house style (figure.py).

`curves`, `bars`, `stacked` and `timeline` describe a panel; `beside` draws panels and writes them as one picture.
"""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ddp_lab.observe.coinciding import separate
from ddp_lab.observe.figure import (
    COLOURS,
    GREY,
    ROW,
    WIDTH,
    clipped,
    empty_figure,
    house_style,
    legend_below,
    legend_height,
    name_rows,
    round_numbers,
    set_x_ticks,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

HEIGHT = 4.0  # height of a panel in inches; rows or a legend can increase it
TITLE = 50  # maximum number of characters of a line of a title
Boxes = list[tuple[float, float, str]]  # a row of a timeline: start and end in seconds, and a label


class Curve(NamedTuple):
    """The points of one line. A dashed line was not measured; it shows an ideal or a formula."""

    label: str
    points: list[tuple[float, float]]
    dashed: bool = False


class Plot(NamedTuple):
    """One panel of a picture.

    Attributes:
        title: text above the panel.
        height: height in inches.
        draw: draws into empty axes. A legend is added to the figure of the axes, outside of them.
    """

    title: str
    height: float
    draw: "Callable[[Axes], None]"


def curves(title: str, x_label: str, y_label: str, lines: Sequence[Curve], log: bool = False, zero: bool = False) -> Plot:
    """Return a plot of lines over x. The legend is on the right, in the order of the lines' last values.

    Curves that coincide are drawn as dashes of alternating colours, with their markers side by side.

    Args:
        title: title of the plot.
        x_label, y_label: labels of the axes.
        lines: the curves; those without points are left out.
        log: whether both axes are logarithmic.
        zero: whether the y axis starts at zero.

    Raises:
        ValueError: there is no point to draw.
    """
    lines = [line for line in lines if line.points]
    places = sorted({x for line in lines for x, _ in line.points})
    if not places:
        raise ValueError(f"{title}: no points to draw")

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import LogLocator

        for line in lines:
            look: dict[str, Any] = {"color": GREY, "linestyle": "--", "marker": ""} if line.dashed else {}
            look |= {"markevery": max(1, len(line.points) // 10)}
            axes.plot(*zip(*line.points, strict=True), label=clipped(line.label), **look)
        if log:
            axes.set(xscale="log", yscale="log")
            axes.xaxis.set_major_locator(LogLocator(numticks=6))  # the label of every power of ten could touch the next
        else:
            axes.yaxis.set_major_locator(round_numbers())
            set_x_ticks(axes, places)
        if zero:
            axes.set_ylim(0, 1.05 * max(y for line in lines for _, y in line.points) or 1)
        axes.set(xlabel=x_label, ylabel=y_label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))
        pairs = list(zip(axes.lines, lines, strict=True))
        last = sorted(pairs, key=lambda pair: -pair[1].points[-1][1])
        axes.figure.legend(handles=[drawn for drawn, _ in last], loc="outside right center")
        separate(axes, [drawn for drawn, line in pairs if not line.dashed])

    return Plot(title, max(HEIGHT, ROW * len(lines) + 1), draw)


def bars(title: str, label: str, values: dict[str, float]) -> Plot:
    """Return a plot of horizontal bars that start at zero, one per name, each with its value at the end.

    Args:
        title: title of the plot.
        label: name or unit of the values.
        values: length of each bar, by name.

    Raises:
        ValueError: there is no value to draw.
    """
    return stacked(title, label, {name: {"": value} for name, value in values.items()})


def stacked(title: str, label: str, values: dict[str, dict[str, float]]) -> Plot:
    """Return a plot of horizontal stacked bars that start at zero, one per name, each with the sum of its parts at the end.

    Args:
        title: title of the plot.
        label: name or unit of the values.
        values: the parts of each bar, by name; all bars have the same parts. The legend is below the axes.

    Raises:
        ValueError: there is no value to draw.
    """
    if not values:
        raise ValueError(f"{title}: no values to draw")
    names = list(next(iter(values.values())))
    totals = [sum(parts.values()) for parts in values.values()]

    def draw(axes: "Axes") -> None:
        left = [0.0] * len(values)
        for colour, name in zip(COLOURS, names, strict=False):
            widths = [parts[name] for parts in values.values()]
            axes.barh(range(len(values)), widths, left=left, height=0.75, color=colour, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        last = cast("BarContainer", axes.containers[-1])
        axes.bar_label(last, [short(float(f"{total:.3g}")) for total in totals], padding=4)
        name_rows(axes, values)
        axes.set_xlim(0, 1.15 * max(totals) or 1)  # the last label needs room
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(round_numbers())
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        if len(names) > 1:
            legend_below(axes, dict(zip(names, COLOURS, strict=False)))

    legend = legend_height(names) + 0.1 if len(names) > 1 else 0
    return Plot(title, max(0.65 * HEIGHT, ROW * len(values) + 1.4) + legend, draw)


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


@house_style()
def figure(plots: Sequence[Plot], columns: int = 2) -> "Figure":
    """Return the plots as one figure, `columns` in a row."""
    columns = min(columns, len(plots))
    rows = [plots[start : start + columns] for start in range(0, len(plots), columns)]
    titles = {plot.title: textwrap.wrap(plot.title, TITLE) for plot in plots}
    heights = [max(plot.height + ROW * (len(titles[plot.title]) - 1) for plot in row) for row in rows]
    whole = empty_figure(columns * WIDTH, sum(heights))
    panels = whole.subfigures(len(rows), columns, squeeze=False, height_ratios=heights).flat
    for panel, plot in zip(panels, plots, strict=False):
        panel.suptitle("\n".join(titles[plot.title]), x=0.02, ha="left")
        plot.draw(panel.subplots())
    return whole


@house_style()
def beside(plots: Sequence[Plot], path: Path, columns: int = 2) -> None:
    """Write the plots as one PNG file, `columns` in a row."""
    fast = {"compress_level": 1}  # a third of the time for a third more bytes than zlib's default
    figure(plots, columns).savefig(path, format="png", pil_kwargs=fast)
