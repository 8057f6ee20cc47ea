"""Performance options keep the results, and are disabled with a reason if not supported. On GPUs: test_gpu.py."""

import shutil
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import RECIPE, assert_equal, ddp, scratch
from launches import SMALL, launch, main_in_world, read_metrics
from omegaconf import OmegaConf
from torch import nn
from torch.nn.utils import spectral_norm, weight_norm
from torch.nn.utils.prune import l1_unstructured
from training import Case, run_cases
from worlds import run_world

from ddp_lab.config.build import build
from ddp_lab.data.datasets import Synthetic
from ddp_lab.data.loader import DeviceLoader, LoaderOptions
from ddp_lab.models.chain import Chain
from ddp_lab.models.resnet import resnet18
from ddp_lab.models.simple_cnn import simple_cnn
from ddp_lab.resilience.fault_injection import Fault
from ddp_lab.strategies.all_reduce import flatten, unflatten
from ddp_lab.strategies.buckets import Buckets, MiB
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.single import Single
from ddp_lab.training.schedule import constant, make_scheduler
from ddp_lab.training.speed.convolution import PaddedConv2d, as_product, pad_convolutions
from ddp_lab.training.speed.cuda_graph import CHANNELS_LAST, COMBO, GraphStep, compile_step
from ddp_lab.training.speed.options import PerformanceOptions
from ddp_lab.training.speed.switches import compiling
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


def test_padded_convolutions_keep_hooks_names_and_containers():
    """A stage of a pipeline, a list of the user's model and a second name refer to the same layer."""
    layers, called = [nn.Conv2d(1, 20, 3), nn.BatchNorm2d(20)], []
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, outputs: called.append(type(layer)))
    model, stage = nn.Sequential(*layers, nn.Sequential(*layers)), nn.Sequential(*layers)
    pad_convolutions(model)
    assert list(model)[:2] == list(model[2]) == list(stage) == layers
    stage(torch.randn(2, 1, 5, 5))
    assert called == [type(layer) for layer in layers]
    assert PaddedConv2d in called
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
def test_compile_step_sets_inductor_options_and_pads_convolutions_on_cuda(device):
    fuses, model = [], nn.Sequential(nn.Conv2d(1, 20, 3), nn.BatchNorm2d(20))
    strategy = SimpleNamespace(device=torch.device(device), module=model, compile=fuses.append)
    compile_step(SimpleNamespace(strategy=strategy), None, tuned=False, channels_last=True)
    assert fuses[0].keywords["options"] == COMBO | CHANNELS_LAST
    assert isinstance(model[0], PaddedConv2d) == (device == "cuda")


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


@pytest.mark.parametrize("hook", ["bf16", pytest.param("powersgd", marks=pytest.mark.slow)])
def test_comm_hook_changes_the_result_slightly(hook, tmp_path):
    """PowerSGD starts after ten of the twenty steps."""
    overrides = [*SMALL, "strategy=ddp", "epochs=4", "model=lenet", f"runs_dir={tmp_path}"]
    for name in ("none", hook):
        run_world(2, main_in_world, *overrides, f"name={name}", f"strategy.comm_hook={name}")
    exact, rounded = (read_metrics(tmp_path / name)[-1]["train_loss"] for name in ("none", hook))
    assert exact != rounded
    assert rounded == pytest.approx(exact, rel=0.3)


def taken(augmented: bool) -> DeviceLoader:
    data = Synthetic(101, 8, 1, 8, 10).load().train
    options = {"dp_rank": 1, "dp_size": 2, "device": torch.device("cpu"), "mean": [0.5], "std": [0.2], "shuffle": True}
    return DeviceLoader(data, LoaderOptions(24, **options, **({"crop_padding": 2, "flip": True} if augmented else {})))


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
def test_next_batch_is_compiled_once_for_all_epochs():
    """The options are those of `compile_step`. Each epoch writes its sample order to the same memory."""
    loader = taken(augmented=True)
    loader.compile(partial(torch.compile, dynamic=False, fullgraph=True))
    for epoch in (1, 2):
        loader.set_epoch(epoch)
        loader.start_epoch()
        expected = list(loader)
        loader.start_epoch()
        for size, batch in zip(loader.batch_sizes(), expected, strict=True):
            with torch.compiler.set_stance("default" if epoch == 1 else "fail_on_recompile"):
                inputs, targets, _ = loader.next_batch(size)
            assert torch.allclose(
                inputs, batch.inputs, rtol=0, atol=1e-6
            )  # the compiler may fuse a multiplication and an addition
            assert torch.equal(targets, batch.targets)


def test_fault_injects_nan_into_a_step_that_gathers_its_batches(tmp_path):
    """No graph is captured in this test, so all batches are computed in eager mode."""
    runtime, loader = Runtime("cpu"), taken(augmented=False)
    strategy = Single(runtime)
    strategy.setup(simple_cnn(1, 8, 10))
    optimizer = torch.optim.SGD(strategy.param_groups(), lr=0.1)
    graph = GraphStep(Step(strategy, optimizer, make_scheduler(optimizer, constant, 1, 5, 0)), loader)
    graph.tally.begin(0)
    fault = Fault(graph, "nan@rank=0,step=3", 0, tmp_path, None, 0)
    loader.set_epoch(1)
    first_bad = []
    for size in fault.batches(loader):
        fault(size)
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
