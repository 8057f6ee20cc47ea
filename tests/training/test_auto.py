"""speed=auto: what it chooses from which facts, and what happens if a choice fails. On GPUs: test_gpu.py."""

import os
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from configs import config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ddp_lab.config.build import build
from ddp_lab.data.datasets import Synthetic
from ddp_lab.data.loader import DeviceLoader, LoaderOptions
from ddp_lab.models.lenet import lenet
from ddp_lab.models.simple_cnn import simple_cnn
from ddp_lab.run.job import load_dataset, make_loaders, make_plan
from ddp_lab.run.speed import find_choices, free_bytes
from ddp_lab.strategies.single import Single
from ddp_lab.training.schedule import constant, make_scheduler
from ddp_lab.training.speed.attempts import LIMITED, build_step
from ddp_lab.training.speed.auto import Choice, Facts, choose, compile_seconds, earns_compiling, notice
from ddp_lab.training.speed.cache import VARIABLE, cache_folder, kept_kernels, mark_of
from ddp_lab.training.speed.options import FEW, PerformanceOptions
from ddp_lab.training.speed.switches import end_choosing
from ddp_lab.training.speed.warm_up import match_strides
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

LEFT = {"data.loader": "auto", "cuda_graph": "auto", "channels_last": "auto", "optimizer.fused": None, "compile": "auto"}
FASTEST = {"data.loader": "device", "cuda_graph": True, "channels_last": True, "optimizer.fused": True, "compile": "auto"}
OFF = {"data.loader": "device", "cuda_graph": False, "channels_last": False, "optimizer.fused": None, "compile": False}
GIB = 2**30
GPU = Facts("cuda", {}, GIB, GIB // 2, 10 * GIB)
REFUSED = {"cuda_graph": "no graph", "compile": "no compiler", "channels_last": "flat", "optimizer.fused": "sharded"}


@pytest.mark.parametrize(
    ("speed", "wanted", "facts", "expected"),
    [
        ("auto", {}, GPU, FASTEST),
        ("off", {}, GPU, OFF),
        ("auto", {}, GPU._replace(device="cpu"), OFF),
        ("auto", {}, GPU._replace(device="mps", data_bytes=None), OFF),
        ("auto", {}, GPU._replace(refusals=REFUSED), OFF),
        ("auto", {}, GPU._replace(data_bytes=5 * GIB), FASTEST),
        ("auto", {}, GPU._replace(data_bytes=5 * GIB + 1), FASTEST | {"data.loader": "workers", "cuda_graph": False}),
        ("auto", {}, GPU._replace(data_bytes=None), FASTEST | {"data.loader": "workers", "cuda_graph": False}),
        ("auto", {}, GPU._replace(model_bytes=GIB // 2 + 1), FASTEST | {"cuda_graph": False, "compile": False}),
        ("auto", {"data.loader": "device"}, GPU._replace(data_bytes=9 * GIB), FASTEST),
        ("auto", {"data.loader": "workers"}, GPU, FASTEST | {"data.loader": "workers", "cuda_graph": False}),
        ("auto", {"cuda_graph": False, "compile": False}, GPU, FASTEST | {"cuda_graph": False, "compile": False}),
        ("auto", {"compile": "tuned", "optimizer.fused": False}, GPU, FASTEST | {"compile": "tuned", "optimizer.fused": False}),
        ("auto", {"cuda_graph": True}, GPU._replace(refusals=REFUSED), OFF | {"cuda_graph": True}),
        ("off", {"cuda_graph": True, "data.loader": "workers"}, GPU, OFF | {"cuda_graph": True, "data.loader": "workers"}),
        ("auto", {"channels_last": True}, GPU._replace(device="cpu"), OFF | {"channels_last": True}),
    ],
)
def test_choices_follow_from_the_facts(speed, wanted, facts, expected):
    choices = choose(speed, LEFT | wanted, facts)
    assert {key: choice.value for key, choice in choices.items()} == expected
    fixed = wanted.keys() if speed == "auto" and facts.device == "cuda" else LEFT.keys()
    assert {key for key, choice in choices.items() if not choice.automatic} == fixed


def test_option_that_stays_off_has_the_reason_of_its_refusal():
    choices = choose("auto", LEFT, GPU._replace(refusals=REFUSED, data_bytes=None))
    assert {key: choice.reason for key, choice in choices.items()} == REFUSED | {
        "data.loader": "the images are read one by one"
    }
    assert "the weights have 1.0 GiB, 10.0 GiB" in choose("auto", LEFT, GPU._replace(model_bytes=GIB))["cuda_graph"].reason
    assert "data.loader=workers" in choose("auto", LEFT, GPU._replace(data_bytes=None))["cuda_graph"].reason


def test_notice_has_a_line_for_each_key():
    choices = choose("auto", LEFT | {"cuda_graph": False}, GPU._replace(refusals={"compile": "no compiler"}))
    assert notice(choices, "float32") == [
        "speed=auto:",
        "  data.loader     device  the dataset has 1.0 GiB, 10.0 GiB are free on the device",
        "  cuda_graph      off     set in the config",
        "  channels_last   on",
        "  optimizer.fused on",
        "  compile         off     no compiler",
        "  precision       float32 precision=bf16 halves the bytes of activations, but rounds to 3 digits",
    ]
    assert notice(choices, "bf16")[-1] == "  precision       bf16"


@pytest.mark.parametrize(("steps", "compiles"), [(0, False), (10_000, False), (100_000, True)])
def test_long_runs_earn_compiling(steps, compiles):
    choice = earns_compiling(steps, 0.004, 40.0, "float32")
    assert choice.value == compiles
    assert f"{steps:,} steps of 4 ms are left" in choice.reason


def test_compiling_again_takes_less_time():
    assert compile_seconds(40, cached=True) < compile_seconds(20, cached=False) < compile_seconds(40, cached=False)


class Runs(PerformanceOptions):
    """Options whose construction of a step fails for those in `broken`, and is noted in `tried`."""

    broken: ClassVar[set[str]] = set()
    tried: ClassVar[list[tuple[bool, bool]]] = []
    chosen: ClassVar[list[int]] = []

    def build(self, step, loader, checked=False):
        self.tried.append((self.cuda_graph, self.compile))
        if self.compile:
            self.chosen.append(torch.backends.cudnn.benchmark_limit)
        for key in self.broken:
            if getattr(self, key):
                step.tally.in_graph = True
                raise RuntimeError(f"{key} is impossible\nbecause of the test")
        return step


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Return a step and its loader, on the CPU."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(Runs, "tried", [])
    monkeypatch.setattr(Runs, "chosen", [])
    strategy = Single(Runtime("cpu"))
    strategy.setup(simple_cnn(1, 8, 10))
    optimizer = torch.optim.SGD(strategy.param_groups(), lr=0.1, momentum=0.9, fused=True)
    step = Step(strategy, optimizer, make_scheduler(optimizer, constant, 1, 5, 0))
    options = {"dp_rank": 0, "dp_size": 1, "device": torch.device("cpu"), "mean": [0.5], "std": [0.2], "shuffle": True}
    return step, DeviceLoader(Synthetic(48, 8, 1, 8, 10).load().train, LoaderOptions(24, **options))


def test_failed_capture_falls_back_to_eager_mode(parts, monkeypatch):
    monkeypatch.setattr(Runs, "broken", {"cuda_graph"})
    step, loader = parts
    assert build_step(Runs(True, False, True), choose("auto", LEFT, GPU), step, loader, 100) is step
    assert Runs.tried == [(True, False), (False, False)]
    assert not step.tally.in_graph


def test_failed_capture_is_an_error_if_the_config_requires_it(parts, monkeypatch):
    monkeypatch.setattr(Runs, "broken", {"cuda_graph"})
    with pytest.raises(RuntimeError, match="cuda_graph is impossible"):
        build_step(Runs(True, False, True), choose("auto", LEFT | {"cuda_graph": True}, GPU), *parts, 100)


def test_step_is_compiled_if_the_run_is_long_and_the_next_time_sooner(parts, monkeypatch):
    monkeypatch.setattr("ddp_lab.training.speed.attempts.time_eager", lambda step, loader: 0.001)
    for steps, tried in [
        (40_000, [(False, False)]),
        (1_000_000, [(False, False), (False, True)]),
        (40_000, [(False, True)]),  # the duration of a step is remembered, too
        (100, [(False, False)]),
    ]:
        Runs.tried.clear()
        build_step(Runs(False, "auto", True), choose("auto", LEFT, GPU), *parts, steps)
        assert Runs.tried == tried
    assert Runs.chosen == [0, LIMITED], "40 s are too short for all of cuDNN's kernels"


@pytest.mark.parametrize(("answer", "tried"), [("yes", [(False, True)]), ("no", [])])
def test_rank_0_decides_whether_to_compile(answer, tried, parts, monkeypatch):
    """Ranks with other layers, as those of a pipeline, may find something else, and would wait for each other forever."""
    monkeypatch.setattr("ddp_lab.training.speed.attempts.time_eager", lambda step, loader: 0.001)
    runtime = parts[0].strategy.runtime
    monkeypatch.setattr(runtime, "agree", lambda key, decide: answer if key == "compile" else decide())
    build_step(Runs(False, "auto", True), choose("auto", LEFT, GPU), *parts, 1 if answer == "yes" else 10**9)
    assert Runs.tried == [(False, False), *tried]


def test_unreadable_mark_is_ignored(parts, monkeypatch):
    monkeypatch.setattr("ddp_lab.training.speed.attempts.time_eager", lambda step, loader: 0.001)
    mark = mark_of(*parts)
    mark.parent.mkdir(parents=True)
    mark.write_text("")
    build_step(Runs(False, "auto", True), choose("auto", LEFT, GPU), *parts, 10)
    assert Runs.tried == [(False, False)]


def test_failed_compilation_falls_back_to_eager_mode(parts, monkeypatch, caplog):
    monkeypatch.setattr(Runs, "broken", {"compile"})
    step, loader = parts
    weights = [parameter.clone() for parameter in step.strategy.parameters()]
    with torch.compiler.set_stance("default"), caplog.at_level("INFO", "ddp_lab"):
        assert build_step(Runs(False, "auto", True), choose("auto", LEFT, GPU), step, loader, 10**9) is step
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    assert Runs.tried == [(False, False), (False, True), (False, False)]
    assert caplog.messages[-1] == "compile: off, because the step cannot be compiled: compile is impossible"
    assert all(group["fused"] for group in step.optimizer.param_groups)
    assert all(map(torch.equal, step.strategy.parameters(), weights)), "timing the step has changed the weights"


def on_gpu(strategy, monkeypatch):
    """Return a strategy as it is on a GPU with 10 GiB of free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    strategy.device = torch.device("cuda")
    return strategy


def values(choices: dict[str, Choice]) -> dict:
    return {key: choice.value for key, choice in choices.items()}


@pytest.mark.parametrize(("device", "overrides"), [("cpu", []), ("mps", []), ("cuda", ["speed=off"])])
def test_nothing_is_chosen_without_a_gpu_or_with_speed_off_and_no_fact_is_asked_for(device, overrides, monkeypatch):
    """The values are those of the keys before `speed` existed, also for a job that is planned for GPUs that are not here."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", None)
    strategy = Single(Runtime("cpu"))
    strategy.device, strategy.runtime = torch.device(device), None
    choices = find_choices(config(*overrides), strategy, Synthetic(8, 8, 1, 28, 10).load(), lenet(1, 28, 10, None))
    assert choices == {key: Choice(value, automatic=False) for key, value in OFF.items()}


@pytest.mark.parametrize(
    ("device", "cuda_graph", "compile", "sgd", "adamw"),
    [
        ("cpu", False, False, None, None),
        ("cuda", False, False, None, True),
        ("cuda", False, True, None, True),
        ("cuda", True, False, True, True),
        ("cuda", True, True, None, None),
        ("cuda", True, "tuned", None, None),
    ],
)
def test_only_speed_auto_fuses_an_optimizer_that_was_not_fused_before(device, cuda_graph, compile, sgd, adamw):
    weight, options = torch.nn.Parameter(torch.zeros(1)), PerformanceOptions(cuda_graph, compile, False)
    for make, fused in ((torch.optim.SGD, sgd), (torch.optim.AdamW, adamw)):
        optimizer = options.settle(make([weight], lr=0.1), torch.device(device))
        assert optimizer.param_groups[0]["fused"] is fused
    adagrad = options.settle(torch.optim.Adagrad([weight], lr=0.1), torch.device(device), fused=True)
    assert adagrad.param_groups[0]["fused"] is None, "torch's fused kernel is for CPUs only"


def test_captured_and_compiled_step_fuses_the_optimizer_of_a_large_model():
    weight, options = torch.nn.Parameter(torch.zeros(1)), PerformanceOptions(True, True, False)
    for elements, fused in ((FEW - 1, None), (FEW, True)):
        optimizer = options.settle(torch.optim.SGD([weight], lr=0.1), torch.device("cuda"), elements=elements)
        assert optimizer.param_groups[0]["fused"] is fused
    large = torch.nn.Parameter(torch.empty(FEW, device="meta"))
    assert options.settle(torch.optim.SGD([large], lr=0.1), torch.device("cuda")).param_groups[0]["fused"]
    adagrad = options.settle(torch.optim.Adagrad([weight], lr=0.1), torch.device("cuda"), elements=FEW)
    assert adagrad.param_groups[0]["fused"] is None, "it has no fused kernel, so it is compiled"


@pytest.mark.parametrize(("fused", "compiled"), [(None, 2), (True, 0)])
def test_optimizer_is_compiled_after_its_first_step_unless_it_is_fused(fused, compiled, parts, monkeypatch):
    """The first step creates the state, which would be compiled for itself."""
    step, _ = parts
    step.optimizer.param_groups[0]["fused"] = fused
    calls = []
    monkeypatch.setattr(torch, "compile", lambda function: lambda: (calls.append(function), function()))
    step.compile(lambda function: function)
    for taken in range(3):
        before = [parameter.detach().clone() for parameter in step.strategy.parameters()]
        for parameter in step.strategy.parameters():
            parameter.grad = torch.ones_like(parameter)
        step._optimize()
        assert not any(map(torch.equal, before, step.strategy.parameters()))
        assert len(calls) == (taken if compiled else 0)


def test_speed_off_logs_nothing(parts, monkeypatch, caplog):
    with caplog.at_level("INFO", "ddp_lab"):
        assert build_step(Runs(False, False, False), choose("off", LEFT, GPU), *parts, 10**9) is parts[0]
    assert Runs.tried == [(False, False)]
    assert caplog.messages == []


@pytest.mark.parametrize("compile", [True, "tuned", "auto"])
def test_only_kernels_of_speed_auto_are_kept(compile, monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with PerformanceOptions(False, compile, False).switches(Runtime("cpu")):
        assert (VARIABLE in os.environ) == (compile == "auto")


def test_speed_auto_chooses_all_options_on_a_gpu(monkeypatch):
    strategy, dataset = on_gpu(Single(Runtime("cpu")), monkeypatch), Synthetic(8, 8, 1, 28, 10).load()
    assert values(find_choices(config(), strategy, dataset, lenet(1, 28, 10, None))) == FASTEST
    rprop = config("speed=auto", "optimizer._target_=torch.optim.Rprop")
    linear = find_choices(rprop, strategy, dataset, torch.nn.Linear(1, 1))
    assert linear["channels_last"] == Choice(False, "the model has no convolutions")
    assert linear["optimizer.fused"] == Choice(None, "torch.optim.Rprop has no fused kernel for GPUs")


def test_refusals_of_a_strategy_are_the_reasons(monkeypatch):
    cfg, dataset = config("speed=auto", "strategy=pipeline"), Synthetic(8, 8, 1, 28, 10).load()
    strategy = on_gpu(build(cfg.strategy, Runtime("cpu")), monkeypatch)
    choices = find_choices(cfg, strategy, dataset, lenet(1, 28, 10, None))
    assert values(choices)["data.loader"] == "device"
    for key in ("cuda_graph", "channels_last"):
        assert choices[key] == Choice(False, "not supported by strategy=pipeline")
    assert choices["optimizer.fused"] == Choice(None, "not with strategy=pipeline, except for AdamW")


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("fsdp", ""),
        ("fsdp strategy.offload=true", "with strategy.offload=true the optimizer's step is on the CPU"),
        (
            "mesh strategy.checkpoint_activations=block",
            "strategy.checkpoint_activations=block keeps the state of the random generators on the host",
        ),
        ("mesh", ""),
        ("tp", ""),
    ],
)
def test_steps_of_sharded_models_are_captured_unless_the_host_is_part_of_them(strategy, reason, monkeypatch):
    cfg = config("speed=auto", *f"strategy={strategy}".split())
    chosen = on_gpu(build(cfg.strategy, Runtime("cpu")), monkeypatch)
    choices = find_choices(cfg, chosen, Synthetic(8, 8, 1, 28, 10).load(), lenet(1, 28, 10, None))
    assert choices["cuda_graph"] == Choice(not reason, reason)
    assert choices["optimizer.fused"].value is True


def test_communication_hooks_are_not_captured(monkeypatch):
    cfg, dataset = config("speed=auto", "strategy=ddp", "strategy.comm_hook=powersgd"), Synthetic(8, 8, 1, 28, 10).load()
    strategy = on_gpu(build(cfg.strategy, Runtime("cpu")), monkeypatch)
    choices = find_choices(cfg, strategy, dataset, lenet(1, 28, 10, None))
    assert choices["cuda_graph"] == Choice(False, "strategy.comm_hook=powersgd was never captured")


def test_free_memory_is_the_smallest_of_all_ranks():
    runtime = SimpleNamespace(
        free_memory=lambda: 7, collect=lambda key, value: ["9", value, "8"], agree=lambda key, decide: decide()
    )
    assert free_bytes(runtime) == 7


def test_kernels_are_kept_in_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with kept_kernels():
        assert os.environ[VARIABLE] == str(tmp_path / ".cache" / "ddp_lab" / "compiled") == str(cache_folder())
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, default_cache_dir())  # as torch does with the first optimizer of a process
    with kept_kernels():
        assert os.environ[VARIABLE] == str(tmp_path / ".cache" / "ddp_lab" / "compiled")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    with kept_kernels():
        assert os.environ[VARIABLE] == str(tmp_path / "mine")
    assert os.environ[VARIABLE] == str(tmp_path / "mine")


