"""The interface of a task: unreduced losses with weights, and metrics as sums.

Outputs and targets may have any shape.

The loss of a step is the mean over the GLOBAL batch,

    sum(losses * weights) / sum(weights),

where a loss may also return both sums itself. So are all metrics: sums are added over
micro-batches, steps and ranks, and divided once. The mean of the means of micro-batches or ranks
would differ as soon as these hold different weights, for example pixels to ignore.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.data.labels import LabelRange

Losses = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
LossFunction = Callable[[Any, Any], Losses]


def require_same_shape(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Raise a TrainingError unless outputs and targets have the same shape.

    torch's losses would broadcast one of them.
    """
    if outputs.shape != targets.shape:
        raise TrainingError(
            f"the outputs must have the shape of the targets, {list(targets.shape)}, got "
            f"{list(outputs.shape)}. Change the last layer of the model, or the targets, for "
            "example by unsqueeze(-1)",
        )


# former names of what a task defines, by which a user's class would silently be ignored
RENAMED = {
    "own_losses": "loss_fn",
    "running": "train_metrics",
    "better": "metric_mode",
    "choosing": "monitorable",
}


class Task(nn.Module):
    """What a model is trained for: its loss, and metrics as sums.

    Outputs are what the model returns, in float32 for half precision: a tensor, [b, ...], or a
    tuple, dict or object of tensors. Targets are those of the dataset: a tensor, [b, ...], or a
    tuple or dict of tensors, or None. A task with `takes_logits` gets one tensor of each. Neither
    contains padding. The mode of the task, training or evaluation, is that of the model.
    `Task(loss)` has a loss and no metrics. A task of one's own overrides `loss_fn` for a loss,
    `sums` and `metrics` for metrics of evaluations, and `train_metrics` and `running_sums` for
    metrics of the training steps.

    Args:
        loss: function that replaces the task's own loss. For outputs and targets it returns
            unreduced losses of any shape [b, ...], (losses, weights) of one shape, or (sum, weight)
            of all samples, both [].

    Attributes:
        train_metrics: names of the training metrics. Each is a sum over the steps, weighted as the
            losses are (`weighted_sum`), divided by the sum of the weights.
        metric_mode: whether lower or higher values of a metric are better, by its name, so that
            `checkpoint.best=val_NAME` can choose by it. The mean loss is always allowed.
        pictures: whether the inputs, where they are images, are drawn with their targets and the
            outputs' largest logits.
        labels: range of the labels, of a task whose targets are classes; None: they are not.
        weighted: whether losses may have weights, or be more or fewer than one for each sample. A
            step then sums the weight of the global batch over the ranks, and scales the gradients
            by it; equal weights are a factor of exactly 1. False: the weight of a batch is its
            size. That of a loss of one's own is its attribute of this name, or True.
        takes_logits: whether outputs that are no tensor are replaced by their part `logits`.
        head_chunks: number of chunks of rows in which the model's last layer computes the losses of
            a micro-batch in training (`losses_of_head`); 1: the model returns its outputs.
        gathers: whether the loss calls ddp_lab.gather, as a trial has found. Then it is called on
            all ranks, also on one that has no sample of a batch.
        check_first: function of outputs and targets that is called once in training, with the first
            ones, and raises an exception if the loss is not supported for them; None: there is
            nothing to check.
    """

    train_metrics: ClassVar[tuple[str, ...]] = ()
    metric_mode: ClassVar[Mapping[str, Literal["lower", "higher"]]] = {}
    pictures: ClassVar[bool] = False
    takes_logits: ClassVar[bool] = False
    weighted: bool = True
    labels: LabelRange | None = None
    head_chunks: int = 1
    gathers: bool = False

    def __init__(self, loss: LossFunction | None = None):
        super().__init__()
        self._require_new_names()
        self.loss = loss
        if loss is not None:
            self.weighted = getattr(loss, "weighted", True)
        self.check_first: Callable[[Any, Any], object] | None = None
        # the arguments and the result of `losses` in `loss_sum`, while `loss_and_metrics` runs
        self._keeps = False
        self._kept: tuple[Any, Any, Losses] | None = None

    @property
    def has_buffers(self) -> bool:
        """Whether it or its loss has buffers, or names of some that have no value yet.

        Those of torch's losses that have no value never get one.
        """
        return any(
            tensor is not None or not type(module).__module__.startswith("torch.nn.")
            for module in self.modules()
            # `named_buffers` leaves out those without a value
            for tensor in module._buffers.values()  # pyright: ignore[reportPrivateUsage]
        )

    def _require_new_names(self) -> None:
        """Raise a ConfigError if the class defines an attribute under a name that has changed."""
        defined = {name for kind in type(self).__mro__ for name in vars(kind)}
        for old, new in RENAMED.items():
            if old in defined:
                raise ConfigError(
                    f"{type(self).__name__}: defines {old}, which a task calls {new}; rename it"
                )

    def require_first(self, check: Callable[[Any, Any], object]) -> None:
        """Call a function once, with the first outputs and targets of training.

        Args:
            check: gets them, and raises an exception if the loss is not supported for them.
        """
        self.check_first = check

    def run_first_check(self, outputs: Any, targets: Any) -> None:
        """Call `check_first`, which must not be None, and not again.

        Args:
            outputs: the first ones of training.
            targets: of these outputs.
        """
        check = self.check_first
        assert check is not None
        self.check_first = None
        check(outputs, targets)

    def note_gathering(self) -> None:
        """Note that the loss calls ddp_lab.gather."""
        self.gathers = True

    def monitorable(self, classes: int) -> list[str]:
        """Return the names of the metrics that can choose the best epoch.

        Args:
            classes: number of classes of the data; 0: the targets are no classes.
        """
        return ["loss", *self.metric_mode]

    def loss_fn(self, outputs: Any, targets: Any) -> Losses:
        """Return the unreduced losses of the task's own loss.

        Args:
            outputs: outputs of the model, [b, ...].
            targets: targets of the same samples, [b, ...].

        Returns:
            The losses, [b, ...], or (losses, weights) of one shape, or (sum, weight), both [].

        Raises:
            TrainingError: the task has no loss.
        """
        name = type(self).__name__
        raise TrainingError(f"{name}: has no loss; define its method loss_fn, or use {name}(loss)")

    def losses(self, outputs: Any, targets: Any) -> Losses:
        """Return the unreduced losses of the task, checked: those of `loss`, else its own.

        Args:
            outputs: outputs of the model, [b, ...].
            targets: targets of the same samples, [b, ...].

        Returns:
            The losses, [b, ...], or (losses, weights) of one shape, or (sum, weight), both [].

        Raises:
            TrainingError: the loss is reduced, the weights have another shape, or `weighted` is
                False and there is not one loss of weight 1 for each sample.
            SampleError: the weight of a sum is negative or not finite.
        """
        returned = (self.loss or self.loss_fn)(outputs, targets)
        if isinstance(returned, torch.Tensor):
            losses = returned
            weights = returned
        else:
            from ddp_lab.tasks.returned import as_pair, checked_sums

            losses, weights = as_pair(returned)
            if not losses.dim() and not weights.dim():
                return checked_sums(losses, weights, self.weighted)

        if isinstance(targets, torch.Tensor):
            samples = len(targets)
        else:
            samples = samples_in(outputs, targets, losses)
        if losses.shape[:1] != (samples,) or weights.shape != losses.shape:
            from ddp_lab.tasks.returned import require_losses

            require_losses(losses, weights, samples)

        if not self.weighted and (weights is not losses or losses.dim() != 1):
            shape = list(losses.shape)
            returned_shapes = (
                f"losses {shape}" if weights is losses else f"(losses, weights) of {shape}"
            )
            raise TrainingError(
                "weighted=False declares one loss of weight 1 for each sample, "
                f"[{samples}], but the loss returned {returned_shapes}. Remove the attribute "
                "weighted of the loss or the task, or set it to True",
            )
        return returned

    def loss_sum(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of losses * weights and the sum of the weights, both [].

        Args:
            outputs: outputs of the model in float32 or float64, [b, ...].
            targets: targets of the same samples, [b, ...].

        Raises:
            TrainingError: the loss is reduced, or the weights have another shape.
            SampleError: the weight of a sum is negative or not finite.
        """
        returned = self.losses(outputs, targets)
        if self._keeps:
            self._kept = (outputs, targets, returned)
        if isinstance(returned, tuple):
            losses, weights = returned
            return ((losses * weights).sum(), weights.sum()) if losses.dim() else returned
        return returned.sum(), torch.full((), returned.numel(), device=returned.device)

    def loss_and_metrics(
        self, outputs: Any, targets: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Return the sums of the losses, of `train_metrics` and of the weights, in training.

        The loss is called once, although the metrics need its weights: it may have a state, such as
        a running mean, which every call changes.

        Args:
            outputs: outputs of the model in float32 or float64, [b, ...].
            targets: targets of the same samples, [b, ...].

        Raises:
            TrainingError, SampleError: as `loss_sum`.
        """
        self._keeps = True
        try:
            loss_sum, weight = self.loss_sum(outputs, targets)
            sums_of_metrics = self.running_sums(outputs, targets)
        finally:
            self._keeps = False
            self._kept = None
        return loss_sum, sums_of_metrics, weight

    def losses_of_head(
        self,
        head: nn.Linear,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        factor: float | torch.Tensor = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `loss_sum` returns for the outputs of a linear layer, without all of them.

        It computes the loss in `head_chunks` chunks of rows, and the gradients of `hidden` and of
        the layer's weight with it. A task that overrides it has a `loss_fn` of the same loss.

        Args:
            head: the model's last layer, without a bias and with its complete weight.
            hidden: inputs of the layer, [b, ..., width].
            targets: of the same samples, [b, ...].
            factor: what the sum will be multiplied by before the backward pass, a number or a
                tensor []: gradients in half precision need it before they are rounded.

        Raises:
            TrainingError: the task computes its loss from outputs only.
        """
        raise TrainingError(f"{type(self).__name__}: computes its loss from the outputs only")

    def compile_head(self, compile_fn: Callable[..., Any]) -> None:
        """Compile what `losses_of_head` does with the logits of a chunk.

        Args:
            compile_fn: torch.compile with its options.
        """

    def require_labels(self, targets: torch.Tensor, classes: int) -> None:
        """Check that targets are classes of the outputs, without a wait for a device.

        Args:
            targets: classes, of any shape.
            classes: number of classes.

        Raises:
            SampleError: a target is below 0, or not below the number of classes.
        """
        labels = self.labels
        if labels is not None and not (
            labels.is_complete and labels.low >= 0 and labels.high < classes
        ):
            labels.require(targets, classes)

    @classmethod
    def lower_is_better(cls, metric: str) -> bool:
        """Return whether lower values of a metric are better.

        Args:
            metric: name of the metric, for example loss.
        """
        return metric == "loss" or cls.metric_mode.get(metric) == "lower"

    def running_sums(self, outputs: Any, targets: Any) -> list[torch.Tensor]:
        """Return the sums of `train_metrics` over a batch, each [], in their order.

        Args:
            outputs: outputs of the model, [b, ...].
            targets: targets of the same samples, [b, ...].
        """
        return []

    def weighted_sum(self, values: torch.Tensor, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the sum of values that are weighted as the losses of their samples are, [].

        Divided by the weight it is a weighted mean. Of several values for one loss the mean counts.
        It computes the losses again, unless `weighted` is False and there is one value for each
        sample, or `running_sums` calls it for the outputs and targets that it was given.

        Args:
            values: numbers or booleans, [b, ...].
            outputs: outputs that the losses are computed from, [b, ...].
            targets: targets that the losses are computed from, [b, ...].
        """
        if not self.weighted and values.dim() == 1:
            return values.sum()
        with torch.no_grad():
            if self._kept is not None and self._kept[0] is outputs and self._kept[1] is targets:
                returned = self._kept[2]
            else:
                returned = self.losses(outputs, targets)
        if isinstance(returned, tuple) and not returned[0].dim():
            from ddp_lab.tasks.returned import refuse_weighted_sum

            refuse_weighted_sum(type(self).__name__, self.train_metrics)
        weights = returned[1].detach() if isinstance(returned, tuple) else torch.ones_like(returned)

        dtype = sum_dtype(outputs.device)
        values = values.to(dtype)
        weights = weights.to(dtype)
        if values.dim() > weights.dim():
            values = values.flatten(weights.dim()).mean(-1)
        missing = weights.dim() - values.dim()
        return (values.view(*values.shape, *[1] * missing) * weights).sum()

    def sums(self, outputs: Any, targets: Any) -> dict[str, torch.Tensor]:
        """Return sums over a batch by name, of any shape, besides those of the loss.

        In an evaluation they are added over batches and ranks.

        Args:
            outputs: outputs of the model in evaluation mode, [b, ...].
            targets: targets of the same samples, [b, ...].
        """
        return {}

    def metric_inputs(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return predictions and targets as the metrics of the key `metrics` take them.

        Args:
            outputs: outputs of the model in evaluation mode, [b, ...].
            targets: targets of the same samples, [b, ...].

        Returns:
            Two tensors, [b, ...]: here the outputs and the targets.
        """
        return outputs, targets

    def metrics(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the metrics of an evaluation by name. The mean loss is not among them.

        Args:
            sums: those of `sums`, over all samples, in float64 on the CPU.
        """
        return {}


def samples_in(outputs: Any, targets: Any, losses: torch.Tensor) -> int:
    """Return the number of samples of outputs and targets of which one is no tensor.

    Where both are silent, any number of losses is right, but there must be a dimension.
    """
    from ddp_lab.data.trees import leaves, size

    if any(True for _ in leaves(targets)):
        return size(targets)
    if isinstance(outputs, torch.Tensor):
        return len(outputs)
    return len(losses) if losses.dim() else 1


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over samples: float64, or float32 on mps, which has no float64.

    In float32 a count is exact up to 2**24 samples, and a loss sum keeps about six digits.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def in_float32(outputs: torch.Tensor) -> torch.Tensor:
    """Return outputs in half precision as float32.

    The 8 bits of bf16 are too coarse for a sum, and fp16 overflows at 65,504.
    """
    return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs


def width(task: Task) -> int:
    """Return the number of sums of a training step: those of `measure`."""
    return 2 + len(task.train_metrics)


Measure = Callable[[Task, Any, Any, int, float | torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def measure(
    task: Task, outputs: Any, targets: Any, num_valid: int, divisor: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss to backpropagate, [], and [loss_sum, *train_metrics, weight].

    The latter are in `sum_dtype`.

    The loss to backpropagate is the sum divided by `divisor`.

    Args:
        outputs, targets: of a micro-batch, [b, ...], with padding at the end. Outputs that are no
            tensor have none, but for a micro-batch that has no sample without padding.
        num_valid: number of samples without padding.
        divisor: size of the GLOBAL batch; with precision=fp16 over the scale of the loss, [].
    """
    counts = True
    if not isinstance(outputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
        from ddp_lab.tasks.nested import for_task

        outputs, targets, counts = for_task(task, outputs, targets, num_valid)
    else:
        if num_valid < len(outputs):  # a slice of all rows would copy their gradient
            outputs = outputs[:num_valid]
            targets = targets[:num_valid]
        outputs = in_float32(outputs)

    if task.check_first is not None and num_valid:
        task.run_first_check(outputs, targets)
    if not num_valid and isinstance(outputs, torch.Tensor) and not task.gathers:
        return loss_of_none(task, outputs)
    loss_sum, sums_of_metrics, weight = task.loss_and_metrics(outputs, targets)
    if not loss_sum.requires_grad and torch.is_grad_enabled():
        from ddp_lab.tasks.returned import require_gradient

        require_gradient(outputs)
    parts = [loss_sum.detach(), *sums_of_metrics, weight]
    dtype = sum_dtype(loss_sum.device)
    sums = torch.stack([each.to(dtype) for each in parts])
    if not counts:
        return loss_sum * 0, torch.zeros_like(sums)
    if isinstance(divisor, torch.Tensor):  # of another device than the last stage's, under split
        divisor = divisor.to(loss_sum.device, non_blocking=True)
    return loss_sum / divisor, sums


def sums_of_loss(
    task: Task, outputs: Any, targets: Any, num_valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `Task.loss_sum` returns in an evaluation; zeros for outputs without samples.

    Args:
        task: with the loss.
        outputs, targets: without padding, or of padding alone if the outputs are no tensor.
        num_valid: number of samples without padding.
    """
    if not num_valid and isinstance(outputs, torch.Tensor) and not task.gathers:
        loss, sums = loss_of_none(task, outputs)
        return loss, sums[-1]
    return task.loss_sum(outputs, targets)


def loss_of_none(task: Task, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `measure` returns for no sample: 0, with a gradient of 0.

    The loss is not called, because one that returns a sum may not support an empty batch, or may
    give it a weight.

    Args:
        task: with the loss.
        outputs: [0, ...].
    """
    parts = torch.view_as_real(outputs) if outputs.is_complex() else outputs
    device = outputs.device
    return parts.sum(), torch.zeros(width(task), dtype=sum_dtype(device), device=device)
