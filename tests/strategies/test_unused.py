"""Parameters that only some steps, and of them only some ranks, use.

The matrix (cases.py) has their weights.
"""

import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from training import full_weights
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import TrainingError
from ddp_lab.strategies.contiguous import broadcast, flatten, unflatten
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.unused import SAME_PARAMETERS, zeros_like_gradient
from ddp_lab.world.runtime import Runtime

TIMEOUT = 15  # seconds in which a rank that waits for another one ends
KEY = {"find_unused_parameters": True}
# Strategies that sum the gradients of replicas themselves, without the key.
REFUSING = {
    "scratch": {},
    "scratch ring": {"algorithm": "ring"},
    "scratch bucketed": {"algorithm": "bucketed", "bucket_mb": 1e-5},
    "tp": {"tp": 1},
    "ddp_pipeline": {"pp": 1, "num_microbatches": 2, "schedule": "gpipe"},
}


class Branch(nn.Module):
    """A layer of which a part is used only if a number of the batch is above 0.5."""

    def __init__(self, width: int):
        super().__init__()
        self.always = nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width)

    def forward(self, inputs):
        outputs = self.always(inputs)
        return outputs + self.sometimes(inputs) if self.is_used(inputs) else outputs

    def is_used(self, inputs):
        return inputs[:, 0].max() > 0.5


class InTurn(Branch):
    """The same, used in every second forward pass, the first one of two."""

    calls = 0

    def is_used(self, inputs):
        self.calls += 1
        return self.calls % 2


def branching(kind: type[Branch] = Branch) -> nn.Module:
    return nn.Sequential(kind(4), nn.Linear(4, 2))


def samples(size: int = 32) -> TensorDataset:
    """Return samples of which every second one, those of rank 1 of two, use the branch."""
    inputs = torch.rand(size, 4, generator=torch.Generator().manual_seed(1))
    inputs[:, 0] = torch.arange(size) % 2
    return TensorDataset(inputs, torch.ones(size, 2))


def train(lab: Lab, model: nn.Module, size: int = 32, **options) -> list[float]:
    """Return the losses of an epoch in the order of the samples."""
    data = samples(size)
    make = partial(torch.optim.SGD, lr=0.1)
    trainer = lab.trainer(model, tasks.Regression(), make, batch_size=8, **options)
    return [trainer.step(*batch).item() for batch in trainer.batches(data, 0, shuffle=False)]


def refusal(strategy: str, options: dict, model=branching, **more) -> tuple[str, float]:
    """Return the message with which training ends on this rank, and after how many seconds."""
    with Lab(strategy, device="cpu", timeout=TIMEOUT, **options) as lab:
        start = time.perf_counter()
        with pytest.raises(TrainingError) as error:
            train(lab, model(), **more)
        return str(error.value), time.perf_counter() - start


def resumed(folder: str, strategy: str, steps: int | None = None) -> list[float]:
    """Train from the checkpoint in a folder, or until one is written.

    The steps of that checkpoint have not used the branch.
    """
    inputs, targets = samples().tensors
    inputs[:, 0] = torch.arange(len(inputs)) >= 16  # the first two batches do not use the branch
    data = TensorDataset(inputs, targets)
    make = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    with Lab(strategy, device="cpu", timeout=30, **KEY) as lab:
        trainer = lab.trainer(branching(), tasks.Regression(), make, batch_size=8, ema=0.5)
        trainer.resume(folder)
        losses = []
        for batch in trainer.batches(data, 0, shuffle=False):
            losses.append(trainer.step(*batch).item())
            if len(losses) == steps:
                trainer.checkpoint(folder)
        return [*losses, trainer.evaluate(data)["loss"]]


def refuse_all(folder: str) -> dict:
    whole = resumed(f"{folder}/none", "ddp")
    resumed(f"{folder}/kept", "ddp", steps=2)
    continued = {strategy: resumed(f"{folder}/kept", strategy) for strategy in ("ddp", "scratch")}
    results: dict = {
        name: refusal(name.split()[0], options, example=samples()[0][0])
        for name, options in REFUSING.items()
    }
    results["ddp accumulate"] = refusal("ddp", {}, partial(branching, InTurn), accumulate=2)
    with Lab("ddp", device="cpu", timeout=30, **KEY) as lab:
        trainer = lab.trainer(branching(), tasks.Regression(), torch.optim.SGD, batch_size=8)
        with pytest.raises(TrainingError) as error:
            trainer.strategy.add_gradient(*samples()[:0], num_valid=0, divisor=1)
        results["ddp empty"] = str(error.value)
    with Lab("scratch", device="cpu", timeout=30, **KEY) as lab:
        results["scratch empty"] = train(lab, branching(), size=9)
    with Lab("ddp", device="cpu", timeout=30) as lab:
        # connects the ranks
        lab.trainer(branching(), tasks.Regression(), torch.optim.SGD, batch_size=8)
        odd = torch.full((3, 4), float(lab.rank))[:, ::2]
        broadcast(odd)
        results["gaps"] = odd.tolist()
    return results | {"whole": whole, "continued": continued}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("unused"))


@once
def two(folder: str) -> list[dict]:
    return run_world(2, refuse_all, folder, timeout=90)


