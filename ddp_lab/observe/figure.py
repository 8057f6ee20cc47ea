"""Figures of matplotlib in the house style (house.mplstyle), and what panels have in common: colours, labels, ticks, legends.

pyplot and its global state are not used. Importing matplotlib takes about half a second, so it is imported when the first
picture is drawn and not with this module.
"""

import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

STYLE = Path(__file__).with_name("house.mplstyle")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C", "#882255")
GREY = "#595959"
WIDTH = 6.4  # width of a panel in inches
ROW = 0.27  # height in inches of a row, a bar or a legend entry
LONGEST = 32  # maximum number of characters of a label
MOST_LABELS = 12  # maximum number of entries of a timeline's legend


@contextmanager
def house_style() -> Generator[None]:
    """Apply the house style within the body, whatever the user's matplotlibrc contains."""
    from matplotlib import style

    with style.context(["default", STYLE]):
        yield


def empty_figure(width: float, height: float) -> "Figure":
    """Return an empty figure of this size in inches, in which texts get the room that they need."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@house_style()
def pixels(figure: "Figure") -> np.ndarray:
    """Return an `empty_figure` that was drawn on as uint8 [height, width, 3]."""
    canvas = cast("FigureCanvasAgg", figure.canvas)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def short(value: float) -> str:
    """Return a number as text with the suffix k, M or G: 1500 as "1.5k"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def clipped(label: str, longest: int = LONGEST) -> str:
    """Return the label, shortened with an ellipsis if it has more characters than `longest`."""
    return label if len(label) <= longest else label[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


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
