"""Curves, bars and timelines as PNG files, drawn by matplotlib in the house style (house.mplstyle).

`curves`, `bars`, `stacked` and `timeline` describe a panel; `beside` draws panels and writes them as one picture. Importing
matplotlib takes about a second, so it is imported when the first picture is drawn and not with this module.
"""

import math
import textwrap
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

STYLE = Path(__file__).with_name("house.mplstyle")
WIDTH, HEIGHT = 6.4, 4.0  # size of a panel in inches; rows or a legend can increase its height
ROW = 0.27  # height in inches of a row, a bar or a legend entry
# The colours of the house style.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C", "#882255")
GREY = "#595959"
LONGEST, TITLE = 32, 50  # maximum number of characters of a label, and of a line of a title
MOST_LABELS = 12  # maximum number of entries of a timeline's legend
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


def short(value: float) -> str:
    """Return a number as text with the suffix k, M or G: 1500 as "1.5k"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def clipped(label: str) -> str:
    """Return the label, shortened with an ellipsis if it has more than LONGEST characters."""
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"


def curves(title: str, x_label: str, y_label: str, lines: Sequence[Curve], log: bool = False, zero: bool = False) -> Plot:
    """Return a plot of lines over x. The legend is on the right, in the order of the lines' last values.

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
        for line in lines:
            look: dict[str, Any] = {"color": GREY, "linestyle": "--", "marker": ""} if line.dashed else {}
            look |= {"markevery": max(1, len(line.points) // 10)}
            axes.plot(*zip(*line.points, strict=True), label=clipped(line.label), **look)
        if log:
            axes.set(xscale="log", yscale="log")
        else:
            axes.yaxis.set_major_locator(round_numbers())
            set_x_ticks(axes, places)
        if zero:
            axes.set_ylim(0, 1.05 * max(y for line in lines for _, y in line.points) or 1)
        axes.set(xlabel=x_label, ylabel=y_label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))
        last = sorted(zip(axes.lines, lines, strict=True), key=lambda pair: -pair[1].points[-1][1])
        axes.figure.legend(handles=[drawn for drawn, _ in last], loc="outside right center")

    return Plot(title, max(HEIGHT, ROW * len(lines) + 1), draw)


def set_x_ticks(axes: "Axes", places: list[float]) -> None:
    """Put ticks at the x values if they are at most six integers with enough space between them, else at round numbers."""
    integers, span = all(float(x).is_integer() for x in places), places[-1] - places[0]
    if integers and len(places) <= 6 and all(b - a >= span / 16 for a, b in pairwise(places)):
        axes.set_xticks(places)
    else:
        axes.xaxis.set_major_locator(round_numbers(integer=integers))


def round_numbers(**options: Any) -> "MaxNLocator":
    """Return a locator for ticks in steps of 1, 2 or 5 times a power of ten."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6, steps=[1, 2, 5, 10], min_n_ticks=3, **options)


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


def name_rows(axes: "Axes", names: Iterable[str]) -> None:
    """Label the rows at y = 0, 1, ..., from top to bottom."""
    names = [clipped(name) for name in names]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def legend_below(axes: "Axes", colours: dict[str, str]) -> None:
    """Add a legend of the colours, by label, below the axes."""
    from matplotlib.patches import Patch

    labels = legend_labels(colours)
    handles = [Patch(color=colour, label=label) for label, colour in zip(labels, colours.values(), strict=False)]
    if len(labels) < len(colours):
        handles[-1].set_alpha(0)  # the last entry has no colour: it gives the number of the remaining labels
    columns = legend_columns(labels)
    axes.figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=1)


def legend_labels(names: Iterable[str]) -> list[str]:
    """Return the entries of a legend: all names, or the first ones and the number of the remaining ones."""
    names = [clipped(name) for name in names]
    if len(names) <= MOST_LABELS:
        return names
    return [*names[: MOST_LABELS - 1], f"and {len(names) - MOST_LABELS + 1} more"]


def legend_columns(labels: list[str]) -> int:
    """Return how many columns of these labels fit into a panel."""
    return max(1, min(len(labels), int(WIDTH / (0.7 + 0.11 * max(map(len, labels))))))


def legend_height(names: Iterable[str]) -> float:
    """Return the height in inches of a legend with these names."""
    labels = legend_labels(names)
    return ROW * math.ceil(len(labels) / legend_columns(labels))


@contextmanager
def house_style() -> Generator[None]:
    """Apply the house style within the body, whatever the user's matplotlibrc contains."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


@house_style()
def figure(plots: Sequence[Plot], columns: int = 2) -> "Figure":
    """Return the plots as one figure, `columns` in a row. pyplot and its global state are not used."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(columns, len(plots))
    rows = [plots[start : start + columns] for start in range(0, len(plots), columns)]
    titles = {plot.title: textwrap.wrap(plot.title, TITLE) for plot in plots}
    heights = [max(plot.height + ROW * (len(titles[plot.title]) - 1) for plot in row) for row in rows]
    whole = Figure((columns * WIDTH, sum(heights)), layout="constrained")
    FigureCanvasAgg(whole)
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
