"""Performance options keep the results, and are disabled with a reason if not supported. On GPUs: test_gpu.py."""

import shutil
import threading
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from cases import CLIPPED, RECIPE, assert_equal, ddp, scratch
from launches import SMALL, launch, main_in_world, read_metrics
from omegaconf import OmegaConf
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm
from torch.nn.utils.prune import l1_unstructured
from training import OFF, Case, run_cases
from worlds import run_world

from ddp_lab.config.build import build
from ddp_lab.data.datasets import Synthetic
from ddp_lab.data.device_loader import DeviceLoader
from ddp_lab.data.sharding import Shard
from ddp_lab.models.chain import Chain
from ddp_lab.models.resnet import resnet18
from ddp_lab.models.simple_cnn import simple_cnn
from ddp_lab.resilience.fault_injection import Fault
from ddp_lab.strategies.all_reduce import flatten, unflatten
from ddp_lab.strategies.batch_norm import SyncBatchNorm
from ddp_lab.strategies.buckets import Buckets, MiB
from ddp_lab.strategies.performance import PerformanceSupport
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.single import Single
from ddp_lab.training.schedule import constant, make_scheduler
from ddp_lab.training.speed import cuda_graph, kernel_choice, options
from ddp_lab.training.speed.batch_norm import ShiftedBatchNorm, shift_batch_norms
from ddp_lab.training.speed.convolution import PaddedConv2d, as_product, pad_convolutions
from ddp_lab.training.speed.cuda_graph import CHANNELS_LAST, COMBO, GraphStep, compile_step
from ddp_lab.training.speed.kernel_choice import NewThread
from ddp_lab.training.speed.options import PerformanceOptions
from ddp_lab.training.speed.switches import compiling, cudnn_benchmark, cudnn_guesses
from ddp_lab.training.step import Step
from ddp_lab.training.tally import LONGEST, Tally
from ddp_lab.world.runtime import Runtime

COMPILED = PerformanceOptions(cuda_graph=False, compile=True, channels_last=True)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")


@needs_compiler
@pytest.mark.parametrize(
    ("case", "size"),
    [
        (ddp(ema=0.8, **RECIPE), 2),
        pytest.param(Case(Single), 1, marks=pytest.mark.slow),
        pytest.param(scratch("bucketed"), 2, marks=pytest.mark.slow),
    ],
    ids=["ddp", "single", "scratch"],
)
def test_compiled_steps_produce_the_same_weights(case, size):
    compiled = Case(**{**vars(case), "performance": COMPILED})
    outcome = run_world(size, run_cases, [compiled], timeout=240)[0][compiled]
    expected = run_world(1, run_cases, [case.reference()])[0][case.reference()]
    assert_equal(outcome, expected)


BATCH_NORM = {"model": "narrow", "init": "default", "dtype": torch.float64, "lr": 0.1, "performance": COMPILED}


def run_replaced(cases: list[Case]) -> dict:
    """Run compiled cases with the layers that a GPU would have."""
    plain = PerformanceSupport.compile

    def compile_replaced(strategy, fuse):
        pad_convolutions(strategy.module)
        shift_batch_norms(strategy.module)
        assert {PaddedConv2d, ShiftedBatchNorm} <= {type(layer) for layer in strategy.module.modules()}
        return plain(strategy, fuse)

    PerformanceSupport.compile = compile_replaced
    return run_cases(cases)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "size"),
    [(Case(Single, accumulate=3, **CLIPPED, **BATCH_NORM), 1), (ddp(accumulate=2, **CLIPPED, **BATCH_NORM), 2)],
    ids=["single", "ddp"],
)
def test_replaced_layers_produce_the_same_weights(case, size):
    plain = replace(case, performance=OFF)
    outcome = run_world(size, run_replaced, [case], timeout=240)[0][case]
    assert_equal(outcome, run_world(size, run_cases, [plain])[0][plain], tolerance=1e-12)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("python train.py cuda_graph=true", "cuda_graph=true is disabled: no GPU is available"),
        ("python train.py strategy=dp compile=tuned", "compile=tuned is disabled: not supported by strategy=dp"),
        (
            "torchrun --standalone --nproc_per_node=2 train.py strategy=pipeline channels_last=true",
            "channels_last=true is disabled: not supported by strategy=pipeline",
        ),
    ],
)
def test_unsupported_performance_option_is_disabled_and_logged(line, message, tmp_path):
    code, output = launch(line, *SMALL, "epochs=1", f"runs_dir={tmp_path}")
    assert code == 0, output
    assert output.count(message) == 1, output


