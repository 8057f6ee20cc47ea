"""The library: a user's loop gives the same numbers for any strategy and any number of ranks."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Subset, TensorDataset
from training import full_weights
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.lab.arguments import require_same

BATCH = 12
EPOCHS = 2
IGNORE = 255
# 37 samples: the last batch of an epoch has one, so that one of two ranks has none. The matrix has
# the others.
STRATEGIES = {"ddp": {}, "pipeline": {"num_microbatches": 3}}


def pixels(size: int = 37) -> TensorDataset:
    """Return images and masks in which the number of ignored pixels differs by sample."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(size, 3, 8, 8, generator=generator)
    masks = torch.randint(0, 4, (size, 8, 8), generator=generator)
    masks[
        torch.rand(masks.shape, generator=generator) < torch.rand(size, 1, 1, generator=generator)
    ] = IGNORE
    return TensorDataset(images, masks)


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(outputs, targets, ignore_index=IGNORE, reduction="none"), (
        targets != IGNORE
    ).float()


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Dropout(dropout), nn.Conv2d(8, 4, 3, padding=1)
    )


SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def trainer_of(lab: Lab, criterion=loss, dropout: float = 0.0, **options):
    return lab.trainer(
        net(dropout), criterion, SGD, batch_size=BATCH, **{"example": pixels()[0]} | options
    )


def own_loop(strategy: str, options: dict, folder: Path, accumulate: int = 1) -> dict:
    """Train in a loop of the user's own, and return what it gives."""
    results: dict = {"losses": [], "kept": []}
    data = pixels()
    with Lab(strategy, device="cpu", **options) as lab:
        trainer = trainer_of(
            lab, accumulate=accumulate, max_grad_norm=1.0, schedule=lambda step: 1 / (1 + step)
        )
        for epoch in range(EPOCHS):
            for inputs, targets in trainer.batches(data, epoch):
                value = trainer.step(inputs, targets)
                results["losses"].append(value.item())
                results["kept"].append(value)
        results["evaluated"] = trainer.evaluate(Subset(data, range(37)), tasks.Segmentation())
        results["outputs"] = trainer.predict(data.tensors[0][:5])
        trainer.save(folder / f"{strategy}.safetensors")
    results["kept"] = [value.item() for value in results["kept"]]
    return results | {"weights": load_file(folder / f"{strategy}.safetensors")}


def interrupted(strategy: str, folder: Path, resumed: bool, dropout: float = 0.0) -> dict:
    """Train with a checkpoint in the middle of epoch 1, or from that checkpoint on."""
    with Lab(strategy, device="cpu") as lab:
        trainer = trainer_of(lab, dropout=dropout, ema=0.5, num_workers=1)
        first, done = trainer.resume(folder)
        losses = []
        for epoch in range(first, EPOCHS):
            for inputs, targets in trainer.batches(Subset(pixels(), range(37)), epoch):
                losses.append(trainer.step(inputs, targets).item())
                if not resumed and trainer.progress.step == 6:
                    trainer.checkpoint(folder)
        return {
            "position": (first, done),
            "losses": losses,
            "weights": full_weights(trainer.strategy),
            "end": trainer.progress,
        }


def train_all(folder: Path) -> dict:
    results: dict = {
        strategy: own_loop(strategy, options, folder, accumulate=2)
        for strategy, options in STRATEGIES.items()
    }
    for resumed in (False, True):
        results["resumed", resumed] = interrupted("fsdp", folder / "dropout", resumed, dropout=0.5)
    results["moved"] = interrupted("ddp", folder / "checkpoints", resumed=False)
    with Lab("ddp", device="cpu") as lab:
        for batch_size, seed in ((5, 0), (6, lab.rank)):
            torch.manual_seed(seed)
            with pytest.raises(ConfigError) as error:
                lab.trainer(net(), loss, SGD, batch_size=batch_size)
            results["error", batch_size] = str(error.value)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lab")


@once
def two(folder: Path) -> list[dict]:
    return run_world(2, train_all, folder)


