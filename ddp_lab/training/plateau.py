"""`scheduler=plateau`: the learning rate falls when a metric of the validation set has stalled.

torch's ReduceLROnPlateau decides, of a made-up optimizer with one parameter. Its learning rate
begins at 1, and so is the factor by which the run's schedule multiplies `optimizer.lr`:

    metric -> ReduceLROnPlateau -> lr of the made-up optimizer = Plateau(progress) -> LambdaLR

The metric is that of all ranks, so all of them decide alike. The state is in checkpoints, as a part
of the position.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_lab.config.types import Allowed, NaturalNumber, NonNegative, ValidationMetric
from ddp_lab.observe.log import log
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.metrics import Evaluation
from ddp_lab.training.progress import Progress
from ddp_lab.training.schedule import ShapeByMetric

Reduction = Annotated[float, Field(gt=0, lt=1), Allowed("a number above 0 and below 1")]
# of the learning rate; ReduceLROnPlateau's default
SMALLEST_CHANGE = 1e-8
STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")  # of ReduceLROnPlateau


class Plateau(ShapeByMetric):
    """A factor that is reduced after `patience` evaluations without a better metric.

    An evaluation is one after an epoch, or within it by `evaluate_every`.

    Args:
        metric: metric of the validation set.
        factor: by which the learning rate is multiplied.
        patience: evaluations without a better metric that are tolerated; the next one reduces the
            learning rate.
        threshold: by which fraction of the best value a metric must be better to count.
        cooldown: evaluations after a reduction that do not count.
        min_lr: learning rate below which it is not reduced.
    """

    def __init__(
        self,
        metric: ValidationMetric = "val_loss",
        factor: Reduction = 0.1,
        patience: NaturalNumber = 10,
        threshold: NonNegative = 1e-4,
        cooldown: NaturalNumber = 0,
        min_lr: NonNegative = 0.0,
    ):
        self.metric = metric
        self.factor = factor
        self.patience = patience
        self.threshold = threshold
        self.cooldown = cooldown
        self.min_lr = min_lr
        self.made_up = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def __call__(self, progress: float) -> float:
        """Return the present factor, which does not depend on the progress."""
        return float(self.made_up.param_groups[0]["lr"])

    def decider(self, lr: float, lower_is_better: bool) -> ReduceLROnPlateau:
        """Return torch's class, which changes the factor.

        Args:
            lr: learning rate of the run, in whose unit min_lr is.
            lower_is_better: whether low values of the metric are good ones.
        """
        return ReduceLROnPlateau(
            self.made_up,
            "min" if lower_is_better else "max",
            self.factor,
            self.patience,
            self.threshold,
            cooldown=self.cooldown,
            min_lr=self.min_lr / lr,
            eps=SMALLEST_CHANGE / lr,
        )


class PlateauSchedule(Hook):
    """Gives the metric of each evaluation to torch's ReduceLROnPlateau.

    An evaluation at which a limit has ended the run within an epoch does not count, unless
    `evaluate_every` has it, too: a run with a higher limit would not have it.

    Args:
        shape: of the run's schedule.
        lr: learning rate of the run.
        lower_is_better: whether low values of the metric are good ones.
        warmup_steps: steps of the warm-up, in which no evaluation counts.
    """

    def __init__(self, shape: Plateau, lr: float, lower_is_better: bool, warmup_steps: int):
        self.shape = shape
        self.warmup_steps = warmup_steps
        self.decider = shape.decider(lr, lower_is_better)

    def resume(self, progress: Progress) -> None:
        """Take over the state in a checkpoint. Options remain those of this launch.

        Of another metric only the factor is taken over: its best value says nothing of this one.
        """
        if not progress.plateau:
            return
        state = dict(progress.plateau)
        self.shape.made_up.param_groups[0]["lr"] = state.pop("factor")
        before = state.pop("metric", self.shape.metric)
        if before == self.shape.metric:
            self.decider.load_state_dict(state)
            return
        log.info(f"scheduler.metric: {before} -> {self.shape.metric}, of which no value is known")

    def on_start(self, run: Run) -> None:
        self.run = run

    def on_evaluate(self, results: Mapping[str, Evaluation]) -> None:
        position = self.run.position
        every = self.run.settings.evaluate_every
        is_complete = position.samples == self.run.loaders["train"].data.size
        if is_complete or (every and position.step % every == 0):
            self._decide(results)

    def on_evaluated(
        self, position: Progress, results: Mapping[str, Evaluation], seconds: float
    ) -> None:
        self._decide(results)
        position.plateau = self._state()

    def on_epoch_end(self, position: Progress) -> None:
        position.plateau = self._state()

    def _decide(self, results: Mapping[str, Evaluation]) -> None:
        """Let torch's class decide, and set the learning rate of the next step."""
        scheduler = self.run.eager.scheduler
        if scheduler.last_epoch < self.warmup_steps:
            return
        value = results["val"].metrics("val")[self.shape.metric]
        before = self.shape(0.0)
        self.decider.step(value)
        after = self.shape(0.0)
        if after == before:
            return
        scheduler.last_epoch -= 1
        scheduler.step()
        if self.run.strategy.runtime.is_main:
            log.info(
                f"scheduler=plateau: {self.shape.metric} {value:.4g} is not better than "
                f"{self.decider.best:.4g}: the learning rate is multiplied by {after:.4g}, before "
                f"by {before:.4g}"
            )

    def _state(self) -> dict[str, Any]:
        state = self.decider.state_dict()
        of_shape = {"factor": self.shape(0.0), "metric": self.shape.metric}
        return of_shape | {name: state[name] for name in STATE}