ELSEWHERE = [scratch("flat"), scratch("bucketed"), ddp(view=False), ddp(accumulate=3, max_grad_norm=0.5)]


def train_elsewhere(cases: list[Case]) -> dict:
    """Take every step in another thread, because a step is captured in the thread with the fastest kernels."""
    torch.cuda.current_stream, torch.cuda.set_stream = lambda: None, lambda stream: None  # CPUs have no streams
    thread, compute, threads = NewThread(), Step.compute, set()

    def elsewhere(step: Step, batch) -> None:
        threads.add(threading.get_ident())
        compute(step, batch)

    Step.compute = lambda step, batch: thread(partial(elsewhere, step, batch))
    outcomes = run_cases(cases)
    assert len(threads - {threading.get_ident()}) == 1
    return outcomes


def test_step_in_another_thread_produces_the_same_weights():
    one, other = run_world(2, train_elsewhere, ELSEWHERE)
    for case in ELSEWHERE:
        assert_equal(one[case], run_world(1, run_cases, [case.reference()])[0][case.reference()])
        assert one[case].digest == other[case].digest


class StandIn:
    """A stand-in for CUDA graphs, whose replays take `milliseconds[index of the graph]`, as other work takes `work`.

    Attributes:
        replays: number of replays of all graphs.
        cleared: how often cuBLAS's workspaces were freed.
    """

    milliseconds: ClassVar[list[float]]
    work: ClassVar[float]
    made: ClassVar[list["StandIn"]]
    replays: ClassVar[int]
    cleared: ClassVar[int]

    def __init__(self):
        self.thread, self.cleared_before = threading.get_ident(), StandIn.cleared
        self.made.append(self)

    def replay(self) -> None:
        StandIn.replays += 1

    @classmethod
    def clear(cls) -> None:
        cls.cleared += 1

    @classmethod
    def duration(cls, work, times: int = 1) -> float:
        for _ in range(times):
            work()
        return cls.milliseconds[cls.made.index(work.__self__)] * times


@pytest.fixture
def graphs(monkeypatch):
    """Let `fastest_thread` work without a GPU."""
    for name, value in {"made": [], "replays": 0, "milliseconds": [], "cleared": 0}.items():
        monkeypatch.setattr(StandIn, name, value, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", StandIn.clear, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandIn)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(kernel_choice, "capturing", lambda graph, pool: nullcontext())
    monkeypatch.setattr(kernel_choice, "duration", StandIn.duration)
    return StandIn


@pytest.mark.parametrize("best", [0, 2, kernel_choice.MOST_THREADS - 1])
def test_fastest_thread_keeps_the_thread_with_the_fastest_kernels(best, graphs):
    count, before = kernel_choice.MOST_THREADS, threading.active_count()
    graphs.milliseconds = [0.5 if place == best else 1.0 for place in range(count)]
    worked = []
    thread = kernel_choice.fastest_thread(lambda: worked.append(threading.get_ident()), seconds=60)
    recorded = [graph.thread for graph in graphs.made]
    assert recorded == list(dict.fromkeys(recorded))
    assert len(recorded) == count
    assert threading.get_ident() not in recorded, "it may have the first guesses of an eager step"
    first, *others = recorded
    assert worked == [first, first, *others, *others], "in each thread before the capture, and for it"
    assert thread(threading.get_ident) == recorded[best]
    assert threading.active_count() == before + 1
    # The first thread works and captures; then all others work, and then all others capture.
    assert [graph.cleared_before for graph in graphs.made] == [1, *range(count + 1, 2 * count)]
    assert graphs.cleared == 2 * count, "cuBLAS's workspaces are freed after each thread's work and after its capture"
    thread.close()


def test_kernels_of_long_work_are_chosen_once(graphs):
    graphs.milliseconds = [kernel_choice.LONGEST + 1]
    worked, before = [], threading.active_count()
    thread = kernel_choice.fastest_thread(lambda: worked.append(threading.get_ident()), seconds=60)
    assert set(worked) == {thread(threading.get_ident)} != {threading.get_ident()}
    assert threading.active_count() == before + 1
    assert graphs.replays == 2, "the only candidate is not compared with itself"
    thread.close()


def test_no_thread_is_started_after_the_time_for_choosing(graphs):
    graphs.milliseconds = [0.5] * kernel_choice.MOST_THREADS
    kernel_choice.fastest_thread(lambda: None, seconds=1e-9).close()
    assert len(graphs.made) == 1


def test_new_thread_has_the_callers_stream_and_context_and_runs_backward_passes_itself(graphs, monkeypatch):
    streams, context = [], ContextVar("context", default="default")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "side")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    context.set("callers")
    thread = NewThread()
    assert thread(context.get) == "callers"
    assert streams == ["side"]
    assert torch._C._is_multithreading_enabled()
    assert not thread(torch._C._is_multithreading_enabled)
    thread.close()


