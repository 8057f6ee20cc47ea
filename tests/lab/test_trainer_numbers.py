"""Every method of a Trainer with numbers worked out on paper: unequal weights, and averages.

The model has one weight, w = 1, and two samples, x = 1 and x = 2, with targets 0 and the weights 1
and 3. With `loss`, the loss is (1 w**2 + 3 (2 w)**2) / 4 = 13/4 w**2 and its gradient 13/2 w, so
that a step with the learning rate 0.1 multiplies w by 0.35. The decay of the averages is 0.5:

    step    w         average
    0       1         1
    1       0.35      (1 + 0.35) / 2 = 0.675
    2       0.1225    (0.675 + 0.1225) / 2 = 0.39875
"""

import json
import time
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from launches import call_in_process
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from ddp_lab import Lab, launch, tasks

SAMPLES = TensorDataset(torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
SGD = partial(torch.optim.SGD, lr=0.1)
FIRST = 0.675  # the averages after a step
SECOND = 0.39875  # the averages after two


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (outputs[:, 0] - targets[:, 0]).square(), targets[:, 1]


class Outputs(tasks.Task):
    """Has the sum of the outputs as its metric, and a loss that would be 100."""

    def loss_fn(self, outputs, targets):
        return torch.full((len(outputs),), 100.0)

    def sums(self, outputs, targets):
        return {"outputs": outputs.sum()}

    def metrics(self, sums):
        return {"outputs": float(sums["outputs"])}


def trainer_of(lab: Lab, criterion=loss, **options):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    arguments = {"batch_size": 2, "ema": 0.5, "ema_warmup": False} | options
    return lab.trainer(model, criterion, SGD, **arguments)


def weight(trainer) -> float:
    return trainer.strategy.module.weight.item()


def step(trainer) -> float:
    return float(trainer.step(*SAMPLES.tensors))


@pytest.fixture
def lab():
    with Lab(device="cpu") as opened:
        yield opened


@pytest.mark.parametrize("accumulate", [1, 2])
def test_step_returns_the_weighted_mean_and_takes_its_gradient(lab, accumulate):
    trainer = trainer_of(lab, accumulate=accumulate)
    assert [step(trainer), step(trainer)] == pytest.approx([13 / 4, 13 / 4 * 0.35**2])
    assert weight(trainer) == pytest.approx(0.1225)


def test_step_clips_to_max_grad_norm(lab):
    trainer = trainer_of(lab, max_grad_norm=1.3)
    step(trainer)  # the gradient 6.5 is scaled to 1.3
    assert weight(trainer) == pytest.approx(1 - 0.13)


def test_step_follows_the_schedule(lab):
    trainer = trainer_of(lab, schedule=lambda step: (1 + step) / 2)
    step(trainer)  # learning rate 0.05: 1 - 0.05 * 6.5
    assert weight(trainer) == pytest.approx(0.675)
    step(trainer)  # learning rate 0.1: 0.675 * (1 - 0.1 * 6.5)
    assert weight(trainer) == pytest.approx(0.675 * 0.35)


def own_step(trainer, parts: int = 1) -> float:
    """Take the step of `step` by the methods with which a loop computes its own."""
    for number in range(parts):
        inputs, targets = (tensor[number::parts] for tensor in SAMPLES.tensors)
        is_last = number == parts - 1
        with nullcontext() if is_last else trainer.accumulating():
            losses, weights = loss(trainer.forward(inputs), targets)
            trainer.backward((losses * weights).sum(), weights.sum())
    return float(trainer.update())


@pytest.mark.parametrize("parts", [1, 2])
def test_own_step_returns_the_weighted_mean_and_updates_the_averages(lab, parts):
    trainer = trainer_of(lab)
    losses = [own_step(trainer, parts), own_step(trainer, parts)]
    assert losses == pytest.approx([13 / 4, 13 / 4 * 0.35**2])
    assert weight(trainer) == pytest.approx(0.1225)
    assert trainer.evaluate(SAMPLES) == pytest.approx({"loss": 13 / 4 * SECOND**2})


def test_own_step_clips_and_follows_the_schedule(lab):
    trainer = trainer_of(lab, max_grad_norm=1.3)
    own_step(trainer)
    assert weight(trainer) == pytest.approx(1 - 0.13)
    trainer = trainer_of(lab, schedule=lambda step: (1 + step) / 2)
    own_step(trainer)
    own_step(trainer)
    assert weight(trainer) == pytest.approx(0.675 * 0.35)


def test_classification_with_a_weighted_loss_divides_the_gradient_by_the_weights(lab):
    """Logits (w x, 0) and class 1: the gradient by w at 0 is x / 2 for each sample."""

    def weighted(outputs, targets):
        losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return losses, torch.tensor([1.0, 3.0])

    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    trainer = lab.trainer(model, tasks.Classification(weighted), SGD, batch_size=2)
    trainer.step(SAMPLES.tensors[0], torch.tensor([1, 1]))
    # (1 * 1/2 + 3 * 2/2) / (1 + 3) = 3.5 / 4 in place of 3.5 / 2
    assert model.weight[0].item() == pytest.approx(-0.1 * 3.5 / 4)


def test_evaluate_uses_the_averages_and_the_loss_of_training(lab):
    trainer = trainer_of(lab)
    step(trainer)
    assert trainer.evaluate(SAMPLES) == pytest.approx({"loss": 13 / 4 * FIRST**2})
    # outputs FIRST and 2 FIRST
    metrics = trainer.evaluate(SAMPLES, Outputs())
    assert metrics == pytest.approx({"loss": 13 / 4 * FIRST**2, "outputs": 3 * FIRST})
    assert weight(trainer) == pytest.approx(0.35)


def test_predict_uses_the_averages(lab):
    trainer = trainer_of(lab)
    step(trainer)
    outputs = trainer.predict(SAMPLES.tensors[0])
    assert outputs.flatten().tolist() == pytest.approx([FIRST, 2 * FIRST])
    assert not outputs.requires_grad
    assert weight(trainer) == pytest.approx(0.35)


@pytest.mark.parametrize(("ema", "expected"), [(0.5, FIRST), (None, 0.35)])
def test_save_writes_the_averages_if_there_are_any(lab, tmp_path, ema, expected):
    trainer = trainer_of(lab, ema=ema)
    step(trainer)
    trainer.save(tmp_path / "new" / "weights.safetensors")
    weights = load_file(tmp_path / "new" / "weights.safetensors")
    assert {name: value.item() for name, value in weights.items()} == {
        "weight": pytest.approx(expected)
    }
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["weights.safetensors"]


def test_fit_returns_the_losses_of_training_and_of_the_averages(lab):
    trainer = trainer_of(lab)
    metrics = trainer.fit(SAMPLES, SAMPLES, epochs=2, task=Outputs())
    assert metrics["train_loss"] == pytest.approx(13 / 4 * 0.35**2)
    assert metrics["val_loss"] == pytest.approx(13 / 4 * SECOND**2)
    assert metrics["val_outputs"] == pytest.approx(3 * SECOND)
    assert (metrics["step"], metrics["lr"]) == (2, pytest.approx(0.1))
    assert trainer.fit(SAMPLES, SAMPLES, epochs=2) == {}


def test_fit_logs_the_weighted_mean_since_the_last_row(tmp_path):
    """Rows at steps 1 and 2 of an epoch of two steps, with the samples in either order."""
    with Lab(device="cpu", run_dir=tmp_path) as lab:
        trainer = trainer_of(lab, batch_size=1)
        trainer.fit(SAMPLES, SAMPLES, epochs=1, log_every=1)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [("step", 1), ("step", 2), ("epoch", 2)]
    # A batch of one sample has the loss (w x)**2, whatever its weight is, and the gradient
    # 2 w x**2: x = 1 multiplies w by 0.8, and x = 2 by 0.2.
    starts = {1.0: (1.0, 0.8**2 * 4, 1, 3), 4.0: (4.0, 0.2**2, 3, 1)}
    first, second, weight_of_first, weight_of_second = starts[round(rows[0]["loss"], 3)]
    assert [row["loss"] for row in rows[:2]] == pytest.approx([first, second])
    mean = (weight_of_first * first + weight_of_second * second) / 4
    assert rows[2]["train_loss"] == pytest.approx(mean)


class Slow(nn.Linear):
    """Takes two seconds of a clock of the test for a forward pass of training."""

    now = 100.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        Slow.now += 2 * self.training
        return super().forward(input)


def test_fit_logs_every_so_many_seconds(tmp_path, monkeypatch):
    """Six steps of two seconds: a row after 4 s, 8 s and 12 s."""
    monkeypatch.setattr(time, "perf_counter", lambda: Slow.now)
    data = TensorDataset(torch.ones(6, 1), torch.ones(6, 2))
    with Lab(device="cpu", run_dir=tmp_path) as lab:
        trainer = lab.trainer(Slow(1, 1), loss, SGD, batch_size=1)
        trainer.fit(data, None, epochs=1, log_every="4s")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [2, 4, 6]
    assert [row["samples_per_second"] for row in steps] == pytest.approx([0.5] * 3)
    assert [row["eta"] for row in steps] == pytest.approx([8, 4, 0])
    assert (rows[-1]["kind"], rows[-1]["seconds"]) == ("epoch", pytest.approx(12))


class Counting(nn.Linear):
    passes = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        Counting.passes += 1
        return super().forward(input)


@pytest.mark.parametrize(("activations", "passes"), [("none", 2), ("block", 4)])
def test_checkpoint_activations_computes_blocks_again(lab, activations, passes):
    model = nn.Sequential(Counting(1, 1), Counting(1, 1))
    trainer = lab.trainer(model, loss, SGD, batch_size=2, checkpoint_activations=activations)
    step(trainer)
    Counting.passes = 0
    step(trainer)
    assert Counting.passes == passes


def test_tracker_options_reach_the_tracker(tmp_path):
    options = {"own_trackers": {"Lines": {"file": "mine.jsonl"}}}
    with Lab(
        device="cpu", run_dir=tmp_path, tracker="own_trackers.Lines", tracker_options=options
    ) as lab:
        lab.log(step=3, loss=0.25)
    records = [json.loads(line)[1:] for line in (tmp_path / "mine.jsonl").read_text().splitlines()]
    assert ["metrics", None, 3, None] in records


def test_checkpoint_and_resume_restore_weights_averages_and_position(lab, tmp_path):
    trainer = trainer_of(lab)
    for batch in trainer.batches(SAMPLES, 0):
        trainer.step(*batch)
    assert (trainer.progress.epoch, trainer.progress.samples, trainer.progress.step) == (1, 0, 1)
    trainer.checkpoint(tmp_path)
    other = trainer_of(lab)
    assert other.resume(tmp_path / "none") == (0, 0)
    assert other.resume(tmp_path) == (1, 0)
    assert weight(other) == pytest.approx(0.35)
    assert other.evaluate(SAMPLES)["loss"] == pytest.approx(13 / 4 * FIRST**2)
    step(other)
    assert other.evaluate(SAMPLES)["loss"] == pytest.approx(13 / 4 * SECOND**2)


@pytest.mark.parametrize("seed", [0, 3])
def test_seed_of_the_lab_determines_initial_weights_and_the_order_of_each_epoch(seed):
    data = TensorDataset(torch.arange(20.0)[:, None], torch.zeros(20, 2))
    with Lab(device="cpu", seed=seed) as lab:
        drawn = torch.rand(3)
        trainer = trainer_of(lab, batch_size=6)
        for epoch in (0, 4):
            order = torch.cat([inputs for inputs, _ in trainer.batches(data, epoch)])
            generator = torch.Generator().manual_seed(seed + epoch)
            assert order.flatten().tolist() == torch.randperm(20, generator=generator).tolist()
        order = torch.cat([inputs for inputs, _ in trainer.batches(data, 4, shuffle=False)])
        assert order.flatten().tolist() == list(range(20))
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(seed)))


