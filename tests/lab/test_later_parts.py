"""Parts that only a step after the trial uses: trained as on one device, or one message."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import TrainingError
from ddp_lab.models.chain import Chain

ADAM = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.5)
LATER = 3  # steps, after which the part is used
KEY = {"find_unused_parameters": True}
TRAINING = {
    "fsdp": {},
    "tp": {"tp": None},
    "mesh": {"shard": None},
    "pipeline": {"num_microbatches": 1, "schedule": "gpipe"},
    "scratch with the key": KEY,
    "ddp with the key": KEY,
    "fsdp with the key": KEY,
}
REFUSING = {
    "scratch": {},
    "scratch bucketed": {"algorithm": "bucketed"},
    "ddp": {},
    "tp replicas": {"tp": 1},
    "ddp_pipeline": {"pp": 1, "num_microbatches": 1, "schedule": "gpipe"},
}


class Later(nn.Module):
    """Uses a layer, and a weight directly, after some steps only."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.steps = 0

    def forward(self, inputs):
        self.steps += self.training
        outputs = self.body(inputs)
        if self.steps > LATER:
            outputs = self.scale * torch.tanh(self.extra(outputs))
        return outputs


class Unused(Later):
    def forward(self, inputs):
        return self.body(inputs)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(*torch.rand(2, 16, 4, generator=generator, dtype=torch.float64))


def train(
    strategy: str, path: str = "", kind=Later, example: bool = True, folder: str = "", **options
) -> list[float]:
    """Return the losses of two epochs of four steps."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Lab(strategy, device="cpu", timeout=20, **options) as lab:
            samples = data()
            model = Chain((4,), first=kind(), last=nn.Linear(4, 4))
            keywords = {"example": samples[0]} if example else {}
            trainer = lab.trainer(
                model, tasks.Regression(), ADAM, batch_size=4, ema=0.5, **keywords
            )
            if folder:
                trainer.resume(folder)
            epochs = range(trainer.progress.epoch, trainer.progress.epoch + 2)
            results = [
                trainer.step(*batch).item()
                for epoch in epochs
                for batch in trainer.batches(samples, epoch)
            ]
            results.append(trainer.evaluate(samples)["loss"])
            if path:
                trainer.save(path)
            if folder:
                trainer.checkpoint(folder)
            return results
    finally:
        torch.set_default_dtype(before)


def refusal(strategy: str, **options) -> str:
    with pytest.raises(TrainingError) as error:
        train(strategy, **options)
    return str(error.value)


def trainings(folder: str) -> dict[str, list[float]]:
    return {
        name: train(name.split()[0], f"{folder}/{name}", **options)
        for name, options in TRAINING.items()
    }


def on_two(folder: str) -> dict:
    results: dict = {
        f"{name} refuses": refusal(name.split()[0], **options) for name, options in REFUSING.items()
    }
    for name in ("single", "ddp"):
        results[f"{name} continued"] = train(
            "fsdp" if name == "ddp" else "ddp", kind=Unused, folder=f"{folder}/of_{name}"
        )
        if name == "single":
            train("ddp", kind=Unused, folder=f"{folder}/of_ddp")
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("later"))


@once
def two(folder: str) -> list[dict]:
    train("single", kind=Unused, folder=f"{folder}/of_single")
    return run_world(2, on_two, folder, timeout=150)


@once
def trained(folder: str) -> list[dict[str, list[float]]]:
    return run_world(2, trainings, folder, timeout=150)


@once
def alone(folder: str) -> list[float]:
    return train("single", f"{folder}/single", example=False)


def test_single_trains_a_part_that_is_used_later(folder):
    assert train("single") == alone(folder)
    saved = load_file(f"{folder}/single")
    with Lab(device="cpu"):
        start = Chain((4,), first=Later(), last=nn.Linear(4, 4)).state_dict()
    assert not torch.allclose(saved["first.extra.weight"].float(), start["first.extra.weight"])
    assert not torch.allclose(saved["first.scale"].float(), start["first.scale"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TRAINING)
def test_part_that_is_used_later_is_trained_as_on_one_device(strategy, folder):
    for rank in trained(folder):
        assert rank[strategy] == pytest.approx(alone(folder), rel=1e-10)
    saved = load_file(f"{folder}/{strategy}")
    expected = load_file(f"{folder}/single")
    for name, value in expected.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", REFUSING)
def test_part_that_is_used_later_is_one_message_where_it_was_frozen(strategy, folder):
    name = strategy.split()[0]
    for number, rank in enumerate(two(folder)):
        message = rank[f"{strategy} refuses"]
        assert message.startswith(f"strategy={name}: the parameter first.")
        assert (
            f"got a gradient in a step on rank {number}. The trial of the model has not used it, "
            "so it was frozen." in message
        )
        assert "strategy.find_unused_parameters=true" in message


@pytest.mark.parametrize("first", ["single", "ddp"])
def test_checkpoint_resumes_where_unused_parameters_are_frozen_and_where_they_are_not(
    first, folder
):
    train("single", kind=Unused, folder=f"{folder}/{first}_again")
    whole = train("single", kind=Unused, folder=f"{folder}/{first}_again")
    for rank in two(folder):
        assert rank[f"{first} continued"] == pytest.approx(whole, rel=1e-10)
