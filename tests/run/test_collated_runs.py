"""Runs of train.py whose samples are dicts or tuples of several parts, with a function of the user
that makes batches of them.
"""

import json
from pathlib import Path

import pytest
from launches import main_in_world, read_metrics, refusal_in_world
from worlds import once, run_world

from ddp_lab.commands import advise, doctor, evaluate, export, predict

COMMON = ["device=cpu", "tracker=none", "batch_size=8", "optimizer.lr=0.1", "data=own"]
COMMON += ["data.num_workers=0", "epochs=2", "model=own", "scheduler=constant"]
TEXTS = [
    *COMMON,
    "data.dataset._target_=own_datasets.Texts",
    "data.targets=label",
    "model._target_=own_models.Reader",
]
PADDED = [*TEXTS, "data.collate_fn._target_=own_datasets.pad"]
POINTS = [
    *COMMON,
    "task=regression",
    "data.dataset._target_=own_datasets.Points",
    "data.targets=-2",
    "model._target_=own_models.Product",
]
IDS = [
    *TEXTS,
    "data.collate_fn._target_=own_datasets.pad_ids",
    "data.targets=1",
    "model._target_=own_models.read_ids",
]


def losses_of(ranks: int, overrides: list[str], folder: Path, name: str) -> list[float]:
    where = [f"runs_dir={folder}", f"name={name}"]
    run_world(ranks, main_in_world, *overrides, *where, timeout=120)
    rows = read_metrics(folder / name)
    return [row[key] for row in rows for key in ("train_loss", "val_loss")]


