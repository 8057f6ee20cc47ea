"""What a reader sees of a figure."""

from matplotlib.figure import Figure, SubFigure
from matplotlib.text import Text


def texts(figure: Figure | SubFigure) -> list[Text]:
    """Return all visible texts. Tick labels outside the axes' limits exist but are not drawn."""
    visible = figure.findobj(
        lambda artist: isinstance(artist, Text) and artist.get_visible() and artist.get_text()
    )
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            kept = {label for tick in axis._update_ticks() for label in (tick.label1, tick.label2)}
            every = {
                label
                for tick in (*axis.majorTicks, *axis.minorTicks)
                for label in (tick.label1, tick.label2)
            }
            visible = [text for text in visible if text not in every - kept]
    return visible
