"""Curves that coincide, drawn so that each of them is visible."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

NEAR = 0.01  # largest distance of lines that coincide, as a fraction of the axes' height: about the width of a line
LONG = 0.1  # least length of their common part, as a fraction of the axes' width
DASH = 4.0  # length of a dash, in widths of the line
APART = 6.0  # points between the centres of adjacent markers


def separate(axes: "Axes", lines: "list[Line2D]") -> None:
    """Draw lines that coincide as dashes of alternating colours, and their markers side by side.

    Args:
        axes: axes that contain the lines, with their final scales.
        lines: the lines, with increasing x.
    """
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    for group in groups(axes, lines):
        axes.margins(x=0.05 + 0.01 * len(group))  # room for the markers beside the first and the last point
        for number, line in enumerate(group):
            points = np.asarray(line.get_xydata())
            marked = points[:: max(1, len(points) * (len(group) + 1) // 20)]
            aside = ScaledTranslation((number - (len(group) - 1) / 2) * APART / 72, 0, axes.figure.dpi_scale_trans)
            look: dict[str, Any] = {"color": line.get_color(), "marker": line.get_marker(), "linestyle": "", "zorder": 3}
            axes.add_artist(Line2D(*marked.T, transform=axes.transData + aside, **look))
            line.set_marker("")
            if number > 0:  # the first line is solid, below the others
                line.set_linestyle((number * DASH, (DASH, DASH * (len(group) - 1))))


def groups(axes: "Axes", lines: "list[Line2D]") -> "list[list[Line2D]]":
    """Return the lines that coincide with others, in groups of at least two."""
    axes.autoscale_view()
    to_fractions = axes.transScale + axes.transLimits
    found: list[tuple[np.ndarray, list[Line2D]]] = []
    for line in lines:
        points = to_fractions.transform(line.get_xydata())
        group = next((group for first, group in found if coincide(first, points)), None)
        if group is None:
            found.append((points, [line]))
        else:
            group.append(line)
    return [group for _, group in found if len(group) > 1]


def coincide(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether the lines through two arrays of points, [n, 2] in fractions of the axes, have a long part in common."""
    low, high = max(one[0, 0], other[0, 0]), min(one[-1, 0], other[-1, 0])
    places = np.union1d(one[:, 0], other[:, 0])
    places = places[(low <= places) & (places <= high)]
    near = np.abs(np.interp(places, *one.T) - np.interp(places, *other.T)) < NEAR
    if len(places) < 2:
        return near.any()
    return np.diff(places)[near[1:] & near[:-1]].sum() > LONG
