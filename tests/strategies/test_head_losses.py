"""The losses of a language model that its last layer computes in chunks of rows.

The equivalence matrix has the strategies that support it.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from case import config_of, reference_of
from in_bf16 import CHUNKS, SETTINGS, assert_chunks_round_no_more, run_in_bf16
from launches import main_in_world, only_run, read_metrics, refusal_in_world
from slow_rows import slow_but
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset
from training import run_cases
from worlds import run_world

from ddp_lab import Lab
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.models.gpt import gpt
from ddp_lab.run.build import build
from ddp_lab.speed.compile import compile_passes
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.checkpointing import RecomputedBlock
from ddp_lab.strategies.head_losses import HeadLosses
from ddp_lab.tasks import Tokens
from ddp_lab.tasks.base import measure
from ddp_lab.tasks.chunked_loss import add_product, adds_in_float32
from ddp_lab.world.runtime import Runtime

VOCABULARY = 53
CONTEXT = 8
SAMPLES = 6
IGNORED = -100


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return returned


def model_of(dtype: torch.dtype = torch.float64, tied: bool = True) -> nn.Module:
    torch.manual_seed(1)
    model = gpt(VOCABULARY, CONTEXT, depth=1, width=16, heads=2, tied=tied).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # so that the logits differ
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets, of which the first two samples are ignored, and some others."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:2] = IGNORED
    targets[3, 4:] = IGNORED
    return tokens[:, :-1], targets


def gradients(
    model: nn.Module,
    chunks: int,
    num_valid: int = SAMPLES,
    divisor: float | torch.Tensor = 4.0,
    half: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss, the sums, and the gradients of all parameters by name."""
    inputs, targets = batch()
    task = Tokens(head_chunks=chunks)
    with torch.autocast("cpu", half) if half else nullcontext():
        if chunks > 1:
            losses = HeadLosses(model, task)
            loss, sums = losses.measure(partial(model, inputs), targets, num_valid, divisor)
        else:
            loss, sums = measure(task, model(inputs), targets, num_valid, divisor)
    loss.backward()
    return loss, sums, {name: weight.grad for name, weight in model.named_parameters()}


# rows: 48, of which chunks of 1, 7 and 16 rows are no samples
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_valid", [SAMPLES, 5, 2, 0])
@pytest.mark.parametrize("chunks", [3, 7, 48, 100])
def test_chunks_have_loss_and_gradients_of_all_logits(chunks, num_valid, tied):
    loss, sums, expected = gradients(model_of(tied=tied), 1, num_valid)
    chunked_loss, chunked_sums, chunked = gradients(model_of(tied=tied), chunks, num_valid)
    assert chunked_loss.item() == pytest.approx(loss.item(), abs=1e-12)
    assert chunked_sums.tolist() == pytest.approx(sums.tolist(), abs=1e-12)
    assert chunked.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(chunked[name], gradient, rtol=0, atol=1e-12), name
    assert (num_valid > 2) == any(gradient.any() for gradient in expected.values())


def test_gradient_follows_a_factor_that_was_not_announced():
    """A loop may multiply the sum by something else than it has said."""
    inputs, targets = batch()
    model = model_of()
    hidden = model.embed(inputs)
    head = model.head.linear
    task = Tokens(head_chunks=3)
    total, _ = task.losses_of_head(head, hidden, targets, factor=torch.tensor(0.25))
    by_factor = torch.autograd.grad(3 * total, [head.weight, model.embed.positions])
    logits = head(model.embed(inputs))
    expected_total, _ = task.loss_sum(logits, targets)
    expected = torch.autograd.grad(3 * expected_total, [head.weight, model.embed.positions])
    for gradient, of_logits in zip(by_factor, expected, strict=True):
        assert torch.allclose(gradient, of_logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", ["head.linear.weight", "all but the head"])
def test_frozen_parameters_get_no_gradient(frozen):
    def freeze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            is_head = name == "head.linear.weight"
            parameter.requires_grad = is_head if frozen == "all but the head" else not is_head
        return model

    *_, expected = gradients(freeze(model_of(tied=False)), 1)
    *_, chunked = gradients(freeze(model_of(tied=False)), 5)
    for name, gradient in expected.items():
        if gradient is None:
            assert chunked[name] is None
        else:
            assert torch.allclose(chunked[name], gradient, rtol=0, atol=1e-12)
    assert None in expected.values()


def error_of(computed: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Return the largest relative error of a gradient; that of the keys' bias is exactly 0."""
    errors = [
        ((computed[name].double() - gradient).norm() / gradient.norm()).item()
        for name, gradient in exact.items()
        if "k.bias" not in name
    ]
    return max(errors)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_with_all_logits(half):
    *_, exact = gradients(model_of(), 1)
    whole_loss, _, whole = gradients(model_of(torch.float32), 1, half=half)
    loss, _, chunked = gradients(model_of(torch.float32), 5, half=half)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(whole_loss.item(), rel=1e-6)
    error = error_of(whole, exact)
    assert 0 < error < 50 * torch.finfo(half).eps
    assert 0 < error_of(chunked, exact) < 1.1 * error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "size"),
    [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.extra), ("fsdp", 2)],
)
def test_training_in_bf16_is_as_exact_as_with_all_logits(strategy, size):
    whole = [f"{strategy} {settings}" for settings in SETTINGS]
    chunked = [f"{line} {CHUNKS}" for line in whole]
    outcomes = run_world(size, run_in_bf16, [*whole, *chunked], timeout=120)[0]
    references = [reference_of(line) for line in whole]
    exact = run_world(1, run_cases, references, timeout=120)[0]
    for line, chunked_line, reference in zip(whole, chunked, references, strict=True):
        assert_chunks_round_no_more(outcomes[chunked_line], outcomes[line], exact[reference])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("supported", [True, False])
