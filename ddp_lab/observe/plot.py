"""Curves, bars and timelines as PNG files, drawn by matplotlib in the house style (house.mplstyle).

`curves`, `bars`, `stacked` and `timeline` describe a panel; `beside` draws panels and writes them as one picture. matplotlib
takes about a second to import. It is imported when the first picture is drawn, and not with this module.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

STYLE = Path(__file__).with_name("house.mplstyle")
WIDTH, HEIGHT = 6.4, 4.0  # inches of a panel; it becomes higher where its rows or its legend need that
ROW = 0.27  # inches of a row, a bar or an entry of a legend
# The colours of the house style.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C", "#882255")
GREY = "#595959"
LONGEST, TITLE = 32, 50  # characters of a label, and of a line of a title
MOST_LABELS = 12  # entries of a timeline's legend
Boxes = list[tuple[float, float, str]]  # start and end in seconds, and what ran: the row of a timeline


class Curve(NamedTuple):
    """The points of one line. `dashed` marks what was not measured, such as an ideal or a formula."""

    label: str
    points: list[tuple[float, float]]
    dashed: bool = False


class Plot(NamedTuple):
    """One panel of a picture.

    Attributes:
        title: above the panel.
        height: inches that it needs.
        draw: fills empty axes. Legends belong to the figure of the axes, outside of them.
    """

    title: str
    height: float
    draw: "Callable[[Axes], None]"


def short(value: float) -> str:
    """Return 1500 as 1.5k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def clipped(label: str) -> str:
    """Return the label, of which an ellipsis replaces the end where it is too long."""
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"


def curves(title: str, x_label: str, y_label: str, lines: Sequence[Curve], log: bool = False, zero: bool = False) -> Plot:
    """Return a plot of lines over x, with the legend at its right in the order in which the lines end.

    Args:
        log: makes both axes logarithmic.
        zero: makes the y axis start at zero.

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
    """Put ticks at the places themselves where these are few integers with room between them, else at round numbers."""
    integers, span = all(float(x).is_integer() for x in places), places[-1] - places[0]
    if integers and len(places) <= 6 and all(b - a >= span / 16 for a, b in pairwise(places)):
        axes.set_xticks(places)
    else:
        axes.xaxis.set_major_locator(round_numbers(integer=integers))


def round_numbers(**options: Any) -> "MaxNLocator":
    """Return the ticks of a linear axis: steps of 1, 2 or 5 times a power of ten."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(6, steps=[1, 2, 5, 10], min_n_ticks=3, **options)


def bars(title: str, label: str, values: dict[str, float]) -> Plot:
    """Return a plot of horizontal bars that start at zero, one for each name, with the value at its end.

    Args:
        label: what the values are, or their unit.

    Raises:
        ValueError: there is no value to draw.
    """
    return stacked(title, label, {name: {"": value} for name, value in values.items()})


def stacked(title: str, label: str, values: dict[str, dict[str, float]]) -> Plot:
    """Return a plot of horizontal bars that start at zero, one for each name, with the sum of its parts at its end.

    Args:
        label: what the values are, or their unit.
        values: all have the same parts; the legend is below the axes.

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
            drawn = axes.barh(range(len(values)), widths, left=left, height=0.75, color=colour, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.bar_label(drawn, [short(float(f"{total:.3g}")) for total in totals], padding=4)
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
    """Return a plot of what ran when: a row for each name, a box for each (start, end, label), a colour for each label.

    x is in milliseconds since the first start; the legend is below the axes.

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
            # No box is too short to be seen, and a white edge lets boxes side by side be counted where there is room for it.
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
    """Explain the colours below the axes."""
    from matplotlib.patches import Patch

    labels = legend_labels(colours)
    handles = [Patch(color=colour, label=label) for label, colour in zip(labels, colours.values(), strict=False)]
    if len(labels) < len(colours):
        handles[-1].set_alpha(0)  # it counts the others
    columns = legend_columns(labels)
    axes.figure.legend(handles=handles, loc="outside lower left", ncols=columns, handlelength=1)


def legend_labels(names: Iterable[str]) -> list[str]:
    """Return what a legend says: all names, or the first ones and how many there are beside them."""
    names = [clipped(name) for name in names]
    if len(names) <= MOST_LABELS:
        return names
    return [*names[: MOST_LABELS - 1], f"and {len(names) - MOST_LABELS + 1} more"]


def legend_columns(labels: list[str]) -> int:
    """Return how many columns of such labels a panel has room for."""
    return max(1, min(len(labels), int(WIDTH / (0.7 + 0.11 * max(map(len, labels))))))


def legend_height(names: Iterable[str]) -> float:
    """Return the inches that the names take below the axes."""
    labels = legend_labels(names)
    return ROW * math.ceil(len(labels) / legend_columns(labels))


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in the house style, whatever the user's matplotlibrc has."""
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
    figure(plots, columns).savefig(path, format="png")
