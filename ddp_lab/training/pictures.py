"""Pictures of what the model predicts, after some of the epochs."""

from collections.abc import Mapping

import torch

from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.metrics import Evaluation

SHOWN = 8  # samples of each rank: rank 0 draws its own


class Pictures(Hook):
    """Passes a few samples with their predictions, and the confusion matrix, to the logger.

    The samples are the first ones of the validation set or, if there is none, of the test set. They
    are read once, and are predicted only after epochs with a picture, and only if the logger draws
    it: rank 0 knows whether it does, and all ranks take part in a prediction.
    """

    def on_start(self, run: Run) -> None:
        self.run = run
        self.name = "val" if "val" in run.loaders else "test"
        loader = run.loaders[self.name]
        self.is_drawable = run.strategy.task.pictures and len(loader.data.shape) == 3
        runtime = run.strategy.runtime
        self.predicts = self.is_drawable and runtime.broadcast_from_rank0(
            "pictures", lambda: run.logger.draws_predictions
        )
        self.samples = loader.first(SHOWN) if self.predicts else None

    def on_evaluate(self, results: Mapping[str, Evaluation]) -> None:
        if not self.is_drawable or self.name not in results:
            return
        run = self.run
        epoch = run.position.epoch
        if self.samples is not None and is_drawn(epoch):
            inputs, targets, _ = self.samples
            assert isinstance(inputs, torch.Tensor), "the inputs are images"
            assert isinstance(targets, torch.Tensor), "they have a class each"
            outputs = run.strategy.predict(inputs)
            if not isinstance(outputs, torch.Tensor):
                from ddp_lab.tasks.nested import logits_of

                outputs = logits_of(outputs, type(run.strategy.task).__name__)
            run.logger.predictions(epoch, inputs, targets, outputs)
        run.logger.confusion(epoch, results[self.name].sums.get("confusion"))


def is_drawn(epoch: int) -> bool:
    """Return whether an epoch has a picture: the first 9, every tenth, after 99 every hundredth.

    A picture takes 0.1 s, and TensorBoard shows ten of a run.
    """
    return epoch % 10 ** (len(str(epoch)) - 1) == 0
