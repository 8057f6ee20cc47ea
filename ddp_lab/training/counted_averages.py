"""Averages whose updates are counted on the device.

The decay of the first ones warms up; without that a short run evaluates mostly initial weights. Or
updates are left out that follow a skipped step (precision=fp16).
"""

from collections import defaultdict
from collections.abc import Mapping

import torch

# bytes of averages that are updated by one call, which needs as much temporary memory
MOST = 64 * 2**20


class CountedAverages:
    """Averages whose decay is min(decay, (1 + t) / (10 + t)) in the update after t others.

    Without a warm-up it is the same in all updates.

    The formula is that of `num_updates` in TensorFlow's tf.train.ExponentialMovingAverage. The
    first update has the decay 0.1, the 81st has 0.9. With decay=0.999 the warm-up takes 8,990
    updates.

    The number of updates is a tensor on each device that holds averages, which every update
    advances: a captured CUDA graph counts its replays, while it would repeat a number of the host
    forever.

    Args:
        averages: by name, of floating-point numbers. They are updated in place.
        decay: at least 0 and below 1.
        warmup: whether the decay warms up.

    Attributes:
        updates: the number of updates so far, [], by device.
    """

    def __init__(self, averages: Mapping[str, torch.Tensor], decay: float, warmup: bool):
        self.averages = averages
        self.decay = decay
        self.warmup = warmup
        self._groups = groups_of(averages)
        devices = {average.device for average in averages.values()}
        # float32 counts to 16.7 million, where the decay is 0.9999995
        dtype = torch.get_default_dtype()
        self.updates = {device: torch.zeros((), device=device, dtype=dtype) for device in devices}

    @torch.no_grad()
    def update(
        self, values: Mapping[str, torch.Tensor], is_skipped: torch.Tensor | None = None
    ) -> None:
        """Add values, by the names of the averages, to them, and count the update.

        Args:
            values: finite ones.
            is_skipped: 1.0 if the update is left out, and 0.0 if it is not, []; None: it is not.

        `torch._foreach_lerp_` takes no tensor as the weight of all values. The three calls below
        are as few kernels on a GPU, for all tensors together.
        """
        for names in self._groups:
            averages = [self.averages[name] for name in names]
            device = averages[0].device
            weight = self._weight(device).to(averages[0].dtype)
            if is_skipped is not None:
                weight = weight * (1 - is_skipped.to(weight))
            changes = torch._foreach_sub([values[name] for name in names], averages)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            torch._foreach_mul_(changes, weight)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            torch._foreach_add_(averages, changes)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        for device, updates in self.updates.items():
            updates.add_(1 if is_skipped is None else 1 - is_skipped.to(device))

    def _weight(self, device: torch.device) -> torch.Tensor:
        """Return the weight of the values in the next update, [], which is 1 minus its decay."""
        if not self.warmup:
            return torch.full_like(self.updates[device], 1 - self.decay)
        in_warmup = 9 / (10 + self.updates[device])  # 1 - (1 + t) / (10 + t)
        return in_warmup.clamp(min=1 - self.decay)

    def resume(self, updates: int) -> None:
        """Continue as after this number of updates."""
        for count in self.updates.values():
            count.fill_(updates)


def groups_of(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names in groups of one device and dtype, of at most MOST bytes or one tensor."""
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        alike[tensor.device, tensor.dtype].append(name)
    groups: list[list[str]] = []
    for names in alike.values():
        size = 0
        groups.append([])
        for name in names:
            if groups[-1] and size + tensors[name].nbytes > MOST:
                size = 0
                groups.append([])
            groups[-1].append(name)
            size += tensors[name].nbytes
    return groups
