"""Runs whose parameters, gradients and optimizer state do not fit on their GPUs are refused before the process group opens."""

import pytest
from launches import refusal_in_world
from worlds import run_world

from ddp_lab.advise import check
from ddp_lab.advise.planned import PlannedRuntime
from ddp_lab.config.errors import ConfigError
from ddp_lab.launch.command_line import compose_config
from ddp_lab.run.job import build
from ddp_lab.world.runtime import Runtime

STATE = 3 * 4 * 129_068  # bytes of LeNet's parameters, gradients and momentum
LENET = ["model=lenet", "data=digits", "batch_size=64"]


def verdict(overrides: list[str], size: int, ranks: int, gpus: int = 1) -> str:
    """Return the verdict on a run on GPUs of a size."""
    cfg = compose_config(overrides, None)
    runtime = PlannedRuntime(ranks, ranks, "float32", gpus=gpus, kind="cpu")
    return check.verdict(cfg, build(cfg, runtime), [size] * ranks)


def refusal(*arguments) -> str:
    with pytest.raises(ConfigError) as refused:
        verdict(*arguments)
    return str(refused.value)


def test_state_that_fits_completely_is_not_planned():
    text = "parameters, gradients and optimizer state take at most 1.48 MiB, a GPU has 1.48 MiB"
    assert verdict([*LENET, "strategy=fsdp"], STATE, 2) == text
    cfg = compose_config(LENET, None)
    assert check.verdict(cfg, build(cfg, Runtime("cpu")), [None]) == "", "the memory of a CPU is not known"


def test_state_that_fits_in_shards_is_planned():
    text = verdict([*LENET, "strategy=fsdp"], STATE - 1, 2)
    assert text == "parameters, gradients and optimizer state take 0.74 MiB on rank 0, a GPU has 1.48 MiB"


def test_refusal_names_the_two_simplest_alternatives():
    large = ["model=vit", "model.width=2048", "model.depth=4", "model.init=by_block", "optimizer=adamw", *LENET[1:]]
    text = refusal([*large, "strategy=single"], int(2.8 * 2**30), 1, 4)
    first, second = text[text.index("Use ") :].split(" or ")
    assert first.startswith("Use `torchrun --standalone --nproc_per_node=4 -m ddp_lab ... strategy=")
    assert ", the simplest of 3 that fit on 4 such GPUs. " in second


def test_refusal_where_nothing_fits_names_what_needs_the_least():
    text = refusal([*LENET, "strategy=ddp"], STATE - 1, 2)
    assert text.startswith(
        "strategy=ddp: parameters, gradients and optimizer state take 1.48 MiB on rank 0, a GPU has 1.48 MiB, and activations "
        "need more. With activations and the CUDA context nothing fits on 2 such GPUs; the least memory need "
    )
    assert "Use more or larger GPUs, a smaller batch_size, or accumulate=N" in text


def test_model_that_reads_values_is_not_refused():
    own = ["model=own", "model._target_=own_models.Waiting", "data=digits", "strategy=fsdp"]
    cfg = compose_config(own, None)
    assert check.verdict(cfg, build(cfg, Runtime("cpu")), [1000]).startswith(
        "not checked, because the step cannot be planned: "
    )


def train_with_memory(size: int, line: str) -> tuple[object, str]:
    check.card_memory = lambda device: size
    return refusal_in_world(line)


def test_train_refuses_before_the_group_opens_and_writes_nothing(tmp_path):
    runs = tmp_path / "runs"
    first, second = run_world(2, train_with_memory, STATE - 1, f"strategy=ddp runs_dir={runs}")
    code, text = first
    assert code == 2
    assert text.startswith("error: strategy=ddp: parameters, gradients and optimizer state take 1.48 MiB on rank 0, a GPU has")
    assert "nothing fits on 2 such GPUs" in text
    assert second == (2, "")
    assert not runs.exists()
