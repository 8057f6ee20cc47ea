"""Figures of matplotlib in the house style (house.mplstyle). pyplot and its global state are not used.

Importing matplotlib takes about half a second, so it is imported when the first picture is drawn and not with this module.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_name("house.mplstyle")


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