def test_seed_of_the_lab_determines_what_a_step_drops():
    def outputs(seed: int) -> float:
        with Lab(device="cpu", seed=seed) as lab:
            model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
            nn.init.ones_(model[1].weight)
            trainer = lab.trainer(model, lambda outputs, targets: outputs[:, 0], SGD, batch_size=1)
            return float(trainer.step(torch.ones(1, 64), torch.zeros(1)))

    assert outputs(1) == outputs(1) != outputs(2)


def test_precision_of_the_lab_is_that_of_the_forward_pass():
    for precision, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        with Lab(device="cpu", precision=precision) as lab:
            trainer = trainer_of(lab)
            assert trainer.predict(SAMPLES.tensors[0]).dtype == dtype
            assert trainer.strategy.module.weight.dtype == torch.float32


def test_lab_is_one_rank_and_logs_numbers_and_tensors(tmp_path, capsys):
    with Lab(device="cpu", run_dir=tmp_path / "run", timeout=12.5) as lab:
        assert (lab.rank, lab.world_size, lab.is_main) == (0, 1, True)
        assert lab.device == torch.device("cpu")
        assert lab.runtime.timeout.total_seconds() == 12.5
        lab.print("two", 3)
        lab.log(epoch=1, loss=torch.tensor(0.25), note="text")
        lab.log(step=7, loss=1 / 3)
        lab.log(loss=0.5)
    assert (
        capsys.readouterr().out
        == "two 3\nepoch 1 loss 0.25 note text\nstep 7 loss 0.3333\nloss 0.5\n"
    )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == [
        {"kind": "epoch", "epoch": 1, "loss": 0.25, "note": "text"},
        {"kind": "step", "step": 7, "loss": 1 / 3},
        {"kind": "log", "loss": 0.5},
    ]


