"""The losses of a language model, computed by its last layer in place of the logits.

    head_chunks=1   hidden [b, n, width] -> linear layer -> logits [b, n, vocabulary] -> losses
    above 1         hidden [b, n, width] -> linear layer: sum of the losses, []

With `task.head_chunks` above 1 the layer itself calls the loss of the task, which is computed in
chunks of rows, so that all logits never exist at once. That happens within the forward pass of the
model. So the weight that fully_shard has gathered is there, gradients arrive where hooks on them
expect it, and the weight may be tied to that of the embedding.

The last block of the model names the layer in its attribute `fusable_head`. The class of the layer
is changed in place, so that the names of the parameters stay. In evaluations, and wherever else no
targets were given, it returns logits.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.module_hooks import hook_of
from ddp_lab.models.trial import meta_copy
from ddp_lab.tasks.base import Task, sum_dtype

if TYPE_CHECKING:
    from ddp_lab.data.trees import Tree
    from ddp_lab.strategies.base import Strategy

LossOfHidden = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


class HeadLinear(nn.Linear):
    """A linear layer that returns what a function makes of its inputs, where there is one.

    Attributes:
        loss_of_hidden: gets the layer and its inputs; None: the layer returns its outputs.
    """

    loss_of_hidden: LossOfHidden | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.loss_of_hidden is None:
            return super().forward(input)
        return self.loss_of_hidden(self, input)


class HeadLosses:
    """The losses of micro-batches, computed by the last layer of a strategy's model.

    Args:
        module: what this rank has of the model, which is all of its blocks. The class of the last
            layer is changed.
        task: with the loss, on its device.

    Attributes:
        path: of the block with the layer.
    """

    def __init__(self, module: nn.Module, task: Task):
        self.task = task
        self.path, block = [*module.named_children()][-1]
        self.layer = as_head(block)
        self._compute: LossOfHidden = self._loss_of_hidden
        # of the micro-batch that is computed
        self._targets = torch.zeros(0)
        self._num_valid = 0
        self._divisor: float | torch.Tensor = 1.0
        self._weight = torch.zeros(0)

    def compile(self, compile_fn: Callable[..., Any]) -> None:
        """Compile what the task computes of a chunk, and let what is around it run in eager mode.

        Args:
            compile_fn: torch.compile with its options.
        """
        self.task.compile_head(compile_fn)
        self._compute = cast("LossOfHidden", torch.compiler.disable(self._loss_of_hidden))

    def measure(
        self,
        forward: Callable[[], torch.Tensor],
        targets: "Tree",
        num_valid: int,
        divisor: float | torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss to backpropagate, [], and [loss_sum, weight], as `tasks.base.measure`.

        Args:
            forward: calls the complete model with the inputs of a micro-batch.
            targets: [b, n], with padding at the end.
            num_valid: number of samples without padding.
            divisor: what the sum of the losses is divided by.
        """
        if not isinstance(targets, torch.Tensor):
            from ddp_lab.tasks.nested import require_tensor_targets

            require_tensor_targets(targets, type(self.task).__name__)
        assert isinstance(targets, torch.Tensor)
        self._targets = targets
        self._num_valid = num_valid
        self._divisor = divisor
        self.layer.loss_of_hidden = self
        try:
            total = forward()
        finally:
            self.layer.loss_of_hidden = None
        dtype = sum_dtype(total.device)
        sums = torch.stack([total.detach().to(dtype), self._weight.to(dtype)])
        return total / divisor, sums

    def __call__(self, layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses of the micro-batch, [].

        Args:
            layer: with its complete weight.
            hidden: its inputs, [b, n, width].
        """
        return self._compute(layer, hidden)

    def _loss_of_hidden(self, layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        targets = self._targets
        num_valid = self._num_valid
        if num_valid < len(hidden):  # a slice of all rows would copy their gradient
            hidden = hidden[:num_valid]
            targets = targets[:num_valid]
        factor = 1 / self._divisor
        total, self._weight = self.task.losses_of_head(layer, hidden, targets, factor)
        return total


def as_head(block: nn.Module) -> HeadLinear:
    """Return the last layer of a block that names it in `fusable_head`. Its class is changed."""
    layer = block.get_submodule(str(block.fusable_head))
    layer.__class__ = HeadLinear
    assert isinstance(layer, HeadLinear)
    return layer


def check_head(strategy: "Strategy", model: nn.Module, task: Task) -> None:
    """Check that the model's last layer can compute the loss of the task in place of the logits.

    Args:
        strategy: before `partition`, with `example`.
        model: the complete model.
        task: with the loss.

    Raises:
        ConfigError: it cannot, under this strategy, with this loss or in this model.
    """
    problem = problem_of_task(task) or problem_of_strategy(strategy) or problem_of_model(model)
    if not problem and isinstance(strategy.example, torch.Tensor):
        assert isinstance(model, Chain)  # `problem_of_model`
        problem = problem_of_outputs(model, strategy.example)
    if problem:
        raise ConfigError(
            f"task.head_chunks={task.head_chunks}: {problem}, or task.head_chunks=1, the default, "
            "with which all logits of a micro-batch exist at once"
        )


def problem_of_task(task: Task) -> str:
    """Return what of a task does not allow that the last layer computes its loss, or ""."""
    name = type(task).__name__
    if task.loss is not None:
        return (
            "the last layer of the model computes the task's own cross-entropy in place of the "
            "logits, which a loss of your own needs. Use loss=default"
        )
    kinds = type(task).__mro__
    own_loss = next(kind for kind in kinds if defines(kind, "loss_fn", "losses", "loss_sum"))
    head_loss = next(kind for kind in kinds if defines(kind, "losses_of_head"))
    if head_loss is Task or not issubclass(head_loss, own_loss):
        return (
            f"the task {name} computes its loss from the logits, and has no `losses_of_head` for "
            "it. Define this method, too, or use task=tokens"
        )
    if task.train_metrics:
        return (
            f"the training metrics of {name}, {', '.join(task.train_metrics)}, need the logits of "
            "the training steps. Leave train_metrics empty"
        )
    return ""


def defines(kind: type, *methods: str) -> bool:
    """Return whether a class itself defines one of these methods."""
    return any(method in vars(kind) for method in methods)


def problem_of_strategy(strategy: "Strategy") -> str:
    """Return why the complete model is not called by the ranks of a strategy, or ""."""
    if strategy.computes_head_losses:
        return ""
    name = strategy.name
    of_mesh = " with strategy.pp or strategy.tp above 1" if name == "mesh" else ""
    return (
        f"is not supported by strategy={name}{of_mesh}, which does not compute the last layer and "
        "its loss in one call on one device. Use strategy=single, scratch, ddp, fsdp, or mesh with "
        "strategy.pp=1 strategy.tp=1"
    )


def problem_of_model(model: nn.Module) -> str:
    """Return why the loss cannot be computed in the last layer of a model, or ""."""
    instead = "Use model=gpt or gpt2, or a Chain with such a block (docs/your-own.md)"
    if not isinstance(model, Chain) or not getattr(model[-1], "fusable_head", None):
        return (
            f"needs a Chain whose last block names its last layer in `fusable_head`, and the model "
            f"is a {type(model).__name__} without one. {instead}"
        )
    *_, (path, block) = model.named_children()
    name = str(block.fusable_head)
    layer: Any = dict(block.named_modules()).get(name)
    kind = "has no such module" if layer is None else f"is a {type(layer).__name__}"
    if type(layer) is nn.Linear:
        kind = "" if getattr(layer, "bias", None) is None else "has a bias"
    if kind:
        return (
            f"the last layer must be a plain nn.Linear without a bias, and {path}.{name} {kind}. "
            f"{instead}"
        )
    assert isinstance(layer, nn.Linear)
    called: dict[str, nn.Module] = {"the model": model, path: block, f"{path}.{name}": layer}
    for place, module in called.items():
        if method := hook_of(module):
            return (
                f"{place} has a hook ({method}), which would get the sum of the losses in place of "
                "the logits. Remove it"
            )
    return ""


def problem_of_outputs(model: Chain, example: torch.Tensor) -> str:
    """Return a message if the model does something with the outputs of its last layer, or "".

    Args:
        model: with a head that `problem_of_model` accepts.
        example: inputs of some samples, on the meta device.
    """
    copied = meta_copy(model)
    *_, head = copied.children()
    layer = as_head(head)
    returned = torch.zeros((), device="meta")
    layer.loss_of_hidden = partial(always, returned)
    try:
        with torch.no_grad():
            outputs = copied(example)
    except Exception:  # with what is no tensor of logits
        outputs = None
    if outputs is returned:
        return ""
    *_, (path, block) = model.named_children()
    return (
        f"the model changes the outputs of {path}.{block.fusable_head}, and the loss would be "
        "computed without this change. Let the last block return them as they are"
    )


def always(value: torch.Tensor, layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Return a value, whatever a layer and its inputs are."""
    return value