def test_product_of_half_precision_is_added_to_float32(supported, half, monkeypatch):
    """Where torch adds it in one call, here in float64, and where it does not."""

    def addmm(total, left, right, *, out_dtype, out):
        if not supported:
            raise RuntimeError("self and mat2 must have the same dtype")
        assert out_dtype == out.dtype
        return out.copy_(total.double() + left.double() @ right.double())

    monkeypatch.setattr(torch, "addmm", addmm)
    adds_in_float32.cache_clear()
    left = torch.full((3, 301), 1.0, dtype=half)
    right = torch.full((301, 2), 7.0, dtype=half)
    total = torch.full((3, 2), 0.25)
    add_product(total, left, right)
    adds_in_float32.cache_clear()
    rounded = torch.tensor(7.0 * 301).to(half).item()
    assert rounded != 7 * 301
    assert torch.equal(total, torch.full((3, 2), (7 * 301 if supported else rounded) + 0.25))


def test_small_gradients_in_fp16_contain_the_scale_of_the_loss_before_they_are_rounded():
    """Probabilities of 4e-8 are subnormal numbers in float16, of one digit."""
    head = nn.Linear(1, 40, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(0, 18, 40)[:, None])
    hidden = torch.ones(1, 4, 1, dtype=torch.float16)
    targets = torch.full((1, 4), 39)
    task = Tokens(head_chunks=2)
    scale = torch.tensor(2.0**12)
    total, _ = task.losses_of_head(head, hidden, targets, factor=scale)
    (gradient,) = torch.autograd.grad(total * scale, head.weight)
    logits = (hidden.double() @ head.weight.detach().double().t()).requires_grad_()
    loss, _ = task.loss_sum(logits, targets)
    expected = torch.autograd.grad(loss, logits)[0].sum((0, 1))[:, None]
    assert expected.abs().min() < 1e-7
    error = (gradient.double() / scale - expected).abs() / expected.abs()
    assert error.max() < 0.02  # most of it is that of the logits in float16


def test_chunks_do_not_make_the_host_wait():
    """A fake tensor has no value that a host could wait for, so reading one is an error."""
    with FakeTensorMode():
        inputs = torch.empty(SAMPLES, CONTEXT, dtype=torch.int64)
        targets = torch.empty(SAMPLES, CONTEXT, dtype=torch.int64)
        model = gpt(VOCABULARY, CONTEXT, depth=1, width=16, heads=2)
        losses = HeadLosses(model, Tokens(head_chunks=5))
        divisor = torch.tensor(4.0)
        loss, sums = losses.measure(partial(model, inputs), targets, SAMPLES - 1, divisor)
        loss.backward()
    assert loss.shape == ()
    assert sums.shape == (2,)


def test_evaluation_and_calls_without_targets_return_logits():
    model = model_of()
    inputs, _ = batch()
    expected = model(inputs)
    gradients(model, 5)
    assert torch.equal(model(inputs), expected)
    assert list(model.state_dict()) == list(model_of().state_dict())


