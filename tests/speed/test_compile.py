"""A compiled step computes what an eager one does.

Also with padded convolutions and by block, where equal blocks share one compilation. On GPUs:
test_gpu.py.
"""

import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import training
from case import reference_of
from cases import assert_equal
from configs import config
from slow_rows import extra
from small_networks import make_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import Outcome, make_step, run_cases
from worlds import once, run_world

from ddp_lab.config.build import call_target
from ddp_lab.run.speed import unsupported_options
from ddp_lab.speed.compile import CHANNELS_LAST, COMBO, compiling, repeats
from ddp_lab.speed.convolution import PaddedConv2d, pad_convolutions
from ddp_lab.speed.fastest import build
from ddp_lab.strategies.single import Single
from ddp_lab.training.performance import PerformanceOptions
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime


@pytest.mark.slow  # aot_eager takes the place of Inductor in the tests by block
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_steps_compiled_by_inductor_produce_the_same_weights():
    case = "ddp ema=0.8 recipe compile=true channels_last=true"
    outcome = run_world(2, run_cases, [case], timeout=240)[0][case]
    alone = reference_of(case)
    assert_equal(outcome, run_world(1, run_cases, [alone])[0][alone])


def train(step, loader, epochs: int) -> list[float]:
    """Return the summed losses of each epoch."""
    losses = []
    for epoch in range(1, epochs + 1):
        step.running_sums.begin(0)
        loader.set_epoch(epoch)
        for batch in step.batches(loader):
            step(batch)
        losses.append(step.running_sums.totals[0].item())
    return losses


def noting(benchmarked: set[bool], compute):
    """Return `Step.compute` that notes whether cuDNN times its kernels."""

    def noted(step: Step, batch) -> None:
        benchmarked.add(torch.backends.cudnn.benchmark)
        compute(step, batch)

    return noted


def test_step_is_compiled_once_in_steps_whose_effects_are_undone(monkeypatch, caplog):
    """The partial last batch runs in eager mode.

    aot_eager compiles in a tenth of Inductor's time.
    """
    caplog.set_level("INFO", "ddp_lab")
    counter = CompileCounterWithBackend("aot_eager")
    compile = torch.compile
    benchmarked = set()
    monkeypatch.setattr(Step, "compute", noting(benchmarked, Step.compute))
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, dynamic, options: compile(function, dynamic=dynamic, backend=counter),
    )
    expected = train(*make_step("ema=0.9"), 2)
    benchmarked.clear()
    step, loader = make_step("ema=0.9")
    options = PerformanceOptions(compile=True)
    with options.backend_flags(Runtime("cpu")):
        assert build(options, step, loader) is step
        assert benchmarked == {True}, "cuDNN times its kernels while the step is compiled"
        graphs = counter.frame_count
        assert graphs == 2, "of the model and of the loss"
        assert train(step, loader, 2) == pytest.approx(expected, rel=1e-6)
        assert counter.frame_count == graphs
    begun, ended = caplog.messages
    assert begun == "compiling the training step: the complete model ..."
    assert ended.startswith("compiling the training step: the complete model: took ")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_compiling_sets_inductor_options_and_pads_convolutions_on_gpus(device):
    compiled_with = []
    model = nn.Sequential(nn.Conv2d(1, 20, 3))
    strategy = Single(Runtime("cpu"))
    strategy.setup(model)
    strategy.device = torch.device(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function, **options: compiled_with.append(options))
        with compiling(SimpleNamespace(strategy=strategy), None, channels_last=True):
            pass
    torch.compiler.set_stance("default")
    assert compiled_with == [{"dynamic": False, "options": COMBO | CHANNELS_LAST}] * 2
    assert isinstance(model[0], PaddedConv2d) == (device == "cuda")


def test_batches_are_gathered_by_one_compiled_function_in_all_epochs():
    """Each epoch writes its sample order to the same memory."""
    _, loader = make_step()
    expected = {epoch: (loader.set_epoch(epoch), list(loader))[1] for epoch in (1, 2)}
    loader.compile(partial(torch.compile, dynamic=False, fullgraph=True, backend="aot_eager"))
    for epoch, batches in expected.items():
        loader.set_epoch(epoch)
        with torch.compiler.set_stance("default" if epoch == 1 else "fail_on_recompile"):
            for batch, wanted in zip(loader, batches, strict=True):
                assert torch.equal(batch.inputs, wanted.inputs)
                assert torch.equal(batch.targets, wanted.targets)


