"""TensorBoard: event files in the run directory."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import yaml

from ddp_lab.config.types import SETS
from ddp_lab.observe.trackers.base import Media, Status, TrackedRun

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """A tracker. The metrics of an epoch are drawn over epochs, those of a step over steps."""

    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter  # takes 2 s, so only rank 0 imports it
        from torch.utils.tensorboard.summary import hparams as hparams_summary

        epoch, step = run.start
        is_new = not list(run.path.glob("events.*"))
        self.first = 0 if is_new else epoch
        # TensorBoard hides what an interrupted launch wrote from here on.
        self.board = SummaryWriter(str(run.path), purge_step=None if is_new else epoch)
        # Those of steps are a run of its own, or resuming from an epoch would hide all steps above
        # the epoch's number. The rows of the last step are passed on again, because an evaluation
        # of its weights may follow.
        self.step = step
        self.open_steps = partial(SummaryWriter, str(run.path / "steps"), purge_step=step)
        self.steps: SummaryWriter | None = None
        if is_new:
            self.board.add_text(
                "config", f"```yaml\n{yaml.safe_dump(run.config, sort_keys=False)}\n```"
            )
            writer = self.board.file_writer
            assert writer is not None, "an open SummaryWriter has a FileWriter"
            metrics = {f"{kind}/{name}": 0.0 for kind, name in product(("loss", "accuracy"), SETS)}
            # add_hparams would add a second run to TensorBoard
            for summary in hparams_summary(run.hparams, metrics):
                writer.add_summary(summary)

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int | None) -> None:
        if epoch is None and step >= self.step:
            self.steps = self.steps or self.open_steps()
            write(self.steps, metrics, step)
        elif epoch is not None and epoch >= self.first:
            write(self.board, metrics, epoch)

    def log_media(self, name: str, media: Media, step: int, epoch: int) -> None:
        if isinstance(media, str):
            self.board.add_text(name, media)
        else:
            self.board.add_image(name, media, epoch, dataformats="HWC")

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        if summary:
            self.board.add_text(
                "result", "\n".join(f"- {name}: {value}" for name, value in summary.items())
            )
        self.board.close()
        if self.steps:
            self.steps.close()


def write(board: "SummaryWriter", metrics: Mapping[str, float], place: int) -> None:
    """Write scalars, so that TensorBoard shows them at once."""
    for tag, value in metrics.items():
        board.add_scalar(tag, value, place)
    board.flush()
