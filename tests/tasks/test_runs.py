"""train.py with tasks other than classification: the same metrics under every strategy, and what is done with the runs."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from launches import main_in_world, read_metrics, refusal_in_world
from worlds import once, run_world

from ddp_lab.commands import evaluate, export, predict
from ddp_lab.tasks.tokens import Tokens

SHORT = ["epochs=2", "device=cpu", "data.num_workers=0", "optimizer.lr=0.3"]
MASKS = ["task=segmentation", "data=own", "data.dataset._target_=own_datasets.Masks", "data.num_classes=2"]
MASKS += ["data.flip=true", "data.crop_padding=2", "batch_size=16", "model=own", "model._target_=own_models.segmenter"]
NUMBERS = ["task=regression", "data=own", "data.dataset._target_=own_datasets.numbers", "batch_size=16"]
NUMBERS += ["model=own", "model._target_=own_models.regressor"]
TEXT = ["task=tokens", "data=text", "data.context=16", "model=gpt", "model.depth=2", "model.width=32", "batch_size=16"]
STRATEGIES = {
    "single": ([], 1),
    "ddp": (["strategy=ddp", "accumulate=2"], 2),
    "pipeline": (["strategy=pipeline", "accumulate=2"], 2),
    "fsdp": (["strategy=fsdp"], 2),
}


def train(runs: list[list[str]]) -> None:
    for overrides in runs:
        main_in_world(*overrides)


@once
def trained(folder: str) -> Path:
    """Train on masks under all strategies, and on a text, in two worlds."""
    text = Path(folder, "text.txt")
    text.write_bytes(b"to be or not, " * 90)
    for size in (1, 2):
        chosen = {name: options for name, (options, ranks) in STRATEGIES.items() if ranks == size}
        runs = [[*SHORT, *MASKS, *options, f"runs_dir={folder}", f"name=masks-{name}"] for name, options in chosen.items()]
        for name, epochs in (("single", 3), ("long", 40)) if size == 1 else (("pipeline", 3),):
            options = ["optimizer=adamw", "optimizer.lr=0.005", f"epochs={epochs}", *chosen.get(name, [])]
            runs.append([*SHORT, *TEXT, *options, f"data.root={text}", f"runs_dir={folder}", f"name=text-{name}"])
        if size == 1:
            choose = ["checkpoint.best=val_mae", "patience=2", "epochs=3", "optimizer.lr=0.01"]
            runs.append([*SHORT, *NUMBERS, *choose, f"runs_dir={folder}", "name=numbers"])
        run_world(size, train, runs)
    return Path(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return trained(str(tmp_path_factory.mktemp("runs")))


@pytest.mark.parametrize("name", ["ddp", "pipeline", "fsdp"])
def test_masks_give_the_same_metrics_under_every_strategy(name, folder):
    expected, found = (read_metrics(folder / f"masks-{each}") for each in ("single", name))
    assert expected[-1]["val_mean_iou"] > expected[0]["val_mean_iou"] > 0.2
    assert f"mean_iou {found[-1]['val_mean_iou']:.4f}" in (folder / f"masks-{name}" / "train.log").read_text()
    for one, other in zip(expected, found, strict=True):
        for key in ("train_loss", "val_loss", "val_accuracy", "val_mean_iou"):
            assert other[key] == pytest.approx(one[key], rel=1e-5), key


def test_best_checkpoint_and_patience_follow_a_metric_of_the_task(folder):
    errors = [row["val_mae"] for row in read_metrics(folder / "numbers")]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 3
    assert "result: epoch 3 (best val_mae), " in (folder / "numbers" / "train.log").read_text()


def test_text_gives_the_same_losses_in_a_pipeline_and_is_continued(folder, command):
    expected, found = (read_metrics(folder / f"text-{each}")[-1] for each in ("single", "pipeline"))
    for key in ("train_loss", "val_perplexity", "val_bits_per_byte"):
        assert found[key] == pytest.approx(expected[key], rel=1e-3), key
    prompt = ["--prompt", "to be or ", "--tokens", "4", "--temperature", "0"]
    code, output, errors = command(predict.main, folder / "text-long", *prompt)
    assert (code, output) == (0, "to be or not,\n"), output + errors
    code, output, errors = command(predict.main, folder / "text-single", folder / "missing.txt")
    assert code == 2
    assert "its task is Tokens, for which predict needs --prompt TEXT" in errors + output
    for option, message in (("--output", ": is for images; leave it out; the text is printed"), ("--top", ": is for images")):
        code, output, errors = command(predict.main, folder / "text-single", *prompt, option, 1)
        assert (code, f"{option} 1{message}" in errors + output) == (2, True), errors + output
    code, output, errors = command(predict.main, folder / "masks-single", folder / "text.txt", "--tokens", 3)
    assert (code, "--tokens 3: is for a text, with --prompt; leave it out" in errors + output) == (2, True), errors + output
    code, output, errors = command(predict.main, folder / "masks-single", folder / "text.txt")
    assert (code, "its task is Segmentation, for which predict is not made" in errors + output) == (2, True), errors + output


def test_other_tasks_are_evaluated_and_exported(folder, command, tmp_path):
    code, _, errors = command(evaluate.main, folder / "masks-single", "--json", tmp_path / "found.json")
    assert code == 0, errors
    expected = read_metrics(folder / "masks-single")[-1]
    assert json.loads((tmp_path / "found.json").read_text())["val_mean_iou"] == pytest.approx(expected["val_mean_iou"])
    code, _, errors = command(export.main, folder / "text-single", "--output", tmp_path / "text.pt2")
    assert code == 0, errors
    logits = torch.export.load(tmp_path / "text.pt2").module()(torch.zeros(3, 16, dtype=torch.int64))
    assert logits.shape == (3, 16, 256)
    assert Tokens().sums(logits, torch.zeros(3, 16, dtype=torch.int64))["tokens"] == 48


def stopped_and_resumed(folder: str, more: list[str]) -> None:
    """Train with dropout without a stop, and stopped by a signal in the middle of an epoch and resumed."""
    for name in ("straight", "stopped", "stopped"):
        inject = ["inject=sigterm@rank=0,step=4"] if name == "stopped" else []
        with suppress(SystemExit):
            main_in_world(*SHORT, *NUMBERS, *more, *inject, f"runs_dir={folder}", f"name={name}")


@pytest.mark.parametrize("strategy", ["single", "ddp", "pipeline"])
def test_run_with_dropout_that_is_resumed_in_an_epoch_is_bitwise_the_same(strategy, tmp_path):
    run_world(1 if strategy == "single" else 2, stopped_and_resumed, str(tmp_path), [f"strategy={strategy}"])
    straight, stopped = (read_metrics(tmp_path / name) for name in ("straight", "stopped"))
    assert "resumed from" in (tmp_path / "stopped" / "train.log").read_text()
    for one, other in zip(straight, stopped, strict=True):
        assert {key: one[key] for key in one if "loss" in key} == {key: other[key] for key in other if "loss" in key}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("data=digits task=regression model=lenet", "the outputs must have the shape of the targets, [2], got [2, 10]"),
        (
            "data=own data.dataset._target_=own_datasets.numbers model=own model._target_=own_models.regressor",
            "needs a dataset with a class for each sample; set data.num_classes, or choose another task",
        ),
        (
            "data=text data.root=README.md model=gpt",
            "task=classification: needs a dataset with a class for each sample; use task=tokens",
        ),
        ("data=digits task=regression loss=cross_entropy", "loss=cross_entropy: is for task=classification, got"),
        (
            f"{' '.join(NUMBERS)} checkpoint.best=val_accuracy",
            "checkpoint.best=val_accuracy: Regression has no such metric for these data; allowed: val_loss, val_mae, val_rmse",
        ),
        (
            "data=synthetic data.dataset.num_classes=5 data.val_fraction=0.1 checkpoint.best=val_top5_accuracy",
            "val_top5_accuracy: Classification has no such metric for these data; allowed: val_loss, val_accuracy. A",
        ),
        ("mixup=0.2 task=regression", "mixup=0.2, cutmix=0: are for task=classification"),
        (
            "task=regression data=own data.dataset._target_=own_datasets.numbers data.flip=true model=own "
            "model._target_=own_models.regressor",
            "data.crop_padding=0, data.flip=true: are for images",
        ),
        ("task=tokens data=text data.root=missing.txt model=gpt", "data.root=missing.txt: cannot be read on"),
    ],
)
def test_mistakes_are_one_message(overrides, message):
    code, printed = run_world(1, refusal_in_world, overrides)[0]
    assert (code, f"error: {message}" in printed or message in printed) == (2, True), printed
