"""The key float32_matmul. tests/test_gpu.py tests that `high` means TF32 on a GPU."""

import torch
from launches import OWN, launch

from ddp_lab.run.evaluate import evaluate_run
from ddp_lab.run.recorded_config import read_config
from ddp_lab.world.runtime import Runtime


def test_training_and_evaluation_have_the_chosen_precision(tmp_path, capsys):
    line = "python train.py epochs=1 name=one model._target_=own_models.Telling float32_matmul=high"
    code, output = launch(line, *OWN, f"runs_dir={tmp_path}")
    assert code == 0, output
    assert "float32_matmul=high, error small" in output, "a CPU has no TF32"
    with Runtime("cpu") as runtime:
        evaluate_run(read_config(tmp_path / "one", [], None), runtime, tmp_path / "one", "last")
    assert capsys.readouterr().out.splitlines()[-1] == "float32_matmul=high, error small"
    assert torch.get_float32_matmul_precision() == "highest", "the setting of this process is restored"
