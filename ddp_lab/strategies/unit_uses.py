"""Uses of a sharded model's parameters outside of the units that gather them."""

from collections.abc import Generator
from contextlib import contextmanager, suppress

from torch import nn

from ddp_lab.config.errors import TrainingError, place_of
from ddp_lab.data.trees import Tree, to
from ddp_lab.models.trial import meta_copy
from ddp_lab.models.usage import record
from ddp_lab.strategies.unit_advice import Advice
from ddp_lab.strategies.units import find_units

MIXED = "got mixed torch.Tensor and DTensor"  # of torch's error, which names no parameter


class Uses:
    """Reports of parameters that are used while they are not gathered.

    Args:
        model: before it is sharded. Its copy on the meta device shows where a forward pass uses its
            parameters, which a sharded model does not.
        advice: what the messages recommend.
        tried: whether a trial has shown such uses before.
    """

    def __init__(self, model: nn.Module, advice: Advice, tried: bool):
        self.advice = advice
        self.tried = tried
        self._copy: nn.Module | None = None
        with suppress(Exception):  # some models cannot be copied
            self._copy = meta_copy(model)

    @contextmanager
    def reported(self, rank: int, inputs: Tree) -> Generator[None]:
        """Report that the body, a pass of the model, uses a sharded parameter that is not gathered.

        Args:
            rank: of this process.
            inputs: of the pass.

        Raises:
            TrainingError: in place of torch's error.
        """
        try:
            yield
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            others = ""
            if not self.tried:
                others = (
                    "; or, in a Lab, let the model be tried: lab.trainer(..., example=dataset[0])"
                )
            raise TrainingError(
                "strategy=fsdp: a parameter is used outside the forward pass of the module that "
                f"has it{place_of(error)}, and is not gathered then. Gather it together with the "
                f"module around it: use {self.advice.keep(self._used_elsewhere(inputs))}{others}",
                rank=rank,
            ) from None

    def _used_elsewhere(self, inputs: Tree) -> list[str]:
        """Return the units whose parameters these inputs use elsewhere; all if that is unknown."""
        units = [*self.advice.units]
        if self._copy is None:
            return units
        with suppress(Exception):  # a model that reads values cannot run on the meta device
            usage = record(self._copy, to(inputs, "meta"))
            names = {module: name for name, module in self._copy.named_modules()}
            gathered_in_time = {
                names[unit] for unit in find_units(self._copy, usage, self.advice.from_user)
            }
            elsewhere = [name for name in units if name not in gathered_in_time]
            return elsewhere or units
        return units