@once
def alone(folder: Path) -> dict:
    return own_loop("single", {}, folder)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_own_loop_gives_the_weights_losses_and_metrics_of_one_rank(strategy, folder):
    expected = alone(folder)
    ranks = two(folder)
    results, other = (rank[strategy] for rank in ranks)
    # the same number on every rank, which later steps do not change
    assert results["losses"] == other["losses"] == results["kept"]
    assert len(results["losses"]) == EPOCHS * 4
    assert results["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    for name, value in expected["weights"].items():
        assert (results["weights"][name] - value).abs().max() < 1e-6
    assert results["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-6)
    assert results["evaluated"].keys() == {"loss", "accuracy", "mean_iou"}
    assert results["outputs"].allclose(expected["outputs"], atol=1e-5)


def test_batch_whose_targets_are_all_ignored_has_the_loss_0_and_changes_nothing():
    with Lab(device="cpu") as lab:
        trainer = trainer_of(lab)
        (inputs, targets) = pixels()[:BATCH]
        before = {name: value.clone() for name, value in full_weights(trainer.strategy).items()}
        assert trainer.step(inputs, torch.full_like(targets, IGNORE)) == 0
        assert all(
            torch.equal(value, before[name])
            for name, value in full_weights(trainer.strategy).items()
        )
        ignored = TensorDataset(inputs, torch.full_like(targets, IGNORE))
        with pytest.raises(
            TrainingError, match=r"^epoch 1 has nothing to learn from: all targets are ignored$"
        ):
            trainer.fit(ignored, ignored, epochs=1)


def test_weighted_loss_is_that_of_the_global_batch_and_not_the_mean_of_the_means(folder):
    """Averaging the means of micro-batches or ranks is the known error of other trainers."""
    with Lab(device="cpu"):
        model = net()
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))[:BATCH]
    images, masks = (tensor[order] for tensor in pixels().tensors)
    mean = partial(F.cross_entropy, ignore_index=IGNORE)
    expected = mean(model(images), masks).item()
    parts = zip(images.chunk(2), masks.chunk(2), strict=True)
    mean_of_means = sum(mean(model(*part[:1]), part[1]).item() for part in parts) / 2
    assert two(folder)[0]["ddp"]["losses"][0] == pytest.approx(expected, abs=1e-6)
    assert abs(mean_of_means - expected) > 1e-4


def test_resume_in_the_middle_of_an_epoch_continues_exactly(folder):
    for rank in two(folder):
        whole = rank["resumed", False]
        rest = rank["resumed", True]
        assert (whole["position"], rest["position"]) == ((0, 0), (1, 2))
        assert rest["losses"] == whole["losses"][6:]
        assert all(
            torch.equal(rest["weights"][name], value) for name, value in whole["weights"].items()
        )
        assert (rest["end"].epoch, rest["end"].samples, rest["end"].step) == (2, 0, 8)
    # dropout
    assert two(folder)[0]["resumed", False]["losses"] != pytest.approx(
        two(folder)[0]["moved"]["losses"], rel=1e-3
    )
    rest = interrupted("single", folder / "checkpoints", resumed=True)
    assert rest["losses"] == pytest.approx(two(folder)[0]["moved"]["losses"][6:], rel=1e-6)


def test_fit_gives_the_weights_of_a_loop_and_logs_its_metrics(tmp_path, capsys):
    data = pixels()
    with Lab(device="cpu", run_dir=tmp_path / "run") as lab:
        trainer = trainer_of(lab)
        for epoch in (1, 2):
            for inputs, targets in trainer.batches(data, epoch):
                trainer.step(inputs, targets)
        expected = full_weights(trainer.strategy)
        torch.manual_seed(0)
        trainer = trainer_of(lab, tasks.Segmentation())
        trainer.fit(data, data, epochs=1)
        trainer.checkpoint(tmp_path)
        trainer = trainer_of(lab)
        assert trainer.resume(tmp_path) == (1, 0)  # epochs and steps that are done
        metrics = trainer.fit(data, data, epochs=2, task=tasks.Segmentation(), log_every=2)
        assert all(
            torch.equal(full_weights(trainer.strategy)[name], value)
            for name, value in expected.items()
        )
        evaluated = trainer.evaluate(data, tasks.Segmentation())
        assert {
            f"val_{name}": value for name, value in evaluated.items()
        }.items() <= metrics.items()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [
        ("epoch", 4),
        ("step", 6),
        ("step", 8),
        ("epoch", 8),
    ]
    assert rows[-1]["val_mean_iou"] == metrics["val_mean_iou"]
    assert "epoch 2" in capsys.readouterr().out


def with_lab(use, **options):
    with Lab(device="cpu", **options) as lab:
        use(lab)


def step(criterion=loss, data=None, samples: int = BATCH, **options):
    def use(lab):
        trainer = trainer_of(lab, criterion, **options)
        if data is not None:
            next(trainer.batches(data, 0))
        inputs, targets = pixels()[:samples]
        trainer.step(inputs, targets)

    return use


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return self.scale * loss(outputs, targets)


def made(**options):
    arguments = {"model": net(), "loss": loss, "optimizer": SGD, "batch_size": BATCH} | options
    return lambda lab: lab.trainer(**arguments)


def second(lab):
    with Lab():
        pass


def reduced(outputs, targets):
    return F.cross_entropy(outputs, targets, ignore_index=IGNORE)


def badly_weighted(outputs, targets):
    return F.cross_entropy(outputs, targets, ignore_index=IGNORE, reduction="none"), torch.ones(
        len(targets)
    )


def closed(lab):
    Lab().trainer(net(), loss, SGD, batch_size=4)


