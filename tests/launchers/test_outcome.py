"""`ddp-lab train --json FILE`: one object about each end of a launch."""

import json
import signal
from pathlib import Path

import pytest
from launches import SMALL, finish, launch, read_metrics, start, wait_for_heartbeat

from ddp_lab.resilience import outcome
from ddp_lab.world import process

ONE = "python -m ddp_lab train"
TWO = "python -m ddp_lab train --nproc 2 strategy=ddp"
VALIDATED = ["data.val_fraction=0.2", "epochs=2", "device=cpu", "tracker=none"]
KEYS = ["status", "exit_code", "error", "run_dir", "metrics_file", "checkpoints"]
KEYS += ["best_checkpoint", "epoch", "step", "metrics", "result"]


def outcome_of(file: Path, code: int) -> dict:
    record = json.loads(file.read_text())
    assert list(record) == KEYS
    assert record["exit_code"] == code
    return record


@pytest.mark.covers("train --json")
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(ONE, marks=pytest.mark.slow),
        TWO,
        pytest.param("python train.py", marks=pytest.mark.slow),
    ],
)
def test_finished_run_has_its_metrics_and_files(line, tmp_path):
    file = tmp_path / "outcome.json"
    where = [f"runs_dir={tmp_path}/runs", f"--json={file}"]
    code, output = launch(line, *where, *SMALL, *VALIDATED)
    assert code == 0, output
    record = outcome_of(file, 0)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert (record["status"], record["error"]) == ("finished", None)
    assert (record["epoch"], record["step"]) == (2, 8)
    assert record["run_dir"] == str(run_dir)
    assert record["metrics_file"] == str(run_dir / "metrics.jsonl")
    names = [f"{run_dir}/checkpoints/step_{step:08}.pt" for step in (4, 8)]
    assert record["checkpoints"] == names
    assert record["best_checkpoint"] == f"{run_dir}/checkpoints/best.pt"
    row = read_metrics(run_dir)[-1]
    expected = {key: row[key] for key in ("epoch", "step", "train_loss", "val_loss", "test_loss")}
    assert record["metrics"].items() >= expected.items()
    assert "lr" not in record["metrics"]
    assert record["result"]["checkpoint"] == record["best_checkpoint"]
    assert record["result"]["val_loss"] == min(each["val_loss"] for each in read_metrics(run_dir))


@pytest.mark.parametrize("line", [ONE, TWO])
def test_failed_run_has_its_error_and_its_checkpoints(line, tmp_path):
    file = tmp_path / "outcome.json"
    where = [f"runs_dir={tmp_path}/runs", "name=mine", "--json", file]
    faults = ["inject=nan@rank=0,step=6", "checkpoint.every_steps=2"]
    code, output = launch(line, *map(str, where), *SMALL, *VALIDATED, *faults)
    assert code == 1, output
    record = outcome_of(file, 1)
    assert record["status"] == "failed"
    assert "the loss of step 6 (epoch 2) is not finite, on rank 0 first" in record["error"]
    assert record["checkpoints"][-1] == f"{tmp_path}/runs/mine/checkpoints/step_00000004.pt"
    assert record["metrics"]["epoch"] == 1
    assert record["result"] is None


def test_launch_whose_rank_is_killed_has_the_signal(tmp_path):
    file = tmp_path / "outcome.json"
    where = [f"runs_dir={tmp_path}/runs", "name=mine", "--json", str(file)]
    code, output = launch(TWO, *where, *SMALL, *VALIDATED, "inject=crash@rank=1,step=3")
    assert code == 1, output
    record = outcome_of(file, 1)
    assert record["status"] == "failed"
    assert "rank 1 on " in record["error"]
    assert record["checkpoints"] == []


