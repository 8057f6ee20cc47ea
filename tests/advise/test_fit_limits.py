"""The quick check of memory against copies counted by hand.

Also the batch of weak scaling, and runs without memory_limit.
"""

import psutil
import pytest
import torch

from ddp_lab.advise import fit
from ddp_lab.config.build import call_target
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.run.build import build
from ddp_lab.training.plan import TrainSizes
from ddp_lab.world.planned import PlannedRuntime

LENET = ["model=lenet", "data=digits", "batch_size=8", "strategy=single"]
WEIGHTS = 4 * 129_068  # bytes of LeNet's parameters
DIGITS = 1437  # samples of the training set


def planned(ranks: int, kind: str = "cpu") -> PlannedRuntime:
    return PlannedRuntime(ranks, ranks, "float32", gpus=1, kind=kind)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        (["optimizer=sgd", "optimizer.momentum=0"], 2),  # weights and gradients
        (["optimizer=sgd"], 3),  # and the momentum
        (["optimizer=sgd", "ema=0.9"], 4),  # and averages of the weights
        (["optimizer=adamw"], 4),  # two moments
        (["optimizer=adamw", "ema=0.9"], 5),
    ],
)
def test_state_that_fits_exactly_is_accepted_and_a_byte_less_is_refused(
    overrides, copies, monkeypatch
):
    monkeypatch.setattr(fit, "alternatives", lambda advisor, runtime: "Use a larger device")
    cfg = compose_config([*LENET, *overrides], None)
    job = build(cfg, planned(1))
    fit.check_state(cfg, job, copies * WEIGHTS)
    with pytest.raises(
        ConfigError, match=r"parameters, gradients and optimizer state take .* on rank 0"
    ):
        fit.check_state(cfg, job, copies * WEIGHTS - 4)


@pytest.mark.parametrize(
    ("scaling", "ranks", "largest"),
    [
        ("strong", 4, 1408),  # the multiple of 4 x 8 below 1437
        ("weak", 4, 352),  # the multiple of 8 below 1437 / 4
        ("weak", 1, 1408),  # of sizes above 256 not every multiple of 8 is tried
        ("weak", 300, 4),  # fewer than 8 samples for each
        ("strong", 300, 1200),
    ],
)
def test_chosen_global_batch_is_at_most_the_training_set(scaling, ranks, largest):
    cfg = compose_config([*LENET[:2], "strategy=ddp", f"scaling={scaling}"], None)
    strategy = call_target(cfg.strategy, planned(ranks))
    cfg.batch_size = "auto"
    sizes = fit.values_of(cfg, strategy, DIGITS, 1)
    assert max(sizes) == largest
    cfg.batch_size = largest
    sizes = TrainSizes.make(cfg, 0.1, ranks, strategy.replicas, DIGITS)
    assert sizes.global_batch_size == largest * (ranks if scaling == "weak" else 1) <= DIGITS
    assert sizes.warning() is None


@pytest.mark.parametrize(
    ("limit", "kind", "memory"),
    [
        (None, "cpu", [0, 500]),  # of a host's memory, what is free, for each of its two ranks
        (None, "cuda", [900, 300]),  # of a GPU all of it, and what is free
        (0.5, "cpu", [2**29, 2**29]),
        (0.5, "cuda", [2**29, 2**29]),
    ],
)
def test_memory_is_the_limit_or_else_that_of_the_device(limit, kind, memory, monkeypatch):
    cfg = compose_config([f"memory_limit={limit or 'null'}"], None)
    runtime = planned(2, "cpu")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 900))
    runtime.device = torch.device(kind)
    assert fit.memory_of(cfg, runtime) == memory


def test_run_on_a_cpu_without_a_limit_is_not_refused(monkeypatch):
    """How much of a host's memory a process may use is not known."""
    cfg = compose_config([*LENET, "memory_limit=null"], None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1}))
    fit.check_memory(cfg, build(cfg, planned(1)))


def test_batch_is_chosen_without_a_limit_from_what_is_free(monkeypatch):
    free = int(0.34 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
    monkeypatch.setattr(fit, "take_real_step", lambda cfg, runtime: (2**20, ""))
    chosen = []
    for limit in ("null", free / 2**30):
        cfg = compose_config(
            [*LENET[:2], "strategy=single", "batch_size=auto", f"memory_limit={limit}"], None
        )
        text = fit.choose_batch(cfg, planned(1))
        assert "A real step took 1.0 MiB of the 348.2 MiB of a device" in text
        chosen.append(cfg.batch_size)
    assert chosen[0] == chosen[1] > 8
