"""Every config key and every flag, from the command line to an effect that a user sees.

One without a row fails here.

A row is a run with the key on its command line, and the effect. A test elsewhere that drives a key
or a flag to its effect has the marker `covers` instead. The runs are short and follow each other in
one process.
"""

import ast
import contextlib
import functools
import importlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from configs import CONF, config
from image_folders import write_folder
from launches import ROOT, SMALL, main_in_world, read_metrics
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file
from slow_rows import slow_but
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from worlds import run_world

from ddp_lab.__main__ import COMMANDS
from ddp_lab.commands import advise, evaluate, export, predict, train
from ddp_lab.config.build import call_target
from ddp_lab.config.errors import TrainingError
from ddp_lab.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StragglerConfig,
)
from ddp_lab.launchers.start_ranks import read_options

# whose keys are parameters of a constructor
GROUPS = ("strategy", "task", "loss", "scheduler", "model", "data.dataset")
BASE = [
    *SMALL,
    "data.dataset.train_size=40",
    "data.dataset.test_size=20",
    "batch_size=20",
    "epochs=1",
    "strategy=single",
]
FILES = [override for override in BASE if not override.startswith("data")]  # for other datasets
OWN = [
    "data=own",
    "data.dataset._target_=own_datasets.Shapes",
    "data.image_size=24",
    "data.resize=28",
]
OWN += ["data.num_workers=0", "data.mean=[0.5]", "data.std=[0.2]"]
WORKERS = ["data=own", "data.dataset._target_=own_datasets.Workers", "data.num_classes=2"]
MASKS = [
    "task=segmentation",
    "data=own",
    "data.mean=[0.0]",
    "data.std=[1.0]",
    "data.dataset._target_=own_datasets.Masks",
]
MASKS += [
    "data.num_workers=0",
    "data.num_classes=2",
    "model=own",
    "model._target_=own_models.segmenter",
]
NUMBERS = ["data=own", "data.dataset._target_=own_datasets.numbers", "data.num_workers=0"]
NUMBERS += ["model=own", "model._target_=own_models.regressor"]
# samples of three parts, of which the target is the second one; and dicts of different lengths
POINTS = "task=regression data=own data.dataset._target_=own_datasets.Points data.num_workers=0 "
POINTS += "model=own model._target_=own_models.Product"
TEXTS = "data=own data.dataset._target_=own_datasets.Texts data.num_workers=0 data.targets=label "
TEXTS += "model=own model._target_=own_models.Reader"
TEXT = [
    "task=tokens",
    "data=text",
    "data.root={SENTENCES}",
    "data.num_workers=0",
    "data.context=16",
    "model=gpt",
]
GPT = ["model.depth=1", "model.width=16", "model.heads=2", "optimizer.lr=1"]
TEXT += GPT
HF = "data=hf data.root={HF} data.num_workers=0 data.image_size=16 data.test_split=test"
# its best epoch is not its last one
CHOSEN = "data.val_fraction=0.25 epochs=3 optimizer.lr=0.3 scheduler=constant"
# two layers with the same weight
SHARED = "model=own model._target_=own_models.twice ema=0.5 checkpoint.format=sharded"
SOME_STEPS = (
    # without the key ddp ends with an error (tests/models/test_own.py)
    "model=own model._target_=own_models.SomeSteps"
)
NORMED = f"{SHARED} +model.shared=false"  # and BatchNorm, which both models have

TRIPLET = "accumulate=2 loss=own loss._target_=batch_losses.triplet"  # a loss over the batch


class Ended(NamedTuple):
    """A run: its exit code, its error, what it returned to a sweeper, and its directory."""

    code: object
    errors: str
    returned: float | None
    path: Path

    @property
    def last(self) -> dict[str, Any]:
        return read_metrics(self.path)[-1]

    @property
    def log(self) -> str:
        return (self.path / "train.log").read_text()

    @property
    def checkpoints(self) -> list[str]:
        return sorted(
            path.name for path in (self.path / "checkpoints").glob("*") if path.suffix != ".sha256"
        )


