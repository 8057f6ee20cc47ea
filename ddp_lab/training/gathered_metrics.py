"""Metrics of an evaluation that are no sums, such as AUROC: classes of torchmetrics.

torchmetrics can add the states of the ranks by itself. It is not used for that, for four reasons:

- It takes all ranks for ranks with samples of their own. Under tp and pipelines several ranks see
  the same samples.
- It decides by batch whether predictions are probabilities or logits, so that local batches of
  another size may be understood in another way.
- It concatenates the samples of one rank after those of another, and adds sums in another order.
- A class of the user that does not declare how its states are added would silently be wrong.

Predictions and targets of each GLOBAL batch are therefore gathered on rank 0, in the order of the
samples and without padding. Its metrics get the same calls as on one device, of batches of the size
of training, however many samples an evaluation computes at once. This costs the communication and
the memory of the outputs of one batch, and what the metric keeps.
"""

import re
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ddp_lab.config.errors import ConfigError, TrainingError, describe_error
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.gathering import gather_on_rank0
from ddp_lab.tasks.base import Task
from ddp_lab.training.user_parts import UserPart, make_part

if TYPE_CHECKING:
    from torchmetrics import Metric

KEY = "metrics"
# options of a metric that are not those of its class
RESERVED = ("name", "higher_is_better")
# prefixes of torchmetrics' classes, of which AUROC(task="multiclass") returns a MulticlassAUROC
KINDS = re.compile("^(Binary|Multiclass|Multilabel)(?=[A-Z])")


class GatheredMetrics:
    """Metrics of torchmetrics, computed on rank 0 over all samples of an evaluation.

    Args:
        metrics: by name.
        labels: import paths of their classes, by name.
        higher_is_better: by name; None: not known.
        batch_size: samples of a GLOBAL batch; None: batches are what an evaluation computes at
            once.
    """

    def __init__(
        self,
        metrics: "Mapping[str, Metric]",
        labels: Mapping[str, str],
        higher_is_better: Mapping[str, bool | None],
        batch_size: int | None = None,
    ):
        self.metrics = metrics
        self.labels = labels
        self.higher_is_better = higher_is_better
        self.batch_size = batch_size
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # for the rest of their batch
        self._is_trial = False
        self._problem = ""  # why a metric has failed on rank 0

    def begin(self, strategy: Strategy) -> None:
        """Begin an evaluation, without the state of the last one."""
        self.strategy = strategy
        self._problem = ""
        self._waiting = []
        if not strategy.runtime.is_main:
            return
        for name, metric in self.metrics.items():
            self._call(name, "reset", partial(reset, metric, strategy.device))

    def add(self, task: Task, outputs: Any, targets: Any, num_valid: int) -> None:
        """Add a batch. Collective.

        Args:
            task: which says what of outputs and targets the metrics get.
            outputs, targets: of this rank's samples, as the task takes them.
            num_valid: number of samples without padding; rows after them are left out.

        Raises:
            TrainingError: predictions or targets are no tensors, or of shapes that differ between
                the ranks.
        """
        predictions, expected = task.metric_inputs(outputs, targets)
        for role, rows in (("predictions", predictions), ("targets", expected)):
            if not isinstance(rows, torch.Tensor):
                raise TrainingError(
                    f"{KEY}: take one tensor of predictions and one of targets, but the {role} of "
                    f"{type(task).__name__} are a {type(rows).__name__}. Let the method "
                    "metric_inputs of a task of your own return both"
                )
        strategy = self.strategy
        predictions = gather_on_rank0(strategy, predictions[:num_valid], f"{KEY}: the predictions")
        expected = gather_on_rank0(strategy, expected[:num_valid], f"{KEY}: the targets")
        if predictions is None or expected is None:
            return
        if self._waiting and self._waiting[-1][0].shape[1:] != predictions.shape[1:]:
            self._update(is_complete=False)  # samples of another length make no batch together
        self._waiting.append((predictions, expected))
        if sum(len(rows) for rows, _ in self._waiting) >= (self.batch_size or 1):
            self._update(is_complete=True)

    def _update(self, is_complete: bool) -> None:
        """Give the metrics the batches that wait.

        Args:
            is_complete: whether the samples after the last complete batch go on to wait.
        """
        if len(self._waiting) == 1:
            ((predictions, expected),) = self._waiting
        else:
            predictions = torch.cat([rows for rows, _ in self._waiting])
            expected = torch.cat([rows for _, rows in self._waiting])
        self._waiting = []
        size = self.batch_size or len(predictions)
        end = len(predictions)
        if is_complete:
            end = end // size * size
        if end < len(predictions):
            self._waiting = [(predictions[end:], expected[end:])]
        for first in range(0, end, size):
            rows = predictions[first : min(first + size, end)]
            labels = expected[first : min(first + size, end)]
            place = f"for predictions {describe(rows)} and targets {describe(labels)}"
            for name, metric in self.metrics.items():
                self._call(name, f"update {place}", partial(metric.update, rows, labels))

    def values(self, taken: Collection[str]) -> dict[str, float]:
        """Return the metrics of the samples so far, by name, the same on every rank. Collective.

        Args:
            taken: names of the other metrics.

        Raises:
            TrainingError: a metric has failed, has the name of another one, or is no number.
        """
        for name in self.metrics:
            if name in taken:
                raise TrainingError(
                    f"{KEY}: {name} is already the name of a metric of the task. Give yours "
                    f"another one: {{_target_: {self.labels[name]}, name: my_{name}}}"
                )
        runtime = self.strategy.runtime
        numbers = runtime.broadcast_from_rank0(KEY, self._compute)
        if isinstance(numbers, str):
            raise TrainingError(numbers)
        return dict(zip(self.metrics, numbers, strict=True))

    def require_direction(self, metric: str, choice: str) -> None:
        """Check that a run can choose by a metric, if it is one of these.

        Args:
            metric: its name.
            choice: the key and its value; begins the message.

        Raises:
            ConfigError: it is not known whether higher values are better.
        """
        if metric in self.metrics and self.higher_is_better[metric] is None:
            label = self.labels[metric]
            raise ConfigError(
                f"{choice}: {label} does not say whether higher values are better "
                "(higher_is_better). Say it in the config: "
                f"{KEY}=[{{_target_: {label}, higher_is_better: true}}], or false"
            )

    @contextmanager
    def trial(self) -> Generator[None]:
        """Take the evaluation of the body for a trial with a few samples.

        They may be too few to compute a metric.
        """
        self._is_trial = True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self._is_trial = False

    def _compute(self) -> list[float] | str:
        """Return the metrics in their order, on rank 0; or why one has failed."""
        if self._waiting:
            self._update(is_complete=False)
        numbers: list[float] = []
        for name, metric in self.metrics.items():
            value = self._call(name, "compute", metric.compute, is_lenient=self._is_trial)
            if value is not None:
                value = self._as_number(name, value)
            numbers.append(float("nan") if value is None else value)
        return self._problem or numbers

    def _call(
        self, name: str, method: str, call: Callable[[], Any], is_lenient: bool = False
    ) -> Any:
        """Return what a method of a metric returns; None after an error, which is noted.

        The other ranks get it at the end of the evaluation, because they wait for nothing before.
        """
        if self._problem:
            return None
        try:
            return call()
        except Exception as error:
            if not is_lenient:
                self._problem = (
                    f"{KEY}: {name} ({self.labels[name]}) fails in {method}: "
                    f"{describe_error(error)}. Set its options for this task, or leave it out"
                )
        return None

    def _as_number(self, name: str, value: Any) -> float | None:
        """Return a value that a metric has computed; None if it is not one number."""
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if isinstance(value, int | float):
            return float(value)
        kind = describe(value) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        self._problem = (
            f"{KEY}: {name} ({self.labels[name]}) returns {kind}, but a row of metrics.jsonl has "
            "one number for each metric. Use an average, for example average: macro, or a class of "
            "your own"
        )
        return None


