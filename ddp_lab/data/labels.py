"""The range of the labels, known on the host before a loss on a device could fail.

On a GPU, a label that is no class of the model ends the process with an assertion of the device,
and a look at the labels of each step would make the host wait for it. Therefore a loader adds the
range of the labels that it has in host memory, or once of all that it keeps on a device, and the
loss compares numbers on the host.
"""

from typing import Any

import torch

from ddp_lab.config.errors import SampleError, count

# torch has no minimum of the others
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
PART = 2**24  # labels of which a copy is made at once


class LabelRange:
    """The smallest and the largest label that this process has read.

    Args:
        ignore: label that does not count; None: all count.

    Attributes:
        low, high: the range, which always contains 0.
        is_complete: whether a loader adds the labels of all batches, so that none has to be
            measured again.
    """

    def __init__(self, ignore: int | None = None):
        self.ignore = ignore
        self.low = 0
        self.high = 0
        self.is_complete = False

    def expect_loader(self) -> None:
        """Expect the labels of all batches from a loader, to be added before it returns one."""
        self.is_complete = True

    def __deepcopy__(self, memo: dict[int, Any]) -> "LabelRange":
        return self  # a copy of a task, for another device, gets the same labels

    def measure(self, targets: Any) -> tuple[int, int]:
        """Return the smallest and the largest of labels, and 0; (0, 0) if they are no integers.

        Labels are a tensor: targets that are a dict or tuple are none.
        """
        if (
            not isinstance(targets, torch.Tensor)
            or targets.dtype not in (*INTEGERS, torch.uint16)
            or not targets.numel()
        ):
            return 0, 0
        if targets.dtype == torch.uint16:  # of shards, in host memory
            return 0, int(targets.numpy().max())
        low, high = (int(bound) for bound in targets.aminmax())
        if self.ignore is not None and low <= self.ignore <= high:
            rows = max(1, PART * len(targets) // targets.numel())
            counted = [part.where(part != self.ignore, 0).aminmax() for part in targets.split(rows)]
            low = min(int(measured.min) for measured in counted)
            high = max(int(measured.max) for measured in counted)
        return min(0, low), max(0, high)

    def add(self, low: int, high: int) -> None:
        """Widen the range to include labels from `low` to `high`."""
        self.low = min(self.low, low)
        self.high = max(self.high, high)

    def add_from(self, targets: Any) -> None:
        """Add the labels of a batch if they are in host memory."""
        if is_on_host(targets):
            self.add(*self.measure(targets))

    def require(self, targets: torch.Tensor, classes: int) -> None:
        """Check that all labels are classes of the model. It does not wait for a device.

        Args:
            targets: the labels of a batch, which are added if they are in host memory.
            classes: number of classes of the model.

        Raises:
            SampleError: one is none.
        """
        self.add_from(targets)
        if self.low >= 0 and self.high < classes:
            return
        low = self.low
        high = self.high
        # a notebook may go on with other targets
        self.low = 0
        self.high = 0
        also = "" if self.ignore is None else f", or {self.ignore} where they do not count"
        allowed = f"labels must be 0 to {classes - 1}{also}"

        if low < 0:
            raise SampleError(f"the targets contain the label {low}; {allowed}. Correct them")
        raise SampleError(
            f"the targets contain the label {high}, but the outputs of the model have "
            f"{count(classes, 'class')}, so that {allowed}. Correct the labels, or give the "
            "model's last layer "
            f"{count(high + 1, 'output')}"
        )


def is_on_host(tensor: Any) -> bool:
    """Return whether values can be read at once.

    They cannot on a device, as fake tensors of a plan, or in a compilation.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )
