"""Pictures of what the model predicts, after some of the epochs."""

from collections.abc import Mapping

import torch

from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.metrics import Evaluation

SHOWN = 8  # samples of each rank: rank 0 draws its own
CANDIDATES = 32  # samples of each rank, of which those are chosen


class Pictures(Hook):
    """Passes a few samples with their predictions, and the confusion matrix, to the logger.

    The samples are one of each class, of some at equal distances in the validation set or, if there
    is none, in the test set, which may be in order of its classes. They are read once, and are
    predicted only after epochs with a picture, and only if the logger draws it: rank 0 knows
    whether it does, and all ranks take part in a prediction.
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
        self.samples = None
        if self.predicts:
            candidates = loader.first(CANDIDATES, spread=True)
            inputs, targets, _ = candidates
            assert isinstance(inputs, torch.Tensor), "the inputs are images"
            assert isinstance(targets, torch.Tensor), "they have a class each"
            chosen = torch.tensor(one_of_each(targets.tolist(), SHOWN), device=inputs.device)
            self.samples = inputs[chosen], targets[chosen]

    def on_evaluate(self, results: Mapping[str, Evaluation]) -> None:
        if not self.is_drawable or self.name not in results:
            return
        run = self.run
        epoch = run.position.epoch
        if self.samples is not None and is_drawn(epoch):
            inputs, targets = self.samples
            outputs = run.strategy.predict(inputs)
            if not isinstance(outputs, torch.Tensor):
                from ddp_lab.tasks.nested import logits_of

                outputs = logits_of(outputs, type(run.strategy.task).__name__)
            run.logger.predictions(epoch, inputs, targets, outputs)
        run.logger.confusion(epoch, results[self.name].sums.get("confusion"), self.name)


def one_of_each(classes: list[int], number: int) -> list[int]:
    """Return the places of the first sample of each class, then of others, at most `number`.

    They are in order of the classes.
    """
    firsts = list({each: classes.index(each) for each in classes}.values())
    others = [place for place in range(len(classes)) if place not in firsts]
    return sorted([*firsts, *others][:number], key=lambda place: (classes[place], place))


def is_drawn(epoch: int) -> bool:
    """Return whether an epoch has a picture: the first 9, every tenth, after 99 every hundredth.

    A picture takes 0.1 s, and TensorBoard shows ten of a run.
    """
    return epoch % 10 ** (len(str(epoch)) - 1) == 0
