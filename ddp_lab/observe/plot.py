"""Curves, bars and timelines as PNG files, drawn by matplotlib in the house style (house.mplstyle).

`curves`, `stacked` and `timeline` describe a panel; `beside` draws panels and writes them as one
picture. Importing matplotlib takes about half a second, so it is imported when the first picture is
drawn and not with this module.
"""

import math
import textwrap
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

STYLE = Path(__file__).with_name("house.mplstyle")
GREY = "#595959"
WIDTH = 6.4  # of a panel, in inches
HEIGHT = 4.0
ROW = 0.27  # inches: the height of a row, a bar or a legend entry
TITLE = 50  # maximum number of characters of a line of a title
LABEL = 24  # the same of a label
# of a timeline: start, end, the label that its colour stands for, and the text in it
Box = tuple[float, float, str, str]


# Strategies and all-reduce algorithms have the same look in all pictures: a place in the cycle of
# house.mplstyle. scratch computes with the algorithms, and no picture has them beside strategies.
ALGORITHMS = ("star", "per_tensor", "flat", "ring", "bucketed", "library", "yours")
STRATEGIES = ("scratch", "ddp", "fsdp", "pipeline", "ddp_pipeline", "tp", "single", "dp", "split")
LOOKS = {name: place for names in (ALGORITHMS, STRATEGIES) for place, name in enumerate(names)}
LOOKS["mesh"] = len(STRATEGIES)
NUM_COLOURS = 9  # of the cycle
OTHER_COLOURS = {"mesh": "#7A5C00"}


class Curve(NamedTuple):
    """The points of one line.

    A dashed line is grey: it was not measured, but shows an ideal or a formula.
    """

    label: str
    points: list[tuple[float, float]]
    dashed: bool = False


class Plot(NamedTuple):
    """One panel of a picture.

    It has a text, a number of rows or legend entries, and what draws into empty axes.
    """

    title: str
    rows: int
    draw: "Callable[[Axes], None]"


@contextmanager
def house_style() -> Generator[None]:
    """Apply the house style within the body, whatever the user's matplotlibrc contains."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def look_of(name: str) -> dict[str, Any]:
    """Return colour, marker and line style of a strategy or an algorithm, in the house style."""
    from matplotlib import rcParams

    look = dict(list(rcParams["axes.prop_cycle"])[LOOKS[name]])
    return look | ({"color": OTHER_COLOURS[name]} if name in OTHER_COLOURS else {})


def short(value: float) -> str:
    """Return a number as text with the suffix k, M or G: 1500 as "1.5k"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def clipped(label: str, longest: int = LABEL) -> str:
    """Return the label, shortened with an ellipsis if it has more characters than `longest`."""
    return label if len(label) <= longest else label[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def curves(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Curve],
    log: Literal["", "x", "y", "xy"] = "",
    zero: bool = False,
) -> Plot:
    """Return a plot of lines over x. The legend has the order of the lines' last values.

    Args:
        title: title of the plot.
        x_label, y_label: labels of the axes.
        lines: the curves, each with a point or more.
        log: the logarithmic axes.
        zero: whether the y axis starts at zero.
    """

    def draw(axes: "Axes") -> None:
        from matplotlib.ticker import LogFormatter, MaxNLocator

        class PlainMinor(LogFormatter):
            """Plain numbers where a logarithmic axis has labels between those of decades."""

            def __call__(self, x: float, pos: int | None = None) -> str:
                return short(float(f"{x:.6g}")) if super().__call__(x, pos) else ""

        for line in lines:
            # a marker at the end of an axis is drawn completely
            look: dict[str, Any] = {
                "markevery": max(1, len(line.points) // 10),
                "clip_on": False,
            }
            if line.label in LOOKS:
                look |= look_of(line.label)
            if line.dashed:
                look |= {"color": GREY, "linestyle": "--", "marker": ""}
            axes.plot(*zip(*line.points, strict=True), label=clipped(line.label), **look)
        if "x" in log:
            axes.set_xscale("log")
        elif all(x == int(x) for line in lines for x, _ in line.points):
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))

        if "y" in log:
            axes.set_yscale("log")

        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: short(value))
            # of a logarithmic axis that spans less than a decade, plain numbers, too
            if isinstance(axis.get_minor_formatter(), LogFormatter):
                axis.set_minor_formatter(PlainMinor(minor_thresholds=(1.0, 0.4)))
        if zero:
            axes.set_ylim(0, 1.05 * max(y for line in lines for _, y in line.points) or 1)
        axes.set(xlabel=x_label, ylabel=y_label)
        last = sorted(zip(axes.lines, lines, strict=True), key=lambda pair: -pair[1].points[-1][1])
        axes.figure.legend(handles=[drawn for drawn, _ in last], loc="outside right center")

    return Plot(title, len(lines), draw)


def dots(title: str, label: str, values: Mapping[str, float]) -> Plot:
    """Return a plot with a row for each name and a dot at its value.

    Args:
        title: title of the plot.
        label: name or unit of the values.
        values: the value of each name.
    """

    def draw(axes: "Axes") -> None:
        names = [clipped(name, 2 * LABEL) for name in values]
        axes.plot(list(values.values()), range(len(names)), linestyle="", clip_on=False)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(lambda value, _: short(value))

    return Plot(title, len(values), draw)


