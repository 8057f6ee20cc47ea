"""The model of a trainer of a Lab: tried, divided by the strategy, compared between the ranks."""

import math
from typing import NamedTuple

from torch import nn

from ddp_lab.checkpoints.state import Shapes
from ddp_lab.config.types import Checkpointing
from ddp_lab.lab.arguments import form_of, in_blocks, require_same
from ddp_lab.lab.example import Example
from ddp_lab.lab.pretrained import Pretrained
from ddp_lab.lab.trial import try_model
from ddp_lab.observe.log import print_if_slow
from ddp_lab.strategies.head_losses import check_head
from ddp_lab.tasks.base import Task
from ddp_lab.training.divided_loss import Division, check_lab_loss
from ddp_lab.training.divided_model import describe_batch_norm, describe_division


class PreparedModel(NamedTuple):
    """A model whose division is known, before it is placed on its devices.

    Attributes:
        module: what the strategy places: the model of the user, or a Chain of its blocks.
        shapes: the shape of each of its tensors by name.
        pretrained: how the library of the model saves it; None: it has no such way.
    """

    module: nn.Module
    shapes: Shapes
    pretrained: Pretrained | None


def prepare_model(
    division: Division,
    model: nn.Module,
    task: Task,
    example: Example | None,
    checkpoint_activations: Checkpointing,
    over_batch: bool,
) -> PreparedModel:
    """Try a model and let the strategy decide who has which part of it. Collective.

    Rank 0 prints what the trials have found.

    Args:
        division: of the global batch, with a new strategy.
        model: of the user, on the CPU.
        task: with the loss.
        example: of a sample; None: there is none.
        checkpoint_activations: what the backward pass computes again.
        over_batch: whether a loss over the batch is allowed.

    Raises:
        ConfigError: model or loss fail for the example; or the strategy supports neither; or the
            ranks have constructed different models.
    """
    strategy = division.strategy
    is_main = strategy.runtime.is_main
    form = form_of(model, example)
    module = in_blocks(model, strategy, example, form)
    with print_if_slow("trying the model: a step of the example", is_main):
        idle, notes = try_model(module, task, example, strategy)
    print_notes(notes, is_main)

    pretrained = Pretrained.of(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    strategy.expect(
        example=form,
        sample=None if example is None else example.get_inputs,
        idle=idle,
        checkpoint_activations=checkpoint_activations,
    )
    if task.head_chunks > 1:
        check_head(strategy, module, task)
    samples = math.ceil(division.batch_size / strategy.replicas / division.accumulate)
    with print_if_slow(f"strategy={strategy.name}: dividing the model", is_main):
        strategy.partition(module, samples)
    with print_if_slow("comparing the initial weights of the ranks", is_main):
        require_same(module, strategy.runtime)

    complete = None
    if example is not None and example.is_complete:
        complete = (example.inputs, example.targets)
    if note := check_lab_loss(division, module, task, complete, over_batch):
        print_notes([note], is_main)
    with print_if_slow("trying what the parts of a batch compute", is_main):
        notes = describe_division(division, model, task, lambda: complete)
    print_notes([*notes, *describe_batch_norm(division, model)], is_main)
    return PreparedModel(module, shapes, pretrained)


def print_notes(notes: list[str], is_main: bool) -> None:
    """Print lines on rank 0."""
    for note in notes if is_main else []:
        print(note, flush=True)
