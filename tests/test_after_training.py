"""The commands for trained runs: evaluate, predict, export."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from launches import SMALL, main_in_world, read_metrics
from worlds import run_world

from ddp_lab import evaluate
from ddp_lab.run.evaluate import evaluate_run
from ddp_lab.run.trained import read_config
from ddp_lab.world.runtime import Runtime

# 50 test images in batches of 24: neither the batches nor the last one are divisible by the ranks' number.
LENET = [*SMALL, "model=lenet", "model.init_std=null", "epochs=2", "strategy=ddp", "name=mine"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the directory of a run that two ranks of ddp trained."""
    folder = tmp_path_factory.mktemp("runs")
    run_world(2, main_in_world, *LENET, f"runs_dir={folder}")
    return folder / "mine"


@pytest.fixture
def command(monkeypatch, capsys):
    """Return a function that runs a command in this process and returns its exit code, output and errors."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # commands set it, and append to sys.path
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(main, *arguments) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        try:
            main.__wrapped__()  # without `record`, which replaces pytest's faulthandler
            code = 0
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def evaluations(folder: Path, strategies: list[str]) -> dict[str, dict]:
    """Evaluate a run under several strategies on this rank."""
    with Runtime("cpu") as runtime:
        values = {}
        for strategy in strategies:
            cfg = read_config(folder, [f"strategy={strategy}"], None)
            values[strategy] = evaluate_run(cfg, runtime, folder, "last").values()
        return values


def test_evaluation_under_any_strategy_equals_the_one_of_training(trained):
    logged = read_metrics(trained)[-1]
    ranks = run_world(2, evaluations, trained, ["ddp", "scratch", "fsdp", "tp", "pipeline"])
    found = ranks[0] | evaluations(trained, ["single", "split"])
    assert ranks[0] == ranks[1]
    for strategy, values in found.items():
        assert (values["samples"], values["epoch"], values["step"]) == (50, 2, 10), strategy
        assert values["test_accuracy"] == logged["test_accuracy"], strategy
        assert values["test_loss"] == pytest.approx(logged["test_loss"], rel=1e-6), strategy
    assert found["ddp"]["test_loss"] == logged["test_loss"]
    assert found["ddp"].get("test_top5_accuracy") == logged.get("test_top5_accuracy")


def test_evaluate_prints_one_line_and_writes_only_the_json_asked_for(trained, command, tmp_path):
    before = files(trained)
    code, output, errors = command(evaluate.main, trained, "strategy=single", "batch_size=7", "--json", tmp_path / "a.json")
    assert (code, errors) == (0, "")
    logged = read_metrics(trained)[-1]
    metrics = f"test loss {logged['test_loss']:.4f} accuracy {logged['test_accuracy']:.4f}"
    assert output.startswith(f"{trained}/checkpoints/step_00000010.pt, epoch 2: {metrics} top-5 ")
    assert output.endswith(" on 50 images (1 x cpu)\n")
    assert output.count("\n") == 1
    assert json.loads((tmp_path / "a.json").read_text())["test_accuracy"] == logged["test_accuracy"]
    assert files(trained) == before


def test_evaluate_takes_any_checkpoint_and_other_data(trained, command):
    old = trained / "checkpoints" / "step_00000005.pt"
    overrides = ["strategy=single", "data.dataset.test_size=20"]
    code, output, errors = command(evaluate.main, trained, "--checkpoint", old, *overrides)
    assert (code, errors) == (0, "")
    assert output.startswith(f"{old}, epoch 1: test loss ")
    assert output.endswith(" on 20 images (1 x cpu)\n")


def test_damaged_newest_checkpoint_is_reported_and_the_one_before_it_is_evaluated(trained, command, tmp_path, caplog):
    shutil.copytree(trained, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_00000010.pt"
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    code, output, _ = command(evaluate.main, tmp_path / "run", "strategy=single")
    assert code == 0
    assert "step_00000005.pt, epoch 1: " in output
    assert f"{newest} is damaged (its SHA-256 differs" in caplog.text
    code, output, errors = command(evaluate.main, tmp_path / "run", "strategy=single", f"--checkpoint={newest}")
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: --checkpoint {newest}: the file is damaged: its SHA-256 differs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}/nowhere"], "{run}/nowhere: is not the directory of a run: there is no {run}/nowhere/config.yaml"),
        (["--json"], "argument --json: expected one argument; see python -m ddp_lab.evaluate --help"),
        (["{run}", "--checkpoint=best"], "--checkpoint best: {run}/checkpoints contains no best.pt"),
        (["{run}", "--checkpoint=none.pt"], "--checkpoint none.pt: must be last, best or the path of a checkpoint"),
        (["{run}", "bogus=1"], "bogus=1: there is no such key; allowed: seed"),
        (["{run}", "batch_size=0"], "batch_size=0: must be an integer of at least 1"),
        (["{run}", "batch_size=1,2"], "batch_size=1,2: must be of the form key=value"),
        (["{run}", "strategy=magic"], "strategy=magic: there is no such option; allowed: ddp"),
        (["{run}", "strategy=single", "data=digits"], "does not match the model: conv1.0.weight is (20, 3, 3, 3) in the"),
        (["{run}", "strategy=single", "model=simple_cnn"], "does not match the model: "),
        (["{run}", "device=cuda:9"], "device=cuda:9: there is no such device"),
    ],
)
def test_evaluate_reports_mistakes_in_one_message(arguments, message, trained, command):
    code, output, errors = command(evaluate.main, *(argument.format(run=trained) for argument in arguments))
    assert (code, output) == (2, ""), errors
    assert errors.startswith("error: ")
    assert message.format(run=trained) in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.yaml", "a: [", "config.yaml: cannot be read as a config (while parsing"),
        ("config.yaml", "- 1", "config.yaml: must be a config, got a list"),
        ("config.yaml", "epochs: 1", "seed: is missing; it must be an integer"),
    ],
)
def test_damaged_run_directory_is_reported_in_one_message(name, content, message, trained, command, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    code, output, errors = command(evaluate.main, tmp_path / "run")
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1
