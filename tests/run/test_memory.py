"""Runs whose parameters, gradients and optimizer state do not fit on their GPUs are refused before the process group opens."""

from dataclasses import replace

import pytest
from cases import fsdp
from launches import refusal_in_world
from training import config_of
from worlds import run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.estimate.cards import CARDS, GiB
from ddp_lab.estimate.planned import PlannedRuntime
from ddp_lab.launch.command_line import compose_config
from ddp_lab.run import memory
from ddp_lab.run.advise import advise
from ddp_lab.run.job import Job
from ddp_lab.run.machine import Machine

STATE = 3 * 4 * 129_068  # bytes of LeNet's parameters, gradients and momentum
LENET = ["model=lenet", "data=digits", "batch_size=64"]
LARGE = ["model=vit", "model.width=2048", "model.init=by_block", "optimizer=adamw", *LENET[1:]]


def planned(case, ranks: int) -> Job:
    job = Job(config_of(case), PlannedRuntime(ranks, ranks, "float32"))
    job.partition()
    return job


def refusal(overrides: list[str], size: float, ranks: int, gpus: int = 1) -> str:
    """Return the refusal of a run whose state needs one byte more than GPUs of a size have."""
    job = Job(compose_config(overrides, None), PlannedRuntime(ranks, ranks, "float32", gpus=gpus))
    job.partition()
    with pytest.raises(ConfigError) as refused:
        memory.verdict(job, [(int(size) + 1, int(size))] * ranks)
    return str(refused.value)


def test_fullest_rank_decides():
    text = memory.verdict(planned(fsdp(), 2), [(2**30, 2**31), (3 * 2**29, 2**31)])
    assert text == "parameters, gradients and optimizer state take 1.50 GiB on rank 1, whose GPU has 2.00 GiB"
    assert memory.verdict(planned(fsdp(), 2), [(2**30, None), (2**30, None)]) == "", "the memory of a CPU is not known"


def test_refusal_names_the_two_strategies_that_are_predicted_to_be_the_best():
    best = advise(LENET, None, Machine(replace(CARDS["H100"], memory=2 * GiB), 4, 1, 50e9)).ranked
    one, other = (f"{' '.join(each.overrides)} ({each.memory.total / GiB:.2f} GiB)" for each in best[:2])
    alone = best[0].overrides == ["strategy=single"]
    one = f"`python -m ddp_lab ... {one.replace(' (', '` (')}" if alone else one
    text = refusal([*LENET, "strategy=ddp"], 2 * GiB, ranks=4)
    assert f"Use {one} or {other}, the best of {len(best)} that are predicted to fit on 4 such GPUs. `python -m" in text


def test_refusal_with_weak_scaling_names_what_trains_the_most_images_per_second():
    run = ["model=resnet18", "data=synthetic", "data.dataset.image_size=28", "batch_size=256", "scaling=weak"]
    text = refusal([*run, "strategy=ddp"], 4 * GiB, ranks=2)
    assert "Use strategy=ddp (" in text
    assert ") or strategy=scratch (" in text


def test_refusal_of_one_process_counts_all_gpus_of_the_machine():
    text = refusal([*LARGE, "strategy=single"], 3 * GiB, ranks=1, gpus=8)
    assert text.count("`torchrun --standalone --nproc_per_node=8 -m ddp_lab ... strategy=") == 2


def test_refusal_names_offload_where_nothing_else_fits():
    text = refusal([*LARGE, "strategy=single"], 2 * GiB, ranks=1)
    line = "strategy=fsdp strategy.offload=true strategy.checkpoint_activations=block"
    assert f"Use {line} (1.5" in text
    assert "the best of 1 that are predicted to fit on 1 such GPU." in text


def test_refusal_where_nothing_is_predicted_to_fit_names_what_needs_the_least():
    text = refusal([*LENET, "strategy=ddp"], STATE - 1, ranks=4)
    assert text.startswith(
        "strategy=ddp: parameters, gradients and optimizer state take 1.48 MiB on rank 0, whose GPU has 1.48 MiB, and "
        "activations need more. With activations and the CUDA context nothing is predicted to fit on 4 such GPUs; the least "
    )
    assert "Use more or larger GPUs, a smaller batch_size, or accumulate=N" in text


def test_refusal_where_nothing_can_be_predicted_names_the_reason(monkeypatch):
    def refuse(*arguments: object) -> None:
        raise ConfigError("the model failed")

    monkeypatch.setattr(memory.Advisor, "predict", refuse)
    text = refusal([*LENET, "strategy=ddp"], STATE - 1, ranks=4)
    assert "activations need more. No strategy can be predicted: single: the model failed. `python" in text


def train_with_memory(size: int, line: str) -> tuple[object, str]:
    memory.card_memory = lambda device: size
    return refusal_in_world(line)


def test_train_refuses_before_the_group_opens_and_writes_nothing(tmp_path):
    runs = tmp_path / "runs"
    first, second = run_world(2, train_with_memory, STATE - 1, f"strategy=ddp runs_dir={runs}")
    code, text = first
    assert code == 2
    assert text.startswith("error: strategy=ddp: parameters, gradients and optimizer state take 1.48 MiB on rank 0, whose GPU")
    assert "nothing is predicted to fit on 2 such GPUs" in text
    assert second == (2, "")
    assert not runs.exists()