Effect = Callable[[Ended, Ended], bool]


class Row(NamedTuple):
    """A run, and whether it shows the effect of a key.

    Attributes:
        overrides: of `train.py`, besides BASE.
        effect: of the run and of the run to compare it with.
        base: overrides of that run, besides BASE.
    """

    overrides: str
    effect: Effect
    base: str = ""


def changes(*metrics: str) -> Effect:
    return lambda run, base: (
        run.code == base.code == 0 and all(run.last[name] != base.last[name] for name in metrics)
    )


def logs(text: str) -> Effect:
    return lambda run, base: text in run.log and text not in base.log


def has(name: str, value: float) -> Effect:
    return lambda run, base: run.last[name] == pytest.approx(value) != base.last[name]


def keeps(*checkpoints: str) -> Effect:
    return lambda run, base: run.checkpoints == sorted(checkpoints) != base.checkpoints


def reports(*metrics: str) -> Effect:
    return lambda run, base: run.last.keys() >= {*metrics} and not base.last.keys() & {*metrics}


def refused(text: str) -> Effect:
    return lambda run, base: run.code == 2 and f"error: {text}" in run.errors


def allows(text: str) -> Effect:
    return lambda run, base: run.code == 0 and base.code == 2 and text in base.errors


def writes(name: str) -> Effect:
    return lambda run, base: (run.path / name).exists() and not (base.path / name).exists()


