"""Hooks of users on parameters and modules: kept and equal to `single`, or refused by name."""

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import pytest
import torch
from slow_rows import extra
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.checkpoints.state import gather_full_state
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import as_chain
from ddp_lab.strategies.batch_trial import changing_buffer

WIDTH = 8
BATCH = 16
STEPS = 3
LIMIT = 1e-2
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
# Strategies with numbers of ranks.
STRATEGIES: dict[str, tuple[int, dict]] = {
    "dp": (1, {}),
    "split": (1, {"devices": ["cpu", "cpu"], "num_microbatches": 2}),
    "scratch": (2, {"algorithm": "bucketed", "bucket_mb": 1e-5}),
    "ddp": (2, {}),
    "pipeline": (2, {"num_microbatches": 2}),
    "ddp_pipeline": (4, {"pp": 2, "num_microbatches": 2}),
    "fsdp": (2, {}),
    "tp": (2, {}),
    "mesh": (2, {"pp": 2, "num_microbatches": 2}),
}
# which have the kinds of parts that others have, too
COMBINED = ("dp", "scratch", "ddp_pipeline", "mesh")
SHARDING = ("fsdp", "tp", "mesh")  # which replace the parameters
CUTTING = ("split", "pipeline", "ddp_pipeline", "mesh")  # which call the blocks of the model


