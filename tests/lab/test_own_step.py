"""Steps that a loop makes of parts: forward, backward, update.

In float64, so that any strategy on any number of ranks has the weights of a loop of plain torch
within 1e-12. Of the last batch two of three ranks have no sample.
"""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replicating import REPLICATING
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, gather, own_rows, tasks
from ddp_lab.checkpoints.state import gather_full_state
from ddp_lab.config.errors import ConfigError, TrainingError

SIZE = 25
BATCH = 12
NOISE = 3
FIRST = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
SECOND = partial(torch.optim.SGD, lr=0.1)
WORLDS = [("single", 1, {}), ("dp", 1, {}), *REPLICATING]
FAST = [
    ("single", 1, {}),
    ("dp", 1, {}),
    ("scratch", 3, {"algorithm": "bucketed"}),
    ("ddp", 3, {}),
]
each_world = pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [
        # of three ranks some have no sample of the last batch
        pytest.param(*world, marks=() if world in FAST else pytest.mark.slow)
        for world in WORLDS
    ],
    ids=lambda value: str(value).strip("{}"),
)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(SIZE, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.rand(SIZE, generator=generator, dtype=torch.float64))


def network(inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def hinge(outputs, targets):
    """A loss that these loops do not call."""
    return (outputs - targets).relu()


def full_weights(*trainers) -> list[dict[str, torch.Tensor]]:
    complete = []
    for trainer in trainers:
        full, _ = gather_full_state(trainer.strategy, trainer.state.weights())
        weights = {name: tensor.clone() for name, tensor in (full or {}).items()}
        complete.append({name.removeprefix("model."): weights[name] for name in weights})
    return complete


def batches_of(epochs: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the global batches."""
    with Lab(device="cpu") as lab:
        trainer = lab.trainer(network(4, 1, 0), tasks.Regression(), FIRST, BATCH)
        return [batch for epoch in range(epochs) for batch in trainer.batches(samples(), epoch)]


def train_gan(strategy: str, options: dict[str, Any]):
    """A generator and a discriminator, which are trained in turn."""
    torch.set_default_dtype(torch.float64)
    losses = []
    with Lab(strategy, device="cpu", timeout=60, **options) as lab:
        generator = lab.trainer(
            network(NOISE, 4, 1), hinge, FIRST, BATCH, max_grad_norm=0.1, ema=0.9
        )
        judge = lab.trainer(network(4, 1, 2), hinge, SECOND, BATCH)
        for epoch in range(2):
            for real, _ in judge.batches(samples(), epoch):
                count = len(real)
                noise = judge.randn(count, NOISE, name="judged")
                with torch.no_grad():
                    fake = generator.forward(noise)
                right = F.softplus(-judge.forward(real)).sum()
                wrong = F.softplus(judge.forward(fake)).sum()
                judge.backward(right + wrong, count)
                losses.append(float(judge.update()))

                fake = generator.forward(generator.randn(count, NOISE, name="shown"))
                with judge.frozen():
                    generator.backward(F.softplus(-judge.forward(fake)).sum(), count)
                losses.append(float(generator.update()))
        position = judge.progress
        weights = full_weights(generator, judge)
    torch.set_default_dtype(torch.float32)
    return weights, losses, (position.epoch, position.step)


def noise_of(count: int, step: int, trainer: int, name: str) -> torch.Tensor:
    """The numbers of a Lab with the seed 0."""
    from ddp_lab.data.seeds import seed_of

    key = seed_of(f"randn {name}", seed=0, trainer=trainer, step=step)
    generator = torch.Generator().manual_seed(key)
    return torch.randn(BATCH, NOISE, generator=generator)[:count]


@once
def plain_gan():
    """The same in plain torch."""
    torch.set_default_dtype(torch.float64)
    generator = network(NOISE, 4, 1)
    judge = network(4, 1, 2)
    first = FIRST(generator.parameters())
    second = SECOND(judge.parameters())
    losses = []
    for step, (real, _) in enumerate(batches_of()):
        count = len(real)
        fake = generator(noise_of(count, step, 1, "judged")).detach()
        loss = (F.softplus(-judge(real)) + F.softplus(judge(fake))).mean()
        loss.backward()
        second.step()
        second.zero_grad()
        losses.append(loss.item())

        fake = generator(noise_of(count, step, 0, "shown"))
        loss = F.softplus(-judge(fake)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(generator.parameters(), 0.1)
        first.step()
        first.zero_grad()
        second.zero_grad()
        losses.append(loss.item())
    torch.set_default_dtype(torch.float32)
    return [dict(model.named_parameters()) for model in (generator, judge)], losses


def require_equal(models, expected) -> None:
    for weights, parameters in zip(models, expected, strict=True):
        for name, parameter in parameters.items():
            torch.testing.assert_close(weights[name], parameter.data, rtol=0, atol=1e-12)


@each_world
def test_two_models_trained_in_turn_equal_plain_torch(strategy, ranks, options):
    expected, expected_losses = plain_gan()
    results = run_world(ranks, train_gan, strategy, options, timeout=100)
    models, *_ = results[0]
    require_equal(models, expected)
    for _, losses, position in results:
        assert losses == pytest.approx(expected_losses, abs=1e-12)
        assert position == (2, 6)


def of_positive(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sum of losses and its weight, which is not the number of samples."""
    weights = targets.square()
    return ((outputs.squeeze(1) - targets).square() * weights).sum(), weights.sum()


def train_in_parts(strategy: str, options: dict[str, Any]):
    """Batches of two parts, the first of which has 3 samples where there are so many."""
    losses = []
    torch.set_default_dtype(torch.float64)
    with Lab(strategy, device="cpu", timeout=60, **options) as lab:
        trainer = lab.trainer(network(4, 1, 0), hinge, FIRST, BATCH)
        for epoch in range(2):
            for inputs, targets in trainer.batches(samples(), epoch):
                with trainer.accumulating():
                    trainer.backward(*of_positive(trainer.forward(inputs[:3]), targets[:3]))
                trainer.backward(*of_positive(trainer.forward(inputs[3:]), targets[3:]))
                losses.append(float(trainer.update()))
        weights = full_weights(trainer)
    torch.set_default_dtype(torch.float32)
    return weights, losses


@once
def plain_parts():
    torch.set_default_dtype(torch.float64)
    model = network(4, 1, 0)
    optimizer = FIRST(model.parameters())
    losses = []
    for inputs, targets in batches_of():
        loss, weight = of_positive(model(inputs), targets)
        (loss / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss / weight).item())
    torch.set_default_dtype(torch.float32)
    return [dict(model.named_parameters())], losses


@each_world
def test_parts_of_a_batch_are_divided_by_all_weights(strategy, ranks, options):
    expected, expected_losses = plain_parts()
    results = run_world(ranks, train_in_parts, strategy, options, timeout=100)
    models, _ = results[0]
    require_equal(models, expected)
    for _, losses in results:
        assert losses == pytest.approx(expected_losses, abs=1e-12)


def contrast_in_own_loop() -> list[float]:
    torch.set_default_dtype(torch.float64)
    losses = []
    with Lab("ddp", device="cpu", timeout=60) as lab:
        trainer = lab.trainer(network(4, 2, 0), hinge, FIRST, BATCH)
        for inputs, _ in trainer.batches(samples(), 0):
            outputs = trainer.forward(inputs)
            others = gather(outputs.tanh())
            losses_of_rows = F.cross_entropy(outputs @ others.T, own_rows(), reduction="none")
            trainer.backward(losses_of_rows.sum(), len(outputs))
            losses.append(float(trainer.update()))
    torch.set_default_dtype(torch.float32)
    return losses


def test_own_step_gathers_the_global_batch():
    one, *_ = run_world(1, contrast_in_own_loop, timeout=60)
    for losses in run_world(3, contrast_in_own_loop, timeout=60):
        assert losses == pytest.approx(one, abs=1e-12)


class Branches(nn.Module):
    """Has a keyword that is no tensor, and returns a tuple."""

    def __init__(self):
        super().__init__()
        self.body = network(4, 2, 0)

    def forward(self, inputs, *, scale=1.0, names=()):
        return self.body(inputs) * scale, names


@pytest.fixture
def lab():
    with Lab(device="cpu") as lab:
        yield lab


def test_forward_passes_arguments_that_are_no_tensors(lab):
    trainer = lab.trainer(Branches(), hinge, FIRST, BATCH)
    inputs = samples().tensors[0][:BATCH]
    outputs, names = trainer.forward(inputs, scale=2.0, names=("a", "b"))
    expected, _ = trainer.strategy.module(inputs)
    torch.testing.assert_close(outputs, expected * 2)
    assert names == ("a", "b")


def backward(trainer, weight=1.0):
    trainer.backward(trainer.forward(samples().tensors[0][:BATCH]).sum(), weight)


def again(trainer):
    backward(trainer)
    backward(trainer)


def accumulate_late(trainer):
    backward(trainer)
    with trainer.accumulating():
        backward(trainer)


def update_early(trainer):
    with trainer.accumulating():
        backward(trainer)
    trainer.update()


def draw_twice(trainer):
    trainer.randn(2, 3, name="z")
    trainer.randn(2, 3, name="z")


def freeze_in_step(trainer):
    trainer.forward(samples().tensors[0][:BATCH])
    with trainer.frozen():
        pass


def freeze_twice(trainer):
    with trainer.frozen(), trainer.frozen():
        pass


def update_frozen(trainer):
    with trainer.frozen():
        backward(trainer)


def step_in_step(trainer):
    trainer.forward(samples().tensors[0][:BATCH])
    trainer.step(samples().tensors[0][:BATCH], samples().tensors[1][:BATCH, None])


def stray_gradient(trainer):
    inputs = samples().tensors[0][:BATCH]
    trainer.strategy.module(inputs).sum().backward()
    trainer.forward(inputs)


def late_stray_gradient(trainer):
    inputs = samples().tensors[0][:BATCH]
    outputs = trainer.forward(inputs)
    trainer.strategy.module(inputs).sum().backward()
    trainer.backward(outputs.sum(), 1)


MISTAKES = {
    "gradient of another trainer in a step": (
        late_stray_gradient,
        "backward: the parameter 0.weight has a gradient that no step of this trainer has computed",
    ),
    "frozen in a step": (freeze_in_step, "frozen: a step of this trainer is under way"),
    "frozen twice": (freeze_twice, "frozen: is called within `with trainer.frozen():`"),
    "own backward while frozen": (update_frozen, "backward: the loss has no gradient"),
    "step within a step": (step_in_step, "step: a step of this trainer is under way"),
    "gradient of another trainer": (
        stray_gradient,
        "forward: the parameter 0.weight has a gradient that no step of this trainer has computed",
    ),
    "not a sum": (
        lambda trainer: trainer.backward(trainer.forward(samples().tensors[0][:BATCH]), 1),
        "backward: the loss must be the sum over this rank's samples, a tensor of shape [], got "
        "the shape [12, 1]",
    ),
    "a number": (lambda trainer: trainer.backward(0.5, 1), "got 0.5, a float"),
    "no gradient": (
        lambda trainer: trainer.backward(torch.tensor(1.0), 1),
        "backward: the loss has no gradient",
    ),
    "negative weight": (
        lambda trainer: backward(trainer, -1),
        "backward: the weight must not be negative, got -1",
    ),
    "twice": (again, "backward: was called twice since the last update"),
    "late part": (accumulate_late, "accumulating: the gradients of this step have been sent"),
    "last part missing": (update_early, "update: the gradients have not been sent"),
    "no backward": (lambda trainer: trainer.update(), "update: there was no backward pass"),
    "only forward": (
        lambda trainer: (trainer.forward(samples().tensors[0][:BATCH]), trainer.update()),
        "update: the gradients have not been sent",
    ),
    "name drawn twice": (draw_twice, "randn: name=z was drawn in this step before"),
    "too many rows": (
        lambda trainer: trainer.randn(13, 2, name="z"),
        "randn: got the shape [13, 2], expected [b, ...] with a row for each sample of this rank, "
        "at most 12",
    ),
}


@pytest.mark.parametrize(("mistake", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_an_own_step_is_one_message(lab, mistake, message):
    trainer = lab.trainer(network(4, 1, 0), hinge, FIRST, BATCH)
    with pytest.raises(ConfigError, match=re.escape(message)):
        mistake(trainer)


@pytest.mark.parametrize(
    "strategy",
    [
        ("split", {"devices": ["cpu", "cpu"]}),
        ("pipeline", {}),
        pytest.param(("mesh", {}), marks=pytest.mark.slow),
        pytest.param(("tp", {}), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", ["forward", "backward", "update", "accumulating", "frozen"])
def test_strategy_that_owns_the_passes_refuses_own_steps(strategy, method):
    name, options = strategy
    arguments = {"forward": (torch.ones(12, 4),), "backward": (torch.zeros(()), 1)}
    with Lab(name, device="cpu", **options) as lab:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        trainer = lab.trainer(model, hinge, FIRST, BATCH, example=(torch.ones(4), torch.ones(1)))
        with pytest.raises(ConfigError, match=f"{method}: is not supported by strategy={name}"):
            getattr(trainer, method)(*arguments.get(method, ()))


def call_bare() -> str:
    model = network(4, 1, 0)
    inputs = samples().tensors[0][:BATCH]
    with Lab("ddp", device="cpu", timeout=20) as lab:
        trainer = lab.trainer(model, hinge, FIRST, BATCH)
        with torch.no_grad():
            model(inputs)
        model.eval()(inputs)
        model.train()
        with pytest.raises(TrainingError, match="the model was called directly in training"):
            model(inputs)
        pairs = TensorDataset(samples().tensors[0], samples().tensors[1][:, None])
        trainer.fit(pairs, pairs, epochs=1)
        trainer.predict(inputs)
        model.train()
        with pytest.raises(TrainingError, match=r"Use trainer.forward\(inputs\)"):
            trainer.strategy.module(inputs)
    return "refused"


def test_bare_call_of_the_model_under_ddp_is_refused():
    assert run_world(2, call_bare, timeout=60) == ["refused", "refused"]


def call_in_evaluation_mode() -> str:
    """Call the model in evaluation mode, which is no training, and use its gradients for it."""
    model = network(4, 1, 0)
    inputs = samples().tensors[0][:BATCH]
    with Lab("ddp", device="cpu", timeout=20) as lab:
        trainer = lab.trainer(model, hinge, FIRST, BATCH)
        with torch.no_grad():
            trainer.forward(inputs)
        outputs = model.eval()(inputs)
        with pytest.raises(ConfigError, match=r"backward: call trainer\.forward first"):
            trainer.backward(outputs.sum(), 1)
    return "refused"


def test_backward_pass_without_a_forward_pass_of_the_trainer_is_refused():
    assert run_world(2, call_in_evaluation_mode, timeout=60) == ["refused", "refused"]


class Penalized(nn.Module):
    """Two layers, of which the gradient's gradient needs the weights of the first again."""

    def __init__(self):
        super().__init__()
        self.layers = network(4, 1, 0)

    def forward(self, inputs):
        return self.layers(inputs)


def penalize(strategy: str, options: dict[str, Any]):
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=30, **options) as lab:
            trainer = lab.trainer(Penalized(), hinge, FIRST, BATCH)
            for inputs, _ in trainer.batches(samples(), 0):
                inputs = inputs.requires_grad_()
                outputs = trainer.forward(inputs)
                (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
                penalty = (slope.norm(dim=1) - 1).square().sum()
                trainer.backward(outputs.sum() + penalty, len(inputs))
                trainer.update()
            return full_weights(trainer)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("strategy", [pytest.param("scratch", marks=pytest.mark.slow), "ddp"])
def test_gradient_penalty_equals_single(strategy):
    (expected,) = run_world(1, penalize, "single", {}, timeout=60)
    models, *_ = run_world(2, penalize, strategy, {}, timeout=60)
    for weights, parameters in zip(models, expected, strict=True):
        for name, parameter in parameters.items():
            torch.testing.assert_close(weights[name], parameter, rtol=0, atol=1e-12)


def test_gradient_penalty_under_fsdp_is_refused():
    with pytest.raises(AssertionError, match="strategy=fsdp: gradients of gradients"):
        run_world(1, penalize, "fsdp", {}, timeout=60)


def draw(strategy: str) -> list[list[list[float]]]:
    """Return the own rows of two steps."""
    rows = []
    with Lab(strategy, device="cpu", timeout=60) as lab:
        trainer = lab.trainer(network(4, 1, 0).float(), hinge, FIRST, BATCH)
        for _ in range(2):
            rows.append(trainer.randn(BATCH // lab.world_size, 2, name="z").tolist())
            inputs = torch.ones(BATCH // lab.world_size, 4)
            trainer.backward(trainer.forward(inputs).sum(), len(inputs))
            trainer.update()
    return rows


def test_randn_is_the_same_for_any_number_of_ranks():
    (one,) = run_world(1, draw, "ddp", timeout=60)
    assert one[0] != one[1]
    by_rank = run_world(3, draw, "ddp", timeout=60)
    for step in range(2):
        joined = [
            row for rows in zip(*(rank[step] for rank in by_rank), strict=True) for row in rows
        ]
        assert joined == one[step]