def largest_in_training(*overrides: str) -> int:
    """Run train.py, and return the elements of the largest tensor of its training steps."""
    largest = Largest()
    add_gradient = Strategy.add_gradient

    def noting(self, *arguments):
        with largest:
            return add_gradient(self, *arguments)

    Strategy.add_gradient = noting
    try:
        main_in_world(*overrides)
    finally:
        Strategy.add_gradient = add_gradient
    return largest.elements


def runs_of(folder: Path, line: str, chunks: list[int]) -> list[int]:
    """Return what `largest_in_training` does for each number of chunks, in a world."""
    return [
        largest_in_training(*line.split(), f"task.head_chunks={each}", f"runs_dir={folder}/{each}")
        for each in chunks
    ]


def test_run_of_the_command_line_has_no_tensor_of_all_logits(tmp_path):
    line = (
        "strategy=single device=cpu task=tokens data=own data.dataset._target_=own_datasets.Tokens "
        "data.num_classes=500 data.num_workers=0 model=gpt model.depth=1 model.width=8 "
        "model.heads=2 batch_size=12 epochs=1 optimizer.lr=0.1"
    )
    rows = 12 * 8  # samples and tokens
    ((whole, chunked),) = run_world(1, runs_of, tmp_path, line, [1, 4], timeout=120)
    assert whole == rows * 500
    assert chunked == rows // 4 * 500
    (one,), (other,) = (read_metrics(only_run(tmp_path / name)) for name in ("1", "4"))
    for name in ("train_loss", "val_loss", "val_accuracy"):
        assert other[name] == pytest.approx(one[name], rel=1e-6)


# a model of one's own for the tokens of the matrix
OWN = "single task=tokens data=own data.dataset._target_=own_datasets.Tokens data.num_classes=11 "
OWN += "data.dataset.ignored=true model=own"
REFUSED = {
    "pipeline tokens": "is not supported by strategy=pipeline, which",
    "ddp_pipeline pp=1 tokens": "is not supported by strategy=ddp_pipeline, which",
    "split devices=[cpu,cpu] tokens": "is not supported by strategy=split, which",
    "dp tokens": "is not supported by strategy=dp, which",
    "tp tp=1 tokens": "is not supported by strategy=tp, which",
    "single tokens loss=own loss._target_=head_models.doubled": "Use loss=default",
    "single tokens task._target_=head_models.Squared": "Squared computes its loss from the logits",
    "single tokens task._target_=head_models.Confident": "metrics of Confident, confidence, need",
    "{OWN} model._target_=head_models.Bigrams": "the model is a Bigrams",
    "{OWN} model._target_=head_models.bigrams model.bias=true": "head.out has a",
    "{OWN} model._target_=head_models.bigrams model.largest=30": (
        "the model changes the outputs of head.out"
    ),
    "{OWN} model._target_=head_models.hooked": ("head has a hook (register_forward_hook)"),
}


def built(line: str, *, chunks: int = 3):
    line = line.format(OWN=OWN)
    return build(config_of(f"{line} task.head_chunks={chunks}"), Runtime("cpu"))


FURTHER = [  # strategies that are refused as that of "dp tokens"
    "pipeline tokens",
    "ddp_pipeline pp=1 tokens",
    "split devices=[cpu,cpu] tokens",
    "tp tp=1 tokens",
]


@pytest.mark.parametrize(
    "case", slow_but([case for case in REFUSED if case not in FURTHER], REFUSED)
)
def test_what_needs_all_logits_is_refused_with_the_reason(case):
    with pytest.raises(ConfigError) as refusal:
        built(case)
    message = str(refusal.value)
    assert message.startswith("task.head_chunks=3: ")
    assert REFUSED[case] in message
    assert "or task.head_chunks=1, the default" in message
    built(case, chunks=1)


@pytest.mark.parametrize("axis", [pytest.param("pp", marks=pytest.mark.slow), "tp"])
def test_mesh_with_an_axis_within_a_replica_is_refused(axis):
    line = f"strategy=mesh strategy.{axis}=2 task=tokens task.head_chunks=2 model=gpt data=own "
    line += "data.dataset._target_=own_datasets.Tokens data.num_classes=11 data.num_workers=0"
    (code, errors), _ = run_world(2, refusal_in_world, line)
    assert code == 2
    assert errors.count("task.head_chunks=2: is not supported by strategy=mesh with") == 1, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("task", ["Longest", "Tokens"])
