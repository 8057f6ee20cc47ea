"""How `ddp-lab train` and `train.py` end by each signal of docs/running.md, early or late."""

import itertools
import json
import signal
import subprocess

import pytest
from launches import OWN, SMALL, newest, start, wait_for_heartbeat
from slow_rows import slow_but

CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGUSR1: 75}
OUTCOMES = {130: "interrupted", 75: "preempted"}
COMMANDS = {
    "train.py": ("python train.py", "strategy=single"),
    "one process": ("python -m ddp_lab train", "strategy=single"),
    "two ranks": ("python -m ddp_lab train --nproc 2", "strategy=ddp"),
}
FAST = [  # each command and each signal
    ("train.py", signal.SIGTERM),
    ("one process", signal.SIGUSR1),
    ("two ranks", signal.SIGINT),
    ("two ranks", signal.SIGUSR1),
]
every_command_and_signal = pytest.mark.parametrize(
    ("command", "number"),
    slow_but(FAST, itertools.product(COMMANDS, CODES)),
    ids=lambda value: getattr(value, "name", value),
)


def end_of(process: subprocess.Popen) -> tuple[int, str, str]:
    """Return the exit code of a launch, and what it has printed on stdout and stderr."""
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@every_command_and_signal
def test_signal_during_training_saves_a_checkpoint_and_is_the_exit_code(command, number, tmp_path):
    line, strategy = COMMANDS[command]
    where = [f"runs_dir={tmp_path}", "name=mine"]
    process = start(line, *SMALL, strategy, "epochs=100000", *where, stderr=subprocess.PIPE)
    run_dir = tmp_path / "mine"
    # step 7 has begun, so 6 are done
    wait_for_heartbeat(run_dir, 0, lambda record: record["step"] > 6)
    process.send_signal(number)
    code, output, errors = end_of(process)
    assert (code, errors) == (CODES[number], ""), output
    outcome = OUTCOMES[code]
    assert output.splitlines()[-1].startswith(f"{outcome} at epoch ")
    status = json.loads((run_dir / "status.json").read_text())
    assert status["status"] == outcome
    assert newest(run_dir)["progress"]["step"] == status["step"] > 5


@every_command_and_signal
def test_signal_before_training_is_the_exit_code_and_leaves_no_run(command, number, tmp_path):
    line, strategy = COMMANDS[command]
    model = ["model._target_=own_signals.signalling_cnn", f"+model.number={int(number)}"]
    where = f"runs_dir={tmp_path}/runs"
    process = start(line, *OWN, *model, strategy, where, stderr=subprocess.PIPE)
    code, output, errors = end_of(process)
    assert code == CODES[number], output + errors
    is_ended_by_launcher = command == "two ranks" and code == 75
    assert errors == ("" if is_ended_by_launcher else "interrupted\n")
    assert not (tmp_path / "runs").exists()
