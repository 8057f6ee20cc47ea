"""The commands for trained runs: evaluate, predict, export, merge."""

import csv
import json
import re
import shutil
from pathlib import Path

import onnxruntime
import pytest
import torch
from configs import config
from image_folders import write_folder
from launches import SMALL, main_in_world, read_metrics, refusal_in_world
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from worlds import run_world

from ddp_lab.checkpoints.files import find_damage
from ddp_lab.checkpoints.find import open_checkpoint
from ddp_lab.commands import evaluate, export, merge, predict
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.read_config import read_config
from ddp_lab.run.build import build
from ddp_lab.run.build_data import image_options
from ddp_lab.run.build_trained import evaluate_run, open_run
from ddp_lab.run.data_record import DataRecord
from ddp_lab.run.export import find_writer, write_pt2
from ddp_lab.run.predict import Predictor, find_images
from ddp_lab.run.trained import InputFormat, TrainedRun
from ddp_lab.tasks.classification import Classification
from ddp_lab.world.runtime import Runtime

# 50 test images in batches of 24: neither the batches nor the last one are divisible by the ranks'
# number.
LENET = [*SMALL, "model=lenet", "epochs=2", "ema=0.8", "strategy=ddp", "name=mine"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of a run that two ranks of ddp trained.

    The averages of its weights are evaluated.
    """
    folder = tmp_path_factory.mktemp("runs")
    run_world(2, main_in_world, *LENET, f"runs_dir={folder}")
    return folder / "mine"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return the directory of a run of two ranks of fsdp with sharded checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    overrides = ["strategy=fsdp", "checkpoint.format=sharded", f"runs_dir={folder}"]
    run_world(2, main_in_world, *LENET, *overrides)
    return folder / "mine"


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def evaluations(folder: Path, strategies: list[str]) -> dict[str, dict]:
    """Evaluate a run under several strategies on this rank."""
    with Runtime("cpu") as runtime:
        values = {}
        for strategy in strategies:
            cfg = read_config(folder, [f"strategy={strategy}"], None)
            values[strategy] = evaluate_run(cfg, runtime, folder, "last")
        return values


@pytest.mark.parametrize(
    "strategies",
    [("ddp", "pipeline"), pytest.param(("scratch", "fsdp", "tp", "ddp"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_evaluation_under_any_strategy_equals_the_one_of_training(strategies, trained):
    logged = read_metrics(trained)[-1]
    ranks = run_world(2, evaluations, trained, [*strategies])
    results = ranks[0] | evaluations(trained, ["single", "split"])
    assert ranks[0] == ranks[1]
    for strategy, values in results.items():
        assert (values["samples"], values["epoch"], values["step"]) == (50, 2, 10), strategy
        assert values["test_accuracy"] == logged["test_accuracy"], strategy
        assert values["test_loss"] == pytest.approx(logged["test_loss"], rel=1e-6), strategy
    assert results["ddp"]["test_loss"] == logged["test_loss"]
    assert results["ddp"].get("test_top5_accuracy") == logged.get("test_top5_accuracy")


@pytest.mark.covers("evaluate --json")
def test_evaluate_prints_one_line_and_writes_only_the_json_asked_for(trained, command, tmp_path):
    before = files(trained)
    code, output, errors = command(
        evaluate.main, trained, "strategy=single", "batch_size=7", "--json", tmp_path / "a.json"
    )
    assert (code, errors) == (0, "")
    logged = read_metrics(trained)[-1]
    metrics = f"test loss {logged['test_loss']:.4f} accuracy {logged['test_accuracy']:.4f}"
    assert (
        output
        == f"{trained}/checkpoints/step_00000010.pt, epoch 2: {metrics} on 50 samples (1 x cpu)\n"
    )
    assert json.loads((tmp_path / "a.json").read_text())["test_accuracy"] == logged["test_accuracy"]
    assert files(trained) == before


def test_run_of_several_ranks_is_evaluated_in_one_process(trained, command, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    logged = read_metrics(trained)[-1]
    for strategy in (
        ["strategy=mesh", "strategy.shard=2", "strategy.tp=2", "strategy.sequence_parallel=true"],
        ["strategy=mesh", "strategy.pp=2", "strategy.cut=[fc1]"],
        ["strategy=ddp_pipeline", "strategy.schedule=interleaved1f1b"],
    ):
        cfg = OmegaConf.load(trained / "config.yaml")
        cfg.strategy = config(*strategy).strategy
        OmegaConf.save(cfg, run / "config.yaml")
        code, output, errors = command(evaluate.main, run)
        assert (code, errors) == (0, ""), strategy
        assert f"loss {logged['test_loss']:.4f} accuracy {logged['test_accuracy']:.4f}" in output, (
            strategy
        )
    code, _, errors = command(evaluate.main, run, "strategy=mesh", "strategy.pp=2")
    assert code == 2, "an override is not replaced"
    assert "strategy.pp=2: cannot lay 1 rank" in errors


def test_commands_take_the_name_of_a_run_and_its_directory(trained, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(trained)
    line = ["--output", "m.safetensors", "--force"]
    results = [command(export.main, run, *line) for run in ("mine", "runs/mine", trained)]
    assert [(code, errors) for code, _, errors in results] == [(0, "")] * 3
    code, _, errors = command(export.main, "mime", *line)
    assert code == 2
    assert errors == (
        "error: mime: there is no such run: it is neither the directory of a run nor the name of "
        "one in runs. Did you mean mine? `ddp-lab runs` lists the names\n"
    )


IS_A_CHECKPOINT = (
    ": is a checkpoint, and the directory of a run is needed. Use {run} --checkpoint "
    "{run}/checkpoints/step_00000010.pt"
)


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (
            evaluate.main,
            ["{tmp}/no"],
            "{tmp}/no: there is no such run: it is neither the directory of a run nor the name of "
            "one in runs. `ddp-lab runs` lists the names",
        ),
        (
            merge.main,
            ["{tmp}"],
            "{tmp}: is not the directory of a run: there is no {tmp}/config.yaml. Use a name that",
        ),
        (evaluate.main, ["{run}/checkpoints/step_00000010.pt"], IS_A_CHECKPOINT),
        (
            evaluate.main,
            ["{run}", "--checkpoint=none.pt"],
            "--checkpoint none.pt: must be auto, last, best or the path of a",
        ),
        (
            evaluate.main,
            ["{run}", "--checkpoint=best"],
            "--checkpoint best: {run}/checkpoints contains no best.pt and no",
        ),
        (
            evaluate.main,
            ["{run}", "--json={tmp}/no/a.json"],
            "--json {tmp}/no/a.json: cannot be written: {tmp}/no does not",
        ),
        (evaluate.main, ["{run}", "bogus=1"], "bogus=1: there is no such key; allowed: seed"),
        (
            evaluate.main,
            ["{run}", "batch_size=1,2"],
            "batch_size=1,2: must be of the form key=value",
        ),
        (
            evaluate.main,
            ["{run}", "strategy=magic"],
            "strategy=magic: there is no such option; allowed: ddp",
        ),
        (
            evaluate.main,
            ["{run}", "data.dataset.num_classes=9"],
            "{run}: was trained with other classes: number 9 of 10 was 9",
        ),
        (evaluate.main, ["{run}", "model=simple_cnn"], "does not match the model: "),
        (
            evaluate.main,
            ["{run}", "split=train"],
            "split=train: must be test: these data have no other set",
        ),
        (
            predict.main,
            ["{run}", "{tmp}/none"],
            "{tmp}/none: no such image; expected a file, a glob, or a folder with .jpg",
        ),
        (predict.main, ["{run}", "{tmp}", "--top=0"], "--top 0: must be an integer of at least 1"),
        (
            predict.main,
            ["{run}", "{tmp}/a.png", "--device=cuda:9"],
            "device=cuda:9: there is no such device",
        ),
        (
            export.main,
            ["{run}", "--output={tmp}/m.pth"],
            "m.pth: the name must end in .safetensors, .onnx, .pt2",
        ),
        (
            export.main,
            ["{run}", "--output={tmp}/old.onnx"],
            "old.onnx: already exists; use --force to replace a file",
        ),
    ],
)
@pytest.mark.covers("predict --device")
def test_mistakes_are_reported_in_one_message(main, arguments, message, trained, command, tmp_path):
    for name in ("old.onnx", "a.png"):
        (tmp_path / name).write_text("old")
    code, output, errors = command(
        main, *(argument.format(run=trained, tmp=tmp_path) for argument in arguments)
    )
    assert (code, output) == (2, ""), errors
    assert errors.startswith("error: ")
    assert message.format(run=trained, tmp=tmp_path) in errors
    assert errors.count("\n") == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "old.onnx": "old",
        "a.png": "old",
    }


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", "a: [", "/config.yaml: cannot be read as a config (while parsing"),
        (
            "config.yaml",
            "- 1",
            "/config.yaml: must be a config, got a list. If another version of ddp_lab wrote it",
        ),
        (
            "config.yaml",
            "epochs: 1",
            "/config.yaml: seed: is missing; it must be an integer from 0 to 2**32 - 1. If another",
        ),
        (
            "data.json",
            "{",
            ": data.json is missing or damaged; start the run again with name=run, which writes "
            "the file, also",
        ),
    ],
)
def test_damaged_or_older_files_are_reported_in_one_message(
    file, content, message, trained, command, tmp_path
):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / file).write_text(content)
    code, output, errors = command(
        export.main, tmp_path / "run", "--output", tmp_path / "m.safetensors"
    )
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {tmp_path}/run{message}")
    assert errors.count("\n") == 1


def reference(folder: Path) -> tuple[nn.Module, torch.Tensor, torch.Tensor, list[str]]:
    """Return the trained model, the test images, raw and normalised, and the classes."""
    job = build(read_config(folder, ["strategy=single", "batch_size=50"]), Runtime("cpu"))
    return (
        open_run(folder, "last").model,
        job.dataset.test.inputs,
        next(iter(job.loaders["test"])).inputs,
        job.dataset.classes,
    )


def save(pixels: torch.Tensor, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)


@pytest.mark.covers("predict --output", "predict --force", "predict --top", "predict --batch-size")
def test_predictions_of_files_equal_those_of_the_test_set(trained, command, tmp_path):
    model, images, inputs, classes = reference(trained)
    for number, pixels in enumerate(images):
        save(pixels, tmp_path / "images" / f"{number:02d}.png")
    (tmp_path / "p.csv").write_text("old")
    options = "--output", tmp_path / "p.csv", "--force", "--top=3", "--batch-size=17"
    code, output, errors = command(predict.main, trained, tmp_path / "images", *options)
    weights = f"weights: {trained}/checkpoints/step_00000010.pt\n"
    assert (code, output, errors) == (0, "", weights)
    header, *rows = csv.reader((tmp_path / "p.csv").open())
    assert header == [
        "file",
        "class_1",
        "probability_1",
        "class_2",
        "probability_2",
        "class_3",
        "probability_3",
    ]
    expected = model(inputs).softmax(1).topk(3)
    assert [row[0] for row in rows] == sorted(map(str, (tmp_path / "images").iterdir()))
    assert [row[1::2] for row in rows] == [
        [classes[i] for i in numbers] for numbers in expected.indices
    ]
    assert torch.tensor([[float(p) for p in row[2::2]] for row in rows]) == pytest.approx(
        expected.values.detach(), abs=2e-6
    )


def test_images_of_other_sizes_and_modes_are_converted_and_corrupt_ones_are_left_out(
    trained, command, tmp_path
):
    _, images, _, _ = reference(trained)
    size = images.shape[-1]
    save(images[0], tmp_path / "a.png")
    (tmp_path / "more").mkdir()
    save(
        images[0].repeat_interleave(2, 1).repeat_interleave(2, 2),
        tmp_path / "more" / "deep" / "large.png",
    )
    Image.new("L", (3 * size, size), 7).save(tmp_path / "more" / "grey.JPG")
    (tmp_path / "more" / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    for name in ("notes.txt", "._grey.png"):
        (tmp_path / "more" / name).touch()
    code, output, errors = command(
        predict.main, trained, tmp_path / "a*.png", tmp_path / "more", tmp_path / "a.png"
    )
    assert code == 2
    weights = f"weights: {trained}/checkpoints/step_00000010.pt\n"
    assert errors.startswith(
        f"{weights}error: 1 of 4 images left out: {tmp_path}/more/broken.png: cannot be decoded ("
    )
    assert errors.count("\n") == 2
    _, *rows = csv.reader(output.splitlines())
    assert [Path(row[0]).name for row in rows] == ["a.png", "large.png", "grey.JPG"]
    assert all(len(row) == 11 for row in rows)
    code, output, errors = command(
        predict.main, trained, tmp_path / "more" / "broken.png", "--output", tmp_path / "p.csv"
    )
    assert (code, output) == (2, "")
    assert errors.startswith(f"{weights}error: 1 of 1 image left out: ")
    assert not (tmp_path / "p.csv").exists()


def format_of(cfg: DictConfig) -> InputFormat:
    return InputFormat(list(cfg.data.mean), list(cfg.data.std), image_options(cfg.data))


def test_predict_sees_the_files_of_a_folder_as_the_evaluation_does(tmp_path):
    root = write_folder(tmp_path / "images", {"train": 3, "test": 6})
    cfg = config(
        "data=folder",
        f"data.root={root}",
        "data.image_size=24",
        "data.num_workers=0",
        "batch_size=6",
    )
    job = build(cfg, Runtime("cpu"))
    seen = []
    data = DataRecord(job.dataset.model_shape(), job.dataset.classes, "", "", None)

    class Seeing(nn.Module):
        def forward(self, images):
            seen.append(images)
            return images.flatten(1)[:, :3]

    run = TrainedRun(data, root, Seeing(), Classification, format_of(cfg))
    rows, corrupt = Predictor(run, job.runtime, top=2).run(find_images([f"{root}/test"]), 6)
    assert torch.equal(seen[0], next(iter(job.loaders["test"])).inputs)
    assert (len(rows), corrupt) == (6, [])
    assert {name for row in rows for name in row.classes} <= {"class 0", "class 1", "class 2"}


@pytest.mark.slow
def test_exported_files_have_the_models_names_and_logits(trained, command, tmp_path):
    model, _, inputs, classes = reference(trained)
    for suffix in ("safetensors", "onnx", "pt2"):
        code, output, errors = command(export.main, trained, "--output", tmp_path / f"m.{suffix}")
        assert (code, errors) == (0, "")
        assert output.startswith(
            f"{tmp_path}/m.{suffix}: {trained}/checkpoints/step_00000010.pt; input [batch, 3, "
        )
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == classes
    state = model.state_dict()
    weights = load_file(tmp_path / "m.safetensors")
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], state[name]) for name in state)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    described = session.get_modelmeta().custom_metadata_map
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert described == {key: file.metadata()[key] for key in ("classes", "mean", "std")}
    program = torch.export.load(tmp_path / "m.pt2").module()
    for batch in (inputs[:1], inputs[:7]):
        expected = model(batch)
        assert torch.equal(program(batch), expected)
        (logits,) = session.run(["logits"], {"images": batch.numpy()})
        assert torch.from_numpy(logits) == pytest.approx(expected.detach(), abs=1e-5)


class DependsOnValues(nn.Module):
    def forward(self, images):
        return images.flatten(1) if images.sum() > 0 else images.flatten(1) * 2


def test_onnx_without_its_packages_is_refused(monkeypatch):
    monkeypatch.setattr("ddp_lab.run.export.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"--output m\.onnx: needs the package onnx: pip install 'ddp_lab\[export\]'",
    ):
        find_writer(Path("m.onnx"))


def test_model_that_cannot_be_exported_is_reported(tmp_path):
    data = DataRecord({"in_channels": 1, "image_size": 4, "num_classes": 16}, [], "", "", None)
    with pytest.raises(ConfigError, match=r"torch cannot export this model as \.pt2 \("):
        write_pt2(
            TrainedRun(data, tmp_path, DependsOnValues(), Classification, format_of(config())),
            tmp_path / "m.pt2",
        )


@pytest.mark.covers("export --force")
def test_export_replaces_a_file_only_when_asked_and_only_by_a_complete_one(
    trained, command, tmp_path, monkeypatch
):
    old = tmp_path / "m.safetensors"
    old.write_text("old")

    def fail(tensors, path, metadata):
        Path(path).write_text("a part")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("safetensors.torch.save_file", fail)
        code, _, errors = command(export.main, trained, "--output", old, "--force")
    assert code == 2
    reason = r"No space left on device; without it [\d,.]+ [KMG]iB are free there"
    assert re.fullmatch(
        rf"error: --output {old}: cannot be written \({reason}\). Free disk space\n", errors
    ), errors
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"m.safetensors": "old"}
    assert command(export.main, trained, "--output", old, "--force")[0] == 0
    assert load_file(old)


def test_commands_read_sharded_checkpoints(sharded, command, tmp_path):
    logged = read_metrics(sharded)[-1]
    code, output, errors = command(
        evaluate.main, sharded, "strategy=single", "--json", tmp_path / "a.json"
    )
    assert (code, errors) == (0, "")
    assert output.startswith(
        f"{sharded}/checkpoints/step_00000010.sharded, epoch 2: test loss "
        f"{logged['test_loss']:.4f} "
    )
    results = json.loads((tmp_path / "a.json").read_text())
    assert (results["test_accuracy"], results["step"]) == (logged["test_accuracy"], 10)
    assert results["test_loss"] == pytest.approx(logged["test_loss"], rel=1e-6)
    code, _, errors = command(export.main, sharded, "--output", tmp_path / "model.safetensors")
    assert (code, errors) == (0, "")
    averages = open_checkpoint(sharded / "checkpoints" / "step_00000010.sharded").content()["ema"]
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == averages.keys()
    assert all(torch.equal(tensor, averages[name]) for name, tensor in exported.items())


@pytest.mark.covers("merge --checkpoint", "merge --output", "merge --force")
def test_merge_writes_a_full_checkpoint(sharded, command, tmp_path):
    code, output, errors = command(merge.main, sharded)
    assert (code, errors) == (0, "")
    merged = sharded / "step_00000010.pt"
    assert output.startswith(f"{merged}: {sharded}/checkpoints/step_00000010.sharded, step 10; ")
    assert find_damage(merged) is None
    saved = open_checkpoint(merged)
    saved.check(
        {
            name: tuple(tensor.shape)
            for name, tensor in open_run(sharded, "last").model.state_dict().items()
        }
    )
    assert saved.state["progress"]["epoch"] == 3
    code, _, errors = command(merge.main, sharded)
    assert code == 2
    assert "already exists" in errors
    assert command(merge.main, sharded, "--force")[0] == 0
    code, _, errors = command(
        merge.main, sharded, "--checkpoint", merged, "--output", tmp_path / "again.pt"
    )
    assert code == 2
    assert "is one file already" in errors


def test_damaged_shards_are_refused_by_name_and_passed_over(sharded, command, tmp_path):
    run = shutil.copytree(sharded, tmp_path / "damaged")
    newest = run / "checkpoints" / "step_00000010.sharded"
    share = "shard-00002-model-00001-of-00001.safetensors"
    (newest / share).write_bytes((newest / share).read_bytes()[:-1])
    code, _, errors = command(
        export.main, run, "--checkpoint", newest, "--output", tmp_path / "a.safetensors"
    )
    assert code == 2
    assert (
        f"--checkpoint {newest}: the checkpoint is damaged: the SHA-256 of {share} differs"
        in errors
    )
    code, output, _ = command(export.main, run, "--output", tmp_path / "a.safetensors")
    assert code == 0
    assert "step_00000005.sharded; " in output
    line = f"{' '.join(LENET[:-2])} strategy=single name=new runs_dir={tmp_path} resume={newest}"
    ((code, printed),) = run_world(1, refusal_in_world, line)
    assert code == 2
    assert f"resume={newest}: the checkpoint is damaged: the SHA-256 of {share} differs" in printed
    assert not (tmp_path / "new").exists(), (
        "the damage must be found before a run directory is made"
    )
