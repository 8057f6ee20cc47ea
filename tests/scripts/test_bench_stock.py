"""scripts/bench_stock.py: each stock loop takes the step of one device, in float32."""

from argparse import Namespace
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from worlds import run_world

from scripts.bench_layouts import Layout
from scripts.bench_models import MODELS, made_up
from scripts.bench_stock import STOCK, mesh_step, why_no_stock_loop, with_usual_sums

BATCH = 4  # samples on each device
STEPS = 3
PIPELINE = Layout(pp=2, schedule="1f1b", num_microbatches=4)
ON_FOUR = {
    "ddp": Layout(replicate=4),
    "fsdp": Layout(shard=4),
    "hsdp": Layout(replicate=2, shard=2),
    "tp": Layout(tp=4),
    "replicated tp": Layout(replicate=2, tp=2),
    "fsdp x tp": Layout(shard=2, tp=2),
    "pp x tp": PIPELINE._replace(tp=2),
    "pp x replicas": PIPELINE._replace(replicate=2),
    "pp x shards": PIPELINE._replace(shard=2),
    "gpipe": PIPELINE._replace(shard=2, schedule="gpipe"),
}
INTERLEAVED = Layout(pp=2, replicate=2, schedule="interleaved1f1b", num_microbatches=4)


def losses_of(model: str, layout: Layout) -> list[float]:
    """Return the losses of the steps; none on a rank that does not have them."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    exact = replace(
        MODELS[model], optimizer=lambda parameters: SGD(parameters, lr=0.5, momentum=0.9)
    )
    arguments = Namespace(layout=layout, batch=BATCH, half=False)
    if not dist.is_initialized():
        arguments.batch *= layout.copies_of_batch
        arguments.layout = Layout()
    step = mesh_step(exact, device, arguments)
    losses = [step() for _ in range(STEPS)]
    return [loss.item() for loss in losses if loss is not None]


def all_losses(cases: list[tuple[str, Layout]]) -> list[list[float]]:
    """Return the losses of some layouts on the ranks of a world."""
    torch.compiler.set_stance("force_eager")
    dist.init_process_group("gloo")
    losses = [losses_of(model, layout) for model, layout in cases]
    dist.destroy_process_group()
    return losses


@pytest.mark.slow
def test_stock_loops_have_the_losses_of_one_device():
    cases = [("gpt_tiny", layout) for layout in ON_FOUR.values()]
    cases += [("vit_tiny", INTERLEAVED), ("vit_tiny", ON_FOUR["fsdp x tp"])]
    names = [*ON_FOUR, "interleaved", "fsdp x tp of vit"]
    by_rank = run_world(4, all_losses, cases, timeout=300)
    with torch.compiler.set_stance("force_eager"):
        expected = [losses_of(model, layout) for model, layout in cases]
    for number, name in enumerate(names):
        known = [losses[number] for losses in by_rank if losses[number]]
        assert known, f"{name}: no rank has the loss"
        for losses in known:
            assert losses == pytest.approx(expected[number], abs=2e-6), name
        assert expected[number][-1] < expected[number][0] - 0.01, "nothing was trained"


def dtypes_of_blocks(module: nn.Module, inputs: torch.Tensor) -> list[torch.dtype]:
    """Return the dtypes of the input and the output of each block under autocast."""
    dtypes: list[torch.dtype] = []
    for block in list(module.children())[1:-1]:
        block.register_forward_hook(
            lambda _, inputs, output: dtypes.extend([inputs[0].dtype, output.dtype])
        )
    with torch.autocast("cpu", torch.bfloat16):
        module(inputs)
    return dtypes


@pytest.mark.parametrize("model", ["gpt_tiny", "vit_tiny"])
def test_usual_sums_are_in_float32_under_autocast_and_change_no_loss_without_it(model):
    """Each block gets the sum of those before it."""
    made = MODELS[model]
    inputs, _ = made_up(BATCH, made)
    images_or_tokens = inputs if made.has_tokens else inputs.float()
    torch.manual_seed(0)
    ours = made.make()
    usual = with_usual_sums(lambda: deepcopy(ours))
    assert torch.equal(usual(images_or_tokens), ours(images_or_tokens))

    assert dtypes_of_blocks(ours, images_or_tokens) == [torch.bfloat16] * 4
    assert dtypes_of_blocks(usual, images_or_tokens) == [torch.float32] * 4


@pytest.mark.parametrize(
    ("strategy", "layout", "reason"),
    [
        ("split", Layout(), "torch has no loop like strategy=split"),
        ("mesh", Layout(tp=2, sequence_parallel=True), "no stock loop here shares the tokens"),
        (
            "pipeline",
            PIPELINE._replace(schedule="interleavedzerobubble"),
            "torch compiles no stage whose backward pass is cut in two",
        ),
        *((name, Layout(), None) for name in STOCK),
        ("mesh", PIPELINE._replace(tp=2, replicate=2), None),
    ],
)
def test_missing_stock_loop_has_a_reason(strategy, layout, reason):
    assert why_no_stock_loop(strategy, layout) == reason