@pytest.mark.parametrize(
    ("conv", "written_as"),
    [
        (nn.Conv2d(1, 20, 3), "linear"),
        (nn.Conv2d(1, 64, (3, 5), padding=(1, 2), bias=False), "linear"),
        (nn.Conv2d(1, 8, 3, stride=(2, 1)), "conv2d"),
        (nn.Conv2d(1, 8, 3, dilation=2), "conv2d"),
        (nn.Conv2d(3, 64, 3, stride=2, padding=1, dilation=2), "conv2d"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [
        pytest.param(torch.float64, torch.contiguous_format, marks=pytest.mark.slow),
        (torch.float64, torch.channels_last),
        pytest.param(torch.float32, torch.channels_last, marks=pytest.mark.slow),
    ],
    ids=["float64", "float64-last", "bf16-last"],
)
def test_padded_convolution_keeps_values_gradients_and_strides(
    conv, written_as, dtype, memory_format
):
    """The convolution is tested compiled and in eager mode, where it is torch's own."""
    torch._dynamo.reset()
    autocast = dtype is torch.float32
    tolerance = 0.02 if autocast else 1e-12
    model = nn.Sequential(deepcopy(conv).to(dtype, memory_format=memory_format))
    images = torch.randn(2, conv.in_channels, 9, 11, dtype=dtype).contiguous(
        memory_format=memory_format
    )
    weights = []

    def results(forward) -> dict[str, torch.Tensor]:
        inputs = images.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = forward(inputs)
        names = ["inputs", *dict(model.named_parameters())]
        gradients = torch.autograd.grad(
            outputs.double().square().sum(), [inputs, *model.parameters()]
        )
        return {"outputs": outputs, **dict(zip(names, gradients, strict=True))}

    def look(graph, inputs):
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target.__name__ in ("linear", "conv2d"):
                weights.append((node.target.__name__, node.args[1].meta["example_value"].shape[:2]))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    expected = results(model)
    pad_convolutions(model)
    for got in results(model), results(torch.compile(model, backend=look, fullgraph=True)):
        assert got["outputs"].dtype == expected["outputs"].dtype
        assert got["0.weight"].stride() == expected["0.weight"].stride()
        for name, wanted in expected.items():
            assert (got[name] - wanted).norm() <= tolerance * wanted.norm(), name
    ((name, shape),) = weights
    assert name == written_as
    assert all(size % 8 == 0 for size in shape)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 16, 3),
        nn.Conv2d(20, 50, 3, groups=5),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
        nn.LazyConv2d(4, 3),
    ],
    ids=str,
)
def test_unsupported_convolutions_keep_their_class(layer):
    before = type(layer)
    pad_convolutions(nn.Sequential(layer))
    assert type(layer) is before


def test_padded_convolutions_keep_parameters_hooks_and_containers():
    """A stage of a pipeline, a list of the user's model and a second name name the same layer."""
    layers = [nn.Conv2d(1, 20, 3), nn.BatchNorm2d(20)]
    called = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, outputs: called.append(type(layer)))
    model = nn.Sequential(*layers, nn.Sequential(*layers)).eval()
    stage = nn.Sequential(*layers)
    before = dict(model.named_parameters())
    drawn = torch.get_rng_state()
    pad_convolutions(model)
    assert torch.equal(torch.get_rng_state(), drawn)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert list(model)[:2] == list(model[2]) == list(stage) == layers
    assert not any(layer.training for layer in layers)
    stage(torch.randn(2, 1, 5, 5))
    assert called == [PaddedConv2d, nn.BatchNorm2d]


def test_sharded_convolutions_are_not_replaced():
    """fully_shard gathers the parameters into the module, so it must not be replaced."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = nn.Sequential(nn.Conv2d(1, 20, 3), nn.BatchNorm2d(20))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    pad_convolutions(model)
    dist.destroy_process_group()
    assert [type(layer) for layer in model] == [nn.Conv2d, nn.BatchNorm2d]


@pytest.mark.parametrize(
    ("options", "model", "reason"),
    [
        ("fsdp", None, "strategy=fsdp compiles a model in "),
        ("pipeline strategy.schedule=interleavedzerobubble", "vit", "cuts the "),
    ],
)
def test_compile_is_not_supported_with_a_reason(options, model, reason, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = call_target(config(*f"strategy={options}".split()).strategy, Runtime("cpu"))
    complete = make_model(model, 0) if model else nn.Linear(3, 3)
    made.partition(complete, 8)
    assert repeats(complete) == bool(model), "only a chain of equal blocks is compiled by block"
    assert reason in unsupported_options(made, complete)["compile"]


# The number of graphs on rank 0: of the embedding, of both blocks, of the head and of the loss, as
# far as the rank has them. The loss of a pipeline is on its last rank. Parameters of a mesh along
# tp that are not divided, and their layouts, divide a graph; there are as many for four blocks.
CASES = {
    "fsdp checkpoint_activations=block short clipped": 4,
    "ddp channels_last=true recipe ema=0.8": 2,  # of the model and of the loss
    "mesh tp=2 sequence_parallel=true short": 8,
    "scratch algorithm=bucketed accumulate=3 vit clipped": 4,
}
EXTRA = {
    "tp tp=2 vit clipped": 4,
    "ddp_pipeline pp=1 vit": 4,
    "mesh pp=2 checkpoint_activations=block short": 2,
}


def run_compiled(cases: list[str]) -> dict[str, tuple[Outcome, int]]:
    """Return each case's outcome, and how many graphs were compiled.

    aot_eager compiles in a tenth of Inductor's time.
    """
    counter = CompileCounterWithBackend("aot_eager")
    graphs = {}
    run_case = training.run_case

    def counted(runtime: Runtime, case: str) -> Outcome:
        counter.clear()
        outcome = run_case(runtime, case)
        graphs[case] = counter.frame_count
        return outcome

    training.run_case = counted
    torch.compile = partial(count_graphs, torch.compile, counter)
    return {case: (outcome, graphs[case]) for case, outcome in run_cases(cases).items()}


def count_graphs(
    compile: Callable,
    counter: CompileCounterWithBackend,
    model: Callable,
    dynamic: bool,
    options: dict,
):
    return compile(model, dynamic=dynamic, backend=counter)


@once
def world(is_extra: bool) -> tuple[dict, dict]:
    """Return the outcomes and numbers of graphs on rank 0, and the outcomes of the references."""
    cases = [f"{case} compile=true" for case in (EXTRA if is_extra else CASES)]
    references = list(dict.fromkeys(map(reference_of, cases)))
    return run_world(2, run_compiled, cases, timeout=500)[0], run_world(1, run_cases, references)[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *extra(EXTRA)])
def test_compiled_strategies_equal_single(case):
    compiled, references = world(case in EXTRA)
    outcome, graphs = compiled[f"{case} compile=true"]
    assert_equal(outcome, references[reference_of(case)])
    assert graphs == (CASES | EXTRA)[case]
