"""Functions that group parameters by position or number, where a rank updates only some of them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain

STAGES = {
    "pipeline": {"num_microbatches": 1, "schedule": "gpipe"},
    "mesh": {"pp": 2, "num_microbatches": 1, "schedule": "gpipe"},
}


def by_position(kind, parameters):
    """Train the last layer 10 times as fast as the others."""
    parameters = list(parameters)
    return kind([{"params": parameters[:-2], "lr": 0.01}, {"params": parameters[-2:], "lr": 0.1}])


def by_layer(kind, parameters):
    """Let the learning rate increase with the position."""
    return kind(
        [{"params": [each], "lr": 0.02 * (place + 1)} for place, each in enumerate(parameters)]
    )


def by_number(kind, parameters):
    """Divide the learning rate by the number of elements."""
    parameters = list(parameters)
    return kind(parameters, lr=4 / sum(each.numel() for each in parameters))


def only_first(kind, parameters):
    """Train the first layer, of which the last stage has nothing."""
    return kind(list(parameters)[:2], lr=0.1)


class Signs(torch.optim.Optimizer):
    """Steps by the sign of each gradient."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class Slow(torch.optim.SGD):
    """Keeps a copy of each parameter, which it averages, as Lookahead does."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)
        self.copies = [
            each.detach().clone() for group in self.param_groups for each in group["params"]
        ]


sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
RIGHT = {
    "position": partial(by_position, sgd),
    "position of an own class": partial(by_position, Signs),
    "layer": partial(by_layer, sgd),
    "layer of an own class": partial(by_layer, Signs),
    "number": partial(by_number, torch.optim.SGD),
    "first": partial(only_first, sgd),
    "the same of all": partial(Slow, lr=0.1),
}
REFUSED = {"copies": partial(by_layer, Slow)}


class Partly(nn.Module):
    """A model whose last layer is not used."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def chain() -> nn.Module:
    return Chain((4,), first=nn.Linear(4, 6), second=nn.Tanh(), last=nn.Linear(6, 4))


def train(strategy: str, make, model=chain, **options) -> tuple[list[float], list[int]]:
    """Return the losses, and the number of parameters in each group."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=20, seed=0, **options) as lab:
            generator = torch.Generator().manual_seed(2)
            samples = TensorDataset(*torch.rand(2, 16, 4, generator=generator))
            trainer = lab.trainer(
                model(), tasks.Regression(), make, batch_size=4, example=samples[0]
            )
            losses = [
                trainer.step(*batch).item()
                for epoch in range(2)
                for batch in trainer.batches(samples, epoch)
            ]
            groups = trainer.state.optimizer.param_groups
            return losses, [len(group["params"]) for group in groups]
    finally:
        torch.set_default_dtype(before)


def outcome(strategy: str, make, **options):
    try:
        return train(strategy, make, **options)
    except ConfigError as error:
        return str(error)


def on_two() -> dict:
    results = {
        (strategy, name): outcome(strategy, make, **options)
        for strategy, options in STAGES.items()
        for name, make in (RIGHT | REFUSED).items()
    }
    return results | {"unused": outcome("ddp", RIGHT["position"], model=Partly)}


@once
def two() -> list[dict]:
    return run_world(2, on_two, timeout=200)


@once
def alone(name: str) -> tuple[list[float], list[int]]:
    return train("single", RIGHT[name])


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("strategy", STAGES)
def test_parameters_of_a_stage_have_the_options_of_the_complete_model(strategy, name):
    losses, sizes = alone(name)
    results = [rank[strategy, name] for rank in two()]
    for own_losses, _ in results:
        assert own_losses == pytest.approx(losses, rel=1e-10)
    # a checkpoint and a resume match the groups of the ranks by their number
    assert [sum(each) for each in zip(*(size for _, size in results), strict=True)] == sizes


@pytest.mark.parametrize("strategy", STAGES)
def test_optimizer_with_copies_is_refused_where_its_groups_depend_on_the_stage(strategy):
    for rank in two():
        assert rank[strategy, "copies"].startswith(
            "optimizer: the function of parameters makes another Slow of the parameters that this "
            "rank updates than of all"
        )


def test_unused_parameters_count_in_the_groups_under_ddp():
    losses, _ = train("single", RIGHT["position"], model=Partly)
    for rank in two():
        own_losses, sizes = rank["unused"]
        assert own_losses == pytest.approx(losses, rel=1e-10)
        assert sizes == [2, 0]


def test_function_is_called_for_the_stage_and_for_all_without_a_trace():
    assert run_world(2, optimizers_made) == [1, 1]


def optimizers_made() -> int:
    made: list[torch.optim.Optimizer] = []

    def make(parameters):
        made.append(RIGHT["layer"](parameters))
        return made[-1]

    train("pipeline", make, **STAGES["pipeline"])
    return len(made)