TRAINED = changes("train_loss", "test_loss")
TESTED = changes("test_loss")
VALIDATED = changes("train_loss", "val_loss")
STEPS = [f"step_{step:08}.pt" for step in range(7)]
# {FOLDER} is a folder of images, {RUN} the directory of the base run, {NEW} a new directory.
FOLDER = "data=folder data.root={FOLDER} data.image_size=16 data.num_workers=0"
KEYS: dict[str, Row] = {
    "seed": Row("seed=1", TRAINED),
    "epochs": Row(
        "epochs=2", lambda run, base: [row["epoch"] for row in read_metrics(run.path)] == [1, 2]
    ),
    "batch_size": Row("batch_size=10", has("step", 4)),
    "lr_scaling": Row(
        "scheduler=constant lr_scaling=linear lr_base_batch_size=10", has("lr", 0.02)
    ),
    "lr_base_batch_size": Row(
        "scheduler=constant lr_scaling=linear lr_base_batch_size=5", has("lr", 0.04)
    ),
    "evaluate_every": Row(
        "evaluate_every=1",
        lambda run, base: "epoch 1, step 1: test loss" in run.log and "step 1:" not in base.log,
    ),
    "max_steps": Row("max_steps=1", has("step", 1)),
    "max_tokens": Row("{TEXT} max_tokens=330", has("step", 2), "{TEXT}"),
    "max_minutes": Row("epochs=null max_minutes=0.001", logs("max_minutes=0.001 have passed")),
    "warmup_epochs": Row("warmup_epochs=1", has("lr", 0.01 * 2 / 3)),
    "warmup_steps": Row("warmup_steps=1", has("lr", 0.01)),
    # statistics of BatchNorm are of micro-batches
    "accumulate": Row(f"{NORMED} accumulate=2", TRAINED, NORMED),
    "loss_over_batch": Row(
        f"{TRIPLET} loss_over_batch=true",
        allows("the loss is not a sum over samples: it "),
        TRIPLET,
    ),
    "checkpoint_activations": Row(
        "model=own model._target_=own_models.Plain strategy=split strategy.devices=[cpu,cpu] "
        "checkpoint_activations=block",
        refused("checkpoint_activations=block: is not supported by strategy=split for a model"),
    ),
    "max_grad_norm": Row("max_grad_norm=0.001", TRAINED),
    "ema": Row("ema=0.9", TESTED),
    "ema_warmup": Row("ema=0.9 ema_warmup=false", TESTED, "ema=0.9"),
    "decay_norms_and_biases": Row(
        "optimizer.weight_decay=9 decay_norms_and_biases=false", TESTED, "optimizer.weight_decay=9"
    ),
    "mixup": Row("mixup=0.9", TRAINED),
    "cutmix": Row("cutmix=0.9", TRAINED),
    "device": Row("device=cuda:9", refused("device=cuda:9: there is no such device")),
    "precision": Row("precision=bf16", TRAINED),
    "cuda_graph": Row("cuda_graph=true", logs("cuda_graph=true is disabled: no GPU is available")),
    "compile": Row(
        "strategy=dp compile=true", logs("compile=true is disabled: not supported by strategy=dp")
    ),
    "channels_last": Row(
        "strategy=fsdp channels_last=true",
        logs("channels_last=true is disabled: not supported by strat"),
    ),
    "name": Row(
        "name=other", lambda run, base: (run.path.parent / "other" / "metrics.jsonl").exists()
    ),
    "runs_dir": Row(
        "runs_dir={NEW}/runs",
        lambda run, base: any(run.path.parent.glob("new*/runs/*/metrics.jsonl")),
    ),
    "resume": Row("epochs=2 resume={RUN}/checkpoints/" + STEPS[2], has("step", 4)),
    "on_nan": Row("inject=nan@rank=0,step=1 on_nan=skip", lambda run, base: run.code == 0),
    "patience": Row(
        "data.val_fraction=0.25 epochs=4 optimizer.lr=1e-12 patience=1", logs("stopped early: ")
    ),
    "evaluate_test": Row(
        "epochs=2 evaluate_test=end", lambda run, base: "test_loss" not in read_metrics(run.path)[0]
    ),
    "optimize": Row(
        "data.val_fraction=0.25 optimize=val_accuracy",
        lambda run, base: run.returned == run.last["val_accuracy"] != base.returned,
        "data.val_fraction=0.25",
    ),
    "log_every": Row(
        "log_every=off",
        lambda run, base: run.code == 0 and writes("steps")(base, run),
        "log_every=1",
    ),
    "metrics": Row(
        "metrics=[{{_target_:torchmetrics.AUROC,task:multiclass,num_classes:10}},"
        "{{_target_:own_metrics.Seen,name:samples}}]",
        lambda run, base: (
            reports("test_auroc", "test_samples")(run, base)
            and run.last["test_samples"] == 20
            and run.last["test_loss"] == base.last["test_loss"]
        ),
    ),
    "tracker": Row(
        "tracker=none",
        lambda run, base: not any(run.path.glob("events.*")) and any(base.path.glob("events.*")),
    ),
    "checkpoint.every_epochs": Row(
        "epochs=2 checkpoint.every_epochs=2", keeps(STEPS[4]), "epochs=2"
    ),
    "checkpoint.every_minutes": Row("checkpoint.every_minutes=1e-9", keeps(*STEPS[1:3])),
    "checkpoint.every_steps": Row("checkpoint.every_steps=1", keeps(*STEPS[1:3])),
    "checkpoint.at_steps": Row("checkpoint.at_steps=[1]", keeps(*STEPS[1:3])),
    "checkpoint.keep": Row(
        "epochs=3 checkpoint.keep=3", keeps(STEPS[2], STEPS[4], STEPS[6]), "epochs=3"
    ),
    "checkpoint.best": Row(
        "data.val_fraction=0.25 checkpoint.best=null", keeps(STEPS[2]), "data.val_fraction=0.25"
    ),
    "checkpoint.on_error": Row(
        "inject=disk_full@rank=0,step=1 checkpoint.on_error=continue",
        lambda run, base: run.code == 0,
    ),
    "checkpoint.format": Row("checkpoint.format=sharded", keeps("step_00000002.sharded")),
    "checkpoint.mirror": Row(
        "checkpoint.mirror=file://{NEW}/mirror",
        lambda run, base: any(
            run.path.parent.glob(f"new*/mirror/{run.path.name}/{STEPS[2]}/SHA256SUMS")
        ),
    ),
    "data.root": Row(
        f"{FOLDER} data.crop_scale=null",
        lambda run, base: "class 0" in (run.path / "data.json").read_text(),
    ),
    "data.loader": Row(
        FOLDER.replace("data.num_workers=0", "data.loader=device"),
        refused("data.loader=device: is not supported"),
    ),
    "data.num_workers": Row(
        "{WORKERS} data.num_workers=2", TRAINED, "{WORKERS} data.num_workers=1"
    ),
    "data.crop_padding": Row("data.crop_padding=3", TRAINED),
    "data.flip": Row("data.flip=true", TRAINED),
    "data.val_fraction": Row(
        "data.val_fraction=0.25",
        lambda run, base: "val_loss" in run.last and "val_loss" not in base.last,
    ),
    "data.val_seed": Row(
        "data.val_fraction=0.25 data.val_seed=1", changes("val_loss"), "data.val_fraction=0.25"
    ),
    "data.mean": Row("data.mean=[0.4]", TRAINED),
    "data.std": Row("data.std=[0.3]", TRAINED),
    "data.channels": Row("{OWN} data.channels=1", VALIDATED, "{OWN}"),
    "data.image_size": Row("{OWN} data.image_size=20", VALIDATED, "{OWN}"),
    "data.resize": Row("{OWN} data.resize=32", VALIDATED, "{OWN}"),
    "data.crop_scale": Row("{OWN} data.crop_scale=[0.5,1]", VALIDATED, "{OWN}"),
    "data.randaugment": Row("{OWN} data.randaugment=9", VALIDATED, "{OWN}"),
    "data.erasing": Row("{OWN} data.erasing=1", VALIDATED, "{OWN}"),
    "data.context": Row("{TEXT} data.context=8", VALIDATED, "{TEXT}"),
    "data.num_classes": Row("{OWN} data.num_classes=5", VALIDATED, "{OWN}"),
    "data.targets": Row(
        f"{POINTS} data.targets=-2", allows("must be (input, target), got tuple of 3"), POINTS
    ),
    "data.val_split": Row(
        "{OWN} data.val_split=null data.test_split=val",
        lambda run, base: "val_loss" not in run.last,
        "{OWN}",
    ),
    "data.test_split": Row(
        "{OWN} data.test_split=test", lambda run, base: "test_loss" in run.last, "{OWN}"
    ),
    "model.weights": Row("model.weights={RUN}/checkpoints/" + STEPS[2], TRAINED),
    "model.weights_except": Row(
        "model.weights={RUN}/checkpoints/" + STEPS[2] + " model.weights_except=['*.bias']",
        TRAINED,
        "model.weights={RUN}/checkpoints/" + STEPS[2],
    ),
    "model.init": Row("model.init=by_block", TRAINED),
    "optimizer.lr": Row("optimizer.lr=0.02", TESTED),
    "optimizer.momentum": Row("optimizer.momentum=0.5", TESTED),
    "optimizer.weight_decay": Row("optimizer.weight_decay=0.5", TESTED),
    "optimizer.nesterov": Row("optimizer.nesterov=true", TESTED),
    "optimizer.fused": Row(
        "optimizer._target_=torch.optim.RMSprop ~optimizer.nesterov optimizer.fused=true",
        refused("optimizer.fused=True: there is no such key"),
    ),
}
# More rows: groups and their options, and keys that tensors use in another way than images of
# Pillow.
MORE: dict[str, dict[str, Row]] = {
    "group": {
        "task": Row("{MASKS} task=segmentation", reports("val_mean_iou", "val_accuracy")),
        "data": Row("{TEXT} data=text", reports("val_perplexity", "val_bits_per_byte")),
        "data.collate_fn._target_": Row(
            f"{TEXTS} data.collate_fn._target_=own_datasets.pad",
            allows('inputs["text"] is str. Text must become numbers'),
            TEXTS,
        ),
        "data.targets": Row(
            f"{TEXTS} data.collate_fn._target_=own_datasets.unlabelled data.targets=null "
            "task._target_=ddp_lab.tasks.Task loss=own loss._target_=own_losses.of_outputs",
            allows("the targets of the train set are none; expected a class for each sample"),
            f"{TEXTS} data.collate_fn._target_=own_datasets.unlabelled data.targets=null",
        ),
        "optimizer._target_": Row(
            "optimizer._target_=torch.optim.RMSprop ~optimizer.nesterov", TRAINED
        ),
        "task.ignore": Row(
            "{MASKS} data.num_classes=256 task.ignore=0", VALIDATED, "{MASKS} data.num_classes=256"
        ),
        "model.depth": Row("{TEXT} model.depth=2", VALIDATED, "{TEXT}"),
        "model.width": Row("{TEXT} model.width=8", VALIDATED, "{TEXT}"),
        "model.heads": Row("{TEXT} model.heads=4", VALIDATED, "{TEXT}"),
        "model.tied": Row("{TEXT} model.tied=true", VALIDATED, "{TEXT}"),
        "strategy.find_unused_parameters": Row(
            f"strategy=ddp {SOME_STEPS} strategy.find_unused_parameters=true", TRAINED
        ),
    },
    "scratch": {
        "strategy.find_unused_parameters": Row(
            "strategy=scratch strategy.find_unused_parameters=true compile=true",
            logs(
                "compile=true is disabled: compiled steps of strategy.find_unused_parameters=true "
                "were never tested"
            ),
        ),
    },
    "fsdp": {
        "strategy.keep_whole": Row(
            "strategy=fsdp strategy.keep_whole=[conv*]",
            logs("parameters gathered separately: head\n"),
            "strategy=fsdp",
        ),
    },
    "tensors": {
        "data.num_classes": Row("{MASKS} data.num_classes=256", VALIDATED, "{MASKS}"),
        "data.val_split": Row(
            "{MASKS} data.val_split=null data.test_split=val", reports("test_mean_iou"), "{MASKS}"
        ),
        "data.test_split": Row(
            "{MASKS} data.val_split=null data.test_split=val", reports("test_loss"), "{MASKS}"
        ),
        "data.val_fraction": Row(
            "{MASKS} data.val_split=null data.val_fraction=0.5", has("step", 1), "{MASKS}"
        ),
        "data.crop_padding": Row("{MASKS} data.crop_padding=2", VALIDATED, "{MASKS}"),
        "data.flip": Row("{MASKS} data.flip=true", VALIDATED, "{MASKS}"),
    },
    "hf": {
        "data.root": Row(HF, lambda run, base: '"dark"' in (run.path / "data.json").read_text()),
        "data.test_split": Row(
            f"{HF} data.val_split=test data.test_split=null", reports("val_accuracy"), HF
        ),
        "data.num_classes": Row(
            f"{HF} data.dataset.targets=number data.num_classes=6",
            reports("test_top5_accuracy"),
            HF,
        ),
        "data.context": Row(
            f"{HF} data.dataset.inputs=text data.dataset.targets=null data.context=16 task=tokens "
            f"model=gpt {' '.join(GPT)}",
            reports("test_perplexity"),
            HF,
        ),
    },
    "labels": {"task": Row("{NUMBERS} task=multi_label", reports("val_f1_micro", "val_f1_macro"))},
}
ROWS = {(key, ""): row for key, row in KEYS.items()}
ROWS |= {(key, kind): row for kind, rows in MORE.items() for key, row in rows.items()}