def clipped(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clamp(-LIMIT, LIMIT)


def clip(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-LIMIT, LIMIT)


def clipped_activation(gradient: torch.Tensor) -> torch.Tensor:
    limit = 1e-3 / BATCH
    return gradient.clamp(-limit, limit)


def clip_each_input(layer: nn.Module, inputs: tuple, outputs: tuple) -> tuple:
    return tuple(map(clipped_activation, inputs))


def clip_each_output(layer: nn.Module, outputs: tuple) -> tuple:
    return tuple(map(clipped_activation, outputs))


def hook_output(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(clipped_activation)


class Clipped(torch.autograd.Function):
    """A backward pass of the user's own, which is not linear."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return clipped_activation(gradient)


def removed(model: nn.Module) -> Callable[[], None]:
    """Register a hook; return what removes it."""
    return model.second.weight.register_hook(torch.zeros_like).remove


ON_PARAMETERS = {
    "register_hook": lambda model: model.second.weight.register_hook(clipped),
    "register_post_accumulate_grad_hook": lambda model: (
        model.first.bias.register_post_accumulate_grad_hook(clip)
    ),
    "removed": removed,
}
ON_MODULES = {
    "register_forward_hook": lambda model: model.second.register_forward_hook(
        lambda *a: a[2] * 1.5
    ),
    "register_forward_pre_hook": lambda model: model.second.register_forward_pre_hook(
        lambda *a: a[1][0] * 1.5
    ),
    "register_full_backward_hook": lambda model: model.second.register_full_backward_hook(
        lambda *a: (a[1][0] / 2,)
    ),
    "register_full_backward_pre_hook": lambda model: model.second.register_full_backward_pre_hook(
        lambda *a: (a[1][0] / 2,)
    ),
    "weight_norm": lambda model: parametrizations.weight_norm(model.second),
    "orthogonal": lambda model: parametrizations.orthogonal(model.second),
}
ON_ACTIVATIONS = {
    "register_full_backward_hook": lambda model: model.second.register_full_backward_hook(
        clip_each_input
    ),
    "register_full_backward_pre_hook": lambda model: model.second.register_full_backward_pre_hook(
        clip_each_output
    ),
    "Tensor.register_hook": lambda model: model.second.register_forward_hook(hook_output),
    "autograd.Function": lambda model: model.second.register_forward_hook(
        lambda *a: Clipped.apply(a[2])
    ),
}
ON_MODEL = {
    "register_forward_hook": lambda model: model.register_forward_hook(lambda *a: a[2] * 1.5),
    "register_forward_pre_hook": lambda model: model.register_forward_pre_hook(
        lambda *a: a[1][0] * 1.5
    ),
    "register_full_backward_pre_hook": lambda model: model.register_full_backward_pre_hook(
        lambda *a: (a[1][0] / 2,)
    ),
}
# registered after `lab.trainer`
LATE = {
    **{f"late parameter {name}": hook for name, hook in list(ON_PARAMETERS.items())[:2]},
    **{f"late model {name}": hook for name, hook in ON_MODEL.items()},
}
SPECTRAL = {
    "spectral_norm": lambda model: parametrizations.spectral_norm(model.second),
    "spectral_norm of old": lambda model: spectral_norm(model.second),
}
KINDS = {
    **{f"parameter {name}": hook for name, hook in ON_PARAMETERS.items()},
    **{f"module {name}": hook for name, hook in ON_MODULES.items()},
    **{f"activation {name}": hook for name, hook in ON_ACTIVATIONS.items()},
    **{f"model {name}": hook for name, hook in ON_MODEL.items()},
    **SPECTRAL,
}


def net() -> nn.Module:
    """Return a model whose blocks all have parameters, so that DDP and the pipelines divide it."""
    layers = {
        "first": nn.Linear(4, WIDTH),
        "a": nn.Tanh(),
        "second": nn.Linear(WIDTH, WIDTH),
        "b": nn.Tanh(),
    }
    return nn.Sequential(OrderedDict(**layers, last=nn.Linear(WIDTH, 2)))


def train(
    kind: str, strategy: str, options: dict, accumulate: int = 1
) -> dict[str, torch.Tensor] | str:
    """Return the weights after some steps, or the message with which the model is refused."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        *(torch.randn(STEPS * BATCH, size, generator=generator) for size in (4, 2))
    )
    with Lab(strategy, device="cpu", timeout=20, **options) as lab:
        model = net()
        remove = KINDS[kind](model) if kind in KINDS else None
        try:
            trainer = lab.trainer(
                model, tasks.Regression(), SGD, BATCH, accumulate, example=data[0]
            )
        except ConfigError as error:
            return str(error)
        if kind == "parameter removed":
            remove()
        if kind in LATE:
            LATE[kind](model)
        try:
            for batch in trainer.batches(data, 0):
                trainer.step(*batch)
        except ConfigError as error:
            refusals = [str(error)]
            if kind.startswith("late model"):
                refusals += [
                    refusal(trainer.evaluate, data),
                    refusal(trainer.predict, data.tensors[0]),
                    refusal(trainer.fit, data, data, 2),
                ]
            assert len(set(refusals)) == 1, refusals
            return refusals[0]
        return gather_full_state(trainer.strategy, trainer.state.weights())[0]


def refusal(method: Callable, *arguments) -> str:
    with pytest.raises(ConfigError) as error:
        method(*arguments)
    return str(error.value)


def train_all(strategy: str, options: dict) -> dict[str, dict[str, torch.Tensor] | str]:
    return {kind: train(kind, strategy, options) for kind in ["none", *KINDS, *LATE]}


@once
def trained(strategy: str) -> dict[str, dict[str, torch.Tensor] | str]:
    if strategy == "single":
        return run_world(1, train_all, "single", {})[0]
    ranks, options = STRATEGIES[strategy]
    return run_world(ranks, train_all, strategy, options, timeout=200)[0]


def difference(
    outcome: dict[str, torch.Tensor] | str, expected: dict[str, torch.Tensor] | str
) -> float:
    assert not isinstance(outcome, str), outcome
    assert not isinstance(expected, str)
    assert {*outcome} == {*expected}
    return max((outcome[name] - tensor).abs().max().item() for name, tensor in expected.items())


def refusal_of(kind: str, strategy: str) -> str:
    """Return the pattern of a strategy's message that refuses hooks; "" if it keeps them."""
    place, _, method = kind.removeprefix("late ").partition(" ")
    if place == "parameter" and strategy in SHARDING:
        weight = "first.bias" if "accumulate" in method else "second.weight"
        return (
            f"strategy={strategy}: shards the parameter {weight}, which has a hook .* for example "
            "ddp or pipeline$"
        )
    if place == "model" and strategy in CUTTING:
        return (
            f"strategy={strategy}: calls the blocks of the model and not the model itself, which "
            rf"has a hook \({method}\)"
        )
    if kind in SPECTRAL and strategy in CUTTING:
        return (
            r"strategy.num_microbatches=2: the buffer second\.\S+ of the model changes in every "
            "forward pass in training, "
        )
    return ""


@pytest.mark.parametrize(
    "kind",
    [
        *(f"parameter {name}" for name in list(ON_PARAMETERS)[:2]),
        *(f"activation {name}" for name in ON_ACTIVATIONS),
        *(f"model {name}" for name in ON_MODEL),
    ],
)
def test_hooks_change_what_single_trains(kind):
    assert difference(trained("single")[kind], trained("single")["none"]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *LATE])
