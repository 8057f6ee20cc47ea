"""Curves, bars and timelines as PNG files, drawn by matplotlib in the house style (house.mplstyle).

`curves`, `stacked` and `timeline` describe a panel; `beside` draws panels and writes them as one picture. Importing matplotlib
takes about half a second, so it is imported when the first picture is drawn and not with this module.
"""

import math
import textwrap
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("house.mplstyle")
COLOURS: tuple[str, ...] = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C", "#882255")
GREY = "#595959"
WIDTH, HEIGHT = 6.4, 4.0  # size of a panel in inches; rows or a legend can increase its height
ROW = 0.27  # height in inches of a row, a bar or a legend entry
TITLE, LABEL = 50, 32  # maximum number of characters of a line of a title, and of a label
COLUMNS, LEGEND_COLUMNS = 2, 2  # panels in a row of a picture, and entries in a row of a legend below the axes
Box = tuple[float, float, str, str]  # of a timeline: start, end, the label that its colour stands for, and the text in it


class Curve(NamedTuple):
    """The points of one line. A dashed line is grey: it was not measured, but shows an ideal or a formula."""

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


@contextmanager
def house_style() -> Generator[None]:
    """Apply the house style within the body, whatever the user's matplotlibrc contains."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def short(value: float) -> str:
    """Return a number as text with the suffix k, M or G: 1500 as "1.5k"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def clipped(label: str, longest: int = LABEL) -> str:
    """Return the label, shortened with an ellipsis if it has more characters than `longest`."""
    return label if len(label) <= longest else label[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


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
    if not lines:
        raise ValueError(f"{title}: no points to draw")

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import LogLocator

        for line in lines:
            look: dict[str, Any] = {"color": GREY, "linestyle": "--", "marker": ""} if line.dashed else {}
            look |= {"markevery": max(1, len(line.points) // 10)}
            axes.plot(*zip(*line.points, strict=True), label=clipped(line.label), **look)
        round_ticks(axes.xaxis, integer=all(float(x).is_integer() for line in lines for x, _ in line.points))
        round_ticks(axes.yaxis)
        if log:
            axes.set(xscale="log", yscale="log")
            axes.xaxis.set_major_locator(LogLocator(numticks=6))  # the label of every power of ten could touch the next
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(lambda value, _: short(value))
        if zero:
            axes.set_ylim(0, 1.05 * max(y for line in lines for _, y in line.points) or 1)
        axes.set(xlabel=x_label, ylabel=y_label)
        last = sorted(zip(axes.lines, lines, strict=True), key=lambda pair: -pair[1].points[-1][1])
        axes.figure.legend(handles=[drawn for drawn, _ in last], loc="outside right center")

    return Plot(title, max(HEIGHT, ROW * len(lines) + 1), draw)


def stacked(title: str, label: str, values: dict[str, dict[str, float]], limit: float = math.inf) -> Plot:
    """Return a plot of horizontal stacked bars that start at zero, one per name, each with the sum of its parts at the end.

    Args:
        title: title of the plot.
        label: name or unit of the values.
        values: the parts of each bar, by name; all bars have the same parts. The legend is below the axes.
        limit: a dashed line marks it, if it is finite.

    Raises:
        ValueError: there is no value to draw.
    """
    if not values:
        raise ValueError(f"{title}: no values to draw")
    names = list(next(iter(values.values())))
    totals = [sum(parts.values()) for parts in values.values()]
    colours = dict(zip(names, COLOURS, strict=False))

    def draw(axes: "Axes") -> None:
        left = [0.0] * len(values)
        for name, colour in colours.items():
            widths = [parts[name] for parts in values.values()]
            axes.barh(range(len(values)), widths, left=left, height=0.75, color=colour)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        last = cast("BarContainer", axes.containers[-1])
        axes.bar_label(last, [short(float(f"{total:.3g}")) for total in totals], padding=4)
        name_rows(axes, values)
        axes.set(xlim=(0, 1.15 * max(totals) or 1), xlabel=label)  # the last label needs room
        if limit < math.inf:
            axes.axvline(limit, color=GREY, linestyle="--")
            axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * limit))
        round_ticks(axes.xaxis)
        legend_below(axes, colours)

    return Plot(title, max(0.65 * HEIGHT, ROW * len(values) + 1.4) + legend_height(names), draw)


def timeline(title: str, x_label: str, rows: Mapping[str, Sequence[Box]]) -> Plot:
    """Return a timeline with a row per name and a colour per label. The legend is below the axes.

    Args:
        title: title of the plot.
        x_label: name or unit of the times.
        rows: the boxes of each row, by name.

    Raises:
        ValueError: there is no box to draw.
    """
    boxes = [box for row in rows.values() for box in row]
    if not boxes:
        raise ValueError(f"{title}: no boxes to draw")
    span = max(end for _, end, _, _ in boxes) - min(start for start, _, _, _ in boxes)
    colours = dict(zip(dict.fromkeys(label for _, _, label, _ in boxes), cycle(COLOURS), strict=False))

    def draw(axes: "Axes") -> None:
        for number, row in enumerate(rows.values()):
            for start, end, label, text in row:
                width = max(end - start, span / 250)  # wide enough to be seen
                edge = "white" if width > span / 100 else "none"  # with an edge, adjacent boxes can be counted
                axes.barh(number, width, left=start, height=0.76, color=colours[label], edgecolor=edge, linewidth=0.7)
                axes.text(start + width / 2, number, text, ha="center", va="center", color="white", fontsize=7)
        name_rows(axes, rows)
        axes.set_xlabel(x_label)
        round_ticks(axes.xaxis)
        legend_below(axes, colours)

    return Plot(title, ROW * len(rows) + legend_height(colours) + 1.5, draw)


def round_ticks(axis: "Axis", integer: bool = False) -> None:
    """Put ticks in steps of 1, 2 or 5 times a power of ten, labelled by `short`."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], min_n_ticks=1 if integer else 3, integer=integer))
    axis.set_major_formatter(lambda value, _: short(value))


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

    handles = [Patch(color=colour, label=clipped(label, 24)) for label, colour in colours.items()]
    axes.figure.legend(handles=handles, loc="outside lower left", ncols=LEGEND_COLUMNS, handlelength=1)


def legend_height(names: Iterable[str]) -> float:
    """Return the height in inches of a legend with these names."""
    return ROW * -(-len(list(names)) // LEGEND_COLUMNS) + 0.1


@house_style()
def figure(plots: Sequence[Plot]) -> "Figure":
    """Return the plots as one figure, two in a row."""
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(plots))
    titles = [textwrap.fill(plot.title, TITLE) for plot in plots]
    needed = [plot.height + ROW * title.count("\n") for plot, title in zip(plots, titles, strict=True)]
    heights = [max(needed[start : start + columns]) for start in range(0, len(plots), columns)]
    whole = Figure((columns * WIDTH, sum(heights)), layout="constrained")
    panels = whole.subfigures(len(heights), columns, squeeze=False, height_ratios=heights).flat
    for panel, plot, title in zip(panels, plots, titles, strict=False):
        panel.suptitle(title, x=0.02, ha="left")
        plot.draw(panel.subplots())
    return whole


@house_style()
def beside(plots: Sequence[Plot], path: Path) -> None:
    """Write the plots as one PNG file, two in a row."""
    fast = {"compress_level": 1}  # a third of the time for a third more bytes than zlib's default
    figure(plots).savefig(path, format="png", pil_kwargs=fast)
