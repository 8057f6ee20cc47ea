"""The functions of parameters that users pass as `optimizer`: what they get, and refusals."""

from functools import partial

import pytest
import torch
from launches import SMALL, refusal_in_world
from torch import nn

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.training.optimizer import construct_optimizer, state_copies

REMOVED = ["~optimizer.momentum", "~optimizer.weight_decay", "~optimizer.nesterov"]
NEEDS = (
    "optimizer: the step of {} needs the argument {}, by which it would compute the loss several "
    "times in a step. "
)


class Own(torch.optim.SGD):
    def step(self, model, closure=None):
        return super().step(closure)


def decayed_by_dimension(parameters):
    """Iterate twice over the parameters, which must be tensors, and make two groups of them."""
    weights = [parameter for parameter in parameters if parameter.dim() > 1]
    biases = [parameter for parameter in parameters if parameter.dim() <= 1]
    return torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1)


FACTORIES = {
    "partial": partial(torch.optim.SGD, lr=0.1),
    "lambda": lambda params: torch.optim.SGD(params, lr=0.1),
    "generator": lambda params: torch.optim.SGD(
        (param for param in params if param.requires_grad), lr=0.1
    ),
    "groups": decayed_by_dimension,
}


def trained(make, strategy: str = "single") -> list[torch.Tensor]:
    with Lab(strategy, device="cpu") as lab:
        trainer = lab.trainer(nn.Linear(4, 1), tasks.Regression(), make, batch_size=8)
        trainer.step(torch.ones(8, 4), torch.zeros(8, 1))
        return [parameter.detach().clone() for parameter in trainer.strategy.module.parameters()]


@pytest.mark.parametrize("name", FACTORIES)
def test_function_of_parameters_gets_tensors(name):
    with Lab(device="cpu"):
        reference = nn.Linear(4, 1)
    optimizer = FACTORIES[name](list(reference.parameters()))
    tasks.Regression().loss_sum(reference(torch.ones(8, 4)), torch.zeros(8, 1))[0].div(8).backward()
    optimizer.step()
    for parameter, expected in zip(trained(FACTORIES[name]), reference.parameters(), strict=True):
        assert torch.allclose(parameter, expected, rtol=0, atol=1e-7)


def test_options_of_a_group_reach_the_optimizer_that_gets_a_list():
    parameters = [nn.Parameter(torch.ones(2))]
    optimizer = construct_optimizer(FACTORIES["lambda"], [{"params": parameters, "foreach": False}])
    assert optimizer.param_groups[0]["foreach"] is False
    # a stage whose parameters are all frozen
    nothing = construct_optimizer(FACTORIES["lambda"], [{"params": []}])
    assert nothing.param_groups[0]["params"] == []


@pytest.mark.parametrize(
    ("make", "name", "argument"), [(torch.optim.LBFGS, "LBFGS", "closure"), (Own, "Own", "model")]
)
def test_optimizer_whose_step_needs_an_argument_is_refused_before_training(make, name, argument):
    with Lab(device="cpu") as lab, pytest.raises(ConfigError) as error:
        lab.trainer(nn.Linear(4, 1), tasks.Regression(), make, batch_size=8)
    assert str(error.value).startswith(NEEDS.format(name, argument))


def test_command_refuses_an_optimizer_whose_step_needs_a_closure(tmp_path):
    code, printed = refusal_in_world(
        " ".join([*SMALL, "optimizer._target_=torch.optim.LBFGS", *REMOVED, f"runs_dir={tmp_path}"])
    )
    assert code == 2
    assert printed.startswith(f"error: {NEEDS.format('LBFGS', 'closure')}"), printed
    assert len(printed.splitlines()) == 1
    assert not list(tmp_path.iterdir())


class Asserts(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "needs a closure"


class TwoSteps(torch.optim.SGD):
    def step(self, closure=None):
        raise NotImplementedError("use first_step and second_step")


class Calls(torch.optim.SGD):
    def step(self, closure=None):
        return closure()


@pytest.mark.parametrize("make", [Asserts, TwoSteps, Calls])
def test_optimizer_that_fails_without_a_closure_is_one_message(make):
    with Lab(device="cpu") as lab, pytest.raises(ConfigError) as error:
        lab.trainer(nn.Linear(4, 1), tasks.Regression(), partial(make, lr=0.1), batch_size=8)
    start = f"optimizer: the step of {make.__name__} fails without a closure"
    assert str(error.value).startswith(start)


def weights_only(parameters):
    return torch.optim.Adam([parameter for parameter in parameters if parameter.dim() > 1])


def test_state_of_a_function_that_leaves_out_parameters_is_counted():
    model = nn.Linear(4, 3)
    assert state_copies(weights_only, model.parameters()) == 2
    assert state_copies(partial(torch.optim.SGD, lr=0.1), model.parameters()) == 0
    with pytest.raises(ConfigError, match=r"optimizer: .*empty parameter list"):
        state_copies(weights_only, nn.LayerNorm(4).parameters())


def fails(parameters):
    return torch.optim.SGD([parameter for parameter in parameters if parameter.dims() > 1])


def test_function_that_fails_is_one_message():
    with (
        Lab(device="cpu") as lab,
        pytest.raises(
            ConfigError, match=r"optimizer: AttributeError: .*dims.*test_optimizer_factories"
        ),
    ):
        lab.trainer(nn.Linear(4, 1), tasks.Regression(), fails, batch_size=8)
    with pytest.raises(AttributeError):
        construct_optimizer(decayed_by_dimension, [{"params": []}, {"params": []}])