def run_all(folder: str, lines: list[str]) -> list[tuple[object, str, float | None]]:
    """Run train.py with each line of overrides; return exit codes, errors, sweepers' values.

    It runs in this process.
    """
    outcomes = []
    returned = []
    train_rank = train.train_rank

    def recorded(cfg: Any) -> None:
        returned.append(train_rank(cfg))

    train.train_rank = recorded
    for number, line in enumerate(lines):
        returned.clear()
        with tempfile.TemporaryFile("w+") as printed, contextlib.redirect_stderr(printed):
            try:
                main_in_world(
                    *(FILES if "data=" in line else BASE),
                    f"runs_dir={folder}",
                    f"name=run{number}",
                    *line.split(),
                )
                code = 0
            except SystemExit as ended:
                code = ended.code
            except TrainingError as error:
                code = f"{error}"
            printed.seek(0)
            outcomes.append((code, printed.read(), *(returned or [None])))
    return outcomes


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Ended]:
    """Return the runs of KEYS, and those that they are compared with, by their overrides."""
    others = ["", CHOSEN, SHARED, NORMED, "{TEXT}"]
    return runs_of(tmp_path_factory.mktemp("runs"), others, KEYS.values())


@pytest.fixture(scope="module")
def further_runs(tmp_path_factory) -> dict[str, Ended]:
    """Return the runs of MORE."""
    rows = (row for rows in MORE.values() for row in rows.values())
    return runs_of(tmp_path_factory.mktemp("further"), [""], rows)


