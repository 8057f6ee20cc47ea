"""The evaluation of a batch whose inputs, targets or outputs are no tensor."""

from typing import TYPE_CHECKING, Any

import torch

from ddp_lab.data.trees import Tree, rows
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.nested import outputs_of_samples
from ddp_lab.tasks.base import Task, sums_of_loss
from ddp_lab.tasks.nested import for_task

if TYPE_CHECKING:
    from ddp_lab.training.gathered_metrics import GatheredMetrics


def sums_of(
    strategy: Strategy,
    task: Task,
    batch: tuple[Tree, Tree],
    num_valid: int,
    outputs: Any = None,
    metrics: "GatheredMetrics | None" = None,
) -> dict[str, torch.Tensor]:
    """Return the sums of a batch in an evaluation: loss, weight, and those of the task. Collective.

    Args:
        strategy: has the model, and the task with the loss.
        task: whose sums are computed.
        batch: inputs and targets, with padding at the end.
        num_valid: number of samples without padding.
        outputs: of the model for all inputs; None: they are computed, for a batch whose padding has
            been cut.
        metrics: get the batch, too.
    """
    if outputs is None:
        inputs, _ = batch
        strategy.require_inputs(inputs)
        batch = rows(batch, slice(max(num_valid, 1)))
        inputs, _ = batch
        outputs = strategy.predict(inputs)

    inputs, targets = batch
    outputs = outputs_of_samples(strategy, outputs, inputs, num_valid)

    loss_inputs = for_task(strategy.task, outputs, targets, num_valid)
    other = loss_inputs if task is strategy.task else for_task(task, outputs, targets, num_valid)
    loss, weight = sums_of_loss(strategy.task, loss_inputs.outputs, loss_inputs.targets, num_valid)
    sums = {"loss": loss, "weight": weight, **task.sums(other.outputs, other.targets)}
    if metrics is not None:
        metrics.add(task, other.outputs, other.targets, num_valid)
    counted = {"loss": loss_inputs.counts, "weight": loss_inputs.counts}
    return {
        name: value if counted.get(name, other.counts) else torch.zeros_like(value)
        for name, value in sums.items()
    }
