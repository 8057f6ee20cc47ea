"""Runs whose parameters, gradients and optimizer state do not fit on their GPUs are refused before the process group opens."""

import pytest
from cases import ddp, fsdp, mesh
from launches import refusal_in_world
from training import config_of
from worlds import run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.estimate.planned import PlannedRuntime
from ddp_lab.run import memory
from ddp_lab.run.job import Job

STATE = 3 * 4 * 129_068  # bytes of LeNet's parameters, gradients and momentum


def planned(case, ranks: int) -> Job:
    job = Job(config_of(case), PlannedRuntime(ranks, ranks, "float32"))
    job.partition()
    return job


def test_fullest_rank_decides():
    text = memory.verdict(planned(fsdp(), 2), [(2**30, 2**31), (3 * 2**29, 2**31)])
    assert text == "parameters, gradients and optimizer state take 1.50 GiB on rank 1, whose GPU has 2.00 GiB"
    assert memory.verdict(planned(fsdp(), 2), [(2**30, None), (2**30, None)]) == "", "the memory of a CPU is not known"


def test_refusal_names_the_two_simplest_strategies_that_fit():
    with pytest.raises(ConfigError) as refusal:
        memory.verdict(planned(ddp(), 4), [(STATE, STATE - 1)] * 4)
    assert str(refusal.value).startswith(
        "strategy=ddp: parameters, gradients and optimizer state take 0.00 GiB on rank 0, whose"
    )
    assert "Use strategy=fsdp or strategy=tp strategy.tp=2; `python -m" in str(refusal.value)


def test_refusal_without_an_alternative_says_so():
    with pytest.raises(ConfigError, match="No other strategy fits on these GPUs: use more or larger ones"):
        memory.verdict(planned(mesh(), 4), [(STATE, 1000)] * 4)


def train_with_memory(size: int, line: str) -> tuple[object, str]:
    memory.card_memory = lambda device: size
    return refusal_in_world(line)


def test_train_refuses_before_the_group_opens_and_writes_nothing(tmp_path):
    runs = tmp_path / "runs"
    first, second = run_world(2, train_with_memory, STATE - 1, f"strategy=ddp runs_dir={runs}")
    code, text = first
    assert code == 2
    assert text.startswith("error: strategy=ddp: parameters, gradients and optimizer state take 0.00 GiB on rank 0, whose GPU")
    assert "Use strategy=fsdp or strategy=tp strategy.tp=2; `python -m ddp_lab.advise`" in text
    assert second == (2, "")
    assert not runs.exists()
