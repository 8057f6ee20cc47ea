"""Runs that do not fit on their devices are refused; batch_size=auto is the largest that fits."""

import re
from pathlib import Path

import pytest
from launches import launch, main_in_world, refusal_in_world
from omegaconf import OmegaConf
from small_digits import ALL_DIGITS
from worlds import run_world

from ddp_lab.advise import fit
from ddp_lab.advise.advisor import Advisor
from ddp_lab.config.build import call_target
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.run.build import build
from ddp_lab.world.planned import PlannedRuntime

STATE = 3 * 4 * 129_068  # bytes of LeNet's parameters, gradients and momentum
LENET = ["model=lenet", "data=digits", "batch_size=64"]
WAITING = ["model=own", "model._target_=own_models.waiting_blocks", "data=digits"]


@pytest.fixture(autouse=True)
def all_digits(monkeypatch):
    """Let batches be as large as those of a user's run."""
    monkeypatch.setenv(ALL_DIGITS, "1")


def check_state(overrides: list[str], size: int, ranks: int, gpus: int = 1) -> None:
    """Check whether a run fits on GPUs of a size."""
    cfg = compose_config(overrides, None)
    fit.check_state(
        cfg, build(cfg, PlannedRuntime(ranks, ranks, "float32", gpus=gpus, kind="cpu")), size
    )


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        ([*LENET, "strategy=ddp"], STATE),
        ([*LENET, "strategy=fsdp"], STATE - 1),
        ([*WAITING, "strategy=fsdp"], 1000),
    ],
    ids=["complete", "in shards", "not planned"],
)
def test_state_that_fits_or_cannot_be_planned_is_accepted(overrides, size):
    check_state(overrides, size, 2)


def test_refusal_names_the_two_simplest_alternatives(monkeypatch):
    few = [["strategy=ddp"], ["strategy=fsdp"], ["strategy=tp", "strategy.tp=2"]]
    monkeypatch.setattr(Advisor, "candidates", lambda self: few)
    with pytest.raises(ConfigError) as refused:
        check_state(
            [*LENET[:-1], "batch_size=8", "optimizer=adamw", "strategy=single"],
            STATE // 3 * 4 - 1,
            1,
            gpus=4,
        )
    text = str(refused.value)
    first, second = text[text.index("Use ") :].split(" or ")
    launch_line = "`torchrun --standalone --nproc_per_node=4 -m ddp_lab ... strategy="
    assert first.startswith(f"Use {launch_line}")
    assert second.startswith(launch_line)
    assert second.endswith(", the simplest of 2 that fit on 4 such devices"), text


@pytest.mark.slow
def test_train_refuses_before_the_group_opens_and_writes_nothing(tmp_path):
    runs = tmp_path / "runs"
    first, second = run_world(
        2, refusal_in_world, f"strategy=ddp memory_limit={(STATE - 1) / 2**30:.9f} runs_dir={runs}"
    )
    code, text = first
    assert code == 2
    state = "parameters, gradients and optimizer state take 1.5 MiB on rank 0, a device has 1.5 MiB"
    assert text.startswith(f"error: strategy=ddp: {state}, and activations need more. ")
    assert "With activations, on 2 devices: Nothing fits: " in text
    assert "Use more or larger GPUs, a smaller batch_size, or accumulate=N" in text
    assert second == (2, "")
    assert not runs.exists()


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [("pipeline", 16), ("ddp_pipeline strategy.pp=2", 32), ("mesh strategy.pp=2", 32), ("mesh", 4)],
)
def test_chosen_batch_can_be_divided_into_the_micro_batches_of_every_replica(strategy, parts):
    chosen = ["strategy.num_microbatches=16", *f"strategy={strategy}".split()]
    cfg = compose_config([*LENET, "model=vit", *chosen], None)
    made = call_target(cfg.strategy, PlannedRuntime(4, 4, "float32", kind="cpu"))
    cfg.batch_size = "auto"
    sizes = fit.values_of(cfg, made, 1437, 1)
    assert (min(sizes), {size % parts for size in sizes}) == (parts, {0})
    cfg.batch_size = 32 * parts
    cfg.accumulate = "auto"
    assert max(fit.values_of(cfg, made, 1437, 1)) == 32


