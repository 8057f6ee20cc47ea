"""The key float32_matmul. tests/test_gpu.py tests that `high` means TF32 on a GPU."""

import pytest
import torch
from launches import OWN, launch

from ddp_lab.run.evaluate import evaluate_run
from ddp_lab.run.recorded_config import read_config
from ddp_lab.world.precision import describe_matmul
from ddp_lab.world.runtime import Runtime


def test_training_and_evaluation_have_the_chosen_precision(tmp_path, capsys):
    line = "python train.py epochs=1 name=one model._target_=own_models.Telling float32_matmul=high"
    code, output = launch(line, *OWN, f"runs_dir={tmp_path}")
    assert code == 0, output
    assert "float32_matmul=high, error small" in output, "a CPU has no TF32"
    assert "matrix multiplications" not in output, "nothing to choose on a CPU, so the log has no line"
    with Runtime("cpu") as runtime:
        evaluate_run(read_config(tmp_path / "one", [], None), runtime, tmp_path / "one", "last")
    assert capsys.readouterr().out.splitlines()[-1] == "float32_matmul=high, error small"
    assert torch.get_float32_matmul_precision() == "highest", "the setting of this process is restored"


@pytest.mark.parametrize(
    ("choice", "precision", "device", "capability", "line"),
    [
        ("highest", "float32", "cuda", (8, 0), "float32_matmul=highest: float32 matrix multiplications use full precision; "),
        ("high", "float32", "cuda", (9, 0), "float32_matmul=high: float32 matrix multiplications use TF32, which rounds"),
        ("highest", "float32", "cuda", (7, 5), None),
        ("highest", "bf16", "cuda", (9, 0), None),
        ("high", "float32", "cpu", None, None),
    ],
)
def test_log_names_the_choice_where_it_matters(choice, precision, device, capability, line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = describe_matmul(choice, precision, torch.device(device))
    assert found is None if line is None else found.startswith(line)