def test_run_of_which_one_rank_alone_was_asked_to_stop_is_preempted_with_code_0(tmp_path):
    file = tmp_path / "outcome.json"
    where = [f"runs_dir={tmp_path}/runs", "name=mine", "--json", str(file)]
    endless = ["epochs=100000", "inject=sigterm@rank=1,step=6"]
    code, output = launch(TWO, *where, *SMALL, *VALIDATED, *endless)
    assert code == 0, output
    record = outcome_of(file, 0)
    assert (record["status"], record["error"], record["result"]) == ("preempted", None, None)
    assert record["metrics"]["epoch"] >= 1
    assert record["step"] > 5
    assert record["checkpoints"][-1].endswith(f"step_{record['step']:08}.pt")


@pytest.mark.parametrize(
    "message", ["error: callbacks: mine.Name raised", "rank 1 on host: failed"]
)
def test_error_of_a_failed_run_has_no_prefix(message, tmp_path, monkeypatch):
    file = tmp_path / "outcome.json"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "failure.json").write_text(json.dumps({"message": message}))
    monkeypatch.setenv(process.OUTCOME, "")
    outcome.begin(file)
    process.note(run_dir=str(run_dir))
    outcome.write(1)
    assert outcome_of(file, 1)["error"] == message.removeprefix("error: ")


@pytest.mark.parametrize("line", [ONE, TWO])
@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["epochs=0"], "epochs=0: must be an integer of at least 1 or null"),
        (["optimizer.lr=0.1", "data.val_fraction=0", "patience=1"], "patience=1: needs a validati"),
    ],
)
def test_refused_run_has_the_message_and_no_directory(line, overrides, error, tmp_path):
    file = tmp_path / "outcome.json"
    where = [f"runs_dir={tmp_path}/runs", "--json", str(file)]
    code, output = launch(line, *where, *SMALL, *VALIDATED, *overrides)
    assert code == 2, output
    record = outcome_of(file, 2)
    assert record["status"] == "refused"
    assert record["error"].startswith(error)
    assert [record[key] for key in KEYS[3:]] == [None] * 8


@pytest.mark.parametrize(
    ("line", "number", "code", "status"),
    [
        (TWO, signal.SIGINT, 130, "interrupted"),
        (ONE, signal.SIGTERM, 75, "preempted"),
        pytest.param(ONE, signal.SIGINT, 130, "interrupted", marks=pytest.mark.slow),
        pytest.param(TWO, signal.SIGTERM, 75, "preempted", marks=pytest.mark.slow),
        pytest.param(ONE, signal.SIGUSR1, 75, "preempted", marks=pytest.mark.slow),
        pytest.param(TWO, signal.SIGUSR1, 75, "preempted", marks=pytest.mark.slow),
    ],
)
def test_run_that_is_stopped_by_a_signal_has_its_checkpoint(line, number, code, status, tmp_path):
    file = tmp_path / "outcome.json"
    where = [f"runs_dir={tmp_path}", "name=mine", "--json", str(file)]
    process = start(line, *where, *SMALL, *VALIDATED, "epochs=100000")
    wait_for_heartbeat(tmp_path / "mine", 0, lambda record: record["step"] > 6)
    assert json.loads(file.read_text())["status"] == "running"
    process.send_signal(number)
    assert finish(process)[0] == code
    record = outcome_of(file, code)
    assert (record["status"], record["error"]) == (status, None)
    assert record["checkpoints"][-1].endswith(f"step_{record['step']:08}.pt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{ONE} --json=", "--json .: cannot be written: it is a directory"),
        (f"{ONE} --json no/such/x.json", "--json no/such/x.json: cannot be written: "),
        (f"{ONE} -m seed=1,2 --json x.json", "--json x.json: is for one run; the jobs of a sweep"),
        (
            "torchrun --standalone --nproc_per_node=1 train.py --json x.json",
            "--json x.json: is not supported under torchrun",
        ),
    ],
)
def test_file_that_cannot_be_written_is_refused(line, message, tmp_path):
    code, output = launch(line, f"runs_dir={tmp_path}")
    assert code == (1 if "torchrun" in line else 2), output
    assert message in output
