"""How many samples a micro-batch has, so that a pipeline does not need too many schedules.

A schedule of torch has static shapes, and torch keeps it in memory.
"""

from collections.abc import Hashable
from typing import NamedTuple

from torch.utils._pytree import tree_flatten

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.trees import Tree, size
from ddp_lab.models.boundaries import Form
from ddp_lab.models.calls import arguments_of

MOST_SHAPES = 16  # of a sample, for which a pipeline makes schedules
# of micro-batches of one shape in evaluation; further ones are rounded up, so that there are not
# many
EXACT_SIZES = 4


class BatchKey(NamedTuple):
    """What a schedule or a trace depends on: the form of a micro-batch, and the mode.

    Attributes:
        sample: form of each tensor of a sample.
        tree: how the inputs contain these tensors.
        samples: number of samples of a micro-batch, with padding.
        training: whether in training mode.
    """

    sample: tuple[Form, ...]
    tree: str
    samples: int
    training: bool


class StageShapes:
    """The micro-batches that have occurred.

    Args:
        num_microbatches: number of micro-batches that a batch is divided into.
    """

    def __init__(self, num_microbatches: int):
        self.num_microbatches = num_microbatches
        self._sizes: dict[tuple[Hashable, bool], list[int]] = {}

    def samples(self, sample: Hashable, text: str, batch: int, training: bool) -> int:
        """Return the number of samples of a micro-batch, with padding.

        Args:
            sample: shapes and dtypes of a sample.
            text: the same, for the message.
            batch: number of samples of the batch.
            training: whether it is trained with.

        Raises:
            ConfigError: samples of MOST_SHAPES other shapes or dtypes have occurred.
        """
        seen = {other for other, _ in self._sizes}
        if len(seen) == MOST_SHAPES and sample not in seen:
            raise ConfigError(
                f"got inputs of {MOST_SHAPES + 1} shapes, the last one {text} for a sample: a "
                "pipeline needs a schedule for each, which torch keeps in memory, so at most "
                f"{MOST_SHAPES} are supported. Pad the inputs to multiples of some length, so that "
                "fewer shapes occur, or use a strategy without a pipeline, for example ddp"
            )
        sizes = self._sizes.setdefault((sample, training), [])
        size = -(-batch // self.num_microbatches)
        if not training and size not in sizes and len(sizes) >= EXACT_SIZES:
            size = 1 << (size - 1).bit_length()  # more padding, and fewer schedules
        if size not in sizes:
            sizes.append(size)
        return size

    def key_of(self, inputs: Tree, training: bool) -> BatchKey:
        """Return the key of a batch of any inputs.

        Args:
            inputs: of the batch.
            training: whether it is trained with.

        Raises:
            ConfigError: as in `samples`.
        """
        tensors, form = tree_flatten(arguments_of(inputs))
        sample = tuple(Form(tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors)
        text = ", ".join(map(str, sample))
        samples = self.samples((sample, str(form)), text, size(inputs), training)
        return BatchKey(sample, str(form), samples, training)
