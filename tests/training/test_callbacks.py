"""Callbacks of a user: when they are called, what they get, and how their errors are reported."""

import json
import re
from pathlib import Path
from typing import Any

import own_callbacks
import pytest
import torch
from launches import ROOT, SMALL, launch, main_in_world, only_run, read_metrics, refusal_in_world
from slow_rows import slow_but
from worlds import run_world

from ddp_lab.config.errors import TrainingError
from ddp_lab.data.batch import Batch
from ddp_lab.training.callbacks import make_callbacks

LINE = ["data.val_fraction=0.2", "batch_size=24", "epochs=2", "tracker=none", "timeout=60"]
TWO_RANKS = f"torchrun --standalone --nproc_per_node=2 {ROOT}/train.py strategy=ddp"
SECTION = "\n## Callbacks\n"


def train(folder: Path, *overrides: str, ranks: int = 1) -> Path:
    """Train; return the run directory."""
    where = f"runs_dir={folder}", "name=run"
    run_world(ranks, main_in_world, *SMALL, *LINE, *where, *overrides)
    return folder / "run"


def calls_of(folder: Path, rank: int = 0, file: str = "calls") -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"{file}.{rank}.jsonl").open()]


def losses(folder: Path) -> list[float]:
    return [row["train_loss"] for row in read_metrics(folder)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    """A run with a callback, of two epochs of four steps, the last one of 8 samples."""
    folder = tmp_path_factory.mktemp("two")
    calls = "callbacks=[own_callbacks.Calls,{_target_: own_callbacks.Calls, file: more}]"
    return train(folder, calls, "strategy=ddp", "evaluate_every=3", ranks=2)


def test_callbacks_are_called_on_all_ranks(two_ranks):
    in_thread = ("on_checkpoint",)
    first, second = (
        [call for call in calls_of(two_ranks, rank) if call[0] not in in_thread] for rank in (0, 1)
    )
    assert (
        first
        == second
        == [call for call in calls_of(two_ranks, file="more") if call[0] not in in_thread]
    )
    lr = [call[2] for call in first if call[0] == "on_step_end"]
    loss = [call[1] for call in first if call[0] == "on_evaluate"]
    expected: list[list[Any]] = [["on_start", 0, 2, 2]]
    for epoch in (1, 2):
        for step in range(4 * epoch - 3, 4 * epoch + 1):
            size = 8 if step % 4 == 0 else 24
            expected += [["before_step", size // 2, size], ["on_step_end", step, lr[step - 1]]]
            if step % 3 == 0:
                expected += [["on_evaluation_batch", step, 1], ["on_evaluated", step, True]]
        numbers = (1, 2, 3, 4)  # one batch to validate with, three to test with
        expected += [["on_evaluation_batch", 4 * epoch, number] for number in numbers]
        expected += [["on_evaluate", loss[epoch - 1]], ["on_epoch_end", epoch + 1, 4 * epoch]]
    assert first == [*expected, ["close", "finished"]]


def test_callback_gets_the_results_that_are_recorded(two_ranks):
    recorded = [
        {"val": row["val_loss"], "test": row["test_loss"]} for row in read_metrics(two_ranks)
    ]
    calls = calls_of(two_ranks)
    assert [call[1] for call in calls if call[0] == "on_evaluate"] == recorded


def test_checkpoints_are_announced_on_rank_0(two_ranks):
    announced = [call[1] for call in calls_of(two_ranks) if call[0] == "on_checkpoint"]
    assert announced[-1] == "step_00000008.pt"
    assert not [call for call in calls_of(two_ranks, 1) if call[0] == "on_checkpoint"]


def test_callback_that_reads_changes_no_loss(two_ranks, tmp_path):
    without = train(tmp_path, "strategy=ddp", "evaluate_every=3", ranks=2)
    assert losses(two_ranks) == losses(without)


@pytest.mark.covers("callbacks")
def test_batch_that_a_callback_returns_is_trained_on(tmp_path):
    doubled = train(tmp_path / "doubled", "callbacks=[own_callbacks.Doubled]")
    pixels = train(tmp_path / "pixels", "data.std=[0.1]")
    plain = train(tmp_path / "plain")
    # pixels are (pixel - mean) / std, and the default of std is 0.2
    assert losses(doubled)[0] == pytest.approx(losses(pixels)[0], rel=1e-5) != losses(plain)[0]


def test_resumed_run_calls_from_its_position(tmp_path):
    calls = "callbacks=[own_callbacks.Calls]"
    train(tmp_path, calls, "max_steps=5", "strategy=single")
    train(tmp_path, calls, "strategy=single")
    starts = [call for call in calls_of(tmp_path / "run") if call[0] == "on_start"]
    assert [call[1] for call in starts] == [0, 5]
    steps = [call[1] for call in calls_of(tmp_path / "run") if call[0] == "on_step_end"]
    assert steps == list(range(1, 9))


REFUSED = {
    "callbacks=[torch.nn.Linear]": "callbacks: torch.nn.Linear is no hook: it must be a subclass",
    "callbacks=[own_callbacks.NoHook]": "callbacks: own_callbacks.NoHook is no hook: it must be a "
    "subclass of ddp_lab.Hook",
    "callbacks=[own_callbacks.Misspelt]": "callbacks: own_callbacks.Misspelt has none of the "
    "methods of a hook: on_start, before_step, on_step_end",
    "callbacks=[own_callbacks.Nothing]": "callbacks._target_=own_callbacks.Nothing: must be the "
    "name of a class",
    "callbacks=[own_callbacks.Failing]": "callbacks.method: is missing",
    "callbacks=[{_target_:own_callbacks.Calls,fil:a}]": "callbacks.fil=a: there is no such key; "
    "did you mean callbacks.file?",
    "callbacks=own_callbacks.Calls": "callbacks=own_callbacks.Calls: must be a list, each the "
    "import path",
}


def refusals(lines: list[str]) -> list[tuple[object, str]]:
    return [refusal_in_world(f"{' '.join(SMALL)} {line}") for line in lines]


def test_wrong_callbacks_are_refused_in_one_message():
    outcomes = run_world(1, refusals, list(REFUSED))[0]
    for (code, printed), expected in zip(outcomes, REFUSED.values(), strict=True):
        assert code == 2
        assert printed.startswith(f"error: {expected}")
        assert printed.count("\n") == 1, printed


def failure(command: str, folder: Path, callback: str, *overrides: str) -> str:
    """Train with a callback that fails; return the one message."""
    words = [*LINE, f"callbacks=[{callback}]", f"runs_dir={folder}", *overrides]
    code, output = launch(command, *SMALL, *words)
    assert code == 1, output
    (message,) = dict.fromkeys(re.findall(r"error: .*", output))
    recorded = json.loads((only_run(folder) / "failure.json").read_text())
    assert recorded["kind"] == "exception"
    return message


METHODS = ["on_start", "before_step", "on_step_end", "on_evaluation_batch", "on_evaluate"]
METHODS += ["on_evaluated", "on_checkpoint", "on_epoch_end", "close"]


@pytest.mark.parametrize("method", slow_but(["on_start", "on_evaluate", "close"], METHODS))
def test_exception_of_a_callback_is_one_message(method, tmp_path):
    callback = f"{{_target_: own_callbacks.Failing, method: {method}}}"
    message = failure("python train.py", tmp_path, callback, "evaluate_every=3")
    assert re.match(
        rf"error: callbacks: own_callbacks.Failing.{method} raised ValueError: planted "
        r"\(own_callbacks.py, line \d+\)",
        message,
    )


@pytest.mark.parametrize("ranks", slow_but(["1"], ["0,1", "1"]))
def test_exception_on_some_ranks_is_one_message(ranks, tmp_path):
    callback = f"{{_target_: own_callbacks.Failing, method: on_step_end, ranks: [{ranks}]}}"
    message = failure(TWO_RANKS, tmp_path, callback)
    assert "own_callbacks.Failing.on_step_end raised ValueError: planted" in message


def test_step_without_a_batch_and_prediction_in_training_are_refused(tmp_path):
    message = failure("python train.py", tmp_path / "forgets", "own_callbacks.Forgetful")
    assert "own_callbacks.Forgetful.before_step returned None; it must return the batch" in message
    message = failure("python train.py", tmp_path / "predicts", "own_callbacks.Predicting")
    assert "Predicting.on_step_end raised ConfigError: predict: is called in on_evaluate" in message


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (own_callbacks.Leaving(), "Leaving.before_step raised SystemExit: 7"),
        (
            own_callbacks.Numbering(),
            "Numbering.before_step returned an object of type int; it must return the",
        ),
    ],
)
def test_callback_that_exits_or_returns_no_batch_is_named(hook, message):
    (callback,) = make_callbacks([hook])
    with pytest.raises(TrainingError, match=f"^callbacks: own_callbacks.{message}"):
        callback.before_step(Batch(torch.zeros(2), torch.zeros(2), 2))


def test_documented_callback_writes_its_file(tmp_path):
    text = (ROOT / "docs/your-own.md").read_text().partition(SECTION)[2].partition("\n## ")[0]
    code, command = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    overrides = re.search(r"callbacks='(.*)'", command)[1]
    words = [*SMALL, *LINE, f"callbacks={overrides}", "runs_dir=runs"]
    code, output = launch(TWO_RANKS, *words, cwd=tmp_path)
    assert code == 0, output
    lines = (only_run(tmp_path / "runs") / "samples.txt").read_text().splitlines()
    rows = read_metrics(only_run(tmp_path / "runs"))
    expected = [f"{name} {row[f'{name}_loss']:.4f}" for row in rows for name in ("val", "test")]
    assert [line.partition(" [")[0] for line in lines] == expected
    assert all(len(json.loads("[" + line.partition("[")[2])) == 2 for line in lines)


def test_evaluate_needs_no_callback(tmp_path):
    folder = train(tmp_path, "callbacks=[own_callbacks.Calls]")
    before = (folder / "calls.0.jsonl").read_text()
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("own_callbacks.Calls", "own_callbacks.Gone"))
    code, output = launch(f"python -m ddp_lab evaluate {folder}")
    assert code == 0, output
    assert (folder / "calls.0.jsonl").read_text() == before