MESSAGES = [
    (
        {},
        step(reduced),
        "the loss must return unreduced losses, [2, ...] for 2 samples, got []. Use "
        "reduction='none'",
    ),
    (
        {},
        step(badly_weighted),
        "weights of a loss must have the shape of its losses, [2, 8, 8], got [2]",
    ),
    (
        {},
        step(reduced, example=None),
        "the loss must return unreduced losses, [12, ...] for 12 samples, got []",
    ),
    (
        {},
        step(data=iter([])),
        "the dataset: must be a map-style dataset, with __len__, __getitem__ and at least one "
        "sample",
    ),
    ({}, step(data=[1, 2]), "the dataset: sample 0 must be (input, target), got int"),
    (
        {},
        step(samples=5),
        "step: got 5 samples on rank 0, expected 12: batch_size=12 is that of all ranks",
    ),
    ({}, second, "Lab: another one is open in this process"),
    ({}, closed, "Lab: is not open; use it as `with Lab(...) as lab:`"),
    ({}, made(batch_size=0), "batch_size=0: must be an integer of at least 1"),
    ({}, made(ema=0.5, ema_warmup="no"), "ema_warmup=no: must be true or false"),
    (
        {},
        made(loss=nn.MSELoss),
        "must be a function of (outputs, targets), or a task such as tasks.Segmentation()",
    ),
    (
        {},
        made(loss=tasks.Regression(Scaled())),
        "loss=Regression: has the parameter loss.scale, which no optimizer would train.",
    ),
    (
        {},
        made(loss=Scaled()),
        "loss=Scaled: has the parameter scale, which no optimizer would train. Make it a part of "
        "the model",
    ),
    (
        {},
        made(optimizer=SGD(net().parameters())),
        "for example partial(torch.optim.AdamW, lr=1e-3), got SGD",
    ),
    (
        {},
        made(optimizer=partial(torch.optim.SGD, lr=-1)),
        "optimizer: ValueError: Invalid learning rate: -1",
    ),
    ({}, made(example=3), "example: must be a sample of tensors, for example dataset[0], got int"),
    (
        {"strategy": "pipeline"},
        made(),
        "strategy=pipeline: cuts the model by a trace, and needs a sample for it: lab.trainer(...",
    ),
    (
        {"strategy": "split"},
        made(model=nn.Linear(3, 3)),
        "strategy=split: cuts the model by a trace, and needs a sample for it: lab.trainer(...",
    ),
    (
        {"strategy": "pipeline", "num_microbatches": 16},
        step(),
        "must not exceed the 12 samples that a pipeline gets at once",
    ),
    (
        {"strategy": "dpp"},
        made(),
        "strategy=dpp: there is no such option; allowed: ddp, ddp_pipeline, dp, fsdp",
    ),
    ({"strategy": "ddp", "bucket_cap": 1}, made(), "did you mean strategy.bucket_cap_mb?"),
    (
        {"strategy": "ddp", "batch_norm": "global"},
        made(),
        "strategy.batch_norm=global: must be local or sync",
    ),
    (
        {"tracker": "wandb"},
        made(),
        "tracker=wandb: needs the directory of the run; use Lab(..., run_dir=DIR)",
    ),
    ({"precision": "fp8"}, made(), "precision=fp8: must be float32 or bf16"),
    (
        {},
        lambda lab: trainer_of(lab).save("/proc/none/weights.safetensors"),
        "/proc/none/weights.safetensors: cannot be written",
    ),
]


@pytest.mark.parametrize(
    ("options", "use", "message"), MESSAGES, ids=[message[:40] for *_, message in MESSAGES]
)
def test_mistake_is_one_message(options, use, message):
    with pytest.raises((ConfigError, TrainingError)) as error:
        with_lab(use, **options)
    assert message in str(error.value)


def test_mistake_that_only_several_ranks_can_make_is_the_same_message_on_each(folder):
    for rank in two(folder):
        assert (
            "batch_size=5: is the global batch and must be divisible by the 2 replicas that share "
            "it; use 4 or 6" in rank["error", 5]
        )
        assert (
            "the model of rank 1 has other initial weights than that of rank 0" in rank["error", 6]
        )


@pytest.mark.parametrize(
    ("warmup", "decay"), [({}, 0.1), ({"ema_warmup": True}, 0.1), ({"ema_warmup": False}, 0.5)]
)
def test_first_average_has_the_decay_of_the_warmup_or_the_final_one(warmup, decay):
    with Lab("single", device="cpu") as lab:
        trainer = trainer_of(lab, ema=0.5, **warmup)
        weight = trainer.strategy.module[0].weight
        before = weight.detach().clone()
        trainer.step(*next(trainer.batches(pixels(), 0)))
        expected = decay * before + (1 - decay) * weight
        torch.testing.assert_close(trainer.ema.averages["0.weight"], expected)


@pytest.mark.parametrize(("other", "same"), [(float("nan"), True), (1.0, False)])
def test_models_whose_buffers_are_nan_are_compared(other, same):
    """NaN is no equal number, but a buffer may begin with it, as one of a running minimum."""

    def gather(key, sums, decide):
        of_other_rank = [torch.tensor(other).item().hex()]
        decide(json.loads(json.dumps([sums, of_other_rank])))

    model = nn.Module()
    model.register_buffer("lowest", torch.tensor(float("nan")))
    runtime = SimpleNamespace(gather_and_decide=gather)
    if same:
        require_same(model, runtime)
        return
    with pytest.raises(ConfigError, match="the model of rank 1 has other initial weights"):
        require_same(model, runtime)
