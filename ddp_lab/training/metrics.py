"""The metrics of training and of an evaluation: sums over samples on the device, divided once.

So the host never waits for the loss of a step, and every sample counts once, whatever the sizes of
batches and ranks are.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ddp_lab.data.batch import Batch
from ddp_lab.strategies.base import Strategy, total
from ddp_lab.tasks.base import Task, in_float32, sum_dtype, sums_of_loss, width

if TYPE_CHECKING:
    from ddp_lab.training.gathered_metrics import GatheredMetrics

LONGEST = 1000  # steps whose losses are kept


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one evaluation, in which each sample counts once.

    Attributes:
        values: the mean loss, the task's metrics and those of the key `metrics`, by name.
        samples: number of samples.
        sums: the task's sums over all samples, on the host, by name.
        weight: sum of the weights of all losses; 0 if all targets are ignored, so that the loss is
            NaN.
    """

    values: dict[str, float]
    samples: int
    sums: dict[str, torch.Tensor]
    weight: float

    @property
    def is_finite(self) -> bool:
        """Whether a sample has counted, and all metrics are finite."""
        return bool(self.weight) and all(map(math.isfinite, self.values.values()))

    def metrics(self, name: str) -> dict[str, float]:
        """Return the metrics by their names in metrics.jsonl: val_loss etc. for the name "val"."""
        return {f"{name}_{key}": value for key, value in self.values.items()}


@torch.no_grad()
def evaluate(
    strategy: Strategy,
    batches: Iterable[Batch],
    task: Task | None = None,
    after_batch: Callable[[], object] = lambda: None,
    metrics: "GatheredMetrics | None" = None,
) -> Evaluation:
    """Evaluate the model on all samples of one or more batches.

    Collective; waits for the device once, at the end.

    Args:
        strategy: has the model, and the task with the loss.
        batches: with padding.
        task: whose metrics are computed, besides the loss; None: those of the strategy's task.
        after_batch: called after each batch.
        metrics: further ones, which are no sums; None: there are none.
    """
    strategy.train(False)
    if metrics is not None:
        metrics.begin(strategy)
    task = task or strategy.task
    samples = 0
    totals = dict[str, torch.Tensor]()
    for inputs, targets, global_size in batches:
        strategy.begin_batch(global_size)
        num_valid = strategy.valid_samples(global_size)
        outputs = None
        sums_of_batch = None
        if (
            isinstance(inputs, torch.Tensor)
            and isinstance(targets, torch.Tensor)
            and not strategy.cuts_padding
        ):
            outputs = strategy.predict(inputs)
            if isinstance(outputs, torch.Tensor) and outputs.shape[:1] == inputs.shape[:1]:
                own_outputs = in_float32(outputs[:num_valid])
                expected = targets[:num_valid]
                loss, weight = sums_of_loss(strategy.task, own_outputs, expected, num_valid)
                sums_of_batch = {"loss": loss, "weight": weight, **task.sums(own_outputs, expected)}
                if metrics is not None:
                    metrics.add(task, own_outputs, expected, num_valid)
        if sums_of_batch is None:
            from ddp_lab.training.nested import sums_of

            batch = inputs, targets
            sums_of_batch = sums_of(strategy, task, batch, num_valid, outputs, metrics)
        for name, value in sums_of_batch.items():
            value = value.to(sum_dtype(strategy.device))
            totals[name] = totals[name] + value if name in totals else value
        samples += global_size
        after_batch()

    sums = {name: total(strategy, value).cpu() for name, value in totals.items()}
    loss = sums.pop("loss").item()
    weight = sums.pop("weight").item()
    mean = loss / weight if weight else math.nan
    values = {"loss": mean, **task.metrics(sums)}
    if metrics is not None:
        values |= metrics.values(values)
    return Evaluation(values, samples, sums, weight)


def means(task: Task, sums: list[float]) -> dict[str, float]:
    """Return the mean loss and metrics, by name, of [loss_sum, *task.train_metrics, weight]."""
    *numerators, weight = sums
    return {
        name: value / weight if weight else math.nan
        for name, value in zip(("loss", *task.train_metrics), numerators, strict=True)
    }


class RunningSums:
    """The sums of this rank's steps, and the losses of its last LONGEST steps.

    Args:
        task: what is summed.
        device: where the sums are kept.
        skip_not_finite: a step whose loss is not finite does not count in `totals`.
        has_norm: whether steps compute the norm of the gradient.

    Attributes:
        totals: [loss_sum, *task.train_metrics, weight] in `sum_dtype` since the training loop last
            zeroed it.
        norm: L2 norm of the last step's gradient, [1], before clipping; None: no step computes it.
        add: counts the next step, by its [loss_sum, *task.train_metrics, weight].
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        skip_not_finite: bool = False,
        has_norm: bool = False,
    ):
        self.skip_not_finite = skip_not_finite
        self.totals = torch.zeros(width(task), dtype=sum_dtype(device), device=device)
        # index s % LONGEST: step s
        self._losses = torch.zeros(LONGEST, dtype=sum_dtype(device), device=device)
        self.norm = torch.zeros_like(self.totals[:1]) if has_norm else None
        # of the last step: a CUDA graph counts steps, too
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        # on a CPU those of the last steps, which take a tenth of the time of `_losses`
        self._recent: deque[torch.Tensor] = deque(maxlen=LONGEST)
        on_host = device.type == "cpu"
        self.add: Callable[[torch.Tensor], None] = self._add_on_host if on_host else self._add

    @property
    def state(self) -> list[torch.Tensor]:
        """The tensors that `add` changes."""
        return [self.totals, self._losses, self._place]

    def begin(self, step: int) -> None:
        """Clear the sums and losses. The next step has the number `step` + 1."""
        self.totals.zero_()
        self._losses.zero_()
        self._recent.clear()
        self._place.fill_(step % LONGEST)

    def compile(self, compile_fn: partial[Any]) -> None:
        """Compile `add` with `compile_fn`."""
        self.add = compile_fn(self._add)

    def _add(self, sums: torch.Tensor) -> None:
        self._place.add_(1).remainder_(LONGEST)
        self._losses.index_copy_(0, self._place, sums[:1])
        self._add_to_totals(sums)

    def _add_on_host(self, sums: torch.Tensor) -> None:
        self._recent.append(sums)
        self._add_to_totals(sums)

    def _add_to_totals(self, sums: torch.Tensor) -> None:
        self.totals += torch.where(sums[0].isfinite(), sums, 0) if self.skip_not_finite else sums

    def first_bad(self, step: int) -> torch.Tensor:
        """Return the first step since the last call whose loss is not finite; inf if there is none.

        Call it at least every LONGEST steps. It does not wait for the device.

        Args:
            step: number of the last step.

        Returns:
            [], in `sum_dtype`, on the device.
        """
        if self._recent:
            return self.totals.new_tensor(self._first_bad_on_host(step))
        places = torch.arange(LONGEST, dtype=self._losses.dtype, device=self._losses.device)
        numbers = step - (step - places) % LONGEST
        first = torch.where(self._losses.isfinite(), math.inf, numbers).min()
        self._losses.zero_()
        return first

    def _first_bad_on_host(self, step: int) -> float:
        losses = torch.stack([*self._recent])[:, 0].tolist()
        self._recent.clear()
        numbers = range(step - len(losses) + 1, step + 1)
        bad = (
            number for number, loss in zip(numbers, losses, strict=True) if not math.isfinite(loss)
        )
        return next(bad, math.inf)
