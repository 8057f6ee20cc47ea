"""precision=fp16: the loss is scaled, and steps whose gradient is not finite are skipped.

The CPU is let through here (`on_cpu`): torch's autocast computes in float16 there, too. Models in
float64 are not cast by autocast, so that what the scale does to the numbers is seen exactly.
"""

import copy
from functools import partial
from unittest.mock import patch

import pytest
import torch
from case import Case, config_of
from fp16 import FITTING, LARGE, in_fp16, on_cpu
from launches import launch
from omegaconf import open_dict
from slow_rows import extra, slow_but
from torch.nn.functional import cross_entropy
from training import Outcome, largest_difference
from worlds import once, run_world

from ddp_lab import Lab
from ddp_lab.config.errors import ConfigError
from ddp_lab.run.build import build
from ddp_lab.strategies import loss_scale
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

TOO_LARGE = 2.0**127  # times a loss of about 2.3 is infinite in float32
OPTIMIZERS = {
    "momentum": "optimizer.momentum=0.9",
    "dampening": "optimizer.momentum=0.9 optimizer.dampening=0.5",
    "no momentum": "optimizer.momentum=0.0",
    "adamw": "optimizer=adamw",
    "rmsprop": "optimizer=adamw optimizer._target_=torch.optim.RMSprop",
}


def make_step(*parts: str, precision: str = "fp16") -> tuple[Step, list]:
    """Return a step of `single` on the CPU and the batches of an epoch, 24, 24 and 12 samples.

    The model is a small vit: the backward pass of LeNet takes a second in float16 on a CPU.
    """
    cfg = config_of(" ".join(["single samples=60 model=vit", *parts]))
    if cfg.optimizer._target_.endswith("RMSprop"):
        with open_dict(cfg):
            del cfg.optimizer.fused
    with on_cpu:
        job = build(cfg, Runtime("cpu", precision))
        step = job.trainer().eager_step
    loader = job.loaders["train"]
    loader.set_epoch(1)
    return step, [*loader]


def state_of(step: Step) -> list[torch.Tensor]:
    """Return copies of all that a skipped step must leave as it is, in a fixed order."""
    values = [
        value
        for state in step.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    averages = step.ema.state if step.ema else []
    module = step.strategy.module
    return [each.clone() for each in [*module.state_dict().values(), *values, *averages]]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("averages", ["ema=0.9", "ema=0.9 ema_warmup=false"])
def test_skipped_step_changes_the_scale_and_the_schedule_only(optimizer, averages):
    step, (batch, again, _) = make_step(
        *OPTIMIZERS[optimizer].split(), *averages.split(), "model=normalized"
    )
    scale = step.strategy.loss_scale
    step(batch)
    assert scale.saved() == {"scale": 2.0**16, "growth_steps": 1, "skipped_steps": 0}
    before = state_of(step)

    scale.scale.fill_(TOO_LARGE)
    step(again)
    assert scale.saved() == {"scale": TOO_LARGE / 2, "growth_steps": 0, "skipped_steps": 1}
    after = state_of(step)
    assert len(before) == len(after)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert step.scheduler.last_epoch == 2

    scale.scale.fill_(2.0)
    step(again)
    assert not any(torch.equal(*pair) for pair in zip(before, state_of(step), strict=True))


@pytest.mark.parametrize("optimizer", slow_but(["momentum"], OPTIMIZERS))
def test_first_step_may_be_skipped(optimizer):
    """The step after it is that of a new optimizer, not one of memory without values."""
    step, (batch, *_) = make_step(*OPTIMIZERS[optimizer].split())
    other, _ = make_step(*OPTIMIZERS[optimizer].split())
    step.strategy.loss_scale.scale.fill_(TOO_LARGE)
    with patch("torch.empty_like", lambda *args, **kwargs: torch.full_like(args[0], 1e30)):
        step(batch)
    step.strategy.loss_scale.scale.fill_(2.0**16)
    other.scheduler.step()
    step(batch)
    other(batch)
    for one, two in zip(state_of(step), state_of(other), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "settings",
    ["model=lenet", "max_grad_norm=0.1", "accumulate=3", "", "adamw max_grad_norm=0.1"],
)
def test_scale_rounds_nothing(settings):
    """In float64 the result is that of precision=float32, to the last digit."""
    results = []
    with Case.of("single float64").default_dtype():
        for precision in ("fp16", "float32"):
            step, batches = make_step(*settings.split(), "float64", "ema=0.9", precision=precision)
            step.optimizer.param_groups[0]["fused"] = True
            for batch in batches:
                step(batch)
            results.append((state_of(step), step.running_sums.norm))
    (scaled, norm), (plain, plain_norm) = results
    for one, other in zip(scaled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
    assert plain_norm is None or torch.equal(norm, plain_norm)


@pytest.mark.slow
def test_scale_doubles_after_steps_without_a_skipped_one(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 2)
    step, batches = make_step()
    scales = []
    for batch in batches * 2:
        step(batch)
        scales.append(step.strategy.loss_scale.scale.item() / loss_scale.INITIAL)
    assert scales == [1, 2, 2, 4, 4, 8]


def test_model_computes_in_float16_and_its_gradients_are_float32():
    step, (batch, *_) = make_step()
    dtypes = []
    step.strategy.module.head.register_forward_hook(
        lambda module, inputs, output: dtypes.append(output.dtype)
    )
    step.zero_grad = lambda: None
    step(batch)
    assert dtypes == [torch.float16]
    assert {each.grad.dtype for each in step.strategy.module.parameters()} == {torch.float32}


EXACT = ["scratch", "ddp clipped", "tp tp=2", "scratch accumulate=2 adamw"]
ROUNDED = [
    "fsdp",
    "pipeline",
    "mesh tp=2 vit",
    "ddp_pipeline pp=2",
    "tp tp=2 vit",
]
# a mesh that shards or cuts as fsdp and ddp_pipeline do
EXTRA = ["mesh pp=2 vit", "mesh shard=2 vit"]


@once
def expected(case: str) -> tuple[Outcome, dict]:
    return run_world(1, in_fp16, [case], [FITTING], timeout=200)[0][case, FITTING]


@once
def references() -> dict[tuple[str, float], tuple[Outcome, dict]]:
    cases = dict.fromkeys(str(Case.of(case).reference()) for case in [*ROUNDED, *EXTRA])
    return run_world(1, in_fp16, [*cases], [FITTING], timeout=200)[0]


@once
def on_two_ranks(cases: tuple[str, ...], *scales: float) -> list[dict]:
    return run_world(2, in_fp16, list(cases), list(scales), timeout=200)


@pytest.mark.parametrize("case", EXACT)
def test_strategy_equals_single_in_float64(case):
    case = f"{case} float64"
    cases = tuple(f"{each} float64" for each in EXACT)
    outcome, scale = on_two_ranks(cases, FITTING)[0][case, FITTING]
    reference, scale_of_single = expected(str(Case.of(case).reference()))
    assert scale == scale_of_single == {"scale": FITTING, "growth_steps": 6, "skipped_steps": 0}
    assert largest_difference(outcome.weights, reference.weights) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ROUNDED, *extra(EXTRA)])
