"""Whether a position in a checkpoint is one in the order of the samples of this launch."""

from ddp_lab.config.errors import ConfigError
from ddp_lab.training.progress import Progress


def check_resumed(progress: Progress, readers: int) -> None:
    """Check that a run may continue a position with its data.

    Args:
        progress: of a checkpoint.
        readers: of this launch; 0: its dataset is map-style.

    Raises:
        ConfigError: it may not.
    """
    before = progress.stream.get("readers", 0)
    if not progress.step or before == readers:
        return
    other = "Use another name, and model.weights=CHECKPOINT to begin from its weights"
    if not before or not readers:
        kinds = ("a map-style dataset", "a stream")
        raise ConfigError(
            f"resume: the checkpoint is of a run on {kinds[bool(before)]}, and this one is on "
            f"{kinds[bool(readers)]}, in which its position means nothing. {other}"
        )
    raise ConfigError(
        f"data.readers={readers}: the checkpoint is of a run with data.readers={before}, which has "
        f"another order of samples; some would be trained on twice and others never. Use "
        f"data.readers={before}. {other}"
    )
