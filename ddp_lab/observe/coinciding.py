"""Curves that coincide, drawn so that each of them is visible."""

from typing import TYPE_CHECKING

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
    from matplotlib.transforms import ScaledTranslation

    for group in groups(axes, lines):
        axes.margins(x=0.05 + 0.01 * len(group))  # room for the markers next to the first and the last point
        for number, line in enumerate(group):
            points = line.get_xydata()[:: max(1, len(line.get_xydata()) * (len(group) + 1) // 20)]
            aside = (number - (len(group) - 1) / 2) * APART / 72
            markers = type(line)(*points.T)
            markers.update_from(line)
            markers.set(linestyle="", zorder=3)
            axes.add_artist(markers)
            markers.set_transform(axes.transData + ScaledTranslation(aside, 0, axes.figure.dpi_scale_trans))
            line.set_marker("")
            if number > 0:  # over the first line, which is solid
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