@pytest.mark.parametrize("name", REFUSING)
def test_parameter_that_one_rank_has_not_used_is_the_same_error_on_all_ranks(name, folder):
    strategy = name.split()[0]
    (first, seconds), (second, _) = (rank[name] for rank in two(folder))
    assert first == second
    assert first.startswith(
        f"strategy={strategy}: the parameter 0.sometimes.weight got no gradient in a step on rank "
        "0. If only some steps use it, use "
    )
    remedy = (
        'strategy.find_unused_parameters=true, in a Lab Lab("scratch", find_unused_parameters=True)'
    )
    assert (remedy in first) == (strategy == "scratch")
    assert "strategy.find_unused_parameters=true" in first
    assert "lab.trainer(..., example=dataset[0])" in first
    assert seconds < TIMEOUT, "a rank waited for the timeout of the collectives"


def test_parameter_that_only_an_early_accumulation_step_used_is_refused_by_ddp(folder):
    for rank, results in enumerate(two(folder)):
        message, _ = results["ddp accumulate"]
        assert message.startswith(
            "strategy=ddp: the parameter 0.sometimes.weight got no gradient in a step on rank "
            f"{rank}. "
        )
        assert 'Lab("ddp", find_unused_parameters=True)' in message


def test_rank_without_a_sample_does_not_call_the_model_or_says_that_it_cannot(folder):
    first, second = two(folder)
    assert first["scratch empty"] == second["scratch empty"]
    assert len(first["scratch empty"]) == 2
    message = second["ddp empty"]
    assert message.startswith(
        "strategy=ddp: strategy.find_unused_parameters=true needs a model that trains on empty "
        "batches"
    )
    cause = "RuntimeError: max(): Expected reduction dim"
    assert f"rank 1 has no sample of this batch or gradient-accumulation step: {cause}" in message
    assert "Use strategy=scratch" in message


class BelowHalf(Branch):
    """Uses the branch for a batch with a number below 0.5; fails for an empty batch.

    Padding of zeros has such numbers.
    """

    def is_used(self, inputs):
        return inputs[:, 0].min() < 0.5


def train_with_empty_micro_batches(strategy: str, options: dict) -> dict:
    """Train with micro-batches of which some are empty.

    The last batch has one sample, which does not use the branch.
    """
    data = samples(33)
    make = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    data.tensors[0][32, 0] = 1.0
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        model = branching(BelowHalf)
        trainer = lab.trainer(model, tasks.Regression(), make, batch_size=8, accumulate=2)
        losses = [trainer.step(*batch).item() for batch in trainer.batches(data, 0, shuffle=False)]
        return {"losses": losses, "weights": full_weights(trainer.strategy)}


def test_micro_batches_without_a_sample_train_under_fsdp_as_under_scratch():
    expected, _ = run_world(2, train_with_empty_micro_batches, "scratch", KEY, timeout=60)
    first, other = run_world(2, train_with_empty_micro_batches, "fsdp", KEY, timeout=60)
    assert first["losses"] == other["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    for name, tensor in expected["weights"].items():
        assert (first["weights"][name] - tensor).abs().max() < 1e-6, name


@pytest.mark.parametrize(
    "make", [partial(Scratch, algorithm="flat", bucket_mb=1.0), partial(DDP, bucket_cap_mb=1.0)]
)
def test_options_that_need_the_same_parameters_in_every_step_are_excluded(make, monkeypatch):
    for expected in (True, False):
        strategy = make(runtime=Runtime("cpu"), batch_norm="local", find_unused_parameters=expected)
        assert strategy.unsupported == (SAME_PARAMETERS if expected else {})


def layouts() -> list[torch.Tensor]:
    numbers = torch.arange(1.0, 121.0)
    image = numbers.view(2, 3, 4, 5)
    return [
        image.clone(),
        image.to(memory_format=torch.channels_last),
        numbers.view(10, 12).t(),
        numbers.view(4, 5, 6).permute(2, 0, 1),
        numbers.view(2, 3, 4, 5).permute(1, 3, 0, 2),
        numbers[:1].view(()),
        numbers[:0],
    ]


def test_flattened_tensors_of_any_layout_come_back_with_their_strides():
    tensors = layouts()
    for restored, tensor in zip(unflatten(flatten(tensors), tensors), tensors, strict=True):
        assert torch.equal(restored, tensor)
        assert restored.stride() == tensor.stride()


def test_gradient_of_zeros_has_the_layout_of_autograds():
    for tensor in [*layouts(), torch.zeros(6, 8)[:, ::2], torch.zeros(6, 8).t()[::2]]:
        parameter = nn.Parameter(tensor)
        (parameter * 2).sum().backward()
        assert zeros_like_gradient(parameter).stride() == parameter.grad.stride()


def test_checkpoint_of_parameters_that_no_step_has_used_yet_resumes(folder):
    for rank in two(folder):
        for strategy, losses in rank["continued"].items():
            assert losses == pytest.approx(rank["whole"][2:], rel=1e-6), strategy
            assert len(losses) == 3


def test_tensor_with_gaps_in_memory_is_broadcast(folder):
    assert all(rank["gaps"] == [[0.0, 0.0]] * 3 for rank in two(folder))