def test_own_head_and_own_metrics_of_evaluations_are_supported(task):
    module = "ddp_lab.tasks.tokens" if task == "Tokens" else "head_models"
    line = f"{OWN} model._target_=head_models.bigrams task._target_={module}.{task}"
    trained = [steps_of(built(line, chunks=chunks)) for chunks in (1, 4)]
    for one, other in zip(*trained, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def from_command_line(task: str):
    """Return the job of a task of head_models, given as on the command line."""
    line = (
        "strategy=single device=cpu data=own data.dataset._target_=own_datasets.Tokens "
        "data.num_classes=11 data.num_workers=0 model=gpt model.depth=1 model.width=8 "
        f"model.heads=2 task=tokens task._target_=head_models.{task}"
    )
    return build(compose_config(line.split(), None), Runtime("cpu"))


def test_constructor_of_an_own_task_needs_no_parameters_of_its_base_class():
    task = from_command_line("Scaled +task.scale=2.0").task
    assert task.scale == 2.0
    assert task.head_chunks == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "Forgetful task.head_chunks=3",
            "task.head_chunks=3: has no effect, because the constructor of Forgetful does not pass "
            "it on, and head_chunks is 1. Call super().__init__(loss, head_chunks) there",
        ),
        (
            "Scaled loss=own loss._target_=head_models.doubled",
            "task._target_=head_models.Scaled: the constructor of Scaled has no parameter loss",
        ),
    ],
)
def test_constructor_that_lacks_what_is_asked_for_is_refused(options, message):
    with pytest.raises(ConfigError) as refusal:
        from_command_line(options)
    assert str(refusal.value).startswith(message)


def test_constructor_that_passes_options_on_supports_chunks():
    assert from_command_line("Passing task.head_chunks=3 +task.scale=2.0").task.head_chunks == 3


def steps_of(job) -> list[torch.Tensor]:
    """Return the weights after an epoch of steps."""
    step = job.trainer().eager_step
    loader = job.loaders["train"]
    loader.set_epoch(1)
    for local_batch in loader:
        step(local_batch)
    return [weight.detach() for weight in step.strategy.module.parameters()]


def test_head_is_not_computed_twice_with_activation_checkpointing():
    """It keeps its gradients only, and would compute all of them again."""
    trainer = built("single tokens checkpoint_activations=block").trainer()
    blocks = dict(trainer.strategy.module.named_children())
    again = [name for name, block in blocks.items() if isinstance(block, RecomputedBlock)]
    assert again == [name for name in blocks if name != "head"]


@pytest.mark.slow
def test_compiled_step_compiles_what_is_done_with_a_chunk():
    line = "single tokens batch_size=12"
    job = built(line, chunks=3)
    trainer = job.trainer()
    strategy = trainer.strategy
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compile_passes(strategy, partial(torch.compile, dynamic=False, backend=counter))
    loader = job.loaders["train"]
    loader.set_epoch(1)
    for local_batch in loader:  # three full batches
        trainer.eager_step(local_batch)
    of_chunks = [
        graph
        for graph in counter.graphs
        if any("logsumexp" in str(node.target) for node in graph.graph.nodes)
    ]
    torch.compiler.reset()
    assert len(of_chunks) == 1, "one for all chunks of all steps"
    compiled = [weight.detach() for weight in strategy.module.parameters()]
    eager = steps_of(built(line, chunks=1))
    for one, other in zip(compiled, eager, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def lab_losses(chunks: int) -> list[float]:
    """Return the losses of the steps of a trainer of a Lab."""
    inputs, targets = batch()
    data = TensorDataset(inputs, targets)
    with Lab("single", device="cpu") as lab:
        make: Callable = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        task = Tokens(head_chunks=chunks)
        trainer = lab.trainer(model_of(), task, make, batch_size=4, example=data[0])
        losses = [
            trainer.step(*local_batch).item()
            for epoch in range(2)
            for local_batch in trainer.batches(data, epoch)
        ]
        evaluated = trainer.evaluate(data)
    return [*losses, evaluated["loss"], evaluated["accuracy"]]


def test_trainer_of_a_lab_has_the_losses_of_all_logits():
    assert lab_losses(5) == pytest.approx(lab_losses(1), rel=1e-12)


def test_trainer_of_a_lab_refuses_a_model_without_such_a_head():
    make = partial(torch.optim.SGD, lr=0.1)
    refused = pytest.raises(ConfigError, match="the model is a Embedding without one")
    with Lab("single", device="cpu") as lab, refused:
        lab.trainer(nn.Embedding(11, 11), Tokens(head_chunks=2), make, batch_size=4)
