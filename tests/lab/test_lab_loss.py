"""A Lab with a loss over the batch: refused where that is divided, exact where not.

Where a user says that it is meant, it is accepted.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from batch_losses import OVER_BATCH, SUMS, info_nce
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.training import divided_loss

BATCH = 12
WIDTH = 5
DATA = TensorDataset(
    torch.randn(30, 6, generator=torch.Generator().manual_seed(1)),
    torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(2)),
)
CLASSES = TensorDataset(DATA.tensors[0], torch.arange(30) % WIDTH)
SGD = partial(torch.optim.SGD, lr=0.1)
SAID = "loss_over_batch=true: the loss is computed over each local batch of"


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, WIDTH))


def refusal(
    loss, strategy: str = "ddp", data=DATA, use: str = "trainer", accumulate: int = 1, **options
) -> str:
    """Return the message about a loss; an empty one if a step is taken."""
    example = {"trainer": data[0], "step": None, "input": data[0][0]}[use]
    try:
        with Lab(strategy, device="cpu", **options) as lab:
            trainer = lab.trainer(net(), loss, SGD, BATCH, accumulate, example=example)
            if use == "trainer":
                return ""
            inputs, targets = next(trainer.batches(data, 0))
            trainer.step(inputs, targets)
    except (ConfigError, TrainingError) as error:
        return str(error)
    return ""


def losses_of(strategy: str, **options) -> list[float]:
    """Return the losses of the first two steps."""
    with Lab(strategy, device="cpu") as lab:
        trainer = lab.trainer(net(), info_nce, SGD, BATCH, example=DATA[0], **options)
        return [
            float(trainer.step(*batch))
            for batch, _ in zip(trainer.batches(DATA, 0), range(2), strict=False)
        ]


def ask_all() -> dict[str, str | list[float]]:
    names = ("supervised contrastive", "triplet", "normalised weights")
    results: dict = {name: refusal(OVER_BATCH[name][1], data=CLASSES) for name in names}
    results |= {
        f"{name}, a sum": refusal(SUMS[name][1], data=CLASSES)
        for name in ("focal", "class weights", "dropout")
    }
    results["fsdp"] = refusal(info_nce, "fsdp")
    results["pipeline"] = refusal(info_nce, "pipeline", num_microbatches=2)
    results["first step"] = refusal(info_nce, use="step")
    results["input"] = refusal(info_nce, use="input")
    results["first step, a sum"] = refusal(SUMS["huber"][1], use="step")
    results["tp"] = losses_of("tp")
    results["meant"] = losses_of("ddp", loss_over_batch=True)
    return results


@once
def two() -> list[dict]:
    return run_world(2, ask_all)


@pytest.mark.parametrize(
    "name",
    ["supervised contrastive", "triplet", "normalised weights", "fsdp", "first step", "input"],
)
def test_loss_over_the_batch_is_refused_under_data_parallelism(name):
    strategy = "fsdp" if name == "fsdp" else "ddp"
    for rank in two():
        assert rank[name].startswith("loss: the loss is not a sum over samples: it ")
        assert (
            f"strategy={strategy} on 2 replicas would compute it over 6 samples at a time"
            in rank[name]
        )


def test_loss_over_the_batch_is_refused_with_microbatches_and_accumulation():
    assert "strategy.num_microbatches=2 would compute it over 6 samples" in two()[0]["pipeline"]
    assert (
        "accumulate=3 would compute it over 4 samples at a time, and not over the global"
        in refusal(info_nce, "single", accumulate=3)
    )
    assert "accumulate=3 would" in refusal(info_nce, "single", use="step", accumulate=3)
    assert "strategy.num_microbatches=3 would" in refusal(info_nce, "split", num_microbatches=3)


@pytest.mark.parametrize(
    "name", ["focal, a sum", "class weights, a sum", "dropout, a sum", "first step, a sum"]
)
def test_sum_over_samples_is_trained_under_data_parallelism(name):
    assert [rank[name] for rank in two()] == ["", ""]


def test_loss_over_the_batch_is_exact_where_the_batch_is_not_divided():
    with Lab(device="cpu"):
        model = net()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))[:BATCH]
    inputs, targets = (tensor[order] for tensor in DATA.tensors)
    expected = info_nce(model(inputs), targets).mean().item()
    of_single = losses_of("single")
    assert of_single[0] == pytest.approx(expected, rel=1e-6)
    for other in (losses_of("dp"), *(rank["tp"] for rank in two())):
        assert other == pytest.approx(of_single, rel=1e-5)
    parts = [slice(rank, None, 2) for rank in range(2)]
    of_parts = sum(info_nce(model(inputs[part]), targets[part]).mean().item() for part in parts) / 2
    assert two()[0]["meant"][0] == pytest.approx(of_parts, rel=1e-6)
    assert of_parts < expected - 0.1


def test_divided_loss_that_is_meant_is_said_once(capsys):
    with Lab(device="cpu") as lab:
        lab.trainer(net(), info_nce, SGD, BATCH, 3, example=DATA[0], loss_over_batch=True)
        lab.trainer(net(), info_nce, SGD, BATCH, loss_over_batch=True)
    assert capsys.readouterr().out == f"{SAID} 4 samples\n"


def test_loss_that_is_one_number_is_refused_and_may_be_expanded():
    def mean(outputs, targets):
        return info_nce(outputs, targets).mean()

    message = refusal(mean, "single", use="step")
    assert message.startswith(
        "the loss must return unreduced losses, [12, ...] for 12 samples, got []. Use "
        "reduction='none'"
    )
    assert message.endswith(
        "A loss that is one number for a batch returns it for each sample, "
        "loss.expand(len(outputs))"
    )
    with Lab(device="cpu") as lab:
        expanded = lab.trainer(net(), lambda *pair: mean(*pair).expand(len(pair[0])), SGD, BATCH)
        (batch, *_) = expanded.batches(DATA, 0)
        loss = float(expanded.step(*batch))
    assert loss == pytest.approx(losses_of("single")[0], rel=1e-6)


def test_task_with_a_loss_over_the_batch_is_refused():
    class Own(tasks.Regression):
        def loss_fn(self, outputs, targets):
            return info_nce(outputs, targets)

    assert refusal(Own(), "single", accumulate=2).startswith(
        "loss: the loss is not a sum over samples: it "
    )
    assert refusal(tasks.Regression(), "single", accumulate=2) == ""


def test_loss_that_was_tried_with_the_example_is_not_tried_again_in_the_first_step():
    def loss(outputs, targets):
        return (outputs - targets).square().mean(1)

    describe = divided_loss.describe_coupling
    for example, tries in ((DATA[0], False), (None, True)):
        with (
            Lab(device="cpu") as lab,
            patch.object(divided_loss, "describe_coupling", wraps=describe) as trial,
        ):
            trainer = lab.trainer(net(), loss, SGD, BATCH, accumulate=3, example=example)
            assert trial.called != tries
            trial.reset_mock()
            batch = next(trainer.batches(DATA, 0))
            trainer.step(*batch)
            assert trial.called == tries
