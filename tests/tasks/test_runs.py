"""train.py with tasks other than classification: equal metrics, and use of the runs."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from launches import main_in_world, read_metrics, refusal_in_world
from worlds import run_world

from ddp_lab.commands import evaluate, export, predict
from ddp_lab.tasks.tokens import Tokens

SHORT = ["epochs=2", "device=cpu", "data.num_workers=0", "optimizer.lr=0.3"]
MASKS = [
    "task=segmentation",
    "data=own",
    "data.dataset._target_=own_datasets.Masks",
    "data.num_classes=2",
]
MASKS += [
    "data.flip=true",
    "data.crop_padding=2",
    "batch_size=16",
    "model=own",
    "model._target_=own_models.segmenter",
]
NUMBERS = [
    "task=regression",
    "data=own",
    "data.dataset._target_=own_datasets.numbers",
    "batch_size=16",
]
NUMBERS += ["model=own", "model._target_=own_models.regressor"]
TEXT = [
    "task=tokens",
    "data=text",
    "data.context=16",
    "model=gpt",
    "model.depth=2",
    "model.width=32",
    "batch_size=16",
]
TIED = ["model.tied=true", "epochs=3"]
ADAMW = ["optimizer=adamw", "optimizer.lr=0.005"]


def train(runs: list[list[str]]) -> None:
    for overrides in runs:
        main_in_world(*SHORT, *overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Train on masks, on numbers, and on a text alone and in a pipeline."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_bytes(b"to be or not, " * 90)
    words = [*TEXT, *ADAMW, f"data.root={text}", f"runs_dir={folder}"]
    choose = [
        "checkpoint.best=val_mae",
        "patience=2",
        "epochs=3",
        "optimizer.lr=0.01",
        f"runs_dir={folder}",
    ]
    runs = [
        [*MASKS, f"runs_dir={folder}", "name=masks"],
        [*NUMBERS, *choose, "name=numbers"],
        [*words, *TIED, "name=text-single"],
    ]
    run_world(1, train, runs)
    run_world(
        2, train, [[*words, *TIED, "strategy=pipeline", "accumulate=2", "name=text-pipeline"]]
    )
    return folder


@pytest.fixture(scope="module")
def learned(folder) -> Path:
    """A run that has learned the text."""
    words = [*TEXT, *ADAMW, f"data.root={folder / 'text.txt'}", f"runs_dir={folder}"]
    run_world(1, train, [[*words, "epochs=40", "name=learned"]])
    return folder / "learned"


@pytest.mark.slow
def test_best_checkpoint_and_patience_follow_a_metric_of_the_task(folder):
    errors = [row["val_mae"] for row in read_metrics(folder / "numbers")]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 3
    assert "result: epoch 3 (best val_mae), " in (folder / "numbers" / "train.log").read_text()


@pytest.mark.slow
def test_text_gives_the_same_losses_in_a_pipeline_and_is_continued(folder, learned, command):
    expected, results = (
        read_metrics(folder / f"text-{each}")[-1] for each in ("single", "pipeline")
    )
    for key in ("train_loss", "val_perplexity", "val_bits_per_byte"):
        assert results[key] == pytest.approx(expected[key], rel=1e-3), key
    code, output, errors = command(predict.main, learned, *PROMPT)
    assert (code, output) == (0, "to be or not,\n"), output + errors


def test_text_of_a_tied_head_is_the_same_after_a_pipeline(folder, command):
    texts = []
    for run in ("text-single", "text-pipeline"):
        code, output, errors = command(predict.main, folder / run, *PROMPT)
        assert code == 0, output + errors
        code, _, errors = command(evaluate.main, folder / run, "--json", folder / "found.json")
        assert code == 0, errors
        results = json.loads((folder / "found.json").read_text())
        assert results["val_loss"] == pytest.approx(read_metrics(folder / run)[-1]["val_loss"])
        texts.append(output)
    assert texts[0] == texts[1]


PROMPT = ["--prompt", "to be or ", "--tokens", "4", "--temperature", "0"]


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        (
            "text-single",
            ["missing.txt"],
            "its task is Tokens, for which predict needs --prompt TEXT",
        ),
        (
            "text-single",
            [*PROMPT, "--output", 1],
            "--output 1: is for images; leave it out; the text is printed",
        ),
        ("text-single", [*PROMPT, "--top", 1], "--top 1: is for images"),
        (
            "masks",
            ["text.txt", "--tokens", 3],
            "--tokens 3: is for a text, with --prompt; leave it out",
        ),
        ("masks", ["text.txt"], "its task is Segmentation, for which predict is not made"),
    ],
)
def test_predict_refuses_what_is_for_another_task(run, arguments, message, folder, command):
    code, output, errors = command(predict.main, folder / run, *arguments)
    assert (code, message in errors + output) == (2, True), errors + output


def test_other_tasks_are_logged_evaluated_and_exported(folder, command, tmp_path):
    expected = read_metrics(folder / "masks")[-1]
    assert (
        f"mean_iou {expected['val_mean_iou']:.4f}" in (folder / "masks" / "train.log").read_text()
    )
    code, _, errors = command(evaluate.main, folder / "masks", "--json", tmp_path / "found.json")
    assert code == 0, errors
    assert json.loads((tmp_path / "found.json").read_text())["val_mean_iou"] == pytest.approx(
        expected["val_mean_iou"]
    )
    code, _, errors = command(
        export.main, folder / "text-single", "--output", tmp_path / "text.pt2"
    )
    assert code == 0, errors
    logits = torch.export.load(tmp_path / "text.pt2").module()(
        torch.zeros(3, 16, dtype=torch.int64)
    )
    assert logits.shape == (3, 16, 256)
    assert Tokens().sums(logits, torch.zeros(3, 16, dtype=torch.int64))["tokens"] == 48


def stopped_and_resumed(folder: Path, strategies: list[str]) -> None:
    """Train with dropout without a stop, and stopped by a signal within an epoch and resumed."""
    for strategy in strategies:
        for name in ("straight", "stopped", "stopped"):
            inject = ["inject=sigterm@rank=0,step=4"] if name == "stopped" else []
            with suppress(SystemExit):
                main_in_world(
                    *SHORT,
                    *NUMBERS,
                    f"strategy={strategy}",
                    *inject,
                    f"runs_dir={folder}/{strategy}",
                    f"name={name}",
                )


@pytest.mark.slow
def test_run_with_dropout_that_is_resumed_in_an_epoch_is_bitwise_the_same(tmp_path):
    run_world(1, stopped_and_resumed, tmp_path, ["single"])
    run_world(2, stopped_and_resumed, tmp_path, ["ddp", "pipeline"])
    for strategy in ("single", "ddp", "pipeline"):
        straight, stopped = (
            read_metrics(tmp_path / strategy / name) for name in ("straight", "stopped")
        )
        assert "resumed from" in (tmp_path / strategy / "stopped" / "train.log").read_text()
        for one, other in zip(straight, stopped, strict=True):
            assert {key: one[key] for key in one if "loss" in key} == {
                key: other[key] for key in other if "loss" in key
            }


MISTAKES = [
    (
        "data=digits task=regression model=lenet",
        "the outputs must have the shape of the targets, [2], got [2, 10]",
    ),
    (
        "data=own data.dataset._target_=own_datasets.numbers model=own "
        "model._target_=own_models.regressor",
        "needs a dataset with a class for each sample; set data.num_classes, or choose another "
        "task",
    ),
    (
        "data=text data.root=README.md model=gpt",
        "task=classification: needs a dataset with a class for each sample; use task=tokens",
    ),
    (
        "data=digits task=regression loss=cross_entropy",
        "loss=cross_entropy: is for task=classification, got",
    ),
    (
        f"{' '.join(NUMBERS)} checkpoint.best=val_accuracy",
        "checkpoint.best=val_accuracy: Regression has no such metric for these data; allowed: "
        "val_loss, val_mae, val_rmse",
    ),
    (
        "data=synthetic data.dataset.num_classes=5 data.val_fraction=0.1 "
        "checkpoint.best=val_top5_accuracy",
        "val_top5_accuracy: Classification has no such metric for these data; allowed: val_loss, "
        "val_accuracy. A",
    ),
    ("mixup=0.2 task=regression", "mixup=0.2, cutmix=0: are for task=classification"),
    (
        "task=regression data=own data.dataset._target_=own_datasets.numbers data.flip=true "
        "model=own model._target_=own_models.regressor",
        "data.crop_padding=0, data.flip=true: are for images",
    ),
    (
        "task=tokens data=text data.root=missing.txt model=gpt",
        "data.root=missing.txt: cannot be read on",
    ),
]


def refusals(lines: list[str]) -> list[tuple[object, str]]:
    return [refusal_in_world(line) for line in lines]


def test_mistakes_are_one_message():
    ended = run_world(1, refusals, [overrides for overrides, _ in MISTAKES])[0]
    for (overrides, message), (code, printed) in zip(MISTAKES, ended, strict=True):
        assert (code, printed.count(message)) == (2, 1), f"{overrides}: {printed}"
