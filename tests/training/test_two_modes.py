"""Optimizers with train() and eval(): other weights train than those that are evaluated."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from launches import SMALL, launch, only_run, read_metrics
from own_optimizers import Counting, ScheduleFree
from safetensors.torch import load_file
from slow_rows import slow_but
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab

EPOCHS = 3
BATCH = 12
RATE = 0.5
LOSSES = partial(cross_entropy, reduction="none")
OPTIMIZER = "optimizer._target_=own_optimizers.ScheduleFree optimizer.lr=0.5 scheduler=constant"
WORLDS = {
    "single": (1, {}),
    "scratch": (2, {}),
    "ddp": (2, {}),
    "fsdp": (2, {}),
    "pipeline": (2, {"num_microbatches": 2}),
    "tp": (2, {"tp": 2}),
    "mesh": (2, {"pp": 2, "num_microbatches": 2}),
    "split": (1, {"devices": ["cpu", "cpu"], "num_microbatches": 2}),
}


def samples(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(25, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs.sum(1) > 3).long())


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2)).double()


def mean_loss(model: nn.Module, data: TensorDataset) -> float:
    inputs, targets = data.tensors
    with torch.no_grad():
        return cross_entropy(model(inputs), targets).item()


@once
def plain() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return the losses of steps and of evaluations, and the last weights, of a plain loop."""
    order = order_of_single()
    model = network()
    optimizer = ScheduleFree(model.parameters(), RATE)
    inputs, targets = samples(0).tensors
    of_steps = []
    evaluated = []
    for batch in order:
        optimizer.train()
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs[batch]), targets[batch])
        loss.backward()
        optimizer.step()
        of_steps.append(loss.item())
        optimizer.eval()
        evaluated.append(mean_loss(model, samples(1)))
    return of_steps, evaluated, model.state_dict()


@once
def order_of_single() -> list[torch.Tensor]:
    """Return the rows of each batch of all epochs."""
    rows = TensorDataset(torch.arange(25), torch.arange(25))
    with Lab("single", device="cpu") as lab:
        trainer = lab.trainer(network(), LOSSES, partial(ScheduleFree, lr=RATE), BATCH)
        epochs = range(EPOCHS)
        return [batch.clone() for epoch in epochs for batch, _ in trainer.batches(rows, epoch)]


def train(strategy: str, options: dict, folder: str, evaluates: bool, resumes: bool = False):
    """Return the losses of steps and evaluations after each, and what is written at the end.

    Args:
        strategy, options: of the Lab.
        folder: for the weights and for checkpoints.
        evaluates: whether every step is followed by an evaluation and a checkpoint.
        resumes: whether to resume the newest checkpoint in `folder`.
    """
    of_steps = []
    evaluated = []
    with Lab(strategy, device="cpu", timeout=60, **options) as lab:
        make = partial(ScheduleFree, lr=RATE)
        trainer = lab.trainer(network(), LOSSES, make, BATCH, example=samples(0)[0])
        first = trainer.resume(f"{folder}/saved")[0] if resumes else 0
        for epoch in range(first, EPOCHS):
            for inputs, targets in trainer.batches(samples(0), epoch):
                of_steps.append(float(trainer.step(inputs, targets)))
                if evaluates:
                    evaluated.append(trainer.evaluate(samples(1))["loss"])
                    trainer.checkpoint(f"{folder}/saved")
                if resumes is False and not evaluates and len(of_steps) == 4:
                    trainer.checkpoint(f"{folder}/saved")
        trainer.save(f"{folder}/weights.safetensors")
    return of_steps, evaluated


@pytest.mark.parametrize("strategy", slow_but(["single", "split", "ddp"], WORLDS))
def test_strategy_equals_a_plain_loop(strategy, tmp_path):
    ranks, options = WORLDS[strategy]
    for of_steps, evaluated in run_world(
        ranks, train, strategy, options, str(tmp_path), True, timeout=120
    ):
        assert of_steps == pytest.approx(plain()[0], abs=1e-12)
        assert evaluated == pytest.approx(plain()[1], abs=1e-12)
    written = load_file(tmp_path / "weights.safetensors")
    for name, expected in plain()[2].items():
        torch.testing.assert_close(written[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_evaluations_and_checkpoints_change_no_digit(strategy, tmp_path):
    ranks, options = WORLDS[strategy]
    losses = [
        run_world(ranks, train, strategy, options, str(tmp_path / str(each)), each)[0][0]
        for each in (True, False)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("first", "second"),
    [("single", "single"), pytest.param("fsdp", "fsdp", marks=pytest.mark.slow)],
)
def test_resumed_loop_continues_to_the_last_digit(first, second, tmp_path):
    ranks, options = WORLDS[first]
    (complete, _), *_ = run_world(ranks, train, first, options, str(tmp_path), False)
    ranks, options = WORLDS[second]
    (rest, _), *_ = run_world(ranks, train, second, options, str(tmp_path), False, True)
    assert rest == complete[4:]


def test_run_is_evaluated_with_the_weights_of_evaluations(tmp_path):
    line = ["scheduler=constant", *OPTIMIZER.split(), *SMALL, f"runs_dir={tmp_path}", "epochs=2"]
    code, output = launch("ddp-lab train --nproc 2 strategy=ddp", *line)
    assert code == 0, output
    run = only_run(tmp_path)
    code, output = launch("ddp-lab evaluate", str(run), "--json", str(tmp_path / "result.json"))
    assert code == 0, output
    again = json.loads((tmp_path / "result.json").read_text())
    expected = read_metrics(run)[-1]
    assert str(round(expected["test_loss"], 4)) in output
    assert again["test_loss"] == pytest.approx(expected["test_loss"], abs=1e-6)


def test_what_an_optimizer_counts_in_its_groups_is_resumed(tmp_path):
    """Otherwise a resumed run would take other steps, and a checkpoint would count as one."""

    def steps(saves_after: int | None, resumes: bool = False) -> list[float]:
        losses = []
        with Lab("single", device="cpu") as lab:
            trainer = lab.trainer(network(), LOSSES, partial(Counting, lr=RATE), BATCH)
            if resumes:
                trainer.resume(tmp_path)
            for epoch in range(2):
                for inputs, targets in trainer.batches(samples(0), epoch):
                    losses.append(float(trainer.step(inputs, targets)))
                    if len(losses) == saves_after:
                        trainer.checkpoint(tmp_path)
        return losses

    complete = steps(None)
    assert steps(2) == complete
    assert steps(None, resumes=True) == complete[2:]
    (path,) = Path(tmp_path).glob("step_*.pt")
    groups = torch.load(path, weights_only=True)["optimizer"]["param_groups"]
    assert [group["taken"] for group in groups] == [2]