def runs_of(folder: Path, others: list[str], rows: Iterable[Row]) -> dict[str, Ended]:
    """Return the runs of others and of rows, and what these are compared with."""
    from hf_datasets import write_hf  # takes 2 s, which all processes of pytest would spend

    images = write_folder(folder / "images", {"train": 20, "test": 6}, sides=(20, 30))
    (folder / "sentences.txt").write_bytes(b"to be or not, " * 90)
    lines = [*others, *(line for row in rows for line in (row.base, row.overrides))]
    lines = list(dict.fromkeys(lines))
    if any("{HF}" in line for line in lines):
        write_hf(folder / "hf")
    names = {
        "FOLDER": images,
        "RUN": folder / "run0",
        "OWN": " ".join(OWN),
        "WORKERS": " ".join(WORKERS),
    }
    text = " ".join(TEXT).format(SENTENCES=folder / "sentences.txt")
    names |= {
        "MASKS": " ".join(MASKS),
        "NUMBERS": " ".join(NUMBERS),
        "TEXT": text,
        "HF": folder / "hf",
    }
    filled = [
        line.format(NEW=folder / f"new{number}", **names) for number, line in enumerate(lines)
    ]
    (ended,) = run_world(1, run_all, str(folder), filled)
    return {
        line: Ended(*outcome, folder / f"run{number}")
        for number, (line, outcome) in enumerate(zip(lines, ended, strict=True))
    }


