"""What a training step keeps on the host, where the replays of a CUDA graph change nothing.

A replay repeats the kernels of the captured step. A number that the model keeps as an attribute, a
branch that was taken by it, a random number of the host and a buffer that the step replaces by
another tensor would stay as they were in the capture.
"""

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from ddp_lab.models.python_state import Place, Plain, changed_attributes, describe, plain_attributes
from ddp_lab.strategies.base import Strategy


class HostState(NamedTuple):
    """The state of the model and the loss on the host.

    Attributes:
        attributes: numbers and texts, of each of them by its name.
        addresses: of the buffers in memory, by name.
        generators: states of the generators of random numbers, by name.
    """

    attributes: Mapping[str, Mapping[Place, Plain]]
    addresses: Mapping[str, int]
    generators: Mapping[str, Any]

    @classmethod
    def of(cls, strategy: Strategy) -> "HostState":
        """Return the present state. It copies no tensor of the device.

        Args:
            strategy: after `setup`.
        """
        _, keys, position, *_ = np.random.get_state()
        generators: dict[str, Any] = {
            "Python's": random.getstate(),
            "NumPy's": (np.asarray(keys).tobytes(), position),
        }
        if strategy.device.type != "cpu":  # whose own generator a step may use
            generators["torch's"] = torch.get_rng_state().numpy().tobytes()
        return cls(
            attributes=attributes_of(strategy),
            addresses={
                name: buffer.data_ptr()
                for name, buffer in strategy.buffers().items()
                if buffer is not None
            },
            generators=generators,
        )

    def difference(self, after: "HostState") -> str:
        """Return what a step has changed, for a message; "" if nothing differs."""
        if changed := difference_of(self.attributes, after.attributes):
            return f"changes {changed}"
        for name, address in after.addresses.items():
            if self.addresses.get(name) != address:
                return f"replaces the buffer {name} by another tensor"
        for name, state in after.generators.items():
            if self.generators[name] != state:
                return f"draws random numbers from {name} generator of the host"
        return ""


def attributes_of(strategy: Strategy) -> dict[str, dict[Place, Plain]]:
    """Return the numbers and texts that the modules of model and loss keep."""
    return {name: plain_attributes(root) for name, root in strategy.roots.items()}


def difference_of(
    before: Mapping[str, Mapping[Place, Plain]], after: Mapping[str, Mapping[Place, Plain]]
) -> str:
    """Return the first attribute that differs, for a message; "" if none does."""
    for name, values in after.items():
        for place in changed_attributes(before[name], values):
            return f"{describe(place)} of the {name}"
    return ""
