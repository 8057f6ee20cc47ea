"""Freed host memory: a step on a CPU gets it back without a page fault."""

import pytest
from launches import launch
from page_faults import PAGES, ROUNDS, TENSORS


@pytest.mark.slow
def test_train_on_a_cpu_keeps_freed_memory(tmp_path):
    out = tmp_path / "faults"
    line = (
        "python train.py device=cpu tracker=none epochs=1 data=synthetic data.dataset.train_size=64"
    )
    task = ["task._target_=page_faults.CountsFaults", f"+task.out={out}"]
    code, output = launch(line, *task, f"runs_dir={tmp_path}", cold=True)
    assert code == 0, output
    assert int(out.read_text()) < TENSORS * PAGES * ROUNDS / 20