def reset(metric: "Metric", device: torch.device) -> None:
    """Remove the state of a metric, which is then used by this rank alone, on a device."""
    for part in metric.modules():
        # Also a metric within a metric would wait for the ranks, which have none.
        if hasattr(part, "distributed_available_fn"):
            part.distributed_available_fn = alone  # pyright: ignore[reportArgumentType]
    metric.to(device)
    metric.reset()


def alone() -> bool:
    """Return whether metrics exchange their states with other ranks: they do not."""
    return False


def describe(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor, for a message."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def make_metrics(
    values: Sequence[Any] | Mapping[str, Any], batch_size: int | None = None
) -> GatheredMetrics | None:
    """Construct the metrics that a user names; return None if there are none.

    Args:
        values: each an import path, a dict with `_target_` and options, a class or an instance; in
            a list, or in a dict by name.
        batch_size: as in `GatheredMetrics`.

    Raises:
        ConfigError: torchmetrics is not installed, one cannot be constructed or is no metric, or
            two have the same name.
    """
    if not values:
        return None
    try:
        from torchmetrics import Metric
    except ModuleNotFoundError:
        raise missing_package() from None

    names: Sequence[str | None] = [None] * len(values)
    if isinstance(values, Mapping):
        names = list(values)
        values = list(values.values())
    metrics: dict[str, Metric] = {}
    labels: dict[str, str] = {}
    higher: dict[str, bool | None] = {}
    for chosen, value in zip(names, values, strict=True):
        part = make_part(KEY, value, RESERVED)
        if not isinstance(part.value, Metric):
            raise ConfigError(
                f"{KEY}: {part.label} is no metric: it must be a subclass of torchmetrics.Metric, "
                f"for example torchmetrics.AUROC, got a {type(part.value).__name__}"
            )
        name = name_of(part, chosen)
        if name in metrics:
            raise ConfigError(
                f"{KEY}: two metrics have the name {name}; give one another name: {{_target_: "
                f"{part.label}, name: other}}"
            )
        metrics[name] = part.value
        labels[name] = part.label
        higher[name] = direction_of(part)
    return GatheredMetrics(metrics, labels, higher, batch_size)


def missing_package() -> ConfigError:
    """Return the error that torchmetrics is not installed."""
    return ConfigError(
        f"{KEY}: needs the package torchmetrics. Use pip install 'ddp_lab[metrics]', or {KEY}=[]"
    )


def name_of(part: UserPart, chosen: str | None) -> str:
    """Return the name of a metric, as in f1_score: the chosen one, or that of its class.

    Raises:
        ConfigError: it is no name.
    """
    name = chosen or part.settings.get("name")
    if name is None:
        kind = type(part.value)
        words = kind.__name__
        if kind.__module__.startswith("torchmetrics."):
            words = KINDS.sub("", words)
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words)
        return words.lower()
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ConfigError(
            f"{KEY}: name={name}: must be letters, digits and _, beginning with a letter, as "
            "top_auroc"
        )
    return name


def direction_of(part: UserPart) -> bool | None:
    """Return whether higher values of a metric are better; None: nobody says.

    Raises:
        ConfigError: what the user says is neither true nor false.
    """
    stated = part.settings.get("higher_is_better", part.value.higher_is_better)
    if stated is not None and not isinstance(stated, bool):
        raise ConfigError(
            f"{KEY}: higher_is_better={stated} of {part.label}: must be true or false"
        )
    return stated