def train_on_two(lr: float, seed: int) -> dict:
    """Train two steps, in which rank 0 has the weight 1 and rank 1 the weight 3."""
    with Lab("ddp", device="cpu", seed=seed) as lab:
        trainer = trainer_of(lab)
        losses = []
        for epoch in range(2):
            for batch in trainer.batches(SAMPLES, epoch, shuffle=False):
                losses.append(float(trainer.step(*batch)))
        evaluated = trainer.evaluate(SAMPLES, Outputs())
        outputs = trainer.predict(torch.ones(1 + lab.rank, 1))
        return {
            "arguments": (lr, seed),
            "losses": losses,
            "weight": weight(trainer),
            "evaluated": evaluated,
            "outputs": outputs,
            "world": (lab.rank, lab.world_size, lab.is_main),
        }


def check_launch_of_two_ranks() -> None:
    result = launch(train_on_two, 0.1, 5, nproc=2)
    assert result["arguments"] == (0.1, 5)
    assert result["world"] == (0, 2, True)
    assert result["losses"] == pytest.approx([13 / 4, 13 / 4 * 0.35**2])
    assert result["weight"] == pytest.approx(0.1225)
    expected = {"loss": 13 / 4 * SECOND**2, "outputs": 3 * SECOND}
    assert result["evaluated"] == pytest.approx(expected)
    assert result["outputs"].tolist() == [[pytest.approx(SECOND)]]


def test_launch_of_two_ranks_with_unequal_weights_returns_the_numbers_of_one():
    done = call_in_process(check_launch_of_two_ranks, timeout=120)
    assert done.returncode == 0, done.stderr
