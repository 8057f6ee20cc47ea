"""Let the runs of the tests draw empty pictures, because those of a run take 0.5 s.

A test of what pictures show draws them in the body of `drawn`. Cold launches draw them, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from matplotlib.figure import Figure

from ddp_lab.observe import logger, metrics_file, pictures, plot


def draw_none() -> None:
    """Let this process and its forks draw empty figures, and write empty files for curves."""
    metrics_file.beside = lambda plots, picture: picture.touch()
    logger.confusion_figure = lambda *_: Figure((0.1, 0.1))
    logger.prediction_grid = lambda *_: Figure((0.1, 0.1))


@contextmanager
def drawn() -> Iterator[None]:
    """Draw pictures in the body."""
    metrics_file.beside = plot.beside
    logger.confusion_figure = pictures.confusion_figure
    logger.prediction_grid = pictures.prediction_grid
    yield
    draw_none()
