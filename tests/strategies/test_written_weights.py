"""Parameters that a forward pass changes: equal to one device, or refused by name."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.usage import find_usage

SGD = partial(torch.optim.SGD, lr=0.3)


class Writer(nn.Module):
    """A layer with a small module inside, whose forward pass may change a weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.target = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4)

    def forward(self, inputs):
        self.write(inputs)
        return self.head(self.layer(inputs) + self.target(inputs))

    def write(self, inputs):
        """Change nothing."""


class MaxNorm(Writer):
    """Limits the norm of each row, through `.data`, which autograd does not see."""

    def write(self, inputs):
        weight = self.layer.weight.data
        weight.mul_((0.3 / weight.norm(dim=1, keepdim=True)).clamp(max=1))


class Clamped(Writer):
    def write(self, inputs):
        with torch.no_grad():
            self.layer.weight.clamp_(-0.2, 0.2)


class Divided(Clamped):
    """A block whose layers a plan divides."""

    tensor_parallel = {"layer": "column", "target": "column", "head": "row"}


class Swapped(Writer):
    def write(self, inputs):
        self.layer.weight.data = self.layer.weight.data * 0.9


class Replaced(Writer):
    def write(self, inputs):
        self.target.weight = nn.Parameter(self.layer.weight.detach() * 0.9, requires_grad=False)


class ReplacedInTraining(Writer):
    def write(self, inputs):
        if self.training:
            self.layer.weight = nn.Parameter(self.layer.weight.detach() * 0.9)


class Average(Writer):
    """BYOL's target: an average of the weights, which a pass updates once more each time."""

    def write(self, inputs):
        if self.training:
            with torch.no_grad():
                self.target.weight.lerp_(self.layer.weight, 0.3)


class InEvaluation(Writer):
    def write(self, inputs):
        if not self.training:
            self.layer.weight.data.mul_(0.9)


class OfSamples(Writer):
    """Writes what depends on the samples."""

    def write(self, inputs):
        if self.training:
            self.target.bias.data.copy_(inputs.mean(0))


class Random(Writer):
    def write(self, inputs):
        if self.training:
            self.target.bias.data.normal_()


class Inner(nn.Linear):
    """A layer of a class of its own, which changes its own weight."""

    def forward(self, input):
        self.weight.data.clamp_(-0.2, 0.2)
        return super().forward(input)


class Own(Writer):
    def __init__(self):
        super().__init__()
        self.layer = Inner(4, 4)


def hooked() -> nn.Module:
    model = Writer()
    model.layer.register_forward_pre_hook(
        lambda layer, _: clear(layer.weight.data.clamp_(-0.2, 0.2))
    )
    return model


def clear(_: object) -> None:
    """Return None, because what a hook returns takes the place of the inputs."""


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class Buffers(Writer):
    """What is no parameter may be changed, and a weight may be computed."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        parametrize.register_parametrization(self.target, "weight", Halved())
        parametrizations.spectral_norm(self.layer)
        self.recurrent = nn.LSTM(4, 4)

    def forward(self, inputs):
        self.calls += 1
        outputs, _ = self.recurrent(self.norm(inputs))
        return super().forward(outputs)


OF_WEIGHTS = {
    "max norm": (MaxNorm, "layer.weight", "the model"),
    "clamped": (Clamped, "layer.weight", "the model"),
    "swapped": (Swapped, "layer.weight", "the module layer"),
    "average": (Average, "target.weight", "the model"),
    "in evaluation": (InEvaluation, "layer.weight", "the model"),
    "own class": (Own, "layer.weight", "the module layer"),
    "hook": (hooked, "layer.weight", "the model"),
}
OF_BATCH = {"samples": OfSamples, "random numbers": Random}
COPYING = {"fsdp": {}, "mesh": {"shard": None}}
REPLICAS = {"ddp": {}, "scratch": {}}
CUTTING = {"pipeline": {"schedule": "gpipe"}, "mesh": {"schedule": "gpipe", "pp": 2}}
# which would wait for the gradient of a parameter that is replaced, or have copies of it
HOLDING = {"ddp": {}, "scratch": {"algorithm": "bucketed"}, "fsdp": {}}


def data(size: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(*torch.rand(2, size, 4, generator=generator))


def train(strategy: str, make, example: bool = True, **options) -> list[float]:
    """Return losses of two epochs, and of an evaluation after each; in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=30, **options) as lab:
            model = make()
            if strategy in ("mesh", "pipeline", "split"):
                model = Chain((4,), first=model, last=nn.Linear(4, 4))
            samples = TensorDataset(*(tensor.double() for tensor in data().tensors))
            with_example = {"example": samples[0]} if example else {}
            trainer = lab.trainer(model, tasks.Regression(), SGD, batch_size=8, **with_example)
            losses: list[float] = []
            for epoch in range(2):
                losses += [trainer.step(*batch).item() for batch in trainer.batches(samples, epoch)]
                losses.append(trainer.evaluate(samples)["loss"])
            return losses
    finally:
        torch.set_default_dtype(before)


def outcome(*arguments, **options) -> list[float] | str:
    try:
        return train(*arguments, **options)
    except ConfigError as error:
        return str(error)


