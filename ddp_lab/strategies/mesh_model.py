"""What a mesh does otherwise for each kind of model: a Chain, any module, and stages of traces."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ddp_lab.data.trees import Tree
from ddp_lab.strategies.executor import Executor

if TYPE_CHECKING:
    from ddp_lab.strategies.mesh import Mesh


class Placed(NamedTuple):
    """A model on the ranks of a mesh, as of `Strategy.setup`.

    Attributes:
        module: this rank's part of it.
        is_metric_rank: whether this rank's sums count.
        executor: runs batches through the stages; None: there is only one.
        forward: computes the logits; None: the executor does.
    """

    module: nn.Module
    is_metric_rank: bool
    executor: Executor | None = None
    forward: nn.Module | None = None


class MeshModel(ABC):
    """A kind of model. Its methods are called as those of the strategy, which they get.

    Attributes:
        tries_plan: as of `Strategy`.
        bubble: as of `Strategy`.
        unsupported: as of `Strategy`, because of the kind of model. These three are known after
            `partition`.
        has_shards: whether the parameters are DTensors of the mesh.
    """

    tries_plan: bool = False
    bubble: float | None = None
    unsupported: Mapping[str, str] = {}
    has_shards: bool = True

    @abstractmethod
    def partition(self, mesh: "Mesh", model: nn.Module, samples: int) -> None:
        """Decide which rank has which part of the model, as `Strategy.partition`."""

    @abstractmethod
    def setup(self, mesh: "Mesh", model: nn.Module) -> Placed:
        """Divide and shard the model, when the groups of the mesh are known. Collective."""

    def before_sharding(self, unit: nn.Module) -> None:  # noqa: B027, traces are not sharded
        """Register hooks on a unit before those of `fully_shard`."""

    def after_sharding(self, unit: nn.Module) -> None:  # noqa: B027, traces are not sharded
        """Register hooks on a unit after those of `fully_shard`."""

    def begin_step(self, inputs: Tree, has_samples: bool) -> None:  # noqa: B027, traces need none
        """Prepare for a forward and a backward pass of a micro-batch.

        Args:
            inputs: of the micro-batch.
            has_samples: whether it has a sample that is no padding.
        """

    def begin_prediction(self, inputs: Tree) -> None:  # noqa: B027, most kinds need none
        """Prepare for a forward pass in evaluation."""

    def no_sync(self) -> AbstractContextManager[object]:
        """Return the context of all gradient-accumulation steps but the last."""
        return nullcontext()

    @abstractmethod
    def reduce_gradients(self, mesh: "Mesh") -> None:
        """Complete the gradients after the last backward pass of a step. Collective."""

    def require_called_hooks(self, mesh: "Mesh", model: nn.Module) -> None:  # noqa: B027
        """Check the hooks on modules, besides those that `Strategy.require_called_hooks` checks."""

    def counted_parameters(self, mesh: "Mesh") -> Iterable[nn.Parameter]:
        """Return the parameters whose gradients this rank adds to the norm of all."""
        return mesh.module.parameters()

    @abstractmethod
    def describe(self, mesh: "Mesh") -> str:
        """Return the lines of the log, as `Strategy.describe`."""
