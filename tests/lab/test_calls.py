"""Ranks of a Lab that do not make the same calls.

One message names the rank that has left, within seconds.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from launches import ROOT, SUPPORT, call_in_process
from torch import nn
from torch.utils.data import TensorDataset
from warm import programs
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.lab.calls import name_ranks, require_same_calls
from ddp_lab.lab.launch import RankError, launch

LIMIT = 25.0  # seconds of a launch on a busy machine; the timeout of a process group is 600 s
SIZE = 64
BATCH = 8
LEAVES = (
    "after step 3 (epoch 1), but rank 0 has begun step 4 (epoch 1). Every rank must take the same "
    "steps"
)
LENGTH = (
    "is 64 on rank 0, but 48 on rank 1, which called {} before its first step. Pass the same on "
    "all ranks"
)
CASES = {
    "break": f"rank 1 called evaluate {LEAVES}",
    "leave": f"rank 1 left the `with` block of its Lab {LEAVES}",
    "sys.exit": f"rank 1 called sys.exit(0) (test_calls.py, line N) {LEAVES}",
    "os._exit": "rank 1 ended with exit code 0 in the function, for example by os._exit(0)",
    "validation": f"the length of the validation dataset {LENGTH.format('fit')}",
    "epochs": "epochs is 2 on rank 0, but 1 on rank 1, which called fit before its first step",
    "save": "rank 1 called save after step 8 (epoch 1), but rank 0 called evaluate after step 8 "
    "(epoch 1). ",
    "all exit": "launch: the function called sys.exit() (test_calls.py, line N). Let the function "
    "return on all ranks",
}


def numbers(size: int = SIZE) -> TensorDataset:
    return TensorDataset(torch.zeros(size, 4), torch.zeros(size, 1))


def train(case: str, strategy: str = "ddp") -> str:
    if case == "all exit":
        sys.exit()
    with Lab(strategy, device="cpu", timeout=120) as lab:
        is_other = lab.rank == 1
        make = partial(torch.optim.SGD, lr=0.1)
        trainer = lab.trainer(nn.Linear(4, 1), tasks.Regression(), make, BATCH)
        data = numbers()
        other = numbers(SIZE - 16 * is_other)
        if case in ("validation", "epochs"):
            trainer.fit(
                data,
                other if case == "validation" else data,
                epochs=2 - (is_other and case == "epochs"),
            )
        for epoch in range(2):
            for inputs, targets in trainer.batches(data, epoch):
                trainer.step(inputs, targets)
                if is_other and trainer.progress.step == 3:
                    if case == "break":
                        break
                    if case == "leave":
                        return case
                    if case == "sys.exit":
                        sys.exit(0)
                    if case == "os._exit":
                        os._exit(0)
            if is_other and case == "save":
                trainer.save("never.safetensors")
            trainer.evaluate(data)
    return "done"


def print_outcomes() -> None:
    """Launch every case on two ranks, and print its error, stderr and seconds, as JSON."""
    outcomes: dict[str, list] = {}
    for case in CASES:
        with tempfile.TemporaryFile("w+") as errors:
            os.dup2(errors.fileno(), sys.stderr.fileno())
            began = time.monotonic()
            try:
                launch(train, case)
            except RankError as error:
                seconds = time.monotonic() - began
                errors.seek(0)
                outcomes[case] = [str(error), errors.read(), seconds]
    print(json.dumps(outcomes))


@functools.cache
def outcomes() -> dict[str, list]:
    """Return what `print_outcomes` prints in a process of its own."""
    done = call_in_process(print_outcomes, timeout=LIMIT * len(CASES))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_rank_that_leaves_the_others_is_named_in_one_message(case):
    error, printed, seconds = outcomes()[case]
    *_, line = error.splitlines()
    message = re.escape(CASES[case]).replace("line\\ N", r"line \d+")
    assert re.search(rf"^(ConfigError: )?{message}", line), error
    assert "Traceback" not in error
    assert printed == ""
    assert seconds < LIMIT


def test_script_of_torchrun_ends_with_the_message(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text("import test_calls\ntest_calls.train('break')\n")
    search = [str(ROOT), str(SUPPORT), str(Path(__file__).parent)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(search),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    torchrun = [
        str(programs() / "torchrun"),
        "--standalone",
        "--nproc_per_node=2",
        str(script),
    ]
    done = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert done.stderr.count(CASES["break"]) == 1, done.stderr
    assert "Connection" not in done.stderr


def make_a_call(lab: Lab, case: str) -> None:
    """Call a method with an argument that differs between the ranks."""
    other = numbers(SIZE - 16 * lab.rank)
    batch_size = BATCH * (1 + lab.rank) if case == "batch_size" else BATCH
    make = partial(torch.optim.SGD, lr=0.1)
    trainer = lab.trainer(nn.Linear(4, 1), tasks.Regression(), make, batch_size)
    if case == "loop":
        next(trainer.batches(other, 0))
    elif case == "train":
        trainer.fit(other, numbers(), epochs=1)
    else:
        trainer.evaluate(other)


def refuse_other_arguments() -> list[str]:
    messages: list[str] = []
    for case in ("batch_size", "loop", "train", "evaluate"):
        with Lab("scratch", device="cpu", timeout=20) as lab:
            with pytest.raises(ConfigError) as error:
                make_a_call(lab, case)
            messages.append(str(error.value))
    return messages


def test_other_arguments_on_another_rank_are_refused():
    expected = [
        "batch_size is 8 on rank 0, but 16 on rank 1, which called lab.trainer before its first "
        "step. ",
        f"the length of the dataset {LENGTH.format('batches')}",
        f"the length of the training dataset {LENGTH.format('fit')}",
        f"the length of the dataset {LENGTH.format('evaluate')}",
    ]
    for messages in run_world(2, refuse_other_arguments, timeout=100):
        assert len(messages) == len(expected)
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start), message


def different_numbers_of_predictions() -> str:
    """Predict on one rank only, which needs nobody else if no rank has a part of the model."""
    with Lab("ddp", device="cpu", timeout=20) as lab:
        trainer = lab.trainer(
            nn.Linear(4, 1), tasks.Regression(), partial(torch.optim.SGD, lr=0.1), BATCH
        )
        if lab.rank == 1:
            trainer.predict(torch.zeros(3, 4))
        for inputs, targets in trainer.batches(numbers(), 0):
            trainer.step(inputs, targets)
        if lab.rank == 0:
            time.sleep(2)  # longer than the thread that looks for other ranks: nothing is wrong
        return "done"


def test_ranks_may_do_different_things_between_calls():
    assert run_world(2, different_numbers_of_predictions, timeout=60) == ["done", "done"]


def test_calls_of_all_ranks_are_compared():
    first = [1, 3, "called evaluate after step 3 (epoch 1)", {"the length of the dataset": 7}, True]
    require_same_calls([first, first])
    other_steps = [1, 4, *first[2:]]
    other_call = [1, 3, "called save after step 3 (epoch 1)", {}, True]
    other_length = [*first[:3], {"the length of the dataset": 6}, True]
    for other in (other_steps, other_call, other_length):
        with pytest.raises(ConfigError, match="rank 2"):
            require_same_calls([first, first, other])
    assert name_ranks([1]) == "rank 1"
    assert name_ranks([*range(9)]) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."
