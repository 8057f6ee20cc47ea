"""Callbacks as users write them."""

import json

from ddp_lab import Hook


class Calls(Hook):
    """Writes a line for each call, on each rank."""

    def __init__(self, file: str = "calls"):
        self.file = file

    def write(self, *values):
        path = self.run.folder / f"{self.file}.{self.run.rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def on_start(self, run):
        self.run = run
        self.write("on_start", run.position.step, run.world_size, run.epochs)

    def before_step(self, batch):
        self.write("before_step", len(batch.inputs), batch.global_size)
        return batch

    def on_step_end(self, position):
        self.write("on_step_end", position.step, position.lr)
        position.lr = -1.0  # it is a copy

    def on_evaluation_batch(self, position, number):
        self.write("on_evaluation_batch", position.step, number)

    def on_evaluate(self, results):
        self.write("on_evaluate", {name: each.values["loss"] for name, each in results.items()})

    def on_evaluated(self, position, results, seconds):
        self.write("on_evaluated", position.step, seconds > 0)

    def on_checkpoint(self, path):
        self.write("on_checkpoint", path.name)

    def on_epoch_end(self, position):
        self.write("on_epoch_end", position.epoch, position.step)

    def close(self, status):
        self.write("close", status)


class Doubled(Hook):
    """Trains on doubled inputs."""

    def before_step(self, batch):
        return batch._replace(inputs=2 * batch.inputs)


class Forgetful(Hook):
    def before_step(self, batch):
        self.batch = batch


class Predicting(Hook):
    """Predicts in a step, which is not allowed."""

    def on_start(self, run):
        self.run = run
        self.batch = run.samples(2)

    def on_step_end(self, position):
        self.run.predict(self.batch.inputs)


class Leaving(Hook):
    def before_step(self, batch):
        raise SystemExit(7)


class Numbering(Hook):
    def before_step(self, batch):
        return len(batch.inputs)


class Failing(Hook):
    """Fails in one of its methods, on the chosen ranks."""

    def __init__(self, method: str, ranks: list | None = None):
        self.method = method
        self.ranks = [0, 1] if ranks is None else ranks

    def fail(self, method):
        if method == self.method and self.run.rank in self.ranks:
            raise ValueError("planted")

    def on_start(self, run):
        self.run = run
        self.fail("on_start")

    def before_step(self, batch):
        self.fail("before_step")
        return batch

    def on_step_end(self, position):
        self.fail("on_step_end")

    def on_evaluation_batch(self, position, number):
        self.fail("on_evaluation_batch")

    def on_evaluate(self, results):
        self.fail("on_evaluate")

    def on_evaluated(self, position, results, seconds):
        self.fail("on_evaluated")

    def on_checkpoint(self, path):
        self.fail("on_checkpoint")

    def on_epoch_end(self, position):
        self.fail("on_epoch_end")

    def close(self, status):
        self.fail("close")


class Misspelt(Hook):
    def on_step_ends(self, position):
        pass


class NoHook:
    def on_step_end(self, position):
        pass
