"""The schedules of a pipeline.

How many stages and micro-batches does each support, where does it cut the model, what is its
bubble?

gpipe                  all forward passes, then all backward passes (Huang et al. 2018,
                       arXiv:1811.06965)
1f1b                   begins each backward pass as early as possible, so that a rank keeps the
                       activations of at most p micro-batches, p being the number of ranks
                       (Narayanan et al. 2019, PipeDream)
interleaved1f1b        several stages per rank: a smaller bubble, more messages
interleavedzerobubble  also cuts the backward pass in two: gradients of the inputs first, those of
                       the weights in idle time
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from torch import nn

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.config.types import BlockName, Count
from ddp_lab.config.worlds import has_one_stage, require_microbatches
from ddp_lab.models.chain import Chain
from ddp_lab.models.cut_points import CutPoints
from ddp_lab.models.partition import Partition

# torch's own names, in lower case. zbvzerobubble and dualpipev are left out, because torch (2.11 to
# 2.15) cannot evaluate with them: "can't steal_bwd_input if this stage doesn't have backward".
Schedule = Literal["gpipe", "1f1b", "interleaved1f1b", "interleavedzerobubble"]


class PipelineKeys(TypedDict):
    """The options of a pipeline, as in the config; `Pipeline` describes them."""

    schedule: Schedule
    num_microbatches: Count
    cut: list[BlockName] | None


@dataclass(frozen=True)
class PipelinePlan:
    """The stages of a pipeline and how they run.

    Attributes:
        schedule: name of torch's schedule.
        ranks: number of ranks of the pipeline, p. Stage s is on rank s % p.
        num_microbatches: number of micro-batches that a batch is divided into, m.
        parts: the blocks of each stage.
    """

    schedule: Schedule
    ranks: int
    num_microbatches: int
    parts: Partition | CutPoints

    @classmethod
    def make(
        cls,
        keys: Mapping[str, Any],
        model: nn.Module,
        ranks: int,
        samples: int,
        cut_model: Callable[[int | list[str]], CutPoints] | None = None,
    ) -> "PipelinePlan":
        """Cut a model into the stages of a pipeline.

        Args:
            keys: at least those of `PipelineKeys`.
            model: the complete model.
            ranks: number of ranks of the pipeline.
            samples: number of samples that the pipeline gets at once.
            cut_model: cuts a model that is no Chain into a number of stages, or before modules.

        Raises:
            ConfigError: the schedule does not support this number of ranks, stages or
                micro-batches, or the model cannot be cut into the stages.
        """
        schedule = keys["schedule"]
        number = keys["num_microbatches"]
        cut = [str(name) for name in keys["cut"] or ()]  # the blocks of a Sequential have numbers
        require_microbatches(schedule, number, ranks, samples)
        one_stage = has_one_stage(schedule)
        if cut and (len(cut) + 1 != ranks if one_stage else (len(cut) + 1) % ranks):
            if one_stage:
                needs = f"{ranks} stages, one for each"
            else:
                needs = f"a multiple of {ranks} stages"
            raise ConfigError(
                f"strategy.cut=[{','.join(cut)}]: makes {len(cut) + 1} stages, but "
                f"strategy.schedule={schedule} on {ranks} ranks needs {needs}"
            )
        cut_at = cut or (ranks if one_stage else 2 * ranks)
        if cut_model is not None:
            parts = cut_model(cut_at)
        else:
            assert isinstance(model, Chain)
            parts = Partition(model, cut_at)
        return cls(schedule, ranks, number, parts)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.parts.parts)

    @property
    def bubble(self) -> float:
        """The fraction of a step in which a balanced pipeline's ranks idle: (p-1) / (v m + p - 1).

        v is the number of stages per rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
        """
        return (self.ranks - 1) / (
            self.num_stages // self.ranks * self.num_microbatches + self.ranks - 1
        )

    def describe(self) -> str:
        """Return lines about the balance of the ranks and the schedule, for the log."""
        p = self.ranks
        m = self.num_microbatches
        v = self.num_stages // self.ranks
        busiest = max(sum(self.parts.shares[rank::p]) for rank in range(p))
        # the formula ignores the cut of the backward pass
        below = "below " if "zerobubble" in self.schedule else ""
        micro_batches = count(m, "micro-batch")
        factor = "v" if v > 1 else ""
        stages = f", v={v} stages a rank" if v > 1 else ""
        lines = [
            f"balance {1 / (p * busiest):.0%} (mean rank / busiest)",
            f"{self.schedule}, {micro_batches}, expected bubble of equally busy ranks {below}"
            f"(p-1)/({factor}m+p-1) = {self.bubble:.0%} of the time, p={p}{stages}",
        ]
        return "\n".join(lines)