def stacked(
    title: str,
    label: str,
    values: dict[str, dict[str, float]],
    limit: float = math.inf,
    limit_label: str = "limit",
) -> Plot:
    """Return a plot of horizontal stacked bars that start at zero, one per name.

    Each has the sum of its parts at its end.

    Args:
        title: title of the plot.
        label: name or unit of the values.
        values: the parts of each bar, by name; all bars have the same parts. A part that all of
            them lack is left out.
        limit: a dashed line marks it, if it is finite.
        limit_label: what it is.
    """
    totals = [sum(parts.values()) for parts in values.values()]
    parts = list(next(iter(values.values())))
    drawn = [part for part in parts if any(bar[part] for bar in values.values())] or parts
    looks = {part: look_of_part(parts.index(part)) for part in drawn}

    def draw(axes: "Axes") -> None:
        left = [0.0] * len(values)
        for part, look in looks.items():
            widths = [bar[part] for bar in values.values()]
            axes.barh(range(len(values)), widths, left=left, height=0.75, **look)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for row, total in enumerate(totals):
            axes.text(total, row, f" {short(float(f'{total:.3g}'))}", va="center")
        line: Line2D | None = None
        if limit < math.inf:
            line = axes.axvline(limit, color=GREY, linestyle="--", marker="", label=limit_label)
        label_rows(axes, values, looks, line)
        highest = max(*totals, limit if limit < math.inf else 0.0)
        axes.set(xlim=(0, 1.2 * highest or 1), xlabel=label)  # the texts at the ends need room
        axes.xaxis.set_major_formatter(lambda value, _: short(value))

    return Plot(title, len(values) + len(looks) // 2, draw)


def timeline(title: str, x_label: str, rows: Mapping[str, Sequence[Box]]) -> Plot:
    """Return a timeline with a row per name and a colour per label.

    Args:
        title: title of the plot.
        x_label: name or unit of the times.
        rows: the boxes of each row, by name.
    """
    boxes = [box for row in rows.values() for box in row]
    span = max(end for _, end, _, _ in boxes) - min(start for start, _, _, _ in boxes)
    colours = {
        label: f"C{number}"
        for number, label in enumerate(dict.fromkeys(label for _, _, label, _ in boxes))
    }

    def draw(axes: "Axes") -> None:
        for number, row in enumerate(rows.values()):
            for start, end, label, text in row:
                width = max(end - start, span / 250)  # wide enough to be seen
                # with an edge, adjacent boxes can be counted
                edge = "white" if width > span / 100 else "none"
                axes.barh(
                    number,
                    width,
                    left=start,
                    height=0.76,
                    color=colours[label],
                    edgecolor=edge,
                    linewidth=0.7,
                )
                axes.text(
                    start + width / 2,
                    number,
                    text,
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=7,
                )
        label_rows(axes, rows, {label: {"color": colour} for label, colour in colours.items()})
        axes.set_xlabel(x_label)

    return Plot(title, len(rows), draw)


def look_of_part(number: int) -> dict[str, Any]:
    """Return colour and hatch of a part of stacked bars: the cycle repeats after nine colours."""
    look = {"facecolor": f"C{number}"}
    return look | ({"hatch": "////", "edgecolor": "white"} if number >= NUM_COLOURS else {})


def label_rows(
    axes: "Axes",
    names: Iterable[str],
    looks: Mapping[str, Mapping[str, Any]],
    line: "Line2D | None" = None,
) -> None:
    """Label the rows at y = 0, 1, ... from the top, and add a legend.

    Args:
        axes: with the rows.
        names: of the rows.
        looks: of the boxes, by label.
        line: in the legend, too.
    """
    from matplotlib.patches import Patch

    names = [clipped(name) for name in names]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    handles: list[Any] = [Patch(label=clipped(label), **look) for label, look in looks.items()]
    if line is not None:
        handles.append(line)
    axes.figure.legend(handles=handles, loc="outside lower left", ncols=2, handlelength=1)


@house_style()
def figure(plots: Sequence[Plot]) -> "Figure":
    """Return the plots as one figure, two in a row."""
    from matplotlib.figure import Figure

    columns = min(2, len(plots))
    heights = [max(HEIGHT, ROW * plot.rows + 2.3) for plot in plots]
    heights = [max(heights[start : start + columns]) for start in range(0, len(plots), columns)]
    whole = Figure((columns * WIDTH, sum(heights)), layout="constrained")
    panels = whole.subfigures(len(heights), columns, squeeze=False, height_ratios=heights).flat
    for panel, plot in zip(panels, plots, strict=False):
        panel.suptitle(textwrap.fill(plot.title, TITLE), x=0.02, ha="left")
        plot.draw(panel.subplots())
    return whole


def beside(plots: Sequence[Plot], path: Path) -> None:
    """Write the plots as one PNG file, two in a row."""
    write(figure(plots), path)


def write(drawn: "Figure", path: Path) -> NDArray[np.uint8]:
    """Write a figure as a PNG file, and return its pixels, so that it is drawn only once."""
    from matplotlib.image import imsave

    fast = {"compress_level": 1}  # a third of the time for a third more bytes than zlib's default
    image = pixels(drawn)
    imsave(path, image, format="png", origin="upper", dpi=drawn.dpi, pil_kwargs=fast)
    return image


def pixels(drawn: "Figure") -> NDArray[np.uint8]:
    """Return a figure as an image, uint8 [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(drawn)
    with without_glyph_warnings():
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


@contextmanager
def without_glyph_warnings() -> Generator[None]:
    """Ignore warnings of other texts that the font cannot draw, such as the name of a run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        yield