def config_of(tmp_path: Path) -> dict:
    return OmegaConf.to_container(OmegaConf.load(tmp_path / "auto" / "config.yaml"))


def resume_planned(tmp_path: Path, line: str) -> dict:
    """Train on this rank without a real step before; return the recorded config.

    The process of a real step would import torch anew.
    """
    fit.take_real_step = lambda cfg, runtime: (2**20, "")
    main_in_world(f"runs_dir={tmp_path}", "optimizer.lr=0.01", *line.split())
    return config_of(tmp_path)


@pytest.mark.slow
def test_auto_trains_with_the_largest_batch_that_fits_which_a_resume_keeps_on_other_devices(
    tmp_path,
):
    limit = "lr_scaling=sqrt memory_limit=0.34 name=auto batch_size=auto"
    command = "torchrun --standalone --nproc_per_node=2 train.py"
    code, output = launch(
        f"{command} runs_dir={tmp_path} optimizer.lr=0.01 {limit} strategy=ddp epochs=1"
    )
    assert code == 0, output
    size = config_of(tmp_path)["batch_size"]
    line = re.search(
        r"batch_size=auto: (\d+)\. A real step took (\d+\.\d) MiB of the 348\.2 MiB of a device; "
        r"batch_size=\1, lr",
        output,
    )
    assert output.count("batch_size=auto:") == 1
    assert int(line[1]) == size
    assert 0 < float(line[2]) <= 348.2
    assert size % 16 == 0, "local batches of a multiple of 8"
    assert 500 < size < 1437
    assert f"global batch {size} = 2 x {size // 2}" in output
    assert f"lr {0.01 * (size / 256) ** 0.5:g}" in output
    cfg = run_world(1, resume_planned, tmp_path, f"{limit} strategy=single epochs=2")[0]
    assert cfg["batch_size"] == size, "the batch is part of the result"
    assert cfg["accumulate"] > 1, "one device cannot hold it at once"
    assert (
        f"accumulate=auto: {cfg['accumulate']}. A real step took"
        in (tmp_path / "auto" / "train.log").read_text()
    )


@pytest.mark.slow
def test_batch_that_a_real_step_refutes_is_made_smaller(monkeypatch):
    """The plan of a step may be too low; a process that ran out of memory says so."""
    cfg = compose_config(["batch_size=auto", "memory_limit=0.5"], None)
    runtime = PlannedRuntime(1, 1, "float32", kind="cpu")
    tried = []

    def step(cfg, runtime):
        tried.append(cfg.batch_size)
        return (0, "RuntimeError: out of memory") if len(tried) < 3 else (2**27, "")

    monkeypatch.setattr(fit, "take_real_step", step)
    text = fit.choose_batch(cfg, runtime)
    assert tried[0] > tried[1] > tried[2] == cfg.batch_size
    assert f"batch_size=auto: {tried[2]}." in text
    monkeypatch.setattr(fit, "take_real_step", lambda cfg, runtime: (2**40, ""))
    cfg.batch_size = "auto"
    with pytest.raises(
        ConfigError,
        match=r"auto: a real step with batch_size=\d+ does not fit: takes 1,024.0 GiB of",
    ):
        fit.choose_batch(cfg, runtime)


@pytest.mark.slow
@pytest.mark.covers("memory_limit")
def test_accumulate_auto_takes_as_few_steps_as_fit(monkeypatch):
    cfg = compose_config(["batch_size=64", "accumulate=auto", "memory_limit=0.286"], None)
    runtime = PlannedRuntime(1, 1, "float32", kind="cpu")
    monkeypatch.setattr(fit, "take_real_step", lambda cfg, runtime: (2**20, ""))
    text = fit.choose_batch(cfg, runtime)
    assert f"accumulate=auto: {cfg.accumulate}." in text
    assert (cfg.batch_size, 1 < cfg.accumulate < 10) == (64, True)
    cfg.accumulate = "auto"
    cfg.batch_size = 8
    cfg.memory_limit = 0.004
    with pytest.raises(
        ConfigError, match=r"accumulate=auto: not even 8 fits: .* With activations, on"
    ):
        fit.choose_batch(cfg, runtime)