CASES = {
    "texts": (PADDED, ["ddp", "fsdp", "scratch", "tp"]),
    "points": (POINTS, ["ddp", "fsdp"]),
    "ids": (IDS, ["ddp", "pipeline"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_parts_of_samples_and_their_batches_train_alike_under_any_strategy(case, tmp_path):
    overrides, strategies = CASES[case]
    alone = losses_of(1, [*overrides, "strategy=single"], tmp_path, "single")
    assert len(alone) == 4
    assert alone[2] < alone[0]
    for strategy in strategies:
        losses = losses_of(2, [*overrides, f"strategy={strategy}"], tmp_path, strategy)
        assert losses == pytest.approx(alone, abs=1e-6), strategy


def test_workers_and_accumulation_do_not_change_the_losses(tmp_path):
    alone = losses_of(1, PADDED, tmp_path, "alone")
    more = [*PADDED, "data.num_workers=2", "accumulate=3"]
    assert losses_of(1, more, tmp_path, "workers") == pytest.approx(alone, abs=1e-6)


def test_metrics_get_texts_of_different_lengths(tmp_path):
    """Before the first step they are tried with a batch of the first samples."""
    options = "task: multiclass, num_classes: 2, average: micro, name: counted"
    metrics = f"metrics=[{{_target_: torchmetrics.Accuracy, {options}}}]"
    losses_of(1, [*PADDED, metrics], tmp_path, "accuracy")
    row = read_metrics(tmp_path / "accuracy")[-1]
    assert row["val_counted"] == pytest.approx(row["val_accuracy"])


@once
def trained(folder: Path) -> Path:
    losses_of(1, [*PADDED, "name=mine"], folder, "mine")
    return folder / "mine"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Return the directory of a run of padded texts."""
    return trained(tmp_path_factory.mktemp("runs"))


def test_steps_of_batches_of_any_length_are_not_compiled(tmp_path):
    losses_of(1, [*IDS, "epochs=1", "compile=true"], tmp_path, "ids")
    message = (
        "compile=true is disabled: data.collate_fn may return another shape in each batch; pad"
    )
    assert message in (tmp_path / "ids" / "train.log").read_text()


@pytest.mark.slow
def test_resumed_run_continues_with_padded_batches(tmp_path):
    expected = losses_of(1, [*PADDED, "epochs=3"], tmp_path, "once")
    losses_of(1, PADDED, tmp_path, "twice")
    more = [*PADDED, "epochs=3", "strategy=ddp"]
    assert losses_of(2, more, tmp_path, "twice") == pytest.approx(expected, abs=1e-6)


def test_evaluate_gives_the_loss_of_the_run(run, command, tmp_path):
    file = tmp_path / "found.json"
    code, _, errors = command(evaluate.main, run, "--checkpoint", "last", "--json", file)
    assert code == 0, errors
    loss = json.loads(file.read_text())["val_loss"]
    assert loss == pytest.approx(read_metrics(run)[-1]["val_loss"], abs=1e-6)


def test_export_writes_weights_and_refuses_programs_of_several_inputs(run, command, tmp_path):
    code, _, errors = command(export.main, run, "--output", tmp_path / "weights.safetensors")
    assert code == 0, errors
    for ending in ("pt2", "onnx"):
        code, _, errors = command(export.main, run, "--output", tmp_path / f"model.{ending}")
        assert code == 2
        assert "needs a model of one input, but the inputs of this run are several" in errors
        assert errors.count("\n") == 1


def test_export_refuses_programs_for_batches_of_any_shape(tmp_path, command):
    losses_of(1, [*IDS, "epochs=1"], tmp_path, "ids")
    code, _, errors = command(export.main, tmp_path / "ids", "--output", tmp_path / "model.pt2")
    assert code == 2
    assert "needs inputs of one shape, but data.collate_fn made batches of any shape" in errors


def test_predict_refuses_inputs_that_are_no_images(run, command):
    code, _, errors = command(predict.main, run, "docs/tensorboard.png")
    assert code == 2
    assert "its inputs are no images" in errors
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_advise_and_doctor_take_runs_of_padded_batches(command, tmp_path):
    arguments = [word for word in PADDED if not word.startswith("device")]
    code, printed, errors = command(advise.main, "--gpus", "2xcpu", *arguments)
    assert code == 0, errors
    assert "ddp" in printed
    code, printed, errors = command(doctor.main, *PADDED, f"runs_dir={tmp_path}")
    assert code == 0, errors
    assert "several parts" in printed


REFUSED = {
    "key": (
        [*PADDED, "data.targets=kind"],
        'the batch from collate_fn must be a dict with the target "kind" and inputs, got dict with '
        "ids, mask, label. Use the key or the place of the target as data.targets; null if there",
    ),
    "no key": (
        [*TEXTS, "data.targets=1"],
        "sample 0 must be (input, target), got dict with ids, label, text. Name the key of its "
        'target, for example data.targets="text"',
    ),
    "place": ([*POINTS, "data.targets=7"], "a tuple with the target at data.targets=7 and inputs"),
    "text": (TEXTS, 'inputs["text"] is str. Text must become numbers'),
    "value": ([*TEXTS, "data.targets=1.5"], "data.targets=1.5: must be "),
    "name": (
        [*TEXTS, "data.collate_fn._target_=own_datasets.no"],
        "data.collate_fn._target_=own_datasets.no: must be the name of a class or function",
    ),
    "option": (
        [*PADDED, "+data.collate_fn.length=3"],
        "data.collate_fn.length=3: there is no such key; allowed: none",
    ),
    "missing option": (
        [*TEXTS, "data.collate_fn._target_=own_datasets.Pad"],
        "data.collate_fn.multiple: is missing",
    ),
    "no target": (
        [*TEXTS, "+data.collate_fn.multiple=3"],
        "data.collate_fn._target_=None: must be the name of a class or function",
    ),
    "object": (
        [*TEXTS, "data.collate_fn._target_=own_datasets.NoFunction"],
        "data.collate_fn._target_=own_datasets.NoFunction: must be a function of a list of samples",
    ),
    "source": (
        [*PADDED, "data.dataset._target_=own_datasets.Loaded"],
        "has the method load, and so decides itself what a sample is; data.targets and "
        "data.collate_fn are for",
    ),
    "images": (
        [*PADDED, "data.crop_scale=[0.5,1]"],
        "change single images of Pillow, and not the batches of data.collate_fn",
    ),
    "no logits": (
        [*PADDED, "model._target_=own_models.Norm"],
        "model._target_=own_models.Norm: it returns dict with scores, but Classification needs one "
        "tensor [b, ...] for b samples, or a part named logits",
    ),
    "keyword": (
        [*PADDED, "model._target_=own_models.Compared"],
        "forward got an unexpected keyword argument 'ids'. Its parameters are left, right",
    ),
}


def refusals(lines: list[list[str]]) -> list[tuple[object, str]]:
    return [refusal_in_world(" ".join(line)) for line in lines]


@once
def refused() -> dict[str, tuple[object, str]]:
    (ended,) = run_world(1, refusals, [line for line, _ in REFUSED.values()], timeout=120)
    return dict(zip(REFUSED, ended, strict=True))


@pytest.mark.parametrize("case", REFUSED)
def test_mistake_about_parts_of_samples_is_one_message(case):
    code, errors = refused()[case]
    assert code == 2, errors
    assert REFUSED[case][1] in errors
    assert errors.count("\n") == 1, errors
