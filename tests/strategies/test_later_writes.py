"""Parameters that a forward pass begins to change after the trial: refused by name."""

import pytest
import torch
import torch.distributed as dist
from slow_rows import slow_but
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import TrainingError
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.later_writes import EVERY, PartWatch, Slot, checksum


class Later(nn.Module):
    """Changes a weight in one forward pass, long after the first."""

    def __init__(self, how: str, at: int):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)
        self.how = how
        self.at = at
        self.passes = 0

    def forward(self, inputs):
        if self.training:
            self.passes += 1
            if self.passes == self.at or (self.passes > self.at and self.how == "data each time"):
                self.write()
        return self.head(self.layer(inputs))

    def write(self):
        weight = self.layer.weight
        if self.how == "in place":
            with torch.no_grad():
                weight.clamp_(-0.01, 0.01)
        elif self.how == "numpy":
            weight.detach().numpy()[:] *= 0.5
        elif self.how.startswith("data"):
            weight.data.mul_(0.5)
        elif self.how == "rows":
            weight.data.copy_(weight.data.flip(0).clone())
        elif self.how == "swapped":
            weight.data = weight.data * 0.5
        elif self.how == "replaced":
            self.layer.weight = nn.Parameter(weight.detach() * 0.5)


STRATEGIES = {
    "ddp": {},
    "scratch": {},
    "tp": {},
    "fsdp": {},
    "mesh": {"shard": None},
}
WAYS = {"in place": 5, "swapped": 6, "replaced": 7, "data": 8, "rows": 4, "none": 3}
STEPS = 10
EVALUATED = ("ddp", "fsdp")
FAST = ("ddp", "fsdp")


def train(
    strategy: str, how: str, at: int, timeout: float = 30, evaluates: bool = False, **options
) -> int | str:
    """Return the number of steps, or the message with the step that raised it.

    Args:
        evaluates: whether two evaluation passes come after each two steps.
    """
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.rand(2, 4, 4, generator=generator)
    with Lab(strategy, device="cpu", timeout=timeout, **options) as lab:
        model: nn.Module = Later(how, at)
        if strategy in ("mesh", "pipeline"):
            model = Chain((4,), first=model, last=nn.Linear(4, 4))
        example = (inputs[0], targets[0])
        trainer = lab.trainer(
            model, tasks.Regression(), torch.optim.SGD, batch_size=4, example=example
        )
        data = TensorDataset(inputs, targets)
        for step in range(1, STEPS + 1):
            batch = next(iter(trainer.batches(data, step - 1)))
            try:
                trainer.step(*batch)
            except TrainingError as error:
                return f"step {step}: {error}"
            if evaluates and step % 2 == 0:
                trainer.evaluate(TensorDataset(inputs.repeat(2, 1), targets.repeat(2, 1)))
        return STEPS


def on_two(strategies: tuple[str, ...]) -> dict:
    results: dict = {}
    if strategies == FAST:
        results["numpy"] = train("ddp", "numpy", 1)
    for strategy in strategies:
        if strategy in EVALUATED:
            results[strategy, "evaluated"] = train(strategy, "data each time", 5, evaluates=True)
        for how, at in WAYS.items():
            results[strategy, how] = train(strategy, how, at, **STRATEGIES[strategy])
    return results


def in_a_stage() -> int | str:
    try:
        # The other stage waits for this one until its time limit.
        options = {"num_microbatches": 1, "schedule": "gpipe", "timeout": 3}
        return train("pipeline", "in place", WAYS["in place"], **options)
    except RuntimeError:
        return "waited"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@once
def world(strategies: tuple[str, ...]) -> list[dict]:
    return run_world(2, on_two, strategies, timeout=200)


def two(strategy: str) -> list[dict]:
    """Return what each rank has found, of the strategies that are as fast as this one."""
    if strategy in FAST:
        return world(FAST)
    return world(tuple(each for each in STRATEGIES if each not in FAST))


@pytest.mark.parametrize("how", [how for how in WAYS if how != "none"])
@pytest.mark.parametrize("strategy", slow_but(FAST, STRATEGIES))
def test_later_change_of_a_parameter_is_refused_in_its_step(strategy, how):
    for rank in two(strategy):
        message = rank[strategy, how]
        assert isinstance(message, str), "trained, although what the forward pass wrote may be lost"
        prefix = "first." if strategy == "mesh" else ""
        expected = (
            f"step {WAYS[how]}: strategy={strategy}: a forward pass has changed the parameter "
            f"{prefix}layer.weight, which no trial"
        )
        assert message.startswith(expected)
        assert message.endswith("or use strategy=single")


@pytest.mark.parametrize("strategy", EVALUATED)
def test_later_change_of_values_is_found_between_evaluations(strategy):
    """Training pass 8 compares values. Counted together, no such pass would be one of training."""
    for rank in two(strategy):
        assert rank[strategy, "evaluated"].startswith(f"step 8: strategy={strategy}: a forward")


def test_change_that_the_trial_cannot_see_is_told_how_to_be_seen():
    for rank in two("ddp"):
        assert rank["numpy"].startswith("step 1: strategy=ddp: a forward pass has changed the")
        assert "Change it by operations of torch, not through NumPy, and from the" in rank["numpy"]


def test_change_of_values_in_every_second_pass_is_found():
    """Each first pass of two, as with two gradient-accumulation steps."""
    layer = nn.Linear(2, 2)
    watch = PartWatch([Slot("weight", layer, "weight")], "ddp", 0)

    def passes(numbers: range) -> None:
        for number in numbers:
            watch.begin(layer, ())
            if number > 1 and number % 2 == 1:
                layer.weight.data.mul_(0.9)
            watch.end(layer, (), None)

    passes(range(1, EVERY))
    with pytest.raises(TrainingError, match="has changed the parameter weight"):
        passes(range(EVERY, EVERY + 1))


def test_stage_with_a_later_change_refuses_it():
    first, _ = run_world(2, in_a_stage, timeout=60)
    assert "has changed the parameter first.layer.weight" in first


@pytest.mark.parametrize("strategy", slow_but(FAST, STRATEGIES))
def test_model_that_changes_no_parameter_is_trained(strategy):
    assert [rank[strategy, "none"] for rank in two(strategy)] == [STEPS] * 2


def test_sum_of_values_depends_on_each_value_and_on_the_order_of_rows():
    tensor = torch.randn(3, 5, dtype=torch.float64)
    expected = checksum(tensor)
    assert torch.equal(checksum(tensor.clone()), expected)
    for row in range(3):
        for column in range(5):
            changed = tensor.clone()
            changed[row, column] = torch.nextafter(changed[row, column], torch.tensor(9.0).double())
            assert not torch.equal(checksum(changed), expected)
    assert not torch.equal(checksum(tensor[[1, 0, 2]]), expected)
    assert not torch.equal(checksum(tensor.T), expected)
    assert checksum(torch.tensor(2.5)) != checksum(torch.tensor(2.25))
    assert EVERY == 101  # as docs/your-own.md says