def test_compiler_is_not_started_unless_the_step_is_compiled(monkeypatch):
    monkeypatch.setattr(torch.compiler, "reset", None)
    with PerformanceOptions(False, "auto", False).switches(Runtime("cpu")):
        torch.compiler.set_stance("eager_on_recompile")  # as `build_step` does if it compiles
        assert not torch.backends.cudnn.benchmark
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_cudnn_chooses_no_kernels_after_the_step_is_built():
    before = torch.backends.cudnn.benchmark
    with PerformanceOptions(False, True, False).switches(Runtime("cpu")):
        assert torch.backends.cudnn.benchmark
        end_choosing()
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before


def test_momentum_of_another_memory_format_gets_the_strides_of_the_weights(parts):
    step, loader = parts
    step(next(iter(loader)))
    weight = next(parameter for parameter in step.strategy.parameters() if parameter.dim() == 4)
    state = step.optimizer.state[weight]
    before = state["momentum_buffer"].clone()
    assert before.abs().max() > 0
    state["momentum_buffer"] = before.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    match_strides(step.optimizer)
    assert state["momentum_buffer"].stride() == weight.stride()
    assert torch.equal(state["momentum_buffer"], before)


@pytest.mark.parametrize(("overrides", "batch"), [([], 8 * 24), (["cuda_graph=true"], 24), (["speed=off"], 24)])
def test_evaluation_takes_larger_batches_if_speed_auto_captures_the_step(overrides, batch, monkeypatch):
    cfg = config("data=synthetic", "data.dataset.channels=1", "batch_size=24", *overrides)
    runtime = Runtime("cpu")
    strategy, dataset = build(cfg.strategy, runtime), load_dataset(cfg, runtime)
    plan = make_plan(cfg, strategy, dataset)
    choices = find_choices(cfg, on_gpu(strategy, monkeypatch), dataset, lenet(1, 28, 10, None))
    strategy.device = torch.device("cpu")
    job = SimpleNamespace(strategy=strategy, dataset=dataset, plan=plan, choices=choices)
    assert [loader.batch_size for loader in make_loaders(cfg, job).values()] == [24, batch]
