"""Which performance options a run uses: what the config sets, and what speed=auto chooses.

On GPUs: test_gpu.py.
"""

from types import SimpleNamespace

import pytest
import torch
from configs import config

from ddp_lab.config.build import call_target
from ddp_lab.data.datasets import Synthetic
from ddp_lab.models.channels_last import to_channels_last
from ddp_lab.models.lenet import lenet
from ddp_lab.run.build import build as build_job
from ddp_lab.run.build import wanted_options
from ddp_lab.run.speed import find_options
from ddp_lab.training.performance import KEYS, PerformanceOptions, choose
from ddp_lab.world.runtime import Runtime

LEFT = {
    "loader": "auto",
    "cuda_graph": "auto",
    "channels_last": "auto",
    "fused": None,
    "compile": "auto",
}
FASTEST = {
    "loader": "device",
    "cuda_graph": True,
    "channels_last": True,
    "fused": True,
    "compile": "auto",
}
OFF = {
    "loader": "device",
    "cuda_graph": False,
    "channels_last": False,
    "fused": None,
    "compile": False,
}
GIB = 2**30
GPU = {"unsupported": {}, "data_bytes": GIB, "model_bytes": GIB // 2, "free_bytes": 10 * GIB}
REFUSED = {
    "cuda_graph": "no graph",
    "compile": "no compiler",
    "channels_last": "flat",
    "fused": "sharded",
}


def values(options: PerformanceOptions) -> dict:
    return {name: getattr(options, name) for name in KEYS}


@pytest.mark.parametrize(
    ("automatic", "wanted", "facts", "expected"),
    [
        (True, {}, GPU, FASTEST),
        (False, {}, GPU, OFF),
        (True, {}, GPU | {"unsupported": REFUSED}, OFF),
        (True, {}, GPU | {"data_bytes": 5 * GIB}, FASTEST),
        (
            True,
            {},
            GPU | {"data_bytes": 5 * GIB + 1},
            FASTEST | {"loader": "workers", "cuda_graph": False},
        ),
        (
            True,
            {},
            GPU | {"model_bytes": GIB // 2 + 1},
            FASTEST | {"cuda_graph": False, "compile": False},
        ),
        (True, {"cuda_graph": True}, GPU | {"model_bytes": GIB}, FASTEST | {"compile": False}),
        (True, {"loader": "device"}, GPU | {"data_bytes": 9 * GIB}, FASTEST),
        (True, {"loader": "workers"}, GPU, FASTEST | {"loader": "workers", "cuda_graph": False}),
        (True, {"compile": True, "fused": False}, GPU, FASTEST | {"compile": True, "fused": False}),
        (False, {"cuda_graph": True}, GPU, OFF | {"cuda_graph": True}),
    ],
)
def test_options_follow_from_the_config_and_the_facts(automatic, wanted, facts, expected):
    options = choose(automatic, LEFT | wanted, **facts)
    assert values(options) == expected
    assert options.reasons.keys() == (LEFT.keys() - wanted.keys() if automatic else set())
    assert options.disabled == ()


def test_required_options_that_are_not_supported_are_disabled_with_a_line():
    required = {"loader": "workers", "cuda_graph": True, "channels_last": True, "compile": True}
    options = choose(False, LEFT | required, **GPU | {"unsupported": {"compile": "no compiler"}})
    assert (options.cuda_graph, options.channels_last, options.compile) == (False, True, False)
    graph, compiled = options.disabled
    assert graph.startswith("cuda_graph=true is disabled: not supported by data.loader=workers, ")
    assert compiled == "compile=true is disabled: no compiler"


def test_log_has_the_reason_of_each_option(caplog):
    caplog.set_level("INFO", "ddp_lab")
    choose(False, LEFT, **GPU).log_choices()
    assert caplog.messages == []
    options = choose(
        True, LEFT | {"cuda_graph": False}, **GPU | {"unsupported": {"compile": "no compiler"}}
    )
    options.log_choices()
    assert caplog.messages == [
        "speed=auto:",
        "  data.loader     device  the dataset has 1.0 GiB, 10.0 GiB are free on the device",
        "  cuda_graph      off     set in the config",
        "  channels_last   on",
        "  optimizer.fused on",
        "  compile         off     no compiler",
    ]


def options_on_gpu(monkeypatch, *overrides: str, model=None) -> PerformanceOptions:
    """Return the options of a job on a GPU with 10 GiB of free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    cfg = config("speed=auto", *overrides)
    strategy = call_target(cfg.strategy, Runtime("cpu"))
    model = model or lenet(1, 28, 10, None)
    strategy.partition(model, 8)
    strategy.device = torch.device("cuda")
    return find_options(wanted_options(cfg), strategy, Synthetic(8, 8, 1, 28, 10).load(), model)


SYNC = (
    "not supported by strategy.batch_norm=sync: capturing collectives inside forward and backward "
    "was never tested"
)
ONE_DEVICE = (
    "the memory of a CUDA graph belongs to one device, and strategy=split has several in one "
    "process; strategy=pipeline has a process for each device"
)


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        (
            "strategy=single optimizer._target_=torch.optim.Rprop",
            {
                "fused": "torch.optim.Rprop has no fused kernel for GPUs",
                "cuda_graph": "it supports the optimizers SGD, Adam and AdamW of torch, and Muon "
                "of ddp_lab, not torch.optim.Rprop",
            },
        ),
        (
            "strategy=single optimizer=muon",
            {"fused": "ddp_lab.training.muon.Muon has no fused kernel for GPUs"},
        ),
        ("strategy=ddp strategy.batch_norm=sync", {"cuda_graph": SYNC}),
        ("strategy=pipeline", {"channels_last": "not supported by strategy=pipeline"}),
        (
            "strategy=ddp_pipeline strategy.pp=1",
            {"channels_last": "not supported by strategy=ddp_pipeline"},
        ),
        ("strategy=split", {"cuda_graph": ONE_DEVICE}),
    ],
)
def test_what_a_strategy_does_not_support_is_off_with_the_reason(overrides, reasons, monkeypatch):
    without = options_on_gpu(monkeypatch, model=torch.nn.Linear(1, 1))
    assert without.reasons["channels_last"] == "the model has no convolutions"
    patches = torch.nn.Conv2d(3, 8, 16, stride=16)
    of_patches = options_on_gpu(monkeypatch, model=patches)
    assert of_patches.reasons["channels_last"] == "the model has no convolutions"
    of_points = options_on_gpu(monkeypatch, model=torch.nn.Conv2d(3, 8, 1))
    assert of_points.reasons["channels_last"] == ""
    options = options_on_gpu(monkeypatch, *overrides.split())
    assert {
        name: reason for name, reason in options.reasons.items() if reason and name != "loader"
    } == reasons
    assert values(options) == FASTEST | {name: OFF[name] for name in reasons}


@pytest.mark.parametrize(("device", "overrides"), [("cpu", []), ("cuda", ["speed=off"])])
@pytest.mark.covers("speed")
def test_no_fact_is_asked_for_where_nothing_is_chosen(device, overrides, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    cfg = config("strategy=single", *overrides)
    strategy = call_target(cfg.strategy, Runtime("cpu"))
    strategy.device = torch.device(device)
    strategy.runtime = None
    assert (
        values(
            find_options(
                wanted_options(cfg),
                strategy,
                Synthetic(8, 8, 1, 28, 10).load(),
                lenet(1, 28, 10, None),
            )
        )
        == OFF
    )


def test_free_memory_is_the_smallest_of_all_ranks(monkeypatch):
    runtime = SimpleNamespace(
        free_memory=lambda: 7, gather_and_decide=lambda key, local, decide: decide([9, local, 8])
    )
    monkeypatch.setattr("ddp_lab.run.speed.choose", lambda *facts: facts)
    strategy = call_target(config("strategy=single").strategy, Runtime("cpu"))
    strategy.device = torch.device("cuda")
    strategy.runtime = runtime
    facts = find_options(
        wanted_options(config("speed=auto")),
        strategy,
        Synthetic(8, 8, 1, 28, 10).load(),
        lenet(1, 28, 10, None),
    )
    assert facts[-1] == 7


@pytest.mark.parametrize(("reasons", "batch"), [({"cuda_graph": ""}, 8 * 24), ({}, 24)])
def test_evaluation_takes_larger_batches_if_speed_auto_captures_the_step(
    reasons, batch, monkeypatch
):
    options = PerformanceOptions(cuda_graph=True, reasons=reasons)
    monkeypatch.setattr("ddp_lab.run.build.find_performance", lambda *_: options)
    job = build_job(
        config("data=synthetic", "data.dataset.channels=1", "batch_size=24"), Runtime("cpu")
    )
    assert [loader.batch_size for loader in job.loaders.values()] == [24, batch]


def test_outputs_and_gradients_are_channels_last_for_images_of_one_channel():
    """Both kinds of strides are channels last with one channel.

    DDP warned that gradients do not match its buckets.
    """
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.Conv2d(4, 4, 3, groups=4), torch.nn.Conv2d(4, 4, 3)
    )
    weights = [layer.weight for layer in model]
    assert to_channels_last(model) is model
    assert [layer.weight.stride() for layer in model] == [
        (9, 1, 3, 1),
        (9, 1, 3, 1),
        (36, 1, 12, 4),
    ]
    assert all(layer.weight is weight for layer, weight in zip(model, weights, strict=True))
    strides = []
    for layer in model:
        layer.register_forward_hook(lambda *seen: strides.append(seen[-1].stride(1)))
        layer.weight.register_hook(lambda gradient: strides.append(gradient.stride()))
    model(torch.randn(2, 1, 12, 12)).sum().backward()
    assert strides == [1] * 3 + [(36, 1, 12, 4), (9, 1, 3, 1), (9, 1, 3, 1)]
    assert (
        model[0](torch.randn(1, 12, 12)).shape
        == model[0](input=torch.randn(4, 1, 12, 12)[0]).shape
        == (4, 10, 10)
    )


def test_own_convolution_with_other_arguments_works_in_channels_last():
    class Scaled(torch.nn.Conv2d):
        def forward(self, input: torch.Tensor, scale: float | None = None) -> torch.Tensor:
            return super().forward(input) * (scale or 1)

    assert to_channels_last(Scaled(1, 2, 3))(torch.ones(4, 1, 3, 3), None).shape == (4, 2, 1, 1)
