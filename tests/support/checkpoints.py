"""Small runs, and the comparison of their checkpoints."""

import functools
import shutil
from pathlib import Path

import torch
from launches import SMALL, main_in_world
from worlds import run_world


def start(run_dir: Path, ranks: int, overrides: tuple[str, ...]) -> None:
    """Train a small model. The learning rate is constant, so that a longer run begins with the same steps."""
    where = f"runs_dir={run_dir.parent}", f"name={run_dir.name}"
    run_world(ranks, main_in_world, *SMALL, "scheduler=constant", *where, *overrides)


@functools.cache
def first_launch(folder: Path, ranks: int, overrides: tuple[str, ...]) -> Path:
    run_dir = folder / f"first-{len(list(folder.glob('first-*')))}"
    start(run_dir, ranks, overrides)
    return run_dir


def train(tmp_path: Path, name: str, *overrides: str, ranks: int = 1) -> dict:
    """Start or resume a run and return its newest checkpoint. First launches are shared: each test gets a copy of the run."""
    run_dir = tmp_path / name
    if run_dir.exists() or "resume=" in str(overrides):
        start(run_dir, ranks, overrides)
    else:
        shutil.copytree(first_launch(tmp_path.parent, ranks, overrides), run_dir)
    newest = sorted((run_dir / "checkpoints").glob("step_*.pt"))[-1]
    return torch.load(newest, weights_only=True)


def assert_same(one: dict, other: dict, tolerance: float) -> None:
    places = [{key: state["progress"][key] for key in ("epoch", "samples", "step")} for state in (one, other)]
    assert places[0] == places[1]
    assert one["scheduler"] == other["scheduler"]
    for name, tensor in one["model"].items():
        assert torch.allclose(tensor, other["model"][name], rtol=0, atol=tolerance), name
        momenta = (state["optimizer"]["state"][name]["momentum_buffer"] for state in (one, other))
        assert torch.allclose(*momenta, rtol=0, atol=10 * tolerance), name