@pytest.mark.parametrize(
    ("collective", "choosing", "guessing", "expected"),
    [
        (False, None, True, [("warm-up", True), ("capture", "here")]),
        (False, 0.0, True, [("warm-up", False), ("choose", 0.0), ("capture", "elsewhere")]),
        (False, 2.0, True, [("warm-up", False), ("choose", 2.0), ("capture", "elsewhere")]),
        (False, 2.0, False, [("warm-up", True), ("choose", 2.0), ("capture", "elsewhere")]),
        (True, 2.0, True, [("warm-up", True), ("capture", "here")]),
    ],
    ids=["not compiled", "one choice", "several choices", "tuned", "collectives"],
)
def test_compiled_step_is_captured_in_a_thread_that_chooses_kernels(collective, choosing, guessing, expected, monkeypatch):
    events, places = [], ["here"]

    def elsewhere(task):
        places.append("elsewhere")
        return task()

    def choose(work, seconds):
        events.append(("choose", seconds))
        return elsewhere

    monkeypatch.setattr(cuda_graph, "warm_up", lambda *_: events.append(("warm-up", torch.backends.cudnn.benchmark)))
    monkeypatch.setattr(cuda_graph, "unchanged", lambda step: nullcontext())
    monkeypatch.setattr(cuda_graph, "compiling", nullcontext)
    monkeypatch.setattr(cuda_graph, "fastest_thread", choose)
    monkeypatch.setattr(GraphStep, "_capture", lambda *_: events.append(("capture", places[-1])))
    monkeypatch.setattr(GraphStep, "_first_batch", lambda *_: None)
    strategy = SimpleNamespace(device=torch.device("cpu"), collective_passes=collective)
    step = SimpleNamespace(strategy=strategy, tally=SimpleNamespace(), optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]))
    loader = SimpleNamespace(set_epoch=lambda epoch: None, turns=lambda: [1])
    with cudnn_benchmark():
        GraphStep(step, loader).capture(choosing, "warming up", guessing=guessing)
    assert events == expected


def test_choice_in_no_time_is_left_to_the_first_use(graphs):
    worked = []
    thread = kernel_choice.fastest_thread(lambda: worked.append(0), seconds=0)
    assert thread(threading.get_ident) != threading.get_ident()
    assert worked == graphs.made == []
    thread.close()


@pytest.mark.parametrize(("compiled", "guessing"), [(True, True), ("tuned", False)])
def test_tuned_convolutions_are_compared_with_kernels_that_cudnn_has_timed(compiled, guessing, monkeypatch):
    given = []
    captured = SimpleNamespace(capture=lambda *_, **named: given.append(named))
    monkeypatch.setattr(options, "compile_step", lambda *_: "the complete model")
    monkeypatch.setattr(options, "GraphStep", lambda step, loader: captured)
    assert PerformanceOptions(True, compiled, False).build(SimpleNamespace(), object.__new__(DeviceLoader)) is captured
    assert given == [{"guessing": guessing}]