@pytest.mark.parametrize(
    ("key", "kind"),
    slow_but([each for each in ROWS if not each[1]], ROWS),
    ids=lambda value: value or "key",
)
def test_key_has_its_effect(key, kind, request):
    runs = request.getfixturevalue("further_runs" if kind else "runs")
    row = ROWS[key, kind]
    assert re.search(rf"(^| ){re.escape(key)}=", row.overrides), "the run does not set the key"
    run = runs[row.overrides]
    assert row.effect(run, runs[row.base]), f"{run}"


@functools.cache
def covered() -> set[str]:
    """Return the keys and flags that tests elsewhere have in a marker `covers`.

    The files are read, because pytest collects only those that it is called with.
    """
    marked: set[str] = set()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text()
        if "mark.covers(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            for decorator in getattr(node, "decorator_list", ()):
                if ast.unparse(decorator).startswith("pytest.mark.covers("):
                    marked |= {argument.value for argument in decorator.args}
    return marked


def keys() -> set[str]:
    """Return the keys of the schema but those of GROUPS, whose constructors define them."""
    nested = {
        "checkpoint": CheckpointConfig,
        "straggler": StragglerConfig,
        "data": DataConfig,
        "model": ModelConfig,
        "optimizer": OptimizerConfig,
    }
    in_groups = {
        f"{group}.{name}" for group, schema in nested.items() for name in schema.model_fields
    }
    in_groups |= {
        f"tracker_options.{name}.{key}"
        for name, node in config().tracker_options.items()
        for key in node
    }
    groups = {*nested, *GROUPS, "tracker_options", "data.collate_fn"}
    return (in_groups | RunConfig.model_fields.keys()) - groups


