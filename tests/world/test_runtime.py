"""Tests of Runtime: devices, process group, meshes, precision."""

import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launches import NARROW, OWN, SMALL, launch, main_in_world, read_metrics
from worlds import run_world

from ddp_lab.launchers.read_config import read_config
from ddp_lab.run.build_trained import evaluate_run
from ddp_lab.world.runtime import Runtime


def use_mesh() -> None:
    """Sum along pp on all ranks but the last one."""
    with Runtime("cpu", timeout=2) as runtime:
        runtime.open_group()
        mesh = runtime.mesh({"dp": 2, "pp": 2})
        if runtime.rank == 3:
            time.sleep(4)
        else:
            dist.all_reduce(torch.ones(()), group=mesh.get_group("pp"))


def test_rank_missing_from_a_mesh_group_is_detected_at_the_timeout():
    start = time.monotonic()
    with pytest.raises(AssertionError, match="rank 2: Traceback") as error:
        run_world(4, use_mesh, timeout=60)
    assert time.monotonic() - start < 30
    assert "2000ms" in str(error.value), (
        "must be detected when the missing rank exits, not by the timeout"
    )
    assert "rank 0: " not in str(error.value), "must not be named: its pipeline is complete"
    assert "rank 1: " not in str(error.value), "must not be named: its pipeline is complete"


IN_BF16 = {  # ranks: overrides of runs
    1: ["strategy=dp", "strategy=split"],
    2: [
        "strategy=ddp",
        "strategy=scratch",
        "strategy=pipeline",
        "strategy=tp",
        f"strategy=fsdp {' '.join(NARROW)}",
    ],
}


def train_in_both(lines: list[str], folder: Path) -> None:
    for i, line in enumerate(lines):
        for precision in ("float32", "bf16"):
            overrides = [
                *line.split(),
                "epochs=1",
                f"precision={precision}",
                f"name={precision}{i}",
                f"runs_dir={folder}",
            ]
            main_in_world(*SMALL, *overrides)


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=pytest.mark.slow if ranks > 1 else ()) for ranks in IN_BF16]
)
def test_bf16_loss_is_close_to_float32(ranks, tmp_path):
    """BatchNorm's parameters stay in float32.

    Its kernels do not support bf16 parameters with float32 statistics.
    """
    run_world(ranks, train_in_both, IN_BF16[ranks], tmp_path)
    for i, line in enumerate(IN_BF16[ranks]):
        exact, rough = (
            read_metrics(tmp_path / f"{precision}{i}")[-1] for precision in ("float32", "bf16")
        )
        assert math.isfinite(rough["test_loss"]), line
        assert rough["train_loss"] != exact["train_loss"], f"nothing was computed in bf16: {line}"
        assert rough["train_loss"] == pytest.approx(exact["train_loss"], rel=0.05), line


@pytest.mark.covers("float32_matmul")
def test_training_and_evaluation_have_the_chosen_precision(tmp_path, capsys):
    """The key float32_matmul. tests/test_gpu.py tests that `high` means TF32 on a GPU."""
    line = "python train.py epochs=1 name=one model._target_=own_models.Telling float32_matmul=high"
    code, output = launch(line, *OWN, f"runs_dir={tmp_path}")
    assert code == 0, output
    assert "float32_matmul=high, error small" in output, "a CPU has no TF32"
    with Runtime("cpu") as runtime:
        evaluate_run(read_config(tmp_path / "one", [], None), runtime, tmp_path / "one", "last")
    assert capsys.readouterr().out.splitlines()[-1] == "float32_matmul=high, error small"
    assert torch.get_float32_matmul_precision() == "highest", (
        "the setting of this process is restored"
    )