@pytest.mark.parametrize(
    "strategy",
    [
        *(strategy for strategy in STRATEGIES if strategy not in COMBINED),
        *extra(COMBINED),
    ],
)
def test_hooks_are_kept_and_equal_to_single_or_refused_by_name(strategy, kind):
    outcome = trained(strategy)[kind]
    message = refusal_of(kind, strategy)
    if message:
        assert re.match(message, str(outcome)), outcome
    else:
        assert difference(outcome, trained("single")[kind.removeprefix("late ")]) < 1e-12


def test_hooks_that_are_registered_between_epochs_are_moved_and_those_of_the_strategy_stay():
    data = TensorDataset(torch.randn(BATCH, 4), torch.randn(BATCH, 2))
    seen: list[float] = []
    with Lab("single", device="cpu") as lab:
        model = net()
        trainer = lab.trainer(model, tasks.Regression(), SGD, BATCH, accumulate=4)
        trainer.fit(data, data, epochs=1)
        handle = model.first.weight.register_hook(
            lambda gradient: seen.append(gradient.norm().item())
        )
        trainer.fit(data, data, epochs=2)
        assert len(seen) == 1
        handle.remove()
        trainer.fit(data, data, epochs=3)
        assert len(seen) == 1


def test_handle_of_a_hook_that_waits_for_the_end_of_the_step_removes_it():
    assert difference(trained("single")["parameter removed"], trained("single")["none"]) == 0


@pytest.mark.parametrize(
    "kind", ["parameter register_hook", "parameter register_post_accumulate_grad_hook"]
)
def test_hooks_on_parameters_are_called_once_in_a_step_of_several_accumulation_steps(kind):
    outcome = run_world(1, train, kind, "single", {}, 4)[0]
    assert difference(outcome, trained("single")[kind]) < 1e-12


def test_spectral_norm_trains_in_a_pipeline_of_one_micro_batch():
    options = {"num_microbatches": 1, "schedule": "gpipe"}
    outcome = run_world(2, train, "spectral_norm", "pipeline", options, timeout=60)[0]
    assert difference(outcome, trained("single")["spectral_norm"]) < 1e-12


class Cached(nn.Linear):
    """A layer that writes the same values into a buffer in every forward pass."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("positions", torch.zeros(4))

    def forward(self, input):
        self.positions.copy_(torch.arange(4.0))
        return super().forward(input) + self.positions


def test_buffer_that_gets_the_same_values_again_is_not_one_that_changes():
    assert (
        changing_buffer(
            nn.Sequential(Cached(), nn.BatchNorm1d(4)), torch.empty(2, 4, device="meta")
        )
        is None
    )
    model = nn.Sequential(nn.Linear(4, 4), spectral_norm(nn.Linear(4, 4)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert changing_buffer(model, torch.empty(2, 4, device="meta")) == "1.weight_u"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("method", ON_MODEL)
def test_sequential_with_a_hook_does_not_become_a_chain_without_it(method):
    model = net()
    assert isinstance(as_chain(model, (4,)), Chain)
    ON_MODEL[method](model)
    assert as_chain(model, (4,)) is model


def twice() -> float:
    """Return the largest gradient that a second trainer leaves, which a hook limits."""
    with Lab(device="cpu") as lab:
        model = nn.Linear(4, 2)
        seen: list[float] = []
        model.weight.register_post_accumulate_grad_hook(
            lambda weight: seen.append(weight.grad.abs().max().item())
        )
        model.weight.register_hook(clipped)
        for _ in range(2):
            trainer = lab.trainer(model, tasks.Regression(), SGD, batch_size=4)
            trainer.step(torch.full((4, 4), 9.0), torch.zeros(4, 2))
        return max(seen)


def test_hooks_on_parameters_are_kept_by_a_second_trainer_of_the_model():
    assert twice() == pytest.approx(LIMIT)


@pytest.mark.parametrize("method", ON_MODEL)
def test_hook_on_a_chain_is_refused_where_only_its_blocks_are_called(method):
    model = Chain((4,), **dict(net().named_children()))
    ON_MODEL[method](model)
    refused = pytest.raises(
        ConfigError, match=rf"has a hook \({method}\) that would never be called"
    )
    with Lab("split", device="cpu", devices=["cpu", "cpu"]) as lab, refused:
        lab.trainer(model, tasks.Regression(), SGD, BATCH, example=torch.rand(4))