@pytest.mark.parametrize("milliseconds", [0.01, 1.0, 15.0])
def test_comparison_of_graphs_ends_in_time(milliseconds, graphs):
    graphs.milliseconds = [milliseconds] * 4
    kernel_choice.quickest([graphs() for _ in range(4)])
    assert graphs.replays >= 4 * (1 + 5)
    assert graphs.replays * milliseconds <= kernel_choice.COMPARING + 4 * milliseconds


@pytest.mark.parametrize(
    ("conv", "written_as"),
    [
        (nn.Conv2d(1, 20, 3), "linear"),
        (nn.Conv2d(1, 64, (3, 5), padding=(1, 2), bias=False), "linear"),
        (nn.Conv2d(1, 8, 3, stride=(2, 1)), "conv2d"),
        (nn.Conv2d(1, 8, 3, dilation=2), "conv2d"),
        (nn.Conv2d(20, 50, 5), "conv2d"),
        (nn.Conv2d(3, 64, 3, stride=2, padding=1, dilation=2), "conv2d"),
    ],
    ids=str,
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 1e-12), (True, 0.02)], ids=["float64", "bf16"])
def test_padded_convolution_keeps_values_gradients_and_strides(conv, written_as, memory_format, autocast, tolerance):
    """The convolution is tested compiled and in eager mode, where it is torch's own."""
    torch._dynamo.reset()
    dtype = torch.float32 if autocast else torch.float64
    model = nn.Sequential(deepcopy(conv).to(dtype, memory_format=memory_format))
    images = torch.randn(2, conv.in_channels, 9, 11, dtype=dtype).contiguous(memory_format=memory_format)
    weights = []

    def results(forward) -> dict[str, torch.Tensor]:
        inputs = images.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = forward(inputs)
        names = ["inputs", *dict(model.named_parameters())]
        gradients = torch.autograd.grad(outputs.double().square().sum(), [inputs, *model.parameters()])
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


def test_convolution_of_an_empty_batch_is_empty():
    assert as_product(torch.ones(0, 1, 5, 6), torch.ones(20, 1, 3, 3), None, (0, 0)).shape == (0, 20, 3, 4)