def flags(capsys: pytest.CaptureFixture) -> set[str]:
    """Return the flags of all commands."""
    names = {f"train --{name}" for name in ("nproc", "config-dir", "json")} | {"doctor --fabric"}
    names |= {f"train {name}" for name in train.OVER_SSH}
    for name in COMMANDS:
        module = importlib.import_module(f"ddp_lab.commands.{name}")
        if hasattr(module, "parse"):
            with pytest.raises(SystemExit):
                module.parse(["--help"])
            options = re.findall(r"^  (?:-h, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
            names |= {f"{name} {option}" for option in options if option != "--help"}
    return names


def test_every_key_and_flag_has_a_row(capsys):
    of_flags = {name for name in covered() if " " in name}
    assert keys() == KEYS.keys() | (covered() - of_flags)
    assert flags(capsys) == of_flags
    assert not KEYS.keys() & covered(), "a key needs one of both"


OPTIONS = [
    (group, path)
    for group in GROUPS
    for path in sorted((CONF / group.partition(".")[0]).glob("*.yaml"))
]


@pytest.mark.parametrize(
    ("group", "path"), OPTIONS, ids=lambda value: getattr(value, "stem", value)
)
def test_constructor_gets_every_option_of_its_group(group, path):
    """What it does with them is tested where it is."""
    node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    options = node["dataset"] if group == "data.dataset" else node
    values = {
        name: f"given {name}"
        for name in options
        if not name.startswith("_") and name != "defaults"  # Hydra's list
    }
    cfg = config(
        f"{group.partition('.')[0]}={path.stem}",
        *(f"{group}.{name}='{value}'" for name, value in values.items()),
    )
    made = call_target(OmegaConf.merge(OmegaConf.select(cfg, group), {"_target_": "builtins.dict"}))
    assert values.items() <= (made.keywords if isinstance(made, partial) else made).items()


def evaluated(command, run: Path, *arguments: str) -> dict[str, Any]:
    file = run / "found.json"
    code, _, errors = command(evaluate.main, run, *arguments, "--json", file)
    assert code == 0, errors
    return json.loads(file.read_text())


def test_precision_changes_what_is_evaluated(runs, command):
    run = runs[CHOSEN].path
    assert (
        evaluated(command, run, "precision=bf16")["test_loss"]
        != evaluated(command, run)["test_loss"]
    )


@pytest.mark.covers("evaluate --config-dir")
def test_evaluate_reads_yaml_of_the_users_own(runs, command, tmp_path):
    (tmp_path / "data").mkdir()
    yaml = (CONF / "data" / "synthetic.yaml").read_text()
    (tmp_path / "data" / "mine.yaml").write_text(yaml.replace("test_size: 1000", "test_size: 7"))
    code, output, errors = command(
        evaluate.main, runs[CHOSEN].path, "--config-dir", tmp_path, "data=mine", "split=test"
    )
    assert (code, " on 7 samples" in output) == (0, True), output + errors


@pytest.mark.covers("train --nproc")
def test_options_of_a_launch_reach_torchrun():
    arguments = (
        "--nproc=3 --nnodes 1:2 --rdzv-endpoint=localhost:1 --max_restarts 1 --rdzv-conf=timeout=9 "
        "--local-addr there"
    )
    options, overrides = read_options(["strategy=ddp", *arguments.split(), "device=cpu"])
    expected = {
        "nproc_per_node": "3",
        "nnodes": "1:2",
        "rdzv_endpoint": "localhost:1",
        "max_restarts": 1,
    }
    expected |= {
        "rdzv_conf": "timeout=9",
        "local_addr": "there",
        "rdzv_backend": "c10d",
        "standalone": False,
    }
    assert vars(options).items() >= expected.items()
    assert overrides == ["strategy=ddp", "device=cpu"]


@pytest.mark.slow
@pytest.mark.covers(
    "advise --gpus", "advise --nodes", "advise --link", "advise --config-dir", "advise --json"
)
def test_advise_plans_what_its_flags_say(command, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: own_models.sequential")
    arguments = (
        "--gpus",
        "1xH100",
        "--nodes",
        "2",
        "--link",
        "25",
        "--config-dir",
        tmp_path,
        "--json",
        tmp_path / "plans",
    )
    code, _, errors = command(advise.main, *arguments, "model=mine", "data=digits", "batch_size=8")
    assert code == 0, errors
    plans = json.loads((tmp_path / "plans").read_text())
    assert plans["head"][0].startswith("1 x H100 (79.1 GiB) on each of 2 machines; 658 parameters")
    rows = {row["overrides"][0]: row for row in plans["rows"]}
    (sent,) = (
        collective["bytes_sent"] for collective in rows["strategy=ddp"]["plans"][0]["collectives"]
    )
    assert rows["strategy=ddp"]["bound"] == pytest.approx(sent / 25e9)


@pytest.mark.covers("predict --checkpoint", "export --checkpoint", "export --output")
def test_checkpoint_changes_predictions_and_exports(runs, command, tmp_path):
    run = runs[CHOSEN].path
    image = ROOT / "docs" / "tensorboard.png"
    predictions = {}
    weights = {}
    for choice in ("best", "last"):
        predictions[choice] = command(predict.main, run, image, "--checkpoint", choice)[:2]
        file = tmp_path / f"{choice}.safetensors"
        assert command(export.main, run, "--checkpoint", choice, "--output", file)[0] == 0
        weights[choice] = torch.cat([tensor.flatten() for tensor in load_file(file).values()])
    assert predictions["best"][0] == predictions["last"][0] == 0
    assert predictions["best"] != predictions["last"]
    assert not torch.equal(weights["best"], weights["last"])
    with safe_open(tmp_path / "best.safetensors", "pt") as file:
        metadata = {
            key: json.loads(value) for key, value in file.metadata().items() if key != "format"
        }
    assert metadata == {
        "classes": [str(number) for number in range(10)],
        "mean": [0.5],
        "std": [0.2],
    }


@pytest.mark.covers("predict --prompt", "predict --tokens", "predict --temperature")
def test_flags_of_predict_determine_the_text(runs, command):
    def text(*flags: str) -> str:
        code, output, errors = command(predict.main, runs["{TEXT}"].path, *flags)
        assert code == 0, errors
        return output

    longer = text("--prompt", "to be", "--tokens", "9", "--temperature", "0")
    assert longer.startswith("to be")
    assert (
        text("--prompt", "to be", "--tokens", "4", "--temperature", "0").rstrip("\n")
        == longer[: 5 + 4]
    )
    assert text("--prompt", "to be", "--tokens", "9", "--temperature", "9") != longer
    assert text("--prompt", "or not", "--tokens", "9", "--temperature", "0").startswith("or not")


def test_hparams_of_tensorboard_have_the_scaled_learning_rate(runs):
    run = runs["scheduler=constant lr_scaling=linear lr_base_batch_size=5"]
    board = EventAccumulator(str(run.path)).Reload()
    data = board.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert HParamsPluginData.FromString(data).session_start_info.hparams[
        "lr"
    ].number_value == pytest.approx(0.04)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    """Return the directory of a run of four ranks, in pairs that share one copy of the weights."""
    folder = tmp_path_factory.mktemp("four")
    overrides = [
        "strategy=mesh",
        "strategy.shard=2",
        "strategy.batch_norm=sync",
        "scaling=weak",
        "batch_size=5",
    ]
    run_world(
        4, main_in_world, *BASE, *NORMED.split(), *overrides, f"runs_dir={folder}", "name=run"
    )
    return folder / "run"


@pytest.mark.covers("scaling")
def test_ranks_share_a_weakly_scaled_batch_and_its_statistics(runs, four):
    (row,) = read_metrics(four)
    one = runs[NORMED].last
    assert (row["global_batch_size"], row["world_size"]) == (20, 4)
    assert (row["train_loss"], row["test_loss"]) == pytest.approx(
        (one["train_loss"], one["test_loss"]), rel=1e-5
    )


def test_averages_of_shared_and_of_sharded_weights_are_saved(runs, four, command):
    for path in (runs[SHARED].path, four):
        evaluation = evaluated(command, path, "strategy=single")
        assert evaluation["test_loss"] == pytest.approx(
            read_metrics(path)[-1]["test_loss"], rel=1e-5
        )
