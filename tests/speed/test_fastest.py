"""The fastest step that works: what is tried in which order, and what happens if it fails.

On GPUs: test_gpu.py.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from training import make_step

from ddp_lab.data.loader import Loader
from ddp_lab.models.vit import vit
from ddp_lab.speed import fastest
from ddp_lab.speed.fastest import (
    build_step,
    compile_pays_off,
    layers_to_compile,
    measure,
)
from ddp_lab.training.optimizer import FEW, configure_optimizer
from ddp_lab.training.performance import PerformanceOptions
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime
from scripts.bench_models import MODELS

CHOSEN = PerformanceOptions(
    cuda_graph=True,
    channels_last=True,
    fused=True,
    compile="auto",
    reasons=dict.fromkeys(["cuda_graph", "fused", "compile"], ""),
)
# pairs of cuda_graph and compile
EAGER = (False, False)
GRAPH = (True, False)
COMPILED = (False, True)
BOTH = (True, True)


class Attempts:
    """A stand-in for `fastest.build` that fails for the options in `broken`.

    Attributes:
        tried: the options.
    """

    def __init__(self):
        self.broken: set[str] = set()
        self.tried: list[tuple[bool, bool]] = []

    def __call__(self, options: PerformanceOptions, step: Step, loader: Loader) -> Step:
        self.tried.append((options.cuda_graph, options.compile))
        if options.compile:
            assert step.optimizer.param_groups[0]["fused"] is (
                True if not options.cuda_graph else None
            )
        for name in self.broken:
            if getattr(options, name):
                raise RuntimeError(f"{name} is impossible\nbecause of the test")
        return step


@pytest.fixture
def attempts(monkeypatch) -> Attempts:
    """Let `build_step` work without a GPU, with steps of 1 ms."""
    made = Attempts()
    monkeypatch.setattr(fastest, "build", made)
    monkeypatch.setattr(fastest, "measure", lambda step, built, loader: 0.001)
    return made


@pytest.fixture(autouse=True)
def compiler_is_reset():
    with PerformanceOptions().backend_flags(Runtime("cpu")):
        yield


LONG = 1_000_000


@pytest.mark.parametrize(
    ("steps", "broken", "tried", "logged"),
    [
        (
            40_000,
            set(),
            [GRAPH],
            "compile         off     40,000 steps of 1 ms are left, 40 s: compiling 4 different "
            "layers pays",
        ),
        (
            LONG,
            set(),
            [GRAPH, BOTH],
            "compile         on      1,000,000 steps of 1 ms are left, 1000 s: compiling 4 "
            "different",
        ),
        (
            LONG,
            {"cuda_graph"},
            [GRAPH, EAGER, COMPILED],
            "off     the step cannot be captured: cuda_graph is impossible",
        ),
        (
            LONG,
            {"compile"},
            [GRAPH, BOTH, GRAPH],
            "off     the step cannot be compiled: compile is impossible",
        ),
        (
            LONG,
            {"cuda_graph", "compile"},
            [GRAPH, EAGER, COMPILED, EAGER],
            "off     the step cannot be compiled",
        ),
    ],
    ids=["short", "long", "graph fails", "compile fails", "both fail"],
)
def test_step_is_compiled_if_the_run_is_long_and_what_fails_is_given_up(
    steps, broken, tried, logged, attempts, caplog
):
    caplog.set_level("INFO", "ddp_lab")
    attempts.broken = broken
    step, loader = make_step("optimizer.fused=true")
    assert build_step(CHOSEN, step, loader, steps) is step
    assert attempts.tried == tried
    assert logged in caplog.text
    if "compile" in broken:
        assert torch._dynamo.eval_frame._stance.stance == "force_eager", (
            "parts of the step are compiled"
        )
        assert step.optimizer.param_groups[0]["fused"]


@pytest.mark.parametrize("name", ["cuda_graph", "compile"])
def test_what_the_config_requires_must_not_fail(name, attempts, caplog):
    caplog.set_level("INFO", "ddp_lab")
    required = PerformanceOptions(**{name: True})
    assert build_step(required, *make_step("optimizer.fused=true"), 10)
    assert attempts.tried == [(required.cuda_graph, required.compile)]
    assert caplog.messages == []
    attempts.broken = {name}
    with pytest.raises(RuntimeError, match=f"{name} is impossible"):
        build_step(required, *make_step("optimizer.fused=true"), 10)


@pytest.mark.parametrize("answer", [True, False])
def test_rank_0_decides_whether_to_compile(answer, attempts, monkeypatch):
    """Ranks with other layers may decide otherwise, and would wait forever.

    Such ranks are those of a pipeline.
    """
    step, loader = make_step("optimizer.fused=true")
    runtime = step.strategy.runtime
    monkeypatch.setattr(
        runtime,
        "broadcast_from_rank0",
        lambda key, decide: answer if key == "compile" else decide(),
    )
    build_step(CHOSEN, step, loader, 1 if answer else 10**9)
    assert attempts.tried == [GRAPH, BOTH][: 1 + answer]


class OfModel:
    """What `compile_pays_off` reads of a step with a model on the meta device, without memory."""

    def __init__(self, model):
        self.strategy = SimpleNamespace(
            module=model,
            compiled_by_block=False,
            runtime=SimpleNamespace(broadcast_from_rank0=lambda key, decide: decide()),
        )


@pytest.mark.parametrize(
    ("model", "step_seconds", "steps", "compiles"),
    [
        ("vit_l16", 0.078, 1_000, True),  # 78 s are left; compiling 26 blocks takes 6 to 20 s
        ("vit_l16", 0.078, 100, False),
        ("resnet18", 0.0028, 20 * 938, False),  # 20 epochs of Fashion-MNIST, batch 64, one H200
        ("resnet18", 0.0028, 60 * 938, True),
        ("resnet18", 0.0028, math.inf, True),
    ],
)
def test_compiling_pays_by_the_time_left_and_the_kinds_of_blocks(
    model, step_seconds, steps, compiles
):
    with torch.device("meta"):
        made = MODELS[model].make()
    pays, why = compile_pays_off(OfModel(made), step_seconds, steps)
    assert pays is compiles, why


def test_equal_blocks_count_once():
    keys = {"width": 16, "heads": 2, "mlp_ratio": 2.0, "patch_size": 7}
    keys |= {"pool": "mean", "drop_path": 0.0}
    made = {depth: vit(1, 28, 10, depth=depth, **keys) for depth in (4, 12)}
    counts = {depth: layers_to_compile(OfModel(model).strategy) for depth, model in made.items()}
    assert counts[4] == counts[12] < 20


def test_measuring_a_step_changes_nothing():
    step, loader = make_step("ema=0.9")
    tensors = [
        *step.strategy.module.parameters(),
        *step.ema.averages.values(),
        *step.running_sums.state,
    ]
    before = [tensor.clone() for tensor in tensors]
    drawn = torch.get_rng_state()
    assert 0 < measure(step, step, loader) < 10
    assert all(map(torch.equal, before, tensors))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not any(state["momentum_buffer"].any() for state in step.optimizer.state.values())


@pytest.mark.parametrize(
    ("device", "cuda_graph", "compile", "fused", "sgd", "adamw"),
    [
        ("cpu", False, False, None, None, None),
        ("cuda", False, False, None, None, True),
        ("cuda", False, False, True, True, True),
        ("cuda", True, False, None, True, True),
        ("cuda", True, True, None, None, None),
        ("cuda", True, "auto", None, True, True),
    ],
)
def test_optimizer_is_fused_as_the_options_require(device, cuda_graph, compile, fused, sgd, adamw):
    how = torch.device(device), fused, cuda_graph, compile is True
    for make, expected in (
        (torch.optim.SGD, sgd),
        (torch.optim.AdamW, adamw),
        (torch.optim.Adagrad, None),
    ):
        optimizer = configure_optimizer(make([torch.nn.Parameter(torch.zeros(1))], lr=0.1), *how)
        assert optimizer.param_groups[0]["fused"] is expected, (
            "torch's fused Adagrad is for CPUs only"
        )
        assert optimizer.param_groups[0].get("capturable", cuda_graph) is cuda_graph
    if cuda_graph:
        large = torch.nn.Parameter(torch.empty(FEW, device="meta"))
        optimizer = configure_optimizer(torch.optim.SGD([large], lr=0.1), *how)
        assert optimizer.param_groups[0]["fused"], "a compiled one would be hardly faster"
