"""Predictions for all strategies of a run, and which of them is recommended."""

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_lab.estimate.footprint import Footprint
from ddp_lab.estimate.memory import Memory
from ddp_lab.estimate.sizes import describe_bytes
from ddp_lab.estimate.step_time import StepTime

SIMPLER = 1.05  # a simpler strategy is recommended unless another one is faster by this factor
SIMPLEST = ("strategy=single", "strategy=ddp")  # before all others: `dp` is a historical baseline, and `scratch` is for study


def name_of(overrides: list[str]) -> str:
    """Return the strategy and its options, without the word strategy."""
    return " ".join(override.removeprefix("+").removeprefix("strategy")[1:] for override in overrides)


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a strategy.

    Attributes:
        overrides: of train.py, which choose the strategy.
        devices: number of GPUs in use.
        fits: whether the memory is at most the card's.
        memory: at the peak of a step, of the rank whose peak is highest.
        held: parameters, gradients, optimizer state and averages of that rank, exact.
        host: bytes of these that the ranks of a machine keep in host memory.
        time: of a step.
        images_per_second: of the training steps.
        gpu_hours: of the training steps of the run, summed over the GPUs in use.
        launch: the command line.
        chosen: keys that speed=auto switches on.
    """

    overrides: list[str]
    devices: int
    fits: bool
    memory: Memory
    held: Footprint
    host: float
    time: StepTime
    images_per_second: float
    gpu_hours: float
    launch: str
    chosen: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.overrides)


@dataclass(frozen=True)
class Refused:
    """A strategy that the model, the batch or the GPUs do not allow."""

    overrides: list[str]
    reason: str

    @property
    def name(self) -> str:
        return name_of(self.overrides)

    @property
    def explanation(self) -> str:
        """The reason without the override that it begins with, as `name` has it."""
        first, _, rest = self.reason.partition(": ")
        return rest if first in self.overrides else self.reason


@dataclass(frozen=True)
class Advice:
    """The predictions for a run.

    Attributes:
        head: lines that describe the run, the GPUs and the constants.
        memory: bytes of the card's memory.
        predictions: the simplest strategies first.
        refused: what cannot be laid on the GPUs.
        own: overrides of the user's own strategy; None if there is none.
        notes: lines about what the predictions leave out.
    """

    head: list[str]
    memory: float
    predictions: list[Prediction]
    refused: list[Refused]
    own: list[str] | None = None
    notes: Sequence[str] = ()

    @property
    def listed(self) -> list[Prediction]:
        """The predictions, the user's own before all others."""
        return sorted(self.predictions, key=lambda each: each.overrides != self.own)

    @property
    def own_refusal(self) -> Refused | None:
        """The refusal of the user's own strategy; None if it can be laid on the GPUs."""
        return next((each for each in self.refused if each.overrides == self.own), None)

    @property
    def least(self) -> Prediction:
        """What needs the least memory."""
        return min(self.predictions, key=lambda each: each.memory.total)

    @property
    def ranked(self) -> list[Prediction]:
        """The predictions that fit, the recommended one first, then by images per second.

        With scaling=weak the batch grows with the number of ranks, so that times of a step cannot be compared.
        """
        fitting = sorted((each for each in self.predictions if each.fits), key=lambda each: -each.images_per_second)
        if not fitting:
            return []
        simple_first = sorted(self.predictions, key=lambda each: (*SIMPLEST, each.overrides[0]).index(each.overrides[0]))
        first = next(each for each in simple_first if self._is_close(each, fitting[0]))
        return [first, *(each for each in fitting if each is not first)]

    @property
    def conclusion(self) -> str:
        """The recommendation with its reason, and the line to paste."""
        if not self.ranked:
            least = self.least
            short = (least.memory.total - self.memory) / 2**30
            return (
                f"Nothing fits: {least.name} needs the least and lacks {short:,.1f} GiB. Use more or larger GPUs, a smaller "
                "batch_size, or accumulate=N"
            )
        best = self.ranked[0]
        chosen = f"\nspeed=auto is predicted to switch on {', '.join(best.chosen)}" if best.chosen else ""
        return f"Recommended: {best.name}, because {self._reason(best)}{chosen}\n  {best.launch}"

    def _is_close(self, each: Prediction, fastest: Prediction) -> bool:
        return each.fits and SIMPLER * each.images_per_second >= fastest.images_per_second

    def _reason(self, best: Prediction) -> str:
        too_large = [each.name for each in self.predictions if not each.fits]
        fastest = max(self.ranked, key=lambda each: each.images_per_second)
        if fastest is best:
            reason = f"it is predicted to be the fastest of {len(self.ranked)} that fit"
        else:
            close = sum(self._is_close(each, fastest) for each in self.ranked)
            reason = (
                f"it is the simplest of {close} that are predicted to be within 5 % of the images/s of the fastest, "
                f"{fastest.name}"
            )
        if best.host:
            reason += f"; it keeps {describe_bytes(best.host)} in the host memory of each machine"
        return reason + (f"; {', '.join(too_large[:3])} would not fit" if too_large else "")