def on_two() -> dict:
    outcomes: dict = {}
    for case, (make, *_) in OF_WEIGHTS.items():
        outcomes |= {
            (strategy, case): outcome(strategy, make, **options)
            for strategy, options in (COPYING | REPLICAS).items()
        }
        outcomes["tp", case] = outcome("tp", make, tp=None)
        outcomes["fsdp without", case] = outcome("fsdp", make, example=False)
        outcomes["ddp without", case] = outcome("ddp", make, example=False)
    for case, make in OF_BATCH.items():
        outcomes |= {(strategy, case): outcome(strategy, make) for strategy in REPLICAS}
        outcomes["tp", case] = outcome("tp", make, tp=None)
    outcomes |= {
        ("replaced", strategy): outcome(strategy, ReplacedInTraining, **options)
        for strategy, options in HOLDING.items()
    }
    outcomes["key"] = outcome("scratch", Average, find_unused_parameters=True)
    for strategy, options in CUTTING.items():
        outcomes[strategy, 2] = outcome(strategy, Clamped, num_microbatches=2, **options)
        outcomes[strategy, 1] = outcome(strategy, Average, num_microbatches=1, **options)
    outcomes["divided"] = outcome("mesh", Divided, tp=2)
    outcomes |= {
        ("buffers", strategy): outcome(strategy, Buffers, **options)
        for strategy, options in COPYING.items()
    }
    return outcomes


@once
def two() -> list[dict]:
    return run_world(2, on_two, timeout=200)


@once
def alone(case: str) -> list[float]:
    make = OF_WEIGHTS[case][0] if case in OF_WEIGHTS else OF_BATCH[case]
    return train("single", make, example=False)


@pytest.mark.parametrize("case", OF_WEIGHTS)
@pytest.mark.parametrize("strategy", [*COPYING, "fsdp without"])
def test_change_of_a_gathered_copy_is_refused_by_name(strategy, case):
    _, name, module = OF_WEIGHTS[case]
    prefix = "first." if strategy == "mesh" else ""
    for rank in two():
        message = rank[strategy, case]
        assert isinstance(message, str), "trained, although what the forward pass writes is lost"
        assert message.startswith(f"strategy={strategy.split()[0]}: the forward pass of ")
        assert (
            f"changes the parameter {prefix}{name}. The strategy computes with copies of the "
            "parameters" in message
        )
        assert message.endswith("or use strategy=single or ddp")
        if not prefix:
            assert f"forward pass of {module} changes" in message


@pytest.mark.parametrize("case", OF_WEIGHTS)
@pytest.mark.parametrize("strategy", REPLICAS)
def test_change_that_depends_on_weights_alone_is_that_of_one_device(strategy, case):
    for rank in two():
        assert rank[strategy, case] == pytest.approx(alone(case), rel=1e-12)


@pytest.mark.parametrize("case", OF_WEIGHTS)
def test_tp_computes_the_same_or_refuses_a_sharded_layer(case):
    for rank in two():
        result = rank["tp", case]
        if isinstance(result, str):
            assert "The strategy shards this parameter" in result
        else:
            assert result == pytest.approx(alone(case), rel=1e-12)


@pytest.mark.parametrize("case", OF_WEIGHTS)
def test_replicas_without_an_example_ask_for_one(case):
    for rank in two():
        message = rank["ddp without", case]
        assert (
            f"changes the parameter {OF_WEIGHTS[case][1]}. Whether every rank would write the same"
            in message
        )
        assert message.endswith("lab.trainer(..., example=dataset[0])")


@pytest.mark.parametrize("case", OF_BATCH)
@pytest.mark.parametrize("strategy", REPLICAS)
def test_change_that_depends_on_the_samples_is_refused_by_replicas(strategy, case):
    for rank in two():
        message = rank[strategy, case]
        assert message.startswith(
            f"strategy={strategy}: the forward pass of the model changes the parameter "
            "target.bias. What"
        )
        assert "depends on the samples of the batch or on random numbers" in message


def test_change_that_depends_on_the_samples_is_kept_where_all_ranks_have_the_same():
    for rank in two():
        losses = rank["tp", "samples"]
        assert losses == pytest.approx(alone("samples"), rel=1e-12)


def test_ranks_that_may_have_no_sample_refuse_a_change():
    assert all("a rank without a sample would not write" in rank["key"] for rank in two())


@pytest.mark.parametrize("strategy", CUTTING)
def test_change_in_every_micro_batch_is_refused(strategy):
    for rank in two():
        assert (
            "changes the parameter first.layer.weight, and so 2 times in a step instead of once."
            in rank[strategy, 2]
        )
        assert len(rank[strategy, 1]) == 6, rank[strategy, 1]


def test_mesh_refuses_a_change_in_a_block_that_a_plan_divides():
    for rank in two():
        assert (
            "changes the parameter first.layer.weight. The strategy shards this parameter"
            in rank["divided"]
        )


@pytest.mark.parametrize("strategy", COPYING)
def test_buffers_and_computed_weights_may_change(strategy):
    for rank in two():
        assert isinstance(rank["buffers", strategy], list), rank["buffers", strategy]


@pytest.mark.parametrize("strategy", HOLDING)
def test_replaced_parameter_is_refused_by_name_before_training(strategy):
    for rank in two():
        assert rank["replaced", strategy].startswith(
            f"strategy={strategy}: the forward pass of the module layer replaces the parameter "
            "layer.weight by another one"
        )


def test_parameter_that_is_replaced_is_found():
    usage = find_usage(Replaced(), torch.empty(2, 4, device="meta"))
    assert usage is not None
    assert usage.written == {"target.weight": "target"}
    assert usage.replaced == {"target.weight"}