def test_ranks_agree_on_what_they_skip(case):
    """Which steps these are may depend on the strategy.

    The gradient of a weight is computed in float16 from all samples of a micro-batch, and the sum
    of a larger one overflows at a smaller scale.
    """
    cases = tuple(EXTRA if case in EXTRA else ROUNDED)
    ranks = on_two_ranks(cases, FITTING, LARGE)
    (_, scale), (_, other_scale) = (rank[case, LARGE] for rank in ranks)
    assert scale == other_scale
    assert 0 < scale["skipped_steps"] < 6
    assert scale["scale"] == LARGE / 2 ** scale["skipped_steps"]
    outcome, _ = ranks[0][case, FITTING]
    reference, _ = references()[str(Case.of(case).reference()), FITTING]
    moved = max(each.abs().max().item() for each in reference.momentum.values())
    assert 0 < largest_difference(outcome.weights, reference.weights) < 0.01 * moved


@pytest.mark.slow
def test_split_skips_on_all_its_devices():
    case = "split devices=[cpu,cpu] num_microbatches=2 vit"
    _, scale = in_fp16([case], [LARGE])[case, LARGE]
    assert 0 < scale["skipped_steps"] < 6


@pytest.mark.slow
@pytest.mark.parametrize("form", ["pt", "sharded"])
def test_resumed_run_continues_with_the_scale_and_the_averages(form, tmp_path):
    settings = f"single vit ema=0.9 checkpoint.at_steps=[4] save={tmp_path}"
    resumed = f"{settings} resume={tmp_path}/{form}/step_00000004.{form}"
    initial = LARGE / 4
    first, scale = in_fp16([settings], [initial])[settings, initial]
    again, other_scale = in_fp16([resumed], [1.0])[resumed, 1.0]
    assert 0 < scale["skipped_steps"] < 4
    assert other_scale == scale
    assert largest_difference(again.weights, first.weights) == 0
    assert largest_difference(again.averages, first.averages) == 0


def test_loop_of_ones_own_scales_its_loss():
    """In float64 the weights are those of precision=float32, whatever the loop divides by."""
    weights = []
    seen = []
    for precision in ("fp16", "float32"):
        with on_cpu, Lab("single", device="cpu", precision=precision) as lab:
            model = torch.nn.Linear(3, 2).double()
            torch.nn.init.constant_(model.weight, 0.5)
            torch.nn.init.constant_(model.bias, 0.25)
            inputs = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 10
            data = torch.utils.data.TensorDataset(inputs, torch.tensor([0, 1, 1, 0]))
            model.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
            optimizer = partial(torch.optim.SGD, lr=0.5)
            trainer = lab.trainer(model, cross_entropy, optimizer, 2, max_grad_norm=0.1)
            for some, targets in trainer.batches(data, 0):
                losses = cross_entropy(trainer.forward(some), targets, reduction="sum")
                trainer.backward(losses, len(targets))
                trainer.update()
            weights.append(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(*weights, rtol=1e-14, atol=1e-14)
    assert len(seen) == 4
    torch.testing.assert_close(seen[:2], seen[2:], rtol=1e-14, atol=1e-14)


def test_fp16_is_refused_on_a_cpu(tmp_path):
    code, output = launch("ddp-lab train precision=fp16 device=cpu", f"runs_dir={tmp_path}")
    assert code == 2
    message = "precision=fp16: is supported on NVIDIA GPUs only, and the device is cpu. Use prec"
    assert output.count(message) == 1
    assert "Traceback" not in output
    with (
        Lab("single", device="cpu", precision="fp16") as lab,
        pytest.raises(ConfigError, match="precision=fp16: is supported on NVIDIA GPUs only"),
    ):
        lab.trainer(torch.nn.Linear(3, 2), cross_entropy, partial(torch.optim.SGD, lr=0.1), 2)
