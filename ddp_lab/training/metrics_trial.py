"""The trial of a run's metrics before its first step, with a few samples."""

from ddp_lab.training.gathered_metrics import GatheredMetrics
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.metrics import evaluate

SAMPLES = 8  # of each rank


class MetricsTrial(Hook):
    """Evaluates a few samples first: a metric that fails must not do so after an epoch of hours."""

    def __init__(self, metrics: GatheredMetrics):
        self.metrics = metrics

    def on_start(self, run: Run) -> None:
        name = next((each for each in ("val", "test") if each in run.loaders), None)
        if name is not None:
            batch = run.loaders[name].first(SAMPLES)
            with self.metrics.trial():
                evaluate(run.strategy, [batch], run.task, metrics=self.metrics)
