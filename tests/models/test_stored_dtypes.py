"""Weights of every dtype: saved right, or refused by name."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.weights import read, write_weights


class Waves(nn.Module):
    """A model with a complex weight, of which safetensors has no dtype."""

    def __init__(self):
        super().__init__()
        self.waves = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.last = nn.Linear(3, 1).double()

    def forward(self, inputs):
        return self.last((inputs.to(self.waves.dtype) @ self.waves).abs())


def save(strategy: str, folder) -> None:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        *(torch.randn(16, width, generator=generator).double() for width in (4, 1))
    )
    with Lab(strategy, device="cpu", timeout=30) as lab:
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        trainer = lab.trainer(Waves(), tasks.Regression(), make, batch_size=8, example=data[0])
        trainer.fit(data, data, epochs=1)
        trainer.checkpoint(folder / f"{strategy}")
        trainer.fit(data, data, epochs=2)
        trainer.save(folder / f"{strategy}.safetensors")
        trainer.resume(folder / f"{strategy}")
        trainer.fit(data, data, epochs=2)
        trainer.save(folder / f"{strategy}-resumed.safetensors")


def test_complex_weights_are_saved_resumed_and_equal_on_ranks(tmp_path):
    save("single", tmp_path)
    run_world(2, save, "ddp", tmp_path, timeout=90)
    expected = read(str(tmp_path / "single.safetensors"))
    assert expected["waves"].dtype == torch.complex128
    assert expected["waves"].imag.abs().max() > 0.1
    pairs = load_file(tmp_path / "single.safetensors")["waves"]  # as other programs read it
    assert torch.equal(torch.view_as_complex(pairs), expected["waves"])
    for name in ("single-resumed", "ddp", "ddp-resumed"):
        stored = read(str(tmp_path / f"{name}.safetensors"))
        for key, tensor in expected.items():
            assert (stored[key] - tensor).abs().max() < 1e-12, (name, key)


def differing_imaginary_parts() -> str:
    with Lab("ddp", device="cpu", timeout=30) as lab:
        model = Waves()
        model.waves.data += lab.rank * 1j
        with pytest.raises(ConfigError) as error:
            lab.trainer(model, tasks.Regression(), torch.optim.SGD, batch_size=8)
        return str(error.value)


def test_models_that_differ_in_imaginary_parts_are_refused():
    for message in run_world(2, differing_imaginary_parts, timeout=60):
        assert message.startswith(
            "the model of rank 1 has other initial weights than that of rank 0"
        )


def test_dtype_that_cannot_be_stored_is_refused_by_name(tmp_path):
    tensors = {"good": torch.zeros(2), "layer.bits": torch.empty(2, dtype=torch.bits8)}
    with pytest.raises(
        ConfigError,
        match=r"safetensors cannot store layer\.bits, which is bits8\. Convert it in the model",
    ):
        write_weights(tmp_path / "file.safetensors", tensors, {})
