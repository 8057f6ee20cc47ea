"""Weights & Biases."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ddp_lab.observe.log import log
from ddp_lab.observe.trackers.base import Media, Status, TrackedRun

# The seconds after which wandb writes its file again. A launch that is killed loses the rows since
# then. The default is 15; versions before 0.31 have no such setting, and write when a buffer is
# full.
OFTEN = {"x_transaction_log_flush_interval": 1.0}


class WandB:
    """A tracker.

    Every launch resumes the run of the same id; offline each writes a folder of its own for `wandb
    sync`.

    Args:
        project: the project.
        entity: the user or team; null is the default of the account.
        mode: whether records are sent (online, which needs `wandb login`) or only written
            (offline); null is WANDB_MODE, else online.
        dir: directory of its folder `wandb`; null is the run directory.
        options: further arguments of wandb.init.
    """

    holds_step = True  # wandb writes the rows of a step when it gets one of a later step

    def __init__(
        self,
        run: TrackedRun,
        project: str = "ddp_lab",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        dir: str | None = None,
        **options: Any,
    ):
        import wandb

        folder = Path(dir or run.path).resolve()
        # by default in the home directory
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
        often: dict[str, Any] = {
            key: value for key, value in OFTEN.items() if key in wandb.Settings.model_fields
        }

        settings = wandb.Settings(console="off", silent=True, **often)
        # else it would ask for a key on a terminal, from which nobody reads in this thread
        wandb.setup(settings)
        arguments: dict[str, Any] = {
            "name": run.path.name,
            "resume": "allow",
            "allow_val_change": True,
        } | options

        self.image = wandb.Image
        self.html = wandb.Html
        self.run = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            dir=str(folder),
            id=run.id,
            config=run.config,
            settings=settings,
            **arguments,
        )
        log.info(f"tracker=wandb: {self.run.dir if self.run.offline else self.run.url}")

    def log_metrics(self, metrics: Mapping[str, float], step: int, epoch: int | None) -> None:
        self.run.log({**metrics, **({} if epoch is None else {"epoch": epoch})}, step=step)

    def log_media(self, name: str, media: Media, step: int, epoch: int) -> None:
        is_text = isinstance(media, str)
        shown = self.html(f"<pre>{media}</pre>") if is_text else self.image(media)
        self.run.log({name: shown}, step=step)

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        self.run.summary.update(dict(summary))
        self.run.finish(exit_code=0 if status == "finished" else 1)