@pytest.mark.parametrize(
    ("change", "layer"),
    [
        (pad_convolutions, nn.Conv2d(8, 16, 3)),
        (pad_convolutions, nn.Conv2d(20, 50, 3, groups=5)),
        (pad_convolutions, nn.Conv2d(3, 4, 3, padding="same")),
        (pad_convolutions, nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")),
        (pad_convolutions, nn.LazyConv2d(4, 3)),
        (shift_batch_norms, nn.BatchNorm2d(3, affine=False)),
        (shift_batch_norms, nn.BatchNorm2d(3, momentum=None)),
        (shift_batch_norms, nn.BatchNorm2d(3, track_running_stats=False)),
        (shift_batch_norms, nn.BatchNorm1d(3)),
        (shift_batch_norms, SyncBatchNorm(3)),
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else value.__name__,
)
def test_unsupported_layers_keep_their_class(change, layer):
    before = type(layer)
    change(nn.Sequential(layer))
    assert type(layer) is before


def test_pad_convolutions_keeps_parameters_and_their_names():
    model = nn.Sequential(nn.Conv2d(1, 20, 3), nn.Sequential(nn.Conv2d(20, 50, 5, bias=False)), nn.Flatten()).eval()
    before, drawn = dict(model.named_parameters()), torch.get_rng_state()
    pad_convolutions(model)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [type(layer) for layer in (model[0], model[1][0])] == [PaddedConv2d, PaddedConv2d]
    assert not any(layer.training for layer in model.modules())
    after = dict(model.named_parameters())
    assert list(after) == list(before) == list(model.state_dict())
    assert all(after[name] is parameter for name, parameter in before.items())


def normalised(model: nn.Module, images: torch.Tensor, compiled: bool = False) -> dict[str, torch.Tensor]:
    """Return outputs, gradients and buffers of a copy of `model` after one pass."""
    torch._dynamo.reset()
    model, inputs = deepcopy(model), images.clone().requires_grad_()
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with torch.autocast("cpu", torch.bfloat16, enabled=images.dtype == torch.bfloat16):
        outputs = forward(inputs)
    targets = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).view_as(outputs)
    gradients = torch.autograd.grad((outputs * targets).sum(), [inputs, *model.parameters()])
    names = ["inputs", *dict(model.named_parameters())]
    return {"outputs": outputs, **dict(zip(names, gradients, strict=True)), **dict(model.named_buffers())}


@pytest.mark.parametrize("mean", [0.0, 3.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_batch_norm_rounds_like_torchs(dtype, mean):
    """Errors against float64, in units of rounding. Unshifted sums would have no digit right at a mean of 1000."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(6, momentum=0.3)).to(torch.float64)
    nn.init.normal_(model[0].weight)
    nn.init.normal_(model[0].bias)
    images = (mean + torch.randn(16, 6, 9, 9)).to(dtype).contiguous(memory_format=torch.channels_last)
    exact = normalised(model, images.double())
    model.to(torch.promote_types(dtype, torch.float32))
    theirs = normalised(model, images, compiled=True)
    shift_batch_norms(model)
    assert isinstance(model[0], ShiftedBatchNorm)
    ours = normalised(model, images, compiled=True)
    assert ours["outputs"].dtype == theirs["outputs"].dtype
    assert ours["outputs"].stride() == theirs["outputs"].stride()
    for name, wanted in exact.items():
        scale = wanted.double().norm() * torch.finfo(torch.promote_types(ours[name].dtype, torch.bfloat16)).eps
        torchs, shifted = (((got[name].double() - wanted).norm() / scale).item() for got in (theirs, ours))
        assert shifted <= 1.5 * torchs + 32, name


def test_batch_norm_in_eager_mode_is_torchs():
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.BatchNorm2d(3)), torch.randn(4, 3, 5, 5)
    for training in (True, False):
        model.train(training)
        expected = normalised(model, images)
        replaced = deepcopy(model)
        shift_batch_norms(replaced)
        got = normalised(replaced, images)
        assert all(torch.equal(got[name], wanted) for name, wanted in expected.items())
        if not training:
            assert all(torch.equal(value, expected[name]) for name, value in normalised(replaced, images, True).items())


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 3, 1, 1), "Expected more than 1 value per channel when training"), ((2, 3, 4), "expected 4D input")],
)
def test_compiled_batch_norm_refuses_what_torchs_refuses(shape, message):
    model = nn.Sequential(nn.BatchNorm2d(3))
    shift_batch_norms(model)
    with pytest.raises(Exception, match=message):
        normalised(model, torch.randn(shape), compiled=True)


def test_compiled_batch_norm_of_an_empty_batch_keeps_the_statistics():
    model = nn.Sequential(nn.BatchNorm2d(3))
    images = torch.randn(0, 3, 4, 4)
    expected = normalised(model, images)
    shift_batch_norms(model)
    got = normalised(model, images, compiled=True)
    assert all(torch.equal(got[name], wanted) for name, wanted in expected.items())


def test_shift_batch_norms_keeps_parameters_and_buffers():
    model = resnet18(1, 28, 10, None).eval()
    before = dict(model.state_dict(keep_vars=True))
    shift_batch_norms(model)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert sum(isinstance(layer, ShiftedBatchNorm) for layer in model.modules()) == 20
    assert not any(layer.training for layer in model.modules())


@pytest.mark.parametrize("change", [pad_convolutions, shift_batch_norms])
def test_replaced_layers_keep_hooks_names_and_containers(change):
    """A stage of a pipeline, a list of the user's model and a second name refer to the same layer."""
    layers, called = [nn.Conv2d(1, 20, 3), nn.BatchNorm2d(20)], []
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, outputs: called.append(type(layer)))
    model, stage = nn.Sequential(*layers, nn.Sequential(*layers)), nn.Sequential(*layers)
    change(model)
    assert list(model)[:2] == list(model[2]) == list(stage) == layers
    stage(torch.randn(2, 1, 5, 5))
    assert called == [type(layer) for layer in layers]
    assert {PaddedConv2d, ShiftedBatchNorm} & set(called)
    model.eval()
    assert not any(layer.training for layer in stage.children())


@pytest.mark.parametrize("wrapped", [weight_norm, spectral_norm, partial(l1_unstructured, name="weight", amount=0.5)])
def test_pad_convolutions_leaves_computed_weights(wrapped):
    model, images = nn.Sequential(wrapped(nn.Conv2d(1, 20, 3)), nn.ReLU()).eval(), torch.randn(2, 1, 5, 5)
    names, expected = list(model.state_dict()), model(images)
    pad_convolutions(model)
    assert list(model.state_dict()) == names
    assert torch.equal(model(images), expected)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_compile_step_sets_inductor_options_and_replaces_layers_on_cuda(device):
    fuses, model = [], nn.Sequential(nn.Conv2d(1, 20, 3), nn.BatchNorm2d(20))
    strategy = SimpleNamespace(device=torch.device(device), module=model, compile=fuses.append)
    compile_step(SimpleNamespace(strategy=strategy), None, tuned=False, channels_last=True)
    assert fuses[0].keywords["options"] == COMBO | CHANNELS_LAST
    assert [isinstance(model[0], PaddedConv2d), isinstance(model[1], ShiftedBatchNorm)] == [device == "cuda"] * 2


@pytest.mark.parametrize(
    "performance", [COMPILED, PerformanceOptions(False, "tuned", False), PerformanceOptions(False, False, True)]
)
def test_switches_are_set_for_training_and_restored(performance):
    def switches() -> tuple:
        return torch.backends.cudnn.benchmark, torch._dynamo.config.recompile_limit, torch._dynamo.eval_frame._stance.stance

    before = switches()
    with performance.switches(Runtime("cpu")):
        assert switches() == ((True, 64, "eager_on_recompile") if performance.compile else before)
        with compiling():
            assert switches() == ((True, 64, "default") if performance.compile else before)
        with cudnn_guesses():
            assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.benchmark == bool(performance.compile)
    assert switches() == before == (False, 8, "default")


def test_cuda_graph_runs_on_a_side_stream_until_the_switches_are_left(monkeypatch):
    events, streams = [], ["default"]

    @contextmanager
    def current(stream):
        streams.append(stream)
        yield
        streams.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "stream", current)
    default = SimpleNamespace(wait_stream=events.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default if streams[-1] == "default" else None)
    with PerformanceOptions(True, False, False).switches(Runtime("cpu")):
        assert streams[-1] == "side"
    assert streams == ["default"]
    assert events == ["side"], "the default stream must wait for the training"


@needs_compiler
def test_compiled_function_runs_in_a_new_thread(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    layer, inputs = torch.nn.Linear(3, 2), torch.ones(4, 3)
    forward = torch.compile(layer, dynamic=False, options=CHANNELS_LAST)

    def gradient() -> torch.Tensor:
        layer.zero_grad()
        forward(inputs).square().sum().backward()
        return layer.weight.grad

    expected, thread = gradient(), NewThread()
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(thread(gradient), expected)
    thread.close()


@pytest.mark.parametrize("hook", ["bf16", pytest.param("powersgd", marks=pytest.mark.slow)])
def test_comm_hook_changes_the_result_slightly(hook, tmp_path):
    """PowerSGD starts after ten of the twenty steps."""
    overrides = [*SMALL, "strategy=ddp", "epochs=4", "model=lenet", f"runs_dir={tmp_path}"]
    for name in ("none", hook):
        run_world(2, main_in_world, *overrides, f"name={name}", f"strategy.comm_hook={name}")
    exact, rounded = (read_metrics(tmp_path / name)[-1]["train_loss"] for name in ("none", hook))
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=0.3)


@pytest.mark.parametrize(("size", "ranks"), [(101, 3), (96, 4), (2, 4)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shard_indices_equal_those_of_distributed_sampler(size, ranks, shuffle):
    for rank in range(ranks):
        shard = Shard(range(size), ranks, rank, shuffle=shuffle, seed=3)
        shard.set_epoch(5)
        assert shard.indices().tolist() == list(shard)
        shard.start = 1
        assert shard.indices().tolist() == list(shard)


@pytest.mark.parametrize("augmented", [False, True])
def test_look_ahead_draws_the_next_epoch(augmented, monkeypatch):
    expected = taken(augmented)
    expected.set_epoch(4)
    expected.deal()
    loader = taken(augmented)
    loader.set_epoch(3, 48)
    loader.look_ahead()
    loader.set_epoch(4)
    for name in ("randperm", "randint"):
        monkeypatch.setattr(torch, name, None)
    loader.deal()
    for turn in loader.turns():
        assert all(map(torch.equal, loader.take(turn.size), expected.take(turn.size)))


def taken(augmented: bool) -> DeviceLoader:
    data = Synthetic(101, 8, 1, 8, 10).load().train
    options = {"dp_rank": 1, "dp_size": 2, "device": torch.device("cpu"), "mean": [0.5], "std": [0.2], "shuffle": True}
    return DeviceLoader(data, 24, num_workers=0, **options, **({"crop_padding": 2, "flip": True} if augmented else {}))


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("samples", [0, 48])
def test_take_returns_the_batches_of_iterating(samples, augmented):
    """A graph reads the same batches as the eager loop, also from the middle of an epoch."""
    loader = taken(augmented)
    loader.set_epoch(3, samples)
    eager = list(loader)
    loader.deal()
    turns = list(loader.turns())
    assert len(turns) == len(eager) == 5 - samples // 24
    for turn, batch in zip(turns, eager, strict=True):
        inputs, targets = loader.take(turn.size)
        assert turn.count == batch.count
        assert torch.equal(inputs, batch.inputs)
        assert torch.equal(targets, batch.targets)


LAYOUTS = [
    torch.randn(6, 3, 5, 5).to(memory_format=torch.channels_last),
    torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last),
    torch.randn(5, 6, 7, 8).permute(3, 2, 1, 0),
    torch.randn(9, 4).t(),
    torch.randn(300, 300),  # more than one chunk
    torch.tensor(3.0),
]


def test_unflatten_returns_views_of_the_flattened_gradients():
    together = flatten(LAYOUTS)
    back = unflatten(together, LAYOUTS)
    assert together.shape == (sum(tensor.numel() for tensor in LAYOUTS),)
    for tensor, view in zip(LAYOUTS, back, strict=True):
        assert torch.equal(tensor, view)
        assert view.untyped_storage().data_ptr() == together.untyped_storage().data_ptr()
    assert back[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("sizes", "starts"),
    [
        ((1,), ["stem", *(f"layer{i}_{j}" for i in (1, 2, 3, 4) for j in (0, 1)), "head"]),
        ((10 * MiB,), ["stem", "layer2_0", "layer4_0", "layer4_1"]),
        ((25 * MiB,), ["stem", "layer4_0"]),
        ((25 * MiB, MiB), ["stem", "layer2_0", "layer4_0"]),
        ((1000 * MiB,), ["stem"]),
        ((1000 * MiB, MiB), ["stem", "layer2_0"]),
        ((1000 * MiB, 50 * MiB), ["stem"]),
    ],
)
def test_chain_pieces_are_cut_at_the_bucket_size(sizes, starts):
    chain = resnet18(1, 28, 10, None)
    names = {block: name for name, block in chain.named_children()}
    pieces = chain.pieces(*sizes)
    assert [names[piece[0]] for piece in pieces] == starts
    assert [block for piece in pieces for block in piece] == list(chain)
    assert all(sum(parameter.nbytes for parameter in piece.parameters()) >= min(sizes) for piece in pieces[1:])


def test_chain_executed_in_pieces_keeps_its_result_and_names():
    chain = Chain((1, 4, 4), flat=nn.Flatten(), fc1=nn.Linear(16, 8), fc2=nn.Linear(8, 4))
    images = torch.randn(3, 1, 4, 4)
    expected, names, calls = chain(images), list(chain.state_dict()), []

    def counted(piece: nn.Module):
        return lambda inputs: calls.append(piece) or piece(inputs)

    pieces = chain.pieces(1)
    chain.execute_in(map(counted, pieces))
    assert torch.equal(chain(images), expected)
    assert calls == pieces
    assert list(chain.state_dict()) == names


def bytes_of_buckets() -> list[int]:
    with Runtime("cpu", timeout=30) as runtime:
        runtime.open_group()
        strategy = Scratch(runtime, "bucketed", 50, "local")
        strategy.setup(resnet18(1, 28, 10, None))
        return [sum(parameter.nbytes for parameter in bucket.parameters) for bucket in strategy.buckets.buckets]


def test_bucket_sent_last_is_small():
    last, rest = run_world(1, bytes_of_buckets)[0]
    assert last <= MiB < 40 * MiB < rest


def test_blocks_without_parameters_have_no_bucket():
    chain = Chain((1, 4, 4), flat=torch.nn.Flatten(), fc=torch.nn.Linear(16, 4))
    groups = [list(piece.parameters()) for piece in chain.pieces(1)]
    assert [len(group) for group in groups] == [0, 2]
    assert [bucket.parameters for bucket in Buckets(groups).buckets] == [groups[1]]


def test_partial_of_a_config_is_functools_partial():
    """Hydra's own partial looks up its policy at every call, which takes 0.1 ms or more."""
    shape = build(OmegaConf.create({"_target_": "ddp_lab.training.schedule.cosine", "_partial_": True}))
    assert type(shape) is partial
    assert shape(0.5) == pytest.approx(0.5)


@needs_compiler
def test_take_is_compiled_once_for_all_epochs():
    """The options are those of `compile_step`. Each epoch writes its sample order to the same memory."""
    loader = taken(augmented=True)
    loader.compile(partial(torch.compile, dynamic=False, fullgraph=True))
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        loader.deal()
        for turn, batch in zip(loader.turns(), list(loader), strict=True):
            with torch.compiler.set_stance("default" if epoch == 1 else "fail_on_recompile"):
                inputs, targets = loader.take(turn.size)
            assert torch.allclose(
                inputs, batch.inputs, rtol=0, atol=1e-6
            )  # the compiler may fuse a multiplication and an addition
            assert torch.equal(targets, batch.targets)


def test_fault_injects_nan_into_a_step_that_gathers_its_batches(tmp_path):
    """No graph is captured in this test, so all turns are computed in eager mode."""
    runtime, loader = Runtime("cpu"), taken(augmented=False)
    strategy = Single(runtime)
    strategy.setup(simple_cnn(1, 8, 10))
    optimizer = torch.optim.SGD(strategy.param_groups(), lr=0.1)
    graph = GraphStep(Step(strategy, optimizer, make_scheduler(optimizer, constant, 1, 5, 0)), loader)
    graph.tally.begin(0)
    fault = Fault(graph, "nan@rank=0,step=3", 0, tmp_path, None, 0)
    loader.set_epoch(1)
    first_bad = []
    for turn in fault.batches(loader):
        fault(turn)
        first_bad.append(graph.tally.first_bad(fault.taken).item())
    assert first_bad[:3] == [float("inf"), float("inf"), 3]


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("start", [0, 7, LONGEST - 3])
def test_tally_returns_the_first_step_that_is_not_finite(start, in_graph):
    tally = Tally(torch.device("cpu"))
    tally.in_graph = in_graph
    tally.begin(start)
    for step in range(1, 11):
        tally.add(torch.tensor([float("nan") if step in (5, 8) else 1.0, 1.0, 1.0], dtype=torch.float64))
    assert tally.first_bad(start + 10).item() == start + 5
    tally.add(torch.ones(3, dtype=torch.float64))
    assert tally.first_bad(start + 11).item() == float("inf")
